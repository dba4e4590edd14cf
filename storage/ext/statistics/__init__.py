"""Statistics of columns, computed in one pass and stored next to the rows."""
