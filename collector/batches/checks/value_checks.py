"""Check whole columns, or a few slots, against the spaces that the environment declares."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.batches.checks.ranges import Fetch, Range, ranges_to_check, values_of
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import PolicyError, TransitionError, ValueRefused
from tallyroll.collector.native.kernel import KINDS, compiled, in_order
from tallyroll.collector.options.objects import Validate
from tallyroll.collector.policies.mask_rules import MaskRule
from tallyroll.collector.rollout.lanes import ended_in
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.rows.keys import NEXT, RANDOM_VERSION, Key, format_key

_SMALL_NBYTES = 2**16


class OutOfRangeWarning(UserWarning):
    """A value is outside its declared space, and ``validate`` lets it pass."""


@dataclass(frozen=True)
class Violation:
    """The first value, in slot order, that is outside its declared space."""

    slot: int
    what: str
    check: "Range | MaskRule"
    can_pass: bool
    """True if ``validate`` decides whether the run accepts it."""

    @property
    def error(self) -> Exception:
        """The exception to raise for the violation."""
        kind = PolicyError if self.check.by_policy else TransitionError
        lenient = '"noise", "warn"' if self.check.has_noise else '"warn"'
        way_out = f', or accept it with validate={lenient} or "off"' if self.can_pass else ""
        return kind(f"{self.what}. Correct the value{way_out}.")


class RangeChecks:
    """Checks the columns of a slab against the declared spaces.

    Args:
        ranges: the allowed values of each column; see :func:`ranges_of`.
        validate: the treatment of violations; see :data:`Validate`.
        masks: the masks of legal actions.
        at_random: True if some actions are drawn. Only then are masks checked, because a policy
            may ignore them.
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
        self._checked_before = _checked_before(self._ranges)
        self._slot_checks: dict[Slab, SlotChecks] = {}
        self._within: dict[Slab, list[Range]] = {}
        """The ranges for the lanes of each slab."""
        self.eased = 0
        """Number of times that a kind of violation was accepted. Each time, all tables change."""

    def first_violation(
        self, slab: Slab, used: int, state: LaneState, fetch: Fetch | None = None
    ) -> Violation | None:
        """Return the first violation in the first ``used`` slots, or None.

        ``fetch`` copies tensors on the device of the slab to the host.
        """
        if not used:
            return None
        few = self._slot_checks.get(slab) or self._of_slots(slab)
        if used <= FEW_SLOTS and few.are_good(used):  # reset slots too
            looks = self.masks_of(slab, used) if self._masks else None
            if looks is None or looks():
                return None
        while True:
            # In the same slot, a wrong action comes first, because it explains wrong results of the
            # step.
            found = self._violations(slab, used, state, fetch)
            first = min(found, key=lambda v: (v.slot, not v.check.by_policy), default=None)
            if first is None or not self._passes(first):
                return first
            warnings.warn(f"{first.what}; {_SAID_ONCE}", OutOfRangeWarning, stacklevel=5)

    def table(self, slab: Slab) -> bytes | None:
        """Return the table for `StepKernel.are_inside`; None if it cannot check ``slab``."""
        checks = self._of_slots(slab)
        return checks.table if checks.fit else None

    def masks_of(self, slab: Slab, used: int) -> Callable[[], bool] | None:
        """Return a fast check of the masks in the first ``used`` slots; None if no mask is checked.

        If the check returns False, call :meth:`first_violation`.
        """
        if not self._masks:
            return None
        if not all(rule.mask in slab.flat for rule in self._masks):
            return lambda: False
        narrow = {each.key for each in self._ranges if each.low.min() >= 0 and each.high.max() <= 1}
        looks = [
            rule.quick(
                slab.array(rule.mask)[:used],
                None if rule.live not in slab.flat else slab.array(rule.live)[:used],
                zeros_and_ones=rule.mask in narrow,
            )
            for rule in self._masks
        ]
        return looks[0] if len(looks) == 1 else lambda: all(look() for look in looks)

    def _of_slots(self, slab: Slab) -> "SlotChecks":
        checks = self._slot_checks.get(slab)
        if checks is None:
            checks = self._slot_checks[slab] = SlotChecks(self._ranges_of(slab), slab)
        return checks

    def _ranges_of(self, slab: Slab) -> list[Range]:
        if (found := self._within.get(slab)) is None:
            found = self._within[slab] = [each.within(slab) for each in self._ranges]
        return found

    def _passes(self, found: Violation) -> bool:
        """Return True if the run accepts ``found`` and later violations of the same kind."""
        if not found.can_pass or self._validate not in ("noise", "warn"):
            return False
        if self._validate == "warn":
            self._ranges, self._masks = _of_numbers(self._ranges), []
        elif isinstance(found.check, Range) and found.check.has_noise:
            key = found.check.key
            self._ranges = [each.numbers() if each.key == key else each for each in self._ranges]
        else:
            return False
        self._slot_checks.clear()
        self._within.clear()
        self._checked_before = _checked_before(self._ranges)
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
        """Return the error for an invalid action or mask in ``slot``, whose step raised, or None.

        ``acting`` marks the lanes ``[lane]`` whose action would have been executed. ``acted`` is
        False if the slot has no actions.
        """
        for check in (each.within(slab) for each in self._declared) if acted else ():
            if check.by_policy and slot < slab.slots and slab.columns[check.key].dtype.is_signed:
                bad = check.bad(values_of(slab, check.key, slot, slot + 1))
                if bad is not None:
                    return _violation(check, slab, slot, int(np.argmax(bad[0])), state).error
        if slab.lane is not None:  # actions are written before the observations of their lanes
            return None
        faults = (_fault_of(rule, slab, slot, acting, state, acted=acted) for rule in self._rules)
        return next((each for each in faults if each is not None), None)

    @staticmethod
    def place(error: ValueRefused, slab: Slab, slot: int, state: LaneState) -> None:
        """Record in ``error`` at which step of the trajectory it was raised, in ``slot``.

        If a worker is ahead of the slots that all workers have filled, the step is unknown.
        """
        if error.lane is None or error.step is not None or slab.lane is not None:
            return
        if error.slot not in (None, slot):
            return
        error.locate(step=step_of(slab, slot, error.lane - slab.first_lane, state))

    def _violations(
        self, slab: Slab, used: int, state: LaneState, fetch: Fetch | None
    ) -> Iterator[Violation]:
        new: tuple[NDArray[np.intp], ...] | None = None
        for check in ranges_to_check(self._ranges_of(slab), slab, used, fetch):
            if check.key not in slab.columns:
                continue
            values = values_of(slab, check.key, 0, used)
            if check.key in self._checked_before and check.key in slab.flowing:
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


