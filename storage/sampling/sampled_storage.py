"""The storage that a sampler draws from: checks of it, and samplers that keep nothing else."""

from __future__ import annotations

from typing import Any

from torchrl.data.replay_buffers.samplers import Sampler

from tallyroll.storage.errors import SlotsMayChange
from tallyroll.storage.storages import DiskStorage


def require_storage(storage: Any, sampler: str, others: str) -> None:
    """Refuse other storages than ours; ``others`` says what draws from those.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(storage, DiskStorage):
        raise TypeError(
            f"{sampler} draws from the storages of tallyroll.storage, got "
            f"{type(storage).__name__}. {others}"
        )


def require_same(own: DiskStorage, storage: Any) -> None:
    """Refuse a buffer over another storage than the sampler's ``own``.

    Raises:
        ValueError: it is another one.
    """
    if storage is not own:
        raise ValueError(
            f"this sampler draws from {own!r}, and the buffer is over {storage!r}. "
            "Give both the same storage."
        )


def require_slots_stay(
    storage: DiskStorage, instead: str, reading: str = "reading them through a replay buffer"
) -> None:
    """Refuse a ring that is only read here; ``instead`` says what to do.

    Raises:
        SlotsMayChange: it is one, and its slots may get other rows between draw and read.
    """
    if storage.ring and storage.mode == "read":
        raise SlotsMayChange(
            f"{storage.path} is a ring that another process may write, so that rows change between "
            f"drawing and {reading}. {instead}"
        )


class StatelessSampler(Sampler):
    """A sampler without a state: its random numbers are a buffer's, and its rows a storage's."""

    def _empty(self) -> None:
        """Nothing is kept here."""

    def dumps(self, path: Any) -> None:
        """Nothing is kept here."""

    def loads(self, path: Any) -> None:
        """Nothing is kept here."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept here."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is kept here."""
