"""Compare rings that store each frame once with rings of whole rows.

Run ``python benchmarks/storage_once.py``, or ``python benchmarks/storage.py --once``.

Each contender is a ring of transitions of ``--env``, made with random actions. The first tables
have the time of ``extend`` with 512 rows, of ``get`` of 256 random rows into reused arrays, and of
``collect`` of one step of all lanes. The last lines have the size of each ring, and the time to
reopen it. A ratio is the median time of the ring of whole rows divided by the contender's.

``--large 1_000_000`` instead fills one ring of that many rows, which repeat ``--rows`` collected
rows, and measures it beside a ring of the same rows without their observations.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Contender,
    Result,
    Tally,
    console,
    interleave,
    prepare,
    print_results,
    print_setting,
    ratio,
    write_json,
)
from tensordict import TensorDictBase

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage, frame_windows, open_storage

LAYOUTS = {"whole": False, "once": True}
APPENDED, DRAWN = 512, 256


class Ring(Contender):
    """A ring that is measured at one kind of work."""

    what: str

    def __init__(self, name: str, path: Path, rows: TensorDictBase, size: int) -> None:
        """Make the ring and fill it with ``rows``, repeated."""
        self.name, self.rows, self.size = name, rows, size
        self.ring = MemmapStorage(path, max_size=size, once=LAYOUTS[name])
        for start in range(0, size, len(rows)):
            self.ring.extend(rows[: size - start], ids="renumber")

    @abstractmethod
    def advance(self) -> None:
        """Do the work once."""

    def close(self) -> None:
        """Close the ring."""
        self.ring.close()


class Extend(Ring):
    """``extend`` with rows over the oldest ones."""

    what = f"extend with {APPENDED} rows"

    def __init__(self, name: str, path: Path, rows: TensorDictBase, size: int) -> None:
        """Make the ring; each call appends the next rows."""
        super().__init__(name, path, rows, size)
        self.at = 0

    def advance(self) -> None:
        """Append the next rows."""
        self.ring.extend(self.rows[self.at : self.at + APPENDED], ids="renumber")
        self.at = (self.at + APPENDED) % (len(self.rows) - APPENDED + 1)

    def tally(self) -> Tally:
        """Return the appended rows."""
        return Tally(APPENDED, 1)


class Draw(Ring):
    """``get`` of random rows with their next observations."""

    what = f"get of {DRAWN} random rows"

    def __init__(self, name: str, path: Path, rows: TensorDictBase, size: int) -> None:
        """Make the ring, and the arrays for the drawn rows."""
        super().__init__(name, path, rows, size)
        self.random = np.random.default_rng(0)
        keys = ["observation", ("next", "observation"), "action", ("next", "reward")]
        self.out = self.ring.reused(DRAWN, keys)

    def make_ready(self) -> None:
        """Draw the numbers of the rows."""
        self.index = self.random.integers(0, self.size, DRAWN)

    def advance(self) -> None:
        """Read the rows."""
        self.ring.get(self.index, out=self.out)

    def tally(self) -> Tally:
        """Return the drawn rows."""
        return Tally(DRAWN, 1)


class Collect(Contender):
    """``collect`` of one step of all lanes, which includes the step of the environment."""

    def __init__(self, name: str, path: Path, env: str, lanes: int, size: int) -> None:
        """Start a run that writes to a ring."""
        self.name, self.lanes = name, lanes
        self.ring = MemmapStorage(path, max_size=size, once=LAYOUTS[name])
        self.collector = SyncCollector(
            env,
            num_envs=lanes,
            frames_per_batch=lanes,
            total_frames=-1,
            storage=self.ring,
            seed=0,
        )

    def advance(self) -> None:
        """Collect a transition of each lane."""
        self.collector.collect(self.lanes)

    def tally(self) -> Tally:
        """Return the stored transitions."""
        return Tally(self.lanes, 1)

    def close(self) -> None:
        """End the run."""
        self.collector.shutdown()
        self.ring.close()


def collected(env: str, lanes: int, count: int) -> TensorDictBase:
    """Return ``count`` transitions with random actions, in the order of the batches."""
    with SyncCollector(
        env, num_envs=lanes, frames_per_batch=APPENDED, total_frames=count, seed=0
    ) as collector:
        return torch.cat([batch.clone() for batch in collector])


def of_noise(rows: TensorDictBase) -> TensorDictBase:
    """Return a copy of one lane's ``rows`` whose frames are noise. Each row adds a new frame."""
    random, noise = np.random.default_rng(0), rows.clone()
    frames = noise["observation"]
    shape = (len(frames) + frames.shape[1], *frames.shape[2:])
    source = random.integers(0, 256, shape, np.uint8)
    for at in range(frames.shape[1]):
        frames.numpy()[:, at] = source[at : at + len(frames)]
        noise["next", "observation"].numpy()[:, at] = source[at + 1 : at + 1 + len(frames)]
    return noise


