"""Detect environments that reset themselves and return the next first observation as final. Pure.

An environment that resets itself inside the step at which an episode ends, without saying so,
returns the first observation of the next episode where the final one belongs. Its rows show it:
the final observation is bit for bit the observation with which the lane's next trajectory begins.
That alone is no proof. In a bandit all observations are equal, and a task may end where it began.
So three comparisons are counted:

- finals that equal the first observation that follows them in their lane;
- of these ends the telling ones, whose trajectory began with another observation than the one
  that follows: only a self-reset knows beforehand with which observation that will be;
- observations in mid-trajectory that equal the first one of their own trajectory.

An observation is compared as one number, a `digest` of its bytes: equal observations have equal
digests, and different ones differ but for one chance in about 2**60. So NaN equals the same NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

import numpy as np

from tallyroll.storage.trajectories.by_lane import lane_order
from tallyroll.storage.verification.value_checks import BATCH_NBYTES, batches, words

__all__ = ["Ends", "Seen", "SelfResets", "Verdict", "digest", "digests", "joined", "judge"]

LEAST = 16
"""Ends, and four times the observations in mid-trajectory, before anything is said."""
MOST_INNER = 1024
"""Observations in mid-trajectory that are compared in all, or `LEAST` a lane where that is more."""
_INNER_AN_END = 16
_INNER_A_LOOK = 256
_PLACES = 5
_PATIENCE = 256
"""Ends after which, with `LEAST` more a lane, what is still undecided is left alone."""

Digests = Callable[[np.ndarray], np.ndarray]
"""Digests uint64 [k] of observations, of rows intp [k]."""


class Verdict(Enum):
    """The judgement of the rows."""

    UNDECIDED = "undecided"
    FINE = "fine"
    SAME_START = "finals equal the first observation that follows, and every trajectory's own"
    SELF_RESET = "finals are the first observations of the next episode"


@dataclass(frozen=True, slots=True)
class Seen:
    """Counts of what was compared."""

    ends: int = 0
    equal: int = 0
    """Of these, the final observation equals the first one that follows in the lane."""
    telling: int = 0
    """Of the ends, the trajectory began with another observation than the one that follows."""
    telling_equal: int = 0
    inner: int = 0
    """Observations in mid-trajectory."""
    inner_equal: int = 0
    """Of these, equal to the first observation of their own trajectory."""


def judge(seen: Seen, least: int = LEAST) -> Verdict:
    """Say what ``seen`` shows, once it holds ``least`` ends and a quarter as many inner ones."""
    if seen.ends < least:
        return Verdict.UNDECIDED
    if 10 * seen.equal < 9 * seen.ends:
        return Verdict.FINE
    if 4 * seen.inner < least:  # episodes of one step, as a bandit's: so may anything look
        return Verdict.UNDECIDED
    if 10 * seen.inner_equal >= seen.inner:
        return Verdict.FINE
    if not seen.telling:
        return Verdict.SAME_START
    return Verdict.SELF_RESET if 10 * seen.telling_equal >= 9 * seen.telling else Verdict.FINE


@dataclass(frozen=True, slots=True)
class Ends:
    """Rows, each lane's in the order of time, whatever lies between them. Arrays are [n]."""

    lane: np.ndarray
    step: np.ndarray
    """Of the row within its trajectory; 0 where one begins."""
    ended: np.ndarray
    """bool, terminated or truncated."""
    terminated: np.ndarray
    """bool. Ends of both kinds are judged apart, too: a time limit around an environment is kept
    by one that does not reset itself then."""
    first: Digests
    """Of the observations that rows begin with."""
    next: Digests
    """Of their next observations."""
    valid: np.ndarray | None = None
    """bool, the row's next observation is not known to be lost; None: none is."""
    start: int = 0
    """Number of the first row."""


@dataclass(slots=True)
class _Tails:
    """The last row of every lane, each [lanes]."""

    first: np.ndarray
    """Digest of the first observation of its trajectory."""
    known: np.ndarray
    """That one was seen."""
    final: np.ndarray
    """Digest of its next observation, where ``ended``."""
    ended: np.ndarray
    """It is an end whose final observation is compared with what follows."""
    kind: np.ndarray
    """1 where terminated, else 0."""
    row: np.ndarray

    @classmethod
    def none(cls, lanes: int) -> _Tails:
        digests, flags = np.zeros(lanes, np.uint64), np.zeros(lanes, np.bool_)
        numbers = np.zeros(lanes, np.int64)
        return cls(digests, flags, digests.copy(), flags.copy(), numbers, numbers.copy())


