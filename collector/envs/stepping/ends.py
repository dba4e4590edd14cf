"""Ends of episodes in a slot: how the following observations are stored for each ``at_end``.

An episode ends with the observation f, and the next one begins with o. A slab stores them as
follows. "Slot after" is the slot after the slot of the end.

    at_end          next of the end          root of the slot after   next of the slot after
    "final"         f, from the step         o, by a reset here       from the first step
    "reset_slot"    f, from the step         f                        o; not a transition
    "first"         f, from `Step.final`     o, from the step         from the first step

Gymnasium's autoreset modes correspond as follows: DISABLED is "final", NEXT_STEP is "reset_slot"
and SAME_STEP is "first".

`put_finals` writes `Step.final` to the next observation. `put_step` in ``native/_step.c`` does so
for compiled steps, and `SystemEnv._step` for TorchRL's steps. `put_finals` also marks lost final
observations in ``("collector", "next_valid")``, and so does `SystemEnv._step`. `put_valid` marks
those of agents.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.stepping.arrays import as_flags
from tallyroll.collector.envs.stepping.contexts import Contexts
from tallyroll.collector.envs.stepping.results import Results
from tallyroll.collector.envs.system import AtEnd, Mask, Step, System
from tallyroll.collector.slab.slab import Cursor

Rows: TypeAlias = Sequence[NDArray[Any]]


class EndContext(Protocol):
    """The attributes of a stepper that the handling of ends uses."""

    system: System
    results: Results
    contexts: Contexts


Finish: TypeAlias = Callable[[EndContext, Cursor, Mask, Step, Rows], None]
"""Function that completes the slot ``cursor.at``, in which lanes ended.

The rows are the next observations of the slot.
"""


def finish_by_mask(lanes: EndContext, cursor: Cursor, ended: Mask, out: Step, rows: Rows) -> None:
    """Reset the lanes that ended, and write their new first observations to the next slot."""
    system = lanes.system
    roots, at = [column[cursor.at] for column in cursor.root_obs], ended.nonzero()[0].tolist()
    for index, (root, value) in enumerate(zip(roots, system.reset(ended, None), strict=True)):
        array = lanes.results.array(index, value)
        for lane in at:  # a loop is fastest for a single lane, the most common case
            root[lane] = array[lane]
    lanes.contexts.draw(system, ended)


def finish_first(lanes: EndContext, cursor: Cursor, ended: Mask, out: Step, rows: Rows) -> None:
    """Replace the first observations of new episodes, which the step returned, by final ones."""
    put_finals(lanes, cursor, ended, out, rows)
    lanes.contexts.draw(lanes.system, ended)


def put_finals(lanes: EndContext, cursor: Cursor, ended: Mask, out: Step, rows: Rows) -> None:
    """Write the final observations in ``out`` to ``rows``, and mark the lost ones.

    Raises:
        TransitionError: the system declares final observations and the step has none.
    """
    lanes.results.require_final_observations(out, ended)
    if out.final is not None:
        at = ended.nonzero()[0]
        for index, row in enumerate(rows):
            final = lanes.results.array(index, out.final[index], len(ended))
            row[at] = final.take(at, 0)
    if cursor.next_valid is not None:
        valid = np.zeros_like(ended) if out.final_valid is None else as_flags(out.final_valid)
        cursor.next_valid[cursor.at] = ~ended | valid


FINISH: dict[AtEnd, Finish] = {"final": finish_by_mask, "first": finish_first}
"""Functions by ``Declares.at_end``. A reset slot needs none."""
