"""Detector of environments that return the next start as the final observation. Pure.

An environment that resets itself inside the step at which an episode ends, without reporting it,
returns the first observation of the next episode in place of the final one. Its rows reveal it: the
final observation equals, bit for bit, the first observation of the lane's next trajectory. Equality
alone is not proof. In a bandit all observations are equal, and a task may end where it began, or
where the next episode begins. The detector therefore counts:

- Finals that equal the first observation that follows in their lane. A final is the final
  observation of a trajectory. If fewer than 9 of 10 are equal, the environment does not reset
  itself.
- Telling ends, whose trajectory did not begin with the observation that follows the end. If fewer
  than 9 of 10 of their finals equal the observation that follows, the environment does not reset
  itself.
- The surprise of the telling ends. An end is a surprise if no earlier trajectory began with the
  observation that follows, or if a different observation followed the last trajectory with the same
  first observation. A surprise is worth the negative logarithm, in bits, of the frequency of the
  observation that follows. The first two ends of a lane do not count, because a lane may have its
  own start positions. A task that alternates between two docks, or returns home at every end, knows
  where the next episode begins. Only an environment that has reset itself knows a start that is
  drawn at random, so `BITS` of surprise are proof.
- Mid-trajectory observations that equal the first one of their own trajectory. If the surprise is
  not enough for proof, and fewer than 1 of 10 of these observations are equal, the environment may
  reset itself, which causes a warning.

The rows of some environments do not show whether the environment resets itself, for example if
episodes have one step or always begin in the same state. If a task's reset keeps the state, or
visits eight or more places in turn, its rows look like those of a self-reset. For such a task, the
user declares ``finals="kept"``.

Observations are compared by a `digest` of their bytes. Equal observations have equal digests, and
different ones have different digests except with a probability of about 1 in 2**60. Consequently,
NaN equals the same NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

import numpy as np

from tallyroll.storage.rows.row_words import batches, words
from tallyroll.storage.trajectories.lane_stretches import LaneOrder, lane_order

LEAST = 16
"""The minimum number of ends for a verdict, which also needs a quarter as many mid-trajectory
observations."""
PLACES = 5
"""The maximum number of rows that a verdict names."""
MOST_INNER = 1024
"""The maximum number of mid-trajectory observations to compare, or `LEAST` per lane if that is
more."""
BITS = 1.5 * LEAST
"""The bits of surprise that prove that an environment knew its next starts.

