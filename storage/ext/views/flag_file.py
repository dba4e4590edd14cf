"""Files of flags: short notes on trajectories, which `tallyroll view --flags` writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

_MOST_NBYTES: Final = 2**28


def read_flags(path: str | os.PathLike[str]) -> dict[str, dict[int, str]]:
    """Return the flags in a file by storage and trajectory.

    Each line is a JSON object with ``storage`` (an id), ``trajectory`` (an id) and ``flag`` (a
    text). The last line of a trajectory counts, and an empty flag removes it. A storage of which
    all flags were removed has an empty dictionary.

    Raises:
        ValueError: the file has other contents, or is not a regular file of at most 256 MiB.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() and path.stat().st_size <= _MOST_NBYTES):
        raise ValueError(f"{path}: expected a regular file of at most 256 MiB.")
    found: dict[str, dict[int, str]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            said = json.loads(line)
            storage, trajectory, flag = said["storage"], int(said["trajectory"]), said["flag"]
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            storage = flag = None
        if not (isinstance(storage, str) and isinstance(flag, str)):
            raise ValueError(
                f"{path}: line {number} is not a flag. Give a file that `tallyroll view --flags` "
                "wrote."
            )
        flags = found.setdefault(storage, {})
        if flag:
            flags[trajectory] = flag
        else:
            flags.pop(trajectory, None)
    return found


def flags_of_storage(path: str | os.PathLike[str], storage: str) -> dict[int, str]:
    """Return the flags of one storage by trajectory.

    Args:
        path: the file.
        storage: the id of the storage.

    Raises:
        ValueError: the file has no line of this storage, or as for `read_flags`.
        OSError: the file cannot be read.
    """
    found = read_flags(path)
    if storage not in found:
        raise ValueError(
            f"{path}: expected flags of the storage {storage}, got flags of "
            f"{', '.join(sorted(found)[:3]) or 'no storage'}. Give the file that was written while "
            "this storage was viewed."
        )
    return found[storage]
