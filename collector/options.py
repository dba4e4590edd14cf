"""Options that all collectors share, checked before anything is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.slab.info import Info, infos_of
from tallyroll.collector.slab.names import checked_rename, split
from tallyroll.storage.rows.keys import Key

Layout = Literal["rows", "lanes", "trajectories", "torchrl"]
Surplus = Literal["carry", "discard", "never_step"]
Validate = Literal["noise", "raise", "warn", "off"]
"""Ways to treat values outside their spaces. A NaN or infinite action always raises.

``"noise"``: they raise, but for numbers outside the box of an action (exploration noise), which
warn once and are kept as the environment got them; ``"raise"``: these raise too; ``"warn"``: all
warn, once; ``"off"``: values are not checked.
"""
ResetSlots = Literal["mask", "avoid"]
Finals = Literal["check", "lost", "kept"]
"""Knowledge about the observations that episodes end with.

``"check"``: they are compared with the first observations that follow, until it is decided;
``"lost"``: the environment resets itself and returns the next episode's first one;
``"kept"``: they are right, also where they equal the first ones that follow, for a reset keeps
the state.
"""
Postproc = Callable[[TensorDictBase], TensorDictBase]
Check = Callable[[str, Any], Any]
"""Takes an argument's name and value; returns the value as it is used, or raises ArgumentError."""


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name}: expected an integer, got {value!r} ({type(value).__name__})")
    return int(value.__index__())


def positive(name: str, value: Any) -> int:
    """``value`` as an integer above 0."""
    number = _integer(name, value)
    if number <= 0:
        raise ArgumentError(f"{name}: expected an integer above 0, got {number}")
    return number


def at_most(most: int) -> Check:
    """A check of integers above 0 and no larger than ``most``."""

    def check(name: str, value: Any) -> int:
        if (number := positive(name, value)) > most:
            raise ArgumentError(f"{name}: expected at most {most:,}, got {number:,}")
        return number

    return check


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


def one_of(name: str, value: Any, literal: Any) -> None:
    """Raise unless ``value`` is among those that the type ``literal`` names."""
    if value not in (allowed := get_args(literal)):
        raise ArgumentError(f"{name}: expected one of {list(allowed)}, got {value!r}")


def or_none(check: Check) -> Check:
    """A check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def _frames(name: str, value: Any) -> int | None:
    """A budget of frames; None for -1, no limit."""
    return None if _integer(name, value) == -1 else positive(name, value)


def _frame_skip(name: str, value: Any) -> int | str:
    """Ticks a transition, or the info key that counts them."""
    return value if isinstance(value, str) else positive(name, value)


def _device(name: str, value: torch.device | str) -> torch.device:
    try:
        # A tensor's device is named in full ("cuda:0", not "cuda"), and is there.
        return torch.empty(0, device=value).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            f"{name}: expected a torch device of this machine, got {value!r}: {error}"
        ) from error


def _function(name: str, value: Any) -> Any:
    if not callable(value):
        raise ArgumentError(f"{name}: expected a callable, got {type(value).__name__}")
    return value


def _keywords(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name}: expected keywords by name, got {value!r}")
    if is_deeper(value, _MOST_DEPTH):
        raise ArgumentError(
            f"{name}: expected values that are nested at most {_MOST_DEPTH} deep, for they are "
            "written to the manifest; pass a factory that has them"
        )
    return dict(value)


def is_deeper(value: Any, most: int) -> bool:
    """Whether mappings and lists in ``value`` are nested deeper than ``most``."""
    level = [value]
    for _ in range(most):
        inner = (each.values() if isinstance(each, Mapping) else each for each in level)
        below = (each for some in inner for each in some if isinstance(each, _NESTING))
        level = [*{id(each): each for each in below}.values()]  # it may hold itself
        if not level:
            return False
    return True


def _infos(name: str, value: Any) -> tuple[Info, ...]:
    return infos_of(value)


def _rename(name: str, value: Any) -> dict[Any, Key]:
    return {} if value is None else checked_rename(value)


_NESTING = (Mapping, list, tuple)
_MOST_DEPTH = 64
MOST_LANES = 2**20
"""A run's, as a manifest is read back."""
Count = Annotated[int | None, or_none(positive)]
Device = Annotated[torch.device | None, or_none(_device)]


