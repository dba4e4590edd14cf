"""Openings of one of several policies: exactly the first N transitions are random."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_kit import GroupsEnv, Told, check_groups, drawn_of, in_slot_order, told, version
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from tallyroll.collector import (
    OnePolicy,
    Supervision,
    SyncCollector,
    load_checkpoint,
    save_checkpoint,
)
from tallyroll.collector.errors import StateError
from tallyroll.storage import MemmapStorage, open_storage, verify

from collect_kit import joined
from oracles import check_rows
from worker_kit import (
    DISABLED,
    NEXT,
    Versioned,
    in_threads,
    lanes_of_workers,
    rows_until,
    start,
    sync_collector,
    worker_collector,
)
from worker_kit import LENGTHS as LENGTHS_BY_LANE

LENGTHS = [[3, 1, 4], [2, 5], [6]]
SEED = 3


def policies(red: int = 7, blue: int = 0) -> dict[str, Any]:
    """Return policies of both groups, each with an opening."""
    return {
        "red": OnePolicy(told("red"), init_random_frames=red),
        "blue": OnePolicy(told("blue"), init_random_frames=blue),
    }


def by_group(workers: int, given: Any, mode: Any = "sync", **more: Any) -> Any:
    kwargs = {"frames_per_batch": 8, "total_frames": 48, "seed": SEED, **more}
    if not workers:
        return SyncCollector(GroupsEnv(3, LENGTHS), given, **kwargs)
    creates = [
        partial(GroupsEnv, lanes, LENGTHS, first_lane=first)
        for first, lanes in lanes_of_workers(3, workers)
    ]
    return start(creates, given, mode=mode, **kwargs)


def rows_of_groups(collector: Any, before: Sequence[TensorDictBase] = ()) -> TensorDict:
    """Return the rows of an endless run of `policies(20, 33)` until shortly after its openings.

    The openings also count the rows of the batches `before`.
    """
    drawn = sum(drawn_of(batch)["blue"] for batch in before)

    def opened(batch: TensorDictBase) -> bool:
        nonlocal drawn
        drawn += drawn_of(batch)["blue"]
        return drawn >= 33

    return rows_until(collector, opened)


@pytest.fixture
def threads() -> Iterator[None]:
    with in_threads():
        yield


@pytest.mark.parametrize(("red", "blue"), [(7, 0), (4, 11), (6, 6), (60, 1)])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_group_begins_at_random_alone(workers: int, red: int, blue: int, threads: None) -> None:
    with by_group(workers, policies(red, blue)) as collector:
        rows = joined([batch.clone() for batch in collector])
        ledger = collector.ledger
    check_groups(rows)
    order = in_slot_order(rows)
    for group, count in (("red", red), ("blue", blue)):
        drawn = (version(rows, group)[order] == -1).tolist()
        assert drawn == [True] * min(count, 48) + [False] * (48 - min(count, 48)), group
    assert ledger.random == min(red, blue)
    assert len(set(rows["red", "action"][version(rows, "red") == -1].flatten().tolist())) == 3


def test_draws_of_a_group_are_the_same_for_any_workers_and_other_policies(threads: None) -> None:
    def drawn(workers: int, given: Any, **more: Any) -> torch.Tensor:
        with by_group(workers, given, **more) as collector:
            rows = joined([batch.clone() for batch in collector])
        return rows["red", "action"][in_slot_order(rows)][:14]

    alone = drawn(0, policies(14))
    assert torch.equal(alone, drawn(3, policies(14)))
    assert torch.equal(alone, drawn(0, policies(14, 22)))
    assert torch.equal(alone, drawn(0, {**policies(14), "blue": None}))
    assert torch.equal(alone, drawn(0, policies(14), surplus="discard", frames_per_batch=6))


def test_shards_of_a_run_with_groups_are_the_one_run(tmp_path: Path) -> None:
    def rows(shard: str | None) -> TensorDictBase:
        first = 0 if shard is None else int(shard[0])
        path = tmp_path / f"rows-{shard and first}"

        def make(num_envs: int) -> GroupsEnv:
            return GroupsEnv(num_envs, LENGTHS, first_lane=first)

        with SyncCollector(
            make,
            policies(14, 4),
            num_envs=3,
            frames_per_batch=8,
            total_frames=48,
            seed=SEED,
            shard=shard,
            storage=path,
        ) as collector:
            for _ in collector:  # its batches end elsewhere
                pass
        with open_storage(path) as storage:
            return storage[:]

    one, parts = rows(None), [rows(f"{at}/3") for at in range(3)]
    assert [drawn_of(part) for part in parts] == [
        {"red": red, "blue": blue} for red, blue in ((5, 2), (5, 1), (4, 1))
    ]
    lane = one["collector", "lane"]
    for at, part in enumerate(parts):
        for key, value in part.items(True, True):
            assert torch.equal(value, one[lane == at][key]), (at, key)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_openings_of_groups_are_exact_where_no_worker_waits(workers: int, threads: None) -> None:
    with by_group(workers, policies(20, 33), "async", total_frames=-1) as collector:
        rows = rows_of_groups(collector)
    check_groups(rows)
    assert drawn_of(rows) == {"red": 20, "blue": 33}


def by_lane(workers: int, source: str, mode: Any, given: Any = None, **more: Any) -> Any:
    opened = given or [
        ([1, 4], OnePolicy(Versioned(), init_random_frames=17)),
        ([0], Versioned()),
        ([2, 3], OnePolicy(Versioned(), init_random_frames=31)),
    ]
    kwargs = {"frames_per_batch": 7, "total_frames": 140, "seed": SEED, **more}
    return worker_collector(source, workers, opened, mode=mode, **kwargs)


def drawn_by_lane(rows: TensorDictBase) -> list[int]:
    at_random = rows["collector", "policy_version"] == -1
    for lane in range(5):
        own = at_random[rows["collector", "lane"] == lane].int()
        assert not (own.diff() > 0).any(), f"lane {lane}: at random after its policy acted"
    return [int(at_random[rows["collector", "policy_id"] == at].sum()) for at in range(3)]


@pytest.mark.parametrize(
    ("workers", "source", "surplus"),
    [(1, DISABLED, "carry"), (3, DISABLED, "never_step"), (3, NEXT, "carry")],
)
def test_openings_of_lanes_are_exact_where_no_worker_waits(
    workers: int, source: str, surplus: Any, threads: None
) -> None:
    with by_lane(workers, source, "async", surplus=surplus, total_frames=-1) as collector:
        rows = rows_until(collector, lambda _: collector.ledger.random == 48)
        assert collector.ledger.random == 48
    check_rows(rows, LENGTHS_BY_LANE, ends="mixed")
    assert drawn_by_lane(rows) == [17, 0, 31]


@pytest.mark.parametrize("kind", ["lanes", "groups"])
@pytest.mark.parametrize("batches", [1, 3, 8])
def test_what_came_and_was_in_no_batch_is_drawn_again(
    kind: str, batches: int, threads: None
) -> None:
    """The workers run ahead when the state is saved."""

    def make() -> Any:
        if kind == "lanes":
            return by_lane(3, NEXT, "async", total_frames=-1)
        return by_group(3, policies(20, 33), "async", total_frames=-1, frames_per_batch=7)

    with make() as collector:
        before = [each.clone() for each in islice(collector, batches)]
        state = collector.state_dict()
    with make() as collector:
        collector.load_state_dict(state)
        if kind == "lanes":
            after = rows_until(collector, lambda _: collector.ledger.random == 48)
        else:
            after = rows_of_groups(collector, before)
    rows = torch.cat([joined(before), after])
    if kind == "lanes":
        assert drawn_by_lane(rows) == [17, 0, 31]
    else:
        assert drawn_of(rows) == {"red": 20, "blue": 33}


@pytest.mark.parametrize(("workers", "mode"), [(0, "sync"), (2, "sync"), (2, "async")])
def test_a_new_seed_begins_no_opening_again(workers: int, mode: Any, threads: None) -> None:
    with by_group(workers, policies(20, 33), mode, total_frames=-1) as collector:
        batches, before = iter(collector), []
        for seed, count in enumerate((1, 2)):
            before += [batch.clone() for batch in islice(batches, count)]
            collector.set_seed(seed)
        rows = torch.cat([joined(before), rows_of_groups(batches, before)])
    assert drawn_of(rows) == {"red": 20, "blue": 33}


@pytest.mark.parametrize(
    ("workers", "mode", "rows"),
    [
        (0, "sync", "rewind"),
        (0, "sync", "resume"),
        (3, "sync", "keep"),
        (3, "async", "rewind"),
        (3, "async", "keep"),
        (3, "async", "resume"),
    ],
)
def test_storages_and_checkpoints_go_on_within_an_opening(
    workers: int, mode: Any, rows: Any, tmp_path: Path, threads: None
) -> None:
    path, saved = tmp_path / "rows", tmp_path / "saved"

    def make(**more: Any) -> Any:
        return by_group(workers, policies(20, 33), mode, total_frames=-1, storage=path, **more)

    with make() as collector:
        before = [batch.clone() for batch in islice(collector, 1)]
        save_checkpoint(saved, collector=collector)
        before += [batch.clone() for batch in islice(collector, 1)]
    if rows == "rewind":
        del before[1:]
    with make(resume=True) as collector:
        if rows != "resume":
            load_checkpoint(saved, collector=collector, rows=rows)
        after = rows_of_groups(collector, before)
    with open_storage(path) as storage:
        found = storage[:]
        told = storage.runs[0]["call"]["policies"]
    assert len(found) == 8 * len(before) + len(after)
    assert drawn_of(found) == {"red": 20, "blue": 33}
    assert told[0] == {"id": "red", "policy": "TensorDictModule", "init_random_frames": 20}
    assert not verify(path).findings


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["lanes", "groups"])
def test_what_a_killed_worker_took_is_drawn_again(kind: str, mode: Any) -> None:
    given = {"supervision": Supervision(on_worker_death="respawn", max_respawns=3)}
    # workers still have work when they are killed
    given |= {"total_frames": 1100, "frames_per_batch": 11}
    lanes = kind == "lanes"
    make = (
        partial(by_lane, 2, NEXT, mode) if lanes else partial(by_group, 2, policies(70, 33), mode)
    )
    rows = []
    with make(**given) as collector:
        for number, batch in enumerate(collector):
            rows.append(batch.clone())
            # kill each worker once, because a killed one may not be replaced yet
            if number in (1, 3):
                os.kill(collector.worker_pids[number // 2], signal.SIGKILL)
        assert collector.ledger.respawned
    if lanes:
        assert drawn_by_lane(joined(rows)) == [17, 0, 31]
    else:
        assert drawn_of(joined(rows)) == {"red": 70, "blue": 33}


@pytest.mark.parametrize("frames", [2**40, 2**70])
def test_an_opening_may_be_longer_than_the_run(frames: int, threads: None) -> None:
    for mode in ("sync", "async"):
        with by_group(2, policies(frames, 3), mode) as collector:
            rows = joined([batch.clone() for batch in collector])
        assert drawn_of(rows) == {"red": 48, "blue": 3}
        with by_group(2, policies(0, 0), mode, init_random_frames=frames) as collector:
            assert sum(map(len, collector)) == collector.ledger.random == 48


def test_a_ring_that_lost_rows_of_an_opening(tmp_path: Path) -> None:
    """The numbers are known by group, or by lane for a single policy.

    Otherwise resuming is refused.
    """

    def run(name: str, make: Any, total: int) -> Any:
        mode: Any = "append" if (tmp_path / name).exists() else "create"
        with (
            MemmapStorage(tmp_path / name, max_size=20, mode=mode) as ring,
            make(storage=ring, resume=mode == "append", total_frames=total) as collector,
        ):
            rows = [batch.clone() for batch in collector]
        return joined(rows)

    red = partial(by_group, 0, policies(40, 52))
    first, second = run("groups", red, 32), run("groups", red, 80)
    assert drawn_of(first) == {"red": 32, "blue": 32}
    assert drawn_of(second) == {"red": 8, "blue": 20}
    both: Any = [
        ([0, 1], OnePolicy(Versioned(), init_random_frames=30)),
        ("rest", OnePolicy(Versioned(), init_random_frames=60)),
    ]
    two = partial(by_lane, 1, DISABLED, "sync", both)
    with in_threads():
        run("known", two, 84)
        rest = run("known", two, 140)
        assert int((rest["collector", "policy_version"] == -1).sum()) == 60 - 50
        run("unknown", two, 35)
        with pytest.raises(
            StateError, match=r"of the policies \[0, 1\] is unknown, because the ring"
        ):
            run("unknown", two, 140)


class ActionContext(Told):
    """Policy of blue that writes only actions, like random ones."""

    def __init__(self) -> None:
        super().__init__("blue")

    def forward(self, observation: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(observation)[0]


def test_openings_count_what_each_policy_drew(tmp_path: Path) -> None:
    """The counts exclude draws of others in a lane, and policies that are always random."""

    def run(given: Any, total: int, **ring: Any) -> Any:
        mode: Any = "append" if path.exists() else "create"
        with (
            MemmapStorage(path, mode=mode, **ring) as storage,
            sync_collector(DISABLED, given, storage=storage, resume="auto", **budget) as collector,
        ):
            collector.collect(total)
            return storage[:] if not ring else None

    path, budget = tmp_path / "lanes", {"frames_per_batch": 7, "total_frames": 140}
    first, other = OnePolicy(Versioned(), init_random_frames=30), Versioned()
    run([([0, 3], first), ("rest", None)], 35)  # 14 rows of the first policy
    second = OnePolicy(other, init_random_frames=25)
    rows = run([([0, 1], first), ("rest", second)], 105)
    random = rows["collector", "policy_version"] == -1
    found = [random & (rows["collector", "policy_id"] == each) for each in range(2)]
    assert [int(each.sum()) for each in found] == [30, 21 + 25]
    path = tmp_path / "groups"
    blue = partial(by_group, 0, storage=path, resume="auto")
    with blue({"red": told("red"), "blue": None}, total_frames=16) as collector:
        list(collector)
    acting = TensorDictModule(ActionContext(), in_keys=["observation"], out_keys=["action"])
    opened = {"red": told("red"), "blue": OnePolicy(acting, init_random_frames=11)}
    with blue(opened, total_frames=48) as collector:
        assert drawn_of(joined([each.clone() for each in collector]))["blue"] == 11
    path = tmp_path / "ring"
    run([([0, 3], None), ("rest", first)], 35, max_size=20)
    with pytest.raises(StateError, match=r"of the policies \[1\] is unknown, because the ring"):
        run([([0, 3], other), ("rest", first)], 35, max_size=20)
