"""Test `tallyroll copy` and its short options as users call them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, content_hash, open_storage
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("ab"):
        rows = trajectory_rows(0, 20, steps=5)
        rows["observation"] += 1000 * number
        if number:
            rows["pixels"] = rows["observation"].byte()
        with MemmapStorage(name) as storage:
            storage.extend(rows)
    return tmp_path


def test_copies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["copy", "a", "c.h5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("c.h5: 20 rows of ")
    assert "written (hdf5, 9 columns" in out
    assert content_hash("c.h5") == content_hash("a")
    assert main(["copy", "a", "c.h5"]) == 1
    assert "c.h5 already exists" in capsys.readouterr().err
    assert main(["copy", "a", "d", "--columns", "observation,next/reward", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    with open_storage("d") as storage:
        assert storage.schema.keys == (("observation",), ("next", "reward"))
    assert main(["copy", "a", "e", "--format", "zarr", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["rows"], said["dry_run"]) == ("zarr", 20, True)
    assert main(["copy", "a", "e", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not Path("e").exists()


def test_short_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "all", "a", "b"]) == 1
    assert "pixels is not in a" in capsys.readouterr().err
    assert main(["copy", "?", "all", "--drop", "pixels"]) == 0
    assert main(["merge", "some", "a", "b", "--columns", "observation"]) == 0
    with open_storage(["a", "b"], columns=["observation"]) as union:
        with open_storage("some") as storage:
            assert_same_rows(storage.get(slice(None)), union.get(slice(None)))
        with open_storage("all") as storage:
            assert storage.get(slice(None), ["observation"])["observation"].equal(
                union.get(slice(None))["observation"]
            )
    assert main(["merge", "x", "a", "b", "--ids", "keep", "--columns", "collector/traj_ids"]) == 1
    assert "trajectory ids of b also occur in earlier members" in capsys.readouterr().err
    assert main(["sort", "all", "sorted.zarr"]) == 0
    assert content_hash("sorted.zarr") == content_hash("all")
    assert main(["drop", "b", "less", "pixels", "next/reward"]) == 0
    with open_storage("less") as storage:
        assert len(storage.schema.keys) == 8
    assert main(["drop", "b", "none", "nothing"]) == 1
    assert "got nothing" in capsys.readouterr().err


def test_chosen_trajectories(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--where", "return > 50", "--columns", "observation", "--quiet"]
    assert main(["copy", "?", "good", *words]) == 0
    with open_storage("good") as storage, open_storage("a") as source:
        good = [source.trajectories[id]["observation"] for id in (2, 3)]
        assert storage.schema.keys == (("observation",),)
        wanted = torch.cat([*good, *(each + 1000 for each in good)])
        assert storage.get(slice(None))["observation"].equal(wanted)
    assert main(["select", "a", "one", "--where", "id == 3"]) == 0
    assert "one: 5 rows" in capsys.readouterr().out
    assert main(["select", "a", "none", "--where", "id == "]) == 2
    assert "\n         ^" in capsys.readouterr().err
    assert not Path("none").exists()
    assert main(["select", "a", "none", "--where", "id == 77"]) == 0
    assert "none: 0 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["copy", "a"],
        ["copy", "a", "b", "x", "--follow"],
        ["copy", "?", "x", "--follow"],
        ["copy", "a", "x", "--follow", "--where", "id == 3"],
        ["select", "a", "x"],
        ["copy", "a", "x.h5", "--follow"],
        ["copy", "a", "x.h5", "--format", "zarr"],
        ["copy", "a", "x", "--follow", "--sort"],
        ["copy", "a", "x", "--columns", "next//x"],
        ["copy", "a", "x", "--format", "parquet"],
        ["drop", "a", "x"],
        ["merge", "x"],
    ],
)
def test_wrong_arguments(folder: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as found:
        main(words)
    assert found.value.code == 2
    assert not Path("x").exists()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("copy", "merge", "select", "drop", "sort"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert f"    tallyroll {name} " in out or f"  tallyroll {name} " in out
        assert "exit status:" in out
        assert max(map(len, out.splitlines())) <= 80


def test_a_signal_ends_following(folder: Path) -> None:
    """The copy has all batches that were committed by then."""
    before = signal.getsignal(signal.SIGINT)
    with MemmapStorage("a", mode="append") as writer:

        def write() -> None:
            for _ in range(5):
                writer.extend(trajectory_rows(len(writer), 10, steps=5), ids="fresh")
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=write)
        thread.start()
        assert main(["copy", "a", "followed", "--follow", "--quiet"]) == 0
        thread.join()
    assert signal.getsignal(signal.SIGINT) == before
    with open_storage("followed") as storage:
        count = len(storage)
        assert count % 10 == 0
        assert count > 20
        assert_same_rows(storage.get(slice(None)), trajectory_rows(0, count, steps=5))
