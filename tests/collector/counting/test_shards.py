"""Shards of a run, compared with a plain list of its transitions in slot order."""

from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector.counting.shards import among_first, first_id, lanes_of

SHARDS = st.integers(1, 40).flatmap(
    lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes), st.integers(0, 300))
)


@given(SHARDS)
def test_shards_have_all_lanes_and_the_first_transitions_of_slot_order(
    run: tuple[int, int, int],
) -> None:
    lanes, of, count = run
    parts = [lanes_of(index, of, lanes) for index in range(of)]
    assert [lane for part in parts for lane in part] == list(range(lanes))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    slot_order = [number % lanes for number in range(count)]
    for own in parts:
        mine = [lane for lane in slot_order if lane in own]
        assert among_first(count, lanes, own) == len(mine)
        # They are also the first transitions in the shard's own slot order.
        assert mine == [own.start + number % len(own) for number in range(len(mine))]


@given(st.integers(0, 10**6), st.integers(1, 50))
def test_ids_begin_at_the_next_multiple_of_the_lanes(after: int, lanes: int) -> None:
    found = first_id(after, lanes)
    assert found == min(each for each in range(after, after + lanes) if each % lanes == 0)
