"""Compare the rows of one lane with its journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from random_configurations import DECLARED, Configuration
from random_herds import HerdRows
from random_lanes import Event
from random_resets import faults_of_resets
from random_spaces import Array, Key

MOST = 8


@dataclass(frozen=True)
class Made:
    """A transition in a journal."""

    event: int
    before: Event
    after: Event
    start: bool
    """True for the first row after a reset."""
    step: int
    """Number of steps since that reset."""
    episode: int
    """Number of resets before that one."""
    given: tuple[int | None, dict[str, Any]] | None
    """Seed and options of that reset."""


@dataclass
class Rows:
    """Stored or yielded rows, lane by lane within each batch, as arrays."""

    columns: dict[Key, Array]
    batch: Array

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, key: Key) -> Array:
        return self.columns[key]

    def take(self, at: Array) -> Rows:
        """Return some of the rows."""
        return Rows({key: column[at] for key, column in self.columns.items()}, self.batch[at])


@dataclass
class Verdict:
    """A list of faults, without duplicates and of limited length."""

    found: list[str] = field(default_factory=list)

    def __call__(self, right: Any, what: str) -> bool:
        """Record ``what`` as a fault unless ``right`` is true."""
        if not right and len(self.found) < MOST and what not in self.found:
            self.found.append(what)
        return bool(right)

    def rows(self, right: Array, rows: Rows, what: str) -> None:
        """Record a fault at the first row that is not right."""
        wrong = np.flatnonzero(~np.asarray(right, np.bool_))
        if len(wrong):
            at = {name: int(rows["collector", name][wrong[0]]) for name in ("lane", "step")}
            self(False, f"{what}: {len(wrong)} of {len(right)} rows, first row {wrong[0]}, {at}")


def made_by(events: list[Event]) -> Iterator[Made]:
    before: Event | None = None
    start, step, episode, given = True, 0, -1, None
    for number, event in enumerate(events):
        if event.action is None:
            start, step, episode, given = True, 0, episode + 1, event.given
        else:
            assert before is not None
            yield Made(number, before, event, start, step, episode, given)
            start, step = False, step + 1
        before = event


def _plain(column: Array, wanted: Array) -> Array:
    """Convert one-hot columns to numbers, and drop the axis that TorchRL's wrapper adds."""
    if column.shape == (*wanted.shape, 1) and wanted.ndim == 1:
        return column[:, 0]
    if column.shape[1:] != wanted.shape[1:] and column.ndim == wanted.ndim + 1:
        return column.argmax(-1)
    return column


def equal(column: Array, wanted: Array) -> Array:
    """Return whether rows are equal bit for bit, ``[row]``, after a cast to the column's dtype."""
    column = _plain(column, wanted)
    if column.shape != wanted.shape:
        return np.zeros(len(column), np.bool_)
    with np.errstate(all="ignore"):
        wanted = wanted.astype(column.dtype)
    nan = (column != column) & (wanted != wanted)
    same = ((column == wanted) | nan).reshape(len(column), -1).all(-1)
    return np.asarray(same)


def may_skip(config: Configuration) -> bool:
    """Return whether transitions between stored ones may have been discarded."""
    return config.surplus == "discard" or config.phase == "seed"


def compare_lane(
    config: Configuration, rows: Rows, made: list[Made], verdict: Verdict, lane: int
) -> list[int]:
    """Compare the rows of one lane with a journal. Return the index of each row's transition."""
    where = _align(config, rows, made, verdict, lane)
    if len(where) < len(rows):
        rows = rows.take(np.arange(len(where)))
    own = [made[at] for at in where]
    if not own:
        return where
    valid = rows.columns.get(("collector", "next_valid"), np.ones(len(rows), np.bool_))
    ended = np.array([ends_of(config, each)[2] for each in own])
    kind = config.env.lane
    herd = _herd(config, own, lane) if kind.joins else None
    for key in own[0].after.obs:
        before = np.stack([each.before.obs[key] for each in own])
        after = np.stack([each.after.obs[key] for each in own])
        if herd is not None:
            before = before * herd.seen_before[..., None]
            after = after * herd.seen_after[..., None]
        column = config.column(key)
        verdict.rows(equal(rows[column], before), rows, f"{column} is not what was returned")
        right = equal(rows["next", *column], after) | ~valid
        verdict.rows(right | ended, rows, f"next {column} in mid-trajectory is another")
        if not _may_lose_finals(config, rows, ended, valid):
            verdict.rows(right, rows, f"next {column} at an end is not the final one")
    action = np.stack([np.asarray(each.after.action) for each in own])
    column = rows[config.own_column("action")]
    if herd is not None:
        column = column * herd.before  # actions of absent agents are ignored
    verdict.rows(equal(column, action), rows, "another action")
    reward = np.array([each.after.reward for each in own])[:, None]
    if kind.agents:
        reward = reward * np.arange(1, kind.agents + 1)
        reward = (reward if herd is None else reward * herd.before)[..., None]
    column = rows["next", *config.own_column("reward")]
    verdict.rows(equal(column, reward), rows, "another reward")
    flags = np.array([ends_of(config, each) for each in own])
    for number, name in enumerate(("terminated", "truncated", "done")):
        verdict.rows(equal(rows["next", name], flags[:, number : number + 1]), rows, name)
    if herd is not None:
        _agents(rows, herd, flags, verdict)
    if config.info_keys:
        _infos(config, rows, own, verdict)
    if config.resets:
        for fault in faults_of_resets(config.resets, rows.columns, [each.given for each in own]):
            verdict(False, fault)
    _numbers(rows, where, own, lane, verdict)
    _valid(config, rows, ended, valid, verdict)
    return where


