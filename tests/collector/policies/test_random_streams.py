"""Random actions depend on the lane and not on the process; the state stays with its lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.modules import GRUModule, OrnsteinUhlenbeckProcessModule

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.counting.numbering import driver_seed
from tallyroll.collector.envs.system import Step
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import PolicyError
from tallyroll.collector.native.kernel import compiled
from tallyroll.collector.policies.masked_actions import Choices
from tallyroll.collector.policies.random_actions import block_draw
from tallyroll.storage import fast_paths

import toy_systems
from collect_kit import ByObservation, joined
from oracles import OracleTorchEnv, make_oracle_vec
from policies_kit import recurrent
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    RecordingPolicy,
    Run,
    assert_alike,
    collect_all,
    in_threads,
    lanes_of_workers,
    make,
    rows_until,
    start,
    sync_collector,
    worker_collector,
)

kernel = compiled()

BUDGET: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 120, "seed": 3}


class Masked(OracleTorchEnv):
    """Oracle with three actions and a mask that depends on the observation."""

    def __init__(self, first: int, lanes: int, one_hot: bool) -> None:
        super().__init__(lanes, LENGTHS, first_lane=first, ends="mixed")
        self.observation_spec["action_mask"] = Binary(3, (lanes, 3), dtype=torch.bool)
        spec = OneHot(3, shape=(lanes, 3)) if one_hot else Categorical(3, shape=(lanes,))
        self.action_spec = Composite(action=spec, shape=(lanes,))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        action = td["action"].int().argmax(-1) if td["action"].ndim > 1 else td["action"]
        return super()._step(td.clone().set("action", action % 2))

    def _out(self, *args: Any) -> Any:
        out = super()._out(*args)
        marks = torch.arange(3) != out["observation"].sum(-1, keepdim=True).long() % 3
        return out.set("action_mask", marks)


def tracked(source: str, first: int, lanes: int) -> TransformedEnv:
    env = make(source, first, lanes)
    if isinstance(env, VectorEnv):
        env = GymnasiumVectorEnv(env)
    return TransformedEnv(env, InitTracker())


def alike(made: Callable[[int, int], Any], policy: Any = None, **kwargs: Any) -> Run:
    """Check that one process and one, two and three workers give the same rows."""
    with in_threads():
        one = collect_all(SyncCollector(partial(made, 0, LANES), policy, **kwargs))
        for workers in (1, 2, 3):
            makes = [partial(made, first, own) for first, own in lanes_of_workers(LANES, workers)]
            assert_alike(one, collect_all(start(makes, policy, **kwargs)))
    return one


@pytest.mark.parametrize("random_frames", [None, 23])
@pytest.mark.parametrize("source", [DISABLED, NEXT, "torch"])
def test_actions_do_not_depend_on_how_lanes_are_spread(
    source: str, random_frames: int | None
) -> None:
    policy = None if random_frames is None else RecordingPolicy()
    extra = {} if random_frames is None else {"init_random_frames": random_frames}
    run = alike(partial(make, source), policy, **BUDGET, **extra, max_frames_per_traj=4)
    rows = joined(run.batches)
    drawn = rows["collector", "policy_version"] == -1
    assert int(drawn.sum()) == (random_frames or 120)
    assert len(rows["action"][drawn].unique()) == 2
    if policy is not None:
        assert not rows["told"][drawn].any()
        assert rows["told"][~drawn].any(-1).all()


@pytest.mark.parametrize("random_frames", [None, 23])
def test_nor_do_they_where_only_some_lanes_are_stepped(random_frames: int | None) -> None:
    policy = None if random_frames is None else ByObservation()
    extra = {} if random_frames is None else {"init_random_frames": random_frames}
    made = partial(make, "serial")
    alike(made, policy, **{**BUDGET, "frames_per_batch": 7}, **extra, surplus="never_step")


@pytest.mark.parametrize("one_hot", [False, True])
def test_masked_actions_do_not_depend_on_it_and_are_legal(one_hot: bool) -> None:
    rows = joined(alike(partial(Masked, one_hot=one_hot), **BUDGET).batches)
    action = rows["action"].int().argmax(-1) if one_hot else rows["action"]
    assert rows["action_mask"].gather(-1, action[:, None]).all()
    assert len(action.unique()) == 3


def test_a_transform_changes_no_action() -> None:
    with in_threads():
        plain = joined(collect_all(sync_collector(DISABLED, **BUDGET)).batches)
        through_torchrl = SyncCollector(partial(tracked, DISABLED, 0, LANES), **BUDGET)
        copied = joined(collect_all(through_torchrl).batches)
    rng = np.random.default_rng(driver_seed(3, 0))
    assert torch.equal(plain["action"], copied["action"])
    first = plain[(plain["collector", "traj_ids"] < LANES) & (plain["collector", "step"] == 0)]
    assert first["action"].tolist() == rng.integers(2, size=(4, LANES))[0].tolist()


@pytest.mark.parametrize("made", [partial(tracked, DISABLED), partial(Masked, one_hot=False)])
def test_workers_that_do_not_wait_for_one_another_draw_other_actions(made: Any) -> None:
    makes = [partial(made, 0, 3)] * 2
    with in_threads():
        counts: Counter[int] = Counter()

        def reached(batch: TensorDictBase) -> bool:
            counts.update(batch["collector", "lane"].tolist())
            return all(counts[lane] > 10 for lane in range(6))

        with start(makes, **{**BUDGET, "total_frames": -1}, mode="async") as collector:
            rows = rows_until(collector, reached)
    lanes = [rows[rows["collector", "lane"] == lane]["action"] for lane in range(6)]
    for lane in range(3):
        count = min(len(lanes[lane]), len(lanes[lane + 3]), 20)
        assert count > 10
        assert not torch.equal(lanes[lane][:count], lanes[lane + 3][:count])


# --- masks ----------------------------------------------------------------------------------------


def bounded(low: list[int], high: list[int], *shape: int) -> Bounded:
    ends = (torch.tensor(end).expand(shape) for end in (low, high))
    return Bounded(*ends, shape=shape, dtype=torch.int64)


SPECS = [
    (Categorical(4, shape=(5,)), 0),
    (Categorical(4, shape=(5, 2)), 0),
    (OneHot(4, shape=(5, 4)), 1),
    (MultiCategorical([2, 4], shape=(5, 2)), 1),
    (bounded([10], [13], 5), 0),
    (bounded([-1], [2], 5, 2), 0),
    (bounded([5, -2], [6, 1], 5, 2), 1),
]


def choices(spec: TensorSpec, inner: int = 0) -> Choices:
    found = Choices.of(spec, inner)
    assert found is not None
    return found


def widths(of: Choices, spec: TensorSpec) -> tuple[tuple[int, ...], int]:
    """Return the batch shape of a spec, and the length of the mask of each action."""
    return of.batch(tuple(spec.shape)), sum(of.sizes)


@pytest.mark.parametrize(("spec", "inner"), SPECS)
def test_each_legal_action_is_as_likely(spec: TensorSpec, inner: int) -> None:
    of = choices(spec, inner)
    several = len(of.sizes) > 1
    lead, width = widths(of, spec)
    shape = of.uniforms(tuple(spec.shape))
    generator = np.random.default_rng(0)
    allowed = torch.from_numpy(generator.random((*lead, width)) < 0.6)
    allowed[0] = False  # nothing is legal here, which allows everything
    counts = torch.zeros(*lead, width)
    for _ in range(3000):
        drawn = of.draw(allowed.numpy(), generator.random(shape))
        action = torch.from_numpy(drawn).to(spec.dtype)
        assert spec.is_in(action)
        action = action.long() - torch.tensor(of.starts if several else of.starts[0])
        if several:
            action = action + torch.tensor([0, 2])
            counts.scatter_add_(-1, action, torch.ones(5, 2))
        elif type(spec) is OneHot:
            counts += action
        else:
            counts.scatter_add_(-1, action[..., None], torch.ones(*lead, 1))
    for part in (slice(0, 2), slice(2, 6)) if several else (slice(None),):
        legal = allowed[..., part] | ~allowed[..., part].any(-1, keepdim=True)
        wanted = legal / legal.sum(-1, keepdim=True)
        assert (counts[..., part] / 3000 - wanted).abs().max() < 0.04


@pytest.mark.parametrize(("spec", "inner"), SPECS)
def test_legal_actions_are_the_same_without_the_extension(
    spec: TensorSpec, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = choices(spec, inner)
    lead, width = widths(of, spec)
    shape = of.uniforms(tuple(spec.shape))
    rng = np.random.default_rng(1)
    for share in (0.0, 0.1, 0.5, 1.0):
        for kind in (np.bool_, np.int8):
            marks = (rng.random((*lead, width)) < share).astype(kind)
            numbers = rng.random(shape)
            numbers[0], numbers[1] = np.nextafter(1.0, 0.0), 0.0
            here = of.draw(marks, numbers)
            with monkeypatch.context() as without:
                without.setattr(fast_paths, "_off", frozenset({"kernel"}))
                assert np.array_equal(here, of.draw(marks, numbers))


@pytest.mark.skipif(kernel is None, reason="no compiler was found")
def test_the_extension_refuses_marks_and_numbers_of_other_rows() -> None:
    assert kernel is not None
    for marks, numbers in ((np.ones(7, np.bool_), 2), (np.ones((2, 4), np.bool_), 3)):
        untouched = np.full(2, 9)
        with pytest.raises(ValueError, match="differ in their rows"):
            kernel.nth_marked(marks, np.zeros(numbers), untouched)
        assert untouched.tolist() == [9, 9]
    kernel.nth_marked(np.zeros((0, 4), np.bool_), np.zeros(0), np.zeros(0, np.int64))


class MaskedToy(toy_systems.Toy):
    """Toy whose mask forbids one of three actions, depending on the step."""

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        mask = {("action_mask",): Binary(3, (3,), dtype=torch.bool)}
        self.declares = replace(self.declares, observation={**self.declares.observation, **mask})

    def reset(self, *args: Any, **options: Any) -> list[Any]:
        return self._masked(super().reset(*args, **options))

    def step(self, *args: Any) -> Step:
        out = super().step(*args)
        return out._replace(obs=self._masked(out.obs))

    def _masked(self, obs: Sequence[Any]) -> list[Any]:
        return [*obs, np.arange(3) != self.state[:, 2:3] % 3]


def test_in_place_legal_actions_are_those_of_the_longer_way() -> None:
    in_place = joined(collect_all(SyncCollector(MaskedToy(3), **BUDGET)).batches)
    copied = TransformedEnv(SystemEnv(MaskedToy(3)), Compose())
    assert torch.equal(
        in_place["action"], joined(collect_all(SyncCollector(copied, **BUDGET)).batches)["action"]
    )
    assert in_place["action_mask"].gather(-1, in_place["action"][:, None]).all()
    assert len(in_place["action"].unique()) == 3


def test_the_largest_uniform_number_is_an_action_too() -> None:
    top = np.nextafter(1.0, 0.0)
    spec = Categorical(3, shape=(1,))
    assert choices(spec).draw(np.ones((1, 3), np.bool_), np.array([top])).tolist() == [2]


def test_a_spec_with_a_mask_of_its_own_is_not_drawn_in_blocks() -> None:
    spec = Categorical(3, shape=(2,), mask=torch.tensor([True, False, True]))
    assert block_draw(spec) is None
    one_hot = block_draw(OneHot(3, shape=(2, 3)))
    assert one_hot is not None
    drawn = one_hot(np.random.default_rng(0), 50)
    assert drawn.shape == (50, 2, 3)
    assert (drawn.sum(-1) == 1).all()


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["alone", "sync", "async", "one lane a worker"])
@pytest.mark.parametrize("random_frames", [2, 11])
def test_at_random_a_recurrent_state_stays_as_it_is(run: str, random_frames: int) -> None:
    _, policy = recurrent(GRUModule)
    kwargs = {**BUDGET, "init_random_frames": random_frames}
    with in_threads():
        if run == "alone":
            collector: Any = sync_collector("torch", policy, **kwargs)
        elif run == "one lane a worker":
            collector = worker_collector("single", 3, policy, 3, **kwargs)
        else:
            collector = worker_collector("torch", 2, policy, **kwargs, mode=run)
        rows = joined(collect_all(collector).batches)
    drawn = rows["collector", "policy_version"] == -1
    assert int(drawn.sum()) == random_frames
    assert torch.equal(rows["next", "h"][drawn], rows["h"][drawn])
    assert not rows["out"][drawn].any()
    assert (rows["next", "h"][~drawn] != rows["h"][~drawn]).flatten(1).any(1).all()
    # After random frames, the policy sees the initial state.
    after = drawn.roll(1) & ~drawn & (rows["collector", "step"] > 0)
    assert not rows["h"][after].any()


def test_noise_that_a_policy_carries_goes_from_step_to_step_and_not_on() -> None:
    env = partial(tracked, "torch", 0, LANES)
    # The module counts its steps since the trajectory began, but no row contains the counter.
    telling = TensorDictModule(torch.clone, in_keys=["_ou_steps"], out_keys=["steps"])
    policy = TensorDictSequential(noisy(), telling)
    rows = joined(collect_all(SyncCollector(env, policy, **BUDGET)).batches)
    assert torch.equal(rows["steps"].view(-1), rows["collector", "step"] + 1)
    assert not [key for key in rows.keys() if key.startswith("_")]


@pytest.mark.filterwarnings("ignore:The tensordict passed to Ornstein")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", [DISABLED, "torch"])
def test_noise_that_would_be_lost_or_go_on_is_refused(source: str, workers: int) -> None:
    wanted = r"\['_ou_prev_noise', '_ou_steps'\] and reads them .* TransformedEnv\(env, InitTracker"
    run = partial(worker_collector, source, workers) if workers else partial(sync_collector, source)
    with in_threads(), pytest.raises(PolicyError, match=wanted):
        run(noisy(), **BUDGET)


def noisy() -> TensorDictSequential:
    """Return a policy whose action is the sign of noise with a state."""
    value = TensorDictModule(_nothing, in_keys=["observation"], out_keys=["value"])
    noise = OrnsteinUhlenbeckProcessModule(
        spec=Unbounded((1,)),
        annealing_num_steps=10,
        action_key="value",
    )
    sign = TensorDictModule(_sign, in_keys=["value"], out_keys=["action"])
    return TensorDictSequential(value, noise, sign)


def _nothing(observation: torch.Tensor) -> torch.Tensor:
    return observation[..., :1] * 0


def _sign(value: torch.Tensor) -> torch.Tensor:
    return (value[..., 0] > 0).long()


def test_states_under_next_that_are_read_without_a_primer_are_refused() -> None:
    def counting(td: TensorDictBase) -> TensorDictBase:
        before = td.get("memory", torch.zeros(*td.batch_size, 1))
        return ByObservation()(td).set(("next", "memory"), before + 1)

    def telling(td: TensorDictBase) -> TensorDictBase:
        total = td["observation"].sum(-1, keepdim=True)
        return ByObservation()(td).set(("next", "total"), total)

    with pytest.raises(PolicyError, match=r"\['next/memory'\] .* Add a primer"):
        sync_collector("torch", counting, **BUDGET)
    rows = joined(collect_all(sync_collector("torch", telling, **BUDGET)).batches)
    assert torch.equal(rows["next", "total"], rows["observation"].sum(-1, keepdim=True))


def test_a_policy_that_draws_or_counts_is_not_taken_for_one_with_states() -> None:
    seen: list[int] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        seen.append(len(seen))
        chance = torch.rand(td.batch_size)
        td = ByObservation()(td).set("chance", chance)
        return td.set("calls", torch.full(td.batch_size, len(seen)))

    vector = make_oracle_vec(LANES, LENGTHS)
    collect_all(SyncCollector(vector, policy, **BUDGET))
