"""A run restarted from a checkpoint has the same rows, counts, ids, versions and random numbers."""

from __future__ import annotations

import itertools
import os
import random
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torchrl.data import ReplayBuffer

from tallyroll.collector import (
    GymnasiumVectorEnv,
    MultiprocessCollector,
    SyncCollector,
    load_checkpoint,
    report,
    save_checkpoint,
)
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.ext.checkpoints import networks
from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    ZarrStorage,
    open_storage,
    verify,
)
from tallyroll.storage.errors import RunUnderWay, StateMismatch
from tallyroll.storage.trajectories.mapping import Trajectories

from collect_kit import LENGTHS, balanced
from fork_server import warm_fork_server
from oracles import check_rows, make_oracle_vec
from policies_kit import linear
from worker_kit import QUICK

TOTAL, BATCH, LANES = 241, 10, 3
EVERY = 10 * int(os.environ.get("TALLYROLL_RESTART_EVERY", "7"))
"""Transitions between two checkpoints.

With TALLYROLL_RESTART_EVERY=1, the run is restarted from each of 22 checkpoints.
"""
IDS, VERSION = ("collector", "traj_ids"), ("collector", "policy_version")


def vec(lanes: int = LANES) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(lanes, LENGTHS, mode=AutoresetMode.NEXT_STEP))


def sync(storage: Any, policy: Any, **more: Any) -> SyncCollector:
    return SyncCollector(
        vec(), policy, frames_per_batch=BATCH, total_frames=TOTAL, storage=storage, **more
    )


def workers(storage: Any, policy: Any, **more: Any) -> MultiprocessCollector:
    warm_fork_server()
    return MultiprocessCollector(
        [partial(vec, 1), partial(vec, 2)],
        policy,
        frames_per_batch=BATCH,
        total_frames=TOTAL,
        storage=storage,
        **QUICK,
        **more,
    )


MAKERS: dict[str, tuple[Any, Any]] = {
    "memmap": (sync, MemmapStorage),
    "ring": (sync, partial(MemmapStorage, max_size=70)),
    "hdf5": (sync, partial(H5Storage, capacity=TOTAL)),
    "zarr": (sync, ZarrStorage),
    "workers": (workers, MemmapStorage),
    "asynchronous workers": (partial(workers, mode="async"), MemmapStorage),
}


class Step(torch.nn.Module):
    """Learner whose only parameter counts its updates."""

    def __init__(self) -> None:
        super().__init__()
        self.done = torch.nn.Parameter(torch.zeros(()))


def rows_of(path: Path) -> dict[int, Any]:
    """Return every row as bytes, by row number."""
    with open_storage(path) as storage:
        rows, span = storage.in_order(), storage.span
        keys = sorted(rows.keys(include_nested=True, leaves_only=True), key=str)
        columns = [
            rows[key].flatten(1).numpy() if rows[key].ndim > 1 else rows[key].numpy()
            for key in keys
        ]
        return {
            row: b"".join(column[at].tobytes() for column in columns) for at, row in enumerate(span)
        }


