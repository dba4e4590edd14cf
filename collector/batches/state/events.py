"""Events of a run: calls that changed its environments, and the first transitions after them."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from reprlib import Repr
from typing import Any

import numpy as np

from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.counting.numbering import LaneState, number
from tallyroll.collector.envs.calls.env_call import EnvCall
from tallyroll.collector.rollout.source import UndeliveredTransitions

_MOST_NBYTES = 4096
"""The most bytes of JSON that an event's arguments may have.

Of larger arguments, only a part of their text is recorded.
"""
_DEEPEST = 16


class _ShortRepr(Repr):
    """Representations in which strings and other values have at most 200 characters each."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200


_short = _ShortRepr()


def event_of(
    asked: EnvCall,
    run: RunState,
    held: Sequence[UndeliveredTransitions],
    done: Sequence[int],
    failed: Sequence[int],
) -> dict[str, Any]:
    """Return the event of a call that was made in the lanes ``done``.

    Args:
        asked: the call that was made in these lanes.
        run: the state of the run.
        held: transitions that were executed before the call and are not stored yet.
        done: lanes in which the call succeeded, in the order of its values.
        failed: lanes in which the call raised.
    """
    every = list(done) == list(run.options.own_lanes(len(run.lanes.step)))
    event: dict[str, Any] = {
        "at": run.ledger.stored,
        "call": asked.way,
        "name": asked.name,
        **_arguments(asked),
        "lanes": None if every else list(done),
    }
    if failed:
        event["failed"] = list(failed)
    ledger = run.ledger
    if held or ledger.executed > ledger.stored + ledger.discarded + ledger.lost:
        state = _after(run.lanes, held)
        run.foresee(state)
        event["first"] = [[int(state.traj_id[lane]), int(state.step[lane])] for lane in done]
    return event


def _after(lanes: LaneState, held: Sequence[UndeliveredTransitions]) -> LaneState:
    """Return the state of all lanes after their held transitions."""
    arrays = ("traj_id", "step", "returns", "first_version", "length")
    state = replace(lanes, **{name: getattr(lanes, name).copy() for name in arrays})
    for each in held:
        rows = len(each.lane)
        number(state, each.lane, each.ended, np.zeros(rows), np.zeros(rows, np.int64))
        if each.cuts is not None:
            state.interrupt(each.cuts)
    return state


def _arguments(asked: EnvCall) -> dict[str, Any]:
    """Return the arguments as JSON values; ``args`` is None if they are not JSON or too large."""
    args: list[Any] = list(asked.args)
    if asked.way == "env_set" and not args:
        args = [list(asked.values)]  # one value per lane
    kwargs = dict(asked.kwargs)
    if _is_json(args) and _is_json(kwargs) and len(json.dumps([args, kwargs])) <= _MOST_NBYTES:
        return deepcopy({"args": args, "kwargs": kwargs})
    return {"args": None, "kwargs": {}, "repr": _text(args, kwargs)}


def _is_json(value: Any, levels: int = _DEEPEST) -> bool:
    """Return True if JSON preserves the value; it does not preserve a tuple, for example."""
    kind = type(value)
    if kind is float:
        return bool(np.isfinite(value))
    if value is None or kind in (bool, int, str):
        return True
    if not levels or kind not in (list, dict):
        return False
    if kind is dict and any(type(key) is not str for key in value):
        return False
    inner = value.values() if kind is dict else value
    return all(_is_json(each, levels - 1) for each in inner)


def _text(args: list[Any], kwargs: dict[str, Any]) -> str:
    try:
        said = ", ".join(
            [*map(_short.repr, args), *(f"{n}={_short.repr(v)}" for n, v in kwargs.items())]
        )
    except Exception:  # noqa: BLE001  record the event even if a __repr__ raises
        said = ", ".join(type(each).__name__ for each in (*args, *kwargs.values()))
    return said if len(said) <= 200 else f"{said[:199]}…"
