"""Options that go together, as one object; and each as a keyword of its own."""

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

``"noise"``: they raise, but for numbers outside the box of an action (exploration noise), which
warn once and are kept as the environment got them; ``"raise"``: these raise too; ``"warn"``: all
warn, once; ``"off"``: values are not checked.
"""
ResetSlots = Literal["mask", "avoid"]
BudgetUnit = Literal["transitions", "agent_transitions"]
Finals = Literal["check", "lost", "kept"]
"""Knowledge about the observations that episodes end with.

``"check"``: they are compared with the first observations that follow, until it is decided;
``"lost"``: the environment resets itself and returns the next episode's first one;
``"kept"``: they are right, also where they equal the first ones that follow, for a reset keeps
the state.
"""
Placement = Literal["local", "central"]
"""Place of a policy whose lanes are in workers."""
InfoKeys = Sequence[str | tuple[str, ...] | Info]
DeviceLike = torch.device | str | None
_DEVICE = or_none(named_device)


class OptionObject:
    """Options of a collector that go together: a frozen dataclass.

    Each field is a keyword of the collector as well, which errors name. A type names the values
    that are allowed, or metadata has a `Check`, as ``"check"``; and the ``"keyword"``, where that
    is not the field's name.
    """

    said: frozenset[str]
    """The fields that its maker gave, be it as they are by default."""

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
    """The fields of a kind of objects, by the keywords of a collector."""
    return {each.metadata.get("keyword", each.name): each for each in fields(kind)}


def object_of(kind: type[Kind], name: str, value: Any, more: Mapping[str, Any]) -> Kind:
    """The object ``value`` of the argument ``name``, with those of ``more`` that are its fields.

    Raises:
        ArgumentError: it is no such object, or both say the same option.
    """
    keywords = keywords_of(kind)
    if kind is Layout and not isinstance(value, Layout):
        given = kind(value)  # its name alone
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
    """Columns of rows, beyond those of the environment's spaces: an argument of collectors.

    Args:
        info_keys: entries of infos (of Gymnasium, Stable-Baselines3, EnvPool, gym3) that become
            columns: names, or :class:`Info` with dtype, shape and fill. Of a name alone, a
            Gymnasium environment that the collector makes is asked by way of another one, which
            is closed again; any other declares it with its first reset.
        rename: other names for columns of observations and infos, where they collide:
            ``{"action": "previous_action"}``, nested ones as tuples or ``"a/b"``. Random actions
            do not keep to an ``action_mask`` that has another name, of infos too.
        frame_skip: simulator ticks a transition, or an info key that counts the ticks since
            the episode's reset (ALE: ``"episode_frame_number"``). Default: the product of what the
            environment and its wrappers report, such as ALE's ``frameskip`` and MuJoCo's
            ``frame_skip``; 1 where nothing skips. Where the number is drawn or not known (lanes
            that differ, TorchRL's ``ParallelEnv``), so are the ticks: NaN in ``metrics()``.
        reward_dtype: ``torch.float64`` stores rewards with all bits that the environment returns.
            Default: as the environment declares them, which is float32 for all but TorchRL's own
            environments. A float32 has 24 bits: it rounds most floats, and a
            ``RoundedWarning`` reports the first reward of a run that becomes 0, or another
            integer (beyond 2**24). TorchRL's own environments have a dtype of their own, which
            ``reward_dtype`` has to agree with.
        yield_large: False leaves columns with rows of 4 KiB and more (images) out of the batches
            that are yielded: they go straight to ``storage``, one copy less.
        budget_unit: what ``total_frames`` counts: ``"transitions"``, or, with groups of agents,
            ``"agent_transitions"``, the parts in them of agents that lived or whose turn it was.
            Then the run ends with the first transition at which there are so many, and
            ``ledger.agent_surplus`` says how many more they are: fewer than its agents.

    Raises:
        ArgumentError: one of them cannot be right.

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
    """Checks of an environment, and what is known of it: an argument of collectors.

    Args:
        validate: values outside their spaces. ``"noise"`` raises, but for numbers outside the box
            of a continuous action, as exploration noise makes them: they are executed and stored
            as they are, and the first is a warning; ``"raise"`` raises for these too, ``"warn"``
            warns once of the first of all, ``"off"`` lets them pass. An action that is NaN or
            infinite raises in any case.
        finals: what final observations are. ``"check"`` compares the first few with the first
            observations that follow them, and raises :class:`SilentReset` where the environment
            resets itself within step and so returns the next episode's first observation as the
            final one; ``"lost"`` says that it does so, and adds ``("collector", "next_valid")``,
            False at ends; ``"kept"`` says that they are right, for a reset keeps the state.
        reset_slots: with a Gymnasium vector environment, see :class:`GymnasiumVectorEnv`.

    Raises:
        ArgumentError: one of them cannot be right.
    """

    validate: Validate = "noise"
    finals: Finals = "check"
    reset_slots: ResetSlots = "mask"


@dataclass(frozen=True, kw_only=True)
class Devices(OptionObject):
    """Devices of a run, where they are not all ``device``: an argument of collectors.

    As keywords of a collector they are ``policy_device``, ``env_device``, ``storing_device`` and
    ``policy_placement``.
    ``device`` stands for those that are None (Gymnasium environments stay on the CPU). Without
    that, a policy runs where its weights are, in worker processes on the CPU. Whether this
    machine has them is asked by the collector.

    Args:
        policy: where the policy runs.
        env: where the environment is moved.
        storing: where yielded batches lie.
        placement: of the policy where workers step the lanes. ``"local"``: each has a copy, and
            acts for its own lanes; ``"central"``: this process acts, in one call for the lanes of
            many workers, on the device of the policy, and sends the actions. Weights stay here.
            Without workers both are the same.

    Raises:
        ArgumentError: one of them is no device, or no place.
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
    """Layout of a batch: an argument of collectors, which takes its name alone as well.

    Args:
        name: ``"rows"`` ``[frames]``, lane by lane and in time within the lane; ``"lanes"``
            ``[lane, time]`` and ``"trajectories"`` ``[trajectory, time]``, padded, with
            ``("collector", "mask")``; ``"torchrl"`` what TorchRL's collectors give:
            ``[lanes, time]`` (``[time]`` of an environment without a batch size), ``time`` named,
            done flags at the root too, and ``("next", "done")`` not True on cuts. Where lanes
            differ in length it is padded, with a mask, done at each lane's last row, and a warning.
        split_trajs: TorchRL's name for ``"trajectories"``; in ``"torchrl"`` trajectories come lane
            by lane.
        set_truncated: as in TorchRL, the last row of each lane of a batch is ``truncated`` and
            ``done``; in ``"torchrl"`` only, and never in what is stored.

    Raises:
        ArgumentError: one of them cannot be right, or two contradict each other.
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
