"""Tests of the gate: its steps, durations and exit status, with tools that only log their calls."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSER = ROOT / "docs/browser.py"
TOOL = """#!/bin/bash
echo "${0##*/} $*" >>"$LOG"
if [[ ${0##*/} == pytest ]]; then echo "${TMPDIR-}" >"$LOG.scratch"; fi
if [[ $1$2 == "-mbuild" ]]; then mkdir -p "$5" && touch "$5/tallyroll-1.whl"; fi
if [[ ${0##*/} == "$SLOW" ]]; then sleep 2; fi
[[ ${0##*/} != "$BREAKS" ]]
"""


class Gate:
    """A copy of check.sh in its own folder, where each tool is a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = folder / ".venv/bin"
        tools.mkdir(parents=True)
        (folder / "tests/systems").mkdir(parents=True)
        for name in ("check.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        shutil.copy(ROOT / "tests/systems/environments.toml", folder / "tests/systems")
        for name in ("python", "ruff", "mypy", "lint-imports", "pytest"):
            self.tool(tools / name)

    def tool(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TOOL)
        path.chmod(0o755)

    def run(
        self, *words: str, breaks: str = "", slow: str = "", **more: str
    ) -> tuple[int, str, list[str]]:
        """Return the exit status, the output, and the commands of the tools that ran."""
        log = self.folder / "log"
        log.write_text("")
        more = {"PYTHON": sys.executable} | more
        more |= {"LOG": str(log), "BREAKS": breaks, "SLOW": slow, "TALLYROLL_CHECK_ONCE": ""}
        done = subprocess.run(
            ["bash", "check.sh", *words],
            cwd=self.folder,
            env=os.environ | more,
            capture_output=True,
            text=True,
            timeout=100,
        )
        return done.returncode, done.stdout, log.read_text().splitlines()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


STEPS = ["set-up", "ruff format", "ruff check", "imports", "pytest", "types"]
"""Steps in the order in which they end. The last one runs in parallel with the steps before it."""


def listed(said: str) -> dict[str, int]:
    """Return the seconds of each step, from the list at the end of the output."""
    found = re.findall(r"^ *(\d+) s  (.+)$", said.partition("== seconds\n")[2], re.MULTILINE)
    assert found.pop()[1] == "in all"
    return {name: int(count) for count, name in found}


def test_it_ends_with_the_seconds_of_each_step(gate: Gate) -> None:
    status, said, ran = gate.run("-k", "ring", slow="mypy")
    assert status == 0
    *_, last = said.splitlines()
    assert last == "All checks passed."
    assert list(listed(said)) == STEPS
    assert listed(said)["types"] >= 2 > listed(said)["imports"]
    # Each step also reports its seconds when it ends.
    before = said.partition("== seconds\n")[0]
    for name in STEPS:
        assert re.search(rf"== {name}\n(?:.*\n)*? +\d+ s  {name}\n", before), name
    tools = [each for each in ran if not each.startswith("python")]
    tools.remove("mypy ")  # runs in parallel with the others
    assert tools == [
        "ruff format --check .",
        "ruff check .",
        "lint-imports --no-cache",
        "pytest --collect-only -qq -m not slow",
        "pytest --numprocesses 3 --dist worksteal --maxfail 50 -m not slow -k ring",
    ]


def test_tests_write_in_memory_where_it_has_room_and_nothing_stays(gate: Gate) -> None:
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= 6 << 30
    assert gate.run("-k", "ring")[0] == 0
    scratch = Path((gate.folder / "log.scratch").read_text().strip())
    assert (scratch.parent == memory) is has_room
    assert not has_room or not scratch.exists()


def test_quick_runs_some_tests_that_there_are(gate: Gate) -> None:
    status, said, ran = gate.run("--quick", "-x")
    assert status == 0
    assert list(listed(said)) == STEPS
    [*options, last] = next(each for each in ran if each.startswith("pytest --num")).split()
    assert (options[0], last) == ("pytest", "-x")
    files = [word for word in options if word.startswith("tests/")]
    assert len(files) > 8
    assert [word for word in files if not (ROOT / word).exists()] == []


def test_a_step_that_fails_is_named_and_the_others_run(gate: Gate) -> None:
    status, said, _ = gate.run(breaks="mypy")
    assert status == 1
    assert list(listed(said)) == STEPS
    assert "\nFAILED: types\n" in said
    assert "All checks passed" not in said


def test_a_set_up_that_fails_ends_it(gate: Gate) -> None:
    status, said, ran = gate.run(breaks="python")
    assert status != 0
    assert "FAILED: set-up (see above)" in said
    assert not any(each.startswith("pytest") for each in ran)


def test_the_newest_are_installed_without_constraints_into_a_fresh_environment(gate: Gate) -> None:
    """TorchRL's nightly build replaces its release before the tests run."""
    left = gate.folder / ".venv-newest/bin/python"
    left.parent.mkdir(parents=True)
    left.write_text("#!/bin/bash\necho 'of yesterday' >>\"$LOG\"\n")
    left.chmod(0o755)
    maker = gate.folder / "maker"
    maker.write_text(
        f'#!/bin/bash\nif [[ $* == "-m venv .venv-newest" ]]; then cp -r .venv .venv-newest\n'
        f'else exec {sys.executable} "$@"; fi\n'
    )
    maker.chmod(0o755)
    status, said, ran = gate.run("--newest", "-k", "ring", PYTHON=str(maker))
    assert status == 0, said
    assert list(listed(said)) == ["set-up", "pytest"]
    pips = [each for each in ran if " pip " in each]
    assert "of yesterday" not in ran
    assert not any("constraints.txt" in each for each in pips)
    taken, given = pips[2:4]
    assert "pip uninstall" in taken
    assert "--no-deps -r .venv-newest/without-dependencies" in given
    wanted = (gate.folder / ".venv-newest/without-dependencies").read_text().split()
    assert [each.partition("==")[0] for each in wanted] == ["tensordict", "torchrl-nightly"]
    assert ran[-1].endswith(" -m not slow -k ring")


def test_all_environments_install_one_wheel(gate: Gate) -> None:
    """Each environment runs check.sh again, which would build the same wheel."""
    every = tomllib.loads((gate.folder / "tests/systems/environments.toml").read_text())
    others = [name for name, each in every.items() if each["run"] == "all"]
    for name in others:
        shutil.copytree(gate.folder / ".venv", gate.folder / f".venv-{name}")
    gate.tool(gate.folder / "no/gcc")  # without it, no debug build is tested
    path = f"{gate.folder / 'no'}:{os.environ['PATH']}"
    status, said, ran = gate.run("--all", breaks="gcc", PATH=path)
    assert status == 0, said
    assert sum(each.startswith("python -m build ") for each in ran) == 1
    for name in others:
        install = f"--no-deps --force-reinstall .venv-{name}/dist/tallyroll-1.whl"
        assert sum(each.endswith(install) for each in ran) == 1


def test_browser_builds_the_pages_and_looks_at_them_alone(gate: Gate) -> None:
    gate.tool(gate.folder / ".venv-browser/bin/python")
    axe = gate.folder / ".venv-browser/package/axe.min.js"  # so that npm does not download it
    axe.parent.mkdir()
    axe.touch()
    (gate.folder / "docs").mkdir()
    shutil.copy(BROWSER, gate.folder / "docs")
    status, said, ran = gate.run("--browser", "--shots", "there", CHROMIUM="true")
    assert status == 0
    assert list(listed(said)) == ["set-up", "pages", "browser"]
    look = "docs/browser.py --shots there --axe .venv-browser/package/axe.min.js"
    assert ran[-6].startswith("python -m sphinx -n -W ")
    assert ran[-5:] == [
        "python docs/site_check.py .venv/pages",
        "python -m pip install -qq -c constraints.txt playwright",
        "python docs/report_page.py .venv/report.html",
        f"python {look} .venv/pages --page .venv/report.html",
        f"python docs/viewed.py .venv-browser/bin/python {look} --viewer",
    ]
    status, said, ran = gate.run("--browser", CHROMIUM="no-such-browser")
    assert (status, said, ran) == (1, "", [])


@pytest.mark.parametrize(
    ("browser", "files", "error"),
    [
        ("no-such-browser", [], "no no-such-browser is installed: apt-get install chromium"),
        ("true", [], "no site is in .: python -m sphinx"),
        ("true", ["index.html"], "playwright is not installed: pip install"),
    ],
)
def test_what_a_look_at_the_pages_lacks_is_one_line(
    tmp_path: Path, browser: str, files: list[str], error: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    command = [sys.executable, "-I", "-S", str(BROWSER), "."]  # without any third-party package
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"CHROMIUM": browser},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(error)
    assert done.stderr.count("\n") == 1


# --- files that tests leave behind ----------------------------------------------------------------


@pytest.fixture
def of_all_tests(pytestconfig: pytest.Config) -> Any:
    """Return the conftest.py of all tests."""
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(each for each in plugins if hasattr(each, "_leftover_files"))


@pytest.fixture
def shared_file() -> Iterator[Callable[[str], str]]:
    """Return a factory of unmapped files in shared memory, which are removed after the test."""
    made = []

    def make(name: str) -> str:
        made.append(Path("/dev/shm", name))
        made[-1].touch()
        return name

    yield make
    for each in made:
        each.unlink(missing_ok=True)


def test_files_of_other_programs_are_not_blamed_on_a_test(
    of_all_tests: Any, shared_file: Callable[[str], str]
) -> None:
    before = of_all_tests._shared_files()
    for name in (f"sem.mp-{os.getppid()}-of_other", "sem.mp-ofascript", "psm_of_other"):
        shared_file(name)
    assert of_all_tests._leftover_files(before) == []
    left = [shared_file(f"sem.mp-{os.getpid()}-x"), shared_file(f"torch_{os.getpid()}_1_2")]
    assert of_all_tests._leftover_files(before) == left
    segment = shared_memory.SharedMemory(create=True, size=1)  # its name has no process id
    try:
        assert of_all_tests._leftover_files(before) == sorted([*left, segment.name])
    finally:
        segment.close()
        segment.unlink()


def test_what_we_spawn_has_our_semaphores() -> None:
    context = multiprocessing.get_context("spawn")
    made = "__import__('multiprocessing').get_context('spawn').Lock()._semlock.name"
    with context.Pool(1) as pool:
        names = pool.apply(eval, [made]), eval(made)
    assert [each.rpartition("-")[0] for each in names] == [f"/mp-{os.getpid()}"] * 2


def test_the_seconds_of_the_slowest_files_are_told_where_that_is_asked_for(
    of_all_tests: Any,
) -> None:
    def report(test: str, seconds: float) -> pytest.TestReport:
        return pytest.TestReport(
            test, (test, 1, test), {}, "passed", None, "call", duration=seconds
        )

    said: list[str] = []
    passed = [report("a.py::x[1]", 1.25), report("b.py::x", 4), report("a.py::x[2]", 5)]
    stats = {"passed": passed, "": [report("c.py::y", 0.5)], "warnings": [object()]}
    reporter = SimpleNamespace(stats=stats, section=said.append, write_line=said.append)
    for most in (0, 2):
        config = SimpleNamespace(getoption={"seconds_of_files": most}.__getitem__)
        of_all_tests.pytest_terminal_summary(reporter, config)
    assert said == ["slowest 2 files", "    6.2 s  a.py", "    4.0 s  b.py"]
