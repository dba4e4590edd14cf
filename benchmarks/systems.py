"""Compare collecting from each environment system with the system's own raw loop.

Run ``python benchmarks/systems.py``. It takes random actions at 1, 8 and 64 lanes, in interleaved
rounds, with three contenders: the system's own calls without any overhead, Tallyroll's collector,
and TorchRL's collector with its wrapper of the system, if there is one. A ratio is the raw loop's
median time per vector step divided by the contender's. Systems that are not installed are skipped
and listed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Contender, Tally, console, play_and_close, prepare, print_setting, write_json
from rich.table import Table
from system_entries import ENTRIES, Entry
from torchrl.collectors import Collector

from tallyroll.collector import SyncCollector

if TYPE_CHECKING:
    from common import Result
    from torchrl.envs import EnvBase

KNOWN = tuple(entry.name for entry in ENTRIES)
QUICK = "gymnasium,torchrl,sb3"
STEPS = {1: 1024, 8: 512, 64: 128}
"""Vector steps per batch, by number of lanes, for cheap steps."""


class Loop(Contender):
    """A contender that makes ``steps`` vector steps and also measures the CPU time of its thread.

    Wall-clock time is the main result, but if the system works in its own threads, it says little
    about the loop around them.
    """

    def __init__(self, lanes: int, steps: int) -> None:
        """Reset the counters."""
        self.lanes, self.steps = lanes, steps
        self.thread_seconds, self.stepped = 0.0, 0

    def advance(self) -> None:
        """Make the steps."""
        start = time.thread_time()
        self.play()
        self.thread_seconds += time.thread_time() - start
        self.stepped += self.steps

    def play(self) -> None:
        """Make the steps."""
        raise NotImplementedError

    def tally(self) -> Tally:
        """Return slots and vector steps. All contenders have the same share of reset slots."""
        return Tally(self.lanes * self.steps, self.steps)

    @property
    def thread_us(self) -> float:
        """Microseconds of this thread's CPU time per vector step."""
        return 1e6 * self.thread_seconds / self.stepped


class Raw(Loop):
    """The system's own step on random actions, with outputs as NumPy arrays.

    Actions are drawn one block at a time, as in Tallyroll. If only some actions are legal, they are
    drawn at every step from the last mask. The system resets itself; the loop keeps no final
    observations and no rows.
    """

    name = "raw"

    def __init__(self, entry: Entry, env: EnvBase, lanes: int, steps: int) -> None:
        """Create the system. The actions are those of Tallyroll's ``env``."""
        super().__init__(lanes, steps)
        action = env.full_action_spec
        self.specs = [action[key] for key in action.keys(True, True)]
        self.masked = entry.masked
        self.step, self.end = entry.raw(lanes)

    def play(self) -> None:
        """Draw actions and make the steps."""
        if self.masked:
            for _ in range(self.steps):
                self.step()
            return
        shape = (self.steps,)
        drawn = [spec.rand(shape).numpy() for spec in self.specs]
        for actions in zip(*drawn, strict=True):
            self.step(*actions)

    def close(self) -> None:
        """Close the system."""
        self.end()


class Collecting(Loop):
    """A collector whose batches are dropped."""

    def __init__(self, name: str, collector: Any, lanes: int, steps: int) -> None:
        """Start to iterate over ``collector``."""
        super().__init__(lanes, steps)
        self.name, self.collector = name, collector
        self.batches = iter(collector)

    def play(self) -> None:
        """Collect a batch."""
        next(self.batches)

    def close(self) -> None:
        """Shut down the collector and its environment."""
        self.collector.shutdown()


