"""Which files this process has open."""

import os


def descriptors() -> set[str]:
    """Files that this process has open, with what they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # that of the listing
            continue
    return found
