"""Compare a collector's rows with manual steps through an environment's own interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.storage import open_storage, verify

Arrays = Mapping[Any, NDArray[Any]]


class Stepped(NamedTuple):
    """The results of a manual step."""

    after: Arrays
    """Observations after the step: final ones where episodes ended."""
    seen: Arrays
    """Observations that the next action depends on."""
    reward: NDArray[Any]
    terminated: NDArray[Any]
    truncated: NDArray[Any]
    skipped: NDArray[Any] | None = None
    """Lanes that ignored their action."""


def rows_of(env: Any, policy: Any = None, **arguments: Any) -> TensorDictBase:
    """Return all rows of a run."""
    with SyncCollector(env, policy, **arguments) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    collector.ledger.check()
    return rows


def by_workers_and_resumed(
    name: str, path: Path, frames: int, more: int, *, as_one: bool = True, **arguments: Any
) -> tuple[TensorDictBase, TensorDictBase, dict[str, Any]]:
    """Collect with two workers and seed 2, and resume for ``more`` rows in one process.

    Return the rows of both, and the environment's entry in the manifest. If ``as_one`` is True,
    check that the rows of workers equal those of one process.
    """
    with MultiprocessCollector(
        name, num_workers=2, total_frames=frames, storage=path, seed=2, **arguments
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    if as_one:
        alone = rows_of(name, total_frames=frames, seed=2, **arguments)
        for key in alone.keys(True, True):
            assert torch.equal(rows[key], alone[key]), key
    resumed = rows_of(name, storage=path, resume=True, total_frames=frames + more, **arguments)
    assert len(resumed) == more
    assert verify(path).sound
    with open_storage(path) as stored:
        assert len(stored) == frames + more
        return rows, resumed, stored.manifest["runs"][0]["environment"]


def compare(
    rows: TensorDictBase,
    lanes: int,
    seen: Arrays,
    step: Callable[[NDArray[Any]], Stepped],
    *,
    lost: bool = False,
) -> int:
    """Check every row of ``rows`` against a manual step, and return the number of ended episodes.

    ``seen`` are the first observations. ``lost`` states that final observations are lost.
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
