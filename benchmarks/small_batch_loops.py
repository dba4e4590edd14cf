"""Whole off-policy loops around one learner: a vector step, sampled rows, a gradient step."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from common import Contender, Tally
from gymnasium.vector import AutoresetMode
from loops import ENV_ID, Case, Work, make_vector_env
from peers import installed
from small_batch_steps import (
    COLLECT,
    RAW,
    bare_vector,
    one_process,
    stable_baselines3,
    stable_baselines3_step,
    torchrl_parts,
    touched_buffer,
)
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from pathlib import Path

LEARNT = (
    "observation",
    "action",
    ("next", "observation"),
    ("next", "reward"),
    ("next", "terminated"),
)
"""The columns to learn from. The peers' buffers hold only these."""
CHEETAH, PENDULUM = "HalfCheetah-v5", "Pendulum-v1"
DISCOUNT, FOLLOW, TEMPERATURE = 0.99, 0.005, 0.2
EPSILON, STEP_SIZE = 1.0, 0.0
"""Values of the first training step, kept for the whole run. Otherwise a faster contender would
learn more, and have longer episodes and fewer resets. The amount of computation is the same.
"""


@dataclass(frozen=True)
class Task:
    """A loop to run.

    Args:
        name: name on the command line.
        algorithm: ``dqn`` or ``sac``.
        env_id: id of the Gymnasium environment.
        lanes: lanes of the vector.
        steps: vector steps per ``advance``.
        sampled: rows to sample after each vector step.
        learns: whether a gradient step follows.
    """

    name: str
    algorithm: str
    env_id: str
    lanes: int
    steps: int = 16
    sampled: int = 256
    learns: bool = True

    @property
    def case(self) -> Case:
        """The environment, and the vector steps per ``advance``."""
        return Case(
            self.name,
            lanes=self.lanes,
            native=False,
            frames=self.steps * self.lanes,
            env_id=self.env_id,
        )

    def playable(self) -> Task:
        """The same task, or without MuJoCo one with another environment of continuous actions."""
        lacks = self.env_id == CHEETAH and find_spec("mujoco") is None
        return replace(self, env_id=PENDULUM) if lacks else self

    def learner(self) -> Learner:
        """The learner that all contenders share: see :func:`learner_of`."""
        return learner_of(self.algorithm, self.env_id)


@lru_cache(maxsize=1)
def learner_of(algorithm: str, env_id: str) -> Learner:
    """Return one learner for all loops: the memory address of its weights changes its speed by 3 %.

    Its step size is 0, so that contenders do not change the weights for those after them.
    """
    torch.manual_seed(0)
    env = gym.make(env_id)
    try:
        return (Dqn if algorithm == "dqn" else Sac)(env)
    finally:
        env.close()


TASKS = (
    Task("dqn1", "dqn", ENV_ID, lanes=1),
    Task("dqn8", "dqn", ENV_ID, lanes=8),
    Task("sac1", "sac", CHEETAH, lanes=1),
    Task("sac8", "sac", CHEETAH, lanes=8),
)


class Rows(NamedTuple):
    """Sampled rows, with the types and the trailing dimensions that each library returns."""

    observation: torch.Tensor
    action: torch.Tensor
    following: torch.Tensor
    reward: torch.Tensor
    terminated: torch.Tensor


def network(inputs: int, outputs: int, hidden: int) -> nn.Sequential:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    """Return one optimizer for the parameters of all modules."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.Adam(parameters, lr=STEP_SIZE, fused=True)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Make one gradient step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Learner:
    """Networks, a gradient step, and the module that chooses actions.

    ``actor`` takes observations ``[lanes, ...]`` and returns actions ``[lanes, ...]``.
    """

    actor: nn.Module

    @abstractmethod
    def update(self, rows: Rows) -> None:
        """Make a gradient step on ``rows``."""

    def follow(self, target: nn.Module, online: nn.Module) -> None:
        """Move the target network slightly towards the online network."""
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), FOLLOW)


class EpsilonGreedy(nn.Module):
    """Take a random action with probability `EPSILON`, or else the best one."""

    def __init__(self, values: nn.Module, actions: int) -> None:
        """Choose among ``actions`` actions by the network ``values``."""
        super().__init__()
        self.values, self.actions = values, actions

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return one action per lane, int64."""
        best = self.values(observation.float()).argmax(-1)
        chance = torch.rand(best.shape)
        return torch.where(chance < EPSILON, torch.randint_like(best, self.actions), best)


