"""A store of rows: what it reads with, what it writes with, and both as one object."""
