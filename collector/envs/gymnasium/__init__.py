"""Gymnasium's vector environments."""
