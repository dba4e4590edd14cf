"""Columns beside the rows that may be written again, row by row, while committed rows never change.

An overlay is a file of its own: `header` says whose it is, `entries` how it names the row of each
value, `overlay_file` opens, enlarges and locks it. `beside` has all of one storage, `overlay` is
what users have of one, and `overlaid` reads rows together with them.
"""
