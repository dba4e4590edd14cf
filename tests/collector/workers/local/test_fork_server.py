"""Workers from the fork server behave as spawned ones."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch

from tallyroll.collector import MultiprocessCollector, compat
from tallyroll.collector.errors import ArgumentError, WorkerDied
from tallyroll.collector.workers.local import fork_server, processes
from tallyroll.collector.workers.local.fork_server import SERVER, ForkedProcess
from tallyroll.collector.workers.local.processes import process_kind

from fork_server import SERVER as WARM_SERVER
from fork_server import warm_fork_server

SERVED = "tallyroll.collector.workers.local.fork_server import serve"
RUN: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 40, "seed": 1}


@pytest.fixture(autouse=True)
def nothing_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the modules that other tests preload, as in a program of its own."""
    monkeypatch.setattr(fork_server, "preloaded_modules", lambda: ["__main__"])
    monkeypatch.setattr(processes, "default_start_method", fork_server.default_start_method)


@pytest.fixture(scope="module", autouse=True)
def server_of_module() -> Iterator[None]:
    yield
    SERVER.stop()


def factory(folder: Path, look: Callable[[], Any]) -> Any:
    """Return a factory that writes the result of ``look`` to a file named by its process."""

    def make() -> Any:
        import json
        import os

        (folder / str(os.getpid())).write_text(json.dumps(look()))
        return gymnasium.make("CartPole-v1")

    return make


def looks(folder: Path, look: Callable[[], Any], workers: int = 1, **options: Any) -> list[Any]:
    """Return the result of ``look`` in each worker of a collector that collects to its end."""
    folder.mkdir(exist_ok=True)
    make = factory(folder, look)
    with MultiprocessCollector(
        make, num_workers=workers, num_envs=workers, **RUN, **options
    ) as collector:
        assert sum(map(len, collector)) == RUN["total_frames"]
        pids = collector.worker_pids
    return [json.loads((folder / str(pid)).read_text()) for pid in pids]


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


# --- the default ----------------------------------------------------------------------------------


def test_workers_are_forked_by_a_server_by_default(tmp_path: Path) -> None:
    (parent,) = looks(tmp_path, os.getppid)
    assert parent == SERVER._pid
    (spawned,) = looks(tmp_path, os.getppid, mp_start_method="spawn")
    assert spawned == os.getpid()


def answer(pipe: Any) -> None:
    pipe.send(fork_server.default_start_method())


@pytest.mark.parametrize("daemon", [False, True])
def test_a_child_of_multiprocessing_spawns(daemon: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=answer, args=(theirs,), daemon=daemon
    )
    child.start()
    assert ours.recv() == "spawn"
    child.join()
    assert fork_server.default_start_method() == "forkserver"


