"""Parts of the Minari format: spaces, Arrow episodes, and JPEG images."""
