"""The lanes, the budget and the ids of a shard, a part of a run that is made separately. Pure.

If every slot of a run is a transition, lane ``l`` of ``L`` makes ``n // L + (l < n % L)`` of the
first ``n`` transitions in slot order. So the budget of a part is the sum of these numbers over its
lanes, and the part makes exactly the first transitions of its own lanes.
"""


def lanes_of(index: int, of: int, lanes: int) -> range:
    """Return the adjacent lanes of part ``index`` of ``of``; sizes of parts differ by at most 1."""
    return range(lanes * index // of, lanes * (index + 1) // of)


def among_first(count: int, lanes: int, own: range) -> int:
    """Return how many of the first ``count`` transitions of ``lanes`` lanes are in ``own``."""
    each, more = divmod(count, lanes)
    return each * len(own) + min(max(0, more - own.start), len(own))


def first_id(after: int, lanes: int) -> int:
    """Return the smallest multiple of ``lanes`` that is at least ``after``.

    Ids that begin at such a multiple have the remainder ``l`` in lane ``l``, in every part of a
    run. So no two parts have an id in common.
    """
    return -(-after // lanes) * lanes
