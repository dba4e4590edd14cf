"""Scripts without a main guard: workers that would start workers raise an error and end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, WorkerRaised

from worker_kit import in_threads, start

SCRIPT = """
from tallyroll.collector import MultiprocessCollector

open("came here", "a").write("again ")
{guard}
    with MultiprocessCollector(
        "CartPole-v1",
        frames_per_batch=5,
        total_frames=10,
        num_workers=2,
        num_envs=2,
        mp_start_method={method!r},
    ) as collector:
        print([len(batch) for batch in collector])
"""


def ran(folder: Path, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_is_told_what_to_write(tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(guard="if True:", method=method))
    run = ran(tmp_path, "script.py")
    assert run.returncode == 1
    assert run.stdout == ""
    assert 'expected the collector to be made under `if __name__ == "__main__":`' in run.stderr
    assert "in worker 0 too. Write" in run.stderr or "in worker 1 too. Write" in run.stderr
    assert run.stderr.count("Traceback") == 1
    # Once by the script, and by each worker before it reached the collector.
    assert 2 <= (tmp_path / "came here").read_text().count("again") <= 3


NEWER_FORK_SERVER = """
import multiprocessing.spawn

if __name__ == "__main__":
    before = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: before(name) | {"main_path": __file__}
"""
"""Make the fork server preload the main module, as since Python 3.13."""


@pytest.mark.slow
def test_a_fork_server_outlives_a_script_without_a_guard(tmp_path: Path) -> None:
    """The server does not preload the main module, which would end it. Each worker imports it."""
    script = NEWER_FORK_SERVER + SCRIPT.format(guard="if True:", method="forkserver")
    (tmp_path / "script.py").write_text(script)
    run = ran(tmp_path, "script.py")
    assert run.returncode == 1
    assert "got a collector in worker" in run.stderr
    assert run.stderr.count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_with_a_guard_runs(tmp_path: Path, method: str) -> None:
    guard = 'if __name__ == "__main__":'
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=guard, method=method))
    run = ran(tmp_path, "script.py")
    assert (run.returncode, run.stdout) == (0, "[5, 5]\n"), run.stderr


@pytest.mark.slow
def test_a_program_from_stdin_is_refused(tmp_path: Path) -> None:
    """Workers would look for a file named "<stdin>"."""
    run = ran(tmp_path, "-", stdin=SCRIPT.format(guard="if True:", method="spawn"))
    assert run.returncode == 1
    assert "read from stdin. Save the program in a file" in run.stderr
    assert (tmp_path / "came here").read_text() == "again "


IDS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from tallyroll.collector import MultiprocessCollector

def make():
    return gymnasium.make_vec("Mine-v0", 1, vectorization_mode="sync")

if __name__ == "__main__":
    gymnasium.register("Mine-v0", entry_point=CartPoleEnv)
    for create in ("Mine-v0", [make]):
        try:
            MultiprocessCollector(create, frames_per_batch=5, total_frames=5, num_workers=1)
        except Exception as error:
            known = "the ids that imported modules register, but not"
            print(type(error).__name__, known in str(error))
"""


@pytest.mark.slow
def test_an_id_that_is_registered_under_the_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IDS)
    run = ran(tmp_path, "script.py")
    assert run.stdout == "ArgumentError True\nWorkerRaised True\n", run.stderr


ASYNC = """
import gymnasium
from tallyroll.collector import SyncCollector

def make():
    cartpole = lambda: gymnasium.make("CartPole-v1")
    return gymnasium.vector.AsyncVectorEnv([cartpole] * 2, context={context!r})

{guard}
    with SyncCollector(make, frames_per_batch=5, total_frames=10) as collector:
        print([len(batch) for batch in collector])
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_an_environment_that_starts_processes_without_a_guard(tmp_path: Path, context: str) -> None:
    (tmp_path / "script.py").write_text(ASYNC.format(guard="if True:", context=context))
    run = ran(tmp_path, "script.py")
    assert run.returncode == 1
    assert "the environment's own processes ended while it was made" in run.stderr
    assert "ran the code of the main module: make environment and collector under" in run.stderr
    guard = 'if __name__ == "__main__":'
    (tmp_path / "script.py").write_text(ASYNC.format(guard=guard, context=context))
    run = ran(tmp_path, "script.py")
    assert (run.returncode, run.stdout) == (0, "[5, 5]\n"), run.stderr


# --- the same, without their own processes --------------------------------------------------------

RUN: dict[str, Any] = {"frames_per_batch": 5, "total_frames": 5}
HINT = "a worker process knows the ids that imported modules register"


@pytest.mark.parametrize("worker", [True, False])
def test_an_id_that_is_unknown_has_a_hint_in_workers_alone(
    worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = multiprocessing.current_process() if worker else None
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    with pytest.raises(ArgumentError, match="gymnasium cannot make 'Nowhere-v0'") as found:
        SyncCollector("Nowhere-v0", **RUN)
    assert (HINT in str(found.value)) is worker
    with pytest.raises(ArgumentError) as found:
        SyncCollector("CartPole-v1", env_kwargs={"nope": 1}, **RUN)
    assert HINT not in str(found.value)


def test_a_factory_of_an_id_that_is_unknown_has_a_hint() -> None:
    def unknown() -> Any:
        return gymnasium.make_vec("Nowhere-v0", 1, vectorization_mode="sync")

    def failing() -> Any:
        raise ValueError("no luck")

    for create, has_hint in ((unknown, True), (failing, False)):
        with in_threads(), pytest.raises(WorkerRaised) as found:
            start([create], **RUN)
        assert (HINT in str(found.value)) is has_hint


@pytest.mark.parametrize(
    ("raised", "starting", "wanted"),
    [
        (EOFError(), False, "the environment's own processes ended while it was made"),
        (ConnectionResetError(), False, "the environment's own processes ended while it was made"),
        (RuntimeError("an attempt"), True, "ran the code of the main module: make environment and"),
        (RuntimeError("of its own"), False, None),
    ],
    ids=str,
)
def test_what_an_environment_raises_that_starts_processes(
    raised: Exception, starting: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        raise raised

    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", starting, raising=False)
    with pytest.raises(Exception) as found:  # noqa: PT011
        SyncCollector(make, **RUN)
    if wanted is None:
        assert found.value is raised
        return
    assert isinstance(found.value, EnvironmentRefused)
    assert wanted in str(found.value)
    assert 'if __name__ == "__main__":' in str(found.value)
    assert found.value.__cause__ is raised
