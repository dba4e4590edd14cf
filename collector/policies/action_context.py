"""The context of steps and policy calls: no gradients, and the chosen exploration."""

from typing import Any

import torch
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.compat import ExplorationPlace, set_gradients


class ActionContext:
    """A context like `torch.no_grad` and `set_exploration_type`, quicker; not to be nested.

    Args:
        exploration: the type.
    """

    __slots__ = ("before", "exploration", "place")

    def __init__(self, exploration: ExplorationType) -> None:
        self.exploration, self.place = exploration, ExplorationPlace()
        self.before: tuple[bool, Any] | None = None
        """Gradients and exploration as they were; None outside."""

    def __enter__(self) -> None:
        """Begin."""
        self.before = torch.is_grad_enabled(), self.place.get()
        try:  # signals' handlers run after calls of compiled functions
            set_gradients(False)
            self.place.put(self.exploration)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        """Let both be as they were. Idempotent, also after an exception in its middle."""
        if self.before is not None:
            try:
                self.place.put(self.before[1])
            finally:
                set_gradients(self.before[0])
            self.before = None
