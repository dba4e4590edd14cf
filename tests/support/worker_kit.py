"""Environments and policies that travel to workers, and runs with any number of workers.

The module is small, so that a worker imports it fast. Most tests start real processes. For hundreds
of runs (`in_threads`), the workers are threads of this process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from tensordict.nn import TensorDictSequential as Sequential
from torchrl.envs import EnvBase, SerialEnv

from tallyroll.collector import (
    GymnasiumVectorEnv,
    MultiprocessCollector,
    SyncCollector,
    multiprocess,
)
from tallyroll.collector.base import Collector
from tallyroll.collector.workers.leases.source import Leases
from tallyroll.collector.workers.local.threads import ThreadTransport

from collect_kit import Batches, ByObservation, OwnTicks, assert_same, joined
from fork_server import warm_fork_server
from oracles import OracleEnv, OracleTorchEnv, OracleVectorEnv, Rows, length_of, make_oracle_vec

LENGTHS = [[3, 1, 4], [1, 1, 2], [5], [2, 7], [1, 9, 1]]
LANES = 5
QUICK = {"mp_start_method": "forkserver", "threads_per_worker": 1}

Env = EnvBase | VectorEnv
Counts = dict[str, int]


# --- environments of lanes first, first + 1, … --------------------------------------------------


class FurtherVectorEnv(OracleVectorEnv):
    """A native vector whose lanes are numbered from `first_lane` on."""

    def __init__(self, first_lane: int, num_envs: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_envs, *args, **kwargs)
        for lane, env in enumerate(self.lanes):
            env.lane = first_lane + lane


def _vec(mode: AutoresetMode, first: int, lanes: int, **kwargs: Any) -> Env:
    lengths = kwargs.pop("lengths", LENGTHS)
    return make_oracle_vec(lanes, lengths, mode=mode, first_lane=first, **kwargs)


def _avoided(first: int, lanes: int, **kwargs: Any) -> Env:
    vector = _vec(AutoresetMode.NEXT_STEP, first, lanes, **kwargs)
    return GymnasiumVectorEnv(vector, reset_slots="avoid")


def _native(first: int, lanes: int, **kwargs: Any) -> Env:
    return FurtherVectorEnv(first, lanes, kwargs.pop("lengths", LENGTHS), **kwargs)


def _torch(first: int, lanes: int | None, **kwargs: Any) -> Env:
    return OracleTorchEnv(lanes, kwargs.pop("lengths", LENGTHS), first_lane=first, **kwargs)


def _serial(first: int, lanes: int, **kwargs: Any) -> Env:
    return SerialEnv(
        lanes, [partial(_torch, first + lane, None, **kwargs) for lane in range(lanes)]
    )


def _single(first: int, lanes: int, **kwargs: Any) -> Env:
    assert lanes == 1
    return _torch(first, None, **kwargs)


SOURCES: dict[str, Callable[..., Env]] = {
    **{mode.value: partial(_vec, mode) for mode in AutoresetMode},
    "avoided": _avoided,
    "native": _native,
    "torch": _torch,
    "serial": _serial,
    "single": _single,
}
DISABLED, NEXT, SAME = (
    mode.value
    for mode in (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
)
RESET_SLOTS = (NEXT, "native")
"""Sources that spend a slot on each reset."""


def make(source: str, first: int, lanes: int, **kwargs: Any) -> Env:
    """Make an environment of a source. kwargs go to the oracle, whose ends are mixed."""
    env = SOURCES[source](first, lanes, **{"ends": "mixed", **kwargs})
    MADE.append(env)
    return env


MADE: list[Env] = []
"""Environments that :func:`make` made in this process since :func:`in_threads` began."""


def steps_and_resets() -> tuple[int, int]:
    """Return the steps and resets of all lanes of `MADE`."""
    lanes = [lane for env in MADE for lane in _lanes_of(env)]
    return sum(lane[0] for lane in lanes), sum(lane[1] for lane in lanes)


def _lanes_of(env: Any) -> Iterator[tuple[int, int]]:
    vector = env.vector_env if isinstance(env, GymnasiumVectorEnv) else env
    if isinstance(vector, SyncVectorEnv):
        yield from ((each.steps_taken, each.resets_done) for each in vector.envs)
    else:
        yield from zip(vector.steps_taken, vector.resets_done, strict=True)


def factory(source: str, first: int, lanes: int, **kwargs: Any) -> Callable[[], Env]:
    """Return a function that makes the environment."""
    return partial(make, source, first, lanes, **kwargs)


def lanes_of_workers(lanes: int, workers: int) -> list[tuple[int, int]]:
    """Return each worker's first lane and number of lanes. The first workers get surplus lanes."""
    sizes = [lanes // workers + (worker < lanes % workers) for worker in range(workers)]
    return [(sum(sizes[:worker]), size) for worker, size in enumerate(sizes)]


def factories(source: str, workers: int, lanes: int = LANES, **kwargs: Any) -> list[Any]:
    """Return the environment factory of each worker."""
    return [
        factory(source, first, own, **kwargs) for first, own in lanes_of_workers(lanes, workers)
    ]


# --- policies -----------------------------------------------------------------------------------


class RecordingPolicy(ByObservation):
    """A policy that writes columns computed from the observation."""

    def __init__(self, kind: Any = "float") -> None:
        super().__init__(kind)
        self.out_keys = ["action", "told", ("deep", "told")]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and the columns."""
        td = super().forward(td)
        told = td["observation"][..., :2].double() + 0.25
        return td.set("told", told).set(("deep", "told"), told.sum(-1).int())


class SlowPolicy(ByObservation):
    """A policy with random delays, so that workers overtake each other."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Wait, and write the action."""
        time.sleep(random.choice((0, 0, 0.0002, 0.001)))
        return super().forward(td)


class Versioned(TensorDictModuleBase):
    """A policy whose weights all equal one number, which its action and its columns encode.

    `weight` is large, so that a torn update can leave half of it old. `mark` is a buffer.
    """

    def __init__(self, entries: int = 7) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "low", "high", "mark"]
        self.weight = torch.nn.Parameter(torch.zeros(entries))
        self.register_buffer("seen_mark", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fleeting", torch.zeros(3), persistent=False)

    def set_to(self, number: int) -> Versioned:
        """Set every weight and buffer to `number`."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(number)
        return self

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and the values of the weights."""
        low, high = self.weight.min().item(), self.weight.max().item()
        total = td["observation"].long().sum(-1) + int(low)
        each = torch.ones(td.batch_size)
        marks = torch.stack([each * self.seen_mark, each * self.fleeting[1]], -1)
        td.set("low", each * low).set("high", each * high).set("mark", marks)
        return td.set("action", total % 2)


def chosen_by(rows: TensorDictBase, number: torch.Tensor) -> torch.Tensor:
    """Return the actions of `Versioned` with these weights, one number per row."""
    return (rows["observation"].long().sum(-1) + number) % 2


def drawing(td: TensorDictBase) -> TensorDictBase:
    """Draw actions from torch's generator, as a stochastic policy."""
    return td.set("action", torch.randint(0, 2, td.batch_size))


def linear() -> Sequential:
    """Return a greedy linear policy."""
    logits = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
    return Sequential(logits, TensorDictModule(_argmax, in_keys=["logits"], out_keys=["action"]))


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


# --- slow environments ----------------------------------------------------------------------------


class Slow(OracleEnv):
    """An oracle whose step in the lanes `slow` (by default all) takes `seconds`.

    Infos have the time of each observation.
    """

    def __init__(
        self, lane: int, *args: Any, seconds: float = 0.0, slow: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(lane, *args, **kwargs)
        self.seconds = seconds if slow is None or lane in slow else 0.0

    def step(self, action: Any) -> Any:
        """Wait, and step."""
        if self.seconds:
            time.sleep(self.seconds)
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "made_at": time.time()}

    def reset(self, **kwargs: Any) -> Any:
        """Begin the next episode."""
        observation, info = super().reset(**kwargs)
        return observation, {**info, "made_at": time.time()}


class FaultyEnv(OracleEnv):
    """An oracle whose transition `at` in lane `bad` is wrong in the way that `what` names."""

    def __init__(self, *args: Any, bad: int, at: int, what: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bad, self.at, self.what = bad, at, what

    def step(self, action: Any) -> Any:
        """Step, and spoil the planned transition."""
        observation, reward, *rest = super().step(action)
        if self.lane == self.bad and self.steps_taken == self.at + 1:
            if self.what == "nan":
                observation = np.full_like(observation, np.nan)
            elif self.what == "range":
                observation = observation - 1e5
            else:
                reward = float("nan")
        return observation, reward, *rest


def _faulty_vec(first: int, lanes: int, **kwargs: Any) -> Env:
    each = range(first, first + lanes)
    makes = [partial(FaultyEnv, lane, LENGTHS, ends="mixed", **kwargs) for lane in each]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)


def faulty_vec(first: int, lanes: int, *, what: str, lane: int, at: int) -> Callable[[], Env]:
    """Return a factory of lanes, of which one is a `FaultyEnv`."""
    return partial(_faulty_vec, first, lanes, bad=lane, at=at, what=what)


def slow_vec(first: int, lanes: int, lengths: Any = LENGTHS, **kwargs: Any) -> Env:
    """Make `Slow` lanes with autoreset disabled."""
    makes = [
        partial(Slow, lane, lengths, **{"ends": "mixed", **kwargs})
        for lane in range(first, first + lanes)
    ]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)


