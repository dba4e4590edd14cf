"""Workers that share no memory with their parent; answers carry the rows."""
