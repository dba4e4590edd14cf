"""Test power cuts at any moment: rows committed with ``durability="power"`` survive intact.

The tests write real storages and build disks from the recorded calls, see `power_cuts`. Control
tests show that losses would be found: they leave out syncs, or use ``durability="process"``.

``TALLYROLL_POWER_CUTS`` sets the total number of disks, 64 by default.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tallyroll.storage import H5Storage, MemmapStorage, Schema, StorageMissing, ZarrStorage, verify
from tallyroll.storage.engine import mapped_space
from tallyroll.storage.engine.commit_engine import Durability, Engine
from tallyroll.storage.engine.frame_pools import FramePools
from tallyroll.storage.errors import DiskFailed, NotAStorage, StorageError
from tallyroll.storage.files.commit_header import header_bytes
from tallyroll.storage.formats.zarr import metadata as zarr_metadata
from tallyroll.storage.replay.checkpoint import DiskStorageCheckpointer
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.storages import DiskStorage

from power_cuts import Recorder, Syncs

CUTS = int(os.environ.get("TALLYROLL_POWER_CUTS", "64"))
CUTS_OF_CONTROLS = 9
RING = 40
STEPS = 7
WIDTH = 128
RECORD_REPEATS = 1500
PROVENANCE = {"of": ["any"] * 1500}
"""Large enough that a manifest spans some pages."""

_PLACE = np.arange(WIDTH)


def rows_of(numbers: np.ndarray, salt: int = 0) -> dict[Key, np.ndarray]:
    """Return the rows of these numbers [count]. Another ``salt`` gives them other contents."""
    wide, after = (each[:, None] * 1000 + _PLACE + 500 * salt for each in (numbers, numbers + 1))
    return {
        ("wide",): wide.view(np.uint8),
        ("next", "wide"): after.view(np.uint8),
        ("a", "b", "c"): (3 * numbers + salt).astype(np.int32),
        ("next", "terminated"): (numbers % STEPS == STEPS - 1)[:, None],
        ("collector", "traj_ids"): numbers // STEPS,
        ("collector", "step"): numbers % STEPS,
        ("collector", "lane"): numbers // STEPS % 2,
    }


def record_of(head: int, salt: int = 0) -> bytes:
    """Return the record committed with row ``head``, of one page or more."""
    return f"{head} {salt}.".encode() * (1 + 397 * head % RECORD_REPEATS)


@dataclass(frozen=True)
class Case:
    """Kind of storage under test."""

    kind: type[DiskStorage]
    ring: int | None = None
    capacity: int | None = None
    once: bool = False

    def create(self, path: Path, durability: Durability) -> DiskStorage:
        more = {"once": True} if self.once else {}
        return self.kind(
            path, capacity=self.capacity, max_size=self.ring, durability=durability, **more
        )


CASES = {
    "memmap": Case(MemmapStorage),
    "ring": Case(MemmapStorage, ring=RING),
    "once": Case(MemmapStorage, once=True),
    "once ring": Case(MemmapStorage, ring=RING, once=True),
    "hdf5": Case(H5Storage, capacity=60),
    "zarr": Case(ZarrStorage, capacity=30),
    "once zarr": Case(ZarrStorage, capacity=30, once=True),
}


@dataclass(frozen=True)
class Promise:
    """Guarantees for a disk after a cut at some moment or later."""

    at: int
    head: int
    """Number of promised rows, -1 if none was acknowledged."""
    record: int
    """Number of rows of the promised record, -1 for none."""
    begun: int
    """Number of rows whose writing has begun. In a ring, they overwrite others."""
    salts: tuple[int, ...]
    """Salts of all rows whose writing has begun."""
    waits: bool
    """Whether all writers so far have waited for the disk."""
    ends: bool
    """Whether no later moment is checked, because a writer does not wait for the disk."""


class Story:
    """Recorded sessions of one storage, with the promises of each moment.

    Args:
        case: the kind of storage.
        root: a new directory to record.
        durability: the durability of the sessions that promise something.
    """

    def __init__(self, case: Case, root: Path, durability: Durability) -> None:
        root.mkdir()
        self.case, self.durability = case, durability
        self.recorder = Recorder(root)
        # The storage creates the directories above it, too.
        self.place = Path("some", "where", "rows.h5")
        self.path = root / self.place
        self.promises: list[Promise] = []
        self.marks: list[int] = []
        """Moments of special interest."""
        self.salts: list[int] = []
        self.begun = 0
        self._head = self._record = -1
        self._waits = True
        self._storage: DiskStorage | None = None

    @property
    def storage(self) -> DiskStorage:
        assert self._storage is not None
        return self._storage

    @property
    def engine(self) -> Engine:
        assert self.storage.reader.engine is not None
        return self.storage.reader.engine

    def promise(self, salts: list[int] | None = None, *, ends: bool = False) -> None:
        """Promise all commits from here on, while rows of ``salts`` are written."""
        self.begun = max(self.begun, len(self.salts if salts is None else salts))
        moment, (head, record) = self.recorder.moment, (self._head, self._record)
        known = tuple(self.salts if salts is None else salts)
        self.promises.append(Promise(moment, head, record, self.begun, known, self._waits, ends))

    def create(self, durability: Durability | None = None) -> None:
        self._begin(durability)
        self._storage = self.case.create(self.path, durability or self.durability)
        self.storage.initialise(Schema.of(rows_of(np.arange(1))), PROVENANCE)

    def append(self, durability: Durability | None = None, **more: Any) -> None:
        self._begin(durability)
        durability = durability or self.durability
        self._storage = self.case.kind(self.path, mode="append", durability=durability, **more)
        self.storage.initialise(self.storage.schema, PROVENANCE)

    def _begin(self, other: Durability | None) -> None:
        if other is not None:
            self._waits, self._head, self._record = False, -1, -1
        self.promise(ends=other is not None)

    @property
    def promising(self) -> bool:
        return self.storage.writer.durability == self.durability

    def extend(self, count: int, *, record: bool = False, salt: int = 0) -> None:
        """Write and commit rows, optionally with a record."""
        start = len(self.salts)
        stop, salts = start + count, [*self.salts, *[salt] * count]
        if self.promising:
            self.promise(salts)
        payload = record_of(stop, salt) if record else None
        self.storage.extend(rows_of(np.arange(start, stop), salt), record=payload, ids="fresh")
        self.salts = salts
        self._keep(stop, stop if record else self._record)

    def put_record(self) -> None:
        self.storage.writer.put_record(record_of(len(self.salts)))
        self._keep(len(self.salts), len(self.salts))

    def _keep(self, head: int, record: int) -> None:
        if self.promising:
            self._head, self._record, self._waits = head, record, True
            self.promise()

    def kill(self) -> None:
        """Leave the storage as a killed process does."""
        engine = self.engine
        engine.abandon()
        assert engine._lock is not None
        engine._lock.release()
        self.storage.reader.detach_engine()

    def close(self) -> None:
        self.storage.close()

    # -- after a cut

    def drawn(self, chance: random.Random, least: int) -> Promise:
        """Return the promise at a random moment with ``least`` promised rows, or -1."""
        at = chance.choice(self.moments[least])
        # Several promises may share a moment. The last one promises the most.
        return replace([each for each in self.promises if each.at <= at][-1], at=at)

    @cached_property
    def moments(self) -> dict[int, list[int]]:
        """The moments to check, by the least number of rows that are promised then."""
        stops = [*(each.at for each in self.promises[1:]), self.recorder.moment + 1]
        spans = [(p, range(p.at, s)) for p, s in zip(self.promises, stops, strict=True)]
        return {
            least: [at for p, span in spans if not p.ends and p.head >= least for at in span]
            for least in (-1, 1)
        }


def growing(story: Story) -> None:
    """Create, extend, show to other libraries, close, resume, finalize and resume a storage."""
    story.create()
    story.extend(3)
    story.extend(20, record=True)
    story.storage.reserve(90)
    story.extend(22, record=True)
    story.storage.flush()
    story.extend(1)
    story.put_record()
    story.extend(16)
    story.close()
    story.append(capacity=120)
    story.engine._refresh_at = 0.0
    story.extend(25, record=True)
    story.storage.finalize()
    story.append(capacity=140)
    story.extend(30, record=True)
    story.close()


def short(story: Story) -> None:
    """Create, extend and close a storage."""
    story.create()
    story.marks = [0, story.recorder.moment]
    for _ in range(3):
        story.extend(20, record=True)
    story.close()


def after_a_process(story: Story) -> None:
    """Create and close a storage with ``durability="process"``, then continue it."""
    story.create("process")
    story.extend(30, record=True)
    story.close()
    story.append(capacity=60)
    story.extend(9)
    story.extend(9, record=True)
    story.close()


def after_a_kill(story: Story) -> None:
    """Create a storage with ``durability="process"`` and kill it.

    Another process extends it, and the story continues.
    """
    story.create("process")
    story.extend(21, record=True)
    story.kill()
    story.append("process", capacity=100)
    story.extend(35)
    story.kill()
    story.append()
    story.put_record()
    story.extend(9)
    story.kill()
    story.append()
    story.extend(30, record=True)
    story.close()


def after_an_error(story: Story) -> None:
    """Fail commits after rows and record were written, and commit others in their place."""
    story.create()
    story.extend(20, record=True)
    fail_to_extend(story, 3)
    story.extend(6)
    fail_to_extend(story, 5)
    story.kill()
    story.append()
    story.extend(8)
    story.extend(2, record=True)
    story.close()


def failing_once(story: Story) -> None:
    """Fail one commit, and commit others in its place."""
    story.create()
    story.extend(20, record=True)
    fail_to_extend(story, 3)
    story.extend(6)
    story.marks = [story.recorder.moment]


def failing_and_killed(story: Story) -> None:
    """Fail one commit, and let the next process commit others in its place."""
    story.create()
    story.extend(20, record=True)
    fail_to_extend(story, 3)
    story.kill()
    story.append()
    story.extend(6)
    story.marks = [story.recorder.moment]


def fail_to_extend(story: Story, count: int) -> None:
    """Write rows and a record that are not committed because the disk fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story.engine._format, "sync", _fail)
        with pytest.raises(OSError, match="it failed"):
            story.extend(count, record=True, salt=1)


