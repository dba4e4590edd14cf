"""Files common to all formats (header, manifest, lock), and safe access to them."""
