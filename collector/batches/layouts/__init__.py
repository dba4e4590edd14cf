"""Layouts: how stored rows are laid out as the batch that is yielded."""
