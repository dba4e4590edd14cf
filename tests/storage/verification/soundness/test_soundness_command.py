"""Test `tallyroll verify` and `repair` of foreign datasets: kinds, exit status, JSON, harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import d4rl_faults
import h5py
import minari_faults
import numpy as np
import pytest
import torchrl_faults
from fault_kit import ROWS

from tallyroll.collector.cli import main
from tallyroll.storage import verify_dataset


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run the command. Return its status and its output."""
    status = main([str(each) for each in words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_kinds_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    minari_faults.sound(tmp_path / "rows")
    for words in ([tmp_path / "rows"], [f"minari:{tmp_path / 'rows'}"]):
        status, out, _ = run(capsys, "verify", *words)
        assert (status, f"sound; {ROWS} rows (minari)" in out) == (0, True)
    minari_faults.nan_in_an_action(tmp_path / "rows")
    status, out, _ = run(capsys, "verify", tmp_path / "rows", "--json")
    found: dict[str, Any] = json.loads(out)
    assert (status, found["sound"], found["format"]) == (1, False, "minari")
    place = {"file": "main_data.hdf5", "episode": 0, "row": 3, "column": "actions"}
    assert found["findings"][0]["check"] == "nan"
    assert found["findings"][0]["places"] == [place]
    assert run(capsys, "verify", tmp_path / "rows", "--skip", "nan", "--quiet") == (0, "", "")
    status, _, err = run(capsys, "verify", f"csv:{tmp_path / 'rows'}")
    assert (status, "does not exist" in err) == (2, True)
    two = [f"minari:{tmp_path / 'rows'}"] * 2
    status, _, err = run(capsys, "verify", *two)
    assert (status, "one at a time" in err) == (2, True)


def test_repair_and_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "rows.hdf5"
    d4rl_faults.sound(place)
    status, out, _ = run(capsys, "repair", place, tmp_path / "whole")
    assert (status, "nothing was lost" in out) == (0, True)
    d4rl_faults.timeouts_lack_rows(place)
    status, out, _ = run(capsys, "repair", f"d4rl:{place}", tmp_path / "part", "--json")
    found = json.loads(out)
    assert (status, found["rows"], found["lost_rows"], found["whole"]) == (1, 20, ROWS - 20, False)
    assert found["lost"][0]["place"] == {"file": "rows.hdf5", "row": 20}
    status, _, err = run(capsys, "repair", place, tmp_path / "part")
    assert (status, "already exists" in err) == (2, True)
    status, _, err = run(capsys, "repair", tmp_path, tmp_path / "none")
    assert (status, (tmp_path / "none").exists()) == (2, False)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """`verify` does not read the objects that tensordict pickles."""
    torchrl_faults.sound(tmp_path / "rows")
    (tmp_path / "rows" / "other.pickle").write_bytes(
        b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "harm") + b"'\ntR."
    )
    assert verify_dataset(tmp_path / "rows").sound
    assert not (tmp_path / "harm").exists()


def test_names_that_a_terminal_would_obey(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "rows.hdf5"
    d4rl_faults.sound(place)
    with h5py.File(place, "r+") as file:
        file["infos/\x1b[31mred"] = np.zeros(3)
    status, out, _ = run(capsys, "verify", place)
    assert status == 1
    assert "\x1b" not in out
