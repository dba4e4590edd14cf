"""Compare slices of trajectories with the same number of random rows.

Run ``python benchmarks/storage_slices.py``. With ``--priorities`` it measures prioritized draws and
updates of 256 rows instead, that is, indices and weights without the rows, and compares them with
those of other installed libraries. Each batch has one row of each of 64 lanes, so consecutive rows
of a trajectory are 64 rows apart. The benchmark reads 32 slices of 16 rows from a full ring, and
then does so again with a batch written before every read.

``--n-step`` measures the sums of three steps of 256 rows, beside Stable-Baselines3's buffer.

``--rows 1e6,1e7,1e8`` measures only the index, for this many rows, which are in no file. The lanes
spend a slot on each reset; batches have 64, 128 and 65,536 rows (``--batches``), and episodes have
22, 50 and 300 rows on average (``--episodes``).

``--packed SRC`` packs existing storages, one after the other, and reads them in one thread. It
prints bytes per row, CPU time per row, and the times of reading rows in order and of 256 random
rows with all their columns, by a reader that has just been opened and by one that has all chunks.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Result,
    console,
    interleave,
    play_and_close,
    prepare,
    print_results,
    print_setting,
    ratio,
    write_json,
)
from gymnasium import spaces
from storage_work import QUANTUM, Calls, Rows, length, tensordict_of
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler

from tallyroll.storage import (
    MemmapStorage,
    PrioritizedSampler,
    fast_paths,
    n_step,
    open_storage,
)
from tallyroll.storage.ext.packed.archives import ZarrArchive
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.readers.row_reader import take_rows
from tallyroll.storage.sampling.trajectory_slices import TrajectorySliceSampler
from tallyroll.storage.trajectories.lane_stretches import RowChunk
from tallyroll.storage.trajectories.row_index import RowIndex

LANES, SLICES, SLICE = 64, 32, 16
SHORTEST, LONGEST = 100, 300
"""Minimum and maximum length of a trajectory."""
SIZES = (100_032, 1_000_000)
"""Rows of the ring, a multiple of the batch."""
PRIORITIES = 256
"""Rows that are drawn or updated by priority at a time."""
TRAJECTORY = ("collector", "traj_ids")


def lane_steps(steps: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """For each row of one lane, return the trajectories before it and its step in its own."""
    lengths = generator.integers(SHORTEST, LONGEST + 1, size=steps // SHORTEST + 1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(steps)
    ordinal = np.searchsorted(starts, rows, side="right") - 1
    return ordinal, rows - starts[ordinal]


def interleaved_rows(count: int) -> Rows:
    """Return rows [count] of 64 interleaved lanes, with the columns of CartPole."""
    generator, steps = np.random.default_rng(0), count // LANES + 1
    lanes = [lane_steps(steps, generator) for _ in range(LANES)]
    ordinal, step = (np.stack(part, axis=1) for part in zip(*lanes, strict=True))
    ended = np.concatenate([ordinal[1:] != ordinal[:-1], np.zeros((1, LANES), bool)])
    lane = np.broadcast_to(np.arange(LANES, dtype=np.int32), ordinal.shape)

    def rows(column: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(column.reshape(-1)[:count])

    done = rows(ended)[:, None]
    observation = generator.standard_normal((count + LANES, 4), dtype=np.float32)
    return {
        ("observation",): observation[:count],
        ("action",): generator.integers(2, size=count),
        ("next", "observation"): observation[LANES:],
        ("next", "reward"): np.ones((count, 1), np.float32),
        ("next", "done"): done,
        ("next", "terminated"): done.copy(),
        ("next", "truncated"): np.zeros_like(done),
        ("collector", "traj_ids"): rows(ordinal * LANES + lane),
        ("collector", "step"): rows(step),
        ("collector", "lane"): rows(lane),
        ("collector", "policy_version"): np.zeros(count, np.int64),
    }


class Reader:
    """A full ring under TorchRL's ``ReplayBuffer`` with a sampler.

    Args:
        name: name of the row in the table.
        ring: the storage, still empty.
        sampler: chooses the rows.
        whole: the rows that fill the ring.
        later: batches to write afterwards, if any. They continue the trajectories of ``whole``.
    """

    def __init__(self, name: str, ring: Any, sampler: Any, whole: Rows, later: list[Rows]) -> None:
        """Fill the ring with batches of one row per lane."""
        self.name, self.ring, self.later = name, ring, later
        self.buffer = ReplayBuffer(storage=ring, sampler=sampler, batch_size=SLICES * SLICE)
        self.ours = isinstance(ring, MemmapStorage)
        if self.ours:
            self.write, self.close = partial(ring.extend, ids="fresh"), ring.close
            for batch in batches_of(whole):
                self.write(batch)
        else:
            self.write, self.close = self.buffer.extend, None
            self.write(tensordict_of(whole))

    def sample(self) -> TensorDict:
        """Return rows [512]."""
        return self.buffer.sample()

    def read(self, _: None) -> None:
        """Read."""
        self.sample()

    def write_and_read(self, batch: Any) -> None:
        """Write one row of each lane, and read."""
        self.write(batch)
        self.sample()

    def calls(self) -> Calls:
        """Return the calls to time."""
        if not self.later:
            return Calls(self.name, self.read, [None], SLICES * SLICE, close=self.close)
        batches = self.later if self.ours else map(tensordict_of, self.later)
        return Calls(self.name, self.write_and_read, batches, SLICES * SLICE, close=self.close)

    def whole_slices(self) -> int:
        """Count the slices of one sample that are consecutive rows of one trajectory."""
        sample = self.sample()["collector"].reshape(SLICES, SLICE)
        same = (sample["traj_ids"] == sample["traj_ids"][:, :1]).all(1)
        successive = (sample["step"].diff(dim=1) == 1).all(1)
        return int((same & successive).sum())


class Direct(Reader):
    """The same without a replay buffer."""

    def sample(self) -> TensorDict:
        """Return slices [32, 16]."""
        return self.ring.trajectories.sample_slices(SLICES, SLICE)


def batches_of(rows: Rows) -> list[Rows]:
    """Split the rows into batches of one row per lane, without a copy."""
    return [
        {key: column[start : start + LANES] for key, column in rows.items()}
        for start in range(0, length(rows), LANES)
    ]


def lane_by_lane(rows: Rows) -> Rows:
    """Return the rows in an order in which TorchRL's sampler can separate trajectories by id."""
    order = np.lexsort((rows["collector", "step"], rows["collector", "traj_ids"]))
    return {key: column[order] for key, column in rows.items()}


