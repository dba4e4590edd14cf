"""Inputs of modules and functions that take tensors instead of a TensorDict."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.storage.rows.keys import Key, format_key

_NO_DATA = {"step_count", "is_init", MASK_NAME}
"""Observations that are never the only input of a module: step counters, markers and masks."""


Inputs = list[Key] | dict[str, Key]
"""Keys of the inputs in the order of the arguments, or by argument name if some are skipped."""


def inputs_of(policy: Any, observations: Collection[Key]) -> Inputs | None:
    """Return the inputs for the arguments of ``policy``; None if it takes a TensorDict.

    As in TorchRL, a module or a function takes the observations after which its arguments are
    named. A module with one argument takes the only observation, whatever the name of the argument.

    A function with one argument that is not an observation takes the TensorDict.

    Raises:
        ArgumentError: the arguments of a module, or several arguments of a function, are not
            observations.
    """
    if _has_keys(policy):
        return None
    is_module = isinstance(policy, nn.Module)
    parameters = _parameters(policy)
    needed = _needed(parameters)
    if len(needed) == 1 and _is_for_tensordicts(parameters[needed[0]]):
        return None
    named: dict[str, Key] = {key[0]: key for key in observations if len(key) == 1}
    if needed and named.keys() >= set(needed):
        found = {name: named[name] for name in parameters if name in named}
        first = [*parameters.values()][: len(found)]
        in_order = all(each.name in found and each.kind != each.KEYWORD_ONLY for each in first)
        return list(found.values()) if in_order else found
    known = sorted(map(format_key, observations))
    if not is_module:
        if len(needed) <= 1:
            return None
        raise ArgumentError(
            f"policy: the arguments of {_name_of(policy)} are {needed}, but the observations are "
            f"{known}. Name all arguments after observations, or take one TensorDict."
        )
    data = [key for key in observations if key[-1] not in _NO_DATA]
    if len(needed) == 1 and len(data) == 1:
        return data
    raise ArgumentError(
        f"policy: {type(policy).__name__} is a plain nn.Module whose arguments are {needed}, but "
        f"the observations are {known}. Name the arguments after observations, or wrap the module "
        "in tensordict.nn.TensorDictModule(module, in_keys=[…], out_keys=[…])."
    )


def unnamed_argument(policy: Any, observations: Collection[Key]) -> str:
    """Explain why a function of one argument takes a TensorDict; "" for other policies."""
    needed = [] if _has_keys(policy) else _needed(_parameters(policy))
    if len(needed) != 1 or (needed[0],) in observations:
        return ""
    return (
        f"The argument {needed[0]!r} of {_name_of(policy)} is none of the observations "
        f"{sorted(map(format_key, observations))}, so it is a TensorDict of all of them. To take "
        "tensors, name the arguments after observations"
    )


def _has_keys(policy: Any) -> bool:
    return isinstance(policy, TensorDictModuleBase) or hasattr(policy, "out_keys")


def _name_of(policy: Any) -> str:
    return getattr(policy, "__name__", type(policy).__name__)


def _needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the arguments without a default."""
    return [name for name, each in parameters.items() if each.default is each.empty]


def _parameters(policy: Any) -> Mapping[str, inspect.Parameter]:
    try:
        called = policy.forward if isinstance(policy, nn.Module) else policy
        found = inspect.signature(called).parameters
    except (TypeError, ValueError):  # not written in Python
        return {}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: each for name, each in found.items() if each.kind not in several}


def _is_for_tensordicts(parameter: inspect.Parameter) -> bool:
    hint = parameter.annotation
    said = "TensorDict" in hint if isinstance(hint, str) else is_tensor_collection(hint)
    return said or parameter.name in ("tensordict", "td")


def around(
    policy: Callable[..., Any], inputs: Inputs, actions: Sequence[Key], more: int = 0
) -> TensorDictModule:
    """Wrap ``policy`` as a module from TensorDict to TensorDict.

    The first values that it returns are the ``actions``. The ``more`` values after them are called
    ``output1``, ``output2``, …, as in TorchRL.
    """
    out_keys = [*actions, *(f"output{index + 1}" for index in range(more))]
    if isinstance(inputs, dict):
        return TensorDictModule(policy, in_keys=inputs, out_keys=out_keys, out_to_in_map=True)
    return TensorDictModule(policy, in_keys=[*inputs], out_keys=out_keys)


def outputs_of(policy: Callable[..., Any], inputs: Inputs, td: TensorDictBase) -> int:
    """Return the number of values that ``policy`` returns for the inputs in ``td``."""
    if isinstance(inputs, dict):
        out = policy(**{name: td.get(key).clone() for name, key in inputs.items()})
    else:
        out = policy(*(td.get(key).clone() for key in inputs))
    return len(out) if isinstance(out, tuple) else 1