def _fail(start: int = 0) -> NoReturn:
    raise OSError(errno.EIO, "it failed")


def loaded(story: Story) -> None:
    """Load a newer copy, as `ReplayBuffer.loads` does."""
    story.create()
    story.extend(25, record=True)
    story.storage.reserve(70)
    copy = story.path.parent.parent.parent.with_name("copy")
    with story.case.kind(copy, capacity=60, max_size=story.case.ring) as source:
        manifest = story.storage.manifest
        source.writer.runs.create(story.storage.schema, manifest["runs"], id=manifest["id"])
        for start in range(0, 60, 30):
            source.extend(rows_of(np.arange(start, start + 30)), ids="fresh")
    ring = story.case.ring
    # While a ring is loaded, none of its rows are valid.
    story.begun = max(len(story.salts), 60) + (ring or 0)
    story._head, head = (-1, 60) if ring else (25, 60)
    story.promise([0] * 60)
    story.marks = [story.recorder.moment]
    DiskStorageCheckpointer().loads(story.storage, copy)
    story.marks += [story.recorder.moment + 1]
    story.salts, story.begun = [0] * head, head
    story._keep(head, 25)
    story.extend(5)
    story.close()
    shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


STORIES: dict[str, Callable[[Story], None]] = {
    story.__name__: story
    for story in (
        *(short, growing, after_a_process, after_a_kill),
        *(after_an_error, failing_once, failing_and_killed, loaded),
    )
}


