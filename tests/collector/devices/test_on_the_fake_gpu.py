"""Run the tests of devices on the simulated GPU, in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fake_gpu_kit
from fake_gpu_kit import BuildFailed, CannotBuild, variables

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 900
Skipped = pytest.skip.Exception
PARTS = {  # each imports torch, and starts a fork server
    "one by one": [
        "tests/collector/devices",
        "tests/collector/rollout/test_on_a_gpu.py",
        "tests/collector/batches/test_storing_formats.py",
        "tests/collector/workers/test_multiprocess_weights.py",
        "tests/storage/device",
        "tests/storage/replay/test_torchrl_on_storages.py",
        "tests/storage/sampling/test_frame_windows.py",
        "tests/storage/sampling/test_loader.py",
    ],
    "random runs": ["tests/collector/collectors/test_random_configurations.py"],
}


@pytest.fixture
def other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that no cache has a library of."""
    source = tmp_path / "other.cpp"
    source.write_text("// nothing\n#error refused")
    monkeypatch.setattr(fake_gpu_kit, "SOURCE", source)
    return source


@pytest.mark.parametrize(("required", "error"), [("", Skipped), ("1", CannotBuild)])
def test_without_a_compiler_only_the_release_gate_fails(
    required: str, error: type[BaseException], other_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TALLYROLL_FAKE_GPU_REQUIRED", required)
    with pytest.raises(error, match="there is no no-such-compiler"):
        variables()
    assert "export TALLYROLL_FAKE_GPU_REQUIRED=1 " in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize(("environment", "error"), [("newest", Skipped), ("core", BuildFailed)])
def test_a_failed_build_is_a_warning_with_the_newest_torch_alone(
    environment: str, error: type[BaseException], other_source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no compiler")
    monkeypatch.setenv("TALLYROLL_TEST_ENVIRONMENT", environment)
    with pytest.raises(error, match="refused"):
        variables()


def test_every_file_with_such_tests_is_run() -> None:
    """A file imports the markers of such tests from `devices_kit`."""
    files = {
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search("^from devices_kit import", file.read_text(), re.MULTILINE)
    }
    given = [ROOT / path for paths in PARTS.values() for path in paths]
    assert files
    assert not [file for file in files if not any(file.is_relative_to(path) for path in given)]


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("part", PARTS)
def test_devices_on_the_simulated_gpu(part: str, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "pytest", "-n0", "-q", "-m", "gpu and not slow"),
        *("-p", "no:cacheprovider", "--basetemp", str(tmp_path / "files"), *PARTS[part]),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]
