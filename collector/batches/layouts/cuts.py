"""Mark ends and beginnings of trajectories in batches; stored rows have no such marks. Pure.

Value estimators step through time by a ``done`` flag: the one at the root, or the one of a group of
agents. So in a batch every done flag is True at the last row of a trajectory. Such a row either
ends an episode, and the environment's own flag at the root is True, or it is cut. Even at the end
of an episode, the environment's flag of a group may be False, for example if a time limit of all
agents ended the episode.

Recurrent modules carry a state through the rows of a batch. Where ``is_init`` is True, they begin
from the state that is stored in the row. So in a batch ``is_init`` is True at the first row of
every trajectory.

`with_cuts` writes ``("collector", "cut")``. `SmallBatches.batch`, and ``lay_out`` in
``native/_store.c``, repeat it for small batches; ``slice_columns.py`` marks slices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.errors import ArgumentError
from tallyroll.storage.rows.keys import CUT, DONE, STEP, TRAJ_IDS, Key, format_key

Rows = dict[Key, torch.Tensor]


@dataclass(frozen=True)
class OwnFlags:
    """The environment's own flags, for the rows whose flags were changed in a batch.

    ``traj_ids`` and ``step`` have an entry for every row ``[row]``. ``at`` has the indices of the
    rows with changed flags ``[mark]``.
    """

    traj_ids: NDArray[np.int64]
    step: NDArray[np.int64]
    at: NDArray[np.intp]
    flags: Mapping[Key, torch.Tensor]
    """The environment's flags ``[mark, ...]``, by key."""

    def put_into(self, rows: Rows) -> None:
        """Restore the flags in ``rows`` ``[row]``, which may be in another order.

        Raises:
            ArgumentError: the rows cannot be identified, or a flag has another shape.
        """
        at = None
        for key, own in self.flags.items():
            column = rows.get(key)
            if column is None:
                continue
            if column.shape[1:] != own.shape[1:]:
                raise ArgumentError(
                    f"postproc: expected {format_key(key)} of shape {list(own.shape[1:])} per row, "
                    f"got {list(column.shape[1:])}. Write the other form under another name."
                )
            if at is None:
                at = torch.from_numpy(self._places(rows))
            rows[key] = column.index_copy(0, at.to(column.device), own.to(column.device))

    def _places(self, rows: Rows) -> NDArray[np.intp]:
        ids = _numbers(rows[TRAJ_IDS])
        if STEP in rows:
            step = _numbers(rows[STEP])
            order, own = np.lexsort((step, ids)), np.lexsort((self.step, self.traj_ids))
            alike = np.array_equal(ids[order], self.traj_ids[own])
            if alike and np.array_equal(step[order], self.step[own]):
                places: NDArray[np.intp] = order[np.argsort(own)][self.at]
                return places
        elif np.array_equal(ids, self.traj_ids):
            return self.at
        raise ArgumentError(
            "postproc: expected unchanged columns collector/traj_ids and collector/step, got other "
            f"values. Keep these columns: without them, {', '.join(map(format_key, self.flags))} "
            "cannot be stored as the environment reported them."
        )


def _numbers(column: torch.Tensor) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = column.reshape(-1).cpu().numpy()
    return numbers


def last_rows(rows: Rows) -> NDArray[np.bool_]:
    """Return marks ``[row]`` of the last rows of trajectories, which are contiguous."""
    ids = rows[TRAJ_IDS].numpy()
    last = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=last[:-1])
    return last


def first_rows(rows: Rows) -> NDArray[np.bool_]:
    """Return marks ``[row]`` of the first rows of trajectories."""
    return np.roll(last_rows(rows), 1)


def with_cuts(rows: Rows, dones: Sequence[Key] = (), *, marks: bool = True) -> Rows:
    """Add ``cut``, and mark every done flag at the last row of a trajectory, as in yielded batches.

    ``dones`` are the done keys below the root. If ``marks`` is False, only ``cut`` is added.
    """
    last = torch.from_numpy(last_rows(rows))
    marked = {**rows, CUT: last & ~rows[DONE].reshape(-1).cpu()}
    for key in (DONE, *dones) if marks else ():
        marked[key] = _or(rows[key], last)
    return marked


def with_beginnings(rows: Rows, inits: Sequence[Key]) -> Rows:
    """Set each flag of ``inits`` to True at the first row of every trajectory."""
    if not inits:
        return rows
    first = torch.from_numpy(first_rows(rows))
    return {**rows, **{key: _or(rows[key], first) for key in inits if key in rows}}


def _or(flag: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return flag | rows.to(flag.device).view(-1, *(1 for _ in flag.shape[1:]))


def own_flags(rows: Rows, dones: Sequence[Key], inits: Sequence[Key]) -> list[OwnFlags]:
    """Return copies of the flags that a batch changes, except ``done`` at the root."""
    marked = (last_rows, dones), (first_rows, inits)
    return [_own(rows, np.flatnonzero(find(rows)), keys) for find, keys in marked if keys]


def _own(rows: Rows, at: NDArray[np.intp], keys: Sequence[Key]) -> OwnFlags:
    index = torch.from_numpy(at)
    flags = {key: rows[key].index_select(0, index.to(rows[key].device)) for key in keys}
    return OwnFlags(rows[TRAJ_IDS].numpy().copy(), rows[STEP].numpy().copy(), at, flags)


def without_cuts(rows: Mapping[Key, torch.Tensor], own: Sequence[OwnFlags] = ()) -> Rows:
    """Restore the environment's own flags, and drop columns that describe the batch.

    Raises:
        ArgumentError: the flags cannot be restored, because ``postproc`` changed the rows.
    """
    cut = rows[CUT].reshape(-1, 1)
    kept = {key: column for key, column in rows.items() if key != CUT}
    kept[DONE] = rows[DONE] & ~cut.to(rows[DONE].device)
    for each in own:
        each.put_into(kept)
    return kept
