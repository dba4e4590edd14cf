"""Random runs with a policy for each group: counts, budgets and random actions are exact.

``TALLYROLL_CONFIGURATIONS=3000`` draws 3000 runs, and ``TALLYROLL_CONFIGURATION=17`` only that one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_kit import GROUPS, GroupsEnv, alive, check_groups, in_slot_order, told, version
from tensordict import TensorDictBase

from tallyroll.collector import OnePolicy, SyncCollector, load_checkpoint, save_checkpoint
from tallyroll.collector.errors import StateError
from tallyroll.storage import open_storage, verify

from random_drawing import Draw
from worker_kit import in_threads, lanes_of_workers, start

COUNT = int(os.environ.get("TALLYROLL_CONFIGURATIONS", "12"))
ALONE = os.environ.get("TALLYROLL_CONFIGURATION")


@dataclass(frozen=True)
class GroupsRun:
    """Run, and the way to interrupt and continue it."""

    lanes: int
    lengths: list[list[int]]
    openings: dict[str, int | None]
    """Opening of each group. None draws random actions all the time."""
    total: int
    frames: int
    by_agent: bool
    workers: int
    mode: str
    surplus: str
    phase: str
    after: int
    collects: bool
    opening: int
    """Opening of all groups."""

    @classmethod
    def drawn(cls, number: int) -> GroupsRun:
        """Return the run of this number."""
        draw = Draw(number, 31)
        lanes = draw.number(1, 4)
        lengths = [[draw.number(1, 7) for _ in range(draw.number(1, 3))] for _ in range(3)]
        openings = {
            group: draw.one(None, 0, 0, draw.number(1, 12), draw.number(1, 70)) for group in GROUPS
        }
        workers = min(lanes, draw.one(0, 0, 1, 2, 3))
        mode = draw.one("sync", "async") if workers else "sync"
        own = any(opening != 0 for opening in openings.values())
        return cls(
            lanes,
            lengths,
            openings,
            total=draw.number(1, 120),
            frames=draw.number(1, 20),
            by_agent=draw.chance(40),
            workers=workers,
            mode=mode,
            surplus="carry" if mode == "async" else draw.one("carry", "carry", "discard"),
            phase=draw.one("", "", "resume", "state", "rewind", "keep", "seed"),
            after=draw.number(1, 4),
            collects=draw.chance(20),
            opening=0 if own else draw.one(0, draw.number(1, 60)),
        )

    def make(self, path: Path, **more: Any) -> Any:
        """Return a collector of the run."""
        policies = {
            group: None if opening is None else OnePolicy(told(group), init_random_frames=opening)
            for group, opening in self.openings.items()
        }
        kwargs: dict[str, Any] = {
            "frames_per_batch": self.frames,
            "total_frames": self.total,
            "budget_unit": "agent_transitions" if self.by_agent else "transitions",
            "surplus": self.surplus,
            "init_random_frames": self.opening,
            "seed": 3,
            "storage": path,
            **more,
        }
        if not self.workers:
            return SyncCollector(GroupsEnv(self.lanes, self.lengths), policies, **kwargs)
        creates = [
            partial(GroupsEnv, lanes, self.lengths, first_lane=first)
            for first, lanes in lanes_of_workers(self.lanes, self.workers)
        ]
        return start(creates, policies, mode=self.mode, **kwargs)

    def taken(self, collector: Any, batches: int | None = None) -> int:
        """Collect some batches, or all that are left, and return the number of rows."""
        count = 0
        for number in range(10**6) if self.collects else islice(collector, batches):
            if not self.collects:
                count += len(number)
            elif batches == number or not (made := collector.collect(1 + number % 5)):
                break
            else:
                count += made
            collector.ledger.check()
        return count


def carried_out(run: GroupsRun, folder: Path) -> tuple[TensorDictBase, Any]:
    """Return the stored rows of a run and its final ledger."""
    path = folder / "rows"
    if run.phase in ("", "seed"):
        with run.make(path) as collector:
            run.taken(collector, run.after)
            if run.phase == "seed":
                with suppress(StateError):  # if the run has ended
                    collector.set_seed(17)
            run.taken(collector)
            ledger = collector.ledger
    else:
        with run.make(path) as collector:
            run.taken(collector, run.after)
            state, before = collector.state_dict(), collector.ledger.stored
            if run.phase in ("rewind", "keep"):
                save_checkpoint(folder / "saved", collector=collector)
                run.taken(collector, 2)
        another = folder / "more" if run.phase == "state" else path
        with run.make(another, **({"resume": True} if another == path else {})) as collector:
            if run.phase == "state":
                collector.load_state_dict(state)
            elif run.phase != "resume":
                load_checkpoint(folder / "saved", collector=collector, rows=run.phase)
            run.taken(collector)
            ledger = collector.ledger
        if run.phase == "state" and another.exists():
            with open_storage(path) as first, open_storage(another) as second:
                return torch.cat([first[:][:before], second[:]]), ledger
    assert not verify(path).findings
    with open_storage(path) as storage:
        return storage[:], ledger


def wrong(run: GroupsRun, rows: TensorDictBase, ledger: Any) -> Iterator[str]:
    """Yield the errors in the rows and the ledger."""
    ledger.check()
    count, living = len(rows), int(rows["red", "mask"].sum()) + len(rows)
    if ledger.stored != count or ledger.agent_transitions != living:
        yield f"{count} rows, {living} agent transitions: {ledger}"
    if run.by_agent and not 0 <= living - run.total < 4:
        yield f"{living} agent transitions of {run.total}"
    if not run.by_agent and count != run.total:
        yield f"{count} rows of {run.total}"
    at = rows["red", "observation"][:, 0, :3].int().tolist()
    if not torch.equal(rows["red", "mask"], torch.tensor([alive(*each) for each in at])):
        yield "other agents live"
    if [each[0] for each in at] != rows["collector", "lane"].tolist():
        yield "a row of another lane"
    whole = run.surplus == "carry"  # otherwise trajectories restart after discarded rows
    if whole and [each[2] for each in at] != rows["collector", "step"].tolist():
        yield "a row of another step"
    for group, opening in run.openings.items():
        drawn = version(rows, group) == -1
        wanted = count if opening is None else min(opening or run.opening, count)
        if int(drawn.sum()) != wanted:
            yield f"{group}: {int(drawn.sum())} rows at random, not {wanted}"
        plain = run.mode == "sync" and run.surplus == "carry" and not run.phase
        if plain and not drawn[in_slot_order(rows)][:wanted].all():
            yield f"{group}: not the first rows are random"
    wholly = version(rows, "red") == -1
    wholly &= version(rows, "blue") == -1
    if ledger.random != int(wholly.sum()):
        yield f"the ledger has {ledger.random} random rows, not {int(wholly.sum())}"


@pytest.mark.parametrize("number", range(COUNT) if ALONE is None else [int(ALONE)])
def test_counts_budgets_and_random_actions_are_exact(number: int, tmp_path: Path) -> None:
    run = GroupsRun.drawn(number)
    with in_threads() if run.workers else nullcontext():
        rows, ledger = carried_out(run, tmp_path)
    assert not [*wrong(run, rows, ledger)], f"TALLYROLL_CONFIGURATION={number}: {run}"
    # in these phases, environments restart
    if run.phase not in ("resume", "state", "rewind", "keep"):
        check_groups(rows)
