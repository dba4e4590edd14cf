"""Rows as trajectories: padded with a mask, as a list, or as offsets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from tallyroll.collector.errors import ArgumentError
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import (
    CUT,
    DONE,
    LANE,
    MASK,
    STEP,
    TRAJ_IDS,
    Key,
    as_key,
    format_key,
    is_done,
    is_init,
)

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Offsets:
    """Trajectories as slices of rows in order.

    ``rows`` are ordered by trajectory, then by time. Trajectory ``i`` is ``rows[offsets[i] :
    offsets[i + 1]]`` and has the id ``traj_ids[i]``.
    """

    rows: TensorDictBase
    offsets: torch.Tensor
    traj_ids: torch.Tensor


@overload
def split_trajectories(
    rows: TensorDictBase, *, out: Literal["padded"] = ..., on_gap: Literal["split", "raise"] = ...
) -> TensorDict: ...
@overload
def split_trajectories(
    rows: TensorDictBase, *, out: Literal["list"], on_gap: Literal["split", "raise"] = ...
) -> list[TensorDictBase]: ...
@overload
def split_trajectories(
    rows: TensorDictBase, *, out: Literal["offsets"], on_gap: Literal["split", "raise"] = ...
) -> Offsets: ...
def split_trajectories(
    rows: TensorDictBase,
    *,
    out: Literal["padded", "list", "offsets"] = "padded",
    on_gap: Literal["split", "raise"] = "split",
) -> TensorDict | list[TensorDictBase] | Offsets:
    """Split rows by ``("collector", "traj_ids")``, in ascending order of the ids.

    Args:
        rows: transitions in any order and of any batch size; ids need not be adjacent. Rows
            where ``("collector", "mask")`` is False are left out.
        out: ``"padded"`` gives ``[trajectory, time]`` with ``("collector", "mask")``;
            ``"list"`` gives one TensorDict ``[time]`` per trajectory; ``"offsets"`` gives an
            :class:`Offsets`.
        on_gap: handling of an id whose steps are not consecutive, because a row is missing or
            repeated. ``"split"`` splits the rows of the id into several trajectories, each of
            consecutive steps, in the order of their first steps; ``"raise"`` raises.

    Within a trajectory rows are ordered by ``("collector", "step")``. Rows without that column stay
    in their order, and all rows of an id are one trajectory, because gaps and repeated rows cannot
    be detected. If rows are repeated, adjacent rows stay together, so that slices drawn by a
    sampler stay as they were drawn.

    At the last row of a trajectory ``("next", "done")``, and every bool ``"done"`` below it, is
    True, and ``("collector", "cut")`` is True if the trajectory continues beyond these rows, so
    that value estimators stop there. At its first row every bool ``"is_init"`` is True, so that
    recurrent modules begin from the state stored in that row.

    Raises:
        ArgumentError: there are no trajectory ids, an id or step is not one number for each row,
            or with ``on_gap="raise"`` the steps of an id are not consecutive.
    """
    if out not in ("padded", "list", "offsets"):
        raise ArgumentError(f'out: expected "padded", "list" or "offsets", got {out!r}.')
    if on_gap not in ("split", "raise"):
        raise ArgumentError(f'on_gap: expected "split" or "raise", got {on_gap!r}.')
    flat = _flat(rows)
    ids, step = _numbers(flat, TRAJ_IDS), _numbers(flat, STEP)
    assert ids is not None
    order, begin = _by_id(ids, step)
    if step is not None and (gaps := _gaps(step[order], begin)).size:
        if on_gap == "raise":
            before, after = step[order][gaps[0]], step[order][gaps[0] + 1]
            raise ArgumentError(
                f"rows: expected consecutive steps of each trajectory, got step {after} after step "
                f'{before} of trajectory {ids[order][gaps[0]]}. Pass on_gap="split" to split there.'
            )
        order, begin = _chains(ids, step, _ended(flat))
    ids = ids[order]
    lengths = np.diff(begin, append=len(ids))
    ordered = _mark_ends(_in_order(flat, order), begin + lengths - 1)
    ordered = _marked(ordered, begin, is_init)
    if out == "padded":
        return padded(ordered, lengths)
    if out == "list":
        return list(ordered.split(lengths.tolist())) if len(lengths) else []
    offsets = torch.from_numpy(np.append(begin, len(ids)))
    return Offsets(ordered, offsets, torch.from_numpy(ids[begin]))


def _numbers(rows: TensorDictBase, key: Key) -> Int | None:
    """Return a column of one number per row, or None if there is no such column."""
    column = rows.get(key, None)
    if column is None:
        return None
    if column.numel() != len(rows):
        raise ArgumentError(
            f"{format_key(key)}: expected one number for each of {len(rows)} rows, got the shape "
            f"{list(column.shape)}."
        )
    found: Int = column.reshape(-1).cpu().numpy()
    return found


def _by_id(ids: Int, step: Int | None) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order of rows by id, then step, and the index at which each id begins in it."""
    order = np.lexsort((ids,) if step is None else (step, ids))
    return order, _begins(ids[order])