def slow_factories(workers: int, lanes: int = LANES, **kwargs: Any) -> list[Any]:
    """Return the factory of slow lanes for each worker."""
    return [
        partial(slow_vec, first, own, **kwargs) for first, own in lanes_of_workers(lanes, workers)
    ]


def ticking(first: int, lanes: int, mode: AutoresetMode) -> Env:
    """Make lanes whose infos count ticks from each reset on."""
    makes = [
        partial(OwnTicks, lane, LENGTHS, ends="mixed", frame_skip=4, noops=3)
        for lane in range(first, first + lanes)
    ]
    return SyncVectorEnv(makes, autoreset_mode=mode)


# --- runs ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """Result of a run, with its ledger at every yield and at the end."""

    batches: Batches
    counts: list[Counts]
    collector: Collector
    episodes: list[Any] = field(default_factory=list)


def collect_all(collector: Collector, batches: int | None = None) -> Run:
    """Iterate to the end, or for a number of batches, and shut down."""
    run = Run([], [], collector)
    with collector:
        for batch in collector:
            collector.ledger.check()
            run.batches.append(batch)
            run.counts.append(collector.ledger.counts())
            if len(run.batches) == batches:
                break
    collector.ledger.check()
    run.counts.append(collector.ledger.counts())
    run.episodes = list(collector.episodes)
    if isinstance(collector, MultiprocessCollector):
        assert_gone(collector.worker_pids)
    return run


