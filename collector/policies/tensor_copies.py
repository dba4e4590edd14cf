"""Copies of TensorDicts, bit for bit, which a policy or an environment may write to and keep."""

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from tallyroll.storage.compat import entries_of, names_of, new_tensordict


def own_tensors(td: TensorDictBase) -> TensorDictBase:
    """Return a copy of ``td`` that shares no memory with it, at any level, and has its very bits.

    ``td.clone()`` has not, where ``td`` knows its device: it adds 0 to all tensors in one call,
    which makes 0.0 of -0.0 and another NaN of some, and which torch lacks for wide unsigned
    integers.

    Memory comes from the allocator and not from a pool of buffers: the allocator returns memory
    that was used a moment ago, so that a copy costs no more than copying its bytes, and any view
    of a copy keeps it alive.
    """
    if type(td) is not TensorDict:
        return td.clone() if is_non_tensor(td) else td.apply(torch.clone)
    # A plain TensorDict's own dictionary: `clone` costs two thirds more.
    source = {
        name: value.clone() if isinstance(value, torch.Tensor) else own_tensors(value)
        for name, value in entries_of(td).items()
    }
    return new_tensordict(
        source=source,
        batch_size=td.batch_size,
        device=td.device,
        names=names_of(td),
        nested=False,
    )


def own_tensors_on(td: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return such a copy on ``device``; one copy if all of ``td`` is on another device."""
    if td.device is None or same_place(td.device, device):
        td = own_tensors(td)
    return td.to(device)


def same_place(one: torch.device, other: torch.device) -> bool:
    """``cuda`` and ``cuda:0`` are one device, and so are ``cpu`` and ``cpu:0``."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)
