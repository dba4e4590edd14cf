"""Compare random operations on overlays with a plain dict from rows to values."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to

NAMES = ("value", ("next", "relabelled"))
FILL = -7


class OverlayMachine(RuleBasedStateMachine):
    """Storage with two overlays, one of which has values of two numbers."""

    kind: type[DiskStorage] = MemmapStorage
    ring: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tallyroll-overlays-"))
        self.path, self.count = self.folder / "rows", 0
        self.values: dict[Any, dict[int, int]] = {name: {} for name in NAMES}
        """The oracle: for each overlay, the value of each row that has one."""

    @initialize()
    def create(self) -> None:
        options = {"capacity": 200} if self.kind is H5Storage else {"max_size": self.ring}
        self.storage = self.kind(self.path, **options)
        self.storage.extend(trajectory_rows(0, 3, steps=4))
        for name in NAMES:
            self._made(name)

    def _made(self, name: Any) -> Any:
        shape = [] if name == "value" else [2]
        return self.storage.overlay(name, torch.int32, shape, FILL)

    @rule(count=st.integers(1, 7))
    def extend(self, count: int) -> None:
        if self.storage.head + count <= 200:
            self.storage.extend(trajectory_rows(self.storage.head, count, steps=4), ids="fresh")

    @rule(name=st.sampled_from(NAMES), data=st.data(), by_index=st.booleans())
    def write(self, name: Any, data: st.DataObject, by_index: bool) -> None:
        span = self.storage.span
        if not span:
            return
        rows = data.draw(st.lists(st.integers(span.start, span.stop - 1), max_size=6))
        numbers = np.array(rows, np.int64)
        values = np.arange(self.count, self.count + len(rows)).astype(np.int32)
        self.count += len(rows)
        overlay = self.storage.overlay(name)
        given = np.repeat(values[:, None], 2, 1) if overlay.shape else values
        if by_index:
            assert overlay.set(self.storage.index_of(numbers), given) == len(rows)
        else:
            assert overlay.set(rows=numbers, values=torch.from_numpy(given)) == len(rows)
        self.values[name].update(zip(rows, values.tolist(), strict=True))

    @precondition(lambda self: self.ring and self.storage.span.start)
    @rule(name=st.sampled_from(NAMES))
    def write_what_is_gone(self, name: Any) -> None:
        assert self.storage.overlay(name).set(rows=[self.storage.span.start - 1], values=1) == 0

    @precondition(lambda self: self.ring)
    @rule()
    def empty(self) -> None:
        self.storage._empty()

    @rule(back=st.integers(1, 5))
    def rewind(self, back: int) -> None:
        rows = self.storage.head - back
        if rows < self.storage.span.start + 1:
            return
        rewind_to(self.storage.writer, rows, None)
        for values in self.values.values():
            for row in [row for row in values if row >= rows]:
                del values[row]

    @rule()
    def reopen(self) -> None:
        self.storage.close()
        self.storage = self.kind(self.path, mode="append")

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: Any) -> None:
        self.storage.drop_overlay(name)
        self.values[name] = {}
        self._made(name)

    @rule()
    def dump_and_load(self) -> None:
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.unlink(missing_ok=True)
        for beside in self.folder.glob("copy.*"):
            beside.unlink()
        self.storage.dumps(copy)
        with open_storage(copy) as other:
            self._check(other)
        known = {name: dict(values) for name, values in self.values.items()}
        span = self.storage.span
        if not span:
            return
        self.storage.overlay("value")[:] = 3
        self.storage.loads(copy)
        kept = {row: value for row, value in known["value"].items() if row in span}
        self.values = {**known, "value": dict.fromkeys(span, FILL) | kept}

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "storage"):
            return
        assert set(self.storage.overlays) == set(NAMES)
        self._check(self.storage)
        with open_storage(self.path) as reader:
            self._check(reader)

    def _check(self, storage: DiskStorage) -> None:
        rows = np.arange(storage.span.start, storage.span.stop)
        index = storage.index_of(rows)
        for name in NAMES:
            overlay = storage.overlay(name)
            want = [self.values[name].get(row, FILL) for row in rows.tolist()]
            wanted = torch.tensor(want, dtype=torch.int32)
            if overlay.shape:
                wanted = wanted[:, None].expand(-1, 2)
            assert overlay.get(rows=rows).equal(wanted)
            assert overlay[index].equal(wanted)
            assert storage.get(index, [name, "observation"])[name].equal(wanted)
            assert storage.in_order([name])[name].equal(wanted)
            column = torch.from_numpy(np.array(storage.column(name)))
            assert column[storage.slots_of(rows)].equal(wanted)
        if len(rows):
            found = storage.with_overlays(*NAMES).get(index)
            assert found["observation"].ravel().tolist() == rows.tolist()
            assert found["value"].tolist() == [
                self.values["value"].get(row, FILL) for row in rows.tolist()
            ]

    def teardown(self) -> None:
        if hasattr(self, "storage"):
            self.storage.close()
            assert [
                str(each) for each in verify(self.path).findings if each.check == "overlays"
            ] == []
        shutil.rmtree(self.folder)


few = settings(
    max_examples=int(os.environ.get("TALLYROLL_OVERLAYS", "3")),
    stateful_step_count=12,
    deadline=None,
)


class RingMachine(OverlayMachine):
    ring = 9


class H5Machine(OverlayMachine):
    kind = H5Storage


class ZarrMachine(OverlayMachine):
    kind = ZarrStorage


for machine in (OverlayMachine, RingMachine, H5Machine, ZarrMachine):
    machine.TestCase.settings = few

TestMemmap = OverlayMachine.TestCase
TestRing = RingMachine.TestCase
TestH5 = H5Machine.TestCase
TestZarr = ZarrMachine.TestCase