def readers(whole: Rows, later: list[Rows], scratch: Path, *, peers: bool) -> list[Reader]:
    """Return the reader of random rows, which is the reference, and the readers of slices.

    Slices are drawn by Tallyroll's sampler and by TorchRL's.
    """
    size = length(whole)

    def ring(name: str) -> Any:
        return MemmapStorage(scratch / name, max_size=size)

    found = [Reader("random rows", ring("random"), RandomSampler(), whole, later)]
    ours = TrajectorySliceSampler(SLICE)
    found.append(Reader("TrajectorySliceSampler", ring("slices"), ours, whole, later))
    found.append(Direct("storage.trajectories.sample_slices", ring("direct"), ours, whole, later))
    if peers:
        by_end = SliceSampler(slice_len=SLICE, end_key=("next", "done"), cache_values=True)
        memory = LazyTensorStorage(size)
        found.append(Reader("TorchRL SliceSampler, end_key", memory, by_end, whole, later))
    if peers and not later:
        by_id = SliceSampler(slice_len=SLICE, traj_key=TRAJECTORY, cache_values=True)
        memory, in_order = LazyTensorStorage(size), lane_by_lane(whole)
        name = "TorchRL SliceSampler, traj_key, rows sorted"
        found.append(Reader(name, memory, by_id, in_order, later))
    return found


