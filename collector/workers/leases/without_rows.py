"""Refusals of a sharded run: what needs rows in this process, or an order among those of shards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.rollout.source import Held


class WithoutRows:
    """The part of `ShardedLeases` that refuses what needs rows; the run goes on."""

    _run: RunState

    def batch(self, size: int | None = None) -> NoReturn:
        """Refuse: no row comes here."""
        self._refuse("its rows stay in the shards; call collect(n), and open the storage to read")

    def discard(self, *_: object) -> None:
        """Do nothing, before `restart_lanes` refuses."""

    def restart_lanes(self, *_: object) -> NoReturn:
        """Refuse."""
        self._refuse("workers number their rows; give seed= to another collector")

    @contextmanager
    def still(self) -> Iterator[Sequence[Held]]:
        """Refuse: a call between rows of several shards has no place among them."""
        self._refuse("calls of environments have no place among rows of several shards")
        yield ()

    def leave(self) -> None:
        """Do nothing: no policy acts here."""

    def _refuse(self, why: str) -> NoReturn:
        self._run.intact = True  # the run goes on
        raise ArgumentError(f"sharded=True: {why}")


class GoesOnFromStorage:
    """In the place of `Restarting`: a sharded run goes on from its storage alone."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(
            "sharded=True: the run goes on from its storage, by resume=True, and has no other state"
        )
