"""A reader of another package: found by its entry point, read as files of ours are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import NotAStorage, StateMismatch
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.testing import ReaderContract
from tallyroll.storage.testing.reader_contract import collected

from toy_reader import ChunkedColumn, ChunkedReader, write_chunks

ENTRY_POINTS = """
[tallyroll.readers]
chunks = toy_reader:ChunkedReader
"""


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What an installer leaves of a package with such an entry point."""
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
    assert ChunkedColumn.take is not RowReader.take


def test_rows_may_begin_above_zero(tmp_path: Path) -> None:
    """As those of a part of a larger storage do; it has no copy, whose rows begin at 0."""
    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
        write_chunks(file, tmp_path / "chunks", first=1000)
        with open_storage(tmp_path / "chunks") as chunks:
            assert chunks.span == range(1000, 1000 + len(file))
            assert (chunks.get([0, -1]) == file.get([0, -1])).all()
            assert chunks.column("action").tolist() == file.column("action").tolist()
            assert list(chunks.trajectories) == list(file.trajectories)
            assert (chunks.trajectories.rows_of(4) == 1000 + file.trajectories.rows_of(4)).all()
            with pytest.raises(StateMismatch, match="begins with row 1000"):
                chunks.dumps(tmp_path / "dump")


def test_without_a_reader_it_is_no_storage(tmp_path: Path, installed: Path) -> None:
    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
        write_chunks(file, tmp_path / "chunks")
    open_storage(tmp_path / "chunks").close()
    (installed / "toy-1.0.dist-info" / "entry_points.txt").unlink()
    with pytest.raises(NotAStorage, match=r"chunks is not a Tallyroll storage"):
        open_storage(tmp_path / "chunks")


def test_what_a_collector_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its record and ledger: `verify` and the command say the same of it."""
    with MemmapStorage(tmp_path / "file") as file:
        for _ in SyncCollector(
            "CartPole-v1", num_envs=3, frames_per_batch=50, total_frames=400, storage=file, seed=1
        ):
            pass
    with open_storage(tmp_path / "file") as file:
        write_chunks(file, tmp_path / "chunks")
    skip = ["episodes"]  # the table that is kept beside the rows
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


def test_a_reader_is_asked_after_our_own_formats(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "file") as file:
        file.extend(collected())
    (tmp_path / "file" / "toy.json").write_text("{}")
    with open_storage(tmp_path / "file") as file:
        assert not isinstance(file.reader, ChunkedReader)