def refusal(whole: Rows) -> str:
    """Return TorchRL's error for interleaved rows of many lanes, sliced by trajectory id."""
    by_id = SliceSampler(slice_len=SLICE, traj_key=TRAJECTORY)
    try:
        Reader("", LazyTensorStorage(length(whole)), by_id, whole, []).read(None)
    except RuntimeError as error:
        return f"TorchRL SliceSampler, traj_key, rows as they came: {str(error).splitlines()[0]}"
    return "TorchRL SliceSampler, traj_key, rows as they came: works"


def play(size: int, batches: int, args: argparse.Namespace) -> list[Result]:
    """Measure one table and print it."""
    rows = interleaved_rows(size + batches * LANES)
    whole = {key: column[:size] for key, column in rows.items()}
    later = batches_of({key: column[size:] for key, column in rows.items()})
    with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch, ExitStack() as stack:
        found = readers(whole, later, Path(scratch), peers=not args.no_peers)
        calls = [reader.calls() for reader in found]
        for call in calls:
            stack.callback(call.close)
        results = interleave(calls, args.rounds, args.seconds)
        remarks = [
            f"{reader.name}: {reader.whole_slices()} of {SLICES} slices are one trajectory's"
            for reader in found[1:]
        ]
    if not args.no_peers:
        remarks.append(refusal({key: column[: min(size, 2**16)] for key, column in whole.items()}))
    title = f"{SLICES} slices of {SLICE} of {size} rows" + (", a batch in between" if later else "")
    print_results(title, results, remarks, "random", ("call", "row"))
    return results


class Prioritised:
    """Draws and updates of 256 rows out of ``size`` rows with random priorities.

    A subclass sets `draw`, which is called without arguments, and `update`, which is called with
    indices [256] and priorities, float32 [256].
    """

    draw: Callable[[], Any]
    update: Callable[[np.ndarray, np.ndarray], Any]

    def close(self) -> None:
        """Release what the contender has opened."""

    def calls(self, name: str, size: int, work: str) -> Calls:
        """Return the calls to time."""
        if work == "draw":
            return Calls(name, lambda _: self.draw(), [None], PRIORITIES, close=self.close)
        generator = np.random.default_rng(0)
        given = [
            (generator.integers(size, size=PRIORITIES), generator.random(PRIORITIES, np.float32))
            for _ in range(500)
        ]
        update = self.update
        return Calls(name, lambda each: update(*each), given, PRIORITIES, close=self.close)


class Ours(Prioritised):
    """`PrioritizedSampler` over a growing storage of the smallest rows."""

    def __init__(self, size: int) -> None:
        """Fill it."""
        self.storage = MemmapStorage(capacity=size)
        for start in range(0, size, 2**22):
            rows = np.zeros(min(2**22, size - start), np.uint8)
            self.storage.extend({("x",): rows})
        self.sampler = PrioritizedSampler(self.storage)
        self.sampler.update_rows(np.arange(size), np.random.default_rng(0).random(size))
        self.draw = partial(self.sampler.draw, PRIORITIES)
        self.update, self.close = self.sampler.update_rows, self.storage.close


class Plain(Ours):
    """The same without the C extension."""

    def __init__(self, size: int) -> None:
        """Fill it."""
        with fast_paths.switched_off("kernel"):
            super().__init__(size)


class Cpprb(Prioritised):
    """cpprb, which also returns the rows; here a row has one byte."""

    def __init__(self, size: int) -> None:
        """Fill it."""
        from cpprb import PrioritizedReplayBuffer

        buffer = PrioritizedReplayBuffer(size, {"x": {"dtype": np.uint8}}, alpha=0.6)
        for start in range(0, size, 2**20):
            count = min(2**20, size - start)
            buffer.add(x=np.zeros(count, np.uint8), priorities=np.random.rand(count))
        self.draw = partial(buffer.sample, PRIORITIES, beta=0.4)
        self.update = buffer.update_priorities


