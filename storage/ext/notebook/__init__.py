"""Notebook output for storages and trajectories: tables, figures and videos."""
