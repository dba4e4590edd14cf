"""Workers that fail as a test plans it, in real processes, and what must hold afterwards.

`Faults` counts in files, so that counts go on where a process was killed: a fault that is planned
for a lane's tenth step happens once, in whichever process makes that step. Environments are those
of `oracles`: each row says which lane, episode and step it belongs to. A new process begins with
episode 0 again; `check_lives` takes the rows of each such life apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from tallyroll.collector import Ledger, MultiprocessCollector
from tallyroll.collector.counting.episode_log import Episode
from tallyroll.collector.errors import WorkerDied, WorkerError, WorkerHung, WorkerRaised

from collect_kit import act, balanced, check_numbers
from fork_server import SERVER, warm_fork_server
from oracles import OracleEnv, OracleTorchEnv, check_rows, decode, flat_rows

TESTS = Path(__file__).resolve().parent
LENGTHS = (5, 1, 9, 2, 30)
SECONDS = 5.0
"""Within which nothing may be left of a run that ended, whatever ended it."""

How = Literal["raise", "exit", "sys.exit", "kill", "segfault", "sleep", "stop", "regex", "gil"]
Where = Literal["import", "factory", "reset", "step", "policy", "close"]

FAULTS: tuple[How, ...] = get_args(How)
HANGS: tuple[How, ...] = ("sleep", "stop", "regex", "gil")
EXITCODES = {"exit": 7, "sys.exit": 3, "kill": -signal.SIGKILL, "segfault": -signal.SIGSEGV}


class Sabotage(Exception):
    """Exception that a fault raises."""


def fall(how: How) -> None:
    """Fail in that way."""
    if how == "raise":
        raise Sabotage("as planned")
    if how == "exit":
        os._exit(7)
    if how == "sys.exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    if how == "sleep":
        time.sleep(3600)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "regex":  # tries 2**64 ways, and lets no other thread run meanwhile
        re.match("(a+)+$", 64 * "a" + "b")
    if how == "gil":  # nor does this, and it lies still
        ctypes.PyDLL(None).sleep(3600)
    raise AssertionError(f"survived {how}")


@dataclass(frozen=True)
class Fault:
    """At the `count`-th time that lane `lane` (of a worker: its first) comes to `where`."""

    where: Where
    how: How
    lane: int = 0
    count: int = 1


@dataclass
class Faults:
    """Faults to come, and what is known of those that came, in `folder`."""

    folder: Path
    planned: Sequence[Fault] = ()
    _files: dict[str, int] = field(default_factory=dict, repr=False)

    def at(self, where: Where, lane: int, action: Any = None) -> None:
        """Count that `lane` came here, about to execute `action`; fail if that is planned."""
        count = self.count(where, lane)
        for fault in self.planned:
            if (fault.where, fault.lane, fault.count) == (where, lane, count):
                (self.folder / "action").write_text(str(action))
                (self.folder / "fell").write_text(repr(time.monotonic()))
                fall(fault.how)

    def count(self, what: str, lane: int) -> int:
        """Count up."""
        file = self._file(f"{what}-{lane}")
        number = int.from_bytes(os.pread(file, 8, 0), "little") + 1
        os.pwrite(file, number.to_bytes(8, "little"), 0)
        return number

    def counted(self, what: str, lane: int) -> int:
        """Return the count, of all processes."""
        path = self.folder / f"{what}-{lane}"
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def executed(self, lanes: int) -> int:
        """Transitions that the environments made, in all processes together."""
        return sum(self.counted("executed", lane) for lane in range(lanes))

    def note(self, what: str, number: int | None) -> None:
        """Add a number to a list."""
        if number is not None:
            with (self.folder / what).open("a") as file:
                file.write(f"{number}\n")

    def noted(self, what: str) -> list[int]:
        """The list."""
        path = self.folder / what
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def action(self) -> str:
        """Return the action that the lane that failed last was about to execute."""
        return (self.folder / "action").read_text()

    @property
    def fell(self) -> float:
        """When the last fault happened, by `time.monotonic`, which all processes share."""
        return float((self.folder / "fell").read_text())

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        return self._files[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "planned": self.planned, "_files": {}}


# --- environments and a policy that fail ----------------------------------------------------------


class FaultyLane(OracleEnv):
    """One lane; `slow` is in seconds a step.

    Reset with the seed 0, it is a child that is made to be looked at: it makes no experience, and
    nothing is noted or fails. Lanes' seeds are words of 31 random bits.
    """

    def __init__(
        self, lane: int, faults: Faults, *, lengths: Sequence[int], slow: float = 0.0
    ) -> None:
        super().__init__(lane, lengths, ends="mixed", kind="seeded")
        self.faults, self.slow, self.looked_at = faults, slow, False
        faults.note("processes", os.getpid())

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        if seed is not None:
            self.looked_at = seed == 0
        if self.looked_at:
            return super().reset(seed=seed, **kwargs)
        self.faults.note("seeds", seed)
        self.faults.note(f"seeds-{self.lane}", seed)
        self.faults.at("reset", self.lane)
        return super().reset(seed=seed, **kwargs)

    def step(self, action: Any) -> Any:
        """Execute one action."""
        if self.looked_at:
            return super().step(action)
        self.faults.at("step", self.lane, action)
        if self.slow:
            time.sleep(self.slow)
        result = super().step(action)
        self.faults.count("executed", self.lane)
        return result

    def close(self) -> None:
        """Fail here, too."""
        if self.looked_at:
            return
        self.faults.at("close", self.lane)


class FaultyTorchEnv(OracleTorchEnv):
    """The same as a TorchRL environment."""

    def __init__(self, lanes: range, faults: Faults, *, slow: float = 0.0) -> None:
        super().__init__(len(lanes), LENGTHS, first_lane=lanes[0], ends="mixed", kind="seeded")
        self.faults, self.slow = faults, slow

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(seed)
        self.faults.note("seeds", seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.faults.at("reset", self.first_lane)
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.faults.at("step", self.first_lane)
        time.sleep(self.slow)
        result = super()._step(tensordict)
        for lane in self.lane_ids.tolist():
            self.faults.count("executed", lane)
        return result


def make(
    lanes: range,
    faults: Faults,
    *,
    kind: Literal["sync", "async", "torchrl"] = "sync",
    autoreset: AutoresetMode = AutoresetMode.NEXT_STEP,
    lengths: Sequence[int] = LENGTHS,
    slow: float = 0.0,
) -> VectorEnv[Any, Any, Any] | FaultyTorchEnv:
    """The environment of a worker."""
    faults.at("factory", lanes[0])
    if kind == "torchrl":
        return FaultyTorchEnv(lanes, faults, slow=slow)
    each = [partial(FaultyLane, lane, faults, lengths=lengths, slow=slow) for lane in lanes]
    if kind == "async":  # torchrl makes spawn the default, which takes seconds
        return AsyncVectorEnv(each, autoreset_mode=autoreset, context="fork")
    return SyncVectorEnv(each, autoreset_mode=autoreset)


class FaultyPolicy(TensorDictModuleBase):
    """Acts by the observation alone; a worker's first lane counts its calls."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.faults = faults

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        observation = td["observation"]
        self.faults.at("policy", int(observation.reshape(-1, 4)[0, 0]))
        return td.set("action", act([observation[..., :3]], "discrete", td.batch_size))


