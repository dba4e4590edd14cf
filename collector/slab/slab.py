"""A preallocated block of slots that a rollout fills in place.

Every column is one tensor ``[time, lane, ...]``. The column of an observation, which flows from one
step to the next, has one more slot: in slot ``t + 1`` the policy sees the value that the step in
slot ``t`` returned, or the first observation after a reset. If these two never differ (``shared``),
the root column and the ``"next"`` column use the same memory, one slot apart, so that a step writes
each byte once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tallyroll.collector.native.kernel import in_order
from tallyroll.storage.rows.keys import (
    LANE,
    NEXT,
    NEXT_VALID,
    POLICY_VERSION,
    TERMINATED,
    TRUNCATED,
    VALID,
    Key,
)

Array = NDArray[Any]
Arrays = tuple[Array, ...]

_ON_CPU = (VALID, POLICY_VERSION, LANE)


@dataclass(frozen=True)
class SlabColumn:
    """Dtype and shape of one column; ``shape`` excludes time and lane."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


SlabColumns = Mapping[Key, SlabColumn]


@dataclass(slots=True)
class Cursor:
    """Arrays of a slab from which an environment reads actions, and to which it writes results.

    All arrays are ``[time, lane, ...]``, and ``at`` is the current slot. An environment reads
    ``actions`` and writes the results of the step to ``rewards``, ``terminated``, ``truncated`` and
    ``next_obs`` (the final observation where an episode ended). It writes the observation that the
    policy sees in the next slot to ``root_obs``, which is empty if the slab shares the memory of
    observations. Actions, rewards and observations are in the order of the environment's columns.

    The cursor has whole arrays and one index instead of a view per slot. The CPU cache would evict
    such views before they are used.
    """

    # Hot path: steppers and drivers assign `at` in each step.

    actions: tuple[Array, ...]
    next_obs: tuple[Array, ...]
    root_obs: tuple[Array, ...]
    seen_obs: tuple[Array, ...]
    """Observations that the policy saw in the slot."""
    rewards: tuple[Array, ...]
    """Rewards, without the last axis if a lane has a single reward."""
    terminated: Array
    truncated: Array
    agents: Mapping[str, tuple[Array, Array, Array]]
    """Terminated, truncated and done of each group of agents ``[time, lane, agent]``."""
    agents_valid: Mapping[str, Array]
    """``next_valid`` of each group of agents that may lose observations ``[time, lane, agent]``."""
    next_valid: Array | None
    """Marks of the final observations that are not lost; None if none is ever lost."""
    board: memoryview
    """The board with the number of complete slots, which the adapter writes, and halt requests."""
    at: int = 0

    def slot(self, at: int) -> tuple[Arrays, Array, Array, Array, Arrays]:
        """Return views ``[lane, ...]`` of a slot, for a slab with one column of rewards.

        They are the next observations, the reward, terminated, truncated, and the observations that
        the policy sees in the next slot. In shared memory, the last are again the next
        observations.
        """
        rows = tuple(column[at] for column in self.next_obs)
        roots = tuple(column[at] for column in self.root_obs or self.next_obs)
        return rows, self.rewards[0][at], self.terminated[at], self.truncated[at], roots


def memory_of(
    slots: int,
    lanes: int,
    layout: SlabColumns,
    flowing: Iterable[Key],
    shared: bool,
    arrivals: bool = False,
) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each piece of a slab's memory. Columns are views of pieces."""
    pieces: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
    flowing = set(flowing)
    for key, column in layout.items():
        if key[0] == NEXT and key[1:] in flowing and shared:
            continue
        length = slots + 1 if key in flowing else slots
        pieces[key] = (length, lanes, *column.shape), column.dtype
    pieces[VALID] = (slots, lanes), torch.bool
    pieces[POLICY_VERSION] = (slots, lanes), torch.int64
    if arrivals:
        pieces[LANE] = (slots, lanes), torch.int32
    return pieces


