"""Detection of bit-for-bit duplicate trajectories that the manifests do not reveal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.rows.keys import STEP, TRAJ_IDS

_CHUNK_NBYTES: Final = 2**24


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Trajectories of a member that equal trajectories of earlier members bit for bit."""

    member: int
    before: int
    """The earlier member that has the same trajectories."""
    count: int
    pairs: tuple[tuple[int, int, int], ...]
    """Some of the pairs, with row numbers and ids of each member's own storage.

    A pair has the first row and the id of the duplicate, and the id of the earlier trajectory.
    """


def doubled_trajectories(union: UnionReader, most: int) -> list[Duplicates]:
    """Find trajectories that equal a trajectory of an earlier member in all bits except the id.

    Args:
        union: the members.
        most: the maximum number of pairs to report per pair of members.
    """
    table = union.trajectories.table
    starts = np.array([each.rows.start for each in union.members])
    of = np.searchsorted(starts, table["first_row"], "right") - 1
    first: dict[bytes, list[int]] = {}
    counts: dict[tuple[int, int], int] = {}
    pairs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    ids, moved = table["id"], union.ids_moved_by
    for line, name in enumerate(_names(union, table)):
        known = first.setdefault(name, [])
        earlier = next((each for each in known if of[each] != of[line]), None)
        if earlier is None or not _same(union, int(ids[earlier]), int(ids[line])):
            known.append(line)
            continue
        member, before = int(of[line]), int(of[earlier])
        counts[member, before] = counts.get((member, before), 0) + 1
        named = pairs.setdefault((member, before), [])
        if len(named) < most:
            own = union.members[member]
            row = int(table["first_row"][line]) - own.rows.start + own.span.start
            both = int(ids[line]) - moved[member], int(ids[earlier]) - moved[before]
            named.append((row, *both))
    return [Duplicates(*both, count, tuple(pairs[both])) for both, count in sorted(counts.items())]


def _names(union: UnionReader, table: np.ndarray) -> Iterator[bytes]:
    """Yield a hash of the first row, the last row and the length of each trajectory."""
    keys = [key for key in union.keys if key != TRAJ_IDS]
    size = max(1, _CHUNK_NBYTES // (2 * union.schema.row_nbytes))
    for start in range(0, len(table), size):
        lines = table[start : start + size]
        ends = np.concatenate([lines["first_row"], lines["last_row"]])
        parts = [_bytes_of(each) for each in union.copies(ends, keys)]
        whole = np.concatenate(parts, axis=1)
        for at, length in enumerate(lines["length"].tolist()):
            said = whole[at].tobytes() + whole[at + len(lines)].tobytes() + b"%d" % length
            yield hashlib.blake2b(said, digest_size=16).digest()


def _same(union: UnionReader, one: int, other: int) -> bool:
    """Return True if two trajectories have the same bits, except for their ids."""
    rows, others = (union.trajectories.rows_of(each) for each in (one, other))
    if len(rows) != len(others):
        return False
    size = max(1, _CHUNK_NBYTES // (2 * union.schema.row_nbytes))
    for key in [STEP, *(key for key in union.keys if key not in (TRAJ_IDS, STEP))]:
        column = union.column(key)
        for start in range(0, len(rows), size):
            both = (column.take(each[start : start + size]) for each in (rows, others))
            if len({each.tobytes() for each in both}) > 1:
                return False
    return True


def _bytes_of(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    return found
