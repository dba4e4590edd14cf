"""The context of steps and policy calls: no gradients, and the chosen exploration."""

from typing import Any

import torch
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.compat import ExplorationPlace, set_gradients


class Acting:
    """A context like `torch.no_grad` and `set_exploration_type`, quicker; not to be nested.

    Args:
        exploration: the type.
    """

    __slots__ = ("_exploration_before", "_gradients_before", "exploration", "place")

    def __init__(self, exploration: ExplorationType) -> None:
        self.exploration, self.place = exploration, ExplorationPlace()

    def __enter__(self) -> None:
        """Begin."""
        self._gradients_before, self._exploration_before = torch.is_grad_enabled(), self.place.get()
        try:  # signals' handlers run after calls of compiled functions
            set_gradients(False)
            self.place.put(self.exploration)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        """Let both be as they were."""
        try:
            self.place.put(self._exploration_before)
        finally:
            set_gradients(self._gradients_before)
