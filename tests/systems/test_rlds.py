"""Test RLDS with TensorFlow Datasets: it reads our exports, and we read its data bit for bit."""

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


pytestmark = pytest.mark.timeout(600)  # a process compiles TensorFlow's modules first
KINDS = ("d4rl", "robots", "kinds", "appended")


def run(*words: object) -> None:
    """Run the script in a separate process because TensorFlow leaves threads."""
    script = [sys.executable, GOLDEN / "with_tfds.py", *words]
    subprocess.run([*map(str, script)], check=True, timeout=550, capture_output=True)


def load(found: Path) -> dict[str, np.ndarray]:
    """Return all values that it read from a dataset."""
    with np.load(found, allow_pickle=False) as arrays:
        return dict(arrays)


def test_it_reads_every_value_of_ours(tmp_path: Path) -> None:
    rows = rows_of_ours()
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        assert storage.export(tmp_path / "out", "rlds").lost == {}
    run("read", tmp_path / "out", tmp_path / "found.npz")
    compare_ours(rows, load(tmp_path / "found.npz"))


def test_what_it_writes_is_read(tmp_path: Path) -> None:
    run("both", tmp_path, *KINDS)
    for kind in KINDS:
        place, back = tmp_path / kind, tmp_path / f"back_{kind}"
        assert verify_dataset(place).findings == ()
        import_dataset(place, back, "rlds")
        with open_storage(back) as storage:
            assert compare_theirs(storage, load(tmp_path / f"{kind}.npz")) >= 2
