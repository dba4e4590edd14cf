"""Random actions obey masks whatever the start of a space, and errors name the cause of bad masks.

The cause is either the environment or the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from tallyroll.collector import Info, MultiprocessCollector, SyncCollector
from tallyroll.collector.batches.checks.value_checks import OutOfRangeWarning
from tallyroll.collector.envs.gymnasium.infos import discovered
from tallyroll.collector.envs.probes.probe import overwrites_itself, single_env
from tallyroll.collector.envs.probes.reuse import leaves
from tallyroll.collector.errors import (
    CollectorError,
    EnvironmentRefused,
    PolicyError,
    SpaceError,
    TransitionError,
    WorkerRaised,
)
from tallyroll.collector.policies.mask_rules import MaskRule
from tallyroll.collector.policies.masked_actions import Choices
from tallyroll.storage import MemmapStorage

import toy_systems
from collect_kit import Batches, collect, joined
from worker_kit import collect_all, in_threads, start

BUDGET: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 40, "seed": 1}
MODES = list(AutoresetMode)


def legal_in(space: spaces.Space[Any], marks: np.ndarray[Any, Any], action: Any) -> bool:
    """Return True if the action is legal, by the documented meaning of a mask."""
    if isinstance(space, spaces.Discrete):
        return bool(marks[int(action) - int(space.start)])
    assert isinstance(space, spaces.MultiDiscrete)
    index = (np.asarray(action) - space.start).ravel()
    sizes = space.nvec.ravel()
    if marks.shape == tuple(sizes):
        return bool(marks[tuple(index)])
    starts = np.cumsum([0, *sizes[:-1]])
    return bool(marks.ravel()[starts + index].all())


class Masked(gym.Env[Any, Any]):
    """Environment that observes [episode, step], from which its binding mask follows."""

    def __init__(
        self,
        space: spaces.Space[Any],
        shape: Sequence[int],
        kind: Any = np.int8,
        *,
        where: str = "seen",
        spoilt: int = -1,
        spoil: Any = 0,
        raises: bool = True,
    ) -> None:
        self.action_space, self.shape, self.kind = space, tuple(shape), kind
        self.where, self.spoilt, self.spoil, self.raises = where, spoilt, spoil, raises
        count = spaces.Box(-1, 1000, (2,), np.float32)
        mask = spaces.Box(0, 1 if kind is bool else 5, self.shape, kind)
        self.observation_space = count
        if where == "seen":
            self.observation_space = spaces.Dict(count=count, action_mask=mask)
        self.episode, self.time = -1, 0

    def marks(self) -> Any:
        rng = np.random.default_rng(self.episode * 100 + self.time)
        marks = rng.random(self.shape) < 0.5
        # One value of each index is legal in every layout of a mask.
        sizes = np.ravel(getattr(self.action_space, "nvec", self.shape[-1:]))
        if len(self.shape) == 1 and sum(sizes) == marks.size:
            marks[np.cumsum(sizes) - 1] = True
        marks[..., -1] = True
        if self.time == self.spoilt:
            marks = np.full(marks.shape, self.spoil)
        return marks.astype(self.kind)

    def look(self) -> tuple[Any, dict[str, Any]]:
        count, marks = np.array([self.episode, self.time], np.float32), self.marks()
        if self.where == "seen":
            return {"count": count, "action_mask": marks}, {}
        return count, {"action_mask": marks}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        self.episode, self.time = self.episode + 1, 0
        return self.look()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute a legal action."""
        if self.raises and not legal_in(self.action_space, self.marks(), action):
            raise RuntimeError("an illegal move")
        self.time += 1
        seen, info = self.look()
        return seen, float(self.time), self.time == 4, False, info


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "from 10": (spaces.Discrete(3, start=10), (3,)),
    "from -1": (spaces.Discrete(3, start=-1), (3,)),
    "from 0": (spaces.Discrete(3), (3,)),
    "one value": (spaces.Discrete(1, start=4), (1,)),
    "several": (spaces.MultiDiscrete([2, 3], start=[5, -2]), (5,)),
    "several from 0": (spaces.MultiDiscrete([2, 3]), (5,)),
    "combinations": (spaces.MultiDiscrete([2, 3], start=[5, -2]), (2, 3)),
    "rows": (spaces.MultiDiscrete([3, 3], start=[1, 4]), (2, 3)),
    "of two dimensions": (spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[1, 0], [0, 9]]), (10,)),
}


