"""Calls of code that users give to storages: transforms, callbacks, readers, formats."""

from tallyroll.storage.errors import CallbackStopIteration
from tallyroll.storage.package.user_code import UserCode

__all__ = ["user_callback"]


class user_callback(UserCode):
    """A context whose ``StopIteration`` becomes :class:`CallbackStopIteration`; see `UserCode`."""

    raises = CallbackStopIteration
