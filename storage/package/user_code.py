"""Calls of code that users give, whose ``StopIteration`` must not end a loop over its results."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import ClassVar

ENDS = StopIteration, StopAsyncIteration
"""The exceptions that Python takes for the end of an iterator."""


class UserCode(ContextDecorator):
    """A context, or a decorator, that turns a ``StopIteration`` inside it into an error of ours.

    Other exceptions pass. The error has the original one as its cause.

    Args:
        place: the call in words, with which the message begins: ``"postproc"``.
    """

    raises: ClassVar[type[Exception]]
    """The class of the error."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the error of ours, if ``error`` is one that would end a loop."""
        if isinstance(error, ENDS):
            raise self.error(self._place, error) from error

    @classmethod
    def error(cls, place: str, original: BaseException) -> Exception:
        """Return the error of ours for ``original``, which the caller makes its cause."""
        text = str(original).partition("\n")[0]
        got = f"{type(original).__name__}{f' ({text:.200})' if text else ''}"
        return cls.raises(
            f"{place}: expected a result or another exception, got {got}, which would end the loop "
            "over the results. Catch it in that code, or give next() a default."
        )