def contenders(entry: Entry, lanes: int, args: argparse.Namespace) -> tuple[list[Loop], str]:
    """Return the raw loop, Tallyroll, and TorchRL if it supports the task; and a remark."""
    steps = max(1, (4 if args.quick else STEPS[lanes]) // entry.costs)
    options = {"frames_per_batch": lanes * steps, "total_frames": -1}
    env = entry.ours(lanes)
    made: list[Loop] = [Raw(entry, env, lanes, steps)]
    made.append(
        Collecting("tallyroll", SyncCollector(env, None, **options, **entry.options), lanes, steps)
    )
    if entry.torchrl is None or args.no_peers:
        return made, ""
    try:
        peer = Collector(entry.torchrl(lanes), None, **options)
        made.append(Collecting("TorchRL", peer, lanes, steps))
        made[-1].advance()
    except Exception as error:  # noqa: BLE001  any error is reported
        if made[-1].name == "TorchRL":
            made.pop()
        return made, f"{type(error).__name__}: {error}".splitlines()[0]
    return made, ""


def record_of(name: str, lanes: int, loops: list[Loop], results: list[Result]) -> dict[str, Any]:
    """Return the figures of a system at one number of lanes."""
    raw = results[0]
    return {
        "system": name,
        "lanes": lanes,
        "contenders": {
            result.name: {
                "us_per_vector_step": result.vector_step_us,
                "thread_us_per_vector_step": loop.thread_us,
                "speed_to_raw": raw.vector_step_us / result.vector_step_us,
                "spread": result.spread,
                "rounds_us_per_vector_step": result.per_vector_step,
            }
            for loop, result in zip(loops, results, strict=True)
        },
    }


def table_of(records: list[dict[str, Any]]) -> Table:
    """Return a table with one line for each system and number of lanes."""
    table = Table()
    for heading in ("system", "lanes"):
        table.add_column(heading)
    for heading in (
        "raw, us / vector step",
        "tallyroll",
        "beside raw, us of the thread",
        "speed to raw",
        "spread",
        "TorchRL to raw",
    ):
        table.add_column(heading, justify="right")
    for record in records:
        played = record["contenders"]
        raw, ours, peer = played["raw"], played["tallyroll"], played.get("TorchRL")
        thread = "thread_us_per_vector_step"
        table.add_row(
            record["system"],
            str(record["lanes"]),
            f"{raw['us_per_vector_step']:.1f}",
            f"{ours['us_per_vector_step']:.1f}",
            f"{ours[thread] - raw[thread]:.1f}",
            f"{ours['speed_to_raw']:.3f}",
            f"{ours['spread']:.1%}",
            "" if peer is None else f"{peer['speed_to_raw']:.3f}",
        )
    return table


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"two tiny rounds of {QUICK}: does it run?"
    )
    parser.add_argument("--only", default="", help=f"of {','.join(KNOWN)} (default: all)")
    parser.add_argument("--lanes", default="1,8,64", help="of 1,8,64 (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a round")
    parser.add_argument("--no-peers", action="store_true", help="the raw loop and Tallyroll only")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    wanted = (args.only or (QUICK if args.quick else ",".join(KNOWN))).split(",")
    args.entries = [entry for entry in ENTRIES if entry.name in wanted]
    args.lanes = [int(lanes) for lanes in args.lanes.split(",")]
    if set(wanted) - set(KNOWN) or set(args.lanes) - set(STEPS):
        parser.error(f"systems are {', '.join(KNOWN)}; lanes are {', '.join(map(str, STEPS))}")
    if args.quick:
        args.rounds, args.seconds, args.lanes = 2, 0.01, args.lanes[:2]
    return args


def main() -> None:
    """Measure every system at every number of lanes, and print one table."""
    args = parse_args()
    prepare()
    print_setting()
    console.print(f"{args.rounds} interleaved rounds of at least {args.seconds} s, one thread")
    records: list[dict[str, Any]] = []
    remarks: list[str] = []
    for entry in args.entries:
        for lanes in args.lanes:
            try:
                loops, remark = contenders(entry, lanes, args)
            except ImportError as missing:  # includes MissingExtra
                remarks.append(f"{entry.name}: left out, {missing}")
                break
            if remark:
                remarks.append(f"{entry.name}, {lanes} lanes: TorchRL left out, {remark}")
            results = play_and_close(loops, args.rounds, args.seconds)
            records.append(record_of(entry.name, lanes, loops, results))
            if args.json:
                write_json(args.json, records)
    console.print(table_of(records))
    for remark in remarks:
        console.print(f"  {remark}", markup=False)


if __name__ == "__main__":
    main()
