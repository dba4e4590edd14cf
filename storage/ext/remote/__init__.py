"""Packed rows in object stores: their addresses, reading by ranges, pushing and pulling."""
