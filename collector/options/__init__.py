"""Options that all collectors share, validated before anything is created."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.checks import (
    a_callable,
    at_most,
    available_device,
    checked,
    frame_budget,
    keyword_arguments,
    not_negative,
    or_none,
    positive,
    refuse_unknown,
)
from tallyroll.collector.options.objects import (
    Checks,
    Columns,
    Devices,
    Layout,
    OptionObject,
    keywords_of,
    object_of,
)
from tallyroll.collector.options.resets import Resets
from tallyroll.collector.options.sharding import Shard, ShardOfRun, a_shard, shard_of_run
from tallyroll.collector.slab.info import Info, infos_of
from tallyroll.collector.slab.names import checked_rename, split
from tallyroll.storage.rows.keys import Key

Surplus = Literal["carry", "discard", "never_step"]
Postproc = Callable[[TensorDictBase], TensorDictBase]

MOST_LANES = 2**20
"""Maximum number of lanes of a run; readers of manifests accept no more."""
Count = Annotated[int | None, or_none(positive)]


@dataclass(frozen=True)
class Options:
    """The arguments that all collectors share; the docstrings of collectors describe them.

    The type of a field determines the check of its argument: a Literal names the allowed values, an
    annotation has a `Check`, and an `OptionObject` has fields that are keywords of the collector
    too.
    """

    frames_per_batch: Annotated[int, positive]
    total_frames: Annotated[int | None, or_none(frame_budget)]
    """The budget of frames; None means no limit."""
    num_envs: Annotated[int | None, or_none(at_most(MOST_LANES))]
    seed: Annotated[int | None, or_none(not_negative)]
    device: Annotated[torch.device | None, or_none(available_device)]
    total_episodes: Count
    env_kwargs: Annotated[dict[str, Any] | None, or_none(keyword_arguments)]
    layout: Layout
    surplus: Surplus
    init_random_frames: Annotated[int, not_negative]
    exploration_type: ExplorationType
    max_frames_per_traj: Count
    reset_at_each_iter: bool
    postproc: Annotated[Postproc | None, or_none(a_callable)]
    columns: Columns
    checks: Checks
    devices: Devices
    resets: Resets
    shard: Annotated[Shard | None, or_none(a_shard)]
    """The shard of the run; a `ShardOfRun` once the other options describe this shard."""
    progress: bool

    # Derived from the fields above.
    policy_device: torch.device | None = field(init=False)
    env_device: torch.device | None = field(init=False)
    storing_device: torch.device | None = field(init=False)
    info_keys: tuple[Info, ...] = field(init=False)
    """The declared infos, including the info that counts ticks."""
    rename: dict[Any, Key] = field(init=False)

    def __post_init__(self) -> None:
        for name, each in keywords_of(Devices).items():
            if each.name == "placement":
                continue
            found = or_none(available_device)(name, getattr(self.devices, each.name))
            if name != "env_device":  # not every environment can be moved
                found = found or self.device
            object.__setattr__(self, name, found)
        ticks, infos = self.columns.frame_skip, infos_of(self.columns.info_keys)
        if isinstance(ticks, str) and split(ticks) not in (info.key for info in infos):
            infos = (*infos, Info(ticks))
        object.__setattr__(self, "info_keys", infos)
        object.__setattr__(self, "rename", checked_rename(self.columns.rename or {}))

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Make options from the ``arguments`` of a collector, the ``locals()`` of its constructor.

        Raises:
            ArgumentError: an option is not valid, or two contradict each other.
        """
        if more := arguments["more"]:
            of = type(arguments["self"]).__name__ if "self" in arguments else "a collector"
            refuse_unknown(more, {*arguments, *cls.keywords()} - _NO_OPTIONS, of)
        options: dict[str, Any] = {}
        for each in fields(cls):
            if isinstance(each.type, type) and issubclass(each.type, OptionObject):
                options[each.name] = object_of(each.type, each.name, arguments[each.name], more)
            elif each.init:
                options[each.name] = checked(each.name, arguments[each.name], each.type)
        made = cls(**options)
        made._refuse_contradictions(arguments)
        return made if made.shard is None else made._of_shard(made.shard)

    def for_env_on(self, device: torch.device | None) -> Self:
        """Return the options with batches on ``device``, unless the caller chose another one."""
        if device is None or device.type == "cpu" or self.storing_device is not None:
            return self
        return replace(self, devices=replace(self.devices, storing=device))

    def _of_shard(self, shard: Shard) -> Self:
        """Return the options of one shard, given the options of the whole run."""
        part = shard_of_run(shard, vars(self), by_agent=self.by_agent)
        return replace(
            self,
            shard=part,
            num_envs=len(part.lanes),
            total_frames=part.among_first(part.asked),
            init_random_frames=part.among_first(self.init_random_frames),
        )

    @property
    def in_shards(self) -> bool:
        """True if each worker stores its rows in its own shard, without sending them here."""
        return False

    @property
    def acts_centrally(self) -> bool:
        """True if the policy acts in the parent of workers."""
        return self.devices.placement == "central"

    @property
    def part(self) -> ShardOfRun | None:
        """The shard that this run is; None if the run is whole."""
        return self.shard if isinstance(self.shard, ShardOfRun) else None

    def run_lanes(self, lanes: int) -> int:
        """Return the number of lanes of the whole run, of which this collector makes ``lanes``."""
        return lanes if self.part is None else self.part.run_lanes

    def own_lanes(self, lanes: int) -> range:
        """Return the numbers, in the whole run, of the ``lanes`` lanes of this collector."""
        return range(lanes) if self.part is None else self.part.lanes

    @property
    def first_lane(self) -> int:
        """Number, in the whole run, of the first lane of this collector."""
        return 0 if self.part is None else self.part.lanes.start

    @classmethod
    def keywords(cls) -> frozenset[str]:
        """Return the keywords of a collector that are fields of option objects."""
        kinds = [each.type for each in fields(cls) if isinstance(each.type, type)]
        objects = [each for each in kinds if issubclass(each, OptionObject)]
        return frozenset(name for each in objects for name in keywords_of(each))

    @property
    def by_agent(self) -> bool:
        """True if ``total_frames`` counts agent transitions."""
        return self.columns.budget_unit == "agent_transitions"

    def for_worker(self, num_envs: int | None) -> Self:
        """Return a worker's options, without the options that it does not use.

        Those may not be picklable.
        """
        return replace(self, num_envs=num_envs, postproc=None)

    @property
    def largest_batch(self) -> int:
        """Maximum number of rows of a batch."""
        if self.by_agent or self.total_frames is None:
            return self.frames_per_batch
        return min(self.frames_per_batch, self.total_frames)

    def _refuse_contradictions(self, given: Mapping[str, Any]) -> None:
        total, episodes = given["total_frames"], given["total_episodes"]
        if (total is None) == (episodes is None):
            raise ArgumentError(
                "expected either total_frames (transitions, -1: no limit) or total_episodes, got "
                f"total_frames={total!r}, total_episodes={episodes!r}"
            )
        if episodes is not None and self.reset_at_each_iter:
            raise ArgumentError(
                "total_episodes counts whole episodes, but reset_at_each_iter cuts them. Drop one."
            )
        if episodes is not None and self.surplus == "discard":
            raise ArgumentError(
                'total_episodes counts whole episodes, but surplus="discard" discards parts of '
                'them. Use surplus="carry".'
            )
        if self.by_agent and (self.total_frames is None or self.layout.name == "torchrl"):
            raise ArgumentError(
                'budget_unit="agent_transitions": expected total_frames and a layout other than '
                f'"torchrl", got total_frames={total!r} and layout="{self.layout.name}". In the '
                'layout "torchrl", frames are always transitions.'
            )
        if self.columns.yield_large:
            return
        if given["storage"] is None or given["replay_buffer"] is not None:
            raise ArgumentError(
                "yield_large=False needs storage=, which receives the large columns. A replay "
                "buffer receives the yielded batches only."
            )
        if self.postproc is not None:
            raise ArgumentError(
                "yield_large=False leaves out columns that postproc may need. Drop one of these "
                "arguments."
            )


_NO_OPTIONS = {"self", "more", "__class__"}
"""Names in ``locals()`` that are not arguments."""
