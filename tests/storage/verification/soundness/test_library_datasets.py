"""Test for false alarms: datasets written by the libraries, and our own exports, are sound."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage, verify_dataset
from tallyroll.storage.ext.testing.reader_contract import collected

GOLDEN = Path(__file__).parent / "golden"
ROWS = {
    "lerobot-0.3.3": 27,
    "lerobot-0.4.4": 27,
    "lerobot-0.4.4-images": 27,
    "minari-0.5.4": 24,
    "minari-0.5.4-buffers": 20,
    "minari-0.5.4-infos": 24,
    "minari-0.5.4-spaces": 18,
    "torchrl-0.14.1": 100,
    "torchrl-0.14.1-buffer": 64,
    "torchrl-0.14.1-lanes": 200,
    "torchrl-0.14.1-ring": 160,
}
"""Number of rows in each dataset, by the library that wrote it.

The writers are LeRobot's `add_frame` and `save_episode`, Minari's `DataCollector` and
`create_dataset_from_buffers`, and the memory maps of TorchRL's collector and replay buffers.
"""
EXPORTS = {"npz": ".npz", "parquet": ".parquet", "hf": "", "torchrl": "", "d4rl": ".hdf5"}
EXPORTS["rlds"] = ""


def golden(name: str, tmp_path: Path) -> Path:
    """Unpack a dataset."""
    place = tmp_path / name
    with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
        archive.extractall(place)
    return place


@pytest.mark.parametrize("name", ROWS)
def test_what_a_library_wrote_is_sound(name: str, tmp_path: Path) -> None:
    kind = name.partition("-")[0]
    if kind == "lerobot":
        pytest.importorskip("pyarrow")
    report = verify_dataset(golden(name, tmp_path))
    assert (report.findings, report.format, report.rows) == ((), kind, ROWS[name])
    skipped = {"videos"} if name.endswith("images") or kind != "lerobot" else set()
    assert {*report.skipped} <= skipped or not _has_av()


def _has_av() -> bool:
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


def test_there_are_ten() -> None:
    assert len(ROWS) >= 10
    assert {each.stem for each in GOLDEN.glob("*.zip")} == {*ROWS, "lerobot-0.4.4-killed"}


def test_what_tensordict_writes_today(tmp_path: Path) -> None:
    """Without ids and steps, next observations are not compared, and the report states it."""
    rows = {"observation": torch.randn(50, 3), "action": torch.randn(50, 1)}
    after = {"observation": torch.randn(50, 3), "reward": torch.randn(50, 1)}
    TensorDict({**rows, "next": after}, [50]).memmap(tmp_path / "rows")
    report = verify_dataset(tmp_path / "rows")
    assert (report.findings, report.rows) == ((), 50)
    assert {*report.skipped} == {"ids", "steps", "observations"}


@pytest.mark.parametrize("kind", EXPORTS)
def test_our_exports_are_sound(kind: str, tmp_path: Path) -> None:
    if kind in ("parquet", "hf"):
        pytest.importorskip("pyarrow")
    if kind == "rlds":
        pytest.importorskip("google.protobuf")
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(collected())  # several lanes, with cut trajectories
        storage.export(tmp_path / f"a{EXPORTS[kind]}", kind)
    with (
        MemmapStorage(tmp_path / "pole") as storage,
        SyncCollector(
            "CartPole-v1",
            num_envs=3,
            frames_per_batch=100,
            total_frames=300,
            seed=0,
            storage=storage,
        ) as collector,
    ):
        collector.collect(300)
        storage.export(tmp_path / f"b{EXPORTS[kind]}", kind)
    reports: list[Any] = [verify_dataset(tmp_path / f"{n}{EXPORTS[kind]}", kind) for n in "ab"]
    assert [each.findings for each in reports] == [(), ()]
    assert reports[1].rows == 300
    assert ("observations" in reports[1].checked) == (kind != "rlds")  # it stores each once
