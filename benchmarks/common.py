"""What the benchmarks share: interleaved rounds, medians, tables, and a line about the machine."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

PACKAGES = (
    "tallyroll",
    "torch",
    "tensordict",
    "torchrl",
    "gymnasium",
    "numpy",
    "stable_baselines3",
    "tianshou",
    "cpprb",
    "h5py",
    "zarr",
    "tensorstore",
    "minari",
    "mujoco",
)

console = Console(width=132, highlight=False)


@dataclass(frozen=True)
class Tally:
    """What a contender did: transitions executed (reset slots excluded) and vector steps made."""

    transitions: float
    vector_steps: float

    def __add__(self, other: Tally) -> Tally:
        """Return both together."""
        return Tally(self.transitions + other.transitions, self.vector_steps + other.vector_steps)


class Contender(ABC):
    """One way of doing the work; it is set up once and then advanced round by round."""

    name: str

    def begin_round(self) -> None:
        """Get going, where that takes more than a call; not timed."""
        return

    def end_round(self) -> None:
        """Come to rest, where something goes on beyond a call; not timed."""
        return

    def make_ready(self) -> None:
        """Get ready for the next ``advance``; not timed."""
        return

    @abstractmethod
    def advance(self) -> None:
        """Do one batch of work. Only this is timed."""

    @abstractmethod
    def tally(self) -> Tally:
        """Return what the last ``advance`` did."""

    def close(self) -> None:
        """Release environments and files."""
        return


@dataclass(frozen=True)
class Round:
    """A round: seconds on the clock, seconds of CPU time of this process, and what was done."""

    seconds: float
    own_seconds: float
    tally: Tally


@dataclass
class Result:
    """The rounds of one contender, in microseconds."""

    name: str
    per_transition: list[float] = field(default_factory=list)
    per_vector_step: list[float] = field(default_factory=list)
    own_per_transition: list[float] = field(default_factory=list)
    plan: str = ""
    """The way that each part of a Tallyroll run goes."""

    def add(self, played: Round) -> None:
        """Record one round."""
        tally = played.tally
        self.per_transition.append(1e6 * played.seconds / tally.transitions)
        self.per_vector_step.append(1e6 * played.seconds / tally.vector_steps)
        self.own_per_transition.append(1e6 * played.own_seconds / tally.transitions)

    @property
    def transition_us(self) -> float:
        """Median over the rounds, microseconds per transition."""
        return statistics.median(self.per_transition)

    @property
    def vector_step_us(self) -> float:
        """Median over the rounds, microseconds per vector step."""
        return statistics.median(self.per_vector_step)

    @property
    def own_us(self) -> float:
        """Median over the rounds, microseconds of this process's CPU time per transition."""
        return statistics.median(self.own_per_transition)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.per_transition) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.per_transition, n=4)
        return (high - low) / 2 / self.transition_us


def prepare() -> None:
    """One thread for torch, and no warnings or log lines of other libraries between the figures."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def play_round(contender: Contender, seconds: float) -> Round:
    """Advance until ``seconds`` have gone by; counting happens with the clock stopped."""
    elapsed, own, tally = 0.0, 0.0, Tally(0, 0)
    while elapsed < seconds:
        contender.make_ready()
        started, start = time.process_time(), time.perf_counter()
        contender.advance()
        elapsed += time.perf_counter() - start
        own += time.process_time() - started
        tally += contender.tally()
    return Round(elapsed, own, tally)


def interleave(contenders: Sequence[Contender], rounds: int, seconds: float) -> list[Result]:
    """Play A B C … A B C …, so that a disturbance of the machine meets all of them.

    Each contender is advanced once, untimed, before the first round.
    """
    results = [Result(contender.name, plan=plan_of(contender)) for contender in contenders]
    for contender in contenders:
        contender.make_ready()
        contender.advance()
        contender.end_round()
    for _ in range(rounds):
        for contender, result in zip(contenders, results, strict=True):
            contender.begin_round()
            result.add(play_round(contender, seconds))
            contender.end_round()
    return results


def plan_of(contender: Contender) -> str:
    """Return the ways of its collector's plan in one line; empty for a peer."""
    plan = getattr(getattr(contender, "collector", None), "plan", None)
    if not hasattr(plan, "as_json"):
        return ""
    return ", ".join(f"{part} {each['way']}" for part, each in plan.as_json().items())


def play_and_close(contenders: Sequence[Contender], rounds: int, seconds: float) -> list[Result]:
    """Let the contenders play, and close them whatever happens."""
    with ExitStack() as stack:
        for contender in contenders:
            stack.callback(contender.close)
        return interleave(contenders, rounds, seconds)


def print_results(
    title: str,
    results: Sequence[Result],
    remarks: Sequence[str] = (),
    against: str = "raw",
    units: tuple[str, str] = ("vector step", "transition"),
    more: Mapping[str, Callable[[Result], str]] | None = None,
) -> None:
    """Print a table; the first result is the one that the others are compared with.

    ``more`` are further columns, by their headings.
    """
    more = more or {}
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for heading in (*(f"us / {unit}" for unit in units), f"speed to {against}", *more, "spread"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.vector_step_us:.2f}",
            f"{result.transition_us:.3f}",
            f"{ratio(results[0], result):.3f}",
            *(column(result) for column in more.values()),
            f"{result.spread:.1%}",
        )
    console.print(table)
    for result in results:
        if result.plan:
            console.print(f"  {result.name}: {result.plan}", markup=False, style="dim")
    for remark in remarks:
        console.print(f"  {remark}", markup=False)


def ratio(reference: Result, result: Result) -> float:
    """Ratio of medians: 1 is as fast as the reference, 0.5 takes twice as long a transition."""
    return reference.transition_us / result.transition_us


def comparisons(results: Sequence[Result], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Say how the contenders of each pair, where both played, stand to each other."""
    by_name = {result.name: result for result in results}
    return [
        f"{one}: {ratio(by_name[other], by_name[one]):.2f} times the speed of {other}"
        for one, other in pairs
        if one in by_name and other in by_name
    ]


def versions() -> dict[str, str]:
    """Return the installed versions of what is compared; a missing package is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return what the figures depend on beside the versions."""
    return {"cpus": os.cpu_count(), "arch": platform.machine(), "system": platform.system()}


def print_setting() -> None:
    """Print the machine and the versions in two lines."""
    console.print(" ".join(f"{key}={value}" for key, value in machine().items()))
    console.print(" ".join(f"{key}={value}" for key, value in versions().items()))


def write_json(path: Path, results: list[dict[str, Any]]) -> None:
    """Write the figures of a run, with versions and machine, to ``path``."""
    report = {"machine": machine(), "versions": versions(), "results": results}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
