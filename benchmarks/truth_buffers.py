"""Replay buffers that `truth.py` checks, used as in the documentation of their libraries."""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage

STACK = 4


@dataclass(frozen=True)
class Step:
    """One transition of each lane. All arrays are [lanes, ...]."""

    observation: np.ndarray
    """[lanes, STACK, height, width], oldest frame first."""
    action: np.ndarray
    reward: np.ndarray
    next: np.ndarray
    """The true next observation, also at the end of an episode."""
    terminated: np.ndarray
    truncated: np.ndarray
    episode: np.ndarray
    """An id of the episode, unique over all lanes."""
    time: np.ndarray
    """The number of the transition within its episode, from 0 on."""


@dataclass(frozen=True)
class Draw:
    """The values of a sampled batch that a learner uses. All arrays are [rows, ...]."""

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    next: np.ndarray
    stops: np.ndarray
    """True where the learner does not bootstrap from `next`."""


class Buffer(ABC):
    """One library's buffer in one configuration.

    Args:
        size: capacity in rows, for all lanes together.
        batch: number of rows of a sampled batch.
        like: a step with the shapes and dtypes of all later steps.
        folder: an empty folder for files.
    """

    name: ClassVar[str]
    library: ClassVar[str]
    """Name of the module to import, also in `--peers`."""
    block: ClassVar[int] = 1
    """Number of steps in one `add`."""
    dtype: ClassVar[Any] = np.uint8
    """Dtype of the observations with which rows are checked."""

    def __init__(self, size: int, batch: int, like: Step, folder: Path) -> None:
        self.size, self.batch, self.like, self.folder = size, batch, like, folder
        self.lanes = len(like.action)
        self.shape = like.observation.shape[1:]
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Create the library's buffer."""

    @abstractmethod
    def prepare(self, steps: Sequence[Step]) -> Any:
        """Convert `block` steps to the form in which the library collects them. Not timed."""

    @abstractmethod
    def add(self, prepared: Any) -> None:
        """Add the prepared steps."""

    @abstractmethod
    def sample(self) -> Any:
        """Return a batch as the library returns it."""

    @abstractmethod
    def read(self, sampled: Any) -> Draw:
        """Convert a sampled batch to arrays. Not timed."""

    def close(self) -> None:
        """Release files."""
        return


def rows_of(steps: Sequence[Step], by_lane: bool = False) -> dict[tuple[str, ...], np.ndarray]:
    """Return the columns of steps in TorchRL's format, ordered by slot or by lane."""

    def column(name: str) -> np.ndarray:
        stacked = np.stack([getattr(step, name) for step in steps], axis=1 if by_lane else 0)
        return stacked.reshape(-1, *stacked.shape[2:])

    terminated, truncated = column("terminated")[:, None], column("truncated")[:, None]
    lanes, count = np.arange(len(steps[0].action), dtype=np.int32), len(steps)
    return {
        ("observation",): column("observation"),
        ("action",): column("action"),
        ("next", "observation"): column("next"),
        ("next", "reward"): column("reward")[:, None],
        ("next", "done"): terminated | truncated,
        ("next", "terminated"): terminated,
        ("next", "truncated"): truncated,
        ("collector", "traj_ids"): column("episode"),
        ("collector", "step"): column("time"),
        ("collector", "lane"): np.repeat(lanes, count) if by_lane else np.tile(lanes, count),
    }


def draw_of(rows: TensorDict) -> Draw:
    """Convert a batch in TorchRL's format to arrays."""
    return Draw(
        rows["observation"].numpy(),
        rows["action"].numpy(),
        rows["next", "reward"].numpy()[:, 0],
        rows["next", "observation"].numpy(),
        rows["next", "terminated"].numpy()[:, 0],
    )


class Tallyroll(Buffer):
    """A memory-mapped ring that stores both observations of a row."""

    name = "Tallyroll `MemmapStorage`"
    library = "tallyroll"
    options: ClassVar[dict[str, Any]] = {"once": False}

    def start(self) -> None:
        known = inspect.signature(MemmapStorage).parameters
        options = {name: value for name, value in self.options.items() if name in known}
        self.storage = MemmapStorage(self.folder / "ring", max_size=self.size, **options)

    def prepare(self, steps: Sequence[Step]) -> dict[tuple[str, ...], np.ndarray]:
        return rows_of(steps)

    def add(self, prepared: dict[tuple[str, ...], np.ndarray]) -> None:
        self.storage.extend(prepared)

    def sample(self) -> TensorDict:
        return self.storage.get(torch.randint(len(self.storage), (self.batch,)))

    def read(self, sampled: TensorDict) -> Draw:
        return draw_of(sampled)

    def close(self) -> None:
        self.storage.close()