@contextlib.contextmanager
def told(case: str, name: str, folder: Path, durability: Durability = "power") -> Iterator[Story]:
    """Run a story of `STORIES` with one kind of storage."""
    story = Story(CASES[case], folder / f"{case}-{name}", durability)
    with contextlib.closing(story.recorder):
        with story.recorder.recording():
            story.promise()
            STORIES[name](story)
        yield story
        if not story.storage.closed:
            story.close()


@dataclass
class Found:
    """Findings on disks after power cuts."""

    wrong: list[str]
    """Broken promises, one sentence per disk."""
    said: Counter[str]
    """Messages of `verify`, with their counts."""


def after_cuts(
    story: Story, folder: Path, cuts: int, heeds: Syncs = Syncs.ALL, *, least: int = -1
) -> Found:
    """Check disks after this many cuts with ``least`` promised rows. Disks may ignore syncs."""
    found = Found([], Counter())
    for number in range(cuts):
        chance = random.Random(f"{story.path.parts[-4]} {number}")
        promise = story.drawn(chance, least)
        story.recorder.disk(folder / "disk", promise.at, chance, heeds)
        try:
            wrong = _Look(story.case, promise, found.said).at(folder / "disk" / story.place)
        finally:
            shutil.rmtree(folder / "disk")
        if wrong:
            place = f"cut {number}, moment {promise.at} of {story.recorder.moment}"
            found.wrong.append(f"{place}, {promise.head} rows promised: {wrong}")
    return found