class Dqn(Learner):
    """Action values from a 64x64 network, with a target network."""

    def __init__(self, env: gym.Env) -> None:
        """Build the networks for the spaces of ``env``."""
        actions = int(env.action_space.n)
        self.values = network(env.observation_space.shape[0], actions, 64)
        self.target = copy.deepcopy(self.values).requires_grad_(False)
        self.actor = EpsilonGreedy(self.values, actions)
        self.optimizer = adam(self.values)

    def update(self, rows: Rows) -> None:
        """Take one step towards the target's best value."""
        with torch.no_grad():
            best = self.target(rows.following.float()).amax(-1)
            goes_on = 1 - rows.terminated.reshape(-1).float()
            wanted = rows.reward.reshape(-1).float() + DISCOUNT * goes_on * best
        value = self.values(rows.observation.float()).gather(-1, rows.action.reshape(-1, 1))
        descend(self.optimizer, functional.smooth_l1_loss(value.squeeze(-1), wanted))
        self.follow(self.target, self.values)


class SquashedNormal(nn.Module):
    """The tanh of normal samples around the output of a network."""

    def __init__(self, inputs: int, space: gym.spaces.Box) -> None:
        """Build a network of 256x256 for actions in ``space``, which is symmetric."""
        super().__init__()
        self.layers = network(inputs, 2 * space.shape[0], 256)
        self.register_buffer("scale", torch.from_numpy(space.high.copy()))

    def draw(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions and their log-densities."""
        mean, spread = self.layers(observation.float()).chunk(2, -1)
        spread = spread.clamp(-5, 2)
        noise = torch.randn_like(mean)
        squashed = torch.tanh(mean + spread.exp() * noise)
        density = -spread - noise.square() / 2 - torch.log1p(1e-6 - squashed.square())
        return squashed * self.scale, density.sum(-1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return one action per lane."""
        return self.draw(observation)[0]


class Sac(Learner):
    """An actor and two critics of 256x256, two target critics, and a fixed temperature."""

    def __init__(self, env: gym.Env) -> None:
        """Build the networks for the spaces of ``env``."""
        observations, actions = env.observation_space.shape[0], env.action_space.shape[0]
        self.actor = SquashedNormal(observations, env.action_space)
        self.critics = nn.ModuleList(network(observations + actions, 1, 256) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.of_actor, self.of_critics = adam(self.actor), adam(self.critics)

    def update(self, rows: Rows) -> None:
        """Take one step of the critics and one of the actor."""
        observation, following = rows.observation.float(), rows.following.float()
        with torch.no_grad():
            action, density = self.actor.draw(following)
            after = self.least(self.targets, following, action) - TEMPERATURE * density
            goes_on = 1 - rows.terminated.reshape(-1).float()
            wanted = rows.reward.reshape(-1).float() + DISCOUNT * goes_on * after
        pair = torch.cat((observation, rows.action), -1)
        values = [critic(pair).squeeze(-1) for critic in self.critics]
        descend(self.of_critics, sum(functional.mse_loss(value, wanted) for value in values))
        action, density = self.actor.draw(observation)
        value = self.least(self.critics, observation, action)
        descend(self.of_actor, (TEMPERATURE * density - value).mean())
        self.follow(self.targets, self.critics)

    def least(
        self, critics: nn.ModuleList, observation: torch.Tensor, action: torch.Tensor
    ) -> torch.Tensor:
        """Return the lower of the two values."""
        pair = torch.cat((observation, action), -1)
        first, second = (critic(pair).squeeze(-1) for critic in critics)
        return torch.minimum(first, second)


class Loop(Contender):
    """Vector steps, each followed by sampled rows and, if the task learns, a gradient step."""

    def __init__(self, task: Task) -> None:
        """Use the learner that all contenders share."""
        self.task, self.learner = task, task.learner()
        self.actor = self.learner.actor

    @abstractmethod
    def step(self) -> None:
        """Make a vector step and store its transitions."""

    @abstractmethod
    def sample(self) -> Rows:
        """Return random rows from those that are stored."""

    def learnt(self) -> None:
        """Publish the new weights, if that takes a call."""
        return

    def advance(self) -> None:
        """Run the loop for some vector steps."""
        learner = self.learner if self.task.learns else None
        for _ in range(self.task.steps):
            self.step()
            rows = self.sample()
            if learner is not None:
                learner.update(rows)
                self.learnt()

    def tally(self) -> Tally:
        """Return all slots as transitions, because no contender spends slots on resets."""
        return Tally(self.task.steps * self.task.lanes, self.task.steps)

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Choose actions without a TensorDict."""
        with torch.no_grad():
            return self.actor(torch.from_numpy(observation)).numpy()


class Raw(Loop):
    """Steps, and rows gathered by NumPy from constant arrays. Stores nothing."""

    name = RAW

    def __init__(self, task: Task, ring: int) -> None:
        """Create the vector and five arrays of ``ring`` rows."""
        super().__init__(task)
        self.env, self.ring = bare_vector(task.case), ring
        self.observation, _ = self.env.reset(seed=0)
        observation, action = self.env.single_observation_space, self.env.single_action_space
        self.arrays = [
            np.zeros((ring, *shape), dtype)
            for shape, dtype in (
                (observation.shape, observation.dtype),
                (action.shape, action.dtype),
                (observation.shape, observation.dtype),
                ((1,), np.float32),
                ((1,), np.bool_),
            )
        ]

    def step(self) -> None:
        """Step, and reset by mask."""
        self.observation, _, terminated, truncated, _ = self.env.step(self.act(self.observation))
        ended = terminated | truncated
        if ended.any():
            self.observation, _ = self.env.reset(options={"reset_mask": ended})

    def sample(self) -> Rows:
        """Gather."""
        index = np.random.randint(self.ring, size=self.task.sampled)
        return Rows(*(torch.from_numpy(array.take(index, 0)) for array in self.arrays))

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


class Tallyroll(Loop):
    """``collector.collect(lanes)`` and ``storage.get``."""

    name = COLLECT

    def __init__(self, task: Task, scratch: Path, ring: int) -> None:
        """Build the collector and fill its ring."""
        super().__init__(task)
        policy = policy_of(self.actor)
        self.inner = one_process(Work(task.case, task.algorithm, scratch), policy, ring)
        self.collector, self.storage = self.inner.collector, self.inner.storage

    def step(self) -> None:
        """Collect."""
        self.collector.collect(self.task.lanes)

    def sample(self) -> Rows:
        """Get random rows."""
        storage = self.storage
        return rows_of(storage.get(torch.randint(len(storage), (self.task.sampled,)), LEARNT))

    def learnt(self) -> None:
        """Increment the version of the weights."""
        self.collector.update_policy_weights_()

    def close(self) -> None:
        """Shut the collector down."""
        self.inner.close()


def policy_of(actor: nn.Module) -> TensorDictModule:
    """Return the actor as a TensorDict module."""
    return TensorDictModule(actor, in_keys=["observation"], out_keys=["action"])


def rows_of(data: Any) -> Rows:
    """Take the columns to learn from out of a TensorDict."""
    following = data.get("next")
    return Rows(
        data.get("observation"),
        data.get("action"),
        following.get("observation"),
        following.get("reward"),
        following.get("terminated"),
    )


class StableBaselines3Loop(Loop):
    """A loop with ``ReplayBuffer.sample`` of Stable-Baselines3."""

    buffer: Any

    def sample(self) -> Rows:
        """Sample."""
        found = self.buffer.sample(self.task.sampled)
        return Rows(
            found.observations,
            found.actions,
            found.next_observations,
            found.rewards,
            found.dones,
        )

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


class StableBaselines3(StableBaselines3Loop):
    """Its vector and its buffer: its off-policy loop without callbacks and statistics."""

    name = "Stable-Baselines3"

    def __init__(self, task: Task, ring: int) -> None:
        """Build the environment and the buffer."""
        super().__init__(task)
        self.env, self.buffer = stable_baselines3(task.case, ring)
        self.observation = self.env.reset()

    def step(self) -> None:
        """Step and store."""
        self.observation = stable_baselines3_step(
            self.env, self.buffer, self.observation, self.act(self.observation)
        )


class CleanRL(StableBaselines3Loop):
    """Gymnasium's vector, Stable-Baselines3's buffer, plain torch, as in CleanRL's scripts.

    Uses SAME_STEP, which puts the final observation into the infos. Keeps no episode statistics.
    """

    name = "CleanRL"

    def __init__(self, task: Task, ring: int) -> None:
        """Build the environment and the buffer."""
        from stable_baselines3.common.buffers import ReplayBuffer

        super().__init__(task)
        env = self.env = make_vector_env(task.case, AutoresetMode.SAME_STEP)
        self.buffer = touched_buffer(
            ReplayBuffer,
            env.single_observation_space,
            env.single_action_space,
            task.case,
            ring,
            handle_timeout_termination=False,
        )
        self.observation, _ = env.reset(seed=0)

    def step(self) -> None:
        """Step and store, with the final observation if an episode ended."""
        action = self.act(self.observation)
        following, reward, terminated, truncated, infos = self.env.step(action)
        stored = following.copy()
        ended = terminated | truncated
        if ended.any():
            for lane in np.flatnonzero(ended):
                stored[lane] = infos["final_obs"][lane]
        self.buffer.add(self.observation, stored, action, reward, terminated, infos)
        self.observation = following


class TorchRL(Loop):
    """Its collector in batches of one vector step, and a ``TensorDictReplayBuffer``."""

    def __init__(self, task: Task, scratch: Path, ring: int, *, memmap: bool) -> None:
        """Build the collector and fill the buffer."""
        super().__init__(task)
        self.name = f"TorchRL + {'LazyMemmapStorage' if memmap else 'LazyTensorStorage'}"
        work = Work(task.case, task.algorithm, scratch)
        self.collector, self.batches, self.buffer = torchrl_parts(
            work, policy_of(self.actor), ring, memmap=memmap, batch_size=task.sampled
        )

    def step(self) -> None:
        """Collect and store."""
        self.buffer.extend(next(self.batches).reshape(-1))

    def sample(self) -> Rows:
        """Sample."""
        return rows_of(self.buffer.sample())

    def close(self) -> None:
        """Shut the collector down."""
        self.collector.shutdown()


def contenders(
    task: Task, scratch: Path, ring: int, *, peers: bool
) -> tuple[list[Contender], list[str]]:
    """Return all contenders, the raw loop first, and remarks on those left out."""
    found: list[Contender] = [Raw(task, ring), Tallyroll(task, scratch, ring)]
    if not peers:
        return found, []
    theirs, remarks = installed(
        {
            "Stable-Baselines3": partial(StableBaselines3, task, ring),
            "CleanRL": partial(CleanRL, task, ring),
            "TorchRL, tensors": partial(TorchRL, task, scratch, ring, memmap=False),
            "TorchRL, memmap": partial(TorchRL, task, scratch, ring, memmap=True),
        }
    )
    return found + theirs, remarks
