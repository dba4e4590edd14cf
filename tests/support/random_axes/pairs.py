"""Pairwise combinations of test parameters, where all combinations would reveal little more.

``TALLYROLL_COMBINATIONS=all`` tries all combinations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

ALL = os.environ.get("TALLYROLL_COMBINATIONS") == "all"


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that contain each pair of values of two axes at least once.

    The greedy search repeatedly takes the combination with the most missing pairs. The first one
    wins a tie.
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
    """Parametrize a test over the named axes, with the :func:`pairs` of their values."""
    chosen = product(*axes.values()) if ALL else pairs(*axes.values())
    return pytest.mark.parametrize(tuple(axes), [*chosen])


def in_gate(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """Return the combinations of these axes, and mark all but every `every`-th of them as slow.

    The choice follows diagonals: the gate tries each value of two axes, and each pair of values of
    three.
    """
    found = []
    for each in product(*map(enumerate, axes)):
        places, values = zip(*each, strict=True)
        found.append(pytest.param(*values, marks=[pytest.mark.slow] * (sum(places) % every > 0)))
    return found
