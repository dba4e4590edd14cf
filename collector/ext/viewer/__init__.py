"""A local web page that shows storages: their runs, episodes, frames, histograms and findings.

``dataset`` answers questions about one storage with JSON values. ``server`` sends the answers to
the page, and ``export`` writes them into a file.
"""
