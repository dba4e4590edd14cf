"""The ranges of values that an environment declares, by column."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, TensorSpec
from torchrl.envs import EnvBase

from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import NEXT, Key, as_key
from tallyroll.storage.rows.transfers import HOST, move_columns

Fetch = Callable[[dict[Any, torch.Tensor]], dict[Any, torch.Tensor]]
"""Copies tensors to the host."""


@dataclass(frozen=True)
class Range:
    """Bounds of one column, broadcast against ``[time, lane, ...]``. NaN is outside all bounds.

    `SlotChecks`, and `are_inside` in ``native/_store.c``, apply the bounds to few slots. `extremes`
    and `allows` apply them to a column on a device.
    """

    key: Key
    low: NDArray[Any]
    high: NDArray[Any]
    by_policy: bool
    first_lane: int | None = None
    """Number of the first lane if the bounds are ``[lane, ...]``; None if all lanes share them."""

    def within(self, slab: Slab) -> "Range":
        """Return the range of the lanes of ``slab``."""
        if self.first_lane is None:
            return self
        at = slab.first_lane - self.first_lane
        if slab.lane is not None or not 0 <= at <= len(self.low) - slab.lanes:
            low, high = self.low.min(axis=0), self.high.max(axis=0)
            return Range(self.key, low, high, self.by_policy)
        low, high = (bound[at : at + slab.lanes] for bound in (self.low, self.high))
        return Range(self.key, low, high, self.by_policy, slab.first_lane)

    def of_lane(self, lane: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the bounds of a lane of the run."""
        if self.first_lane is None:
            return self.low, self.high
        return self.low[lane - self.first_lane], self.high[lane - self.first_lane]

    @property
    def has_noise(self) -> bool:
        """True for a continuous action, which exploration may drive beyond its bounds."""
        return self.by_policy and self.low.dtype.kind == "f"

    def numbers(self) -> "Range":
        """Return the range with each finite bound replaced by the lowest or highest finite number.

        A policy that explores beyond the bounds is checked against this range.
        """
        most = np.finfo(self.low.dtype).max
        low, high = (
            np.where(np.isfinite(b), s * most, b) for b, s in ((self.low, -1), (self.high, 1))
        )
        kind = self.low.dtype
        return Range(self.key, low.astype(kind), high.astype(kind), True, self.first_lane)

    def or_(self, other: "Range") -> "Range":
        """Return the smallest range that contains both ranges."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Range(self.key, low, high, self.by_policy)

    def repeated(self, lanes: int) -> "Range":
        """Return the range with separate bounds for each of ``lanes`` lanes."""
        if self.first_lane is not None:
            return self
        low, high = (np.repeat(bound[None], lanes, axis=0) for bound in (self.low, self.high))
        return Range(self.key, low, high, self.by_policy, 0)

    def joined(self, other: "Range") -> "Range":
        """Return the range of these lanes, followed by the lanes of ``other``."""
        shape = np.broadcast_shapes(self.low.shape[1:], other.low.shape[1:])
        pairs = (self.low, other.low), (self.high, other.high)
        low, high = (
            np.concatenate([np.broadcast_to(each, (len(each), *shape)) for each in pair])
            for pair in pairs
        )
        return Range(self.key, low, high, self.by_policy, self.first_lane)

    def bad(self, values: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Return a mask ``[time, lane]`` of values out of range, or None if all are in range."""
        if not values.size:
            return None
        if self.holds(values):
            return None
        if self.first_lane is None:
            low, high = _extremes(values)
            if np.all(low >= self.low) and np.all(high <= self.high):
                return None
        outside = ~((values >= self.low) & (values <= self.high))
        bad = np.asarray(outside.reshape(*outside.shape[:2], -1).any(axis=2))
        return None if self.first_lane is not None and not bad.any() else bad

    @cached_property
    def _within(self) -> tuple[Any, Any]:
        """The tightest bounds of all entries."""
        return self.low.max(), self.high.min()

    @cached_property
    def _bounded(self) -> tuple[bool, bool]:
        """Two flags: True to compare values with the upper bounds; with the lower bounds.

        At least one of them is True, because a comparison also finds a NaN.
        """
        low, high = self._within
        is_below = bool(high < np.inf)
        return is_below, not is_below or bool(low > -np.inf)

    def extremes(self, column: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the lowest and highest values of a column, "low" and "high", on its device.

        ``column`` is ``[time, lane, ...]``. Lanes or entries with separate bounds are reduced
        separately. If there is a NaN, both values are NaN. A value that cannot be out of range is
        left out.
        """
        over: tuple[int, ...] = (0,)
        if self.first_lane is None:
            shared = all((bound == bound.min()).all() for bound in (self.low, self.high))
            over = tuple(range(column.ndim)) if shared else (0, 1)
        is_below, is_above = self._bounded
        found = {"low": column.amin(over)} if is_above else {}
        return {**found, "high": column.amax(over)} if is_below else found

    def allows(self, extremes: Mapping[str, NDArray[Any]]) -> bool:
        """Return True if the results of :meth:`extremes` are in range."""
        low, high = extremes.get("low", self.low), extremes.get("high", self.high)
        return bool(np.all(low >= self.low) and np.all(high <= self.high))

    def holds(self, values: NDArray[Any]) -> bool:
        """Return True if all ``values`` satisfy the bounds of every entry (fast path).

        If False, all values may still be in range, because each entry can have separate bounds. The
        values are compared in chunks that fit in the CPU cache, so that the second pass is cheap.
        If a chunk has a NaN, both its minimum and its maximum are NaN, and the chunk is rejected.
        """
        low, high = self._within
        is_below, is_above = self._bounded
        count = max(1, _CACHED_NBYTES // max(1, values[0].nbytes))
        for at in range(0, len(values), count):
            some = values[at : at + count]
            if is_above and not some.min() >= low:
                return False
            if is_below and not some.max() <= high:
                return False
        return True


def ranges_to_check(
    ranges: Sequence[Range], slab: Slab, used: int, fetch: Fetch | None = None
) -> Sequence[Range]:
    """Return the ``ranges`` that values of the first ``used`` slots may violate.

    Columns on a device are reduced there, and ``fetch`` copies their extremes to the host together.
    If the columns are on the host, return all ``ranges``.
    """
    if slab.on_host:
        return ranges
    columns = [slab.columns.get(check.key) for check in ranges]
    extremes = {
        index: ranges[index].extremes(column[:used])
        for index, column in enumerate(columns)
        if column is not None and column.numel() and column.dtype not in SIGNED
    }
    fetch = partial(move_columns, device=HOST) if fetch is None else fetch
    found = fetch({(i, name): c for i in extremes for name, c in extremes[i].items()})
    good = {
        index
        for index, each in extremes.items()
        if ranges[index].allows({name: found[index, name].numpy() for name in each})
    }
    return [check for index, check in enumerate(ranges) if index not in good]


def values_of(slab: Slab, key: Key, start: int, stop: int) -> NDArray[Any]:
    """Return a column ``[time, lane, ...]`` from slot ``start`` to ``stop``."""
    if key in slab.flat:
        return slab.array(key)[start:stop]
    return np.asarray(slab.columns[key][start:stop].cpu().numpy())


def _extremes(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the minimum and maximum over time and lane; NaN if a value is NaN."""
    rows = values.reshape(-1, *values.shape[2:])
    # NumPy reduces wide rows many times faster than narrow rows, so fold 64 rows into one.
    whole = len(rows) - len(rows) % _FOLD
    folded = rows[:whole].reshape(-1, _FOLD, *rows.shape[1:])
    parts = [folded.min(axis=0), folded.max(axis=0)] if whole else []
    rest = np.concatenate([*parts, rows[whole:]])
    return rest.min(axis=0), rest.max(axis=0)


_FOLD = 64
_CACHED_NBYTES = 2**19


def ranges_of(env: EnvBase, *, policy: bool, lost_finals: bool, first_lane: int = 0) -> list[Range]:
    """Return the ranges that the specs of ``env`` declare for the columns of its slab.

    Args:
        env: an environment of batch size ``[]`` or ``[lanes]``.
        policy: True if actions come from a policy and are checked too.
        lost_finals: True if NaN marks lost final observations, so that it is not a violation.
        first_lane: the number of the first lane in the run.
    """
    found: list[Range] = []
    lead = len(env.batch_size)

    def add(key: Key, spec: TensorSpec, by_policy: bool) -> None:
        if lead == 1 and (own := _bounds_of_lanes(spec)) is not None:
            found.append(Range(key, *own, by_policy, first_lane))
        elif (bounds := _bounds(spec, lead)) is not None:
            found.append(Range(key, *bounds, by_policy))

    for name, spec in env.observation_spec.items(True, True):
        add(as_key(name), spec, False)
        if not lost_finals:
            add((NEXT, *as_key(name)), spec, False)
    for name, spec in env.full_reward_spec.items(True, True):
        add((NEXT, *as_key(name)), spec, False)
    for name, spec in env.full_action_spec.items(True, True) if policy else ():
        add(as_key(name), spec, True)
    return found


def _bounds_of_lanes(spec: TensorSpec) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return the bounds of each lane ``[lane, ...]``; None if all lanes have the same bounds."""
    if not isinstance(spec, Bounded) or type(spec) is Categorical or spec.dtype is torch.bfloat16:
        return None
    low, high = (bound.cpu().numpy() for bound in (spec.low, spec.high))
    if len(low) < 2 or ((low == low[:1]).all() and (high == high[:1]).all()):
        return None
    return low, high


def _bounds(spec: TensorSpec, lead: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return the bounds of a column, or None if every value is allowed."""
    if spec.dtype is torch.bfloat16 or spec.dtype.is_complex or spec.dtype is torch.bool:
        return None
    kind = torch.zeros(0, dtype=spec.dtype).numpy().dtype
    if type(spec) is Categorical:
        return np.asarray(0, kind), np.asarray(int(spec.n) - 1, kind)
    if type(spec) is MultiCategorical:
        top = spec.nvec.cpu().numpy().reshape(-1, spec.shape[-1])[0] - 1
        return np.zeros_like(top), top
    if isinstance(spec, Binary):
        return np.asarray(0, kind), np.asarray(1, kind)
    if isinstance(spec, Bounded):
        index = (0,) * lead
        low, high = (bound.cpu().numpy()[index] for bound in (spec.low, spec.high))
        if kind.kind in "iu":
            limits = np.iinfo(kind)
            if np.all(low <= limits.min) and np.all(high >= limits.max):
                return None
        return low, high
    if kind.kind == "f":
        return np.asarray(-np.inf, kind), np.asarray(np.inf, kind)
    return None
