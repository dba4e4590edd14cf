"""Rows of random lanes, and a plain loop over them that computes their trajectories."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict


@dataclass(frozen=True)
class Model:
    """Rows in storage order; arrays are [n]."""

    ids: np.ndarray
    steps: np.ndarray
    lane: np.ndarray
    terminated: np.ndarray | None = None
    truncated: np.ndarray | None = None

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        *,
        rows: int,
        lanes: int,
        mean_length: float = 12.0,
        skip: float = 0.3,
        restart: float = 0.01,
        lane_by_lane: bool = False,
    ) -> Model:
        """Return batched steps of `lanes` lanes, some of which are left out at random.

        Occasionally all lanes start over, as after a restart. With `lane_by_lane` the rows of each
        batch (of several steps) are sorted by lane.
        """
        found: list[tuple[int, int, int, bool, bool]] = []
        count, step, base = np.zeros(lanes, int), np.zeros(lanes, int), 0
        while len(found) < rows:
            if rng.random() < restart:
                base = base + int(count.max() + 1) * lanes
                count[:], step[:] = 0, 0
            batch = []
            for _ in range(int(rng.integers(1, 5)) if lane_by_lane else 1):
                for lane in range(lanes):
                    if rng.random() < skip:
                        continue
                    ends = rng.random() < 1 / mean_length
                    kind = rng.integers(4) if ends else 0
                    row = (base + count[lane] * lanes + lane, step[lane], lane)
                    batch.append((*map(int, row), kind in (1, 3), kind in (2, 3)))
                    step[lane] += 1
                    if ends:  # kind 0: a cut
                        count[lane] += 1
                        step[lane] = 0
            found += sorted(batch, key=lambda row: row[2]) if lane_by_lane else batch
        columns = [np.array(column) for column in zip(*found[:rows], strict=True)]
        return cls(columns[0], columns[1], columns[2].astype(np.int32), columns[3], columns[4])

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def rewards(self) -> np.ndarray:
        """One reward per row, exact in float32."""
        return ((7 * np.arange(len(self)) + 3 * self.ids) % 101 - 50) / 4

    def trajectories(self) -> dict[int, list[int]]:
        """Return the rows of each trajectory, in the order of their first rows."""
        found = defaultdict(list)
        for row, id in enumerate(self.ids.tolist()):
            found[id].append(row)
        return dict(found)

    @cached_property
    def _next(self) -> list[int]:
        found = [-1] * len(self)
        for rows in self.trajectories().values():
            for row, after in pairwise(rows):
                if self.steps[after] == self.steps[row] + 1:
                    found[row] = after
        return found

    def next_of(self, row: int) -> int:
        """Return the row of the next step, or -1."""
        return self._next[row]

    def stretches(self, first: int = 0) -> list[list[int]]:
        """Return sequences of rows from `first` on that follow one another step by step."""
        found: list[list[int]] = []
        for rows in self.trajectories().values():
            open = False
            for row in rows:
                if row < first:
                    continue
                if open and self._next[found[-1][-1]] == row:
                    found[-1].append(row)
                else:
                    found.append([row])
                open = True
        return found

    def slices(self, length: int, first: int = 0) -> list[tuple[int, ...]]:
        """Return all slices of that length among the rows from `first` on."""
        return [
            tuple(rows[at : at + length])
            for rows in self.stretches(first)
            for at in range(len(rows) - length + 1)
        ]

    def ended(self, row: int) -> bool:
        """Return whether the environment ended the trajectory with this row."""
        assert self.terminated is not None
        assert self.truncated is not None
        return bool(self.terminated[row] or self.truncated[row])

    def rows(self, start: int = 0, stop: int | None = None) -> TensorDict:
        """Return the rows as a collector stores them. Observations contain the row number."""
        part = slice(start, len(self) if stop is None else stop)
        number = torch.arange(len(self))[part]
        terminated, truncated = (
            torch.from_numpy(np.ascontiguousarray(flags[part]))[:, None]
            for flags in (self.terminated, self.truncated)
            if flags is not None
        )
        return TensorDict(
            {
                "observation": number[:, None].double(),
                "action": number % 2,
                "next": {
                    "observation": number[:, None].double() + 0.5,
                    "reward": torch.from_numpy(self.rewards[part]).float()[:, None],
                    "done": terminated | truncated,
                    "terminated": terminated,
                    "truncated": truncated,
                },
                "collector": {
                    "traj_ids": torch.from_numpy(self.ids[part].copy()),
                    "step": torch.from_numpy(self.steps[part].copy()),
                    "lane": torch.from_numpy(self.lane[part].copy()),
                    "policy_version": number // 10,
                },
            },
            batch_size=[len(number)],
        )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw models of up to 150 rows."""
    return Model.random(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        rows=draw(st.integers(1, 150)),
        lanes=draw(st.integers(1, 6)),
        mean_length=draw(st.sampled_from([1.0, 3.0, 20.0])),
        skip=draw(st.sampled_from([0.0, 0.4])),
        restart=draw(st.sampled_from([0.0, 0.05])),
        lane_by_lane=draw(st.booleans()),
    )
