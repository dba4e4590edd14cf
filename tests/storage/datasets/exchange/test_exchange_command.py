"""Test ``tallyroll export`` and ``tallyroll import``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage
from tallyroll.storage.ext.testing.reader_contract import collected


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(collected())
    return tmp_path / "rows"


def test_out_and_back(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = rows.with_name("out.npz"), rows.with_name("back")
    assert main(["export", str(rows), f"npz:{out}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{out}: 141 rows of 27 trajectories written (npz, 17 columns, ")
    assert said[1:] == ["cut: 3 trajectories of the source"]
    assert main(["import", f"npz:{out}", str(back)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{back}: 141 rows of {out} written (memmap, 17 columns)"]
    assert main(["diff", str(rows), str(back)]) == 0
    assert main(["verify", str(back)]) == 0


def test_options(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = rows.with_name("out.hdf5")
    assert main(["export", str(rows), f"d4rl:{out}", "--cuts", "drop", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["rows"]) == ("d4rl", 127)
    assert found["lost"] == {"cut_trajectories": 3, "rows_of_cut_trajectories": 14}
    out = rows.with_name("some.npz")
    words = ["--columns", "observation, next/reward", "--where", "length > 3", "--cuts", "keep"]
    assert main(["export", str(rows), f"npz:{out}", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["columns"] == ["observation", "next/reward"]
    assert main(["import", f"npz:{out}", str(rows.with_name("b.zarr")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "zarr"


def test_options_of_lerobot(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    words = ["--fps", "5", "--task", "balance", "--json"]
    assert main(["export", str(rows), f"lerobot:{rows}-out", *words]) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == {}
    info = json.loads(Path(f"{rows}-out/meta/info.json").read_text())
    assert (info["fps"], info["total_tasks"], info["total_frames"]) == (5, 1, 141)
    assert main(["import", f"lerobot:{rows}-out", f"{rows}-back"]) == 0
    assert main(["diff", str(rows), f"{rows}-back"]) == 0


def test_the_loss_is_said(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(rows), f"npz:{rows}.npz", "--cuts", "drop"]) == 0
    said = capsys.readouterr().out.splitlines()[1:]
    assert said == [
        "cut: 3 trajectories of the source",
        "lost: cut trajectories: 3",
        "lost: rows of cut trajectories: 14",
    ]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["export", "ROWS", "OUT"], 2, "expected KIND:PATH, such as parquet:rows.parquet"),
        (["export", "ROWS", "zip:OUT"], 2, "kind: expected one of d4rl, hf, lerobot, minari"),
        (["export", "ROWS", "npz:OUT", "--columns", "x,"], 2, "expected columns"),
        (["export", "ROWS", "npz:OUT", "--columns", "x"], 1, "got x"),
        (["export", "ROWS", "npz:OUT", "--where", "x >"], 2, "--where"),
        (["export", "ROWS", "npz:ROWS"], 1, "already exists"),
        (["export", "ROWS", "npz:OUT", "--fps", "5"], 2, "npz accepts no options"),
        (
            ["export", "ROWS", "lerobot:OUT", "--crf", "99"],
            2,
            "crf: expected a whole number from 0 to 51",
        ),
        (["import", "npz:OUT", "BACK"], 1, "does not exist"),
        (["import", "npz:ROWS", "BACK"], 1, "ROWS"),
        (["import", "npz:ROWS", "BACK.h5", "--format", "zarr"], 2, "suffix of hdf5"),
    ],
)
def test_words_that_are_wrong(
    rows: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, said: str
) -> None:
    names = {"ROWS": str(rows), "OUT": str(rows.with_name("out")), "BACK": f"{rows}-back"}
    for name, path in names.items():
        words = [word.replace(name, path) for word in words]
        said = said.replace(name, path)
    try:
        found = main(words)
    except SystemExit as error:
        found = error.code  # type: ignore[assignment]
    assert found == status
    assert said in capsys.readouterr().err
    assert [each.name for each in rows.parent.iterdir()] == ["rows"]
