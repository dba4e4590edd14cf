"""Batches with `layout="torchrl"` equal those of TorchRL's own collector.

The tests compare keys, dtypes, shapes, names and every bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector as TorchrlCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    MultiStepTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule, ProbabilisticActor
from torchrl.objectives.value import GAE, TDLambdaEstimator, VTrace

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.batches.layouts.torchrl_layout import PaddedBatchWarning
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.errors import ArgumentError
from tallyroll.storage import MemmapStorage

from agents_kit import DEEP, GROUP, AgentsEnv
from collect_kit import LENGTHS, ByObservation, assert_same, collect, without_cut
from estimators_kit import GAMMA, LAMBDA, plain_gae, value_net
from oracles import OracleTorchEnv, OracleVectorEnv, check_rows, flat_rows, make_oracle_vec
from pairs import in_gate
from policies_kit import recurrent
from worker_kit import collect_all, in_threads, start

SEED = 3
IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")
OWN = {"lane", "step", "policy_version", "cut"}

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:torchrl"),
    pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning"),
]


class Upright(torch.nn.Module):
    """Policy that pushes a pole back or swings a pendulum, depending only on the observation."""

    def __init__(self, *, box: bool) -> None:
        super().__init__()
        self.box = box

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the action and an additional column."""
        push = observation[..., -2:].sum(-1)
        if self.box:
            return push.clamp(-2, 2).unsqueeze(-1), push
        return torch.nn.functional.one_hot((push > 0).long(), 2), push


def upright(*, box: bool = False) -> TensorDictModule:
    return TensorDictModule(Upright(box=box), ["observation"], ["action", "push"])


def agents_act(td: TensorDictBase) -> TensorDictBase:
    return td.set((GROUP, "action"), td[GROUP, "observation"].sum(-1).long() % 3)


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def serial(make: Callable[[], EnvBase], lanes: int) -> EnvBase:
    return SerialEnv(lanes, make)


def serial_agents() -> EnvBase:
    return SerialEnv(3, [partial(AgentsEnv, None, LENGTHS, first_lane=lane) for lane in range(3)])


def counted(make: Callable[[], EnvBase]) -> EnvBase:
    return TransformedEnv(make(), Compose(InitTracker(), StepCounter(9), RewardSum()))


def primed(cls: Any) -> EnvBase:
    memory, _ = recurrent(cls)
    env = OracleTorchEnv(3, LENGTHS, ends="mixed")
    return TransformedEnv(env, Compose(InitTracker(), memory.make_tensordict_primer()))


