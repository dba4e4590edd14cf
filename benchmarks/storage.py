"""Compare writing and reading rows with NumPy copies into a raw memory map.

Run ``python benchmarks/storage.py``. For each kind of row, it measures batches written over
existing rows, batches appended to growing files, and random reads. The printed ratio is the median
time of the floor, the plain NumPy copies, divided by the contender's.

``python benchmarks/storage.py --once`` compares rings that store each frame once instead; its other
options are those of ``storage_once.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import storage_once
import storage_ours
import storage_peers
from common import (
    Result,
    comparisons,
    console,
    interleave,
    prepare,
    print_results,
    print_setting,
    ratio,
    write_json,
)
from storage_work import (
    READ_ROWS,
    BareTensorDict,
    Calls,
    Floor,
    GrowingFloor,
    Rows,
    Spec,
    Store,
    cartpole_rows,
    first,
    growing,
    image_rows,
    reading,
    row_nbytes,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Callable

COMPARED = (
    ("ReplayBuffer(MemmapStorage)", "ReplayBuffer(LazyMemmapStorage)"),
    ("H5Storage(capacity=)", "MemmapStorage(capacity=)"),
    ("ZarrStorage(capacity=)", "MemmapStorage(capacity=)"),
)


@dataclass(frozen=True)
class Job:
    """A kind of work: how to start a storage on it, and the storages that support it."""

    title: str
    start: Callable[[type[Store], Spec], Calls]
    ours: list[type[Store]]
    peers: list[type[Store]]


ROUND = "{batch} a call into {room} rows, round and round"
RANDOM = f"{READ_ROWS} random rows of {{room}} a call"
LIBRARIES = " (libraries for files)"
JOBS = {
    "write": Job(ROUND, writing, [Floor, *storage_ours.WRITERS], storage_peers.WRITERS),
    "read": Job(
        RANDOM, reading, [Floor, BareTensorDict, *storage_ours.READERS], storage_peers.READERS
    ),
    "grow": Job(
        "{batch} a call into files that grow",
        growing,
        [GrowingFloor, *storage_ours.GROWERS],
        storage_peers.GROWERS,
    ),
    # Separate from the other jobs: these writes keep the disk busy for a long time.
    "files-write": Job(
        ROUND + LIBRARIES, writing, [Floor, *storage_ours.FORMATS], storage_peers.FILES
    ),
    "files-read": Job(
        RANDOM + LIBRARIES, reading, [Floor, *storage_ours.FORMATS], storage_peers.FILES
    ),
}


@dataclass(frozen=True)
class Kind:
    """A kind of row, and the number of rows to write and read.

    Args:
        name: name on the command line.
        make: creates the given number of rows.
        batches: rows per write.
        room: capacity of a storage that is written to, in rows.
        grown: rows per write into growing files.
        until: rows at which growing files are started again.
        held: rows in a storage that is read.
    """

    name: str
    make: Callable[[int], Rows]
    batches: tuple[int, ...]
    room: int
    grown: int
    until: int
    held: int

    def cases(self, what: str) -> list[tuple[int, int]]:
        """Return the rows per call and the rows of the storage, for each table."""
        if what.endswith("write"):
            return [(batch, self.room) for batch in self.batches]
        return [(self.grown, self.until) if what == "grow" else (READ_ROWS, self.held)]


KINDS = (
    Kind("A", cartpole_rows, (1, 64, 1024, 16384), 2**20, 1024, 2**19, 2**20),
    Kind("B", image_rows, (1, 64, 1024), 2**10, 64, 2**10, 2**12),
)
KNOWN = tuple(kind.name for kind in KINDS)
QUICK = "A"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"two tiny rounds of {QUICK}: does it run?"
    )
    parser.add_argument("--only", default="", help=f"of {','.join(KNOWN)} (default: all)")
    parser.add_argument(
        "--what", default=",".join(JOBS), help=f"of {','.join(JOBS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a round")
    parser.add_argument("--no-peers", action="store_true", help="the floor and Tallyroll only")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    wanted = (args.only or (QUICK if args.quick else ",".join(KNOWN))).split(",")
    args.what = args.what.split(",")
    if set(wanted) - set(KNOWN) or set(args.what) - set(JOBS):
        parser.error(f"kinds are {', '.join(KNOWN)}; what is of {', '.join(JOBS)}")
    args.kinds = [kind for kind in KINDS if kind.name in wanted]
    if args.quick:
        args.rounds, args.seconds = 2, 0.001
        tiny = {"batches": (1, 64), "room": 256, "grown": 64, "until": 512, "held": 512}
        args.kinds = [dataclasses.replace(kind, **tiny) for kind in args.kinds]
    return args


def play(job: Job, spec: Spec, args: argparse.Namespace, title: str) -> list[Result]:
    """Measure the contenders of one table and print it. The first contender is the floor."""
    peers, remarks = ([], []) if args.no_peers else storage_peers.installed(job.peers)
    with ExitStack() as stack:
        calls = []
        for place, store in enumerate([*job.ours, *peers]):
            scratch = spec.scratch / str(place)
            scratch.mkdir()
            calls.append(job.start(store, dataclasses.replace(spec, scratch=scratch)))
            stack.callback(calls[-1].close)
        results = interleave(calls, args.rounds, args.seconds)
    print_results(
        title, results, [*remarks, *comparisons(results, COMPARED)], "floor", ("call", "row")
    )
    return results


def report(kind: Kind, what: str, batch: int, results: list[Result]) -> list[dict[str, Any]]:
    """Return the results as plain records."""
    return [
        {
            "rows": kind.name,
            "what": what,
            "rows_per_call": batch,
            "contender": result.name,
            "us_per_call": result.vector_step_us,
            "us_per_row": result.transition_us,
            "speed_to_floor": ratio(results[0], result),
            "spread": result.spread,
            "rounds_us_per_row": result.per_transition,
        }
        for result in results
    ]


def main() -> None:
    """Measure every table."""
    if "--once" in sys.argv:
        storage_once.main([each for each in sys.argv[1:] if each != "--once"])
        return
    args = parse_args()
    prepare()
    print_setting()
    console.print(f"{args.rounds} interleaved rounds of at least {args.seconds} s, one thread")
    records: list[dict[str, Any]] = []
    for kind, what in itertools.product(args.kinds, args.what):
        filler = kind.make(max(*kind.batches, kind.grown))
        for batch, room in kind.cases(what):
            with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
                rows = first(filler, batch)
                spec = Spec(rows, filler, room, Path(scratch))
                does = JOBS[what].title.format(batch=batch, room=room)
                title = f"{kind.name}, {row_nbytes(rows)} bytes a row: {does}"
                results = play(JOBS[what], spec, args, title)
            records += report(kind, what, batch, results)
            if args.json:
                write_json(args.json, records)


if __name__ == "__main__":
    main()
