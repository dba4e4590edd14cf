"""Random actions obey masks of legal actions in infos, on every path of stepping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from tensordict import TensorDictBase

from tallyroll.collector import Info, MultiprocessCollector, OnePolicy, SyncCollector, evaluate
from tallyroll.collector.envs.gymnasium.info_masks import InfoMasks
from tallyroll.collector.envs.gymnasium.spaces import action_leaf
from tallyroll.collector.envs.system import Declares, Step
from tallyroll.collector.errors import CollectorError, SpaceError, TransitionError
from tallyroll.storage import fast_paths

SPACES: dict[str, Callable[[], Any]] = {
    "discrete": lambda: spaces.Discrete(4),
    "from 3": lambda: spaces.Discrete(4, start=3),
    "several": lambda: spaces.MultiDiscrete([3, 4]),
    "two of two": lambda: spaces.MultiDiscrete([2, 2]),
    "bits": lambda: spaces.MultiBinary(3),
    "two bits": lambda: spaces.MultiBinary(2),
}


def is_legal(space: Any, mask: Any, action: Any) -> bool:
    """Return True if Gymnasium's ``space.sample(mask)`` could return the action."""
    if isinstance(space, spaces.Discrete):
        return bool(mask[int(action) - int(space.start)])
    if isinstance(space, spaces.MultiBinary):
        return all(m in (2, a) for m, a in zip(mask, action, strict=True))
    return all(bool(m[a]) for m, a in zip(mask, action, strict=True))


class Masked(gym.Env[Any, Any]):
    """Environment whose infos have a mask that the space accepts; it observes [salt, step].

    The salt is a random number of the episode. Rewards are 1 for legal actions, and 0 for others.
    """

    observation_space = spaces.Box(-1, 1000, (2,), np.float32)

    def __init__(
        self,
        space: str = "discrete",
        kind: Any = np.int8,
        *,
        length: int = 5,
        absent: int = -1,
        spoil: Callable[[int, Any], Any] = lambda at, mask: mask,
    ) -> None:
        self.action_space, self.kind = SPACES[space](), kind
        self.length, self.absent, self.spoil = length, absent, spoil
        self.at = 0
        self.mask: Any = None

    def _info(self) -> dict[str, Any]:
        rng, space = np.random.default_rng([self.salt, self.at]), self.action_space
        if isinstance(space, spaces.MultiBinary):
            self.mask = rng.integers(3, size=space.n).astype(np.int8)
        else:
            sizes = [space.n] if isinstance(space, spaces.Discrete) else space.nvec
            parts = tuple((np.arange(n) == rng.integers(n)).astype(self.kind) for n in sizes)
            self.mask = parts[0] if isinstance(space, spaces.Discrete) else parts
        if self.at % 4 == self.absent:
            self.mask = None
            return {}
        return {"action_mask": self.spoil(self.at, self.mask)}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.salt = 0, int(self.np_random.integers(1000))
        return np.array([self.salt, 0], np.float32), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        legal = self.mask is None or is_legal(self.action_space, self.mask, action)
        self.at += 1
        over = self.at == self.length
        seen = np.array([self.salt, self.at], np.float32)
        return (
            seen,
            float(legal),
            over and self.salt % 2 == 0,
            over and self.salt % 2 == 1,
            (self._info()),
        )


def rows(make: Any, kind: Any = SyncCollector, **options: Any) -> TensorDictBase:
    """Return the 120 rows of a run whose actions are random."""
    given = {"frames_per_batch": 40, "total_frames": 120, "seed": 2, **options}
    with kind(make, **given) as collector:
        return torch.cat(list(collector))


def legal(batch: TensorDictBase) -> bool:
    """Return True if the environments found all actions legal."""
    return bool((batch["next", "reward"] == 1).all())


@pytest.mark.parametrize("kind", [np.int8, np.bool_, np.float32, np.int64])
@pytest.mark.parametrize("space", SPACES)
def test_masks_of_every_space_are_kept_to(space: str, kind: Any) -> None:
    batch = rows(partial(Masked, space, kind), num_envs=3)
    assert legal(batch)
    assert "action_mask" not in batch.keys()


