"""A budget of agent transitions ends with the first row that reaches it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from groups_kit import GroupsEnv, alive
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDictBase

from tallyroll.collector import Ledger, SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.counting.ledger import Budget
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.storage import MemmapStorage, open_storage, verify

from agents_kit import AGENTS, RED, AgentsEnv
from collect_kit import joined
from oracles import length_of
from worker_kit import in_threads, lanes_of_workers, start

LENGTHS = [[3, 1, 4], [2, 5], [6]]
UNIT: dict[str, Any] = {"budget_unit": "agent_transitions", "seed": 3}


def agents_of(lane: int, row: int) -> int:
    """Return the number of acting agents in a lane's row.

    Those are the live agents of red, and blue.
    """
    episode = 0
    while row >= length_of(LENGTHS, lane, episode):
        row -= length_of(LENGTHS, lane, episode)
        episode += 1
    return sum(alive(lane, episode, row)) + 1


def expected(total: int, lanes: int = 3) -> tuple[int, int]:
    """Return the number of rows that reach the budget, and their agent transitions."""
    rows = counted = 0
    while counted < total:
        counted += agents_of(rows % lanes, rows // lanes)
        rows += 1
    return rows, counted


def env(lanes: int = 3, first: int = 0) -> GroupsEnv:
    return GroupsEnv(lanes, LENGTHS, first_lane=first)


def acted(rows: TensorDictBase) -> int:
    return int(rows["red", "mask"].sum()) + len(rows)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(1, 120))
def test_asking_again_finds_the_first_row_that_reaches_the_budget(
    agents: list[int], total: int
) -> None:
    agents = [*agents, *[1] * total]
    budget, rows, counted = Budget(total, agents=5), 0, 0
    while ask := budget.remaining(counted):
        assert budget.batch(counted, 7) == 7
        taken = agents[rows : rows + ask]
        assert counted + sum(taken[:-1]) < total, "one row too many was asked for"
        rows, counted = rows + ask, counted + sum(taken)
    assert budget.batch(counted, 7) == 0
    assert sum(agents[:rows]) == counted >= total > sum(agents[: rows - 1])


@pytest.mark.parametrize("total", [1, 2, 59, 60, 61, 62, 63, 150])
def test_a_run_ends_with_that_row(total: int, tmp_path: Path) -> None:
    rows, counted = expected(total)
    for surplus in ("carry", "discard"):
        path = tmp_path / surplus
        with SyncCollector(
            env(),
            frames_per_batch=9,
            total_frames=total,
            surplus=surplus,  # type: ignore[arg-type]
            storage=path,
            **UNIT,
        ) as collector:
            batches = [batch.clone() for batch in collector]
            ledger, metrics = collector.ledger, collector.metrics()
            with pytest.raises(TypeError, match="has no length"):
                len(collector)
        assert [len(batch) for batch in batches[:-1]] == [9] * (len(batches) - 1)
        found = joined(batches)
        assert acted(found) == ledger.agent_transitions
        if surplus == "carry":
            assert (len(found), ledger.agent_transitions) == (rows, counted)
        ledger.check()
        assert ledger.agent_surplus == ledger.agent_transitions - total < 4
        assert metrics["agent_surplus"] == ledger.agent_surplus
        assert ledger.as_dict()["agent_budget"] == total
        with open_storage(path) as storage:
            assert storage.runs[0]["call"]["budget_unit"] == "agent_transitions"
    assert not verify(path).findings


@pytest.mark.parametrize("step", [1, 4, 50])
def test_collect_ends_with_that_row(step: int, tmp_path: Path) -> None:
    with SyncCollector(
        env(), frames_per_batch=9, total_frames=101, storage=tmp_path / "rows", **UNIT
    ) as collector:
        calls = []
        while made := collector.collect(step):
            calls.append(made)
        assert (sum(calls), collector.ledger.agent_transitions) == expected(101)
        assert set(calls[:-1]) <= {step}


@pytest.mark.parametrize(("workers", "mode"), [(1, "sync"), (3, "sync"), (2, "async")])
def test_workers_end_with_that_row(workers: int, mode: Any) -> None:
    with in_threads():
        creates = [partial(env, lanes, first) for first, lanes in lanes_of_workers(3, workers)]
        kwargs = {"frames_per_batch": 9, "total_frames": 101, "mode": mode, **UNIT}
        with start(creates, **kwargs) as collector:
            found = joined([batch.clone() for batch in collector])
        ledger = collector.ledger
    ledger.check()
    assert acted(found) == ledger.agent_transitions >= 101 > acted(found) - 4
    if mode == "sync":
        assert (len(found), ledger.agent_transitions) == expected(101)
    else:
        assert ledger.executed == len(found) + ledger.discarded


@pytest.mark.parametrize("ring", [False, True])
def test_a_resumed_run_is_exact(ring: bool, tmp_path: Path) -> None:
    """The record of the last commit may be older than the rows of a storage."""
    path = tmp_path / "rows"

    def run(total: int, batches: int | None, *, resume: bool) -> tuple[Ledger, int, Any]:
        mode: Any = "append" if resume else "create"
        with (
            MemmapStorage(path, max_size=14 if ring else None, mode=mode) as storage,
            SyncCollector(
                env(),
                frames_per_batch=9,
                total_frames=total,
                storage=storage,
                resume=resume,
                **UNIT,
            ) as collector,
        ):
            found = sum(acted(batch) for batch in islice(collector, batches))
            return collector.ledger, found, collector.state_dict()

    ledger, before, state = run(1000, 2, resume=False)
    assert before == ledger.agent_transitions
    total = before + 37
    with ExitStack() as stack:
        if not ring:
            stack.enter_context(patch.object(Ledger, "load", lambda *_: None))
        ledger, more, _ = run(total, None, resume=True)
    assert before + more == ledger.agent_transitions == total + ledger.agent_surplus
    assert 0 <= ledger.agent_surplus < 4
    with SyncCollector(env(), frames_per_batch=9, total_frames=total, **UNIT) as collector:
        collector.load_state_dict(state)
        more = sum(map(acted, collector))
    assert before + more == collector.ledger.agent_transitions
    assert total <= before + more < total + 4


def test_groups_without_masks_count_all_of_their_agents() -> None:
    with SyncCollector(
        AgentsEnv(2, [[4], [3]]),
        lambda td: td.set(("agents", "action"), torch.zeros(2, AGENTS).long()),
        frames_per_batch=4,
        total_frames=61,
        **UNIT,
    ) as collector:
        found = sum(map(len, collector))
    assert found == 13
    assert collector.ledger.agent_transitions == 13 * (AGENTS + RED) == 61 + 4
    assert collector.ledger.agent_surplus == 4


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"total_episodes": 3}, "expected total_frames and"),
        ({"total_frames": -1}, "expected total_frames and"),
        ({"total_frames": 9, "layout": "torchrl"}, "a layout other"),
        ({"total_frames": 9, "budget_unit": "agents"}, "expected one of"),
    ],
)
def test_contradictions_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        SyncCollector(env(), frames_per_batch=4, **{**UNIT, **kwargs})


def test_an_environment_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRefused, match="with groups of agents, got one without"):
        SyncCollector(
            "CartPole-v1",
            frames_per_batch=4,
            total_frames=9,
            storage=tmp_path / "rows",
            **UNIT,
        )
    assert not [*tmp_path.iterdir()]


def test_the_command_refuses_a_unit_of_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "collect CartPole-v1 --episodes 3 --budget-unit agent_transitions --out there"
    with pytest.raises(SystemExit):
        main(words.split())
    assert "--budget-unit needs --frames" in capsys.readouterr().err
