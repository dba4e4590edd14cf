"""`report`: read many storages, group their runs, and present them as a table and a page."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.report.figure import report_figure
from tallyroll.collector.ext.report.files import write_report
from tallyroll.collector.ext.report.group_fields import (
    DEFAULT,
    checked_fields,
    require_known,
    shortened,
)
from tallyroll.collector.ext.report.groups import Group, Scale, groups_of, score_of
from tallyroll.collector.ext.report.page import render
from tallyroll.collector.ext.report.paper import curve_points, figure_file, latex_table
from tallyroll.collector.ext.report.run_reader import COUNTS, Run, read_runs
from tallyroll.collector.ext.report.storage_search import distinct, storages_at
from tallyroll.collector.ext.report.stored_runs import part, whole_number
from tallyroll.collector.ext.report.text import show_runs
from tallyroll.storage.errors import StorageError
from tallyroll.storage.ext.joined.shards import recorded_shard
from tallyroll.storage.files.manifest import SHARD, policy_of
from tallyroll.storage.rows.pages import Page, PageSource, counted
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.storages import open_storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Note = Callable[[str, str], object]
"""Callback with the name of a run, and a sentence about it."""


def with_shards_joined(runs: Sequence[Run], problem: Note, note: Note) -> list[Run]:
    """Join shards of one run into one run, at the position of the first shard.

    Args:
        runs: the runs of storages.
        problem: callback for a duplicate shard, which is ignored.
        note: callback for missing shards.
    """
    by_run: dict[Any, dict[int, Run]] = {}
    for run in runs:
        said = recorded_shard([run.entry])
        if said is None:
            by_run[id(run)] = {0: run}
            continue
        name, index, of, _ = said
        there = by_run.setdefault((name, of), {})
        if index in there:
            problem(
                run.path,
                f"shard {index} of {of} is also in {there[index].path}, and only that one counts",
            )
        else:
            there[index] = run
    found = []
    for about, there in by_run.items():
        if isinstance(about, int):
            found.append(there[0])
            continue
        _, of = about
        joined = _joined([there[index] for index in sorted(there)], of)
        found.append(joined)
        if missing := [index for index in range(of) if index not in there]:
            note(joined.path, f"shards {', '.join(map(str, missing))} of {of} are missing")
    return found


def _joined(shards: Sequence[Run], of: int) -> Run:
    first = shards[0]
    said = part(first.entry, SHARD)
    asked = whole_number(said, "asked") or None
    at, resumed_at = (
        np.concatenate([_in_run(getattr(each, name), each.entry) for each in shards])
        for name in ("ended_at", "resumed_at")
    )
    returns = np.concatenate([each.returns for each in shards])
    why = first.without_returns
    if len(returns):  # if any shard with episodes lacks returns, the run lacks returns
        lacking = [each for each in shards if each.episodes and each.without_returns]
        why = f"{lacking[0].path}: {lacking[0].without_returns}" if lacking else ""
    order = at.argsort(kind="stable")[: 0 if why else None]
    entry = {name: value for name, value in first.entry.items() if name != SHARD}
    return replace(
        first,
        path=f"{first.path} ({len(shards)} of {of} shards)",
        entry={**entry, "call": {**part(entry, "call"), "total_frames": asked}},
        identity=(SHARD, said.get("run"), of),
        asked=asked,
        stored=sum(each.stored for each in shards),
        counts=_sums([each.counts for each in shards]),
        resumed=sum(each.resumed for each in shards),
        resumed_at=tuple(sorted(resumed_at.tolist())),
        replaced=sum(each.replaced for each in shards),
        state=_state([each.state for each in shards], whole=len(shards) == of),
        episodes=sum(each.episodes for each in shards),
        ended_at=at[order],
        returns=returns[order],
        without_returns=why,
        begins_late=any(each.begins_late for each in shards),
    )


def _in_run(numbers: Sequence[int] | NDArray[np.int64], entry: Mapping[str, Any]) -> Any:
    """Convert transition numbers of a shard, counted from 1, to numbers in the whole run.

    The conversion follows slot order. It is exact if every slot is a transition, and approximate
    otherwise.
    """
    found, lanes = np.asarray(numbers, np.int64), part(entry, SHARD).get("lanes")
    of_run = whole_number(entry, "lanes")
    if not isinstance(lanes, list) or [type(each) for each in lanes] != [int, int]:
        return found
    first, own = lanes[0], lanes[1] - lanes[0]
    if not 0 <= first < lanes[1] <= of_run:
        return found
    return (found - 1) // own * of_run + first + (found - 1) % own + 1


def _sums(counts: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    there = [each for each in counts if each is not None]
    if len(there) < len(counts):
        return None
    return {name: sum(each.get(name, 0) for each in there) for name in there[0]}


def _state(states: Sequence[str], *, whole: bool) -> str:
    for name in ("running", "killed"):
        if name in states:
            return name
    return "complete" if whole and {*states} == {"complete"} else "stopped"


_OF_EACH_RUN = ("made.at", "made.policy.weights")
"""Values that two runs never have in common."""
_DEEPEST = 5

Path: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Problem:
    """An item that is missing from a report or needs attention, with the reason."""

    where: str
    """A path, or the name of a group."""
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, repr=False)
class RunsReport(PageSource):
    """A report over many runs, made by `report`."""

    groups: tuple[Group, ...]
    """Runs of the same experiment, with the mean and the interquartile mean of their returns."""
    problems: tuple[Problem, ...]
    """Items that could not be read, or are excluded from the statistics."""
    notes: tuple[Problem, ...]
    """Items that may be intended, but that the reader should know."""
    window: int
    """Number of last episodes whose mean is the return of a run."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, group by group."""
        return tuple(run for group in self.groups for run in group.runs)

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """One dict per run, in a form for ``pandas.DataFrame``. Unknown values are None."""
        return [self._line(group, run) for group in self.groups for run in group.runs]

    def _line(self, group: Group, run: Run) -> dict[str, Any]:
        counts = run.counts or {}
        return {
            "run": run.path,
            "group": group.name,
            "environment": run.environment,
            "seed": run.seed,
            "policy": policy_of(run.entry) or None,
            "asked": run.asked,
            "asked_episodes": run.asked_episodes,
            "stored": run.stored,
            "state": run.state,
            "resumed": run.resumed,
            "replaced": run.replaced,
            **{name: counts.get(name) for name in COUNTS},
            "episodes": run.episodes,
            "return": score_of(run, self.window) if len(run.returns) else None,
        }

    @cached_property
    def differences(self) -> dict[str, dict[str, list[str]]]:
        """Values that differ between runs, as ``{name: {value: [run, ...]}}``.

        The values come from the versions, the environment, the call and the provenance of each
        run, and from its number of lanes.
        """
        names = ("versions", "environment", "call", "made")
        values = [
            {name: value for each in names for name, value in _flat(part(run.entry, each), each)}
            | {"lanes": str(run.entry.get("lanes", "?"))}
            for run in self.runs
        ]
        found: dict[str, dict[str, list[str]]] = {}
        for name in sorted({name for each in values for name in each}):
            by_value: dict[str, list[str]] = {}
            for run, each in zip(self.runs, values, strict=True):
                by_value.setdefault(each.get(name, "-"), []).append(run.path)
            if len(by_value) > 1:
                found[name] = by_value
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON values."""
        return {
            "window": self.window,
            "groups": [_as_dict(group) for group in self.groups],
            "runs": self.table,
            "differences": self.differences,
            "problems": [vars(each) for each in self.problems],
            "notes": [vars(each) for each in self.notes],
        }

    def as_csv(self) -> str:
        """Return the table as CSV with a header line."""
        text = io.StringIO()
        names = [*self.table[0]] if self.table else ["run"]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.table)
        return text.getvalue()

    def to_csv(self, path: Path, *, force: bool = False) -> None:
        """Write the table as CSV, atomically; see `to_html` for arguments and errors."""
        write_report(os.fspath(path), self.as_csv(), force=force)

    def to_html(self, path: Path, *, force: bool = False) -> None:
        """Write the page, atomically, as one file that needs no network.

        Args:
            path: path of the file. An existing report is replaced.
            force: also replace a file that is not a report.

        Raises:
            ArgumentError: the path has a file that is not a report, or is not a regular file.
            OSError: the file cannot be written. An existing file is unchanged.
        """
        write_report(os.fspath(path), render(self), force=force)

    def to_latex(self, path: Path, *, force: bool = False) -> None:
        """Write the groups as a LaTeX table (booktabs); see `to_html` for arguments and errors."""
        write_report(os.fspath(path), latex_table(self.groups, self.window), force=force)

    def to_curves(self, path: Path, *, force: bool = False) -> None:
        """Write the points of the learning curves as CSV; see `to_html` for arguments and errors.

        Columns are the group, its number of runs, transitions, the interquartile mean, and the
        bounds of its interval.
        """
        write_report(os.fspath(path), curve_points(self.groups), force=force)

    def to_png(self, path: Path, *, force: bool = False) -> None:
        """Write the figure of `plot` as a PNG; see `to_html` for arguments and errors.

        Raises:
            MissingExtra: Matplotlib is not installed.
        """
        write_report(os.fspath(path), figure_file(self.groups, "png"), force=force)

    def to_pdf(self, path: Path, *, force: bool = False) -> None:
        """Write the figure of `plot` as a PDF; see `to_png`."""
        write_report(os.fspath(path), figure_file(self.groups, "pdf"), force=force)

    def plot(self) -> Figure:
        """Draw the learning curves of the groups with their intervals, with Matplotlib.

        Raises:
            MissingExtra: Matplotlib is not installed.
        """
        return report_figure(self.groups)

    def __repr__(self) -> str:
        lines = [
            f"RunsReport({counted(len(self.runs), 'run')}, {counted(len(self.groups), 'group')}"
        ]
        if self.problems:
            lines[0] += f", {counted(len(self.problems), 'problem')}"
        for group in self.groups:
            found = group.interquartile_mean
            shown = "no returns" if found is None else f"{found.value:.5g}"
            if found is not None and found.low is not None:
                shown += f" [{found.low:.5g}, {found.high:.5g}]"
            lines.append(f"  {group.name}: {counted(len(group.runs), 'run')}, return {shown}")
        return ",\n".join(lines) + ")"

    def _show_on_(self, page: Page) -> None:
        show_runs(self, page)


def report(
    paths: Path | Iterable[Path],
    *,
    group_by: str | Sequence[str] = DEFAULT,
    window: int = 100,
    scale: Scale | None = None,
    progress: Progress | None = None,
    accept_copy: bool = False,
) -> RunsReport:
    """Read the runs of many storages: counts, returns with intervals, learning curves.

    A run's return is the mean return of its last ``window`` episodes. A group has the mean and the
    interquartile mean over its runs, with 95 % intervals from the stratified bootstrap. Runs are
    the samples, and environments are the strata. Shards of one run count as one run. Storages that
    cannot be read are listed in ``problems``, and the others are reported.

    Args:
        paths: storages of any format, or folders that contain storages.
        group_by: fields that the runs of a group have in common: ``"environment"``, ``"label"``
            (the name of the storage without the seed at its end, or for ``ppo/3`` the name of the
            folder), ``"folder"``, ``"policy"``, or the name of a value in the run's entry, such as
            ``"call.frames_per_batch"``.
        window: number of last episodes in a mean, also at each point of a learning curve.
        scale: the two returns of each environment that are scaled to 0 and 1. A group of several
            environments has no common mean without a scale.
        progress: function called with the number of rows read and the total.
        accept_copy: open copies that were made while a writer had the storage open.

    Raises:
        ArgumentError: an argument is invalid.
        MissingExtra: scipy or jinja2 is not installed.
    """
    fields, given = checked_fields(group_by), _checked_paths(paths)
    if type(window) is not int or window < 1:
        raise ArgumentError(f"window: expected a number of episodes above 0, got {window!r}")
    scales = _checked_scale(scale or {})
    for package in ("scipy.stats", "jinja2"):
        needs(package, "report", "reports")
    problems: list[Problem] = []
    heads: dict[str, int] = {}
    entries: list[Mapping[str, Any]] = []
    for path in given:
        for place, error in storages_at(path, accept_copy):
            if error is not None:
                problems.append(_problem(place, error))
                continue
            try:
                with open_storage(place, accept_copy=accept_copy) as storage:
                    heads[place] = storage.head
                    entries += storage.runs
            except (StorageError, OSError) as late:
                problems.append(_problem(place, late))
    if entries:
        require_known(fields, entries)
    runs = _read(heads, problems, progress, accept_copy=accept_copy)
    notes: list[Problem] = []
    runs = with_shards_joined(
        _each_once(runs, problems),
        lambda name, why: problems.append(Problem(name, why)),
        lambda name, what: notes.append(Problem(name, what)),
    )
    for run in runs:
        if run.without_returns:
            problems.append(Problem(run.path, run.without_returns))
    groups = groups_of(
        runs, fields, scales, window, lambda name, why: problems.append(Problem(name, why))
    )
    return RunsReport(tuple(groups), tuple(problems), (*notes, *_notes(groups)), window)


def _read(
    heads: Mapping[str, int],
    problems: list[Problem],
    progress: Progress | None,
    *,
    accept_copy: bool,
) -> list[Run]:
    runs: list[Run] = []
    done, total = 0, sum(heads.values())
    for path in distinct(heads):

        def counted(rows: int, before: int = done) -> None:
            if progress is not None:
                progress(before + rows, total)

        def problem(why: str, path: str = path) -> None:
            problems.append(Problem(path, why))

        try:
            runs += read_runs(path, counted, problem, accept_copy=accept_copy)
        except (StorageError, OSError) as error:
            problems.append(_problem(path, error))
        done += heads[path]
        counted(0, done)
    return runs


def _problem(path: str, error: Exception) -> Problem:
    """Convert an error to a problem, without the path that most messages begin with."""
    why = str(error) or type(error).__name__
    return Problem(path, why.removeprefix(f"{path}: ").removeprefix(f"{path} "))


def _each_once(runs: Sequence[Run], problems: list[Problem]) -> list[Run]:
    """Return the runs without copies of earlier runs, which would count as other seeds."""
    known: dict[Any, Run] = {}
    kept = []
    for run in runs:
        first = known.setdefault(run.identity, run)
        if first is run:
            kept.append(run)
        else:
            problems.append(
                Problem(
                    run.path,
                    f"the run is a copy of the run in {first.path}, and only that one counts",
                )
            )
    return kept


def _notes(groups: Iterable[Group]) -> Iterable[Problem]:
    for group in groups:
        by_seed: dict[Any, list[str]] = {}
        for run in group.runs:
            if run.seed is not None:
                by_seed.setdefault((run.environment, run.seed), []).append(run.path)
            if run.begins_late:
                yield Problem(
                    run.path,
                    "the oldest rows were overwritten, so the curve begins with the remaining rows",
                )
            if run.unversioned:
                yield Problem(run.path, run.unversioned)
            if run.state in ("stopped", "killed", "running"):
                asked = run.asked if run.asked is not None else run.asked_episodes
                unit = "transitions" if run.asked is not None else "episodes"
                wanted = "" if asked is None else f", and its budget is {asked:,} {unit}"
                yield Problem(
                    run.path, f"{run.state}: the run has {run.stored:,} transitions{wanted}"
                )
        for (_, seed), paths in by_seed.items():
            if len(paths) > 1:
                yield Problem(
                    group.name,
                    f"{', '.join(paths)} have the same seed, {seed}. If everything is "
                    "deterministic, they are one run and not several",
                )


def _checked_paths(paths: Path | Iterable[Path]) -> list[str]:
    one = isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable)
    given: list[Any] = [paths] if one else [*paths]  # type: ignore[misc]
    for each in given:
        path = os.fspath(each) if isinstance(each, str | os.PathLike) else None
        if not isinstance(path, str) or "\0" in path:
            raise ArgumentError(f"paths: expected paths of storages, got {each!r}")
    if not given or not all(os.fspath(each) for each in given):
        raise ArgumentError("paths: expected at least one path of a storage, got none")
    return distinct([os.fspath(each) for each in given])


def _checked_scale(scale: Scale) -> dict[str, tuple[float, float]]:
    found = {}
    for name, ends in scale.items():
        try:
            low, high = map(float, ends)
        except (TypeError, ValueError):
            low = high = float("nan")
        if not low < high or not abs(low) + abs(high) < float("inf"):
            raise ArgumentError(
                f"scale: expected two numbers, the lower first, for {name}, got {ends!r}"
            )
        found[str(name)] = (low, high)
    return found


def _flat(value: Mapping[str, Any], before: str) -> Iterable[tuple[str, str]]:
    for name, each in value.items():
        path = f"{before}.{name}"
        if path in _OF_EACH_RUN:
            continue
        if isinstance(each, dict) and path.count(".") < _DEEPEST:
            yield from _flat(each, path)
        elif each is not None:  # None is the same as absent
            yield path, shortened(each)


def _as_dict(group: Group) -> dict[str, Any]:
    curve = group.curve
    return {
        "name": group.name,
        "fields": dict(group.fields),
        "runs": [run.path for run in group.runs],
        "environments": list(group.environments),
        "scaled": group.scaled,
        "mean": group.mean and vars(group.mean),
        "interquartile_mean": group.interquartile_mean and vars(group.interquartile_mean),
        "curve": curve
        and {
            "transitions": curve.at.tolist(),
            **{
                name: None if values is None else [None if v != v else v for v in values.tolist()]
                for name, values in (
                    ("value", curve.value),
                    ("low", curve.low),
                    ("high", curve.high),
                )
            },
        },
    }
