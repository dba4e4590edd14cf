"""Test a reader of another package: its entry point registers it, and it reads like our files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import IndexOutOfRange, NotAStorage, Overrun, StateMismatch
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected
from tallyroll.storage.readers import registry, row_reader
from tallyroll.storage.readers.row_reader import RowReader, take_rows, values_in_slots
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.testing import ReaderContract

from toy_reader import ChunkedColumn, ChunkedReader, WithoutArrays, write_chunks

ENTRY_POINTS = """
[tallyroll.readers]
chunks = toy_reader:ChunkedReader
"""


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the files that an installer leaves for a package with this entry point."""
    site = tmp_path_factory.mktemp("site")
    about = site / "toy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site


class TestChunkedReader(ReaderContract):
    def write_rows(self, source: DiskStorage, path: Path) -> None:
        write_chunks(source, path)


def test_a_reader_may_have_no_array() -> None:
    assert "array" not in vars(ChunkedColumn)
    assert "take" in vars(ChunkedColumn)


def test_rows_may_begin_above_zero(tmp_path: Path) -> None:
    """A part of a larger storage has such rows.

    It cannot be copied, as rows of copies start at 0.
    """
    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
        write_chunks(file, tmp_path / "chunks", first=1000)
        with open_storage(tmp_path / "chunks") as chunks:
            assert chunks.span == range(1000, 1000 + len(file))
            assert (chunks.get([0, -1]) == file.get([0, -1])).all()
            assert chunks.column("action").tolist() == file.column("action").tolist()
            assert list(chunks.trajectories) == list(file.trajectories)
            assert (chunks.trajectories.rows_of(4) == 1000 + file.trajectories.rows_of(4)).all()
            with pytest.raises(StateMismatch, match="starts with row 1000"):
                chunks.dumps(tmp_path / "dump")


def test_without_a_reader_it_is_no_storage(tmp_path: Path, installed: Path) -> None:
    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
        write_chunks(file, tmp_path / "chunks")
    open_storage(tmp_path / "chunks").close()
    about = installed / "toy-1.0.dist-info"
    about.rename(tmp_path / about.name)
    with pytest.raises(NotAStorage, match=r"chunks is not a Tallyroll storage"):
        open_storage(tmp_path / "chunks")
    (tmp_path / about.name).rename(about)
    open_storage(tmp_path / "chunks").close()


def test_packages_are_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(**group: str) -> Any:
        looks.append(group)
        return entry_points(**group)

    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
        write_chunks(file, tmp_path / "chunks")
    monkeypatch.setattr(registry, "entry_points", counted)
    registry._registered.cache_clear()
    for _ in range(3):
        open_storage(tmp_path / "chunks").close()
    assert looks == [{"group": "tallyroll.readers"}]
    monkeypatch.syspath_prepend(tmp_path)
    open_storage(tmp_path / "chunks").close()
    assert len(looks) == 2


