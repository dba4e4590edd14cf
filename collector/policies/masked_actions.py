"""Random legal actions from a mask and uniform numbers, so that any process draws them alike."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Categorical, MultiCategorical, OneHot, TensorSpec

Uniform = NDArray[np.float64]


def uniforms(spec: TensorSpec) -> tuple[int, ...] | None:
    """Shape of the uniform numbers that one action of ``spec`` takes; None for other specs."""
    if type(spec) in (Categorical, MultiCategorical):
        return tuple(spec.shape)
    return tuple(spec.shape[:-1]) if type(spec) is OneHot else None


def pick(spec: TensorSpec, allowed: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """Actions of ``spec``, each legal one as likely as the others.

    Args:
        spec: Categorical, OneHot or MultiCategorical.
        allowed: bool, ``[*batch, n]``; for a MultiCategorical ``[*batch, sum(nvec)]``, or
            ``[*batch, *nvec]``, which marks combinations.
        uniform: in [0, 1), of the shape that :func:`uniforms` gives for ``spec``. Where nothing
            is legal, every action is: such a slot is one that an environment ignores.
    """
    marks: NDArray[np.bool_] = allowed.cpu().numpy()
    if type(spec) is MultiCategorical:
        nvec = spec.nvec.cpu().numpy().reshape(-1, spec.shape[-1])[0]
        if len(nvec) > 1 and marks.shape == (*spec.shape[:-1], *nvec):
            among = _nth(marks.reshape(*spec.shape[:-1], -1), uniform[..., 0])
            return torch.from_numpy(np.stack(np.unravel_index(among, nvec), -1)).to(spec.dtype)
        ends = np.cumsum(nvec)
        parts = np.split(np.broadcast_to(marks, (*spec.shape[:-1], int(ends[-1]))), ends[:-1], -1)
        chosen = [_nth(part, uniform[..., at]) for at, part in enumerate(parts)]
        return torch.from_numpy(np.stack(chosen, -1)).to(spec.dtype)
    n = int(spec.space.n)
    index = torch.from_numpy(_nth(np.broadcast_to(marks, (*uniform.shape, n)), uniform))
    if type(spec) is OneHot:
        return torch.nn.functional.one_hot(index, n).to(spec.dtype)
    return index.to(spec.dtype)


def _nth(marks: NDArray[np.bool_], uniform: Uniform) -> NDArray[np.int64]:
    """Index of one of the marked entries of the last axis of ``marks``."""
    marks = marks | ~marks.any(-1, keepdims=True)
    ranks = np.cumsum(marks, -1)
    # Rounding may make the product as large as the count itself.
    nth = np.minimum((uniform * ranks[..., -1]).astype(np.int64), ranks[..., -1] - 1)
    found: Any = (ranks > nth[..., None]).argmax(-1)
    return np.asarray(found, np.int64)
