"""Checks of LeRobot datasets of versions 2 and 3."""
