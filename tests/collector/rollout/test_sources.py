"""Fast paths of sources equal the slow ones, and third parties can write sources."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.collector import SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import NOTHING, Ledger, LedgerEntry, post
from tallyroll.collector.counting.transitions import (
    first_in_slot_order,
    lane_major,
    next_step_transitions,
    whole_slots,
)
from tallyroll.collector.errors import LedgerError
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.driver import Driver, SlotOutcome
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block, DiscardedTransitions, ValidSlots
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.slab import Slab, SlabColumn
from tallyroll.storage import open_storage
from tallyroll.storage.rows.keys import REWARD, TERMINATED, TRUNCATED, Key

from collect_kit import balanced

OBSERVATION: Key = ("observation",)
LAYOUT = {
    OBSERVATION: SlabColumn(torch.float32, (2,)),
    ("next", *OBSERVATION): SlabColumn(torch.float32, (2,)),
    ("action",): SlabColumn(torch.int64, ()),
    REWARD: SlabColumn(torch.float32, (1,)),
    TERMINATED: SlabColumn(torch.bool, (1,)),
    TRUNCATED: SlabColumn(torch.bool, (1,)),
}


# --- fast paths -----------------------------------------------------------------------------------


class Scripted(Driver):
    """Driver whose steps write predefined ends."""

    used, stopping = 0, False

    def __init__(self, slab: Slab, ends: np.ndarray, resets: bool) -> None:
        self.slab, self.run_lanes, self.resets, self.steps = slab, slab.lanes, resets, 0
        self._ends, self._pending = ends, np.zeros(slab.lanes, np.bool_)

    paused = False

    def seek(self, slots: int) -> None:
        self.used = slots

    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def begin(self) -> None: ...
    def restart(self) -> None: ...

    def random_steps(self, start: int, stop: int) -> None:
        for at in range(start, stop):
            self.slab.arrays[TERMINATED][at, :, 0] = self._ends[self.steps % len(self._ends)]
            self.steps += 1
            self.used = at + 1

    def policy_steps(self, start: int, stop: int, random_lanes: Any = None) -> None:
        self.random_steps(start, stop)

    def part(self, at: int, lanes: int, random_lanes: Any) -> None:
        self.random_steps(at, at + 1)

    def upcoming(self) -> np.ndarray:
        return ~self._pending

    def outcome(self, start: int, stop: int, stepped: int) -> SlotOutcome:
        transitions = np.ones((stop - start, self.slab.lanes), np.bool_)
        if self.resets and stop > start:
            ended = self.ended(start, stop)
            transitions = next_step_transitions(ended, self._pending)
            self._pending = ended[-1].copy()
        transitions[:, stepped:] = False
        return SlotOutcome((stop - start) * stepped, int(transitions.sum()), transitions)


class Numbered:
    """Stand-in for a policy."""

    version = 7


def slow_of(slab: Slab, transitions: np.ndarray, count: int, **owner: Any) -> Block:
    """Return the expected ``Block.of``, computed one lane and slot at a time."""
    taken = np.zeros_like(transitions)
    for slot, lane in np.argwhere(transitions)[:count]:
        taken[slot, lane] = True
    rows = [(lane, slot) for lane in range(slab.lanes) for slot in np.flatnonzero(taken[:, lane])]
    index = np.array([slot * slab.lanes + lane for lane, slot in rows], np.intp)
    lanes = np.array([slab.first_lane + lane for lane, _ in rows], np.int32)
    return Block(slab, len(transitions), taken, index, lanes, **owner)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    lanes = draw(st.integers(1, 5))
    never = draw(st.booleans())
    often = draw(st.sampled_from([0.0, 0.2, 0.6]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return {
        "lanes": lanes,
        "ends": rng.random((40, lanes)) < often,
        "surplus": "never_step" if never else "carry",
        "resets": not never and draw(st.booleans()),
        "policy": draw(st.booleans()),
        "random_frames": draw(st.sampled_from([0, 0, 7])),
        "episodes": draw(st.sampled_from([None, None, 6])),
        "first_lane": draw(st.sampled_from([0, 3])),
        "wants": draw(st.lists(st.integers(1, 2 * lanes + 1) | st.just(lanes), max_size=12)),
    }


def played(run: dict[str, Any]) -> tuple[list[Any], Ledger]:
    """Return all results of a run."""
    slab = Slab(4, run["lanes"], LAYOUT, flowing=[OBSERVATION], first_lane=run["first_lane"])
    episodes = run["episodes"]
    rollout = Rollout(
        Scripted(slab, run["ends"], run["resets"]),
        Numbered() if run["policy"] else None,  # type: ignore[arg-type]
        extra=(),
        surplus=run["surplus"],
        random_frames=run["random_frames"],
        gate=None if episodes is None else EpisodeBudget(episodes, run["lanes"]),
    )
    ledger, seen = Ledger(), []
    for want in run["wants"]:
        if rollout.dry:
            break
        block = rollout.block(want)
        post(ledger, block.entry)
        assert len(block) <= want
        seen += [block.index.tolist(), block.lane.tolist(), block.taken.tolist(), block.entry]
        assert (block.index.dtype, block.lane.dtype) == (np.intp, np.int32)
        block.lane[:] = -1  # the array belongs to the block
        rollout.hand_over(block)
        post(ledger, LedgerEntry(stored=len(block)))
        ledger.balance(rollout.carried)
        seen += [rollout.carried, rollout.random_frames]
    assert ledger.slots == rollout.driver.steps * run["lanes"] or run["surplus"] == "never_step"
    post(ledger, rollout.discard((REWARD,)).entry)
    ledger.balance(0)
    return seen, ledger


@given(runs())
@settings(max_examples=200, deadline=None)
def test_blocks_of_whole_slots_are_what_the_slow_way_makes_of_them(run: dict[str, Any]) -> None:
    quick = played(run)
    with patch.object(Block, "of", slow_of):
        assert played(run) == quick


@given(st.integers(0, 6), st.integers(1, 6))
def test_the_index_of_whole_slots(slots: int, lanes: int) -> None:
    for one, other in zip(
        whole_slots(slots, lanes), lane_major(np.ones((slots, lanes), np.bool_)), strict=True
    ):
        assert one.tolist() == other.tolist()
        assert one.dtype == other.dtype


@given(st.integers(0, 9), st.integers(1, 6), st.integers(0, 30), st.integers(0, 2**32))
def test_the_first_transitions_of_one_slot_or_more(n: int, lanes: int, count: int, s: int) -> None:
    transitions = np.random.default_rng(s).random((n, lanes)) < 0.7
    slab = Slab(max(n, 1), lanes, LAYOUT)
    slow = slow_of(slab, transitions, count)
    taken = first_in_slot_order(transitions, count)
    index, lane = lane_major(taken)
    assert taken.tolist() == slow.taken.tolist()
    assert (index.tolist(), lane.tolist()) == (slow.index.tolist(), slow.lane.tolist())


# --- blocks ---------------------------------------------------------------------------------------


class SlotKeeper:
    """Listener that counts its calls."""

    def __init__(self, spare: bool) -> None:
        self.spare, self.heard = spare, 0

    def keeps(self) -> bool:
        return self.spare

    def hand_over(self, block: Block) -> None: ...

    def released(self) -> None:
        self.heard += 1


def block_of(owner: Any = None, keeper: Any = None) -> Block:
    block = Block.of(Slab(2, 3, LAYOUT), np.ones((2, 3), np.bool_), 6)
    block.owner, block.keeper = owner, keeper
    return block


@pytest.mark.parametrize("more", [False, True])
def test_a_block_is_released_only_where_it_was_kept(more: bool) -> None:
    for spare in (False, True):
        keeper = SlotKeeper(spare)
        block = block_of(keeper, keeper)
        assert block.keep(more) is spare
        block.release()
        block.release()
        assert keeper.heard == spare


def test_a_block_waits_until_the_next_one_or_for_ever_in_memory_of_its_own() -> None:
    owner = SlotKeeper(True)
    assert block_of(owner).keep(more=False)
    assert not block_of(owner).keep(more=True)
    block = block_of()
    assert block.keep(more=True)
    block.release()


# --- third-party sources --------------------------------------------------------------------------


class Tape:
    """Source that plays one slot per block, each in its own memory.

    Lanes count their steps, and an episode has four. Slot 3 fails if ``fails`` is True.
    """

    random_frames = 0
    counts = Decision("by lane", "it is a tape")

    def __init__(self, lanes: int, fails: bool = False, forgets: bool = False) -> None:
        self.lanes, self.fails, self.forgets = lanes, fails, forgets
        self.slot, self.entry, self.stopped = 0, NOTHING, False
        self.rest: tuple[Slab, np.ndarray] | None = None
        self.slabs = [Slab(1, lanes, LAYOUT)]

    def block(self, want: int) -> Block:
        if self.rest is None:
            slab = Slab(1, self.lanes, LAYOUT)
            if self.fails and self.slot == 3:
                raise ConnectionError("the tape is torn")
            for at, key in enumerate((OBSERVATION, ("next", *OBSERVATION))):
                slab.arrays[key][0, :, 0] = np.arange(self.lanes)
                slab.arrays[key][0, :, 1] = self.slot + at
            slab.arrays[TERMINATED][:] = self.slot % 4 == 3
            self.slot += 1
            self.entry = LedgerEntry(slots=self.lanes, executed=self.lanes)
            self.rest = slab, np.ones((1, self.lanes), np.bool_)
        slab, marks = self.rest
        block = Block.of(slab, marks, want)
        block.entry, self.entry = self.entry, NOTHING
        left = marks & ~block.taken
        self.rest = (slab, left) if left.any() and not self.forgets else None
        return block

    @property
    def carried(self) -> int:
        return 0 if self.rest is None else int(self.rest[1].sum())

    @property
    def dry(self) -> bool:
        return self.stopped and self.rest is None

    def discard(self, rewards: Sequence[Key]) -> DiscardedTransitions:
        lanes = np.zeros(self.lanes, np.bool_) if self.rest is None else self.rest[1][0]
        entry = self.entry.plus(LedgerEntry(discarded=self.carried))
        self.entry, self.rest = NOTHING, None
        return DiscardedTransitions(
            entry, lanes, np.zeros(self.lanes), np.zeros(self.lanes, np.bool_)
        )

    def restart_lanes(self, ledger: Ledger) -> None:
        self.slot = 0

    def recover(self, valid_slots: ValidSlots, most: int) -> Iterator[Block]:
        if self.rest is not None:
            yield self.block(most)

    def refused(self) -> None:
        return None

    paused = False

    def go_on(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True


class NoEnvironments:
    """Stand-in for environments without seeds."""

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        return []

    def state(self) -> None: ...

    def load(self, state: Any) -> None: ...


class TapeCollector(Collector):
    """Collector of a tape."""

    def __init__(self, tape: Tape, storage: Path, **kwargs: Any) -> None:
        bound = inspect.signature(SyncCollector).bind(None, **kwargs)
        bound.apply_defaults()
        options = Options.of(bound.arguments)
        super().__init__(options, replay_buffer=None, storage=storage, resume=False)
        self._policy = None
        self._begin_run(tape.lanes, NoEnvironments())
        plan = SlabPlan(
            LAYOUT, (), (), False, (REWARD,), False, (OBSERVATION,), (), {}, False, False, False
        )
        self._drive(tape, plan, [], {})

    def _close_source(self) -> None: ...

    def _stepping(self) -> dict[str, Decision]:
        played = Decision("tape")
        return dict.fromkeys(("acts", "steps", "writes"), played)


@pytest.mark.parametrize("surplus", ["carry", "discard"])
def test_a_collector_takes_exact_batches_of_any_source(surplus: str, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 40, "surplus": surplus}
    kwargs["finals"] = "kept"  # the tape never returns to a first observation
    with TapeCollector(Tape(3), tmp_path / "rows", **kwargs) as collector:
        assert collector.plan.counts == Decision("by lane", "it is a tape")
        assert [len(batch) for batch in collector] == [10] * 4
        assert balanced(collector.ledger)
    # Forty rows come from slots of three. In each batch, the fourth slot has two surplus rows.
    executed, discarded = (42, 2) if surplus == "carry" else (48, 8)
    counts = collector.ledger.counts()
    assert (counts["executed"], counts["discarded"], counts["carried"]) == (executed, discarded, 0)
    with open_storage(tmp_path / "rows") as storage:
        rows = storage.get(slice(0, storage.head))
        seen = {tuple(row) for row in rows["observation"].int().tolist()}
        assert len(seen) == 40, "none twice"
        if surplus == "carry":
            assert seen == {(row % 3, row // 3) for row in range(40)}


def test_after_an_error_of_a_source_its_counts_are_exact(tmp_path: Path) -> None:
    with TapeCollector(
        Tape(3, fails=True), tmp_path / "rows", frames_per_batch=4, total_frames=40
    ) as collector:
        sizes = []
        with pytest.raises(ConnectionError, match="torn"):
            sizes += [len(batch) for batch in collector]
    counts = collector.ledger.counts()
    assert (counts["executed"], counts["stored"], counts["carried"]) == (9, 9, 0)
    assert balanced(collector.ledger)


def test_a_source_that_loses_what_it_held_is_found_out(tmp_path: Path) -> None:
    with (
        TapeCollector(
            Tape(3, forgets=True), tmp_path / "rows", frames_per_batch=4, total_frames=40
        ) as collector,
        pytest.raises(LedgerError, match=r"expected executed = stored \+"),
    ):
        next(iter(collector))
