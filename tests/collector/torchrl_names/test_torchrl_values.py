"""TorchRL's arguments act as in TorchRL where its behavior is exact and correct."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torchrl_kit
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential
from torchrl.collectors import VanillaWeightUpdater, WeightUpdaterBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import AdditiveGaussianModule, RandomPolicy
from torchrl.weight_update import NoWeightSyncScheme, SharedMemWeightSyncScheme
from torchrl_kit import assert_batches_alike, both

from tallyroll.collector.batches.layouts.torchrl_layout import PaddedBatchWarning
from tallyroll.collector.errors import ArgumentError, PolicyError, StateError
from tallyroll.collector.torchrl import Collector
from tallyroll.storage import MemmapStorage

from collect_kit import ByObservation
from oracles import OracleTorchEnv
from policies_kit import linear

KIT = str(torchrl_kit.__file__)
LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]


def env(lanes: int | None = 3) -> OracleTorchEnv:
    return OracleTorchEnv(lanes, LENGTHS, ends="mixed")


def run(name: str = "Collector", lanes: int | None = 3, **given: Any) -> list[list[Any]]:
    """Return all batches of TorchRL's collector and of ours."""
    given = {"frames_per_batch": 12, "total_frames": 36, **given}
    return [list(each) for _, each in both(partial(env, lanes), ByObservation, name, **given)]


@pytest.mark.parametrize("lanes", [None, 1, 3])
def test_batches_are_those_of_torchrl(lanes: int | None) -> None:
    theirs, mine = run(lanes=lanes)
    assert len(mine) == len(theirs) == 3
    for one, other in zip(theirs, mine, strict=True):
        assert_batches_alike(one, other)


@pytest.mark.filterwarnings("ignore:.*divisible by:UserWarning")  # warning of TorchRL
def test_batches_are_rounded_up_to_as_many_for_each_lane() -> None:
    with pytest.warns(UserWarning, match="frames_per_batch=10 .* batches have 12") as told:
        theirs, mine = run(frames_per_batch=10)
    assert len([w for w in told if "as in TorchRL. total_frames stays" in str(w.message)]) == 1
    assert [str(w.filename) for w in told if "as in TorchRL" in str(w.message)] == [KIT]
    assert len(theirs) == len(mine) == 3
    for one, other in zip(theirs, mine, strict=True):
        assert_batches_alike(one, other)
    with pytest.warns(UserWarning, match="batches have 12"):
        collector = Collector(env(), ByObservation(), frames_per_batch=10, total_frames=32)
    with collector:
        assert len(collector) == 3
        assert collector.requested_frames_per_batch == 12
        with pytest.warns(PaddedBatchWarning):
            batches = list(collector)
    ones = torch.ones(())
    counts = [each.get(("collector", "mask"), ones.expand(each.shape)) for each in batches]
    assert [int(each.sum()) for each in counts] == [12, 12, 8], "as many as were asked for"
    with Collector(
        env(), ByObservation(), frames_per_batch=10, total_frames=20, layout="rows"
    ) as collector:
        assert [len(batch) for batch in collector] == [10, 10]


@pytest.mark.filterwarnings(
    "ignore:.*divisible by:UserWarning",
    "ignore:.*as in TorchRL:UserWarning",
    "ignore:Using `add:UserWarning",
)
def test_rounded_batches_fill_a_buffer_and_want_a_ring_that_holds_them(tmp_path: Any) -> None:
    theirs, mine = filled(3, 2, frames_per_batch=10)
    assert mine.write_count == theirs.write_count
    assert_batches_alike(theirs[:], mine[:], names=False)
    for given in ({"extend_buffer": False}, {"interruptor": Interruptor(9)}):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        with Collector(
            env(), None, frames_per_batch=10, total_frames=24, replay_buffer=buffer, **given
        ) as collector:
            assert list(collector) == [None, None]
    with (
        MemmapStorage(tmp_path / "ring", max_size=11) as storage,
        pytest.raises(ArgumentError, match=r"rows of the ring .*, got 12"),
    ):
        Collector(env(), None, frames_per_batch=10, storage=storage)


