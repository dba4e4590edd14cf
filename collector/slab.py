"""A preallocated block of slots that a rollout fills in place.

Every column is one tensor ``[time, lane, ...]``. A key that flows from one step to the next
(an observation) has one slot more: what the step returned in slot ``t`` is what the policy
sees in slot ``t + 1``. Where the two never differ (``shared``), the root column and the
``"next"`` column are the same memory, one slot apart, so that a step writes each byte once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tallyroll.collector.keys import (
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    dotted,
)

Array = NDArray[Any]


@dataclass(frozen=True)
class Column:
    """Dtype and shape of one column; ``shape`` excludes time and lane."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


Layout = Mapping[Key, Column]


@dataclass(slots=True)
class Slot:
    """Views of one slot, for an environment that writes in place. All are ``[lane, ...]``.

    An adapter reads ``action`` and fills the rest: ``next_obs`` with what the step led to (the
    final observation where an episode ended) and ``root_obs`` with what the policy sees next.
    Both list the observation's columns in the order of the adapter's leaves; where the slab
    shares their memory, ``root_obs`` is empty.
    """

    td: TensorDict
    action: Array
    next_obs: tuple[Array, ...]
    root_obs: tuple[Array, ...]
    seen_obs: tuple[Array, ...]
    """What the policy saw in this slot."""
    reward: Array
    terminated: Array
    truncated: Array
    next_td: TensorDict = field(init=False)


class Slab:
    """Memory for ``slots`` slots of ``lanes`` lanes.

    Args:
        slots: capacity in time.
        lanes: number of lanes.
        layout: every column, root and ``"next"``.
        flowing: keys that flow from step to step; each stands in ``layout`` at the root and
            under ``"next"``. Only an environment that writes in place names any.
        shared: root and ``"next"`` observations are one memory (see the module).
        device: where the memory lies.
    """

    def __init__(
        self,
        slots: int,
        lanes: int,
        layout: Layout,
        *,
        flowing: Iterable[Key] = (),
        shared: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.slots, self.lanes, self.shared = slots, lanes, shared
        self.flowing = tuple(flowing)
        self.columns: dict[Key, torch.Tensor] = {}
        self._flow: dict[Key, torch.Tensor] = {}
        for key, column in layout.items():
            if key[0] == NEXT and key[1:] in self.flowing and shared:
                continue
            length = slots + 1 if key in self.flowing else slots
            memory = torch.zeros((length, lanes, *column.shape), dtype=column.dtype, device=device)
            if key in self.flowing:
                self._flow[key] = memory
            self.columns[key] = memory[:slots]
        if shared:
            for key in self.flowing:
                self.columns[(NEXT, *key)] = self._flow[key][1:]
        self.on_cpu = device is None or device.type == "cpu"
        self.transitions = np.zeros((slots, lanes), np.bool_)
        self.version = np.zeros((slots, lanes), np.int64)

    def array(self, key: Key) -> Array:
        """A column as a NumPy view ``[time, lane, ...]`` (CPU slabs only)."""
        view: Array = self.columns[key].numpy()
        return view

    def keep_last(self, used: int, lanes: NDArray[np.bool_] | None) -> None:
        """Make room for the next block after ``used`` slots were filled.

        Args:
            used: slots that were filled.
            lanes: lanes of the last slot whose transition opens the next block, or None. They
                are moved to slot 0.
        """
        if used == 0:
            return
        for memory in self._flow.values():
            if lanes is not None:
                memory[0] = memory[used - 1]
                memory[1] = memory[used]
            else:
                memory[0] = memory[used]
        if lanes is not None and used > 1:
            for key, column in self.columns.items():
                if key not in self._flow and not (self.shared and key[1:] in self._flow):
                    column[0] = column[used - 1]
            self.version[0] = self.version[used - 1]
        if lanes is not None:
            self.transitions[0] = lanes

    def set_root(self, at: int, td: TensorDict) -> None:
        """Write the observation that the policy sees in slot ``at``."""
        for key, memory in self._flow.items():
            memory[at].copy_(td.get(key))

    def bind(self, action: Key) -> list[Slot]:
        """The slots of an environment that writes in place, views built once.

        ``slots[t].td`` is the tensordict that the policy and the environment are handed in
        slot ``t``; it carries its slot as the attribute ``slot``.
        """
        batch = torch.Size([self.lanes])
        roots = {key: memory.unbind(0) for key, memory in self._flow.items()}
        nexts = {key: self.columns[(NEXT, *key)].unbind(0) for key in self.flowing}
        flags = {key: self.columns[key].unbind(0) for key in (REWARD, TERMINATED, TRUNCATED)}
        arrays = {key: list(memory.numpy()) for key, memory in self._flow.items()}
        next_arrays = {key: list(self.array((NEXT, *key))) for key in self.flowing}
        actions = list(self.array(action))
        rows = {key: list(self.array(key)[..., 0]) for key in flags}
        slots: list[Slot] = []
        for t in range(self.slots):
            td = _nested({key: views[t] for key, views in roots.items()}, batch)
            after = {key: views[t] for key, views in nexts.items()}
            after |= {key[1:]: views[t] for key, views in flags.items()}
            td.set(NEXT, _nested(after, batch))
            slots.append(
                Slot(
                    td=td,
                    action=actions[t],
                    next_obs=tuple(next_arrays[key][t] for key in self.flowing),
                    root_obs=()
                    if self.shared
                    else tuple(arrays[key][t + 1] for key in self.flowing),
                    seen_obs=tuple(arrays[key][t] for key in self.flowing),
                    reward=rows[REWARD][t],
                    terminated=rows[TERMINATED][t],
                    truncated=rows[TRUNCATED][t],
                )
            )
            td.slot = slots[-1]
        last = _nested({key: views[self.slots] for key, views in roots.items()}, batch)
        for slot, following in zip(slots, [*(s.td for s in slots[1:]), last], strict=True):
            slot.next_td = following
        return slots


def _nested(leaves: Mapping[Key, torch.Tensor], batch: torch.Size) -> TensorDict:
    if all(len(key) == 1 for key in leaves):
        return TensorDict({key[0]: leaf for key, leaf in leaves.items()}, batch)
    td = TensorDict({}, batch)
    for key, leaf in leaves.items():
        td.set(key, leaf)
    return td


def differences(wanted: Layout, got: Layout) -> list[str]:
    """How two layouts differ, a sentence each; empty where they do not."""
    found = [f"{dotted(key)} is missing" for key in wanted if key not in got]
    found += [f"{dotted(key)} is unexpected" for key in got if key not in wanted]
    found += [
        f"{dotted(key)} is {got[key]}, wanted {wanted[key]}"
        for key in wanted
        if key in got and got[key] != wanted[key]
    ]
    return found
