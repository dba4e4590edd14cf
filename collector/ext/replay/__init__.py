"""Stored trajectories, started again from their seeds, stepped and compared bit for bit.

``planning`` says what starts where and ``comparing`` what differs, both pure; ``recovering`` makes
environments of what a manifest says, ``stage`` steps them, ``filming`` makes films and pictures.
"""
