"""Our storage and TorchRL's hold the yielded rows, and errors lose no rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.errors import ArgumentError, StateError, TransitionError
from tallyroll.storage import MemmapStorage
from tallyroll.storage.errors import RowsMismatch, StorageFull
from tallyroll.storage.rows.keys import as_key

from collect_kit import LENGTHS, ByObservation, assert_same, balanced, collect, joined
from oracles import (
    ENDS,
    KINDS,
    OracleEnv,
    OracleTorchEnv,
    OracleVectorEnv,
    check_rows,
    make_oracle_vec,
)
from pairs import each_pair


def vec(mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed", **kwargs))


def rows_in(path: Path) -> TensorDict:
    with MemmapStorage(path, mode="read") as storage:
        return storage.get(slice(None)).clone()


DRIVERS: dict[str, Callable[..., Any]] = {
    **{mode.value: partial(vec, mode) for mode in AutoresetMode},
    "native": partial(OracleVectorEnv, 3, LENGTHS, ends="mixed"),
    "torch": partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"),
}


@each_pair(driver=list(DRIVERS), kind=KINDS, layout=["rows", "lanes", "trajectories"])
def test_stored_rows_are_the_yielded_ones(
    driver: str, kind: Any, layout: Any, tmp_path: Any
) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 60, "seed": 0}
    collect(DRIVERS[driver](kind=kind), storage=tmp_path / "s", layout=layout, **kwargs)
    stored = rows_in(tmp_path / "s")
    wanted, _ = collect(DRIVERS[driver](kind=kind), **kwargs)
    assert_same(stored, joined(wanted))
    check_rows(stored, LENGTHS, kind=kind, ends="mixed", from_start=True)
    assert not set(stored["collector"].keys()) & {"cut", "mask"}


@pytest.mark.parametrize("ends", ENDS)
def test_storage_keeps_the_environments_own_flags(ends: Any, tmp_path: Any) -> None:
    collect(
        OracleTorchEnv(3, LENGTHS, ends=ends),
        frames_per_batch=1,
        total_frames=30,
        storage=tmp_path / "s",
    )
    stored = rows_in(tmp_path / "s")
    check_rows(stored, LENGTHS, ends=ends, from_start=True)
    assert not stored["next", "done"].all()


def test_a_batch_is_stored_before_it_is_yielded(tmp_path: Any) -> None:
    with SyncCollector(
        vec(), frames_per_batch=7, total_frames=30, storage=tmp_path / "s"
    ) as collector:
        for batch in collector:
            rows = rows_in(tmp_path / "s")
            assert len(rows) == collector.ledger.stored
            assert torch.equal(rows["observation"][-len(batch) :], batch["observation"])


def test_a_storage_of_ones_own_stays_open(tmp_path: Any) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        batches, _ = collect(vec(), frames_per_batch=7, total_frames=30, storage=storage)
        assert_same(storage.get(slice(None)), joined(batches))


def test_runs_that_are_appended_have_ids_of_their_own(tmp_path: Any) -> None:
    batches = []
    for mode in ("create", "append", "append"):
        with MemmapStorage(tmp_path / "s", mode=mode) as storage:  # type: ignore[arg-type]
            batches += [collect(vec(), frames_per_batch=30, total_frames=30, storage=storage)[0]]
    ids = [set(joined(each)["collector", "traj_ids"].tolist()) for each in batches]
    assert not ids[0] & ids[1]
    assert not (ids[0] | ids[1]) & ids[2]
    assert_same(rows_in(tmp_path / "s"), joined([b for each in batches for b in each]))
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        assert [run["first_row"] for run in storage.manifest["runs"]] == [0, 30, 60]


def test_the_manifest_says_what_made_the_data(tmp_path: Any) -> None:
    _, collector = collect(
        "CartPole-v1",
        num_envs=2,
        seed=5,
        frames_per_batch=9,
        total_frames=30,
        storage=tmp_path / "s",
    )
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        (run,) = storage.manifest["runs"]
    assert run["environment"]["id"] == "CartPole-v1"
    assert (run["seed"], run["lanes"], run["incarnation"]) == (5, 2, 0)
    assert run["versions"] == collector.ledger.versions
    assert run["versions"]["torch"] == torch.__version__
    assert collector.ledger.as_dict()["seed"] == 5


# --- TorchRL's replay buffers -------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("kind", ["tensor", "memmap"])
@pytest.mark.parametrize("driver", [AutoresetMode.NEXT_STEP.value, "torch"])
def test_torchrls_own_storages_get_the_same_rows(
    driver: str, kind: str, cls: Any, tmp_path: Any
) -> None:
    storage = (
        LazyTensorStorage(100)
        if kind == "tensor"
        else LazyMemmapStorage(100, scratch_dir=str(tmp_path))
    )
    buffer = cls(storage=storage, batch_size=8)
    kwargs: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 60, "seed": 0}
    batches, collector = collect(DRIVERS[driver](), replay_buffer=buffer, **kwargs)
    assert len(buffer) == 60
    assert_same(buffer[:].exclude("index"), joined(batches))
    assert balanced(collector.ledger)


def test_our_storage_under_a_replay_buffer(tmp_path: Any) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=16)
        batches, collector = collect(
            vec(), replay_buffer=buffer, frames_per_batch=17, total_frames=60
        )
        assert len(buffer) == 60
        rows = joined(batches)
        assert_same(storage.get(slice(None)), rows)
        for _ in range(5):
            sample = buffer.sample()
            assert_same(sample.exclude("index"), rows[sample["index"]])
        assert collector.ledger.stored == 60


def test_ids_go_on_behind_those_of_a_replay_buffer() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    ids = []
    for _ in range(2):
        batches, _ = collect(vec(), replay_buffer=buffer, frames_per_batch=30, total_frames=30)
        ids.append(set(joined(batches)["collector", "traj_ids"].tolist()))
    assert not ids[0] & ids[1]
    assert len(buffer) == 60


def test_a_storage_and_a_replay_buffer_both(tmp_path: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collect(
        vec(), replay_buffer=buffer, storage=tmp_path / "s", frames_per_batch=17, total_frames=60
    )
    assert_same(rows_in(tmp_path / "s"), buffer[:])


# --- errors in the middle -----------------------------------------------------------------------


class Failing(OracleEnv):
    """Oracle with the fault `what` at transition `at` of lane 1."""

    def __init__(self, *args: Any, at: int, what: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.what = at, what

    def step(self, action: Any) -> Any:
        """Step and spoil the result."""
        if self.lane == 1 and self.steps_taken == self.at and self.what == "raise":
            raise ZeroDivisionError("the simulator exploded")
        observation, reward, terminated, truncated, info = super().step(action)
        if self.lane == 1 and self.steps_taken == self.at + 1:
            if self.what == "nan":
                observation = np.full_like(observation, np.nan)
            elif self.what == "range":
                observation = observation - 1e5
            elif self.what == "reward":
                reward = float("nan")
            elif self.what == "interrupt":
                raise KeyboardInterrupt
        return observation, reward, terminated, truncated, info


def failing(what: str, at: int, mode: AutoresetMode) -> GymnasiumVectorEnv:
    makes = [partial(Failing, lane, LENGTHS, ends="mixed", at=at, what=what) for lane in range(3)]
    return GymnasiumVectorEnv(SyncVectorEnv(makes, autoreset_mode=mode))


WRONG: dict[str, tuple[type[BaseException], str | None]] = {
    "raise": (ZeroDivisionError, "the simulator exploded"),
    "interrupt": (KeyboardInterrupt, None),
    "nan": (TransitionError, r"next/observation lies outside its space at lane 1, step \d of"),
    "range": (
        TransitionError,
        r"lane 1, step \d of its traj.*expected \[0, 1e\+06\] and no NaN, got -9.* at ",
    ),
    "reward": (TransitionError, r"next/reward lies outside its space at lane 1, step \d"),
}


@each_pair(at=[0, 1, 6, 13], what=list(WRONG), mode=list(AutoresetMode))
def test_all_slots_before_an_error_are_stored(
    mode: AutoresetMode, what: str, at: int, tmp_path: Any
) -> None:
    error, match = WRONG[what]
    with (
        SyncCollector(
            failing(what, at, mode),
            ByObservation(),
            frames_per_batch=17,
            total_frames=100,
            storage=tmp_path / "s",
        ) as collector,
        pytest.raises(error, match=match),
    ):
        list(collector)
    assert balanced(collector.ledger)
    assert collector.ledger.carried == 0
    stored = rows_in(tmp_path / "s") if (tmp_path / "s").exists() else []
    assert len(stored) == collector.ledger.stored
    if at == 0:
        assert len(stored) == 0
        return
    rows = check_rows(stored, LENGTHS, ends="mixed", from_start=True)
    assert (rows.lane == 1).sum() == at
    ended = pytest.raises(StateError, match=f"ended when {error.__name__} was raised within it")
    with ended:
        assert list(collector) == []


def test_the_step_that_is_named_is_the_one_that_was_wrong(tmp_path: Any) -> None:
    makes = [partial(Failing, lane, [[4]], at=6, what="nan") for lane in range(3)]
    env = SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(TransitionError, match="lane 1, step 2 of its trajectory"):
        collect(env, frames_per_batch=5, total_frames=50)


def test_values_outside_are_let_through_with_a_warning_or_silently() -> None:
    from tallyroll.collector.batches.checks.value_checks import OutOfRangeWarning

    kwargs: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 60}
    mode = AutoresetMode.DISABLED
    with pytest.warns(OutOfRangeWarning, match="next/observation lies outside") as caught:
        batches, _ = collect(failing("nan", 5, mode), validate="warn", **kwargs)
    assert len(caught) == 1
    assert joined(batches)["next", "observation"].isnan().any()
    batches, _ = collect(failing("nan", 5, mode), validate="off", **kwargs)
    assert len(joined(batches)) == 60


class LyingVector(OracleVectorEnv):
    """Native vector environment whose fourth step returns a wrong observation."""

    def __init__(self, lie: Callable[[Any], Any]) -> None:
        super().__init__(3, LENGTHS, ends="mixed")
        self.lie, self.told = lie, 0

    def step(self, actions: Any) -> Any:
        """Step, and falsify the fourth observation."""
        observation, *rest = super().step(actions)
        self.told += 1
        return (self.lie(observation) if self.told == 4 else observation, *rest)


@pytest.mark.parametrize(
    ("lie", "match"),
    [
        (
            lambda o: o.astype(np.float64),
            r"declares float32 \[3, 3\], the environment returned flo",
        ),
        (lambda o: o[:, :2], r"declares float32 \[3, 3\], the environment returned float32 \[3, 2"),
        (lambda o: o.tolist(), r"the environment returned None \[\] \(list\); correct the env"),
        (lambda _: None, r"returned None \[\] \(NoneType\)"),
    ],
)
def test_observations_of_another_shape_or_dtype(lie: Any, match: str, tmp_path: Any) -> None:
    with (
        SyncCollector(
            LyingVector(lie), frames_per_batch=50, total_frames=100, storage=tmp_path / "s"
        ) as collector,
        pytest.raises(TransitionError, match=match),
    ):
        list(collector)
    assert len(check_rows(rows_in(tmp_path / "s"), LENGTHS, ends="mixed").lane) > 0
    assert balanced(collector.ledger)


def test_a_failing_postproc_stores_nothing_of_its_batch(tmp_path: Any) -> None:
    calls: list[int] = []

    def second_time(rows: TensorDictBase) -> TensorDictBase:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("no")
        return rows

    with (
        SyncCollector(
            vec(),
            frames_per_batch=7,
            total_frames=30,
            storage=tmp_path / "s",
            postproc=second_time,
        ) as collector,
        pytest.raises(ZeroDivisionError, match="no"),
    ):
        list(collector)
    assert len(rows_in(tmp_path / "s")) == 7 == collector.ledger.stored
    assert balanced(collector.ledger)


def test_an_error_in_the_loop_body_closes_everything(tmp_path: Any) -> None:
    collector = SyncCollector(vec(), frames_per_batch=7, total_frames=30, storage=tmp_path / "s")

    def left_by_an_error() -> None:
        with collector:
            for _ in collector:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        left_by_an_error()
    assert len(rows_in(tmp_path / "s")) == 7
    assert balanced(collector.ledger)
    with MemmapStorage(tmp_path / "s", mode="append") as storage:
        assert len(storage) == 7


def test_without_a_storage_an_error_counts_only_what_was_yielded() -> None:
    got = 0
    with SyncCollector(
        failing("raise", 6, AutoresetMode.DISABLED), frames_per_batch=7, total_frames=100
    ) as collector:
        try:
            for batch in collector:
                got += len(batch)
        except ZeroDivisionError:
            pass
    assert collector.ledger.stored == got
    assert balanced(collector.ledger)


MODES = list(AutoresetMode)


def test_a_buffer_over_the_storage_stores_each_row_once(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "runs")
    buffer = ReplayBuffer(storage=storage)
    _, collector = collect(
        make_oracle_vec(2, LENGTHS),
        frames_per_batch=4,
        total_frames=20,
        storage=storage,
        replay_buffer=buffer,
    )
    assert len(storage) == collector.ledger.stored == 20
    storage.close()


def test_a_failing_replay_buffer_leaves_storage_and_ledger_agreed(tmp_path: Path) -> None:
    class Failing(ReplayBuffer):
        batches = 0

        def extend(self, *args: Any, **kwargs: Any) -> Any:
            self.batches += 1
            if self.batches == 2:
                raise RuntimeError("no room")
            return super().extend(*args, **kwargs)

    storage = MemmapStorage(tmp_path / "runs")
    buffer = Failing(storage=LazyTensorStorage(100, compilable=True))
    with pytest.raises(RuntimeError, match="no room"):
        collect(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=20,
            storage=storage,
            replay_buffer=buffer,
        )
    assert storage.record is not None
    assert json.loads(storage.record[1])["ledger"]["stored"] == len(storage)
    storage.close()


class NotANumberAtFirst(OracleEnv):
    """Oracle whose second episode starts with NaN."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        observation, info = super().reset(**kwargs)
        return (observation * np.nan if self.episode == 1 else observation), info


