"""The peers: TorchRL, Stable-Baselines3 and Tianshou, each used as its documentation shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from common import Contender, Tally
from gymnasium.vector import AutoresetMode
from loops import ACTIONS, ENV_ID, HIDDEN, OBSERVATION, Case, Work, make_vector_env

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tensordict.nn import TensorDictModule
    from torchrl.envs import EnvBase

BATCHES_HELD = 16
"""Batches that a peer's buffer holds. It is a ring, so that its pages stay warm."""


class Peer(Contender):
    """A peer resets finished lanes by itself, so every slot is a transition."""

    def __init__(self, case: Case) -> None:
        """Store the case."""
        self.case = case

    @property
    def capacity(self) -> int:
        """Number of rows that the peer's buffer holds."""
        return BATCHES_HELD * self.case.frames

    def tally(self) -> Tally:
        """Return one batch."""
        return Tally(self.case.frames, self.case.block)


def torchrl_env(case: Case) -> EnvBase:
    """The case's vector in TorchRL's wrapper, in the only autoreset mode that it gets right."""
    from torchrl.envs import GymWrapper

    env = make_vector_env(case, AutoresetMode.DISABLED)
    return GymWrapper(env, categorical_action_encoding=True)


class TorchRL(Peer):
    """TorchRL's ``Collector``."""

    def __init__(
        self, work: Work, policy: TensorDictModule | None, *, memmap: bool = False
    ) -> None:
        """Create the collector, with a replay buffer on memory-mapped storage if ``memmap``."""
        from torchrl.collectors import Collector
        from torchrl.data import LazyMemmapStorage, ReplayBuffer

        super().__init__(work.case)
        self.name = "TorchRL + LazyMemmapStorage" if memmap else "TorchRL"
        scratch = work.scratch / f"torchrl-{work.case.name}-{work.policy}"
        self.buffer = None
        if memmap:
            storage = LazyMemmapStorage(self.capacity, scratch_dir=scratch)
            self.buffer = ReplayBuffer(storage=storage)
        self.collector = Collector(
            torchrl_env(work.case),
            policy,
            frames_per_batch=work.case.frames,
            total_frames=-1,
        )
        self.batches = iter(self.collector)

    def advance(self) -> None:
        """Collect one batch ``[lanes, time]`` and extend the buffer with its rows.

        If the buffer were passed to the collector as ``replay_buffer=``, it would store one lane as
        one row. With a ``postproc`` that makes rows, it would be extended from a lazy stack, which
        is much slower.
        """
        data = next(self.batches)
        if self.buffer is not None:
            self.buffer.extend(data.reshape(-1))

    def close(self) -> None:
        """Shut the collector down."""
        self.collector.shutdown()


def single_envs(lanes: int) -> list[Callable[[], gym.Env]]:
    """Return one factory per lane, for the peers' own vector classes."""
    return [lambda: gym.make(ENV_ID)] * lanes


class StableBaselines3Replay(Peer):
    """A loop over ``DummyVecEnv`` with ``ReplayBuffer.add``; actions are drawn block by block."""

    name = "Stable-Baselines3 + ReplayBuffer"

    def __init__(self, work: Work) -> None:
        """Build the environment and the buffer."""
        from stable_baselines3.common.buffers import ReplayBuffer
        from stable_baselines3.common.vec_env import DummyVecEnv

        super().__init__(work.case)
        self.env = DummyVecEnv(single_envs(work.case.lanes))
        self.buffer = ReplayBuffer(
            self.capacity,
            self.env.observation_space,
            self.env.action_space,
            device="cpu",
            n_envs=work.case.lanes,
        )
        self.rng = np.random.default_rng(0)
        self.observation = self.env.reset()

    def advance(self) -> None:
        """Step one block and store it, with the final observation if an episode ended."""
        observation = self.observation
        for action in self.rng.integers(ACTIONS, size=(self.case.block, self.case.lanes)):
            following, reward, done, infos = self.env.step(action)
            stored = following
            if done.any():
                stored = following.copy()
                for lane in np.flatnonzero(done):
                    stored[lane] = infos[lane]["terminal_observation"]
            self.buffer.add(observation, stored, action, reward, done, infos)
            observation = following
        self.observation = observation

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


