"""Test each way a worker can fail, in a real process: who gets the error, when, and what stays."""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.errors import WorkerDied, WorkerError, WorkerHung, WorkerRaised
from tallyroll.collector.workers.local import processes
from tallyroll.collector.workers.local.lifetime import kill_when_closed
from tallyroll.storage import open_storage

from pairs import each_pair
from worker_faults_kit import (
    EXITCODES,
    FAULTS,
    HANGS,
    Ended,
    Fault,
    Faults,
    FaultyPolicy,
    How,
    Sabotage,
    Where,
    check_episodes,
    check_ledger,
    check_lives,
    descendants,
    error_of,
    factories,
    gone,
    helpers,
    measured,
    no_process_left,
    run,
    wait_until,
    warm_server,
)

__all__ = ["no_process_left", "warm_server"]

MODES = ["sync", "async"]
TIMEOUT = 0.7
"""Limit in seconds for one step, in tests of steps that hang."""
RESPAWN: dict[str, Any] = {
    "on_worker_death": "respawn",
    "max_respawns": 100,
    "step_timeout": TIMEOUT,
}
AT_ONCE = 5.0
"""Limit in seconds on a busy machine. On a quiet one, a second is enough."""


def one_fault(folder: Path, fault: Fault, mode: str, **kwargs: Any) -> tuple[Ended, Faults]:
    """Run two workers of two lanes for 400 transitions, one of which fails."""
    faults = Faults(folder, [fault])
    limit = "start_timeout" if fault.where == "factory" else "step_timeout"
    if fault.how in HANGS:
        kwargs.setdefault(limit, TIMEOUT)
    options = {"frames_per_batch": 10, "total_frames": 400, "seed": 1, "storage": folder / "data"}
    kind = kwargs.pop("kind", "sync")
    create = factories(faults, 4, kwargs.pop("workers", 2), kind=kind)
    return run(create, FaultyPolicy(faults), mode=mode, **(options | kwargs)), faults


def seconds_to_hear(ended: Ended, faults: Faults) -> float:
    """Return the seconds from the fault to the error.

    For a hang, count from the end of the timeout.
    """
    assert isinstance(ended.error, WorkerError), ended.error
    seconds = ended.at - faults.fell
    return measured("heard", seconds - TIMEOUT * isinstance(ended.error, WorkerHung))


def check_facts(error: WorkerError, faults: Faults, fault: Fault) -> None:
    """Check the error's worker, lanes, seeds, action, and exit status or original exception."""
    assert (error.worker, error.lanes) == (1, range(2, 4))
    in_vector = fault.how == "raise" and fault.where in ("step", "reset")
    assert error.lane == (fault.lane if in_vector else None)
    action = error.action
    seeded = [fault.lane] if in_vector else [2, 3]
    assert error.seeds == [faults.noted(f"seeds-{lane}")[-1] for lane in seeded]
    if fault.where == "step":
        assert str(action if in_vector else action[fault.lane - 2]) == faults.action
    found = re.search(r"worker 1 \(lanes 2 to 3, process (\d+)\)", str(error))
    assert found
    assert int(found[1]) in faults.noted("processes")
    said = []
    if in_vector:
        said.append(f"lane {error.lane} (seed {error.seeds[0]}), last action {action}")
    elif fault.how != "raise":
        said.append(f"seeds {error.seeds[0]}, {error.seeds[1]}; last actions {action}")
        said.append('on_worker_death="respawn"')
    for words in said:
        assert words in str(error)
    if fault.how == "raise":
        assert isinstance(error.__cause__, Sabotage)
        assert "in fall\n    raise Sabotage" in error.worker_traceback
        assert error.worker_traceback in str(error)
    else:
        assert error.exitcode == EXITCODES.get(fault.how)


IN_THE_MIDDLE: list[tuple[Where, How]] = [
    *(("step", how) for how in FAULTS),
    *(("policy", how) for how in ("raise", "exit", "gil")),
    *(("reset", how) for how in ("raise", "kill", "sleep")),
]


