"""Where does the rest of the time go? Run ``python benchmarks/profile_loop.py --case sync64``.

The script first prints shares of time, from two clocks around ``env.step`` and the policy. The
remainder is the loop's own time and, with ``--storage``, the time for writing. Then it prints the
most expensive functions according to cProfile. Profiling slows down Python code but not compiled
code, so use the profile to find slow functions, not to measure them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collect import CASES, POLICIES
from common import console, play_round, prepare, print_setting
from gymnasium.vector import VectorEnv, VectorWrapper
from loops import Tallyroll, Work, make_policy, make_vector_env
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Adds up the time spent inside a function."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` wrapped so that this clock runs while it is called."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed


class ClockedEnv(VectorWrapper):
    """A vector environment with a clock around its step.

    This is a wrapper because replacing ``step`` on the environment itself would slow it down.
    """

    def __init__(self, env: VectorEnv, clock: Clock) -> None:
        """Wrap ``env``."""
        super().__init__(env)
        self.timed_step = clock.around(env.step)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Step the environment while the clock runs."""
        return self.timed_step(actions)


def collector_with_clocks(work: Work, path: Path | None) -> tuple[Tallyroll, Clock, Clock]:
    """Create Tallyroll with one clock around the environment's step and one around the policy."""
    env_clock, policy_clock = Clock(), Clock()
    policy = make_policy(work.policy)
    if policy is not None:
        policy.forward = policy_clock.around(policy.forward)
    env = ClockedEnv(make_vector_env(work.case), env_clock)
    return Tallyroll(work, policy, path, env), env_clock, policy_clock


def print_shares(work: Work, path: Path | None, seconds: float) -> None:
    """Print microseconds per vector step: environment, policy, and the rest."""
    contender, env_clock, policy_clock = collector_with_clocks(work, path)
    contender.advance()
    contender.tally()
    env_clock.seconds = policy_clock.seconds = 0.0
    played = play_round(contender, seconds)
    elapsed, tally = played.seconds, played.tally
    contender.close()
    rest = elapsed - env_clock.seconds - policy_clock.seconds
    table = Table(title=title_of(work, path), title_justify="left")
    for heading in ("where", "us / vector step", "share"):
        table.add_column(heading, justify="right" if heading != "where" else "left")
    for name, part in (
        ("env.step", env_clock.seconds),
        ("policy", policy_clock.seconds),
        ("the rest", rest),
        ("all", elapsed),
    ):
        table.add_row(name, f"{1e6 * part / tally.vector_steps:.2f}", f"{part / elapsed:.1%}")
    console.print(table)


def print_profile(work: Work, path: Path | None, seconds: float, functions: int) -> None:
    """Print the functions with the largest own time."""
    contender = Tallyroll(work, make_policy(work.policy), path)
    contender.advance()
    contender.tally()
    profile = cProfile.Profile()
    profile.enable()
    tally = play_round(contender, seconds).tally
    profile.disable()
    contender.close()
    table = Table(title="cProfile, own time", title_justify="left")
    for heading in ("function", "calls / vector step", "us / vector step"):
        table.add_column(heading, justify="right" if heading != "function" else "left")
    entries = pstats.Stats(profile).stats.items()
    for (file, line, name), (_, calls, own, *_) in sorted(entries, key=own_time)[:functions]:
        where = name if line == 0 else f"{short(file)}:{line} {name}"
        steps = tally.vector_steps
        table.add_row(where, f"{calls / steps:.2f}", f"{1e6 * own / steps:.2f}")
    console.print(table)


def own_time(entry: tuple[Any, Any]) -> float:
    """Sort key: largest own time first."""
    return -entry[1][2]


def short(path: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(Path(path).parts[-2:])


def title_of(work: Work, path: Path | None) -> str:
    """Return the title of the report."""
    where = "in memory" if path is None else "to disk"
    return f"{work.case.name}, {work.policy}, {where}"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a moment only: does it run?")
    parser.add_argument("--case", choices=[case.name for case in CASES], default="sync64")
    parser.add_argument("--policy", choices=POLICIES, default="random")
    parser.add_argument("--storage", action="store_true", help="write the rows to disk as well")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--functions", type=int, default=15, help="lines of the profile")
    args = parser.parse_args()
    args.work = next(case for case in CASES if case.name == args.case)
    if args.quick:
        args.seconds = 0.02
        args.work = replace(args.work, frames=16 * args.work.lanes)
    return args


def main() -> None:
    """Print the shares, then the profile."""
    args = parse_args()
    prepare()
    print_setting()
    with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
        work = Work(args.work, args.policy, Path(scratch))
        first, second = (Path(scratch) / name if args.storage else None for name in ("a", "b"))
        print_shares(work, first, args.seconds)
        print_profile(work, second, args.seconds, args.functions)


if __name__ == "__main__":
    main()
