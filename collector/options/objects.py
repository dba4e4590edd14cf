"""Groups of options as objects, whose fields are also keywords of a collector."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal, Self, TypedDict, TypeVar

import torch

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.checks import (
    checked,
    column_names,
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

``"noise"``: such values raise, except numbers outside the box of an action (exploration noise),
which warn once and are stored as the environment received them; ``"raise"``: these numbers raise
too; ``"warn"``: all such values are stored, and the first one warns; ``"off"``: values are not
checked.
"""
ResetSlots = Literal["mask", "avoid"]
BudgetUnit = Literal["transitions", "agent_transitions"]
Finals = Literal["check", "lost", "kept"]
"""Knowledge about the observations at the ends of episodes.

``"check"``: they are compared with the first observations after them, until they show whether the
environment resets itself; ``"lost"``: the environment resets itself and returns the next episode's
first observation; ``"kept"``: they are correct even if they equal the first observations after
them, because a reset preserves the state.
"""
Placement = Literal["local", "central"]
"""Place of a policy whose lanes are in workers."""
InfoKeys = Sequence[str | tuple[str, ...] | Info]
ColumnNames = Sequence[str | tuple[str, ...]]
DeviceLike = torch.device | str | None
_DEVICE = or_none(named_device)


class OptionObject:
    """A frozen dataclass of options of a collector that belong together.

    Each field is also a keyword of the collector, and errors name this keyword. The type of a field
    names the allowed values, or the metadata of the field has a `Check` under ``"check"``. The
    metadata also has the ``"keyword"``, if it differs from the field's name.
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
    """Return the option object of the argument ``name``: ``value``, with keywords from ``more``.

    Raises:
        ArgumentError: ``value`` is not such an object, or ``value`` and ``more`` have the same
            option.
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
            f"{keyword}: expected only once, got both {keyword}={more[keyword]!r} and {given!r}. "
            "Leave one of them out."
        )
    if not said:
        return given
    before = {name: getattr(given, name) for name in given.said}
    return kind(**before, **{name: more[keyword] for name, keyword in said.items()})


