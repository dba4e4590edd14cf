"""The folder of a temporary storage."""

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
    """New folder that is removed together with its storage.

    Memory maps of removed files stay valid. A forked child does not remove the folder.

    Args:
        mode: the mode of the storage, which must be ``"create"``.
    """

    def __init__(self, mode: str) -> None:
        if mode != "create":
            raise ValueError(f"mode={mode!r} opens an existing storage. Give its path.")
        self._folder = tempfile.mkdtemp(prefix="tallyroll-")
        self.rows = Path(self._folder) / "rows"
        """The path of the storage."""

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def remove_with(self, storage: Any, close: Callable[[], None]) -> Callable[[], Any]:
        """Remove the folder when ``storage`` is dropped or the process exits.

        The storage is closed first, with ``close``. The returned callback does both immediately.
        """
        return weakref.finalize(storage, _leave, self._folder, close, os.getpid())


def _leave(folder: str, close: Callable[[], None], owner: int) -> None:
    if os.getpid() != owner:
        return
    with contextlib.suppress(Exception):  # remove the folder even if closing fails
        close()
    shutil.rmtree(folder, ignore_errors=True)
