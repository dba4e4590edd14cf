"""A thousand actors for a day, in simulated time: exact counts, and the driver's CPU load.

    python benchmarks/apart/simulated_actors.py
    python benchmarks/apart/simulated_actors.py --sharded
    python benchmarks/apart/simulated_actors.py --rates --width 256

A transport with a simulated clock runs no actors. It draws the time of each answer (steps take
lognormal times, the network exponential ones) and of each actor's death, and writes the rows. The
scheduler, the leases, the ledger and the rows are the real ones. The driver's own CPU time advances
the clock too, so answers wait while the driver is busy. Every batch is compared with the rows that
the actors made. With ``--sharded`` the actors send no rows but report how many they stored. The
script compares these numbers with the lines that record which rows count. ``--rates`` lets actors
step faster and faster until the driver is always busy: the rows per second are then the highest
rate that one driver can handle.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.batches.stored.worker_shard import OpenShard, ShardCommit
from tallyroll.collector.counting.episode_ring import EPISODE
from tallyroll.collector.counting.ledger import LedgerEntry
from tallyroll.collector.slab.progress import COUNTED, FILLED, LEASE, counted_word
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.local.pipes import SharedPlace
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.transport import Gone
from tallyroll.collector.workers.worker import Worker
from tallyroll.storage.ext.sharded.files import ShardedFiles

NOTICED = 5.0
"""Seconds until the death of an actor is detected, as by its heartbeats."""
START = (10.0, 40.0)
"""Minimum and maximum seconds that an actor takes to start."""
NETWORK = 0.02
"""Mean seconds that an answer takes."""


class Lane(gymnasium.Env[Any, Any]):
    """An environment of one lane. Observes lane, life and step, padded to the width of a row."""

    def __init__(self, width: int) -> None:
        self.observation_space = Box(-np.inf, np.inf, (width,), np.float32)
        self.action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> Any:
        raise NotImplementedError("the transport writes the rows")


class SimLink:
    """An actor: the requests to it, and the times of its answers."""

    pid = None
    alive = True

    def __init__(self, index: int, life: int, sim: Simulation) -> None:
        self.index, self.life, self.sim = index, life, sim
        self.name = f"actor {index}"
        self.heard: deque[Any] = deque()
        self.step = 0
        self.heard_at = 0.0
        """The time of its last answer."""
        self.keep: OpenShard | None = None
        """The shard for its rows, if it stores them."""
        self.free_at = sim.clock + sim.draw.uniform(*START)
        self.dies_at = self.free_at + sim.draw.expovariate(1 / sim.mtbf)
        self.ended = self.doomed = False
        sim.at(self.free_at, self, m.EnvReady(1, sim.description))

    def send(self, question: Any) -> None:
        with self.sim.apart():
            self._send(question)

    def _send(self, question: Any) -> None:
        sim = self.sim
        if self.doomed or isinstance(question, m.Close):
            return
        if isinstance(question, m.Seed):
            answer: Any = replace(sim.planned, lane_seeds=[1 + self.index + 100_003 * self.life])
        elif isinstance(question, m.Bind):
            answer = sim.bound
        elif isinstance(question, OpenShard):
            self.keep, answer = question, m.DONE
        else:
            assert isinstance(question, m.Lease), question
            begins = max(self.free_at, sim.clock)
            self.free_at = begins + sim.seconds_of(question.frames)
            if self.free_at > self.dies_at:
                self._dies_in(question, begins)
                return
            answer = question
        # An answer arrives before the actor dies, or never. Answers arrive in order.
        comes = max(self.free_at, sim.clock) + sim.draw.expovariate(1 / NETWORK)
        self.heard_at = max(self.heard_at, comes)
        sim.at(self.heard_at, self, answer)

    def _dies_in(self, lease: m.Lease, begins: float) -> None:
        """Fill a part of a lease. The death is detected some time later."""
        self.doomed = True
        part = (self.dies_at - begins) / (self.free_at - begins)
        done = int(lease.frames * part) if begins < self.dies_at else 0
        known = max(self.dies_at, self.sim.clock, self.heard_at) + NOTICED
        self.sim.at(known, self, (lease, done))

    def hear(self) -> object:
        with self.sim.apart():
            answer = self.heard.popleft()
            if isinstance(answer, tuple):
                lease, done = answer
                if done:
                    self.sim.count(self.index, lease, done)
                self.sim.deaths += 1
                self.sim.lost += done
                self.heard.clear()
                answer = Gone("was killed, as drawn")
            if not self.heard:
                del self.sim.speaking[self]
            if not isinstance(answer, m.Lease):
                return answer
            return self.sim.kept(self, answer) if self.keep else self.sim.fill(self, answer)

    def over(self, seconds: float) -> bool:
        return True

    def kill(self) -> None:
        self.ended = True

    end = kill


class Simulation:
    """The transport: a clock, a heap of future answers, and memory."""

    kills = True

    def __init__(self, jobs: Sequence[bytes], args: argparse.Namespace) -> None:
        self.draw, self.rng = random.Random(args.seed), np.random.default_rng(args.seed)
        self.mtbf, self.mean = args.mtbf * 3600, args.step
        self.clock, self.mark = 0.0, time.thread_time()
        self.driver = 0.0
        """CPU seconds of the driver."""
        self.deaths = self.lost = self.made = 0
        self._heap: list[tuple[float, int, SimLink, Any]] = []
        self._number = 0
        self.speaking: dict[SimLink, None] = {}
        """Links with answers to read."""
        self._listed: Sequence[SimLink] = ()
        self._listened: set[SimLink] = set()
        self.stored: dict[str, int] = {}
        """Rows that actors reported as stored, by shard."""
        self._lives: dict[int, int] = {}
        self._real = Worker(cloudpickle.loads(jobs[0]), self)
        self.description = self._real.description
        self.planned = self._real.seed(m.Seed(1, 0, 0, len(jobs), 0, asked=True))
        self.bound: Any = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude work of the simulation from the driver's CPU time."""
        self._passes()
        try:
            yield
        finally:
            self.mark = time.thread_time()

    def _passes(self) -> None:
        now = time.thread_time()
        self.driver += now - self.mark
        self.clock += now - self.mark
        self.mark = now

    def at(self, clock: float, link: SimLink, answer: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (clock, self._number, link, answer))

    def seconds_of(self, frames: int) -> float:
        """Return the time of the steps of a lease. Some actors are slower in some leases."""
        return frames * self.mean * self.draw.lognormvariate(-0.125, 0.5)

    def start(self, index: int) -> SimLink:
        with self.apart():
            life = self._lives[index] = self._lives.get(index, -1) + 1
            return SimLink(index, life, self)

    def ready(self, links: Sequence[SimLink], seconds: float) -> set[SimLink]:
        with self.apart():
            heap, until = self._heap, self.clock + seconds
            if heap and heap[0][0] > self.clock:
                self.clock = min(until, heap[0][0])
            while heap and heap[0][0] <= self.clock:
                _, _, link, answer = heapq.heappop(heap)
                if not link.ended:
                    link.heard.append(answer)
                    self.speaking[link] = None
            if links is not self._listed:
                self._listed, self._listened = links, {*links}
            return {link for link in self.speaking if link in self._listened}

    # The worker's side of a channel, for the only real worker.
    def place(self, share: Share, plan: Any, module: Any) -> Any:
        if self.bound is None and not hasattr(self, "memory"):
            self.memory = SharedPlace().make(share, plan, module)
            self.memory.weights.publish(None, 0)
            self.slabs: dict[tuple[int, int], Any] = {}
            self.share = share
            self.bound = self._real.bind(m.Bind(share, 0))
        return self.memory

    def fill(self, link: SimLink, lease: m.Lease) -> m.LeaseResult:
        """Write the rows of a lease, and report them."""
        index, frames = link.index, lease.frames
        key = index, lease.base // self.share.stride
        if key not in self.slabs:
            self.slabs[key] = self.memory.segment(*key)
        slab = self.slabs[key]
        steps = np.arange(link.step, link.step + frames + 1, dtype=np.float32)
        for name, first in ((("observation",), 0), (("next", "observation"), 1)):
            rows = slab.arrays[name][:frames, 0]
            rows[:, 0], rows[:, 1] = index, link.life
            rows[:, 2] = steps[first : first + frames]
        slab.arrays[
            "next",
            "reward",
        ][:frames, 0, 0] = steps[1:]
        for name in ("terminated", "truncated"):
            slab.arrays["next", name][:frames] = False
        slab.arrays["action",][:frames] = 0
        slab.version[:frames] = -1
        slab.transitions[:frames] = True
        link.step += frames
        self.made += frames
        self.count(index, lease, frames)
        entry = LedgerEntry(slots=frames, executed=frames)
        return m.LeaseResult(frames, entry, [0], 0)

    def kept(self, link: SimLink, lease: m.Lease) -> ShardCommit:
        """Report that the rows of a lease are stored."""
        assert link.keep is not None
        frames = lease.frames
        link.step += frames
        self.made += frames
        self.stored[Path(link.keep.path).name] = link.step
        self.count(link.index, lease, frames)
        entry = LedgerEntry(slots=frames, executed=frames, stored=frames)
        next_id = link.keep.first_id + link.keep.run_lanes
        return ShardCommit(
            f"{id(link):x}", link.step, entry, 0, 1, next_id, -1, np.zeros(0, EPISODE), "simulated"
        )

    def count(self, index: int, lease: m.Lease, done: int) -> None:
        board = self.memory.board(index)
        board[LEASE], board[FILLED] = lease.number, lease.base + done
        board[COUNTED] = counted_word(lease.base + done, done)

    def close(self) -> None:
        self._heap.clear()


