"""The raw loop, which is the reference, and Tallyroll's collector on the same work."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from common import Contender, Tally, ratio
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.storage import MemmapStorage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from common import Result

ENV_ID = "CartPole-v1"
RING_BATCHES = 16
OBSERVATION, ACTIONS, HIDDEN = 4, 2, 64
ROW = (16, 8, 16, 4, 1, 1, 1, 8, 8, 4, 8)
"""Bytes of a CartPole row in all eleven columns."""


@dataclass(frozen=True)
class Case:
    """An environment to collect from: number of lanes, kind of vector, and batch size."""

    name: str
    lanes: int
    native: bool
    frames: int
    env_id: str = ENV_ID
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Vector steps of a batch. Random actions are drawn for this many steps at a time."""
        return self.frames // self.lanes


@dataclass(frozen=True)
class Work:
    """A case, the kind of policy (``random``, ``sampled``, ``argmax``), and a folder for files."""

    case: Case
    policy: str
    scratch: Path

    @property
    def title(self) -> str:
        """The title of its table."""
        case = self.case
        return f"{case.name}: {case.lanes} lanes, {self.policy}, batches of {case.frames}"


def records_of(work: Work, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the results as plain records. The first result is the raw loop's."""
    return [
        {
            "case": work.case.name,
            "lanes": work.case.lanes,
            "frames_per_batch": work.case.frames,
            "policy": work.policy,
            "contender": result.name,
            "us_per_vector_step": result.vector_step_us,
            "us_per_transition": result.transition_us,
            "speed_to_raw": ratio(results[0], result),
            "spread": result.spread,
            "rounds_us_per_transition": result.per_transition,
        }
        for result in results
    ]


def make_vector_env(case: Case, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> VectorEnv:
    """Create the case's vector environment. The native one supports only NEXT_STEP."""
    if case.native:
        return gym.make_vec(case.env_id, case.lanes, vectorization_mode="vector_entry_point")
    return gym.make_vec(
        case.env_id,
        case.lanes,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        **case.env_kwargs,
    )


class Mlp(torch.nn.Module):
    """Two tanh layers of 64: observation ``[lanes, 4]`` to action ``[lanes]``."""

    def __init__(self, *, sample: bool) -> None:
        """Build the layers. ``sample`` draws the action; otherwise the best one is taken."""
        super().__init__()
        self.sample = sample
        self.logits = torch.nn.Sequential(
            torch.nn.Linear(OBSERVATION, HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Linear(HIDDEN, HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Linear(HIDDEN, ACTIONS),
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return one action per lane, int64."""
        logits = self.logits(observation)
        if self.sample:
            return torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        return logits.argmax(-1)


def make_policy(kind: str) -> TensorDictModule | None:
    """Return the policy module, or None for random actions. The weights are always the same."""
    if kind == "random":
        return None
    torch.manual_seed(0)
    return TensorDictModule(
        Mlp(sample=kind == "sampled"), in_keys=["observation"], out_keys=["action"]
    )


class RawLoop(Contender):
    """``env.step`` and the policy without any overhead. Subclasses choose the actions.

    The loop does not look at what the environment returns, so it cannot count reset slots.
    ``count_reset_share`` finds their share beforehand, on the same work.
    """

    def __init__(self, work: Work, env: VectorEnv | None = None) -> None:
        """Reset ``env``, by default the case's own."""
        self.case = work.case
        self.env = make_vector_env(work.case) if env is None else env
        self.observation, _ = self.env.reset(seed=0)
        self.reset_share = 0.0

    def tally(self) -> Tally:
        """Return the slots of the block minus the expected reset slots."""
        return Tally(self.case.frames * (1 - self.reset_share), self.case.block)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def draw_actions(space: gym.Space, rng: np.random.Generator, slots: tuple[int, int]) -> np.ndarray:
    """Return random actions ``[time, lane, ...]`` of a Discrete or a bounded Box space."""
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(space.n, size=slots)
    return rng.uniform(space.low, space.high, (*slots, *space.shape)).astype(space.dtype)


class RawRandom(RawLoop):
    """Random actions, drawn one block at a time as in Tallyroll."""

    name = "raw"

    def __init__(self, work: Work, env: VectorEnv | None = None) -> None:
        """Create the environment and a random generator for this loop."""
        super().__init__(work, env)
        self.rng = np.random.default_rng(0)

    def advance(self) -> None:
        """Step one block."""
        step, slots = self.env.step, (self.case.block, self.case.lanes)
        for action in draw_actions(self.env.single_action_space, self.rng, slots):
            step(action)


class RawSample(RawLoop):
    """Random actions from ``action_space.sample()`` at every step, for reference."""

    name = "raw (action_space.sample)"

    def advance(self) -> None:
        """Step one block."""
        step, sample = self.env.step, self.env.action_space.sample
        for _ in range(self.case.block):
            step(sample())


class RawWriting(RawRandom):
    """Lower bound: the raw loop, which also writes as many bytes as a row has to growing files.

    It gathers and numbers nothing, and always writes the same bytes.
    """

    name = "raw + bare files (floor)"

    def __init__(self, work: Work) -> None:
        """Create the environment, and one file per column."""
        super().__init__(work)
        self.arrays = [np.ones((work.case.frames, width), np.uint8) for width in ROW]
        self.files = [
            os.open(work.scratch / f"floor-{index}", os.O_RDWR | os.O_CREAT)
            for index in range(len(ROW))
        ]
        self.blocks = 0

    def advance(self) -> None:
        """Step one block and write its rows."""
        super().advance()
        for file, array in zip(self.files, self.arrays, strict=True):
            at = self.blocks * array.nbytes
            os.posix_fallocate(file, at, array.nbytes)
            os.pwrite(file, array, at)
        self.blocks += 1

    def close(self) -> None:
        """Close the environment and the files."""
        super().close()
        for file in self.files:
            os.close(file)


class RawPolicy(RawLoop):
    """The policy module on one TensorDict that every step reuses."""

    name = "raw"

    def __init__(self, work: Work, policy: TensorDictModule, env: VectorEnv | None = None) -> None:
        """Create the environment and the TensorDict."""
        super().__init__(work, env)
        self.policy = policy
        self.data = TensorDict(
            {"observation": torch.from_numpy(self.observation)}, batch_size=[work.case.lanes]
        )

    def advance(self) -> None:
        """Step one block."""
        step, policy, data, observation = self.env.step, self.policy, self.data, self.observation
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            for _ in range(self.case.block):
                data.set("observation", torch.from_numpy(observation))
                policy(data)
                observation, *_ = step(data.get("action").numpy())
        self.observation = observation


def make_raw(work: Work, policy: TensorDictModule | None, env: VectorEnv | None = None) -> RawLoop:
    """Return the reference loop: only random actions or the policy."""
    return RawRandom(work, env) if policy is None else RawPolicy(work, policy, env)


def count_reset_share(loop: RawLoop, blocks: int) -> float:
    """Return the share of slots that are resets, counted one by one in ``blocks`` blocks.

    Do not time the loop afterwards: an environment whose ``step`` was once replaced stays a few per
    cent slower, because its attributes leave the interpreter's fast path.
    """
    step, ended, slots = loop.env.step, 0, 0

    def counted(action: np.ndarray) -> tuple[Any, ...]:
        nonlocal ended, slots
        result = step(action)
        ended += int(np.count_nonzero(result[2] | result[3]))
        slots += loop.case.lanes
        return result

    with patch.object(loop.env, "step", counted):
        for _ in range(blocks):
            loop.advance()
    loop.close()
    return ended / slots


class Collecting(Contender):
    """One of Tallyroll's collectors, whose batches are dropped."""

    def __init__(self, name: str, lanes: int, collector: Any, storage: Any = None) -> None:
        """Start to iterate over ``collector``. ``storage``, which it fills, is closed with it."""
        self.name, self.lanes, self.collector, self.storage = name, lanes, collector, storage
        self.batches = iter(collector)
        self.counted = Tally(0, 0)

    def advance(self) -> None:
        """Collect one batch."""
        next(self.batches)

    def tally(self) -> Tally:
        """Return the difference of the collector's ledger since the last call."""
        ledger = self.collector.ledger
        now = Tally(ledger.executed, ledger.slots / self.lanes)
        before, self.counted = self.counted, now
        return Tally(now.transitions - before.transitions, now.vector_steps - before.vector_steps)

    def close(self) -> None:
        """Shut down the collector and its environment."""
        self.collector.shutdown()
        if self.storage is not None:
            self.storage.close()


def open_storage(
    work: Work, path: Path | None, ring: int | None
) -> tuple[str, MemmapStorage | None]:
    """Create the storage at ``path``, and return it with a description to append to a name.

    ``ring`` is the number of batches that it keeps; by default it keeps all of them.
    """
    if path is None:
        return "", None
    if ring is None:
        return " + MemmapStorage", MemmapStorage(path)
    return " + MemmapStorage ring", MemmapStorage(path, max_size=ring * work.case.frames)


class Tallyroll(Collecting):
    """``SyncCollector``. With a path, it also writes every row to disk."""

    def __init__(
        self,
        work: Work,
        policy: TensorDictModule | None,
        path: Path | None = None,
        env: VectorEnv | None = None,
        *,
        ring: int | None = None,
        **options: Any,
    ) -> None:
        """Create a collector without a budget on ``env``, by default the case's own.

        ``path`` and ``ring`` are those of ``open_storage``, ``options`` the collector's.
        """
        written, storage = open_storage(work, path, ring)
        collector = SyncCollector(
            GymnasiumVectorEnv(env or make_vector_env(work.case)),
            policy,
            frames_per_batch=work.case.frames,
            total_frames=-1,
            seed=0,
            storage=storage,
            **options,
        )
        super().__init__(f"tallyroll{written}", work.case.lanes, collector, storage)


def raw_contenders(work: Work, policy: TensorDictModule | None, blocks: int) -> list[Contender]:
    """Return the raw loops for this work, the reference first, with their reset slots counted."""
    share = count_reset_share(make_raw(work, policy), blocks)
    loops = [make_raw(work, policy)]
    if policy is None:
        loops += [RawSample(work), RawWriting(work)]
    for loop in loops:
        loop.reset_share = share
    return list(loops)


def tallyroll_contenders(work: Work, policy: TensorDictModule | None) -> list[Contender]:
    """Return Tallyroll in memory and Tallyroll to disk."""
    path = work.scratch / f"tallyroll-{work.case.name}-{work.policy}"
    return [
        Tallyroll(work, policy),
        Tallyroll(work, policy, path),
        Tallyroll(work, policy, path.with_name(f"{path.name}-ring"), ring=RING_BATCHES),
    ]
