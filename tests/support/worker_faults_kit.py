"""Workers that fail according to a plan, in real processes, and the checks for afterwards.

`Faults` counts in files, so that counts continue after a process is killed. A fault that is planned
for a lane's tenth step happens once, in the process that makes that step. Environments are those of
`oracles`, so each row encodes its lane, episode and step. A new process begins with episode 0
again, and `check_lives` separates the rows of each such life.
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
"""Time within which all processes of an ended run must be gone, however it ended."""

How = Literal["raise", "exit", "sys.exit", "kill", "segfault", "sleep", "stop", "regex", "gil"]
Where = Literal["import", "factory", "reset", "step", "policy", "close"]

FAULTS: tuple[How, ...] = get_args(How)
HANGS: tuple[How, ...] = ("sleep", "stop", "regex", "gil")
EXITCODES = {"exit": 7, "sys.exit": 3, "kill": -signal.SIGKILL, "segfault": -signal.SIGSEGV}


class Sabotage(Exception):
    """Exception that a fault raises."""


def fall(how: How) -> None:
    """Fail in the given way."""
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
    if how == "regex":  # tries 2**64 matches without releasing the GIL
        re.match("(a+)+$", 64 * "a" + "b")
    if how == "gil":  # this keeps the GIL too, and sleeps
        ctypes.PyDLL(None).sleep(3600)
    raise AssertionError(f"survived {how}")


@dataclass(frozen=True)
class Fault:
    """A fault at the `count`-th time that lane `lane` (a worker's first lane) reaches `where`."""

    where: Where
    how: How
    lane: int = 0
    count: int = 1


@dataclass
class Faults:
    """Planned faults, and the records of those that happened, in `folder`."""

    folder: Path
    planned: Sequence[Fault] = ()
    _files: dict[str, int] = field(default_factory=dict, repr=False)

    def at(self, where: Where, lane: int, action: Any = None) -> None:
        """Count that `lane` reached `where`, about to execute `action`. Fail if that is planned."""
        count = self.count(where, lane)
        for fault in self.planned:
            if (fault.where, fault.lane, fault.count) == (where, lane, count):
                (self.folder / "action").write_text(str(action))
                (self.folder / "fell").write_text(repr(time.monotonic()))
                fall(fault.how)

    def count(self, what: str, lane: int) -> int:
        """Increment a count and return it."""
        file = self._file(f"{what}-{lane}")
        number = int.from_bytes(os.pread(file, 8, 0), "little") + 1
        os.pwrite(file, number.to_bytes(8, "little"), 0)
        return number

    def counted(self, what: str, lane: int) -> int:
        """Return a count over all processes."""
        path = self.folder / f"{what}-{lane}"
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def executed(self, lanes: int) -> int:
        """Return the number of transitions that the environments made, over all processes."""
        return sum(self.counted("executed", lane) for lane in range(lanes))

    def note(self, what: str, number: int | None) -> None:
        """Append a number to a list."""
        if number is not None:
            with (self.folder / what).open("a") as file:
                file.write(f"{number}\n")

    def noted(self, what: str) -> list[int]:
        """Return a list of numbers."""
        path = self.folder / what
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def action(self) -> str:
        """Return the action that the lane that failed last was about to execute."""
        return (self.folder / "action").read_text()

    @property
    def fell(self) -> float:
        """Time of the last fault by `time.monotonic`, which all processes share."""
        return float((self.folder / "fell").read_text())

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        return self._files[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "planned": self.planned, "_files": {}}


# --- environments and a policy that fail ----------------------------------------------------------


class FaultyLane(OracleEnv):
    """One lane, whose steps take `slow` seconds.

    A lane that is reset with the seed 0 serves only for inspection. Its calls are not recorded and
    do not fail. Seeds of other lanes have 31 random bits.
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
        """Close the lane, which may fail, too."""
        if self.looked_at:
            return
        self.faults.at("close", self.lane)


class FaultyTorchEnv(OracleTorchEnv):
    """The faulty lanes as a TorchRL environment."""

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
    """Make the environment of a worker."""
    faults.at("factory", lanes[0])
    if kind == "torchrl":
        return FaultyTorchEnv(lanes, faults, slow=slow)
    each = [partial(FaultyLane, lane, faults, lengths=lengths, slow=slow) for lane in lanes]
    if kind == "async":  # the default of torchrl is spawn, which takes seconds
        return AsyncVectorEnv(each, autoreset_mode=autoreset, context="fork")
    return SyncVectorEnv(each, autoreset_mode=autoreset)


class FaultyPolicy(TensorDictModuleBase):
    """A policy of the observation alone. Calls are counted for a worker's first lane."""

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
    """A policy of the observation and of the weights, which all equal the version's number."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.weight = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        assert self.weight.min() == self.weight.max(), "weights of two versions"
        return td.set("action", by_version(td["observation"], int(self.weight[0])))


def by_version(observation: torch.Tensor, version: int | torch.Tensor) -> torch.Tensor:
    """Return the actions of `Versioned` ``[row]``."""
    return (observation[..., :3].long().sum(-1) + version) % 2


def split(lanes: int, workers: int) -> list[range]:
    """Return the lanes of each worker."""
    sizes = [lanes // workers + (worker < lanes % workers) for worker in range(workers)]
    return [range(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(workers)]


def factories(faults: Faults, lanes: int, workers: int, **kwargs: Any) -> list[Callable[[], Any]]:
    """Return the environment factory of each worker."""
    return [partial(make, own, faults, **kwargs) for own in split(lanes, workers)]


# --- checks ---------------------------------------------------------------------------------------


def check_lives(rows: TensorDictBase, lanes: int, *, gaps: bool = False) -> list[int]:
    """Check that every row was made, and that no life of a lane has gaps or repeats.

    Args:
        rows: rows of a storage, in order.
        lanes: number of lanes of the run.
        gaps: whether whole episodes may be missing because they exceeded the budget.

    Returns:
        The number of lives with rows, for each lane.
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
    """Check that done marks each trajectory's last row in a batch. Return the number of rows."""
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
    """Return the numbers of whole and of cut trajectories in the rows."""
    ids = rows["collector", "traj_ids"].numpy()
    ended = rows["next", "terminated"] | rows["next", "truncated"]
    whole = np.unique(ids[ended.reshape(-1).numpy()])
    return len(whole), len(np.unique(ids)) - len(whole)


def check_ledger(ledger: Ledger, rows: TensorDictBase, faults: Faults, lanes: int) -> None:
    """Compare the counts of an ended run with the transitions that the environments made."""
    ledger.check()
    assert balanced(ledger)
    assert ledger.carried == 0
    assert ledger.stored == len(rows)
    assert (ledger.episodes_complete, ledger.episodes_cut) == ends_of(rows)
    unknown = faults.executed(lanes) - ledger.executed
    # It is unknown how many of a worker's lanes had stepped in the slot in which it died.
    assert 0 <= unknown <= (1 + ledger.respawned) * lanes, f"{unknown} executed, not counted"
    seeds = faults.noted("seeds")
    assert len(set(seeds)) == len(seeds), "a seed was used twice"


def check_episodes(episodes: Sequence[Episode], rows: TensorDictBase) -> None:
    """Compare the table of whole episodes with the rows."""
    ids = rows["collector", "traj_ids"].numpy()
    reward = rows["next", "reward"].reshape(-1).double().numpy()
    assert len({episode.traj_id for episode in episodes}) == len(episodes) == ends_of(rows)[0]
    for episode in episodes:
        own = ids == episode.traj_id
        assert episode.length == own.sum()
        assert episode.total_return == reward[own].sum()


def error_of(how: How) -> type[WorkerError]:
    """Return the class of error that reports a fault."""
    if how == "raise":
        return WorkerRaised
    return WorkerHung if how in HANGS else WorkerDied


# --- remaining processes --------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants."""
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
    """Wait for a condition. Return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"waited {seconds} s for {what or condition}"
        time.sleep(0.01)
    return time.monotonic() - began


def measured(what: str, seconds: float) -> float:
    """Write `seconds` to the file that TALLYROLL_MEASURED names, and return them."""
    if path := os.environ.get("TALLYROLL_MEASURED"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1]
        with open(path, "a") as file:
            file.write(f"{seconds:7.3f} s {what}: {test}\n")
    return seconds


def gone(before: Sequence[int], seconds: float = SECONDS) -> float:
    """Wait until the only descendants are those in `before`. Return the seconds that it took."""
    began = time.monotonic()
    while left := {pid: line for pid, line in descendants().items() if pid not in before}:
        assert time.monotonic() < began + seconds, f"left after {seconds} s: {left}"
        time.sleep(0.02)
    return measured("gone", time.monotonic() - began)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Check that no process is left, even one that a fork server started.

    conftest.py cannot distinguish these from the server.
    """
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
    """Return the fork server of this process, and the tracker of its semaphores."""
    pids = [SERVER._forkserver_pid, resource_tracker._resource_tracker._pid]
    return [pid for pid in pids if pid is not None]


@pytest.fixture(scope="module", autouse=True)
def warm_server() -> None:
    """Warm the fork server once per module, so that workers start immediately."""
    warm_fork_server()


@dataclass
class Ended:
    """The end of a run."""

    collector: MultiprocessCollector | None
    error: Exception | None
    at: float
    """Time of the end, by `time.monotonic`."""


def run(create: Any, policy: Any = None, **kwargs: Any) -> Ended:
    """Collect to the end or to an error."""
    collector = None
    kwargs.setdefault("mp_start_method", "forkserver")
    try:
        collector = MultiprocessCollector(create, policy, **kwargs)
        for batch in collector:
            collector.ledger.check()
            check_batch(batch)
        return Ended(collector, None, time.monotonic())
    except Exception as error:  # noqa: BLE001  the test inspects it
        return Ended(collector, error, time.monotonic())
    finally:
        if collector is not None:
            collector.shutdown()


# --- parents --------------------------------------------------------------------------------------


class Parent:
    """A process that collects with workers and that a test may kill. It has its own session.

    It starts in milliseconds, because the fork server has done all imports. Its workers come from
    the same server. Its standard streams are files in `folder`, or the terminal at `tty`. Temporary
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
        """Send the process a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Return the exit status, which is negative for the number of a fatal signal."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"runs after {seconds} s\n{self.err}"
        return int(self.process.exitcode)

    def wait_for(self, name: str, seconds: float = 60.0) -> None:
        """Wait until the process has made a file."""
        path = self.folder / name
        wait_until(lambda: path.exists() or not self.process.is_alive(), seconds, name)
        assert path.exists(), f"it ended without {name}\n{self.err}"

    @property
    def err(self) -> str:
        """Output of the process and its workers on stderr."""
        return (self.folder / "stderr").read_text()


def server_of_tests() -> dict[str, Any]:
    """Return the address of the tests' fork server, and its key for Python 3.14.

    The result includes the preloaded modules. Without them, workers would come from another server.
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
    SERVER.ensure_running = lambda: None  # the server is another process's child
    try:
        target(folder, *args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
