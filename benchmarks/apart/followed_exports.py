"""How far do exports lag behind a running writer, and what do they cost?

    python benchmarks/apart/followed_exports.py --rate 3000 --seconds 300 [--kills]

One process adds rows at a constant rate. For each format, `tallyroll export --follow` runs in
another process, all at the same time. Once per second the script checks the newest version of each
export, and records how long its first missing row has been in the storage. With ``--kills`` it
kills each export at random moments. It then reads the newest version back, compares its rows with
their numbers, and restarts the export.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyarrow import parquet

from tallyroll.storage import MemmapStorage, import_dataset, open_storage

STEPS = 200
KILL_SECONDS = 90
"""Mean seconds between two kills of an export: time for two or three versions."""
ENDS = {"lerobot": "", "parquet": ".parquet", "rlds": ""}
"""Suffixes of the names of versions, by format."""


def last_row(text: Any) -> int:
    """Return the last row according to the metadata of an export."""
    return int(text["rows"]["copied_from"]["rows"][1])


COUNTS: dict[str, Callable[[Path], int]] = {
    "lerobot": lambda version: json.loads((version / "meta/info.json").read_text())["total_frames"],
    "parquet": lambda version: parquet.read_metadata(version).num_rows,
    "rlds": lambda version: 1 + last_row(json.loads((version / "tallyroll.json").read_text())),
}


def rows_of(start: int, count: int) -> dict[Any, np.ndarray]:
    """Return rows of 191 bytes, in trajectories of `STEPS` rows. The reward is the row's number."""
    number = np.arange(start, start + count)
    random = np.random.default_rng(start)
    observation = random.random((count + 1, 17), np.float32)
    ends = (number % STEPS == STEPS - 1)[:, None]
    return {
        ("observation",): observation[:-1],
        ("action",): random.random((count, 6), np.float32),
        ("next", "observation"): observation[1:],
        ("next", "reward"): number[:, None].astype(np.float64),
        ("next", "terminated"): np.zeros_like(ends),
        ("next", "truncated"): ends,
        ("next", "done"): ends,
        ("collector", "traj_ids"): number // STEPS,
        ("collector", "step"): number % STEPS,
        ("collector", "lane"): np.zeros(count, np.int32),
    }


def write(place: Path, rate: float, seconds: float, log: Any) -> None:
    """Add rows ten times per second, and send the time at which each number of rows was written."""
    with MemmapStorage(place) as storage:
        began, rows = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds:
            if count := int(now * rate) - rows:
                storage.extend(rows_of(rows, count))
                rows += count
                log.send((time.monotonic(), rows))
            time.sleep(0.1)


class Followed:
    """An export that a separate process keeps up to date.

    Args:
        source: the storage.
        folder: the folder for its versions.
        kind: its format.
    """

    def __init__(self, source: Path, folder: Path, kind: str) -> None:
        self.kind, self._source, self.place = kind, source, folder / kind
        self.ages, self.seen = list[float](), dict[str, int]()
        self.cpu, self.memory, self.kills = 0.0, 0, 0
        self.start()

    def start(self) -> None:
        """Start the export, or resume it."""
        words = ["export", self._source, f"{self.kind}:{self.place}", "--follow", "--quiet"]
        command = [sys.executable, "-m", "tallyroll.collector.cli", *map(str, words)]
        self.process = psutil.Popen(command, stdout=subprocess.DEVNULL)
        self._cpu_before = self.cpu

    def look(self, log: list[tuple[float, int]]) -> None:
        """Record the age of the newest version, and the CPU time of the process so far."""
        with contextlib.suppress(psutil.Error):
            times = self.process.cpu_times()
            self.cpu = self._cpu_before + times.user + times.system
            self.memory = max(self.memory, self.process.memory_info().rss)
        newest = self.newest
        if newest.exists() and newest.name not in self.seen:
            self.seen[newest.name] = COUNTS[self.kind](newest)
        if not (rows := self.seen.get(newest.name, 0)):
            return  # there is no version yet
        lacking = bisect_right([count for _, count in log], rows)
        self.ages.append(time.monotonic() - log[lacking][0] if lacking < len(log) else 0.0)

    @property
    def newest(self) -> Path:
        """The version that the link points to."""
        return (self.place / f"current{ENDS[self.kind]}").resolve()

    def check(self) -> int:
        """Compare the rows of the newest version with their numbers. Return their count."""
        with tempfile.TemporaryDirectory(dir=self.place.parent) as scratch:
            back = Path(scratch, "back")
            import_dataset(self.newest, back, self.kind)
            with open_storage(back) as storage:
                rows = storage.reader.span
                rewards = storage.reader.column(("next", "reward")).slice(rows.start, rows.stop)
            np.testing.assert_array_equal(rewards[:, 0], np.arange(len(rows)))
        return len(rows)

    def kill(self) -> None:
        """Kill the export, check its newest version, and restart it."""
        self.process.kill()
        self.process.wait()
        self.kills += 1
        if self.newest.exists():
            self.check()
        self.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=3000, help="rows a second")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kinds", default=",".join(ENDS))
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="a folder for what is written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        play(args, Path(scratch))


def play(args: argparse.Namespace, scratch: Path) -> None:
    context = get_context("spawn")
    receives, sends = context.Pipe(duplex=False)
    source = scratch / "rows"
    writer = context.Process(target=write, args=(source, args.rate, args.seconds, sends))
    writer.start()
    log = [receives.recv()]
    followed = [Followed(source, scratch, kind) for kind in args.kinds.split(",")]
    generator, began = random.Random(0), time.monotonic()
    while writer.is_alive():
        time.sleep(1)
        while receives.poll():
            log.append(receives.recv())
        for each in followed:
            each.look(log)
            if args.kills and generator.random() < 1 / KILL_SECONDS:
                each.kill()
    wall = time.monotonic() - began
    print(f"{log[-1][1]:,} rows in {wall:.0f} s")
    for each in followed:
        code = each.process.wait(timeout=600)
        ages = np.array(each.ages or [np.nan])
        assert (code, each.check()) == (0, log[-1][1]), each.kind
        print(
            f"{each.kind}: age median {np.median(ages):.1f} s, worst {ages.max():.1f}; CPU "
            f"{each.cpu / wall:.2f}; memory {each.memory / 2**20:.0f} MiB; {len(each.seen)} "
            f"versions, {each.kills} kills"
        )


if __name__ == "__main__":
    main()
