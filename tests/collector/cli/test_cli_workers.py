"""``tallyroll collect --workers`` in real processes."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.cli import main, without_ours
from tallyroll.collector.cli.inspection.inspect import as_text, examine
from tallyroll.collector.cli.plan import Plan
from tallyroll.storage import open_storage

from warm_cli import Command, WarmServer

AT_ONCE = 5.0
"""Seconds within which a signalled process and its workers must be gone."""
WHILE_IT_STARTS = 30.0
"""Same limit for starting workers and their parent.

Workers check their parent once they have imported torch, and the parent waits up to 5 seconds for
them.
"""
MINE = """
import time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    def __init__(self, at=0, hang=None, slow=0.0, render_mode=None):
        super().__init__()
        self.at, self.hang, self.slow, self.steps = at, hang, slow, 0
    def step(self, action):
        self.steps += 1
        time.sleep(self.slow)
        if self.steps == self.at:
            if self.hang:
                open(self.hang, "w").close()
                time.sleep(600)
            self.broken()
        return super().step(action)
    def broken(self):
        raise RuntimeError("the simulator fell over")

gymnasium.register("Mine-v0", entry_point="mine:Mine", disable_env_checker=True)
"""
AGENT = """
def act(td):
    return td.set("action", (td["observation"][..., 2] > 0).long())
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Create a folder with a user's modules."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


def mine(frames: int, workers: int, *more: object, **kwargs: object) -> tuple[object, ...]:
    """Build a command line; keyword arguments go to the environment."""
    words = ("collect", "mine:Mine-v0", "--frames", frames, "--workers", workers, "--seed", 3)
    given = ("--env-kwargs", json.dumps(kwargs)) if kwargs else ()
    return (*words, *given, "--frames-per-batch", 50, *more)


