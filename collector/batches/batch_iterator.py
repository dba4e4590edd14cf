"""An iterator over batches that no exception exhausts."""

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any


class BatchIterator(Generator[Any, None, None]):
    """Yields ready batches, and has more made ready if there are none.

    A generator in which an exception was raised is exhausted, so that a loop over it would end as
    if there were no more; this one goes on. What is ready stays so until it is yielded: a signal's
    handler may raise at a call, and there is none between the two.

    Args:
        ready: what to yield, which every iterator of a run takes from.
        make: makes more of it ready, perhaps none yet; False: no more will come.
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
            if not self._make():
                break
        raise StopIteration

    def send(self, value: None) -> Any:
        """Return the next batch; there is nothing to be sent."""
        return next(self)

    def throw(  # type: ignore[override]
        self, kind: Any, value: BaseException | None = None, trace: TracebackType | None = None
    ) -> Any:
        """Raise what is given: no code here waits for it, and the run stays as it is."""
        super().throw(kind, value, trace)

    def close(self) -> None:
        """Yield no more; another iterator goes on."""
        self._closed = True
