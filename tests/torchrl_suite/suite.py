"""TorchRL's own tests with ours in the place of theirs: what each did, and if that is listed."""

from __future__ import annotations

import fnmatch
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


class Suite:
    """What was expected of each test, and what it did.

    A test counts if it made one of ours. Of those that count each passes, or is a difference that
    is listed with its reason: a failure that is not listed is a surprise, and so is a difference
    that is none any more.

    Args:
        listed: a TOML file with a list ``difference`` of ``tests`` (patterns) and a ``reason``.
        made: gets an entry whenever a test makes one of ours.
        what: what stands in the place of theirs.
        log: a file for what failed, and how.
    """

    def __init__(self, listed: Path, made: list[str], what: str, log: str | None) -> None:
        self.made, self.what, self.log = made, what, log
        self.differences = [
            (pattern, each["reason"])
            for each in tomllib.loads(listed.read_text())["difference"]
            for pattern in each["tests"]
        ]
        self.passed: set[str] = set()
        self.untouched: set[str] = set()
        self.skipped: set[str] = set()
        self.failed: dict[str, str] = {}
        self.hit: set[str] = set()

    def reason(self, test: str) -> str | None:
        """Why a test is to fail, None if it is to pass."""
        for pattern, reason in self.differences:
            if fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")):  # those of parameters
                self.hit.add(pattern)
                found: str = reason
                return found
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Note whether the test makes one of ours."""
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
        if report.skipped:
            self.skipped.add(name)
        elif report.passed:
            (self.passed if self.made else self.untouched).add(name)
        else:
            self.failed[name] = _first_line(call)
            if self.log:
                with Path(self.log).open("a") as file:
                    file.write(f"{name}\t{self.failed[name]}\n")
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
        right = self.passed | self.untouched
        return sorted(
            found + [f"{name} is listed, and passes" for name in right if self.reason(name)]
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say the figures."""
        say = terminalreporter.write_line
        say("")
        say(
            f"{self.what}: {len(self.passed)} tests pass with them, {len(self.failed)} do not; "
            f"{len(self.untouched)} have nothing to do with them, {len(self.skipped)} skipped"
        )
        for reason, count in Counter(map(self.reason, self.failed)).most_common():
            say(f"{count:5}  {reason or 'UNEXPLAINED'}")
        for line in self.surprises():
            say(f"surprise: {line}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if anything is not as listed."""
        if self.surprises() and session.exitstatus == 0:
            session.exitstatus = 1


def _name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("test/")


def _first_line(call: Any) -> str:
    lines = str(call.excinfo.value).splitlines() or [""]
    return f"{call.excinfo.typename}: {lines[0]}"[:300]
