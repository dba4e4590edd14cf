"""Rows of 4 KiB and more are copied once, to their destination, and never overwritten too early.

Each pixel of an oracle's image encodes its lane, episode and step. The tests thus detect rows that
were overwritten, mixed up or copied too late in any part of them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer, Unbounded

from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.rows.rows import ArrayBatch
from tallyroll.collector.errors import ArgumentError, TransitionError, WorkerRaised
from tallyroll.collector.rollout import slab_plan
from tallyroll.storage import MemmapStorage, open_storage, verify

from collect_kit import ByObservation, assert_same, joined, without_cut
from oracles import LARGE_KINDS, OracleEnv, OracleTorchEnv, Rows, check_rows, flat_rows
from pairs import in_gate
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    Run,
    assert_alike,
    collect_all,
    in_threads,
    start,
    sync_collector,
    worker_collector,
)

MODES = (DISABLED, NEXT, SAME)
SOURCES = (*MODES, "avoided", "native", "torch")
IMAGES: dict[str, Any] = {"kind": "images"}
RUN: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 87, "seed": 3}
"""17 is not a multiple of the lanes: rows are carried over, and the last batch is shorter."""
PATHS = ("s", "s.h5", "s.zarr")
LARGE = ("img", ("next", "img"))


def policy() -> ByObservation:
    """Return a policy that also reads images."""
    return ByObservation("images")


def few_slots(monkeypatch: pytest.MonkeyPatch, slots: int = 4) -> None:
    """Limit a slab, or the segment that a worker fills, to a part of a batch."""
    monkeypatch.setattr(slab_plan, "MOST_SLOTS", slots)


def rows_in(path: Path) -> TensorDict:
    """Return all valid rows of a storage in order."""
    with open_storage(path, mode="read") as storage:
        rows = storage.get(torch.from_numpy(storage.slots_of(np.array(storage.span)))).clone()
    assert isinstance(rows, TensorDict)
    return rows


def true_rows(rows: TensorDictBase, **kwargs: Any) -> Rows:
    """Check every pixel of every row."""
    return check_rows(rows, LENGTHS, kind="images", ends="mixed", **kwargs)


def assert_stored_alone(batches: list[TensorDictBase], stored: TensorDictBase) -> None:
    """Check that batches have no large columns and that the storage has them."""
    for batch in batches:
        assert not {*LARGE} & {*batch.keys(True, True)}
    assert {*LARGE} < {*stored.keys(True, True)}
    assert_same(joined(batches), stored.clone().exclude(*LARGE))


def with_and_without(make: Any, path: Path, **kwargs: Any) -> tuple[Run, Run]:
    """Run twice to storages: once yielding large columns, once only storing them.

    The batches are kept and compared after both runs.
    """
    runs = []
    for yields in (True, False):
        to = path.with_name(f"{yields}-{path.name}")
        runs.append(collect_all(make(storage=to, yield_large=yields, **{**RUN, **kwargs})))
    with_large, without = (path.with_name(f"{yields}-{path.name}") for yields in (True, False))
    stored = rows_in(with_large)
    assert_same(rows_in(without), stored)
    assert runs[0].counts == runs[1].counts
    assert runs[0].episodes == runs[1].episodes
    if "layout" not in kwargs:
        yielded = joined(runs[0].batches)
        assert_same(yielded, stored)
        assert [*yielded.keys(True, True)] == [*stored.keys(True, True)], "another order"
        assert_stored_alone(runs[1].batches, stored)
    return runs[0], runs[1]


# --- one process --------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "slots"), in_gate(SOURCES, [3, 4096]))
def test_every_pixel_is_stored_and_yielded(
    source: str, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of a batch stays in the slab; earlier blocks are copied out."""
    few_slots(monkeypatch, slots)
    make = partial(sync_collector, source, policy(), oracle=IMAGES)
    run, _ = with_and_without(make, tmp_path / "s")
    assert [len(batch) for batch in run.batches] == [17] * 5 + [2]
    true_rows(rows_in(tmp_path / "True-s"), from_start=True)


