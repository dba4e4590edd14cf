"""Tests that `benchmarks/gpu_check.py` finds wrong rows, and continues after any failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_gpu_kit import variables

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["correctness", "waits", "bandwidth", "rings", "collectors", "workers"]

CASES = """
import os, time

def correctness(device, seconds):
    def one_contender():
        return {"results": [1], "errors": {"a ring": "it refused"}}
    def crash():
        os.abort()
    def raises():
        raise ValueError("wrong\\nrow")
    return {"good": lambda: 7, "raises": raises, "crash": crash, "one": one_contender,
            "hangs": lambda: time.sleep(60), "last": lambda: "equal"}

workers = correctness
"""
"""A module of sections, of which every kind of failure is one case."""

STUB = """
import os, sys
sys.path[:0] = [{folder!r}, {benchmarks!r}]
import gpu_check
gpu_check.SCRIPT = gpu_check.Path(__file__).resolve()
toy = dict.fromkeys(["correctness", "workers"], "toy_cases")
gpu_check.SECTIONS = {{"waits": "missing_module", **toy}}
gpu_check.LEAST_SECONDS, gpu_check.CASE_SHARE = 2.0, float(os.environ["CASE_SHARE"])
gpu_check.describe = lambda device: None if device == "xpu" else {{
    "device": device, "versions": {{}}}}
gpu_check.is_healthy = lambda device: True
if __name__ == "__main__":
    sys.exit(gpu_check.main())
"""


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., tuple[int, str, Any]]:
    """Return a function that runs the script over `CASES`: status, output and results."""
    (tmp_path / "toy_cases.py").write_text(CASES)
    script, out = tmp_path / "stub.py", tmp_path / "out.json"
    script.write_text(STUB.format(folder=str(tmp_path), benchmarks=str(ROOT / "benchmarks")))

    def run(*words: str, share: float) -> tuple[int, str, Any]:
        command = [sys.executable, str(script), "--json", str(out), *words]
        more = os.environ | {"CASE_SHARE": str(share)}
        done = subprocess.run(command, env=more, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout, json.loads(out.read_text()) if out.exists() else None

    return run


def test_later_cases_run_after_every_kind_of_failure(
    stub: Callable[..., tuple[int, str, Any]],
) -> None:
    status, printed, report = stub(
        "--device", "cpu", "--minutes", "10", "--only", "waits,correctness", share=5e-3
    )
    assert status == 1
    cases = report["sections"]["correctness"]["cases"]
    assert [each["case"] for each in cases] == ["good", "raises", "crash", "one", "hangs", "last"]
    errors = [each.get("error", "") for each in cases]
    assert errors[0] == errors[5] == ""
    assert errors[1] == "ValueError: wrong row"
    assert "status -6" in errors[2]
    assert errors[3] == "a ring: it refused"
    assert errors[4] == "no result for 3 s"
    assert "missing_module" in report["sections"]["waits"]["cases"][0]["error"]
    assert len(report["failed"]) == 5
    assert "correctness: 6 cases, 4 failed" in printed
    assert "  FAILED raises: ValueError: wrong row (" in printed


def test_a_device_that_is_not_there_ends_the_script(
    stub: Callable[..., tuple[int, str, Any]],
) -> None:
    status, printed, report = stub("--device", "xpu", share=1.0)
    assert (status, report) == (2, None)
    assert printed.splitlines() == ["== waits"]


def test_the_time_limit_ends_a_case_and_leaves_out_the_rest(
    stub: Callable[..., tuple[int, str, Any]],
) -> None:
    status, printed, report = stub(
        "--device", "cpu", "--minutes", "0.2", "--only", "correctness,workers", share=1.0
    )
    assert status == 1
    assert report["seconds"] < 60
    cases = report["sections"]["correctness"]["cases"]
    assert cases[0] == {"case": "good", "seconds": 0.0, "found": 7}
    assert cases[-1] == {"case": "further cases", "error": "left out: no time is left"}
    assert report["failed"][-1] == "workers: all"
    assert "workers: 1 cases, 1 failed" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device_is_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu_check.py"), "--only", "bandwidth"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "--device: expected cpu on this machine, got cuda." in done.stdout


def run_for(device: str, out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run the script on a device, and return its results."""
    command = [
        *(sys.executable, str(ROOT / "benchmarks/gpu_check.py"), "--device", device),
        *("--seconds", "0.2", "--minutes", "15", "--json", str(out)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=960)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("device", ["cpu", "fakegpu"])
def test_the_script_passes(device: str, tmp_path: Path) -> None:
    if device == "fakegpu":
        variables()  # skips without a compiler
    environment = {name: each for name, each in os.environ.items() if name[:7] != "PYTEST_"}
    report = run_for(device, tmp_path / "out.json", environment)
    assert report["failed"] == []
    sections = report["sections"]
    assert [*sections] == SECTIONS
    assert len(sections["correctness"]["cases"]) > 40
    found = {case["case"]: case["found"] for each in sections.values() for case in each["cases"]}
    writing = {each["contender"] for each in found["writing"]["results"]}
    assert {"LazyTensorStorage on the device", "MemmapStorage, loader"} <= writing
    there = found["environment on the device"]
    names = {each["contender"] for each in there["results"]}
    assert {"bare loop", "Tallyroll, batches on the device", "Tallyroll, MemmapStorage"} <= names
    if device == "fakegpu":
        assert "TorchRL, batches on the device" in there["left out"]
        assert found["bare loop"]["waits of a batch"] > 0
        assert found["all on the device, rows also to disk"]["counts of a batch"]["kernels"] > 0
    else:
        assert "TorchRL, batches on the device" in names


# --- the checks themselves ------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {  # of the columns that it names
    "lane": lambda rows: rows["collector", "lane"].__setitem__(5, 6),
    "step": lambda rows: rows["collector", "step"].__setitem__(5, 8),
    "reward": lambda rows: rows["next", "reward"].__setitem__(5, 0.5),
    "terminated": lambda rows: rows["next", "terminated"].logical_not_(),
    "next": lambda rows: rows["next", "observation"].__setitem__(5, rows["observation"][5]),
    "code": lambda rows: rows["nested", "code"].__setitem__(5, 255),
    "order": lambda rows: rows.copy_(rows.flip(0).clone()),
}


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.usefixtures("benchmarks")
def test_a_wrong_row_is_found(tmp_path: Path) -> None:
    import gpu_envs
    import gpu_rows

    expected = gpu_rows.rows_of(gpu_rows.filled(tmp_path / "rows"))
    gpu_envs.check_rows(expected)
    for change in CHANGES.values():
        rows = expected.clone()
        change(rows)
        with pytest.raises(AssertionError, match=r"rows differ. Row"):
            gpu_envs.check_rows(rows)
        with pytest.raises(AssertionError, match=r"rows differ. Row"):
            gpu_envs.require_same(rows, expected)


@pytest.mark.usefixtures("benchmarks")
def test_waits_are_counted_by_the_warnings_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own warnings are replaced, because no machine of the gate has a GPU."""
    import gpu_times

    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another", stacklevel=1)

    found = gpu_times.by_warnings(call)
    assert sum(found.values()) == 3
    assert modes == ["warn", "default"]
