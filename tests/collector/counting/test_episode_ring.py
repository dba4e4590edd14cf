"""The log gets the same episodes from a ring that is read later as from immediate logging."""

from __future__ import annotations

import copy
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tallyroll.storage
from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.fast_collect import FastPath
from tallyroll.collector.batches.state import run_state
from tallyroll.collector.counting import episode_log, episode_ring
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.episode_ring import EPISODE, EpisodeRing
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import MemmapStorage, fast_paths

from collect_kit import ByObservation
from traced_code import Interruption, at_checks, traced
from worker_kit import DISABLED, LANES, NEXT, factory

PACKAGE = str(Path(tallyroll.storage.__file__).parents[1])
FRAMES = 1500
needs_compiler = pytest.mark.skipif(compiled() is None, reason="there is no compiler")


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give rings the smallest possible capacity."""
    monkeypatch.setattr(episode_ring, "LEAST_ROOM", 1)


def collector_of(source: str, storage: MemmapStorage, size: int, **options: Any) -> SyncCollector:
    return SyncCollector(
        factory(source, 0, LANES),
        ByObservation(),
        frames_per_batch=size,
        total_frames=FRAMES,
        storage=storage,
        seed=3,
        **options,
    )


def seen(log: EpisodeLog, path: Path) -> Any:
    log.to_csv(path)
    arrays = log.returns.tobytes(), log.lengths.tobytes()
    return log.to_dict(), path.read_bytes(), arrays, [*log], repr(log), log.total, log[-7:]


# --- compared with the slow path ------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("source", "size", "yields", "kept"),
    [
        (DISABLED, LANES, False, None),
        (NEXT, 2 * LANES + 1, True, None),
        (DISABLED, 3, True, 7),
        (NEXT, LANES, False, 7),
    ],
)
def test_the_log_is_the_same_whenever_it_is_read(
    source: str,
    size: int,
    yields: bool,
    kept: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kept is not None:
        monkeypatch.setattr(run_state, "EPISODES_KEPT", kept)
    found = []
    for every, off in ((FRAMES, ()), (6, ()), (1, ("kernel",))):
        read = {}
        with (
            fast_paths.switched_off(*off),
            MemmapStorage(max_size=200) as storage,
            collector_of(source, storage, size) as run,
        ):
            batches = iter(run)
            for call in range(50):
                assert next(batches) is not None if yields and call % 4 else run.collect(size)
                if not call % every:
                    read[call] = run.metrics(5), run.episodes[-3:], len(run.episodes)
            complete = run.ledger.episodes_complete
            found.append((read, seen(run.episodes, tmp_path / "log")))
        assert run.episodes.total == complete > 40
    (_, last), *others = found
    at_once = others[-1][0]
    for read_then, others_last in others:
        assert others_last == last
        assert read_then == {call: at_once[call] for call in read_then}


@needs_compiler
def test_a_ring_that_nobody_empties_is_left_to_the_longer_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[bool] = []
    store = FastPath.store

    def counted(self: FastPath, *given: Any) -> bool:
        object.__setattr__(self, "episodes", SimpleNamespace(take=lambda: None))
        stored.append(store(self, *given))
        return stored[-1]

    monkeypatch.setattr(FastPath, "store", counted)
    with MemmapStorage(max_size=50) as storage, collector_of(DISABLED, storage, LANES) as run:
        while run.collect(LANES):
            pass
    assert 0 < stored.count(False) < stored.count(True)
    with (
        fast_paths.switched_off("kernel"),
        MemmapStorage(max_size=50) as storage,
        collector_of(DISABLED, storage, LANES) as other,
    ):
        while other.collect(LANES):
            pass
    assert [*run.episodes] == [*other.episodes]


@needs_compiler
def test_other_threads_may_read_meanwhile() -> None:
    reads: list[list[Any]] = []
    done = threading.Event()

    def read() -> None:
        while not done.wait(0.0002):
            reads.append([*run.episodes[-20:]])

    with MemmapStorage(max_size=50) as storage, collector_of(DISABLED, storage, LANES) as run:
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            while run.collect(LANES):
                pass
        finally:
            done.set()
            for thread in threads:
                thread.join()
    last = [*run.episodes]
    assert len(last) == run.ledger.episodes_complete
    assert len(reads) > 20
    for each in filter(None, reads):
        stop = last.index(each[-1]) + 1
        assert each == last[max(0, stop - 20) : stop]


# --- the log alone --------------------------------------------------------------------------------


def records(first: int, count: int) -> np.ndarray:
    made = np.zeros(count, EPISODE)
    made["traj_id"] = made["ended_at"] = np.arange(first, first + count)
    return made


def note(ring: EpisodeRing, count: int) -> None:
    """Write `count` further records as the extension does."""
    counts, room = ring.counts, ring.counts.room
    assert counts.noted - counts.taken + count <= room
    for record in records(counts.noted, count):
        ring._records[counts.noted % room] = record
        counts.noted += 1


@given(st.one_of(st.none(), st.integers(0, 5)), st.lists(st.integers(0, 17), max_size=30))
def test_the_last_ones_are_kept(limit: int | None, blocks: list[int]) -> None:
    log, one_by_one, total = EpisodeLog(limit), EpisodeLog(limit), 0
    for block in blocks:
        log.extend(records(total, block), 0)
        for each in range(total, total + block):
            one_by_one.extend(records(each, 1), 0)
        total += block
    ids = log.to_dict()["traj_id"]
    assert ids == one_by_one.to_dict()["traj_id"] == [*range(total)][total - len(ids) :]
    assert log.total == total
    least = total if limit is None else min(limit, total)
    assert least <= len(log) == len(log.returns) == len(log.lengths)
    assert limit is None or len(log) <= max(0, 2 * limit - 1)


@given(st.data())
def test_blocks_and_the_ring_are_in_order(data: st.DataObject) -> None:
    log, wanted = EpisodeLog(), []
    ring, most = log.ring(3), 3
    for _ in range(data.draw(st.integers(1, 25))):
        does = data.draw(st.sampled_from(["note", "extend", "read", "larger"]))
        if does == "note":
            count = data.draw(st.integers(0, most))
            if ring.counts.noted - ring.counts.taken + count > ring.counts.room:
                log.take()
            wanted += range(ring.counts.noted, ring.counts.noted + count)
            note(ring, count)
        elif does == "extend":
            log.extend(records(5, 2), 1000)
            wanted += 1005, 1006
        elif does == "read":
            assert log.to_dict()["ended_at"] == wanted
        else:
            most = data.draw(st.integers(1, 9))
            again = log.ring(most)
            assert (again is ring) is (2 * most <= ring.counts.room)
            ring = again
    assert log.to_dict()["ended_at"] == wanted
    assert log.total == len(wanted)


def taken_with(what: str, place: int) -> int:
    """Take 9 episodes with an action at one place in between.

    Return the number of places.
    """
    count = 0
    log = EpisodeLog(4)
    ring = log.ring(3)
    for noted in (5, 4):  # the second batch of records wraps around the end of the ring
        log.take()
        note(ring, noted)

    def look(_: Any) -> None:
        nonlocal count
        count += 1
        if count != place:
            return
        if what == "raise":
            raise Interruption
        log.take()
        for _ in range(3 if what == "more" else 0):
            note(ring, 6)
            log.take()

    places = traced if what == "raise" else at_checks  # handlers can only run there
    with suppress(Interruption), places(PACKAGE, look):
        log.take()
    total = 27 if what == "more" and 0 < place <= count else 9
    assert log.total == total
    ids = log.to_dict()["traj_id"]
    assert ids == [*range(total - len(ids), total)]
    assert len(ids) == 4 + total % 4
    assert ring.counts.taken == ring.counts.noted == total
    return count


@pytest.mark.parametrize("what", ["read", "more", "raise"])
def test_a_handler_may_come_anywhere(what: str) -> None:
    """The handler reads the log, or collects more episodes and reads them.

    In the third case, any instruction raises.
    """
    places = taken_with(what, 0)
    assert places > (150 if what == "raise" else 15)
    for place in range(1, places + 1):
        taken_with(what, place)


def test_a_copy_has_what_was_there_and_gets_no_more() -> None:
    log = EpisodeLog(50)
    ring = log.ring(3)
    note(ring, 5)
    copies = [copy.deepcopy(log), pickle.loads(pickle.dumps(log)), copy.copy(log)]
    before = log.to_dict()
    note(ring, 1)
    log.extend(records(0, 1), 0)
    for each in copies:
        assert each.to_dict() == before
        assert each.total == 5
        each.extend(records(9, 2), 0)
        assert len(each) == len(log) == 7
    assert log.to_dict()["traj_id"] == [0, 1, 2, 3, 4, 5, 0]
    assert episode_log.EPISODE.itemsize == 53
