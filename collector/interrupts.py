"""Interrupts: signal handlers, and exceptions that may be raised at any instruction.

Ctrl-C, a cluster's SIGTERM and a timeout of SIGALRM run a handler between any two instructions of
the main thread, and the handler may raise. Another thread can inject an exception in the same way.
Neither may lose or duplicate a row. There are four rules, each with one owner:

1. **Handlers run between steps.** A collecting call defers them (:class:`defer_signals`, the base
   of `CollectGuard`): an exception between a worker's reply and its count would lose transitions in
   the middle of a trajectory, and an interrupted step of an environment cannot continue. While an
   environment or a policy runs, a signal makes the driver pause after the step
   (:class:`pause_on_signal`). The run loop then balances the counts and calls the handler
   (:func:`call_waiting`). If the handler raises, nothing is lost and the next call continues. Code
   that waits for something else lets handlers run immediately (:class:`allow_signals`). A handler
   that has waited for one second runs at once, even within a step, because an environment may never
   return. `ShardedLeases.collect` replaces the run loop, and does the same after each answer.
2. **An exception at any other instruction ends the run** (`CollectGuard.__exit__`), unless the loop
   is at a safe point (`RunState.at_safe_point`). Complete transitions are stored first, and later
   calls raise `StateError`.
3. **The fast path for few slots needs no deferral**: one C call numbers, stores and commits the
   rows. If an exception is raised before or after that call, `FastCollect` keeps the exception, the
   slots and the batch until the run loop takes them over (`PendingCall`). Workers continue a step
   in other processes, so `FastCollectOfWorkers` does defer handlers.
4. **A context may be left before it is entered.** An injected exception can be raised before the
   interpreter calls ``__enter__`` or after it calls ``__exit__``. So the methods of `CollectGuard`
   that enter the guard or call `FastCollect` catch the exception once more and call ``leave``. The
   tests of random interrupts (``test_going_on``, ``test_plain_slots``) fail if either ``leave`` is
   missing.

From the first batch of a run to its end (:func:`keep_stand_ins`), a stand-in replaces each handler.
The stand-in defers signals during a call, and forwards them between calls. Only Python's own
handler of Ctrl-C is restored between calls, because asyncio looks for it and replaces it.
"""

import os
import signal
import threading
import weakref
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType, TracebackType
from typing import Any

from tallyroll.collector.compat import get_handler, set_handler

_CTRL_C = int(signal.SIGINT)
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NUMBERS = (*map(int, _ENDS), int(signal.SIGALRM))
"""The signals with which people and clusters end or limit a computation."""
_LIMITS = int(signal.SIGALRM)
"""The signal with which code limits its own time. That code catches the handler's exception."""
_DEFAULT = signal.default_int_handler
"""Python's own handler of Ctrl-C."""
_PATIENCE_SECONDS = 1.0
"""Seconds after which a deferred signal is handled wherever the program is."""


class _StandIn:
    """A stand-in that defers a signal handler."""

    __slots__ = ("handler",)

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that arrived."""
        _arrived(self, number, frame)


_stand_ins: dict[int, Any] = dict.fromkeys(_NUMBERS)
"""The last handler that was found or installed for each signal; None at first."""
_runs: set[int] = set()
"""The ids of the runs that keep the stand-ins installed between batches."""
_calling: dict[int, _StandIn] = {}
"""Signals whose handlers are running."""
_waiting: dict[int, tuple[_StandIn, threading.Timer, list[None]]] = {}
"""Deferred signals, as (stand-in, timer that sends the signal again, list of further arrivals)."""
_resent: set[int] = set()
"""Signals that were sent again."""
_main = main_thread().ident
_holder: int | None = None
"""The thread inside a :class:`defer_signals`, always the main thread; None if there is none."""
_admitting = False
_pause: Callable[[], None] | None = None
"""Asks the driver to pause after the step; None if admitted handlers are called immediately."""

# Each of these variables changes in one instruction, so that a handler's exception leaves them
# consistent.


class defer_signals:
    """A context that defers handlers until its end, or until :func:`call_waiting`.

    Handlers run only in the main thread, so in another thread the context does nothing.
    """

    __slots__ = ("_before", "_inner", "_outer")

    @property
    def is_left(self) -> bool:
        """True once this context no longer defers handlers."""
        return not self._outer or _holder != get_ident()

    def __enter__(self) -> None:
        """Defer handlers."""
        global _holder, _admitting, _pause
        thread = get_ident()
        self._inner = thread == _holder
        self._outer = _holder is None and thread == _main
        if self._inner:
            self._before = _admitting, _pause
            _admitting, _pause = False, None
        elif self._outer:
            _resent.clear()
            _admitting, _pause = False, None
            _holder = thread
            try:
                _install()
            except BaseException:
                _holder = None
                _restore()
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Call the handlers of the signals that have arrived."""
        global _holder, _admitting, _pause
        if self._inner:
            _admitting, _pause = self._before
        elif self._outer:
            _holder = None
            try:
                _restore()
            except BaseException:  # a restored handler raised before the others were restored
                _restore()
                raise
            finally:
                if _waiting:
                    call_waiting()


