"""Bring workers to their first step, and others in the place of those that failed."""
