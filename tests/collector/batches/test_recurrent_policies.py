"""Recurrent modules return the same values for batches and slices as for single lanes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Categorical, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector, split_trajectories
from tallyroll.collector.errors import ArgumentError
from tallyroll.storage import TrajectorySliceSampler, open_storage

from agents_kit import AGENTS, GROUP, AgentsEnv
from pairs import each_pair

if TYPE_CHECKING:
    from pathlib import Path

    from tensordict import TensorDictBase

LANES, FRAMES = 3, 120
INIT = ("is_init",)


def gru() -> Any:
    keys = ["observation", "state", "is_init"], ["embed", ("next", "state")]
    return GRUModule(input_size=4, hidden_size=5, in_keys=keys[0], out_keys=keys[1])


def lstm() -> Any:
    states = ["state", "cell"]
    return LSTMModule(
        input_size=4,
        hidden_size=5,
        in_keys=["observation", *states, "is_init"],
        out_keys=["embed", *(("next", name) for name in states)],
    )


def policy_of(module: Any) -> TensorDictSequential:
    torch.manual_seed(0)
    head = TensorDictModule(torch.nn.Linear(5, 2), ["embed"], ["logits"])
    act = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return TensorDictSequential(module, head, act)


def env_of(module: Any, lanes: int, tracker: Any = InitTracker) -> TransformedEnv:
    """Return CartPole with a tracker and the primer of `module`.

    The policy is untrained and acts randomly, so that the lengths of episodes differ.
    """
    made = gym.make_vec("CartPole-v1", num_envs=lanes, vectorization_mode="sync")
    return TransformedEnv(
        GymnasiumVectorEnv(made), Compose(tracker(), module.make_tensordict_primer())
    )


def collected(module: Any, lanes: int = LANES, **options: Any) -> Any:
    options = {"frames_per_batch": 30, "total_frames": FRAMES, "seed": 2, **options}
    with SyncCollector(partial(env_of, module, lanes), policy_of(module), **options) as made:
        return [batch.clone() for batch in made]


def rows_of(batch: TensorDictBase) -> TensorDictBase:
    mask = batch.get(("collector", "mask"), None)
    return batch.reshape(-1) if mask is None else batch[mask]


def recomputed(module: Any, batch: TensorDictBase) -> torch.Tensor:
    with torch.no_grad(), set_recurrent_mode(True):
        return module(batch.select("observation", "state", "cell", *INIT, strict=False))["embed"]


def by_trajectory(module: Any, rows: TensorDictBase) -> torch.Tensor:
    """Compute embeddings by single steps from the state in each trajectory's first row."""
    cell = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
    kind = "gru" if isinstance(module, GRUModule) else "lstm"
    net, embed = getattr(module, kind), torch.zeros(len(rows), 5)
    assert isinstance(net, cell[kind])
    names = ["state"] if kind == "gru" else ["state", "cell"]
    for one in rows["collector", "traj_ids"].unique():
        at = (rows["collector", "traj_ids"] == one).nonzero().flatten()
        at = at[rows["collector", "step"][at].argsort()]
        states = [rows[name][at[:1]].transpose(0, 1) for name in names]
        for row in at:
            given = states[0] if kind == "gru" else tuple(states)
            with torch.no_grad():
                embed[row], new = net(rows["observation"][row][None, None], given)
            states = [new] if kind == "gru" else list(new)
    return embed


@each_pair(
    make=[gru, lstm], layout=["rows", "lanes", "trajectories", "torchrl"], frames=[30, LANES]
)
def test_batches_give_what_a_loop_over_each_lane_gives(make: Any, layout: str, frames: int) -> None:
    module = make()
    begun_later = 0
    for batch in collected(module, layout=layout, frames_per_batch=frames):
        rows = rows_of(batch)
        embed = recomputed(module, batch)
        mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        assert torch.allclose(embed[mask], rows["embed"], atol=1e-6)
        assert torch.allclose(by_trajectory(module, rows), rows["embed"], atol=1e-6)
        begun_later += int((rows[INIT].flatten() & (rows["collector", "step"] > 0)).sum())
        if layout != "torchrl":  # this layout has the flags of TorchRL's collectors
            assert torch.allclose(recomputed(module, rows), rows["embed"], atol=1e-6)
    assert begun_later or layout == "torchrl"


@pytest.mark.filterwarnings("ignore:Nested TransformedEnvs")
@pytest.mark.parametrize("options", [{"max_frames_per_traj": 7}, {"reset_at_each_iter": True}])
def test_resets_and_one_lane(options: dict[str, Any]) -> None:
    module = gru()
    for lanes in (1, LANES):
        for batch in collected(module, lanes, **options):
            assert torch.allclose(recomputed(module, batch), batch["embed"], atol=1e-6)


def test_trajectories_that_are_split_later_begin_too(tmp_path: Path) -> None:
    module = gru()
    collected(module, storage=tmp_path / "rows")
    with open_storage(tmp_path / "rows", mode="read") as storage:
        split = split_trajectories(storage[:][7:].clone(), out="offsets")
    assert split.rows[INIT].flatten().nonzero().flatten().tolist() == split.offsets[:-1].tolist()
    embed = recomputed(module, split.rows)
    assert torch.allclose(embed, split.rows["embed"], atol=1e-6)


