"""Protection against user code that raises ``StopIteration`` inside a loop."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import ClassVar

ENDS = StopIteration, StopAsyncIteration
"""The exceptions that Python interprets as the end of an iterator."""


class UserCode(ContextDecorator):
    """Context manager and decorator that converts a ``StopIteration`` to an error of Tallyroll.

    Other exceptions propagate unchanged. The original exception is the cause of the error.

    Args:
        place: the name of the call, with which the message begins, such as ``"postproc"``.
    """

    raises: ClassVar[type[Exception]]
    """The exception class to raise."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Convert ``error`` if it is an exception that would end a loop."""
        if isinstance(error, ENDS):
            raise self.error(self._place, error) from error

    @classmethod
    def error(cls, place: str, original: BaseException) -> Exception:
        """Return the error for ``original``, which the caller sets as its cause."""
        text = str(original).partition("\n")[0]
        got = f"{type(original).__name__}{f' ({text:.200})' if text else ''}"
        return cls.raises(
            f"{place}: expected a result or another exception, got {got}, which would end the loop "
            "over the results. Catch it in that code, or give next() a default."
        )
