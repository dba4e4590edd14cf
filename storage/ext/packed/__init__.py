"""Packed storages: compressed rows in trajectory order, without duplicate states and frames."""
