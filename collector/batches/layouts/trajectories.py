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
    is_done,
    is_init,
    spell,
)

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Offsets:
    """Trajectories as slices of rows in order.

    ``rows`` stands trajectory by trajectory, in time within each; trajectory ``i`` is
    ``rows[offsets[i] : offsets[i + 1]]`` and has the id ``traj_ids[i]``.
    """

    rows: TensorDictBase
    offsets: torch.Tensor
    traj_ids: torch.Tensor


@overload
def split_trajectories(rows: TensorDictBase, *, out: Literal["padded"] = ...) -> TensorDict: ...
@overload
def split_trajectories(rows: TensorDictBase, *, out: Literal["list"]) -> list[TensorDictBase]: ...
@overload
def split_trajectories(rows: TensorDictBase, *, out: Literal["offsets"]) -> Offsets: ...
def split_trajectories(
    rows: TensorDictBase, *, out: Literal["padded", "list", "offsets"] = "padded"
) -> TensorDict | list[TensorDictBase] | Offsets:
    """Split rows by ``("collector", "traj_ids")``, in ascending order of the ids.

    Args:
        rows: transitions in any order and of any batch size; ids need not be adjacent. Rows
            where ``("collector", "mask")`` is False are left out.
        out: ``"padded"`` gives ``[trajectory, time]`` with ``("collector", "mask")``;
            ``"list"`` a TensorDict ``[time]`` a trajectory; ``"offsets"`` an :class:`Offsets`.

    Within a trajectory rows are ordered by ``("collector", "step")`` where it is there, else as
    they come. At its last row ``("next", "done")``, and every bool ``"done"`` below it, is True,
    and ``("collector", "cut")`` says whether the trajectory goes on beyond these rows, so that
    value estimators stop there. At its first row every bool ``"is_init"`` is True, where recurrent
    modules begin from the state that is stored there.

    Raises:
        ArgumentError: there are no trajectory ids.
    """
    if out not in ("padded", "list", "offsets"):
        raise ArgumentError(f'out is "padded", "list" or "offsets", got {out!r}')
    flat = _flat(rows)
    found = (flat.get(key, None) for key in (STEP, TRAJ_IDS))
    keys = [column.reshape(-1).cpu().numpy() for column in found if column is not None]
    order = np.lexsort(keys)
    ids = keys[-1][order]
    begin = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    lengths = np.diff(begin, append=len(ids))
    ordered = _mark_ends(_in_order(flat, order), begin + lengths - 1)
    ordered = _marked(ordered, begin, is_init)
    if out == "padded":
        return padded(ordered, lengths)
    if out == "list":
        return list(ordered.split(lengths.tolist())) if len(lengths) else []
    offsets = torch.from_numpy(np.append(begin, len(ids)))
    return Offsets(ordered, offsets, torch.from_numpy(ids[begin]))


def by_lane(rows: TensorDictBase, lanes: range) -> TensorDict:
    """Return rows, in order of ``lanes``, as ``[lane, time]``, padded, with a ``"mask"``."""
    counts = np.bincount(rows.get(LANE).cpu().numpy() - lanes.start, minlength=len(lanes))
    return padded(rows, counts)


def padded(rows: TensorDictBase, lengths: Int, lead: tuple[int, ...] | None = None) -> TensorDict:
    """Return consecutive groups of ``rows`` as ``[group, longest]``, padded with zeros.

    ``lead`` are other dimensions in the place of ``group``, of as many elements.
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
            f"expected rows with {spell(TRAJ_IDS)}, got the keys "
            f"{sorted(spell(key) for key in rows.keys(True, True))}"
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
    """``rows`` where the columns of a kind are True ``at`` some."""
    marked = rows.copy()
    for key, leaf in rows.items(True, True):
        if isinstance(leaf, torch.Tensor) and which(as_key(key), leaf.dtype):
            marked.set(key, leaf.clone().index_fill_(0, torch.from_numpy(at).to(leaf.device), 1))
    return marked
