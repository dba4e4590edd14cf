"""Context for calls of user code: transforms, callbacks, readers and formats."""

from tallyroll.storage.errors import CallbackStopIteration
from tallyroll.storage.package.user_code import UserCode

__all__ = ["user_callback"]


class user_callback(UserCode):
    """Convert ``StopIteration`` to :class:`CallbackStopIteration`; see `UserCode`."""

    raises = CallbackStopIteration
