"""Test the memory lent to slices: it is clean when it is reused, and it is bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, ZarrStorage
from tallyroll.storage.engine import columns as private_rows
from tallyroll.storage.files.mapping import Region
from tallyroll.storage.storages import DiskStorage

from storage_contract import arrays, assert_rows, rows


@pytest.fixture(autouse=True)
def nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the copying of small slices."""
    monkeypatch.setattr(private_rows, "_COPIED_NBYTES", 0)


def address(slice_: TensorDict) -> int:
    return int(slice_["id"].data_ptr())


def test_an_area_comes_back_clean_when_nothing_refers_to_it(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows", capacity=1000) as storage:
        storage.extend(arrays(0, 1000))
        first = storage.get(slice(None))
        place, row = address(first), first["wide"][3]
        first["wide"].zero_()
        del first
        other = storage.get(slice(None))
        assert address(other) != place, "a row of it is still there"
        assert not row.any()
        del row
        again = storage.get(slice(None))
        assert address(again) == place
        assert (again == rows(0, 1000)).all()
        assert (other == rows(0, 1000)).all()


def test_beyond_the_maps_that_may_be_held_slices_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_rows, "_MOST_MAPS", 12)
    made: list[int] = []
    make = Region.__init__
    monkeypatch.setattr(
        Region, "__init__", lambda self, *given: made.append(1) or make(self, *given)
    )
    with MemmapStorage(tmp_path / "rows", capacity=1000) as storage:
        storage.extend(arrays(0, 1000))
        made.clear()
        slices = [storage.get(slice(start, None)) for start in range(10)]
        assert len(made) == 3, "of 4 maps each"
        for start, each in enumerate(slices):
            assert (each == rows(start, 1000 - start)).all()
            each["wide"].zero_()
        assert_rows(storage, 1000)
        slices.clear()
        del each
        storage.get(slice(None))
        assert len(made) == 3


@pytest.mark.parametrize("made", [MemmapStorage, ZarrStorage])
def test_a_storage_that_grows_is_seen_to_its_end(
    tmp_path: Path, made: Callable[..., DiskStorage]
) -> None:
    """The storage adds chunks to its area, in formats that have them."""
    with made(tmp_path / "rows") as storage:
        head = 0
        for count in (10, 100_000, 5, 90_000, 200_000):
            storage.extend(arrays(head, count))
            head += count
            taken = storage.get(slice(None))
            assert taken["id"].tolist() == list(range(head))
            taken["id"].zero_()
            del taken
            assert storage.get(slice(head - 3, None))["wide"][:, 0].tolist() == [
                0.5 * row for row in range(head - 3, head)
            ]


def test_what_is_written_to_a_slice_of_a_ring_is_seen_there_alone(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=1000) as ring:
        ring.extend(rows(0, 1000))
        taken, column = ring.get(slice(None)), ring.column("id")
        taken["id"].add_(0)
        column.flags.writeable = True
        column[:] = -1
        for start in range(1000, 2500, 500):
            ring.extend(rows(start, 500))
        wanted = [*range(2000, 2500), *range(1500, 2000)]
        assert ring.get(slice(None))["id"].tolist() == wanted
        assert ring.get(list(range(1000)))["id"].tolist() == wanted
        assert ring.column("id").tolist() == wanted
        assert taken["id"].tolist() == list(range(1000))


def test_rows_of_a_ring_may_be_written_to_it_again(tmp_path: Path) -> None:
    """Each row overwrites the next one."""
    with MemmapStorage(tmp_path / "ring", max_size=1000) as ring:
        ring.extend(rows(0, 1000))
        ring.extend(rows(1000, 1))
        gone = [ring.get(slice(None)) for _ in range(3)]
        del gone
        ring.extend(ring.get(slice(None))[:-1])
        shown = ring.get(slice(None))
        assert shown["id"].tolist() == [1000, 1000, *range(1, 999)]
        assert torch.equal(shown["next", "id"], shown["id"] + 1)
