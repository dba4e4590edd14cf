"""What is counted, and how it is numbered. Pure: no environment, no file."""
