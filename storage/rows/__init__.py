"""Columns and rows: schemas, keys, and conversion of callers' batches."""