@pytest.mark.parametrize(
    ("where", "how", "mode"),
    [
        *((where, how, MODES[turn % 2]) for turn, (where, how) in enumerate(IN_THE_MIDDLE)),
        # One of each error in both modes.
        *(("step", how, mode) for how, mode in (("raise", "async"), ("kill", "async"))),
        ("step", "sleep", "async"),
    ],
)
def test_a_worker_fails_in_the_middle(where: Where, how: How, mode: str, tmp_path: Path) -> None:
    lane, count = (3, 4) if where == "reset" else (2, 30)
    ended, faults = one_fault(tmp_path, Fault(where, how, lane, count), mode)
    assert seconds_to_hear(ended, faults) < AT_ONCE
    error, collector = ended.error, ended.collector
    assert type(error) is error_of(how), error
    assert isinstance(error, WorkerError)
    assert collector is not None
    check_facts(error, faults, faults.planned[0])
    assert collector.ledger.stored > 20
    check_stored(tmp_path, faults, collector)


def check_stored(
    folder: Path, faults: Faults, collector: MultiprocessCollector, *, gaps: bool = False
) -> list[int]:
    """Check that stored rows are right and counted. Return the number of lives of each lane."""
    with open_storage(folder / "data") as storage:
        rows = storage.get(slice(0, storage.head))
        check_ledger(collector.ledger, rows, faults, 4)
        check_episodes(collector.episodes, rows)
        return check_lives(rows, 4, gaps=gaps)


# --- before the first batch -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "how"),
    [
        *(("factory", how) for how in ("raise", "exit", "sys.exit", "kill", "segfault", "gil")),
        ("reset", "raise"),
        ("reset", "kill"),
        ("policy", "raise"),
    ],
)
def test_a_worker_fails_before_it_is_ready(where: Where, how: How, tmp_path: Path) -> None:
    mode = "async" if how in ("exit", "kill") else "sync"
    ended, faults = one_fault(tmp_path, Fault(where, how, 2), mode)
    assert seconds_to_hear(ended, faults) < AT_ONCE
    error = ended.error
    assert type(error) is error_of(how), error
    assert isinstance(error, WorkerError)
    assert error.worker == 1
    doing = {"factory": "making the environment", "reset": "resetting the environment"}
    if how == "raise":
        assert f" raised Sabotage while {doing.get(where, 'trying the policy out')}" in str(error)
        assert isinstance(error.__cause__, Sabotage)
        assert "in fall\n    raise Sabotage" in error.worker_traceback
    elif how in HANGS:
        assert f"was not ready after start_timeout={TIMEOUT:g} seconds, and was ended" in str(error)
    else:
        assert "before it was ready" in str(error)
        assert error.exitcode == EXITCODES[how]
    assert not (tmp_path / "data").exists(), "a run that did not begin made files"


def test_a_worker_is_gone_before_its_parent_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def late(pipe: int, process: int) -> None:
        seen.append(process)
        if len(seen) == 2:  # the one that fails
            wait_until(lambda: not psutil.pid_exists(process))
        kill_when_closed(pipe, process)

    monkeypatch.setattr(processes, "kill_when_closed", late)
    ended, _ = one_fault(tmp_path, Fault("factory", "exit", 2), "sync")
    assert isinstance(ended.error, WorkerDied), ended.error
    assert "before it was ready" in str(ended.error)
    assert ended.error.exitcode == EXITCODES["exit"]


