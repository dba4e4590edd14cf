"""Tests that the README and the map name existing files, and that the benchmarks run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from warm_cli import WarmServer

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
SHM = Path("/dev/shm")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))]
ALL = "".join(PAGES)


def test_the_map_names_files_that_are_there() -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", MAP))
    found = (path for top in ("[cest]*", "docs") for path in ROOT.glob(f"{top}/**/*"))
    there = {path.relative_to(ROOT).as_posix() for path in found}
    there = {path + "/" * (ROOT / path).is_dir() for path in there} | {
        "setup.py",
        "benchmarks/",
        "collector/",
        "docs/",
        "storage/",
        "tests/",
    }
    assert len(named) > 40
    assert {name for name in named if not any(path.endswith(name) for path in there)} == set()


MADE_BY_ANOTHER = {"offline_iql.py": {"data/policies"}}
"""Folders that examples only read."""


def test_what_is_made_by_examples_and_pages_does_not_collide() -> None:
    """Each command has its own path, because a storage refuses a path that already holds one."""
    by_command = re.findall(r"tallyroll collect (?!.*--(?:resume|append)).*--out (\S+)", ALL)
    by_code = re.findall(r"Storage\(\"([^\"]+)\", (?:max_size|capacity)", ALL)
    for page in PAGES:  # resuming names the path a second time
        by_code += set(re.findall(r"storage=\"(data/[^\"]+)\"", page))
    made = by_command + by_code
    assert len(made) >= 10
    for example in (ROOT / "examples").rglob("*.py"):
        named = set(re.findall(r"data/[\w/]+", example.read_text(encoding="utf-8")))
        made += named - MADE_BY_ANOTHER.get(example.name, set())
    assert sorted(made) == sorted(set(made))


def test_the_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:examples|benchmarks)/[\w./]*)`", ALL)
    assert [name for name in named if not (ROOT / name).exists()] == []
    scripts = set(re.findall(r"`(\w+_\w+\.py|ppo.py|dqn.py|sac.py)`", ALL))
    assert len(scripts) + len(named) > 20
    assert scripts - {path.name for path in (ROOT / "examples").rglob("*.py")} == set()


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    # Some benchmarks create and delete hundreds of storages, which takes minutes on a slow disk.
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
        "recorder",
        "small_batches",
        "storage",
        "storage_once",
        "storage_slices",
        "systems",
        "truth",
        "workers",
    ],
)
def test_each_benchmark_runs(script: str, server: WarmServer, tmp_path: Path) -> None:
    benchmark = server.start(tmp_path, "python", ROOT / f"benchmarks/{script}.py", "--quick")
    assert benchmark.wait(100) == 0, benchmark.err
    told = benchmark.out
    assert "us / vector step" in told or "us / call" in told or "MiB" in told