@dataclass(frozen=True)
class Options:
    """Arguments that collectors share; their docstrings say what they mean.

    A type says how the argument is checked: it names the values that are allowed, or is annotated
    with a `Check`.
    """

    frames_per_batch: Annotated[int, positive]
    total_frames: Annotated[int | None, or_none(_frames)]
    """None: no limit of frames."""
    total_episodes: Count
    num_envs: Annotated[int | None, or_none(at_most(MOST_LANES))]
    env_kwargs: Annotated[dict[str, Any] | None, or_none(_keywords)]
    seed: Annotated[int | None, or_none(not_negative)]
    layout: Layout
    split_trajs: bool
    set_truncated: bool
    surplus: Surplus
    device: Device
    policy_device: Device
    env_device: Device
    storing_device: Device
    init_random_frames: Annotated[int, not_negative]
    max_frames_per_traj: Count
    reset_at_each_iter: bool
    postproc: Annotated[Postproc | None, or_none(_function)]
    info_keys: Annotated[tuple[Info, ...], _infos]
    rename: Annotated[dict[Any, Key], _rename]
    frame_skip: Annotated[int | str, _frame_skip]
    exploration_type: ExplorationType
    validate: Validate
    reset_slots: ResetSlots
    yield_large: bool
    finals: Finals

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Options":
        """Make options from the ``arguments`` of a collector, its ``locals()`` at its beginning.

        Raises:
            ArgumentError: an option cannot be right, or two contradict each other.
        """
        checked: dict[str, Any] = {
            each.name: _checked(each.name, arguments[each.name], each.type) for each in fields(cls)
        }
        _refuse_contradictions(arguments)
        if checked["split_trajs"] and checked["layout"] == "rows":
            checked["layout"] = "trajectories"
        for name in ("policy_device", "storing_device"):
            checked[name] = checked[name] or checked["device"]
        ticks, infos = checked["frame_skip"], checked["info_keys"]
        if isinstance(ticks, str) and split(ticks) not in (info.key for info in infos):
            checked["info_keys"] = (*infos, Info(ticks))
        return cls(**checked)

    def for_worker(self, num_envs: int | None) -> "Options":
        """Return a worker's options, without unused ones, which may not be picklable."""
        return replace(self, num_envs=num_envs, postproc=None, storing_device=None)

    @property
    def largest_batch(self) -> int:
        """Rows of the largest batch that can come."""
        return min(self.frames_per_batch, self.total_frames or self.frames_per_batch)


def _checked(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0](name, value)
    if get_origin(hint) is Literal:
        one_of(name, value, hint)
    return value


def _refuse_contradictions(given: Mapping[str, Any]) -> None:
    frames, episodes = given["total_frames"], given["total_episodes"]
    if (frames is None) == (episodes is None):
        raise ArgumentError(
            "expected total_frames (transitions, -1: no limit) or total_episodes, one of them, got "
            f"total_frames={frames!r}, total_episodes={episodes!r}"
        )
    if episodes is not None and given["reset_at_each_iter"]:
        raise ArgumentError(
            "total_episodes wants whole episodes and reset_at_each_iter cuts them; drop one"
        )
    if episodes is not None and given["surplus"] == "discard":
        raise ArgumentError(
            'total_episodes wants whole episodes and surplus="discard" throws parts of them '
            'away; use surplus="carry"'
        )
    if given["split_trajs"] and given["layout"] == "lanes":
        raise ArgumentError('split_trajs=True is layout="trajectories", got layout="lanes" too')
    if given["set_truncated"] and given["layout"] != "torchrl":
        raise ArgumentError(
            'set_truncated marks cuts as TorchRL does, in layout="torchrl" alone, got layout='
            f'"{given["layout"]}", which has ("collector", "cut") for them'
        )
    if given["yield_large"]:
        return
    if given["storage"] is None or given["replay_buffer"] is not None:
        raise ArgumentError(
            "yield_large=False wants a storage (storage=), which alone gets large columns; a "
            "replay buffer gets what is yielded"
        )
    if given["postproc"] is not None:
        raise ArgumentError(
            "yield_large=False leaves out columns that postproc may want; drop one of them"
        )
