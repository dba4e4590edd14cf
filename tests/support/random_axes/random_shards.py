"""Sharded runs, drawn by a number, that must have the rows of the single run, bit for bit.

Rows are matched by id and step. The environment's episodes, observations and rewards depend only on
its lane's seed and on the executed actions, so each row shows whether it belongs to the single run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from once_kit import OnceStorage, OnceZarr

from tallyroll.collector import MultiprocessCollector, OnePolicy, SyncCollector
from tallyroll.storage import fast_paths, open_storage
from tallyroll.storage.rows.keys import STEP, TRAJ_IDS, Key

Rows = dict[Key, NDArray[Any]]


class Wanderer(gym.Env[Any, Any]):
    """An environment that walks by its generator and its actions, for a random number of steps."""

    def __init__(self, action: str = "discrete") -> None:
        self.masked = action == "masked"
        self.action_space = spaces.Discrete(4) if action != "box" else spaces.Box(-1, 1, (2,))
        place = spaces.Box(-np.inf, np.inf, (3,))
        mask = spaces.MultiBinary(4)
        self.observation_space = (
            spaces.Dict({"place": place, "action_mask": mask})
            if self.masked
            else spaces.Dict({"place": place})
        )

    def seen(self) -> dict[str, Any]:
        """Return the observation."""
        found: dict[str, Any] = {"place": self.place.astype(np.float32)}
        if self.masked:
            found["action_mask"] = np.roll(np.array([1, 1, 0, 1], np.int8), self.left)
        return found

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Draw the length of the episode and its start."""
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 12))
        self.place = self.np_random.normal(size=3)
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move, and draw noise."""
        self.left -= 1
        self.place = self.place + self.np_random.normal(size=3) + np.sum(action)
        over = self.left == 0
        first = bool(self.place[0] > 0)
        return self.seen(), float(np.sum(action)), over and first, over and not first, {}


def chooses(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a policy whose actions depend on one lane only."""

    def policy(place: torch.Tensor) -> torch.Tensor:
        if kind == "box":
            return torch.sign(place[..., :2])
        return (place[..., 0] > 0).long() + 2 * (place[..., 1] > 0).long()

    return policy


@dataclass(frozen=True)
class Sharded:
    """A run, and the number of its shards."""

    kind: str
    lanes: int
    of: int
    frames: int
    by_policy: bool
    off: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (32,)
    """Batch sizes that the shards cycle through. The single run uses the first."""
    workers: int = 0
    several: int = 0
    """Random actions before the policy of every third lane, while other lanes have no policy.

    0: all lanes have the policy.
    """
    collects: int = 0
    """Rows of each call of ``collect(n)``; 0 iterates over batches."""
    once: type[OnceStorage] | type[OnceZarr] | None = None
    """The kind of storage in which each shard stores frames once."""

    def collect(self, path: Path, shard: str | None, at: int = 0) -> Rows:
        """Collect the run, or one shard of it; return its rows."""
        options = {**self.options, "num_envs": self.lanes, "total_frames": self.frames}
        options["frames_per_batch"] = self.batches[at % len(self.batches)]
        kind: Any = SyncCollector
        if self.workers and shard is not None:
            kind, options["transport"] = MultiprocessCollector, "thread"
            of = int(shard.partition("/")[2])
            options["num_workers"] = min(self.workers, self.lanes // of)
        policy: Any = chooses(self.kind) if self.by_policy else None
        if self.several:
            some, rest = slice(0, None, 3), [*range(1, self.lanes, 3), *range(2, self.lanes, 3)]
            opened = OnePolicy(policy, init_random_frames=self.several)
            policy = [(some, opened)] + ([(rest, None)] if rest else [])
        off = self.off if shard is not None else ()
        with (
            fast_paths.switched_off(*off),
            nullcontext(path) if self.once is None or shard is None else self.once(path) as storage,
            kind(
                lambda: Wanderer(self.kind), policy, seed=5, storage=storage, shard=shard, **options
            ) as collector,
        ):
            if self.collects:
                while collector.collect(self.collects) == self.collects:
                    pass
            else:
                for _ in collector:
                    collector.ledger.check()
            collector.ledger.check()
        return rows_of(path)

    def check(self, folder: Path) -> None:
        """Compare the shards, joined together, with the single run."""
        one = self.collect(folder / "one", None)
        names = [f"{index}/{self.of}" for index in range(self.of)]
        parts = [self.collect(folder / str(at), name, at) for at, name in enumerate(names)]
        assert_same_rows(in_order(one), joined(parts), self)


def draw(number: int) -> Sharded:
    """Draw the run of this number."""
    rng = np.random.default_rng([number, 40])
    lanes = int(rng.integers(1, 14))
    of = int(rng.integers(1, lanes + 1))
    first = lanes * (of - 1) // of
    frames = int(rng.integers(first + 1, first + 1 + int(rng.choice([5, 100, 400]))))
    by_policy = bool(rng.random() < 0.6)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["max_frames_per_traj"] = int(rng.integers(1, 6))
    if rng.random() < 0.3:
        options["reset_seeds"] = True
    if by_policy and rng.random() < 0.6:
        options["init_random_frames"] = int(rng.integers(0, frames + 10))
    if rng.random() < 0.3:
        options["layout"] = str(rng.choice(["lanes", "trajectories"]))
    return Sharded(
        kind=str(rng.choice(["discrete", "box", *([] if by_policy else ["masked"])])),
        lanes=lanes,
        of=of,
        frames=frames,
        by_policy=by_policy,
        off=tuple(way for way in fast_paths.FAST_PATHS if number % 3 and rng.random() < 0.3),
        options=options,
        batches=tuple(int(each) for each in rng.integers(1, 70, 3)),
        workers=int(rng.integers(1, 4)) if rng.random() < 0.25 else 0,
        collects=int(rng.integers(1, 4 * lanes)) if rng.random() < 0.4 else 0,
        once=(None, None, OnceStorage, OnceZarr)[rng.integers(4)],
    )


def rows_of(path: Path) -> Rows:
    """Return all rows of a storage, by column."""
    with open_storage(path) as storage:
        reader = storage.reader
        return {key: reader.column(key).take(np.arange(reader.head)) for key in reader.keys}


def in_order(rows: Rows) -> Rows:
    """Return rows sorted by id and step."""
    order = np.lexsort((rows[STEP], rows[TRAJ_IDS]))
    return {key: column[order] for key, column in rows.items()}


def joined(parts: list[Rows]) -> Rows:
    """Return the rows of all parts, sorted by id and step."""
    assert all(part.keys() == parts[0].keys() for part in parts)
    return in_order({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def assert_same_rows(one: Rows, other: Rows, said: object = "") -> None:
    """Check that every column, every dtype and every bit is the same."""
    assert one.keys() == other.keys(), said
    for key, column in one.items():
        assert column.dtype == other[key].dtype, (key, said)
        assert column.shape == other[key].shape, (key, said)
        assert column.tobytes() == other[key].tobytes(), (key, said)


def next_step_vector(num_envs: int) -> SyncVectorEnv:
    """Return a vector that spends a slot on each reset, as Gymnasium's vectors do by default."""
    return SyncVectorEnv([Wanderer] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