_SAID_ONCE = "the run keeps this value and later ones like it, without another warning"


def _checked_before(ranges: Sequence[Range]) -> set[Key]:
    """Return the keys whose column under "next" has the same range.

    A value of such a key was checked in the previous slot, where it was under "next".
    """
    by_key = {each.key: each for each in ranges}
    return {
        key
        for key, each in by_key.items()
        if (twin := by_key.get((NEXT, *key))) is not None
        and np.array_equal(each.low, twin.low)
        and np.array_equal(each.high, twin.high)
    }


def _new_in(slab: Slab, used: int) -> tuple[NDArray[np.intp], ...]:
    """Return the slots and lanes whose observation was not under "next" in the previous slot.

    These are the observations of the first slot, after a reset, and after a slot without a
    transition.
    """
    new = np.ones((used, slab.lanes), np.bool_)
    new[1:] = ended_in(slab, 0, used - 1) | ~slab.transitions[: used - 1]
    return new.nonzero()


def _bad_at(
    check: Range, values: NDArray[Any], at: tuple[NDArray[np.intp], ...]
) -> NDArray[np.bool_] | None:
    """Return `Range.bad` for the slots and lanes ``at``, which is faster if they are few."""
    if check.first_lane is not None or 2 * len(at[0]) > values.shape[0] * values.shape[1]:
        return check.bad(values)
    some = check.bad(values[at][None])
    if some is None:
        return None
    bad = np.zeros(values.shape[:2], np.bool_)
    bad[at] = some[0]
    return bad


def _of_numbers(ranges: Sequence[Range]) -> list[Range]:
    """Return the checks that apply even if values may be out of range: actions must be finite."""
    return [each.numbers() for each in ranges if each.has_noise]


def _violation(check: Range, slab: Slab, slot: int, lane: int, state: LaneState) -> Violation:
    value = values_of(slab, check.key, slot, slot + 1)[0, lane]
    bounds = check.of_lane(slab.first_lane + lane)
    low, high = (np.broadcast_to(bound, value.shape) for bound in bounds)
    at = tuple(np.argwhere(~((value >= low) & (value <= high)))[0])
    where = f" at {[int(index) for index in at]}" if at else ""
    what = "the action space" if check.by_policy else "its space"
    said = (
        f"{format_key(check.key)} lies outside {what} at lane {slab.first_lane + lane}, step "
        f"{step_of(slab, slot, lane, state)} of its trajectory: expected [{_exact(low[at])}, "
        f"{_exact(high[at])}] and no NaN, got {_exact(value[at])}{where}"
    )
    return Violation(slot, said, check, not check.has_noise or bool(np.isfinite(value[at])))


