"""Types of progress callbacks for long calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], object]
"""Callback that is called regularly with the amount done and the total, in bytes or rows."""
MoreDone: TypeAlias = Callable[[int], object]
"""Callback that is called regularly with the amount done since its last call."""