def test_lanes_are_reset_before_each_batch() -> None:
    # TorchRL also resets before the first batch, which only such an oracle shows.
    theirs, mine = run(reset_at_each_iter=True)
    assert [batch.shape for batch in theirs] == [batch.shape for batch in mine]
    for batch in (*theirs, *mine):
        assert (batch["observation"][:, 0, 2] == 0).all()


def test_last_frames_are_truncated_where_it_is_wished() -> None:
    theirs, mine = run(set_truncated=True)
    for one, other in zip(theirs, mine, strict=True):
        assert_batches_alike(one, other)
        assert one["next", "truncated"][:, -1].all()


def test_trajectories_are_split() -> None:
    with pytest.warns(UserWarning, match="split_trajs"):
        theirs, mine = run(split_trajs=True)
    for one, other in zip(theirs, mine, strict=True):
        mask, own = one["collector", "mask"], other["collector", "mask"]
        assert sorted(mask.sum(-1).tolist()) == sorted(own.sum(-1).tolist())
        seen = [
            set(map(tuple, b["observation"][m].tolist())) for b, m in ((one, mask), (other, own))
        ]
        assert seen[0] == seen[1]


def test_whole_floats_and_limits_that_are_none() -> None:
    given = {"frames_per_batch": 4.0, "total_frames": 1e1, "max_frames_per_traj": -1}
    with Collector(env(None), None, init_random_frames=None, **given) as collector:
        assert [len(batch) for batch in collector] == [4, 4, 2], "exactly, and no more"
    for limit in (None, 0, -1):
        with Collector(env(None), None, frames_per_batch=6, max_frames_per_traj=limit) as collector:
            assert "step_count" not in next(iter(collector)).keys()
    with Collector(env(None), None, frames_per_batch=6, max_frames_per_traj=2.0) as collector:
        assert collector.next()["next", "truncated"].reshape(-1).tolist()[1]
    for total in (-1, None):
        with Collector(env(None), None, frames_per_batch=6, total_frames=total) as collector:
            assert collector.total_frames == float("inf")


def test_the_second_iteration_goes_on_where_the_first_one_stopped() -> None:
    found = []
    for _, collector in both(env, ByObservation, frames_per_batch=12, total_frames=36):
        first = next(iter(collector))
        rest = list(collector)
        found.append([first, *rest])
        assert list(collector) == []
    for one, other in zip(*found, strict=True):
        assert_batches_alike(one, other)


def test_next_and_rollout_give_batches() -> None:
    found = []
    for _, collector in both(env, ByObservation, frames_per_batch=12, total_frames=36):
        taken = collector.next().clone(), collector.rollout().clone()  # TorchRL reuses the memory
        found.append([*taken, *collector.iterator()])
        assert collector.next() is None or len(found[-1]) == 4  # TorchRL does not count rollout()
    assert_batches_alike(found[0][0], found[1][0])
    assert_batches_alike(found[0][1], found[1][1])
    assert len(found[1]) == 3, "what rollout() gives is counted"


def test_factories_get_their_keywords() -> None:
    given: dict[str, Any] = {"create_env_kwargs": {"lengths": [2]}, "frames_per_batch": 4}
    with Collector(partial(OracleTorchEnv, None), None, **given) as collector:
        assert collector.next()["next", "done"].reshape(-1).tolist()[1]
    with Collector([partial(OracleTorchEnv, None)], None, **given) as collector:
        assert collector.next() is not None
    serial = SerialEnv(2, OracleTorchEnv, create_env_kwargs={})
    given["create_env_kwargs"] = [{"first_lane": 4}, {"first_lane": 5}]
    with Collector(serial, None, **given) as collector:
        assert collector.next()["observation"][:, 0, 0].tolist() == [4.0, 5.0]
    with pytest.raises(ArgumentError, match="num_collectors=2"):
        Collector([env, env], frames_per_batch=4)


def test_a_policy_factory_makes_the_policy() -> None:
    with Collector(env(None), policy_factory=ByObservation, frames_per_batch=4) as collector:
        assert isinstance(collector.policy, ByObservation)
        assert collector.next() is not None
    with pytest.raises(ArgumentError, match="one for all workers"):
        Collector(env(None), policy_factory=[linear, ByObservation], frames_per_batch=4)


