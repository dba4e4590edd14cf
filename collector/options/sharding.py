"""Shards: parts of a run that are collected separately, with the same options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tallyroll.collector.counting.shards import among_first, lanes_of
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.checks import not_negative, positive


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One part of a run whose parts are collected separately; an argument of collectors.

    ``num_envs``, ``total_frames``, ``init_random_frames`` and ``seed`` describe the whole run, and
    are the same in each shard. A shard has some of the run's lanes, with their transitions, seeds
    and ids, so that all shards together have exactly ``total_frames`` transitions. Matched by
    ``traj_ids`` and ``step``, these equal the transitions of a single run bit for bit under these
    conditions: every slot is a transition, ``surplus`` is ``"carry"``, lanes have separate seeds,
    and actions are random or come from a deterministic policy that acts for each lane from that
    lane alone. Each shard is resumed separately.

    Args:
        index: number of the shard, from 0, like ``SLURM_ARRAY_TASK_ID`` and
            ``JOB_COMPLETION_INDEX``.
        of: number of shards.

    Raises:
        ArgumentError: ``index`` is not below ``of``, or a number is not valid.

    Examples:
        >>> from tallyroll.collector import Shard, SyncCollector
        >>> for index in range(3):
        ...     with SyncCollector(
        ...         "CartPole-v1", num_envs=8, frames_per_batch=50, total_frames=101, seed=0,
        ...         shard=Shard(index=index, of=3),
        ...     ) as collector:
        ...         rows = sum(len(batch) for batch in collector)
        ...         print(collector.shard.lanes, rows)
        range(0, 2) 26
        range(2, 5) 39
        range(5, 8) 36
    """

    index: int
    of: int

    def __post_init__(self) -> None:
        index, of = not_negative("shard: index", self.index), positive("shard: of", self.of)
        if index >= of:
            raise ArgumentError(
                f"shard: expected an index from 0 to {of - 1} of {of} shards, got {index}. Indices "
                f"count from 0, so the last of {of} shards is {of - 1}/{of}."
            )

    @classmethod
    def parsed(cls, text: str) -> "Shard":
        """Parse ``"I/N"``."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None:
            raise ArgumentError(
                f'shard: expected "I/N", shard I of N, counted from 0, such as "0/8", got {text!r}'
            )
        return cls(index=int(found[1]), of=int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


@dataclass(frozen=True, kw_only=True)
class ShardOfRun(Shard):
    """A shard with facts about its run; the :attr:`shard` of a collector.

    Args:
        index, of: as in `Shard`.
        asked: number of transitions of the whole run.
        opening: number of transitions at the start of the run that have random actions.
        lanes: the lanes of the shard, numbered over the whole run.
        run_lanes: number of lanes of the whole run.
    """

    asked: int
    opening: int
    lanes: range
    run_lanes: int

    def among_first(self, count: int) -> int:
        """Return how many of the run's first ``count`` transitions are in this shard."""
        return among_first(count, self.run_lanes, self.lanes)

    def described(self, run: str, weights: str | None) -> dict[str, Any]:
        """Return the shard's description in a run's entry.

        ``run`` identifies the facts that all shards share, and ``weights`` identifies the initial
        weights of the shard.
        """
        return {
            "index": self.index,
            "of": self.of,
            "asked": self.asked,
            "lanes": [self.lanes.start, self.lanes.stop],
            "run": run,
            **({} if weights is None else {"weights": weights}),
        }


def a_shard(name: str, value: Any) -> Shard:
    """Return ``value`` as a shard; it is a `Shard` or ``"I/N"``."""
    if isinstance(value, Shard):
        return Shard(index=value.index, of=value.of)
    if isinstance(value, str):
        return Shard.parsed(value)
    raise ArgumentError(
        f'{name}: expected "I/N", such as "0/8", or Shard(index=…, of=…), got {value!r} '
        f"({type(value).__name__})"
    )


def shard_of_run(shard: Shard, given: Mapping[str, Any], *, by_agent: bool) -> ShardOfRun:
    """Return ``shard`` with the facts about the run, from its options ``given``.

    Raises:
        ArgumentError: an option is missing, or has a meaning only for the whole run.
    """
    lanes, frames = given["num_envs"], given["total_frames"]
    if given["total_episodes"] is not None:
        raise ArgumentError(
            "shard: expected total_frames, got total_episodes. The lanes of all shards determine "
            "which episodes start first, and a shard knows only its own lanes."
        )
    if frames is None:
        raise ArgumentError(
            "shard: expected total_frames, the transitions of all shards together, got -1 (no "
            "limit), which cannot be divided"
        )
    if by_agent:
        raise ArgumentError(
            'shard: expected budget_unit="transitions", got "agent_transitions". The number of '
            "agent transitions of a lane is not known in advance."
        )
    if given["seed"] is None:
        raise ArgumentError("shard: expected a seed, the same in all shards, got None; pass seed=")
    if lanes is None:
        raise ArgumentError(
            "shard: expected num_envs, the lanes of all shards together, got None. Pass num_envs "
            "with an id, a function that makes one Gymnasium environment, or a function with an "
            "argument num_envs. An instance cannot be split into shards."
        )
    if shard.of > lanes:
        raise ArgumentError(
            f"shard: expected at most {lanes} shards, one for each lane, got {shard.of}. Increase "
            "num_envs, the lanes of all shards together, or use fewer shards."
        )
    last = lanes_of(shard.of - 1, shard.of, lanes)
    if frames <= last.start:
        raise ArgumentError(
            f"total_frames: expected at least {last.start + 1}, a transition for each of "
            f"{shard.of} shards of {lanes} lanes, got {frames}. Use fewer shards."
        )
    own = lanes_of(shard.index, shard.of, lanes)
    return ShardOfRun(
        index=shard.index,
        of=shard.of,
        asked=frames,
        opening=given["init_random_frames"],
        lanes=own,
        run_lanes=lanes,
    )
