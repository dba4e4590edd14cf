"""What do slices of trajectories cost beside as many random rows?

Run ``python benchmarks/storage_slices.py``. 64 lanes, one row of each a batch, so that neighbours
in a trajectory lie 64 rows apart. 32 slices of 16 rows are read from a full ring; and once more
with a batch written before every read.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Result,
    console,
    interleave,
    prepare,
    print_results,
    print_setting,
    ratio,
    write_json,
)
from storage_work import QUANTUM, Calls, Rows, length, tensordict_of
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler

from tallyroll.storage import MemmapStorage
from tallyroll.storage.sampling.trajectory_slices import TrajectorySliceSampler

LANES, SLICES, SLICE = 64, 32, 16
SHORTEST, LONGEST = 100, 300
"""Bounds of the trajectories' lengths."""
SIZES = (100_032, 1_000_000)
"""Rows of the ring: whole batches."""
TRAJECTORY = ("collector", "traj_ids")


def lane_steps(steps: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One lane's count of trajectories before each row, and the step within the trajectory."""
    lengths = generator.integers(SHORTEST, LONGEST + 1, size=steps // SHORTEST + 1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(steps)
    ordinal = np.searchsorted(starts, rows, side="right") - 1
    return ordinal, rows - starts[ordinal]


def interleaved_rows(count: int) -> Rows:
    """Rows [count] of 64 lanes, a row of each after the other, with the columns of CartPole."""
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
        name: of the row in the table.
        ring: the storage, still empty.
        sampler: chooses the rows.
        whole: the rows that fill it.
        later: batches that may be written afterwards, and then go on where ``whole`` ends.
    """

    def __init__(self, name: str, ring: Any, sampler: Any, whole: Rows, later: list[Rows]) -> None:
        """Fill the ring, one row of each lane a batch."""
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
        """Return what is timed."""
        if not self.later:
            return Calls(self.name, self.read, [None], SLICES * SLICE, close=self.close)
        batches = self.later if self.ours else map(tensordict_of, self.later)
        return Calls(self.name, self.write_and_read, batches, SLICES * SLICE, close=self.close)

    def whole_slices(self) -> int:
        """Of one sample, how many slices are successive rows of one trajectory."""
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
    """The rows as batches of one row of each lane, in the same memory."""
    return [
        {key: column[start : start + LANES] for key, column in rows.items()}
        for start in range(0, length(rows), LANES)
    ]


def lane_by_lane(rows: Rows) -> Rows:
    """The same rows in the order in which TorchRL's sampler can tell trajectories by id."""
    order = np.lexsort((rows["collector", "step"], rows["collector", "traj_ids"]))
    return {key: column[order] for key, column in rows.items()}


def readers(whole: Rows, later: list[Rows], scratch: Path, *, peers: bool) -> list[Reader]:
    """A random sample of as many rows, which the others are compared with; slices by ours and by
    TorchRL's sampler."""
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
    """What TorchRL's sampler says to rows of many lanes by trajectory id."""
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


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two tiny rounds: does it run?")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a round")
    parser.add_argument("--no-peers", action="store_true", help="Tallyroll only")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    args.sizes = SIZES
    if args.quick:
        args.rounds, args.seconds, args.sizes = 2, 0.001, (64 * LONGEST,)
    return args


def main() -> None:
    """Measure every size, without and with batches in between."""
    args = parse_args()
    prepare()
    print_setting()
    console.print(f"{args.rounds} interleaved rounds of at least {args.seconds} s, one thread")
    # A batch and a read take more than 0.1 ms.
    enough = int((args.rounds + 1) * (args.seconds + QUANTUM) / 1e-4) + 100
    records: list[dict[str, Any]] = []
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
