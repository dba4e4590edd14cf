"""What systems return, as NumPy and torch have it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.envs.system import AgentFlags, Array, Step, System
from tallyroll.collector.errors import TransitionError


def whole(system: System, lanes: int) -> Step:
    """All lanes of a system, each once, as one step; they came back in any order."""
    parts: list[Step] = []
    while sum(len(part.terminated) for part in parts) < lanes:
        parts.append(system.recv())
    came = np.concatenate([np.asarray(part.lanes) for part in parts])
    order = np.argsort(came, kind="stable")
    if not np.array_equal(came[order], np.arange(lanes)):
        raise TransitionError(f"expected each of {lanes} lanes once, got {came.tolist()!r:.200}")

    def joined(values: Sequence[Array]) -> Array:
        return np.concatenate([np.asarray(value) for value in values])[order]

    def columns(values: Sequence[Sequence[Array]]) -> list[Array]:
        return [joined(each) for each in zip(*values, strict=True)]

    def flags(values: Sequence[Array | None]) -> Array | None:
        if all(each is None for each in values):
            return None
        sizes = [len(part.terminated) for part in parts]
        return joined(
            [np.zeros(n, np.bool_) if v is None else v for v, n in zip(values, sizes, strict=True)]
        )

    finals = None
    if any(part.final is not None for part in parts):
        finals = columns([part.obs if part.final is None else part.final for part in parts])
    return Step(
        columns([part.obs for part in parts]),
        columns([part.reward for part in parts]),
        joined([part.terminated for part in parts]),
        joined([part.truncated for part in parts]),
        finals,
        flags([part.final_valid for part in parts]),
        None,
        flags([part.skipped for part in parts]),
        {
            group: AgentFlags(*columns([part.agents[group] for part in parts]))
            for group in parts[0].agents
        },
    )


def reordered(out: Step, order: NDArray[np.intp]) -> Step:
    """What ``recv`` returned, its rows in ``order``."""

    def rows(value: Array | None) -> Array | None:
        return None if value is None else np.asarray(value)[order]

    return Step(
        [rows(value) for value in out.obs],
        [rows(value) for value in out.reward],
        rows(out.terminated),
        rows(out.truncated),
        None if out.final is None else [rows(value) for value in out.final],
        rows(out.final_valid),
        rows(out.lanes),
        rows(out.skipped),
        {group: AgentFlags(*map(rows, flags)) for group, flags in out.agents.items()},
    )


def fitting(value: Array, row: NDArray[Any]) -> NDArray[Any]:
    """``value``, of the shape of ``row``: NumPy would spread fewer values over all lanes."""
    if type(value) is np.ndarray and value.shape == row.shape:
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = np.from_dlpack(value)
    found = np.asarray(value)
    if found.shape != row.shape or found.dtype.kind not in "biuf":
        raise ValueError(f"expected the shape {row.shape}, got {found.shape} of {found.dtype}")
    return found


def put_flags(columns: Sequence[NDArray[Any]], at: int, flags: AgentFlags) -> None:
    """The flags of a group, in a slot of their columns."""
    terminated, truncated, done = columns
    terminated[at], truncated[at] = flags.terminated, flags.truncated
    np.logical_or(terminated[at], truncated[at], out=done[at])


def as_flags(value: Array) -> NDArray[np.bool_]:
    """Flags as NumPy has them, copied."""
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = as_tensor(value, torch.device("cpu")).numpy()
    flags: NDArray[np.bool_] = np.array(value, np.bool_)
    return flags


def as_tensor(value: Array, device: torch.device) -> torch.Tensor:
    """A copy of ``value`` on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        if device.type == "cpu":
            value = np.from_dlpack(value)  # torch takes no array that is read-only
        else:
            found: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
            return found.to(device, copy=True)
    return torch.from_numpy(np.array(value)).to(device)
