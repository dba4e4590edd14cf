"""Checks of a sampler's storage, and a base class for samplers without state."""

from __future__ import annotations

from typing import Any

from torchrl.data.replay_buffers.samplers import Sampler

from tallyroll.storage.errors import SlotsMayChange
from tallyroll.storage.replay.tensor_storage import AsTensorStorage
from tallyroll.storage.storages import DiskStorage


def require_storage(
    storage: Any, sampler: str, others: str, kind: type[AsTensorStorage] = DiskStorage
) -> None:
    """Raise unless ``storage`` is a Tallyroll storage.

    Args:
        storage: the storage of a buffer.
        sampler: the name of the sampler, for the message.
        others: the remedy for other storages, for the message.
        kind: the class of storages that the sampler works with.

    Raises:
        TypeError: the storage is of another library.
    """
    if not isinstance(storage, kind):
        raise TypeError(
            f"{sampler}: expected a storage of tallyroll.storage, got {type(storage).__name__}. "
            f"{others}"
        )


def require_same(own: DiskStorage, storage: Any) -> None:
    """Raise unless the buffer uses the sampler's ``own`` storage.

    Raises:
        ValueError: the buffer uses another storage.
    """
    if storage is not own:
        raise ValueError(
            f"expected a buffer over {own!r}, the storage of this sampler, got a buffer over "
            f"{storage!r}. Give both the same storage."
        )


def require_slots_stay(
    storage: DiskStorage, instead: str, reading: str = "reading them through a replay buffer"
) -> None:
    """Raise for a ring that this process only reads; ``instead`` is the remedy for the message.

    Raises:
        SlotsMayChange: another process may overwrite the ring's slots between draw and read.
    """
    if storage.ring and storage.mode == "read":
        raise SlotsMayChange(
            f"{storage.path} is a ring to which another process may write, so rows may change "
            f"between drawing and {reading}. {instead} If this process is to write the ring, open "
            'it with MemmapStorage(path, mode="append").'
        )


class StatelessSampler(Sampler):
    """Base class of samplers without state: the buffer provides the random numbers."""

    def _empty(self) -> None:
        """Do nothing, because there is no state."""

    def dumps(self, path: Any) -> None:
        """Do nothing, because there is no state."""

    def loads(self, path: Any) -> None:
        """Do nothing, because there is no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict, because there is no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, because there is no state."""