class Tianshou(Prioritised):
    """Tianshou's buffer. Its sum tree uses numba, its weights use NumPy."""

    def __init__(self, size: int) -> None:
        """Fill it."""
        from tianshou.data import Batch, PrioritizedReplayBuffer

        buffer = PrioritizedReplayBuffer(size, alpha=0.6, beta=0.4)
        first = Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, obs_next=0, info={})
        buffer.add(first)
        buffer._size = size  # pretend that all rows were written, which would take minutes
        buffer.weight[np.arange(size)] = np.random.rand(size)

        def draw() -> tuple[np.ndarray, np.ndarray]:
            index = buffer.sample_indices(PRIORITIES)
            return index, buffer.get_weight(index)

        self.draw, self.update = draw, buffer.update_weight


class Rlox(Prioritised):
    """rlox's buffer in Rust, which also returns the rows; here each column has one number."""

    def __init__(self, size: int) -> None:
        """Fill it."""
        from rlox import PrioritizedReplayBuffer

        buffer = PrioritizedReplayBuffer(size, 1, 1, 0.6, 0.4)
        one = np.zeros(1, np.float32)
        for priority in np.random.default_rng(0).random(size).tolist():
            buffer.push(one, one, 0.0, False, False, one, priority)
        self.draw = partial(buffer.sample, PRIORITIES)
        # It accepts only arrays of these types.
        self.update = lambda index, given: buffer.update_priorities(
            index.astype(np.uint64), given.astype(np.float64)
        )


class TorchRL(Prioritised):
    """TorchRL's sampler, if its compiled part loads."""

    def __init__(self, size: int) -> None:
        """Fill it."""
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler as Theirs

        storage = LazyTensorStorage(size)
        storage.set(range(size), TensorDict({"x": torch.zeros(size, dtype=torch.uint8)}, [size]))
        sampler = Theirs(size, 0.6, 0.4)
        sampler.update_priority(torch.arange(size), torch.rand(size))
        self.draw = partial(sampler.sample, storage, PRIORITIES)
        self.update = sampler.update_priority


def play_priorities(size: int, work: str, args: argparse.Namespace) -> list[Result]:
    """Measure one table and print it."""
    kinds: list[tuple[str, type[Prioritised]]] = [("PrioritizedSampler", Ours)]
    kinds.append(("PrioritizedSampler, no extension", Plain))
    if not args.no_peers:
        kinds += [("cpprb", Cpprb), ("Tianshou", Tianshou), ("rlox", Rlox), ("TorchRL", TorchRL)]
    found, remarks = [], []
    with ExitStack() as stack:
        for name, kind in kinds:
            try:
                found.append(kind(size).calls(name, size, work))
                stack.callback(found[-1].close)
            except (ImportError, RuntimeError) as error:  # missing, or for another torch
                remarks.append(f"{name}: {str(error).splitlines()[0]}")
        results = interleave(found, args.rounds, args.seconds)
    print_results(f"{work} {PRIORITIES} of {size} rows", results, remarks, "ours", ("call", "row"))
    return results


def n_step_calls(size: int) -> list[Calls]:
    """Return calls of `n_step`, and of Stable-Baselines3's buffer with the same columns."""
    from stable_baselines3.common.buffers import NStepReplayBuffer

    lanes, steps = 8, size // 8
    random, observations = np.random.default_rng(0), spaces.Box(-1, 1, (17,))
    actions = spaces.Box(-1, 1, (6,))
    peer = NStepReplayBuffer(size, observations, actions, "cpu", lanes, n_steps=3, gamma=0.99)
    ours = MemmapStorage(capacity=lanes * steps)
    for step in range(steps):
        seen, later = random.random((2, lanes, 17), np.float32)
        acted, reward = random.random((lanes, 6), np.float32), random.random(lanes, np.float32)
        ended = np.full(lanes, step % 200 == 199)
        peer.add(seen, later, acted, reward, ended, [{}] * lanes)
        rows: Rows = {("observation",): seen, ("action",): acted, ("next", "observation"): later}
        rows["next", "reward"] = reward[:, None]
        rows["next", "done"] = rows["next", "terminated"] = ended[:, None]
        rows["next", "truncated"] = np.zeros_like(ended)[:, None]
        rows["collector", "lane"] = np.arange(lanes)
        rows["collector", "traj_ids"] = rows["collector", "lane"] + step // 200 * lanes
        rows["collector", "step"] = np.full(lanes, step % 200)
        ours.extend(rows)
    keys = ["observation", "action", ("next", "observation"), ("next", "reward")]
    keys += [("next", "terminated"), "gamma"]

    def call(**options: Any) -> Callable[[object], object]:
        return lambda _: n_step(
            ours, random.integers(len(ours), size=PRIORITIES), 3, 0.99, **options
        )

    out = n_step(ours, np.zeros(PRIORITIES, np.int64), 3, 0.99, keys=keys)
    contenders = {
        "Stable-Baselines3": lambda _: peer.sample(PRIORITIES),
        "n_step": call(),
        "n_step, keys=": call(keys=keys),
        "n_step, out=": call(out=out),
    }
    return [
        Calls(name, each, [None], PRIORITIES, close=ours.close) for name, each in contenders.items()
    ]


