"""Private APIs of other libraries that storages use.

An upgrade of such a library can break only this module. `tests/project/test_compat.py` reports
the attributes that are missing.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Callable


# --- tensordict -----------------------------------------------------------------------------------

entries_of: Callable[[TensorDict], dict[str, Any]] = attrgetter("_tensordict")
"""The internal dictionary of a plain TensorDict. A copy costs as much as ten lookups."""
names_of: Callable[[TensorDict], Any] = attrgetter("_td_dim_names")
"""The dimension names of a TensorDict, or None if its dimensions have no names."""
new_tensordict: Callable[..., TensorDict] = TensorDict._new_unsafe
"""Make a TensorDict without checking the shapes. With the checks, this takes five times as long."""


def plain_tensordict(
    entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None = None
) -> TensorDict:
    """Return an unlocked TensorDict that uses ``entries`` without a copy.

    This takes a third of the time of the public constructor.
    """
    made = TensorDict.__new__(TensorDict)
    made._device, made._td_dim_names = device, None
    made._tensordict, made._batch_size = entries, batch_size
    return made


# --- torch ----------------------------------------------------------------------------------------

wrapper_tensor: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Make a tensor of a subclass that has a shape and a dtype, but no memory."""


def tensor_guards() -> Any:
    """Return torch's class of tensor guards, or None if it does not behave as we require.

    The class compares tensors for torch's compiler. It is private to torch and may change or
    disappear. Without it, every batch is converted to arrays.
    """
    try:
        from torch._C._dynamo import guards

        kind: Any = guards.TensorGuards
        one = torch.zeros(2, 2, device="cpu")
        same = kind(one, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = (one[:1], one.T, one.double(), one.to("meta"), one.clone().requires_grad_())
        return kind if same(one.clone()) and not any(map(same, others)) else None
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None


def takes_pinned_memory(device: torch.device) -> bool:
    """Return True if copies from pinned memory to ``device`` are asynchronous.

    `Tensor.pin_memory` pins for the accelerator of the process. It does not support MPS.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


# --- TorchRL's replay buffers ---------------------------------------------------------------------

CURSOR: Final = "_cursor"
"""Attribute of a writer: the index of its next write."""
WRITER: Final = "_writer"
"""Attribute of a buffer: its writer. A buffer has no writer before it is initialised."""
WRITER_MAKER: Final = "_init_writer"
"""Attribute of a buffer before initialisation: its writer, a factory for it, or None."""
COLLATE: Final = "_init_collate_fn"
"""Attribute of a buffer: its collate function, or None for the default."""


ROWS: Final = "_storage"
"""Attribute of a `TensorStorage`: its rows, one for each slot."""
STORED: Final = "_len"
"""Attribute of a `TensorStorage`: the number of rows that were written."""
LAST_INDEX: Final = "_last_cursor"
"""Attribute of a `TensorStorage`: the index of the last write."""
INITIALISE: Final = "_init"
"""Method of a `TensorStorage` that allocates the rows, given one row as a pattern."""


def attached_buffers(storage: Any) -> list[Any]:
    """Return the replay buffers over a storage."""
    return list(storage._attached_entities_list)


def counts_in_64_bits(writer: Any) -> bool:
    """Return True if the writer's cursor is not limited to a 32-bit C integer."""
    return bool(writer._compilable)