def workers_of(command: Command) -> list[psutil.Process]:
    """Return the live workers of a command."""
    try:
        children = psutil.Process(command.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        try:
            parent = psutil.Process(child.ppid())
            if any("fork_server import serve" in word for word in parent.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def require_gone(workers: list[psutil.Process], within: float = AT_ONCE) -> None:
    deadline = time.monotonic() + within
    while left := [each.pid for each in workers if _lives(each)]:
        assert time.monotonic() < deadline, f"workers {left} are left"
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rows_in(path: Path) -> int:
    if not (path / "manifest.json").exists():
        return 0
    with open_storage(path) as storage:
        return storage.head


def wait_for_rows(command: Command, rows: int = 1) -> list[psutil.Process]:
    """Wait until `rows` rows are committed, and return the live workers."""
    deadline = time.monotonic() + 60
    while rows_in(command.folder / "data") < rows:
        assert time.monotonic() < deadline, command.err
        time.sleep(0.02)
    return workers_of(command)


def require_resumable(server: WarmServer, command: Command, extra: int = 70) -> str:
    """Run the printed resume command in one process, and return its report."""
    committed = rows_in(command.folder / "data")
    assert committed > 0
    (resume,) = (line for line in command.err.splitlines() if line.startswith("    tallyroll"))
    words = [*shlex.split(resume)[1:], "--workers", 0, "--frames", committed + extra]
    done = server.run(command.folder, *words)
    assert rows_in(command.folder / "data") == committed + extra
    assert main(["verify", str(command.folder / "data"), "--quiet"]) == 0
    return done.out


# --- the same data --------------------------------------------------------------------------------


def test_workers_collect_what_one_process_would(server: WarmServer, here: Path) -> None:
    """The policy and the environment come from modules in the current directory."""
    more = ("--num-envs", 3, "--policy", "agent:act", "--out")
    done = server.run(here, *mine(501, 2, *more, "two"))
    assert "\n501 frames of mine:Mine-v0, " in done.out
    assert "tallyroll: 501 of 501 frames (100 %), " in done.err
    assert done.out.endswith(
        "more of the same: tallyroll collect mine:Mine-v0 --frames 501 --num-envs 3 --policy "
        "agent:act --frames-per-batch 50 --workers 2 --out two --append\n"
    )
    server.run(here, *mine(501, 0, *more, "one"))
    with open_storage(here / "two") as two, open_storage(here / "one") as one:
        assert two.head == one.head == 501
        for key in one.schema.keys:
            assert two.column(key).tobytes() == one.column(key).tobytes(), key
        run = two.manifest["runs"][0]
        assert run["command"]["workers"] == run["call"]["num_workers"] == 2
        own = {"call": 0, "command": 0, "made": 0}
        assert run | own == one.manifest["runs"][0] | own
        assert ", 3 lanes in 2 sync workers, seed 3, " in as_text(examine(two, 0))
        assert ", 3 lanes, seed 3, " in as_text(examine(one, 0))
    words = ("--policy", "agent:act", "--resume", "--frames", 600, "--workers", 0, "--out", "two")
    resumed = server.run(here, "collect", "mine:Mine-v0", *words)
    assert "\nresumed once; " in resumed.out
    assert rows_in(here / "two") == 600
    assert main(["verify", str(here / "two"), "--quiet"]) == 0


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers", "mode"),
    [(signal.SIGINT, 2, "sync"), (signal.SIGTERM, 1, "async")],
)
def test_a_signal_to_the_group_commits_what_is_complete(
    server: WarmServer, here: Path, number: signal.Signals, workers: int, mode: str
) -> None:
    words = ("--num-envs", 3, "--mode", mode, "--out", "data")
    command = server.start(here, *mine(1_000_000, workers, *words, slow=0.001))
    living = wait_for_rows(command)
    assert len(living) == workers
    command.kill(number, group=True)
    assert command.wait(AT_ONCE) == 128 + number
    require_gone(living)
    resume = "tallyroll collect mine:Mine-v0 --out data --resume"
    kept = "all complete transitions are committed"
    said = f"stopped by {number.name}; {kept}. Continue with\n    {resume}\n"
    assert command.err.endswith(said)
    assert f"\n{rows_in(here / 'data'):,} frames of mine:Mine-v0" in command.out
    assert "resumed once" in require_resumable(server, command)


def test_a_signal_while_workers_start(server: WarmServer, here: Path) -> None:
    """The signal arrives while the fork server starts, because a fork itself is too short."""
    command = server.start(here, *mine(77, 1, "--out", "data"))
    deadline = time.monotonic() + 30
    while not (living := psutil.Process(command.pid).children()):
        assert time.monotonic() < deadline, command.err
        time.sleep(0.01)
    command.kill(signal.SIGHUP, group=True)
    assert command.wait(WHILE_IT_STARTS) == 129
    require_gone(living, WHILE_IT_STARTS)
    assert (
        "stopped by SIGHUP; nothing was collected yet. Continue with\n    tallyroll" in command.err
    )
    assert not (here / "data").exists()


@pytest.mark.slow
def test_a_second_signal_ends_a_step_that_hangs(server: WarmServer, here: Path) -> None:
    hanging = here / "hanging"
    command = server.start(here, *mine(1000, 1, "--out", "data", at=120, hang=str(hanging)))
    living = wait_for_rows(command, 100)
    deadline = time.monotonic() + 30
    while not hanging.exists():
        assert time.monotonic() < deadline, command.err
        time.sleep(0.02)
    command.kill(signal.SIGINT, group=True)
    time.sleep(0.2)
    assert command.server.ask({"wait": command.pid, "seconds": 0.0})["status"] is None
    command.kill(signal.SIGINT, group=True)
    assert command.wait(AT_ONCE) == 130
    require_gone(living)
    assert 100 <= rows_in(here / "data") < 120
    require_resumable(server, command, 5)


# --- workers that fail ----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_exception_in_a_worker_is_the_users_to_read(server: WarmServer, here: Path) -> None:
    words = ("--num-envs", 2, "--out", "data")
    command = server.start(here, *mine(1000, 1, *words, at=90))
    assert command.wait() == 1
    note, _, said = command.err.partition("tallyroll: error: ")
    assert note.endswith(
        f"tallyroll: {rows_in(here / 'data')} rows are committed in data. Once the cause of the "
        "error is gone, continue with\n    tallyroll collect mine:Mine-v0 --out data --resume\n"
    )
    assert said.startswith("worker 0 (lanes 0 to 1, process ")
    assert "raised RuntimeError while stepping: the simulator fell over; lane 0 (seed " in said
    assert "in broken\n    raise RuntimeError(" in said
    assert "\nRuntimeError: the simulator fell over\n" in said
    assert f"{os.sep}collector{os.sep}workers{os.sep}" not in said
    assert rows_in(here / "data") >= 100
    require_resumable(server, command, 5)


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended(server: WarmServer, here: Path) -> None:
    words = ("--step-timeout", 0.5, "--out", "data")
    command = server.start(here, *mine(1000, 1, *words, at=120, hang=str(here / "hanging")))
    living = wait_for_rows(command, 100)
    assert command.wait() == 1
    require_gone(living)
    assert "completed no step within step_timeout=0.5 seconds, and was ended" in command.err
    assert "Traceback" not in command.err
    require_resumable(server, command, 5)


def test_respawns_reach_the_collector(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of workers check the effect of respawns."""
    given: list[dict[str, Any]] = []

    class Noted(MultiprocessCollector):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given.append(kwargs)
            super().__init__(*args, **kwargs)

    monkeypatch.chdir(here)
    monkeypatch.setattr("tallyroll.collector.cli.collect.MultiprocessCollector", Noted)
    words = ["collect", "CartPole-v1", "--frames", "9", "--workers", "1", "--transport", "thread"]
    for more in (["--respawns", "3"], []):
        assert main([*words, *more, "--out", f"data{len(more)}", "--quiet"]) == 0
    limits = [(each["on_worker_death"], each["max_respawns"]) for each in given]
    assert limits == [("respawn", 3), ("raise", 0)]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_as_often_as_it_was_asked_for(
    server: WarmServer, here: Path
) -> None:
    words = ("--num-envs", 2, "--respawns", 1, "--out", "data")
    command = server.start(here, *mine(1_000_000, 1, *words, slow=0.001))
    (first,) = wait_for_rows(command)
    before = rows_in(here / "data")
    first.kill()
    (second,) = wait_for_rows(command, before + 200)
    assert second.pid != first.pid
    second.kill()
    assert command.wait() == 1
    require_gone([first, second])
    assert "worker 0 (lanes 0 to 1, process " in command.err
    assert " was killed by SIGKILL; seeds " in command.err
    assert "Traceback" not in command.err
    out = require_resumable(server, command)
    assert "\nworkers were replaced once; " in out
    assert "\nresumed once; " in out
    with open_storage(here / "data") as storage:
        facts = examine(storage, 0)
    assert facts["ledger"]["incarnation"] == 2
    assert [run["resumed"] for run in facts["runs"]] == [1]
    text = as_text(facts)
    assert "\nworkers were replaced once; " in text
    assert "\nresumed once; " in text


# --- in threads -----------------------------------------------------------------------------------


def test_workers_in_threads_make_the_same_rows_and_go_on(here: Path, server: WarmServer) -> None:
    """The command calls the policy in its own process.

    `--resume` keeps the options that it omits.
    """
    words = ("--num-envs", 4, "--policy", "agent:act", "--out")
    central = ("--transport", "thread", "--policy-placement", "central")
    threads = server.start(here, *mine(200, 2, *central, *words, "threads"))
    assert threads.wait() == 0, threads.err
    alone = server.start(here, *mine(200, 0, *words, "alone"))
    assert alone.wait() == 0, alone.err
    one, other = (open_storage(here / name) for name in ("alone", "threads"))
    with one, other:
        rows, theirs = one.get(slice(0, 200)), other.get(slice(0, 200))
        assert (rows == theirs).all()
        assert other.manifest["runs"][-1]["command"]["transport"] == "thread"
        assert other.manifest["runs"][-1]["call"]["policy_placement"] == "central"
        assert "transport" not in one.manifest["runs"][-1]["command"]
    more = ("collect", "mine:Mine-v0", "--resume", "--frames", 300, *words[2:], "threads")
    resumed = server.start(here, *more)
    assert resumed.wait() == 0, resumed.err
    assert rows_in(here / "threads") == 300


# --- in this process ------------------------------------------------------------------------------


def test_frames_of_this_package_are_left_out_of_a_traceback() -> None:
    import tallyroll.collector.workers.worker as ours

    theirs = '  File "/home/me/mine.py", line 3, in step\n    fall_over()\n'
    frame = f'  File "{ours.__file__}", line 9, in serve\n    answer = self.step()\n    ^^^^^^\n'
    head = "Traceback (most recent call last):\n"
    assert without_ours(head + frame + theirs + frame + "Error: why\n    because\n") == (
        head + theirs + "Error: why\n    because"
    )


def test_the_module_runs_nothing_where_a_worker_imports_it() -> None:
    runpy.run_module("tallyroll.collector.cli.__main__", run_name="__mp_main__")


@pytest.mark.parametrize(
    ("given", "lanes"),
    [({}, 1), ({"workers": 0}, 1), ({"workers": 4}, 4), ({"workers": 4, "num_envs": 9}, 9)],
)
def test_lanes_by_default(given: dict[str, int], lanes: int) -> None:
    assert Plan(**given).lanes == lanes  # type: ignore[arg-type]
