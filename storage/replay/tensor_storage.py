"""The methods that TorchRL calls on a `TensorStorage`, for rows on disk, or refused.

Some of its samplers and maps work on tensor storages alone, and check the class. So this class
overrides every method of it: those that rows on disk cannot support raise an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from tallyroll.storage.errors import NotAnAppend
from tallyroll.storage.readers.row_reader import RowReader

IN_PLACE = (
    "rows on disk are only added, and never change. Extend with what is new, and keep what is to "
    "change, such as priorities, in a sampler; where rows must change, use TorchRL's "
    "LazyMemmapStorage."
)


class AsTensorStorage(TensorStorage):
    """The face of a `TensorStorage` of one dimension over a reader of rows."""

    reader: RowReader
    supports_conditional_update = False

    ndim: int = 1
    device: torch.device = torch.device("cpu")

    def __init__(self) -> None:
        # Compilable: otherwise TorchRL makes two semaphores, which outlive a killed process, for
        # counts that we take from the header. More rows than any disk has: a tree of priorities of
        # that size is a MemoryError, where the largest integer makes TorchRL count for ever.
        Storage.__init__(self, max_size=2**48, compilable=True)

    def _fit_ring(self) -> None:
        if self.reader.ring:
            self.max_size = self.reader.ring

    @property
    def initialized(self) -> bool:
        """True if there are columns yet."""
        return self.reader.initialised

    @property
    def shape(self) -> torch.Size:
        """The number of rows, as a shape [rows]."""
        return torch.Size([len(self.reader)])

    @property
    def _storage(self) -> TensorDict | None:
        # Changes to its tensors stay in this process.
        return self.reader.get(slice(None)) if self.reader.initialised else None

    @property
    def _len(self) -> int:
        return len(self.reader)

    @_len.setter
    def _len(self, rows: int) -> None:
        _refuse()

    @property
    def _total_shape(self) -> torch.Size:
        return torch.Size([self.max_size])

    @property
    def _len_along_dim0(self) -> int:
        return len(self.reader)

    @property
    def _storage_keys(self) -> None:
        return None

    @property
    def _is_full(self) -> bool:
        return len(self.reader) == self.max_size

    def _max_size_along_dim0(self, **_: Any) -> int:
        return self.max_size

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        return torch.randint(len(self.reader), (batch_size,), generator=self._rng)

    _rand_given_ndim_impl = _rand_given_ndim

    def flatten(self) -> AsTensorStorage:
        """Return this storage, which has one dimension already."""
        return self

    def _bump_mutation_revision(self) -> None:
        # A buffer calls this after it wrote to the rows of `self[:]`, which only the buffer sees.
        _refuse()

    def _wait_for_init(self) -> None:
        """Return at once: no other process makes this storage."""

    # TorchRL 0.15 asks these, for workers of a `DataLoader` that are forked.

    def _content_leaves(self) -> list[torch.Tensor]:
        return []  # rows are in files

    def _content_devices(self) -> set[torch.device]:
        return {self.device}

    def _share_memory_(self) -> None:
        """Do nothing: every process that maps the files reads later rows."""

    def _fork_safe(self) -> bool:
        return True  # a copy reads the count of rows in the files, as this storage does

    def _init(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    def __setstate__(self, state: Any) -> NoReturn:
        _refuse()

    _conditional_patch_leaf = _validate_conditional_patch = _apply_conditional_patch = _init
    _set_tree_map = _get_new_len = _raise_informative_lock_error = _init


def _refuse() -> NoReturn:
    raise NotAnAppend(IN_PLACE[0].upper() + IN_PLACE[1:])
