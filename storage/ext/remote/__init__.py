"""Packed rows in object stores: addresses, range reads, push and pull."""
