"""State as values that ``torch.load(weights_only=True)`` reads: tensors, numbers, text. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tallyroll.collector.errors import StateError

_KIND = "tallyroll"
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


def to_plain(value: Any, where: str) -> Any:
    """Return ``value`` with arrays and bytes as tensors, and mappings as dicts.

    Args:
        value: a state, as ``state_dict()`` returns it.
        where: the name of what it is the state of, for messages.

    Raises:
        StateError: something in it is none of these; the message names it.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
        return {_KIND: "array", "values": torch.from_numpy(np.array(value, order="C"))}
    if isinstance(value, (bytes, bytearray)):
        octets = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)
        return {_KIND: "bytes", "values": octets.to(torch.uint8)}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if type(key) not in (str, int, float, bool, tuple)]:
            raise _refused(wrong[0], f"a key of {where}")
        found = {key: to_plain(each, f"{where}[{key!r}]") for key, each in value.items()}
        return {_KIND: "mapping", "values": found} if _KIND in found else found
    if isinstance(value, (list, tuple)):
        each_of = [to_plain(each, f"{where}[{at}]") for at, each in enumerate(value)]
        return tuple(each_of) if isinstance(value, tuple) else each_of
    raise _refused(value, where)


def from_plain(value: Any) -> Any:
    """Return what :meth:`to_plain` was given, with mappings as dicts."""
    if isinstance(value, dict):
        kind = value.get(_KIND)
        if kind == "array":
            return value["values"].numpy()
        if kind == "bytes":
            return value["values"].numpy().tobytes()
        if kind == "mapping":
            value = value["values"]
        return {key: from_plain(each) for key, each in value.items()}
    if type(value) is list:
        return [from_plain(each) for each in value]
    if type(value) is tuple:
        return tuple(from_plain(each) for each in value)
    return value


def _refused(value: Any, where: str) -> StateError:
    kind = type(value)
    return StateError(
        f"{where}: expected tensors, arrays, numbers, text, and lists and mappings of these, got "
        f"{kind.__module__}.{kind.__qualname__}; a checkpoint is read without running code, so it "
        "holds nothing else: give the part a state_dict() of such values"
    )
