"""Trees of JAX as columns, spaces as specs, and how environments of JAX are made."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, SpaceError
from tallyroll.storage.rows.dtypes import TORCH
from tallyroll.storage.rows.keys import Key, format_key


def keyed(jax: Any, tree: Any) -> dict[Key, Any]:
    """The leaves of a tree of arrays by their names; an array is ``("observation",)``."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [getattr(p, "key", getattr(p, "name", getattr(p, "idx", p))) for p in path]
        lead = () if names and isinstance(names[0], str) else ("observation",)
        found[(*lead, *map(str, names))] = leaf
    return found


def strong(jax: Any, leaves: Iterable[Any]) -> list[Any]:
    """Leaves without weak types: a second step would be compiled for these."""
    convert = jax.lax.convert_element_type
    return [convert(x, x.dtype) if getattr(x, "weak_type", False) else x for x in leaves]


def merged(jax: Any, lanes: Any, new: Any, old: Any) -> Any:
    """The tree ``new`` in ``lanes``, bool ``[lane]``, and ``old`` in the others."""

    def pick(one: Any, other: Any) -> Any:
        if one.shape[:1] != lanes.shape:  # of no lane, as memory of MuJoCo Warp is
            return other
        return jax.numpy.where(lanes.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return jax.tree.map(pick, new, old)


def placed(jax: Any, at: Any, lanes: int, new: Any, old: Any) -> Any:
    """The tree ``old``, with the rows of ``new`` in the lanes ``at``; `lanes` of it are no lane."""

    def put(one: Any, other: Any) -> Any:
        if one.shape[:1] != at.shape or other.shape[:1] != (lanes,):
            return other
        return other.at[at].set(one, mode="drop")

    return jax.tree.map(put, new, old)


def require_same(jax: Any, reset: Any, step: Any, what: str) -> None:
    """Raise where the trees ``[lane, ...]`` of a reset and of a step have other arrays.

    Raises:
        EnvironmentRefused: says which.
    """
    (one, _), (other, _) = map(jax.tree_util.tree_flatten_with_path, (reset, step))
    before, after = (
        {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape[1:])}" for path, x in leaves}
        for leaves in (one, other)
    )
    for path in [*before, *after]:
        if before.get(path) != after.get(path):
            raise EnvironmentRefused(
                f"{what}{path} is {before.get(path)} after a reset and {after.get(path)} after a "
                "step; correct the environment"
            )


def specs_of(
    returned: Mapping[Key, Any], known: Mapping[Key, TensorSpec], unbounded: Sequence[str]
) -> dict[Key, TensorSpec]:
    """The specs of one lane's columns, of the dtypes that are ``returned`` ``[lane, ...]``.

    ``known`` have bounds, and ``unbounded`` names some that do not hold.

    Raises:
        ArgumentError: a name in ``unbounded`` is no column.
        SpaceError: a column has another shape than is known of it, or a dtype that none can hold.
    """
    names = [format_key(key) for key in returned]
    if unknown := {*unbounded} - {*names}:
        raise ArgumentError(f"unbounded: {sorted(unknown)} are no observations, which are {names}")
    specs: dict[Key, TensorSpec] = {}
    for key, value in returned.items():
        dtype, shape = TORCH.get(value.dtype), tuple(value.shape[1:])
        if dtype is None:
            raise SpaceError(
                f"{format_key(key)}: no column holds {value.dtype}; cast it in a wrapper"
            )
        spec = known.get(key)
        if spec is None or format_key(key) in unbounded:
            spec = Unbounded(shape, dtype=dtype)
        if tuple(spec.shape) != shape:
            raise SpaceError(
                f"{format_key(key)}: the space declares the shape {list(spec.shape)}, the "
                "environment "
                f'returns {list(shape)}; correct the space, or pass unbounded=["{format_key(key)}"]'
            )
        specs[key] = spec if spec.dtype == dtype else spec.to(dtype)
    return specs


def observations(space: spaces.Space[Any]) -> dict[Key, TensorSpec]:
    """The specs of one lane's columns of an observation space."""
    return {leaf.key: leaf.spec[0] for leaf in observation_leaves(space, 1)}


def actions(space: spaces.Space[Any]) -> dict[Key, TensorSpec]:
    """The spec of one lane's action.

    Raises:
        SpaceError: it is composite.
    """
    leaf = action_leaf(space, 1)
    return {leaf.key: leaf.spec[0]}


def contexts(names: Iterable[str], found: Mapping[str, Any], of: str) -> dict[str, TensorSpec]:
    """The specs of contexts, from the values that parameters of these names have.

    Args:
        names: of contexts.
        found: parameters by name.
        of: what has them, and how they are found, for messages.

    Raises:
        ArgumentError: one is no parameter, or is no array of numbers.
    """
    specs: dict[str, TensorSpec] = {}
    for name in names:
        value = np.asarray(found.get(name))
        if value.dtype.kind not in "biuf":
            raise ArgumentError(
                f"context: expected parameters of {of} that are numbers or arrays of them, got "
                f"{name!r}"
            )
        dtype = {"f": torch.float32, "b": torch.bool}.get(value.dtype.kind, torch.int32)
        specs[name] = Unbounded(value.shape, dtype=dtype)
    return specs


def made(name: str, kwargs: Mapping[str, Any], make: Callable[..., Any]) -> Any:
    """``make(name, **kwargs)``.

    Raises:
        ArgumentError: there is no such environment, or it does not take ``kwargs``.
    """
    try:
        return make(name, **kwargs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        given = f" with {dict(kwargs)}" if kwargs else ""
        raise ArgumentError(f"cannot make {name!r}{given}: {error!r:.500}") from error


def refuse_bare(made: object, module: str, kind: str, system: str) -> None:
    """Raise where ``made`` is a ``kind`` of ``module``, one lane of which ``system`` makes many.

    Raises:
        ArgumentError: says what to pass.
    """
    found = getattr(sys.modules.get(module), kind, None)
    if isinstance(found, type) and isinstance(made, found):
        raise ArgumentError(
            f"got {type(made).__name__}, which is a function of one lane; pass {system}(env, lanes)"
            f" from {__package__}, or a factory of it"
        )
