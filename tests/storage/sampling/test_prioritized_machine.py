"""Compare `PrioritizedSampler` over rings, rewinds and restarts with a plain dictionary of rows.

TALLYROLL_EXAMPLES=1000 runs that many examples.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, PrioritizedSampler, fast_paths, open_storage
from tallyroll.storage.readers.row_reader import rows_at
from tallyroll.storage.stores.rewinds import rewind_to

ALPHA, BETA, EPS = 0.7, 0.5, 1e-3
MEMORY = Path("/dev/shm")
"""In memory, because each save waits for the disk."""
Row = tuple[int, int]
"""The number of a row, and a count of the rows that have had this number."""


def leaf_of(priority: float) -> np.float32:
    return np.float32((np.float64(priority) + EPS) ** ALPHA)


class Machine(RuleBasedStateMachine):
    """The dictionary has the leaf of every existing row that the sampler has seen."""

    @initialize(
        ring=st.sampled_from([0, 1, 7, 16, 40]), kernel=st.booleans(), seed=st.integers(0, 2**31)
    )
    def begin(self, ring: int, kernel: bool, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.path = Path(self.folder.name) / "rows"
        self.ring, self.off = ring, () if kernel else ("kernel",)
        self.generator = torch.Generator().manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.storage: Any = MemmapStorage(self.path, max_size=ring or None)
        self.births: list[int] = []
        self.leaves: dict[Row, np.float32] = {}
        self.largest = leaf_of(1)
        self.batches: list[list[Row]] = []
        self.drawn: dict[int, Row] = {}
        self.gone = self.floor = self.births_so_far = 0
        self.saved: tuple[dict[Row, np.float32], np.float32] | None = None
        self.make()

    def make(self) -> None:
        with fast_paths.switched_off(*self.off):
            self.sampler = PrioritizedSampler(
                self.storage, ALPHA, BETA, EPS, generator=self.generator
            )
        self.gone = 0

    def teardown(self) -> None:
        if hasattr(self, "storage"):
            self.storage.close()
            self.folder.cleanup()

    @property
    def rows(self) -> list[Row]:
        """Return all existing rows."""
        return [(number, self.births[number]) for number in self.storage.span]

    def follow(self) -> None:
        """Do what the sampler does at its next call."""
        largest = max(self.leaves.values(), default=self.largest)
        there = set(self.rows)
        left = {row: leaf for row, leaf in self.leaves.items() if row in there}
        if self.storage.reader.floor != self.floor:
            self.floor = self.storage.reader.floor
            if not left and not self.rewound:
                largest = leaf_of(1)
        self.rewound = False
        self.leaves = {row: left.get(row, largest) for row in self.rows}
        self.largest = largest

    rewound = False

    def check(self) -> None:
        priorities = self.sampler._priorities
        expected = [self.leaves[row] for row in self.rows]
        assert priorities.leaves().tolist() == expected
        assert priorities.total > 0 or not expected
        assert self.sampler.gone == self.gone

    # --- rows -------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 60))
    def write(self, count: int) -> None:
        for start in range(0, count, self.ring or count):
            part = min(self.ring or count, count - start)
            self.storage.extend(TensorDict({"x": torch.zeros(part)}, [part]))
            self.births += range(self.births_so_far, self.births_so_far + part)
            self.births_so_far += part

    @precondition(lambda self: self.ring and len(self.storage))
    @rule()
    def empty(self) -> None:
        self.storage._empty()

    @precondition(lambda self: len(self.storage))
    @rule(part=st.floats(0, 1))
    def rewind(self, part: float) -> None:
        kept = int(part * self.storage.head)
        if kept == self.storage.head:
            return
        rewind_to(self.storage.writer, kept, None)
        del self.births[kept:]
        self.rewound = True

    # --- draws and updates ------------------------------------------------------------------------

    @precondition(lambda self: len(self.storage))
    @rule(count=st.integers(1, 30), buffer=st.booleans())
    def draw(self, count: int, buffer: bool) -> None:
        if buffer:
            index, info = self.sampler.sample(self.storage, count)
            rows, weights = info["collector", "row"].numpy(), info["priority_weight"].numpy()
            assert np.array_equal(
                rows_at(self.storage.reader, index.numpy(), self.storage.span), rows
            )
        else:
            rows, weights = self.sampler.draw(count)
            index = torch.from_numpy(self.storage.index_of(rows))
        self.follow()
        drawn = [(number, self.births[number]) for number in rows.tolist()]
        leaves = np.array([self.leaves[row] for row in drawn])
        least = min(self.leaves.values())
        assert np.array_equal(weights, (leaves / least) ** np.float32(-BETA))
        # A number that is drawn again refers to the new row.
        self.batches = [
            batch
            for batch in self.batches
            if not any(old in dict(drawn) and dict(drawn)[old] != birth for old, birth in batch)
        ]
        self.batches.append(drawn)
        self.drawn |= dict(zip(index.tolist(), drawn, strict=True))
        self.check()

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def update_a_batch(self, data: Any) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        self.update(batch, lambda given: self.sampler.update_rows([n for n, _ in batch], given))

    @precondition(lambda self: self.drawn)
    @rule(data=st.data())
    def update_by_index(self, data: Any) -> None:
        index = data.draw(st.lists(st.sampled_from(sorted(self.drawn)), min_size=1, max_size=20))
        batch = [self.drawn[each] for each in index]
        self.update(batch, lambda given: self.sampler.update_priority(torch.tensor(index), given))

    def update(self, batch: list[Row], call: Callable[[np.ndarray], None]) -> None:
        given = self.rng.pareto(1.0, len(batch)) * (self.rng.random(len(batch)) < 0.9)
        call(given)
        self.follow()
        for row, priority in zip(batch, given.tolist(), strict=True):
            if row in self.leaves:
                self.leaves[row] = leaf_of(priority)
            else:
                self.gone += 1
        self.check()

    # --- restarts ---------------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        self.sampler.save()
        if self.storage.reader.initialised:
            self.follow()
            self.saved = dict(self.leaves), max(self.leaves.values(), default=self.largest)

    @precondition(lambda self: len(self.storage))
    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        if killed:  # changes since the last save are lost
            self.storage.writer.closing.clear()
            self.storage.close()
        else:
            self.follow()
            self.saved = dict(self.leaves), max(self.leaves.values(), default=self.largest)
            self.storage.close()
        self.storage = open_storage(self.path, "append")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if killed else "error")
            self.make()
        self.batches, self.drawn, self.rewound = [], {}, False
        self.floor = self.storage.reader.floor
        kept, self.largest = self.saved or ({}, leaf_of(1))
        there = set(self.rows)
        left = {row: leaf for row, leaf in kept.items() if row in there}
        largest = max(left.values(), default=self.largest)
        self.leaves = {row: left.get(row, largest) for row in self.rows}
        self.sampler._priorities.follow()
        self.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=int(os.environ.get("TALLYROLL_EXAMPLES", "12")),
    stateful_step_count=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
