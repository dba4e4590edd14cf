"""Defer signal handlers that may raise, Ctrl-C's among them, until nothing is half done.

Python runs a signal handler between any two instructions of the main thread. If a handler raised
after a worker's answer arrived and before it was counted, transitions in the middle of a trajectory
would be lost while later ones are stored. A step that an exception interrupts cannot continue
either. So handlers are deferred while a batch is made. While a :class:`pausable` environment or
policy runs, the driver is asked to finish the step, and the handlers are called after it
(:func:`call_waiting`): the run can continue even if one of them raises. In :class:`admitted` code
handlers are called immediately.

`fast_collect` needs none of this, because one C call does everything that must stay together.

From the first batch of a run to its end (:func:`keep_for`), a stand-in replaces each handler. It
defers signals during a batch, and forwards them between batches. Only Python's own handler of
Ctrl-C is restored between batches, because asyncio looks for it and replaces it.
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
"""The signals by which people and clusters end or limit a computation."""
_LIMITS = int(signal.SIGALRM)
"""The signal by which code limits its own time; that code catches the handler's exception."""
_DEFAULT = signal.default_int_handler
"""Python's own handler of Ctrl-C."""
_PATIENCE_SECONDS = 1.0
"""Seconds after which a deferred signal is handled wherever the program is."""


class _Stand:
    """A stand-in for a handler, which defers it."""

    __slots__ = ("handler",)

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that arrived."""
        _arrived(self, number, frame)


_standing: dict[int, Any] = dict.fromkeys(_NUMBERS)
"""The last handler of each signal that was found or installed; None at first."""
_runs: set[int] = set()
"""The runs, by id, that keep handlers where they are between batches."""
_calling: dict[int, _Stand] = {}
"""Signals whose handlers are running."""
_waiting: dict[int, tuple[_Stand, threading.Timer, list[None]]] = {}
"""Deferred signals: stand-in, the timer that sends it again, an item for each further arrival."""
_again: set[int] = set()
"""Signals that were sent again."""
_main = main_thread().ident
_holder: int | None = None
"""The thread that is inside a :class:`deferred`, always the main one."""
_admitting = False
_pause: Callable[[], None] | None = None
"""Asks the driver to finish a step; None if admitted handlers are called immediately."""

# Each of these changes in one instruction, so that a handler's exception leaves them consistent.


class deferred:
    """A context that defers handlers until its end, or until :func:`call_waiting`.

    Handlers run in the main thread only: in another thread it does nothing.
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
            _again.clear()
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
            except BaseException:  # of a handler that was restored before the others are
                _restore()
                raise
            finally:
                if _waiting:
                    call_waiting()


class admitted:
    """A context in which handlers are called immediately, also those that wait."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Defer handlers again."""
        global _admitting, _pause
        if self._mine:
            _admitting, _pause = self._before


class pausable(admitted):
    """A context that defers handlers until :func:`call_waiting`, and asks for that call.

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


def later() -> None:
    """Do nothing: an ``asks`` of :class:`pausable` that defers handlers until the context ends."""


def waits() -> bool:
    """Return whether a handler waits for this thread."""
    return bool(_waiting) and get_ident() == _holder


def are_deferred() -> bool:
    """Return whether handlers are deferred."""
    return _holder is not None


def keep_for(run: object) -> bool:
    """Keep the stand-ins that :class:`deferred` installed, and return True.

    They stay until :func:`let_go`, or until ``run`` is garbage-collected. In a thread that does not
    defer handlers, do nothing and return False.
    """
    if get_ident() != _holder:
        return False
    if id(run) not in _runs:
        _runs.add(id(run))
        weakref.finalize(run, _forget, id(run)).atexit = False
    return True


def let_go(run: object) -> None:
    """End :func:`keep_for` of ``run``; restore handlers after the last run. Idempotent."""
    _forget(id(run))


def _forget(run: int) -> None:
    _runs.discard(run)
    # Another thread may not set handlers. A stand-in does no harm until a signal or batch comes.
    if _holder is None and get_ident() == _main:
        _restore()


def _install() -> None:
    for number, stand in _standing.items():
        found = get_handler(number)
        if found is stand:
            continue
        if type(stand) is _Stand and stand.handler is found:
            set_handler(number, stand)
        elif callable(found) and type(found) is not _Stand:
            _standing[number] = stand = _Stand(found)
            set_handler(number, stand)
        else:
            _standing[number] = found


def _restore() -> None:
    """Restore handlers; while there are runs, only Python's own."""
    for number in (_CTRL_C,) if _runs else _NUMBERS:
        stand = _standing[number]
        if (
            type(stand) is _Stand
            and (stand.handler is _DEFAULT or not _runs)
            and get_handler(number) is stand
        ):
            set_handler(number, stand.handler)


def _forked() -> None:
    global _main
    _main = get_ident()


os.register_at_fork(after_in_child=_forked)


def _arrived(stand: _Stand, number: int, frame: FrameType | None) -> None:
    calling = _calling.get(number)
    if calling is not None:  # a handler calls the one that it found, which was this
        if calling is not stand:
            stand.handler(number, frame)
        return
    again = number in _again
    _again.discard(number)
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
        _again.add(number)
        signal.pthread_kill(thread, number)


def call_waiting(only: int | None = None) -> None:
    """Call the handlers that wait, or ``only`` one, then raise their first exception."""
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


def _call(stand: _Stand, number: int, frame: FrameType | None) -> None:
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
