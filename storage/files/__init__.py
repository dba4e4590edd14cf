"""The files that every format has: header, manifest, lock, and the way to them."""
