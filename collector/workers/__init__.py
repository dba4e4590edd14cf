"""Worker processes of the multiprocess collector."""
