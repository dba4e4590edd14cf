"""Calls of code that users give: environments, policies, samplers, hooks."""

from tallyroll.collector.errors import UserStopIteration
from tallyroll.storage.package.user_code import ENDS, UserCode

__all__ = ["ENDS", "user_code"]


class user_code(UserCode):
    """A context whose ``StopIteration`` becomes :class:`UserStopIteration`; see `UserCode`."""

    raises = UserStopIteration
