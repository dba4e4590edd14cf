"""Flags that a user sets on episodes, in a file of JSON lines outside the storages."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tallyroll.collector.errors import ArgumentError
from tallyroll.storage.ext.views.flag_file import read_flags

MOST_CHARACTERS: Final = 1000


class Flags:
    """Flags of episodes by storage and trajectory, each a short text.

    Every change appends a line ``{"storage": id, "path": ..., "trajectory": ..., "flag": ...,
    "at": ...}`` to the file. The last line of a trajectory counts, and an empty flag removes it.

    Args:
        path: the file, which is created with the first flag.
        storages: paths of the storages; the file must not be inside one of them.

    Raises:
        ArgumentError: the path is unsuitable, or the file has other contents.
    """

    def __init__(self, path: str, storages: list[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._flags: dict[str, dict[int, str]] = {}
        place = self.path.resolve()
        for each in map(Path, storages):
            if each.exists() and place.is_relative_to(each.resolve()):
                raise ArgumentError(
                    f"--flags {path}: expected a file outside the storage {each}. Give "
                    "another path."
                )
        if not place.parent.is_dir():
            raise ArgumentError(f"--flags {path}: {place.parent} is not a folder. Create it first.")
        if self.path.exists():
            try:
                self._flags = read_flags(path)
            except ValueError as error:
                raise ArgumentError(f"--flags {error}") from None

    def of(self, storage: str) -> dict[int, str]:
        """Return the flags of a storage by trajectory."""
        with self._lock:
            return dict(self._flags.get(storage, {}))

    def set(self, storage: str, path: str, trajectory: int, flag: str) -> None:
        """Set a flag, or remove it if ``flag`` is empty. When the call returns, it is on disk.

        Raises:
            ValueError: the text is too long.
            OSError: the file cannot be written.
        """
        if len(flag) > MOST_CHARACTERS:
            raise ValueError(
                f"flag: expected at most {MOST_CHARACTERS} characters, got {len(flag)}."
            )
        line: dict[str, Any] = {"storage": storage, "path": path, "trajectory": trajectory}
        line |= {"flag": flag, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        with self._lock:
            with open(self.path, "ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            flags = self._flags.setdefault(storage, {})
            if flag:
                flags[trajectory] = flag
            else:
                flags.pop(trajectory, None)