@pytest.mark.parametrize("kind", LARGE_KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_batches_without_a_storage(mode: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few_slots(monkeypatch)
    run = collect_all(sync_collector(mode, ByObservation(kind), oracle={"kind": kind}, **RUN))
    check_rows(joined(run.batches), LENGTHS, kind=kind, ends="mixed", from_start=True)


def test_a_batch_of_one_slot_is_its_own() -> None:
    """Writing to a batch does not change later batches."""
    run = {"frames_per_batch": LANES, "total_frames": 5 * LANES, "seed": 3}
    with sync_collector(DISABLED, oracle=IMAGES, **run) as collector:
        for batch in collector:
            assert batch["collector", "lane"].tolist() == [*range(LANES)]
            for leaf in batch.values(True, True):
                leaf.zero_()


@pytest.mark.parametrize(("name", "size"), in_gate(PATHS, [3, 17, 130]))
def test_every_format_holds_the_same_with_large_columns_and_without(
    name: str, size: int, tmp_path: Path
) -> None:
    """Batches of 14 KB, 80 KB and 610 KB reach the file in three different ways."""
    make = partial(sync_collector, NEXT, policy(), oracle=IMAGES)
    budget = {"frames_per_batch": size, "total_frames": 3 * size - 1}
    with_and_without(make, tmp_path / name, **budget)
    true_rows(rows_in(tmp_path / f"False-{name}"), from_start=True)
    assert verify(tmp_path / f"False-{name}").sound


OPTIONS: dict[str, dict[str, Any]] = {
    "episodes": {"total_frames": None, "total_episodes": 23},
    "discarded": {"surplus": "discard"},
    "never stepped": {"surplus": "never_step"},
    "resets": {"reset_at_each_iter": True, "frames_per_batch": 12, "total_frames": 61},
    "few at a time": {"reset_at_each_iter": True, "frames_per_batch": 3, "total_frames": 40},
    "random": {"init_random_frames": 41},
    "by lanes": {"layout": "lanes"},
    "trajectories": {"layout": "trajectories"},
    "renamed": {"rename": {"img": "pixels"}},
}


@pytest.mark.parametrize("case", list(OPTIONS))
def test_the_same_rows_whatever_the_options(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch)
    options = dict(OPTIONS[case])
    make = partial(
        sync_collector, DISABLED, None if "rename" in options else policy(), oracle=IMAGES
    )
    if "rename" in options:
        run = collect_all(make(storage=tmp_path / "r", yield_large=False, **RUN, **options))
        stored = rows_in(tmp_path / "r").rename_key_("pixels", "img")
        stored["next"].rename_key_("pixels", "img")
        assert_stored_alone(run.batches, stored)
    else:
        yielded, without = with_and_without(make, tmp_path / "s", **options)
        stored = rows_in(tmp_path / "True-s")
        if "layout" in options:
            for mine, other in zip(yielded.batches, without.batches, strict=True):
                assert_same(mine, other, *LARGE)
                true_rows(flat_rows(mine))
    if case in ("discarded", "resets", "few at a time"):  # trajectories begin in mid-episode
        stored.exclude("collector", inplace=True)
    true_rows(stored, contiguous=False)


def test_a_part_of_a_batch_that_is_kept_stays_as_it_was() -> None:
    """The pool reuses memory only when no view of it is left."""
    kept: list[tuple[Any, bytes]] = []
    with sync_collector(
        NEXT, policy(), oracle=IMAGES, frames_per_batch=10, total_frames=300
    ) as collector:
        for number, batch in enumerate(collector):
            image = batch["next", "img"] if number % 2 else batch["img"]
            part: Any = (image[4], image.numpy()[2:4], image.flatten()[7:], batch[5:])[number % 4]
            held = part["img"] if number % 4 == 3 else part
            kept.append((held, np.asarray(held).tobytes()))
            del batch, image, part, held
            if number % 5 == 4:
                kept.pop(0)  # memory without views is reused
            assert all(np.asarray(each).tobytes() == was for each, was in kept)
    assert len(kept) == 24


@pytest.mark.parametrize("yields", [True, False])
def test_a_ring_holds_the_last_images(yields: bool, tmp_path: Path) -> None:
    """Once the ring has wrapped, pages are warm and rows are gathered straight into the map."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with MemmapStorage(tmp_path / "s", max_size=40) as storage:
        options = {**RUN, "oracle": IMAGES, "storage": storage, "yield_large": yields}
        with sync_collector(SAME, policy(), **options) as collector:
            for batch in collector:
                rows = storage.get(torch.from_numpy(storage.slots_of(np.array(storage.span))))
                true_rows(rows)
                assert_same(without_cut(batch), rows[-len(batch) :], *([] if yields else LARGE))
                kept.append((rows["img"], rows["img"].clone()))
    assert len(rows_in(tmp_path / "s")) == 40
    assert all(torch.equal(rows, was) for rows, was in kept)
    assert verify(tmp_path / "s").sound


@pytest.mark.parametrize("workers", [0, 2])
def test_a_buffer_beside_the_storage_gets_images_too(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch)
    options = {**RUN, "oracle": IMAGES, **pair(tmp_path / "s")}
    make = partial(worker_collector, SAME, workers) if workers else partial(sync_collector, SAME)
    with in_threads():
        run = collect_all(make(policy(), **options))
    held = options["replay_buffer"].storage.get(slice(0, 87))
    assert_same(held.exclude("index"), stored := rows_in(tmp_path / "s"))
    assert_same(joined(run.batches), stored)
    true_rows(stored, from_start=True)


def test_a_postproc_sees_and_changes_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch)

    def inverted(td: TensorDictBase) -> TensorDictBase:
        true_rows(td)
        return td.set("img", 255 - td["img"])

    run = collect_all(
        sync_collector(
            NEXT, policy(), oracle=IMAGES, storage=tmp_path / "s", postproc=inverted, **RUN
        )
    )
    stored = rows_in(tmp_path / "s")
    assert_same(joined(run.batches), stored)
    true_rows(stored.set("img", 255 - stored["img"]), from_start=True)


def test_a_run_is_resumed_without_large_columns(tmp_path: Path) -> None:
    make = partial(
        sync_collector, NEXT, policy(), oracle=IMAGES, storage=tmp_path / "s", yield_large=False
    )
    options = {"frames_per_batch": 17, "total_frames": 87}
    first = collect_all(make(seed=3, **options), batches=3)
    second = collect_all(make(resume=True, **options))
    assert_stored_alone(first.batches + second.batches, stored := rows_in(tmp_path / "s"))
    assert second.collector.ledger.stored == len(stored) == 87
    true_rows(stored[:51], from_start=True)
    true_rows(stored[51:], from_start=True)


class Objectives(OracleTorchEnv):
    """Oracle whose reward has 600 parts of 8 bytes. The first part is the usual reward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_spec = Unbounded((*self.batch_size, 600), dtype=torch.float64)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        parts = torch.zeros(*self.batch_size, 600, dtype=torch.float64)
        parts[..., :1], parts[..., 1:] = out["reward"], out["pos"][..., :1] + 0.25
        return out.set("reward", parts)


@pytest.mark.parametrize("yields", [True, False])
def test_large_rewards_are_looked_at_and_always_yielded(yields: bool, tmp_path: Path) -> None:
    env = Objectives(LANES, LENGTHS, kind="images", ends="mixed")
    options = {**RUN, "storage": tmp_path / "s", "yield_large": yields}
    run = collect_all(SyncCollector(env, policy(), **options))
    stored = rows_in(tmp_path / "s")
    assert_same(joined(run.batches), stored, *([] if yields else LARGE))
    reward = stored["next", "reward"]
    assert torch.equal(reward[:, 1:], (stored["pos"][:, :1] + 0.25).double().expand(-1, 599))
    ids, done = stored["collector", "traj_ids"], stored["next", "done"].reshape(-1)
    assert len(run.episodes) == int(done.sum())
    for episode in run.episodes:
        assert episode.total_return == pytest.approx(float(reward[ids == episode.traj_id].sum()))
    true_rows(stored.set(("next", "reward"), reward[:, :1].float()), from_start=True)


# --- workers ------------------------------------------------------------------------------------


OF_WORKERS = [
    *((source, 3, (3, 4096)[turn % 2]) for turn, source in enumerate([*MODES, "torch"])),
    (NEXT, 1, 3),
]


@pytest.mark.parametrize(("source", "workers", "slots"), OF_WORKERS)
def test_workers_in_step_give_what_one_process_gives(
    source: str, workers: int, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch, slots)
    one = collect_all(sync_collector(source, policy(), oracle=IMAGES, **RUN))
    with in_threads():
        make = partial(worker_collector, source, workers, policy(), oracle=IMAGES)
        run, _ = with_and_without(make, tmp_path / "s")
    assert_alike(one, run)


@pytest.mark.parametrize(("source", "workers", "slots"), OF_WORKERS)
def test_workers_that_run_free(
    source: str, workers: int, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker fills its other segment while one segment waits for the batch to be delivered."""
    few_slots(monkeypatch, slots)
    for yields in (True, False):
        path = tmp_path / f"{yields}"
        with in_threads():
            run = collect_all(
                worker_collector(
                    source,
                    workers,
                    policy(),
                    oracle=IMAGES,
                    mode="async",
                    storage=path,
                    yield_large=yields,
                    **RUN,
                )
            )
        stored = rows_in(path)
        assert len(stored) == 87
        true_rows(stored, from_start=True)
        if yields:
            assert_same(joined(run.batches), stored)
        else:
            assert_stored_alone(run.batches, stored)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("workers", [1, 3])
def test_processes(
    workers: int, mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch, 5)
    options = {"oracle": IMAGES, "mode": mode, "storage": tmp_path / "s", "yield_large": False}
    run = collect_all(worker_collector(NEXT, workers, policy(), **options, **RUN))
    assert_stored_alone(run.batches, stored := rows_in(tmp_path / "s"))
    true_rows(stored, from_start=True)


# --- errors -------------------------------------------------------------------------------------


class Raising(OracleEnv):
    """Oracle whose lane `bad` raises at step `at`, counted from 0."""

    def __init__(self, *args: Any, bad: int, at: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bad, self.at = bad, at

    def step(self, action: Any) -> Any:
        """Step, or raise."""
        if self.lane == self.bad and self.steps_taken == self.at:
            raise RuntimeError("out of order")
        return super().step(action)


def raising(first: int = 0, lanes: int = LANES, at: int = 10) -> SyncVectorEnv:
    """Return lanes of which the third fails."""
    makes = [
        partial(Raising, lane, LENGTHS, bad=2, at=at, kind="images", ends="mixed")
        for lane in range(first, first + lanes)
    ]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize("at", [10, 13])
@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_complete_before_an_error_are_stored(
    workers: int, yields: bool, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch)
    options = {**RUN, "storage": tmp_path / "s", "yield_large": yields}
    make = partial(raising, at=at)
    with in_threads():
        if workers:
            collector: Any = start([make], policy(), **options)
        else:
            collector = SyncCollector(make, policy(), **options)
        with collector, pytest.raises((RuntimeError, WorkerRaised), match="out of order"):
            list(collector)
    collector.ledger.check()
    stored = rows_in(tmp_path / "s")
    assert true_rows(stored, from_start=True).counts(LANES) == [at] * LANES
    assert collector.ledger.stored == len(stored)


@pytest.mark.parametrize("slots", [3, 4096])
def test_rows_that_free_workers_completed_before_an_error_are_stored(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch, slots)
    makes = [partial(raising, first, own, at=31) for first, own in ((0, 2), (2, 3))]
    options = {**RUN, "total_frames": 4000, "storage": tmp_path / "s", "yield_large": False}
    with (
        in_threads(),
        start(makes, policy(), mode="async", **options) as collector,
        pytest.raises(WorkerRaised, match="out of order"),
    ):
        list(collector)
    collector.ledger.check()
    stored = rows_in(tmp_path / "s")
    counts = true_rows(stored, from_start=True).counts(LANES)
    assert max(counts[2:]) <= 31
    assert collector.ledger.stored == len(stored) == sum(counts)


@pytest.mark.parametrize("yields", [True, False])
def test_a_value_that_is_wrong_is_not_stored(yields: bool, tmp_path: Path) -> None:
    class Wrong(OracleEnv):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            if self.lane == 1 and self.steps_taken == 9:
                observation["pos"] = observation["pos"] - 1e5
            return observation, *rest

    vector = SyncVectorEnv(
        [partial(Wrong, lane, LENGTHS, ends="mixed", **IMAGES) for lane in range(LANES)],
        autoreset_mode=AutoresetMode.DISABLED,
    )
    options = {**RUN, "storage": tmp_path / "s", "yield_large": yields}
    with SyncCollector(vector, policy(), **options) as collector, pytest.raises(TransitionError):
        list(collector)
    assert true_rows(rows_in(tmp_path / "s"), from_start=True).counts(LANES) == [8] * LANES


# --- number of copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_fit_in_the_slab_are_copied_once(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of a batch stays in the slab until it is written to the file."""
    settled: list[int] = []
    settle = ArrayBatch.settle
    monkeypatch.setattr(
        ArrayBatch, "settle", lambda part: settled.append(len(part)) or settle(part)
    )
    make = partial(worker_collector, NEXT, workers) if workers else partial(sync_collector, NEXT)
    with in_threads():
        collect_all(make(policy(), oracle=IMAGES, storage=tmp_path / "s", yield_large=False, **RUN))
    assert settled == []
    few_slots(monkeypatch, 5)
    with in_threads():
        collect_all(make(policy(), oracle=IMAGES, storage=tmp_path / "t", yield_large=False, **RUN))
    assert 0 < sum(settled) < RUN["total_frames"] - 5
    assert_same(rows_in(tmp_path / "s"), rows_in(tmp_path / "t"))


# --- refusals -----------------------------------------------------------------------------------


def pair(path: Path) -> dict[str, Any]:
    return {"storage": path, "replay_buffer": ReplayBuffer(storage=LazyTensorStorage(200))}


REFUSED: dict[str, Any] = {
    "storage and buffer": (pair, "buffer receives the yielded batches only"),
    "a buffer alone": (lambda path: {**pair(path), "storage": None}, "needs storage="),
    "nothing": (lambda _: {}, "needs storage="),
    "a postproc": (lambda path: {"storage": path, "postproc": lambda td: td}, "postproc"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", list(REFUSED))
def test_large_columns_that_nobody_would_get_are_refused(
    case: str, workers: int, tmp_path: Path
) -> None:
    given, match = REFUSED[case]
    options = {**RUN, "oracle": IMAGES, "yield_large": False, **given(tmp_path / "s")}
    make = partial(worker_collector, NEXT, workers) if workers else partial(sync_collector, NEXT)
    with pytest.raises(ArgumentError, match=match):
        make(policy(), **options)
    assert not [*tmp_path.iterdir()]


def test_a_run_that_is_refused_lets_go_of_its_storage(tmp_path: Path) -> None:
    collect_all(
        sync_collector(NEXT, policy(), oracle=IMAGES, storage=tmp_path / "s", **RUN), batches=2
    )
    options = {"frames_per_batch": 17, "total_frames": 87, "yield_large": False, "resume": True}
    with pytest.raises(ArgumentError, match="replay buffer") as raised:
        sync_collector(NEXT, policy(), oracle=IMAGES, **options, **pair(tmp_path / "s"))
    assert raised.traceback  # keeps references to the objects, and to their lock if it is held
    with open_storage(tmp_path / "s", mode="append") as storage:
        assert len(storage) == 34


def test_a_buffer_over_the_storage_itself_is_refused_too(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        buffer = ReplayBuffer(storage=storage)
        for where in ({}, {"storage": storage}):
            with pytest.raises(ArgumentError, match="buffer receives the yielded batches only"):
                sync_collector(
                    NEXT, policy(), oracle=IMAGES, yield_large=False, replay_buffer=buffer,
                    **where, **RUN,
                )  # fmt: skip
        run = collect_all(
            sync_collector(NEXT, policy(), oracle=IMAGES, replay_buffer=buffer, **RUN)
        )
        assert_same(joined(run.batches), storage.get(slice(None)))
        true_rows(joined(run.batches), from_start=True)
