"""Environment systems, one module each, found by entry points in the group ``tallyroll.envs``."""
