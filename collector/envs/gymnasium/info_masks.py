"""Masks of legal actions in infos. Random actions respect them, and they are not stored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrl.data import Binary

from tallyroll.collector.envs.gymnasium.info_entries import found_in, lookup
from tallyroll.collector.envs.gymnasium.spaces import Leaf
from tallyroll.collector.envs.system import Declares, Mask, Step
from tallyroll.collector.errors import TransitionError
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.collector.slab.info import Info
from tallyroll.storage.rows.keys import Key

Array = NDArray[Any]


def masks_declared(
    infos: Any, leaves: Sequence[Leaf], lanes: int, *, wanted: bool = True
) -> Info | None:
    """Return the mask entry in the infos of a first reset; None if random actions need none.

    A mask in the observation takes precedence over one in the infos. A lane without the entry may
    choose any action.

    Args:
        infos: infos of all lanes.
        leaves: leaves of the observation.
        lanes: number of lanes.
        wanted: True if random actions are drawn.

    Raises:
        ArgumentError: the entry is not an array of numbers.
    """
    if not wanted or not isinstance(infos, Mapping):
        return None
    found = lookup(infos, (MASK_NAME,))
    if found is None or any(leaf.key == (MASK_NAME,) for leaf in leaves):
        return None
    value = found[0]
    empty = isinstance(value, np.ndarray) and value.dtype.kind == "O"
    if empty and all(each is None for each in value):
        return None
    return replace(found_in(Info(MASK_NAME), infos, lanes), fill=True)


class InfoMasks:
    """Tracks the masks of the last step or reset of each lane.

    The last two columns of a step are the mask and a flag, which is True if the environment gave
    the mask. :meth:`reset` and :meth:`step` remove both columns.

    Args:
        action: the action to which the masks belong.
        declares: the declaration of the system.
        info: the declared info entry of the masks, with their shape.
    """

    def __init__(self, action: Leaf, declares: Declares, info: Info) -> None:
        self._key, self._lanes = action.key, declares.lanes
        self._after_end = declares.at_end != "first"
        shape = info.shape
        self._bits = are_bits(action, shape)
        if self._bits:
            shape = (2 * int(np.prod(shape)),)
        self.marks: NDArray[np.bool_] = np.ones((self._lanes, *shape), np.bool_)
        self.first_lane = 0

    def number_from(self, first_lane: int) -> None:
        """Number lanes in messages from ``first_lane`` on."""
        self.first_lane = first_lane

    @property
    def legal(self) -> Mapping[Key, NDArray[np.bool_]]:
        """The masks ``[lane, ...]`` by action, for `System.legal`."""
        return {self._key: self.marks}

    def reset(self, values: Sequence[Array], lanes: Mask | None) -> list[Array]:
        """Store the masks of a reset of ``lanes`` (None: all), and return the other columns."""
        self._take(values[-2], ... if lanes is None else lanes)
        return list(values[:-2])

    def step(self, out: Step, lanes: Any = None) -> Step:
        """Store the masks of a step of ``lanes`` (None: all), and return the step without them.

        A lane that ended is reset before it acts again, or ignores its next action, so any action
        is legal in that lane.
        """
        chosen = ... if lanes is None else lanes
        arrived = out.lanes is not None
        self._take(out.obs[-2], chosen, arrived=arrived)
        if self._after_end:
            ended = np.logical_or(out.terminated, out.truncated)
            if ended.any():
                self.marks[lanes[ended] if arrived else ended] = True
        final = None if out.final is None else out.final[:-2]
        return out._replace(obs=out.obs[:-2], final=final)

    def _take(self, row: Array, lanes: Any, *, arrived: bool = False) -> None:
        row = row if arrived else row[lanes]

        def place(at: int) -> str:
            return f"in lane {self.first_lane + int(np.arange(self._lanes)[lanes][at])}"

        self.marks[lanes] = marks_of(row, self._bits, place)


def are_bits(action: Leaf, shape: tuple[int, ...]) -> bool:
    """Return True if masks have one mark per bit, like Gymnasium's masks of a MultiBinary."""
    return isinstance(action.spec, Binary) and shape == action.shape[1:]


def marks_of(rows: Array, bits: bool, place: Callable[[int], str]) -> NDArray[np.bool_]:
    """Return masks ``[row, ...]`` in the form that `Choices.parts` accepts.

    Args:
        rows: the masks as the environment returned them.
        bits: True if masks have one mark per bit: the legal value, or 2 if both are legal.
        place: function that describes the place of a row for messages.

    Raises:
        TransitionError: a mask contains other numbers.
    """
    if rows.dtype != np.bool_:
        wrong = (rows != 0) & (rows != 1) & ((rows != 2) | (not bits))
        if wrong.any():
            first = int(np.argmax(wrong.reshape(len(rows), -1).any(-1)))
            wanted = "1 for each value that is legal and 0 for the others"
            if bits:
                wanted = "the value of each bit, or 2 where both are legal"
            raise TransitionError(
                f"info key {MASK_NAME!r}: expected {wanted}, got "
                f"{rows[first].tolist()!r:.80} {place(first)}; correct the mask"
            )
    if bits:
        return np.stack([rows != 1, rows != 0], -1).reshape(len(rows), -1)
    return rows.astype(np.bool_, copy=False)
