"""Slots of a slab after a step: ends of episodes, and lanes that were not all stepped."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.arrays import as_flags, fitting, put_flags
from tallyroll.collector.envs.system import Array, Mask, Step
from tallyroll.collector.envs.torchrl_protocol import ProtocolEnv
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.slab.progress import FILLED
from tallyroll.collector.slab.slab import Cursor
from tallyroll.storage.rows.keys import TERMINATED, TRUNCATED, Key


class SlotEnds(ProtocolEnv):
    """An environment that completes the slot ``cursor.at`` in place."""

    def _declare(self) -> None:
        super()._declare()
        finish = {"final": self._finish_by_mask, "first": self._finish_first}
        self._finish = finish.get(self._declares.at_end)

    @property
    def _looks_behind(self) -> bool:
        """A step is more than observations, rewards and ends."""
        d = self._declares
        return bool(d.groups) or (self.has_reset_slots and (bool(d.context) or self._tells_skips))

    def _finish_by_mask(
        self, cursor: Cursor, ended: Mask, out: Step, rows: Sequence[NDArray[Any]]
    ) -> None:
        roots = [column[cursor.at] for column in cursor.root_obs]
        system = self.system
        try:
            if system.lends:
                system.lend(roots)
            first = system.reset(ended, None)
        finally:
            if system.lends:
                system.lend(None)
        for index, (_, value) in enumerate(zip(roots, first, strict=True)):
            if value is not roots[index]:
                roots[index][ended] = self._array(index, value)[ended]
        self._draw_contexts(ended)

    def _finish_first(
        self, cursor: Cursor, ended: Mask, out: Step, rows: Sequence[NDArray[Any]]
    ) -> None:
        self._put_finals(cursor, ended, out, rows)
        self._draw_contexts(ended)

    def _put_finals(
        self, cursor: Cursor, ended: Mask, out: Step, rows: Sequence[NDArray[Any]]
    ) -> None:
        """Replace the first observations of the next episodes by the final ones."""
        if out.final is not None:
            at = ended.nonzero()[0]
            for index, row in enumerate(rows):
                row[at] = self._array(index, out.final[index], len(ended)).take(at, 0)
        elif self._declares.finals == "extra" and ended.any():
            raise self._lost_finals(ended)
        if cursor.next_valid is not None:
            valid = np.zeros_like(ended) if out.final_valid is None else as_flags(out.final_valid)
            cursor.next_valid[cursor.at] = ~ended | valid

    def _after_step(self, cursor: Cursor, out: Step, stepped: Mask | None = None) -> None:
        """Write agents' flags, and the results of reset slots."""
        at = cursor.at
        for group, flags in cursor.agents.items():
            put_flags(flags, at, out.agents[group])
        pending, skipped = self._pending, out.skipped
        ended = cursor.terminated[at] | cursor.truncated[at]
        if stepped is not None:  # the others are as they were
            pending, ended = pending & stepped, np.where(stepped, ended, pending)
            skipped = None if skipped is None else as_flags(skipped) & stepped
        if self._looks_behind or not self.has_reset_slots:
            self._require_skipped(skipped, pending)
        # Which lanes wait for a reset slot is followed from the first time that it speaks of it.
        if skipped is not None and not self._tells_skips:
            self._tells_skips = True
        if self.has_reset_slots:
            self._draw_contexts(pending)
            self._pending[...] = ended  # setting an attribute of a module costs five times as much

    def step_part(self, cursor: Cursor, lanes: int) -> None:
        """Step only the first ``lanes`` lanes; the others keep their values.

        Only where :attr:`can_step_part` holds; no lane at all can always be stepped.
        """
        at = cursor.at
        rows = [column[at] for column in cursor.next_obs]
        roots = [column[at] for column in cursor.root_obs]
        for row, seen in zip(rows, cursor.seen_obs, strict=True):
            row[lanes:] = seen[at, lanes:]
        for root, seen in zip(roots, cursor.seen_obs, strict=bool(roots)):
            root[lanes:] = seen[at, lanes:]
        if lanes:
            some = np.arange(self.batch_size[0]) < lanes
            out = self.system.step([column[at].copy() for column in cursor.actions], some)
            try:
                for key, column, value in self._values_of(cursor, out):
                    column[at, :lanes] = fitting(value, column[at], key)[:lanes]
            except (TypeError, ValueError, ValueRefused) as error:
                raise self._unfit(out, error) from error
            for index, (row, value) in enumerate(zip(rows, out.obs, strict=True)):
                row[:lanes] = self._array(index, value)[:lanes]
            for root, row in zip(roots, rows, strict=bool(roots)):
                root[:lanes] = row[:lanes]
            if cursor.next_valid is not None:
                cursor.next_valid[at] = True
            ended = (cursor.terminated[at] | cursor.truncated[at]) & some
            if self._finish is not None and ended.any():
                self._finish(cursor, ended, out, rows)
            if self._looks_behind or out.skipped is not None:
                self._after_step(cursor, out, some)
        cursor.board[FILLED] = at + 1

    def _values_of(self, cursor: Cursor, out: Step) -> Iterator[tuple[Key, NDArray[Any], Array]]:
        """Key, column and values of each reward, and of both flags."""
        yield from zip(self.next_rewards, cursor.rewards, out.reward, strict=True)
        yield TERMINATED, cursor.terminated, out.terminated
        yield TRUNCATED, cursor.truncated, out.truncated

    # --- in place, in any order -------------------------------------------------------------------

    def receive(self, cursor: Cursor, out: Step, pending: Mask) -> Mask:
        """Write the result of ``recv`` to the slot ``cursor.at``; return the marks of ended lanes.

        ``pending`` are the arrivals of reset slots.
        """
        at = cursor.at
        rows = [column[at] for column in cursor.next_obs]
        for index, (row, value) in enumerate(zip(rows, out.obs, strict=True)):
            row[...] = self._array(index, value, len(pending))
        try:
            for key, column, value in self._values_of(cursor, out):
                column[at] = fitting(value, column[at], key)
        except (TypeError, ValueError, ValueRefused) as error:
            raise self._unfit(out, error, out.lanes) from error
        ended: Mask = cursor.terminated[at] | cursor.truncated[at]
        for group, flags in cursor.agents.items():
            put_flags(flags, at, out.agents[group])
        if self._declares.at_end == "first":
            self._put_finals(cursor, ended, out, rows)
        self._require_skipped(out.skipped, pending, out.lanes)
        if self.has_reset_slots:
            self._draw_contexts_of(np.asarray(out.lanes)[pending])
        return ended

    def following(self, lanes: NDArray[np.int32], ended: Mask, out: Step) -> list[NDArray[Any]]:
        """Return the next observations ``[arrival, ...]`` of the ``lanes`` that arrived."""
        count, at_end = len(lanes), self._declares.at_end
        seen = [self._array(index, value, count) for index, value in enumerate(out.obs)]
        if at_end == "final" and ended.any():
            asked = np.zeros(self.batch_size[0], np.bool_)
            asked[lanes[ended]] = True
            first = self.system.reset(asked, None)
            seen = [value.copy() for value in seen]
            for index, (_, value) in enumerate(zip(seen, first, strict=True)):
                seen[index][ended] = self._array(index, value)[lanes[ended]]
        if at_end != "reset_slot":
            self._draw_contexts_of(lanes[ended])
        return seen
