"""Datasets: rows that are packed, joined, chosen and copied, each by way of a `RowReader`."""