def vec(case: str, mode: AutoresetMode = MODES[0], lanes: int = 2, **kwargs: Any) -> Any:
    space, shape = CASES[case]
    if case == "rows":
        kwargs["raises"] = False
    make = partial(Masked, space, shape, **kwargs)
    return SyncVectorEnv([make] * lanes, autoreset_mode=mode)


def require_legal(rows: TensorDictBase, case: str) -> None:
    space, _ = CASES[case]
    for marks, action in zip(rows["action_mask"].numpy(), rows["action"].numpy(), strict=True):
        assert space.contains(action.astype(space.dtype)[()]), action
        if case == "rows":
            index = action - space.start
            assert marks[np.arange(2), index].all() or marks[tuple(index % [2, 3])]
        else:
            assert legal_in(space, marks, action), (marks, action)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "rows"])
def test_random_actions_are_legal(case: str, mode: AutoresetMode) -> None:
    rows = joined(collect(vec(case, mode), **BUDGET)[0])
    require_legal(rows, case)
    assert len(rows["action"].reshape(40, -1).unique(dim=0)) >= min(3, CASES[case][1][0])


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("where", ["seen", "told"])
def test_masks_of_any_dtype_seen_or_told(where: str, kind: Any) -> None:
    env = vec("from 10", where=where, kind=kind)
    infos = [] if where == "seen" else [Info("action_mask")]
    rows = joined(collect(env, info_keys=infos, **BUDGET)[0])
    require_legal(rows, "from 10")
    assert len(rows["action"].unique()) == 3


@pytest.mark.parametrize("run", ["sync", "async"])
def test_workers_draw_legal_actions(run: str) -> None:
    with in_threads():
        collector = start([partial(vec, "several", lanes=1)] * 2, **BUDGET, mode=run)
        rows = joined(collect_all(collector).batches)
    require_legal(rows, "several")
    if run == "sync":
        one = joined(collect(vec("several"), **BUDGET)[0])
        assert torch.equal(rows["action"], one["action"])


def test_a_random_opening_is_legal_and_the_policy_goes_on() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", td["action_mask"].to(torch.int64).argmax(-1) + 10)

    rows = joined(collect(vec("from 10"), policy, init_random_frames=16, **BUDGET)[0])
    require_legal(rows, "from 10")
    drawn = rows["collector", "policy_version"] == -1
    assert int(drawn.sum()) == 16
    assert len(rows["action"][drawn].unique()) == 3


@pytest.mark.parametrize("way", ["iterated", "collected"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (0, r"expected at least one value that is legal, got \[0, 0, 0\]"),
        (2, r"expected 1 for each value that is legal and 0 for the others, got \[2, 2, 2\]"),
    ],
)
def test_a_mask_that_is_none_is_the_environments_fault(
    spoil: int, wanted: str, mode: AutoresetMode, way: str
) -> None:
    storage = MemmapStorage(max_size=100)
    env = vec("from -1", mode, spoilt=2, spoil=spoil, raises=False)
    match = f"action_mask of the environment at lane 0, step 2 of .*{wanted}"
    with pytest.raises(TransitionError, match=match):
        run(env, storage, way)
    assert 0 < len(storage) < 7
    require_legal(storage[:], "from -1")


def run(env: Any, storage: Any, way: str, policy: Any = None) -> Batches:
    with SyncCollector(env, policy, storage=storage, **BUDGET) as collector:
        if way == "iterated":
            return list(collector)
        while collector.ledger.stored < 40:
            collector.collect(2)
    return []


def test_where_nobody_looks_all_values_are_drawn() -> None:
    env = vec("from 10", spoilt=2, raises=False)
    rows = joined(collect(env, validate="off", **BUDGET)[0])
    assert set(rows["action"].tolist()) == {10, 11, 12}


@pytest.mark.parametrize("way", ["iterated", "collected"])
@pytest.mark.parametrize("mode", MODES)
def test_a_policy_that_the_environment_refuses_is_blamed(mode: AutoresetMode, way: str) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", 12 - (td["count"][:, 1] == 2).long())

    bad: dict[str, Any] = {"spoilt": 2, "spoil": [1, 0, 1]}
    wanted = r"action is not legal at lane 0, step 2 of .*: expected .*\[1, 0, 1\] allows, got 11"
    with pytest.raises(PolicyError, match=wanted) as found:
        run(vec("from 10", mode, **bad), MemmapStorage(max_size=50), way, policy)
    assert isinstance(found.value.__cause__, RuntimeError)