def _marks(
    rule: MaskRule, slab: Slab, start: int, stop: int
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the mask and the marks of acting agents (or None), both ``[time, lane, ...]``."""
    live = None if rule.live is None else values_of(slab, rule.live, start, stop)
    return values_of(slab, rule.mask, start, stop), live


def _bad_mask(
    rule: MaskRule, slab: Slab, slot: int, lane: int, state: LaneState, wanted: str
) -> str:
    marks = values_of(slab, rule.mask, slot, slot + 1)[0, lane]
    return (
        f"{format_key(rule.mask)} of the environment at lane {slab.first_lane + lane}, step "
        f"{step_of(slab, slot, lane, state)} of its trajectory: expected {wanted}, got "
        f"{marks.tolist()!r:.200}"
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
    """Return the error for a wrong mask or a forbidden action in a slot whose step raised."""
    marks, live = _marks(rule, slab, slot, slot + 1)
    wrong, wanted = rule.wrong(marks, live)
    if (wrong := wrong[0] & acting).any():
        said = _bad_mask(rule, slab, slot, int(np.argmax(wrong)), state, wanted)
        return TransitionError(f"{said}. Correct the mask.")
    if not acted:
        return None
    actions = values_of(slab, rule.action, slot, slot + 1)
    by_policy = acting & (slab.version[slot] != RANDOM_VERSION)
    forbidden = rule.forbids(actions, marks, live)[0] & by_policy
    if not forbidden.any():
        return None
    lane = int(np.argmax(forbidden))
    return PolicyError(
        f"{format_key(rule.action)} is not legal at lane {slab.first_lane + lane}, step "
        f"{step_of(slab, slot, lane, state)} of its trajectory: expected an action that "
        f"{format_key(rule.mask)} {marks[0, lane].tolist()!r:.200} allows, got "
        f"{actions[0, lane].tolist()!r:.100}. Make the policy respect the mask."
    )


def _exact(number: Any) -> str:
    """Return the text of a float with six significant digits, or of an integer with all digits."""
    return f"{number:g}" if np.asarray(number).dtype.kind == "f" else str(number)


def step_of(slab: Slab, slot: int, lane: int, state: LaneState) -> int:
    """Return the step within its trajectory of the transition at ``slot`` and ``lane``."""
    before = slab.transitions[:slot] & slab.of_lane(slot, lane)
    ends = np.nonzero((before & ended_in(slab, 0, slot)).any(axis=1))[0]
    count = before.sum(axis=1)
    if len(ends):
        return int(count[ends[-1] + 1 :].sum())
    return int(state.step[slab.lane_at(slot, lane)] + count.sum())


class _SlotCheck:
    """A `Range` whose bounds have the shape of a slot, so that no comparison broadcasts."""

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
        """Return True if slots are so small that this check is the faster one."""
        return check.key in slab.flat and slab.array(check.key)[:1].nbytes <= _SMALL_NBYTES

    @property
    def words(self) -> list[Any]:
        """The table words that describe the check to `StepKernel.are_inside`."""
        words: list[Any] = in_order(
            "CHECK",
            values=self._array,
            dtype=KINDS.get(self._array.dtype, -1),
            count=self._low.size,
            low=self._low,
            high=self._high,
        )
        return words

    def is_good(self, at: int) -> bool:
        """Return True if the values of slot ``at`` are in range."""
        values, inside = self._array[at], self._inside
        np.greater_equal(values, self._low, inside[0])
        np.less_equal(values, self._high, inside[1])
        return bool(np.count_nonzero(inside) == self._size)


class SlotChecks:
    """Checks all columns of a slab slot by slot, if that is faster."""

    def __init__(self, ranges: Sequence[Range], slab: Slab) -> None:
        ranges = [each for each in ranges if each.key in slab.columns]
        self._kernel = compiled()
        self.fit = all(_SlotCheck.fits(each, slab) for each in ranges)
        self._checks = [_SlotCheck(each, slab) for each in ranges] if self.fit else []
        self.table = table_of(chain.from_iterable(check.words for check in self._checks))

    def are_good(self, used: int) -> bool:
        """Return True if all values of the first ``used`` slots are in range.

        False means that a value is out of range, or that this object cannot check the values.
        """
        if not self.fit:
            return False
        if self._kernel is not None:
            return self._kernel.are_inside(self.table, used)
        return all(check.is_good(at) for check in self._checks for at in range(used))
