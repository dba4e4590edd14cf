"""What the README shows is what happens, and the benchmarks run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tallyroll.storage import open_storage

from warm_cli import WarmServer

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
SHM = Path("/dev/shm")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_map_names_files_that_are_there() -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", MAP))
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("[cst]*/**/*")}
    there = {path + "/" * (ROOT / path).is_dir() for path in there} | {
        "setup.py",
        "collector/",
        "storage/",
        "tests/",
    }
    assert len(named) > 40
    assert {name for name in named if not any(path.endswith(name) for path in there)} == set()


def test_what_is_made_by_examples_and_the_readme_does_not_collide() -> None:
    """A path that holds a storage already is refused: each command has its own."""
    by_command = re.findall(
        r"tallyroll collect (?!.*--(?:resume|append)).*--out (data/\S+)", README
    )
    by_code = re.findall(r"storage=\"(data/\S+)\"|Storage\(\"(data/[^\"]+)\", max_size", README)
    made = by_command + [path for found in by_code for path in found if path]
    assert len(made) >= 7
    for example in (ROOT / "examples").glob("*.py"):
        made += set(re.findall(r"data/[\w/]+", example.read_text(encoding="utf-8")))
    assert sorted(made) == sorted(set(made))


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(BLOCKS[0], encoding="utf-8")
    told = run("example.py", cwd=tmp_path)
    assert told.count("torch.Size([1000])") == 10
    assert "torch.Size([1]) " in told
    assert "'stored': 10001" in told
    assert "torch.Size([256, 4])" in told


def test_the_example_of_an_off_policy_loop_runs(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(BLOCKS[1], encoding="utf-8")
    assert run("example.py", cwd=tmp_path).strip() == "20000 stored, 10000 in the ring"


@pytest.mark.slow
def test_the_example_of_a_swapped_line_runs(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(BLOCKS[2], encoding="utf-8")
    told = run("example.py", cwd=tmp_path)
    assert told.count("torch.Size([100]) ['time']") == 2
    assert told.count("torch.Size([50]) ['time']") == 1


@pytest.mark.slow
def test_the_example_with_workers_runs(tmp_path: Path) -> None:
    """On an environment that needs no extra, and on fewer processes."""
    block = BLOCKS[3]
    for there, here in (("HalfCheetah-v5", "CartPole-v1"), ("=4,", "=2,"), ("1_000_000", "8200")):
        assert block.count(there) == 1
        block = block.replace(there, here)
    (tmp_path / "example.py").write_text(block, encoding="utf-8")
    told = run("example.py", cwd=tmp_path)
    assert told.count("torch.Size([4096])") == 2
    assert "torch.Size([8]) " in told
    with open_storage(tmp_path / "data" / "cheetah") as storage:
        assert len(storage) == 8200


@pytest.mark.slow
def test_an_environment_of_its_own_runs_and_passes_the_contract(tmp_path: Path) -> None:
    contract = """
from tallyroll.collector.testing import SystemContract


class TestWalk(SystemContract):
    steps = 400

    def make(self, lanes, seeds):
        return Walk(lanes)
"""
    (tmp_path / "test_walk.py").write_text(BLOCKS[4] + contract, encoding="utf-8")
    assert "[200, 200, 100]" in run("test_walk.py", cwd=tmp_path)
    assert "16 passed" in run("-m", "pytest", "-q", "test_walk.py", cwd=tmp_path)


def test_no_other_block_is_a_script() -> None:
    assert len(BLOCKS) == 5


def test_the_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:examples|benchmarks)/[\w./]*)`", README)
    named += [f"examples/{name}" for name in re.findall(r"`(\w+\.py)`", README)]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    # Some make and delete hundreds of storages, which takes minutes on a slow disk.
    with (
        tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as scratch,
        WarmServer(TMPDIR=scratch, PYTHONWARNINGS="ignore") as server,
    ):
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "collect",
        "learner_apart",
        "split",
        "memory",
        "modes",
        "profile_loop",
        "small_batches",
        "storage",
        "storage_slices",
        "systems",
        "workers",
    ],
)
def test_each_benchmark_runs(script: str, server: WarmServer, tmp_path: Path) -> None:
    benchmark = server.start(tmp_path, "python", ROOT / f"benchmarks/{script}.py", "--quick")
    assert benchmark.wait(100) == 0, benchmark.err
    told = benchmark.out
    assert "us / vector step" in told or "us / call" in told or "MiB" in told
