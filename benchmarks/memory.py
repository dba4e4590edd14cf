"""Does the process grow while it writes rows to disk? Run ``python benchmarks/memory.py``.

The script writes five million CartPole rows of the native vector environment to a storage path. The
process's own memory is ``RssAnon``: the memory that it has allocated, without the pages of mapped
files, which belong to the operating system's cache and come and go. Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import console, prepare, print_setting
from loops import Case, make_vector_env
from rich.table import Table

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector

CASE = Case("native64", lanes=64, native=True, frames=16384)
MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """Memory after ``rows`` rows, in bytes: the process's own, and that of mapped files."""

    rows: int
    own: int
    mapped: int


def read_memory(rows: int) -> Sample:
    """Read this process's memory from the kernel."""
    fields = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = value
    own, mapped = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return Sample(rows, own, mapped)


def collect(path: Path, frames: int, batch: int) -> list[Sample]:
    """Collect ``frames`` rows into ``path`` and sample the memory after every batch."""
    samples = []
    env = GymnasiumVectorEnv(make_vector_env(CASE))
    with SyncCollector(
        env, None, frames_per_batch=batch, total_frames=frames, seed=0, storage=path
    ) as collector:
        rows = 0
        for data in collector:
            rows += len(data)
            samples.append(read_memory(rows))
    return samples


def bytes_on_disk(path: Path) -> int:
    """Return the size of all files under ``path``."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def print_samples(samples: list[Sample]) -> None:
    """Print the first, median, last and largest sample, and the growth over the second half."""
    table = Table(title="memory after each batch, MiB", title_justify="left")
    for heading in ("", "own (RssAnon)", "mapped files (RssFile)"):
        table.add_column(heading, justify="right")
    for name, own, mapped in (
        ("first", samples[0].own, samples[0].mapped),
        ("median", median(samples, "own"), median(samples, "mapped")),
        ("last", samples[-1].own, samples[-1].mapped),
        ("max", max(s.own for s in samples), max(s.mapped for s in samples)),
    ):
        table.add_row(name, f"{own / MIB:.1f}", f"{mapped / MIB:.1f}")
    console.print(table)
    middle = samples[len(samples) // 2]
    growth, rows = samples[-1].own - middle.own, samples[-1].rows - middle.rows
    console.print(f"own memory, second half: {growth / MIB:+.2f} MiB over {rows} rows")


def median(samples: list[Sample], name: str) -> float:
    """Return the median of one kind of memory."""
    return statistics.median(getattr(sample, name) for sample in samples)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 000 rows: does it run?")
    parser.add_argument("--frames", type=int, default=5_000_000, help="rows to collect")
    parser.add_argument("--out", type=Path, help="keep the rows here (default: a temporary folder)")
    args = parser.parse_args()
    if args.quick:
        args.frames = 100_000
    return args


def main() -> None:
    """Collect, and print the memory and the size on disk."""
    args = parse_args()
    prepare()
    print_setting()
    with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
        path = args.out or Path(scratch) / "rows"
        start = time.perf_counter()
        samples = collect(path, args.frames, CASE.frames)
        seconds = time.perf_counter() - start
        size = bytes_on_disk(path)
    print_samples(samples)
    rows = samples[-1].rows
    console.print(f"{rows} rows in {seconds:.1f} s ({rows / seconds:,.0f} a second)")
    console.print(f"{size / MIB:.1f} MiB on disk, {size / rows:.1f} bytes a row")


if __name__ == "__main__":
    main()
