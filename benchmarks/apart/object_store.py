"""Compare packed rows in an object store on this machine with the same rows on its disk.

    python benchmarks/apart/object_store.py --rows 100000 --rounds 3
    python benchmarks/apart/object_store.py --endpoint http://127.0.0.1:8333

The store is moto's server (`pip install "moto[server]"`), in a separate process, or a server that
already runs. Wall-clock times are mostly those of the server; the CPU time of this process is
that of Tallyroll and obstore. Rows are read in order and at random: without a cache, with blocks
cached in a folder, and with blocks cached in memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, S3Options, open_storage, pull, push

BATCH = 256


def use(url: str) -> None:
    """Wait until the server answers, make a bucket, and point the library at the server."""
    end = time.monotonic() + 60
    while True:
        try:
            make = urllib.request.Request(f"{url}/bench", method="PUT")
            urllib.request.urlopen(make, timeout=30).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    os.environ |= {**dict.fromkeys(keys, "any"), "AWS_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = url


@contextmanager
def moto() -> Iterator[None]:
    """Run an empty store on a loopback address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    process = subprocess.Popen(
        [*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        use(f"http://127.0.0.1:{port}")
        yield
    finally:
        process.kill()
        process.wait()


def make(folder: Path, rows: int, numbers: int) -> Path:
    """Pack rows of a random walk, in trajectories of 200."""
    number = torch.arange(rows)
    draw = torch.Generator().manual_seed(0)
    walk = torch.randn(rows, numbers, generator=draw).cumsum(0)
    content = {
        "observation": walk,
        "action": torch.randint(0, 4, (rows,), generator=draw),
        ("next", "reward"): torch.randn(rows, 1, generator=draw),
        ("next", "done"): (number % 200 == 199).reshape(-1, 1),
        ("collector", "traj_ids"): number // 200,
        ("collector", "step"): number % 200,
    }
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(TensorDict(content, [rows]))
        storage.pack(folder / "packed")
    shutil.rmtree(folder / "rows")
    return folder / "packed"


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds that a call takes: wall-clock time, and CPU time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_order(storage: Any) -> None:
    for at in range(0, len(storage), 2048):
        storage.get(slice(at, at + 2048))


def at_random(storage: Any, batches: int = 20) -> None:
    generator = np.random.default_rng(1)
    for _ in range(batches):
        storage.get(generator.integers(0, len(storage), BATCH))


def main() -> None:
    """Measure in rounds, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--numbers", type=int, default=64, help="of an observation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoint", help="of a store that takes any keys")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        found.setdefault(name, []).append(timed(call))

    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        if args.endpoint:
            use(args.endpoint)
        else:
            stack.enter_context(moto())
        folder = Path(name)
        packed = make(folder, args.rows, args.numbers)
        nbytes = sum(each.stat().st_size for each in packed.rglob("*") if each.is_file())
        for number in range(args.rounds):
            address = f"s3://bench/{number}"
            note("push", partial(push, packed, address))
            note("pull", partial(pull, address, folder / "pulled"))
            shutil.rmtree(folder / "pulled")
            kept = S3Options(folder=folder / f"blocks{number}")
            for place, options in (
                ("disk", None),
                ("store, nothing kept", S3Options(memory_nbytes=0)),
                ("store, into a folder", kept),
                ("store, from the folder", kept),
            ):
                with open_storage(packed if options is None else address, s3=options) as storage:
                    note(f"in order: {place}", partial(in_order, storage))
                with open_storage(packed if options is None else address, s3=options) as storage:
                    note(f"at random, first: {place}", partial(at_random, storage))
                    note(f"at random, again: {place}", partial(at_random, storage))
            shutil.rmtree(folder / f"blocks{number}")
    print(f"{args.rows:,} rows, {nbytes / 2**20:.1f} MiB packed; medians of {args.rounds}")
    print(f"{'':<42} {'clock, s':>9} {'CPU, s':>8} {'MiB/s':>8} {'rows/s':>10} {'rows/CPU s':>11}")
    for what, times in found.items():
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        random = what.startswith("at random")
        rows = 20 * BATCH if random else args.rows
        rate = "" if random else f"{nbytes / 2**20 / wall:.0f}"
        print(f"{what:<42} {wall:9.3f} {cpu:8.3f} {rate:>8} {rows / wall:10.0f} {rows / cpu:11.0f}")


if __name__ == "__main__":
    main()
