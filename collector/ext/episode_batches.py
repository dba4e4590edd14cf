"""Batches of whole episodes, for policy gradients that need complete returns."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import takewhile

import torch
from tensordict import TensorDict, TensorDictBase, cat

from tallyroll.collector.errors import ArgumentError
from tallyroll.storage.rows.keys import (
    CUT,
    DONE,
    LANE,
    MASK,
    NEXT,
    STEP,
    TRAJ_IDS,
    Key,
    as_key,
    format_key,
)


class EpisodeBatches(Iterator[TensorDict]):
    """Iterator that regroups the batches of a collector to whole episodes.

    Each item has the rows of ``episodes_per_batch`` episodes, a TensorDict [rows], one episode
    after the other in the order of their ids, which is the order in which they started. An episode
    is yielded after all episodes that started before it, so short episodes are not favoured. When
    the batches end, a last item may have fewer episodes. ``("next", "done")`` is True at the last
    row of each episode only, ``("collector", "cut")`` nowhere, and ``is_init`` at first rows only.

    An episode that is cut, because its lane was reset or its worker was lost, is left out, as is
    one whose first step is not among the batches. The rows of episodes that have not ended are
    kept until they do; at the end of a run, those rows are only in its storage.

    The iterator asks for the next batch when it needs it. If the policy is updated between two
    items, rows of the next one may come from older versions; ``("collector", "policy_version")``
    has the version of each row.

    Args:
        batches: a collector, or its batches, in any layout.
        episodes_per_batch: the number of episodes of an item.

    Raises:
        ArgumentError: the number is not positive, a batch lacks the columns of a collector, or
            ``set_truncated`` has marked its cuts as ends.

    Examples:
        >>> from tallyroll.collector import EpisodeBatches, SyncCollector
        >>> with SyncCollector(
        ...     "CartPole-v1", num_envs=4, frames_per_batch=100, total_frames=1000, seed=0
        ... ) as collector:
        ...     for batch in EpisodeBatches(collector, 8):
        ...         ended = int(batch["next", "done"].sum())
        ...         assert ended <= 8
    """

    def __init__(self, batches: Iterable[TensorDictBase], episodes_per_batch: int) -> None:
        if type(episodes_per_batch) is not int or episodes_per_batch < 1:
            raise ArgumentError(
                f"episodes_per_batch: expected a whole number above 0, got {episodes_per_batch!r}."
            )
        self._batches, self._count = iter(batches), episodes_per_batch
        self._held: dict[int, list[TensorDictBase]] = {}
        """Rows of the episodes that were not yielded, by id."""
        self._ended: set[int] = set()
        """The ids of held episodes that have ended."""
        self._open: dict[int, int] = {}
        """The newest episode of each lane."""
        self.cut = 0
        """Number of episodes that were left out so far."""

    @property
    def held_rows(self) -> int:
        """Number of rows that are kept until their episodes can be yielded."""
        return sum(len(piece) for pieces in self._held.values() for piece in pieces)

    def __next__(self) -> TensorDict:
        while True:
            first = heapq.nsmallest(self._count, self._held)
            ready = [*takewhile(self._ended.__contains__, first)]
            if len(ready) == self._count:
                return self._take(ready)
            batch = next(self._batches, None)
            if batch is None:
                break
            self._add(batch)
        if not ready:
            raise StopIteration
        return self._take(ready)

    def _take(self, ids: list[int]) -> TensorDict:
        pieces = [piece for id in ids for piece in self._held.pop(id)]
        self._ended.difference_update(ids)
        return cat(pieces)

    def _add(self, batch: TensorDictBase) -> None:
        keys = batch.keys(include_nested=True)
        if missing := [key for key in (TRAJ_IDS, LANE, STEP, CUT, DONE) if key not in keys]:
            raise ArgumentError(
                f"batches: expected the column {format_key(missing[0])}, got a batch without it. "
                "Pass a collector, or its batches."
            )
        rows = batch.reshape(-1)
        if MASK in keys:
            rows = rows[rows[MASK].reshape(-1)]
        ids, order = rows[TRAJ_IDS].reshape(-1).sort(stable=True)
        found, counts = ids.unique_consecutive(return_counts=True)
        for id, index in zip(found.tolist(), order.split(counts.tolist()), strict=True):
            self._add_episode(id, _as_stored(rows[index]))

    def _add_episode(self, id: int, rows: TensorDictBase) -> None:
        """Add rows of an episode, in the order of its steps."""
        lane, step = int(rows[LANE].reshape(-1)[0]), int(rows[STEP].reshape(-1)[0])
        before = self._open.get(lane)
        if before != id:
            self._open[lane] = id
            if before in self._held and before not in self._ended:
                del self._held[before]
                self.cut += 1
            if step:
                self.cut += 1
            else:
                self._held[id] = []
        if id in self._held:
            self._held[id].append(rows)
            if bool(rows[DONE][-1].all()):
                self._ended.add(id)


def _as_stored(rows: TensorDictBase) -> TensorDictBase:
    """Undo the marks of a batch at the first and last of its rows of an episode, in place."""
    cut, goes_on = rows[CUT].reshape(-1), rows[STEP].reshape(-1) > 0
    for key in list(rows.keys(include_nested=True, leaves_only=True)):
        path = as_key(key)
        if path[-1] == "is_init":
            rows[path] = rows[path] & ~_like(goes_on, rows[path])
        elif path[0] == NEXT and path[-1] == "done":
            rows[path] = rows[path] & ~(_like(cut, rows[path]) & ~_own_end(rows, path))
    rows[CUT] = torch.zeros_like(rows[CUT])
    return rows


def _own_end(rows: TensorDictBase, done: Key) -> torch.Tensor:
    """Return the ends that the environment reported beside ``done``."""
    flags = [rows.get((*done[:-1], name), None) for name in ("terminated", "truncated")]
    found = torch.zeros_like(rows[done])
    for flag in flags:
        if flag is not None:
            found = found | flag
    if done == DONE and bool((found.reshape(len(rows), -1).any(1) & rows[CUT].reshape(-1)).any()):
        raise ArgumentError(
            "batches: expected truncated only where the environment reported it, got cuts that are "
            "marked as truncated. Leave set_truncated out."
        )
    return found


def _like(marks: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    return marks.view(-1, *(1 for _ in flag.shape[1:]))
