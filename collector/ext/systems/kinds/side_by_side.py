"""Environments of one lane each, side by side."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tallyroll.collector.envs.system import Mask


@contextmanager
def all_or_none() -> Iterator[list[Any]]:
    """A list for environments that are made inside; where that fails, they are closed again."""
    made: list[Any] = []
    try:
        yield made
    except BaseException:
        close_all(made)
        raise


def close_all(envs: Sequence[Any]) -> None:
    """Close each of them."""
    for env in envs:
        env.close()


def numbers(lanes: Mask | None, count: int) -> Sequence[int]:
    """The numbers of the lanes of a mask; None: all ``count``."""
    return range(count) if lanes is None else lanes.nonzero()[0].tolist()
