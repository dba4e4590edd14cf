"""Values that pass from slot to slot are checked once, and every wrong value is found."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.slab import Slab, SlabColumn
from tallyroll.storage.rows.keys import TERMINATED, TRUNCATED, Key

SEEN, NEXT_SEEN = ("seen",), ("next", "seen")
LAYOUT = {
    SEEN: SlabColumn(torch.float32, (2,)),
    NEXT_SEEN: SlabColumn(torch.float32, (2,)),
    TERMINATED: SlabColumn(torch.bool, (1,)),
    TRUNCATED: SlabColumn(torch.bool, (1,)),
}


def filled(data: st.DataObject, *, shared: bool) -> tuple[Slab, int]:
    """Fill a slab as an environment does in place, with a few wrong values."""
    used = data.draw(st.integers(FEW_SLOTS + 1, 12))
    lanes = data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    slab = Slab(used + 2, lanes, LAYOUT, flowing=[SEEN], shared=shared)
    lies = rng.random((used, lanes)) < data.draw(st.sampled_from([0.0, 0.01, 0.1]))
    begins = rng.random((used + 1, lanes)) < data.draw(st.sampled_from([0.0, 0.02, 0.3]))
    slab.transitions[:used] = rng.random((used, lanes)) < data.draw(st.sampled_from([0.6, 1.0]))
    root, after = slab.columns[SEEN].numpy(), slab.columns[NEXT_SEEN].numpy()
    root[0] = np.where(begins[0, :, None], np.nan, 0.5)
    for at in range(used):
        ended = rng.random(lanes) < 0.2
        slab.columns[TERMINATED][at, :, 0] = torch.from_numpy(ended)
        after[at] = np.where(lies[at, :, None], [0.5, 7.0], 0.5)
        if at + 1 < used and not shared:
            first = np.where(begins[at + 1, :, None], [np.nan, 0.5], 0.25)
            # The environment chooses the observation of a lane after a slot without a transition.
            root[at + 1] = np.where((ended | ~slab.transitions[at])[:, None], first, after[at])
    return slab, used


def ranges(*keys: Key, most: float = 1.0) -> list[Range]:
    return [Range(key, np.float32(-1.0), np.float32(most), False) for key in keys]


@given(data=st.data(), shared=st.booleans())
def test_the_first_that_lies_is_found(data: st.DataObject, shared: bool) -> None:
    slab, used = filled(data, shared=shared)
    checks, every = (RangeChecks(ranges(NEXT_SEEN, SEEN), "raise") for _ in range(2))
    assert checks._checked_before == {SEEN}
    every._checked_before = set()
    state = LaneState.fresh(slab.lanes)
    one, other = (each.first_violation(slab, used, state) for each in (checks, every))
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.slot, one.what) == (other.slot, other.what)


def test_what_has_another_range_is_looked_at_everywhere() -> None:
    wider = [*ranges(SEEN), *ranges(NEXT_SEEN, most=2.0)]
    assert RangeChecks(wider, "raise")._checked_before == set()
    assert RangeChecks(ranges(SEEN), "raise")._checked_before == set()
    assert RangeChecks(ranges(SEEN, NEXT_SEEN), "raise")._checked_before == {SEEN}
    assert RangeChecks(ranges(SEEN, NEXT_SEEN), "off")._checked_before == set()


def test_of_no_slots_nothing_lies() -> None:
    half = SlabColumn(torch.float16, (2,))  # the extension does not check such columns
    slab = Slab(4, 2, {**LAYOUT, SEEN: half, NEXT_SEEN: half}, flowing=[SEEN])
    checks = RangeChecks(
        [Range(k, np.float16(-1), np.float16(1), False) for k in slab.columns], "raise"
    )
    assert checks.first_violation(slab, 0, LaneState.fresh(2)) is None
