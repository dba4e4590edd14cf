"""Test that `verify` recomputes stored statistics, including those of packed rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.ext.statistics.computation import ColumnAccumulator
from tallyroll.storage.ext.statistics.statistics_file import place_of, read_whole, write_saved
from tallyroll.storage.ext.verification.findings import Finding
from tallyroll.storage.stores.rewinds import rewind_to

COUNT = 60


def rows_of(count: int, seed: int) -> TensorDict:
    """Return rows of one lane with numbers far from 0, NaNs, infinities and bytes."""
    pick, at = torch.Generator().manual_seed(seed), torch.arange(count)
    wild = torch.randn(count, 2, generator=pick)
    wild[at % 7 == 2, 1] = torch.nan
    endless = torch.randn(count, generator=pick)
    endless[5] = torch.inf
    ids = {"traj_ids": at // 9 + 100 * seed, "step": at % 9, "lane": torch.zeros(count).int()}
    return TensorDict(
        {
            "wild": wild,
            "far": torch.randn(count, generator=pick, dtype=torch.float64) + 1e9,
            "endless": endless,
            "byte": torch.randint(-128, 128, (count, 2), generator=pick, dtype=torch.int8),
            "next": {"terminated": at % 9 == 8},
            "collector": ids,
        },
        [count],
    )


def made(path: Path) -> Path:
    """Make a storage of two runs whose statistics were computed in parts."""
    with MemmapStorage(path) as storage:
        for seed in range(4):
            storage.extend(rows_of(COUNT, seed))
            if seed == 1:
                storage.writer.runs.write([{"first_row": 0}, {"first_row": 2 * COUNT}])
            storage.statistics()
            if seed == 2:
                storage.statistics(["far"])
    return path


def found(path: Path, **more: Any) -> list[Finding]:
    report = verify(path, **more)
    assert ("statistics" in report.checked) != ("statistics" in report.skipped)
    return [each for each in report.findings if each.check == "statistics"]


@pytest.mark.parametrize("pieces", [2**20, 16])
def test_what_was_counted_in_parts(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path / "rows")
    monkeypatch.setattr("tallyroll.storage.ext.statistics.computation._AT_ONCE", pieces)
    told: list[tuple[int, int]] = []
    assert found(path, progress=lambda *of: told.append(of)) == []
    assert told[-1][0] <= told[-1][1]
    report = verify(path)
    assert "statistics" in report.checked
    assert "statistics" in verify(path, skip=["statistics"]).skipped


def add(name: str, by: float) -> Callable[[ColumnAccumulator], None]:
    def change(kept: ColumnAccumulator) -> None:
        kept.of_runs[name][1, 0] += by

    return change


def of_bytes(kept: ColumnAccumulator) -> None:
    assert kept.of_bytes is not None
    one, other = np.flatnonzero(kept.of_bytes[0])[:2]
    kept.of_bytes[0, one] -= 1
    kept.of_bytes[0, other] += 1


def of_quantiles(kept: ColumnAccumulator) -> None:
    assert kept.quantiles is not None
    kept.quantiles[3] = np.nextafter(kept.quantiles[3], 0)


@pytest.mark.parametrize(
    ("column", "change", "what"),
    [
        ("far", add("mean", 1e-2), "mean or deviation of run 1"),
        ("wild", add("squares", 1e-3), "mean or deviation of run 1"),
        ("endless", add("squares", 1.0), None),  # unknown, as one value is infinite
        ("wild", add("least", -1e-3), "least of run 1"),
        ("wild", add("most", 1e-3), "most of run 1"),
        ("byte", of_bytes, "counts of bytes"),
        ("wild", of_quantiles, "quantiles"),
    ],
)
def test_what_the_rows_contradict(
    column: str, change: Callable[[ColumnAccumulator], None], what: str | None, tmp_path: Path
) -> None:
    path = made(tmp_path / "rows")
    with open_storage(path) as storage:
        place = place_of(storage.reader)
        assert place is not None
        kept = read_whole(storage.reader, place)
        change(kept[(column,)])
        write_saved(storage.reader, place, kept)
    findings = found(path)
    if what is None:
        assert findings == []
        return
    (finding,) = findings
    assert [(each.column, each.what) for each in finding.places] == [(column, what)]
    with open_storage(path) as storage:  # the remedy
        place.path.unlink()
        storage.statistics()
    assert found(path) == []


def test_a_row_that_changed(tmp_path: Path) -> None:
    path = made(tmp_path / "rows")
    values = np.memmap(path / "wild.memmap", np.float32, "r+")
    values[2 * 131] = (values[2 * 131] + values[2 * 132]) / 2
    values.flush()
    (finding,) = found(path)
    assert {each.column for each in finding.places} == {"wild"}
    assert "mean or deviation of run 1" in {each.what for each in finding.places}


def test_files_that_are_not_used(tmp_path: Path) -> None:
    path, other = made(tmp_path / "rows"), made(tmp_path / "other")
    file = path / "columns.statistics"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    (finding,) = found(path)
    assert "is damaged, or rows have changed. Delete it" in finding.message
    file.write_bytes((other / file.name).read_bytes())
    assert found(path) == []
    assert "the stored statistics are of other rows" in verify(path).skipped["statistics"]
    with MemmapStorage(path, mode="append") as storage:
        rewind_to(storage.writer, 3 * COUNT, None)
    file.write_bytes(whole)
    assert "the stored statistics are of other rows" in verify(path).skipped["statistics"]
    file.unlink()
    assert "no statistics are stored" in verify(path).skipped["statistics"]


@pytest.mark.parametrize("name", ["packed", "packed.h5"])
def test_packed_rows_keep_theirs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / name, list[int]()
    with open_storage(made(tmp_path / "rows")) as storage:
        wanted = storage.statistics()
        storage.pack(path, format="hdf5" if name.endswith("h5") else "zarr")
    assert "no statistics are stored" in verify(path).skipped["statistics"]
    for again in (False, True):
        with open_storage(path) as packed:
            have = packed.statistics(progress=lambda done, _: read.append(done))
        assert bool(read) != again
        read.clear()
        assert have.keys() == wanted.keys()
        for column in wanted:
            assert have[column].min.tolist() == pytest.approx(wanted[column].min, nan_ok=True)
            for share, quantile in wanted[column].quantiles.items():
                assert np.array_equal(have[column].quantiles[share], quantile, equal_nan=True)
    assert found(path) == []
    with open_storage(path) as packed:
        place = place_of(packed.reader)
        assert place is not None
        kept = read_whole(packed.reader, place)
        kept[("far",)].of_runs["mean"][0] += 1
        write_saved(packed.reader, place, kept)
    assert len(found(path)) == 1
    path.rename(tmp_path / f"moved{path.suffix}")
    assert [*tmp_path.glob("packed*")] == ([place.path] if path.suffix else [])


def test_a_view_and_several_storages_have_no_place(tmp_path: Path) -> None:
    paths = [made(tmp_path / "a"), made(tmp_path / "b")]
    before = set(tmp_path.rglob("*"))
    with open_storage(paths) as union, open_storage(paths[0]) as storage:
        for each in (union, storage.trajectories.where("length > 3")):
            assert place_of(each.reader) is None
            assert each.statistics().rows == len(each)
    assert set(tmp_path.rglob("*")) == before
    assert verify(paths).sound is False  # they have the same rows
    assert "statistics" in verify(paths, skip=["content"]).checked
