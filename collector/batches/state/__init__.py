"""The state of a run: counts, phase, seeds, provenance, and saved states."""
