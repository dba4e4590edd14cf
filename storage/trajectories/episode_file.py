"""The file of the episode table: an ``.npy`` file for `numpy.load`, with a checksum at its end."""

from __future__ import annotations

import ast
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage.errors import DamagedTable
from tallyroll.storage.files.paths import failed
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.trajectories.episodes import what_is_wrong

_MARK = b"tallyCRC"
_TAIL_NBYTES = len(_MARK) + 4
_HEAD_NBYTES = 2**16 + 10
_HEADER_LIMIT = 10_000  # NumPy's own limit


def write_table(inside: Inside, path: Path, table: np.ndarray, *, synced: bool = False) -> None:
    """Write the lines atomically: write a temporary file and rename it to ``path``.

    With ``synced``, ``path`` is complete even after a power cut.

    Raises:
        StorageFull: the disk has no space; the previous file stays.
        NotWritable: the file system does not allow the write.
    """
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, table, version=(1, 0), allow_pickle=False)
    content = buffer.getvalue()
    content += _MARK + zlib.crc32(content).to_bytes(4, "little")
    try:
        inside.write_atomically(path, content, synced=synced)
    except OSError as error:
        raise failed(path, error, len(content)) from error


def read_table(inside: Inside, path: Path, dtype: np.dtype[Any], head: int) -> np.ndarray | None:
    """Return the lines in a file, or None if the file does not exist.

    The newest rows may be missing from the lines.

    Args:
        inside: the storage's files.
        path: the file.
        dtype: the dtype of a line.
        head: the number of rows ever committed.

    Raises:
        DamagedTable: the file is damaged, comes from another program, or refers to rows beyond
            ``head``.
    """
    try:
        # Check the end before reading the whole file, which may be large if it is not ours.
        if not inside.read_end(path, _TAIL_NBYTES).startswith(_MARK):
            raise _damaged(path, "its checksum is missing")
        # A table has at most one line per row, and a version 1.0 header is shorter than 2**16 + 10.
        content = inside.read(path, head * dtype.itemsize + _HEAD_NBYTES + _TAIL_NBYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error
    body, tail = content[:-_TAIL_NBYTES], content[-_TAIL_NBYTES:]
    if tail != _MARK + zlib.crc32(body).to_bytes(4, "little"):
        raise _damaged(path, "its checksum does not match")
    try:
        table = _parse(body, dtype)
    except (ValueError, EOFError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise _damaged(
            path, f"it is not an .npy file with the table for these columns ({error})"
        ) from error
    if wrong := what_is_wrong(table, head):
        raise _damaged(path, wrong)
    return table


def _parse(content: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the lines in a file of version 1.0, after checking their dtype."""
    # NumPy's parser would accept any dtype that the file names and raise more kinds of errors.
    file = io.BytesIO(content)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("it has another version of the .npy format")
    length = int.from_bytes(file.read(2), "little")
    if length > _HEADER_LIMIT:
        raise ValueError(f"its header has {length} bytes")
    header = ast.literal_eval(file.read(length).decode("latin1").strip())
    if not isinstance(header, dict) or header.get("descr") != np.lib.format.dtype_to_descr(dtype):
        raise ValueError("its fields differ from the fields of the table for these columns")
    lines = np.frombuffer(content, dtype, offset=file.tell())
    if header.get("fortran_order") is not False or header.get("shape") != (len(lines),):
        raise ValueError("its shape does not match its lines")
    return lines


def _damaged(path: Path, why: str) -> DamagedTable:
    return DamagedTable(
        f"{path} cannot be used: {why}. Delete the file. The table is rebuilt from the rows."
    )
