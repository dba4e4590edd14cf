"""Measure the cost of a vector step when each step is stored before the next one.

Run ``python benchmarks/small_batches.py``. The first part compares one vector step per call, stored
into a ring, with the raw loop. The second part compares whole off-policy loops (a vector step, 256
sampled rows, a gradient step) with the loops of other libraries around the same learner. Results
are medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import small_batch_loops
import small_batch_steps
from common import (
    comparisons,
    console,
    play_and_close,
    prepare,
    print_results,
    print_setting,
    ratio,
    write_json,
)
from loops import Work, records_of
from processes import none_left
from small_batch_loops import TASKS, Task
from small_batch_steps import CASES, NEXT_STEP, RAW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from common import Contender, Result
    from loops import Case

KNOWN = (*(case.name for case in CASES), *(task.name for task in TASKS))
QUICK = "step8,dqn1,sac8"
POLICIES = {"random": "random", "mlp": "sampled", "argmax": "argmax"}
"""Kinds of policies of ``loops.make_policy``, by their names on the command line."""
LEARNERS = ("without", "with")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"two tiny rounds of {QUICK}: does it run?"
    )
    parser.add_argument("--part", default="steps,loops", help="of steps,loops (default: both)")
    parser.add_argument("--only", default="", help=f"of {','.join(KNOWN)} (default: all)")
    parser.add_argument("--policy", default="", help=f"steps: of {','.join(POLICIES)}")
    parser.add_argument("--learner", default=",".join(LEARNERS), help="loops: of without,with")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a round")
    parser.add_argument("--no-peers", action="store_true", help="the raw loop and Tallyroll only")
    parser.add_argument("--no-workers", action="store_true", help="steps: no worker processes")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    args.wanted = (args.only or (QUICK if args.quick else ",".join(KNOWN))).split(",")
    args.policy = args.policy or ("mlp" if args.quick else "random,mlp")
    args.cases, args.tasks, args.ring = CASES, TASKS, small_batch_steps.RING
    for name, known in (
        ("part", ("steps", "loops")),
        ("policy", POLICIES),
        ("learner", LEARNERS),
        ("wanted", KNOWN),
    ):
        given = getattr(args, name)
        chosen = given.split(",") if isinstance(given, str) else given
        setattr(args, name, chosen)
        if set(chosen) - set(known):
            parser.error(f"{', '.join(chosen)}: expected some of {', '.join(known)}")
    if args.quick:
        args.rounds, args.seconds, args.ring = 2, 0.001, 512
        args.cases = [replace(case, frames=4 * case.lanes) for case in CASES]
        args.tasks = [replace(task, steps=2) for task in TASKS]
    return args


def ours_beside(results: Sequence[Result]) -> list[str]:
    """Return lines that compare Tallyroll's ``collect`` with each peer."""
    peers = [result.name for result in results if not result.name.startswith(("raw", "tallyroll"))]
    return comparisons(results, [(small_batch_steps.COLLECT, peer) for peer in peers])


def paired(reference: Result, result: Result) -> float:
    """Return the median ratio to the reference of the same round.

    It is more stable than the ratio of medians on a noisy machine.
    """
    pairs = zip(reference.per_transition, result.per_transition, strict=True)
    return statistics.median(theirs / own for theirs, own in pairs)


def beside(reference: Result, result: Result, lanes: int) -> float:
    """Return the median of the additional microseconds over the reference of the same round.

    Both times are for as many transitions as a vector step has lanes.
    """
    pairs = zip(reference.per_transition, result.per_transition, strict=True)
    return lanes * statistics.median(own - theirs for theirs, own in pairs)


def raw_of(result: Result, results: Sequence[Result]) -> Result:
    """Return the raw loop over an environment that resets in the same way as the result's."""
    spends = [raw for raw in results if raw.name == f"{RAW}, {NEXT_STEP}"]
    return spends[0] if result.name.endswith(NEXT_STEP) else results[0]


def play(
    work: Work,
    title: str,
    contenders: Sequence[Contender],
    remarks: Sequence[str],
    args: argparse.Namespace,
    **about: Any,
) -> list[dict[str, Any]]:
    """Run the contenders, print their table, and return their figures together with ``about``."""
    results = play_and_close(contenders, args.rounds, args.seconds)
    lanes, raw = work.case.lanes, results[0]

    def more(result: Result) -> dict[str, float]:
        return {
            "us_beside_raw": beside(raw_of(result, results), result, lanes),
            "speed_to_raw_paired": paired(raw, result),
            "speed_to_own_raw": ratio(raw_of(result, results), result),
        }

    columns = {"us beside": "us_beside_raw", "by round": "speed_to_raw_paired"}
    if raw_of(results[1], results) is not raw:
        columns["to own raw"] = "speed_to_own_raw"
    print_results(
        title,
        results,
        [*remarks, *ours_beside(results)],
        more={
            heading: lambda result, name=name: f"{more(result)[name]:.{1 if 'us' in name else 3}f}"
            for heading, name in columns.items()
        },
    )
    records = records_of(work, results)
    for record, result in zip(records, results, strict=True):
        del record["frames_per_batch"]  # it is not the number of rows that a call stores
        record |= {**about, **more(result)}
    return records


def play_steps(case: Case, policy: str, args: argparse.Namespace, scratch: Path) -> list[Any]:
    """Compare one vector step per call."""
    work = Work(case, POLICIES[policy], scratch)
    title = (
        f"{case.name}: {case.env_id}, {case.lanes} lanes, {policy}, one vector step a call, "
        f"a ring of {args.ring} rows"
    )
    contenders, remarks = small_batch_steps.contenders(
        work, args.ring, peers=not args.no_peers, workers=not args.no_workers
    )
    return play(work, title, contenders, remarks, args, part="steps")


def play_loops(task: Task, learner: str, args: argparse.Namespace, scratch: Path) -> list[Any]:
    """Compare whole loops."""
    task = replace(task, learns=learner == "with")
    work = Work(task.case, task.algorithm, scratch)
    title = (
        f"{task.name}: {task.env_id}, {task.lanes} lanes; a vector step, {task.sampled} rows, "
        f"{'a gradient step' if task.learns else 'no learner'}"
    )
    contenders, remarks = small_batch_loops.contenders(
        task, scratch, args.ring, peers=not args.no_peers
    )
    return play(work, title, contenders, remarks, args, part="loops", learner=task.learns)


def jobs(args: argparse.Namespace) -> Iterator[Callable[[Path], list[Any]]]:
    """Yield the benchmarks to run, in order. Each is called with a folder for files."""
    if "steps" in args.part:
        for case in args.cases:
            for policy in args.policy if case.name in args.wanted else ():
                yield partial(play_steps, case, policy, args)
    if "loops" in args.part:
        for task in args.tasks:
            for learner in args.learner if task.name in args.wanted else ():
                yield partial(play_loops, task.playable(), learner, args)


def main() -> None:
    """Run every case."""
    args = parse_args()
    with none_left():
        prepare()
        print_setting()
        console.print(f"{args.rounds} interleaved rounds of at least {args.seconds} s, one thread")
        records: list[dict[str, Any]] = []
        for job in jobs(args):
            with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
                records += job(Path(scratch))
            if args.json:
                write_json(args.json, records)


if __name__ == "__main__":
    main()
