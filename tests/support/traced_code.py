"""Call a function at each instruction of a package's code, for example to interrupt it there."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

Look = Callable[[Any], object]


class Interruption(Exception):
    """Exception that a signal handler raises."""


@contextmanager
def traced(
    folder: str,
    instruction: Look,
    begin: Look | None = None,
    only: Collection[CodeType] | None = None,
) -> Iterator[None]:
    """Call ``instruction`` with the frame before each instruction of code in files of ``folder``.

    ``begin`` is called at the start of each function. ``only`` restricts the functions by their
    code objects; None traces all.
    """

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "opcode":
            instruction(frame)
        else:
            frame.f_trace_opcodes = True  # Python 3.14 respects it only after such an event
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
    # Python 3.12 emits these events only if a frame requested them before the call.
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
    """Call ``look`` with the frame wherever Python checks for signals in code of ``folder``.

    These points are the start of a function and the end of each call.
    """

    def look_behind_calls(frame: Any) -> None:
        code, last = frame.f_code.co_code, frame.f_lasti - 2
        while last > 0 and code[last] == 0:  # cache entries of the previous instruction
            last -= 2
        if last >= 0 and code[last] in _CHECKED:
            look(frame)

    with traced(folder, look_behind_calls, begin=look):
        yield