@pytest.mark.parametrize("space", SPACES)
def test_a_mask_may_be_a_column_too(space: str) -> None:
    given = {"num_envs": 3, "info_keys": ("action_mask",)}
    batch = rows(partial(Masked, space), **given)
    assert legal(batch)
    assert len(batch["action_mask"]) == 120
    without = rows(partial(Masked, space), num_envs=3)
    assert torch.equal(batch["action"], without["action"])


def test_a_lane_without_a_mask_may_do_anything() -> None:
    batch = rows(partial(Masked, absent=1), num_envs=3)
    assert legal(batch)
    free = batch["observation"][:, 1] % 4 == 1
    assert len(set(batch["action"][free].tolist())) == 4
    column = (Info("action_mask", np.int8, (4,), fill=1),)
    assert legal(rows(partial(Masked, absent=0), num_envs=3, info_keys=column))


@pytest.mark.parametrize("way", ["in turn", "through", "within", "vector", "async"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_way_of_stepping_keeps_to_masks(mode: AutoresetMode, way: str) -> None:
    if way == "within" and mode is not AutoresetMode.NEXT_STEP:
        pytest.skip("Gymnasium's wrapper is of that mode alone")

    def make() -> Any:
        kind: Any = SyncVectorEnv
        if way == "async":
            kind = partial(AsyncVectorEnv, context="fork")
        vector = kind([partial(Masked, absent=2)] * 3, autoreset_mode=mode)
        wrappers = {"through": RecordEpisodeStatistics, "within": NormalizeObservation}
        return wrappers.get(way, lambda each: each)(vector)

    with fast_paths.switched_off(*(["sequential"] if way == "vector" else [])):
        batch = rows(make)
    assert legal(batch)
    assert batch["next", "done"].any()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_collect_keeps_to_masks(mode: AutoresetMode, tmp_path: Path) -> None:
    made = SyncVectorEnv([Masked] * 3, autoreset_mode=mode)
    options = {"frames_per_batch": 6, "total_frames": 60, "seed": 0, "storage": tmp_path / "run"}
    with SyncCollector(made, **options) as collector:
        while collector.collect(6):
            pass
        assert collector.plan.masks.way == "infos"
        assert "action_mask is in the infos" in str(collector.plan)
        storage = collector.restarting.storage
        assert storage is not None
        assert legal(storage.reader.get(slice(None)))  # type: ignore[attr-defined]
    made.close()


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_workers_draw_what_one_process_draws(transport: str) -> None:
    alone = rows(Masked, num_envs=4)
    many = {"num_envs": 4, "num_workers": 2, "transport": transport}
    batch = rows(Masked, MultiprocessCollector, **many)
    assert legal(batch)
    assert torch.equal(alone["action"], batch["action"])
    if transport == "thread":
        assert legal(rows(Masked, MultiprocessCollector, mode="async", **many))


def nothing(td: TensorDictBase) -> TensorDictBase:
    """Choose 0, which masks mostly forbid."""
    return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


def test_openings_keep_to_masks_and_policies_need_not() -> None:
    batch = rows(Masked, policy=nothing, num_envs=3, init_random_frames=50)
    random = batch["collector", "policy_version"] == -1
    assert int(random.sum()) == 50
    assert legal(batch[random])
    assert not legal(batch[~random])
    policies = [([0], OnePolicy(nothing, init_random_frames=7)), ([1, 2], None)]
    batch = rows(Masked, policy=policies, num_envs=3)
    random = batch["collector", "policy_version"] == -1
    assert legal(batch[random])
    assert int(random.sum()) == 80 + 7
    with SyncCollector(Masked, nothing, frames_per_batch=4, total_frames=8) as collector:
        assert collector.plan.masks.way == "none"
        assert "no action_mask is an observation, or at the root of the first infos" in str(
            collector.plan
        )


def best(observation: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
    """Choose the first legal action."""
    return action_mask.int().argmax(-1)


class FirstOfTwo(torch.nn.Module):
    """Network with one argument, which is the observation without the mask."""

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        assert seen.shape[-1] == 2
        return seen[..., 0].long() * 0


def test_a_column_of_masks_reaches_policies_that_want_it() -> None:
    given: dict[str, Any] = {"num_envs": 3, "info_keys": ("action_mask",)}
    assert legal(rows(Masked, policy=best, **given))
    assert legal(rows(Masked, policy=best, init_random_frames=40, **given))
    assert not legal(rows(Masked, policy=FirstOfTwo(), **given))


def test_time_limits_and_evaluation_keep_to_masks() -> None:
    assert legal(rows(Masked, num_envs=3, max_frames_per_traj=3))
    assert legal(rows(Masked, num_envs=3, surplus="never_step"))
    assert legal(rows(Masked, num_envs=3, reset_at_each_iter=True))
    done = evaluate(None, Masked, episodes=6, num_envs=2, seed=0)
    assert done.returns.tolist() == [5.0] * 6


def test_a_mask_by_another_name_is_not_kept_to() -> None:
    given = {"info_keys": ("action_mask",), "rename": {"action_mask": "marks"}}
    batch = rows(Masked, num_envs=3, **given)
    assert not legal(batch)
    assert batch["marks"].shape == (120, 4)


def test_a_mask_of_nothing_names_its_lane() -> None:
    def spoil(at: int, mask: Any) -> Any:
        return mask * (at != 3)

    with pytest.raises(
        TransitionError, match=r"expected at least one legal value .*, got none in lane 0"
    ):
        rows(partial(Masked, spoil=spoil), num_envs=2)
    assert legal(rows(partial(Masked, spoil=spoil, length=3), num_envs=2))  # only at ends
    with pytest.raises(
        TransitionError, match=r"expected at least one legal value .*, got none in lane"
    ):
        rows(
            partial(Masked, spoil=spoil),
            MultiprocessCollector,
            num_envs=2,
            num_workers=2,
            transport="thread",
        )


WRONG: dict[str, tuple[Callable[[int, Any], Any], type[CollectorError], str]] = {
    "too long": (lambda at, mask: np.ones(7), SpaceError, r"the shape \[4\]"),
    "longer later": (
        lambda at, mask: np.ones(4 if at < 3 else 5, np.int8),
        TransitionError,
        r"shape \[4\].* lane 0",
    ),
    "added to logits": (
        lambda at, mask: np.where(mask, 0.0, -np.inf),
        TransitionError,
        "1 for each value that is legal",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mask_is_an_error(name: str) -> None:
    spoil, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        rows(partial(Masked, spoil=spoil), num_envs=2)
    rows(partial(Masked, spoil=spoil), num_envs=2, policy=nothing)  # does not draw by the mask


def test_masks_are_taken_of_the_lanes_that_arrive() -> None:
    leaf = action_leaf(spaces.Discrete(2), 3)
    declares = Declares(
        lanes=3, observation={}, action={("action",): leaf.spec[0]}, at_end="reset_slot"
    )
    masks = InfoMasks(leaf, declares, Info("action_mask", np.int8, (2,), fill=True))
    given = np.ones(3, np.bool_)
    seen = np.zeros((3, 1))
    first = masks.reset([seen, np.array([[1, 0], [0, 1], [1, 0]], np.int8), given], None)
    assert len(first) == 1
    lanes, ended = np.array([2, 0], np.int32), np.array([True, False])
    step = Step(
        [seen[:2], np.array([[0, 0], [0, 1]], np.int8), given[:2]],
        [np.zeros(2)],
        ended,
        np.zeros(2, np.bool_),
        lanes=lanes,
    )
    assert len(masks.step(step, lanes).obs) == 1
    assert masks.marks.tolist() == [[False, True], [False, True], [True, True]]