def _herd(config: Configuration, own: list[Made], lane: int) -> HerdRows:
    steps = [(each.episode, each.step, ends_of(config, each)[2]) for each in own]
    return HerdRows(config.env.lane.agents, lane, steps)


def _agents(rows: Rows, herd: HerdRows, flags: Array, verdict: Verdict) -> None:
    """Check masks and flags of agents that join and leave."""
    for key, wanted in (
        (("agents", "mask"), herd.before),
        (("next", "agents", "mask"), herd.after),
    ):
        verdict.rows((rows[key] == wanted).all(-1), rows, f"{key} is not who lives")
    for name, wanted in herd.flags(flags[:, 0], flags[:, 1]).items():
        got = rows["next", "agents", name][..., 0]
        verdict.rows((got == wanted).all(-1), rows, f"{name} of the agents")


def ends_of(config: Configuration, made: Made) -> tuple[bool, bool, bool]:
    limit = config.max_frames_per_traj
    late = limit is not None and made.step >= limit - 1
    terminated, truncated = bool(made.after.terminated), bool(made.after.truncated) or late
    return terminated, truncated, terminated or truncated


def _align(
    config: Configuration, rows: Rows, made: list[Made], verdict: Verdict, lane: int
) -> list[int]:
    """Match each row with a transition: the one after the last match, unless some were skipped."""
    keys = [config.column(key) for key in (made[0].before.obs if made else ())]
    where: list[int] = []
    at = -1
    for row in range(len(rows)):
        at += 1
        if may_skip(config):
            while at < len(made) and not _looks_like(config, rows, row, made[at], keys, lane):
                at += 1
        if at >= len(made):
            verdict(False, f"row {row} of the lane was never made ({len(made)} transitions were)")
            break
        where.append(at)
    return where


def _looks_like(
    config: Configuration, rows: Rows, row: int, made: Made, keys: list[Key], lane: int
) -> bool:
    if config.env.lane.joins:
        (value,) = made.before.obs.values()
        seen = _herd(config, [made], lane).seen_before[0][:, None]
        return bool((rows[keys[0]][row] == value * seen).all())
    reward = float(rows["next", *config.own_column("reward")][row].reshape(-1)[0])
    if reward != np.float32(made.after.reward):
        return False
    return all(
        equal(rows[key][row][None], np.asarray(value)[None])[0]
        for key, value in zip(keys, made.before.obs.values(), strict=True)
    )


def _may_lose_finals(config: Configuration, rows: Rows, ended: Array, valid: Array) -> bool:
    """Return whether the environment loses final observations, and this is not detectable yet."""
    kind = config.env.lane
    return kind.self_reset != "" and not config.env.auto_reset and not config.loses_finals


def _valid(config: Configuration, rows: Rows, ended: Array, valid: Array, verdict: Verdict) -> None:
    """Check that final observations are marked as lost where they are, and nowhere else."""
    if config.env.auto_reset or config.loses_finals:
        verdict.rows(valid == ~ended, rows, "next_valid is not where final observations are lost")
    elif not config.env.lane.self_reset:
        verdict.rows(valid, rows, "next_valid is False where nothing was lost")


def _infos(config: Configuration, rows: Rows, own: list[Made], verdict: Verdict) -> None:
    for name in config.env.lane.infos:
        for key, events in (
            ((name,), [each.before for each in own]),
            (("next", name), [each.after for each in own]),
        ):
            column = rows[key]
            fill = DECLARED[name][2] if config.given_column(name) else 0
            right = [
                _holds(column[row], event.infos.get(name), fill) for row, event in enumerate(events)
            ]
            verdict.rows(np.array(right), rows, f"info {key} is another")
            if flag := config.given_column(name):
                given = rows[*key[:-1], *flag].reshape(-1)
                wanted = np.array([name in event.infos for event in events])
                verdict.rows(given == wanted, rows, f"{flag} is wrong")


def _holds(value: Array, wanted: Array | None, fill: float) -> bool:
    """Return whether the column has the info's value, in any dtype, or the fill value."""
    if wanted is None:
        return bool(np.all(value == fill))
    if np.shape(value) != wanted.shape:
        return False
    return bool(np.all(np.asarray(value, object) == wanted.astype(object)))


def _numbers(rows: Rows, where: list[int], own: list[Made], lane: int, verdict: Verdict) -> None:
    """Check that steps count from each start, and that each trajectory has one new, larger id."""
    step, ids = rows["collector", "step"], rows["collector", "traj_ids"]
    wanted = 0
    for row, each in enumerate(own):
        begins = row == 0 or each.start or where[row] != where[row - 1] + 1
        wanted = 0 if begins else wanted + 1
        if not verdict(step[row] == wanted, f"row {row}: step {step[row]}, not {wanted}"):
            return
        if row:
            grows = ids[row] > ids[row - 1] if begins else ids[row] == ids[row - 1]
            if not verdict(grows, f"row {row}: id {ids[row]} after {ids[row - 1]}"):
                return
