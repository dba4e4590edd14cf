"""The entry of a run records where, when and by which code it was made; exports omit the place."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import nn

from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.state import host_info
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.files.manifest import exported

from collect_kit import ByObservation
from worker_kit import DISABLED, LANES, factory


@pytest.fixture(autouse=True)
def git_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the function that conftest.py replaces for all tests."""
    monkeypatch.setattr(host_info, "git_of_folder", host_info.git_of_folder.__wrapped__)


def git(folder: Path, *words: str) -> str:
    words = ("-c", "user.name=x", "-c", "user.email=x@example.org", *words)
    return subprocess.run(
        ["git", "-C", folder, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def collect(path: Path, policy: Any = None) -> list[dict[str, Any]]:
    with SyncCollector(
        factory(DISABLED, 0, LANES),
        policy,
        frames_per_batch=5,
        total_frames=5,
        storage=path,
        seed=1,
    ) as collector:
        for _ in collector:
            pass
    with open_storage(path) as storage:
        return storage.runs


def test_what_made_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_info, "_GIT_SECONDS", 60)
    git(tmp_path, "init", "-q")
    (file := tmp_path / "x.py").write_text("1")
    git(tmp_path, "add", "x.py")
    git(tmp_path, "commit", "-qm", "x")
    before = datetime.now(UTC).replace(microsecond=0)
    (run,) = collect(tmp_path / "a", ByObservation())
    made = run["made"]
    assert made["git"] == {"commit": git(tmp_path, "rev-parse", "HEAD"), "changed": False}
    assert before <= datetime.fromisoformat(made["at"]) <= datetime.now(UTC)
    assert made["host"] == socket.gethostname()
    code = Path(sys.modules[ByObservation.__module__].__file__ or "")
    assert made["policy"] == {
        "name": f"{ByObservation.__module__}:ByObservation",
        "code": hashlib.sha256(code.read_bytes()).hexdigest(),
        "weights": None,
    }
    assert str(tmp_path) not in json.dumps(run)
    file.write_text("2")
    (run,) = collect(tmp_path / "b")
    assert run["made"]["git"]["changed"] is True
    assert run["made"]["policy"] is None


def test_no_git_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert host_info.git_of_folder() is None, "no repository"
    git(tmp_path, "init", "-q")
    assert host_info.git_of_folder() is None, "no commit"
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert host_info.git_of_folder() is None, "no git"
    (slow := tmp_path / "bin" / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    began = time.monotonic()
    assert host_info.git_of_folder() is None, "a slow one"
    assert time.monotonic() - began < 10


def test_the_hash_of_weights_is_of_their_values() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    first = host_info.hashes_of(one)
    assert first["weights"] != host_info.hashes_of(other)["weights"]
    other.load_state_dict(one.state_dict())
    assert host_info.hashes_of(other) == first
    assert first["code"] is None, "a library's"
    assert host_info.hashes_of(nn.LazyLinear(3))["weights"] is None
    assert host_info.hashes_of(one.bfloat16())["weights"] != first["weights"]


@pytest.mark.parametrize("name", ["rows.h5", "rows.zarr"])
def test_exports_do_not_say_where(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-of-mine")
    path = tmp_path / name
    (run,) = collect(path)
    assert run["made"]["host"] == "a-host-of-mine"
    if path.is_file():
        with h5py.File(path, locking=False) as file:
            text = file.attrs["provenance"]
    else:
        text = json.loads((path / "zarr.json").read_text())["attributes"]["provenance"]
    (shown,) = json.loads(text)["runs"]
    assert shown["made"] == {k: v for k, v in run["made"].items() if k != "host"}
    copied = {"first_row": 0, "runs": [{**run, "command": {"policy": "/home/me/agent.py:act"}}]}
    (inner,) = exported(copied)["runs"]
    assert inner["made"] == shown["made"]
    assert inner["command"] == {"policy": "agent.py:act"}


def test_runs_of_a_storage_are_a_copy(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        assert storage.runs == []
    collect(tmp_path / "other")
    with open_storage(tmp_path / "other") as storage:
        runs = storage.runs
        assert runs == storage.manifest["runs"]
        runs[0]["environment"].clear()
        assert storage.runs[0]["environment"]
