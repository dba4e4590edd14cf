"""Arguments are checked before anything is made or touched."""

from collections.abc import Sequence
from typing import Any

import torch

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.slab import Column


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name}: wanted an integer, got {value!r} ({type(value).__name__})")
    return int(value.__index__())


def positive(name: str, value: Any, *, optional: bool = False) -> int:
    """``value`` as an integer above 0."""
    if optional and value is None:
        return 0
    number = _integer(name, value)
    if number <= 0:
        raise ArgumentError(f"{name}: wanted an integer above 0, got {number}")
    return number


def not_negative(name: str, value: Any) -> int:
    """``value`` as an integer of at least 0."""
    number = _integer(name, value)
    if number < 0:
        raise ArgumentError(f"{name}: wanted an integer of at least 0, got {number}")
    return number


def seconds(name: str, value: Any) -> float | None:
    """``value`` as a number of seconds above 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ArgumentError(f"{name}: wanted a number of seconds above 0, or None, got {value!r}")
    return float(value)


def total(frames: Any, episodes: Any, reset_at_each_iter: bool, surplus: str) -> int | None:
    """The frame budget, or None where there is no limit of frames."""
    if (frames is None) == (episodes is None):
        raise ArgumentError(
            "wanted total_frames (transitions, -1: no limit) or total_episodes, one of them, got "
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
        raise ArgumentError(f"{name}: wanted one of {list(allowed)}, got {value!r}")


def frame_skip(value: Any) -> int | str:
    """Ticks a transition, or the info key that counts them."""
    return value if isinstance(value, str) else positive("frame_skip", value)


def seed(value: Any) -> int | None:
    """A seed, or None."""
    return None if value is None else not_negative("seed", value)


def device(name: str, value: torch.device | str | None) -> torch.device | None:
    """A torch device, or None."""
    try:
        # A tensor's device is named in full ("cuda:0", not "cuda"), and is there.
        return None if value is None else torch.empty(0, device=value).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            f"{name}: wanted a torch device of this machine, got {value!r}: {error}"
        ) from error


def column(leaf: torch.Tensor) -> Column:
    """The column that ``leaf`` ``[row, ...]`` fills."""
    return Column(leaf.dtype, tuple(leaf.shape[1:]))
