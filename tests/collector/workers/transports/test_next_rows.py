"""Next observations of remote workers arrive exactly, and once if another slot has them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.ext.far.far_worker import Rows, as_array
from tallyroll.collector.ext.far.next_rows import pop_next_rows, put_back
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.slab import SlabColumn, memory_of
from tallyroll.storage import fast_paths

from far_kit import FarThreads
from worker_kit import (
    DISABLED,
    NEXT,
    SAME,
    assert_alike,
    collect_all,
    factories,
    in_threads,
    sync_collector,
)

BEGINS, ENDS = ("observation",), ("next", "observation")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]
RUN: dict[str, Any] = {"frames_per_batch": 60, "total_frames": 211, "seed": 3}


# --- rows -----------------------------------------------------------------------------------------


def octets(rows: np.ndarray, slot: int, lane: int) -> bytes:
    return rows[slot, lane].tobytes()


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (1,), (3,), (2, 5), (0,)]),
    lanes=st.integers(1, 4),
    slots=st.integers(1, 9),
    flows=st.booleans(),
    part=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    same=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    off=st.sampled_from([(), ("kernel",)]),
)
def test_what_was_taken_out_is_put_back(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    lanes: int,
    slots: int,
    flows: bool,
    part: tuple[int, int],
    same: float,
    seed: int,
    off: tuple[str, ...],
) -> None:
    """The test uses random bits, which include infinities and NaN."""
    rng = np.random.default_rng(seed)
    layout = {key: SlabColumn(dtype, shape) for key in (BEGINS, ENDS)}
    pieces = memory_of(slots, lanes, layout, [BEGINS] if flows else [], shared=False)

    def memory() -> Rows:
        made = {}
        for key in (BEGINS, ENDS):
            length = pieces[key][0]
            nbytes = int(np.prod(length)) * dtype.itemsize
            bits = rng.choice(np.array([0, 1, 127, 255], np.uint8), nbytes).tobytes()
            if dtype is torch.bool:
                bits = bytes(each & 1 for each in bits)
            filled = torch.frombuffer(bytearray(bits), dtype=dtype) if nbytes else torch.empty(0)
            made[key] = as_array(filled.to(dtype).reshape(length))
        return made

    theirs, ours = memory(), memory()
    for slot in range(min(slots, len(theirs[BEGINS]) - 1)):
        for lane in range(lanes):
            if rng.random() < same:
                theirs[ENDS][slot, lane] = theirs[BEGINS][slot + 1, lane]
    first, stop = sorted(min(each, slots) for each in part)
    sent = {BEGINS: theirs[BEGINS][first : stop + flows], ENDS: theirs[ENDS][first:stop]}
    before = {key: array.copy() for key, array in ours.items()}
    own = {
        (slot - first, lane)
        for slot in range(first, stop)
        for lane in range(lanes)
        if slot + 1 >= stop + flows
        or octets(theirs[ENDS], slot, lane) != octets(theirs[BEGINS], slot + 1, lane)
    }

    with fast_paths.switched_off(*off):
        others = pop_next_rows(sent, [ENDS])
    assert [*sent] == [BEGINS]
    assert {*zip(*map(np.ndarray.tolist, np.nonzero(others[ENDS].at)), strict=True)} == own
    assert len(others[ENDS].rows) == len(own)

    ours[BEGINS][first : first + len(sent[BEGINS])] = sent[BEGINS]
    put_back(ours, first, others)
    for slot in range(slots):
        wanted = theirs if first <= slot < stop else before
        for lane in range(lanes):
            assert octets(ours[ENDS], slot, lane) == octets(wanted[ENDS], slot, lane)


# --- runs -----------------------------------------------------------------------------------------


def far(source: str, mode: Literal["sync", "async"], kind: str) -> MultiprocessCollector:
    made = factories(source, 2, kind=kind)
    return MultiprocessCollector(made, transport=FarThreads, mode=mode, **RUN)


@pytest.mark.parametrize("off", [(), ("once",)], ids=["once", "twice"])
@pytest.mark.parametrize("source", [DISABLED, SAME, NEXT, "torch"])
def test_rows_are_those_of_one_process(source: str, off: tuple[str, ...]) -> None:
    one = collect_all(sync_collector(source, oracle={"kind": "image"}, **RUN))
    with fast_paths.switched_off(*off), in_threads():
        many = collect_all(far(source, "sync", "image"))
    assert_alike(one, many)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("source", "kind", "off", "decision"),
    [
        (DISABLED, "image", (), Decision("once")),
        (SAME, "image", (), Decision("once")),
        (NEXT, "image", (), Decision("once")),
        ("torch", "image", (), Decision("once")),
        (DISABLED, "image", ("once",), Decision("twice", "-once switches it off")),
        (DISABLED, "float", (), Decision("twice", "an observation is smaller than 64 bytes")),
    ],
)
def test_few_next_observations_are_sent(
    source: str, kind: str, off: tuple[str, ...], decision: Decision, mode: Any
) -> None:
    with fast_paths.switched_off(*off), far(source, mode, kind) as collector:
        assert collector.plan.sends == decision
        transport: Any = collector._worker_pool.transport
        for _ in collector:
            pass
        others = [each.others for each in transport.answers if each.others]
        rows = [each.rows for each in transport.answers if each.rows]
        ledger = collector.ledger
    assert any(ENDS in each for each in rows) == (decision.way == "twice")
    if source == NEXT:  # these share the memory
        assert not others
    elif decision.way == "once":
        sent = sum(len(each[ENDS].rows) for each in others)
        most = ledger.episodes_complete + ledger.executed // 10
        assert 0 < sent < most, (sent, ledger)
