"""Networks of policy functions that a checkpoint does not save."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

_LIBRARIES = {"builtins", "collections", "functools", "numpy", "random"}
_LIBRARIES |= {"tallyroll", "tensordict", "torch", "torchrl"}
"""Packages whose classes, other than modules, hold no networks of a policy."""

_MOST_VALUES = 1_000
"""The number of values of a container that the search visits."""
_MOST_OBJECTS = 10_000
"""The number of objects after which the search ends."""


def unsaved_networks(policy: object, parts: Mapping[str, Any]) -> list[str]:
    """Return the names of the networks that a function uses and that no part of a checkpoint saves.

    The search is best effort. It follows closures, global variables, arguments of
    `functools.partial`, containers and attributes of objects.

    Args:
        policy: the policy as the caller passed it. The collector saves one that is a module.
        parts: the parts of the checkpoint, by name. A part of an unknown class, or with tensors,
            may hold any network, so that the list is empty.
    """
    if policy is None or isinstance(policy, nn.Module):
        return []
    saved: set[int] = set()
    for part in parts.values():
        if isinstance(part, nn.Module):
            saved |= _places(part)
        elif any(_may_hold_weights(leaf) for leaf in tree_leaves(part)):
            return []
    return sorted({name for name, each in _networks(policy) if _places(each) - saved})


def _may_hold_weights(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or not _is_of_library(value)


def _is_of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def _places(module: nn.Module) -> set[int]:
    return {each.data_ptr() for each in module.parameters() if not is_lazy(each)} - {0}


def _networks(policy: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a function uses, with the names of their variables."""
    seen: set[int] = set()
    todo = [("policy", policy)]
    while todo and len(seen) < _MOST_OBJECTS:
        name, each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            yield name, each
        elif isinstance(each, functools.partial):
            todo += [(name, one) for one in (each.func, *each.args)]
            todo += each.keywords.items()
        elif isinstance(each, dict | list | tuple):
            values = each.values() if isinstance(each, dict) else each
            todo += [(name, one) for one in islice(values, _MOST_VALUES)]
        elif inspect.ismethod(each):
            todo += [(name, each.__self__), (name, each.__func__)]
        elif inspect.isfunction(each):
            if (each.__module__ or "").partition(".")[0] not in _LIBRARIES:
                found = inspect.getclosurevars(each)
                todo += [*found.nonlocals.items(), *found.globals.items()]
        elif not isinstance(each, type) and not _is_of_library(each):
            todo += getattr(each, "__dict__", {}).items()
            todo += [(name, type(each).__call__)] if each is policy else []
