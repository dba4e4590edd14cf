"""Write a report's file atomically, and only over another report."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from typing import Final

from tallyroll.collector.errors import ArgumentError

MARK: Final = '<meta name="generator" content="tallyroll report">'
CSV_BEGINNING: Final = "run,group,environment,seed,"
_HEAD_NBYTES = 512


def require_report(path: str, *, force: bool = False) -> None:
    """Refuse a path at which there is something other than a report.

    Raises:
        ArgumentError: the path is not a regular file, or the file is not a report and ``force`` is
            False.
        OSError: the path cannot be examined.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(path))
        if not os.access(folder, os.W_OK | os.X_OK):
            why = "is not writable" if os.path.isdir(folder) else "is not a folder"
            raise ArgumentError(f"the report cannot be written to {path}: {folder} {why}") from None
        return
    if not stat.S_ISREG(mode):
        raise ArgumentError(
            f"expected a regular file for the report, but {path} is not one. Give another path."
        )
    if force:
        return
    with open(path, "rb") as file:
        head = file.read(_HEAD_NBYTES)
    if head and MARK.encode() not in head and not head.startswith(CSV_BEGINNING.encode()):
        raise ArgumentError(
            f"{path} exists and is not a report. Give another path, or --force (force=True) to "
            "replace the file."
        )


def write_report(path: str, text: str, *, force: bool = False) -> None:
    """Write a report's file atomically; see `require_report` for errors."""
    require_report(path, force=force)
    place = os.path.realpath(path)
    file, aside = tempfile.mkstemp(prefix=".report-", suffix=".tmp", dir=os.path.dirname(place))
    try:
        # Escape surrogates of file names, which UTF-8 cannot encode.
        with open(file, "w", encoding="utf-8", errors="backslashreplace", newline="") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.umask(mask := os.umask(0o077))
        os.chmod(aside, 0o666 & ~mask)
        os.replace(aside, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
