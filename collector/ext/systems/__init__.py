"""Environment systems: one file each, found by its entry point in the group ``tallyroll.envs``."""