@dataclass
class _Look:
    """Opens a storage after a cut: to read, to append, and to read again."""

    case: Case
    promise: Promise
    said: Counter[str]

    def at(self, path: Path) -> str | None:
        """Return the broken promise, or None if all are kept."""
        promise, kind = self.promise, self.case.kind
        nothing = promise.head < 0
        try:
            with kind(path, mode="read") as storage:
                if wrong := wrong_in(storage, promise):
                    return wrong
            return self._verify(path) or self._append(path)
        except (StorageMissing, NotAStorage) as error:
            self.said["no storage"] += 1
            return (
                self._create(path)
                if nothing and promise.waits
                else None
                if nothing
                else f"{error!r}"
            )
        except StorageError as error:
            self.said["another error"] += 1
            return None if nothing and not promise.waits else f"{error!r}"

    def _verify(self, path: Path) -> str | None:
        report = verify(path)
        self.said["sound" if report.sound else "not sound"] += 1
        self.said.update(f"{each.check}: {each.message[:80]}" for each in report.findings)
        # A record may be torn if it was never acknowledged.
        wrong = [str(each) for each in report.findings if each.check != "record"]
        return f"verify says {wrong}" if wrong and self.promise.waits else None

    def _append(self, path: Path) -> str | None:
        promise, kind = self.promise, self.case.kind
        capacity = len(promise.salts) + 40
        with kind(path, mode="append", capacity=capacity) as storage:
            if wrong := wrong_in(storage, promise):
                return f"opened to append: {wrong}"
            start = storage.head
            stop, salts = start + 9, (*promise.salts[:start], *[0] * 9)
            storage.extend(rows_of(np.arange(start, stop)), record=record_of(stop), ids="fresh")
        after = replace(
            promise, head=stop, record=stop, begun=max(promise.begun, stop), salts=salts
        )
        with kind(path, mode="read") as storage:
            wrong = wrong_in(storage, after)
        return f"appended to: {wrong}" if wrong else None

    def _create(self, path: Path) -> str | None:
        try:
            with self.case.create(path, "process") as storage:
                storage.extend(rows_of(np.arange(9)))
        except StorageError as error:
            return f"created again: {error!r}"
        return None


