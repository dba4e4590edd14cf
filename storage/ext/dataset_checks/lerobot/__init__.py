"""Checks of datasets of LeRobot, versions 2 and 3."""
