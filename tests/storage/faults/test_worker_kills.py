"""Test every way to end a process at any moment: no process stays, and committed rows are right.

``TALLYROLL_KILLS`` sets how many workers and how many parents are killed at random: 24 each by
default.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from gymnasium.vector import AutoresetMode

from tallyroll.collector import Ledger, MultiprocessCollector
from tallyroll.storage import open_storage
from tallyroll.storage.engine.commit_engine import Durability
from tallyroll.storage.errors import NotAStorage, StorageMissing
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.storages import DiskStorage, storage_class

from collect_kit import balanced
from fork_server import SERVER
from pairs import each_pair
from worker_faults_kit import (
    SECONDS,
    TESTS,
    Fault,
    Faults,
    How,
    Parent,
    Sabotage,
    Versioned,
    by_version,
    check_batch,
    check_episodes,
    check_ledger,
    check_lives,
    descendants,
    ends_of,
    factories,
    gone,
    no_process_left,
    wait_until,
    warm_server,
)
from worker_kit import kept_sums

__all__ = ["kept_sums", "no_process_left", "warm_server"]

KILLS = int(os.environ.get("TALLYROLL_KILLS", "24"))
KILLS_A_RUN = 10
KILLS_A_CHAIN = 4
LANES = 4
SUFFIXES = ["", ".h5", ".zarr"]


# --- workers that are killed at random ------------------------------------------------------------


class Killer(threading.Thread):
    """Kills one or all workers of a collector while it collects, or before they are ready."""

    def __init__(self, collector: MultiprocessCollector, seed: int) -> None:
        super().__init__()
        self.collector, self.chance = collector, random.Random(seed)
        self.killed = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        """Kill workers until enough are dead or until stopped."""
        while self.killed < KILLS_A_RUN and not self.stopped.is_set():
            stored = self.collector.ledger.stored
            soon = self.killed and self.chance.random() < 0.25
            while not soon and self.collector.ledger.stored == stored:
                if self.stopped.wait(0.002):
                    return
            self.stopped.wait(self.chance.uniform(0, 0.15 if soon else 0.03))
            pids = self.collector.worker_pids
            victims = pids if self.chance.random() < 0.15 else [self.chance.choice(pids)]
            self.killed += sum(map(killed, victims))


def killed(pid: int) -> bool:
    """Kill a process if it is still a worker. Return whether it was."""
    try:
        if psutil.Process(pid).ppid() != SERVER._forkserver_pid:
            return False
        os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
    return True


def opened(data: Path, durability: Durability) -> DiskStorage:
    """Open the storage at a path, or create it if it is missing."""
    mode: Mode = "append" if is_there(data) else "create"
    capacity = {"capacity": FRAMES} if data.suffix == ".h5" and mode == "create" else {}
    return storage_class(data)(data, mode=mode, durability=durability, **capacity)


def with_kills(folder: Path, number: int) -> int:
    """Run a collector whose workers are killed. Return the number of kills."""
    chance = random.Random(number)
    frames, at_random = chance.randint(700, 900), chance.choice([0, 150])
    faults, policy = Faults(folder), Versioned()
    autoreset = chance.choice(list(AutoresetMode))
    data = folder / f"data{SUFFIXES[number % 3]}"
    with (
        opened(data, "power" if number % 4 == 1 else "process") as storage,
        MultiprocessCollector(
            factories(faults, LANES, chance.randint(1, 3), autoreset=autoreset, slow=0.001),
            policy,
            mode="sync" if number % 2 else "async",
            frames_per_batch=chance.choice([5, 24, 100]),
            total_frames=frames,
            init_random_frames=at_random,
            layout=chance.choice(["rows", "lanes", "trajectories"]),
            surplus="never_step" if autoreset is AutoresetMode.DISABLED else "carry",
            storage=storage,
            on_worker_death="respawn",
            max_respawns=1000,
            mp_start_method="forkserver",
        ) as collector,
    ):
        killer = Killer(collector, number)
        killer.start()
        yielded = 0
        try:
            for batch in collector:
                collector.ledger.check()
                yielded += check_batch(batch)
                policy.weight += 1
                collector.update_policy_weights_()
        finally:
            killer.stopped.set()
            killer.join()
    ledger = collector.ledger
    assert ledger.stored == yielded == frames
    assert ledger.random == at_random
    assert ledger.respawned <= killer.killed
    with open_storage(data) as storage:
        rows = storage.get(slice(0, storage.head))
    check_ledger(ledger, rows, faults, LANES)
    check_lives(rows, LANES)
    check_episodes(collector.episodes, rows)
    version = rows["collector", "policy_version"]
    chosen = version >= 0
    assert int((~chosen).sum()) == at_random
    assert (rows["action"] == by_version(rows["observation"], version))[chosen].all()
    return killer.killed


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
def test_workers_killed_at_random_points(tmp_path: Path) -> None:
    kills, runs = 0, 0
    while kills < KILLS:
        folder = tmp_path / str(runs)
        folder.mkdir()
        kills += with_kills(folder, runs)
        runs += 1
    assert runs <= max(10, KILLS // 2), "too few kills hit"


# --- parents that are killed at random ------------------------------------------------------------

FRAMES = 1000
EPISODES = 100
"""Number of episodes with about as many transitions as `FRAMES`."""


def is_there(path: Path) -> bool:
    """Return whether a storage exists whose creation was completed."""
    try:
        open_storage(path).close()
    except (NotAStorage, StorageMissing):
        return False
    return True


def go_on(
    folder: Path, data: Path, workers: int, durability: Durability = "process", **options: Any
) -> None:
    """Start or resume collecting, and run to the end. Some workers fail and are replaced."""
    resume = is_there(data)
    planned = [Fault("step", "exit", lane, count) for lane in (0, 2) for count in (50, 120, 200)]
    with (
        opened(data, durability) as storage,
        MultiprocessCollector(
            factories(Faults(folder, planned), LANES, workers, slow=0.0002),
            storage=storage,
            resume=resume,
            on_worker_death="respawn",
            mp_start_method="forkserver",
            **options,
        ) as collector,
    ):
        for _ in collector:
            pass


def look(data: Path, *, gaps: bool = False) -> int:
    """Check the committed rows and return their number."""
    if not is_there(data):
        return 0
    with open_storage(data) as storage:
        if storage.head:
            check_lives(storage.get(slice(0, storage.head)), LANES, gaps=gaps)
        return storage.head


def chain(folder: Path, number: int, full: float) -> list[int]:
    """Kill a run again and again, then let it end. Return the number of rows after each kill."""
    chance = random.Random(number)
    suffix = SUFFIXES[number % 3]
    data = folder / f"data{suffix}"
    episodes = suffix != ".h5" and chance.random() < 0.3  # their number of rows is unknown
    heads = [0]

    def start() -> Parent:
        # The number of workers and the mode may change, but the lanes are the same.
        options = {
            "workers": chance.randint(1, 3),
            "mode": chance.choice(["sync", "async"]),
            "durability": chance.choice(["process", "process", "power"]),
            "frames_per_batch": chance.choice([5, 24, 100]),
            "total_episodes" if episodes else "total_frames": EPISODES if episodes else FRAMES,
        }
        return Parent(folder, partial(go_on, data=data, **options))

    for place in range(KILLS_A_CHAIN):
        parent = start()
        time.sleep(full * chance.uniform(0, 0.5 + 0.2 * place))
        parent.kill()
        assert parent.wait() in (0, -signal.SIGKILL), parent.err
        heads.append(look(data, gaps=episodes))
        assert heads[-1] >= heads[-2], "committed rows were lost"
    last = start()
    assert last.wait() == 0, last.err
    heads.append(look(data, gaps=episodes))
    check_last_record(data, heads[-1], episodes)
    return heads[1:-1]


def check_last_record(data: Path, rows: int, episodes: bool) -> None:
    """Check that the last ledger of the run balances and that the budget was met exactly."""
    with open_storage(data) as storage:
        assert storage.record is not None
        ledger = Ledger()
        ledger.load(json.loads(storage.record[1])["ledger"])
        whole, cut = ends_of(storage.get(slice(0, storage.head)))
    ledger.check()
    assert balanced(ledger)
    assert (ledger.stored, ledger.carried) == (rows, 0)
    assert (ledger.episodes_complete, ledger.episodes_cut) == (whole, cut)
    assert (whole == EPISODES) if episodes else (rows == FRAMES)


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
def test_parents_killed_at_random_points(tmp_path: Path) -> None:
    before = descendants()
    folder = tmp_path / "undisturbed"
    options = {"mode": "sync", "frames_per_batch": 24, "total_frames": FRAMES}
    undisturbed = Parent(folder, partial(go_on, data=folder / "data", workers=2, **options))
    began = time.monotonic()
    assert undisturbed.wait() == 0, undisturbed.err
    full = time.monotonic() - began
    chains = range(-(-KILLS // KILLS_A_CHAIN))
    with ThreadPoolExecutor(2) as pool:
        heads = list(pool.map(lambda n: chain(tmp_path / f"chain-{n}", n, full), chains))
    found = [head for each in heads for head in each]
    assert sum(0 < head < FRAMES for head in found) >= KILLS // 4, f"few hit the middle: {found}"
    gone(before)
    assert not list(tmp_path.glob("*/tmp/*")), "temporary files are left"


# --- other ways a parent can end ------------------------------------------------------------------


def collector_of(
    folder: Path, planned: Sequence[Fault] = (), **options: Any
) -> MultiprocessCollector:
    """Return a collector that would run for minutes, with environments that start processes."""
    made = {"kind": options.pop("kind", "async"), "slow": 0.001}
    options = {"mp_start_method": "forkserver", "frames_per_batch": 8} | options
    return MultiprocessCollector(
        factories(Faults(folder, planned), LANES, options.pop("workers", 2), **made),
        total_frames=1_000_000,
        storage=folder / "data",
        **options,
    )


def batches_of(folder: Path, collector: MultiprocessCollector) -> Iterator[int]:
    """Yield the numbers of batches. Create the file `under-way` after the fifth."""
    for number, _ in enumerate(collector):
        if number == 5:
            (folder / "under-way").touch()
        yield number


def goes_on(folder: Path, planned: Sequence[Fault] = (), **options: Any) -> None:
    """Collect until the process is ended."""
    with collector_of(folder, planned, **options) as collector:
        for _ in batches_of(folder, collector):
            pass


def never_shuts_down(folder: Path, **options: Any) -> None:
    """Raise an error in the consumer's loop without a shutdown."""
    for number in batches_of(folder, collector_of(folder, **options)):
        if number == 9:
            raise Sabotage("in the loop")