class WithoutTruncated(OracleTorchEnv):
    """Oracle that declares only `done` and `terminated`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.full_done_spec["truncated"]

    def _reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return super()._reset(*args, **kwargs).exclude("truncated")

    def _step(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return super()._step(*args, **kwargs).exclude("truncated")


def without_truncated() -> EnvBase:
    return WithoutTruncated(3, LENGTHS)


SOURCES: dict[str, tuple[Callable[[], EnvBase], Callable[[], Any], int]] = {
    "one": (cartpole, upright, 1),
    "one, pendulum": (partial(GymEnv, "Pendulum-v1"), partial(upright, box=True), 1),
    "one in a batch": (partial(serial, cartpole, 1), upright, 1),
    "serial": (partial(serial, cartpole, 3), upright, 3),
    "counted": (partial(counted, partial(serial, cartpole, 3)), upright, 3),
    "counted one": (partial(counted, cartpole), upright, 1),
    "counted in lanes": (
        partial(serial, partial(counted, partial(GymEnv, "Pendulum-v1")), 3),
        partial(upright, box=True),
        3,
    ),
    "batched": (partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"), ByObservation, 3),
    "lstm": (partial(primed, LSTMModule), lambda: recurrent(LSTMModule)[1], 3),
    "gru": (partial(primed, GRUModule), lambda: recurrent(GRUModule)[1], 3),
    "no truncated": (without_truncated, ByObservation, 3),
    "agents": (partial(AgentsEnv, 3, LENGTHS), lambda: agents_act, 3),
    "agents, one lane": (partial(AgentsEnv, None, LENGTHS), lambda: agents_act, 1),
    "serial agents": (serial_agents, lambda: agents_act, 3),
}
KINDS = ("one", "counted", "batched", "lstm", "no truncated", "agents", "serial agents")
"""Sources that differ in the form of their flags, lanes or states."""


def theirs(source: str, **kwargs: Any) -> list[TensorDictBase]:
    make, policy, _ = SOURCES[source]
    env = make()
    env.set_seed(lane_seeds(SEED, 1, 0)[0])
    collector = TorchrlCollector(env, policy(), **kwargs)
    batches = [batch if batch is None else batch.clone() for batch in collector]
    collector.shutdown()
    return batches


def ours(source: str, **kwargs: Any) -> list[TensorDictBase]:
    make, policy, _ = SOURCES[source]
    return collect(make(), policy(), seed=SEED, layout="torchrl", **kwargs)[0]


def assert_theirs(batch: TensorDictBase, wanted: TensorDictBase) -> None:
    """Check that `batch` equals `wanted`, except for trajectory ids and our own columns."""
    assert batch.batch_size == wanted.batch_size
    assert batch.names == wanted.names
    got, expected = set(batch.keys(True)), set(wanted.keys(True))
    assert got - expected == {("collector", name) for name in OWN}
    assert not expected - got
    for key in expected:
        one, other = batch[key], wanted[key]
        if isinstance(other, TensorDictBase):
            assert one.batch_size == other.batch_size, key
            assert one.names == other.names, key
        elif key == IDS:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            # there the end of an agent begins another trajectory
            if (GROUP, "action") not in expected:
                assert torch.equal(one.diff(dim=-1) == 0, other.diff(dim=-1) == 0)
        else:
            assert one.dtype == other.dtype, key
            assert one.shape == other.shape, key
            assert one.numpy().tobytes() == other.numpy().tobytes(), key


@pytest.mark.parametrize(
    ("source", "slots"),
    [*((source, 20) for source in SOURCES), *in_gate(KINDS, [1]), ("one", 2)],
)
def test_batches_are_torchrls(source: str, slots: int) -> None:
    frames = slots * SOURCES[source][2]
    budget = {"frames_per_batch": frames, "total_frames": max(3, 30 // slots) * frames}
    for batch, wanted in zip(ours(source, **budget), theirs(source, **budget), strict=True):
        assert_theirs(batch, wanted)


@pytest.mark.parametrize("source", ["one", "counted", "agents"])
def test_batches_of_more_slots_than_a_slab_has_are_torchrls(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.collector.rollout.slab_plan.MOST_SLOTS", 7)
    lanes = SOURCES[source][2]
    budget = {"frames_per_batch": 20 * lanes, "total_frames": 60 * lanes}
    for batch, wanted in zip(ours(source, **budget), theirs(source, **budget), strict=True):
        assert_theirs(batch, wanted)


@pytest.mark.parametrize("source", KINDS)
def test_truncation_is_set_as_torchrl_does_and_not_stored(source: str, tmp_path: Path) -> None:
    lanes = SOURCES[source][2]
    budget = {"frames_per_batch": 7 * lanes, "total_frames": 14 * lanes}
    if source == "no truncated":
        with pytest.raises(ArgumentError, match="set_truncated=True: expected an environment"):
            ours(source, **budget, set_truncated=True)
        return
    batches = ours(source, **budget, set_truncated=True, storage=tmp_path / "a")
    wanted = theirs(source, **budget, set_truncated=True)
    for batch, other in zip(batches, wanted, strict=True):
        assert_theirs(batch, other)
    make, policy, _ = SOURCES[source]
    collect(make(), policy(), seed=SEED, storage=tmp_path / "b", **budget)
    assert_same(*(stored(tmp_path / name) for name in "ab"))


def stored(path: Path) -> TensorDictBase:
    with MemmapStorage(path, mode="read") as storage:
        return storage.get(slice(None)).clone()


@pytest.mark.parametrize("source", ["one", "serial", "batched"])
def test_split_trajectories_are_torchrls(source: str) -> None:
    lanes = SOURCES[source][2]
    budget: dict[str, Any] = {"frames_per_batch": 20 * lanes, "total_frames": 60 * lanes}
    split = ours(source, **budget, split_trajs=True)
    for batch, wanted in zip(split, theirs(source, **budget, split_trajs=True), strict=True):
        assert batch.batch_size == wanted.batch_size
        assert batch.names == [None, "time"]  # TorchRL drops the names if it pads
        assert torch.equal(batch[MASK], wanted[MASK])
        rows, others = batch[batch[MASK]], wanted[wanted[MASK]]
        # TorchRL's estimators would continue into the padding, so `done` is True at cuts before
        # padding.
        full = bool(batch[MASK].all())
        for key in (key for key in others.keys(True, True) if key != IDS):
            if key[-1] == "done" and key[0] == "next" and not full:
                last = rows["collector", "step"].diff(append=torch.zeros(1, dtype=int)) != 1
                assert torch.equal(rows[key][~last], others[key][~last])
                assert rows[key][last].all()
            else:
                assert torch.equal(rows[key], others[key]), key


# --- values computed from batches ----------------------------------------------------------------


def chooser(observed: int) -> ProbabilisticActor:
    """Return a stochastic policy that is evaluated at its mode."""
    loc = TensorDictModule(torch.nn.Linear(observed, 2), ["observation"], ["loc"])
    scale = TensorDictModule(lambda loc: loc.abs() + 1, ["loc"], ["scale"])
    return ProbabilisticActor(
        TensorDictSequential(loc, scale),
        in_keys=["loc", "scale"],
        out_keys=["chosen"],
        distribution_class=IndependentNormal,
        default_interaction_type=ExplorationType.DETERMINISTIC,
    )


def estimators(observed: int) -> dict[str, Any]:
    critic = TensorDictModule(torch.nn.Linear(observed, 1), ["observation"], ["state_value"])
    return {
        "gae": GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic),
        "td-lambda": TDLambdaEstimator(gamma=GAMMA, lmbda=LAMBDA, value_network=critic),
        "vtrace": VTrace(gamma=GAMMA, value_network=critic, actor_network=chooser(observed)),
    }


@cache
def batches_of_both(source: str) -> list[tuple[TensorDictBase, TensorDictBase]]:
    lanes = SOURCES[source][2]
    budget = {"frames_per_batch": 24 * lanes, "total_frames": 96 * lanes}
    return list(zip(ours(source, **budget), theirs(source, **budget), strict=True))


@pytest.mark.parametrize("name", ["gae", "td-lambda", "vtrace"])
@pytest.mark.parametrize("source", ["one", "serial", "counted", "batched", "one, pendulum"])
def test_targets_and_metrics_are_those_of_torchrls_batches(source: str, name: str) -> None:
    pairs = batches_of_both(source)
    torch.manual_seed(0)
    estimate = estimators(pairs[0][0]["observation"].shape[-1])[name]
    for pair in pairs:
        found = []
        for batch in (each.clone() for each in pair):  # torch's rounding depends on alignment, too
            if name == "vtrace":
                batch[estimate.tensor_keys.sample_log_prob] = (
                    -batch["observation"].sum(-1).abs() / 100 - 2
                )
            out = estimate(batch)
            found.append((out["advantage"].clone(), out["value_target"].clone()))
        for one, other in zip(*found, strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes()
        if source == "counted":
            one, other = (batch["next", "episode_reward"][batch["next", "done"]] for batch in pair)
            assert len(one)
            assert torch.equal(one, other)


# --- padded batches ------------------------------------------------------------------------------


def vec(mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed"))


UNEVEN: dict[str, tuple[Callable[[], Any], int, int]] = {
    "reset slots": (vec, 18, 60),
    "native": (partial(OracleVectorEnv, 3, LENGTHS, ends="mixed"), 18, 60),
    "frames_per_batch": (partial(vec, AutoresetMode.DISABLED), 17, 60),
    "total_frames": (partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"), 18, 61),
    "few": (partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"), 2, 11),
}
IN_STORE = {IDS, *(("collector", name) for name in ("lane", "step", "policy_version"))}


@pytest.mark.parametrize("uneven", list(UNEVEN))
def test_what_is_no_rectangle_is_padded_and_said_once(uneven: str, tmp_path: Path) -> None:
    make, frames, total = UNEVEN[uneven]
    budget: dict[str, Any] = {"frames_per_batch": frames, "total_frames": total}
    with pytest.warns(PaddedBatchWarning, match="Ignore positions where .* is False, or") as said:
        batches, collector = collect(
            make(), ByObservation(), **budget, layout="torchrl", storage=tmp_path / "s"
        )
    assert [str(each.message).count("padded") for each in said] == [1]
    assert ("reset_slots=" in str(said[0].message)) == (uneven in ("reset slots", "native"))
    assert collector.ledger.stored == total
    plain, _ = collect(make(), ByObservation(), **budget, storage=tmp_path / "t")
    assert_same(stored(tmp_path / "s"), stored(tmp_path / "t"))
    gae = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=value_net())
    for batch, rows in zip(batches, plain, strict=True):
        counts = np.bincount(rows["collector", "lane"], minlength=3)
        assert batch.batch_size == (3, counts.max())
        assert batch.names == [None, "time"]
        if (counts == counts.max()).all():
            assert batch.get(MASK, None) is None
            continue
        assert np.array_equal(batch[MASK], np.arange(counts.max()) < counts[:, None])
        assert not any(leaf[~batch[MASK]].any() for leaf in batch.values(True, True))
        flat = flat_rows(batch)
        for key in IN_STORE | {"observation", "action", ("next", "terminated")}:
            assert torch.equal(flat[key], rows[key]), key
        last = flat["collector", "lane"].diff(append=torch.full((1,), -1)) != 0
        own = rows["next", "terminated"] | rows["next", "truncated"]
        assert torch.equal(flat["next", "done"], own | last.unsqueeze(-1))
        assert not flat["done"].any()
        got = flat_rows(gae(batch))["advantage"].view(-1).tolist()
        assert got == pytest.approx(plain_gae(rows).tolist(), rel=1e-4, abs=1e-3)


def test_set_truncated_marks_the_last_rows_of_padded_lanes() -> None:
    with pytest.warns(PaddedBatchWarning):
        batches, _ = collect(
            vec(), frames_per_batch=18, total_frames=54, layout="torchrl", set_truncated=True
        )
    for batch in batches:
        flat = flat_rows(batch)
        last = flat["collector", "lane"].diff(append=torch.full((1,), -1)) != 0
        assert flat["next", "truncated"][last].all()
        assert flat["next", "done"][last].all()


@pytest.mark.parametrize("layout", ["rows", "lanes", "trajectories"])
def test_set_truncated_is_of_this_layout_only(layout: Any) -> None:
    with pytest.raises(ArgumentError, match='set_truncated: expected layout="torchrl", in which'):
        collect(cartpole(), frames_per_batch=5, total_frames=5, layout=layout, set_truncated=True)


# --- into a replay buffer, and through a postproc ------------------------------------------------


def buffer(ndim: int) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(300, ndim=ndim), batch_size=5)


@pytest.mark.parametrize(
    ("source", "ndim"), [("one", 1), ("serial", 2), ("serial", 1), ("agents", 2), ("batched", 1)]
)
@pytest.mark.parametrize("processed", [False, True])
def test_a_torchrl_buffer_holds_what_torchrls_collector_puts_there(
    source: str, ndim: int, processed: bool
) -> None:
    lanes = SOURCES[source][2]
    budget: dict[str, Any] = {"frames_per_batch": 10 * lanes, "total_frames": 40 * lanes}
    if processed:
        budget["postproc"] = lambda td: td.set("more", td["next", "done"].float())
    mine, other = buffer(ndim), buffer(ndim)
    batches = ours(source, **budget, replay_buffer=mine)
    assert theirs(source, **budget, replay_buffer=other) == [None] * 4
    assert (len(mine), mine.write_count) == (len(other), other.write_count)
    held, wanted = (each[:].exclude("index", IDS) for each in (mine, other))
    own = [("collector", name) for name in OWN]
    assert held.batch_size == wanted.batch_size
    assert_same(held.exclude(*own), wanted)
    assert sum(batch.numel() for batch in batches) == 40 * lanes


def test_collecting_without_yielding_fills_it_too() -> None:
    mine, other = buffer(2), buffer(2)
    with SyncCollector(
        SOURCES["serial"][0](),
        upright(),
        frames_per_batch=30,
        total_frames=120,
        seed=SEED,
        layout="torchrl",
        replay_buffer=mine,
    ) as collector:
        assert collector.collect(120) == 120
    theirs("serial", frames_per_batch=30, total_frames=120, replay_buffer=other)
    assert torch.equal(mine[:]["observation"], other[:]["observation"])


def test_a_buffer_over_a_storage_gets_rows(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "s")
    over = TensorDictReplayBuffer(storage=storage, batch_size=5)
    ours("serial", frames_per_batch=30, total_frames=120, replay_buffer=over)
    collect(
        SOURCES["serial"][0](), upright(), frames_per_batch=30, total_frames=120, seed=SEED,
        storage=tmp_path / "t",
    )  # fmt: skip
    assert len(storage) == 120
    assert_same(storage.get(slice(None)).clone(), stored(tmp_path / "t"))
    storage.close()


@pytest.mark.parametrize(
    ("make", "kwargs", "match"),
    [
        (partial(serial, cartpole, 3), {"frames_per_batch": 31}, "frames_per_batch: .* of 3 lanes"),
        (partial(serial, cartpole, 3), {"total_frames": 61}, "total_frames: .* a multiple of 3 la"),
        (vec, {}, "with reset slots, the lanes of an item differ"),
        (
            partial(serial, cartpole, 3),
            {"total_frames": None, "total_episodes": 3},
            "with total_episodes, the lanes of an item differ",
        ),
    ],
)
def test_a_torchrl_buffer_is_refused_what_it_cannot_hold(
    make: Any, kwargs: dict[str, Any], match: str
) -> None:
    kwargs = {"frames_per_batch": 30, "total_frames": 60, **kwargs}
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(make(), layout="torchrl", replay_buffer=buffer(2), **kwargs)


def test_a_postproc_gets_the_batch_of_torchrl(tmp_path: Path) -> None:
    seen: list[TensorDictBase] = []

    def look(batch: TensorDictBase) -> TensorDictBase:
        seen.append(batch.clone())
        return batch.set("doubled", 2 * batch["action" if source == "serial" else "time"])

    budget: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 120, "set_truncated": True}
    for source in ("serial", "agents"):
        seen.clear()
        batches = ours(source, **budget, postproc=look, storage=tmp_path / source)
        for batch, given, wanted in zip(batches, seen, theirs(source, **budget), strict=True):
            assert_theirs(given, wanted)
            assert_theirs(batch.exclude("doubled", (GROUP, "doubled")), wanted)
        ours(source, **budget, storage=tmp_path / f"{source} plain")
        kept, plain = stored(tmp_path / source), stored(tmp_path / f"{source} plain")
        assert_same(kept.exclude("doubled"), plain)
        assert torch.equal(kept["doubled"], 2 * plain["action" if source == "serial" else "time"])
        if source == "agents":
            for level in (GROUP, DEEP, ("next", GROUP)):
                assert kept[level].batch_size == plain[level].batch_size


def test_a_postproc_may_make_other_rows_where_none_are_stored() -> None:
    steps = MultiStepTransform(n_steps=3, gamma=0.9)
    budget = {"frames_per_batch": 30, "total_frames": 120}
    mine = ours("serial", **budget, postproc=steps)
    wanted = theirs("serial", **budget, postproc=MultiStepTransform(n_steps=3, gamma=0.9))
    for batch, other in zip(mine, wanted, strict=True):
        assert batch.batch_size == other.batch_size
        assert torch.equal(batch["next", "reward"], other["next", "reward"])


# --- devices, workers ----------------------------------------------------------------------------


def test_the_device_is_torchrls() -> None:
    budget: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 60, "storing_device": "cpu"}
    for batch, wanted in zip(ours("serial", **budget), theirs("serial", **budget), strict=True):
        assert batch.device == wanted.device == torch.device("cpu")
        assert_theirs(batch, wanted)


def plain_env(first: int, lanes: int | None) -> EnvBase:
    return OracleTorchEnv(lanes, LENGTHS, first_lane=first, ends="mixed")


@pytest.mark.parametrize(
    ("lanes", "size"), [((None, None), (2, 8)), ((2, 2), (2, 2, 8)), ((2, 1), (3, 8))]
)
def test_workers_in_step_are_stacked_as_torchrls_are(lanes: Any, size: Any) -> None:
    count = sum(each or 1 for each in lanes)
    makes = [partial(plain_env, w * (lanes[0] or 1), own) for w, own in enumerate(lanes)]
    budget: dict[str, Any] = {"frames_per_batch": 8 * count, "total_frames": 24 * count}
    with in_threads():
        run = collect_all(start(makes, ByObservation(), layout="torchrl", **budget))
    alone, _ = collect(plain_env(0, count), ByObservation(), layout="torchrl", **budget)
    for batch, rows in zip(run.batches, alone, strict=True):
        assert batch.batch_size == size
        assert batch.names == [*[None] * (len(size) - 1), "time"]
        assert_same(batch.reshape(-1), rows.reshape(-1))


@pytest.mark.parametrize(("lanes", "lead"), [(None, ()), (2, (2,)), (1, (1,))])
@pytest.mark.parametrize("total", [120, 111])
def test_workers_on_their_own_give_batches_of_their_own(lanes: Any, lead: Any, total: int) -> None:
    own = lanes or 1
    makes = [partial(plain_env, worker * own, lanes) for worker in range(3)]
    with warnings.catch_warnings(), in_threads():
        if total % own:
            warnings.simplefilter("ignore", PaddedBatchWarning)
        run = collect_all(
            start(makes, ByObservation(), mode="async", layout="torchrl", frames_per_batch=12,
                  total_frames=total)
        )  # fmt: skip
    rows = []
    for batch in run.batches:
        assert batch.batch_size[:-1] == lead
        assert batch.names == [*[None] * len(lead), "time"]
        rows.append(flat_rows(batch))
        assert len({lane // own for lane in rows[-1]["collector", "lane"].tolist()}) == 1
    sizes = [len(each) for each in rows]
    assert sum(sizes) == total == run.collector.ledger.stored
    if total % 12 == 0:
        assert set(sizes) == {12}
    joined = torch.cat([without_cut(each.exclude(MASK)) for each in rows])
    check_rows(joined, LENGTHS, ends="mixed", from_start=True)


def test_a_batch_of_a_worker_is_whole_however_many_slots_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tallyroll.collector.rollout.slab_plan.MOST_SLOTS", 7)
    makes = [partial(plain_env, 2 * worker, 2) for worker in range(2)]
    budget: dict[str, Any] = {"frames_per_batch": 40, "total_frames": 160}
    with in_threads():
        run = collect_all(start(makes, ByObservation(), mode="async", layout="torchrl", **budget))
    assert [batch.batch_size for batch in run.batches] == [(2, 20)] * 4


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("lanes", [None, 2])
def test_a_torchrl_buffer_behind_workers(mode: Any, lanes: Any) -> None:
    own = lanes or 1
    makes = [partial(plain_env, worker * own, lanes) for worker in range(2)]
    held = buffer(1 if lanes is None else 2)
    with in_threads():
        collect_all(
            start(makes, ByObservation(), mode=mode, layout="torchrl", replay_buffer=held,
                  frames_per_batch=12 * own, total_frames=48 * own)
        )  # fmt: skip
    assert len(held) == 48 * own
    assert held[:].batch_size == ((48,) if lanes is None else (2, 48))
    check_rows(held[:].reshape(-1).exclude("index"), LENGTHS, ends="mixed", contiguous=False)


def test_an_id_is_one_system_however_many_processes_step_it() -> None:
    with in_threads():
        run = collect_all(
            start("CartPole-v1", num_envs=4, num_workers=2, layout="torchrl",
                  frames_per_batch=40, total_frames=40)
        )  # fmt: skip
    assert run.batches[0].batch_size == (4, 10)


def test_flags_of_groups_are_followed_between_yields(tmp_path: Path) -> None:
    """Rows that `collect` stores between yields are checked too."""
    with SyncCollector(
        AgentsEnv(3, LENGTHS), agents_act, frames_per_batch=3, total_frames=90,
        layout="torchrl", storage=tmp_path / "s",
    ) as collector:  # fmt: skip
        batches, at = [], []
        batch = iter(collector)
        for _ in range(15):
            collector.collect(3)
            at.append(collector.ledger.stored)
            batches.append(next(batch))
    whole = ours("agents", frames_per_batch=90, total_frames=90)[0]
    assert whole[GROUP, "done"].any()
    for start_at, each in zip(at, batches, strict=True):
        time = start_at // 3
        for key in ("done", (GROUP, "done"), (GROUP, "terminated"), (*DEEP, "done")):
            assert torch.equal(each[key], whole[:, time : time + 1][key])


def test_nested_levels_keep_their_names() -> None:
    batch = ours("agents", frames_per_batch=12, total_frames=12)[0]
    assert batch.names == [None, "time"]
    assert batch[GROUP].batch_size == (3, 4, 2)
    assert isinstance(batch, TensorDict)