def seconds_to_open(path: Path) -> float:
    """Return the median seconds of opening the ring and reading a row."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        with open_storage(path) as ring:
            ring.get([0])
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(title: str, contenders: list[Contender], args: argparse.Namespace) -> dict[str, Any]:
    """Measure the contenders of one table, and print it."""
    with ExitStack() as stack:
        for contender in contenders:
            stack.callback(contender.close)
        results = interleave(contenders, args.rounds, args.seconds)
    print_results(title, results, against="whole", units=("call", "row"))
    return {"what": title, "results": [_record(results[0], each) for each in results]}


def _record(whole: Result, result: Result) -> dict[str, Any]:
    return {
        "contender": result.name,
        "us_per_call": result.vector_step_us,
        "cpu_us_per_row": result.own_us,
        "speed_to_whole": ratio(whole, result),
        "spread": result.spread,
    }


def sizes(folder: Path, rows: TensorDictBase, size: int) -> list[dict[str, Any]]:
    """Fill a ring of each layout, and measure its bytes a row and the time to open it."""
    found = []
    for name, once in LAYOUTS.items():
        path = folder / f"size {name}"
        with MemmapStorage(path, max_size=size, once=once) as ring:
            for start in range(0, size, len(rows)):
                ring.extend(rows[: size - start], ids="renumber")
        nbytes = sum(each.stat().st_blocks * 512 for each in path.rglob("*") if each.is_file())
        seconds = seconds_to_open(path)
        console.print(f"  {name}: {nbytes / size:,.0f} bytes a row, opened in {seconds:.3f} s")
        found.append({"contender": name, "bytes_a_row": nbytes / size, "seconds_to_open": seconds})
    return found


def large(folder: Path, rows: TensorDictBase, size: int) -> list[dict[str, Any]]:
    """Measure a ring of ``size`` rows that store frames once, and one without observations."""
    others = rows.exclude("observation", ("next", "observation"))
    found = []
    for name, kept in {"once": rows, "without observations": others}.items():
        path = folder / f"large {name}"
        began = time.process_time()
        with MemmapStorage(path, max_size=size, once=name == "once") as ring:
            for start in range(0, size, len(kept)):
                ring.extend(kept[: size - start], ids="renumber")
        record = {
            "contender": name,
            "fill_cpu_us_a_row": (time.process_time() - began) / size * 1e6,
        }
        nbytes = sum(each.stat().st_blocks * 512 for each in path.rglob("*") if each.is_file())
        record |= {"bytes_a_row": nbytes / size, "open_ms": 1e3 * seconds_to_open(path)}
        with MemmapStorage(path, mode="append") as ring:
            extend = partial(ring.extend, kept[:8], ids="renumber")
            record |= {"first_extend_cpu_ms": _cpu_ms(extend), "extend_cpu_ms": _cpu_ms(extend)}
            if name == "once":
                random = np.random.default_rng(0)
                index = [random.integers(0, size, DRAWN) for _ in range(100)]
                get = partial(ring.get, out=ring.reused(DRAWN))
                record |= {
                    "pool_usage_cpu_ms": _cpu_ms(ring.pool_usage),
                    "get_cpu_ms": _median(get, index),
                    "windows_cpu_ms": _median(partial(frame_windows, ring), index),
                }
        console.print("\n".join(f"  {key}: {value}" for key, value in record.items()))
        found.append(record)
    return found


def _cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU milliseconds of a call."""
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def _median(read: Callable[[np.ndarray], object], index: Sequence[np.ndarray]) -> float:
    """Return the median CPU milliseconds of reading the rows of each index."""
    return statistics.median(_cpu_ms(partial(read, each)) for each in index)


def parse_args(given: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two tiny rounds: does it run?")
    parser.add_argument("--env", default="ale:breakout", help="of images (default: %(default)s)")
    parser.add_argument("--lanes", type=int, default=8, help="lanes (default: 8)")
    parser.add_argument("--rows", type=int, default=8192, help="rows of a ring (default: 8192)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a round")
    parser.add_argument("--large", type=int, help="measure only a ring of this many rows")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args(given)
    if args.quick:
        args.rounds, args.seconds, args.rows = 2, 0.001, 1024
    return args


def tables(folder: Path, rows: TensorDictBase, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both layouts at each kind of work."""
    records: list[dict[str, Any]] = []
    for kind in (Extend, Draw):
        rings = [kind(name, folder / f"{kind.what} {name}", rows, args.rows) for name in LAYOUTS]
        records.append(measure(kind.what, [*rings], args))
    run = partial(Collect, env=args.env, lanes=args.lanes, size=args.rows)
    runs: list[Contender] = [run(name, folder / f"collect {name}") for name in LAYOUTS]
    records.append(measure(f"collect({args.lanes})", runs, args))
    noise = of_noise(collected(args.env, 1, args.rows))
    for title, kept in {args.env: rows, "frames of noise, one lane": noise}.items():
        console.print(title)
        records.append({"what": title, "results": sizes(folder / title[:6], kept, args.rows)})
    return records


def main(given: list[str] | None = None) -> None:
    """Measure every table."""
    args = parse_args(given)
    prepare()
    print_setting()
    console.print(f"{args.env}, {args.lanes} lanes, rings of {args.rows:,} rows, one thread")
    rows = collected(args.env, args.lanes, args.rows)
    with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
        folder = Path(scratch)
        if args.large:
            records = [{"what": "large ring", "results": large(folder, rows, args.large)}]
        else:
            records = tables(folder, rows, args)
    if args.json:
        write_json(args.json, records)


if __name__ == "__main__":
    main()
