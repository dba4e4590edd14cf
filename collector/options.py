"""What every collector is told, checked before anything is made or touched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchrl.envs.utils import ExplorationType

from tallyroll.collector import arguments
from tallyroll.collector.checks import Validate
from tallyroll.collector.delivery import Postproc
from tallyroll.collector.envs.info import Info, infos_of
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.finals import Finals
from tallyroll.collector.keys import Key
from tallyroll.collector.names import Rename, checked_rename, split
from tallyroll.collector.rollout import Surplus
from tallyroll.collector.trajectories import Layout


@dataclass(frozen=True)
class Options:
    """Arguments that collectors share; their docstrings say what they mean."""

    frames_per_batch: int
    total_frames: int | None
    """None: no limit of frames."""
    total_episodes: int | None
    seed: int | None
    layout: Layout
    surplus: Surplus
    device: torch.device | None
    policy_device: torch.device | None
    env_device: torch.device | None
    storing_device: torch.device | None
    init_random_frames: int
    max_frames_per_traj: int | None
    reset_at_each_iter: bool
    postproc: Postproc | None
    info_keys: tuple[Info, ...]
    rename: dict[Any, Key]
    frame_skip: int | str
    exploration_type: ExplorationType
    validate: Validate
    yield_large: bool
    finals: Finals

    @classmethod
    def checked(
        cls,
        *,
        frames_per_batch: Any,
        total_frames: Any,
        total_episodes: Any,
        seed: Any,
        layout: Layout,
        split_trajs: bool,
        surplus: Surplus,
        device: torch.device | str | None,
        policy_device: torch.device | str | None,
        env_device: torch.device | str | None,
        storing_device: torch.device | str | None,
        init_random_frames: Any,
        max_frames_per_traj: Any,
        reset_at_each_iter: bool,
        postproc: Postproc | None,
        info_keys: Sequence[Any],
        rename: Rename | None,
        frame_skip: Any,
        exploration_type: ExplorationType,
        validate: Validate,
        yield_large: bool,
        finals: Finals,
    ) -> "Options":
        """The options that a call gave.

        Raises:
            ArgumentError: one of them cannot be right.
        """
        arguments.positive("frames_per_batch", frames_per_batch)
        total = arguments.total(total_frames, total_episodes, reset_at_each_iter, surplus)
        arguments.positive("max_frames_per_traj", max_frames_per_traj, optional=True)
        arguments.one_of("layout", layout, ("rows", "lanes", "trajectories"))
        if split_trajs and layout == "lanes":
            raise ArgumentError('split_trajs=True is layout="trajectories", got layout="lanes" too')
        if postproc is not None and not callable(postproc):
            raise ArgumentError(f"postproc: wanted a callable, got {type(postproc).__name__}")
        if postproc is not None and not yield_large:
            raise ArgumentError(
                "yield_large=False leaves out columns that postproc may want; drop one of them"
            )
        arguments.one_of("surplus", surplus, ("carry", "discard", "never_step"))
        frame_skip = arguments.frame_skip(frame_skip)
        infos = infos_of(info_keys)
        if isinstance(frame_skip, str) and split(frame_skip) not in (info.key for info in infos):
            infos = (*infos, Info(frame_skip))
        arguments.one_of("finals", finals, ("check", "lost", "kept"))
        if validate not in ("raise", "warn", "off"):
            raise ArgumentError(f'validate is "raise", "warn" or "off", got {validate!r}')
        default = arguments.device("device", device)
        return cls(
            frames_per_batch=int(frames_per_batch),
            total_frames=total,
            total_episodes=total_episodes,
            seed=arguments.seed(seed),
            layout="trajectories" if split_trajs else layout,
            surplus=surplus,
            device=default,
            policy_device=arguments.device("policy_device", policy_device) or default,
            env_device=arguments.device("env_device", env_device),
            storing_device=arguments.device("storing_device", storing_device) or default,
            init_random_frames=arguments.not_negative("init_random_frames", init_random_frames),
            max_frames_per_traj=max_frames_per_traj,
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            info_keys=infos,
            rename={} if rename is None else checked_rename(rename),
            frame_skip=frame_skip,
            exploration_type=exploration_type,
            validate=validate,
            yield_large=yield_large,
            finals=finals,
        )

    @property
    def for_workers(self) -> "Options":
        """Those that matter where environments are stepped; the others may not be picklable."""
        return replace(self, postproc=None, storing_device=None)

    @property
    def largest_batch(self) -> int:
        """Rows of the largest batch that can come."""
        return min(self.frames_per_batch, self.total_frames or self.frames_per_batch)
