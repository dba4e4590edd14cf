"""Batch iterator that can continue after an exception."""

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from tallyroll.collector.user_code import ENDS, user_code


class BatchIterator(Generator[Any, None, None]):
    """Yields ready batches, and makes more when there are none.

    A generator is exhausted after an exception, so that a second loop over it would end as if the
    budget were met. This iterator continues. A batch stays ready until it is yielded: a signal
    handler may raise at any call, and no call comes between taking the batch from the list and
    returning it.

    Args:
        ready: batches to yield; all iterators of a run take from this list.
        make: makes further batches ready, possibly none; returns False if the run is over.
    """

    def __init__(self, ready: list[Any], make: Callable[[], bool]) -> None:
        self._ready, self._make = ready, make
        self._closed = False

    def __next__(self) -> Any:
        ready = self._ready
        while not self._closed:
            if ready:
                batch = ready[0]
                del ready[0]
                return batch
            try:
                more = self._make()
            except ENDS as error:  # StopIteration would end the loop as if the budget were met
                raise user_code.error("a call of user code for a batch", error) from error
            if not more:
                break
        raise StopIteration

    def send(self, value: None) -> Any:
        """Return the next batch; ``value`` is ignored."""
        return next(self)

    def throw(  # type: ignore[override]
        self, kind: Any, value: BaseException | None = None, trace: TracebackType | None = None
    ) -> Any:
        """Raise the given exception; the run does not change."""
        super().throw(kind, value, trace)

    def close(self) -> None:
        """Stop yielding; another iterator can continue."""
        self._closed = True
