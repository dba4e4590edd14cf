"""Adapter that gives a reader of rows the interface of TorchRL's `TensorStorage`.

Some of TorchRL's samplers and maps accept only tensor storages and check the class. This class
therefore overrides every method of `TensorStorage`. Methods that change stored rows raise an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NoReturn, ParamSpec

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from tallyroll.storage.errors import NotAnAppend
from tallyroll.storage.readers.row_reader import RowReader, index_of

IN_PLACE = (
    "stored rows can only be appended and never change. Append new rows with extend, and keep "
    "changing values, such as priorities, in a sampler or an overlay. If rows must change, use "
    "TorchRL's LazyMemmapStorage."
)


_REMEDIES: Final = {
    "device": 'move samples with .to(device), or use DeviceStorage(max_size=n, device="cuda")',
    "scratch_dir": "give the directory as the path of a MemmapStorage, its first argument",
    "existsok": 'MemmapStorage(path, max_size=n, mode="auto") opens or creates a storage',
    "ndim": "rows have one dimension, and lane and step are columns: leave it out",
    **dict.fromkeys(
        ("compilable", "consolidated", "shared_init", "auto_cleanup", "cleanup_memmap"),
        "leave it out",
    ),
}
"""Remedies for the arguments of TorchRL's storages that ours do not have."""
_Arguments = ParamSpec("_Arguments")


def remedies_named(make: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Decorate a constructor, so that it names the remedy for an argument of TorchRL's storages."""
    own = inspect.signature(make).parameters

    @wraps(make)
    def made(*args: _Arguments.args, **given: _Arguments.kwargs) -> None:
        for name in given:
            if name in _REMEDIES and name not in own:
                raise TypeError(
                    f"{name}: {type(args[0]).__name__} has no such argument of TorchRL's storages; "
                    f"{_REMEDIES[name]}."
                )
        make(*args, **given)

    return made


class AsTensorStorage(TensorStorage):
    """`TensorStorage` interface, with one dimension, over a reader of rows."""

    reader: RowReader
    writer: Any
    supports_conditional_update = False

    ndim: int = 1
    device: torch.device = torch.device("cpu")

    def __init__(self) -> None:
        # compilable=True: otherwise TorchRL makes two semaphores, which outlive a killed process,
        # for counts that we read from the header. max_size is more rows than any disk can hold. A
        # priority tree of that size raises MemoryError, whereas TorchRL loops forever if max_size
        # is the largest integer.
        Storage.__init__(self, max_size=2**48, compilable=True)

    def _fit_ring(self) -> None:
        if self.reader.ring:
            self.max_size = self.reader.ring

    @property
    def initialized(self) -> bool:
        """True if the storage has a schema."""
        return self.reader.initialised

    @property
    def shape(self) -> torch.Size:
        """The number of rows, as a shape [rows]."""
        return torch.Size([len(self.reader)])

    @property
    def last_index(self) -> int | None:
        """The index of the newest row, or None if the storage is empty."""
        if not len(self.reader):
            return None
        return int(index_of(self.reader, np.array(self.reader.head - 1)))

    # TorchRL's samplers read these to find where a ring begins.
    _last_cursor_index = _last_cursor = last_index

    def contains(self, item: Any) -> Any:
        """Return True if `get` finds a row at this index; for a tensor, a bool for each index."""
        rows = len(self.reader)
        if isinstance(item, torch.Tensor):
            return (item >= -rows) & (item < rows)
        return -rows <= int(item) < rows

    @property
    def _mutation_revision(self) -> int:
        # TorchRL's samplers drop their caches when this changes.
        return self.reader.revision

    @property
    def _storage(self) -> TensorDict | None:
        # Changes to the tensors are visible only in this process.
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
        """Return this storage, which already has one dimension."""
        return self

    def _bump_mutation_revision(self) -> None:
        # A buffer calls this after it wrote to the rows of `self[:]`, which are a private copy.
        _refuse()

    def _wait_for_init(self) -> None:
        """Return at once: no other process initialises this storage."""

    # TorchRL 0.15 calls these for forked workers of a `DataLoader`.

    def _content_leaves(self) -> list[torch.Tensor]:
        return []  # the rows are in files

    def _content_devices(self) -> set[torch.device]:
        return {self.device}

    def _share_memory_(self) -> None:
        """Do nothing, because every process that maps the files can read later rows."""

    def _fork_safe(self) -> bool:
        return True  # like this storage, a copy reads the row count from the files

    def _init(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    def __setstate__(self, state: Any) -> NoReturn:
        _refuse()

    _conditional_patch_leaf = _validate_conditional_patch = _apply_conditional_patch = _init
    _set_tree_map = _get_new_len = _raise_informative_lock_error = _init


def _refuse() -> NoReturn:
    raise NotAnAppend(IN_PLACE[0].upper() + IN_PLACE[1:])
