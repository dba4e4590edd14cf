"""Columns and rows: schema, keys, and batches as callers hand them over."""
