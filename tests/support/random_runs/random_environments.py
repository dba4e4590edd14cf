"""Random environments of every system: Gymnasium's vectors, a native vector, and TorchRL's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)

from tallyroll.collector import GymnasiumVectorEnv
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.ext.systems.pettingzoo import PettingZooSystem

from random_habits import one_lane
from random_herds import Herd
from random_lanes import LaneKind, Reuse, World
from random_running import Running
from random_spaces import Array, Key, leaves

# With its first environment TorchRL looks for further packages. It keeps the ImportError of a
# missing one, with all objects that the frames of its traceback refer to.
GymWrapper(gym.make("CartPole-v1")).close()

System = Literal[
    "sync", "async", "native", "torch", "one", "wrapper", "serial", "parallel", "pettingzoo"
]
VECTORS = ("sync", "async", "native")


@dataclass(frozen=True)
class EnvKind:
    """An environment of several lanes."""

    lane: LaneKind
    lanes: int = 2
    system: System = "sync"
    mode: Literal["Disabled", "NextStep", "SameStep"] = "Disabled"
    adapter: Literal["", "mask", "avoid"] = ""
    """The `reset_slots` of the `GymnasiumVectorEnv` that wraps the environment."""
    copy: bool = True
    """The argument `copy` of a `SyncVectorEnv`."""
    vector_statistics: bool = False
    one_hot: bool = False
    auto_reset: bool = False
    """Whether TorchRL knows that the environment resets itself."""
    tensors: Reuse = ""
    """Whether a TorchRL environment returns the same tensors repeatedly."""
    transforms: tuple[str, ...] = ()
    shared: tuple[int, ...] = ()
    """Lanes that share one object."""
    shared_wrapped: bool = False
    """Whether each of these lanes wraps the object in its own wrapper."""
    device: str = "cpu"

    @property
    def is_vector(self) -> bool:
        """True for Gymnasium's vectors."""
        return self.system in VECTORS

    @property
    def flat(self) -> bool:
        """True if the batch size is []."""
        return self.system in ("one", "wrapper")

    @property
    def has_reset_slots(self) -> bool:
        """True if some slots are resets."""
        return self.system == "native" or (
            self.is_vector and self.mode == "NextStep" and self.adapter != "avoid"
        )


