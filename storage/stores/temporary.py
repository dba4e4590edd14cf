"""The folder of a storage that nobody wants to keep."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any


class TemporaryFolder:
    """A new folder, which goes with what it was made for.

    Maps of files that are removed stay whole for whoever has them. A forked child leaves the
    folder to its parent.

    Args:
        mode: of the storage, which can only be a new one.
    """

    def __init__(self, mode: str) -> None:
        if mode != "create":
            raise ValueError(f"mode={mode!r} opens a storage that is there. Give its path.")
        self._folder = tempfile.mkdtemp(prefix="tallyroll-")
        self.rows = Path(self._folder) / "rows"
        """Where the storage goes."""

    def remove(self) -> None:
        """Remove it at once."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def leave_with(self, storage: Any, close: Callable[[], None]) -> Callable[[], Any]:
        """Remove it when the storage goes, or this process; returns what does it now."""
        return weakref.finalize(storage, _leave, self._folder, close, os.getpid())


def _leave(folder: str, close: Callable[[], None], owner: int) -> None:
    if os.getpid() != owner:
        return
    with contextlib.suppress(Exception):  # it goes, whatever state it is in
        close()
    shutil.rmtree(folder, ignore_errors=True)
