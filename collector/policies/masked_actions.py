"""Random legal actions from a mask and uniform numbers, so that any process draws them alike."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Categorical, MultiCategorical, OneHot, TensorSpec

from tallyroll.storage.engine.kernel import kernel

Uniform = NDArray[np.float64]


def uniforms(spec: TensorSpec) -> tuple[int, ...] | None:
    """Shape of the uniform numbers that one action of ``spec`` takes; None for other specs."""
    if type(spec) in (Categorical, MultiCategorical):
        return tuple(spec.shape)
    return tuple(spec.shape[:-1]) if type(spec) is OneHot else None


def pick(spec: TensorSpec, allowed: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """Actions of ``spec``, each legal one as likely as the others; see :func:`chosen`."""
    return torch.from_numpy(chosen(spec, allowed.cpu().numpy(), uniform)).to(spec.dtype)


def chosen(spec: TensorSpec, marks: NDArray[Any], uniform: Uniform) -> NDArray[np.int64]:
    """Actions of ``spec``, each legal one as likely as the others.

    Args:
        spec: Categorical, OneHot or MultiCategorical.
        marks: bool, ``[*batch, n]``; for a MultiCategorical ``[*batch, sum(nvec)]``, or
            ``[*batch, *nvec]``, which marks combinations.
        uniform: in [0, 1), of the shape that :func:`uniforms` gives for ``spec``. Where nothing
            is legal, every action is: such a slot is one that an environment ignores.
    """
    if type(spec) is MultiCategorical:
        nvec = spec.nvec.cpu().numpy().reshape(-1, spec.shape[-1])[0]
        if len(nvec) > 1 and marks.shape == (*spec.shape[:-1], *nvec):
            among = _nth(marks.reshape(*spec.shape[:-1], -1), uniform[..., 0])
            return np.stack(np.unravel_index(among, nvec), -1)
        ends = np.cumsum(nvec)
        parts = np.split(np.broadcast_to(marks, (*spec.shape[:-1], int(ends[-1]))), ends[:-1], -1)
        return np.stack([_nth(part, uniform[..., at]) for at, part in enumerate(parts)], -1)
    n = int(spec.space.n)
    wanted = (*uniform.shape, n)
    index = _nth(marks if marks.shape == wanted else np.broadcast_to(marks, wanted), uniform)
    return (index[..., None] == np.arange(n)).astype(np.int64) if type(spec) is OneHot else index


def _nth(marks: NDArray[Any], uniform: Uniform) -> NDArray[np.int64]:
    """Index of one of the marked entries of the last axis of ``marks``."""
    marks = marks if marks.dtype == np.bool_ else marks.astype(np.bool_)
    if kernel is not None and marks.flags.c_contiguous and uniform.flags.c_contiguous:
        found = np.empty(uniform.shape, np.int64)
        kernel.nth_marked(marks, uniform, found)
        return found
    marks = marks | ~marks.any(-1, keepdims=True)
    ranks = np.cumsum(marks, -1)
    # Rounding may make the product as large as the count itself.
    nth = np.minimum((uniform * ranks[..., -1]).astype(np.int64), ranks[..., -1] - 1)
    index: Any = (ranks > nth[..., None]).argmax(-1)
    return np.asarray(index, np.int64)
