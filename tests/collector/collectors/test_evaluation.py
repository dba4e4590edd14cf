"""Evaluation takes the episodes that start first, and leaves everything else unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.envs import CatFrames, Compose, TransformedEnv, VecNormV2

from tallyroll.collector import SyncCollector, evaluate
from tallyroll.collector.errors import ArgumentError

from collect_kit import ByObservation
from oracles import OracleTorchEnv, length_of, make_oracle_vec

# Episodes are short in lane 0 and long in lane 2. Taking those that end first would take only lane
# 0's.
LENGTHS = [[1], [4], [30]]


def first_started(episodes: int) -> list[tuple[int, int]]:
    """Return the (lane, length) pairs that start first, by slot and lane, without reset slots."""
    clock, started, found = [0, 0, 0], [0, 0, 0], []
    while len(found) < episodes:
        lane = min(range(3), key=lambda each: (clock[each], each))
        length = length_of(LENGTHS, lane, started[lane])
        found.append((lane, length))
        clock[lane] += length
        started[lane] += 1
    return found


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("episodes", [1, 2, 3, 4, 17, 40])
def test_the_episodes_are_those_that_start_first(mode: AutoresetMode, episodes: int) -> None:
    found = evaluate(
        ByObservation(), lambda: make_oracle_vec(3, LENGTHS, mode=mode), episodes=episodes
    )
    assert sorted((e.lane, e.length) for e in found.episodes) == sorted(first_started(episodes))
    assert found.ledger.episodes_complete == episodes == len(found.returns)
    assert found.ledger.stored == found.lengths.sum()
    assert found.ledger.episodes_cut == 0


def test_an_evaluation_has_a_budget_of_its_own() -> None:
    with SyncCollector("CartPole-v1", frames_per_batch=50, total_frames=150, seed=3) as alone:
        wanted = torch.cat([batch["observation"] for batch in alone])
    got = []
    with SyncCollector("CartPole-v1", frames_per_batch=50, total_frames=150, seed=3) as collector:
        for batch in collector:
            got.append(batch["observation"])
            before = collector.ledger.counts()
            evaluate(None, "CartPole-v1", episodes=3, num_envs=2, seed=len(got))
            assert collector.ledger.counts() == before
    assert torch.equal(torch.cat(got), wanted)


def test_global_generators_are_as_before() -> None:
    def drawing(td):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return td.set("action", torch.randint(2, td.batch_size))

    torch.manual_seed(5)
    saved, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = evaluate(drawing, "CartPole-v1", episodes=4, num_envs=2, seed=0)
    again = evaluate(drawing, "CartPole-v1", episodes=4, num_envs=2, seed=0)
    assert torch.equal(torch.get_rng_state(), saved)
    assert np.array_equal(np.random.get_state()[1], numpys)
    assert first.returns.tolist() == again.returns.tolist()
    assert first.mean_return == first.returns.mean()


@pytest.mark.parametrize("episodes", [0, -1, 2.5])
def test_how_many_is_a_whole_number(episodes: int) -> None:
    with pytest.raises(ArgumentError, match="total_episodes: expected an integer"):
        evaluate(None, "CartPole-v1", episodes=episodes)


# --- the policy is unchanged ----------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Policy whose buffers and dropout show every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3))
        self.seen: list[bool] = []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = observation[0]
        self.seen.append(self.training)
        return self.drop(self.norm(observation)).sum(-1).gt(0).long()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_modes_and_buffers_are_as_before(wrapped: bool, training: bool) -> None:
    net = Layers()
    policy = TensorDictModule(net, ["observation"], ["action"]) if wrapped else net
    policy.train(training)
    net.drop.train(not training)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    last = net.last
    first, again = (
        evaluate(policy, lambda: make_oracle_vec(3, LENGTHS), episodes=5, seed=1) for _ in range(2)
    )
    assert net.seen
    assert not any(net.seen), "it was evaluated in evaluation mode"
    assert (policy.training, net.norm.training, net.drop.training) == (
        training,
        training,
        not training,
    )
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert net.last is last
    assert first.returns.tolist() == again.returns.tolist()


def test_buffers_of_odd_kinds_are_as_before() -> None:
    """One buffer has gradients, one shares memory, one has two names, and one is lazy."""

    class Odd(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graded", torch.zeros(3, requires_grad=True))
            self.register_buffer("wide", torch.zeros(1).expand(3))
            self.register_buffer("also", self.last)
            self.lazy = torch.nn.LazyBatchNorm1d()

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.graded += 1
            self.also = observation[0]
            return super().forward(self.lazy(observation))

    net = Odd()
    last = net.last
    evaluate(net, lambda: make_oracle_vec(3, LENGTHS), episodes=5, seed=1)
    assert net.seen
    assert net.graded.requires_grad
    assert not net.graded.any()
    assert net.also is net.last is last


def test_they_are_as_before_where_it_fails() -> None:
    class Fails(Layers):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            if self.calls == 3:
                raise ValueError("that was the third")
            return super().forward(observation)

    net = Fails()
    with pytest.raises(ValueError, match="third"):
        evaluate(net, lambda: make_oracle_vec(3, LENGTHS), episodes=9, seed=1)
    assert (net.training, int(net.calls), int(net.norm.num_batches_tracked)) == (True, 0, 0)


# --- the state of transforms ----------------------------------------------------------------------


def normed(lanes: int = 3) -> TransformedEnv:
    base = OracleTorchEnv(lanes, [[4], [9]])
    norm = VecNormV2(in_keys=["observation"], out_keys=["normed"])
    return TransformedEnv(base, Compose(norm, CatFrames(2, -1, ["observation"], ["two"])))


@pytest.mark.filterwarnings("ignore:Support of VecNormV2")
def test_transforms_have_the_state_that_they_are_given() -> None:
    with SyncCollector(normed, None, frames_per_batch=60, total_frames=120, seed=2) as collector:
        batches = iter(collector)
        next(batches)
        state = collector.state_dict()["env"]
        kept = {name: str(value) for name, value in state.items()}
        next(batches)
        assert {name: str(value) for name, value in state.items()} == kept, "it is a copy"
    env = normed()
    env.reset()
    env.load_state_dict(state)
    norm = env.transform[0]
    loc, scale = norm.loc["observation"], norm.scale["observation"]

    def policy(td: TensorDictBase) -> TensorDictBase:
        wanted = (td["observation"] - loc) / scale
        seen.append(torch.allclose(td["normed"], wanted, rtol=1e-3, atol=1e-3))
        return td.set("action", torch.zeros_like(td["observation"][:, 0], dtype=torch.int64))

    for given in (state, [None, state]):
        seen: list[bool] = []
        evaluate(policy, normed, episodes=4, seed=0, env_state=given)
        assert len(seen) > 4
        assert all(seen), "also the first observation, and the last"
    seen = []
    evaluate(policy, normed, episodes=4, seed=0)
    assert not all(seen), "those of a fresh one are others"


@pytest.mark.filterwarnings("ignore:Support of VecNormV2")
@pytest.mark.parametrize("wrong", [5, "state", {"other": torch.zeros(1)}])
def test_another_state_is_refused(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="env_state: expected"):
        evaluate(None, normed, episodes=1, env_state=wrong)  # type: ignore[arg-type]