Chance produces as many in one of ``2 ** BITS`` runs."""
_FREE = 2
"""The number of first ends of every lane that do not count as surprises."""
_INNER_AN_END = 16
_INNER_A_LOOK = 256
_PATIENCE = 256
"""The number of ends, plus `LEAST` per lane, after which an undecided case is dropped."""

Columns = Sequence[tuple[Callable[[np.ndarray], np.ndarray], int]]
"""For each column of an observation, a function that returns rows [k], and the bytes of a row."""


class Verdict(Enum):
    """Judgement of whether an environment resets itself."""

    UNDECIDED = "undecided"
    FINE = "fine"
    KNOWN_START = "finals equal the first observation that follows, which may be known beforehand"
    SELF_RESET = "finals are the first observations of the next episode"


@dataclass(frozen=True, slots=True)
class ComparisonCounts:
    """Counts of the compared observations."""

    ends: int = 0
    equal: int = 0
    """Ends whose final observation equals the first one that follows in the lane."""
    telling: int = 0
    """Ends whose trajectory did not begin with the observation that follows."""
    telling_equal: int = 0
    inner: int = 0
    """Observations in mid-trajectory."""
    inner_equal: int = 0
    """Observations in mid-trajectory that equal the first one of their own trajectory."""
    bits: float = 0.0
    """The surprise of the telling ends that are equal."""


def judge(seen: ComparisonCounts, least: int = LEAST) -> Verdict:
    """Return the verdict that ``seen`` supports.

    The verdict is undecided until there are ``least`` ends and a quarter as many mid-trajectory
    observations.
    """
    if seen.ends < least:
        return Verdict.UNDECIDED
    if not _agree(seen):
        return Verdict.FINE
    if 4 * seen.inner < least:  # episodes of one step, as in a bandit, are inconclusive
        return Verdict.UNDECIDED
    if seen.bits >= BITS * least / LEAST:
        return Verdict.SELF_RESET
    if 10 * seen.inner_equal < seen.inner:
        return Verdict.KNOWN_START
    return Verdict.UNDECIDED if seen.telling else Verdict.FINE


def _agree(seen: ComparisonCounts) -> bool:
    """Return True if 9 of 10 finals equal the next start, both among all and among telling ends."""
    return 10 * seen.equal >= 9 * seen.ends and 10 * seen.telling_equal >= 9 * seen.telling


def surprise(lane: np.ndarray, own: np.ndarray, following: np.ndarray, told: np.ndarray) -> float:
    """Return the bits of surprise of the ends that ``told`` [n] marks.

    Args:
        lane: the lanes of the ends [n], in time order.
        own: digests [n] of the first observations of the trajectories that ended.
        following: digests [n] of the first observations that follow.
        told: a mask [n] of the telling ends whose final observation equals the one that follows.
    """
    _, which, counts = np.unique(following, return_inverse=True, return_counts=True)
    begun = np.stack([own, following], axis=1).reshape(-1)
    _, first = np.unique(begun, return_index=True)
    new = np.zeros(len(begun), np.bool_)
    new[first] = True
    order = np.argsort(own, kind="stable")
    alike = own[order][1:] == own[order][:-1]
    other = np.zeros(len(own), np.bool_)
    other[order[1:]] = alike & (following[order][1:] != following[order][:-1])
    bits = np.log2(len(own) / counts)[which]
    return float(bits[told & (new[1::2] | other) & (_earlier(lane) >= _FREE)].sum())


def _earlier(lane: np.ndarray) -> np.ndarray:
    """Return the number of earlier entries of the same lane for each entry of ``lane`` [n]."""
    order = np.argsort(lane, kind="stable")
    first = np.searchsorted(lane[order], lane[order])
    found = np.empty(len(lane), np.int64)
    found[order] = np.arange(len(lane)) - first
    return found


@dataclass(frozen=True, slots=True)
class Ends:
    """Rows to compare, with the rows of each lane in time order. Arrays are [n]."""

    lane: np.ndarray
    step: np.ndarray
    """The step of the row within its trajectory; 0 for the first."""
    ended: np.ndarray
    """True if the row is terminated or truncated, bool."""
    terminated: np.ndarray
    """True if the row is terminated, bool. The two kinds of ends are also judged separately,
    because an environment may reset itself at its own ends but not at time limits."""
    first: Columns
    """The observations at the beginning of the rows."""
    next: Columns
    """The next observations of the rows."""
    valid: np.ndarray | None = None
    """False if the row's next observation is known to be lost, bool; None: none is lost."""
    start: int = 0
    """The number of the first row."""


_TAIL = {
    "first": np.uint64,  # digest of the first observation of its trajectory
    "known": np.bool_,  # True if the first observation was seen
    "final": np.uint64,  # digest of its next observation, if ``ended``
    "ended": np.bool_,  # True for an end whose final observation will be compared
    "kind": np.int64,  # 1 if terminated, else 0
    "row": np.int64,
}
"""The values of a lane's last row that its next row is compared with."""
_Tails = dict[str, np.ndarray]


