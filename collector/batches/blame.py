"""The fault of an action, where an environment raised the exception."""

from tallyroll.collector.batches.value_checks import RangeChecks
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.rollout.driver import raised_by_policy
from tallyroll.collector.rollout.source import TransitionSource


def culprit_of(
    error: Exception,
    rollout: TransitionSource,
    checks: RangeChecks,
    state: LaneState,
    *,
    in_place: bool,
) -> Exception | None:
    """Return the fault of the action or mask for which a step raised ``error``; None: of neither.

    ``error`` gets the step of its trajectory, if it lacks that. ``in_place``: the policy saw what
    is in the slab.
    """
    refused = rollout.refused()
    if refused and isinstance(error, ValueRefused):
        checks.place(error, *refused[:2], state)
    acted = not raised_by_policy(error)
    if not acted and not in_place:
        return None  # what the policy saw is not in the slab
    return checks.bad_action(*refused, state, acted=acted) if refused else None
