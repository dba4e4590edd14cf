"""Guard for calls of user code: environments, policies, samplers, hooks."""

from tallyroll.collector.errors import UserStopIteration
from tallyroll.storage.package.user_code import ENDS, UserCode

__all__ = ["ENDS", "user_code"]


class user_code(UserCode):
    """Context that replaces ``StopIteration`` with :class:`UserStopIteration`; see `UserCode`."""

    raises = UserStopIteration
