"""Built-in formats, one file each, and the code that several of them share."""
