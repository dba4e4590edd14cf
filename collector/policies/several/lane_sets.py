"""Sets of lanes as callers specify them; each lane has exactly one policy. Pure functions."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from tallyroll.collector.errors import ArgumentError

LaneSet: TypeAlias = int | slice | range | Sequence[int] | Literal["rest"]
"""Lanes of a policy: one or several numbers, a slice, or the lanes that no other policy has."""
REST = "rest"


def require_lanes(given: Any, policy: int) -> None:
    """Refuse a value that cannot specify lanes, for any number of lanes.

    Raises:
        ArgumentError: the value is refused; the message describes valid values.
    """
    if isinstance(given, (slice, range)) or _is_number(given):
        return
    if isinstance(given, str):
        if given == REST:
            return
    elif isinstance(given, Sequence) and given and all(map(_is_number, given)):
        return
    raise ArgumentError(
        f"policy: expected lanes for policy {policy}: a number, numbers, a range, a slice or "
        f'"rest", got {given!r}'
    )


def lanes_of_each(sets: Sequence[LaneSet], lanes: int) -> list[tuple[int, ...]]:
    """Return the lanes of each policy, in ascending order, in a run of ``lanes`` lanes.

    Raises:
        ArgumentError: a lane does not exist, has two policies, or has none.
    """
    found: list[tuple[int, ...]] = []
    owner: dict[int, int] = {}
    for policy, given in enumerate(sets):
        own = () if given == REST else _numbers(given, lanes)
        for lane in own:
            if not 0 <= lane < lanes:
                raise ArgumentError(
                    f"policy: expected lanes 0 to {lanes - 1}, got lane {lane} for policy {policy}"
                )
            if lane in owner:
                raise ArgumentError(
                    f"policy: expected one policy for each lane, got lane {lane} for policy "
                    f"{owner[lane]} and for policy {policy}"
                )
            owner[lane] = policy
        found.append(tuple(sorted(own)))
    rest = tuple(lane for lane in range(lanes) if lane not in owner)
    takes = [policy for policy, given in enumerate(sets) if given == REST]
    if len(takes) > 1:
        raise ArgumentError(f'policy: expected "rest" once, got it for the policies {takes}')
    if takes:
        found[takes[0]] = rest
    elif rest:
        raise ArgumentError(
            f"policy: expected a policy for each of {lanes} lanes, got none for {in_words(rest)}. "
            'Assign these lanes to a policy, or add ("rest", policy).'
        )
    for policy, own in enumerate(found):
        if not own:
            raise ArgumentError(
                f"policy: policy {policy} acts in none of the {lanes} lanes. Leave it out, or "
                "assign lanes to it."
            )
    return found


def in_words(lanes: Sequence[int]) -> str:
    """Format ascending ``lanes`` as text: ``0-5, 7``."""
    words, start = [], 0
    for at, lane in enumerate(lanes):
        if at + 1 == len(lanes) or lanes[at + 1] != lane + 1:
            words.append(str(lane) if at == start else f"{lanes[start]}-{lane}")
            start = at + 1
    return ", ".join(words)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _numbers(given: Any, lanes: int) -> Sequence[int]:
    if isinstance(given, slice):
        return range(lanes)[given]
    return [given.__index__()] if _is_number(given) else [each.__index__() for each in given]