def test_a_program_that_preloads_modules_spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With forkserver, the program gets the server that has these modules."""
    listed = ["__main__", fork_server.PRELOADED]
    monkeypatch.setattr(fork_server, "preloaded_modules", lambda: listed)
    assert fork_server.default_start_method() == "forkserver"
    assert process_kind("forkserver") is ForkedProcess
    listed.append("json")
    assert fork_server.default_start_method() == "spawn"
    preloaded = []
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(context, "set_forkserver_preload", preloaded.extend)
    assert process_kind("forkserver") is context.Process
    assert preloaded == ["json", fork_server.PRELOADED]


def test_a_system_without_fork_servers_spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "get_all_start_methods", lambda: ["spawn", "fork"])
    assert fork_server.default_start_method() == "spawn"


def test_an_executable_spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert fork_server.default_start_method() == "spawn"


# --- the workers' surroundings --------------------------------------------------------------------


def variables() -> list[str | None]:
    names = ["ADDED", "CHANGED", "REMOVED", "CUDA_VISIBLE_DEVICES"]
    return [os.environ.get(name) for name in names]


def test_a_worker_has_the_environment_variables_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert looks(tmp_path, variables) == [[None, "before", "before", None]]
    monkeypatch.setenv("ADDED", "now")
    monkeypatch.setenv("CHANGED", "now \udcff é")
    monkeypatch.delenv("REMOVED")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert looks(tmp_path, variables) == [["now", "now \udcff é", None, "7"]]


def test_so_has_a_worker_of_multiprocessings_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_fork_server()
    monkeypatch.setattr(fork_server, "preloaded_modules", compat.preloaded_modules)
    monkeypatch.setenv("ADDED", "now")
    server = {"mp_start_method": "forkserver"}
    assert [found[0] for found in looks(tmp_path / "0", variables, **server)] == ["now"]
    assert looks(tmp_path / "1", os.getppid, **server) == [WARM_SERVER._forkserver_pid]


def threads_of_libraries() -> list[Any]:
    import os

    maps = open("/proc/self/maps").read().splitlines()  # noqa: SIM115
    (path,) = {line.split()[-1] for line in maps if "openblas" in line}
    blas = ctypes.CDLL(path).scipy_openblas_get_num_threads64_()
    return [os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), blas]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_worker_has_threads_as_if_it_were_spawned(threads: int, tmp_path: Path) -> None:
    options = {"threads_per_worker": threads}
    assert looks(tmp_path, threads_of_libraries, **options) == [[str(threads), threads, threads]]
    assert threads_in(SERVER._pid) == 1


def test_a_worker_writes_where_its_parent_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server may have started while another file was the output."""
    SERVER.start()
    outputs = os.dup(1), os.dup(2)
    try:
        with open(tmp_path / "output", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        looks(tmp_path / "0", lambda: os.write(1, b"out ") + os.write(2, b"err "))
    finally:
        for number, kept in enumerate(outputs, 1):
            os.dup2(kept, number)
            os.close(kept)
    assert (tmp_path / "output").read_text() == "out err "
    assert capfd.readouterr() == ("", "")


def surroundings() -> list[Any]:
    import os
    import resource
    from pathlib import Path

    status = Path("/proc/self/status").read_text()
    umask = status.partition("Umask:")[2].split()[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [umask, os.getcwd(), files, sorted(os.sched_getaffinity(0))]


def test_a_worker_has_its_parents_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, cpus = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    looks(tmp_path / "before", surroundings)
    umask = os.umask(0o027)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 3, before[1]))
        os.sched_setaffinity(0, {min(cpus)})
        monkeypatch.chdir(tmp_path)
        expected = ["0027", str(tmp_path), before[0] - 3, [min(cpus)]]
        assert looks(tmp_path / "now", surroundings) == [expected]
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.sched_setaffinity(0, cpus)


def draws() -> list[float]:

    import torch

    return [random.random(), np.random.random(), torch.rand(()).item()]


def test_factories_draw_numbers_of_their_own(tmp_path: Path) -> None:
    """A fork copies the generators that libraries seed on import."""
    drawn = looks(tmp_path, draws, workers=3)
    for numbers in zip(*drawn, strict=True):
        assert len({*numbers}) == 3


# --- the server -----------------------------------------------------------------------------------