class Slab:
    """Memory for ``slots`` slots of ``lanes`` lanes.

    Args:
        slots: the maximum number of slots.
        lanes: number of lanes.
        layout: every column, at the root and under ``"next"``.
        flowing: keys that flow from step to step; each is in ``layout`` at the root and
            under ``"next"``. Only an environment that writes in place has any.
        shared: True if root and ``"next"`` observations share memory (see the module).
        device: device of the memory; marks of transitions and versions are on the CPU.
        first_lane: number of the first lane in the run.
        arrivals: True if a slot has rows of the lanes that happened to arrive, listed in ``lane``;
            ``lanes`` is then the number of rows per slot.
        memory: the pieces that :func:`memory_of` describes, or views of them; None allocates them.
    """

    def __init__(
        self,
        slots: int,
        lanes: int,
        layout: SlabColumns,
        *,
        flowing: Iterable[Key] = (),
        shared: bool = False,
        device: torch.device | None = None,
        first_lane: int = 0,
        arrivals: bool = False,
        memory: Mapping[Key, torch.Tensor] | None = None,
    ) -> None:
        self.slots, self.lanes, self.shared = slots, lanes, shared
        self.first_lane = first_lane
        self.flowing = tuple(flowing)
        if memory is None:
            pieces = memory_of(slots, lanes, layout, self.flowing, shared, arrivals)
            memory = {
                key: torch.zeros(shape, dtype=dtype, device=None if key in _ON_CPU else device)
                for key, (shape, dtype) in pieces.items()
            }
        self._flow = {key: memory[key] for key in self.flowing}
        # NumPy copies a few bytes in a tenth of the time that torch takes.
        self._moved = [
            m.numpy() if m.device.type == "cpu" and m.dtype is not torch.bfloat16 else m
            for m in self._flow.values()
        ]
        self.columns = {key: memory[key][:slots] for key in layout if key in memory}
        if shared:
            for key in self.flowing:
                self.columns[(NEXT, *key)] = self._flow[key][1:]
        self.arrays = {
            key: column.numpy()
            for key, column in self.columns.items()
            if column.device.type == "cpu" and column.dtype is not torch.bfloat16
        }
        """The columns that NumPy can represent, as NumPy views ``[time, lane, ...]``."""
        self.on_host = all(column.device.type == "cpu" for column in self.columns.values())
        """False if the columns are on a device."""
        self._carried = [
            self.arrays.get(key, column)
            for key, column in self.columns.items()
            if key not in self._flow and not (shared and key[1:] in self._flow)
        ]
        """Columns that do not flow from slot to slot."""
        self.flat = {
            key: array.reshape(slots * lanes, *array.shape[2:])
            for key, array in self.arrays.items()
            if array.flags.c_contiguous
        }
        """These columns as ``[time * lane, ...]``, if their memory is contiguous."""
        self.transitions: NDArray[np.bool_] = memory[VALID].numpy()
        self.version: NDArray[np.int64] = memory[POLICY_VERSION].numpy()
        self.lane: NDArray[np.int32] | None = memory[LANE].numpy() if arrivals else None
        """The lane of each row ``[time, arrival]``, from 0 on; None if columns are lanes."""

    def is_filled_from(self, device: torch.device | None) -> bool:
        """Return True if the columns are on the host, and their values come from ``device``."""
        return self.on_host and device is not None and device.type != "cpu"

    def lane_at(self, slot: int, column: int) -> int:
        """Return the number in the run of the lane whose row is at ``slot`` and ``column``."""
        lane = column if self.lane is None else int(self.lane[slot, column])
        return self.first_lane + lane

    def of_lane(self, slot: int, column: int) -> NDArray[np.bool_]:
        """Return marks ``[time, column]`` of the rows before ``slot`` in the lane of a row.

        The row is at ``slot`` and ``column``.
        """
        columns = np.arange(self.lanes) if self.lane is None else self.lane[:slot]
        of_it: NDArray[np.bool_] = columns == self.lane_at(slot, column) - self.first_lane
        return np.broadcast_to(of_it, (slot, self.lanes))

    def array(self, key: Key) -> Array:
        """Return a column as a NumPy view ``[time, lane, ...]`` (CPU slabs only)."""
        return self.arrays[key]

    def keep_last(self, used: int, lanes: NDArray[np.bool_] | None) -> None:
        """Prepare for the next block after ``used`` slots were filled.

        Args:
            used: number of slots that were filled.
            lanes: mask of the lanes whose transition in the last slot starts the next block. These
                transitions are moved to slot 0. None if there are none.
        """
        if used == 0:
            return
        for memory in self._moved:
            if lanes is not None:
                memory[0] = memory[used - 1]
                memory[1] = memory[used]
            else:
                memory[0] = memory[used]
        if lanes is not None and used > 1:
            for column in self._carried:
                column[0] = column[used - 1]
            self.version[0] = self.version[used - 1]
            if self.lane is not None:
                self.lane[0] = self.lane[used - 1]
        if lanes is not None:
            self.transitions[0] = lanes

    @property
    def carry_words(self) -> list[Any]:
        """The table words for the pieces of memory that :meth:`keep_last` moves.

        Pieces that flow come first; all are contiguous if every column is in ``flat``.
        """
        flowing = [(memory.numpy(), memory[0].nbytes) for memory in self._flow.values()]
        others = [(array, array[0].nbytes) for array in (*self._own, self.version)]
        pieces = (in_order("PIECE", address=at, nbytes=size) for at, size in flowing + others)
        return [*chain.from_iterable(pieces)]

    @property
    def _own(self) -> list[Array]:
        return [column for column in self._carried if isinstance(column, np.ndarray)]

    def carry_root(self, used: int, to: int) -> None:
        """Copy the observations after the first ``used`` slots to the start of slot ``to``."""
        if used != to:
            for memory in self._flow.values():
                memory[to] = memory[used]

    def set_root(self, at: int, td: TensorDict) -> None:
        """Write the observation that the policy sees in slot ``at``."""
        for key, memory in self._flow.items():
            memory[at].copy_(td.get(key))

    def cursor(
        self,
        observations: Sequence[Key],
        actions: Sequence[Key],
        rewards: Sequence[Key],
        groups: Iterable[str],
        board: memoryview,
    ) -> Cursor:
        """Return arrays for an environment that writes in place; ``rewards`` are under "next"."""
        flow = [self._flow[key].numpy() for key in self.flowing]
        flags = ("terminated", "truncated", "done")
        return Cursor(
            actions=tuple(map(self.array, actions)),
            next_obs=tuple(self.array((NEXT, *key)) for key in observations),
            root_obs=() if self.shared else tuple(memory[1:] for memory in flow),
            seen_obs=tuple(memory[: self.slots] for memory in flow),
            rewards=tuple(self._squeezed((NEXT, *key)) for key in rewards),
            terminated=self._squeezed(TERMINATED),
            truncated=self._squeezed(TRUNCATED),
            agents={
                group: tuple(self._squeezed((NEXT, group, flag)) for flag in flags)  # type: ignore[misc]
                for group in groups
            },
            agents_valid={
                group: self.arrays[(*NEXT_VALID, group)]
                for group in groups
                if (*NEXT_VALID, group) in self.arrays
            },
            next_valid=self.arrays.get(NEXT_VALID),
            board=board,
        )

    def _squeezed(self, key: Key) -> Array:
        """Return a column, without its last axis if that axis has the length 1."""
        array = self.array(key)
        return array[..., 0] if array.ndim > 2 and array.shape[-1] == 1 else array

    def tensordicts(self, groups: Mapping[str, int]) -> list[TensorDict]:
        """Return one TensorDict for each slot, with views for the policy.

        ``groups`` maps groups of agents to their sizes; they have one more batch dimension.
        """
        batch = torch.Size([self.lanes])
        views = {key: memory.unbind(0) for key, memory in self._flow.items()}
        made = []
        for at in range(self.slots):
            td = TensorDict({}, batch)
            for group, size in groups.items():
                td.set(group, TensorDict({}, (self.lanes, size)))
            for key, slots in views.items():
                td.set(key, slots[at])
            made.append(td)
        return made
