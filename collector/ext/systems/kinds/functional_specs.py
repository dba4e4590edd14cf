"""Convert JAX trees to columns and spaces to specs, and make JAX environments."""

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
    """Return the leaves of a tree of arrays by name; a bare array is ``("observation",)``."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [getattr(p, "key", getattr(p, "name", getattr(p, "idx", p))) for p in path]
        lead = () if names and isinstance(names[0], str) else ("observation",)
        found[(*lead, *map(str, names))] = leaf
    return found


def strong(jax: Any, leaves: Iterable[Any]) -> list[Any]:
    """Return leaves without weak types, which would trigger a compilation of the second step."""
    convert = jax.lax.convert_element_type
    return [convert(x, x.dtype) if getattr(x, "weak_type", False) else x for x in leaves]


def merged(jax: Any, lanes: Any, new: Any, old: Any) -> Any:
    """Return a tree with ``new`` in ``lanes``, bool ``[lane]``, and ``old`` in other lanes."""

    def pick(one: Any, other: Any) -> Any:
        if one.shape[:1] != lanes.shape:  # not per lane, such as the memory of MuJoCo Warp
            return other
        return jax.numpy.where(lanes.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return jax.tree.map(pick, new, old)


def placed(jax: Any, at: Any, lanes: int, new: Any, old: Any) -> Any:
    """Return the tree ``old`` with the rows of ``new`` in the lanes ``at``.

    An entry of ``at`` that equals ``lanes`` is not a lane, and its row is dropped.
    """

    def put(one: Any, other: Any) -> Any:
        if one.shape[:1] != at.shape or other.shape[:1] != (lanes,):
            return other
        return other.at[at].set(one, mode="drop")

    return jax.tree.map(put, new, old)


def require_same(jax: Any, reset: Any, step: Any, what: str) -> None:
    """Check that the trees ``[lane, ...]`` of a reset and of a step have the same arrays.

    Raises:
        EnvironmentRefused: an array differs. The message names the array.
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
                "step. Correct the environment."
            )


def specs_of(
    returned: Mapping[Key, Any], known: Mapping[Key, TensorSpec], unbounded: Sequence[str]
) -> dict[Key, TensorSpec]:
    """Return the specs of one lane's columns, with the dtypes of ``returned`` ``[lane, ...]``.

    ``known`` has the specs with bounds, and ``unbounded`` names columns that exceed their bounds.

    Raises:
        ArgumentError: a name in ``unbounded`` is not a column.
        SpaceError: the shape of a column differs from its known spec, or no column can hold its
            dtype.
    """
    names = [format_key(key) for key in returned]
    if unknown := {*unbounded} - {*names}:
        raise ArgumentError(
            f"unbounded: expected names of observations, {names}, got {sorted(unknown)}"
        )
    specs: dict[Key, TensorSpec] = {}
    for key, value in returned.items():
        dtype, shape = TORCH.get(value.dtype), tuple(value.shape[1:])
        if dtype is None:
            raise SpaceError(
                f"{format_key(key)}: expected a dtype that a column can hold, got {value.dtype}. "
                "Cast the value in a wrapper of the environment."
            )
        spec = known.get(key)
        if spec is None or format_key(key) in unbounded:
            spec = Unbounded(shape, dtype=dtype)
        if tuple(spec.shape) != shape:
            raise SpaceError(
                f"{format_key(key)}: expected the shape {list(spec.shape)} that the space "
                f"declares, got {list(shape)}. Correct the space, or pass "
                f'unbounded=["{format_key(key)}"].'
            )
        specs[key] = spec if spec.dtype == dtype else spec.to(dtype)
    return specs


def observations(space: spaces.Space[Any]) -> dict[Key, TensorSpec]:
    """Return the specs of one lane's columns of an observation space."""
    return {leaf.key: leaf.spec[0] for leaf in observation_leaves(space, 1)}


def actions(space: spaces.Space[Any]) -> dict[Key, TensorSpec]:
    """Return the spec of one lane's action.

    Raises:
        SpaceError: the action space is composite.
    """
    leaf = action_leaf(space, 1)
    return {leaf.key: leaf.spec[0]}


def contexts(names: Iterable[str], found: Mapping[str, Any], of: str) -> dict[str, TensorSpec]:
    """Return the specs of contexts, derived from the current values of the parameters.

    Args:
        names: names of the contexts.
        found: parameters by name.
        of: owner of the parameters and how to find them, for messages.

    Raises:
        ArgumentError: a name is not a parameter, or its value is not an array of numbers.
    """
    specs: dict[str, TensorSpec] = {}
    for name in names:
        value = np.asarray(found.get(name))
        if value.dtype.kind not in "biuf":
            raise ArgumentError(
                f"context: expected names of numeric parameters of {of}, got {name!r}"
            )
        dtype = {"f": torch.float32, "b": torch.bool}.get(value.dtype.kind, torch.int32)
        specs[name] = Unbounded(value.shape, dtype=dtype)
    return specs


def made(name: str, kwargs: Mapping[str, Any], make: Callable[..., Any]) -> Any:
    """Return ``make(name, **kwargs)``.

    Raises:
        ArgumentError: the environment does not exist, or does not accept ``kwargs``.
    """
    try:
        return make(name, **kwargs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        given = f" with {dict(kwargs)}" if kwargs else ""
        raise ArgumentError(f"cannot make {name!r}{given}: {error!r:.500}") from error


def refuse_bare(made: object, module: str, kind: str, system: str) -> None:
    """Raise if ``made`` is an instance of the class ``kind`` of ``module``.

    Such an environment is a single lane, and ``system`` makes many lanes of it.

    Raises:
        ArgumentError: ``made`` is such an environment. The message says what to pass.
    """
    found = getattr(sys.modules.get(module), kind, None)
    if isinstance(found, type) and isinstance(made, found):
        raise ArgumentError(
            f"expected an environment of several lanes, got {type(made).__name__}, which has "
            f"one lane. Pass {system}(env, lanes) from {__package__}, or a factory that returns it."
        )
