"""What holds for every test: one thread, and nothing left behind."""

from __future__ import annotations

import gc
import math
import os
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, wraps
from multiprocessing import process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from warm_cli import WarmServer

pytest.register_assert_rewrite("tallyroll.storage.testing", "storage_contract", "storage_machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script that starts the tests with & has them ignore it, and all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The contracts that ship are no test modules, whose assertions pytest explains.
pytest.register_assert_rewrite("tallyroll.collector.testing")

UNTIL = float(os.environ.get("TALLYROLL_CHECK_UNTIL", "inf"))
"""The time after which no long test begins, in seconds since 1970."""

# Shared machines are slow at times: pytest's own watchdog is the deadline. Examples are the same in
# each run, so that a change does not fail for an example that it has nothing to do with.
# TALLYROLL_EXAMPLES=20 draws others, 20 times as many.
MORE_EXAMPLES = int(os.environ.get("TALLYROLL_EXAMPLES", "0"))
settings.register_profile("tallyroll", deadline=None, derandomize=not MORE_EXAMPLES)
settings.load_profile("tallyroll")

# A test that takes memory without end gets a MemoryError: the machine would stand still.
MOST_BYTES = 8 << 30

SHM = Path("/dev/shm")
# The name of a semaphore has the id of this process, also if a process that we spawn makes it.
process.current_process()._config["semprefix"] = f"/mp-{os.getpid()}"  # type: ignore[attr-defined]
# So do tensors and arrays that this process shares.
OURS = re.compile(rf"(?:sem\.mp-|torch_|pym-){os.getpid()}[-_]")
KERNEL_LISTS = Path(f"/proc/self/task/{os.getpid()}/children").exists()
GRACE_SECONDS = 5.0
# Of Python, torch and ours: started on first use, they live as long as the interpreter.
HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "tallyroll.collector.workers.local.fork_server",
    "torch_shm_manager",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds-of-files", type=int, default=0, metavar="N", help="N slowest files")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With that option, the seconds of each file: of all its tests, set-up and all."""
    seconds: Counter[str] = Counter()
    if most := config.getoption("seconds_of_files"):
        for reports in terminalreporter.stats.values():
            for report in reports:
                if isinstance(report, pytest.TestReport):
                    seconds[report.nodeid.partition("::")[0]] += report.duration
        terminalreporter.section(f"slowest {most} files")
    for file, duration in seconds.most_common(most):
        terminalreporter.write_line(f"{duration:7.1f} s  {file}")


def pytest_collection(session: pytest.Session) -> None:
    """What needs torch: of xdist the process that only gives out tests starts without it."""
    if (
        not hasattr(session.config, "workerinput")
        and session.config.getoption("dist", "no") != "no"
    ):
        return
    gc.disable()  # nearly all objects made until `pytest_collection_finish` stay: 8 of 28 seconds
    import torch

    torch.set_num_threads(1)
    # A driver of CUDA maps more than that, and so do sanitizers.
    if not torch.cuda.is_available() and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    _ask_git_once()
    _start_workers_quickly()
    _print_no_progress()


def _print_no_progress() -> None:
    """A command prints a line after some seconds, which only a slow machine takes."""
    from tallyroll.collector.ext import progress

    progress.LINE_SECONDS = math.inf


def _start_workers_quickly() -> None:
    """By default, too, workers come from the fork server of the tests.

    It preloads modules, as that of a program may, for which workers are spawned by default. Each
    one would import torch for seconds.
    """
    from tallyroll.collector.workers.local import processes

    def start_method() -> str:
        from fork_server import warm_fork_server

        warm_fork_server()
        return "forkserver"

    processes.default_start_method = start_method


def _ask_git_once() -> None:
    """Each stored run asks git, in a process of its own: some 8 ms, thousands of times.

    Commands and workers ask it each time, in their processes, and so do tests of provenance.
    """
    from tallyroll.collector.batches.state import host_info

    asked = cache(lambda _, ask=host_info.git_of_folder: ask())
    host_info.git_of_folder = wraps(host_info.git_of_folder)(lambda: asked(os.getcwd()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of Hypothesis draw as many examples as TALLYROLL_EXAMPLES asks for."""
    for item in items if MORE_EXAMPLES else ():
        function = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            function = getattr(function, "__func__", function)
            own = getattr(function, "_hypothesis_internal_use_settings", None) or settings.default
            more = settings(own, max_examples=MORE_EXAMPLES * own.max_examples, derandomize=False)
            function._hypothesis_internal_use_settings = more


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no long test once the time of ``check.sh`` has passed."""
    if time.time() > UNTIL and item.get_closest_marker("slow") is not None:
        pytest.skip("no time is left for long tests: TALLYROLL_CHECK_UNTIL")


def pytest_collection_finish() -> None:
    """What was imported stays: looking for garbage in it took half a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def server() -> Iterator[WarmServer]:
    """Starts commands in processes that need not import torch."""
    from warm_cli import WarmServer

    with WarmServer() as server:
        yield server


@pytest.fixture(autouse=True)
def own_exploration_type() -> Iterator[None]:
    """TorchRL has one for all threads: workers that are threads may leave theirs behind."""
    import torch
    from torchrl.envs.utils import set_exploration_type

    with set_exploration_type(None):
        yield
    had_gradients = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert had_gradients, "gradients are off after the test"


def _descendants(pid: int) -> Iterator[int]:
    """Processes below ``pid``. Most kernels list them; psutil looks at every one that there is."""
    if not KERNEL_LISTS:
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
        return
    with suppress(OSError):  # it ended
        for task in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError):
                for child in map(int, Path(task.path, "children").read_bytes().split()):
                    yield child
                    yield from _descendants(child)


def _new_children(before: set[int]) -> dict[int, psutil.Process]:
    """Living descendants of this process by id, without the helpers and `before`."""
    found = {}
    for pid in {*_descendants(os.getpid())} - before:
        try:
            child = psutil.Process(pid)
            is_helper = any(name in " ".join(child.cmdline()) for name in HELPERS)
            if not is_helper and child.status() != psutil.STATUS_ZOMBIE:
                found[pid] = child
        except psutil.NoSuchProcess:
            continue
    return found


def _shared_files() -> set[str]:
    """Names in /dev/shm. Directories there are of tests that want files in memory."""
    if not SHM.is_dir():
        return set()
    with os.scandir(SHM) as entries:
        return {entry.name for entry in entries if not entry.is_dir()}


def _own_files(before: set[str]) -> list[str]:
    """New files there that have a name of ours, or that this process maps."""
    if not (new := _shared_files() - before):
        return []
    maps = Path("/proc/self/maps").read_text()
    return sorted(name for name in new if OURS.match(name) or f" {SHM}/{name}\n" in maps)


def _leftover_files(before: set[str]) -> list[str]:
    left = _own_files(before)
    for generation in (1, 2):  # tensors in cycles hold their file until then; most are young
        if left:
            gc.collect(generation)
            left = _own_files(before)
    return left


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test: no new child process, and no new file of ours in /dev/shm."""
    children, files = {*_descendants(os.getpid())}, _shared_files()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := _new_children(children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = []
    for pid, child in left.items():
        with suppress(psutil.NoSuchProcess):
            lines.append(f"{pid}: {' '.join(child.cmdline())}")
            child.kill()
    assert not lines, "child processes are left:\n" + "\n".join(lines)
    deadline = time.monotonic() + GRACE_SECONDS
    while (left_files := _leftover_files(files)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_files, f"files are left in {SHM}: {left_files}"
