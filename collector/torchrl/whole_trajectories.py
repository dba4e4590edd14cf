"""Whole trajectories put together of the batches in which their rows come."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.collector.batches.layouts import padded, split_trajectories
from tallyroll.storage.rows.keys import CUT, as_key, is_done


class WholeTrajectories:
    """Holds back what is not complete.

    Args:
        padded_ones: batches are ``[trajectory, time]`` with a mask, or else rows.
    """

    def __init__(self) -> None:
        self._open: dict[int, list[TensorDictBase]] = {}
        self._whole: list[TensorDictBase] = []

    def __len__(self) -> int:
        return len(self._whole)

    def add(self, rows: TensorDictBase, *, ends_all: bool) -> None:
        """Take the rows of a batch; ``ends_all``: what is open now will never be complete."""
        pieces = split_trajectories(rows, out="offsets")
        lengths = np.diff(pieces.offsets.numpy()).tolist()
        for key, piece in zip(pieces.traj_ids.tolist(), pieces.rows.split(lengths), strict=True):
            self._open.setdefault(key, []).append(own_ends(piece))
            if not bool(piece.get(CUT)[-1]):
                self._whole.append(torch.cat(self._open.pop(key)))
        if ends_all:
            self._open.clear()

    def forget(self) -> None:
        """All lanes begin anew."""
        self._open.clear()
        self._whole.clear()

    def first(self, count: int) -> Sequence[TensorDictBase]:
        """The first ``count`` that are complete."""
        return self._whole[:count]

    def drop(self, count: int) -> None:
        """The first ``count`` are done with."""
        del self._whole[:count]


def own_ends(rows: TensorDictBase) -> TensorDictBase:
    """Rows whose done is the environment's own: not where the batch alone ended."""
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
    """``[trajectory, time]`` with a mask, or with ``"cat"`` one after the other."""
    rows = torch.cat(list(trajectories))
    if form == "cat":
        return rows
    return padded(rows, np.array([len(each) for each in trajectories]))
