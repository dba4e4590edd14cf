"""Shared code of the benchmarks: interleaved rounds, medians, tables, facts about the machine."""

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
    """Work of a contender: transitions executed (without reset slots) and vector steps made."""

    transitions: float
    vector_steps: float

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both."""
        return Tally(self.transitions + other.transitions, self.vector_steps + other.vector_steps)


class Contender(ABC):
    """One way of doing the work. It is set up once and then advanced round by round."""

    name: str

    def begin_round(self) -> None:
        """Start background work, if the contender has any. Not timed."""
        return

    def end_round(self) -> None:
        """Stop background work, if the contender has any. Not timed."""
        return

    def make_ready(self) -> None:
        """Prepare for the next ``advance``. Not timed."""
        return

    @abstractmethod
    def advance(self) -> None:
        """Do one batch of work. Only this is timed."""

    @abstractmethod
    def tally(self) -> Tally:
        """Return the work of the last ``advance``."""

    def close(self) -> None:
        """Release environments and files."""
        return


@dataclass(frozen=True)
class Round:
    """One round: wall-clock seconds, seconds of this process's CPU time, and the work done."""

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
    """The fast path or fallback that each part of a Tallyroll run uses."""

    def add(self, played: Round) -> None:
        """Record one round."""
        tally = played.tally
        self.per_transition.append(1e6 * played.seconds / tally.transitions)
        self.per_vector_step.append(1e6 * played.seconds / tally.vector_steps)
        self.own_per_transition.append(1e6 * played.own_seconds / tally.transitions)

    @property
    def transition_us(self) -> float:
        """Median over the rounds, in microseconds per transition."""
        return statistics.median(self.per_transition)

    @property
    def vector_step_us(self) -> float:
        """Median over the rounds, in microseconds per vector step."""
        return statistics.median(self.per_vector_step)

    @property
    def own_us(self) -> float:
        """Median over the rounds of this process's CPU time, in microseconds per transition."""
        return statistics.median(self.own_per_transition)

    @property
    def spread(self) -> float:
        """Half the interquartile range, as a fraction of the median."""
        if len(self.per_transition) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.per_transition, n=4)
        return (high - low) / 2 / self.transition_us


def prepare() -> None:
    """Set torch to one thread, and silence warnings and log lines of other libraries."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def play_round(contender: Contender, seconds: float) -> Round:
    """Advance until ``seconds`` have passed. The clock is stopped while the work is counted."""
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
    """Run the contenders in the order A B C … A B C …, so that a disturbance affects all of them.

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
    """Return the paths of its collector's plan on one line, or an empty string for a peer."""
    plan = getattr(getattr(contender, "collector", None), "plan", None)
    if not hasattr(plan, "as_json"):
        return ""
    return ", ".join(f"{part} {each['way']}" for part, each in plan.as_json().items())


def play_and_close(contenders: Sequence[Contender], rounds: int, seconds: float) -> list[Result]:
    """Run the contenders, and close them even if one fails."""
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
    """Print a table that compares all results with the first one.

    ``more`` maps headings of additional columns to functions of a result.
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
    """Ratio of medians: 1 is as fast as the reference, 0.5 takes twice as long per transition."""
    return reference.transition_us / result.transition_us


def comparisons(results: Sequence[Result], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each pair of which both contenders ran, comparing the two."""
    by_name = {result.name: result for result in results}
    return [
        f"{one}: {ratio(by_name[other], by_name[one]):.2f} times the speed of {other}"
        for one, other in pairs
        if one in by_name and other in by_name
    ]


def versions() -> dict[str, str]:
    """Return the installed versions of the compared packages. Missing packages are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return the other facts about the machine that affect the figures."""
    return {"cpus": os.cpu_count(), "arch": platform.machine(), "system": platform.system()}


def print_setting() -> None:
    """Print the machine and the versions on two lines."""
    console.print(" ".join(f"{key}={value}" for key, value in machine().items()))
    console.print(" ".join(f"{key}={value}" for key, value in versions().items()))


def write_json(path: Path, results: list[dict[str, Any]]) -> None:
    """Write the figures of a run, with versions and machine, to ``path``."""
    report = {"machine": machine(), "versions": versions(), "results": results}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
