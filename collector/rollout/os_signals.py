"""Ctrl-C, and other signals whose handlers may raise, only where nothing is half done.

Python runs a signal's handler between any two instructions of the main thread. An exception from
there, between the answer of a worker and the note that it came, would lose transitions in the
middle of a trajectory whose later ones are stored. So while a batch is made, handlers wait until
:class:`admitted` code runs: an environment, a policy, the wait for workers.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""The signals that people end, or limit, a computation with."""
_PATIENCE_SECONDS = 1.0
"""A signal that has waited for so long is handled wherever the program is."""

_Handler = Callable[[int, FrameType | None], object]

_handlers: dict[int, _Handler] = {}
"""What handles signals when it is not :func:`_arrived`."""
_former: dict[int, _Handler] = {}
"""What handled signals before that."""
_calling: set[int] = set()
"""Signals whose handlers are running."""
_waiting: dict[int, threading.Timer] = {}
"""Signals that nobody has handled yet, and what sends them again."""
_again: set[int] = set()
"""Signals that were sent again."""
_holder: int | None = None
"""The thread, always the main one, inside of :class:`deferred`."""
_admitting = False

# Every change of these is one instruction, so that what a handler raises finds them as they are.


class deferred:
    """Handlers wait inside of this, and are called at its end at the latest.

    Handlers run in the main thread only: in another one this does nothing.
    """

    def __enter__(self) -> None:
        """Let them wait."""
        global _holder, _admitting
        thread = threading.get_ident()
        self._inner = thread == _holder
        self._outer = _holder is None and thread == threading.main_thread().ident
        self._before = _admitting
        if self._outer:
            _again.clear()
            try:
                _install()
            except BaseException:
                _restore()
                raise
        if self._inner or self._outer:
            _admitting = False
            _holder = thread

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Call those of the signals that have arrived."""
        global _holder, _admitting
        if self._inner:
            _admitting = self._before
        elif self._outer:
            _holder = None
            try:
                _restore()
            finally:  # a handler that was restored first may raise before the others are
                _restore()
            _call_waiting()


class admitted:
    """Handlers are called at once inside of this, those that wait before it begins."""

    def __enter__(self) -> None:
        """Call them from here on."""
        global _admitting
        self._mine = threading.get_ident() == _holder
        if not self._mine:
            return
        self._before = _admitting
        try:
            _admitting = True
            _call_waiting()
        except BaseException:
            _admitting = self._before
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let them wait again."""
        global _admitting
        if self._mine:
            _admitting = self._before


def _install() -> None:
    for number in _NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not _arrived:
            before = _handlers.get(number)
            if before is not None and before != handler:
                _former[number] = before
            _handlers[number] = handler
            signal.signal(number, _arrived)


def _restore() -> None:
    for number in _NUMBERS:
        if signal.getsignal(number) is _arrived:
            signal.signal(number, _handlers[number])


def _arrived(number: int, frame: FrameType | None) -> None:
    if number in _calling:  # a handler calls the one that it found, which was this
        if number in _former:
            _former[number](number, frame)
        return
    again = number in _again
    _again.discard(number)
    if again and number not in _waiting:
        return  # it was handled in between
    if again or _holder is None or _admitting:
        _call(number, frame)
    elif number not in _waiting:
        timer = threading.Timer(_PATIENCE_SECONDS, _send_again, (number, threading.get_ident()))
        timer.daemon = True
        _waiting[number] = timer
        timer.start()


def _send_again(number: int, thread: int) -> None:
    if number in _waiting:
        _again.add(number)
        signal.pthread_kill(thread, number)


def _call_waiting() -> None:
    """All of them; what the first one raises is raised in the end."""
    if not _waiting:
        return
    raised: BaseException | None = None
    for number in [*_waiting]:
        try:
            _call(number, None)
        except BaseException as error:  # noqa: BLE001  raised below
            raised = raised or error
    if raised is not None:
        raise raised


def _call(number: int, frame: FrameType | None) -> None:
    global _admitting
    before, _admitting = _admitting, False
    timer = _waiting.pop(number, None)
    if timer is not None:
        timer.cancel()
    _calling.add(number)
    try:
        _handlers[number](number, frame)
    finally:
        _calling.discard(number)
        _admitting = before
