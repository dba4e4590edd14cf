"""Cached leaf hashes in a file alongside the rows, for hashing a growing storage repeatedly.

The file can be lost without losing rows. Its first line contains its name, and its second line is
JSON: the ``id`` of the storage, the SHA-256 of the names, dtypes and shapes of its columns
(``about``), the number of ``rows`` that it covers, the number of ``rewinds`` at that time, and the
number of ``leaves``. A `LEAF` for each leaf follows, and finally the SHA-256 of everything before.

Rows never change, and keep their numbers, during the life of a storage. The cached hash of a leaf
is therefore valid for a leaf with the same first, last and newest row and the same number of rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tallyroll.storage.formats.base import Format

LEAF: Final = np.dtype(
    [
        ("first", "<i8"),
        ("last", "<i8"),
        ("newest", "<i8"),
        ("rows", "<i8"),
        ("sha256", "u1", (32,)),
    ]
)
"""A leaf: the numbers of its first and last row in the order of the content, the number of its
most recently committed row, its number of rows, and its hash."""
_MAGIC: Final = b"tallyroll leaves 1\n"
_MORE_ROWS: Final = 2**16
_SUM_NBYTES: Final = 32


class UnusableLeaves(Exception):
    """The file is damaged or belongs to other rows. The message states the reason."""


class LeafHashes:
    """Cached leaf hashes of one storage.

    Args:
        files: the files of the storage.
        id: the id of the storage.
        about: a description of its columns, see `leaves.about`.
        head: returns the number of rows ever committed to the storage.
        rewinds: the number of rewinds, after which row numbers may refer to other rows.
    """

    def __init__(
        self, files: Format, id: str | None, about: bytes, head: Callable[[], int], rewinds: int
    ) -> None:
        self._files, self._head, self._rewinds = files, head, rewinds
        self._owner = {"id": id, "about": hashlib.sha256(about).hexdigest()}
        self.seen = -1
        """The number of rows that the file covers, or -1 if there is no usable file."""

    def read(self) -> np.ndarray | None:
        """Return the leaves in the file, [n] of `LEAF`, or None if there is no file for these rows.

        Raises:
            UnusableLeaves: the file cannot be used.
        """
        path = self._files.leaves_path
        try:
            # A file has at most one leaf per row, and other processes may be adding rows.
            most = (self._head() + _MORE_ROWS) * LEAF.itemsize
            content = self._files.inside.read(path, most)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnusableLeaves(f"{path} cannot be read: {error.strerror}.") from error
        body, told = content[:-_SUM_NBYTES], content[-_SUM_NBYTES:]
        if not body.startswith(_MAGIC) or hashlib.sha256(body).digest() != told:
            raise UnusableLeaves(f"{path} is damaged: its checksum does not match.")
        line, _, rest = body[len(_MAGIC) :].partition(b"\n")
        try:
            says = json.loads(line)
            rows, leaves, rewinds = says["rows"], says["leaves"], says["rewinds"]
            owner = {name: says[name] for name in self._owner}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnusableLeaves(
                f"{path} does not name the storage of its hashes ({error})."
            ) from error
        if owner != self._owner:
            raise UnusableLeaves(f"{path} belongs to another storage.")
        if rewinds != self._rewinds:
            return None
        if type(rows) is not int or type(leaves) is not int or len(rest) != leaves * LEAF.itemsize:
            raise UnusableLeaves(f"{path} does not have the number of leaves in its header.")
        if rows > (head := self._head()):
            raise UnusableLeaves(f"{path} covers {rows} rows, but the storage has {head}.")
        self.seen = rows
        return np.frombuffer(rest, LEAF)

    def fill(self, lines: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Fill in the cached hashes of the leaves ``lines``, [n] of `LEAF`.

        Returns:
            A mask of the leaves that were filled in, bool [n].
        """
        if not len(kept):
            return np.zeros(len(lines), np.bool_)
        kept = kept[np.argsort(kept["first"])]
        at = np.minimum(np.searchsorted(kept["first"], lines["first"]), len(kept) - 1)
        known: np.ndarray = lines["newest"] < self.seen
        for name in ("first", "last", "newest", "rows"):
            known &= lines[name] == kept[name][at]
        lines["sha256"][known] = kept["sha256"][at[known]]
        return known

    def write(self, lines: np.ndarray, seen: int) -> None:
        """Replace the file atomically; do nothing if the file cannot be written."""
        told: dict[str, Any] = {**self._owner, "rewinds": self._rewinds}
        told |= {"rows": seen, "leaves": len(lines)}
        body = _MAGIC + json.dumps(told).encode() + b"\n" + lines.tobytes()
        with contextlib.suppress(OSError):
            content = body + hashlib.sha256(body).digest()
            self._files.inside.write_atomically(self._files.leaves_path, content, synced=True)
            self.seen = seen
