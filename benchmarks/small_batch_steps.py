"""One vector step per call: the raw loop, Tallyroll, and the loops of other libraries."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from common import Contender, Tally
from gymnasium.vector import AutoresetMode, VectorEnv
from loops import (
    Case,
    Collecting,
    RawPolicy,
    RawRandom,
    Work,
    count_reset_share,
    draw_actions,
    make_policy,
    make_raw,
    make_vector_env,
)
from peers import Peer, installed, torchrl_env
from processes import START, Apart
from torchrl.envs.utils import ExplorationType, set_exploration_type
from worker_ours import AHEAD

from tallyroll.collector import GymnasiumVectorEnv, MultiprocessCollector, SyncCollector
from tallyroll.storage import MemmapStorage

if TYPE_CHECKING:
    from tensordict.nn import TensorDictModule

STEPS = 64
"""Vector steps, one per call, in an ``advance``. As many random actions are drawn ahead."""
CASES = tuple(
    Case(f"step{lanes}", lanes=lanes, native=False, frames=STEPS * lanes) for lanes in (1, 8, 64)
)
RING = 10_000
"""Rows that each buffer keeps. Every buffer has wrapped around once before anything is timed."""
WORKERS = 2
COUNTED = 20_000
"""Slots over which the raw loop's resets are counted."""
RAW, NEXT_STEP, COLLECT = "raw", "NEXT_STEP", "tallyroll collect"


def bare_vector(case: Case) -> VectorEnv:
    """Return the vector that a collector makes of an id: it resets by mask and copies nothing."""
    return gym.make_vec(
        case.env_id,
        case.lanes,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED, "copy": False},
        **case.env_kwargs,
    )


class MaskedRandom(RawRandom):
    """Random actions. Lanes whose episode has ended are reset by mask."""

    def advance(self) -> None:
        """Step one block."""
        env, step = self.env, self.env.step
        slots = (self.case.block, self.case.lanes)
        for action in draw_actions(env.single_action_space, self.rng, slots):
            _, _, terminated, truncated, _ = step(action)
            ended = terminated | truncated
            if ended.any():
                env.reset(options={"reset_mask": ended})


class MaskedPolicy(RawPolicy):
    """The policy module. Lanes whose episode has ended are reset by mask."""

    def advance(self) -> None:
        """Step one block."""
        env, policy, data, observation = self.env, self.policy, self.data, self.observation
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            for _ in range(self.case.block):
                data.set("observation", torch.from_numpy(observation))
                policy(data)
                observation, _, terminated, truncated, _ = env.step(data.get("action").numpy())
                ended = terminated | truncated
                if ended.any():
                    observation, _ = env.reset(options={"reset_mask": ended})
        self.observation = observation


class MaskedNetwork(MaskedPolicy):
    """The same network without a TensorDict around it, as in Stable-Baselines3's loop."""

    name = "raw, plain torch"

    def advance(self) -> None:
        """Step one block."""
        env, network, observation = self.env, self.policy.module, self.observation
        with torch.no_grad():
            for _ in range(self.case.block):
                action = network(torch.from_numpy(observation)).numpy()
                observation, _, terminated, truncated, _ = env.step(action)
                ended = terminated | truncated
                if ended.any():
                    observation, _ = env.reset(options={"reset_mask": ended})
        self.observation = observation


