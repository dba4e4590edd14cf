"""Test central policies: the driver acts for many actors' lanes, with exact counts."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from loopback_kit import (
    LANES,
    assert_whole,
    inside,
    nothing_left_behind,
    own_ray,
    run_inside,
)

from tallyroll.collector import MultiprocessCollector, RayCollector
from tallyroll.collector.workers.central import CentralPolicy
from tallyroll.storage import open_storage, verify

from collect_kit import joined
from worker_faults_kit import Faults, FaultyPolicy
from worker_faults_kit import factories as faulty
from worker_kit import (
    NEXT,
    RecordingPolicy,
    assert_alike,
    collect_all,
    factories,
    sync_collector,
)

__all__ = ["nothing_left_behind"]

KILLS = int(os.environ.get("TALLYROLL_RAY_KILLS", "3"))
RUN: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 200, "seed": 3}
CENTRAL: dict[str, Any] = {**RUN, "policy_placement": "central"}


@pytest.mark.timeout(1600)
def test_in_a_network_namespace() -> None:
    run_inside(__file__, "in_step")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray():
        yield


@inside
@pytest.mark.parametrize(("source", "options"), [(NEXT, {}), ("torch", {"init_random_frames": 40})])
def test_in_step_rows_are_those_of_one_process(source: str, options: Any) -> None:
    one = collect_all(sync_collector(source, RecordingPolicy(), LANES, **RUN, **options))
    made = factories(source, 2, LANES)
    many = collect_all(RayCollector(made, RecordingPolicy(), spares=0, **CENTRAL, **options))
    assert_alike(one, many)
    if not options:
        central: Any = many.collector._worker_pool.central
        assert central.calls * LANES == many.collector.ledger.slots


Acts = Callable[[int], None]
"""Hook that receives the number of the coming policy call."""


def before_acting(monkeypatch: pytest.MonkeyPatch, do: Acts) -> None:
    choose, calls = CentralPolicy.choose, [0]

    def choosing(self: CentralPolicy, wanted: Any) -> Any:
        calls[0] += 1
        do(calls[0])
        return choose(self, wanted)

    monkeypatch.setattr(CentralPolicy, "choose", choosing)


def central(folder: Path, mode: str, total: int, **options: Any) -> RayCollector:
    faults = Faults(folder)
    made = faulty(faults, LANES, 3)
    given = {**CENTRAL, "total_frames": total, "storage": folder / "rows", **options}
    given |= {"on_worker_death": "respawn", "max_respawns": 1000, "start_timeout": 600}
    return RayCollector(made, FaultyPolicy(faults), mode=mode, **given)  # type: ignore[arg-type]


@inside
@pytest.mark.timeout(120 + 20 * KILLS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_actors_that_wait_for_actions_are_killed(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, killed = random.Random(KILLS), [0]

    def kill(call: int) -> None:
        if not call % 10 and killed[0] == collector.ledger.respawned < KILLS:
            os.kill(draws.choice(collector.worker_pids), signal.SIGKILL)
            killed[0] += 1

    with central(tmp_path, mode, -1, spares=1) as collector:
        before_acting(monkeypatch, kill)
        for _ in collector:
            if collector.ledger.stored >= 500 and collector.ledger.respawned >= KILLS:
                break
        collector.ledger.check()
        ledger = collector.ledger
    assert killed == [KILLS] == [ledger.respawned]
    assert_whole(tmp_path, ledger.stored, mode)


@inside
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_actor_that_is_frozen_while_it_waits_is_replaced(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In async mode, no other actor waits for it."""
    gaps, frozen = [time.monotonic()], list[int]()

    def freeze(call: int) -> None:
        gaps.append(time.monotonic())
        if call == 30:
            frozen.append(collector.worker_pids[0])
            os.kill(frozen[0], signal.SIGSTOP)

    with central(tmp_path, mode, 1500, spares=1, heartbeat=0.3) as collector:
        before_acting(monkeypatch, freeze)
        try:
            assert sum(len(batch) for batch in collector) == 1500
        finally:
            with suppress(ProcessLookupError):
                os.kill(frozen[0], signal.SIGKILL)
        collector.ledger.check()
        assert collector.ledger.respawned == 1
    assert_whole(tmp_path, 1500, mode)
    if mode == "async":
        after = gaps[31:]
        stalls = [later - before for before, later in pairwise(after)]
        assert max(stalls) < 2


@inside
@pytest.mark.timeout(600)
def test_a_run_moves_between_places(tmp_path: Path) -> None:
    run: dict[str, Any] = {**RUN, "storage": tmp_path / "rows", "num_workers": 2}
    policy = RecordingPolicy()
    made = factories(NEXT, 2, LANES)
    run.pop("num_workers")
    with RayCollector(made, policy, policy_placement="central", spares=0, **run) as collector:
        rows = joined(list(collector))
    run |= {"resume": True, "total_frames": 300}
    with MultiprocessCollector(made, policy, **run) as collector:
        list(collector)
    run["total_frames"] = 401
    with RayCollector(
        made, policy, policy_placement="central", mode="async", spares=0, **run
    ) as collector:
        list(collector)
    with open_storage(tmp_path / "rows") as storage:
        assert (len(rows), len(storage)) == (200, 401)
        placed = [each["call"].get("policy_placement", "local") for each in storage.runs]
    assert placed == ["central", "local", "central"]
    assert verify(tmp_path / "rows").sound
