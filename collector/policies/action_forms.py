"""Lossless conversions of actions into the form that the environment declares.

The trial of a policy determines the form of its actions: one axis more or less, another dtype, a
one-hot instead of an index, or an index instead of a one-hot. The stored action is the action that
the environment received.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import one_hot
from torchrl.data import Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec

from tallyroll.collector.errors import PolicyError
from tallyroll.collector.slab.slab import SlabColumn
from tallyroll.storage.rows.keys import Key, format_key

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Form:
    """A conversion of the policy's output ``key`` to the ``wanted`` form; call it on a value.

    Raises:
        PolicyError: the conversion of a value would not be lossless. Only calls raise this.
    """

    key: Key
    given: SlabColumn
    wanted: SlabColumn
    changes: tuple[Change, ...]
    note: str = ""
    """A note about the stored actions for users of the rows; empty if there is none."""

    def takes(self, value: torch.Tensor) -> bool:
        """Return True if ``value`` has the dtype and shape of the trial."""
        return (value.dtype, tuple(value.shape)) == (self.given.dtype, self.given.shape)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` in the form that the environment takes."""
        try:
            for change in self.changes:
                value = change(value)
        except ValueError as error:
            raise PolicyError(f"policy: {format_key(self.key)}: {error}") from None
        return value.reshape(self.wanted.shape)


def form_of(key: Key, action: torch.Tensor, spec: TensorSpec, lead: int) -> Form | None:
    """Return the conversion of ``action`` to the form of ``spec``; None if there is no conversion.

    ``lead`` is the number of batch dimensions of the environment.
    """
    given = SlabColumn(action.dtype, tuple(action.shape))
    wanted = SlabColumn(spec.dtype, tuple(spec.shape))
    form = partial(Form, key, given, wanted)
    if given.dtype.is_complex or wanted.dtype.is_complex:
        return None
    if wanted.shape in _alike(given.shape) or given.shape in _alike(wanted.shape):
        if given.dtype == wanted.dtype:
            return form(())
        narrower = given.dtype.is_floating_point and wanted.dtype.is_floating_point
        if narrower and torch.promote_types(given.dtype, wanted.dtype) != wanted.dtype:
            return None
        return form((partial(_exact, dtype=wanted.dtype),))
    sizes = _sizes(spec)
    if sizes is None:
        return None
    to_dtype = partial(_exact, dtype=wanted.dtype)
    if isinstance(spec, OneHot):
        parts = (len(sizes),) if type(spec) is MultiOneHot else ()
        if given.shape not in _alike((*wanted.shape[:-1], *parts)):
            return None
        to_index = partial(_exact, dtype=torch.int64)
        note = (
            f"{format_key(key)} is stored as a one-hot, which the environment expects; the policy "
            "returns an index"
        )
        return form((to_index, partial(_one_hots, sizes=sizes), to_dtype), note)
    around = wanted.shape
    if type(spec) is MultiCategorical or (len(around) > lead and around[-1] == 1):
        around = around[:-1]
    if given.shape not in ((*around, sum(sizes)), (*wanted.shape, sum(sizes))):
        return None
    note = f"{format_key(key)} is stored as an index, which the environment expects; the policy"
    return form((partial(_indices, sizes=sizes), to_dtype), f"{note} returns a one-hot")


def _alike(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return shape, (*shape, 1)


def _sizes(spec: TensorSpec) -> list[int] | None:
    """Return the number of values of each index of an action; None for other specs."""
    if type(spec) is MultiOneHot:
        return [int(box.n) for box in spec.space]
    if type(spec) is OneHot:
        return [int(spec.space.n)]
    if type(spec) is Categorical:
        return [int(spec.n)]
    if type(spec) is MultiCategorical:
        rows = spec.nvec.reshape(-1, spec.shape[-1])
        return [int(n) for n in rows[0]] if bool((rows == rows[0]).all()) else None
    return None


def _exact(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert ``value`` to ``dtype``.

    Raises:
        ValueError: the conversion changes a number.
    """
    if value.dtype == dtype or value.dtype is torch.bool:
        return value.to(dtype)
    cast = value.to(dtype)
    wrong = cast.to(value.dtype) != value
    if not (dtype is torch.bool or (value.is_floating_point() and dtype.is_floating_point)):
        # A number that overflowed an integer compares equal after the conversion back.
        ends = _ends(value.dtype), _ends(dtype)
        low, high = max(one for one, _ in ends), min(one for _, one in ends)
        wrong |= (value < low) | (value > high)
    if bool(wrong.any()):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"expected a number that {name} can hold, got {value[wrong][0].item()}")
    return cast


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """Return the bounds between which ``dtype`` represents every integer."""
    if dtype.is_floating_point:
        most = int(2 / torch.finfo(dtype).eps)
        return -most, most
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _one_hots(index: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    columns = index.reshape(-1, len(sizes))
    for at, size in enumerate(sizes):
        low, high = int(columns[:, at].min()), int(columns[:, at].max())
        if low < 0 or high >= size:
            raise ValueError(f"expected indices 0..{size - 1}, got {low if low < 0 else high}")
    return torch.cat([one_hot(columns[:, at], size) for at, size in enumerate(sizes)], -1)


def _indices(hot: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    rows = hot.reshape(-1, sum(sizes))
    found = []
    for part in torch.split(rows, list(sizes), -1):
        ones = part == 1
        good = (ones | (part == 0)).all(-1) & (ones.sum(-1) == 1)
        if not bool(good.all()):
            got = [float(f"{number:.4g}") for number in part[~good][0].tolist()]
            raise ValueError(f"expected an index or a one-hot vector, got {got}")
        found.append(ones.to(torch.uint8).argmax(-1))
    return torch.stack(found, -1)
