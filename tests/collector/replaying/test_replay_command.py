"""``tallyroll replay``: its output, its errors and its exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_kit import ROWS, collect

from tallyroll.collector.cli import main
from tallyroll.storage import open_storage

Stored = Callable[[str], Path]
FACTORY = """
import gymnasium
def make(gravity=9.8):
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.gravity = gravity
    return env
def light():
    return make(1.0)
here = 3
"""


def test_equal_rows(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(stored("seeded"))
    assert main(["replay", path]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("equal: ")
    assert " of " in said.out
    assert said.err == ""
    assert main(["replay", path, "--all", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["same"], facts["rows"], facts["differences"]) == (True, ROWS, [])
    assert main(["replay", path, "--trajectory", "1,3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replayed"] == 2
    assert main(["replay", path, "--sample", "3", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_differences_and_what_cannot_be_done(
    stored: Stored,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "poles_of_replay.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = str(stored("seeded"))
    assert (
        main(["replay", path, "--trajectory", "0", "--env-factory", "poles_of_replay:light"]) == 1
    )
    said = capsys.readouterr().out
    with open_storage(path) as storage:
        total = len(storage.trajectories)
    assert "different: 0 of 1 trajectories are equal; 1 of " in said
    assert f"1 of {total:,} trajectories and " in said
    assert "trajectory 0, step 0 (row 0), next/observation: stored [" in said
    assert "next/observation: " in said.partition("Columns that differ")[2]

    made = str(collect(tmp_path / "made", __import__("poles_of_replay").make, total_frames=50))
    for words, error in (
        ([made], "--env-factory gymnasium.envs.classic_control.cartpole:CartPoleEnv) if the run"),
        ([made, "--env-factory", "poles_of_replay:none"], "has no attribute 'none'"),
        ([made, "--env-factory", "poles_of_replay:here"], "expected a function"),
        ([made, "--env-factory", "poles"], "expected module:function"),
        ([made, "--env-factory", "no_such_module:f"], "no_such_module"),
        ([made, "--env", "Gone-v0"], "Gone"),
        ([path, "--trajectory", "999"], "no rows of trajectory 999"),
        ([str(tmp_path / "none")], "does not exist"),
        ([str(tmp_path)], "is not a Tallyroll storage"),
    ):
        assert main(["replay", *words]) == 2, words
        said_of = capsys.readouterr()
        assert said_of.out == ""
        assert error in said_of.err, words
    assert main(["replay", made, "--env-factory", "poles_of_replay:make", "--quiet"]) == 0
    assert main(["replay", made, "--env", "CartPole-v1", "--quiet"]) == 0
    shutil.rmtree(made)


@pytest.mark.parametrize(
    "words",
    [
        ["--all", "--sample", "3"],
        ["--trajectory", "x"],
        ["--trajectory", "-1"],
        ["--sample", "0"],
        ["--tolerance", "nan"],
        ["--env", "a", "--env-factory", "b:c"],
    ],
)
def test_words_that_cannot_be_right(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["replay", "a", *words])
    assert end.value.code == 2
    assert words[0] in capsys.readouterr().err
