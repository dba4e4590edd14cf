"""Test datasets of other libraries with one change.

The result is a finding, a Tallyroll error, or the rows. ``TALLYROLL_CHANGED=3000`` tries that many
changes, starting at ``TALLYROLL_CHANGED_FROM``. The default is 12.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from minari_faults import sound as sound_minari
from rlds_faults import sound as sound_rlds

from tallyroll.storage import (
    InvalidDataset,
    StorageError,
    import_dataset,
    open_storage,
    repair,
    verify_dataset,
)
from tallyroll.storage.engine.available_memory import library_memory
from tallyroll.storage.errors import NotEnoughMemory
from tallyroll.storage.ext.exchange.base import source_errors
from tallyroll.storage.ext.repair import parquet_footer
from tallyroll.storage.files.safe_files import data_ranges

from hostile_kit import in_a_child

SCRIPT = Path(__file__).parents[2] / "support" / "storages" / "exchanges" / "changed_sources.py"
FIRST = int(os.environ.get("TALLYROLL_CHANGED_FROM", "0"))
COUNT = int(os.environ.get("TALLYROLL_CHANGED", "12"))
LOG = os.environ.get("TALLYROLL_CHANGED_LOG")


@pytest.mark.timeout(300 + 20 * COUNT)
def test_one_change_of_a_dataset(tmp_path: Path) -> None:
    pytest.importorskip("av")
    pytest.importorskip("google_crc32c")
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "changed", str(FIRST), str(FIRST + COUNT)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=280 + 20 * COUNT,
    )
    if LOG:
        Path(LOG).write_text(done.stdout)
    assert done.stdout, done.stderr
    first, *cases = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [json.dumps(case) for case in cases if case["wrong"]]
    assert not wrong, "\n".join(wrong)
    assert done.returncode == 0, f"case {FIRST + len(cases)}: {done.returncode}\n{done.stderr}"
    assert [case["number"] for case in cases] == list(range(FIRST, FIRST + COUNT))
    noticed = sum(not each.endswith(("done", " 0 findings")) for c in cases for each in c["said"])
    assert noticed > COUNT / 4
    assert first["changes"] > 1000


def test_tasks_of_lerobot_without_their_numbers(tmp_path: Path) -> None:
    pytest.importorskip("av")
    parquet = pytest.importorskip("pyarrow.parquet")
    from lerobot_recordings import sound_v3

    sound_v3(tmp_path / "it")
    file = tmp_path / "it" / "meta" / "tasks.parquet"
    table = parquet.read_table(file)
    names = ["other" if each == "task_index" else each for each in table.column_names]
    parquet.write_table(table.rename_columns(names), file)
    found = verify_dataset(tmp_path / "it").findings
    assert any(each.check == "tasks" and "task_index" in each.message for each in found), found
    assert repair(tmp_path / "it", tmp_path / "repaired").rows > 0


@pytest.mark.parametrize("way", ["verify", "repair", "import"])
def test_sizes_of_parquet_that_do_not_fit(way: str, tmp_path: Path) -> None:
    """pyarrow ends the process if it reads some of these sizes, so the code reads others."""
    pytest.importorskip("av")
    parquet = pytest.importorskip("pyarrow.parquet")
    from lerobot_recordings import sound_v3

    sound_v3(tmp_path / "it")
    for file in (tmp_path / "it").rglob("*.parquet"):
        parquet.write_table(parquet.read_table(file), file)  # writes size statistics
        content = file.read_bytes()
        begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        footer = parquet_footer.ThriftReader(content[begin:-8]).struct()
        for group in footer[4][1][1]:
            for chunk in group[1][1][1]:
                chunk[3][1][16] = (
                    parquet_footer.STRUCT,
                    {3: (parquet_footer.LIST, (parquet_footer.I64, [1] * 9))},
                )
        end = parquet_footer.serialize(footer)
        file.write_bytes(content[:begin] + end + len(end).to_bytes(4, "little") + b"PAR1")

    def use() -> bool:
        with contextlib.suppress(StorageError):
            if way == "verify":
                return bool(verify_dataset(tmp_path / "it").findings)
            if way == "repair":
                repair(tmp_path / "it", tmp_path / "repaired")
            else:
                import_dataset(tmp_path / "it", tmp_path / "imported", "lerobot")
            return False
        return True

    assert in_a_child(use)


@pytest.mark.parametrize(
    "error", [ValueError("x"), TypeError(), KeyError("x"), ZeroDivisionError(), RecursionError()]
)
def test_an_error_that_a_source_causes_in_a_library(error: Exception) -> None:
    with pytest.raises(InvalidDataset, match=type(error).__name__) as caught, source_errors(Path()):
        raise error
    assert caught.value.__cause__ is error


def test_errors_of_ours_and_of_the_system_stay_as_they_are() -> None:
    for error in (StorageError("x"), OSError(5, "x"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, source_errors(Path()):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    "within", [lambda: source_errors(Path("it")), lambda: library_memory("it")]
)
def test_memory_that_a_library_does_not_get(within: Callable[[], object]) -> None:
    """Arrow raises its own error for failed allocations."""
    arrow = pytest.importorskip("pyarrow")
    for kind in (MemoryError, arrow.lib.ArrowMemoryError):
        with pytest.raises(NotEnoughMemory, match="it needs more memory"), within():  # type: ignore[attr-defined]
            raise kind("malloc of size 64 failed")


def test_an_error_of_the_callers_progress_stays_as_it_is(tmp_path: Path) -> None:
    sound_minari(tmp_path / "it")

    def fail(done: int, total: int) -> None:
        raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        verify_dataset(tmp_path / "it", progress=fail)
    with pytest.raises(ValueError, match="the caller's own"):
        import_dataset(tmp_path / "it", tmp_path / "out", "minari", progress=fail)


# --- holes ----------------------------------------------------------------------------------------


def test_data_between_holes(tmp_path: Path) -> None:
    with open(tmp_path / "it", "w+b") as file:
        for at in (2**20, 2**30):
            file.seek(at)
            file.write(b"x" * 4096)
        file.truncate(2**40)
        file.seek(7)
        assert [*data_ranges(file.fileno())] == [(at, at + 4096) for at in (2**20, 2**30)]
        assert [*data_ranges(file.fileno(), 2**20 + 5)] == [
            (2**20 + 5, 2**20 + 4096),
            (2**30, 2**30 + 4096),
        ]
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 7


def test_records_behind_a_hole_of_a_terabyte(tmp_path: Path) -> None:
    """Neither `verify` nor `repair` reads the hole, and both find the record after it."""
    pytest.importorskip("google_crc32c")
    sound_rlds(tmp_path / "it")
    whole = repair(tmp_path / "it", tmp_path / "whole")
    file = sorted(each for each in (tmp_path / "it").iterdir() if "tfrecord" in each.name)[0]
    content = file.read_bytes()
    with open(file, "r+b") as opened:
        opened.truncate(2**40)
        opened.seek(2**40)
        opened.write(content)
    started = time.process_time()
    report = repair(tmp_path / "it", tmp_path / "repaired", "rlds")
    assert verify_dataset(tmp_path / "it", "rlds").findings
    assert time.process_time() - started < 20
    with open_storage(tmp_path / "repaired") as storage:
        assert len(storage) == report.rows > whole.rows


def test_a_film_with_a_hole_stays_one(tmp_path: Path) -> None:
    """A repair copies videos without filling their holes."""
    from tallyroll.storage.ext.repair.lerobot import _copy

    with open(tmp_path / "raw", "w+b") as raw, open(tmp_path / "out", "w+b") as out:
        raw.seek(2**30)
        raw.write(np.arange(1000).tobytes())
        raw.truncate(2**36)
        raw.flush()
        _copy(raw, out)
        out.flush()
        assert os.fstat(out.fileno()).st_size == 2**36
        assert os.fstat(out.fileno()).st_blocks * 512 < 2**20
        out.seek(2**30)
        assert out.read(8000) == np.arange(1000).tobytes()
