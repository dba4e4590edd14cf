"""Checks of datasets that other libraries wrote, a file a format, and repair of damaged ones."""
