"""Parameters of which each pair is tried, where trying each combination says little more.

``TALLYROLL_COMBINATIONS=all`` tries each one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

ALL = os.environ.get("TALLYROLL_COMBINATIONS") == "all"


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that have each pair of values of two axes at least once.

    The one that has most of the missing pairs is taken again and again, the first one of several.
    """
    values = [list(axis) for axis in axes]
    places = list(product(*(range(len(each)) for each in values)))
    columns = list(combinations(range(len(values)), min(2, len(values))))
    pairs_of = {each: {(at, tuple(each[i] for i in at)) for at in columns} for each in places}
    missing, taken = set[Any]().union(*pairs_of.values()), []
    while missing:
        taken.append(max(places, key=lambda each: len(pairs_of[each] & missing)))
        missing -= pairs_of[taken[-1]]
    return [tuple(values[axis][at] for axis, at in enumerate(each)) for each in sorted(taken)]


def each_pair(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by the names of these axes, with :func:`pairs` of their values."""
    chosen = product(*axes.values()) if ALL else pairs(*axes.values())
    return pytest.mark.parametrize(tuple(axes), [*chosen])


def in_gate(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """Return the combinations of these axes, of which all but each so many-th are slow.

    Along the diagonal: of two axes each value is among those that the gate tries, of three each
    pair.
    """
    found = []
    for each in product(*map(enumerate, axes)):
        places, values = zip(*each, strict=True)
        found.append(pytest.param(*values, marks=[pytest.mark.slow] * (sum(places) % every > 0)))
    return found
