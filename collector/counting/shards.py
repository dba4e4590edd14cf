"""A run in parts that are made on their own: which lanes, budget and ids a part has. Pure.

In a run every slot of which is a transition, lane ``l`` of ``L`` makes ``n // L + (l < n % L)`` of
the first ``n`` transitions in slot order. So a part has the sum of that over its lanes, and in slot
order these are the first ones of its own lanes.
"""


def lanes_of(index: int, of: int, lanes: int) -> range:
    """Return the lanes of part ``index`` of ``of``: neighbours, as many as others or one more."""
    return range(lanes * index // of, lanes * (index + 1) // of)


def among_first(count: int, lanes: int, own: range) -> int:
    """Return how many of the first ``count`` transitions of ``lanes`` lanes are of ``own``."""
    each, more = divmod(count, lanes)
    return each * len(own) + min(max(0, more - own.start), len(own))


def first_id(after: int, lanes: int) -> int:
    """Return the least multiple of ``lanes`` from ``after`` on.

    Lane ``l``'s ids have the remainder ``l`` then, wherever a part begins or goes on: parts that
    know nothing of one another have no id in common.
    """
    return -(-after // lanes) * lanes
