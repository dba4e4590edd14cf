"""Comparison of the space that rows need with the free space, before any row is written."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tallyroll.storage.errors import StorageFull
from tallyroll.storage.files.mapping import maps_left
from tallyroll.storage.files.paths import free_bytes, nearest
from tallyroll.storage.rows.schema import Schema

_UNLIMITED = 2**63 - 1
# Maximum file sizes in bytes, by Linux's name of the file system.
_LARGEST_FILES = {
    "msdos": 2**32 - 1,
    "vfat": 2**32 - 1,
    "ext2": 2**41,
    "ext3": 2**41,
    "ext4": 2**44,
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Disk space of rows in some format."""

    nbytes: int
    """Total bytes of all files."""
    files: int
    largest: int
    """Bytes of the largest file."""
    maps: int
    """Number of memory maps of a process that has all files open."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The space and files that a run needs, and the space and files that are free."""

    needed: Footprint
    nbytes: int
    """Bytes needed beyond those that the storage already has."""
    free: int
    """Free bytes on the file system."""
    free_files: int
    largest_file: int
    """Maximum bytes of one file, by the file system and this process's limits."""
    free_maps: int

    @property
    def problems(self) -> list[str]:
        """The exceeded limits, one sentence each."""
        found = []
        if self.nbytes > self.free:
            found.append(f"they need {self.nbytes:,} more bytes, and {self.free:,} are free")
        if self.needed.largest > self.largest_file:
            found.append(
                f"the largest file would have {self.needed.largest:,} bytes, and a file may have "
                f"at most {self.largest_file:,} (by the file system, or ulimit -f)"
            )
        if self.needed.files > self.free_files:
            found.append(f"they need {self.needed.files:,} files, and {self.free_files:,} are free")
        if self.needed.maps > self.free_maps:
            found.append(
                f"they need {self.needed.maps:,} memory maps, and a process may have "
                f"{self.free_maps:,} more (sysctl vm.max_map_count)"
            )
        return found


class SizedFormat(Protocol):
    """The part of a format that determines its space."""

    path: Path

    def footprint(self, schema: Schema, rows: int) -> Footprint:
        """Return the space of ``rows`` rows on disk."""


def estimate(format: SizedFormat, schema: Schema, rows: int, *, there: int = 0) -> Estimate:
    """Return the space that a total of ``rows`` rows will need, and the free space.

    Args:
        format: the format of the storage.
        schema: the schema of the rows.
        rows: the number of rows.
        there: the number of rows that already have space.
    """
    needed = format.footprint(schema, rows)
    taken = format.footprint(schema, there).nbytes if there else 0
    place = nearest(format.path)
    found = os.statvfs(place)
    return Estimate(
        needed=needed,
        nbytes=max(0, needed.nbytes - taken),
        free=free_bytes(format.path),
        free_files=found.f_favail if found.f_files else _UNLIMITED,
        largest_file=_largest_file(place),
        free_maps=maps_left(),
    )


def require_room(format: SizedFormat, schema: Schema, rows: int, *, there: int = 0) -> None:
    """Raise unless a total of ``rows`` rows fit, of which ``there`` already have space.

    Raises:
        StorageFull: the rows exceed a limit; the message names every such limit, with numbers.
    """
    if problems := estimate(format, schema, rows, there=there).problems:
        raise StorageFull(
            f"{format.path} has no room for {rows:,} rows of {schema.row_nbytes:,} bytes: "
            f"{'; '.join(problems)}. Nothing was written. Request fewer rows, free space, or give "
            "another path."
        )


def _largest_file(place: Path) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = _UNLIMITED if soft == resource.RLIM_INFINITY else soft
    return min(limit, _LARGEST_FILES.get(_file_system(place), _UNLIMITED))


def _file_system(place: Path) -> str:
    """Return the name of the file system, or "" if it is unknown."""
    found: tuple[int, str] = (0, "")
    with contextlib.suppress(OSError, ValueError, IndexError):
        real = os.path.realpath(place)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= found[0]:
                found = (len(point), after.split()[0])
    return found[1]