def run(collector: Any, policy: Any, learner: Step, folder: Path, until: int) -> dict[int, Any]:
    """Collect, learn and save in turn.

    Return the next random numbers at each checkpoint.
    """
    drawn: dict[int, Any] = {}
    while collector.ledger.stored < until:
        collector.collect(min(BATCH, until - collector.ledger.stored))
        with torch.no_grad():
            learner.done += 1
            policy.module[0].module.weight.add_(0.01)
        collector.update_policy_weights_()
        saved = save_checkpoint(
            folder, collector=collector, every=EVERY, keep_last=None, learner=learner, note="x"
        )
        if saved is not None:
            before = random.getstate(), np.random.get_state(), torch.get_rng_state()
            drawn[collector.ledger.stored] = draw()
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
    return drawn


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_run_restarts_from_each_of_its_checkpoints(name: str, tmp_path: Path) -> None:
    make, kind = MAKERS[name]
    path, folder = tmp_path / ("rows.h5" if name == "hdf5" else "rows"), tmp_path / "saved"
    policy, learner = linear(), Step()
    until = TOTAL - 20 if "worker" not in name else 10 + EVERY  # each restart starts processes
    storage = kind(path)
    with make(storage, policy, seed=5) as collector:
        drawn = run(collector, policy, learner, folder, until)
    storage.close()
    rows, ring = rows_of(path), storage.ring
    saved = sorted(folder.glob("0*"))
    assert [each.name for each in saved] == [
        f"{number:06d}-at-{EVERY * number - EVERY + BATCH}" for number in range(1, len(saved) + 1)
    ]
    versions, incarnation, head, ids, reserve = -1, -1, until, set[int](), 0
    for checkpoint in reversed(saved):
        at = int(checkpoint.name.rpartition("-")[2])
        policy, learner = linear(1), Step()
        with closing(type(storage)(path, mode="append")) as storage:
            with make(storage, policy, resume=True) as collector:
                loaded = load_checkpoint(checkpoint, collector=collector, learner=learner)
                assert draw() == drawn[at]
                assert loaded.values == {"note": "x"}
                assert (loaded.transitions, loaded.rewound) == (at, head - at)
                reserve = max(reserve, head)  # rows whose slots were reused
                left = max(0, reserve - ring) if ring else 0
                assert loaded.gone == max(0, min(left, at) - max(0, at - ring))
                reserve = min(reserve, at + ring)
                ledger = collector.ledger
                assert (ledger.stored, storage.head) == (at, at)
                assert balanced(ledger)
                assert learner.done == at // BATCH
                weight = linear().module[0].module.weight
                torch.testing.assert_close(
                    policy.module[0].module.weight, weight + 0.01 * int(learner.done)
                )
                assert ledger.incarnation > incarnation
                assert collector.policy_version > versions
                incarnation = ledger.incarnation
                head = min(at + 25, TOTAL)
                while collector.ledger.stored < head:
                    collector.collect(5)
                versions = collector.policy_version
                now = rows_of(path)
                assert {row: now[row] for row in now if row < at} == {
                    row: rows[row] for row in now if row < at
                }
                fresh = set(storage.get(slice(-25, None))[IDS].tolist()) if not ring else set()
                assert not fresh & ids, "ids of rows that were taken back came again"
                ids |= fresh
            assert not verify(path).findings
    with closing(type(storage)(path, mode="append")) as storage:
        with make(storage, linear(), resume=True) as collector:
            collector.collect(TOTAL - head)
            with pytest.raises(StateMismatch, match="rows from 10 on were removed"):
                load_checkpoint(saved[1], storage=storage)
        assert storage.head == TOTAL
        firsts = [entry["first_row"] for entry in storage.runs]
        for first, stop in itertools.pairwise([*firsts, TOTAL]):
            if make is sync and not ring:  # each restart repeats the lanes' episodes
                check_rows(storage.get(slice(first, stop)), LENGTHS)
    assert not verify(path).findings


def test_rows_that_came_later_are_kept_if_they_are_wanted(tmp_path: Path) -> None:
    policy, learner = linear(), Step()
    with sync(tmp_path / "rows", policy, seed=5) as collector:
        run(collector, policy, learner, tmp_path / "saved", 100)
    policy, learner = linear(1), Step()
    with sync(tmp_path / "rows", policy, resume=True) as collector:
        resumed, before = collector.ledger.counts(), collector.policy_version
        loaded = load_checkpoint(
            tmp_path / "saved" / "000001-at-10", collector=collector, rows="keep", learner=learner
        )
        assert (loaded.kept, loaded.rewound, learner.done) == (90, 0, 1)
        older = load_checkpoint(
            tmp_path / "saved" / "000002-at-80", collector=collector, rows="keep", learner=learner
        )
        assert (older.kept, learner.done) == (20, 8)
        assert collector.ledger.counts() == resumed
        assert collector.policy_version > before
        collector.collect(TOTAL - 100)
    assert len(rows_of(tmp_path / "rows")) == TOTAL
    assert not verify(tmp_path / "rows").findings


