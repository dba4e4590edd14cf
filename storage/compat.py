"""Private parts of other libraries that storages use: an upgrade can break them here alone.

What is missing is said by `tests/project/test_compat.py`.
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
"""A plain TensorDict's own dictionary: another one costs as much as ten lookups."""
names_of: Callable[[TensorDict], Any] = attrgetter("_td_dim_names")
"""The names of its dimensions, None where they have none."""
new_tensordict: Callable[..., TensorDict] = TensorDict._new_unsafe
"""A TensorDict whose shapes are known: a check of each would cost five times as much."""


def plain_tensordict(entries: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    """Return an unlocked TensorDict over ``entries`` themselves, in a third of the time."""
    made = TensorDict.__new__(TensorDict)
    made._device, made._td_dim_names = None, None
    made._tensordict, made._batch_size = entries, batch_size
    return made


# --- torch ----------------------------------------------------------------------------------------


def tensor_guards() -> Any:
    """Return the class that compares tensors for torch's compiler, if it does what we rely on.

    torch promises neither that nor that it stays. Without it every batch is made arrays.
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


# --- TorchRL's replay buffers ---------------------------------------------------------------------

CURSOR: Final = "_cursor"
"""The attribute of a writer that says where it writes next."""
WRITER: Final = "_writer"
"""That of a buffer for its writer; it has none before it is initialised."""
WRITER_MAKER: Final = "_init_writer"
"""Until then, the writer that it will have, or what makes one; None for its default."""
COLLATE: Final = "_init_collate_fn"
"""The collate function that it will have; None for its default."""


ROWS: Final = "_storage"
"""The attribute of a `TensorStorage` for its rows, one for each of its slots."""
STORED: Final = "_len"
"""That for how many of them were written."""
LAST_INDEX: Final = "_last_cursor"
"""That for the index of what was written last."""
INITIALISE: Final = "_init"
"""The method that makes its rows, all like the one that it is given."""


def attached_buffers(storage: Any) -> list[Any]:
    """Return the replay buffers over a storage."""
    return list(storage._attached_entities_list)


def counts_in_64_bits(writer: Any) -> bool:
    """Return whether a writer's cursor is no C integer of 32 bits."""
    return bool(writer._compilable)
