"""Statistics of columns, counted in one pass and kept beside the rows."""
