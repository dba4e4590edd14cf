"""Copies of columns between the host and a device, packed into one buffer.

Each copy has a fixed overhead, and each copy to the host also waits for the device. Small columns
are therefore copied together. The results are views of one buffer, which lives as long as any of
them. Large columns are copied separately, so that no small column keeps their memory alive.

Other copies: `as_tensor` (``collector/envs/stepping/arrays.py``) takes the arrays of systems, also
by DLPack; ``_value`` in ``collector/workers/central.py`` copies the inputs of a central policy one
by one; the loader (``storage/replay/loader.py``) stages batches in pinned memory; `ExactRow`
(``collector/envs/exact.py``) copies values of single lanes to the host, and `as_flags`
(``envs/stepping/arrays.py``) flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.compat import takes_pinned_memory
from tallyroll.storage.rows.keys import Key, as_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HOST: Final = torch.device("cpu")
ALONE_NBYTES: Final = 2**20
"""Number of bytes from which a column is copied separately."""

K = TypeVar("K")


def same_place(one: torch.device, other: torch.device) -> bool:
    """Return True if both arguments name the same device.

    ``cuda`` is ``cuda:0``, and ``cpu`` is ``cpu:0``.
    """
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def move_columns(
    columns: Mapping[K, torch.Tensor], device: torch.device, *, staged: bool = False
) -> dict[K, torch.Tensor]:
    """Copy dense columns to ``device``, and return all columns in the same order.

    Columns that are already on ``device`` are returned unchanged. A copy to the host waits for the
    device. A copy from the host to a device that takes pinned memory does not wait.

    Args:
        columns: the columns. Each of them may be on another device.
        device: the device of the results.
        staged: True if the caller drops results on the host soon. They are then in pinned memory,
            to which devices copy faster.
    """
    found = dict(columns)
    groups: dict[tuple[torch.device, K | None], list[K]] = {}
    for key, column in columns.items():
        if column.device != device and not same_place(column.device, device):
            alone = column.nbytes >= ALONE_NBYTES
            groups.setdefault((column.device, key if alone else None), []).append(key)
    for keys in groups.values():
        found.update(_PackedColumns({key: columns[key] for key in keys}, device).on(device, staged))
    return found


def move_batch(batch: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return ``batch`` on ``device``; if all entries are plain tensors, use `move_columns`."""
    columns = _leaves_of(batch)
    return (
        batch.to(device) if columns is None else _with(batch, move_columns(columns, device), device)
    )


def fetch(batch: TensorDictBase, keys: Iterable[Key]) -> dict[Key, Any]:
    """Copy entries of ``batch`` to the host together; an entry is None if it is missing.

    The caller copies the values to other memory soon, because they may be in pinned memory.
    """
    found = {key: batch.get(key, None) for key in keys}
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    return {**found, **move_columns(tensors, HOST, staged=True)}


class StagedBatch:
    """Batch on the host whose columns are packed in pinned memory, ready for a copy to a device."""

    def __init__(
        self, batch: TensorDictBase, columns: dict[Key, torch.Tensor], device: torch.device
    ) -> None:
        small = {key: column for key, column in columns.items() if column.nbytes < ALONE_NBYTES}
        large = [{key: column} for key, column in columns.items() if key not in small]
        self._batch = batch
        self._packed = [_PackedColumns(each, device) for each in (small, *large) if each]

    @classmethod
    def of(cls, batch: Any, device: torch.device) -> StagedBatch | None:
        """Stage ``batch`` for ``device``; return None if not all entries are plain host tensors."""
        columns = _leaves_of(batch)
        if columns is None or any(column.device != HOST for column in columns.values()):
            return None
        return cls(batch, columns, device)

    def to(self, device: torch.device, *, non_blocking: bool = True) -> TensorDictBase:
        """Return the batch on ``device``."""
        moved = {key: each for packed in self._packed for key, each in packed.on(device).items()}
        return _with(self._batch, moved, device)


def _leaves_of(batch: Any) -> dict[Key, torch.Tensor] | None:
    """Return all tensors of a TensorDict; None if one of its entries cannot be packed."""
    leaves: dict[Key, torch.Tensor] = {}

    def are_plain(td: Any, root: Key) -> bool:
        if type(td) is not TensorDict:
            return False
        for name, value in td.items():
            key = (*root, name)
            if type(value) is not torch.Tensor:
                if not are_plain(value, key):
                    return False
            elif _is_plain(value):
                leaves[key] = value
            else:
                return False
        return True

    return leaves if are_plain(batch, ()) else None


def _is_plain(value: torch.Tensor) -> bool:
    """Return True if ``value`` consists of its bytes alone, so that a copy of them is enough."""
    dense = value.layout is torch.strided and not value.is_nested
    return dense and not (value.requires_grad or value.is_conj() or value.is_neg())


def _with(
    batch: TensorDictBase, columns: Mapping[Key, torch.Tensor], device: torch.device
) -> TensorDictBase:
    """Return ``batch`` with its tensors replaced by ``columns``, which are on ``device``."""
    made = batch.named_apply(lambda key, _: columns[as_key(key)], nested_keys=True, device=device)
    return cast("TensorDictBase", made)


def _octets(column: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense column, uint8 [nbytes]."""
    dense = column.contiguous()
    # A contiguous column with at most one element may have any stride.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class _PackedColumns(Generic[K]):
    """Columns of one device, packed into one buffer for a copy to ``device``."""

    def __init__(self, columns: Mapping[K, torch.Tensor], device: torch.device) -> None:
        # Wide dtypes come first, so that each column is aligned.
        self._order = sorted(columns, key=lambda key: -columns[key].itemsize)
        self._layouts = [(columns[key].dtype, columns[key].shape) for key in self._order]
        octets = [_octets(columns[key]) for key in self._order]
        self._sizes = list(map(len, octets))
        self._source = octets[0].device
        self._pinned = self._source.type == "cpu" and takes_pinned_memory(device)
        if self._pinned:
            buffer = torch.empty(sum(self._sizes), dtype=torch.uint8, pin_memory=True)
            self._octets = torch.cat(octets, out=buffer)
        else:
            self._octets = octets[0] if len(octets) == 1 else torch.cat(octets)

    def on(self, device: torch.device, staged: bool = False) -> dict[K, torch.Tensor]:
        """Return the columns on ``device``; ``staged`` is as for :func:`move_columns`."""
        here = self._octets
        if staged and device.type == "cpu" and takes_pinned_memory(self._source):
            there = torch.empty_like(here, device=device, pin_memory=True).copy_(here)
        else:
            there = here.to(device, non_blocking=self._pinned)
        parts = zip(self._order, self._layouts, there.split_with_sizes(self._sizes), strict=True)
        return {key: part.view(dtype).view(shape) for key, (dtype, shape), part in parts}