class TallyrollOnce(Tallyroll):
    """A ring that stores each frame once, in versions of Tallyroll that have frame pools."""

    name = "Tallyroll `MemmapStorage(once=True)`"
    options: ClassVar[dict[str, Any]] = {"once": True}


class StableBaselines3(Buffer):
    """Stable-Baselines3's default buffer."""

    name = "Stable-Baselines3 `ReplayBuffer`"
    library = "stable_baselines3"
    options: ClassVar[dict[str, bool]] = {}

    def start(self) -> None:
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common.buffers import ReplayBuffer

        self.buffer = ReplayBuffer(
            self.size,
            Box(0, 255, self.shape, np.uint8),
            Discrete(2**20),
            device="cpu",
            n_envs=self.lanes,
            **self.options,
        )

    def prepare(self, steps: Sequence[Step]) -> tuple[Any, ...]:
        (step,) = steps
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in step.truncated]
        done = step.terminated | step.truncated
        return step.observation, step.next, step.action[:, None], step.reward, done, infos

    def add(self, prepared: tuple[Any, ...]) -> None:
        self.buffer.add(*prepared)

    def sample(self) -> Any:
        return self.buffer.sample(self.batch)

    def read(self, sampled: Any) -> Draw:
        return Draw(
            sampled.observations.numpy(),
            sampled.actions.numpy()[:, 0],
            sampled.rewards.numpy()[:, 0],
            sampled.next_observations.numpy(),
            sampled.dones.numpy()[:, 0] != 0,
        )


class StableBaselines3Once(StableBaselines3):
    """A single array of observations, with which the library refuses to handle time limits."""

    name = "Stable-Baselines3 `optimize_memory_usage=True`"
    options: ClassVar[dict[str, bool]] = {
        "optimize_memory_usage": True,
        "handle_timeout_termination": False,
    }


class TorchRL(Buffer):
    """TorchRL's buffer with its default sampler."""

    name = "TorchRL `LazyTensorStorage`"
    library = "torchrl"

    def start(self) -> None:
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        self.buffer = ReplayBuffer(storage=LazyTensorStorage(self.size), batch_size=self.batch)

    def prepare(self, steps: Sequence[Step]) -> TensorDict:
        rows = {key: torch.from_numpy(column) for key, column in rows_of(steps).items()}
        return TensorDict(rows, [self.lanes * len(steps)])

    def add(self, prepared: TensorDict) -> None:
        self.buffer.extend(prepared)

    def sample(self) -> TensorDict:
        return self.buffer.sample()

    def read(self, sampled: TensorDict) -> Draw:
        return draw_of(sampled)


class TorchRLCompressed(TorchRL):
    """A storage that compresses each row (with zlib; from Python 3.14 on, with zstd)."""

    name = "TorchRL `CompressedListStorage`"

    def start(self) -> None:
        from torchrl.data import CompressedListStorage, ReplayBuffer

        self.buffer = ReplayBuffer(storage=CompressedListStorage(self.size), batch_size=self.batch)


class TorchRLCompact(TorchRL):
    """Rows of a collector with `compact_obs=True`, whose next observations are reconstructed.

    Each `add` takes a batch of 4 steps, ordered by lane, as the collector yields it. Observations
    are floats, because the transform marks a missing observation by NaN. Integers need another
    ``fill_value``.
    """

    name = "TorchRL `compact_obs`, `NextStateReconstructor`"
    block = 4
    dtype = np.float32

    def start(self) -> None:
        from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler
        from torchrl.envs.transforms import NextStateReconstructor

        fill = {"fill_value": 0} if self.like.observation.dtype == np.uint8 else {}
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(self.size),
            sampler=SliceSampler(
                slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False
            ),
            transform=NextStateReconstructor(**fill),
            batch_size=self.batch,
        )

    def prepare(self, steps: Sequence[Step]) -> TensorDict:
        columns = rows_of(steps, by_lane=True)
        del columns["next", "observation"]
        rows = {key: torch.from_numpy(column) for key, column in columns.items()}
        return TensorDict(rows, [self.lanes * len(steps)])


