"""`repair`: what is readable of a damaged or unfinished dataset becomes a new storage."""
