"""The compiled functions return the same results as their NumPy and Python fallbacks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fast_paths_kit import built
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector.batches.rows.slab_rows import rows_of_slab
from tallyroll.collector.counting.ledger import COUNTS, LedgerCounts
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.counting.transitions import first_in_slot_order
from tallyroll.collector.envs.stepping import stepper as writing
from tallyroll.collector.native.kernel import KINDS, StepKernel, compiled
from tallyroll.collector.native.slot_rows import HeldCounts, LogCounts, RunCounts
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.slab import Slab, SlabColumn
from tallyroll.storage import fast_paths
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.errors import ExtensionMismatch
from tallyroll.storage.files.commit_header import CommitCounts
from tallyroll.storage.rows.keys import DONE, NEXT_VALID, STEP, TERMINATED, TRAJ_IDS, TRUNCATED

REWARD = ("next", "reward")


@pytest.fixture(scope="module")
def kernel() -> StepKernel:
    """Return the compiled functions, which exist if a compiler was available."""
    return built(compiled())


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
@given(data=st.data())
def test_values_are_inside_as_numpy_says(
    kernel: StepKernel, dtype: Any, data: st.DataObject
) -> None:
    slots, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    special = [-np.inf, np.inf, np.nan] if dtype.kind == "f" else []
    low, high = (0, 9) if dtype.kind == "u" else (-9, 9)
    numbers = st.integers(low, high) | st.sampled_from(special or [low])
    draw = st.lists(numbers, min_size=slots * count, max_size=slots * count)
    values = np.array(data.draw(draw), dtype).reshape(slots, count)
    bounds = np.array(data.draw(draw) + data.draw(draw), dtype)[: 2 * count].reshape(2, count)
    bounds = np.sort(bounds, axis=0)
    words = [values.ctypes.data, KINDS[dtype], count, bounds[0].ctypes.data, bounds[1].ctypes.data]
    told = kernel.are_inside(table_of(words), slots)
    assert told == bool(((values >= bounds[0]) & (values <= bounds[1])).all())


def test_what_it_does_not_know_is_left_to_others(kernel: StepKernel) -> None:
    values = np.zeros(1, np.float16)
    words = [values.ctypes.data, KINDS.get(values.dtype, -1), 1, 0, 0]
    assert not kernel.are_inside(table_of(words), 1)
    assert kernel.are_inside(b"", 3)


# --- numbers --------------------------------------------------------------------------------------


def plan_of(lost: bool, made: str, reward: torch.dtype, *shape: int) -> SlabPlan:
    flag = SlabColumn(torch.bool, (1,))
    layout = {REWARD: SlabColumn(reward, shape or (1,)), TERMINATED: flag}
    layout |= {DONE: flag} if made == "truncated" else {TRUNCATED: flag}
    nothing: dict[str, Any] = {"batch_dims": {}, "in_place": True, "reset_slots": False}
    return SlabPlan(layout, (), (), False, (REWARD,), lost, (), (), **nothing, marked=False)


@given(data=st.data())
def test_rows_are_numbered_alike(kernel: StepKernel, data: st.DataObject) -> None:
    lanes, first = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 2]))
    slots = data.draw(st.integers(1, 9))
    plan = plan_of(
        data.draw(st.booleans()),
        data.draw(st.sampled_from(["truncated", "done"])),
        data.draw(st.sampled_from([torch.float32, torch.float64])),
        *data.draw(st.sampled_from([(1,), (2,), (3, 1), (7,), (8,)])),
    )
    slab = plan.slab(slots, lanes, first_lane=first)
    run_lanes = first + lanes + 1
    states = [LaneState.fresh(run_lanes, 100) for _ in range(2)]
    tables = [rows_of_slab(slab, plan)]
    with fast_paths.switched_off("kernel"):
        tables.append(rows_of_slab(slab, plan))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 4))):
        used = data.draw(st.integers(1, slots))
        by_lane = data.draw(st.booleans())
        _fill(slab, rng)
        marks = slab.transitions[:used]
        marks[:] = rng.random(marks.shape) < data.draw(st.sampled_from([0.6, 1.0]))
        want = data.draw(st.integers(0, used * lanes))
        block = Block.of(slab, first_in_slot_order(marks, want), want)
        if not len(block):
            continue
        each = zip(tables, states, strict=True)
        _assert_alike(*(table.part(block, state, by_lane=by_lane) for table, state in each))
        for name in ("traj_id", "step", "returns", "first_version", "length"):
            one, other = (getattr(state, name) for state in states)
            # NumPy adds many slots in a different order.
            same = np.array_equal if slots <= FEW_SLOTS else np.allclose
            assert same(one, other), name


def test_words_of_the_numbering_are_in_the_order_of_the_extension(
    kernel: StepKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(False, "done", torch.float32)
    table = rows_of_slab(plan.slab(1, 2), plan)
    first, *rest = kernel.NUMBERING.split()  # type: ignore[attr-defined]
    # Some debug builds list the sizes before the words.
    usual = np.frombuffer(table.numbering(LaneState.fresh(2)), np.int64)[-len(rest) - 1 :]
    module = SimpleNamespace(NUMBERING=" ".join([*rest, first]), __file__="kernel.so")
    monkeypatch.setattr("tallyroll.collector.native.kernel.EXTENSION.module", module)
    moved = np.frombuffer(table.numbering(LaneState.fresh(2)), np.int64)[-len(rest) - 1 :]
    sizes = [rest.index(name) for name in ("stride", "makes_done", "rewards")]
    assert first == "lanes"
    assert moved[-1] == usual[0] == 2
    assert (moved[sizes] == usual[1:][sizes]).all()
    module.NUMBERING = " ".join(rest)
    with pytest.raises(ExtensionMismatch, match=r"the words lanes, stride, .* got stride"):
        table.numbering(LaneState.fresh(2))


def _fill(slab: Slab, rng: np.random.Generator) -> None:
    for array in slab.arrays.values():
        array[:] = (
            rng.random(array.shape) < 0.3 if array.dtype == np.bool_ else rng.random(array.shape)
        )
    if DONE in slab.arrays:
        slab.arrays[TERMINATED] &= slab.arrays[DONE]
    slab.version[:] = rng.integers(-1, 3, slab.version.shape)


def _assert_alike(one: Any, other: Any) -> None:
    assert list(one.index) == list(other.index)
    assert one.next_id == other.next_id
    assert one.ends == other.ends
    for key in (TRAJ_IDS, STEP, DONE, TRUNCATED, TERMINATED, NEXT_VALID):
        assert (key in one) == (key in other)
        if key in one:
            assert (one.array(key) == other.array(key)).all(), key
    begun = [np.sort(np.concatenate([*part.begun, np.zeros(0, np.intp)])) for part in (one, other)]
    assert (begun[0] == begun[1]).all()
    if one.ends:
        for name in one.episodes.dtype.names:
            assert np.allclose(*(np.sort(each.episodes[name]) for each in (one, other))), name


# --- a step ---------------------------------------------------------------------------------------


class Slot:
    """Arrays of a slot of three lanes.

    `put` writes a step to them by the compiled function or by NumPy.
    """

    def __init__(self, kind: str, payoff: str, shared: bool, compiled: StepKernel | None) -> None:
        self.row, self.payoff = np.ones((3, 2), kind), np.ones(3, payoff)
        self.root = self.row if shared else np.ones((3, 2), kind)
        self.terminated, self.truncated = np.zeros((2, 3), np.bool_)
        self.more, self.more_root = np.ones((2, 3, 2, 1), "i4")  # a second observation
        self.arrays = self.row, self.payoff, self.terminated, self.truncated, self.more
        self.all = *self.arrays, self.root, self.more_root
        rows, roots = (self.row, self.more), (self.root, self.more_root)
        self.put: Any = self.by_numpy
        if compiled is not None:
            self.put = writing.make_slot_writer(rows, *self.arrays[1:4], roots)

    def holds(self, reward: float) -> bool:
        """Return True if no warning is due for the reward.

        A finite reward must stay finite, and must not become 0. An integer must stay exact.
        """
        kept = float(self.payoff.dtype.type(reward))
        if not math.isfinite(reward) or kept == reward:
            return True
        return math.isfinite(kept) and kept != 0 and not reward.is_integer()

    @np.errstate(all="ignore")
    def by_numpy(self, seen: Any, *others: Any) -> int:
        """Write the step if all arrays have the dtypes and shapes of the slot; else return -1."""
        *others, final = others
        given = seen[0], *others, seen[1]
        kinds = [array.dtype for array in self.arrays]
        kinds[1] = given[1].dtype if getattr(given[1], "dtype", None) in ("f4", "f8") else kinds[1]
        for each, own, kind in zip(given, self.arrays, kinds, strict=False):
            if not isinstance(each, np.ndarray) or (each.dtype, each.shape) != (kind, own.shape):
                return -1
        if not all(map(self.holds, given[1].tolist())):
            return -1
        for each, own in zip(given, self.arrays, strict=False):
            own[...] = each
        self.root[...], self.more_root[...] = self.row, self.more
        ended = self.terminated | self.truncated
        if final is not None and ended.any():
            if self.root is self.row:  # also the first observation of the next episode
                return -1
            for last, own in zip(final, (self.row, self.more), strict=True):
                if not isinstance(last, np.ndarray) or last.dtype != own.dtype:
                    return -1
                if last.shape != own.shape:
                    return -1
                own[ended] = last[ended]
        return int(np.count_nonzero(ended))


OBS_KINDS = ["f4", "f8", "i8", "u1", "?", "c8", ">f4"]
WAYS = ["as it is", "strided", "reversed bytes", "another dtype", "another shape", "a list"]


@np.errstate(all="ignore")
def bent(array: np.ndarray, way: str) -> Any:
    """Return the same values in another form."""
    forms: dict[str, Any] = {
        "strided": np.repeat(array, 2, axis=0)[::2],
        "reversed bytes": array.astype(array.dtype.newbyteorder("S")),
        "another dtype": array.astype("f4" if array.dtype == "f8" else "f8"),
        "another shape": array[:2],
        "a list": array.tolist(),
    }
    return forms.get(way, array)


@pytest.mark.filterwarnings("ignore:.*discards the imaginary")
@given(
    kind=st.sampled_from(OBS_KINDS),
    payoff=st.sampled_from(["f4", "f8"]),
    shared=st.booleans(),
    bends=st.tuples(*[st.sampled_from([*WAYS[:1] * 5, *WAYS])] * 5),
    rewards=st.lists(st.floats(width=64), min_size=3, max_size=3),
    narrow=st.booleans(),
    flags=st.lists(st.booleans(), min_size=6, max_size=6),
    seed=st.integers(0, 99),
    lasts=st.none() | st.tuples(*[st.sampled_from([*WAYS[:1] * 5, *WAYS])] * 2),
)
def test_steps_are_written_alike(
    kernel: StepKernel,
    kind: str,
    payoff: str,
    shared: bool,
    bends: Any,
    rewards: list[float],
    narrow: bool,
    flags: list[bool],
    seed: int,
    lasts: tuple[str, str] | None,
) -> None:
    seen = np.random.default_rng(seed).integers(0, 2, (3, 2)).astype(kind)
    with np.errstate(all="ignore"):
        reward = np.array(rewards, "f4" if narrow else "f8")
    more = np.random.default_rng(seed).integers(0, 9, (3, 2, 1), "i4")
    given = [seen, reward, np.array(flags[:3]), np.array(flags[3:]), more]
    bent_seen, *others, bent_more = map(bent, given, bends)
    final = None
    if lasts is not None:
        bends += lasts
        final = tuple(
            bent(each + each.dtype.type(1), way)
            for each, way in zip((seen, more), lasts, strict=True)
        )
    step = [(bent_seen, bent_more), *others, final]
    ours, theirs = (Slot(kind, payoff, shared, each) for each in (kernel, None))
    assert ours.put.func is kernel.put_step
    ended, wanted = ours.put(*step), theirs.put(*step)
    if ended < 0:  # the fallback detects fewer cases
        assert wanted < 0 or {*bends} != {"as it is"}
        return
    if wanted < 0 and {*bends} != {"as it is"}:  # the NumPy fallback compares dtypes by identity
        return
    assert ended == wanted
    for one, other in zip(ours.all, theirs.all, strict=True):
        assert one.tobytes() == other.tobytes()


# --- without the compiled functions ---------------------------------------------------------------


def test_wrong_arguments_are_errors(kernel: StepKernel) -> None:
    anything: Any = kernel
    with pytest.raises(ValueError, match="too short"):
        anything.number_slots(bytes(64), 1, None)
    with pytest.raises(TypeError):
        anything.are_inside("text", 1)
    with pytest.raises(TypeError):
        anything.put_step("text", (b"d",), (np.zeros(1),), *[np.zeros(1)] * 3, None)
    with pytest.raises(ValueError, match="too short"):
        anything.put_step(bytes(32), (b"d",), (np.zeros(1),), *[np.zeros(1)] * 3, None)
    for plan in ((), [0] * 9, (0,) * 9):
        with pytest.raises(TypeError):
            anything.store_slots(plan, 1, 1, 1, 0, False, None)


def test_a_plan_with_other_numbers_is_refused(kernel: StepKernel) -> None:
    lanes = np.zeros(64, np.int64)
    addresses = [lanes.ctypes.data] * 20
    numbering = table_of([1, 1, *addresses[:8], 1, *addresses[8:]])  # one reward per lane
    counts = (
        CommitCounts(), RunCounts(), LedgerCounts(), HeldCounts(), LogCounts(), LedgerCounts()
    )  # fmt: skip
    blocks = table_of(block.address for block in counts)
    whole = b"%d" * (len(COUNTS) + 3)

    def stored(
        record: bytes = whole,
        counts: int = len(COUNTS),
        given: bytes = blocks,
        batch: Any = None,
    ) -> int:
        tables = numbering, b"", bytes(48), bytes(24), bytes(32), bytes(8 * counts), given
        return kernel.store_slots((*tables, record, 0), 1, 1, 0, 0, False, batch)

    assert stored() == stored(whole + b" " * 4000) == -1
    for wrong in (
        {"record": whole[2:]},
        {"record": whole + b"%d"},
        {"record": whole[:-2] + b"%s"},
        {"record": whole[:-2] + b"%"},
        {"counts": len(COUNTS) + 1},
    ):
        with pytest.raises(ValueError, match="other numbers"):
            stored(**wrong)  # type: ignore[arg-type]
    fewer = table_of(block.address for block in counts[1:])
    for short in ({"counts": len(COUNTS) - 1}, {"given": fewer}):
        with pytest.raises(ValueError, match="too short"):
            stored(**short)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        stored(None)  # type: ignore[arg-type]
    table, one, two = table_of([0, 0, 0, 8, 0]), table_of([0]), table_of([0, 0])
    for none in ((), (table,), [table, one], (table, "text", None)):
        with pytest.raises(TypeError):
            stored(batch=none)
    with pytest.raises(ValueError, match="too short"):
        stored(batch=(b"", one, None))
    beyond, below = table_of([1, 0, 0, 8, 0]), table_of([0, -1, 0, 8, 0])
    for pair in ((beyond, one), (below, one), (table, two), (table, b""), (table + one, one)):
        with pytest.raises(ValueError, match="other columns"):
            stored(batch=(*pair, None))
    assert stored(batch=(table, one, None)) == -1