def reordered(batch: TensorDictBase) -> TensorDictBase:
    return batch[torch.arange(len(batch)).flip(0)]


@pytest.mark.parametrize("frames", [30, LANES])
@pytest.mark.parametrize("postproc", [None, lambda batch: batch, reordered])
def test_the_storage_keeps_what_the_environment_said(
    postproc: Any, frames: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"postproc": postproc, "frames_per_batch": frames}
    batches = collected(gru(), storage=tmp_path / "rows", **options)
    for batch in batches:
        at = batch.get(("collector", "traj_ids")).tolist()
        if postproc is reordered:
            at.reverse()
        init = batch[INIT].flatten().tolist()
        first = [each not in at[:row] for row, each in enumerate(at)]
        assert (init[::-1] if postproc is reordered else init) == first
    with open_storage(tmp_path / "rows", mode="read") as storage:
        rows = storage[:]
        assert torch.equal(rows[INIT].flatten(), rows["collector", "step"] == 0)
    assert len(rows) == FRAMES


def test_a_buffer_of_torchrls_keeps_it_too() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(FRAMES, ndim=2), batch_size=4)
    collected(gru(), replay_buffer=buffer, layout="torchrl")
    kept = buffer[:]
    assert torch.equal(kept[INIT].squeeze(-1), kept["collector", "step"] == 0)


def test_a_postproc_that_hides_where_rows_were_is_refused(tmp_path: Path) -> None:
    def renumbered(batch: TensorDictBase) -> TensorDictBase:
        return batch.set(("collector", "step"), batch["collector", "step"] + 1)

    with pytest.raises(ArgumentError, match="is_init"):
        collected(gru(), storage=tmp_path / "rows", postproc=renumbered)


def test_slices_begin_from_the_stored_state(tmp_path: Path) -> None:
    module = gru()
    collected(module, storage=tmp_path / "rows")
    with open_storage(tmp_path / "rows") as storage:
        storage_slices = storage.trajectories.sample_slices(40, 5)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=TrajectorySliceSampler(5), batch_size=200
        )
        sampled = buffer.sample()
        for slices in (storage_slices, storage_slices.reshape(-1), sampled):
            assert slices[INIT].reshape(40, 5)[:, 0].all()
            assert (slices["collector", "step"].reshape(40, 5)[:, 0] > 0).any()
            assert torch.allclose(recomputed(module, slices), slices["embed"], atol=1e-6)
        rows = storage[:]
        assert torch.equal(rows[INIT].flatten(), rows["collector", "step"] == 0)


def test_a_tracker_of_another_name() -> None:
    """A second tracker is used in addition to the default one, which the modules read."""
    module = gru()

    def make() -> TransformedEnv:
        env = env_of(module, LANES)
        env.append_transform(InitTracker("begins"))
        return env

    with SyncCollector(make, policy_of(module), frames_per_batch=30, total_frames=60) as made:
        for batch in made:
            assert torch.equal(batch["begins"], batch["is_init"])
            assert batch["begins"].sum() >= LANES


class TrackingAgentsEnv(AgentsEnv):
    """Environment that marks for each agent where its trajectory begins."""

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes, [[2], [5], [40]])
        flag = Categorical(2, shape=(lanes, AGENTS, 1), dtype=torch.bool)
        spec = self.observation_spec.clone()
        spec[(GROUP, *INIT)] = flag
        self.observation_spec = spec

    def _out(self, *flags: Any) -> Any:
        begins = np.repeat(self.at == 0, AGENTS).reshape(-1, AGENTS, 1)
        return super()._out(*flags).set((GROUP, *INIT), self._shaped(begins))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        return out.set((GROUP, *INIT), torch.zeros_like(out[(GROUP, *INIT)]))


@pytest.mark.parametrize("frames", [30, LANES])
def test_those_of_agents_are_marked_too_and_stored_as_they_were(
    frames: int, tmp_path: Path
) -> None:
    make, key = partial(TrackingAgentsEnv, LANES), (GROUP, *INIT)
    given: dict[str, Any] = {"total_frames": 60, "storage": tmp_path / "rows"}
    with SyncCollector(make, None, frames_per_batch=frames, **given) as made:
        for batch in made:
            ids = batch["collector", "traj_ids"].tolist()
            first = torch.tensor([each not in ids[:row] for row, each in enumerate(ids)])
            assert torch.equal(batch[key], first[:, None, None].expand(-1, AGENTS, 1))
            assert not batch[("next", *key)].any()
    with open_storage(tmp_path / "rows", mode="read") as storage:
        rows = storage[:]
    begins = rows["collector", "step"] == 0
    assert torch.equal(rows[key], begins[:, None, None].expand(-1, AGENTS, 1))
    assert not rows[("next", *key)].any()


@pytest.mark.parametrize("options", [{"max_frames_per_traj": 5}, {}])
def test_what_is_put_around_transforms_does_not_warn(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl.envs.transforms._base._AUTO_UNWRAP_WARNING_EMITTED", False)
    module = gru()
    made = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    env = TransformedEnv(GymnasiumVectorEnv(made), InitTracker())  # without a primer
    with SyncCollector(env, policy_of(module), frames_per_batch=8, total_frames=8, **options) as it:
        assert [len(batch) for batch in it] == [8]
