"""Record the writes of storages, and make disks that a power cut at any moment may leave.

Within `Recorder.recording` this process writes real files. Around every call that changes or syncs
something, the recorder compares the tree with its previous state. So the record has all changes,
even those through maps and other libraries. A disk after a cut holds everything that was synced,
and any part of everything else: pages of 4 KiB (each in any later version), sizes, and names in
directories. A rename either happened or not, as in file systems with a journal.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage.engine.columns import ArrayRows, Columns
from tallyroll.storage.engine.frame_pool import FrameWriter
from tallyroll.storage.files.commit_header import HEADER_NBYTES, Header, word_of
from tallyroll.storage.files.header_words import INODE, inode_of, with_identity_of

__all__ = ["PAGE_NBYTES", "Recorder", "Syncs"]

PAGE_NBYTES = 4096
_ZEROS = bytes(PAGE_NBYTES)
_open = os.open  # the original, while the recorder patches os.open
_ALL = 2**62
_CHANGING = ("mkdir", "rmdir", "unlink", "pwrite", "ftruncate", "posix_fallocate")
_RENAMING = ("rename", "replace")
_IN_MEMORY: tuple[tuple[type, str], ...] = (
    (ArrayRows, "copy_to"),
    (Columns, "copy_memory"),
    (FrameWriter, "append"),
    (Header, "write_record"),
    (Header, "forget_uncommitted"),
    (Header, "begin_writing"),
    (Header, "end_writing"),
    (Header, "set_reserve"),
    (Header, "set_head"),
)


class Syncs(Flag):
    """The kinds of syncs that a disk respects."""

    NONE = 0
    FILES = auto()
    DIRECTORIES = auto()
    ALL = FILES | DIRECTORIES


@dataclass(eq=False)
class _File:
    """A file, with the history of its pages and of its size."""

    descriptor: int
    inode: int
    pages: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    syncs: list[tuple[int, int, int]] = field(default_factory=list)
    """Moment, and the pages [start, stop) that were on the disk then."""
    content: bytes = b""
    """Content at the last comparison."""


@dataclass(eq=False)
class _Directory:
    """A directory, with the history of its names and of its syncs."""

    descriptor: int
    inode: int
    changes: list[tuple[int, dict[str, _Node | None]]] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)
    names: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Directory


class Recorder:
    """A record of all changes below ``root``, which is empty and on the disk at the start.

    For speed, syncs of maps are only recorded, not executed. The same holds for syncs of files if
    the caller replaces `os.fsync` and `os.fdatasync`.
    """

    def __init__(self, root: Path) -> None:
        self.moment = 0
        """Increases with every change and every sync."""
        self._nodes: dict[int, _Node] = {}
        file = _open(root, os.O_RDONLY)
        self._root = _Directory(file, os.fstat(file).st_ino)
        self._nodes[self._root.inode] = self._root

    def close(self) -> None:
        """Close the files."""
        for node in self._nodes.values():
            os.close(node.descriptor)

    # -- recording

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the changes that this process makes."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _CHANGING:
                patch.setattr(os, name, self._around(getattr(os, name)))
            for name in _RENAMING:
                patch.setattr(os, name, self._around(getattr(os, name), both=True))
            patch.setattr(os, "open", self._opening(os.open))
            for owner, name in _IN_MEMORY:
                patch.setattr(owner, name, self._around(owner.__dict__[name]))
            patch.setattr(os, "fsync", self._syncing(os.fsync))
            patch.setattr(os, "fdatasync", self._syncing(os.fdatasync))
            patch.setattr(mmap, "mmap", self._watched_map())
            yield
        self._look()

    def _around(self, function: Callable[..., Any], *, both: bool = False) -> Callable[..., Any]:
        """Wrap a function to compare after the call, and before it if ``both`` sides change."""

        def called(*args: Any, **more: Any) -> Any:
            if both:
                self._look()
            try:
                return function(*args, **more)
            finally:
                self._look()

        return called

    def _opening(self, function: Callable[..., int]) -> Callable[..., int]:
        making = self._around(function)

        def called(path: Any, flags: int, *args: Any, **more: Any) -> int:
            return (making if flags & os.O_CREAT else function)(path, flags, *args, **more)

        return called

    def _syncing(self, function: Callable[[int], None]) -> Callable[[int], None]:
        def called(descriptor: int) -> None:
            self._look()
            node = self._nodes.get(os.fstat(descriptor).st_ino)
            function(descriptor)
            if isinstance(node, _Directory):
                node.syncs.append(self._next())
            elif node is not None:
                node.syncs.append((self._next(), 0, _ALL))

        return called

    def _watched_map(self) -> type[mmap.mmap]:
        class Map(mmap.mmap):
            def flush(self, offset: int = 0, size: int | None = None) -> None:
                assert offset % mmap.PAGESIZE == 0
                begin = np.frombuffer(self, np.uint8).ctypes.data + offset
                recorder._flushed(begin, begin + (len(self) - offset if size is None else size))

        recorder = self
        return Map

    def _flushed(self, start: int, stop: int) -> None:
        self._look()
        for inode, first, last in _mapped(start, stop):
            node = self._nodes[inode]
            assert isinstance(node, _File)
            node.syncs.append((self._next(), first, last))

    def _next(self) -> int:
        self.moment += 1
        return self.moment

    def _look(self) -> None:
        """Compare the whole tree with its state at the last comparison."""
        self._look_into(self._root)

    def _look_into(self, directory: _Directory) -> None:
        found: dict[str, _Node] = {}
        with os.scandir(directory.descriptor) as entries:
            for entry in entries:
                found[entry.name] = self._nodes.get(entry.inode()) or self._new(directory, entry)
        before = directory.names
        if found != before:
            names = {*found, *before}
            changes = {n: found.get(n) for n in names if found.get(n) is not before.get(n)}
            directory.changes.append((self._next(), changes))
            directory.names = found
        for node in found.values():
            if isinstance(node, _Directory):
                self._look_into(node)
            else:
                self._look_at(node)

    def _new(self, directory: _Directory, entry: os.DirEntry[str]) -> _Node:
        # The descriptor stays open, so that no other file gets its inode number.
        file = _open(entry.name, os.O_RDONLY, dir_fd=directory.descriptor)
        kind = _Directory if stat.S_ISDIR(os.fstat(file).st_mode) else _File
        node = self._nodes[entry.inode()] = kind(file, entry.inode())
        return node

    def _look_at(self, file: _File) -> None:
        size = os.fstat(file.descriptor).st_size
        content = os.pread(file.descriptor, size, 0)
        if content == file.content:
            return
        if size != file.sizes[-1][1]:
            file.sizes.append((self._next(), size))
        before, now = _pages_of(file.content, size), _pages_of(content, len(file.content))
        changed = np.flatnonzero((before != now).any(axis=1)).tolist()
        if changed:
            moment = self._next()
            for page in changed:
                file.pages.setdefault(page, []).append((moment, now[page].tobytes()))
        file.content = content

    # -- the disk after a cut

    def disk(
        self, target: Path, moment: int, chance: random.Random, heeds: Syncs = Syncs.ALL
    ) -> None:
        """Make a disk at ``target`` that a cut right after ``moment`` may have left."""
        _Cut(moment, chance, heeds).make(self._root, target)


@dataclass
class _Cut:
    moment: int
    chance: random.Random
    heeds: Syncs

    def _share(self) -> float:
        """Return the share of unsynced changes that reached the disk, for one file or directory."""
        return self.chance.choice((0.0, 0.0, 0.1, 0.5, 0.9, 1.0, 1.0))

    def make(self, directory: _Directory, target: Path) -> None:
        target.mkdir()
        for name, node in sorted(self._names(directory).items()):
            if isinstance(node, _Directory):
                self.make(node, target / name)
            else:
                self._make_file(node, target / name)

    def _names(self, directory: _Directory) -> dict[str, _Node]:
        synced = -1
        if Syncs.DIRECTORIES in self.heeds:
            synced = max((each for each in directory.syncs if each <= self.moment), default=-1)
        names: dict[str, _Node | None] = {}
        share = self._share()
        for moment, changes in directory.changes:
            if moment <= self.moment and (moment < synced or self.chance.random() < share):
                names |= changes
        return {name: node for name, node in names.items() if node is not None}

    def _make_file(self, file: _File, path: Path) -> None:
        syncs = [each for each in file.syncs if each[0] <= self.moment]
        if Syncs.FILES not in self.heeds:
            syncs = []
        share = self._share()
        size = self._pick(file.sizes, max((moment for moment, *_ in syncs), default=-1), share)
        with open(path, "w+b", buffering=0) as target:
            target.truncate(size or 0)
            for page, versions in file.pages.items():
                done = (moment for moment, start, stop in syncs if start <= page < stop)
                content = self._pick(versions, max(done, default=-1), share) or _ZEROS
                at = page * PAGE_NBYTES
                if content != _ZEROS and at < (size or 0):
                    os.pwrite(target.fileno(), content[: size - at], at)
            _keep_origin(target.fileno(), file.descriptor)

    def _pick(self, versions: list[tuple[int, Any]], synced: int, share: float) -> Any:
        """Return one of the versions since the sync: the newest, or any."""
        stop = bisect_right(versions, self.moment, key=lambda each: each[0])
        start = bisect_right(versions, synced, key=lambda each: each[0])
        if start == stop or self.chance.random() < share:
            return versions[stop - 1][1] if stop else None
        at = self.chance.randrange(start - 1, stop)
        return versions[at][1] if at >= 0 else None


def _pages_of(content: bytes, least: int) -> np.ndarray:
    """Return the content page by page, [pages, *], for at least ``least`` bytes."""
    pages = -(-max(len(content), least) // PAGE_NBYTES)
    return np.frombuffer(content.ljust(pages * PAGE_NBYTES, b"\0"), np.uint64).reshape(pages, -1)


def _mapped(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield shared mappings of files in an address range: inode, first page, end page."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            places, access, offset, _, inode, *_ = line.split()
            begin, end = (int(each, 16) for each in places.split("-"))
            begin_at, end_at = max(begin, start), min(end, stop)
            if begin_at < end_at and access[3] == "s":
                first = (int(offset, 16) + begin_at - begin) // PAGE_NBYTES
                yield int(inode), first, first + -(-(end_at - begin_at) // PAGE_NBYTES)


def _keep_origin(file: int, recorded: int) -> None:
    """Update the inode number in a header, because a power cut would not change the file's."""
    header = os.pread(file, HEADER_NBYTES, 0)
    if len(header) == HEADER_NBYTES:
        word = int.from_bytes(header[8 * INODE : 8 * INODE + 8], "little")
        if word == word_of(inode_of(recorded)):
            os.pwrite(file, with_identity_of(file, header), 0)
