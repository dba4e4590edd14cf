"""Collecting in a thread: it ends when it is told to, and its error is raised where one asks."""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tallyroll.collector.errors import StateError

PATIENCE_SECONDS = 60.0
"""How long the step under way may take once the thread was told to end."""
_AT_EXIT_SECONDS = 5.0

_running: "weakref.WeakSet[Background]" = weakref.WeakSet()


class _Request:
    """Something that another thread wants done."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self.is_done = False
        self.error: BaseException | None = None

    def do(self) -> None:
        """Do it; what it raises is for whoever asked."""
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001  raised by `perform`
            self.error = error
        self.is_done = True


class Background:
    """A thread that takes batch after batch.

    Args:
        batches: gives the next batch each time; the thread ends where it raises StopIteration.
        stop: ends a batch early.
    """

    def __init__(self, batches: Callable[[], Any], stop: Callable[[], None]) -> None:
        self._batches, self._stop = batches, stop
        self._turn = threading.Condition()
        self._told = self._in_batch = False
        self._holders = 0
        self._requests: list[_Request] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tallyroll-collector", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """It is still collecting."""
        return self._thread.is_alive()

    @property
    def is_here(self) -> bool:
        """The caller is this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            while self._begins():
                try:
                    self._batches()
                finally:
                    with self._turn:
                        self._in_batch = False
                        self._turn.notify_all()
        except StopIteration:
            return
        except BaseException as error:  # noqa: BLE001  raised by `raise_error`
            self.error = error
        finally:
            _running.discard(self)

    def _begins(self) -> bool:
        """Wait until nobody holds the next batch; False where there is to be none."""
        with self._turn:
            self._turn.wait_for(lambda: self._told or not self._holders)
            self._do_requests()
            self._in_batch = not self._told
            return self._in_batch

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No batch is begun within this, and none is under way, but for the caller's own."""
        with self._turn:
            self._holders += 1
            self._turn.wait_for(lambda: self.is_here or not self._in_batch)
        try:
            yield
        finally:
            with self._turn:
                self._holders -= 1
                self._turn.notify_all()

    def perform(self, action: Callable[[], None]) -> None:
        """Do ``action`` while nothing is collected: between two steps, or two batches.

        Raises what it raises.
        """
        if self.is_here:
            action()
            return
        request = _Request(action)
        with self._turn:
            self._requests.append(request)
            self._turn.wait_for(lambda: request.is_done or not self._in_batch)
            if not request.is_done:
                self._requests.remove(request)
                request.do()
        if request.error is not None:
            raise request.error

    def serve(self) -> None:
        """Do what others asked for, from within the thread, between two steps."""
        if self._requests:
            with self._turn:
                self._do_requests()

    def _do_requests(self) -> None:
        for request in self._requests:
            request.do()
        self._requests.clear()
        self._turn.notify_all()

    def raise_error(self) -> None:
        """Raise what the thread raised, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def tell(self) -> None:
        """Let it end after the step under way."""
        with self._turn:
            self._told = True
            self._turn.notify_all()
        if self.alive:
            self._stop()

    def wait(self, seconds: float) -> None:
        """Wait for its end for so long."""
        self._thread.join(seconds)

    def end(self, timeout: float | None) -> None:
        """Tell it to end, and wait until it has.

        Raises:
            StateError: it has not within ``timeout`` seconds.
        """
        self.tell()
        if self.is_here:
            return
        seconds = PATIENCE_SECONDS if timeout is None else timeout
        self.wait(seconds)
        if self.alive:
            raise StateError(
                f"the thread that collects has not ended within {seconds:g} s: a step of the "
                "environment, or the policy, takes longer; shut down again with a larger timeout="
            )


@atexit.register
def _end_all() -> None:
    # Threads of torch do not survive an interpreter that takes its modules apart.
    left = [*_running]
    for each in left:
        each.tell()
    for each in left:
        each.wait(_AT_EXIT_SECONDS)