def test_a_random_policy_without_a_spec_draws_of_the_environment() -> None:
    policy = RandomPolicy()
    with Collector(env(None), policy, frames_per_batch=40) as collector:
        assert policy.action_spec is not None
        assert set(collector.next()["action"].tolist()) == {0, 1}


def test_exploration_without_a_spec_gets_that_of_the_environment() -> None:
    net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    policy = Sequential(net, AdditiveGaussianModule(spec=None, device="cpu"))
    box = OracleTorchEnv(2, (5,), action="box")
    with Collector(box, policy, frames_per_batch=20) as collector:
        assert collector.next()["action"].abs().max() <= 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # warning of torch's compiler
@pytest.mark.parametrize(
    "keywords",
    [pytest.param({}, marks=[pytest.mark.slow, pytest.mark.timeout(300)]), {"backend": "eager"}],
)
def test_a_policy_is_compiled_and_acts_the_same(keywords: dict[str, Any]) -> None:
    policy, asked = linear(), {"compile_policy": keywords or True}
    given: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 36, "seed": 0}
    with Collector(env(), policy, **given) as plain:
        want = list(plain)
    with Collector(env(), policy, **given, **asked) as collector:
        got = list(collector)
        assert collector.compiled_policy
        assert collector.compiled_policy_kwargs == keywords
        collector.update_policy_weights_(linear(seed=1))
        assert torch.equal(policy[0].module.weight, linear(seed=1)[0].module.weight)
        assert set(collector.policy.state_dict()) == set(policy.state_dict())
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one["action"], other["action"])
        torch.testing.assert_close(one["logits"], other["logits"])


@pytest.mark.filterwarnings("ignore:.*PyTree:UserWarning")  # warning of the first graph
def test_a_graph_is_captured_on_a_gpu_and_else_torchrl_warns() -> None:
    given: dict[str, Any] = {"frames_per_batch": 6, "cudagraph_policy": True, "seed": 0}
    with Collector(env(), linear(), frames_per_batch=6, seed=0) as plain:
        want = plain.next()
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA"):
            (got,) = Collector(env(), linear(), total_frames=6, **given)
        assert torch.equal(got["action"], want["action"])


class Seeing(ByObservation):
    """Policy that writes its exploration type."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and the exploration type."""
        now = exploration_type() is ExplorationType.DETERMINISTIC
        return super().forward(td).set("plain", torch.full(td.batch_size, now))


def test_the_exploration_type_is_set() -> None:
    for given, want in (
        (ExplorationType.DETERMINISTIC, True),
        (ExplorationType.RANDOM, False),
        (None, False),
    ):
        with Collector(env(), Seeing(), frames_per_batch=6, exploration_type=given) as collector:
            assert (collector.next()["plain"] == want).all()


def test_devices_are_those_of_our_collectors() -> None:
    with Collector(env(), linear(), frames_per_batch=6, device="cpu") as collector:
        cpu = torch.device("cpu")
        assert collector.next().device == cpu
        assert collector.device == collector.policy_device == collector.storing_device == cpu
    with Collector(
        env(), linear(), frames_per_batch=6, storing_device="cpu", env_device="cpu"
    ) as c:
        assert c.env_device == torch.device("cpu")


def test_a_postproc_gets_what_is_yielded() -> None:
    shapes: list[Any] = []

    def halve(batch: TensorDictBase) -> TensorDictBase:
        shapes.append((batch.batch_size, batch.names))
        return batch[..., ::2]

    theirs, mine = run(postproc=halve)
    assert shapes[:3] == shapes[3:] == [((3, 4), [None, "time"])] * 3
    for one, other in zip(theirs, mine, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one["observation"], other["observation"])


def test_hooks_are_called_around_each_batch() -> None:
    calls: list[Any] = []
    given: dict[str, Any] = {
        "pre_collect_hook": lambda: calls.append("before"),
        "post_collect_hook": lambda batch: calls.append(tuple(batch.shape)),
    }
    run(**given)
    assert calls == ["before", (3, 4)] * 6
    with Collector(env(), None, frames_per_batch=6, total_frames=6) as collector:
        collector.set_post_collect_hook(calls.append)
        last = collector.next()
    assert calls[-1] is last


