"""A signal that comes at a chosen call of a function of ours, and raises what a caller catches."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

How = Literal["", "ctrl-c", "term", "user"]
SIGNALS = {"ctrl-c": signal.SIGINT, "term": signal.SIGTERM, "user": signal.SIGUSR1}
OURS = ("/tallyroll/collector/", "/tallyroll/storage/")


class Stopped(Exception):
    """Exception that a handler of the caller's own raises."""


CAUGHT = (KeyboardInterrupt, Stopped)


@contextmanager
def interrupted(how: How, calls: int) -> Iterator[None]:
    """A signal comes inside, before the ``calls``-th call of a function of ours."""
    if not how:
        yield
        return
    number = SIGNALS[how]
    before = signal.signal(number, signal.default_int_handler if how == "ctrl-c" else _stop)
    left = calls

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event != "call" or not any(part in frame.f_code.co_filename for part in OURS):
            return
        left -= 1
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(number)

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        signal.signal(number, before)


def _stop(number: int, frame: Any) -> None:
    raise Stopped(f"signal {number}")
