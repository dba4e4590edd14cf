"""A worker's shard: the rows of its lanes, stored by the worker itself on the disk of its node."""

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.run_loop import make_run_loop
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.batches.stored.writer import BatchWriter
from tallyroll.collector.counting.ledger import COUNTS, Ledger, LedgerEntry
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.options import Options
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.rollout.driver import LocalDriver
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import COUNTED, LEASE, counted_word
from tallyroll.storage.errors import CorruptStorage, NotAStorage, StorageMissing
from tallyroll.storage.rows.frame_stacks import FrameStack
from tallyroll.storage.rows.keys import RANDOM_VERSION
from tallyroll.storage.storages import MemmapStorage


@dataclass(frozen=True)
class OpenShard:
    """Request to a worker to keep its rows in its own storage from now on."""

    path: str
    """A folder that does not exist yet on any node."""
    lanes: range
    run_lanes: int
    first_id: int
    """The lowest id of a trajectory, a multiple of the run's lanes."""
    provenance: Mapping[str, Any]
    """The entry of the run."""
    once: bool = False
    """True to store each frame of large observations once."""
    stacks: tuple[FrameStack, ...] = ()
    """The observations that are stacks of frames, if ``once`` is True."""


@dataclass(frozen=True)
class ShardCommit:
    """Reply to a lease: the rows and counts that are committed to the shard."""

    id: str
    """The id of the shard's manifest; "" until it has rows."""
    rows: int
    """Number of all rows of the shard, including earlier leases."""
    entry: LedgerEntry
    """Changes of the counts since the last lease; the counted rows are stored."""
    held: int
    """Number of transitions that wait for the next lease."""
    open: int
    """Number of unfinished trajectories."""
    next_id: int
    """A number larger than any id of a trajectory in the shard."""
    version: int
    """The version of the policy that acted last."""
    episodes: NDArray[np.void]
    """Records of the episodes that ended, counted from the first row of the lease."""
    host: str
    state: bytes | None = None
    """The state of the environment's transforms."""


@dataclass(frozen=True)
class FindShards:
    """Request to a worker to look for these shards on the disks of its node."""

    paths: Sequence[str]


@dataclass(frozen=True)
class FoundShards:
    """Reply to `FindShards`."""

    shards: Mapping[str, tuple[str, int]]
    """The id and the number of rows of each storage that was found, by its path."""


def find_shards(paths: Sequence[str]) -> FoundShards:
    """Look for shards; damaged ones count as missing."""
    found = {}
    for path in paths:
        with (
            suppress(StorageMissing, NotAStorage, CorruptStorage),
            MemmapStorage(path, mode="read", accept_copy=True) as shard,
        ):
            found[path] = shard.manifest["id"], shard.head
    return FoundShards(found)


class WorkerShard:
    """Shard of a worker: numbers, checks and stores the slots that the worker's driver fills.

    Args:
        keep: the request, which names the path, the lanes and the run.
        options: the options of the run.
        policy: chooses actions; None if all actions are random.
        driver: the driver that fills the slots.
        plan: the plan of the slab.
        ranges: the allowed values of each column.
    """

    def __init__(
        self,
        keep: OpenShard,
        options: Options,
        policy: Policy | None,
        driver: LocalDriver,
        plan: SlabPlan,
        ranges: Sequence[Range],
    ) -> None:
        part = ShardOfRun(
            index=0, of=1, asked=0, opening=0, lanes=keep.lanes, run_lanes=keep.run_lanes
        )
        own = replace(options, shard=part, total_frames=None)
        os.makedirs(Path(keep.path).parent, exist_ok=True)
        self._rows = MemmapStorage(keep.path, once=keep.once, stacks=keep.stacks)
        try:
            self._writer = BatchWriter(self._rows, None, False, None, own.largest_batch, part)
        except BaseException:
            self._rows.close()
            raise
        try:
            stored_run = self._writer.stored_run
            stored_run.count_ids(keep.first_id - 1)
            lanes = LaneState.fresh(keep.run_lanes, stored_run.next_id())
            entry = keep.provenance
            self._ledger = Ledger(seed=entry["seed"], incarnation=entry["incarnation"])
            self._run = RunState(own, self._writer, self._ledger, lanes, dict(entry))
            rollout = Rollout(
                driver,
                policy,
                extra=plan.extra,
                surplus=own.surplus,
                random_frames=0,
                gate=None,
                run_lanes=keep.run_lanes,
            )
            self._loop = make_run_loop(
                self._run,
                RowSource(plan),
                rollout,
                ranges,
                count_random=policy is not None,
                draws=policy is not None and policy.draws,
                torchrl=None,
            )
        except BaseException:
            self._close()
            raise
        self._policy, self._board = policy, driver.board
        self._piece = rollout.slab.slots * rollout.slab.lanes
        self._said = np.zeros(len(COUNTS), np.int64)

    def collect(self, lease: int, frames: int) -> ShardCommit:
        """Store exactly ``frames`` more rows, or fewer if the board requests a stop.

        ``lease`` is the number of the lease.
        """
        board, ledger, episodes = self._board, self._ledger, self._run.episodes
        executed, stored, ended = ledger.executed, ledger.stored, episodes.total
        board[COUNTED], board[LEASE] = counted_word(0, 0), lease
        goal = stored + frames
        while ledger.stored < goal and not self._run.over:
            try:
                self._loop.collect(min(self._piece, goal - ledger.stored))
            finally:  # steps before an error count as lost
                board[COUNTED] = counted_word(0, ledger.executed - executed)
        newest = RANDOM_VERSION if self._policy is None else self._policy.version
        return ShardCommit(
            self._id,
            self._writer.stored_run.head,
            self._entry(),
            ledger.carried,
            0 if self._run.over else int(self._run.lanes.open.sum()),
            self._writer.stored_run.counts.next_id,
            newest,
            episodes.newest(episodes.total - ended, stored),
            platform.node(),
        )

    @property
    def _id(self) -> str:
        reader = self._rows.reader
        return str(reader.manifest["id"]) if reader.initialised else ""

    def _entry(self) -> LedgerEntry:
        now = self._ledger.block.words.copy()
        added, self._said = now - self._said, now
        by_name = dict(zip(COUNTS, added.tolist(), strict=True))
        return LedgerEntry(**{name: by_name[name] for name in LedgerEntry._fields})

    def close(self) -> None:
        """End the run of the shard, and close its storage."""
        try:
            if not self._run.over:
                self._loop.end()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._rows.close()