class Interruptor:
    """Interruptor that stops collection from its `at`-th call on."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def collection_stopped(self) -> bool:
        """Return True to stop."""
        self.asked += 1
        return self.asked >= self.at


def test_an_interruptor_ends_the_batch_and_not_the_run() -> None:
    rows = []
    for _, collector in both(
        env, ByObservation, frames_per_batch=12, total_frames=36, interruptor=Interruptor(3)
    ):
        collector.interruptor = Interruptor(3)
        batch = next(iter(collector))
        ids = batch["collector", "traj_ids"]
        rows.append(batch[..., : int((ids != -1).sum(-1).max())])
    assert rows[1].shape == (3, 3)
    assert_batches_alike(*rows)


def test_compact_batches_have_observations_once() -> None:
    theirs, mine = run(compact_obs=True)
    for one, other in zip(theirs, mine, strict=True):
        assert ("next", "observation") not in other.keys(True)
        assert_batches_alike(one, other)


def test_versions_stand_where_torchrl_has_them() -> None:
    found = []
    for _, collector in both(
        partial(env, None), linear, frames_per_batch=4, track_policy_version=True
    ):
        batches, policy = [], linear(seed=1)
        for number, batch in enumerate(collector):
            batches.append(batch["next", "policy_version"].reshape(-1).tolist())
            collector.update_policy_weights_(TensorDict.from_module(policy))
            if number == 2:
                break
        collector.increment_version()
        found.append((batches, collector.policy_version, collector.get_policy_version()))
    assert found[0] == found[1]


def test_random_frames_are_counted_with_what_a_buffer_holds() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    for want in (8, 4, 0):
        with Collector(
            env(None),
            ByObservation(),
            frames_per_batch=4,
            total_frames=4,
            init_random_frames=8,
            replay_buffer=buffer,
        ) as collector:
            assert collector.init_random_frames == 8
            assert list(collector) == [None]
            assert collector.ledger.random == min(want, 4)


# --- replay buffers -------------------------------------------------------------------------------


def filled(lanes: int | None, ndim: int, **given: Any) -> list[ReplayBuffer]:
    buffers = []
    given = {"frames_per_batch": 12, "total_frames": 36, **given}
    for name in ("theirs", "ours"):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=ndim), batch_size=4)
        for who, collector in both(
            partial(env, lanes), ByObservation, replay_buffer=buffer, **given
        ):
            if who == name:
                assert list(collector) == [None] * 3
        buffers.append(buffer)
    return buffers


@pytest.mark.parametrize(("lanes", "ndim"), [(None, 1), (3, 1), (3, 2)])
def test_with_a_buffer_none_is_yielded_and_the_rows_are_in_it(lanes: int | None, ndim: int) -> None:
    theirs, mine = filled(lanes, ndim)
    assert mine.write_count == theirs.write_count
    assert_batches_alike(theirs[:], mine[:], names=False)


@pytest.mark.filterwarnings("ignore:Using `add:UserWarning")  # TorchRL's warning about its items
@pytest.mark.parametrize("lanes", [None, 3])
def test_steps_go_one_by_one_into_a_buffer(lanes: int | None) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    given: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 24, "extend_buffer": False}
    with Collector(env(lanes), ByObservation(), replay_buffer=buffer, **given) as collector:
        assert list(collector) == [None, None]
    assert buffer.write_count == (24 if lanes is None else 8)


def test_a_storage_of_ours_behind_a_buffer_gets_rows(tmp_path: Any) -> None:
    with MemmapStorage(tmp_path / "rows", max_size=100) as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        given: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 35}
        with pytest.warns(UserWarning, match="batches have 12"):
            collector = Collector(env(), ByObservation(), replay_buffer=buffer, **given)
        with collector:
            assert list(collector) == [None] * 3
            assert len(storage) == buffer.write_count == 35
            assert collector.stats()["frames"] == 35
        assert buffer.sample().shape == (4,)


def test_lanes_of_unequal_length_enter_no_buffer_of_rectangles() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4)
    with (
        pytest.raises(ArgumentError, match="total_frames"),
        Collector(
            env(), None, frames_per_batch=12, total_frames=35, replay_buffer=buffer
        ) as collector,
    ):
        collector.next()


# --- whole trajectories ---------------------------------------------------------------------------


def whole(rows: TensorDictBase) -> list[list[float]]:
    """Return the observations of each trajectory of a padded batch."""
    return [
        each["observation"][mask].tolist()
        for each, mask in zip(rows, rows["collector", "mask"], strict=True)
    ]


@pytest.mark.parametrize("form", ["padded", "cat"])
def test_whole_trajectories_are_those_of_torchrl(form: str) -> None:
    given: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 48, "traj_format": form}
    found = []
    for _, collector in both(env, ByObservation, trajs_per_batch=3, **given):
        found.append(list(collector))
    theirs, mine = found
    assert len(mine) == len(theirs) > 2
    if form == "padded":
        flat = [sorted(traj for batch in each for traj in whole(batch)) for each in found]
        assert flat[0] == flat[1]
    else:
        assert all(batch["next", "done"].sum() == 3 for batch in mine)
        flat = [
            sorted(row for batch in each for row in batch["observation"].tolist()) for each in found
        ]
        assert flat[0] == flat[1]


def test_whole_trajectories_go_to_a_buffer() -> None:
    found = []
    asked: list[dict[str, Any]] = [
        {"trajs_per_batch": 1},
        {"trajs_per_batch": 1, "trajs_per_write": 2},
        {"replay_write_mode": "trajectory"},
        {"replay_write_mode": "trajectory", "trajs_per_write": 2},
    ]
    for each in asked:
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        given: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 48, **each}
        with Collector(env(), ByObservation(), replay_buffer=buffer, **given) as collector:
            assert collector.replay_write_mode == "trajectory"
            assert set(collector) == {None}
        rows = buffer[:]
        assert rows["next", "done"][-1]
        step = rows["collector", "step"].tolist()
        begins = [at for at, number in enumerate(step) if number == 0]
        assert all(rows["next", "done"][at - 1] for at in begins[1:]), "one after the other, whole"
        found.append(rows)
    for rows in found[1:]:
        assert torch.equal(found[0]["observation"], rows["observation"])


def test_whole_trajectories_of_interrupted_batches_go_to_a_buffer_once() -> None:
    found = []
    for interruptor in (None, Interruptor(2)):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        given: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 48, "trajs_per_batch": 1}
        with Collector(
            env(), ByObservation(), replay_buffer=buffer, interruptor=interruptor, **given
        ) as collector:
            assert set(collector) == {None}
        rows = buffer[:]
        numbers = rows["collector", "traj_ids"].tolist(), rows["collector", "step"].tolist()
        found.append(sorted(zip(*numbers, rows["observation"].tolist(), strict=True)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("wanted", "given", "said"),
    [
        (None, {}, ""),
        ("rollout", {"buffer": True}, ""),
        ("rollout", {"buffer": True, "replay_write_mode": "rollout"}, ""),
        (
            None,
            {"buffer": True, "replay_write_mode": "both"},
            r"expected one of \['rollout', 'traj",
        ),
        (None, {"replay_write_mode": "trajectory"}, "Give replay_buffer="),
        (
            None,
            {"buffer": True, "replay_write_mode": "trajectory", "trajs_per_batch": 2},
            "Leave trajs_per_batch out",
        ),
        (
            None,
            {"buffer": True, "replay_write_mode": "rollout", "trajs_per_write": 2},
            'trajs_per_write needs replay_write_mode="trajectory"',
        ),
        (
            None,
            {"buffer": True, "replay_write_mode": "trajectory", "set_truncated": True},
            "replay_write_mode gives whole trajectories. Leave set_truncated out",
        ),
        (
            None,
            {"buffer": True, "replay_write_mode": "trajectory", "extend_buffer": False},
            "Leave extend_buffer out",
        ),
    ],
)
def test_how_a_buffer_is_written_is_said_or_refused(
    wanted: str | None, given: dict[str, Any], said: str
) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100)) if given.pop("buffer", None) else None
    given = {"frames_per_batch": 12, "replay_buffer": buffer, **given}
    if said:
        with pytest.raises(ArgumentError, match=said):
            Collector(env(), ByObservation(), **given)
    else:
        with Collector(env(), ByObservation(), **given) as collector:
            assert collector.replay_write_mode == wanted


def test_cut_trajectories_are_dropped_where_every_batch_resets() -> None:
    given: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 48, "reset_at_each_iter": True}
    with Collector(env(), ByObservation(), trajs_per_batch=1, **given) as collector:
        for batch in collector:
            assert batch["next", "done"][0].any()
            assert batch["collector", "step"][0, 0] == 0
        assert not len(collector._whole._open)


# --- weights --------------------------------------------------------------------------------------


def weight(policy: Any) -> torch.Tensor:
    return policy[0].module.weight.data


FORMS = {
    "module": lambda new: ((new,), {}),
    "tensordict": lambda new: ((TensorDict.from_module(new),), {}),
    "data": lambda new: ((TensorDict.from_module(new).data,), {}),
    "state dict": lambda new: ((new.state_dict(),), {}),
    "weights": lambda new: ((), {"weights": TensorDict.from_module(new)}),
    "policy": lambda new: ((), {"policy": new}),
    "policy_weights": lambda new: ((), {"policy_weights": TensorDict.from_module(new)}),
    "policy_or_weights": lambda new: ((), {"policy_or_weights": new}),
    "weights_dict": lambda new: ((), {"weights_dict": {"policy": new}}),
    "model_id": lambda new: ((new,), {"model_id": "policy"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_taken_in_every_form(form: str) -> None:
    policy, new = linear(), linear(seed=1)
    with Collector(env(), policy, frames_per_batch=6) as collector:
        args, kwargs = FORMS[form](new)
        collector.update_policy_weights_(*args, **kwargs)
        assert torch.equal(weight(policy), weight(new))
        assert collector.policy_version == 1
        collector.update_policy_weights_()
        collector.increment_version()
        assert collector.get_policy_version() == 3
        assert collector.get_model("policy") is collector.policy is policy


def test_a_weight_updater_says_which_weights() -> None:
    policy, new, hooked = linear(), linear(seed=1), []
    updater = VanillaWeightUpdater(
        weight_getter=lambda: TensorDict.from_module(new).data,
        policy_weights=TensorDict.from_module(policy).data.lock_(),
    )
    updater.register_post_hook(lambda: hooked.append(True))
    for given in (updater, lambda: updater):
        with Collector(env(), policy, frames_per_batch=6, weight_updater=given) as collector:
            collector.init_updater()
            collector.update_policy_weights_()
            assert torch.equal(weight(policy), weight(new))
            assert collector.policy_version == 1
    assert hooked == [True, True]


def test_a_weight_updater_of_ones_own_is_called() -> None:
    with pytest.warns(DeprecationWarning, match="WeightUpdaterBase"):

        class Own(WeightUpdaterBase):
            def _sync_weights_with_worker(
                self, *, worker_id: Any = None, server_weights: Any
            ) -> None:
                self.collector.policy.load_state_dict(server_weights)

    policy, new = linear(), linear(seed=1)
    with Collector(env(), policy, frames_per_batch=6, weight_updater=Own) as collector:
        collector.update_policy_weights_(new.state_dict())
        assert torch.equal(weight(policy), weight(new))


def test_schemes_of_shared_memory_are_taken() -> None:
    scheme = {"policy": SharedMemWeightSyncScheme()}
    with Collector(env(), linear(), frames_per_batch=6, weight_sync_schemes=scheme) as collector:
        collector.update_policy_weights_(linear(seed=1))
        assert collector._weight_sync_schemes == scheme
    with pytest.raises(ArgumentError, match="shared memory"):
        Collector(env(), frames_per_batch=6, weight_sync_schemes={"policy": NoWeightSyncScheme()})


# --- seeds, states, the end -----------------------------------------------------------------------


def test_set_seed_gives_a_seed_for_the_next_one_and_begins_anew() -> None:
    with Collector(env(), None, frames_per_batch=6) as collector:
        collector.next()
        other = collector.set_seed(3)
        assert isinstance(other, int)
        assert other != 3
        assert collector.set_seed(3, static_seed=True) == 3
        one = collector.next()
        collector.set_seed(3, static_seed=True)
        again = collector.next()
        assert torch.equal(one["action"], again["action"])
        assert again["collector", "step"][:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("lanes", [None, 2])
def test_an_environment_begins_as_who_made_it_has_seeded_it(lanes: int | None) -> None:
    def create() -> Any:
        made = OracleTorchEnv(lanes, (5,), kind="seeded")
        made.set_seed(7)
        return made

    found = [next(iter(collector)) for _, collector in both(create, ByNoise, frames_per_batch=12)]
    assert_batches_alike(*found)
    with Collector(create(), ByNoise(), frames_per_batch=12, seed=3) as collector:
        assert not torch.equal(next(iter(collector))["observation"], found[0]["observation"])


class ByNoise(ByObservation):
    """Policy that acts by the first numbers of an observation."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        return td.set("action", td["observation"][..., :3].sum(-1).long() % 2)


