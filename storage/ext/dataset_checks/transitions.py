"""Checks of rows that are transitions, one block after another. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tallyroll.storage.ext.dataset_checks.checker import CheckResults, Where
from tallyroll.storage.ext.dataset_checks.values import (
    ZeroRuns,
    as_flags,
    check_finite,
    flat_rows,
    zero_rows,
)

_MOST_KEPT: Final = 2**26
"""The maximum number of rows whose ids and steps are kept to find duplicates.

Datasets with more rows are not searched for duplicates.
"""

Block = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Names:
    """The names of columns by their role. An empty name means that the column is missing."""

    observations: Mapping[str, str] = field(default_factory=dict)
    """The observation columns, each mapped to the column of its next values."""
    alone: tuple[str, ...] = ()
    """Observations without a column of next values."""
    actions: tuple[str, ...] = ()
    reward: str = ""
    terminated: str = ""
    truncated: str = ""
    done: str = ""
    before: str = ""
    """A column that is True if the environment was done before the action."""
    trajectory: str = ""
    step: str = ""
    next_step: str = ""
    lost: str = ""
    """A column that is False for rows whose next values are lost, and are not compared."""
    in_order: bool = False
    """True if each row without an end is followed by the next row of its episode."""


class TransitionChecks:
    """Checks rows block by block, and keeps the last row of each block.

    Args:
        found: the object that collects the findings.
        names: the columns by role. A block may lack columns that cannot be read.
    """

    def __init__(self, found: CheckResults, names: Names) -> None:
        self._found, self._names = found, names
        self._last: dict[str, np.ndarray] = {}
        self._zeros = ZeroRuns(found)
        self._kept: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._rows = 0
        self._seam: int | None = None

    def ring_of(self, rows: int) -> None:
        """Treat the rows as a ring of ``rows`` rows, in which an old row follows the newest one."""
        self._seam = rows

    def advance(self, block: Block, where: Where) -> None:
        """Check the next rows [n, ...]."""
        names, found = self._names, self._found
        following = {*names.observations.values()}
        for name in self._numbers(block):
            valid = block.get(names.lost) if name in following else None
            check_finite(found, block[name], where, name, valid=valid)
        flags = {}
        for name in (names.terminated, names.truncated, names.done, names.before):
            if name in block:
                flag = as_flags(found, block[name], where, name)
                if flag is not None:
                    flags[name] = flag
        self._rows_alone(flags, block, where)
        one = self._joined(block, flags)
        self._last = {name: values[-1:] for name, values in one.items()}
        fresh = len(next(iter(block.values()))) if block else 0
        joined = len(next(iter(one.values()))) if one else 0
        back = Where(where.file, where.episode, where.start - (joined - fresh))
        if joined > 1:
            self._pairs(one, back)
        self._keep(block, where)

    def finish(self) -> None:
        """Finish the checks after the last row."""
        self._zeros.finish()
        self._doubles()

    def _numbers(self, block: Block) -> list[str]:
        names = self._names
        wanted = [*names.observations, *names.observations.values(), *names.alone, *names.actions]
        wanted.append(names.reward)
        return [name for name in wanted if name in block]

    def _rows_alone(self, flags: Block, block: Block, where: Where) -> None:
        """Make the checks that look at each row on its own."""
        names, found = self._names, self._found
        done, terminated, truncated = (
            flags.get(name) for name in (names.done, names.terminated, names.truncated)
        )
        if done is not None and terminated is not None and truncated is not None:
            wrong = done != (terminated | truncated)
            found.add_rows("ends", "done is not equal to terminated or truncated", wrong, where)
        if names.before in flags:
            message = "an action follows an end: the environment was done before the action"
            found.add_rows("ends", message, flags[names.before], where)
        if names.trajectory in block:
            wrong = _flat(block[names.trajectory]) < 0
            found.add_rows("ids", "a trajectory id is negative", wrong, where)
        if names.step in block and names.next_step in block:
            after, step = _flat(block[names.next_step]), _flat(block[names.step])
            wrong = after != step + 1
            found.add_rows(
                "steps",
                "the next step is not the step plus one",
                wrong,
                where,
                names.next_step,
                lambda row: f"{after[row]} after {step[row]}",
            )
        seen = [name for name in (*names.observations, *names.alone) if name in block]
        parts = [block[name] for name in self._numbers(block)]
        if any(block[name].dtype.kind == "f" for name in seen):
            self._zeros.advance(zero_rows(parts), where)

    def _joined(self, block: Block, flags: Block) -> dict[str, np.ndarray]:
        """Return the columns by which each row is compared with the next one.

        If there is a previous block, the columns start with its last row.
        """
        names = self._names
        wanted = [*names.observations, *names.observations.values()]
        wanted += [names.trajectory, names.step, names.lost]
        fresh = {name: block[name] for name in wanted if name in block} | dict(flags)
        if self._last and all(name in self._last for name in fresh):
            return {name: np.concatenate([self._last[name], v]) for name, v in fresh.items()}
        return fresh

    def _pairs(self, one: Block, where: Where) -> None:
        names, found = self._names, self._found
        count = len(next(iter(one.values())))
        ended, terminated = np.zeros(count, bool), np.zeros(count, bool)
        for name in (names.terminated, names.truncated, names.done):
            if name in one:
                ended |= one[name]
        if names.terminated in one:
            terminated = one[names.terminated]
        same = self._same(one)
        steps = _flat(one[names.step]) if names.step in one else None
        if same is not None:
            message = "rows of the same trajectory follow its end"
            found.add_rows("ends", message, same & ended[:-1], where)
            follows = same & ~ended[:-1]
        else:
            follows = ~ended[:-1]
        if steps is not None:
            by_one = steps[1:] == steps[:-1] + 1
            if same is not None:
                self._steps(same & ~by_one, steps, where)
            follows = follows & by_one
        elif same is None and not names.in_order:
            return
        self._observations(one, follows, terminated, where)

    def _same(self, one: Block) -> np.ndarray | None:
        name = self._names.trajectory
        if name not in one:
            return None
        ids = _flat(one[name])
        same: np.ndarray = ids[1:] == ids[:-1]
        return same

    def _steps(self, wrong: np.ndarray, steps: np.ndarray, where: Where) -> None:
        if self._seam is not None and wrong.any():
            back = steps[:-1] - steps[1:] + 1
            wrong = wrong & (back != self._seam)
        after = Where(where.file, where.episode, where.start + 1)
        self._found.add_rows(
            "steps",
            "steps of a trajectory do not increase by one",
            wrong,
            after,
            self._names.step or None,
            lambda row: f"{steps[row + 1]} after {steps[row]}",
        )

    def _observations(
        self, one: Block, follows: np.ndarray, terminated: np.ndarray, where: Where
    ) -> None:
        names, found = self._names, self._found
        known = np.ones(len(follows), bool)
        if names.lost in one:
            known = _flat(one[names.lost])[:-1].astype(bool)
        shared, floats = known.copy(), False
        for name, after in names.observations.items():
            if name not in one or after not in one:
                continue
            if one[name].dtype != one[after].dtype or one[name].shape != one[after].shape:
                continue
            alike = equal_rows(one[after][:-1], one[name][1:])
            message = "the next observation differs from the observation of the following row"
            found.add_rows("observations", message, follows & known & ~alike, where, name)
            if one[name].dtype.kind == "f":
                floats, shared = True, shared & alike
        if floats:
            message = (
                "a final observation equals the observation of the next row: the episode "
                "continues, or the next episode's first observation was stored"
            )
            found.add_rows("ends", message, shared & terminated[:-1], where)

    def _keep(self, block: Block, where: Where) -> None:
        names = self._names
        if names.trajectory in block and names.step in block:
            ids, steps = _flat(block[names.trajectory]), _flat(block[names.step])
            self._rows += len(ids)
            if self._rows <= _MOST_KEPT:
                self._kept.append((where.start, ids.astype(np.int64), steps.astype(np.int64)))

    def _doubles(self) -> None:
        if not self._kept or self._rows > _MOST_KEPT:
            return
        rows = np.concatenate([start + np.arange(len(ids)) for start, ids, _ in self._kept])
        ids = np.concatenate([each for _, each, _ in self._kept])
        steps = np.concatenate([each for _, _, each in self._kept])
        order = np.lexsort((rows, steps, ids))
        ids, steps, rows = ids[order], steps[order], rows[order]
        again = (ids[1:] == ids[:-1]) & (steps[1:] == steps[:-1])
        wrong = np.zeros(int(rows.max()) + 1 if len(rows) else 0, bool)
        wrong[rows[1:][again]] = True
        self._found.add_rows("ids", "a step of a trajectory occurs twice", wrong)


def equal_rows(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return a mask of the rows [n] that are equal in two arrays [n, ...]. NaN equals NaN."""
    differ = np.asarray(one != other)
    if one.dtype.kind in "fc":
        differ = np.logical_and(differ, ~(np.isnan(one) & np.isnan(other)))
    return ~np.asarray(flat_rows(differ).any(1))


def _flat(values: np.ndarray) -> np.ndarray:
    """Return one number per row."""
    return flat_rows(values)[:, 0]
