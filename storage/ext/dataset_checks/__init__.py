"""Checks of datasets that other libraries wrote, one module or folder per format."""