def _begins(values: Int) -> NDArray[np.intp]:
    """Return the index at which each run of equal values begins."""
    if not len(values):
        return np.zeros(0, np.intp)
    return np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1)


def _gaps(step: Int, begin: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the ordered rows after which the next row of the same id is not the next step."""
    apart = np.diff(step) != 1
    apart[begin[1:] - 1] = False
    return np.flatnonzero(apart)


def _ended(rows: TensorDictBase) -> NDArray[np.bool_]:
    """Return a mask of the rows that end an episode, and not only a batch."""
    done, cut = rows.get(DONE, None), rows.get(CUT, None)
    if done is None:
        return np.zeros(len(rows), np.bool_)
    ended = done.reshape(len(rows), -1).all(-1)
    if cut is not None:
        ended &= ~cut.reshape(len(rows), -1).any(-1)
    found: NDArray[np.bool_] = ended.cpu().numpy()
    return found


def _chains(
    ids: Int, step: Int, ended: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows ordered by chains of consecutive steps of an id, and where each chain begins.

    Every row is followed by a row of the next step as long as there is one. A row is followed by
    the adjacent row if possible, otherwise by the first row that is left. Rows that end an episode
    are the last to get a successor.
    """
    count = len(ids)
    order, _ = _by_id(ids, step)
    new = np.ones(count, np.bool_)
    new[1:] = (np.diff(ids[order]) != 0) | (np.diff(step[order]) != 0)
    group = np.empty(count, np.int64)  # the number of each set of rows with the same id and step
    group[order] = np.cumsum(new) - 1
    first = order[new]  # a row of each group
    follows = np.zeros(len(first), np.bool_)  # the next group is the next step of the same id
    follows[:-1] = (np.diff(ids[first]) == 0) & (np.diff(step[first]) == 1)

    before = np.arange(count)  # the previous row in the chain; the first row has itself
    adjacent = np.flatnonzero(follows[group[:-1]] & (np.diff(group) == 1) & ~ended[:-1])
    before[adjacent + 1] = adjacent
    open_, alone = follows[group], np.ones(count, np.bool_)
    open_[adjacent], alone[adjacent + 1] = False, False
    earlier, later = np.flatnonzero(open_), np.flatnonzero(alone)
    earlier = earlier[np.lexsort((ended[earlier], group[earlier]))]
    later = later[np.argsort(group[later], kind="stable")]
    _, one, other = np.intersect1d(
        (group[earlier] + 1) * count + _ranks(group[earlier]),
        group[later] * count + _ranks(group[later]),
        assume_unique=True,
        return_indices=True,
    )
    before[later[other]] = earlier[one]

    start = before
    while not np.array_equal(further := start[start], start):
        start = further
    order = np.lexsort((step, start, step[start], ids))
    return order, _begins(start[order])


def _ranks(groups: Int) -> Int:
    """Return the position of each element within its run of equal elements."""
    begin = _begins(groups)
    lengths = np.diff(begin, append=len(groups))
    found: Int = np.arange(len(groups)) - np.repeat(begin, lengths)
    return found


def by_lane(rows: TensorDictBase, lanes: range) -> TensorDict:
    """Return ``rows``, which are ordered by lane, as padded ``[lane, time]`` with a ``"mask"``."""
    counts = np.bincount(rows.get(LANE).cpu().numpy() - lanes.start, minlength=len(lanes))
    return padded(rows, counts)


def padded(rows: TensorDictBase, lengths: Int, lead: tuple[int, ...] | None = None) -> TensorDict:
    """Return consecutive groups of ``rows`` as ``[group, longest]``, padded with zeros.

    ``lead`` are dimensions that replace ``group`` and have as many elements.
    """
    groups, longest = len(lengths), int(lengths.max(initial=0))
    within = np.arange(longest)[None, :] < lengths[:, None]
    at = torch.from_numpy(np.flatnonzero(within))
    full = groups * longest == len(rows)
    size = (*((groups,) if lead is None else lead), longest)

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if full:
            return leaf.reshape(*size, *leaf.shape[1:])
        wide = leaf.new_zeros((groups * longest, *leaf.shape[1:]))
        bits = SIGNED.get(leaf.dtype, leaf.dtype)
        wide.view(bits).index_copy_(0, at.to(leaf.device), leaf.view(bits))
        return wide.view(*size, *leaf.shape[1:])

    out: TensorDict = rows.apply(pad, batch_size=size)
    for level in batch_dims_of(rows):
        out.get(level).batch_size = (*size, *rows.get(level).batch_size[1:])
    out.set(MASK, torch.from_numpy(within).view(size).to(rows.device or "cpu"))
    return out


def _flat(rows: TensorDictBase) -> TensorDictBase:
    if rows.get(TRAJ_IDS, None) is None:
        raise ArgumentError(
            f"rows: expected the column {format_key(TRAJ_IDS)}, got the keys "
            f"{sorted(format_key(key) for key in rows.keys(True, True))}"
        )
    flat = rows if rows.ndim == 1 else rows.reshape(-1)
    mask = flat.get(MASK, None)
    return flat if mask is None else flat[mask.reshape(-1)].exclude(MASK)


def _in_order(rows: TensorDictBase, order: NDArray[np.intp]) -> TensorDictBase:
    if np.array_equal(order, np.arange(len(order))):
        return rows
    at = torch.from_numpy(order)
    out: TensorDictBase = rows.apply(lambda leaf: leaf.index_select(0, at.to(leaf.device)))
    return out


def _mark_ends(rows: TensorDictBase, last: NDArray[np.intp]) -> TensorDictBase:
    done = rows.get(DONE, None)
    if done is None or not len(last):
        return rows
    marked = rows.copy()
    at = torch.from_numpy(last).to(done.device)
    none = torch.zeros(len(rows), dtype=torch.bool, device=done.device)
    cut = rows.get(CUT, none).clone()
    cut[at] |= ~done.reshape(len(rows), -1).any(-1)[at]
    marked.set(CUT, cut)
    return _marked(marked, last, is_done)


def _marked(
    rows: TensorDictBase, at: NDArray[np.intp], which: Callable[[Key, torch.dtype], bool]
) -> TensorDictBase:
    """Return a copy of ``rows``; the columns that ``which`` accepts are True in the rows ``at``."""
    marked = rows.copy()
    for key, leaf in rows.items(True, True):
        if isinstance(leaf, torch.Tensor) and which(as_key(key), leaf.dtype):
            marked.set(key, leaf.clone().index_fill_(0, torch.from_numpy(at).to(leaf.device), 1))
    return marked
