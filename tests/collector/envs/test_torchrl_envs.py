"""TorchRL environments without changes: transforms, workers, recurrent policies, auto-reset."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torchrl.data import Unbounded
from torchrl.envs import (
    CatFrames,
    ChessEnv,
    Compose,
    EnvBase,
    ExcludeTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    PendulumEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
    VecNormV2,
    check_env_specs,
)
from torchrl.modules import GRUModule, LSTMModule

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.errors import EnvironmentRefused

from collect_kit import LENGTHS, ByObservation, assert_same, collect, joined, stream
from oracles import OracleEnv, OracleTorchEnv, OracleVectorEnv, check_rows, make_oracle_vec
from pairs import each_pair
from policies_kit import plain_states, recurrent
from self_reset_kit import AutoResetGym

DISABLED = AutoresetMode.DISABLED


def vec(mode: AutoresetMode = DISABLED, **kwargs: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed", **kwargs))


def one_lane(lane: int = 0) -> OracleTorchEnv:
    return OracleTorchEnv(None, LENGTHS, first_lane=lane, ends="mixed")


BASES: dict[str, Any] = {
    "torch": partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"),
    "one-lane": one_lane,
    "serial": lambda: SerialEnv(3, [partial(one_lane, lane) for lane in range(3)]),
    "parallel": lambda: ParallelEnv(
        3, [partial(one_lane, lane) for lane in range(3)], mp_start_method="fork"
    ),
    **{mode.value: partial(vec, mode) for mode in AutoresetMode},
}
every_base = pytest.mark.parametrize("base", list(BASES))


def run(make: Any, policy: Any = None, **kwargs: Any) -> TensorDictBase:
    kwargs = {"frames_per_batch": 17, "total_frames": 60, "seed": 0, **kwargs}
    return joined(collect(make, policy, **kwargs)[0])


@every_base
def test_it_is_driven_as_it_is(base: str) -> None:
    check_rows(run(BASES[base], ByObservation()), LENGTHS, ends="mixed", from_start=True)


@every_base
@pytest.mark.parametrize("transformed", [False, True])
def test_its_specs_hold(base: str, transformed: bool) -> None:
    env = BASES[base]()
    if transformed:
        env = TransformedEnv(env, Compose(InitTracker(), StepCounter()))
    try:
        check_env_specs(env)
    finally:
        env.close(raise_if_closed=False)


@pytest.mark.parametrize("base", [name for name in BASES if name != "parallel"])
def test_transforms_follow_each_lane(base: str) -> None:
    """InitTracker, StepCounter, RewardSum and CatFrames are recomputed from the rows."""

    def make() -> EnvBase:
        return TransformedEnv(
            BASES[base](),
            Compose(
                InitTracker(),
                StepCounter(),
                RewardSum(),
                CatFrames(N=2, dim=-1, in_keys=["observation"], out_keys=["two"]),
            ),
        )

    rows = run(make, ByObservation())
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    step = rows["collector", "step"]
    assert torch.equal(rows["step_count"].view(-1), step)
    assert torch.equal(rows["next", "step_count"].view(-1), step + 1)
    for ids in rows["collector", "traj_ids"].unique():
        own = rows[rows["collector", "traj_ids"] == ids]
        assert torch.equal(own["next", "episode_reward"], own["next", "reward"].cumsum(0))
        assert own["is_init"][0]
        before = torch.cat([own["observation"][:1], own["observation"][:-1]])
        assert torch.equal(own["two"], torch.cat([before, own["observation"]], -1))
        assert torch.equal(
            own["next", "two"], torch.cat([own["observation"], own["next", "observation"]], -1)
        )


@pytest.mark.parametrize("base", ["torch", "one-lane", AutoresetMode.NEXT_STEP.value])
def test_normalisation_sees_each_observation(base: str) -> None:
    def make() -> EnvBase:
        norm = VecNormV2(in_keys=["observation"], out_keys=["normed"])
        return TransformedEnv(BASES[base](), norm)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # from VecNormV2 of batched environments
        rows = run(make, ByObservation())
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert rows["normed"].isfinite().all()
    assert not torch.equal(rows["normed"], rows["observation"])


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_transform_sees_lanes_that_are_not_reset_as_they_are(mode: AutoresetMode) -> None:
    """Statistics over all observations would otherwise count zeros."""
    as_they_are = []

    class Watches(Transform):
        def _step(self, _: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
            self.last = after["observation"].clone()
            return after

        def _reset(self, before: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
            if "_reset" in before:
                others = ~before["_reset"].squeeze(-1)
                as_they_are.append(torch.equal(after["observation"][others], self.last[others]))
            return after

    check_rows(run(lambda: TransformedEnv(vec(mode), Watches())), LENGTHS, ends="mixed")
    assert len(as_they_are) > 5
    assert all(as_they_are)


def test_a_primer_is_reset_with_its_lane() -> None:
    def make() -> EnvBase:
        primer = TensorDictPrimer({"memory": Unbounded((1,))}, expand_specs=True)
        return TransformedEnv(BASES["torch"](), Compose(InitTracker(), primer))

    def counting(td: TensorDictBase) -> TensorDictBase:
        td = ByObservation()(td)
        return td.set(("next", "memory"), td["memory"] + 1)

    rows = run(make, counting)
    assert torch.equal(rows["memory"].view(-1), rows["collector", "step"].float())
    assert torch.equal(rows["next", "memory"], rows["memory"] + 1)


# --- recurrent policies -------------------------------------------------------------------------


@each_pair(
    base=[name for name in BASES if name != "parallel"],
    primed=[True, False],
    cls=[LSTMModule, GRUModule],
)
def test_recurrent_states_are_each_lanes_own_and_carried_over_batches(
    base: str, cls: Any, primed: bool
) -> None:
    memory, policy = recurrent(cls)

    def make() -> EnvBase:
        env = BASES[base]()
        if not primed:
            return env
        return TransformedEnv(env, Compose(InitTracker(), memory.make_tensordict_primer()))

    rows = run(make, policy, frames_per_batch=4)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    for ids in rows["collector", "traj_ids"].unique():
        own = rows[rows["collector", "traj_ids"] == ids]
        assert torch.allclose(own["out"], plain_states(memory, own), atol=1e-5)


@pytest.mark.parametrize("base", ["torch", "one-lane", DISABLED.value])
def test_recurrent_policies_after_random_frames(base: str) -> None:
    memory, policy = recurrent(GRUModule)
    rows = run(BASES[base], policy, init_random_frames=11)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    version = rows["collector", "policy_version"]
    assert int((version == -1).sum()) == 11
    for ids in rows["collector", "traj_ids"].unique():
        own = rows[rows["collector", "traj_ids"] == ids]
        if (own["collector", "policy_version"] == 0).all():
            assert torch.allclose(own["out"], plain_states(memory, own), atol=1e-5)


def test_a_recurrent_policy_is_refused_where_reset_masks_are_ignored() -> None:
    _, policy = recurrent(GRUModule)
    with pytest.raises(EnvironmentRefused, match="the states of a recurrent policy are reset lane"):
        SyncCollector(OracleVectorEnv(3, LENGTHS), policy, frames_per_batch=5, total_frames=10)


# --- TorchRL's own environments -----------------------------------------------------------------


def categorical(**kwargs: Any) -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs)


@pytest.mark.parametrize(
    "make",
    [
        categorical,
        partial(GymEnv, "CartPole-v1"),
        partial(GymEnv, "Pendulum-v1"),
        partial(SerialEnv, 2, categorical),
        partial(ParallelEnv, 2, categorical, mp_start_method="fork"),
    ],
)
def test_gymnasium_environments_through_torchrl(make: Any) -> None:
    rows = run(make, frames_per_batch=50, total_frames=120)
    assert len(rows) == 120
    for lane in rows["collector", "lane"].unique():
        own = stream(rows, lane, 200)
        ended = own["next", "done"].view(-1)[:-1]
        following = own["observation"][1:]
        assert torch.equal(own["next", "observation"][:-1][~ended], following[~ended])
        assert not (own["next", "observation"][:-1][ended] == following[ended]).all(-1).any()


@pytest.mark.parametrize("make", [PendulumEnv, partial(SerialEnv, 3, PendulumEnv)])
def test_torchrls_pendulum(make: Any) -> None:
    rows = run(make, total_frames=30)
    assert len(rows) == 30
    for lane in rows["collector", "lane"].unique():
        own = stream(rows, lane, 30)
        assert torch.equal(own["next", "th"][:-1], own["th"][1:])


def test_lost_final_observations_are_marked() -> None:
    def make() -> EnvBase:
        env = AutoResetGym(0, LENGTHS, ends="mixed")
        return GymWrapper(env, auto_reset=True, categorical_action_encoding=True)

    rows = run(make, ByObservation())
    valid = rows["collector", "next_valid"]
    assert torch.equal(~valid, rows["next", "done"].view(-1))
    assert (~valid).any()
    ended = rows["next", "done"].view(-1)
    assert torch.equal(
        rows["next", "observation"][:-1][~ended[:-1]], rows["observation"][1:][~ended[:-1]]
    )


def test_environments_that_lose_nothing_have_no_such_column() -> None:
    assert ("collector", "next_valid") not in run(BASES["torch"]).keys(True)


@pytest.mark.filterwarnings("ignore")
def test_a_gymnasium_vector_behind_gymenv_is_refused() -> None:
    env = GymEnv("CartPole-v1", num_envs=3)
    try:
        with pytest.raises(EnvironmentRefused, match="zeroes or loses final observations"):
            SyncCollector(env, frames_per_batch=5, total_frames=10)
    finally:
        env.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.filterwarnings("ignore")
def test_torchrls_wrapper_of_a_vector_that_resets_itself_is_refused(mode: AutoresetMode) -> None:
    def make() -> EnvBase:
        return GymWrapper(make_oracle_vec(3, LENGTHS, mode=mode))

    with pytest.raises((EnvironmentRefused, ValueError, RuntimeError)):
        SyncCollector(make, frames_per_batch=5, total_frames=10)


def test_a_native_vector_under_transforms_is_refused() -> None:
    env = TransformedEnv(GymnasiumVectorEnv(OracleVectorEnv(3, LENGTHS)), StepCounter())
    with pytest.raises(EnvironmentRefused, match="OracleVectorEnv ignores reset masks, so a Trans"):
        SyncCollector(env, frames_per_batch=5, total_frames=10)


def test_more_batch_dimensions_than_lanes_are_refused() -> None:
    env = SerialEnv(2, partial(OracleTorchEnv, 3, LENGTHS))
    with pytest.raises(
        EnvironmentRefused, match=r"expected a batch size \[\] or \[lanes\], got \[2"
    ):
        SyncCollector(env, frames_per_batch=5, total_frames=10)


def test_an_action_mask_is_honoured() -> None:
    from torchrl.envs import ActionMask

    class Masked(OracleTorchEnv):
        """Oracle in which only action lane % 2 is legal."""

        def __init__(self) -> None:
            super().__init__(3, LENGTHS)
            from torchrl.data import Binary

            self.observation_spec["action_mask"] = Binary(2, (3, 2), dtype=torch.bool)

        def _out(self, *args: Any) -> Any:
            out = super()._out(*args)
            return out.set("action_mask", torch.eye(2, dtype=torch.bool)[self.lane_ids % 2])

    for make in (Masked, lambda: TransformedEnv(Masked(), ActionMask())):
        rows = run(make)
        assert torch.equal(rows["action"], rows["collector", "lane"].long() % 2)


def test_chess_is_played_by_its_rules() -> None:
    """The mask allows only legal moves. The test extra installs `chess`."""
    import chess

    def make() -> EnvBase:
        return ChessEnv(include_fen=True, mask_actions=True, stateful=True).append_transform(
            ExcludeTransform("fen")
        )

    board, moves = chess.Board(), run(make, total_frames=40)
    assert len(moves) == 40
    mask = moves["action_mask"]
    taken = moves["action"].view(-1, 1)
    assert mask.gather(-1, taken).all()
    assert int(mask[0].sum()) == board.legal_moves.count() == 20
    assert torch.equal(moves["turn"].view(-1)[:-1], ~moves["turn"].view(-1)[1:])


def test_batches_of_transformed_vectors_are_those_of_torchrls_wrapper() -> None:
    def wrapped() -> EnvBase:
        vector = make_oracle_vec(3, LENGTHS, mode=DISABLED, ends="mixed")
        env = GymWrapper(vector, categorical_action_encoding=True)
        env._set_seed = lambda seed: None  # seeding would reset
        for lane in vector.envs:
            lane.episode = -1
        return TransformedEnv(env, Compose(InitTracker(), StepCounter(), RewardSum()))

    def ours() -> EnvBase:
        return TransformedEnv(vec(), Compose(InitTracker(), StepCounter(), RewardSum()))

    one, other = run(wrapped, ByObservation()), run(ours, ByObservation())
    assert np.array_equal(one["observation"], other["observation"])
    assert_same(one, other)


@pytest.mark.parametrize("lanes", [None, 3])
def test_hooks_behind_a_step_are_called(lanes: int | None) -> None:
    """The policy sees the observation that the hook returns, and the next row begins with it."""
    env = OracleTorchEnv(lanes, [[4]])

    def halved(td: TensorDictBase, following: TensorDictBase) -> tuple[Any, Any]:
        return td, following.set("observation", following["observation"] / 2)

    env._post_step_mdp_hooks = halved
    batches, _ = collect(env, frames_per_batch=12, total_frames=12, finals="kept")
    rows = joined(batches)
    within = rows["collector", "step"] > 0
    before = {
        (int(row["collector", "traj_ids"]), int(row["collector", "step"])): row for row in rows
    }
    assert within.any()
    for row in rows[within]:
        step = int(row["collector", "step"])
        last = before[int(row["collector", "traj_ids"]), step - 1]
        assert torch.equal(row["observation"], last["next", "observation"] / 2)


@pytest.mark.filterwarnings("ignore")
def test_lost_final_observations_of_a_serial_environment_are_marked_or_refused() -> None:
    class AutoReset(OracleEnv):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            if terminated or truncated:
                observation, _ = self.reset()
            return observation, reward, terminated, truncated, info

    def make() -> Any:
        return GymWrapper(AutoReset(0, LENGTHS), auto_reset=True, categorical_action_encoding=True)

    try:
        batches, _ = collect(
            SerialEnv(2, make), frames_per_batch=6, total_frames=24, validate="off"
        )
    except EnvironmentRefused:
        return
    rows = joined(batches)
    assert torch.equal(~rows["collector", "next_valid"], rows["next", "done"].view(-1))
