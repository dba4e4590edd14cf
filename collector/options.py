"""Options that all collectors share, checked before anything is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.slab.info import Info, infos_of
from tallyroll.collector.slab.names import Rename, checked_rename, split
from tallyroll.storage.rows.keys import Key

Layout = Literal["rows", "lanes", "trajectories"]
Surplus = Literal["carry", "discard", "never_step"]
Validate = Literal["raise", "warn", "off"]
Finals = Literal["check", "lost", "kept"]
"""What is known of the observations that episodes end with.

``"check"``: they are compared with the first observations that follow, until it is decided;
``"lost"``: the environment resets itself and returns the next episode's first one;
``"kept"``: they are right, also where they equal the first ones that follow, for a reset keeps
the state.
"""
Postproc = Callable[[TensorDictBase], TensorDictBase]


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
        positive("frames_per_batch", frames_per_batch)
        total = _total(total_frames, total_episodes, reset_at_each_iter, surplus)
        positive("max_frames_per_traj", max_frames_per_traj, optional=True)
        one_of("layout", layout, ("rows", "lanes", "trajectories"))
        if split_trajs and layout == "lanes":
            raise ArgumentError('split_trajs=True is layout="trajectories", got layout="lanes" too')
        if postproc is not None and not callable(postproc):
            raise ArgumentError(f"postproc: expected a callable, got {type(postproc).__name__}")
        if postproc is not None and not yield_large:
            raise ArgumentError(
                "yield_large=False leaves out columns that postproc may want; drop one of them"
            )
        one_of("surplus", surplus, ("carry", "discard", "never_step"))
        frame_skip = _frame_skip(frame_skip)
        infos = infos_of(info_keys)
        if isinstance(frame_skip, str) and split(frame_skip) not in (info.key for info in infos):
            infos = (*infos, Info(frame_skip))
        one_of("finals", finals, ("check", "lost", "kept"))
        if validate not in ("raise", "warn", "off"):
            raise ArgumentError(f'validate is "raise", "warn" or "off", got {validate!r}')
        default = _device("device", device)
        return cls(
            frames_per_batch=int(frames_per_batch),
            total_frames=total,
            total_episodes=total_episodes,
            seed=seed_of(seed),
            layout="trajectories" if split_trajs else layout,
            surplus=surplus,
            device=default,
            policy_device=_device("policy_device", policy_device) or default,
            env_device=_device("env_device", env_device),
            storing_device=_device("storing_device", storing_device) or default,
            init_random_frames=not_negative("init_random_frames", init_random_frames),
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


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name}: expected an integer, got {value!r} ({type(value).__name__})")
    return int(value.__index__())


def positive(name: str, value: Any, *, optional: bool = False) -> int:
    """``value`` as an integer above 0."""
    if optional and value is None:
        return 0
    number = _integer(name, value)
    if number <= 0:
        raise ArgumentError(f"{name}: expected an integer above 0, got {number}")
    return number


def not_negative(name: str, value: Any) -> int:
    """``value`` as an integer of at least 0."""
    number = _integer(name, value)
    if number < 0:
        raise ArgumentError(f"{name}: expected an integer of at least 0, got {number}")
    return number


def seconds(name: str, value: Any) -> float | None:
    """``value`` as a number of seconds above 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ArgumentError(f"{name}: expected a number of seconds above 0, or None, got {value!r}")
    return float(value)


def _total(frames: Any, episodes: Any, reset_at_each_iter: bool, surplus: str) -> int | None:
    """The frame budget, or None where there is no limit of frames."""
    if (frames is None) == (episodes is None):
        raise ArgumentError(
            "expected total_frames (transitions, -1: no limit) or total_episodes, one of them, got "
            f"total_frames={frames!r}, total_episodes={episodes!r}"
        )
    if episodes is not None:
        positive("total_episodes", episodes)
        if reset_at_each_iter:
            raise ArgumentError(
                "total_episodes wants whole episodes and reset_at_each_iter cuts them; drop one"
            )
        if surplus == "discard":
            raise ArgumentError(
                'total_episodes wants whole episodes and surplus="discard" throws parts of them '
                'away; use surplus="carry"'
            )
        return None
    if _integer("total_frames", frames) == -1:
        return None
    return positive("total_frames", frames)


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise unless ``value`` is among ``allowed``."""
    if value not in allowed:
        raise ArgumentError(f"{name}: expected one of {list(allowed)}, got {value!r}")


def _frame_skip(value: Any) -> int | str:
    """Ticks a transition, or the info key that counts them."""
    return value if isinstance(value, str) else positive("frame_skip", value)


def seed_of(value: Any) -> int | None:
    """A seed, or None."""
    return None if value is None else not_negative("seed", value)


def _device(name: str, value: torch.device | str | None) -> torch.device | None:
    """A torch device, or None."""
    try:
        # A tensor's device is named in full ("cuda:0", not "cuda"), and is there.
        return None if value is None else torch.empty(0, device=value).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            f"{name}: expected a torch device of this machine, got {value!r}: {error}"
        ) from error