def test_reset_begins_new_trajectories() -> None:
    with Collector(env(), None, frames_per_batch=6) as collector:
        before = collector.next()["collector", "traj_ids"]
        collector.reset()
        batch = collector.next()
        assert batch["collector", "step"].reshape(3, -1)[:, 0].tolist() == [0, 0, 0]
        assert batch["collector", "traj_ids"].min() >= 0
        assert not set(batch["collector", "traj_ids"].unique().tolist()) & set(
            before.unique().tolist()
        ) - {0}


def test_a_state_has_the_names_of_torchrl_and_goes_on() -> None:
    policy = linear()
    given: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 18}
    counted = TransformedEnv(env(), StepCounter())
    with Collector(counted, policy, **given) as collector:
        collector.next()
        state = collector.state_dict()
        assert (state["frames"], state["iter"]) == (6, 0)
        assert set(state["policy_state_dict"]) == set(policy.state_dict())
    with Collector(TransformedEnv(env(), StepCounter()), linear(seed=1), **given) as other:
        other.load_state_dict(state)
        assert torch.equal(weight(other.policy), weight(policy))
        assert len(list(other)) == 2
        assert other.stats()["completed"]
        assert other.stats("both") == other.stats()
        assert other.stats("per_worker") == {}
        with pytest.raises(ArgumentError, match=r"^workers: expected one of \['aggregate', "):
            other.stats("each")
    with (
        Collector(env(), None, **given) as other,
        pytest.raises(StateError, match="a state of this"),
    ):
        other.load_state_dict({"frames": 3, "iter": 0})


