"""Collecting in a thread: it ends when it is told to, and its error is raised where one asks."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tallyroll.collector.errors import StateError

PATIENCE_SECONDS = 60.0
"""How long the step under way may take once the thread was told to end."""
_AT_EXIT_SECONDS = 5.0

_running: "weakref.WeakSet[Background]" = weakref.WeakSet()


class Background:
    """A thread that takes batch after batch.

    Args:
        batches: gives the next batch each time; the thread ends where it raises StopIteration.
        stop: ends a batch early.
    """

    def __init__(self, batches: Callable[[], Any], stop: Callable[[], None]) -> None:
        self._batches, self._stop = batches, stop
        self._told = threading.Event()
        self._turn = threading.Lock()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tallyroll-collector", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """It is still collecting."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._told.is_set():
                with self._turn:
                    if self._told.is_set():
                        return
                    self._batches()
        except StopIteration:
            return
        except BaseException as error:  # noqa: BLE001  raised by `raise_error`
            self.error = error
        finally:
            _running.discard(self)

    def hold(self) -> threading.Lock:
        """While this is held no batch is begun."""
        return self._turn

    def raise_error(self) -> None:
        """Raise what the thread raised, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def tell(self) -> None:
        """Let it end after the step under way."""
        self._told.set()
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
        if threading.current_thread() is self._thread:
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
