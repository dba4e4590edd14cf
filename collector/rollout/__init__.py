"""Stepping environments until a slab holds enough transitions."""