def make(width: int) -> Any:
    return SyncVectorEnv([lambda: Lane(width)], autoreset_mode=AutoresetMode.DISABLED)


class Judge:
    """Compares rows with those that were made: each life of a lane starts at 0 and has no gaps."""

    def __init__(self, actors: int) -> None:
        self.life, self.next = np.zeros(actors), np.zeros(actors)
        self.rows = 0

    def look(self, batch: Any) -> None:
        seen = batch["observation"].numpy()
        after = batch["next", "observation"].numpy()
        assert (after[:, 2] == seen[:, 2] + 1).all()
        order = np.argsort(seen[:, 0], kind="stable")
        lane, life, step = (seen[order, at] for at in range(3))
        lane = lane.astype(int)
        first = np.r_[True, lane[1:] != lane[:-1]]
        before_life = np.where(first, self.life[lane], np.r_[0, life[:-1]])
        before = np.where(first, self.next[lane], np.r_[0, step[:-1] + 1])
        same = life == before_life
        assert (step[same] == before[same]).all(), "a row is missing, or there twice"
        assert (step[~same] == 0).all()
        assert (life[~same] > before_life[~same]).all()
        last = np.r_[first[1:], True]
        self.life[lane[last]], self.next[lane[last]] = life[last], step[last] + 1
        assert (batch["collector", "lane"].numpy()[order] == lane).all()
        self.rows += len(batch)


