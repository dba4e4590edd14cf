"""Helpers for systems with one environment object per lane."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tallyroll.collector.envs.system import Mask


@contextmanager
def all_or_none() -> Iterator[list[Any]]:
    """Yield a list for new environments, and close them all if the block raises."""
    made: list[Any] = []
    try:
        yield made
    except BaseException:
        close_all(made)
        raise


def close_all(envs: Sequence[Any]) -> None:
    """Close each environment."""
    for env in envs:
        env.close()


def numbers(lanes: Mask | None, count: int) -> Sequence[int]:
    """Return the indices of the lanes of a mask; None selects all ``count`` lanes."""
    return range(count) if lanes is None else lanes.nonzero()[0].tolist()
