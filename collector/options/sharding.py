"""A shard: a part of a run that is made on its own, by the same options as the others."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tallyroll.collector.counting.shards import among_first, lanes_of
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.checks import not_negative, positive


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One of the parts that a run is made in, each on its own: an argument of collectors.

    ``num_envs``, ``total_frames``, ``init_random_frames`` and ``seed`` are those of the whole run,
    the same in each shard. A shard has some of its lanes, their part of these transitions, their
    seeds and ids; so all shards together are exactly ``total_frames`` transitions. They are those
    of the one run, bit for bit by ``traj_ids`` and ``step``, where every slot is a transition,
    ``surplus`` is ``"carry"``, lanes have seeds of their own, and actions are random or of a
    deterministic policy that looks at a lane alone. Each is resumed by itself.

    Args:
        index: from 0, as ``SLURM_ARRAY_TASK_ID`` and ``JOB_COMPLETION_INDEX`` count.
        of: number of shards.

    Raises:
        ArgumentError: there is no such shard.

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
                f"shard: expected an index from 0 to {of - 1} of {of} shards, got {index}; it "
                f"counts from 0, so that the last of {of} is {of - 1}/{of}"
            )

    @classmethod
    def parsed(cls, text: str) -> "Shard":
        """Return the shard that ``"I/N"`` names."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None:
            raise ArgumentError(
                f'shard: expected "I/N", shard I, from 0 on, of N, as "0/8", got {text!r}'
            )
        return cls(index=int(found[1]), of=int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


@dataclass(frozen=True, kw_only=True)
class ShardOfRun(Shard):
    """A shard of a run that is known: :attr:`shard` of a collector.

    Args:
        index, of: as of `Shard`.
        asked: transitions of the whole run.
        opening: how many of them, at the start, have random actions.
        lanes: its own ones, numbered over the whole run.
        run_lanes: lanes of the whole run.
    """

    asked: int
    opening: int
    lanes: range
    run_lanes: int

    def among_first(self, count: int) -> int:
        """Return how many of the first ``count`` transitions of the run are this shard's."""
        return among_first(count, self.run_lanes, self.lanes)

    def described(self, run: str, weights: str | None) -> dict[str, Any]:
        """Return what stands in a run's entry.

        ``run`` names what all shards have in common, ``weights`` those that the shard began with.
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
    """``value`` as a shard: it is one, or says ``"I/N"``."""
    if isinstance(value, Shard):
        return Shard(index=value.index, of=value.of)
    if isinstance(value, str):
        return Shard.parsed(value)
    raise ArgumentError(
        f'{name}: expected "I/N", as "0/8", or Shard(index=…, of=…), got {value!r} '
        f"({type(value).__name__})"
    )


def shard_of_run(shard: Shard, given: Mapping[str, Any], *, by_agent: bool) -> ShardOfRun:
    """Return ``shard`` of the run that the options ``given`` are of.

    Raises:
        ArgumentError: they say too little of the whole run, or what no shard can know.
    """
    lanes, frames = given["num_envs"], given["total_frames"]
    if given["total_episodes"] is not None:
        raise ArgumentError(
            "shard: expected total_frames, got total_episodes; which episodes start first depends "
            "on the lanes of all shards, which no shard knows"
        )
    if frames is None:
        raise ArgumentError(
            "shard: expected total_frames, the transitions of all shards together, got -1 (no "
            "limit), which has no parts"
        )
    if by_agent:
        raise ArgumentError(
            'shard: expected budget_unit="transitions", got "agent_transitions": how many of them '
            "a lane makes is not known before"
        )
    if given["seed"] is None:
        raise ArgumentError("shard: expected a seed, the same in all shards, got None; give seed=")
    if lanes is None:
        raise ArgumentError(
            "shard: expected num_envs, the lanes of all shards together, got None; give it, with "
            "an id, a function that makes one Gymnasium environment, or one with an argument "
            "num_envs, which makes so many lanes. An instance cannot be cut into shards"
        )
    if shard.of > lanes:
        raise ArgumentError(
            f"shard: expected at most {lanes} shards, one for each lane, got {shard.of}; make "
            "num_envs, the lanes of all shards together, larger, or of smaller"
        )
    last = lanes_of(shard.of - 1, shard.of, lanes)
    if frames <= last.start:
        raise ArgumentError(
            f"total_frames: expected a transition for each of {shard.of} shards of {lanes} lanes: "
            f"{last.start + 1} or more, got {frames}; make fewer shards"
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