def shuts_down(folder: Path, **options: Any) -> None:
    """Raise an error in the consumer's loop under `with`."""
    with collector_of(folder, **options) as collector:
        for number in batches_of(folder, collector):
            if number == 9:
                raise Sabotage("in the loop")


_kept: list[MultiprocessCollector] = []
"""Global variable that keeps collectors alive until the interpreter exits, as in a script."""


def exits(folder: Path, **options: Any) -> None:
    """Exit in the loop."""
    _kept.append(collector_of(folder, **options))
    for number in batches_of(folder, _kept[0]):
        if number == 9:
            sys.exit(4)


def breaks(folder: Path, **options: Any) -> None:
    """Stop iterating, and end without a shutdown."""
    _kept.append(collector_of(folder, **options))
    for number in batches_of(folder, _kept[0]):
        if number == 9:
            break


def never_iterates(folder: Path, **options: Any) -> None:
    """Make a collector, and end without iterating."""
    _kept.append(collector_of(folder, **options))


def forgets(folder: Path, **options: Any) -> None:
    """Stop iterating, drop the collector, and keep running."""
    collector = collector_of(folder, **options)
    for number in batches_of(folder, collector):
        if number == 9:
            break
    pids = collector.worker_pids
    del collector
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), SECONDS, "workers to end")