@pytest.mark.parametrize("mode", MODES)
def test_the_first_observation_of_an_episode_is_checked_too(mode: AutoresetMode) -> None:
    env = SyncVectorEnv([partial(NotANumberAtFirst, 0, (3,))], autoreset_mode=mode)
    with pytest.raises(TransitionError, match="observation lies outside its space"):
        collect(env, frames_per_batch=4, total_frames=12)


@pytest.mark.parametrize("column", ["cut", "lane", "traj_ids"])
def test_a_postproc_that_drops_what_batches_need_is_told_so(column: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"collector.{column}"):
        collect(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=8,
            layout="lanes",
            storage=tmp_path / "runs",
            postproc=lambda td: td.exclude(("collector", column)),
        )
    assert not (tmp_path / "runs" / "manifest.json").exists()


def test_a_postproc_does_not_lose_what_was_stored_before_a_state(tmp_path: Path) -> None:
    def part(**kwargs: Any) -> SyncCollector:
        return SyncCollector(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=5,
            total_frames=60,
            postproc=lambda td: td,
            **kwargs,
        )

    with part(storage=tmp_path / "runs", seed=1) as first:
        next(iter(first))
        state = first.state_dict()
    with (
        MemmapStorage(tmp_path / "runs", mode="append") as storage,
        part(storage=storage) as second,
    ):
        second.load_state_dict(state)
        next(iter(second))
    with part(storage=tmp_path / "runs", resume=True) as third:
        assert third.ledger.stored == 10