@pytest.mark.parametrize("way", ["iterated", "collected"])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_policy_raises_is_its_own(mode: AutoresetMode, way: str) -> None:
    """No action was chosen yet. The zeros in its place are not in the space."""

    def policy(td: TensorDictBase) -> TensorDictBase:
        if (td["count"][:, 1] == 2).any():
            raise ValueError("mine")
        return td.set("action", torch.full((2,), 12))

    with pytest.raises(ValueError, match=r"^mine$"):
        run(vec("from 10", mode), MemmapStorage(max_size=50), way, policy)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_policy_raises_in_a_worker_is_its_own(mode: Any) -> None:
    class Late(torch.nn.Module):
        def forward(self, count: torch.Tensor) -> torch.Tensor:
            if (count[..., 1] == 1).any():
                raise ValueError("mine")
            return torch.full(count.shape[:1], 12)

    policy = TensorDictModule(Late(), in_keys=["count"], out_keys=["action"])
    options: dict[str, Any] = {**BUDGET, "num_workers": 2, "mode": mode, "transport": "thread"}
    with (
        MultiprocessCollector(partial(vec, "from 10"), policy, **options) as collector,
        pytest.raises(WorkerRaised, match="raised ValueError while stepping: mine"),
    ):
        list(collector)


def test_what_the_environment_takes_is_kept() -> None:
    env = vec("from 10", raises=False)
    always = partial(torch.full, (2,), 11)
    rows = joined(collect(env, lambda td: td.set("action", always()), **BUDGET)[0])
    assert (rows["action"] == 11).all()
    assert not rows["action_mask"][:, 1].all()


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_where_a_mask_allows_nothing_no_policy_is_blamed(mode: AutoresetMode, random: bool) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        legal = td["action_mask"].float()
        return td.set("action", torch.multinomial(legal, 1)[:, 0] + 10)  # raises on its own

    with pytest.raises(
        TransitionError, match=r"action_mask of the environment at lane 0, step 3 .*at least one"
    ):
        collect(vec("from 10", mode, spoilt=3), None if random else policy, **BUDGET)


def test_a_mask_that_passes_is_warned_of_once() -> None:
    env = vec("from 10", spoilt=2, raises=False)
    with pytest.warns(
        OutOfRangeWarning, match="action_mask of the environment at lane 0, step 2 of"
    ) as caught:
        rows = joined(collect(env, validate="warn", **BUDGET)[0])
    assert [each.category for each in caught] == [OutOfRangeWarning]
    assert len(rows) == 40


def test_a_mask_that_a_policy_is_given_is_its_own_affair() -> None:
    env = vec("from 10", spoilt=3, raises=False)
    always = partial(torch.full, (2,), 11)
    rows = joined(
        collect(env, lambda td: td.set("action", always()), init_random_frames=4, **BUDGET)[0]
    )
    assert (~rows["action_mask"].bool().any(-1)).sum() == 10


class Late(Masked):
    """Environment that raises in its fifth step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute any action."""
        if self.time == 4:
            raise RuntimeError("a fault of its own")
        return *super().step(action)[:2], False, False, {}

    def marks(self) -> Any:
        return np.ones(self.shape, self.kind)


@pytest.mark.parametrize("spoil", [0, [1, 0, 1]])
def test_masks_of_reset_slots_are_blamed_for_nothing(spoil: Any) -> None:
    """When lane 1 raises, the last mask of lane 0 belongs to an ignored action."""
    space, shape = CASES["from 10"]
    ends = partial(Masked, space, shape, spoilt=4, spoil=spoil, raises=False)
    env = SyncVectorEnv([ends, partial(Late, space, shape)], autoreset_mode=AutoresetMode.NEXT_STEP)
    always = partial(torch.full, (2,), 11)
    with pytest.raises(RuntimeError, match="a fault of its own") as found:
        collect(env, lambda td: td.set("action", always()), **BUDGET)
    assert not isinstance(found.value, CollectorError)