def check_end(parent: Parent, before: Iterable[int], *, rows: int = 40) -> None:
    """Check that a parent leaves nothing but committed rows, and that these are right."""
    gone(before)
    assert not list((parent.folder / "tmp").iterdir()), "temporary files are left"
    assert look(parent.folder / "data") >= rows


@pytest.mark.parametrize(
    ("script", "status", "said", "mode"),
    [
        (never_shuts_down, 1, "in the loop", "sync"),
        (shuts_down, 1, "in the loop", "async"),
        (exits, 4, "", "sync"),
        (breaks, 0, "", "async"),
        (forgets, 0, "", "async"),
        (forgets, 0, "", "sync"),
        (never_iterates, 0, "", "async"),
    ],
)
def test_a_script_ends(
    script: Callable[..., None], status: int, said: str, mode: str, tmp_path: Path
) -> None:
    before = descendants()
    parent = Parent(tmp_path, partial(script, mode=mode))
    assert parent.wait() == status, parent.err
    assert said in parent.err
    assert bool(parent.err) == bool(said), parent.err
    check_end(parent, before, rows=0 if script is never_iterates else 72)


@pytest.mark.parametrize(
    ("number", "mode"),
    [
        (signal.SIGINT, "sync"),
        (signal.SIGINT, "async"),
        (signal.SIGTERM, "async"),
        (signal.SIGKILL, "sync"),
    ],
)
def test_a_signal_in_mid_run(number: signal.Signals, mode: str, tmp_path: Path) -> None:
    before = descendants()
    parent = Parent(tmp_path, partial(goes_on, mode=mode))
    parent.wait_for("under-way")
    os.killpg(parent.process.pid, number)
    # A child of a fork server handles KeyboardInterrupt like any other error.
    assert parent.wait() == (1 if number is signal.SIGINT else -number), parent.err
    assert ("KeyboardInterrupt" in parent.err) == (number is signal.SIGINT)
    assert "tallyroll-worker" not in parent.err, "a worker had something to say"
    check_end(parent, before)


