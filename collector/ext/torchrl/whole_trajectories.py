"""Whole trajectories, put together from the batches in which their rows come."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.collector.batches.layouts.trajectories import padded, split_trajectories
from tallyroll.storage.rows.keys import CUT, as_key, is_done


class WholeTrajectories:
    """Trajectories that are complete, and the rows of those that are not yet."""

    def __init__(self) -> None:
        self._open: dict[int, list[TensorDictBase]] = {}
        self._whole: list[TensorDictBase] = []

    def __len__(self) -> int:
        return len(self._whole)

    def add(self, rows: TensorDictBase, *, ends_all: bool) -> None:
        """Add the rows of a batch; ``ends_all``: open trajectories will never be complete."""
        pieces = split_trajectories(rows, out="offsets")
        lengths = np.diff(pieces.offsets.numpy()).tolist()
        for key, piece in zip(pieces.traj_ids.tolist(), pieces.rows.split(lengths), strict=True):
            self._open.setdefault(key, []).append(own_ends(piece))
            if not bool(piece.get(CUT)[-1]):
                self._whole.append(torch.cat(self._open.pop(key)))
        if ends_all:
            self._open.clear()

    def forget(self) -> None:
        """Drop all rows: every lane begins a new trajectory."""
        self._open.clear()
        self._whole.clear()

    def first(self, count: int) -> Sequence[TensorDictBase]:
        """Return the first ``count`` complete trajectories."""
        return self._whole[:count]

    def drop(self, count: int) -> None:
        """Drop the first ``count`` complete trajectories."""
        del self._whole[:count]


def own_ends(rows: TensorDictBase) -> TensorDictBase:
    """Return ``rows`` with the environment's own done: False where only the batch ended."""
    cut = rows.get(CUT)
    if not bool(cut.any()):
        return rows
    rows = rows.copy()
    for key, leaf in list(rows.items(True, True)):
        if is_done(as_key(key), leaf.dtype):
            rows.set(key, leaf & ~cut.view(-1, *[1] * (leaf.ndim - 1)))
    rows.set(CUT, torch.zeros_like(cut))
    return rows


def laid_out(trajectories: Sequence[TensorDictBase], form: str | None) -> TensorDictBase:
    """Lay out as ``[trajectory, time]`` with a mask, or with ``"cat"`` one after the other."""
    rows = torch.cat(list(trajectories))
    if form == "cat":
        return rows
    return padded(rows, np.array([len(each) for each in trajectories]))