def wrong_in(storage: DiskStorage, promise: Promise) -> str | None:
    """Return the broken promise about the rows or the record, or None."""
    span, head = storage.span, max(promise.head, 0)
    first = max(0, promise.begun - storage.ring) if storage.ring else 0
    if not head <= span.stop <= len(promise.salts) or span.start > max(first, 0):
        return f"{span} is there, expected rows {first} to {head}, up to {len(promise.salts)}"
    numbers = np.array(span, np.int64)
    if len(numbers):
        salts, slots = np.array(promise.salts)[numbers], storage.slots_of(numbers)
        for salt in np.unique(salts).tolist():
            for key, wanted in rows_of(numbers[salts == salt], salt).items():
                if not np.array_equal(storage.column(key)[slots[salts == salt]], wanted):
                    return f"column {key} of {span} is wrong"
    rows, payload = storage.record or (-1, b"")
    if rows < promise.record:
        return f"the record is that of {rows} rows, expected {promise.record}"
    if rows >= 0 and payload != record_of(rows):
        return f"the record of {rows} rows is {payload[:20]!r}"
    return None


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use growth steps and chunks of a few pages, and do not wait for the disk below the tests."""
    monkeypatch.setattr(mapped_space, "_FIRST_ROOM_NBYTES", 2**13)
    monkeypatch.setattr(zarr_metadata, "_KIB", 32)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, os.fstat)


@pytest.mark.timeout(60 + CUTS)
@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("case", CASES)
def test_committed_rows_survive_power_cuts(case: str, name: str, tmp_path: Path) -> None:
    with told(case, name, tmp_path) as story:
        found = after_cuts(story, tmp_path, CUTS // (len(CASES) * len(STORIES)))
    assert not found.wrong, "\n".join(found.wrong)


@pytest.mark.parametrize("case", CASES)
def test_a_closed_storage_is_on_the_disk_whole(case: str, tmp_path: Path) -> None:
    with told(case, "short", tmp_path) as story:
        for number in range(5):
            target = tmp_path / f"disk-{number}"
            story.recorder.disk(target, story.recorder.moment, random.Random(number))
            assert contents(target / story.place.parent) == contents(story.path.parent)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, without lock files and without the inode in a header."""
    files = [file for file in folder.rglob("*") if file.is_file() and "lock" not in file.name]
    found = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    for name, content in found.items():
        if content.startswith(header_bytes(0)[:8]):
            found[name] = content[:200] + content[216:]
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_storage_that_is_being_created(case: str, tmp_path: Path) -> None:
    with told(case, "short", tmp_path) as story:
        created = story.marks[1]
        # The manifest comes last.
        story.moments = {-1: [*range(created), *list(range(created - 2, created)) * 20]}
        found = after_cuts(story, tmp_path, 40)
    assert not found.wrong, "\n".join(found.wrong)


@pytest.mark.parametrize("name", ["failing_once", "failing_and_killed"])
def test_no_record_of_rows_that_were_not_committed(name: str, tmp_path: Path) -> None:
    with told("memmap", name, tmp_path) as story:
        # The head is written, and earlier discarded data may be back on the disk.
        story.moments = {-1: [story.marks[0] - 1]}
        found = after_cuts(story, tmp_path, 40)
    assert not found.wrong, "\n".join(found.wrong)


@pytest.mark.parametrize("case", ["ring", "once ring"])
def test_a_ring_that_is_being_loaded(case: str, tmp_path: Path) -> None:
    with told(case, "loaded", tmp_path) as story:
        story.moments = {-1: list(range(*story.marks))}
        found = after_cuts(story, tmp_path, 40)
    assert not found.wrong, "\n".join(found.wrong)


@pytest.mark.parametrize("kind", [MemmapStorage, H5Storage, ZarrStorage])
def test_a_disk_that_fails_is_told_when_a_storage_is_opened(
    kind: type[DiskStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    with kind(path, capacity=60) as storage:
        storage.extend(rows_of(np.arange(30)), ids="fresh")
    heads, left = [], 0

    def sync(file: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "fdatasync", sync)
    for place in range(1, 100):
        left = place
        try:
            storage = kind(path, mode="append", durability="power")
        except DiskFailed:
            with kind(path, mode="append") as storage:
                heads.append(storage.head)
        else:
            assert left >= 0
            break
    left = 0
    storage.close()
    assert heads == [30] * (place - 1)
    assert place > 5


@pytest.mark.parametrize("case", CASES)
def test_the_cuts_find_what_was_not_synced(case: str, tmp_path: Path) -> None:
    with told(case, "short", tmp_path) as story:
        for heeds in (Syncs.NONE, Syncs.FILES, Syncs.DIRECTORIES):
            found = after_cuts(story, tmp_path, CUTS_OF_CONTROLS, heeds, least=1)
            assert len(found.wrong) > CUTS_OF_CONTROLS // 3, (heeds, found)


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name].once])
def test_the_cuts_find_frames_that_were_not_synced(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FramePools, "sync", lambda self: None)
    with told(case, "short", tmp_path) as story:
        found = after_cuts(story, tmp_path, CUTS_OF_CONTROLS, least=1)
    assert len(found.wrong) > CUTS_OF_CONTROLS // 3, found


@pytest.mark.parametrize("case", CASES)
def test_the_cuts_find_that_nothing_waited(case: str, tmp_path: Path) -> None:
    with told(case, "short", tmp_path, "process") as story:
        found = after_cuts(story, tmp_path, CUTS_OF_CONTROLS, least=1)
    assert len(found.wrong) > CUTS_OF_CONTROLS // 3, found