@each_pair(kind=["sync", "async"], mode=["sync", "async"], how=["sleep", "regex", "gil"])
def test_a_parent_is_killed_while_a_worker_hangs(
    kind: str, mode: str, how: How, tmp_path: Path
) -> None:
    """The worker hangs, or a process of its environment, which then cannot detect the death."""
    before = descendants()
    hangs = [Fault("step", how, 2, 20)]
    parent = Parent(tmp_path, partial(goes_on, planned=hangs, mode=mode, kind=kind))
    parent.wait_for("fell")
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    check_end(parent, before, rows=16)


def forks(folder: Path, **options: Any) -> None:
    """Fork a child that keeps running with all open files.

    A data loader may have such children.
    """
    with collector_of(folder, **options) as collector:
        for number in batches_of(folder, collector):
            if number == 3 and os.fork() == 0:
                (folder / "child").write_text(str(os.getpid()))
                time.sleep(3600)


def test_a_parent_that_forked_is_killed(tmp_path: Path) -> None:
    before = descendants()
    parent = Parent(tmp_path, forks)
    parent.wait_for("under-way")
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    try:
        check_end(parent, [*before, child], rows=16)
    finally:
        os.kill(child, signal.SIGKILL)


def test_ctrl_c_again_and_again(tmp_path: Path) -> None:
    before = descendants()
    parent = Parent(tmp_path, partial(goes_on, planned=[Fault("step", "gil", 2, 40)], kind="sync"))
    parent.wait_for("fell")
    for _ in range(4):
        parent.kill(signal.SIGINT)
        time.sleep(0.3)
    assert parent.wait() == 1
    check_end(parent, before)


def test_a_parent_is_killed_while_a_worker_hangs_at_its_start(tmp_path: Path) -> None:
    before = descendants()
    parent = Parent(tmp_path, partial(goes_on, planned=[Fault("factory", "gil", 2)]))
    parent.wait_for("fell")
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    gone(before)


