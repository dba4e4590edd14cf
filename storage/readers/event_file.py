"""File of environment calls alongside the rows, to which each call appends a line.

The first line contains a name and the id of the storage. Every other line is a CRC-32 followed by a
JSON list. The CRC-32 covers the id and the list. The list contains the name of the run's events,
which the manifest entry of the run records (`IN_FILE`), the number of the event among the events of
the run, and the event in the form of `run_events`. A line is written before the first row that
follows the call. A kill therefore truncates at most the last line, which belongs to a call without
rows. The next writer replaces that line.

In memory, the manifest entry of a run always contains its events. On disk, the entry contains only
the name of the events, or the events themselves if an earlier version wrote it or the entry
describes copied rows.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import translated
from tallyroll.storage.files.run_events import (
    EVENTS,
    EVENTS_NBYTES,
    IN_FILE,
    LEFT_OUT,
    Event,
    is_event,
    without_events,
)
from tallyroll.storage.files.safe_files import closing, write_all
from tallyroll.storage.formats.base import Format

_MAGIC: Final = "tallyroll events 1"
_LONGEST: Final = 2**22
"""The maximum number of bytes of a line. It is large, because an event names one trajectory per
lane."""
_NOTHING: Final = -1
_NO_FILE: Final = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}
"""Errors that show that the path is not our file but, for example, a link or a pipe."""


@dataclass(frozen=True)
class _State:
    """The complete lines of the file, as of the last read or write."""

    inode: int = _NOTHING
    nbytes: int = 0
    """Bytes of the complete lines."""
    events: dict[str, list[Event]] = field(default_factory=dict)
    """The events by name."""
    left_out: frozenset[str] = frozenset()
    """The names of events of which a line is, or may be, damaged or missing."""
    faults: tuple[str, ...] = ()
    last: str = ""
    """The name in the last undamaged line."""


class EventFile:
    """The events of a storage's runs, stored in one file.

    Args:
        files: the files of the storage.
        writable: True if a file that exists and cannot be read is an error; otherwise the storage
            is used without it.
    """

    def __init__(self, files: Format, *, writable: bool) -> None:
        self._files, self._path, self._writable = files, files.events_path, writable
        self._state = _State()
        self._lost = 0
        """The number of runs whose events should be in the file but are not."""

    # --- reading ----------------------------------------------------------------------------------

    def merged(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the events of its runs.

        An entry with unreadable events gets its readable events and the key `LEFT_OUT`.
        """
        names = [run[IN_FILE] for run in manifest["runs"] if IN_FILE in run]
        if not names:
            self._state, self._lost = _State(), 0
            return manifest
        state = self._state = self._look(str(manifest["id"]))
        self._lost = sum(type(name) is not str or name not in state.events for name in names)
        return {**manifest, "runs": [_with_events(run, state) for run in manifest["runs"]]}

    def faults(self) -> Iterator[str]:
        """Yield the faults that the last read of the file found, one sentence each."""
        yield from self._state.faults
        if self._lost and not self._state.faults:
            yield f"{self._path} has no events of {self._lost} runs that should have some"

    @property
    def torn(self) -> bool:
        """True if the last line is truncated."""
        with suppress(OSError), closing(self._files.inside.open(self._path, os.O_RDONLY)) as file:
            found = os.fstat(file)
            return found.st_ino == self._state.inode and found.st_size > self._state.nbytes
        return False

    def _look(self, id: str) -> _State:
        """Return the lines of the file, reading only those added since the last call."""
        try:
            with open(self._files.inside.open(self._path, os.O_RDONLY), "rb") as file:
                found, known = os.fstat(file.fileno()), self._state
                if found.st_ino != known.inode or found.st_size < known.nbytes or known.faults:
                    known = _State()
                if found.st_size > EVENTS_NBYTES + _LONGEST:
                    return _State(faults=(f"{self._path} is too large to be a file of events",))
                file.seek(known.nbytes)
                content = file.read(found.st_size - known.nbytes)
        except FileNotFoundError:
            return _State(faults=(f"{self._path}, which has the events of runs, is missing",))
        except OSError as error:
            if self._writable and error.errno not in _NO_FILE:
                raise
            return _State(faults=(f"{self._path} cannot be read: {error.strerror}",))
        return self._with_lines(known, id, content, found.st_ino)

    def _with_lines(self, known: _State, id: str, content: bytes, inode: int) -> _State:
        *lines, torn = content.split(b"\n")
        if not known.nbytes and (not lines or lines.pop(0) != _first(id)[:-1]):
            return _State(faults=(f"{self._path} is damaged, or belongs to another storage",))
        events = dict(known.events)
        grown: set[str] = set()
        left_out, last, damaged = {*known.left_out}, known.last, 0
        for line in lines:
            found = _parsed(line, id)
            if found is None:
                damaged += 1
                left_out.add(last)
                continue
            last, number, event = found
            if last not in grown:  # copy the list, because earlier callers hold it
                grown.add(last)
                events[last] = [*events.get(last, ())]
            if number == len(events[last]):
                events[last].append(event)
            else:
                left_out.add(last)
        faults = (f"{damaged} lines of {self._path} are damaged",) if damaged else ()
        if gaps := sorted(left_out - known.left_out) if not damaged else ():
            faults = (f"{self._path} lacks events of {len(gaps)} runs",)
        nbytes = known.nbytes + len(content) - len(torn)
        return _State(inode, nbytes, events, frozenset(left_out), known.faults + faults, last)

    # --- writing ----------------------------------------------------------------------------------

    def add(self, id: str, run: Mapping[str, Any], event: Event) -> bool:
        """Add an event to an entry whose events are in the file; return False for other entries.

        The event is also appended, in place, to the list of events in the entry.
        """
        state, name = self._state, run.get(IN_FILE)
        if name not in state.events or run.get(EVENTS) is not state.events[name]:
            return False
        self._append(id, [(name, len(run[EVENTS]), event)])
        run[EVENTS].append(event)
        return True

    @property
    def full(self) -> bool:
        """True if the file has no room for more events."""
        return self._state.nbytes > EVENTS_NBYTES

    def keep(self, manifest: Manifest) -> tuple[Manifest, Callable[[], None]]:
        """Write the events that the file lacks, before the manifest is written.

        Returns:
            The manifest with a name for the events of each run, and a callback. The caller writes
            the manifest and then calls the callback, which removes events that no run has any more.
        """
        runs = [_named(run) for run in manifest["runs"]]
        wanted: dict[str, list[Event]] = {
            run[IN_FILE]: run[EVENTS] for run in runs if IN_FILE in run
        }
        manifest, id = {**manifest, "runs": runs}, str(manifest["id"])
        have = self._state.events
        others = {name: each for name, each in wanted.items() if have.get(name) is not each}
        known = {name: have.get(name, []) for name in others}
        if any(known[name] != each[: len(known[name])] for name, each in others.items()):
            return manifest, lambda: self._rewrite(id, wanted)
        new = [
            (name, number, each[number])
            for name, each in others.items()
            for number in range(len(known[name]), len(each))
        ]
        if new and self._state.inode == _NOTHING:
            self._rewrite(id, wanted)
        elif new:
            self._append(id, new)
            have.update(wanted)
        return manifest, lambda: None

    def _append(self, id: str, events: list[tuple[str, int, Event]]) -> None:
        state, lines = self._state, b"".join(_line(id, *each) for each in events)
        with (
            translated(self._path, len(lines)),
            closing(self._files.inside.open(self._path, os.O_RDWR)) as file,
        ):
            if os.fstat(file).st_size != state.nbytes:  # a writer was killed within a line
                os.ftruncate(file, state.nbytes)
            try:
                write_all(file, lines, state.nbytes)
                if self._files.durable:
                    os.fdatasync(file)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(file, state.nbytes)
                raise
        self._state = _State(
            state.inode,
            state.nbytes + len(lines),
            state.events,
            state.left_out,
            state.faults,
            events[-1][0],
        )

    def _rewrite(self, id: str, wanted: dict[str, list[Event]]) -> None:
        lines = [
            _line(id, name, number, event)
            for name, events in wanted.items()
            for number, event in enumerate(events)
        ]
        content = b"".join([_first(id), *lines])
        with translated(self._path, len(content)):
            self._files.inside.write_atomically(self._path, content, durable=self._files.durable)
            with closing(self._files.inside.open(self._path, os.O_RDONLY)) as file:
                inode = os.fstat(file).st_ino
        self._state = _State(inode, len(content), dict(wanted))


