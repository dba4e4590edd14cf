"""Counts of rows that are about to be stored, which the run adds to its ledger."""

from functools import lru_cache

import numpy as np
import torch

from tallyroll.collector.batches.rows.rows import ArrayBatch
from tallyroll.collector.batches.rows.slab_rows import SlabBatch
from tallyroll.collector.counting.ledger import NOTHING, LedgerEntry
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.names import new_name, split
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import NEXT, POLICY_VERSION, RANDOM_VERSION, Key

_ROWS_AT_ONCE = 2**16


class DeliveredCounts:
    """Counts transitions, ticks, episodes and agents in rows that are about to be stored.

    Args:
        options: the options of the run.
        plan: the columns of the rows.
        draws: True if some actions are random and are counted.

    Raises:
        ArgumentError: there is no column with the name ``frame_skip``.
    """

    def __init__(self, options: Options, plan: SlabPlan, *, draws: bool) -> None:
        self.draws = draws
        self._ticks = _ticks(options, plan)
        self.masks, self._agents = _agents(options, plan)
        masked = sum(int(np.prod(plan.layout[mask].shape)) for mask in self.masks)
        self.most_agents = self._agents + masked
        """The most agent transitions of a row; 0 if there are no groups of agents."""
        self.column = self._ticks if isinstance(self._ticks, tuple) else None
        """The column that counts ticks; None if every transition has the same number."""
        self._looks = draws or self.column is not None or bool(self.masks)

    def of(self, part: ArrayBatch | SlabBatch, count: int) -> LedgerEntry:
        """Return the counts of ``part``, which has ``count`` rows."""
        if not self._looks:
            return _delivered(count, 0, count * self._ticks, part.ends, count * self._agents)
        drawn = 0
        if self.draws:
            version = part.array(POLICY_VERSION)
            drawn = int(np.count_nonzero(version == RANDOM_VERSION))
        if isinstance(self._ticks, int):
            ticks = count * self._ticks
        else:
            before, after = part.array(self._ticks), part.array((NEXT, *self._ticks))
            ticks = int((after - before).sum())
        return _delivered(count, drawn, ticks, part.ends, self.agents_of(part, count))

    def agents_of(self, part: ArrayBatch | SlabBatch, count: int) -> int:
        """Return the number of agent transitions in ``part``, which has ``count`` rows."""
        agents = count * self._agents
        for mask in self.masks:
            agents += int(np.count_nonzero(part.array(mask)))
        return agents

    def agents_in(self, reader: RowReader, start: int) -> int:
        """Return the number of agent transitions in the rows of ``reader`` from ``start`` on."""
        agents = (reader.head - start) * self._agents
        for mask in self.masks:
            column = reader.column(mask)
            for at in range(start, reader.head, _ROWS_AT_ONCE):
                some = column.slice(at, min(at + _ROWS_AT_ONCE, reader.head))
                agents += int(np.count_nonzero(some))
        return agents

    def of_rows(self, count: int) -> LedgerEntry:
        """Return the counts of ``count`` rows, if they do not depend on the values in the rows."""
        assert isinstance(self._ticks, int)
        return _delivered(count, 0, count * self._ticks, 0, count * self._agents)

    def of_resets(self, part: ArrayBatch | SlabBatch) -> LedgerEntry:
        """Return the ticks used by the resets before the episodes that begin in ``part``."""
        if self.column is None:
            return NOTHING
        ticks = sum(int(part.at(self.column, begun).sum()) for begun in part.begun)
        return LedgerEntry(reset_ticks=ticks)


@lru_cache(maxsize=256)
def _delivered(count: int, drawn: int, ticks: int, ends: int, agents: int) -> LedgerEntry:
    return LedgerEntry(
        stored=count, random=drawn, ticks=ticks, episodes_complete=ends, agent_transitions=agents
    )


def _agents(options: Options, plan: SlabPlan) -> tuple[list[Key], int]:
    """Return the masks of groups of agents, and the number of agents in groups without a mask."""
    masks, others = [], 0
    for key in plan.dones:
        mask = new_name((*key[1:-1], "mask"), options.rename, plan.layout)
        if mask in plan.layout and plan.layout[mask].dtype is torch.bool:
            masks.append(mask)
        else:
            others += int(np.prod(plan.layout[key].shape))
    return masks, others


def _ticks(options: Options, plan: SlabPlan) -> int | Key:
    """Return the number of ticks in each transition, or the column that counts them.

    Raises:
        ArgumentError: ``frame_skip`` names a column that does not exist.
    """
    if options.columns.frame_skip is None:
        return 0 if plan.ticks is None else plan.ticks  # see `Ledger.ticks`
    if isinstance(options.columns.frame_skip, int):
        return options.columns.frame_skip
    key = new_name(split(options.columns.frame_skip), options.rename, plan.layout)
    if key not in plan.layout:
        raise ArgumentError(
            "frame_skip: expected a number, or the info key that counts ticks, got "
            f"{options.columns.frame_skip!r}. No column has this name."
        )
    return key
