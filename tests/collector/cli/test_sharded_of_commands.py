"""``tallyroll collect --sharded`` and the commands that read its result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tallyroll.collector.cli import main
from tallyroll.storage import open_storage

RUN = ["collect", "CartPole-v1", "--num-envs", "5", "--workers", "2", "--transport", "thread"]


def collect(out: Path, *more: str) -> int:
    """Run the command in this process."""
    return main([*RUN, "--sharded", "--seed", "0", "--quiet", "--out", str(out), *more])


def test_it_is_collected_resumed_and_read_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows"
    assert collect(out, "--frames", "700") == 0
    assert main(["collect", "--resume", "--frames", "1001", "--quiet", "--out", str(out)]) == 0
    with open_storage(out) as storage:
        assert len(storage) == 1001
        assert [run["command"]["sharded"] for run in storage.runs] == [True, True]
    capsys.readouterr()
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1001
    for name in ("copy", "pack"):
        assert main([name, str(out), str(tmp_path / name), "--quiet"]) == 0
        assert main(["verify", str(tmp_path / name), "--quiet"]) == 0
        assert main(["diff", str(out), str(tmp_path / name), "--quiet"]) == 0
    assert main(["verify", str(out), "--quiet"]) == 0
    assert main(["report", str(out), "--quiet"]) == 0
    shutil.rmtree(next((out / "shards").iterdir()))
    assert main(["verify", str(out), "--quiet"]) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--mode", "sync"], "rows of several shards have no order"),
        (["--format", "zarr"], "--format cannot be combined with --sharded"),
        (["--finalize"], "--finalize cannot be combined with --sharded"),
        (["--workers", "0"], "Give --workers"),
        (["--policy-placement", "central"], "--policy-placement central needs a policy"),
        (["--policy-placement", "central", "--policy", "a:b"], "cannot be combined with --sharded"),
        (["--shard", "0/2"], "--shard"),
    ],
)
def test_it_says_what_does_not_go_with_it(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        collect(tmp_path / "rows", "--frames", "100", *more)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


def test_another_run_is_not_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows"
    assert collect(out, "--frames", "50") == 0
    given = ["CartPole-v1", "--frames", "100", "--append", "--out", str(out)]
    assert main(["collect", *given]) != 0
    assert "has one run" in capsys.readouterr().err
    with open_storage(out) as storage:
        assert len(storage) == 50
