"""A stand-in for Isaac Lab's environments, with the interface of its documentation.

Tensors are batched and on a device. The step that ends an episode also resets the lane. Buffers are
written in place, and observations come in groups. Observations encode lane, episode and step.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

PACKAGE = "isaaclab.envs.manager_based_rl_env"


class ManagerBasedRLEnv(gymnasium.Env):
    """Lanes that end after 3 to 6 steps: even episodes by a time limit, odd ones by termination.

    ``policy`` is ``[lane, episode, step, sum of actions, draw]``, and ``critic`` has
    ``[step, draw]`` under "state". With ``cfg.compute_final_obs``, ``extras["final_obs"]`` has the
    observations before resets, as in Isaac Lab 2.4 and later. A ``cfg`` without this field stands
    for an older version.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.num_envs, self.device = cfg, cfg.num_envs, torch.device(cfg.device)
        box = spaces.Box(-np.inf, np.inf, (5,), np.float32)
        critic = spaces.Dict(state=spaces.Box(-np.inf, np.inf, (2,), np.float32))
        self.single_observation_space = spaces.Dict(policy=box, critic=critic)
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (self.num_envs, 2), np.float32)
        self.state = torch.zeros(self.num_envs, 5, device=self.device)
        self.state[:, 0] = torch.arange(self.num_envs, device=self.device)
        self.state[:, 1] = -1
        self.reward_buf = torch.zeros(self.num_envs, device=self.device)
        self.reset_terminated = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.reset_time_outs = self.reset_terminated.clone()
        self.extras: dict[str, Any] = {}
        self.generator = torch.Generator(self.device)
        self.closed = False

    def observed(self) -> dict[str, Any]:
        return {"policy": self.state, "critic": {"state": self.state[:, [2, 4]]}}

    def reset_idx(self, lanes: torch.Tensor) -> None:
        drawn = torch.randint(1000, (self.num_envs,), generator=self.generator, device=self.device)
        self.state[lanes, 1] += 1
        self.state[lanes, 2:4] = 0
        self.state[lanes, 4] = drawn[lanes].float()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.reset_idx(torch.ones_like(self.reset_terminated))
        return self.observed(), self.extras

    def step(self, action: torch.Tensor) -> Any:
        assert action.shape == (self.num_envs, 2)
        assert action.device == self.device
        self.state[:, 2] += 1
        self.state[:, 3] += action.sum(1)
        self.reward_buf[:] = self.state[:, 2] + action[:, 0]
        over = self.state[:, 2] >= 3 + self.state[:, 4] % 4
        self.reset_time_outs[:] = over & (self.state[:, 1] % 2 == 0)
        self.reset_terminated[:] = over & ~self.reset_time_outs
        if getattr(self.cfg, "compute_final_obs", False):
            clone = self.state.clone()
            self.extras["final_obs"] = {"policy": clone, "critic": {"state": clone[:, [2, 4]]}}
        self.reset_idx(over)
        flags = self.reset_terminated, self.reset_time_outs
        return self.observed(), self.reward_buf, *flags, self.extras

    def close(self) -> None:
        self.closed = True


ManagerBasedRLEnv.__module__ = PACKAGE


def config(lanes: int, **entries: Any) -> SimpleNamespace:
    return SimpleNamespace(num_envs=lanes, **{"device": "cpu", **entries})


def make(lanes: int, **entries: Any) -> gymnasium.Env:
    """Return the environment in a wrapper, as ``gymnasium.make`` does."""
    return gymnasium.wrappers.OrderEnforcing(ManagerBasedRLEnv(config(lanes, **entries)))


def tasks() -> dict[str, ModuleType]:
    """Return the modules of a package that registers one task, by name in ``sys.modules``."""

    def parse_env_cfg(task: str, device: str = "cuda:0", num_envs: int | None = None) -> Any:
        gymnasium.spec(task)
        return config(num_envs or 1, device=device, compute_final_obs=False, episode_length_s=5.0)

    package, utils = ModuleType("isaaclab_tasks"), ModuleType("isaaclab_tasks.utils")
    utils.parse_env_cfg = parse_env_cfg  # type: ignore[attr-defined]
    if "Isaac-Stand-In-v0" not in gymnasium.registry:
        gymnasium.register(
            "Isaac-Stand-In-v0",
            lambda cfg, render_mode: ManagerBasedRLEnv(cfg),
            disable_env_checker=True,
        )
    return {"isaaclab_tasks": package, "isaaclab_tasks.utils": utils}