class Cpprb(Buffer):
    """cpprb's default buffer."""

    name = "cpprb `ReplayBuffer`"
    library = "cpprb"

    def start(self) -> None:
        self.buffers = [self.buffer_of(self.size)]

    def buffer_of(self, size: int, **options: Any) -> Any:
        """Return a buffer of cpprb, whose stacks have their frames along the last axis."""
        from cpprb import ReplayBuffer

        pixels = {"shape": (*self.shape[1:], STACK), "dtype": np.uint8}
        columns: dict[str, Any] = {"obs": pixels, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
        if "next_of" not in options:
            columns["next_obs"] = pixels
        return ReplayBuffer(size, columns, **options)

    def prepare(self, steps: Sequence[Step]) -> list[tuple[dict[str, Any], bool]]:
        (step,) = steps
        now, then = np.moveaxis(step.observation, 1, -1), np.moveaxis(step.next, 1, -1)
        return [
            (
                {
                    "obs": now[lane],
                    "act": step.action[lane],
                    "rew": step.reward[lane],
                    "next_obs": then[lane],
                    "done": step.terminated[lane],
                },
                bool(step.terminated[lane] or step.truncated[lane]),
            )
            for lane in range(self.lanes)
        ]

    def add(self, prepared: list[tuple[dict[str, Any], bool]]) -> None:
        for lane, (row, ended) in enumerate(prepared):
            buffer = self.buffers[lane % len(self.buffers)]
            buffer.add(**row)
            if ended:
                buffer.on_episode_end()

    def sample(self) -> list[dict[str, np.ndarray]]:
        return [buffer.sample(self.batch // len(self.buffers)) for buffer in self.buffers]

    def read(self, sampled: list[dict[str, np.ndarray]]) -> Draw:
        rows = {name: np.concatenate([each[name] for each in sampled]) for name in sampled[0]}
        return Draw(
            np.moveaxis(rows["obs"], -1, 1),
            rows["act"][:, 0],
            rows["rew"][:, 0],
            np.moveaxis(rows["next_obs"], -1, 1),
            rows["done"][:, 0] != 0,
        )


class CpprbNextOf(Cpprb):
    """Each observation once, in a buffer for each lane, because consecutive rows are adjacent."""

    name = "cpprb `next_of`, a buffer for each lane"
    once: ClassVar[dict[str, str]] = {"next_of": "obs"}

    def start(self) -> None:
        each = self.size // self.lanes
        self.buffers = [self.buffer_of(each, **self.once) for _ in range(self.lanes)]


class CpprbStacks(CpprbNextOf):
    """Each frame of a stack once, in a buffer for each lane."""

    name = "cpprb `next_of`, `stack_compress`, a buffer for each lane"
    once: ClassVar[dict[str, str]] = {"next_of": "obs", "stack_compress": "obs"}


class CpprbMixed(CpprbNextOf):
    """Each observation once, with both lanes in one buffer. cpprb does not support this."""

    name = "cpprb `next_of`, lanes in turn in one buffer (not supported)"

    def start(self) -> None:
        self.buffers = [self.buffer_of(self.size, **self.once)]


class Tianshou(Buffer):
    """Tianshou's default buffer, which has a ring for each lane."""

    name = "Tianshou `VectorReplayBuffer`"
    library = "tianshou"
    options: ClassVar[dict[str, Any]] = {}

    def start(self) -> None:
        from tianshou.data import VectorReplayBuffer

        self.buffer = VectorReplayBuffer(self.size, self.lanes, **self.options)

    def prepare(self, steps: Sequence[Step]) -> Any:
        from tianshou.data import Batch

        (step,) = steps
        return Batch(
            obs=step.observation,
            act=step.action,
            rew=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            done=step.terminated | step.truncated,
            obs_next=step.next,
            info=[{}] * self.lanes,
        )

    def add(self, prepared: Any) -> None:
        self.buffer.add(prepared)

    def sample(self) -> Any:
        return self.buffer.sample(self.batch)[0]

    def read(self, sampled: Any) -> Draw:
        return Draw(sampled.obs, sampled.act, sampled.rew, sampled.obs_next, sampled.terminated)


class TianshouOnce(Tianshou):
    """The options of Tianshou's Atari examples: only the last frame of each observation."""

    name = "Tianshou `ignore_obs_next`, `save_only_last_obs`, `stack_num=4`"
    options: ClassVar[dict[str, Any]] = {
        "ignore_obs_next": True,
        "save_only_last_obs": True,
        "stack_num": STACK,
    }


class FlashbaxItem(Buffer):
    """Flashbax's buffer of independent transitions."""

    name = "flashbax `make_item_buffer`"
    library = "flashbax"

    def start(self) -> None:
        import flashbax
        import jax

        rows = {"add_batches": True, "sample_batch_size": min(self.batch, self.size)}
        self.begin(flashbax.make_item_buffer(max_length=self.size, min_length=1, **rows))
        self.key = jax.random.PRNGKey(0)

    def begin(self, buffer: Any) -> None:
        """Allocate the buffer, and compile its functions."""
        import jax

        row = jax.tree.map(lambda column: column[0], self.prepare([self.like]))
        self.state = buffer.init(row)
        self.adds = jax.jit(buffer.add, donate_argnums=0)  # in place
        self.samples = jax.jit(buffer.sample)

    def prepare(self, steps: Sequence[Step]) -> dict[str, Any]:
        import jax.numpy as jnp

        (step,) = steps
        names = ("observation", "action", "reward", "terminated", "next")
        return {name: jnp.asarray(getattr(step, name)) for name in names}

    def add(self, prepared: dict[str, Any]) -> None:
        import jax

        self.state = jax.block_until_ready(self.adds(self.state, prepared))

    def sample(self) -> Any:
        import jax

        self.key, key = jax.random.split(self.key)
        return jax.block_until_ready(self.samples(self.state, key).experience)

    def read(self, sampled: Any) -> Draw:
        names = ("observation", "action", "reward", "next", "terminated")
        return Draw(*(np.asarray(sampled[name]) for name in names))


class FlashbaxFlat(FlashbaxItem):
    """Flashbax's buffer of pairs of rows: the second row has the next observation."""

    name = "flashbax `make_flat_buffer`"

    def start(self) -> None:
        import flashbax
        import jax

        lanes = {"add_batch_size": self.lanes, "sample_batch_size": min(self.batch, self.size)}
        self.begin(flashbax.make_flat_buffer(max_length=self.size, min_length=2, **lanes))
        self.key = jax.random.PRNGKey(0)

    def prepare(self, steps: Sequence[Step]) -> dict[str, Any]:
        prepared = super().prepare(steps)
        del prepared["next"]
        return prepared

    def read(self, sampled: Any) -> Draw:
        first = {name: np.asarray(column) for name, column in sampled.first.items()}
        then = np.asarray(sampled.second["observation"])
        return Draw(
            first["observation"], first["action"], first["reward"], then, first["terminated"]
        )


BUFFERS: list[type[Buffer]] = [
    Tallyroll,
    TallyrollOnce,
    StableBaselines3,
    StableBaselines3Once,
    TorchRL,
    TorchRLCompact,
    TorchRLCompressed,
    Cpprb,
    CpprbNextOf,
    CpprbStacks,
    CpprbMixed,
    Tianshou,
    TianshouOnce,
    FlashbaxItem,
    FlashbaxFlat,
]
PEERS = list(dict.fromkeys(each.library for each in BUFFERS[2:]))


def chosen(peers: Sequence[str]) -> tuple[list[type[Buffer]], list[str]]:
    """Return the buffers to check, and a remark for each buffer that is left out."""
    kinds, remarks = [], []
    for kind in BUFFERS:
        if kind.library not in ("tallyroll", *peers):
            continue
        if importlib.util.find_spec(kind.library) is None:
            remarks.append(f'{kind.name}: left out, not installed: install ".[bench]"')
        elif kind is TallyrollOnce and "once" not in inspect.signature(MemmapStorage).parameters:
            remarks.append(f"{kind.name}: left out, this version has no `once`")
        else:
            kinds.append(kind)
    return kinds, remarks