# --- with spawn, and from a shell -----------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_spawned_workers_start(number: signal.Signals, tmp_path: Path) -> None:
    before = descendants()
    parent = Parent(tmp_path, partial(goes_on, mp_start_method="spawn", workers=1))
    wait_until(lambda: any("spawn_main" in line for line in new(before).values()))
    os.killpg(parent.process.pid, number)
    assert parent.wait() == (1 if number is signal.SIGINT else -number), parent.err
    gone(before)
    assert "tallyroll-worker" not in parent.err, "a worker had something to say"
    assert not list((tmp_path / "tmp").iterdir())


def new(before: Iterable[int]) -> dict[int, str]:
    """Return descendants that did not exist before."""
    return {pid: line for pid, line in descendants().items() if pid not in before}


def does_not_listen(folder: Path, **options: Any) -> None:
    """Collect while ignoring the signals that end other processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    goes_on(folder, **options)


@pytest.mark.slow
def test_a_parent_is_killed_while_a_spawned_worker_hangs(tmp_path: Path) -> None:
    before = descendants()
    hangs = [Fault("step", "gil", 0, 40)]
    options = {"planned": hangs, "mp_start_method": "spawn", "workers": 1, "kind": "sync"}
    parent = Parent(tmp_path, partial(does_not_listen, **options))
    wait_until(lambda: any("spawn_main" in line for line in new(before).values()))
    # A worker that is still importing belongs to the same group, but its parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.killpg(parent.process.pid, number)
    parent.wait_for("fell")
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    check_end(parent, before)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_worker_kills import {name}

if __name__ == "__main__":
    {name}(Path({folder!r}), mode={mode!r}, mp_start_method="spawn", workers=1)
"""


def script(folder: Path, name: str, mode: str, tty: int | None) -> subprocess.Popen[bytes]:
    """Start a script as a shell does. In a terminal, Ctrl-C interrupts it."""
    (folder / "tmp").mkdir(parents=True)
    tests = [str(Path(__file__).parent), str(TESTS), str(TESTS / "random_axes")]
    text = SCRIPT.format(tests=tests, name=name, folder=str(folder), mode=mode)
    (folder / "script.py").write_text(text)

    def terminal() -> None:
        os.setsid()
        if tty is not None:
            fcntl.ioctl(tty, termios.TIOCSCTTY, 0)

    with (folder / "stderr").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder / "tmp")},
            stdin=tty,
            stdout=err,
            stderr=err,
            preexec_fn=terminal,
        )


@pytest.mark.slow
def test_three_scripts_that_spawn(tmp_path: Path) -> None:
    """One ends by itself, one by Ctrl-C, and one by SIGTERM.

    They run concurrently because each imports for seconds.
    """
    before = descendants()
    keyboard, tty = pty.openpty()
    ends = {"breaks": 0, "Ctrl-C": -signal.SIGINT, "SIGTERM": -signal.SIGTERM}
    scripts = {
        "breaks": script(tmp_path / "breaks", "breaks", "async", None),
        "Ctrl-C": script(tmp_path / "Ctrl-C", "goes_on", "async", tty),
        "SIGTERM": script(tmp_path / "SIGTERM", "goes_on", "sync", None),
    }
    try:
        wait_until((tmp_path / "Ctrl-C/under-way").exists)
        os.write(keyboard, b"\x03")
        wait_until((tmp_path / "SIGTERM/under-way").exists)
        scripts["SIGTERM"].terminate()
        for name, process in scripts.items():
            err = (tmp_path / name / "stderr").read_text
            assert process.wait(60) == ends[name], f"{name}: {err()}"
            assert ("KeyboardInterrupt" in err()) == (name == "Ctrl-C")
            assert err().count("Traceback") == (name == "Ctrl-C"), err()
    finally:
        os.close(keyboard)
        os.close(tty)
        for process in scripts.values():
            process.kill()
            process.wait()
    gone(before)
    for name in scripts:
        assert not list((tmp_path / name / "tmp").iterdir()), "temporary files are left"
        assert look(tmp_path / name / "data") >= 40