class Versioned(TensorDictModuleBase):
    """Acts by the observation and the weights, all of which are the version's number."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.weight = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        assert self.weight.min() == self.weight.max(), "weights of two versions"
        return td.set("action", by_version(td["observation"], int(self.weight[0])))


def by_version(observation: torch.Tensor, version: int | torch.Tensor) -> torch.Tensor:
    """The action of `Versioned` ``[row]``."""
    return (observation[..., :3].long().sum(-1) + version) % 2


def split(lanes: int, workers: int) -> list[range]:
    """The lanes of each worker."""
    sizes = [lanes // workers + (worker < lanes % workers) for worker in range(workers)]
    return [range(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(workers)]


def factories(faults: Faults, lanes: int, workers: int, **kwargs: Any) -> list[Callable[[], Any]]:
    """Return the environment factory of each worker."""
    return [partial(make, own, faults, **kwargs) for own in split(lanes, workers)]


# --- what must hold -------------------------------------------------------------------------------


def check_lives(rows: TensorDictBase, lanes: int, *, gaps: bool = False) -> list[int]:
    """Every row was really made; within each life of a lane none is missing, none there twice.

    Args:
        rows: as a storage has them, in order.
        lanes: of the run.
        gaps: whole episodes may be missing, for which there was no budget.

    Returns:
        How many lives each lane has rows of.
    """
    lane, episode, step = decode("seeded", {"observation": rows["observation"].numpy()})
    assert set(lane.tolist()) <= set(range(lanes))
    ids = rows["collector", "traj_ids"].numpy()
    check_numbers(ids, step)
    lives, seen = [], set()
    for own in range(lanes):
        at = np.flatnonzero(lane == own)
        since = episode[at] * 2**32 + step[at]
        begins = 1 + np.flatnonzero(since[1:] <= since[:-1])
        last = -1
        parts = np.split(at, begins) if len(at) else []
        for life in parts:
            how = {"contiguous": not gaps, "from_start": not gaps}
            check_rows(rows[life], LENGTHS, kind="seeded", ends="mixed", **how)
            assert ids[life[0]] > last, f"lane {own}: an id of an earlier life came again"
            last = int(ids[life].max())
        assert not seen & set(ids[at].tolist()), "two lanes have the same id"
        seen |= set(ids[at].tolist())
        lives.append(len(parts))
    noise = np.stack([rows[key].numpy()[:, 3] for key in ("observation", ("next", "observation"))])
    assert len(np.unique(noise, axis=1).T) == len(rows), "data was repeated"
    return lives


def check_batch(batch: TensorDictBase) -> int:
    """Done where a trajectory ends in the batch, by itself or by a cut; returns its rows."""
    rows = flat_rows(batch)
    ids = rows["collector", "traj_ids"]
    last = torch.ones(len(rows), dtype=torch.bool)
    last[:-1] = ids[1:] != ids[:-1]
    assert len(ids.unique()) == last.sum(), "a trajectory is there in two parts"
    ended = (rows["next", "terminated"] | rows["next", "truncated"]).reshape(-1)
    assert not (ended & ~last).any()
    assert torch.equal(rows["next", "done"].reshape(-1), last)
    if ("collector", "cut") in rows.keys(True, True):
        assert torch.equal(rows["collector", "cut"], last & ~ended)
    return len(rows)


def ends_of(rows: TensorDictBase) -> tuple[int, int]:
    """Trajectories in the rows that are whole, and those that were cut."""
    ids = rows["collector", "traj_ids"].numpy()
    ended = rows["next", "terminated"] | rows["next", "truncated"]
    whole = np.unique(ids[ended.reshape(-1).numpy()])
    return len(whole), len(np.unique(ids)) - len(whole)


def check_ledger(ledger: Ledger, rows: TensorDictBase, faults: Faults, lanes: int) -> None:
    """The counts of a run that is over, held against what the environments made."""
    ledger.check()
    assert balanced(ledger)
    assert ledger.carried == 0
    assert ledger.stored == len(rows)
    assert (ledger.episodes_complete, ledger.episodes_cut) == ends_of(rows)
    unknown = faults.executed(lanes) - ledger.executed
    # How many lanes of a worker had stepped in the slot in which it died is not known.
    assert 0 <= unknown <= (1 + ledger.respawned) * lanes, f"{unknown} executed, not counted"
    seeds = faults.noted("seeds")
    assert len(set(seeds)) == len(seeds), "a seed was used twice"


def check_episodes(episodes: Sequence[Episode], rows: TensorDictBase) -> None:
    """The table of whole episodes says what the rows say."""
    ids = rows["collector", "traj_ids"].numpy()
    reward = rows["next", "reward"].reshape(-1).double().numpy()
    assert len({episode.traj_id for episode in episodes}) == len(episodes) == ends_of(rows)[0]
    for episode in episodes:
        own = ids == episode.traj_id
        assert episode.length == own.sum()
        assert episode.total_return == reward[own].sum()


def error_of(how: How) -> type[WorkerError]:
    """The class that a fault is reported by."""
    if how == "raise":
        return WorkerRaised
    return WorkerHung if how in HANGS else WorkerDied


# --- what is left ---------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Make this process the parent of the children of a child that died."""
    set_child_subreaper = 36
    assert ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0) == 0


