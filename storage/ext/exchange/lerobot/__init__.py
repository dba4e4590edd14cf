"""The ``lerobot`` format, which `lerobot_format.py` implements: LeRobot folders."""