class Closing(OracleTorchEnv):
    """Environment that counts calls of `close`."""

    closings = 0

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Count and close."""
        self.closings += 1
        super().close(raise_if_closed=raise_if_closed)


def test_shutdown_closes_the_environment_or_leaves_it() -> None:
    for create in (lambda made: made, lambda made: lambda: made):
        for close in (True, False):
            made = Closing(2)
            collector = Collector(create(made), None, frames_per_batch=6)
            collector.shutdown(timeout=1.0, close_env=close, raise_on_error=False)
            assert made.closings == close
            assert collector.closed
            assert list(collector) == []
            collector.shutdown(close_env=close)


def test_what_cannot_be_made_raises_why_and_closes_nothing() -> None:
    made = Closing(2)
    with pytest.raises(PolicyError, match="expected the key action in the output, got"):
        Collector(
            made, TensorDictModule(lambda x: x, ["observation"], ["other"]), frames_per_batch=6
        )
    assert not made.closings

    def create() -> Any:
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        Collector(create, None, frames_per_batch=6)


def test_methods_of_methods() -> None:
    with Collector(env(), linear(), frames_per_batch=6) as collector:
        assert collector.map_fn("get_policy_version") == [0]
        collector.map_fn("update_policy_weights_", [(linear(),), (linear(seed=1),)])
        assert collector.get_distant_attr("ledger.stored") == 0
        assert collector.getattr_policy("out_keys") == ["logits", "action"]
        assert collector.getattr_env("batch_size") == (3,)
        assert collector.getattr_rb is not None
        with pytest.raises(ArgumentError, match="map_fn"):
            collector.map_fn("reset", [()], [{}, {}])
