"""``--reset`` and ``--reset-seeds`` act as in the call, also in a resumed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tallyroll.collector import Resets, SyncCollector, choice, uniform
from tallyroll.collector.cli import main
from tallyroll.storage import open_storage

from collect_kit import assert_same

RESETS = Resets(sampler={"low": uniform(-0.1, 0), "high": choice([0.05, 0.1])}, seeds=True)
COLLECT = ["collect", "CartPole-v1", "--frames", "60", "--seed", "2", "--quiet"]
OPTIONS = ["--reset", "low=uniform(-0.1, 0)", "--reset", "high=choice(0.05, 0.1)", "--reset-seeds"]


def test_a_command_draws_what_a_call_draws(tmp_path: Path) -> None:
    """The manifest has the options, and --resume reads them, also from a run of the call."""
    command, call = tmp_path / "command", tmp_path / "call"
    assert main([*COLLECT, *OPTIONS, "--out", str(command)]) == 0
    given = {"storage": call, "frames_per_batch": 1024, "seed": 2, "resets": RESETS}
    with SyncCollector("CartPole-v1", total_frames=60, **given) as collector:
        collector.collect(60)
    for path in (command, call):
        assert main(["collect", "--resume", "--frames", "90", "--quiet", "--out", str(path)]) == 0
    with open_storage(command) as one, open_storage(call) as other:
        assert_same(one[:], other[:])
        assert len(one) == 90
        assert len(one[:]["collector", "context", "low"].unique()) > 2
        (first, *_) = one.manifest["runs"]
    assert first["command"]["reset"] == ["low=uniform(-0.1, 0)", "high=choice(0.05, 0.1)"]
    assert first["command"]["reset_seeds"] is True
    assert first["call"]["resets"] == RESETS.described()


def test_inspect_shows_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The columns are listed like others, in text and as JSON."""
    out = str(tmp_path / "s")
    assert main([*COLLECT, "--reset-seeds", "--reset", 'why="text"', "--out", out]) == 0
    assert main(["inspect", out]) == 0
    assert "reset_seed" in capsys.readouterr().out
    assert main(["inspect", out, "--json"]) == 0
    assert "reset_seed" in str(json.loads(capsys.readouterr().out)["columns"])
    with open_storage(out) as storage:
        assert storage[:]["collector", "reset_seed"].dtype is torch.int64
    assert main(["verify", out]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reset", "gravity"], "expected NAME=VALUE, got 'gravity'"),
        (["--reset", "=1"], "expected NAME=VALUE, got '=1'"),
        (["--reset", "a=uniform(3, 1)"], "expected the lower bound first"),
        (["--reset", "a=__import__('os')"], "expected uniform(LOW, HIGH)"),
        (["--reset", "a=NaN"], "expected uniform(LOW, HIGH)"),
        (["--reset", "a=1", "--reset", "a=2"], "a is given twice"),
    ],
)
def test_wrong_options_are_wrong_usage(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal precedes all other work."""
    with pytest.raises(SystemExit) as ended:
        main([*COLLECT, *options, "--out", str(tmp_path / "s")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_an_environment_that_cannot_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the option to omit."""
    words = [*COLLECT, "--reset", "a/b=1", "--out", str(tmp_path / "s")]
    assert main(words) == 1
    assert "expected a valid name of a column" in capsys.readouterr().err
