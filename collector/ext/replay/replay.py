"""Replay: restart stored trajectories, step them, and compare the results."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike, fspath
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tallyroll.collector.envs.setup.make import CreateEnv
from tallyroll.collector.envs.setup.packages import version_here
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.replay.calls import Call, calls_of, with_ids_moved
from tallyroll.collector.ext.replay.comparison import Comparison
from tallyroll.collector.ext.replay.makers import makers_of
from tallyroll.collector.ext.replay.recovered_env import (
    RecoveredEnv,
    made,
    options_for,
    recovered,
)
from tallyroll.collector.ext.replay.replay_plan import (
    Group,
    History,
    Line,
    ReplayPlan,
    calls_around,
    plan_of,
)
from tallyroll.collector.ext.replay.replayed_draws import give_draws
from tallyroll.collector.ext.replay.report import ReplayReport
from tallyroll.collector.ext.replay.rounds import Lane, Round, StoredRows
from tallyroll.collector.ext.replay.stage import Stage
from tallyroll.collector.ext.replay.video import EpisodeVideo
from tallyroll.collector.options.draws import Constant
from tallyroll.collector.options.resets import Resets
from tallyroll.collector.policies.trial import generators_restored
from tallyroll.collector.user_code import user_code
from tallyroll.storage.errors import ColumnsMissing, UnknownTrajectory
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.files.excluded_columns import excluded_by
from tallyroll.storage.files.run_record import RunRecord
from tallyroll.storage.package.versions import versions
from tallyroll.storage.rows.keys import COLLECTOR, CONTEXT, RESET_SEED, Key, format_key
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.storages import DiskStorage, open_storage

_RESETS_DIFFER = (
    "the trajectory differs, and two resets of the environment with the same seed give different "
    "observations"
)

PathOf = str | PathLike[str]


def replay(
    path: PathOf | Sequence[PathOf],
    trajectories: int | Iterable[int] | Literal["all"] | None = None,
    *,
    sample: int = 20,
    create_env_fn: CreateEnv | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    resets: Resets | None = None,
    atol: float = 0.0,
    video: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    accept_copy: bool = False,
) -> ReplayReport:
    """Restart stored trajectories, step their actions, and compare every value bit for bit.

    If the run had ``Resets(seeds=True)``, a trajectory restarts from the seed and the context in
    its rows. Otherwise each lane starts where its run, or the resumption of its run, seeded it. The
    replay then steps the lane through all its earlier stored rows, and compares these too. It
    compares observations, next observations, rewards and episode ends with the stored values.
    Equality is only guaranteed on the same machine with the same versions.

    Args:
        path: path of the storage. With several paths or a pattern, each storage is replayed
            separately.
        trajectories: an id, several ids, or ``"all"``. None selects a ``sample``.
        sample: number of trajectories in a sample, spread over all trajectories that can be
            replayed.
        create_env_fn: an id, or a function that makes the environment, as for a collector. None
            makes it from the run's provenance, as :func:`recover_env` does.
        env_kwargs: keyword arguments for an id, in addition to those of the run.
        resets: the resets of the run, needed if a function drew them. None uses the recorded
            resets.
        atol: largest difference of two floats that count as equal.
        video: path of an MP4 file that shows the trajectories one after the other. It needs the
            extra ``video``, and an environment that renders.
        progress: function called with the number of rows compared and the total.
        accept_copy: see `open_storage`.

    Raises:
        ArgumentError: an argument is invalid.
        UnknownTrajectory: the storage has no row of a trajectory.
        EnvironmentUnknown: ``create_env_fn`` is needed.
        EnvironmentRefused: the environment does not accept seeds, or cannot be stepped in this way.
        StorageError: the storage cannot be opened or read.

    Examples:
        >>> from tallyroll.collector import Resets, SyncCollector, replay
        >>> from tallyroll.storage import MemmapStorage
        >>> storage = MemmapStorage()
        >>> with SyncCollector(
        ...     "CartPole-v1",
        ...     num_envs=2,
        ...     frames_per_batch=100,
        ...     total_frames=100,
        ...     storage=storage,
        ...     seed=0,
        ...     resets=Resets(seeds=True),
        ... ) as collector:
        ...     rows = next(iter(collector))
        >>> report = replay(storage.path, "all")
        >>> report.same, report.rows
        (True, 100)
        >>> storage.close()
    """
    _require(sample, atol, create_env_fn)
    began = time.monotonic()
    with (
        user_code("replay"),
        open_storage(path, accept_copy=accept_copy) as storage,
        generators_restored(),
        torch.no_grad(),
        ExitStack() as closed,
    ):
        film = None if video is None else closed.enter_context(EpisodeVideo(fspath(video)))
        run = _Replay(storage, create_env_fn, env_kwargs, resets, atol, film)
        run.choose(trajectories, sample)
        run.carry_out(progress)
        named = fspath(path) if isinstance(path, str | PathLike) else str(storage.path)
        return run.report(named, time.monotonic() - began)


def _require(sample: int, atol: float, create: object) -> None:
    """Refuse invalid arguments."""
    if type(sample) is not int or sample < 1:
        raise ArgumentError(f"sample: expected a whole number above 0, got {sample!r}")
    if isinstance(atol, bool) or not isinstance(atol, (int, float)) or not 0 <= atol < np.inf:
        raise ArgumentError(f"atol: expected a finite number of at least 0, got {atol!r}")
    if isinstance(create, (EnvBase, VectorEnv, System)) or not (
        create is None or isinstance(create, str) or callable(create)
    ):
        raise ArgumentError(
            "create_env_fn: expected an id, or a function that makes the environment, got "
            f"{type(create).__name__}. A replay may need several environments."
        )


def _runs_of(storage: DiskStorage) -> list[dict[str, Any]]:
    """Return the runs of a storage.

    If the storage joins several storages, trajectory ids in calls are shifted like those in the
    rows.
    """
    reader = storage.reader
    if not isinstance(reader, UnionReader):
        return storage.runs
    found = []
    for run in storage.runs:
        of = next(at for at, each in enumerate(reader.members) if run["first_row"] in each.rows)
        found.append(with_ids_moved(run, reader.ids_moved_by[of]))
    return found


def _losses_of(storage: DiskStorage) -> dict[str, int]:
    """Return the combined losses in the ledgers of all storages."""
    reader, found = storage.reader, dict[str, int]()
    members = [each.reader for each in reader.members] if isinstance(reader, UnionReader) else []
    for each in members or [reader]:
        if (record := RunRecord.parse(each.record)) is not None:
            for name in ("lost", "respawned"):
                found[name] = found.get(name, 0) + record.ledger.get(name, 0)
    return found


class _Replay:
    """State of one replay."""

    def __init__(
        self,
        storage: DiskStorage,
        create: CreateEnv | None,
        kwargs: Mapping[str, Any] | None,
        resets: Resets | None,
        atol: float,
        film: EpisodeVideo | None,
    ) -> None:
        self._storage, self._film = storage, film
        self._create, self._kwargs, self._resets = create, kwargs, resets
        self._comparison = Comparison(atol)
        if not storage.head:
            raise ArgumentError(f"{storage.path} has no rows yet to replay")
        self._seeded = RESET_SEED in storage.schema
        self._contexts: dict[str, Key] = {
            column.key[-1]: column.key
            for column in storage.schema.columns
            if column.key[:-1] == CONTEXT
        }
        table = storage.trajectories.table
        if not len(table):
            raise ColumnsMissing(
                f"{storage.path}: no row has a trajectory id, so no trajectory can be replayed"
            )
        self._history = History(
            table,
            storage.span,
            makers_of(_runs_of(storage), storage.head),
            self._seeded,
            _losses_of(storage),
        )
        self._rows = StoredRows(storage, table)
        self._plan = ReplayPlan()
        self._left_out: dict[str, int] = {}
        self._notes: dict[str, None] = {}
        self._versions: dict[str, tuple[str, str]] = {}
        self._made: set[Key] = set()
        self._compared: set[int] = set()

    def choose(self, trajectories: int | Iterable[int] | str | None, sample: int) -> None:
        """Select the trajectories and plan their replay."""
        ids = self._history.table["id"]
        if trajectories is None:
            whole = plan_of(self._history, ids.tolist())
            can = [id for id in ids.tolist() if id not in whole.refused]
            if not can:
                self._plan = whole
                return
            for why in whole.refused.values():
                self._left_out[why] = self._left_out.get(why, 0) + 1
            some = np.unique(np.linspace(0, len(can) - 1, min(sample, len(can))).round())
            wanted = [can[int(at)] for at in some]
        elif isinstance(trajectories, str):
            if trajectories != "all":
                raise ArgumentError(f'trajectories: expected ids or "all", got {trajectories!r}')
            wanted = ids.tolist()
        else:
            wanted = self._known(trajectories)
        self._plan = plan_of(self._history, wanted)

    def _known(self, trajectories: int | Iterable[int]) -> list[int]:
        several = isinstance(trajectories, Iterable)
        given = list(trajectories) if isinstance(trajectories, Iterable) else [trajectories]
        for id in given:
            if isinstance(id, (bool, np.bool_)) or not isinstance(id, (int, np.integer)):
                raise ArgumentError(f"trajectories: expected whole numbers, got {id!r}")
            if id not in self._storage.trajectories:
                raise UnknownTrajectory(
                    f"{self._storage.path} has no rows of trajectory {id}. `tallyroll inspect "
                    "--trajectories` lists the existing ids."
                )
        if not given and several:
            raise ArgumentError("trajectories: expected at least one id, got none")
        return [int(id) for id in given]

    # --- stepping ---------------------------------------------------------------------------------

    def carry_out(self, progress: Progress | None) -> None:
        """Replay everything that was planned."""
        total = sum(self._rows.count(line) for group in self._plan.groups for line in group.lines)

        def tell() -> None:
            if progress is not None:
                with user_code("progress"):
                    progress(self._comparison.rows, total)

        for group in self._plan.groups:
            entry = self._history.makers[group.maker].entry
            found = recovered(entry, self._create, self._kwargs, self._resets)
            if self._film is not None and self._create is None:
                found.kwargs.setdefault("render_mode", "rgb_array")
            self._note_versions(entry)
            if group.seeded:
                self._from_own_seeds(group, found, tell)
            else:
                self._from_run(group, found, tell)

    def _note_versions(self, entry: Mapping[str, Any]) -> None:
        said, here = entry.get("versions"), versions()
        for name, version in (said if isinstance(said, dict) else {}).items():
            found = here.get(name) or version_here(name) or "not installed"
            if found != version:
                self._versions[name] = (str(version), found)

    def _from_own_seeds(self, group: Group, found: RecoveredEnv, tell: Callable[[], None]) -> None:
        firsts = np.array([self._rows.of(line.trajectories[0])[0] for line in group.lines])
        seeds = self._rows.take(RESET_SEED, firsts)
        contexts = {name: self._rows.take(key, firsts) for name, key in self._contexts.items()}
        resets = found.resets
        if contexts and resets.sampler is None:  # a function drew them, or the draws are unknown
            sampler = {name: Constant(values[0].tolist()) for name, values in contexts.items()}
            resets = Resets(sampler=sampler, seeds=True)
        if found.unknown_sampler:
            self._notes[
                f"the function {found.unknown_sampler} drew the options of resets, and options "
                "that are not numbers are not stored. Pass resets= to draw them again"
            ] = None
        for same, before, after in self._called_alike(group):
            alone = self._film is not None or bool(after)
            with self._stage(
                found, 1 if alone else min(len(same), max(found.lanes)), resets
            ) as stage:
                for call in before:
                    for lane in range(stage.lanes):
                        stage.call(call, lane)
                draws = give_draws(stage.env, contexts, found.resets)
                # Group lines of similar length, so that few lanes wait for others.
                order = np.array(sorted(same, key=lambda at: self._rows.count(group.lines[at])))
                size = 1 if alone else stage.lanes
                for start in range(0, len(order), size):
                    some = order[start : start + size]
                    draws.give_lanes(
                        seeds[some], {name: values[some] for name, values in contexts.items()}
                    )
                    if not start and not stage.resets_alike():
                        group = replace(group, doubt=_RESETS_DIFFER, first_too=True)
                    stage.begin()
                    lines = [(lane, group.lines[at]) for lane, at in enumerate(some.tolist())]
                    self._round(stage, group, lines, tell, calls=after)

    def _called_alike(self, group: Group) -> Iterator[tuple[list[int], list[Call], list[Call]]]:
        """Yield groups of lines whose environments the run had called in the same way.

        A group has the indices of its lines, the calls before their resets, and the calls after
        them. A line with calls after its reset forms its own group.
        """
        alike: dict[tuple[str, ...], tuple[list[int], list[Call]]] = {}
        for place, line in enumerate(group.lines):
            before, after = calls_around(self._history, group.maker, line)
            if after:
                yield [place], before, after
            else:
                key = tuple(call.content for call in before)
                alike.setdefault(key, ([], before))[0].append(place)
        for places, before in alike.values():
            yield places, before, []

    def _from_run(self, group: Group, found: RecoveredEnv, tell: Callable[[], None]) -> None:
        entry = self._history.makers[group.maker].entry
        if found.unknown_sampler:
            raise ArgumentError(
                f"the function {found.unknown_sampler} drew the options of resets, and their seeds "
                "are not stored. Pass the function in resets=Resets(sampler=...)."
            )
        first, call = 0, entry.get("call")
        workers = len(found.lanes) > 1 or (isinstance(call, dict) and "num_workers" in call)
        for worker, count in enumerate(found.lanes):
            lanes = range(first, first + count)
            first += count
            own = [line for line in group.lines if line.lane in lanes]
            if not own:
                continue
            for some in [[line] for line in own] if self._film is not None else [own]:
                with self._stage(found, count, found.resets) as stage:
                    if stage.lanes != count:
                        raise ArgumentError(
                            f"expected an environment with {count} lanes, as in the run, got "
                            f"{stage.lanes} lanes"
                        )
                    stage.seed_run(
                        entry["seed"], entry["incarnation"], lanes, worker if workers else None
                    )
                    stage.begin()
                    if stage.shares_seed:
                        some = self._all_lanes(group, lanes, some)
                    lines = [(line.lane - lanes.start, line) for line in some]
                    self._round(stage, group, lines, tell)

    def _all_lanes(self, group: Group, lanes: range, some: list[Line]) -> list[Line]:
        """Return the lines of all lanes. Other lanes influence the lanes of ``some``."""
        asked = {line.lane: line for line in some}
        plan = plan_of(self._history, self._history.table["id"].tolist())
        every = next(each for each in plan.groups if each.maker == group.maker)
        return [asked.get(line.lane, line) for line in every.lines if line.lane in lanes]

    def _stage(self, found: RecoveredEnv, lanes: int, resets: Resets) -> _OpenStage:
        return _OpenStage(
            lambda: Stage(made(found, lanes, resets), options_for(found, None, resets))
        )

    def _round(
        self,
        stage: Stage,
        group: Group,
        lines: list[tuple[int, Line]],
        tell: Callable[[], None],
        calls: Sequence[Call] | None = None,
    ) -> None:
        """Replay lines after a reset.

        ``calls`` has the calls of lines with their own seeds. None reads them from the run's entry.
        """
        entry = self._history.makers[group.maker].entry
        lanes = [
            Lane(
                column,
                line.lane,
                line.trajectories,
                bool(group.doubt),
                group.first_too,
                tuple(calls_of(entry, line.lane) if calls is None else calls),
            )
            for column, line in lines
        ]
        round = Round(stage, self._rows, lanes, self._comparison, self._film)
        self._made.update((*round.keys, *stage.actions))
        for _ in round.blocks():
            tell()
        for id in round.doubtful:
            self._plan.refused[id] = group.doubt
        for id, before in round.unreached.items():
            self._plan.refused[id] = (
                f"the lane ended trajectory {before} at another step than in the stored rows, so "
                "the lane continues from another state"
            )
        self._compared |= round.compared

    # --- the result -------------------------------------------------------------------------------

    def report(self, path: str, seconds: float) -> ReplayReport:
        """Return the report."""
        found, by_reason = self._comparison, defaultdict[str, list[int]](list)
        for id, why in sorted(self._plan.refused.items()):
            if id not in found.first:
                by_reason[why].append(id)
        rest = [
            format_key(column.key)
            for column in self._storage.schema.columns
            if column.key not in self._made and column.key[0] != COLLECTOR
        ]
        return ReplayReport(
            path=path,
            equal=len(self._compared - found.first.keys()),
            rows=found.rows,
            atol=float(found.atol),
            largest=found.columns,
            differing=found.differing,
            differences=tuple(found.first[id] for id in sorted(found.first)),
            not_replayed={why: tuple(ids) for why, ids in by_reason.items()},
            left_out=self._left_out,
            versions=self._versions,
            not_compared=tuple(rest),
            excluded=tuple(excluded_by(self._storage.runs)),
            notes=tuple(self._notes),
            trajectories=len(self._history.table),
            frames=0 if self._film is None else self._film.frames,
            seconds=seconds,
        )


class _OpenStage:
    """Context manager that makes a stage and closes it."""

    def __init__(self, make: Callable[[], Stage]) -> None:
        self._make = make

    def __enter__(self) -> Stage:
        self._stage = self._make()
        return self._stage

    def __exit__(self, *_: object) -> None:
        self._stage.close()