@pytest.mark.parametrize(
    ("space", "shape", "wanted"),
    [
        (spaces.Discrete(3, start=1), (4,), r"expected the shape \[3\], .* got \[4\]"),
        (spaces.Discrete(3), (1,), r"expected the shape \[3\], .* got \[1\]"),
        (spaces.Discrete(3), (2, 3), r"expected the shape \[3\], .* got \[2, 3\]"),
        (spaces.MultiDiscrete([2, 3]), (6,), r"\[5\] .*, \[2, 3\] \(combinations\), .* got \[6\]"),
        (spaces.MultiBinary(3), (3,), r"\[6\].* \[3, 2\] \(one row per index\), .* got \[3\]"),
        (spaces.Box(-1, 1, (2,)), (2,), r"got Bounded\w* \[2\] for action; give the mask another"),
        (spaces.Box(0, 9, (1,), np.uint8), (2,), r"expected the shape \[10\], .* got \[2\]"),
    ],
)
def test_masks_that_fit_no_action(space: Any, shape: tuple[int, ...], wanted: str) -> None:
    env = partial(Masked, space, shape, raises=False)
    with pytest.raises(SpaceError, match=f"^action_mask: .*{wanted}.*rename"):
        collect(SyncVectorEnv([env]), **BUDGET)
    # also for a list of several
    with pytest.raises(SpaceError, match=f"^action_mask: .*{wanted}.*rename"):
        collect(SyncVectorEnv([env]), [("rest", None)], **BUDGET)
    if not isinstance(space, spaces.Discrete):
        return
    chosen = torch.full((1,), int(space.start))
    rows = joined(collect(SyncVectorEnv([env]), lambda td: td.set("action", chosen), **BUDGET)[0])
    assert len(rows) == 40, "a policy reads what it likes"
    renamed = {"action_mask": "marks"}
    assert len(joined(collect(SyncVectorEnv([env]), rename=renamed, **BUDGET)[0])) == 40


def test_bits_are_chosen_by_two_marks_each() -> None:
    env = partial(Masked, spaces.MultiBinary(3), (3, 2), raises=False)
    rows = joined(collect(SyncVectorEnv([env]), **BUDGET)[0])
    bits = rows["action"].long()
    assert rows["action_mask"].gather(-1, bits[..., None]).all()
    assert len(bits.unique(dim=0)) > 3


class Teams(toy_systems.Toy):
    """Group of two agents that choose among three values from 7 on, each with its own mask.

    One of them acts, as a mask indicates, and the other has no legal action.
    """

    def __init__(self, dead: int = -1) -> None:
        super().__init__(2)
        self.dead = dead
        low, high = (torch.full((2,), end) for end in (7, 9))
        self.declares = replace(
            self.declares,
            observation={
                **self.declares.observation,
                ("team", "action_mask"): Binary(3, (2, 3), dtype=torch.bool),
                ("team", "mask"): Binary(2, (2,), dtype=torch.bool),
            },
            action={("team", "action"): Bounded(low, high, shape=(2,), dtype=torch.int64)},
            groups={"team": 2},
        )

    def seen(self, state: Any) -> list[Any]:
        turn = self.state[:, 2] % 2
        acts = turn[:, None] == np.arange(2)
        marks = np.arange(3) != self.state[:, 2:3, None] % 3
        marks = marks & acts[..., None] & (self.state[:, 2] != self.dead)[:, None, None]
        return [state, marks, acts]

    def reset(self, *args: Any, **options: Any) -> list[Any]:
        return self.seen(super().reset(*args, **options)[0])

    def step(self, action: Sequence[Any], lanes: Any = None) -> Any:
        own = action[0]
        assert ((own >= 7) & (own <= 9)).all()
        turn = self.state[:, 2] % 2
        out = super().step([own[np.arange(len(own)), turn] - 7], lanes)
        flags = np.repeat(out.terminated[:, None], 2, 1), np.repeat(out.truncated[:, None], 2, 1)
        agents = {"team": toy_systems.AgentFlags(*flags)}
        return out._replace(obs=self.seen(out.obs[0]), agents=agents)


def test_an_agent_whose_turn_it_is_not_needs_no_legal_action() -> None:
    rows = joined(collect(Teams(), **BUDGET)[0])
    marks, chosen = rows["team", "action_mask"], rows["team", "action"] - 7
    legal = marks.gather(-1, chosen[..., None])[..., 0]
    assert torch.equal(legal, marks.any(-1))
    with pytest.raises(
        TransitionError, match=r"^team/action_mask of the environment at lane \d, step 3 of "
    ):
        collect(Teams(dead=3), **BUDGET)