@dataclass(frozen=True, kw_only=True)
class Columns(OptionObject):
    """Choice of the columns of rows, and their names; an argument of collectors.

    Args:
        info_keys: entries of infos (of Gymnasium, Stable-Baselines3, EnvPool, gym3) that become
            columns: names, or :class:`Info` with dtype, shape and fill. If only a name is given,
            the collector determines the type of the entry: from an additional environment, which it
            closes again, if it makes Gymnasium environments; otherwise from the first reset.
        rename: new names for columns of observations and infos whose names collide, such as
            ``{"action": "previous_action"}``; nested names are tuples or ``"a/b"``. Random actions
            ignore an ``action_mask`` that was renamed, even in infos.
        frame_skip: simulator ticks per transition, or an info key that counts the ticks since the
            episode's reset (ALE: ``"episode_frame_number"``). Default: the product of the values
            that the environment and its wrappers report, such as ALE's ``frameskip`` and MuJoCo's
            ``frame_skip``; 1 if nothing skips. If the number is random or unknown (because lanes
            differ, or in TorchRL's ``ParallelEnv``), ticks are NaN in ``metrics()``.
        reward_dtype: ``torch.float64`` stores rewards with all bits that the environment returns.
            Default: the dtype that the environment declares, which is float32 for all but TorchRL's
            own environments. A float32 has 24 bits and rounds most floats. A
            ``RoundedWarning`` reports the first reward of a run that becomes 0, or another
            integer (beyond 2**24). TorchRL's own environments define the dtype, with which
            ``reward_dtype`` must agree.
        yield_large: False leaves columns with rows of 4 KiB and more (images) out of yielded
            batches. They are written directly to ``storage``, which saves one copy.
        exclude: names of columns that the policy sees and no storage holds, such as a stack of
            frames if its newest frame is stored; nested names are tuples or ``"a/b"``. A name
            also excludes the column under ``"next"``, the name of a group excludes its columns, and
            renamed columns have their new names. Yielded batches and ``postproc`` get these
            columns; the storage, a replay buffer (also one of TorchRL's own storages) and a
            checkpoint do not. Each row needs its actions, rewards, flags of ends, masks of agents
            and ``"collector"`` columns, which cannot be excluded. The run's entry in the manifest
            names the excluded columns, for errors of readers, ``inspect`` and ``replay``. A resumed
            run must exclude the same columns. ``yield_large=False`` leaves the large excluded
            columns out of batches too.
        budget_unit: the unit of ``total_frames``: ``"transitions"``, or, with groups of agents,
            ``"agent_transitions"``, which counts each agent that is alive, or whose turn it is, in
            a transition. The run then ends with the first transition at which the budget is
            reached. ``ledger.agent_surplus`` is the excess, less than the number of agents in that
            transition.

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
    exclude: ColumnNames = field(default=(), metadata={"check": column_names})
    budget_unit: BudgetUnit = "transitions"


@dataclass(frozen=True, kw_only=True)
class Checks(OptionObject):
    """Checks of an environment, and known facts about it; an argument of collectors.

    Args:
        validate: treatment of values outside their spaces. ``"noise"`` raises, except for numbers
            outside the box of a continuous action, which exploration noise causes: they are
            executed and stored unchanged, and the first one warns. ``"raise"`` raises for these
            too. ``"warn"`` accepts all values and warns once, of the first one. ``"off"`` accepts
            all without a warning. An action that is NaN or infinite always raises.
        finals: knowledge about final observations. ``"check"`` compares the first few with the
            first observations after them, and raises :class:`SilentReset` if the environment resets
            itself within step and therefore returns the next episode's first observation as the
            final one. ``"lost"`` declares that the environment does so, and adds the column
            ``("collector", "next_valid")``, which is False at ends. ``"kept"`` declares that final
            observations are correct, because a reset preserves the state.
        reset_slots: treatment of reset slots in a Gymnasium vector environment; see
            :class:`GymnasiumVectorEnv`.

    Raises:
        ArgumentError: an argument is not valid.
    """

    validate: Validate = "noise"
    finals: Finals = "check"
    reset_slots: ResetSlots = "mask"


@dataclass(frozen=True, kw_only=True)
class Devices(OptionObject):
    """Devices of a run, if they are not all ``device``; an argument of collectors.

    As keywords of a collector, the fields are ``policy_device``, ``env_device``, ``storing_device``
    and ``policy_placement``. The default of each device is ``device``, except that Gymnasium
    environments stay on the CPU. Without ``device``, a policy runs on the device of its weights, or
    on the CPU in worker processes. Batches are then on the device of the environment, or on the CPU
    if workers step it. The collector checks that this machine has the devices.

    Args:
        policy: device of the policy.
        env: device to which the environment is moved.
        storing: device of yielded batches.
        placement: place of the policy if workers step the lanes. ``"local"``: each worker has a
            copy, which acts for its lanes; ``"central"``: this process acts, in one call for the
            lanes of many workers, on the device of the policy, and sends the actions. The weights
            are not sent. Without workers, both places are the same.

    Raises:
        ArgumentError: an argument is not a device, or ``placement`` is not valid.
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
        name: ``"rows"`` is ``[frames]``, lane by lane and by time within a lane. ``"lanes"`` is
            ``[lane, time]`` and ``"trajectories"`` is ``[trajectory, time]``, both padded, with
            ``("collector", "mask")``. ``"torchrl"`` is the layout of TorchRL's collectors:
            ``[lanes, time]``, or ``[time]`` for an environment without a batch size, with a
            dimension named ``time``, done flags at the root too, and ``("next", "done")`` not True
            on cuts. If lanes differ in length, the batch is padded, has a mask, and is done at the
            last row of each lane; the first such batch causes a warning.
        split_trajs: TorchRL's name for ``"trajectories"``. With ``"torchrl"``, it splits batches
            into trajectories, ordered lane by lane.
        set_truncated: True marks the last row of each lane in a batch as ``truncated`` and
            ``done``, as TorchRL does. Only for ``"torchrl"``; stored rows are never marked.

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
            raise ArgumentError(
                'split_trajs=True selects layout="trajectories", got layout="lanes" too. Drop one.'
            )
        if self.set_truncated and self.name != "torchrl":
            raise ArgumentError(
                'set_truncated: expected layout="torchrl", in which it marks cuts, got layout='
                f'"{self.name}". That layout marks cuts in ("collector", "cut").'
            )
        if self.split_trajs and self.name == "rows":
            object.__setattr__(self, "name", "trajectories")


class MoreOptions(TypedDict, total=False):
    """The fields of option objects as keywords of a collector, for type checkers."""

    info_keys: InfoKeys
    rename: Rename | None
    frame_skip: int | str | None
    reward_dtype: torch.dtype | str | None
    yield_large: bool
    exclude: ColumnNames
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
