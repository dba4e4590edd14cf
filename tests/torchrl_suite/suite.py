"""TorchRL's own tests with ours in the place of theirs: what each did, and whether that is listed.

Used by the plugins beside this file, which say what is put in whose place.
"""

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
        listed: a TOML file with a list ``difference`` of ``tests`` (patterns of `fnmatch`, in which
            brackets stand for themselves), a ``reason``, and perhaps ``errors`` (parts of the
            error's first line, of which one is there), ``of`` (the names that it is for) and
            ``passes_too`` (the error says it, and tests of the patterns may pass).
            ``fails_without_ours`` are parts of errors that do not count, for tests end in them
            with TorchRL's own, too.
        made: gets an entry whenever a test makes one of ours.
        what: what stands in the place of theirs.
        log: a file for what failed, and how.
        name: of what is tried, where ``of`` tells differences apart.
    """

    def __init__(
        self, listed: Path, made: list[str], what: str, log: str | None, name: str = ""
    ) -> None:
        self.made, self.what, self.log = made, what, log
        content = tomllib.loads(listed.read_text())
        self.differences: list[tuple[str, list[str], str, bool]] = [
            (pattern, each.get("errors", [""]), each["reason"], each.get("passes_too", False))
            for each in content["difference"]
            if name in each.get("of", [name])
            for pattern in each["tests"]
        ]
        self.not_ours: list[str] = content.get("fails_without_ours", [])
        self.passed: set[str] = set()
        self.untouched: set[str] = set()
        self.skipped: set[str] = set()
        self.failed: dict[str, str] = {}

    def reason(self, test: str, error: str | None = None) -> str | None:
        """Why a test is to fail, with this error if one is given; None if it is to pass."""
        for pattern, errors, reason, passes_too in self.differences:
            fits = not passes_too if error is None else any(part in error for part in errors)
            if fits and fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")):
                return reason
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
        name = item.nodeid.removeprefix("test/")
        if report.skipped:
            self.skipped.add(name)
        elif report.failed:
            self._count_failure(name, _first_line(call), report)
        elif report.when == "call":
            (self.passed if self.made else self.untouched).add(name)
        return report

    def _count_failure(self, name: str, error: str, report: Any) -> None:
        self.passed.discard(name)  # it fails after its end
        reason: str | None
        if not self.made or any(part in error for part in self.not_ours):
            self.skipped.add(name)
            reason = "it fails without ours, too"
        else:
            self.failed[name] = error
            reason = self.reason(name, error)
        if reason is not None:
            report.outcome, report.wasxfail = "skipped", f"reason: {reason}"

    def surprises(self) -> list[str]:
        """What is not as listed."""
        found = [
            f"{name} fails and is not listed: {error}"
            for name, error in self.failed.items()
            if self.reason(name, error) is None
        ]
        right = [f"{name} is listed, and passes" for name in self.passed if self.reason(name)]
        return sorted(found + right)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say the figures."""
        say = terminalreporter.write_line
        say("")
        say(
            f"{self.what}: {len(self.passed)} tests pass with them, {len(self.failed)} do not; "
            f"{len(self.untouched)} have nothing to do with them, {len(self.skipped)} are skipped "
            "or fail without them, too"
        )
        reasons = Counter(self.reason(*each) for each in self.failed.items())
        for reason, count in reasons.most_common():
            say(f"{count:5}  {reason or 'UNEXPLAINED'}")
        for line in self.surprises():
            say(f"surprise: {line}")
        if self.log:
            lines = [f"{name}\t{error}\n" for name, error in sorted(self.failed.items())]
            lines += [f"{name}\n" for name in sorted(self.passed)]
            Path(self.log).write_text("".join(lines))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if anything is not as listed."""
        if self.surprises() and session.exitstatus == 0:
            session.exitstatus = 1


def _first_line(call: Any) -> str:
    lines = str(call.excinfo.value).splitlines() or [""]
    return f"{call.excinfo.typename}: {lines[0]}"[:300]