def next_step_chunks(rows: int, episode: int, batch: int) -> Iterator[RowChunk]:
    """Yield rows of 64 lanes without reset slots, in batches that are laid out lane by lane."""
    rng, slots, start = np.random.default_rng(0), 2**18 // LANES, 0
    count, step = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    resets = np.zeros(LANES, np.bool_)
    while start < rows:
        ids, steps = np.empty((2, slots, LANES), np.int64)
        stored, draws = np.empty((slots, LANES), np.bool_), rng.random((slots, LANES))
        for slot in range(slots):
            stored[slot], ids[slot], steps[slot] = ~resets, count, step
            ends = (draws[slot] < 1 / episode) & ~resets
            step = np.where(resets, step, np.where(ends, 0, step + 1))
            count, resets = count + ends, ends
        lane = np.broadcast_to(np.arange(LANES), stored.shape)
        columns = [(ids * LANES + lane)[stored], steps[stored], lane[stored]]
        if batch > LANES:
            number = np.arange(len(columns[0]))
            order = np.lexsort((number, columns[2], number // batch))
            columns = [column[order] for column in columns]
        yield RowChunk(start, *columns)
        start += len(columns[0])


def median_us(call: Callable[[], Any], times: int = 300) -> float:
    """Return the median time of a call, in microseconds."""
    each = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        each.append(time.perf_counter() - begin)
    return float(np.median(each)) * 1e6


def play_index(rows: int, episode: int, batch: int) -> dict[str, float]:
    """Measure the index of ``rows`` rows, and print one line."""
    index, rng, build = RowIndex(), np.random.default_rng(1), 0.0
    for chunk in next_step_chunks(rows, episode, batch):
        begin = time.process_time()
        index.extend(chunk)
        build += time.process_time() - begin

    def pick(count: int, below: int) -> np.ndarray:
        return rng.integers(below, size=count)

    found = {
        "rows": index.seen,
        "episode": episode,
        "batch": batch,
        "bytes_a_row": index.nbytes / index.seen,
        "build_seconds": build,
        "slices_us": median_us(lambda: index.draw(SLICES, SLICE, 0, pick)),
        "onward_us": median_us(lambda: index.onward(pick(256, index.seen), 5)),
        "trajectory_us": median_us(lambda: index.rows_of(int(pick(1, rows // episode // 2)[0]))),
    }
    numbers = ", ".join(f"{name} {value:,.3g}" for name, value in found.items())
    console.print(numbers, highlight=False)
    return found


def play_packed(source: Path, rounds: int) -> dict[str, Any]:
    """Print the cost of packing and reading a storage: medians, and the minimum for packing."""
    random, packing, cold, cached, ordered = np.random.default_rng(0), [], [], [], []
    with open_storage(source) as storage, tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds):
            path = Path(scratch, f"{number}")
            began = time.process_time()
            report = storage.pack(path)
            packing.append((time.process_time() - began) / report.rows * 1e6)
            reader = PackedReader(ZarrArchive(path), threads=1)
            rows = random.integers(0, report.rows, 256)
            cold.append(seconds_of(lambda reader=reader, rows=rows: take_rows(reader, rows)))
            for _ in range(2):  # chunks are cached on the second access
                take_rows(reader, np.arange(0, report.rows, 32))
            cached.append(
                median_us(lambda reader=reader, rows=rows: take_rows(reader, rows), 50) / 1e3
            )
            reader.close()
            reader = PackedReader(ZarrArchive(path), threads=1)
            column, begun = reader.column(("observation",)), time.thread_time()
            for start in range(0, report.rows, 1024):
                column.slice(start, min(start + 1024, report.rows))
            ordered.append(report.rows / (time.thread_time() - begun))
            reader.close()
            shutil.rmtree(path)
    found = {
        "source": source.name,
        "rows": report.rows,
        "bytes_a_row": report.nbytes / report.rows,
        "pack_us_cpu_a_row": float(np.median(packing)),
        "pack_us_cpu_a_row_least": min(packing),
        "observations_a_cpu_s": float(np.median(ordered)),
        "256_rows_cold_ms_cpu": float(np.median(cold)) * 1e3,
        "256_rows_cached_ms": float(np.median(cached)),
    }
    console.print(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of this thread in one call."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def numbers(text: str) -> list[int]:
    """Parse the integers of an option, such as ``1e6,1e7``."""
    return [int(float(each)) for each in text.split(",")]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two tiny rounds: does it run?")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a round")
    parser.add_argument("--no-peers", action="store_true", help="Tallyroll only")
    parser.add_argument("--priorities", action="store_true", help="prioritised draws and updates")
    parser.add_argument("--n-step", action="store_true", help="256 rows of 3 steps")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of the ring")
    parser.add_argument("--rows", type=numbers, help="the index alone, of so many rows: 1e6,1e8")
    parser.add_argument("--batches", type=numbers, default=[64, 128, 2**16], help="with --rows")
    parser.add_argument("--episodes", type=numbers, default=[22, 50, 300], help="with --rows")
    parser.add_argument("--packed", type=Path, nargs="+", metavar="SRC", help="pack these")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    args.sizes = args.sizes or ((SIZES[-1],) if args.priorities else SIZES)
    if args.quick:
        args.rounds, args.seconds, args.sizes = 2, 0.001, (64 * LONGEST,)
    return args


def main() -> None:
    """Measure every size, without and with batches in between."""
    args = parse_args()
    prepare()
    print_setting()
    if args.rows:
        cases = itertools.product(args.episodes, args.batches, args.rows)
        found = [play_index(rows, episode, batch) for episode, batch, rows in cases]
        if args.json:
            write_json(args.json, found)
        return
    if args.packed:
        played = [play_packed(source, args.rounds) for source in args.packed]
        if args.json:
            write_json(args.json, played)
        return
    console.print(f"{args.rounds} interleaved rounds of at least {args.seconds} s, one thread")
    # A write and a read together take more than 0.1 ms.
    enough = int((args.rounds + 1) * (args.seconds + QUANTUM) / 1e-4) + 100
    records: list[dict[str, Any]] = []
    if args.n_step:
        results = play_and_close(n_step_calls(args.sizes[0]), args.rounds, args.seconds)
        print_results(
            f"3 steps of 256 of {args.sizes[0]} rows", results, [], "peer", ("call", "row")
        )
        if args.json:
            write_json(args.json, [{"contender": r.name, "us": r.vector_step_us} for r in results])
        return
    if args.priorities:
        for size, work in itertools.product(args.sizes, ("draw", "update")):
            for result in play_priorities(size, work, args):
                figures = {"rows": size, "work": work, "contender": result.name}
                records.append({**figures, "us_per_call": result.vector_step_us})
        if args.json:
            write_json(args.json, records)
        return
    for batches, size in itertools.product((0, enough), args.sizes):
        results = play(size, batches, args)
        records += [
            {
                "rows": size,
                "batch_in_between": bool(batches),
                "contender": result.name,
                "us_per_call": result.vector_step_us,
                "speed_to_random": ratio(results[0], result),
                "spread": result.spread,
                "rounds_us_per_row": result.per_transition,
            }
            for result in results
        ]
        if args.json:
            write_json(args.json, records)


if __name__ == "__main__":
    main()