def raws(work: Work, policy: TensorDictModule | None) -> list[Contender]:
    """Return the raw loops: first the one that resets by mask, then the one that spends slots."""
    blocks = max(2, COUNTED // work.case.frames)
    loops = [
        MaskedRandom(work, bare_vector(work.case))
        if policy is None
        else MaskedPolicy(work, policy, bare_vector(work.case)),
        make_raw(work, policy),
    ]
    loops[0].name, loops[1].name = RAW, f"{RAW}, {NEXT_STEP}"
    loops[1].reset_share = count_reset_share(make_raw(work, policy), blocks)
    if policy is not None:
        loops.append(MaskedNetwork(work, policy, bare_vector(work.case)))
    return list(loops)


class Calling(Collecting):
    """``collect(lanes)``, called once for each vector step of a block."""

    def __init__(self, name: str, case: Case, collector: Any, storage: Any) -> None:
        """Fill the ring with whole steps of all lanes, so that no rows carry over between calls."""
        super().__init__(name, case.lanes, collector, storage)
        self.calls = case.block
        collector.collect(-(-storage.max_size // case.lanes) * case.lanes)
        self.tally()

    def advance(self) -> None:
        """Make the calls."""
        collect, lanes = self.collector.collect, self.lanes
        for _ in range(self.calls):
            collect(lanes)


class CallingWorkers(Calling):
    """The same with worker processes, which may have executed more than was collected."""

    def tally(self) -> Tally:
        """Return the requested number."""
        return Tally(self.calls * self.lanes, self.calls)


class Iterating(Calling):
    """Batches with ``frames_per_batch=lanes``, which are dropped."""

    def advance(self) -> None:
        """Collect the batches of a block."""
        batches = self.batches
        for _ in range(self.calls):
            next(batches)


def ring_of(work: Work, name: str, ring: int) -> MemmapStorage:
    """Create a ring in its own folder."""
    return MemmapStorage(work.scratch / f"{work.case.name}-{work.policy}-{name}", max_size=ring)


def one_process(
    work: Work, policy: TensorDictModule | None, ring: int, env: VectorEnv | None = None
) -> Calling:
    """``SyncCollector`` of the case's id, or of ``env``."""
    storage = ring_of(work, "one" if env is None else "env", ring)
    collector = SyncCollector(
        work.case.env_id if env is None else GymnasiumVectorEnv(env),
        policy,
        num_envs=work.case.lanes if env is None else None,
        frames_per_batch=work.case.frames,
        total_frames=-1,
        seed=0,
        storage=storage,
    )
    name = COLLECT if env is None else f"{COLLECT}, {NEXT_STEP}"
    return Calling(name, work.case, collector, storage)


def iterating(work: Work, policy: TensorDictModule | None, ring: int) -> Iterating:
    """``SyncCollector`` of the case's id with batches of one vector step."""
    storage = ring_of(work, "iterated", ring)
    collector = SyncCollector(
        work.case.env_id,
        policy,
        num_envs=work.case.lanes,
        frames_per_batch=work.case.lanes,
        total_frames=-1,
        seed=0,
        storage=storage,
    )
    return Iterating("tallyroll iterating", work.case, collector, storage)


def workers_calling(
    work: Work, policy: TensorDictModule | None, ring: int, mode: str
) -> CallingWorkers:
    """``MultiprocessCollector`` of the case's id."""
    storage = ring_of(work, mode, ring)
    collector = MultiprocessCollector(
        work.case.env_id,
        policy,
        num_workers=WORKERS,
        mode=mode,
        num_envs=work.case.lanes,
        frames_per_batch=work.case.frames,
        total_frames=-1,
        seed=0,
        storage=storage,
        mp_start_method=START,
    )
    name = f"tallyroll, {WORKERS} workers, {mode}"
    return CallingWorkers(name, work.case, collector, storage)


class StableBaselines3(Peer):
    """Its off-policy loop: ``DummyVecEnv``, the terminal observation, ``ReplayBuffer.add``.

    This loop is faster than Stable-Baselines3's own. It has no callbacks and no episode statistics,
    copies observations only when an episode ends, draws random actions ahead, and calls the
    policy's network without its wrappers.
    """

    name = "Stable-Baselines3"

    def __init__(self, work: Work, policy: TensorDictModule | None, ring: int) -> None:
        """Create the environment and the buffer, and touch the buffer's pages."""
        super().__init__(work.case)
        self.env, self.buffer = stable_baselines3(work.case, ring)
        self.network = None if policy is None else policy.module
        self.rng = np.random.default_rng(0)
        self.observation = self.env.reset()

    def advance(self) -> None:
        """Step one block."""
        env, network, observation = self.env, self.network, self.observation
        actions: Any = range(self.case.block)
        if network is None:
            actions = draw_actions(env.action_space, self.rng, (self.case.block, self.case.lanes))
        with torch.no_grad():
            for action in actions:
                if network is not None:
                    action = network(torch.as_tensor(observation)).numpy()
                observation = stable_baselines3_step(env, self.buffer, observation, action)
        self.observation = observation

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def stable_baselines3(case: Case, ring: int) -> tuple[Any, Any]:
    """Return its vector and its buffer of ``ring`` rows, whose pages are touched."""
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([partial(gym.make, case.env_id, **case.env_kwargs)] * case.lanes)
    return env, touched_buffer(ReplayBuffer, env.observation_space, env.action_space, case, ring)


def touched_buffer(
    kind: Any, observations: gym.Space, actions: gym.Space, case: Case, ring: int, **options: Any
) -> Any:
    """Return a buffer of ``ring`` rows that counts as full and has every page in memory."""
    buffer = kind(ring, observations, actions, device="cpu", n_envs=case.lanes, **options)
    for array in vars(buffer).values():
        if isinstance(array, np.ndarray):
            array.fill(0)
    buffer.full = True
    return buffer


def stable_baselines3_step(
    env: Any, buffer: Any, observation: np.ndarray, action: np.ndarray
) -> np.ndarray:
    """Step and store, with the terminal observation if an episode ended."""
    following, reward, done, infos = env.step(action)
    stored = following
    if done.any():
        stored = following.copy()
        for lane in np.flatnonzero(done):
            stored[lane] = infos[lane]["terminal_observation"]
    buffer.add(observation, stored, action, reward, done, infos)
    return following


class TorchRL(Peer):
    """``Collector`` with ``frames_per_batch=lanes`` into a ``TensorDictReplayBuffer``."""

    def __init__(
        self, work: Work, policy: TensorDictModule | None, ring: int, *, memmap: bool
    ) -> None:
        """Build the collector and fill the buffer."""
        super().__init__(work.case)
        self.name = f"TorchRL + {'LazyMemmapStorage' if memmap else 'LazyTensorStorage'}"
        self.collector, self.batches, self.buffer = torchrl_parts(work, policy, ring, memmap=memmap)

    def advance(self) -> None:
        """Collect and store the batches of a block."""
        batches, extend = self.batches, self.buffer.extend
        for _ in range(self.case.block):
            extend(next(batches).reshape(-1))

    def close(self) -> None:
        """Shut the collector down."""
        self.collector.shutdown()


def torchrl_parts(
    work: Work, policy: TensorDictModule | None, ring: int, *, memmap: bool, **options: Any
) -> tuple[Any, Any, Any]:
    """Return TorchRL's collector, its batches, and a full buffer made with ``options``."""
    from torchrl.collectors import Collector
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

    scratch = work.scratch / f"torchrl-{work.case.name}-{work.policy}"
    storage = LazyMemmapStorage(ring, scratch_dir=scratch) if memmap else LazyTensorStorage(ring)
    buffer = TensorDictReplayBuffer(storage=storage, **options)
    collector = Collector(
        torchrl_env(work.case), policy, frames_per_batch=work.case.lanes, total_frames=-1
    )
    batches = iter(collector)
    rows = next(batches).reshape(-1)
    buffer.extend(rows[torch.arange(ring) % len(rows)])
    return collector, batches, buffer


def contenders(
    work: Work, ring: int, *, peers: bool, workers: bool
) -> tuple[list[Contender], list[str]]:
    """Return all contenders, the raw loop first, and remarks on those left out."""
    policy = make_policy(work.policy)
    found = raws(work, policy)
    found.append(one_process(work, policy, ring))
    found.append(one_process(work, policy, ring, make_vector_env(work.case)))
    found.append(iterating(work, policy, ring))
    remarks = []
    if workers and work.case.lanes < WORKERS:
        remarks.append(f"{WORKERS} workers: left out, there are fewer lanes")
    elif workers:
        found += [
            Apart(partial(workers_calling, work, policy, ring, mode), ahead)
            for mode, ahead in AHEAD.items()
        ]
    if peers:
        theirs, missing = installed(
            {
                "Stable-Baselines3": partial(StableBaselines3, work, policy, ring),
                "TorchRL, tensors": partial(TorchRL, work, policy, ring, memmap=False),
                "TorchRL, memmap": partial(TorchRL, work, policy, ring, memmap=True),
            }
        )
        found, remarks = found + theirs, remarks + missing
    return found, remarks