def on_disk(manifest: Manifest) -> Manifest:
    """Return the manifest without the events that are in the file."""
    return {
        **manifest,
        "runs": [
            {name: each for name, each in run.items() if name != EVENTS} if IN_FILE in run else run
            for run in manifest["runs"]
        ],
    }


def _with_events(run: dict[str, Any], state: _State) -> dict[str, Any]:
    if IN_FILE not in run:
        return run
    name = run[IN_FILE]
    if not isinstance(name, str) or name not in state.events:
        rest = {name: each for name, each in run.items() if name != IN_FILE}
        return {**rest, LEFT_OUT: True}
    more = {LEFT_OUT: True} if name in state.left_out else {}
    return {**run, EVENTS: state.events[name], **more}


def _named(run: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with a name for its events, if it has events."""
    events = run.get(EVENTS)
    if not isinstance(events, list):
        return without_events(run) if IN_FILE in run else run  # read without the file of events
    if not events:
        return {name: each for name, each in run.items() if name not in (EVENTS, IN_FILE)}
    if IN_FILE in run or not all(map(is_event, events)):
        return run
    return {**run, IN_FILE: secrets.token_hex(6)}


def _first(id: str) -> bytes:
    return f"{_MAGIC} {id}\n".encode()


def _line(id: str, name: str, number: int, event: Event) -> bytes:
    content = json.dumps([name, number, event]).encode()
    return b"%08x %b\n" % (_crc(id, content), content)


def _crc(id: str, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(id.encode()))


def _parsed(line: bytes, id: str) -> tuple[str, int, Event] | None:
    """Return the name, the number and the event in a line, or None if the line is damaged."""
    try:
        if int(line[:8], 16) != _crc(id, line[9:]):
            return None
        match json.loads(line[9:]):
            case [str(name), int(number), event] if is_event(event):
                return name, number, event
    except (ValueError, RecursionError):
        pass
    return None
