"""Errors of a command that has changed nothing yet."""

from tallyroll.collector.errors import CollectorError


class CommandError(CollectorError):
    """The command cannot be carried out; the message says what to do. Nothing was changed.

    ``command`` is one to be pasted instead, shown below the message.
    """

    def __init__(self, message: str, command: str = "") -> None:
        super().__init__(message)
        self.command = command