@pytest.mark.parametrize("layout", ["torchrl", "lanes", "trajectories"])
@pytest.mark.parametrize("first", [False, True])
def test_a_batch_that_is_not_flat_is_refused(tmp_path: Path, layout: str, first: bool) -> None:
    """The storage would otherwise store rows of several transitions each."""
    with SyncCollector(
        "CartPole-v1", num_envs=3, frames_per_batch=30, total_frames=30, seed=0, layout=layout
    ) as collector:
        (batch,) = collector
    mask = batch["collector"].get("mask", None)
    flat = batch.reshape(-1) if mask is None else batch[mask]
    flat = flat.exclude(("collector", "mask"), ("collector", "cut"))
    with MemmapStorage(tmp_path / "rows") as storage:
        if first:
            storage.extend(flat)
        arrays = {as_key(key): batch[key].numpy() for key in flat.keys(True, True)}
        for rows in (batch, batch.exclude(("collector", "mask"), ("collector", "cut")), arrays):
            with pytest.raises(RowsMismatch, match=r"\[lanes, time\]\. Give batch.reshape\(-1\)"):
                storage.extend(rows)
        if not first:
            storage.extend(flat)
        assert len(storage) == 30


@pytest.mark.parametrize("way", ["iterate", "collect"])
def test_rows_from_elsewhere_are_not_counted_where_a_write_fails(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise StorageFull("no space")

    with MemmapStorage(tmp_path / "s") as storage:
        options = {"frames_per_batch": 12, "total_frames": 60, "seed": 0, "storage": storage}
        with SyncCollector(vec(), None, **options) as collector:
            batches = iter(collector)
            next(batches)
            storage.extend(storage.get(slice(None)), ids="fresh")  # as many rows as a batch
            monkeypatch.setattr(storage.reader.engine, "append", full)
            with pytest.raises(StorageFull):
                next(batches) if way == "iterate" else collector.collect(12)
            monkeypatch.undo()
            assert collector.ledger.stored == 12
            assert balanced(collector.ledger)