def descendants(pid: int | None = None) -> dict[int, str]:
    """Command lines of living descendants by process id."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, what: str = "") -> float:
    """Wait for it; the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"waited {seconds} s for {what or condition}"
        time.sleep(0.01)
    return time.monotonic() - began


def measured(what: str, seconds: float) -> float:
    """`seconds`, written to the file that TALLYROLL_MEASURED names."""
    if path := os.environ.get("TALLYROLL_MEASURED"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1]
        with open(path, "a") as file:
            file.write(f"{seconds:7.3f} s {what}: {test}\n")
    return seconds


def gone(before: Sequence[int], seconds: float = SECONDS) -> float:
    """Wait until there are no more descendants than `before`; the seconds that it took."""
    began = time.monotonic()
    while left := {pid: line for pid, line in descendants().items() if pid not in before}:
        assert time.monotonic() < began + seconds, f"left after {seconds} s: {left}"
        time.sleep(0.02)
    return measured("gone", time.monotonic() - began)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Not even one that a fork server started: conftest.py cannot tell these from the server."""
    adopt_orphans()
    before = descendants()
    yield
    try:
        gone([*before, *helpers()])
    finally:
        for pid in descendants().keys() - {*before, *helpers()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def helpers() -> list[int]:
    """The fork server of this process, and the tracker of its semaphores."""
    pids = [SERVER._forkserver_pid, resource_tracker._resource_tracker._pid]
    return [pid for pid in pids if pid is not None]


@pytest.fixture(scope="module", autouse=True)
def warm_server() -> None:
    """For a whole module: workers start at once."""
    warm_fork_server()


@dataclass
class Ended:
    """How a run ended."""

    collector: MultiprocessCollector | None
    error: Exception | None
    at: float
    """When, by `time.monotonic`."""


def run(create: Any, policy: Any = None, **kwargs: Any) -> Ended:
    """Collect to the end, or to the error."""
    collector = None
    kwargs.setdefault("mp_start_method", "forkserver")
    try:
        collector = MultiprocessCollector(create, policy, **kwargs)
        for batch in collector:
            collector.ledger.check()
            check_batch(batch)
        return Ended(collector, None, time.monotonic())
    except Exception as error:  # noqa: BLE001  it is looked at
        return Ended(collector, error, time.monotonic())
    finally:
        if collector is not None:
            collector.shutdown()


# --- parents --------------------------------------------------------------------------------------


class Parent:
    """A process that collects with workers, and that may be killed; a session of its own.

    It starts in milliseconds, for the fork server has imported all, and its workers come from the
    same server. Its standard streams are files in `folder`, or the terminal at `tty`; temporary
    files go to `folder`/tmp.
    """

    def __init__(
        self, folder: Path, target: Callable[..., None], *args: Any, tty: str | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tmp").mkdir(exist_ok=True)
        self.folder = folder
        self.process = multiprocessing.get_context("forkserver").Process(
            target=_parent, args=(server_of_tests(), folder, tty, target, args)
        )
        self.process.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit status: negative, a signal's number, if that ended it."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"runs after {seconds} s\n{self.err}"
        return int(self.process.exitcode)

    def wait_for(self, name: str, seconds: float = 60.0) -> None:
        """Return when it has made that file."""
        path = self.folder / name
        wait_until(lambda: path.exists() or not self.process.is_alive(), seconds, name)
        assert path.exists(), f"it ended without {name}\n{self.err}"

    @property
    def err(self) -> str:
        """Output of it and its workers on stderr."""
        return (self.folder / "stderr").read_text()


def server_of_tests() -> dict[str, Any]:
    """Where a process finds the fork server of the tests; Python 3.14 asks for its key, too.

    With the modules that it preloads: without any, workers would come from another server.
    """
    names = ("_forkserver_address", "_forkserver_authkey", "_preload_modules")
    return {name: getattr(SERVER, name) for name in names if hasattr(SERVER, name)}


def _parent(server: dict[str, Any], folder: Path, tty: str | None, target: Any, args: Any) -> None:
    os.setsid()
    names = [os.devnull, str(folder / "stdout"), str(folder / "stderr")]
    for number, name in enumerate(names if tty is None else [tty] * 3):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    multiprocessing.current_process()._config.pop("tempdir", None)
    vars(SERVER).update(server)
    SERVER.ensure_running = lambda: None  # it is another process's child
    try:
        target(folder, *args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
