"""Ends of episodes in a slot: the observations that follow, as the system declares it.

An episode that ends with the observation f, and the next one, which begins with o, lie in a slab
as follows; "slot after" is the slot after that of the end.

    at_end          next of the end          root of the slot after   next of the slot after
    "final"         f, which a step gives    o, by a reset here       the first step's
    "reset_slot"    f, which a step gives    f                        o; it is no transition
    "first"         f, from `Step.final`     o, which a step gives    the first step's

Of Gymnasium's autoreset modes DISABLED is "final", NEXT_STEP "reset_slot" and SAME_STEP "first".
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
    """The parts of a stepper that ends of episodes concern."""

    system: System
    results: Results
    contexts: Contexts


Finish: TypeAlias = Callable[[EndContext, Cursor, Mask, Step, Rows], None]
"""Completes the slot ``cursor.at``, in which lanes ended; the last is its next observations."""


def finish_by_mask(lanes: EndContext, cursor: Cursor, ended: Mask, out: Step, rows: Rows) -> None:
    """Reset the lanes that ended, and write what they observe to the slot after."""
    system = lanes.system
    roots, at = [column[cursor.at] for column in cursor.root_obs], ended.nonzero()[0].tolist()
    for index, (root, value) in enumerate(zip(roots, system.reset(ended, None), strict=True)):
        array = lanes.results.array(index, value)
        for lane in at:  # most often one, and then this is fastest
            root[lane] = array[lane]
    lanes.contexts.draw(system, ended)


def finish_first(lanes: EndContext, cursor: Cursor, ended: Mask, out: Step, rows: Rows) -> None:
    """Replace the first observations of next episodes, which the step gave, by the final ones."""
    put_finals(lanes, cursor, ended, out, rows)
    lanes.contexts.draw(lanes.system, ended)


def put_finals(lanes: EndContext, cursor: Cursor, ended: Mask, out: Step, rows: Rows) -> None:
    """Write final observations to ``rows``, where the step has them, and mark those that are lost.

    Raises:
        TransitionError: it has none, against the declaration.
    """
    lanes.results.require_finals(out, ended)
    if out.final is not None:
        at = ended.nonzero()[0]
        for index, row in enumerate(rows):
            final = lanes.results.array(index, out.final[index], len(ended))
            row[at] = final.take(at, 0)
    if cursor.next_valid is not None:
        valid = np.zeros_like(ended) if out.final_valid is None else as_flags(out.final_valid)
        cursor.next_valid[cursor.at] = ~ended | valid


FINISH: dict[AtEnd, Finish] = {"final": finish_by_mask, "first": finish_first}
"""By ``Declares.at_end``; a reset slot needs none."""
