"""Transitions as they come from workers that never wait for one another (``mode="async"``)."""
