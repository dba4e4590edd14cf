"""Write the file of a report atomically, and overwrite only files that are reports."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from typing import Final

from tallyroll.collector.errors import ArgumentError

MARK: Final = '<meta name="generator" content="tallyroll report">'
CSV_BEGINNING: Final = "run,group,environment,seed,"
CURVES_BEGINNING: Final = "group,runs,transitions,interquartile_mean,low,high"
LATEX_BEGINNING: Final = "% Made by tallyroll report."
FIGURE_MARK: Final = "tallyroll report"
"""Name of the program in the metadata of a figure."""

_BEGINNINGS = tuple(map(str.encode, (CSV_BEGINNING, CURVES_BEGINNING, LATEX_BEGINNING)))
_FIGURES = (b"\x89PNG\r\n", b"%PDF-")
_HEAD_NBYTES = 512
_TAIL_NBYTES = 2**16
"""Bytes at the end of a PDF that have its metadata."""


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
    if not _is_report(path):
        raise ArgumentError(
            f"{path} exists and is not a report. Give another path, or --force (force=True) to "
            "replace the file."
        )


def _is_report(path: str) -> bool:
    """Return True if a file is empty, or is a report or a part of one."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_NBYTES)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_NBYTES))
        tail = file.read(_TAIL_NBYTES)
    if not head or MARK.encode() in head or head.startswith(_BEGINNINGS):
        return True
    return head.startswith(_FIGURES) and FIGURE_MARK.encode() in head + tail


def write_report(path: str, content: str | bytes, *, force: bool = False) -> None:
    """Write a report's file atomically; see `require_report` for errors."""
    require_report(path, force=force)
    if isinstance(content, str):
        # Escape surrogates of file names, which UTF-8 cannot encode.
        content = content.encode("utf-8", "backslashreplace")
    replace_file(os.path.realpath(path), content)


def replace_file(place: str, content: bytes) -> None:
    """Write a file atomically, with the permissions of a new file."""
    file, temporary = tempfile.mkstemp(
        prefix=".tallyroll-", suffix=".tmp", dir=os.path.dirname(place)
    )
    try:
        with open(file, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.umask(mask := os.umask(0o077))
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
