"""Checks of values against the spaces that the environment declared, by whole columns."""

import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, TensorSpec
from torchrl.envs import EnvBase

from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import PolicyError, TransitionError, ValueRefused
from tallyroll.collector.options import Validate
from tallyroll.collector.policies.mask_rules import MaskRule
from tallyroll.collector.rollout.lanes import ended_in
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.kernel import KINDS, compiled, table_of
from tallyroll.storage.rows.keys import NEXT, RANDOM_VERSION, Key, as_key, spell


class OutOfRangeWarning(UserWarning):
    """A value is outside its declared space, and ``validate`` lets it pass."""


@dataclass(frozen=True)
class Violation:
    """The first value, in slot order, that is not as declared."""

    slot: int
    what: str
    check: "Range | MaskRule"
    can_pass: bool
    """True if ``validate`` decides whether it passes."""

    @property
    def error(self) -> Exception:
        """The exception to raise for the violation."""
        kind = PolicyError if self.check.by_policy else TransitionError
        lenient = '"noise", "warn"' if self.check.has_noise else '"warn"'
        way_out = f', or let it pass with validate {lenient} or "off"' if self.can_pass else ""
        return kind(f"{self.what}; correct it{way_out}")


@dataclass(frozen=True)
class Range:
    """Bounds of one column, broadcast against ``[time, lane, ...]``; NaN is outside any."""

    key: Key
    low: NDArray[Any]
    high: NDArray[Any]
    by_policy: bool

    @property
    def has_noise(self) -> bool:
        """True for a continuous action, which exploration may drive beyond its bounds."""
        return self.by_policy and self.low.dtype.kind == "f"

    def numbers(self) -> "Range":
        """Return the range of all numbers that a policy may give, however far it explores."""
        most = np.finfo(self.low.dtype).max
        low, high = (
            np.where(np.isfinite(b), s * most, b) for b, s in ((self.low, -1), (self.high, 1))
        )
        return Range(self.key, low.astype(self.low.dtype), high.astype(self.low.dtype), True)

    def or_(self, other: "Range") -> "Range":
        """The least range that holds both."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Range(self.key, low, high, self.by_policy)

    def bad(self, values: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Return marks ``[time, lane]`` of values outside, or None if all are inside."""
        if not values.size:
            return None
        if self.holds(values):
            return None
        low, high = _extremes(values)
        if np.all(low >= self.low) and np.all(high <= self.high):
            return None
        outside = ~((values >= self.low) & (values <= self.high))
        return np.asarray(outside.reshape(*outside.shape[:2], -1).any(axis=2))

    @cached_property
    def _within(self) -> tuple[Any, Any]:
        """The bounds that every entry has."""
        return self.low.max(), self.high.min()

    def holds(self, values: NDArray[Any]) -> bool:
        """Return whether all ``values`` are within bounds that all entries share; the fastest way.

        A NaN becomes lowest and highest. The second look at a piece finds it in the cache.
        """
        low, high = self._within
        is_below = high < np.inf
        is_above = not is_below or low > -np.inf
        count = max(1, _CACHED_NBYTES // max(1, values[0].nbytes))
        for at in range(0, len(values), count):
            some = values[at : at + count]
            if is_above and not some.min() >= low:
                return False
            if is_below and not some.max() <= high:
                return False
        return True


def _values(slab: Slab, key: Key, start: int, stop: int) -> NDArray[Any]:
    """A column ``[time, lane, ...]`` from slot ``start`` to ``stop``."""
    if key in slab.flat:
        return slab.array(key)[start:stop]
    return np.asarray(slab.columns[key][start:stop].cpu().numpy())


def _extremes(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Lowest and highest entry over time and lane; NaN where there is one."""
    rows = values.reshape(-1, *values.shape[2:])
    # NumPy reduces wide rows many times faster than narrow ones: fold 64 rows into one.
    whole = len(rows) - len(rows) % _FOLD
    folded = rows[:whole].reshape(-1, _FOLD, *rows.shape[1:])
    parts = [folded.min(axis=0), folded.max(axis=0)] if whole else []
    rest = np.concatenate([*parts, rows[whole:]])
    return rest.min(axis=0), rest.max(axis=0)


_FOLD = 64
_CACHED_NBYTES = 2**19
_SMALL_NBYTES = 2**16


class _SlotCheck:
    """A `Range` over the slots of a slab, with bounds as wide as a slot: nothing is broadcast."""

    __slots__ = ("_array", "_high", "_inside", "_low", "_size")

    def __init__(self, check: Range, slab: Slab) -> None:
        self._array = slab.array(check.key)
        slot, dtype = self._array.shape[1:], self._array.dtype
        self._low, self._high = (
            np.broadcast_to(bound, slot).astype(dtype, order="C")
            for bound in (check.low, check.high)
        )
        self._inside = np.zeros((2, *slot), np.bool_)
        self._size = self._inside.size

    @staticmethod
    def fits(check: Range, slab: Slab) -> bool:
        """Whether its slots are so small that this way is faster."""
        return check.key in slab.flat and slab.array(check.key)[:1].nbytes <= _SMALL_NBYTES

    @property
    def words(self) -> tuple[int, ...]:
        """The check, as the kernel takes it."""
        arrays = (self._array, self._low, self._high)
        values, low, high = (array.ctypes.data for array in arrays)
        return values, KINDS.get(self._array.dtype, -1), self._low.size, low, high

    def is_good(self, at: int) -> bool:
        """Return whether the values of slot ``at`` are inside."""
        values, inside = self._array[at], self._inside
        np.greater_equal(values, self._low, inside[0])
        np.less_equal(values, self._high, inside[1])
        return bool(np.count_nonzero(inside) == self._size)


class _SlotChecks:
    """The checks of all columns of a slab, slot by slot, where that is the faster way."""

    def __init__(self, ranges: Sequence[Range], slab: Slab) -> None:
        ranges = [each for each in ranges if each.key in slab.columns]
        self._kernel = compiled()
        self.fit = all(_SlotCheck.fits(each, slab) for each in ranges)
        self._checks = [_SlotCheck(each, slab) for each in ranges] if self.fit else []
        self.table = table_of(chain.from_iterable(check.words for check in self._checks))

    def are_good(self, used: int) -> bool:
        """Return whether all values of the first slots are inside; False also if not checked."""
        if not self.fit:
            return False
        if self._kernel is not None:
            return self._kernel.are_inside(self.table, used)
        return all(check.is_good(at) for check in self._checks for at in range(used))


class RangeChecks:
    """Checks of the columns of a slab against their declaration.

    Args:
        ranges: what is allowed; see :func:`ranges_of`.
        validate: see :data:`Validate`.
        masks: of legal actions.
        at_random: some actions are drawn, and keep to masks; what a policy does is its own affair.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        validate: Validate,
        masks: Sequence[MaskRule] = (),
        *,
        at_random: bool = False,
    ) -> None:
        self._validate = validate
        self._rules = masks
        self._masks = list(masks) if at_random and validate != "off" else []
        self._declared = [] if validate == "off" else list(ranges)
        self._ranges = _of_numbers(ranges) if validate == "off" else list(ranges)
        self._seen_before = _seen_before(self._ranges)
        self._slot_checks: dict[Slab, _SlotChecks] = {}
        self.eased = 0
        """Number of times that a violation was let pass from then on, which changed all tables."""
        self._fine: dict[Key, int] = {}
        """Columns of the block under way, and how many of its first slots are as declared."""

    def first_violation(self, slab: Slab, used: int, state: LaneState) -> Violation | None:
        """The earliest transition in the first ``used`` slots that is not as declared."""
        if not used:
            return None
        few = self._slot_checks.get(slab) or self._of_slots(slab)
        if used <= FEW_SLOTS and few.are_good(used):  # reset slots too
            looks = self.masks_of(slab, used) if self._masks else None
            if looks is None or looks():
                return None
        while True:
            # A wrong action explains what the environment made of it: it comes first of equals.
            found = self._violations(slab, used, state)
            first = min(found, key=lambda v: (v.slot, not v.check.by_policy), default=None)
            if first is None or not self._passes(first):
                return first
            warnings.warn(f"{first.what}; {_SAID_ONCE}", OutOfRangeWarning, stacklevel=5)

    def look(self, slab: Slab, keys: Container[Key], start: int, stop: int) -> None:
        """Look at columns of complete slots already, before :meth:`first_violation` is asked."""
        for check in self._ranges:
            key = check.key
            if key not in keys or (key in self._seen_before and key in slab.flowing):
                continue
            if self._fine.get(key, 0) == start and check.holds(_values(slab, key, start, stop)):
                self._fine[key] = stop

    def forget(self) -> None:
        """Take nothing that :meth:`look` saw for granted: its slots are to be written over."""
        self._fine.clear()

    def table(self, slab: Slab) -> bytes | None:
        """Return the table of checks for `Kernel.are_inside`; None if it cannot check ``slab``."""
        checks = self._of_slots(slab)
        return checks.table if checks.fit else None

    def masks_of(self, slab: Slab, used: int) -> Callable[[], bool] | None:
        """Return a quick check of the masks in the first ``used`` slots; None: none is checked.

        If it returns False, :meth:`first_violation` looks closer.
        """
        if not self._masks:
            return None
        if not all(rule.mask in slab.flat for rule in self._masks):
            return lambda: False
        narrow = {each.key for each in self._ranges if each.low.min() >= 0 and each.high.max() <= 1}
        looks = [
            rule.quick(slab.array(rule.mask)[:used], zeros_and_ones=rule.mask in narrow)
            for rule in self._masks
        ]
        return looks[0] if len(looks) == 1 else lambda: all(look() for look in looks)

    def _of_slots(self, slab: Slab) -> _SlotChecks:
        checks = self._slot_checks.get(slab)
        if checks is None:
            checks = self._slot_checks[slab] = _SlotChecks(self._ranges, slab)
        return checks

    def _passes(self, found: Violation) -> bool:
        """Return whether ``found`` and all violations like it are kept from here on."""
        if not found.can_pass or self._validate not in ("noise", "warn"):
            return False
        if self._validate == "warn":
            self._ranges, self._masks = _of_numbers(self._ranges), []
        elif found.check.has_noise:
            self._ranges = [
                each.numbers() if each is found.check else each for each in self._ranges
            ]
        else:
            return False
        self._slot_checks.clear()
        self._seen_before = _seen_before(self._ranges)
        self.eased += 1
        return True

    def bad_action(
        self,
        slab: Slab,
        slot: int,
        acting: NDArray[np.bool_],
        state: LaneState,
        *,
        acted: bool = True,
    ) -> Exception | None:
        """The fault of the actions in ``slot``, or of their masks, where a step of it raised.

        ``acting`` are the lanes ``[lane]`` whose action the environment would have executed; the
        slot has no actions yet unless ``acted``.
        """
        for check in self._declared if acted else ():
            if check.by_policy and slot < slab.slots and slab.columns[check.key].dtype.is_signed:
                bad = check.bad(_values(slab, check.key, slot, slot + 1))
                if bad is not None:
                    return _violation(check, slab, slot, int(np.argmax(bad[0])), state).error
        if slab.lane is not None:  # its actions are there before what their lanes saw
            return None
        faults = (_fault_of(rule, slab, slot, acting, state, acted=acted) for rule in self._rules)
        return next((each for each in faults if each is not None), None)

    @staticmethod
    def place(error: ValueRefused, slab: Slab, slot: int, state: LaneState) -> None:
        """Let ``error``, which a step raised in ``slot``, say the step of its trajectory.

        A worker may be slots ahead of what all have filled: then it is not known.
        """
        if error.lane is None or error.step is not None or slab.lane is not None:
            return
        if error.slot not in (None, slot):
            return
        error.step = _step_of(slab, slot, error.lane - slab.first_lane, state)

    def _violations(self, slab: Slab, used: int, state: LaneState) -> Iterator[Violation]:
        new: tuple[NDArray[np.intp], ...] | None = None
        for check in self._ranges:
            if check.key not in slab.columns:
                continue
            values, fine = _values(slab, check.key, 0, used), self._fine.get(check.key, 0)
            if fine and check.bad(values[fine:]) is None:
                continue
            if check.key in self._seen_before and check.key in slab.flowing:
                new = _new_in(slab, used) if new is None else new
                bad = _bad_at(check, values, new)
            else:
                bad = check.bad(values)
            if bad is not None and (bad := bad & slab.transitions[:used]).any():
                slot, lane = (int(index) for index in np.argwhere(bad)[0])
                yield _violation(check, slab, slot, lane, state)
        for rule in self._masks:
            drawn = slab.transitions[:used] & (slab.version[:used] == RANDOM_VERSION)
            wrong, wanted = rule.wrong(*_marks(rule, slab, 0, used))
            if (wrong := wrong & drawn).any():
                slot, lane = (int(index) for index in np.argwhere(wrong)[0])
                said = _bad_mask(rule, slab, slot, lane, state, wanted)
                yield Violation(slot, said, rule, can_pass=True)


_SAID_ONCE = (
    "it is kept as the environment got or made it, and so are others from here on, without a word"
)


def _seen_before(ranges: Sequence[Range]) -> set[Key]:
    """Return keys whose values were under "next" in the slot before, with the same range."""
    by_key = {each.key: each for each in ranges}
    return {
        key
        for key, each in by_key.items()
        if (twin := by_key.get((NEXT, *key))) is not None
        and np.array_equal(each.low, twin.low)
        and np.array_equal(each.high, twin.high)
    }


def _new_in(slab: Slab, used: int) -> tuple[NDArray[np.intp], ...]:
    """Return slots and lanes whose observation was not under "next" in the slot before.

    These are the first ones, those that a reset returned, and those that follow no transition.
    """
    new = np.ones((used, slab.lanes), np.bool_)
    new[1:] = ended_in(slab, 0, used - 1) | ~slab.transitions[: used - 1]
    return new.nonzero()


def _bad_at(
    check: Range, values: NDArray[Any], at: tuple[NDArray[np.intp], ...]
) -> NDArray[np.bool_] | None:
    """Return `Range.bad` of some slots and lanes; quicker if these are few."""
    if 2 * len(at[0]) > values.shape[0] * values.shape[1]:
        return check.bad(values)
    some = check.bad(values[at][None])
    if some is None:
        return None
    bad = np.zeros(values.shape[:2], np.bool_)
    bad[at] = some[0]
    return bad


def _of_numbers(ranges: Sequence[Range]) -> list[Range]:
    """Return the checks that remain if values may be outside: actions are numbers."""
    return [each.numbers() for each in ranges if each.has_noise]


def _violation(check: Range, slab: Slab, slot: int, lane: int, state: LaneState) -> Violation:
    value = _values(slab, check.key, slot, slot + 1)[0, lane]
    low, high = (np.broadcast_to(bound, value.shape) for bound in (check.low, check.high))
    at = tuple(np.argwhere(~((value >= low) & (value <= high)))[0])
    where = f" at {[int(index) for index in at]}" if at else ""
    what = "the action space" if check.by_policy else "its space"
    said = (
        f"{spell(check.key)} lies outside {what} at lane {slab.first_lane + lane}, step "
        f"{_step_of(slab, slot, lane, state)} of its trajectory: got {_exact(value[at])}{where}, "
        f"expected [{_exact(low[at])}, {_exact(high[at])}] and no NaN"
    )
    return Violation(slot, said, check, not check.has_noise or bool(np.isfinite(value[at])))


def _marks(
    rule: MaskRule, slab: Slab, start: int, stop: int
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The mask and, where agents have one, which of them act ``[time, lane, ...]``."""
    live = None if rule.live is None else _values(slab, rule.live, start, stop)
    return _values(slab, rule.mask, start, stop), live


def _bad_mask(
    rule: MaskRule, slab: Slab, slot: int, lane: int, state: LaneState, wanted: str
) -> str:
    marks = _values(slab, rule.mask, slot, slot + 1)[0, lane]
    return (
        f"{spell(rule.mask)}, as the environment made it at lane {slab.first_lane + lane}, step "
        f"{_step_of(slab, slot, lane, state)} of its trajectory: got {marks.tolist()!r:.200}, "
        f"expected {wanted}"
    )


def _fault_of(
    rule: MaskRule,
    slab: Slab,
    slot: int,
    acting: NDArray[np.bool_],
    state: LaneState,
    *,
    acted: bool,
) -> Exception | None:
    """Return the fault of a mask, or of an action that it forbids, in a slot that raised."""
    marks, live = _marks(rule, slab, slot, slot + 1)
    wrong, wanted = rule.wrong(marks, live)
    if (wrong := wrong[0] & acting).any():
        said = _bad_mask(rule, slab, slot, int(np.argmax(wrong)), state, wanted)
        return TransitionError(f"{said}; correct it")
    if not acted:
        return None
    actions = _values(slab, rule.action, slot, slot + 1)
    by_policy = acting & (slab.version[slot] != RANDOM_VERSION)
    forbidden = rule.forbids(actions, marks, live)[0] & by_policy
    if not forbidden.any():
        return None
    lane = int(np.argmax(forbidden))
    return PolicyError(
        f"{spell(rule.action)} is not legal at lane {slab.first_lane + lane}, step "
        f"{_step_of(slab, slot, lane, state)} of its trajectory: got "
        f"{actions[0, lane].tolist()!r:.100}, expected one that {spell(rule.mask)} "
        f"{marks[0, lane].tolist()!r:.200} allows; let the policy keep to the mask"
    )


def _exact(number: Any) -> str:
    """A number in few digits, an integer in all of them."""
    return f"{number:g}" if np.asarray(number).dtype.kind == "f" else str(number)


def ranges_of(env: EnvBase, *, policy: bool, lost_finals: bool) -> list[Range]:
    """The ranges that the specs of ``env`` declare, for the columns of its slab.

    Args:
        env: batch size ``[]`` or ``[lanes]``.
        policy: whether actions come from a policy and have to be checked too.
        lost_finals: NaN marks final observations that are lost, which is no violation.
    """
    found: list[Range] = []
    lead = len(env.batch_size)

    def add(key: Key, spec: TensorSpec, by_policy: bool) -> None:
        bounds = _bounds(spec, lead)
        if bounds is not None:
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


def _step_of(slab: Slab, slot: int, lane: int, state: LaneState) -> int:
    """Step within its trajectory of the transition at ``slot`` and ``lane``."""
    before = slab.transitions[:slot] & slab.of_lane(slot, lane)
    ends = np.nonzero((before & ended_in(slab, 0, slot)).any(axis=1))[0]
    count = before.sum(axis=1)
    if len(ends):
        return int(count[ends[-1] + 1 :].sum())
    return int(state.step[slab.lane_at(slot, lane)] + count.sum())


def _bounds(spec: TensorSpec, lead: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Lowest and highest value of a column, or None where every value is allowed."""
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