class NativeVector(VectorEnv[Any, Any, Any]):
    """A vector like Gymnasium's own: NEXT_STEP, no masks, one seed, arrays written in place."""

    metadata: dict[str, Any] = {  # noqa: RUF012  gymnasium declares it so
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(self, envs: list[gym.Env[Any, Any]]) -> None:
        self.num_envs, self.envs = len(envs), envs
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._obs: Any = create_empty_array(self.single_observation_space, self.num_envs)
        self._reward = np.zeros(self.num_envs, np.float32)
        self._flags = np.zeros((2, self.num_envs), np.bool_)
        self._over = np.zeros(self.num_envs, np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every lane, and ignore any mask in `options`."""
        assert seed is None or isinstance(seed, int), f"expected an integer, got {seed!r}"
        self._over[:] = False
        return self._gather(
            [
                env.reset(seed=None if seed is None else seed + lane)
                for lane, env in enumerate(self.envs)
            ]
        )

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step the running lanes, and reset the others."""
        results = []
        for lane, action in enumerate(iterate(self.action_space, actions)):
            if self._over[lane]:
                results.append(self.envs[lane].reset())
                self._reward[lane], self._flags[:, lane] = 0, False
            else:
                obs, reward, terminated, truncated, info = self.envs[lane].step(action)
                self._reward[lane], self._flags[:, lane] = reward, (terminated, truncated)
                results.append((obs, info))
        np.logical_or(*self._flags, out=self._over)
        obs, infos = self._gather(results)
        return obs, self._reward, *self._flags, infos

    def _gather(self, results: list[Any]) -> tuple[Any, dict[str, Any]]:
        infos: dict[str, Any] = {}
        for lane, (_, info) in enumerate(results):
            infos = self._add_info(infos, info, lane)
        observations = [obs for obs, _ in results]
        self._obs = concatenate(self.single_observation_space, observations, self._obs)
        return self._obs, infos


class TorchLanes(EnvBase):
    """Lanes as a TorchRL environment of batch size [lanes], or [] for one."""

    def __init__(
        self, envs: list[gym.Env[Any, Any]], *, flat: bool, tensors: Reuse = "", agents: int = 0
    ) -> None:
        lanes = len(envs)
        super().__init__(device="cpu", batch_size=torch.Size([] if flat else [lanes]))
        self.envs, self.flat, self.tensors, self.agents = envs, flat, tensors, agents
        self.kept: dict[Key, torch.Tensor] = {}
        self.calls = 0
        lead = () if flat else (lanes,)
        group = (*lead, agents) if agents else lead
        self.observation_spec = self._composite(
            {
                leaf.key: leaf.spec[0] if flat else leaf.spec
                for leaf in observation_leaves(envs[0].observation_space, lanes)
            }
        )
        if agents:
            self.action_spec = Composite(
                agents=Composite(action=Categorical(3, shape=group), shape=group), shape=lead
            )
        else:
            action = action_leaf(envs[0].action_space, lanes).spec
            self.action_spec = action[0] if flat else action
        reward = Unbounded((*group, 1), dtype=torch.float32)
        self.reward_spec = self._composite({self._in_group("reward"): reward})
        names = ("done", "terminated", "truncated")
        flags: dict[Key, Any] = {
            (name,): Binary(1, shape=(*lead, 1), dtype=torch.bool) for name in names
        }
        if agents:
            for name in names:
                flags["agents", name] = Binary(1, shape=(*group, 1), dtype=torch.bool)
        self.full_done_spec = self._composite(flags)

    def _in_group(self, name: str) -> Key:
        return ("agents", name) if self.agents else (name,)

    def _composite(self, specs: dict[Key, Any]) -> Composite:
        out = Composite(shape=self.batch_size)
        if self.agents:
            out["agents"] = Composite(shape=(*self.batch_size, self.agents))
        for key, spec in specs.items():
            own = self._in_group("observation") if key == ("observation",) else key
            out[own] = spec
        return out

    def _set_seed(self, seed: int | None) -> None:
        self._seed_next = seed

    _seed_next: int | None = None

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = np.ones(len(self.envs), np.bool_)
        if tensordict is not None and "_reset" in tensordict.keys():
            mask = tensordict["_reset"].reshape(-1).cpu().numpy()
        seed, self._seed_next = self._seed_next, None
        for lane in np.flatnonzero(mask).tolist():
            own = None if seed is None else seed + lane
            self._now[lane] = leaves(self.envs[lane].reset(seed=own)[0])
        return self._out(np.zeros((len(self.envs), 2), np.bool_))

    @property
    def _now(self) -> list[Any]:
        """The last observation of each lane."""
        return self.__dict__.setdefault("_last", [None] * len(self.envs))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = tensordict.get(self.action_keys[0])
        actions = actions.unsqueeze(0) if self.flat else actions
        flags = np.zeros((len(self.envs), 2), np.bool_)
        rewards = torch.zeros(len(self.envs))
        for lane, env in enumerate(self.envs):
            action: Any = actions[lane].cpu().numpy()  # a view that environments may write to
            if action.ndim == 0 and isinstance(env.action_space, gym.spaces.Discrete):
                action = action[()]
            obs, rewards[lane], flags[lane, 0], flags[lane, 1], _ = env.step(action)
            self._now[lane] = leaves(obs)
        out = self._out(flags)
        reward = rewards.unsqueeze(-1)
        if self.agents:
            reward = reward.unsqueeze(-1) * torch.arange(1, self.agents + 1).view(1, -1, 1)
        reward = reward.to(self.device)
        out[self._in_group("reward")] = reward[0] if self.flat else reward
        return out

    def _out(self, flags: Array) -> TensorDict:
        device = None if self.device.type == "cpu" else self.device
        out = TensorDict({}, batch_size=self.batch_size, device=device)
        if self.agents:
            out["agents"] = TensorDict({}, batch_size=(*self.batch_size, self.agents))
        self.calls += 1
        for number, key in enumerate(self._now[0]):
            value = torch.from_numpy(np.stack([each[key] for each in self._now])).to(self.device)
            own = self._in_group("observation") if key == ("observation",) else key
            out[own] = self._again(number, own, value[0] if self.flat else value)
        flag = torch.from_numpy(np.array(flags)).to(self.device)
        for name, one in (
            ("terminated", flag[:, :1]),
            ("truncated", flag[:, 1:]),
            ("done", flag.any(-1, keepdim=True)),
        ):
            out[name] = (one[0] if self.flat else one).clone()
            if self.agents:
                out["agents", name] = (
                    out[name].unsqueeze(-2).expand(*self.batch_size, self.agents, 1).clone()
                )
        return out

    def _again(self, number: int, key: Key, value: torch.Tensor) -> torch.Tensor:
        """Return the value in a new tensor, or in one that an earlier call returned."""
        if not self.tensors or (self.tensors == "one key" and number):
            return value
        count = {"double": 2, "ring": 3}.get(self.tensors, 1)
        if key not in self.kept:
            self.kept[key] = torch.stack([value] * count)
            self.__dict__.setdefault("_rows", {})[key] = list(self.kept[key].unbind(0))
        at = self.calls % count
        self.kept[key][at] = value
        return self.kept[key][at] if self.tensors == "view" else self.__dict__["_rows"][key][at]


def _transform(name: str, world: World) -> Transform:
    if name == "norm":
        return Running(world.told)
    if name == "steps":
        return StepCounter()
    if name == "init":
        return InitTracker()
    if name == "sum":
        return RewardSum()
    assert name == "stack"
    return CatFrames(N=2, dim=-1, in_keys=["observation"], out_keys=["stacked"])


_SHARED: dict[tuple[str, int], gym.Env[Any, Any]] = {}


def _lane(kind: EnvKind, world: World, run: int, lane: int) -> gym.Env[Any, Any]:
    if lane not in kind.shared:
        return one_lane(kind.lane, world, run, lane)
    key = world.token, run
    if key not in _SHARED:
        _SHARED[key] = one_lane(kind.lane, world, run, lane)
    env = _SHARED[key]
    return wrappers.TimeLimit(env, 500) if kind.shared_wrapped else env


def lane_of_torch(kind: EnvKind, world: World, run: int, lane: int) -> EnvBase:
    """Return one lane as a TorchRL environment of batch size []."""
    env = _lane(kind, world, run, lane)
    if kind.tensors or kind.system == "one":
        return TorchLanes([env], flat=True, tensors=kind.tensors).to(kind.device)
    if kind.auto_reset:
        return GymWrapper(env, auto_reset=True, categorical_action_encoding=True)
    return GymWrapper(env, categorical_action_encoding=not kind.one_hot)


def make_env(
    kind: EnvKind,
    world: World,
    run: int,
    options: dict[str, Any],
    first: int = 0,
    lanes: int | None = None,
) -> Any:
    """Return an environment of ``lanes`` lanes from ``first`` on.

    ``options`` are those of a `GymnasiumVectorEnv`.
    """
    lanes = kind.lanes if lanes is None else lanes
    each = range(first, first + lanes)
    if kind.is_vector:
        makes = [partial(_lane, kind, world, run, lane) for lane in each]
        return _vector(kind, makes, options, world)
    if kind.system == "pettingzoo":
        return PettingZooSystem([Herd(_lane(kind, world, run, i), i) for i in each])
    env: EnvBase
    if kind.flat:
        env = lane_of_torch(kind, world, run, first)
    elif kind.system == "torch":
        envs = [_lane(kind, world, run, lane) for lane in each]
        lanes_there = TorchLanes(envs, flat=False, tensors=kind.tensors, agents=kind.lane.agents)
        env = lanes_there.to(kind.device)
    else:
        torch_makes = [partial(lane_of_torch, kind, world, run, lane) for lane in each]
        if kind.system == "serial":
            env = SerialEnv(lanes, torch_makes)
        else:
            env = ParallelEnv(lanes, torch_makes, mp_start_method="fork")
    return _transformed(env, kind, world)


def _vector(kind: EnvKind, makes: list[Any], options: dict[str, Any], world: World) -> Any:
    mode = AutoresetMode(kind.mode)
    vector: VectorEnv[Any, Any, Any]
    seen: dict[str, Any] = {"observation_mode": "different"} if kind.lane.wider else {}
    if kind.system == "native":
        vector = NativeVector([make() for make in makes])
    elif kind.system == "async":
        vector = AsyncVectorEnv(makes, autoreset_mode=mode, context="fork", **seen)
    else:
        vector = SyncVectorEnv(makes, autoreset_mode=mode, copy=kind.copy, **seen)
    if kind.vector_statistics:
        vector = wrappers.vector.RecordEpisodeStatistics(vector)
    if not kind.adapter:
        return vector
    env = GymnasiumVectorEnv(vector, reset_slots=kind.adapter, **options)
    return _transformed(env, kind, world)


def _transformed(env: EnvBase, kind: EnvKind, world: World) -> EnvBase:
    if not kind.transforms:
        return env
    return TransformedEnv(env, Compose(*(_transform(name, world) for name in kind.transforms)))


def close(env: Any) -> None:
    """Close an environment that may already be closed."""
    if isinstance(env, EnvBase):
        env.close(raise_if_closed=False)
    else:
        env.close()
