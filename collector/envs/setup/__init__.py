"""Preparation of environments for a collector: making, validating and describing them."""