def run(args: argparse.Namespace, total: int) -> dict[str, float]:
    made: list[Simulation] = []

    def transport(jobs: Sequence[bytes]) -> Simulation:
        made.append(Simulation(jobs, args))
        return made[0]

    factories: list[Callable[[], Any]] = [lambda: make(args.width)] * args.actors
    with (
        tempfile.TemporaryDirectory() as folder,
        MultiprocessCollector(
            factories,
            None,
            mode="async",
            frames_per_batch=args.batch,
            total_frames=total,
            seed=args.seed,
            transport=transport,
            on_worker_death="respawn",
            max_respawns=10**9,
            sharded=args.sharded,
            storage=Path(folder) / "rows" if args.sharded else None,
        ) as collector,
    ):
        sim, judge = made[0], Judge(args.actors)
        sim.mark = time.thread_time()
        sim.driver, began = 0.0, sim.clock
        if args.sharded:
            collector.collect(total)
        else:
            for batch in collector:
                with sim.apart():
                    judge.look(batch)
        sim._passes()
        ledger = collector.ledger
        ledger.check()
        if args.sharded:
            said = ShardedFiles(Path(folder) / "rows").acknowledged()
            assert {each.name: each.rows for each in said.shards} == sim.stored
            judge.rows = said.rows
        assert judge.rows == ledger.stored == total, (judge.rows, ledger.stored, total)
        assert ledger.lost == sim.lost, (ledger.lost, sim.lost)
    seconds = sim.clock - began
    return {
        "rows": total,
        "hours": seconds / 3600,
        "deaths": sim.deaths,
        "lost": ledger.lost,
        "rate": total / seconds,
        "driver": sim.driver,
        "us": 1e6 * sim.driver / total,
        "share": sim.driver / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--step", type=float, default=10.0, help="mean seconds of a step")
    parser.add_argument("--mtbf", type=float, default=12.0, help="mean hours of an actor's life")
    parser.add_argument("--batch", type=int, default=64_000)
    parser.add_argument("--width", type=int, default=17, help="numbers of an observation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sharded", action="store_true", help="actors keep their rows")
    parser.add_argument("--rates", action="store_true")
    args = parser.parse_args()
    columns = "rows hours deaths lost rate driver us share"
    print(f"{'actors':>8} {'step s':>8} " + " ".join(f"{each:>10}" for each in columns.split()))

    def show(total: int) -> None:
        found = run(args, total)
        numbers = " ".join(f"{found[each]:>10.4g}" for each in columns.split())
        print(f"{args.actors:>8} {args.step:>8g} {numbers}", flush=True)

    if not args.rates:
        show(math.floor(args.actors * args.hours * 3600 / args.step))
    else:
        for args.step in (1.0, 0.1, 0.01, 0.001, 0.0001):
            show(args.batch * 4)
    print(f"memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
