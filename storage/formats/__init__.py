"""File formats: where the rows are in files, and the metadata for other libraries."""
