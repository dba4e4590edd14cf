"""A signal at a chosen call of our code, whose handler raises an exception for the caller."""

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
    """Exception that the caller's own signal handler raises."""


CAUGHT = (KeyboardInterrupt, Stopped)


@contextmanager
def interrupted(how: How, calls: int) -> Iterator[None]:
    """Raise a signal within the context, before the ``calls``-th call of one of our functions."""
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
