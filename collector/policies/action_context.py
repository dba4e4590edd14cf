"""Context of steps and policy calls: no gradients, and the configured exploration type."""

from collections.abc import Callable
from typing import Any

import torch
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.compat import ExplorationPlace, set_gradients


class ActionContext:
    """Faster replacement for `torch.no_grad` with `set_exploration_type`. Do not nest it.

    Args:
        exploration: the exploration type.
    """

    __slots__ = ("before", "exploration", "place")

    def __init__(self, exploration: ExplorationType) -> None:
        self.exploration, self.place = exploration, ExplorationPlace()
        self.before: tuple[bool, Any] | None = None
        """The previous gradient mode and exploration type; None outside of the context."""

    def __enter__(self) -> None:
        """Enter the context."""
        self.before = torch.is_grad_enabled(), self.place.get()
        try:  # signal handlers run after calls of compiled functions
            set_gradients(False)
            self.place.put(self.exploration)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        """Restore both settings. A second call has no effect, even if the first one raised."""
        if self.before is not None:
            try:
                self.place.put(self.before[1])
            finally:
                set_gradients(self.before[0])
            self.before = None

    def call(self, fill: Callable[[int], None], want: int) -> None:
        """Call ``fill(want)`` within the context, in fewer Python calls than a ``with`` block."""
        self.before = before = torch.is_grad_enabled(), self.place.get()
        try:
            set_gradients(False)
            self.place.put(self.exploration)
            fill(want)
        finally:
            set_gradients(before[0])
            self.place.put(before[1])
            self.before = None
