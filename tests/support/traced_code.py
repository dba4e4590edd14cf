"""Look at each instruction of a package's code as it runs, and interrupt it there."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

Look = Callable[[Any], object]


class Interruption(Exception):
    """Exception that a handler raises."""


@contextmanager
def traced(
    folder: str,
    instruction: Look,
    begin: Look | None = None,
    only: Collection[CodeType] | None = None,
) -> Iterator[None]:
    """Call ``instruction`` with the frame before each one of code in files of ``folder``.

    ``begin`` is called where a function of it begins. ``only`` are functions' codes; None: all.
    """

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "opcode":
            instruction(frame)
        else:
            frame.f_trace_opcodes = True  # Python 3.14 heeds it once there was such an event
        return local

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if only is not None and frame.f_code not in only:
            return None
        frame.f_trace_opcodes = True
        if begin is not None:
            begin(frame)
        return local

    before = sys.gettrace()
    # Python 3.12 gives these events only where a frame asked for them before the call.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


_CHECKED = {
    dis.opmap[name]
    for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "CALL_FUNCTION_KW")
    if name in dis.opmap
}


@contextmanager
def at_checks(folder: str, look: Look) -> Iterator[None]:
    """Call ``look`` with the frame where Python looks for signals, in code of ``folder``.

    That is where a function begins, and behind each call.
    """

    def look_behind_calls(frame: Any) -> None:
        code, last = frame.f_code.co_code, frame.f_lasti - 2
        while last > 0 and code[last] == 0:  # caches of the instruction before
            last -= 2
        if last >= 0 and code[last] in _CHECKED:
            look(frame)

    with traced(folder, look_behind_calls, begin=look):
        yield