@pytest.mark.parametrize("how", ["raise", "exit", "sleep"])
def test_a_module_fails_when_a_worker_imports_it(
    how: How, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"module_that_fails_by_{how}"
    (tmp_path / f"{name}.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from worker_faults_kit import Fault, Faults, make\n"
        f"faults = Faults(Path({str(tmp_path)!r}), [Fault('import', {how!r})])\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    faults.at('import', 0)\n"
        "def create():\n"
        "    return make(range(2), faults)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    create = importlib.import_module(name).create
    ended = run(create, num_workers=1, frames_per_batch=4, total_frames=8, start_timeout=TIMEOUT)
    assert seconds_to_hear(ended, Faults(tmp_path)) < AT_ONCE
    assert type(ended.error) is error_of(how), ended.error
    if how == "raise":
        assert isinstance(ended.error.__cause__, Sabotage)
        assert f'{name}.py", line 6, in <module>' in ended.error.worker_traceback


# --- differences of spawn -------------------------------------------------------------------------


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Record killed processes, and whether each pid still existed."""
    found = []
    kill = processes.kill_group

    def watched(pid: int) -> None:
        found.append((pid, Path(f"/proc/{pid}").exists()))
        kill(pid)

    monkeypatch.setattr(processes, "kill_group", watched)
    return found


@pytest.mark.parametrize(
    ("where", "how", "mode"),
    [
        ("step", "segfault", "sync"),
        pytest.param("reset", "kill", "async", marks=pytest.mark.slow),
        pytest.param("factory", "exit", "async", marks=pytest.mark.slow),
        pytest.param("policy", "gil", "async", marks=pytest.mark.slow),
    ],
)
def test_spawned_workers_fail_alike(
    where: Where, how: How, mode: str, tmp_path: Path, signalled: list[tuple[int, bool]]
) -> None:
    count = {"factory": 1, "reset": 4}.get(where, 30)
    ended, faults = one_fault(
        tmp_path, Fault(where, how, 0, count), mode, workers=1, mp_start_method="spawn"
    )
    assert seconds_to_hear(ended, faults) < AT_ONCE
    assert type(ended.error) is error_of(how), ended.error
    if where != "factory":
        assert ended.collector is not None
        assert ended.collector.ledger.stored > 20
        check_stored(tmp_path, faults, ended.collector)
    # After a process was reaped, another process may have its number.
    assert all(there for _, there in signalled), "a process that is gone was signalled"


def test_an_import_that_takes_longer_than_start_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run(
        factories(Faults(tmp_path), 2, 1),
        frames_per_batch=4,
        total_frames=8,
        start_timeout=0.4,
        mp_start_method="spawn",
    )
    assert measured("heard", time.monotonic() - began - 0.4) < AT_ONCE
    assert type(ended.error) is WorkerHung
    assert "start_timeout=0.4" in str(ended.error)


@pytest.mark.slow
def test_a_spawned_worker_is_replaced(tmp_path: Path, signalled: list[tuple[int, bool]]) -> None:
    ended, faults = one_fault(
        tmp_path,
        Fault("step", "sys.exit", 0, 30),
        "sync",
        workers=1,
        mp_start_method="spawn",
        on_worker_death="respawn",
    )
    assert ended.error is None, ended.error
    assert ended.collector is not None
    assert ended.collector.ledger.respawned == 1
    assert check_stored(tmp_path, faults, ended.collector) == [2, 2, 2, 2]
    assert all(there for _, there in signalled)


# --- replaced workers -----------------------------------------------------------------------------


def planned(chance: random.Random, kind: str) -> list[Fault]:
    """Return faults of many kinds in `step`, and some elsewhere, at random points."""
    lanes = [0, 2] if kind == "torchrl" else [0, 1, 2, 3]
    quick = [how for how in FAULTS if how not in HANGS]

    def some(where: Where, hows: Iterable[How], lanes: list[int], most: int) -> list[Fault]:
        return [Fault(where, how, chance.choice(lanes), chance.randint(2, most)) for how in hows]

    found = some("step", [*quick, chance.choice(HANGS)], lanes, 40)
    found += some("policy", ["raise", "kill"], [0, 2], 40)
    found += some("reset", ["raise", "exit"], lanes, 9)
    # These fail while they replace a failed worker.
    found += some("factory", ["raise", "kill"], [0, 2], 3)
    return list({(each.where, each.lane, each.count): each for each in found}.values())


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("next_step", "sync"),
        pytest.param("next_step", "async", marks=pytest.mark.slow),
        pytest.param("same_step", "sync", marks=pytest.mark.slow),
        ("disabled", "async"),
        pytest.param("torchrl", "sync", marks=pytest.mark.slow),
        ("torchrl", "async"),
    ],
)
def test_every_fault_at_random_points_and_the_run_ends_at_n(
    kind: str, mode: str, tmp_path: Path
) -> None:
    chance = random.Random(f"{kind} {mode}")
    faults = Faults(tmp_path, planned(chance, kind))
    options: dict[str, Any] = {"kind": "torchrl", "slow": 0.002}
    if kind != "torchrl":
        options = {"autoreset": AutoresetMode[kind.upper()], "slow": 0.001}
    ended = run(
        factories(faults, 4, 2, **options),
        FaultyPolicy(faults),
        mode=mode,
        frames_per_batch=chance.choice([7, 30]),
        total_frames=801,
        init_random_frames=50,
        seed=2,
        storage=tmp_path / "data",
        **RESPAWN,
    )
    assert ended.error is None, ended.error
    assert ended.collector is not None
    ledger = ended.collector.ledger
    assert (ledger.stored, ledger.random) == (801, 50)
    happened = [
        each for each in faults.planned if faults.counted(each.where, each.lane) >= each.count
    ]
    # A fault after the last row has no effect. Other workers continue while a replacement starts.
    assert len(happened) - (4 if mode == "async" else 2) <= ledger.respawned <= len(happened)
    assert ledger.respawned >= (2 if mode == "async" else 6), "too few faults were met"
    assert ledger.incarnation == ledger.respawned
    assert ledger.lost > 0
    lives = check_stored(tmp_path, faults, ended.collector)
    assert max(lives) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_budget_of_episodes_is_met_exactly(mode: str, tmp_path: Path) -> None:
    chance = random.Random(mode)
    faults = Faults(tmp_path, planned(chance, "sync"))
    ended = run(
        factories(faults, 4, 2, slow=0.001),
        FaultyPolicy(faults),
        mode=mode,
        frames_per_batch=16,
        total_episodes=60,
        storage=tmp_path / "data",
        **RESPAWN,
    )
    assert ended.error is None, ended.error
    assert ended.collector is not None
    ledger = ended.collector.ledger
    assert ledger.episodes_complete == 60
    assert len(ended.collector.episodes) == 60
    # Others continue while one starts, and may finish before its next fault.
    assert ledger.respawned >= (2 if mode == "async" else 6)
    check_stored(tmp_path, faults, ended.collector, gaps=mode == "async")


@pytest.mark.parametrize("mode", MODES)
def test_lost_and_cut_rows_are_counted(mode: str, tmp_path: Path) -> None:
    """Each worker has two lanes, and a batch has five slots. The worker dies in its eighth slot."""
    faults = Faults(tmp_path, [Fault("step", "kill", 2, 8)])
    options = {"lengths": (1000,), "autoreset": AutoresetMode.DISABLED, "slow": 0.01}
    ended = run(
        factories(faults, 4, 2, **options),
        mode=mode,
        frames_per_batch=20,
        total_frames=100,
        storage=tmp_path / "data",
        on_worker_death="respawn",
    )
    assert ended.collector is not None
    ledger = ended.collector.ledger
    counts = {
        name: ledger.counts()[name] for name in ("stored", "lost", "respawned", "incarnation")
    }
    # Lost are slots six and seven of its two lanes. The five slots before were delivered.
    assert counts == {"stored": 100, "lost": 4, "respawned": 1, "incarnation": 1}
    with open_storage(tmp_path / "data") as storage:
        trajectories = len(np.unique(storage.get(slice(0, 100))["collector", "traj_ids"]))
    # Two at its death, four at the end. In async mode, the others may finish before it is replaced.
    assert trajectories == 6 or (mode == "async" and trajectories == 4)
    assert ledger.episodes_cut == trajectories
    assert ledger.episodes_complete == 0


@pytest.mark.parametrize("mode", MODES)
def test_complete_rows_are_stored_before_it_raises(mode: str, tmp_path: Path) -> None:
    """The worker fails in the middle of the first batch."""
    faults = Faults(tmp_path, [Fault("step", "kill", 2, 900)])
    endless = {"lengths": (10_000,), "autoreset": AutoresetMode.DISABLED}
    ended = run(
        factories(faults, 4, 2, **endless),
        mode=mode,
        frames_per_batch=4000,
        total_frames=8000,
        storage=tmp_path / "data",
    )
    assert type(ended.error) is WorkerDied
    assert ended.collector is not None
    ledger = ended.collector.ledger
    ledger.check()
    if mode == "sync":  # all slots that both workers completed
        assert 100 < ledger.stored <= 4 * 899
        assert ledger.stored % 4 == 0
    else:  # all slots that the other worker completed
        assert ledger.stored > 100
        assert (ledger.discarded, ledger.lost) == (0, 2 * 899)
    with open_storage(tmp_path / "data") as storage:
        assert storage.head == ledger.stored


@pytest.mark.parametrize("mode", MODES)
def test_more_deaths_than_max_respawns(mode: str, tmp_path: Path) -> None:
    deaths = [Fault("step", "exit", 2, count) for count in (5, 10, 15, 20)]
    faults = Faults(tmp_path, deaths)
    ended = run(
        factories(faults, 4, 2, slow=0.002),
        mode=mode,
        frames_per_batch=10,
        total_frames=100_000,  # in async mode, the other worker continues meanwhile
        storage=tmp_path / "data",
        on_worker_death="respawn",
        max_respawns=2,
    )
    assert type(ended.error) is WorkerDied, ended.error
    said = ["tallyroll: max_respawns=2 workers were replaced before this one"]
    assert ended.error.__notes__ == said
    assert ended.collector is not None
    assert ended.collector.ledger.respawned == 2
    assert check_stored(tmp_path, faults, ended.collector)[2:] == [3, 3]


def test_with_max_respawns_0_nobody_is_replaced(tmp_path: Path) -> None:
    ended, faults = one_fault(
        tmp_path, Fault("step", "exit", 2, 30), "sync", on_worker_death="respawn", max_respawns=0
    )
    assert type(ended.error) is WorkerDied
    assert ended.collector is not None
    assert ended.collector.ledger.respawned == 0
    check_stored(tmp_path, faults, ended.collector)


def test_a_bug_that_is_in_every_start_ends_the_run(tmp_path: Path) -> None:
    """The worker cannot be replaced because its replacements fail, too."""
    always = [Fault("factory", "raise", 2, count) for count in range(2, 20)]
    faults = Faults(tmp_path, [Fault("step", "kill", 2, 5), *always])
    ended = run(
        factories(faults, 4, 2),
        frames_per_batch=10,
        total_frames=400,
        on_worker_death="respawn",
        max_respawns=3,
    )
    assert type(ended.error) is WorkerRaised
    assert isinstance(ended.error.__cause__, Sabotage)
    assert ended.collector is not None
    assert ended.collector.ledger.respawned == 3


# --- deaths while no call waits -------------------------------------------------------------------


@each_pair(victims=[1, 2], mode=MODES, death=["raise", "respawn"])
def test_killed_between_two_batches(
    victims: int, mode: str, death: Literal["raise", "respawn"], tmp_path: Path
) -> None:
    faults = Faults(tmp_path)
    with MultiprocessCollector(
        factories(faults, 4, 2, slow=0.001),
        mode=mode,  # type: ignore[arg-type]
        frames_per_batch=20,
        total_frames=400,
        storage=tmp_path / "data",
        on_worker_death=death,
        mp_start_method="forkserver",
    ) as collector:
        batches = iter(collector)
        for _ in range(5):
            next(batches)
        before = collector.worker_pids
        for pid in before[:victims]:
            os.kill(pid, signal.SIGKILL)
        if mode == "sync":
            gone([pid for pid in descendants() if pid not in before[:victims]])
        state = collector.state_dict()
        assert state["ledger"]["stored"] == 100
        if death == "raise":
            began = time.monotonic()
            with pytest.raises(WorkerDied, match="was killed by SIGKILL; seeds"):
                list(batches)
            assert measured("heard", time.monotonic() - began) < AT_ONCE
        else:
            assert sum(len(batch) for batch in batches) == 300
            assert collector.ledger.respawned == victims
            assert collector.worker_pids[victims:] == before[victims:]
            assert not set(collector.worker_pids[:victims]) & set(before)
    lives = check_stored(tmp_path, faults, collector)
    if death == "respawn":
        wanted = [2, 2, *([2, 2] if victims == 2 else [1, 1])]
        # In async mode, the others may collect all remaining rows before a replacement is ready.
        assert lives == wanted or (mode == "async" and all(np.less_equal(lives, wanted)))


def test_a_worker_that_hangs_keeps_nobody_from_ending(tmp_path: Path) -> None:
    faults = Faults(tmp_path, [Fault("step", "gil", 2, 5)])
    collector = MultiprocessCollector(
        factories(faults, 4, 2),
        mode="async",
        frames_per_batch=10,
        total_frames=1000,
        storage=tmp_path / "data",
        mp_start_method="forkserver",
    )
    for number, _ in enumerate(collector):
        if number == 20:
            break
    wait_until(lambda: (tmp_path / "fell").exists())
    began = time.monotonic()
    collector.state_dict()
    assert measured("state_dict", time.monotonic() - began) < 0.5
    began = time.monotonic()
    collector.shutdown()
    assert measured("shutdown", time.monotonic() - began) < AT_ONCE
    check_stored(tmp_path, faults, collector)


@pytest.mark.parametrize("how", ["raise", "kill", "sleep"])
def test_a_process_of_the_environment_fails(how: How, tmp_path: Path) -> None:
    """Gymnasium waits forever for a dead process.

    The collector treats it as a step that hangs.
    """
    ended, faults = one_fault(
        tmp_path,
        Fault("step", how, 3, 30),
        "async",
        kind="async",
        step_timeout=TIMEOUT,
        on_worker_death="respawn",
    )
    assert ended.error is None, ended.error
    assert ended.collector is not None
    assert ended.collector.ledger.respawned == 1
    # The other worker may collect all remaining rows before this one is ready again.
    assert check_stored(tmp_path, faults, ended.collector) in ([1, 1, 2, 2], [1, 1, 1, 1])


@pytest.mark.parametrize("how", ["raise", "kill", "gil"])
def test_an_environment_that_cannot_be_closed(how: How, tmp_path: Path) -> None:
    before = descendants()
    ended, faults = one_fault(tmp_path, Fault("close", how, 2), "sync")
    assert ended.error is None, ended.error
    assert faults.counted("close", 2) >= 1
    assert ended.collector is not None
    assert ended.collector.ledger.stored == 400
    gone([*before, *helpers()])
    assert measured("closed", time.monotonic() - faults.fell) < AT_ONCE
    check_stored(tmp_path, faults, ended.collector)


# --- leaks ----------------------------------------------------------------------------------------


def counted() -> dict[str, Any]:
    """Count the resources of a process that could leak."""
    me = psutil.Process()
    maps = Path("/proc/self/maps").read_text()
    return {
        "files": me.num_fds(),
        "threads": me.num_threads(),
        "python threads": threading.active_count(),
        "children": len([child for child in me.children() if child.status() != "zombie"]),
        "shared memory": maps.count("memfd:tallyroll"),
        "signal handlers": [signal.getsignal(number) for number in (2, 15, 1)],
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
    }


@pytest.mark.slow
def test_ten_collectors_leave_nothing(tmp_path: Path) -> None:
    chance = random.Random(1)

    def one(number: int, how: How | None) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        death = chance.choice(["raise", "respawn"])
        where: Where = chance.choice(["step", "factory", "policy"])
        fault = Fault(where, how or "raise", 2, 1 if where == "factory" else 5)
        faults = Faults(folder, [fault] if how else [])
        run(
            factories(faults, 4, 2),
            FaultyPolicy(faults),
            mode=chance.choice(MODES),
            frames_per_batch=10,
            total_frames=60,
            storage=folder / "data",
            on_worker_death=death,
        )

    one(-1, None)  # fill the caches that stay
    one(-2, "kill")
    gc.collect()
    before = counted()
    for number in range(10):
        one(number, None if number % 2 else chance.choice(["raise", "exit", "kill", "sys.exit"]))
    gc.collect()
    assert counted() == before
