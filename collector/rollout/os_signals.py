"""Ctrl-C, and other signals whose handlers may raise, only where nothing is half done.

Python runs a signal's handler between any two instructions of the main thread. An exception from
there, between the answer of a worker and the note that it came, would lose transitions in the
middle of a trajectory whose later ones are stored. And a step that an exception interrupts cannot
go on. So while a batch is made, handlers wait. While a :class:`pausable` environment or policy
runs, the driver is asked to come to the end of the step, where the handlers are called
(:func:`call_waiting`): after an exception of theirs the run can go on. In :class:`admitted` code
they are called at once.

Only `fast_collect` needs none of this: one call of the extension does all that must stay together.

A stand-in takes the place of each handler, and lets it wait, from the first batch of a run to its
end (:func:`keep_for`); between batches it passes signals on at once. Only Python's own handler of
Ctrl-C comes back between batches: asyncio looks for it, and puts its own there.
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
"""The signal by which code limits its own time; it catches the handler's exception."""
_DEFAULT = signal.default_int_handler
"""Python's own handler of Ctrl-C."""
_PATIENCE_SECONDS = 1.0
"""Seconds after which a waiting signal is handled at any point of the program."""


class _Stand:
    """A stand-in for a handler, which lets it wait."""

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
"""Signals that wait: stand-in, the timer that sends again, an item for each further arrival."""
_again: set[int] = set()
"""Signals that were sent again."""
_main = main_thread().ident
_holder: int | None = None
"""The thread, always the main one, inside of :class:`deferred`."""
_admitting = False
_pause: Callable[[], None] | None = None
"""Asks the driver to come to the end of a step; None: admitted handlers are called at once."""

# Each change of these is one instruction, so that a handler's exception leaves them consistent.


class deferred:
    """A context inside of which handlers wait; they are called at its end at the latest.

    Handlers run in the main thread only: in another one this does nothing.
    """

    __slots__ = ("_before", "_inner", "_outer")

    @property
    def is_left(self) -> bool:
        """True once handlers wait no more for this context to end."""
        return not self._outer or _holder != get_ident()

    def __enter__(self) -> None:
        """Let them wait."""
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
        """Call those of the signals that have arrived."""
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
    """Handlers are called at once inside of this, those that wait before it begins."""

    __slots__ = ("_before", "_mine")

    asks: Callable[[], None] | None = None

    def __enter__(self) -> None:
        """Call them from here on."""
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
        """Let them wait again."""
        global _admitting, _pause
        if self._mine:
            _admitting, _pause = self._before


class pausable(admitted):
    """Handlers wait inside of this until there is :func:`call_waiting`, which is asked for.

    Those of SIGALRM are called at once.

    Args:
        asks: is called, in the place of a handler, when one waits. It may raise.
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
    """Do nothing; for :class:`pausable`: handlers wait until the context ends."""


def waits() -> bool:
    """Return whether a handler waits for this thread."""
    return bool(_waiting) and get_ident() == _holder


def are_deferred() -> bool:
    """Return whether handlers wait now."""
    return _holder is not None


def keep_for(run: object) -> bool:
    """Keep handlers where :class:`deferred`, inside of which this is called, has put them.

    They stay there until :func:`let_go`, or until ``run`` is dropped. Return False, with nothing
    done, in a thread in which handlers do not wait.
    """
    if get_ident() != _holder:
        return False
    if id(run) not in _runs:
        _runs.add(id(run))
        weakref.finalize(run, _forget, id(run)).atexit = False
    return True


def let_go(run: object) -> None:
    """End :func:`keep_for` of ``run``; after the last run put handlers back. Idempotent."""
    _forget(id(run))


def _forget(run: int) -> None:
    _runs.discard(run)
    # Another thread may not; a stand-in does no harm there until a signal or a batch comes.
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
    """Put handlers back; while there are runs, only Python's own."""
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
    """Call the handlers that wait, or ``only`` one; in the end raise the first exception."""
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