def test_where_no_mask_tells_who_acts_one_agent_must() -> None:
    rule = MaskRule(("team", "action"), ("team", "action_mask"), Choices((7,), (3,)), (2,), None)
    marks = np.zeros((1, 3, 2, 3), np.bool_)
    marks[0, 0], marks[0, 1, 1, 2] = True, True
    assert rule.wrong(marks, None)[0].tolist() == [[False, False, True]]
    acts = np.array([[[True, True], [True, False], [False, False]]])
    assert rule.wrong(marks, acts)[0].tolist() == [[False, True, False]]


LAID: dict[str, tuple[Choices, tuple[int, ...]]] = {
    "one": (Choices((7,), (3,)), (3,)),
    "parts": (Choices((5, -2), (2, 3), (2,)), (5,)),
    "combinations": (Choices((5, -2), (2, 3), (2,)), (2, 3)),
    "rows": (Choices((1, 4), (3, 3), (2,)), (2, 3)),
}
"""Layouts of a mask by name: the values, and the shape of one mask."""


def parts_of(laid: str, marks: Any) -> list[Any]:
    if laid == "parts":
        return [marks[:2], marks[2:]]
    return list(marks) if laid == "rows" else [marks.reshape(-1)]


def allows(laid: str, marks: Any, action: Any) -> bool:
    choices, _ = LAID[laid]
    index = np.ravel(action) - choices.starts
    if (index < 0).any() or (index >= choices.sizes).any():
        return False
    if laid == "combinations":
        return bool(marks[tuple(index)])
    return all(part[at] for part, at in zip(parts_of(laid, marks), index, strict=True))


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("laid", LAID)
def test_a_quick_look_finds_what_is_wrong(laid: str, kind: Any) -> None:
    choices, shape = LAID[laid]
    rule, rng = MaskRule(("action",), ("action_mask",), choices, (), None), np.random.default_rng(0)
    others = {np.uint8: [2, 255], np.int64: [2, -1], np.float32: [2, -1, 0.5, np.nan]}.get(kind, [])
    seen = set()
    for number in range(60):
        marks = (rng.random((2, 3, *shape)) < (0.5, 0.95)[number % 2]).astype(kind)
        spoilt = bool(others) and rng.random() < 0.3
        if spoilt:
            marks.reshape(-1)[rng.integers(marks.size)] = rng.choice(others)
        every = marks.reshape(6, *shape)
        odd = [bool(((each != 0) & (each != 1)).any()) for each in every]
        empty = [any(not part.any() for part in parts_of(laid, each)) for each in every]
        assert rule.wrong(marks, None)[0].reshape(-1).tolist() == (odd if spoilt else empty)
        right = not any(odd) and not any(empty)
        assert rule.quick(marks, None, zeros_and_ones=False)() is right
        if not spoilt:
            assert rule.quick(marks, None, zeros_and_ones=True)() is right
        seen.add((right, spoilt))
    assert len(seen) == (3 if others else 2)


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.float32])
@pytest.mark.parametrize("laid", LAID)
def test_a_quick_look_passes_over_agents_that_do_not_act(laid: str, kind: Any) -> None:
    choices, shape = LAID[laid]
    rule = MaskRule(("team", "action"), ("team", "action_mask"), choices, (2,), ("team", "mask"))
    rng, seen = np.random.default_rng(2), set()
    for number in range(60):
        marks = (rng.random((2, 3, 2, *shape)) < (0.5, 0.9)[number % 2]).astype(kind)
        live = rng.random((2, 3, 2)) < 0.3
        marks[~live & (rng.random(live.shape) < 0.5)] = 0
        if spoilt := kind is not np.bool_ and number % 7 == 0:
            marks[~live] = 2
        bad = [
            any(not part.any() for part in parts_of(laid, each)) and alive
            for each, alive in zip(marks.reshape(12, *shape), live.reshape(-1), strict=True)
        ]
        right = not any(bad) and not (spoilt and bool((~live).any()))
        assert rule.quick(marks, live, zeros_and_ones=False)() is right
        assert (not rule.wrong(marks, live)[0].any()) is right
        seen.add(right)
    assert seen == {True, False}


