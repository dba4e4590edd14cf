"""Built-in exchange formats, one module or folder for each, and the code that they share."""
