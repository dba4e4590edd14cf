"""Parts of Minari's format: its spaces, its episodes in Arrow, and its images in JPEG."""
