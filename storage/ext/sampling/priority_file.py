"""File that stores priorities next to the rows, so that a restart continues with them.

Losing the file loses no rows. It begins with a line that contains a magic string and the version,
followed by a line of JSON: the ``id`` of the storage, the range of rows ``first`` to ``stop``, the
number of ``rewinds`` at the time of writing, ``slice_len``, ``alpha``, ``beta`` and ``eps``, and
the leaf of new rows (``entering``). A float32 for each row follows, then a CRC-32 of everything
before it.

Rows never change or move while a storage exists, except by rewinds, which are counted. Priorities
of rows that still exist are therefore valid.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import StateMismatch
from tallyroll.storage.files.paths import failed
from tallyroll.storage.files.rewind_history import least_rows_after_rewinds
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.readers.row_reader import RowReader

_NAME: Final = b"tallyroll priorities "
_VERSION: Final = 1
_MAGIC: Final = _NAME + b"%d\n" % _VERSION
_LEAVES: Final = np.finfo(np.float32)
_HEAD_NBYTES: Final = 2**12
_SUM_NBYTES: Final = 4


@dataclass(frozen=True, slots=True)
class SavedPriorities:
    """Saved parameters of priorities, without the leaves."""

    id: str | None
    first: int
    stop: int
    rewinds: int
    slice_len: int | None
    alpha: float
    beta: float
    eps: float
    entering: float

    def require_of(self, reader: RowReader, slice_len: int | None, what: str) -> int:
        """Return the end of the row numbers that denote the same rows as when the state was saved.

        Args:
            reader: the reader of the current rows.
            slice_len: the ``slice_len`` of the sampler.
            what: the name of the saved state, for messages.

        Raises:
            StateMismatch: the state belongs to another storage, to later rows, or to another
                ``slice_len``.
        """
        if self.id != reader.id:
            raise StateMismatch(f"{what} belongs to another storage than {reader.path}.")
        if self.slice_len != slice_len:
            raise StateMismatch(
                f"{what} has slice_len={self.slice_len}, but this sampler has "
                f"slice_len={slice_len}."
            )
        rewinds, head = reader.rewinds, reader.head
        left = least_rows_after_rewinds(reader.manifest, self.rewinds, rewinds)
        if self.rewinds > rewinds or (left is None and self.stop > head):
            raise StateMismatch(
                f"{what} has priorities of {self.stop} rows, but {reader.path} has {head} rows: "
                "the storage is older. Restore a newer copy of the storage."
            )
        return min(self.stop, head if left is None else left)

    @classmethod
    def of(cls, says: Any) -> SavedPriorities:
        """Parse a mapping; raise ValueError if it is invalid."""
        try:
            kept = cls(**{name: says[name] for name in cls.__slots__})
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"the description of the saved rows is incomplete ({error})"
            ) from error
        counts = (kept.first, kept.stop, kept.rewinds)
        numbers = (kept.alpha, kept.beta, kept.eps, kept.entering)
        wrong = (
            any(type(each) is not int or not 0 <= each < 2**62 for each in counts)
            or any(type(each) is not float or not 0 <= each < np.inf for each in numbers)
            or kept.first > kept.stop
            or not (kept.slice_len is None or type(kept.slice_len) is int)
            or not float(_LEAVES.tiny) <= kept.entering <= float(_LEAVES.max)
        )
        if wrong:
            raise ValueError("the description of the saved rows is invalid")
        return kept


def check_leaves(leaves: np.ndarray, kept: SavedPriorities) -> None:
    """Raise ValueError unless float32 leaves are valid, one for each row of ``kept``."""
    if leaves.shape != (kept.stop - kept.first,):
        raise ValueError("the number of priorities differs from the number of rows")
    if len(leaves) and not (leaves.min() >= 0 and leaves.max() < np.inf):
        raise ValueError("a saved priority is negative, infinite or NaN")


def write_priorities(inside: Inside, path: Path, kept: SavedPriorities, leaves: np.ndarray) -> None:
    """Replace the file atomically, and wait until the new file is on the disk.

    Raises:
        StorageFull: there is no space. An older file is kept.
        NotWritable: the file system does not permit writing to the directory.
    """
    head = _MAGIC + json.dumps(asdict(kept)).encode() + b"\n"
    rows = leaves.astype("<f4", copy=False).data.cast("B")
    told = zlib.crc32(rows, zlib.crc32(head)).to_bytes(_SUM_NBYTES, "little")
    content = b"".join((head, rows, told))
    try:
        inside.write_atomically(path, content, durable=True)
    except OSError as error:
        raise failed(path, error, len(content)) from error


def read_priorities(
    inside: Inside, path: Path, most: int
) -> tuple[SavedPriorities, np.ndarray] | None:
    """Read a file and return its parameters and leaves, float32 [rows]; None if it is missing.

    Args:
        inside: the directory of the file.
        path: the file.
        most: the maximum number of rows.

    Raises:
        ValueError: the file cannot be used. The message is a clause that states the reason.
    """
    try:
        content = inside.read(path, most * 4 + _HEAD_NBYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"the file cannot be read ({error.strerror})") from error
    if not content.startswith(_MAGIC):
        if content.startswith(_NAME):
            version = content[len(_NAME) :].partition(b"\n")[0][:20].decode("latin1")
            raise ValueError(f"expected version {_VERSION} of the file, got {version}")
        raise ValueError("Tallyroll did not write this file")
    body, told = memoryview(content)[:-_SUM_NBYTES], content[-_SUM_NBYTES:]
    if zlib.crc32(body).to_bytes(_SUM_NBYTES, "little") != told:
        raise ValueError("the checksum does not match")
    end = content.find(b"\n", len(_MAGIC))
    try:
        says = json.loads(content[len(_MAGIC) : end])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the description of the saved rows is not JSON ({error})") from error
    kept = SavedPriorities.of(says)
    rows = body[end + 1 :]
    if len(rows) % 4:
        raise ValueError("the number of priorities differs from the number of rows")
    leaves = np.frombuffer(rows, "<f4").astype(np.float32, copy=False)
    check_leaves(leaves, kept)
    return kept, leaves