class allow_signals:
    """A context in which handlers are called immediately, including those that wait."""

    __slots__ = ("_before", "_mine")

    asks: Callable[[], None] | None = None

    def __enter__(self) -> None:
        """Call handlers immediately from here on."""
        global _admitting, _pause
        self._mine = get_ident() == _holder
        if not self._mine:
            return
        self._before = _admitting, _pause
        try:
            _admitting, _pause = True, self.asks
            if _waiting:
                self._call()
        except BaseException:
            _admitting, _pause = self._before
            raise

    def _call(self) -> None:
        call_waiting()

    def __exit__(self, *_: object) -> None:
        """Defer handlers again."""
        global _admitting, _pause
        if self._mine:
            _admitting, _pause = self._before


class pause_on_signal(allow_signals):
    """A context that defers handlers until :func:`call_waiting`, and requests that call.

    Handlers of SIGALRM are called immediately.

    Args:
        asks: called instead of a handler when a signal arrives. It may raise.
    """

    __slots__ = ("asks",)

    def __init__(self, asks: Callable[[], None]) -> None:
        self.asks = asks

    def _call(self) -> None:
        if _LIMITS in _waiting:
            call_waiting(_LIMITS)
        if _waiting and self.asks is not None:
            self.asks()


def until_exit() -> None:
    """Do nothing. As the ``asks`` of a :class:`pause_on_signal`, it defers handlers to the end."""


def signal_waits() -> bool:
    """Return True if a signal handler is waiting for this thread."""
    return bool(_waiting) and get_ident() == _holder


def signals_are_deferred() -> bool:
    """Return True if handlers are deferred."""
    return _holder is not None


def keep_stand_ins(run: object) -> bool:
    """Keep the stand-ins that :class:`defer_signals` installed, and return True.

    They stay until :func:`release_stand_ins`, or until ``run`` is garbage-collected. In a thread
    that does not defer handlers, do nothing and return False.
    """
    if get_ident() != _holder:
        return False
    if id(run) not in _runs:
        _runs.add(id(run))
        weakref.finalize(run, _forget, id(run)).atexit = False
    return True


def release_stand_ins(run: object) -> None:
    """Release the stand-ins that :func:`keep_stand_ins` kept for ``run``.

    After the last run, restore the original signal handlers. Repeated calls have no effect.
    """
    _forget(id(run))


def _forget(run: int) -> None:
    _runs.discard(run)
    # Another thread may not set handlers. An installed stand-in only forwards the next signal.
    if _holder is None and get_ident() == _main:
        _restore()


def _install() -> None:
    for number, stand in _stand_ins.items():
        found = get_handler(number)
        if found is stand:
            continue
        if type(stand) is _StandIn and stand.handler is found:
            set_handler(number, stand)
        elif callable(found) and type(found) is not _StandIn:
            _stand_ins[number] = stand = _StandIn(found)
            set_handler(number, stand)
        else:
            _stand_ins[number] = found


def _restore() -> None:
    """Restore handlers; while there are runs, restore only Python's own handler."""
    for number in (_CTRL_C,) if _runs else _NUMBERS:
        stand = _stand_ins[number]
        if (
            type(stand) is _StandIn
            and (stand.handler is _DEFAULT or not _runs)
            and get_handler(number) is stand
        ):
            set_handler(number, stand.handler)


def _forked() -> None:
    global _main
    _main = get_ident()


os.register_at_fork(after_in_child=_forked)


def _arrived(stand: _StandIn, number: int, frame: FrameType | None) -> None:
    calling = _calling.get(number)
    if calling is not None:  # the handler calls the previous handler, which was this stand-in
        if calling is not stand:
            stand.handler(number, frame)
        return
    again = number in _resent
    _resent.discard(number)
    if again and number not in _waiting:
        return  # it was handled in between
    if number in _waiting and not again:
        _waiting[number][2].append(None)
    if _holder is None and number not in _waiting:
        if not _runs:
            _restore()
        stand.handler(number, frame)
    elif again or _holder is None or (_admitting and (_pause is None or number == _LIMITS)):
        _call(stand, number, frame)
    elif number not in _waiting:
        timer = threading.Timer(_PATIENCE_SECONDS, _send_again, (number, get_ident()))
        timer.daemon = True
        _waiting[number] = stand, timer, []
        timer.start()
        if _pause is not None:
            _pause()


def _send_again(number: int, thread: int) -> None:
    if number in _waiting:
        _resent.add(number)
        signal.pthread_kill(thread, number)


def call_waiting(only: int | None = None) -> None:
    """Call all waiting handlers, or the one of the signal ``only``; raise the first exception."""
    raised: BaseException | None = None
    for number, (stand, *_) in [*_waiting.items()]:
        if only not in (None, number):
            continue
        try:
            _call(stand, number, None)
        except BaseException as error:  # noqa: BLE001  raised below
            raised = raised or error
    if raised is not None:
        raise raised


def _call(stand: _StandIn, number: int, frame: FrameType | None) -> None:
    global _admitting
    before, _admitting = _admitting, False
    waited = _waiting.pop(number, None)
    if waited is not None:
        waited[1].cancel()
    _calling[number] = stand
    try:
        stand.handler(number, frame)
        for _ in waited[2] if waited is not None else ():  # a second one may mean another thing
            stand.handler(number, frame)
    finally:
        del _calling[number]
        _admitting = before
