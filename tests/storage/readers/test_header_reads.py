"""Test how often a read of rows reads the counts in the header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tallyroll.storage import DiskStorage, MemmapStorage, open_storage
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.files.commit_header import Header

RING = 30
READS: dict[str, Any] = {
    "one row": lambda storage: storage.get(-1),
    "random rows": lambda storage: storage.get(torch.tensor([3, 0, 7])),
    "some columns": lambda storage: storage.get(torch.tensor([3, 0, 7]), ["observation"]),
    "a slice": lambda storage: storage.get(slice(2, 20, 3)),
    "all rows": lambda storage: storage.get(slice(None)),
    "into reused memory": lambda storage: storage.get(
        torch.tensor([3, 0, 7]), out=storage.reused(3)
    ),
}
LENGTH_OF_RING = ["head", "reserve", "head"]
"""`head` is read twice because `reserve` must belong to the same moment."""


@pytest.fixture(params=[None, RING], ids=["growing", "ring"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemmapStorage]:
    with MemmapStorage(tmp_path / "rows", max_size=request.param) as storage:
        for start in range(0, 45, 5):
            storage.extend(trajectory_rows(start, 5, steps=5))
        yield storage


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the counts in the order in which they are read, of any header."""
    found: list[str] = []
    for name in ("head", "reserve", "floor", "rewinds", "counts"):
        real = vars(Header)[name]

        def get(header: Header, name: str = name, real: property = real) -> Any:
            count = real.__get__(header)
            if count is not None:  # `counts` of a reader
                found.append(name)
            return count

        monkeypatch.setattr(Header, name, property(get, real.fset))
    return found


def once(storage: DiskStorage, reads: list[str], read: Any) -> list[str]:
    """Return the counts that ``read`` reads when all caches are filled."""
    read(storage)
    reads.clear()
    read(storage)
    return reads


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_writer_reads_its_counts_once(
    storage: MemmapStorage, reads: list[str], read: Any
) -> None:
    counts = ["floor", "counts"] if storage.ring else ["head"]
    assert once(storage, reads, read) == ["rewinds", *counts, "rewinds"]


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_reader_reads_the_counts_once_before_the_copy_and_once_after_it(
    storage: MemmapStorage, reads: list[str], read: Any
) -> None:
    """After the copy, it reads `reserve` and `rewinds`.

    They detect overwritten and rewound rows.
    """
    with open_storage(storage.path) as reader:
        found = once(reader, reads, read)
    if not storage.ring:
        assert found == ["rewinds", "head", "rewinds"]
        return
    if read is READS["into reused memory"]:
        assert found.pop(0) == "rewinds"  # such a ring does not take the fast path
    assert found == ["rewinds", "floor", *LENGTH_OF_RING, "reserve", "rewinds"]


def test_a_sample_reads_the_counts_once_besides_the_sampler(
    storage: MemmapStorage, reads: list[str]
) -> None:
    """TorchRL's sampler reads the length twice before it reads rows."""
    with open_storage(storage.path) as reader:
        buffer = TensorDictReplayBuffer(storage=reader, batch_size=4)
        found = once(reader, reads, lambda _: buffer.sample())
    length = LENGTH_OF_RING if storage.ring else ["head"]
    first, after = (["floor"], ["reserve"]) if storage.ring else ([], [])
    assert found == [*length, *length, "rewinds", *first, *length, *after, "rewinds"]
