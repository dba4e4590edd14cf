"""The functions by which callers hear how far a long call is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], object]
"""Called now and then with how much is done, and with how much there is, of bytes or rows."""
MoreDone: TypeAlias = Callable[[int], object]
"""Called now and then with how much was done since its last call."""
