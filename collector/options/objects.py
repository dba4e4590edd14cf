"""Groups of options as objects, whose fields are also keywords of a collector."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal, Self, TypedDict, TypeVar

import torch

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.checks import (
    checked,
    flag,
    info_declarations,
    named_device,
    new_names,
    or_none,
    refuse_unknown,
    reward_dtype,
    tick_count,
)
from tallyroll.collector.options.draws import Sampler
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import Rename

LayoutName = Literal["rows", "lanes", "trajectories", "torchrl"]
Validate = Literal["noise", "raise", "warn", "off"]
"""Ways to treat values outside their spaces. A NaN or infinite action always raises.

``"noise"``: values raise, except numbers outside the box of an action (exploration noise), which
warn once and are stored as the environment received them; ``"raise"``: these raise too;
``"warn"``: all values warn, once; ``"off"``: values are not checked.
"""
ResetSlots = Literal["mask", "avoid"]
BudgetUnit = Literal["transitions", "agent_transitions"]
Finals = Literal["check", "lost", "kept"]
"""Knowledge about the observations at the ends of episodes.

``"check"``: they are compared with the first observations after them, until the case is decided;
``"lost"``: the environment resets itself and returns the next episode's first observation;
``"kept"``: they are correct even if they equal the first observations after them, because a reset
preserves the state.
"""
Placement = Literal["local", "central"]
"""Place of a policy whose lanes are in workers."""
InfoKeys = Sequence[str | tuple[str, ...] | Info]
DeviceLike = torch.device | str | None
_DEVICE = or_none(named_device)


class OptionObject:
    """A frozen dataclass of options of a collector that belong together.

    Each field is also a keyword of the collector, which errors name. The type of a field names the
    allowed values, or its metadata has a `Check`, as ``"check"``. Metadata also has the
    ``"keyword"``, if that is not the field's name.
    """

    said: frozenset[str]
    """The fields that were passed explicitly, even with their default values."""

    def __new__(cls, *args: Any, **named: Any) -> Self:  # noqa: D102
        names = [each.name for each in keywords_of(cls).values()]
        refuse_unknown(named, names, cls.__name__)
        made = super().__new__(cls)
        object.__setattr__(made, "said", frozenset((*names[: len(args)], *named)))
        return made

    def __post_init__(self) -> None:
        for keyword, each in keywords_of(type(self)).items():
            check = each.metadata.get("check", partial(checked, hint=each.type))
            object.__setattr__(self, each.name, check(keyword, getattr(self, each.name)))


Kind = TypeVar("Kind", bound=OptionObject)


def keywords_of(kind: Any) -> Mapping[str, Field[Any]]:
    """Return the fields of a class of option objects, by the keywords of a collector."""
    return {each.metadata.get("keyword", each.name): each for each in fields(kind)}


def object_of(kind: type[Kind], name: str, value: Any, more: Mapping[str, Any]) -> Kind:
    """Return the object ``value`` of the argument ``name``, with its fields among ``more``.

    Raises:
        ArgumentError: ``value`` is no such object, or both have the same option.
    """
    keywords = keywords_of(kind)
    if kind is Layout and not isinstance(value, Layout):
        given = kind(value)  # only the name of a layout
    elif value is None:
        given = kind()
    elif isinstance(value, kind):
        given = value
    else:
        raise ArgumentError(
            f"{name}: expected {kind.__name__}(...), got {type(value).__name__}; its fields are "
            f"{', '.join(each.name for each in keywords.values())}"
        )
    said = {keywords[keyword].name: keyword for keyword in more if keyword in keywords}
    for name in said.keys() & given.said:
        keyword = said[name]
        raise ArgumentError(
            f"{keyword}: expected in one place, got {keyword}={more[keyword]!r} and {given!r} too; "
            "leave one of them out"
        )
    if not said:
        return given
    before = {name: getattr(given, name) for name in given.said}
    return kind(**before, **{name: more[keyword] for name, keyword in said.items()})


@dataclass(frozen=True, kw_only=True)
class Columns(OptionObject):
    """Columns of rows beyond those of the environment's spaces; an argument of collectors.

    Args:
        info_keys: entries of infos (of Gymnasium, Stable-Baselines3, EnvPool, gym3) that become
            columns: names, or :class:`Info` with dtype, shape and fill. For a name alone the type
            of the entry is determined: if the collector makes Gymnasium environments, by an
            additional one, which is closed again; otherwise by the first reset.
        rename: other names for columns of observations and infos that collide:
            ``{"action": "previous_action"}``, nested ones as tuples or ``"a/b"``. Random actions
            ignore an ``action_mask`` that was renamed, also one in infos.
        frame_skip: simulator ticks per transition, or an info key that counts the ticks since
            the episode's reset (ALE: ``"episode_frame_number"``). Default: the product of the
            values that the environment and its wrappers report, such as ALE's ``frameskip`` and
            MuJoCo's ``frame_skip``; 1 if nothing skips. If the number is random or not known (lanes
            that differ, TorchRL's ``ParallelEnv``), ticks are NaN in ``metrics()``.
        reward_dtype: ``torch.float64`` stores rewards with all bits that the environment returns.
            Default: the dtype that the environment declares, which is float32 for all but TorchRL's
            own environments. A float32 has 24 bits and rounds most floats. A
            ``RoundedWarning`` reports the first reward of a run that becomes 0, or another
            integer (beyond 2**24). TorchRL's own environments define the dtype, with which
            ``reward_dtype`` must agree.
        yield_large: False leaves columns with rows of 4 KiB and more (images) out of yielded
            batches. They are written directly to ``storage``, which saves one copy.
        budget_unit: the unit of ``total_frames``: ``"transitions"``, or, with groups of agents,
            ``"agent_transitions"``, the parts in them of agents that lived or whose turn it was.
            The run then ends with the first transition at which the budget is reached, and
            ``ledger.agent_surplus`` is the excess: fewer than the agents of that transition.

    Raises:
        ArgumentError: an argument is not valid.

    Examples:
        >>> from tallyroll.collector import Columns, SyncCollector
        >>> columns = Columns(rename={"observation": "state"})
        >>> with SyncCollector(
        ...     "CartPole-v1", frames_per_batch=5, total_frames=5, columns=columns
        ... ) as collector:
        ...     print("state" in next(iter(collector)))
        True
    """

    info_keys: InfoKeys = field(default=(), metadata={"check": info_declarations})
    rename: Rename | None = field(default=None, metadata={"check": new_names})
    frame_skip: int | str | None = field(default=None, metadata={"check": or_none(tick_count)})
    reward_dtype: torch.dtype | str | None = field(
        default=None, metadata={"check": or_none(reward_dtype)}
    )
    yield_large: bool = field(default=True, metadata={"check": flag})
    budget_unit: BudgetUnit = "transitions"


@dataclass(frozen=True, kw_only=True)
class Checks(OptionObject):
    """Checks of an environment, and known facts about it; an argument of collectors.

    Args:
        validate: treatment of values outside their spaces. ``"noise"`` raises, except for numbers
            outside the box of a continuous action, which exploration noise causes: they are
            executed and stored unchanged, and the first one warns. ``"raise"`` raises for these
            too, ``"warn"`` warns once, of the first value, ``"off"`` accepts all. An action that is
            NaN or infinite always raises.
        finals: knowledge about final observations. ``"check"`` compares the first few with the
            first observations after them, and raises :class:`SilentReset` if the environment resets
            itself within step and therefore returns the next episode's first observation as the
            final one. ``"lost"`` declares that it does so, and adds ``("collector",
            "next_valid")``, False at ends. ``"kept"`` declares that they are correct, because a
            reset preserves the state.
        reset_slots: for a Gymnasium vector environment; see :class:`GymnasiumVectorEnv`.

    Raises:
        ArgumentError: an argument is not valid.
    """

    validate: Validate = "noise"
    finals: Finals = "check"
    reset_slots: ResetSlots = "mask"


@dataclass(frozen=True, kw_only=True)
class Devices(OptionObject):
    """Devices of a run, if they are not all ``device``; an argument of collectors.

    As keywords of a collector they are ``policy_device``, ``env_device``, ``storing_device`` and
    ``policy_placement``.
    The default of each is ``device`` (Gymnasium environments stay on the CPU). Without ``device`` a
    policy runs on the device of its weights, but on the CPU in worker processes. The collector
    checks that this machine has the devices.

    Args:
        policy: device of the policy.
        env: device to which the environment is moved.
        storing: device of yielded batches.
        placement: place of the policy if workers step the lanes. ``"local"``: each worker has a
            copy, which acts for its lanes; ``"central"``: this process acts, in one call for the
            lanes of many workers, on the device of the policy, and sends the actions. The weights
            are not sent. Without workers both are the same.

    Raises:
        ArgumentError: an argument is no device, or no placement.
    """

    policy: DeviceLike = field(
        default=None, metadata={"check": _DEVICE, "keyword": "policy_device"}
    )
    env: DeviceLike = field(default=None, metadata={"check": _DEVICE, "keyword": "env_device"})
    storing: DeviceLike = field(
        default=None, metadata={"check": _DEVICE, "keyword": "storing_device"}
    )
    placement: Placement = field(default="local", metadata={"keyword": "policy_placement"})


@dataclass(frozen=True)
class Layout(OptionObject):
    """Layout of a batch; an argument of collectors, which also accept its name.

    Args:
        name: ``"rows"`` ``[frames]``, lane by lane and in order of time within a lane; ``"lanes"``
            ``[lane, time]`` and ``"trajectories"`` ``[trajectory, time]``, padded, with
            ``("collector", "mask")``; ``"torchrl"`` the layout of TorchRL's collectors:
            ``[lanes, time]`` (``[time]`` for an environment without a batch size), ``time`` named,
            done flags at the root too, and ``("next", "done")`` not True on cuts. If lanes
            differ in length it is padded, with a mask, done at each lane's last row, and a warning.
        split_trajs: TorchRL's name for ``"trajectories"``; in ``"torchrl"`` trajectories are
            ordered lane by lane.
        set_truncated: as in TorchRL, the last row of each lane of a batch is ``truncated`` and
            ``done``; in ``"torchrl"`` only, and never in stored rows.

    Raises:
        ArgumentError: an argument is not valid, or two contradict each other.
    """

    name: LayoutName = field(default="rows", metadata={"keyword": "layout"})
    _: KW_ONLY
    split_trajs: bool = field(default=False, metadata={"check": flag})
    set_truncated: bool = field(default=False, metadata={"check": flag})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_trajs and self.name == "lanes":
            raise ArgumentError('split_trajs=True is layout="trajectories", got layout="lanes" too')
        if self.set_truncated and self.name != "torchrl":
            raise ArgumentError(
                'set_truncated marks cuts as TorchRL does, in layout="torchrl" alone, got layout='
                f'"{self.name}", which has ("collector", "cut") for them'
            )
        if self.split_trajs and self.name == "rows":
            object.__setattr__(self, "name", "trajectories")


class MoreOptions(TypedDict, total=False):
    """The fields of these objects as keywords of a collector, for type checkers."""

    info_keys: InfoKeys
    rename: Rename | None
    frame_skip: int | str | None
    reward_dtype: torch.dtype | str | None
    yield_large: bool
    budget_unit: BudgetUnit
    validate: Validate
    finals: Finals
    reset_slots: ResetSlots
    policy_device: DeviceLike
    env_device: DeviceLike
    storing_device: DeviceLike
    policy_placement: Placement
    split_trajs: bool
    set_truncated: bool
    reset_sampler: Sampler | None
    reset_seeds: bool
