"""Infos of slots in which only some lanes are stepped (``surplus="never_step"``)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tallyroll.collector import Info, SyncCollector
from tallyroll.collector.errors import TransitionError, WorkerRaised
from tallyroll.storage import open_storage

from collect_kit import ByObservation, joined
from oracles import OracleEnv, check_rows
from worker_kit import collect_all, in_threads, start

LENGTHS = (3, 1, 2)
LANES = 3


class Late(OracleEnv):
    """Oracle whose info of lane 1 does not fit at one (episode, step).

    "some" exists at even steps only.
    """

    def __init__(self, lane: int, at: tuple[int, int] = (-1, -1), **kwargs: Any) -> None:
        super().__init__(lane, LENGTHS, ends="mixed", **kwargs)
        self.at = at

    def _info(self) -> dict[str, Any]:
        bad = self.lane == 1 and (self.episode, self.step_in_episode) == self.at
        told = {"x": 0.5 if bad else self.step_in_episode, "where": self.lane * 100 + self.episode}
        return told if self.step_in_episode % 2 else {**told, "some": self.steps_taken + 7}


def late(at: tuple[int, int], first: int = 0, lanes: int = LANES) -> SyncVectorEnv:
    makes = [partial(Late, lane, at) for lane in range(first, first + lanes)]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)


PLACES = [
    (episode, step)
    for episode in range(4)
    for step in range(LENGTHS[episode % 3] + 1)
    if (episode, step) != (0, 0)
]
"""All cases except the first reset, which is checked before any step."""
RUN: dict[str, Any] = {
    "surplus": "never_step",
    "info_keys": [Info("x", "int64"), Info("where", "int64"), Info("some", "int64", fill=-1)],
    "total_frames": 40,
    "seed": 1,
}


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_row_has_the_infos_of_its_step(size: int, workers: int) -> None:
    """Sizes 1 and 2 never have a whole slot; in 4 and 5, every second slot is whole."""
    options = {**RUN, "frames_per_batch": size}
    if workers:
        makes = [partial(late, (-1, -1), first, own) for first, own in ((0, 1), (1, 2))]
        with in_threads():
            rows = joined(collect_all(start(makes, ByObservation(), **options)).batches)
    else:
        rows = joined(
            collect_all(SyncCollector(late((-1, -1)), ByObservation(), **options)).batches
        )
    checked = check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    taken = [0] * LANES
    for row, (lane, episode, step) in enumerate(
        zip(checked.lane.tolist(), checked.episode.tolist(), checked.step.tolist(), strict=True)
    ):
        for place, at, count in (
            (rows, step, taken[lane]),
            (rows["next"], step + 1, taken[lane] + 1),
        ):
            assert place["x"][row] == at
            assert place["where"][row] == lane * 100 + episode
            assert place["some"][row] == (-1 if at % 2 else count + 7)
            assert place["some_given"][row] == (at % 2 == 0)
        taken[lane] += 1


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("at", PLACES)
def test_a_value_that_does_not_fit_is_told_with_its_step(
    at: tuple[int, int], size: int, tmp_path: Path
) -> None:
    """The step is counted within the trajectory, for whole and partial slots."""
    episode, step = at
    where = f"step {step - 1} of its" if step else "in the reset before step 0 of its"
    options = {**RUN, "frames_per_batch": size, "storage": tmp_path / "s"}
    collector = SyncCollector(late(at), ByObservation(), **options)
    with collector, pytest.raises(TransitionError, match=f"'x'.*at lane 1, {where} trajectory"):
        list(collector)
    collector.ledger.check()
    if not collector.ledger.stored:
        return
    with open_storage(tmp_path / "s") as storage:
        rows = storage.get(slice(None)).clone()
    checked = check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert collector.ledger.stored == len(rows)
    assert (checked.episode[checked.lane == 1] <= episode).all()


def test_the_lane_is_that_of_the_run_where_a_worker_steps_a_part() -> None:
    makes = [partial(late, (1, 1), first, own) for first, own in ((0, 1), (1, 2))]
    options = {**RUN, "frames_per_batch": 2}
    with in_threads(), pytest.raises((TransitionError, WorkerRaised), match="at lane 1, step 0 of"):
        collect_all(start(makes, ByObservation(), **options))
