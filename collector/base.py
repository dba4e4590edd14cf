"""What every collector is to its user: an iterator of batches, a ledger, a policy, metrics."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import ceil
from types import TracebackType
from typing import Self

from tensordict import TensorDictBase

from tallyroll.collector import arguments
from tallyroll.collector.episodes import EpisodeLog
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.keys import RANDOM_VERSION
from tallyroll.collector.ledger import Budget, Ledger
from tallyroll.collector.policy import Policy, Weights


class Collector(ABC):
    """An iterable of batches that is a context manager.

    A subclass makes :meth:`_collect` give the next batch, and sets what is declared here.
    """

    ledger: Ledger
    """The balanced count of the run."""
    episodes: EpisodeLog
    """Finished episodes."""
    frames_per_batch: int
    _budget: Budget
    _policy: Policy | None
    _over: bool

    @abstractmethod
    def _collect(self) -> TensorDictBase | None:
        """The next batch; None where the run ended without one. Sets ``_over`` at its end."""

    @abstractmethod
    def stop(self) -> None:
        """End the run after the step under way; what is complete makes a last, shorter batch.

        Safe to call from a signal handler or another thread.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the run, close what was made here: the environment, the storage. Idempotent."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is met or :meth:`stop` was called."""
        while not self._over:
            batch = self._collect()
            if batch is not None:
                yield batch

    def __len__(self) -> int:
        """Number of batches that a run of limited frames has in all."""
        if self._budget.total is None:
            raise TypeError("a collector without total_frames has no length")
        return ceil(self._budget.total / self.frames_per_batch)

    def __enter__(self) -> Self:
        """The collector; leaving the block shuts it down."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down. What goes wrong with that is a note of an ``error`` that is there already."""
        try:
            self.shutdown()
        except Exception as again:
            if error is None:
                raise
            add_end_note(error, again)

    @property
    def policy_version(self) -> int:
        """How often the policy's weights were updated; -1 where actions are random."""
        return RANDOM_VERSION if self._policy is None else self._policy.version

    def update_policy_weights_(self, weights: Weights = None) -> None:
        """Use new weights for every action chosen from here on, and count the version up.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes those that
                the policy given at construction has now.
        """
        if self._policy is None:
            raise ArgumentError("this collector draws random actions: it has no weights to update")
        self._policy.update_weights(weights)

    def metrics(self, window: int = 100) -> dict[str, float]:
        """A flat dict for any logger: the counts, and means over the last ``window`` episodes."""
        arguments.positive("window", window)
        recent = self.episodes[-window:]
        return {
            "frames": self.ledger.stored,
            "ticks": self.ledger.ticks,
            "reset_slots": self.ledger.reset_slots,
            "discarded": self.ledger.discarded,
            "episodes": self.ledger.episodes_complete,
            "policy_version": self.policy_version,
            "return_mean": _mean([episode.total_return for episode in recent]),
            "length_mean": _mean([float(episode.length) for episode in recent]),
        }


def add_end_note(error: BaseException, again: Exception) -> None:
    """Note of ``error``, which is raised, what else went wrong at the end of the run."""
    error.add_note(f"tallyroll: and at the end of the run: {type(again).__name__}: {again}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
