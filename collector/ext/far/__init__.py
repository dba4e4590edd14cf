"""Workers that share no memory with their parent. Their answers carry the rows."""