@pytest.mark.parametrize("laid", LAID)
def test_actions_that_masks_forbid(laid: str) -> None:
    choices, shape = LAID[laid]
    rule = MaskRule(("team", "action"), ("team", "action_mask"), choices, (2,), None)
    rng, count = np.random.default_rng(1), len(choices.sizes)
    for _ in range(20):
        marks = rng.random((2, 3, 2, *shape)) < 0.7
        index = rng.integers(-1, 4, (2, 3, 2, count)) if rng.random() < 0.5 else 1
        actions = np.asarray(choices.starts) + np.broadcast_to(index, (2, 3, 2, count))
        actions = actions.reshape(2, 3, 2, *choices.shape)
        acts = rng.random((2, 3, 2)) < 0.5
        legal = np.reshape(
            [allows(laid, marks[at], actions[at]) for at in np.ndindex(2, 3, 2)], (2, 3, 2)
        )
        assert (rule.forbids(actions, marks, None) == (~legal).any(-1)).all()
        assert (rule.forbids(actions, marks, acts) == (~legal & acts).any(-1)).all()


def test_errors_are_of_one_tree() -> None:
    assert issubclass(SpaceError, CollectorError)
    assert Choices((0,), (2,)).parts(np.zeros((4, 3), np.bool_), (4,)) is None


# --- probes of an environment ---------------------------------------------------------------------


class Again(Masked):
    """Environment that returns observations and masks in infos in the same arrays each time."""

    held: Any = None

    def look(self) -> tuple[Any, dict[str, Any]]:
        """Overwrite the values that were returned before."""
        seen = super().look()
        if self.held is None:
            self.held = seen
        for old, new in zip(leaves(self.held), leaves(seen), strict=True):
            old[...] = new
        return self.held


@pytest.mark.parametrize("where", ["seen", "told"])
@pytest.mark.parametrize("case", CASES)
def test_a_probe_takes_legal_actions(case: str, where: str) -> None:
    """An environment that raises at illegal actions would otherwise hide that it reuses memory."""
    space, shape = CASES[case]
    child = partial(single_env, names=("action_mask",))
    for kind, reuses in ((Again, True), (Masked, False)):
        make = partial(kind, space, shape, where=where)
        assert overwrites_itself(make, child, warn=True) is reuses


def test_an_async_vector_that_overwrites_masked_rows_is_refused() -> None:
    lane = partial(Again, *CASES["several"])
    same = AutoresetMode.SAME_STEP
    make = partial(AsyncVectorEnv, [lane], autoreset_mode=same, context="fork")
    with pytest.raises(EnvironmentRefused, match="in one array that it overwrites"):
        collect(make, **BUDGET)


@pytest.mark.parametrize("case", CASES)
def test_infos_are_looked_for_with_legal_actions(case: str) -> None:
    space, shape = CASES[case]
    make = partial(SyncVectorEnv, [partial(Masked, space, shape, where="told")] * 9)
    (found,) = discovered((Info("action_mask"),), make, make())
    assert (found.dtype, found.shape) == (np.dtype(np.int8), shape)


class Alone(EnvBase):
    """Environment of one lane without an axis, whose mask allows one of 10, 11 and 12."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(action_mask=Binary(3, (3,), dtype=torch.bool))
        self.action_spec = Bounded(10, 12, shape=(), dtype=torch.int64)
        self.reward_spec = Unbounded((1,))
        self.time = 0

    def _set_seed(self, seed: int | None) -> None: ...

    def _look(self) -> TensorDict:
        done = torch.tensor([self.time > 0 and self.time % 4 == 0])
        mask = torch.arange(3) == self.time % 3
        return TensorDict({"action_mask": mask, "done": done, "terminated": done.clone()})

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        self.time += 1 if self.time % 4 == 0 else 0
        return self._look()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert int(tensordict["action"]) == 10 + self.time % 3, "an illegal move"
        self.time += 1
        return self._look().set("reward", torch.ones(1))


def test_a_lane_without_an_axis_whose_actions_begin_elsewhere() -> None:
    rows = joined(collect(Alone(), **BUDGET)[0])
    assert (rows["action"] == 10 + rows["action_mask"].int().argmax(-1)).all()
    assert len(rows["action"].unique()) == 3
