"""The amount of memory that this process can still allocate."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tallyroll.storage.errors import NotEnoughMemory


@dataclass(frozen=True)
class _CgroupFiles:
    """A version of cgroups: the location of its memory controller, and the names of its files."""

    controller: str
    """The controller's name in ``/proc/self/cgroup``."""
    mounted: str
    """A pattern for the end of a line of ``/proc/self/mountinfo``."""
    limit: str
    used: str
    reclaimable: str
    """The entry of ``memory.stat`` with the number of bytes that the kernel can reclaim."""


_VERSIONS = (
    _CgroupFiles("", r"cgroup2 ", "memory.max", "memory.current", "inactive_file"),
    _CgroupFiles(
        "memory",
        r"cgroup \S+ (?:\S+,)?memory\b",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


_LITTLE_NBYTES = 2**24


def require_memory(
    nbytes: int, what: str, instead: str = "Use a smaller storage, or another machine."
) -> None:
    """Raise unless ``nbytes`` of memory are available for ``what``.

    Memory is allocated only when it is touched, which is too late for an error: the kernel kills
    the process.

    Raises:
        NotEnoughMemory: the available memory is smaller.
    """
    if nbytes > (available := available_bytes()):
        raise NotEnoughMemory(
            f"expected {-(-nbytes // 2**20):,} MiB of memory for {what}, got "
            f"{available // 2**20:,} MiB available. {instead}"
        )


def is_little(nbytes: int) -> bool:
    """Return True if an allocation is so small that the available memory need not be checked.

    A check takes half a millisecond, and there may be very many storages.
    """
    return nbytes <= _LITTLE_NBYTES


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can still be allocated, by the machine's and the cgroups' limits.

    File cache that the kernel can reclaim counts as free; swap does not. If the system does not
    report a limit, there is none. ``root`` is the directory that contains ``proc`` and ``sys``.
    """
    left = [mem_available(_read(root / "proc/meminfo"))]
    mounts, paths = _read(root / "proc/self/mountinfo"), _read(root / "proc/self/cgroup")
    for folder, files in cgroup_folders(mounts, paths):
        place = root / folder.relative_to("/")
        limit, used = _read(place / files.limit), _read(place / files.used)
        left.append(left_in_cgroup(limit, used, _read(place / "memory.stat"), files.reclaimable))
    return min((number for number in left if number is not None), default=sys.maxsize)


def _read(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def mem_available(meminfo: str) -> int | None:
    """Return the available bytes in the text of ``/proc/meminfo``, or None."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def left_in_cgroup(limit: str, used: str, stat: str, reclaimable: str) -> int | None:
    """Return the bytes that a cgroup can still use, or None without a limit.

    Args:
        limit: the text of its limit: a number of bytes, or ``max``.
        used: the text of its usage: a number of bytes.
        stat: the text of its statistics: lines of a name and a number.
        reclaimable: the name in ``stat`` of the bytes that can be reclaimed.
    """
    if not limit.strip().isdecimal() or not used.strip().isdecimal():
        return None
    found = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)
    cache = int(found[1]) if found else 0
    return max(0, int(limit) - max(0, int(used) - cache))


def cgroup_folders(mountinfo: str, cgroup: str) -> Iterator[tuple[PurePosixPath, _CgroupFiles]]:
    """Yield the folders of the process's memory cgroup and of its parents, innermost first.

    Args:
        mountinfo: the text of ``/proc/self/mountinfo``.
        cgroup: the text of ``/proc/self/cgroup``.
    """
    groups = re.findall(r"^\d+:(.*?):(/.*)$", cgroup, re.MULTILINE)
    paths = {name: path for names, path in groups for name in names.split(",")}
    for files in _VERSIONS:
        line = rf"^\S+ \S+ \S+ (/\S*) (/\S*) .* - {files.mounted}"
        mounts = re.findall(line, mountinfo, re.MULTILINE) if files.controller in paths else []
        for root, top in mounts:
            path = PurePosixPath(paths[files.controller])
            # Otherwise the process is in a container, or sees only its own part of the hierarchy.
            visible = path.is_relative_to(root) and ".." not in path.parts
            inside = path.relative_to(root) if visible else PurePosixPath()
            yield from ((top / folder, files) for folder in (inside, *inside.parents))


def no_memory(what: str, error: MemoryError) -> NotEnoughMemory:
    """Return the error for a library whose memory allocation failed."""
    return NotEnoughMemory(
        f"{what} needs more memory than this process gets ({error!s:.200}). Free memory, or raise "
        "the limit of address space (ulimit -v)."
    )


@contextlib.contextmanager
def library_memory(what: str) -> Iterator[None]:
    """Convert a library's MemoryError, such as Arrow's, to `NotEnoughMemory` for ``what``."""
    try:
        yield
    except NotEnoughMemory:
        raise
    except MemoryError as error:
        raise no_memory(what, error) from error
