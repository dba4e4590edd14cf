"""Test kills of a process that calls `collect(n)`, at any moment: committed rows are complete.

``TALLYROLL_KILLS`` sets the number of kills for each kind of run, 8 by default.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.native import kernel as steps
from tallyroll.collector.native import slot_rows
from tallyroll.storage import MemmapStorage, fast_paths, open_storage, verify
from tallyroll.storage.engine import columns, kernel
from tallyroll.storage.engine.columns import IndexedRows
from tallyroll.storage.engine.commit_engine import Engine
from tallyroll.storage.engine.writer_check import WritePermission
from tallyroll.storage.files.commit_header import Header

from collect_kit import ByObservation
from killed_storages_kit import Told, forked, in_a_process, killed, wait_until
from oracles import check_row, check_rows, make_oracle_vec
from random_runs import flat

KILLS = int(os.environ.get("TALLYROLL_KILLS", "8"))
LENGTHS = [[3, 1, 4], [1, 1, 2], [5], [2, 9]]
RING = 48


def collector_of(storage: MemmapStorage, lanes: int, mode: str, **options: Any) -> SyncCollector:
    env = make_oracle_vec(lanes, LENGTHS, mode=AutoresetMode[mode])
    return SyncCollector(
        GymnasiumVectorEnv(env),
        ByObservation(),
        frames_per_batch=lanes,
        total_frames=10**6,
        storage=storage,
        seed=0,
        **options,
    )


def collect_for_ever(path: Path, ring: int | None, lanes: int, mode: str, told: Told) -> None:
    """Collect one step of all lanes per call, sometimes more, or a batch."""
    torch.set_num_threads(1)
    with MemmapStorage(path, max_size=ring) as storage:
        collector = collector_of(storage, lanes, mode)
        batches = iter(collector)
        told.head = 0
        for call in count():
            if call % 7 == 6:
                next(batches)
            else:
                collector.collect(lanes if call % 5 else 3 * lanes + 1)
            told.head = collector.ledger.stored


def judge(path: Path, lanes: int, mode: str, told: int) -> int:
    """Check that committed rows are complete and in order, and that the run can be resumed."""
    with open_storage(path) as storage:
        head, span = storage.head, storage.span
        assert head >= told
        assert len(storage) == len(span)
        if span:
            rows = flat(storage.get(torch.arange(len(span))).clone())
            check_rows(rows, LENGTHS, from_start=span.start == 0)
    report = verify(path)
    assert report.sound, report.findings
    with MemmapStorage(path, mode="append") as storage:
        collector = collector_of(storage, lanes, mode, resume=True)
        assert collector.ledger.stored == head
        collector.ledger.check()
        assert collector.collect(3 * lanes) == 3 * lanes
        assert storage.head == head + 3 * lanes
        collector.shutdown()
    assert verify(path).sound
    return head


def killed_at_random(folder: str, ring: int | None, lanes: int, mode: str, kills: int) -> list[int]:
    heads = []
    for seed in range(kills):
        path, told = Path(folder, str(seed)), Told()
        told.head = -1
        child = forked(lambda path=path, told=told: collect_for_ever(path, ring, lanes, mode, told))
        # Every second process is killed after the ring has begun to overwrite.
        least = RING if seed % 2 else 0
        wait_until(lambda told=told, least=least: told.head > least)
        time.sleep(random.Random(seed).uniform(0.0, 0.01))
        killed(child)
        heads.append(judge(path, lanes, mode, told.head))
    return heads


@pytest.mark.parametrize(
    ("ring", "lanes", "mode"),
    [(RING, 1, "DISABLED"), (RING, 8, "NEXT_STEP"), (None, 8, "DISABLED"), (RING, 4, "SAME_STEP")],
)
def test_killed_at_any_moment(ring: int | None, lanes: int, mode: str, tmp_path: Path) -> None:
    heads = in_a_process(
        killed_at_random, str(tmp_path), ring, lanes, mode, KILLS, seconds=60 + KILLS
    )
    assert len(heads) == KILLS
    assert max(heads) > RING


# --- at each step of a commit ---------------------------------------------------------------------

POINTS: list[tuple[Any, str]] = [
    (WritePermission, "look"),
    (Engine, "_reserve"),
    (IndexedRows, "copy_to"),
    (Engine, "_commit"),
    (Header, "write_record"),
    (Engine, "append"),
]
"""Functions involved in a commit: a kill comes before and after each."""


def kill_around(owner: Any, name: str, behind: bool, calls: int) -> Callable[..., Any]:
    original, left = getattr(owner, name), [calls]

    def called(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not behind and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        value = original(*args, **kwargs)
        if behind and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    return called


def killed_at_each_step(folder: str) -> int:
    trials = 0
    for owner, name in POINTS:
        for behind in (False, True):
            for calls in (1, 5, 23):
                path, told = Path(folder, str(trials)), Told()
                trials += 1

                def act(
                    path: Path = path,
                    told: Told = told,
                    owner: Any = owner,
                    name: str = name,
                    how: tuple[bool, int] = (behind, calls),
                ) -> None:
                    step = patch.object(owner, name, kill_around(owner, name, *how))
                    with fast_paths.switched_off("kernel"), step:
                        collect_for_ever(path, RING, 4, "DISABLED", told)

                _, status = os.waitpid(forked(act), 0)
                assert os.WIFSIGNALED(status), (name, behind, calls)
                judge(path, 4, "DISABLED", told.head)
    return trials


@pytest.mark.slow
def test_killed_at_each_step_of_a_commit(tmp_path: Path) -> None:
    assert in_a_process(killed_at_each_step, str(tmp_path), seconds=110) == 6 * len(POINTS)


PLACES = ["reserve", "head", "record", *range(0, 33, 4)]
"""Places to which a commit in one call writes: words of the header, and columns by their words."""


class Fatal:
    """Both extensions, with an invalid address at one place of a commit. It kills the process."""

    def __init__(self, way: str, place: str | int, calls: int) -> None:
        self._way, self._place, self._left = way, place, calls
        self._rows: Any = kernel.compiled()
        self._slots: Any = steps.compiled()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots if hasattr(self._slots, name) else self._rows, name)

    def commit_rows(self, table: bytes, *args: Any) -> bool:
        table, header = self._spoilt("commit_rows", table, args[3])
        done: bool = self._rows.commit_rows(table, *args[:3], header, *args[4:])
        return done

    def store_slots(self, plan: tuple[Any, ...], *args: Any) -> int:
        columns, header = self._spoilt("store_slots", *plan[3:5])
        stored: int = self._slots.store_slots((*plan[:3], columns, header, *plan[5:]), *args)
        return stored

    def _spoilt(self, way: str, columns: bytes, header: bytes) -> tuple[bytes, bytes]:
        self._left -= way == self._way
        if self._left or way != self._way:
            return columns, header
        words, places = (np.frombuffer(each, np.int64).copy() for each in (columns, header))
        if isinstance(self._place, int):
            words[self._place // 3 * 3 % len(words)] = 16
        else:
            at = ["reserve", "head", "record"].index(self._place)
            places[at : None if self._place == "record" else at + 1] = 16
        return words.tobytes(), places.tobytes()


def killed_within_one_call(folder: str) -> int:
    trials = 0
    for way, place in product(("commit_rows", "store_slots"), PLACES):
        for calls, mode in ((1, "NEXT_STEP"), (5, "DISABLED"), (23, "NEXT_STEP")):
            path, told, fatal = Path(folder, str(trials)), Told(), Fatal(way, place, calls)
            trials += 1

            def act(
                path: Path = path,
                told: Told = told,
                fatal: Fatal = fatal,
                how: tuple[str, str] = (way, mode),
            ) -> None:
                faulthandler.disable()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                off = ["fast-collect"] if how[0] == "commit_rows" else []
                mode = how[1]
                with (
                    patch.object(columns, "compiled", lambda: fatal),
                    patch.object(slot_rows, "compiled", lambda: fatal),
                    fast_paths.switched_off(*off),
                ):
                    collect_for_ever(path, RING, 4, mode, told)

            _, status = os.waitpid(forked(act), 0)
            assert os.WIFSIGNALED(status), (way, place, calls)
            assert os.WTERMSIG(status) == signal.SIGSEGV, (place, calls)
            judge(path, 4, mode, told.head)
    return trials


@pytest.mark.slow
@pytest.mark.skipif(kernel.compiled() is None, reason="commits in one call are the extension's")
def test_killed_within_a_commit_in_one_call(tmp_path: Path) -> None:
    done = in_a_process(killed_within_one_call, str(tmp_path), seconds=110)
    assert done == 2 * 3 * len(PLACES)


# --- concurrent readers ---------------------------------------------------------------------------


def read_beside(folder: str) -> tuple[int, int]:
    """Read a ring, row by row, while another process collects into it."""
    path, told = Path(folder, "ring"), Told()
    told.head = -1
    child = forked(lambda: collect_for_ever(path, RING, 4, "DISABLED", told))
    wait_until(lambda: told.head > RING)
    looked, first = 0, told.head
    try:
        with open_storage(path) as reader:
            rng, until = np.random.default_rng(0), time.monotonic() + 3
            while time.monotonic() < until:
                rows = reader.get(torch.from_numpy(rng.integers(0, RING - 16, 8)))
                for row in rows:
                    check_row(row, LENGTHS)
                looked += len(rows)
    finally:
        killed(child)
    return looked, told.head - first


def test_readers_beside_it_see_whole_rows_only(tmp_path: Path) -> None:
    looked, made = in_a_process(read_beside, str(tmp_path), seconds=60)
    assert looked > 500
    assert made > 20 * RING
