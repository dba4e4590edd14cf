"""TorchRL's own replay-buffer tests, with our storages in the place of its lazy ones.

The README beside this file says how to run it. The test modules come from a checkout of TorchRL;
before they are imported `LazyMemmapStorage` and `LazyTensorStorage` are ours. A test counts if it
made one of these, or asked for one by its class. Of those that count each passes, or is one of the
differences that `storages.toml` lists with their reasons: a failure that is not listed fails the
run, and so does a difference that is none any more.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage
from tallyroll.storage.storages import DiskStorage

KINDS: dict[str, type[DiskStorage]] = {
    "memmap": MemmapStorage,
    "hdf5": H5Storage,
    "zarr": ZarrStorage,
}
REPLACED = ("LazyMemmapStorage", "LazyTensorStorage")
WHERE = (
    "torchrl.data",
    "torchrl.data.replay_buffers",
    "torchrl.data.replay_buffers.storages",
    "torchrl.data.replay_buffers.storages.tensor",
)
"""The modules that tests, and checkpointers while they run, take these names from."""
MOST = 2**20
"""Rows of space for storages that are made for more, where the format reserves it at once."""


class _Refused(ValueError):
    """An argument of TorchRL's storages that ours do not have."""


def stand_in(kind: type[DiskStorage], name: str, made: list[str]) -> type[DiskStorage]:
    """A class of the name and signature of one of TorchRL's lazy storages, which makes ours."""

    class StandIn(kind):  # type: ignore[misc,valid-type]
        """Takes what a script gives to TorchRL's storages."""

        def __init__(
            self,
            max_size: int,
            *,
            scratch_dir: Any = None,
            device: Any = "cpu",
            ndim: int = 1,
            existsok: bool = False,
            compilable: bool = False,
            shared_init: bool = False,
            **others: Any,
        ) -> None:
            made.append("made")
            if ndim != 1:
                raise _Refused(f"ndim={ndim}: a row is a transition")
            if shared_init:
                raise _Refused("shared_init: a storage has one writer")
            if "cuda" in str(device):
                raise _Refused(f"device={device}: rows are on disk")
            size = int(max_size)
            room = {"max_size": size} if kind is MemmapStorage else {"capacity": min(size, MOST)}
            super().__init__(scratch_dir, **room)

    StandIn.__name__ = StandIn.__qualname__ = name  # by which tests are named, too
    return StandIn


class Suite:
    """What was expected of each test, and what it did."""

    def __init__(self, config: pytest.Config) -> None:
        name = config.getoption("--tallyroll-storage")
        self.made: list[str] = []
        self.kind = KINDS[name]
        listed = tomllib.loads((Path(__file__).parent / "storages.toml").read_text())
        self.differences = [
            (pattern, each["reason"])
            for each in listed["difference"]
            if name in each.get("storages", KINDS)
            for pattern in each["tests"]
        ]
        self.passed: set[str] = set()
        self.untouched: set[str] = set()
        self.failed: dict[str, str] = {}
        self.skipped: set[str] = set()
        self.log = config.getoption("--torchrl-log")

    def reason(self, test: str) -> str | None:
        """Why a test is to fail, None if it is to pass."""
        for pattern, reason in self.differences:
            if fnmatch.fnmatchcase(test, _escaped(pattern)):
                found: str = reason
                return found
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Note whether the test makes storages."""
        self.made.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        """Count the test; what differs on purpose does not fail the run."""
        report = yield
        if report.when != "call" and not report.failed:
            if report.skipped:
                self.skipped.add(_name(item))
            return report
        name = _name(item)
        if report.passed and not self.made:
            self.untouched.add(name)
        elif report.passed:
            self.passed.add(name)
        elif report.skipped:
            self.skipped.add(name)
        else:
            self.failed[name] = _first_line(call)
            if self.reason(name) is not None:
                report.outcome, report.wasxfail = "skipped", f"reason: {self.reason(name)}"
        return report

    def surprises(self) -> list[str]:
        """What is not as listed."""
        found = [
            f"{name} fails and is not listed: {why}"
            for name, why in self.failed.items()
            if self.reason(name) is None
        ]
        right = {*self.passed, *self.untouched}
        found += [f"{name} is listed, and passes" for name in right if self.reason(name)]
        ran = {*right, *self.failed, *self.skipped}
        for pattern, _ in self.differences:
            if not any(fnmatch.fnmatchcase(name, _escaped(pattern)) for name in ran):
                found.append(f"no test that ran is {pattern}")
        return sorted(found)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say the figures."""
        say = terminalreporter.write_line
        say("")
        say(
            f"{self.kind.__name__}: {len(self.passed)} tests pass with it, {len(self.failed)} do "
            f"not; {len(self.untouched)} have nothing to do with it, {len(self.skipped)} skipped"
        )
        for reason, count in Counter(map(self.reason, self.failed)).most_common():
            say(f"{count:5}  {reason or 'UNEXPLAINED'}")
        for line in self.surprises():
            say(f"surprise: {line}")
        if self.log:
            lines = [f"{name}\t{why}\n" for name, why in sorted(self.failed.items())]
            lines += [f"{name}\n" for name in sorted(self.passed)]
            Path(self.log).write_text("".join(lines))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if anything is not as listed; of a part of the tests only their own."""
        if self.surprises() and session.exitstatus == 0:
            session.exitstatus = 1


def _escaped(pattern: str) -> str:
    # Brackets are those of parameters.
    return pattern.replace("[", "[[]")


def _name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("test/")


def _first_line(call: Any) -> str:
    error = call.excinfo
    return f"{error.typename}: {str(error.value).splitlines()[0] if str(error.value) else ''}"[:300]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the run."""
    group = parser.getgroup("tallyroll")
    group.addoption("--tallyroll-storage", choices=sorted(KINDS), default="memmap")
    group.addoption("--torchrl-log", help="a file for what failed, and how")


def pytest_configure(config: pytest.Config) -> None:
    """Put ours in their place, before a test module is imported."""
    suite = Suite(config)
    import torchrl.data  # noqa: F401 - all of the modules below

    ours = {name: stand_in(suite.kind, name, suite.made) for name in REPLACED}
    for module in WHERE:
        for name in REPLACED:
            if hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, ours[name])
    config.pluginmanager.register(suite, "tallyroll-storages")
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
