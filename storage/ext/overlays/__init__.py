"""Overlays: extra columns that can be rewritten row by row, while committed rows never change.

Each overlay has its own file. `header` defines the first page, which identifies the storage and the
column. `entries` defines how an entry names its row. `overlay_file` opens, enlarges and locks the
file. `overlay_set` manages all overlays of one storage, `overlay` is the public object for one of
them, and `overlaid` reads rows together with overlays.
"""
