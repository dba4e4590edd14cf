"""Rows of a collector against an environment that is stepped by hand with its own interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector import SyncCollector

Arrays = Mapping[Any, NDArray[Any]]


class Stepped(NamedTuple):
    """The results of a step by hand."""

    after: Arrays
    """The observations after it: final ones where episodes ended."""
    seen: Arrays
    """The observations by which the next action is chosen."""
    reward: NDArray[Any]
    terminated: NDArray[Any]
    truncated: NDArray[Any]
    skipped: NDArray[Any] | None = None
    """Lanes whose action was ignored."""


def rows_of(env: Any, policy: Any = None, **arguments: Any) -> TensorDictBase:
    """All rows of a run."""
    with SyncCollector(env, policy, **arguments) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    collector.ledger.check()
    return rows


def compare(
    rows: TensorDictBase,
    lanes: int,
    seen: Arrays,
    step: Callable[[NDArray[Any]], Stepped],
    *,
    lost: bool = False,
) -> int:
    """Every row of ``rows`` is what a step by hand does; returns how many episodes ended.

    ``seen`` are first observations, ``lost`` says that final ones are.
    """
    order = np.lexsort((rows["collector", "step"].numpy(), rows["collector", "traj_ids"].numpy()))
    lane_of = rows["collector", "lane"].numpy()[order]
    left = [order[lane_of == lane].tolist() for lane in range(lanes)]
    actions = rows["action"].numpy()
    pending, ends, compared = np.zeros(lanes, bool), 0, 0
    while all(left):
        here = [None if pending[lane] else left[lane].pop(0) for lane in range(lanes)]
        given = np.zeros((lanes, *actions.shape[1:]), actions.dtype)
        for lane, row in enumerate(here):
            if row is not None:
                given[lane] = actions[row]
        out = step(given)
        if out.skipped is not None:
            assert (out.skipped == pending).all()
        for lane, row in enumerate(here):
            if row is None:
                continue
            ended = bool(out.terminated[lane] | out.truncated[lane])
            for key in seen:
                got, wanted = rows[key][row].numpy(), seen[key][lane]
                assert np.array_equal(got, wanted), (row, lane, key, got, wanted)
                got, wanted = rows["next"][key][row].numpy(), out.after[key][lane]
                assert (lost and ended) or np.array_equal(got, wanted), (row, lane, key, "next")
            got = rows["next", "reward"][row].numpy().reshape(-1)
            assert np.array_equal(got, np.float32(out.reward[lane]).reshape(-1)), (row, "reward")
            assert bool(rows["next", "terminated"][row]) == bool(out.terminated[lane]), row
            assert bool(rows["next", "truncated"][row]) == bool(out.truncated[lane]), row
            ends += ended
            compared += 1
        seen = {key: value.copy() for key, value in out.seen.items()}
        if out.skipped is not None:
            pending = np.asarray(out.terminated | out.truncated)
    assert compared >= len(rows) // 2, (compared, len(rows))
    return ends