def threads_in(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


PROGRAM = """
import multiprocessing, os, sys, time
from multiprocessing import forkserver
with open({log!r}, "a") as log:
    print("main", os.getpid(), os.environ.get("SET_LATE"), file=log)

def make():
    import gymnasium
    return gymnasium.make("CartPole-v1")

def look(pipe):
    pipe.send([os.getpid(), os.environ.get("OMP_NUM_THREADS"), "torch" in sys.modules])

if __name__ == "__main__":
    from tallyroll.collector import MultiprocessCollector

    os.environ.pop("OMP_NUM_THREADS", None)
    for late in "01":
        os.environ["SET_LATE"] = late
        with MultiprocessCollector(
            make, num_workers=2, num_envs=2, frames_per_batch=5, total_frames=10, seed=0
        ) as collector:
            print(sum(map(len, collector)), *collector.worker_pids, flush=True)
            if late == "1":
                print(forkserver._forkserver._forkserver_pid)
                # A killed program leaves the socket of this server.
                multiprocessing.current_process()._config["tempdir"] = "."
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload(["json"])
                ours, theirs = context.Pipe()
                process = context.Process(target=look, args=(theirs,))
                process.start()
                print(*ours.recv(), flush=True)
                process.join()
                time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a separate program, whose temporary files go to tmp."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM.format(log=str(tmp_path / "log")))
    # A stub of JAX that logs its import.
    (tmp_path / "jax.py").write_text(f"import os; open({str(tmp_path / 'jax')!r}, 'w')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    started = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield started
    started.kill()
    started.communicate()


def test_a_server_of_a_program_that_is_killed(
    tmp_path: Path, program: subprocess.Popen[str]
) -> None:
    """The server imports nothing of the program, starts no thread or CUDA, and leaves no file.

    Workers import the program once variables are set. The program's own fork server starts on
    demand and knows nothing of ours.
    """
    assert program.stdout is not None
    pids = []
    for _ in range(2):
        count, *workers = map(int, program.stdout.readline().split())
        assert count == 10
        pids.append(workers)
    assert program.stdout.readline() == "None\n"
    look, *seen = program.stdout.readline().split()
    assert seen == ["None", "False"]
    (server,) = (
        each
        for each in psutil.Process(program.pid).children()
        if SERVED in " ".join(each.cmdline())
    )
    assert server.num_threads() == 1
    loaded = {line.path for line in server.memory_maps()}
    assert any("libtorch_cpu" in path for path in loaded)
    assert not any("libcuda.so" in path for path in loaded)
    assert not (tmp_path / "jax").exists()
    lines = (tmp_path / "log").read_text().splitlines()
    expected = [f"main {program.pid} None"]
    expected += [f"main {pid} {late}" for late in (0, 1) for pid in pids[late]]
    expected += [f"main {look} 1"]
    assert sorted(lines) == sorted(expected)
    processes = [server, *map(psutil.Process, pids[1])]
    program.kill()
    program.wait()
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive
    assert [each.name for each in (tmp_path / "tmp").rglob("*") if not each.is_dir()] == []
    assert [each.name for each in (tmp_path / "tmp").glob("pymp-*")] == []


def test_a_limit_of_the_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server continues, because other workers need it."""
    SERVER.start()
    before, kept = SERVER._pid, fork_server._share_limits

    def few_files(pid: int) -> None:
        kept(pid)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (10, hard))

    with monkeypatch.context() as patched:
        patched.setattr(fork_server, "_share_limits", few_files)
        with pytest.raises(ArgumentError, match=r"num_workers: 1 workers could not be started"):
            MultiprocessCollector("CartPole-v1", num_workers=1, **RUN)
    with MultiprocessCollector("CartPole-v1", num_workers=1, **RUN) as collector:
        assert sum(map(len, collector)) == 40
    assert SERVER._pid == before


def test_a_server_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "SERVER", server := fork_server.ForkServer())
    monkeypatch.setattr("tallyroll.collector.workers.local.processes.SERVER", server)
    monkeypatch.setattr(fork_server, "_ALONE", {"x": "\0"})  # a variable that cannot be set
    with pytest.raises(ArgumentError, match="the fork server did not start"):
        MultiprocessCollector("CartPole-v1", num_workers=1, **RUN)
    server.stop()


# --- coexistence with other processes of the program ----------------------------------------------


def test_a_forked_child_has_no_part_in_the_server() -> None:
    """A server in a child would never end, and would wait for a process that is not its child."""
    SERVER.start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if SERVER._control is None and SERVER._pid == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert SERVER._control is not None


# --- its death: last, because each start of a server imports torch for seconds -------------------


def test_a_server_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies twice: when it is asked for a worker, and when it has workers.

    The ends of the workers are no longer visible, so they count as dead: they are replaced, or the
    run ends with an error.
    """
    SERVER.start()
    servers, kept = [SERVER._pid], fork_server._share_limits

    def kill(pid: int) -> None:
        if pid == servers[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        kept(pid)

    monkeypatch.setattr(fork_server, "_share_limits", kill)
    for options in ({"on_worker_death": "respawn", "max_respawns": 2}, {}):
        run = {**RUN, "total_frames": 3000, **options}
        with MultiprocessCollector("CartPole-v1", num_workers=2, num_envs=2, **run) as collector:
            assert {*map(parent_of, collector.worker_pids)} == {SERVER._pid}
            batches = iter(collector)
            stored = len(next(batches))
            workers = [psutil.Process(pid) for pid in collector.worker_pids]
            servers.append(SERVER._pid)
            os.kill(SERVER._pid, signal.SIGKILL)
            if options:
                assert stored + sum(map(len, batches)) == 3000
                assert collector.ledger.respawned == 2
                assert {*map(parent_of, collector.worker_pids)} == {SERVER._pid}
                assert len({*servers, SERVER._pid}) == 3
            else:
                with pytest.raises(WorkerDied):
                    list(batches)
            collector.ledger.check()
        _, alive = psutil.wait_procs(workers, 10)
        # zombies that belong to another parent
        assert all(each.status() == psutil.STATUS_ZOMBIE for each in alive)
