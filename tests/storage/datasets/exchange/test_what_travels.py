"""Test statistics, overlays, runs and events: what an export includes, and what it loses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, PrioritizedSampler, import_dataset, open_storage
from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.ext.exchange import sidecar
from tallyroll.storage.ext.testing.reader_contract import collected
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.storages import DiskStorage


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DiskStorage]:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(collected())
        yield storage


def text_of(storage: Any, place: Path, **options: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """Export. Return the losses, and the text that accompanies the rows."""
    report = storage.export(place, "torchrl", **options)
    return report.lost, json.loads((place / "tallyroll.json").read_text())


def test_kept_statistics_travel(source: DiskStorage, tmp_path: Path) -> None:
    keys = ["observation", ("next", "reward"), ("next", "truncated")]
    found = source.statistics(keys)
    lost, text = text_of(source, tmp_path / "all")
    assert lost == {}
    assert {*text["statistics"]} == {"observation", "next/reward", "next/truncated"}
    for name, said in text["statistics"].items():
        for field in ("count", "mean", "std", "min", "max", "nan"):
            np.testing.assert_array_equal(said[field], getattr(found[name], field))
        for share, values in found[name].quantiles.items():
            np.testing.assert_array_equal(said["quantiles"][str(share)], values)
    lost, text = text_of(source, tmp_path / "some", columns=["action", "observation"])
    assert (lost, {*text["statistics"]}) == ({}, {"observation"})
    assert import_dataset(tmp_path / "all", tmp_path / "back", "torchrl").rows == 141


def test_statistics_of_other_rows_do_not(source: DiskStorage, tmp_path: Path) -> None:
    """Statistics of other rows are not exported.

    Cases: fewer rows were counted, an export drops cut trajectories, or it changes the column.
    """
    source.statistics(["observation", ("next", "truncated")])
    lost, text = text_of(source, tmp_path / "drop", cuts="drop")
    assert (lost["statistics"], "statistics" in text) == (2, False)
    lost, text = text_of(source, tmp_path / "truncate", cuts="truncate")
    assert (lost["statistics"], {*text["statistics"]}) == (1, {"observation"})
    lost, text = text_of(source.trajectories.where("length > 3"), tmp_path / "view")
    assert (lost, "statistics" in text) == ({}, False)
    source.extend(collected(), ids="fresh")
    lost, text = text_of(source, tmp_path / "more")
    assert (lost, "statistics" in text) == ({"statistics": 2}, False)


def test_statistics_of_as_many_rows_as_are_left(tmp_path: Path) -> None:
    """The first 10 of 13 rows were counted, and the export has 10 different rows."""
    with MemmapStorage(tmp_path / "rows") as storage:
        rows = trajectory_rows(0, 13, steps=5)
        storage.extend(rows[:10])
        storage.statistics(["observation"])
        storage.extend(rows[10:])
        lost, text = text_of(storage, tmp_path / "out", cuts="drop")
        assert (lost["rows_of_cut_trajectories"], lost["statistics"]) == (3, 1)
        assert "statistics" not in text


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        values = torch.tensor([[np.inf, np.nan, -np.inf], [1.0, np.nan, 2.0]])
        storage.extend(TensorDict({"x": values}, [2]))
        storage.statistics()
        _, text = text_of(storage, tmp_path / "out")
    said = text["statistics"]["x"]
    assert (said["max"], said["min"]) == (["inf", "nan", 2.0], [1.0, "nan", "-inf"])
    assert said["count"] == [2, 0, 2]


def test_more_statistics_than_a_text_has_room_for(
    source: DiskStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.statistics(["observation", "action", ("next", "reward")])
    monkeypatch.setattr(sidecar, "_STATISTICS_NBYTES", 700)
    lost, text = text_of(source, tmp_path / "out")
    assert lost == {"statistics": 1}
    assert len(json.dumps(text["statistics"])) < 800
    assert {*text["statistics"]} == {"action", "next/reward"}


def test_overlays_are_counted_or_become_columns(source: DiskStorage, tmp_path: Path) -> None:
    error = source.overlay("error", torch.float32, fill=1)
    error[np.arange(5)] = np.arange(5, dtype=np.float32)
    source.overlay(("state", "h"), torch.float32, (2,))
    assert source.export(tmp_path / "a.npz", "npz").lost == {"overlays": 2}
    assert source.with_overlays("error").export(tmp_path / "b.npz", "npz").lost == {"overlays": 1}
    view = source.trajectories.where("length > 3")
    assert view.export(tmp_path / "c.npz", "npz").lost == {"overlays": 2}
    # Named columns are exported. Columns that the caller leaves out do not count as lost.
    report = source.export(tmp_path / "d.npz", "npz", columns=["action", "error"])
    assert (report.columns, report.lost) == (("action", "error"), {})
    wanted = [*range(5), *[1] * 136]
    for name in ("b", "d"):
        with np.load(tmp_path / f"{name}.npz") as file:
            assert file["error"].tolist() == wanted
    assert source.export(tmp_path / "e.npz", "npz", columns="error").columns == ("error",)
    with pytest.raises(ColumnsMissing, match="got errors"):
        source.export(tmp_path / "f.npz", "npz", columns=["action", "errors"])


def test_priorities_are_counted(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(trajectory_rows(0, 10, steps=5))
        sampler = PrioritizedSampler(storage, alpha=0.6, beta=0.4)
        sampler.save()
        assert storage.export(tmp_path / "a.npz", "npz").lost == {"priorities": 1}
        assert storage.export(tmp_path / "b.npz", "npz", columns=["observation"]).lost == {}


def test_runs_and_events_that_do_not_fit(tmp_path: Path) -> None:
    event = {"at": 0, "call": "env_set", "name": "gravity", "args": [9.8]}
    large = [(letter * 600_000, []) for letter in "de"]
    runs = [("a", []), ("b", [event]), ("c", [event] * 300), *large]

    def written(place: Path, runs: list[tuple[str, list[Any]]]) -> tuple[dict[str, int], Any]:
        with MemmapStorage(place) as storage:
            storage.extend(trajectory_rows(0, 10 * len(runs), steps=5))
            entries = [
                {"first_row": 10 * number, "note": note, "events": events}
                for number, (note, events) in enumerate(runs)
            ]
            storage.writer.runs.write(entries)
        with open_storage(place) as storage:
            lost, text = text_of(storage, place.with_name(f"{place.name}-out"))
            view = storage.trajectories.where("length == 5")  # its entries have no events
            found = view.export(place.with_name(f"{place.name}-view"), "torchrl").lost
            without = sum(bool(events) for _, events in runs) if "runs" not in lost else 0
            assert found.get("runs_without_events", 0) == without
        return lost, text["rows"]["runs"]

    lost, said = written(tmp_path / "one", runs[:2])
    assert (lost, [each["note"] for each in said]) == ({}, ["a", "b"])
    assert said[1]["events"] == [event]
    lost, said = written(tmp_path / "two", runs[:3])
    assert (lost, [each["note"] for each in said]) == ({"runs_without_events": 1}, ["a", "b", "c"])
    lost, said = written(tmp_path / "three", [*runs[:2], *runs[3:]])
    assert (lost, [each["note"][0] for each in said]) == ({"runs": 3}, ["e"])
