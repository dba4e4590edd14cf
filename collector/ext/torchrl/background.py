"""Collection in a thread, which ends on request; the caller that asks gets its error."""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tallyroll.collector.errors import StateError

PATIENCE_SECONDS = 60.0
"""Seconds that the step under way may take after the thread was asked to end."""
_AT_EXIT_SECONDS = 5.0

_running: "weakref.WeakSet[Background]" = weakref.WeakSet()


class _Request:
    """An action that another thread asks this one to do."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self.is_done = False
        self.error: BaseException | None = None

    def do(self) -> None:
        """Do the action; keep its exception for the thread that asked."""
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001  raised by `perform`
            self.error = error
        self.is_done = True


class Background:
    """A thread that collects batch after batch.

    Args:
        batches: makes the next batch each time; if it raises StopIteration, the thread ends.
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
        """True while the thread collects."""
        return self._thread.is_alive()

    @property
    def is_here(self) -> bool:
        """True if the caller is this thread."""
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
        """Wait while a caller holds the next batch; return False if there will be none."""
        with self._turn:
            self._turn.wait_for(lambda: self._told or not self._holders)
            self._do_requests()
            self._in_batch = not self._told
            return self._in_batch

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Begin no batch within this context; wait for the one under way, but not in its thread."""
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

        An exception of ``action`` is raised here.
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
        """Do the requested actions, from within the thread, between two steps."""
        if self._requests:
            with self._turn:
                self._do_requests()

    def _do_requests(self) -> None:
        for request in self._requests:
            request.do()
        self._requests.clear()
        self._turn.notify_all()

    def raise_error(self) -> None:
        """Raise the thread's exception, once, if there is one."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def tell(self) -> None:
        """Ask the thread to end after the step under way."""
        with self._turn:
            self._told = True
            self._turn.notify_all()
        if self.alive:
            self._stop()

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread to end."""
        self._thread.join(seconds)

    def end(self, timeout: float | None) -> None:
        """Ask the thread to end, and wait until it has.

        Raises:
            StateError: the thread has not ended within ``timeout`` seconds.
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