class StableBaselines3Ppo(Peer):
    """``PPO.collect_rollouts``: policy, value and log-probability, and a ``RolloutBuffer``."""

    name = "Stable-Baselines3 PPO rollout"

    def __init__(self, work: Work) -> None:
        """Create the algorithm. Its default policy has two tanh layers of 64 as well."""
        from stable_baselines3 import PPO
        from stable_baselines3.common.logger import Logger
        from stable_baselines3.common.vec_env import DummyVecEnv

        super().__init__(work.case)
        env = DummyVecEnv(single_envs(work.case.lanes))
        self.ppo = PPO("MlpPolicy", env, n_steps=work.case.block, device="cpu", seed=0)
        self.ppo.set_logger(Logger(None, []))  # the default logger would create a folder
        # learn() would train between rollouts; it calls this before its first rollout.
        _, self.callback = self.ppo._setup_learn(10**9)

    def advance(self) -> None:
        """Collect one rollout."""
        ppo = self.ppo
        ppo.collect_rollouts(ppo.env, self.callback, ppo.rollout_buffer, ppo.n_steps)

    def close(self) -> None:
        """Close the environments."""
        self.ppo.env.close()


class TianshouActor(torch.nn.Module):
    """Two tanh layers of 64, with the signature that Tianshou calls."""

    def __init__(self) -> None:
        """Build the layers."""
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(OBSERVATION, HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Linear(HIDDEN, HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Linear(HIDDEN, ACTIONS),
        )

    def forward(
        self, obs: np.ndarray, state: Any = None, info: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """Return logits ``[lanes, 2]`` and the state unchanged."""
        return self.layers(torch.from_numpy(obs)), state


class Tianshou(Peer):
    """Tianshou's ``Collector`` and ``VectorReplayBuffer`` on its ``DummyVectorEnv``."""

    name = "Tianshou + VectorReplayBuffer"

    def __init__(self, work: Work) -> None:
        """Create the collector. Random actions use its own ``random=True``."""
        from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
        from tianshou.data import Collector, VectorReplayBuffer
        from tianshou.env import DummyVectorEnv

        super().__init__(work.case)
        self.random = work.policy == "random"
        policy = DiscreteActorPolicy(
            actor=TianshouActor(),
            deterministic_eval=work.policy == "argmax",
            action_space=gym.spaces.Discrete(ACTIONS),
        )
        self.env = DummyVectorEnv(single_envs(work.case.lanes))
        buffer = VectorReplayBuffer(self.capacity, work.case.lanes)
        self.collector = Collector(policy, self.env, buffer)
        self.collector.reset()

    def advance(self) -> None:
        """Collect one batch."""
        with torch.no_grad():
            self.collector.collect(n_step=self.case.frames, random=self.random)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def peer_contenders(
    work: Work, policy: TensorDictModule | None
) -> tuple[list[Contender], list[str]]:
    """Return the peers that can do this work, and a remark for each one left out."""
    if work.case.native:
        return [], ["peers: none of them drives a Gymnasium vector_entry_point environment"]
    factories: dict[str, Callable[[], Contender]] = {
        "TorchRL": lambda: TorchRL(work, policy),
        "TorchRL + LazyMemmapStorage": lambda: TorchRL(work, policy, memmap=True),
        "Tianshou": lambda: Tianshou(work),
    }
    if work.policy == "random":
        factories["Stable-Baselines3"] = lambda: StableBaselines3Replay(work)
    if work.policy == "sampled":
        factories["Stable-Baselines3"] = lambda: StableBaselines3Ppo(work)
    return installed(factories)


def installed(
    factories: Mapping[str, Callable[[], Contender]],
) -> tuple[list[Contender], list[str]]:
    """Build the contenders whose libraries are installed, and return remarks on the others."""
    peers, remarks = [], []
    for name, factory in factories.items():
        try:
            peers.append(factory())
        except ModuleNotFoundError as missing:
            remarks.append(f'{name}: left out, {missing.name} is missing: install ".[bench]"')
    return peers, remarks
