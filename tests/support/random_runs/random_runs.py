"""Run a configuration: make collectors, take their batches, and read the stored rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from once_kit import OnceStorage, OnceZarr
from random_faults import FaultyPostproc, FaultySampler
from random_looking import looked_at
from random_saving import wrong_in_saving
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector, run_plan
from tallyroll.collector.base import Collector
from tallyroll.collector.errors import StateError
from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage
from tallyroll.storage.errors import RunUnderWay

from far_kit import FarThreads
from random_configurations import Configuration
from random_devices import on_host
from random_environments import close, make_env
from random_interrupts import CAUGHT, interrupted
from random_lanes import Event, World
from random_meddling import Meddler
from random_networks import CHANGES
from random_policies import make_policy
from random_resets import RESETS
from random_running import Told
from random_spelling import spelled
from worker_kit import QUICK, in_threads, lanes_of_workers, start

RING = 32


@dataclass
class Run:
    """The life of one collector."""

    number: int
    batches: list[TensorDictBase] = field(default_factory=list)
    copies: list[TensorDictBase] = field(default_factory=list)
    """Copies of the batches, made when they arrived."""
    error: BaseException | None = None
    counts: dict[str, int] = field(default_factory=dict)
    updated_at: int | None = None
    """Number of existing rows when the policy got new weights."""
    changed: bool = False
    """Whether the policy was changed."""
    first_version: int = 0
    """Version of the policy's weights when the run began."""
    stepped: bool = False
    """Whether the program stepped or reset a lane while rows were left to collect."""
    interrupted: bool = False
    ended_by_interrupt: bool = False
    """True if the run did not continue, and its message explained how to continue."""

    @property
    def rows(self) -> int:
        """Number of yielded rows, without padding."""
        return sum(count_of(batch) for batch in self.copies)


@dataclass
class Outcome:
    """Result of a configuration."""

    runs: list[Run]
    journals: dict[tuple[int, int], list[list[Event]]]
    stored: list[TensorDictBase]
    """Rows of each storage."""
    paths: list[Path]
    buffer: TensorDictBase | None = None
    told: Told = field(default_factory=dict)
    """Results of the transforms."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    """Batches of collectors in turn: the run and the number of rows of each batch."""
    found: list[str] = field(default_factory=list)
    """Faults found during the run."""
    warned: set[str] = field(default_factory=set)
    """Names of warning categories."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run."""
        return next((run.error for run in reversed(self.runs) if run.error is not None), None)


def count_of(batch: TensorDictBase) -> int:
    """Return the number of rows of a batch of any layout."""
    mask = batch.get(("collector", "mask"), None)
    return int(batch.numel() if mask is None else mask.sum())


def identity(batch: TensorDictBase) -> TensorDictBase:
    """Return the batch unchanged."""
    return batch


@contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Record warnings instead of showing them."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


def carry_out(config: Configuration, folder: Path) -> Outcome:
    """Run ``config``, with its files in ``folder``."""
    journals = folder / "journals"
    journals.mkdir()
    world = World(str(folder), str(journals) if config.uses_files else None)
    threads = config.workers and config.threads
    with (
        quiet() as said,
        in_threads() if threads else nullcontext(),
        patch.object(run_plan, "TWICE_NBYTES", 1),  # observations are small in these tests
    ):
        try:
            outcome = _Runner(config, folder, world).outcome()
            outcome.warned = {each.category.__name__ for each in said}
            return outcome
        finally:
            world.forget()


