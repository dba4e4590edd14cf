"""Tests of the runner of TorchRL's own tests: it fails if an outcome differs from the list."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from warm_cli import WarmServer

SUITE = Path(__file__).parents[1] / "torchrl_suite"

TESTS = """
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer


@pytest.mark.parametrize("kind", [LazyMemmapStorage, LazyTensorStorage])
def test_rows(kind):
    buffer = ReplayBuffer(storage=kind(10), batch_size=2)
    buffer.extend(TensorDict({"a": torch.arange(25)}, [25]))
    assert sorted(buffer[:]["a"].tolist()) == list(range(15, 25))


@pytest.mark.parametrize("size", [3, 5])
def test_tensor(size):
    ReplayBuffer(storage=LazyTensorStorage(size), batch_size=2).extend(torch.arange(2))


def test_none_of_ours():
    ReplayBuffer(storage=ListStorage(10), batch_size=2).extend([1, 2])


def test_fails_without_ours():
    raise ValueError("no")


def test_fails_with_theirs():
    LazyTensorStorage(3)
    raise ValueError("not there")
"""

LISTED = """
fails_without_ours = ["not there"]

[[difference]]
reason = "tensors have no names"
errors = ["holds TensorDicts"]
tests = ["rb/test_it.py::test_tensor[*]"]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    with WarmServer(SUITE) as server:
        yield server


def run(server: WarmServer, folder: Path, listed: str) -> tuple[int, str]:
    (folder / "test" / "rb").mkdir(parents=True)
    (folder / "test" / "rb" / "test_it.py").write_text(TESTS)
    (folder / "listed.toml").write_text(listed)
    done = server.start(
        folder,
        *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "storages_plugin"),
        *("--rootdir", folder, "--differences", "listed.toml", "test/rb"),
    )
    return done.wait(100), done.out + done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (LISTED, []),
        (LISTED.replace("[*]", "[3]"), ["test_tensor[5] fails and is not listed: RowsMismatch"]),
        (LISTED.replace("holds Tens", "holds tens"), ["test_tensor[3] fails and is not listed"]),
        (LISTED.replace("test_tensor[*]", "*"), ["test_rows[LazyMemmapStorage] is listed, and"]),
        (LISTED.replace("not there", "?"), ["test_fails_with_theirs fails and is not listed"]),
    ],
    ids=["as listed", "another fails", "with another error", "one passes", "not with theirs"],
)
def test_what_is_not_as_listed_fails_the_run(
    server: WarmServer, tmp_path: Path, listed: str, told: list[str]
) -> None:
    code, output = run(server, tmp_path, listed)
    surprises = [line for line in output.splitlines() if line.startswith("surprise: ")]
    assert code == bool(told), output
    assert bool(surprises) == bool(told), output
    for each in told:
        assert any(each in line for line in surprises), output
    if not told:
        assert "MemmapStorage: 2 tests pass with them, 2 do not; 1 have nothing" in output
        assert "2  tensors have no names" in output


@pytest.mark.parametrize("path", sorted(SUITE.glob("*.toml")), ids=lambda path: path.stem)
def test_each_difference_has_its_reason(path: Path) -> None:
    for each in tomllib.loads(path.read_text())["difference"]:
        assert len(each["reason"]) > 20
        assert each["tests"]
        assert len(set(each["tests"])) == len(each["tests"])
