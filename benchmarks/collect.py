"""Compare the time of collecting with the raw loop of ``env.step`` and the policy.

Run ``python benchmarks/collect.py``. Each case runs in interleaved rounds. The printed ratio is the
raw loop's median time per true transition divided by the contender's.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from common import (
    Contender,
    Result,
    console,
    play_and_close,
    prepare,
    print_results,
    print_setting,
    write_json,
)
from loops import Case, Work, make_policy, raw_contenders, records_of, tallyroll_contenders
from peers import peer_contenders

CASES = (
    Case("sync1", lanes=1, native=False, frames=2048),
    Case("sync8", lanes=8, native=False, frames=4096),
    Case("sync64", lanes=64, native=False, frames=16384),
    Case("native64", lanes=64, native=True, frames=16384),
)
KNOWN = tuple(case.name for case in CASES)
QUICK = "sync8"
POLICIES = ("random", "sampled", "argmax")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"two tiny rounds of {QUICK}: does it run?"
    )
    parser.add_argument("--only", default="", help="cases, such as sync1,native64 (default: all)")
    parser.add_argument("--policy", default="random,sampled", help=f"of {','.join(POLICIES)}")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a round")
    parser.add_argument("--no-peers", action="store_true", help="the raw loop and Tallyroll only")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    wanted = (args.only or (QUICK if args.quick else ",".join(KNOWN))).split(",")
    args.cases = [case for case in CASES if case.name in wanted]
    args.policies = args.policy.split(",")
    if set(wanted) - set(KNOWN) or set(args.policies) - set(POLICIES):
        parser.error(f"cases are {', '.join(KNOWN)}; policies are {', '.join(POLICIES)}")
    if args.quick:
        # On its first import, Tianshou compiles helpers for 9 s that collecting does not use.
        os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
        args.rounds, args.seconds = 2, 0.01
        args.cases = [dataclasses.replace(case, frames=16 * case.lanes) for case in args.cases]
    return args


def build(work: Work, args: argparse.Namespace) -> tuple[list[Contender], list[str]]:
    """Return the contenders of this work, the raw loop first, and remarks on those left out."""
    policy = make_policy(work.policy)
    blocks = 1 if args.quick else max(2, 200_000 // work.case.frames)
    contenders = raw_contenders(work, policy, blocks)
    contenders += tallyroll_contenders(work, policy)
    peers, remarks = ([], []) if args.no_peers else peer_contenders(work, policy)
    return contenders + peers, remarks


def play(work: Work, args: argparse.Namespace) -> list[Result]:
    """Run one case with one policy and print its table."""
    contenders, remarks = build(work, args)
    results = play_and_close(contenders, args.rounds, args.seconds)
    print_results(work.title, results, remarks)
    return results


def main() -> None:
    """Run every case with every policy."""
    args = parse_args()
    prepare()
    print_setting()
    console.print(f"{args.rounds} interleaved rounds of at least {args.seconds} s, one thread")
    records: list[dict[str, Any]] = []
    for case in args.cases:
        for policy in args.policies:
            with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
                work = Work(case, policy, Path(scratch))
                records += records_of(work, play(work, args))
            if args.json:
                write_json(args.json, records)


if __name__ == "__main__":
    main()