def test_what_a_collector_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record and the ledger are included: `verify` and the command report the same."""
    with MemmapStorage(tmp_path / "file") as file:
        for _ in SyncCollector(
            "CartPole-v1", num_envs=3, frames_per_batch=50, total_frames=400, storage=file, seed=1
        ):
            pass
    with open_storage(tmp_path / "file") as file:
        write_chunks(file, tmp_path / "chunks")
    skip = ["episodes"]  # the stored table
    reports = [verify(tmp_path / name, skip=skip) for name in ("file", "chunks")]
    assert reports[0].sound
    assert reports[0].checked == reports[1].checked
    assert {"record", "observations", "ends"} <= set(reports[1].checked)
    said = []
    for name in ("file", "chunks"):
        for words in (
            ["inspect", "--rows", "5", "--json"],
            ["inspect", "--rows", "2"],
            ["verify", "--skip", "episodes", "--json"],
        ):
            assert main([*words, str(tmp_path / name)]) == 0
            said.append(capsys.readouterr().out.replace(str(tmp_path / name), "PATH"))
    assert said[:3] == said[3:]
    assert json.loads(said[0])["ledger"]["stored"] == 400


@pytest.mark.slow
def test_the_command_finds_it_in_a_process_of_its_own(tmp_path: Path, installed: Path) -> None:
    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
        write_chunks(file, tmp_path / "chunks")
    support = str(Path(sys.modules["toy_reader"].__file__ or "").parent)
    code = (
        f"import sys; sys.path[:0] = [{str(installed)!r}, {support!r}]\n"
        "from tallyroll.collector.cli import main\n"
        f"raise SystemExit(main(['verify', {str(tmp_path / 'chunks')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sound; 141 rows" in done.stdout


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[MemmapStorage]:
    """Make a ring in its second lap, with rows of three trajectories per lane."""
    with MemmapStorage(tmp_path / "ring", max_size=60) as storage:
        for rows in collected()[:99].split(11):
            storage.extend(rows, ids="fresh")
        yield storage


def test_a_ring_without_arrays(ring: MemmapStorage, tmp_path: Path) -> None:
    reader = WithoutArrays(ring.reader)
    every = torch.arange(60)
    assert_same_rows(reader.get(every), ring.get(every))
    assert_same_rows(reader.get(slice(7, 50, 3)), ring.get(slice(7, 50, 3)))
    numbers = np.arange(39, 99)
    assert_same_rows(take_rows(reader, numbers), ring.get(torch.from_numpy(ring.slots_of(numbers))))
    assert (reader.trajectories.table == ring.trajectories.table).all()
    for (id, rows), wanted in zip(
        reader.trajectories.items(), ring.trajectories.items(), strict=True
    ):
        assert id == wanted[0]
        assert_same_rows(rows, wanted[1])
    drawn = [
        each.trajectories.sample_slices(20, 3, torch.Generator().manual_seed(3))
        for each in (reader, ring)
    ]
    assert_same_rows(*drawn)
    for key in reader.keys:
        assert (values_in_slots(reader, key, 0, 60) == ring.column(key)).all()
        assert (reader.shown(key) == ring.column(key)).all()
    with pytest.raises(IndexOutOfRange, match="has rows 39 to 98"):
        take_rows(reader, np.array([38]))


@pytest.mark.parametrize("laps", [1, 3])
def test_overwritten_rows_of_a_ring_without_arrays_are_read_again(
    ring: MemmapStorage, monkeypatch: pytest.MonkeyPatch, laps: int
) -> None:
    reader, left, written = WithoutArrays(ring.reader), laps, [*range(99)]
    copies = WithoutArrays.copies

    def overtaken(self: RowReader, rows: Any, keys: Any = None) -> Any:
        nonlocal left
        found = copies(self, rows, keys)
        if left:
            left -= 1
            written.extend(range(20))
            ring.extend(collected()[:20], ids="fresh")
        return found

    monkeypatch.setattr(WithoutArrays, "copies", overtaken)
    found = reader.get(torch.arange(60))
    assert not left
    assert_same_rows(found, ring.get(torch.arange(60)))
    assert ring.head == len(written)
    left = 10**6
    monkeypatch.setattr(row_reader, "_PATIENCE_SECONDS", 0.01)
    with pytest.raises(Overrun, match="is a ring of 60 rows, and its writer overwrites rows"):
        reader.get(torch.arange(60))


@pytest.mark.parametrize("name", ["pytest", "hypothesis"])
def test_contracts_say_what_they_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in [each for each in sys.modules if each.startswith("tallyroll.storage.ext.testing")]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.delitem(sys.modules, "tallyroll.storage.testing", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    wanted = f'tallyroll.storage.testing needs {name}: pip install "tallyroll[testing]"'
    with pytest.raises(ImportError, match=rf"^{re.escape(wanted)}$"):
        import_module("tallyroll.storage.testing")


def test_a_reader_is_asked_after_our_own_formats(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
    (tmp_path / "file" / "toy.json").write_text("{}")
    with open_storage(tmp_path / "file") as file:
        assert not isinstance(file.reader, ChunkedReader)