@dataclass(slots=True)
class SelfResets:
    """Follow the rows of a run until it is decided whether its environment resets itself.

    Args:
        lanes: how many the run has.
    """

    lanes: int
    verdict: Verdict = Verdict.UNDECIDED
    seen: Seen = field(default_factory=Seen)
    """Of the lanes, or of the kind of end, that the verdict is about; else of all."""
    places: list[int] = field(default_factory=list)
    """Numbers of the first few ends whose final observation is the first one that follows."""
    _tails: _Tails = field(init=False)
    _counts: np.ndarray = field(init=False)
    """Ends, equal ones, telling ones, telling equal ones: [4, kind, lane]."""
    _inner: np.ndarray = field(init=False)
    """Observations in mid-trajectory and equal ones: [2, lane]."""
    _quota: int = _INNER_AN_END

    def __post_init__(self) -> None:
        self._tails = _Tails.none(self.lanes)
        self._counts = np.zeros((4, 2, self.lanes), np.int64)
        self._inner = np.zeros((2, self.lanes), np.int64)

    @property
    def decided(self) -> bool:
        """Nothing that comes can change the verdict, and nothing more is looked at."""
        return self.verdict in (Verdict.FINE, Verdict.SELF_RESET)

    @property
    def likely(self) -> Verdict:
        """The judgement of few ends, at least 4, that all agree."""
        seen = self.seen
        agree = seen.equal == seen.ends and seen.telling_equal == seen.telling
        if self.verdict is not Verdict.UNDECIDED or not agree or seen.telling < 2:
            return Verdict.UNDECIDED
        return judge(seen, least=4)

    def look(self, rows: Ends) -> None:
        """Compare ``rows``, which follow those of the call before.

        Rows of lanes that the run does not have are damage, and end the comparison.
        """
        if self.decided or not len(rows.lane):
            return
        if rows.lane.min() < 0 or rows.lane.max() >= self.lanes:
            self.verdict = Verdict.FINE
            return
        begins = rows.step == 0
        if not (begins.any() or rows.ended.any()):
            self._look_between(rows)
            return
        self._follow(rows, begins)
        self._judge()

    def forget(self, lanes: np.ndarray) -> None:
        """Rows of ``lanes``, bool [lanes], are missing from here on."""
        self._tails.ended[lanes] = self._tails.known[lanes] = False

    def _look_between(self, rows: Ends) -> None:
        """Rows in mid-trajectory alone: their lanes' first observations are those known."""
        if self._quota <= 0:
            return
        which = np.flatnonzero(self._tails.known[rows.lane])
        self._compare_inner(rows, which, rows.lane, self._tails.first.take(rows.lane))

    def _compare_inner(
        self, rows: Ends, which: np.ndarray, lane: np.ndarray, own: np.ndarray,
        at: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Compare the entries ``which`` with the first observation of their trajectory, ``own``."""
        most = min(self._quota, _INNER_A_LOOK)
        if most <= 0 or not len(which):
            return
        if len(which) > most:
            which = which[np.arange(most) * len(which) // most]
        found = rows.next(which if at is None else at[which]) == own[which]
        lanes = lane[which]
        self._quota -= len(which)
        self._inner[0] += np.bincount(lanes, minlength=self.lanes)
        self._inner[1] += np.bincount(lanes[found], minlength=self.lanes)

    def _follow(self, rows: Ends, begins: np.ndarray) -> None:
        order, tails = lane_order(rows.lane), self._tails
        at = order.at
        ended = rows.ended[at]
        compared = ended if rows.valid is None else ended & rows.valid[at]
        begun = np.flatnonzero(begins[at])
        here, final = np.zeros(len(at), np.uint64), np.zeros(len(at), np.uint64)
        if len(begun):
            here[begun] = rows.first(at[begun])
        if len(finals := np.flatnonzero(compared)):
            final[finals] = rows.next(at[finals])
        follows = ~begins[at]
        own = order.since(follows, here, tails.first)
        known = order.since(follows, ~follows, tails.known)
        kind = rows.terminated[at].astype(np.int64)
        number = rows.start + at
        behind = begun[order.before(compared, tails.ended)[begun]]
        if len(behind):
            self._count_ends(
                order.lane[behind],
                order.before(kind, tails.kind)[behind],
                order.before(final, tails.final)[behind] == here[behind],
                order.before(known, tails.known)[behind]
                & (order.before(own, tails.first)[behind] != here[behind]),
                order.before(number, tails.row)[behind],
            )
        self._compare_inner(rows, np.flatnonzero(known & ~ended), order.lane, own, at)
        last, lanes = order.last, order.own
        for values, kept in (
            (own, tails.first), (known, tails.known), (final, tails.final),
            (compared, tails.ended), (kind, tails.kind), (number, tails.row),
        ):  # fmt: skip
            kept[lanes] = values[last]

    def _count_ends(
        self, lane: np.ndarray, kind: np.ndarray, equal: np.ndarray, telling: np.ndarray,
        row: np.ndarray,
    ) -> None:  # fmt: skip
        flat = kind * self.lanes + lane
        for counts, which in zip(
            self._counts, (slice(None), equal, telling, telling & equal), strict=True
        ):
            counts += np.bincount(flat[which], minlength=2 * self.lanes).reshape(2, self.lanes)
        self._quota = min(
            self._quota + _INNER_AN_END * len(lane),
            max(MOST_INNER, LEAST * self.lanes) - int(self._inner[0].sum()),
        )
        if len(self.places) < _PLACES:
            self.places += row[equal].tolist()[: _PLACES - len(self.places)]

    def _judge(self) -> None:
        of_lanes, inner = self._counts.sum(axis=1), self._inner
        every = _seen(of_lanes.sum(axis=1), inner.sum(axis=1))
        verdict, self.seen = judge(every), every
        if verdict is not Verdict.FINE:
            if verdict is not Verdict.UNDECIDED or every.ends >= self._most:
                self.verdict = verdict
            if every.ends >= self._most and verdict is not Verdict.SELF_RESET:
                self.verdict = Verdict.FINE
            return
        # Environments, and kinds of ends, may differ: one lane in many, or every end but those
        # of a time limit.
        open_questions = bool((of_lanes[0] == 0).any())
        suspects = [_seen(self._counts[:, kind].sum(axis=1), inner.sum(axis=1)) for kind in (0, 1)]
        for lane in np.flatnonzero((10 * of_lanes[1] >= 9 * of_lanes[0]) & (of_lanes[0] > 0)):
            suspects.append(_seen(of_lanes[:, lane], inner[:, lane]))
        for suspect in suspects:
            if not suspect.ends:
                continue
            verdict = judge(suspect)
            if verdict is Verdict.SELF_RESET:
                self.verdict, self.seen = verdict, suspect
                return
            open_questions |= (
                verdict is Verdict.UNDECIDED and 10 * suspect.equal >= 9 * suspect.ends
            )
        if not open_questions or every.ends >= self._most:
            self.verdict = Verdict.FINE

    @property
    def _most(self) -> int:
        return _PATIENCE + LEAST * self.lanes


def _seen(ends: np.ndarray, inner: np.ndarray) -> Seen:
    return Seen(*map(int, (*ends, *inner)))


@lru_cache(maxsize=64)
def _factors(count: int) -> np.ndarray:
    factors = np.random.default_rng(count).integers(0, 2**64, count, np.uint64) | np.uint64(1)
    factors.setflags(write=False)
    return factors


def digests(
    take: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, row_nbytes: int
) -> np.ndarray:
    """Digests uint64 [k] of ``rows`` intp [k] of a column, of which ``take`` gives some.

    Large rows are taken few at a time.
    """
    if len(rows) * row_nbytes <= BATCH_NBYTES:
        return digest(take(rows))
    parts = batches(len(rows), row_nbytes)
    return np.concatenate([digest(take(rows[part])) for part in parts])


def digest(rows: np.ndarray) -> np.ndarray:
    """Digests uint64 [n] of the bytes of C-contiguous ``rows`` [n, ...]."""
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    mixed = words(rows).astype(np.uint64)
    # A sum alone would miss bits that change together, such as two signs.
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    found: np.ndarray = mixed @ _factors(mixed.shape[1])
    return found


def joined(digests: list[np.ndarray]) -> np.ndarray:
    """One digest uint64 [n] for what several [n] stand for, in their order."""
    whole = digests[0]
    for each in digests[1:]:
        whole = (whole ^ (whole >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93) + each
    return whole
