"""TensorFlow Datasets reads what is exported, and what it writes is read bit for bit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rlds_kit import GOLDEN
from rlds_rows import compare_ours, compare_theirs, rows_of_ours

from tallyroll.storage import MemmapStorage, import_dataset, open_storage, verify_dataset

if importlib.util.find_spec("tensorflow_datasets") is None:
    pytest.skip("tensorflow_datasets is not installed", allow_module_level=True)


def run(*words: object) -> None:
    """Run it in a process apart: TensorFlow leaves threads."""
    script = [sys.executable, GOLDEN / "with_tfds.py", *words]
    subprocess.run([*map(str, script)], check=True, timeout=110, capture_output=True)


def read(place: Path, found: Path) -> dict[str, np.ndarray]:
    """Return all that it gives of a dataset."""
    run("read", place, found)
    with np.load(found, allow_pickle=False) as arrays:
        return dict(arrays)


def test_it_reads_every_value_of_ours(tmp_path: Path) -> None:
    rows = rows_of_ours()
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        assert storage.export(tmp_path / "out", "rlds").lost == {}
    compare_ours(rows, read(tmp_path / "out", tmp_path / "found.npz"))


@pytest.mark.parametrize("kind", ["d4rl", "robots", "kinds", "appended"])
def test_what_it_writes_is_read(kind: str, tmp_path: Path) -> None:
    run("write", kind, tmp_path)
    assert verify_dataset(tmp_path / kind).findings == ()
    import_dataset(tmp_path / kind, tmp_path / "back", "rlds")
    with open_storage(tmp_path / "back") as back:
        assert compare_theirs(back, read(tmp_path / kind, tmp_path / "found.npz")) >= 2