class _Runner:
    def __init__(self, config: Configuration, folder: Path, world: World) -> None:
        self.config, self.folder, self.world = config, folder, world
        self.paths: list[Path] = []
        self.buffer: ReplayBuffer | None = None
        self.to_close: list[Any] = []
        self.runs: list[Run] = []
        self.policy: Any = None
        self.turns: list[tuple[int, int]] = []
        self.found: list[str] = []

    def outcome(self) -> Outcome:
        try:
            self._phases()
        finally:
            for each in self.to_close:
                close(each)
        stored = []
        for path in self.paths:
            if path.exists():
                with open_storage(path) as storage:
                    rows = torch.from_numpy(storage.slots_of(np.array(storage.span, np.int64)))
                    stored.append(storage.get(rows).clone())
        memory = None
        if self.buffer is not None and len(self.buffer):
            held = self.buffer.storage.get(slice(0, len(self.buffer)))
            memory = held.apply(torch.clone)  # its own clone turns -0.0 into 0.0
        seen = self.world.read(), stored, self.paths, memory
        return Outcome(self.runs, *seen, self.world.told, self.turns, self.found)

    # --- phases -----------------------------------------------------------------------------------

    def _phases(self) -> None:
        config = self.config
        phase, after = config.phase, config.phase_after
        if phase == "in turn":
            self._in_turn()
            return
        if phase == "interrupt":
            self._run(0, config.seed)
            if self.runs[-1].ended_by_interrupt and config.sink in ("memmap", "h5", "zarr"):
                self._run(1, None, resume=True)
            return
        if phase not in ("resume", "state", "append"):
            self._run(0, config.seed)
            return
        state: dict[str, Any] = {}
        if phase == "state":
            self._run(
                0, config.seed, leave=after, at_leaving=lambda c: state.update(c.state_dict())
            )
        else:
            self._run(0, config.seed, leave=after)
        if self.runs[-1].error is not None or (phase == "state" and not state):
            return
        if phase == "resume":
            self._run(1, None, resume=True)
        elif phase == "append":
            self._run(1, config.seed + 1, append=True)
        else:
            self._run(1, config.seed, another=True, at_start=lambda c: c.load_state_dict(state))

    def _run(
        self,
        number: int,
        seed: int | None,
        *,
        leave: int = 0,
        at_leaving: Callable[[Collector], Any] | None = None,
        at_start: Callable[[Collector], Any] | None = None,
        **sink: bool,
    ) -> None:
        """Collect to the end, or a given number of batches."""
        run = Run(number, first_version=int(self.config.updates and number > 0))
        self.runs.append(run)
        collector: Collector | None = None
        storage: Any = None
        try:
            given = self._sinks(**sink)
            storage = given.get("storage")
            collector = self._collector(number, seed=seed, **given)
            with collector:
                if at_start is not None:
                    at_start(collector)
                self._iterate(run, collector, leave)
                if at_leaving is not None and run.batches:
                    at_leaving(collector)
        except Exception as error:  # noqa: BLE001  the judge checks it
            run.error = error
        finally:
            if collector is not None and hasattr(collector, "ledger"):
                run.counts = collector.ledger.counts()
            if hasattr(storage, "close"):
                storage.close()

    def _iterate(self, run: Run, collector: Collector, leave: int) -> None:
        config = self.config
        if config.phase != "interrupt" or run.number:
            with looked_at(collector, self.found) if config.looks else nullcontext():
                self._batches(run, collector, leave)
            return
        try:
            with interrupted(config.interrupt, config.interrupt_at):
                self._batches(run, collector, leave)
        except CAUGHT:
            run.interrupted = True
        if run.interrupted:
            try:
                self._batches(run, collector, leave)
            except StateError as error:
                if "resume" not in str(error):
                    raise
                run.ended_by_interrupt = True

    def _batches(self, run: Run, collector: Collector, leave: int) -> None:
        config = self.config
        meddler = Meddler(config.meddles, self.storage, config.number)
        self.to_close.append(meddler)
        collects = config.collects and not run.number
        for batch in self._by_calls(collector) if collects else collector:
            run.batches.append(batch)
            run.copies.append(on_host(batch))
            collector.ledger.check()
            if config.meddles:
                held = torch.cat([restored(each) for each in run.copies])
                meddler(batch, held if len(meddler.found) < 3 else None)
                self.found += meddler.found
            if config.saves and len(run.batches) < 3:
                self.found += wrong_in_saving(collector, batch, config.number)
            if len(run.batches) == leave:
                if config.updates and not run.number:
                    collector.update_policy_weights_()
                break
            if len(run.batches) == config.phase_after:
                if config.phase == "stop":
                    collector.stop()
                elif config.phase == "weights":
                    collector.update_policy_weights_()
                    run.updated_at = run.rows
                elif config.phase == "outside" and run.rows < (config.total_frames or 0):
                    self._step_outside()
                    run.stepped = True
                elif config.phase == "seed":
                    collector.set_seed(config.seed // 2)
                elif config.phase == "change" and config.policy is not None:
                    CHANGES[config.policy.change](self.policy, config.policy_keys)
                    run.changed = True

    def _step_outside(self) -> None:
        """Reset all lanes or one, or step one, as a user's program might."""
        rng = np.random.default_rng([43, self.config.number])
        env = next(each for each in self.to_close if not isinstance(each, Meddler))
        way = rng.choice(["reset", "reset one", "step"])
        if way == "reset":
            env.reset()
            return
        envs = env.envs if self.config.env.system == "torch" else env.unwrapped.envs
        lane = envs[int(rng.integers(len(envs)))]
        if way == "step" and not lane.unwrapped.over:
            lane.step(lane.action_space.sample())
        else:
            lane.reset()

    def _by_calls(self, collector: Collector) -> Iterator[TensorDictBase]:
        """Yield rows that calls of `collect` stored, as batches. Some calls fill a whole batch."""
        config, rng = self.config, np.random.default_rng([29, self.config.number])
        lanes, frames = config.env.lanes, config.frames_per_batch
        while True:
            got = collector.collect(int(rng.choice([lanes, lanes, 1, frames, rng.integers(1, 30)])))
            if len(self.storage) > self.read:
                rows = self.storage.get(slice(self.read, len(self.storage))).clone()
                self.read = len(self.storage)
                yield as_yielded(rows)
            if not got:
                return

    def _in_turn(self) -> None:
        """Run two collectors on one storage, in random turns."""
        config, rng = self.config, np.random.default_rng([23, self.config.number])
        self.runs += [Run(0), Run(1)]
        storage, collectors = self._storage(config.sink, 2), []
        run = self.runs[0]
        try:
            for run in self.runs:
                made = self._collector(run.number, seed=config.seed + run.number, storage=storage)
                collectors.append(made)
            left = {run.number: iter(made) for run, made in zip(self.runs, collectors, strict=True)}
            waits: int | None = None
            while left:
                run = self.runs[int(rng.choice([each for each in left if each != waits]))]
                try:
                    batch = next(left[run.number], None)
                except RunUnderWay:
                    if waits is not None:
                        raise
                    # The run must wait until the other one ends, and then begin.
                    waits, left[run.number] = run.number, iter(collectors[run.number])
                    continue
                if batch is None:
                    waits = None
                    del left[run.number]
                    continue
                run.batches.append(batch)
                run.copies.append(on_host(batch))
                self.turns.append((run.number, count_of(batch)))
        except Exception as error:  # noqa: BLE001  the judge checks it
            run.error = error
        finally:
            for run, made in zip(self.runs, collectors, strict=False):
                made.shutdown()
                run.counts = made.ledger.counts()
            storage.close()

    # --- arguments of a collector -----------------------------------------------------------------

    storage: Any = None
    """The object that the collector received, if any."""
    read = 0
    """Number of rows already read from it."""

    def _storage(self, sink: str, runs: int = 1) -> Any:
        """Return an open storage."""
        path = self.folder / "data1"
        if sink == "h5":
            capacity = max(1, runs * (self.config.total_frames or 2000))
            self.storage = H5Storage(path.with_suffix(".h5"), capacity=capacity)
        elif sink == "zarr":
            self.storage = self._zarr(path.with_suffix(".zarr"))
        else:
            self.storage = self._memmap(path, max_size=RING if sink == "ring" else None)
        if self.storage.path not in self.paths:
            self.paths.append(self.storage.path)
        return self.storage

    def _sinks(
        self, *, resume: bool = False, append: bool = False, another: bool = False
    ) -> dict[str, Any]:
        sink = self.config.sink
        suffix = {"h5": ".h5", "zarr": ".zarr"}.get(sink, "")
        path = self.folder / f"data{2 if another else 1}{suffix}"
        if sink == "":
            return {}
        if (self.config.meddles or self.config.collects) and not resume:
            return {"storage": self._storage(sink)}
        buffer = None
        if sink in ("buffer", "memory and disk"):
            buffer = ReplayBuffer(storage=LazyTensorStorage(2000))
        if sink != "buffer" and path not in self.paths:
            self.paths.append(path)
        if sink == "buffer":
            self.buffer = buffer
            return {"replay_buffer": buffer}
        if sink == "buffer on disk":
            storage = self._memmap(path)
            return {"replay_buffer": ReplayBuffer(storage=storage), "storage": storage}
        if sink == "memory and disk":
            self.buffer = buffer
            return {"storage": path, "replay_buffer": buffer}
        if sink == "ring":
            return {"storage": self._memmap(path, max_size=RING)}
        if append:
            kind = ZarrStorage if sink == "zarr" else MemmapStorage
            return {"storage": kind(path, mode="append")}
        if self.config.once and not resume:
            return {"storage": self._zarr(path) if sink == "zarr" else self._memmap(path)}
        return {"storage": path} | ({"resume": True} if resume else {})

    def _memmap(self, path: Path, **options: Any) -> MemmapStorage:
        kind = OnceStorage if self.config.once else MemmapStorage
        return kind(path, **options)

    def _zarr(self, path: Path) -> ZarrStorage:
        return (OnceZarr if self.config.once else ZarrStorage)(path)

    def _collector(self, number: int, **given: Any) -> Collector:
        config = self.config
        make_one = partial(make_policy, config.policy, config.env.lane, config.policy_keys)
        self.policy = policy = (
            make_one() if config.several is None else config.several.policies(make_one)
        )
        options: dict[str, Any] = {
            name: getattr(config, name)
            for name in (
                "frames_per_batch",
                "total_frames",
                "total_episodes",
                "layout",
                "surplus",
                "init_random_frames",
                "max_frames_per_traj",
                "reset_at_each_iter",
                "validate",
                "yield_large",
            )
        }
        if config.exclude:
            options["exclude"] = config.exclude
        options |= given
        for name in ("policy_device", "storing_device"):
            if (device := getattr(config, name)) is not None:
                options[name] = device
        if config.postproc:
            options["postproc"] = identity
        if config.resets:
            options["resets"] = RESETS[config.resets]
        fault = config.fault
        if fault is not None and fault.where == "postproc":
            options["postproc"] = FaultyPostproc(fault)
        elif fault is not None and fault.where == "sampler":
            options["resets"] = Resets(sampler=FaultySampler(fault))
        options |= config.settling
        of_vector: dict[str, Any] = {"info_keys": config.infos} if config.infos else {}
        if "rename" in options:
            of_vector["rename"] = options.pop("rename")
        if config.env.is_vector:
            options["reset_slots"] = config.reset_slots
        if not config.env.adapter:
            options |= of_vector
        make = partial(make_env, config.driven, self.world, number, of_vector)
        options = spelled(options, config.number)
        if not config.workers:
            env: Any = make
            if config.given == "object":
                env = make()
                self.to_close.append(env)
            return SyncCollector(env, policy, **options)
        factories = [
            partial(make, first=first, lanes=lanes)
            for first, lanes in lanes_of_workers(config.env.lanes, config.workers)
        ]
        if config.far:
            options |= {
                "transport": FarThreads,
                "mode": config.mode,
            }
            return MultiprocessCollector(factories, policy, **options)
        if config.threads:
            return MultiprocessCollector(factories, policy, mode=config.mode, **QUICK, **options)
        return start(factories, policy, mode=config.mode, **options)


def flat(batch: TensorDictBase) -> TensorDictBase:
    """Return the rows of a batch of any layout, lane by lane and in time order within a lane."""
    rows = batch.reshape(-1)
    mask = rows.get(("collector", "mask"), None)
    if mask is not None:
        rows = rows[mask.reshape(-1)].exclude(("collector", "mask"))
    keys = [rows["collector", name].numpy() for name in ("step", "traj_ids", "lane")]
    order = np.lexsort(keys)
    if np.array_equal(order, np.arange(len(order))):
        return rows
    return rows[torch.from_numpy(order)]


def restored(batch: TensorDictBase) -> TensorDictBase:
    """Return rows in their stored form."""
    rows = flat(batch)
    cut = rows["collector", "cut"]
    stored = rows.exclude(("collector", "cut")).clone()
    for key in [key for key in stored.keys(True, True) if key[0] == "next" and key[-1] == "done"]:
        done = stored[key]
        if len(key) > 2:  # an agent may have ended while its lane continues
            stored[key] = stored[*key[:-1], "terminated"] | stored[*key[:-1], "truncated"]
        else:
            stored[key] = done & ~cut.reshape(-1, *[1] * (done.ndim - 1))
    init = stored.get("is_init", None)
    if init is not None and init.dtype is torch.bool:  # otherwise an observation has that name
        stored["is_init"] = init & (stored["collector", "step"] == 0).reshape(init.shape)
    return stored


def as_yielded(stored: TensorDictBase) -> TensorDictBase:
    """Return stored rows in the form of a yielded batch."""
    rows = flat(stored)
    last = torch.ones(len(rows), dtype=torch.bool)
    last[:-1] = rows["collector", "traj_ids"][1:] != rows["collector", "traj_ids"][:-1]
    ended = (rows["next", "terminated"] | rows["next", "truncated"]).reshape(len(rows))
    for key in [key for key in rows.keys(True, True) if key[0] == "next" and key[-1] == "done"]:
        rows[key] = rows[key] | last.reshape(-1, *[1] * (rows[key].ndim - 1))
    rows["collector", "cut"] = last & ~ended
    init = rows.get("is_init", None)
    if init is not None and init.dtype is torch.bool:
        rows["is_init"] = init | last.roll(1).reshape(init.shape)
    return rows
