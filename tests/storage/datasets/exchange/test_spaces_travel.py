"""Test environment spaces in copies, packs, unions, views, exports, cards and imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli.inspection import inspect
from tallyroll.storage import export_card, import_dataset, open_storage, verify
from tallyroll.storage.readers.spaces import spaces_of
from tallyroll.storage.storages import DiskStorage

BOX = {"type": "Box", "dtype": "float32", "shape": [1], "low": -2.0, "high": 2.0}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("spaces") / "rows"
    with SyncCollector(
        "Pendulum-v1", num_envs=2, frames_per_batch=500, total_frames=500, seed=0, storage=place
    ) as collector:
        collector.collect(500)
    return place


@pytest.fixture
def source(rows: Path) -> Iterator[DiskStorage]:
    with open_storage(rows) as storage:
        yield storage


def known(place: Path | list[Path]) -> dict[Any, Any]:
    with open_storage(place) as storage:
        return spaces_of(storage.runs, storage.schema)


def test_wherever_the_rows_go(source: DiskStorage, rows: Path, tmp_path: Path) -> None:
    wanted = known(rows)
    assert wanted["action",] == BOX
    assert wanted["observation",]["high"] == [1.0, 1.0, 8.0]
    assert len(wanted) == 2
    source.copy_to(tmp_path / "copy.h5")
    source.pack(tmp_path / "packed")
    source.trajectories.where("length > 100").copy_to(tmp_path / "view.zarr")
    for kind in ("npz", "d4rl"):
        source.export(tmp_path / f"rows.{kind}", kind)
        import_dataset(tmp_path / f"rows.{kind}", tmp_path / f"{kind}_back", kind)
    for name in ("copy.h5", "packed", "view.zarr", "npz_back", "d4rl_back"):
        assert known(tmp_path / name) == wanted, name
        report = verify(tmp_path / name)
        assert (report.sound, "spaces" in report.checked) == (True, True), name
    for name, part in source.split(first=0.5, second=0.5).items():
        part.copy_to(tmp_path / name)
    assert known([tmp_path / "first", tmp_path / "second"]) == wanted


def test_they_are_shown(rows: Path, tmp_path: Path, source: DiskStorage) -> None:
    facts = inspect.examine(source, 0)
    assert {each["name"]: each["space"] for each in facts["columns"] if each["space"]} == {
        "observation": known(rows)["observation",],
        "action": BOX,
    }
    text = inspect.as_text(facts)
    assert re.search(r"observation +float32 +\[3\] +12 +in -1\.\.1, -1\.\.1, -8\.\.8", text)
    assert re.search(r"action +float32 +\[1\] +4 +in -2\.\.2", text)
    assert "| `action` | float32 | [1] | in -2..2 |" in str(source.card())
    source.export(tmp_path / "rows.npz", "npz")
    assert "| in -2..2 |" in str(export_card(tmp_path / "rows.npz", "npz"))


def test_a_text_that_claims_other_spaces(source: DiskStorage, tmp_path: Path) -> None:
    source.export(tmp_path / "out", "torchrl")
    place = tmp_path / "out" / "tallyroll.json"
    text = json.loads(place.read_text())
    hostile = {"observation": {"type": "Box", "dtype": "O", "shape": [3]}, "action": [[[1]]]}
    for said in (hostile, 7, {"action": {"type": "Discrete", "n": 2}}, {"x": BOX}):
        text["rows"]["runs"][0]["spaces"] = said
        place.write_text(json.dumps(text))
        import_dataset(tmp_path / "out", tmp_path / "back", "torchrl")
        assert known(tmp_path / "back") == {}
        assert verify(tmp_path / "back").sound
        assert "&#91;-2" not in str(export_card(tmp_path / "out", "torchrl"))
        with open_storage(tmp_path / "back") as storage:
            assert inspect.as_text(inspect.examine(storage, 0))
        (tmp_path / "back").rename(tmp_path / f"back{np.random.default_rng().integers(2**60)}")
