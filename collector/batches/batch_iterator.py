"""An iterator over batches that no exception exhausts."""

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from tallyroll.collector.user_code import ENDS, user_code


class BatchIterator(Generator[Any, None, None]):
    """An iterator that yields ready batches, and has more made ready if there are none.

    A generator in which an exception was raised is exhausted, so that a loop over it would end as
    if there were no more; this one goes on. A batch stays ready until it is yielded: a signal's
    handler may raise at a call, and there is no call between taking and returning it.

    Args:
        ready: batches to yield; every iterator of a run takes from this list.
        make: makes more batches ready, perhaps none yet; returns False if no more will come.
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
            except ENDS as error:  # it would end the loop as if the budget were met
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
        """Raise the given exception; the run stays as it is."""
        super().throw(kind, value, trace)

    def close(self) -> None:
        """Yield no more; another iterator goes on."""
        self._closed = True
