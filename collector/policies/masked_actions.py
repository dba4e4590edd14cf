"""Draw random legal actions from a mask and uniform numbers, identically in every process.

`nth_marked` in ``native/_kernel.c`` is the C version of `_nth`. If `Choices` cannot list the
actions of a spec, TorchRL draws the actions (`RandomActions._by_torch`).
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, OneHot, TensorSpec

from tallyroll.collector.native.kernel import compiled

Array = NDArray[Any]
Uniform = NDArray[np.float64]


@dataclass(frozen=True)
class Choices:
    """The values that an action may have, in the order in which a mask lists them.

    A mask is ``[*batch, n]`` if the action is one index, or the one-hot of one index. For several
    indices, a mask is ``[*batch, sum(sizes)]``; or ``[*batch, *sizes]``, which marks combinations;
    or ``[*batch, index, n]`` if all indices have n values.
    """

    starts: tuple[int, ...]
    """The first value of each index."""
    sizes: tuple[int, ...]
    """The number of values of each index."""
    shape: tuple[int, ...] = ()
    """The shape of one action."""
    one_hot: bool = False

    @classmethod
    def of(cls, spec: TensorSpec, inner: int) -> Self | None:
        """Return the choices of a spec; None if a mask cannot list the actions.

        ``inner`` is the number of dimensions of one action, which is used if the spec's class does
        not determine it.
        """
        if type(spec) is Categorical:
            return cls((0,), (int(spec.n),))
        if type(spec) is OneHot:
            return cls((0,), (int(spec.space.n),), tuple(spec.shape[-1:]), one_hot=True)
        if type(spec) is MultiCategorical:
            sizes = _alike(spec.nvec.cpu().numpy().reshape(-1, spec.shape[-1]))
            return None if sizes is None else cls((0,) * len(sizes), sizes, (len(sizes),))
        shape = tuple(spec.shape[len(spec.shape) - inner :])
        if isinstance(spec, Binary):
            return cls((0,) * prod(shape), (2,) * prod(shape), shape) if prod(shape) else None
        if not isinstance(spec, Bounded) or spec.dtype.is_floating_point or not prod(shape):
            return None
        bounds = [b.cpu().numpy().reshape(-1, prod(shape)) for b in (spec.low, spec.high)]
        low, high = map(_alike, bounds)
        if low is None or high is None:
            return None
        return cls(low, tuple(b - a + 1 for a, b in zip(low, high, strict=True)), shape)

    def batch(self, action: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch shape of an array of actions of shape ``action``."""
        return action[: len(action) - len(self.shape)]

    def uniforms(self, action: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the uniform numbers from which actions of this shape are drawn."""
        return self.batch(action) if self.one_hot else action

    @property
    def form(self) -> str:
        """The valid shapes of a mask of one action, for messages."""
        n, count = self.sizes[0], len(self.sizes)
        if count == 1:
            return f"[{n}]"
        combinations = f", {[*self.sizes]} (combinations)" if count < 9 else ""
        alike = f", {[count, n]} (one row per index)" if set(self.sizes) == {n} else ""
        return f"[{sum(self.sizes)}] (one part per index, in order){combinations}{alike}"

    def parts(self, marks: Array, batch: tuple[int, ...]) -> list[Array] | None:
        """Convert a mask to arrays ``[*batch, n]``: one per index, or one for all combinations.

        Return None if the mask has another shape.
        """
        sizes = self.sizes
        if len(sizes) == 1 and marks.size == prod(batch) * sizes[0]:
            return [marks.reshape(*batch, sizes[0])] if marks.shape[-1:] == sizes else None
        if marks.shape == (*batch, sum(sizes)):
            return np.split(marks, np.cumsum(sizes)[:-1], -1)
        if len(sizes) > 1 and marks.shape == (*batch, *sizes):
            return [marks.reshape(*batch, -1)]
        if marks.shape == (*batch, len(sizes), sizes[0]) and set(sizes) == {sizes[0]}:
            return [marks[..., at, :] for at in range(len(sizes))]
        return None

    def draw(self, marks: Array, uniform: Uniform) -> Array:
        """Draw actions uniformly from the legal ones.

        Args:
            marks: a mask of a shape that :meth:`parts` accepts.
            uniform: numbers in [0, 1), in the shape of :meth:`uniforms`.

            If a mask allows no action, all actions count as legal, because an environment ignores
                the action of such a slot.
        """
        if self.one_hot or not self.shape:
            wanted = (*uniform.shape, self.sizes[0])
            index = _nth(marks if marks.shape == wanted else marks.reshape(wanted), uniform)
            if self.one_hot:
                one_hot: Array = index[..., None] == np.arange(self.sizes[0])
                return one_hot.astype(np.int64)
            # For an array without dimensions, NumPy's sum would be a scalar.
            return np.asarray(index + self.starts[0]) if self.starts[0] else index
        batch = uniform.shape[: uniform.ndim - len(self.shape)]
        parts = self.parts(marks, batch)
        assert parts is not None
        numbers = uniform.reshape(*batch, -1)
        if len(parts) < len(self.sizes):
            found = np.stack(np.unravel_index(_nth(parts[0], numbers[..., 0]), self.sizes), -1)
        else:
            found = np.stack([_nth(p, numbers[..., at]) for at, p in enumerate(parts)], -1)
        counted: Array = found + np.asarray(self.starts)
        return counted.reshape(*batch, *self.shape)

    def nothing(self, marks: Array, batch: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return marks ``[*batch]`` of the masks that allow no action."""
        parts = self.parts(marks, batch)
        assert parts is not None
        found: NDArray[np.bool_] = np.asarray(~parts[0].any(-1))
        for part in parts[1:]:
            np.logical_or(found, ~part.any(-1), out=found)
        return found

    def allowed(self, actions: Array, marks: Array, batch: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return marks ``[*batch]`` of the actions that their masks allow.

        A value that is not an action is not allowed.
        """
        parts = self.parts(marks, batch)
        assert parts is not None
        if self.one_hot:
            index = actions.argmax(-1)[..., None]
        else:
            index = actions.reshape(*batch, -1).astype(np.int64) - np.asarray(self.starts)
        inside = ((index >= 0) & (index < np.asarray(self.sizes))).all(-1)
        index = np.clip(index, 0, np.asarray(self.sizes) - 1)
        if len(parts) < len(self.sizes):
            index = np.ravel_multi_index(tuple(np.moveaxis(index, -1, 0)), self.sizes)[..., None]
        good = [
            np.take_along_axis(part, index[..., at, None], -1)[..., 0] != 0
            for at, part in enumerate(parts)
        ]
        legal: NDArray[np.bool_] = np.logical_and.reduce(good) & inside
        return legal


def _alike(rows: Array) -> tuple[int, ...] | None:
    """Return the first row if all rows are equal; None if they differ."""
    if not len(rows) or (rows != rows[0]).any():
        return None
    return tuple(int(number) for number in rows[0])


def _nth(marks: Array, uniform: Uniform) -> NDArray[np.int64]:
    """Return the index of one of the marked entries of the last axis of ``marks``."""
    marks = marks if marks.dtype == np.bool_ else marks.astype(np.bool_)
    kernel = compiled()
    if kernel is not None and marks.flags.c_contiguous and uniform.flags.c_contiguous:
        found = np.empty(uniform.shape, np.int64)
        kernel.nth_marked(marks, uniform, found)
        return found
    marks = marks | ~marks.any(-1, keepdims=True)
    ranks = np.cumsum(marks, -1)
    # Rounding may make the product equal to the count.
    nth = np.minimum((uniform * ranks[..., -1]).astype(np.int64), ranks[..., -1] - 1)
    index: Any = (ranks > nth[..., None]).argmax(-1)
    return np.asarray(index, np.int64)
