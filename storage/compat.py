"""Private parts of other libraries that storages stand on: an upgrade may break them here alone.

What is missing is said by `tests/project/test_compat.py`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CURSOR",
    "attached_buffers",
    "collate_of",
    "counts_in_64_bits",
    "entries_of",
    "names_of",
    "new_tensordict",
    "set_collate",
    "set_writer_maker",
    "tensor_guards",
    "writer_maker_of",
    "writer_of",
]

# --- tensordict -----------------------------------------------------------------------------------

entries_of: Callable[[TensorDict], dict[str, Any]] = attrgetter("_tensordict")
"""A plain TensorDict's own dictionary: another one costs as much as ten lookups."""
names_of: Callable[[TensorDict], Any] = attrgetter("_td_dim_names")
"""The names of its dimensions, None where they have none."""
new_tensordict: Callable[..., TensorDict] = TensorDict._new_unsafe
"""A TensorDict whose shapes are known: a check of each would cost five times as much."""


# --- torch ----------------------------------------------------------------------------------------


def tensor_guards() -> Any:
    """The class that compares tensors for torch's compiler, if it does what we rely on.

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


def attached_buffers(storage: Any) -> list[Any]:
    """The replay buffers over a storage."""
    return list(storage._attached_entities_list)


def writer_of(buffer: Any) -> Any:
    """A buffer's writer, None where it has none yet."""
    return getattr(buffer, "_writer", None)


def writer_maker_of(buffer: Any) -> Any:
    """The writer of a buffer that is not initialised, or what makes one; None for its default."""
    return getattr(buffer, "_init_writer", None)


def set_writer_maker(buffer: Any, make: Callable[[], Any]) -> None:
    """Let ``make`` do that."""
    buffer._init_writer = make


def collate_of(buffer: Any) -> Any:
    """The collate function that a buffer will have; None for its default."""
    return getattr(buffer, "_init_collate_fn", None)


def set_collate(buffer: Any, collate: Callable[[Any], Any]) -> None:
    """Let ``collate`` be that."""
    buffer._init_collate_fn = collate


def counts_in_64_bits(writer: Any) -> bool:
    """Whether a writer's cursor is no C integer of 32 bits."""
    return bool(writer._compilable)
