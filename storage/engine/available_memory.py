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
    """Location and file names of the memory controller in one version of cgroups."""

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
    """Raise unless ``nbytes`` bytes of memory are available for ``what``.

    The kernel allocates memory only when it is touched. If too little is left then, the kernel
    kills the process, and no error can be raised.

    Raises:
        NotEnoughMemory: less memory is available.
    """
    if nbytes > (available := available_bytes()):
        raise NotEnoughMemory(
            f"expected {-(-nbytes // 2**20):,} MiB of memory for {what}, got "
            f"{available // 2**20:,} MiB available. {instead}"
        )


def is_small_allocation(nbytes: int) -> bool:
    """Return True if an allocation is so small that the available memory need not be checked.

    A check takes half a millisecond, which adds up if there are very many storages.
    """
    return nbytes <= _LITTLE_NBYTES


def available_bytes(root: Path = Path("/")) -> int:
    """Return the number of bytes that the machine and its cgroups still let this process allocate.

    File cache that the kernel can reclaim counts as free; swap does not. A limit that the system
    does not report is ignored. ``root`` is the directory that contains ``proc`` and ``sys``.
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
    """Return the available bytes that the text of ``/proc/meminfo`` states, or None."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def left_in_cgroup(limit: str, used: str, stat: str, reclaimable: str) -> int | None:
    """Return the number of bytes that a cgroup can still use, or None if it has no limit.

    Args:
        limit: the text of the limit file: a number of bytes, or ``max``.
        used: the text of the usage file: a number of bytes.
        stat: the text of the statistics file: lines with a name and a number.
        reclaimable: the name in ``stat`` of the number of bytes that can be reclaimed.
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
            # If the path is not visible, the process is in a container, or sees only its own part
            # of the hierarchy.
            visible = path.is_relative_to(root) and ".." not in path.parts
            inside = path.relative_to(root) if visible else PurePosixPath()
            yield from ((top / folder, files) for folder in (inside, *inside.parents))


def out_of_memory_error(what: str, error: MemoryError) -> NotEnoughMemory:
    """Return the error for a library whose memory allocation failed."""
    return NotEnoughMemory(
        f"{what} needs more memory than this process may allocate ({error!s:.200}). Free memory, "
        "or raise the address-space limit (ulimit -v)."
    )


@contextlib.contextmanager
def library_memory(what: str) -> Iterator[None]:
    """Convert a library's MemoryError, such as Arrow's, to `NotEnoughMemory` for ``what``."""
    try:
        yield
    except NotEnoughMemory:
        raise
    except MemoryError as error:
        raise out_of_memory_error(what, error) from error
