"""``lerobot``: a folder of LeRobot, and back; `lerobot_format.py` is the format."""