def test_every_and_keep_last(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    with sync(storage, None) as collector:
        saved = []
        for stored in range(BATCH, 150, BATCH):
            collector.collect(BATCH)
            path = save_checkpoint(tmp_path / "c", collector=collector, every=35, keep_last=2)
            saved += [] if path is None else [stored]
    storage.close()
    assert saved == [10, 50, 90, 130]
    assert sorted(path.name for path in (tmp_path / "c").glob("[0-9]*")) == [
        "000003-at-90",
        "000004-at-130",
    ]


def test_a_copy_of_the_rows_goes_to_another_machine(tmp_path: Path) -> None:
    policy = linear()
    with sync(tmp_path / "rows", policy, seed=5) as collector:
        collector.collect(50)
        saved = save_checkpoint(tmp_path / "c", collector=collector, copy_rows=True)
        lean = save_checkpoint(tmp_path / "lean", collector=collector)
    assert saved is not None
    assert lean is not None
    rows = rows_of(tmp_path / "rows")
    there = MemmapStorage(tmp_path / "there")
    with pytest.raises(StateMismatch, match="copy_rows=True"):
        load_checkpoint(lean, storage=there)
    load_checkpoint(saved, storage=there)
    with sync(there, linear(1), resume=True) as collector:
        assert load_checkpoint(saved, collector=collector).rewound == 0
        collector.collect(TOTAL - 50)
    there.close()
    found = rows_of(tmp_path / "there")
    assert {row: found[row] for row in rows} == rows
    assert len(found) == TOTAL
    assert not verify(tmp_path / "there").findings


def test_a_replay_buffer_over_the_ring_writes_where_it_is_to(tmp_path: Path) -> None:
    ring = MemmapStorage(tmp_path / "ring", max_size=64)
    buffer = ReplayBuffer(storage=ring, batch_size=16)
    make = partial(
        SyncCollector, vec(), frames_per_batch=BATCH, total_frames=-1, replay_buffer=buffer
    )
    with make() as collector:
        collector.collect(50)
        save_checkpoint(tmp_path / "c", collector=collector, buffer=buffer)
        collector.collect(40)
    with make(resume=True) as collector:
        loaded = load_checkpoint(tmp_path / "c", collector=collector, buffer=buffer)
        assert (loaded.rewound, loaded.gone, len(ring)) == (40, 26, 24)
        collector.collect(30)
        assert ring.span == range(26, 80)
        assert len(buffer.sample()) == 16
    assert not verify(tmp_path / "ring").findings
    ring.close()


def test_counts_after_a_kill_between_the_rewind_and_what_follows(tmp_path: Path) -> None:
    """The process is killed after it has rewound the storage, before it restores the counts."""
    policy = linear()
    with sync(tmp_path / "rows", policy, seed=5) as collector:
        run(collector, policy, Step(), tmp_path / "saved", 120)
        largest = int(collector.policy_version)
    with MemmapStorage(tmp_path / "rows", mode="append") as storage:
        newest = max(rows[IDS] for rows in [storage.get(slice(None))])
        top = int(newest.max())
        load_checkpoint(tmp_path / "saved" / "000002-at-80", storage=storage)
        assert storage.head == 80
    with sync(tmp_path / "rows", linear(), resume=True) as collector:
        assert collector.ledger.stored == 80
        assert collector.ledger.incarnation == 1
        assert collector.policy_version >= largest
        collector.collect(TOTAL - 80)
    with open_storage(tmp_path / "rows") as storage:
        rows = storage.get(slice(80, None))
        assert int(rows[IDS].min()) > top
        assert int(rows[VERSION].min()) >= largest
    assert not verify(tmp_path / "rows").findings


# --- mismatches -----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with sync(tmp_path / "rows", linear(), seed=5) as collector:
        collector.collect(40)
        path = save_checkpoint(tmp_path / "c", collector=collector, number=3, learner=Step())
        collector.collect(40)
    assert path is not None
    return path


def test_refused_with_nothing_changed(saved: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    before = rows_of(rows)

    def refused(error: type[Exception], match: str, **given: Any) -> None:
        with pytest.raises(error, match=match):
            load_checkpoint(saved, **given)

    with sync(rows, linear(), resume=True) as collector:
        refused(ArgumentError, "rows: expected", collector=collector, rows="all")
        refused(
            StateError,
            "has no optimizer\\. It has learner, number",
            collector=collector,
            optimizer=Step(),
        )
        refused(
            ArgumentError,
            r"number was saved as a plain value\. Read it from \.values",
            collector=collector,
            number=Step(),
        )
        other_net = torch.nn.Linear(3, 3)
        refused(StateError, "learner: cannot load", collector=collector, learner=other_net)
        refused(ArgumentError, "that have state_dict", collector=Step())
        refused(ArgumentError, "storage: expected a storage on disk", storage=Step())
        other = MemmapStorage(tmp_path / "other")
        refused(ArgumentError, "Leave storage out", collector=collector, storage=other)
        refused(StateMismatch, "has no rows", storage=other)
        refused(RunUnderWay, "so its rows cannot be rewound", storage=collector.restarting.storage)
    with sync(None, linear()) as collector:
        refused(StateError, "no storage", collector=collector)
    with sync(tmp_path / "more", linear()) as collector:
        refused(StateMismatch, "is another one", collector=collector)
    with MemmapStorage(rows, mode="append") as storage, sync(storage, linear()) as collector:
        refused(StateError, "resume=True", collector=collector, rows="keep")
    assert rows_of(rows) == before
    with sync(rows, linear(), resume=True) as collector:
        collector.collect(1)
        refused(StateError, "already collected", collector=collector)
    with MemmapStorage(rows, mode="append") as storage:
        storage.finalize()
    with MemmapStorage(rows, mode="append") as storage, sync(storage, linear()) as collector:
        learner = Step()
        learner.done.data += 7
        refused(StateMismatch, "was finalized with 81 rows", collector=collector, learner=learner)
        assert learner.done == 7
    assert not verify(rows).findings


def test_other_lanes_are_refused_and_any_workers_go_on(tmp_path: Path) -> None:
    """A run must have the lanes of its rows. The number of workers may change."""
    options = {"frames_per_batch": 20, "total_frames": 80, "seed": 5}
    for name in ("rows", None):
        place = None if name is None else tmp_path / name
        with SyncCollector("CartPole-v1", num_envs=3, storage=place, **options) as collector:
            next(iter(collector))
            save_checkpoint(tmp_path / f"of {name}", collector=collector)
    said = "is of a collector with 3 lanes, got one with 2. Make the collector with num_envs=3"
    with SyncCollector("CartPole-v1", num_envs=2, **options) as collector:
        with pytest.raises(StateError, match=said):
            load_checkpoint(tmp_path / "of None", collector=collector)
        assert collector.ledger.stored == 0
    with pytest.raises(StateError, match="has 3 lanes, got 2"):
        SyncCollector("CartPole-v1", num_envs=2, storage=tmp_path / "rows", resume=True, **options)
    with MultiprocessCollector(
        "CartPole-v1",
        num_envs=3,
        num_workers=2,
        transport="thread",
        storage=tmp_path / "rows",
        resume=True,
        **options,
    ) as collector:
        assert load_checkpoint(tmp_path / "of rows", collector=collector).transitions == 20
        assert sum(map(len, collector)) == 60
    with open_storage(tmp_path / "rows") as storage:
        assert len(storage) == 80
        assert {*storage.column(("collector", "lane")).tolist()} == {0, 1, 2}
    assert verify(tmp_path / "rows").findings == ()
    storage = MemmapStorage(tmp_path / "rows", mode="append")
    with storage, SyncCollector("CartPole-v1", num_envs=2, storage=storage, **options) as collector:
        for rows in ("rewind", "keep"):
            with pytest.raises(StateError, match=said):
                load_checkpoint(tmp_path / "of rows", collector=collector, rows=rows)


def test_a_reader_and_plain_states_know_of_rewinds(saved: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    with open_storage(rows) as reader:
        state, revision = reader.state_dict(), reader._mutation_revision
        with MemmapStorage(rows, mode="append") as storage:
            storage.dumps(tmp_path / "dump")
            load_checkpoint(saved, storage=storage)
            assert len(reader) == 40
            with pytest.raises(IndexError):
                reader.get(41)
            storage.extend(storage.get(slice(0, 40)), ids="renumber")
        assert len(reader) == 80
        assert reader._mutation_revision != revision
        with pytest.raises(StateMismatch, match="rows from 40 on were removed"):
            reader.load_state_dict(state)
        reader.load_state_dict(reader.state_dict())
        with pytest.raises(StateMismatch, match="rows from 40 on were removed"):
            reader.dumps(tmp_path / "dump")
        reader.dumps(tmp_path / "again")
        reader.dumps(tmp_path / "again")
    with MemmapStorage(rows, mode="append") as storage:
        with pytest.raises(StateMismatch, match="rows from 40 on were removed"):
            storage.loads(tmp_path / "dump")
        storage.loads(tmp_path / "again")
    with open_storage(tmp_path / "again") as copy:
        assert copy.reader.rewinds == 1
        assert copy.manifest["rewinds"] == [40]
    assert rows_of(tmp_path / "again") == rows_of(rows)


def test_a_restart_from_a_checkpoint_counts_once(tmp_path: Path) -> None:
    """A start that loads a checkpoint is one place at which the rows continue."""
    policy, learner = linear(), Step()
    with sync(tmp_path / "rows", policy, seed=5) as collector:
        run(collector, policy, learner, tmp_path / "saved", 100)
    for at, start in enumerate(("killed", "again"), 1):
        with sync(tmp_path / "rows", policy, resume=True) as collector:
            load_checkpoint(tmp_path / "saved", collector=collector, learner=learner)
            collector.collect(10 * at)
        (found,) = report(tmp_path / "rows").runs
        assert (found.resumed, len(found.resumed_at)) == (1, 1), start
    with sync(tmp_path / "rows", policy, resume=True) as collector:
        collector.collect(5)
    (found,) = report(tmp_path / "rows").runs
    assert (found.resumed, len(found.resumed_at)) == (2, 2)


# --- networks of policy functions -----------------------------------------------------------------

ACTOR, CRITIC = linear(), torch.nn.Linear(3, 1)


def of_global(td: Any) -> Any:
    return ACTOR(td)


def of_closure() -> Any:
    nets = {"a": ACTOR}

    @torch.no_grad()
    def act(td: Any) -> Any:
        return nets["a"](td)

    return act


class Agent:
    """Learner whose method is the policy."""

    def __init__(self) -> None:
        self.net = ACTOR

    def act(self, td: Any) -> Any:
        return of_function(self, td)

    def state_dict(self) -> Any:
        return self.net.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.net.load_state_dict(state)


def of_function(agent: Agent, td: Any) -> Any:
    return agent.net(td)


@pytest.mark.parametrize(
    ("policy", "parts", "missing"),
    [
        (of_global, {}, "ACTOR"),
        (of_global, {"critic": CRITIC, "optimizer": torch.optim.Adam(ACTOR.parameters())}, "ACTOR"),
        (of_global, {"nets": torch.nn.ModuleList([CRITIC, ACTOR]), "n": 3}, ""),
        (of_global, {"weights": ACTOR.state_dict()}, ""),
        (of_closure(), {}, "nets"),
        (partial(of_function, Agent()), {}, "net"),
        (agent := Agent().act, {}, "net"),
        (agent, {"agent": agent.__self__}, ""),
        ([([0], ACTOR), ("rest", of_global)], {}, "ACTOR"),
        (ACTOR, {}, ""),
        (None, {}, ""),
    ],
)
def test_a_network_of_a_function_that_no_part_saves(
    policy: Any, parts: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    text = f"weights of its networks: {missing}. Pass each .* such as {missing}={missing}"
    expected = pytest.warns(UserWarning, match=text) if missing else nullcontext()
    with sync(tmp_path / "rows", policy) as collector, expected:
        save_checkpoint(tmp_path / "saved", collector=collector, **parts)


def test_the_search_for_networks_reads_no_rows_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(networks, "_is_of_library", lambda each: looked.append(each) or True)
    held: list[Any] = [list(range(part, part + 100_000)) for part in range(0, 2_000_000, 100_000)]
    with MemmapStorage() as storage:
        monkeypatch.setattr(Trajectories, "values", pytest.fail)

        def policy(td: Any) -> Any:
            return held, trajectories

        trajectories = storage.trajectories
        assert networks.unsaved_networks(policy, {}) == []
    assert 1_000 < len(looked) <= 10_000
