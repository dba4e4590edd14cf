"""Leases: transitions from workers that never wait for one another (``mode="async"``)."""