def assert_gone(pids: Sequence[int]) -> None:
    """Assert that none of these processes exists after at most five seconds."""
    until = time.monotonic() + 5
    while any(map(_alive, pids)):
        assert time.monotonic() < until, f"processes {pids} are left"
        time.sleep(0.005)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sync_collector(
    source: str, policy: Any = None, lanes: int = LANES, **kwargs: Any
) -> SyncCollector:
    """Return a single-process collector."""
    own = kwargs.pop("oracle", {})
    return SyncCollector(factory(source, 0, lanes, **own), policy, **kwargs)


def start(create: Any, policy: Any = None, **kwargs: Any) -> MultiprocessCollector:
    """Return a collector whose workers start quickly."""
    warm_fork_server()
    return MultiprocessCollector(create, policy, **{**QUICK, **kwargs})


def worker_collector(
    source: str, workers: int, policy: Any = None, lanes: int = LANES, **kwargs: Any
) -> MultiprocessCollector:
    """Return a collector with this many workers and the same lanes as :func:`sync_collector`."""
    own = kwargs.pop("oracle", {})
    return start(factories(source, workers, lanes, **own), policy, **kwargs)


def rows_until(
    collector: MultiprocessCollector, reached: Callable[[TensorDictBase], bool]
) -> TensorDict:
    """Return rows of an endless run, until more than five batches have `reached` the condition.

    A worker may be late by any time.
    """
    batches: list[TensorDictBase] = []
    after = 0
    for batch in collector:
        batches.append(batch.clone())
        after += reached(batch)
        if after > 5:
            break
    return joined(batches)


