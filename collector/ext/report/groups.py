"""Statistics of a group of runs: returns with intervals, and a learning curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.ext.report.group_fields import NOTHING, value_of
from tallyroll.collector.ext.report.run_reader import Run
from tallyroll.collector.ext.report.statistics import (
    Curve,
    IntervalEstimate,
    Scores,
    estimate,
    grid,
    group_curve,
    interquartile_mean,
    mean,
    mean_of_last,
)

Scale = Mapping[str, tuple[float, float]]
"""The two returns of each environment that are scaled to 0 and 1, by environment name."""


@dataclass(frozen=True)
class Group:
    """Runs of the same experiment, with statistics over their returns."""

    name: str
    fields: Mapping[str, str]
    """The field values that the runs have in common."""
    runs: tuple[Run, ...]
    environments: tuple[str, ...]
    scaled: bool
    """True if the returns are scaled, because the group has several environments."""
    scores: Mapping[str, float]
    """Return of each run, by path: the mean of its last episodes, scaled if ``scaled``."""
    mean: IntervalEstimate | None
    interquartile_mean: IntervalEstimate | None
    curve: Curve | None
    """None if the group's statistics or points are unavailable."""


@np.errstate(all="ignore")
def score_of(run: Run, window: int) -> float:
    """Return the mean return of a run's last ``window`` episodes; NaN without episodes."""
    return float(run.returns[-window:].mean()) if len(run.returns) else np.nan


@np.errstate(all="ignore")  # means of very large returns overflow to infinity
def groups_of(
    runs: Sequence[Run],
    fields: Sequence[str],
    scale: Scale,
    window: int,
    problem: Callable[[str, str], object],
) -> list[Group]:
    """Group runs, and order the groups by name.

    ``problem`` is called with the name of a group, and a sentence about the group.
    """
    values = [
        tuple(value_of(field, run.place, run.environment, run.entry) or NOTHING for field in fields)
        for run in runs
    ]
    members = {
        key: tuple(run for run, of in zip(runs, values, strict=True) if of == key)
        for key in sorted({*values})
    }
    ends = _ends([*members.values()])
    found = []
    for key, group in members.items():
        environments = tuple(sorted({run.environment for run in group}))
        at = grid(ends[environments])
        name = " · ".join(key)
        there = [run for run in group if len(run.returns)]
        scaled, why = len(environments) > 1, ""
        if scaled and (lacking := [each for each in environments if each not in scale]):
            why = (
                f"the group has runs of {', '.join(environments)}, and their returns have no "
                "common mean. Add environment to --group-by, or give --scale for "
                f"{', '.join(lacking)}"
            )
            problem(name, why)
        scores = {run.path: _scaled(score_of(run, window), run, scale, scaled) for run in there}
        strata = [
            np.array([scores[run.path] for run in there if run.environment == each])
            for each in environments
        ]
        strata = [each for each in strata if len(each)]
        counts = not why and bool(there)
        found.append(
            Group(
                name,
                dict(zip(fields, key, strict=True)),
                group,
                environments,
                scaled,
                {} if why else scores,
                estimate(mean, strata) if counts else None,
                estimate(interquartile_mean, strata) if counts else None,
                _curve(there, environments, at, window, scale, scaled) if counts else None,
            )
        )
    return found


def _ends(groups: Sequence[Sequence[Run]]) -> dict[tuple[str, ...], int]:
    """Return the largest number of transitions of a run, by the environments of its group."""
    ends: dict[tuple[str, ...], int] = {}
    for group in groups:
        environments = tuple(sorted({run.environment for run in group}))
        most = max(run.stored for run in group)
        ends[environments] = max(ends.get(environments, 0), most)
    return ends


def _scaled(value: float, run: Run, scale: Scale, scaled: bool) -> float:
    if not scaled or run.environment not in scale:
        return value
    low, high = scale[run.environment]
    return (value - low) / (high - low)


def _curve(
    runs: Sequence[Run],
    environments: Sequence[str],
    at: NDArray[np.int64],
    window: int,
    scale: Scale,
    scaled: bool,
) -> Curve | None:
    """Return the curve of runs that have returns, up to the end of the shortest run."""
    if not len(at):
        return None

    def values(run: Run) -> Scores:
        of_run = mean_of_last(run.ended_at, run.returns, at, window)
        of_run[at > run.stored] = np.nan
        if scaled:
            low, high = scale[run.environment]
            of_run = (of_run - low) / (high - low)
        return of_run

    strata = [[values(run) for run in runs if run.environment == each] for each in environments]
    return group_curve([each for each in strata if each], at)
