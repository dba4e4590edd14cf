"""``tallyroll report``: its output, its page, its errors and its exit status."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, open_storage

from report_kit import FRAMES, collected


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        collected(folder / f"left-{seed}", "left", seed)
    return folder


def test_a_table_and_a_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--html", str(tmp_path / "a.html")]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "CartPole-v1 · left" in said.out
    for seed in range(2):
        (line,) = (each for each in said.out.splitlines() if f"left-{seed} " in each)
        assert line.split()[1:5] == [str(seed), str(FRAMES), str(FRAMES), "complete"]
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>")


def test_for_other_programs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [line["stored"] for line in facts["runs"]] == [FRAMES, FRAMES]
    assert main(["report", str(runs), "--csv", "--window", "3", "--scale", "X=0:1"]) == 0
    lines = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    for line in lines:
        with open_storage(line["run"]) as storage:
            assert int(line["stored"]) == len(storage)


def test_what_cannot_be_read_is_said(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["report", str(runs), str(tmp_path / "gone\x1b"), "--html", str(tmp_path / "a.html")]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "left-1" in said.out
    (line,) = said.err.splitlines()
    assert line.startswith("tallyroll: not in the numbers: ")
    assert line.endswith(r"gone\x1b: does not exist. Give the path of a storage.")
    assert (tmp_path / "a.html").is_file()
    assert main(["report", str(tmp_path / "gone"), "--html", str(tmp_path / "b.html")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "there is no run to report" in said.err
    assert not (tmp_path / "b.html").exists()


def test_a_quoted_pattern_is_read_storage_by_storage(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("left-0", "left-1"):
        shutil.copytree(runs / name, tmp_path / name)
    with MemmapStorage(tmp_path / "left-other") as storage:
        storage.extend({("x",): np.zeros(3)})
    (tmp_path / "left.txt").write_text("notes")
    assert main(["report", str(tmp_path / "left*"), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    named = {each["fields"]["label"]: each["runs"] for each in facts["groups"]}
    assert named == {
        "left": [str(tmp_path / f"left-{seed}") for seed in range(2)],
        "left-other": [str(tmp_path / "left-other")],
    }
    assert {each["where"] for each in facts["problems"]} == {str(tmp_path / "left-other")}
    assert main(["report", str(tmp_path / "left-[01]"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    for pattern, said in (("*.txt", "matches no storage"), ("none*", "matches no path")):
        assert main(["report", str(tmp_path / pattern)]) == 1
        assert said in capsys.readouterr().err


def test_a_place_of_another_file_is_refused_before_anything_is_read(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = runs / "left-0/manifest.json"
    before = manifest.read_bytes()
    for place in (manifest, tmp_path, tmp_path / "none/a.html"):
        assert main(["report", str(runs), "--html", str(place)]) == 1
        said = capsys.readouterr()
        assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert manifest.read_bytes() == before
    (tmp_path / "mine.html").write_text("mine")
    assert main(["report", str(runs), "--html", str(tmp_path / "mine.html"), "--force"]) == 0
    assert (tmp_path / "mine.html").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: PATH"),
        (
            ["a", "--scale", "X=5"],
            "argument --scale: expected ENV=LOW:HIGH, such as CartPole-v1=0:500",
        ),
        (["a", "--scale", "X=5:nan"], "expected ENV=LOW:HIGH"),
        (["a", "--window", "0"], "argument --window: expected a whole number above 0"),
        (["a", "--csv", "--json"], "not allowed with argument"),
        (["a", "--htm", "x"], "unrecognized option --htm; did you mean --html?"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_field_that_no_run_has(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--group-by", "call.frames_per_bach"]) == 1
    said = capsys.readouterr().err
    assert "or the name of a value in a run's entry" in said
    assert "got 'call.frames_per_bach'" in said
    assert "did you mean call.frames_per_batch?" in said


def test_without_the_extra_it_is_one_line(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy.stats", None)
    assert main(["report", str(runs)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('which is not installed: pip install "tallyroll[report]"')