def assert_alike(one: Run, other: Run) -> None:
    """Assert that batches (bit by bit), ledgers at every yield, and episode logs are equal."""
    assert [len(batch) for batch in other.batches] == [len(batch) for batch in one.batches]
    for mine, theirs in zip(one.batches, other.batches, strict=True):
        assert mine.batch_size == theirs.batch_size
        assert_same(mine, theirs)
    assert other.counts == one.counts
    assert other.episodes == one.episodes


def as_stored(batches: Batches) -> TensorDict:
    """Return the rows of batches of any layout except "rows", lane by lane within each batch."""
    parts = []
    for batch in batches:
        rows = batch
        if ("collector", "mask") in batch.keys(True, True):
            rows = batch[batch["collector", "mask"].reshape(batch.batch_size)]
        parts.append(rows)
    joined = torch.cat(parts)
    assert isinstance(joined, TensorDict)
    return joined


def assert_first_started(
    checked: Rows, lanes: range, lengths: Any, *, resets: bool = False
) -> None:
    """Assert that the episodes of one worker's lanes are whole, and that they started first.

    `resets`: whether each reset takes a slot. `checked` has all rows, in the order of each lane.
    """
    whole: dict[int, int] = {}
    for lane in lanes:
        at = checked.lane == lane
        whole[lane] = int(checked.ended[at].sum())
        wanted = sum(length_of(lengths, lane, episode) for episode in range(whole[lane]))
        assert at.sum() == wanted, f"lane {lane}: an episode was cut or left out"
    taken = sum(whole.values())
    starts = []
    for lane in lanes:
        slot = 0
        for episode in range(taken + 1):
            starts.append((slot, lane, episode))
            slot += length_of(lengths, lane, episode) + resets
    first = {(lane, episode) for _, lane, episode in sorted(starts)[:taken]}
    assert first == {(lane, episode) for lane in lanes for episode in range(whole[lane])}


# --- sums over all workers ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def kept_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the sums that `Leases` keeps with sums over all workers, before each block."""
    plain = Leases.block

    def block(leases: Leases, want: int) -> Any:
        queue, budget = leases._queue, leases._budget
        out = [each for tally in budget._tallies for each in tally.leased]
        assert budget.out is bool(out)
        assert (budget.drawing == sum(each.random_frames for each in out)).all()
        assert leases.carried == sum(int(each.transitions.sum()) for each in queue.segments)
        return plain(leases, want)

    monkeypatch.setattr(Leases, "block", block)


# --- workers in threads -------------------------------------------------------------------------


def _as_threads(jobs: Sequence[bytes], **_: Any) -> ThreadTransport:
    """Return threads, regardless of the requested transport."""
    plain = [replace(cloudpickle.loads(job), threads=None) for job in jobs]
    return ThreadTransport([cloudpickle.dumps(job) for job in plain])


@contextmanager
def in_threads() -> Iterator[None]:
    """Give collectors made within the context threads as workers."""
    MADE.clear()
    with patch.object(multiprocess, "ProcessTransport", _as_threads):
        yield