class SelfResets:
    """Detector that follows the rows of a run until its verdict on the environment is clear.

    Args:
        lanes: the number of lanes of the run.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.verdict = Verdict.UNDECIDED
        self.seen = ComparisonCounts()
        """The counts of the lane or kind of end that decided the verdict; otherwise, of all
        ends."""
        self.places: list[int] = []
        """Rows of the first ends whose final observation equals the first one that follows."""
        self._tails: _Tails = {name: np.zeros(lanes, dtype) for name, dtype in _TAIL.items()}
        """The values of the last row of every lane, [lanes] each."""
        self._counts = np.zeros((4, 2, lanes), np.int64)
        """Counts of ends, equal ones, telling ones, and telling equal ones: [4, kind, lane]."""
        self._ends = np.zeros((5, 0), np.uint64)
        """Every end whose trajectory has a known first observation, [5, ends]: the kind, the lane,
        the digests of that observation and of the one that follows, and 1 if the end is telling and
        equal."""
        self._inner = np.zeros((2, lanes), np.int64)
        """Counts of mid-trajectory observations and of equal ones: [2, lane]."""
        self._quota = _INNER_AN_END
        self._most = _PATIENCE + LEAST * lanes

    @property
    def decided(self) -> bool:
        """True if later rows cannot change the verdict and are ignored."""
        return self.verdict in (Verdict.FINE, Verdict.SELF_RESET)

    @property
    def undecided(self) -> bool:
        """True while mid-trajectory rows are compared as well."""
        return self._quota > 0

    @property
    def likely(self) -> bool:
        """True if at least 4 ends, still too few for a verdict, all agree on a self-reset."""
        seen = self.seen
        agree = seen.equal == seen.ends and seen.telling_equal == seen.telling >= 2
        undecided = self.verdict is Verdict.UNDECIDED
        told = judge(seen, least=4) in (Verdict.SELF_RESET, Verdict.KNOWN_START)
        return undecided and agree and told

    def look(self, rows: Ends) -> None:
        """Compare ``rows``, which follow the rows of the previous call.

        A lane that the run does not have is a sign of damage and stops the comparison.
        """
        if self.decided or not len(rows.lane):
            return
        if rows.lane.min() < 0 or rows.lane.max() >= self.lanes:
            self.verdict = Verdict.FINE
            return
        begins = rows.step == 0
        if begins.any() or rows.ended.any():
            self._follow(rows, begins)
            self._judge()
        elif self._quota > 0:  # mid-trajectory rows, whose first observations are in the tails
            inner = np.flatnonzero(self._tails["known"][rows.lane])
            self._compare_inner(rows, inner, self._tails["first"][rows.lane[inner]])

    def forget(self, lanes: np.ndarray) -> None:
        """Drop the last rows of ``lanes``, bool [lanes], because the next rows are missing."""
        for name in ("ended", "known"):
            self._tails[name][lanes] = False

    def _compare_inner(self, rows: Ends, which: np.ndarray, own: np.ndarray) -> None:
        """Compare rows [k] with the first observation of their trajectory, ``own``."""
        most = min(self._quota, _INNER_A_LOOK)
        if most <= 0:
            return
        if len(which) > most:
            some = np.arange(most) * len(which) // most
            which, own = which[some], own[some]
        lanes, equal = rows.lane[which], digests(rows.next, which) == own
        self._quota -= len(which)
        self._inner[0] += np.bincount(lanes, minlength=self.lanes)
        self._inner[1] += np.bincount(lanes[equal], minlength=self.lanes)

    def _follow(self, rows: Ends, begins: np.ndarray) -> None:
        order, tails = lane_order(rows.lane), self._tails
        compares = self._quota > 0
        if not compares:  # leave out mid-trajectory rows
            order = _around_ends(order, rows.ended, begins)
        at = order.at
        ended, begun, follows = rows.ended[at], np.flatnonzero(begins[at]), ~begins[at]
        compared = ended if rows.valid is None else ended & rows.valid[at]
        finals = np.flatnonzero(compared)
        here, final = np.zeros(len(at), np.uint64), np.zeros(len(at), np.uint64)
        here[begun], final[finals] = digests(rows.first, at[begun]), digests(rows.next, at[finals])
        now = {
            "first": order.since(follows, here, tails["first"]),
            "known": order.since(follows, ~follows, tails["known"]),
            "final": final,
            "ended": compared,
            "kind": rows.terminated[at].astype(np.int64),
            "row": rows.start + at,
        }
        behind = begun[order.before(compared, tails["ended"])[begun]]
        if len(behind):
            before = {name: order.before(now[name], tails[name])[behind] for name in now}
            self._count_ends(order.lane[behind], before, here[behind])
        if compares:
            inner = np.flatnonzero(now["known"] & ~ended)
            self._compare_inner(rows, at[inner], now["first"][inner])
        own, last = order.own, order.last
        for name, values in now.items():
            tails[name][own] = values[last]

    def _count_ends(self, lane: np.ndarray, ends: _Tails, following: np.ndarray) -> None:
        """Compare ends in ``lane`` [k] with the first observations that follow them."""
        equal = ends["final"] == following
        telling = ends["known"] & (ends["first"] != following)
        flat = ends["kind"] * self.lanes + lane
        for counts, which in zip(
            self._counts, (slice(None), equal, telling, telling & equal), strict=True
        ):
            counts += np.bincount(flat[which], minlength=2 * self.lanes).reshape(2, self.lanes)
        told = (ends["kind"], lane, ends["first"], following, telling & equal)
        seen = np.stack([each.astype(np.uint64) for each in told])[:, ends["known"]]
        self._ends = np.concatenate([self._ends, seen], axis=1)
        self._quota = min(
            self._quota + _INNER_AN_END * len(lane),
            max(MOST_INNER, LEAST * self.lanes) - int(self._inner[0].sum()),
        )
        if len(self.places) < PLACES:
            self.places += ends["row"][equal][: PLACES - len(self.places)].tolist()

    def _judge(self) -> None:
        of_lanes, inner = self._counts.sum(axis=1), self._inner
        every = self._counts_of(of_lanes.sum(axis=1), inner.sum(axis=1))
        verdict, self.seen = judge(every), every
        if verdict is not Verdict.FINE:
            left_alone = every.ends >= self._most and verdict is not Verdict.SELF_RESET
            self.verdict = Verdict.FINE if left_alone else verdict
            return
        # Environments, and kinds of ends, may differ: one lane of many may reset itself, or every
        # end except those of a time limit.
        open_questions = bool((of_lanes[0] == 0).any())
        suspects = [
            self._counts_of(self._counts[:, kind].sum(axis=1), inner.sum(axis=1), 0, kind)
            for kind in (0, 1)
        ]
        for lane in np.flatnonzero(
            (10 * of_lanes[1] >= 9 * of_lanes[0]) & (of_lanes[0] > 0)
        ).tolist():
            suspects.append(self._counts_of(of_lanes[:, lane], inner[:, lane], 1, lane))
        for suspect in suspects:
            if not suspect.ends:
                continue
            verdict = judge(suspect)
            if verdict is Verdict.SELF_RESET:
                self.verdict, self.seen = verdict, suspect
                return
            open_questions |= verdict in (Verdict.UNDECIDED, Verdict.KNOWN_START) and (
                10 * suspect.equal >= 9 * suspect.ends
            )
        if not open_questions or every.ends >= self._most:
            self.verdict = Verdict.FINE

    def _counts_of(
        self, ends: np.ndarray, inner: np.ndarray, row: int = 0, value: int | None = None
    ) -> ComparisonCounts:
        """Return the counts and the surprise of ends.

        ``ends`` and ``inner`` are the counts. The surprise is that of all ends or, if ``value`` is
        given, of the ends with this value in row ``row`` of `_ends`.
        """
        seen = ComparisonCounts(*map(int, (*ends, *inner)))
        if not seen.telling or not _agree(seen):
            return seen
        chosen = self._ends
        if value is not None:
            chosen = chosen[:, chosen[row] == np.uint64(value)]
        return replace(seen, bits=surprise(chosen[1], chosen[2], chosen[3], chosen[4] > 0))


def _around_ends(order: LaneOrder, ended: np.ndarray, begins: np.ndarray) -> LaneOrder:
    """Return the rows of ``order`` that are needed to compare ends.

    These are the rows that begin or end a trajectory, the last row of each lane, and the row before
    each beginning.
    """
    begun = begins[order.at]
    kept = begun | ended[order.at]
    kept[:-1] |= begun[1:]
    kept[order.last] = True
    return LaneOrder.of(order.at[kept], order.lane[kept])


@lru_cache(maxsize=64)
def _factors(count: int) -> np.ndarray:
    factors = np.random.default_rng(count).integers(0, 2**64, count, np.uint64) | np.uint64(1)
    factors.setflags(write=False)
    return factors


def digests(columns: Columns, rows: np.ndarray) -> np.ndarray:
    """Return digests, uint64 [k], of ``rows``, intp [k], over all ``columns`` in order.

    Large rows are processed in small batches.
    """
    if not len(rows):
        return np.zeros(0, np.uint64)
    found, *others = [
        np.concatenate([digest(take(rows[part])) for part in batches(len(rows), row_nbytes)])
        for take, row_nbytes in columns
    ]
    for each in others:
        found = (found ^ (found >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93) + each
    return found


def digest(rows: np.ndarray) -> np.ndarray:
    """Return digests uint64 [n] of the bytes of C-contiguous ``rows`` [n, ...]."""
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    mixed = words(rows).astype(np.uint64)
    # A plain sum would miss bits that change together, such as two signs.
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    found: np.ndarray = mixed @ _factors(mixed.shape[1])
    return found
