"""Rows that are copied while a system computes are those that are gathered when it is done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule

from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.checks.value_checks import OutOfRangeWarning
from tallyroll.collector.batches.rows import rows_ahead
from tallyroll.collector.batches.rows.rows_ahead import RowsAhead
from tallyroll.collector.envs.system import Step
from tallyroll.collector.errors import TransitionError
from tallyroll.storage import MemmapStorage, open_storage, verify

from collect_kit import assert_same, balanced
from counting_kit import LANES, SLOTS, Counting
from pairs import each_pair
from toy_systems import TOYS, First, Toy

WHOLE = 4 * 6
"""Rows of a batch that is slots of all lanes."""
Made = dict[str, Any]


def waiting(kind: type[Any], times: Sequence[int] = (1,)) -> type[Any]:
    """A system that lets the driver work in each step, so many times, in turn."""

    class Waiting(kind):  # type: ignore[misc]
        waits = True
        calls = 0

        def step(self, action: Sequence[Any], lanes: Any = None) -> Step:
            step: Step = super().step(action, lanes)
            for _ in range(times[self.calls % len(times)]):
                if self.while_waiting is not None:
                    self.while_waiting()
            self.calls += 1
            return step

    return Waiting


@pytest.fixture
def large() -> None:
    """Only columns of which a batch is large go ahead."""


@pytest.fixture(autouse=True)
def small_ones_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column goes ahead, however small a batch is."""
    if "large" not in request.fixturenames:
        all_columns(monkeypatch)


def all_columns(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(rows_ahead, "POOLED_NBYTES", 1)
    patched.setattr(rows_ahead, "WIDE_NBYTES", 1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns each block had that were copied before."""
    counts: list[int] = []
    take = RowsAhead.take

    def counted(self: RowsAhead, block: Any) -> Any:
        rows = take(self, block)
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(RowsAhead, "take", counted)
    return counts


def by_sum() -> TensorDictModule:
    """A deterministic policy."""
    return TensorDictModule(
        lambda seen: seen.sum(-1) % 3, in_keys=["observation"], out_keys=["action"]
    )


def both(kind: type[Any], policy: Any = None, times: Sequence[int] = (1,), **how: Any) -> list[Any]:
    """Collectors of equal seeds over the system as it is, and over one that waits."""
    how = {"frames_per_batch": WHOLE, "total_frames": 5 * WHOLE + 7, "seed": 3, **how}
    return [
        SyncCollector(lambda made=made: made(4), policy() if policy else None, **how)
        for made in (kind, waiting(kind, times))
    ]


def assert_equal(plain: Any, ahead: Any) -> None:
    """All that is left of both is the same."""
    with plain, ahead:
        for one, other in zip(plain, ahead, strict=True):
            assert_same(one, other)
        assert plain.ledger.counts() == ahead.ledger.counts()
        assert [*plain.episodes] == [*ahead.episodes]


# --- the same rows --------------------------------------------------------------------------------


@each_pair(
    name=["Toy", "First", "SomeFinals", "Lost", "InParts"],
    policy=[None, by_sum],
    times=[(1,), (0, 1), (3, 0, 0)],
)
def test_batches_are_the_same(
    name: str, policy: Any, times: Sequence[int], taken: list[int]
) -> None:
    assert_equal(*both(TOYS[name], policy, times))
    assert taken.count(0) == 1, "the last batch alone is no whole one"
    assert len(taken) == 6


@pytest.mark.parametrize(("times", "slots"), [((1,), 5), ((0, 1), 5), ((1, 0), 4), ((0,), 0)])
def test_slots_are_copied_while_the_system_computes(
    times: Sequence[int], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left for the end is the last slot, and those since it was last let work."""
    found = []
    take = RowsAhead.take

    def noted(self: RowsAhead, block: Any) -> Any:
        found.append(self._copied)
        return take(self, block)

    monkeypatch.setattr(RowsAhead, "take", noted)
    assert_equal(*both(First, None, times))
    assert found[:5] == [slots] * 5


@pytest.mark.parametrize("layout", ["lanes", "trajectories", "torchrl"])
def test_layouts(layout: str, taken: list[int]) -> None:
    assert_equal(*both(First, layout=layout, total_frames=5 * WHOLE))
    assert all(taken)


@pytest.mark.parametrize(
    ("how", "whole"),
    [
        ({"frames_per_batch": WHOLE + 1}, False),
        ({"total_episodes": 30, "total_frames": None}, True),
        ({"surplus": "discard"}, True),
        ({"reset_at_each_iter": True}, True),
        ({"init_random_frames": WHOLE + 5}, True),
        ({"validate": "off"}, True),
        ({"postproc": lambda batch: batch}, True),
    ],
)
def test_options(how: Made, whole: bool, taken: list[int]) -> None:
    assert_equal(*both(Toy, by_sum, **how))
    assert any(taken) is whole


@pytest.mark.parametrize("suffix", ["", ".h5", ".zarr"])
def test_what_is_stored_is_the_same(suffix: str, taken: list[int], tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in ("plain", "ahead")]
    for kind, path in zip((First, waiting(First)), paths, strict=True):
        with SyncCollector(
            lambda kind=kind: kind(4),
            frames_per_batch=WHOLE,
            total_frames=5 * WHOLE + 7,
            seed=3,
            storage=str(path),
        ) as collector:
            list(collector)
        assert verify(path).sound
    one, other = (open_storage(path) for path in paths)
    with one, other:
        assert_same(one[:], other[:])
    assert any(taken)


@settings(max_examples=20)
@given(st.integers(1, 60), st.integers(5, 9), st.integers(0, 99))
def test_budgets_of_episodes(episodes: int, slots: int, seed: int) -> None:
    """The last batches have slots of which some lanes are no rows."""
    with pytest.MonkeyPatch.context() as patched:
        all_columns(patched)
        how = {"total_frames": None, "total_episodes": episodes, "seed": seed}
        assert_equal(*both(Toy, None, frames_per_batch=4 * slots, **how))


@settings(max_examples=10)
@given(
    calls=st.lists(st.integers(0, 40), max_size=12),
    times=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    chosen=st.booleans(),
)
def test_whatever_comes_between(calls: list[int], times: list[int], chosen: bool) -> None:
    """0 iterates, 40 seeds anew, any other number is collected."""
    with pytest.MonkeyPatch.context() as patched:
        all_columns(patched)
        found = []
        for kind in (Toy, waiting(Toy, times)):
            with (
                MemmapStorage(max_size=500) as storage,
                SyncCollector(
                    lambda kind=kind: kind(4),
                    by_sum() if chosen else None,
                    frames_per_batch=WHOLE,
                    total_frames=-1,
                    seed=1,
                    storage=storage,
                ) as collector,
            ):
                batches = iter(collector)
                yielded = []
                for call in calls:
                    if call == 0:
                        yielded.append(next(batches))
                    elif call == 40:
                        collector.set_seed(call)
                    else:
                        collector.collect(call)
                assert balanced(collector.ledger)
                found.append((yielded, storage[:].clone(), collector.ledger.counts()))
    (yielded, rows, ledger), other = found
    for one, two in zip(yielded, other[0], strict=True):
        assert_same(one, two)
    if len(rows):
        assert_same(rows, other[1])
    assert ledger == other[2]


# --- errors ---------------------------------------------------------------------------------------


def values(at: int, bad: float, ahead: bool, **how: Any) -> tuple[list[Any], str, Any]:
    """Batches until a value is wrong, what is said of it, and the ledger."""
    kind = waiting(Counting) if ahead else Counting
    batches, said = [], ""
    with SyncCollector(
        lambda: kind(at, bad),
        frames_per_batch=LANES * SLOTS,
        total_frames=3 * LANES * SLOTS,
        seed=0,
        **how,
    ) as made:
        try:
            batches.extend(made)
        except TransitionError as error:
            said = str(error)
        return batches, said, made.ledger.counts()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("bad", [np.nan, -1.0, 2e6])
@pytest.mark.parametrize("at", [1, 5, SLOTS - 1, SLOTS, SLOTS + 1, 2 * SLOTS])
def test_a_wrong_value_is_found_in_the_same_place(
    at: int, bad: float, taken: list[int], tmp_path: Path
) -> None:
    stored = [tmp_path / "plain", tmp_path / "ahead"]
    plain, ahead = (
        values(at, bad, index == 1, storage=str(path)) for index, path in enumerate(stored)
    )
    assert f"step {at - 1} " in plain[1]
    assert plain[1:] == ahead[1:]
    assert len(plain[0]) == (at - 1) // SLOTS == len(ahead[0])
    one, other = (open_storage(path) for path in stored)
    with one, other:
        assert len(one) == LANES * (at - 1)
        if len(one):
            assert_same(one[:], other[:])
    assert any(taken) is (at > SLOTS)


@settings(max_examples=10)
@given(
    at=st.integers(1, 30),
    slots=st.integers(1, 9),
    calls=st.lists(st.integers(0, 9), min_size=12, max_size=12),
)
def test_a_wrong_value_is_found_whatever_came_before(at: int, slots: int, calls: list[int]) -> None:
    """0 iterates, any other number of slots is collected."""
    found = []
    with pytest.MonkeyPatch.context() as patched:
        all_columns(patched)
        for kind in (Counting, waiting(Counting)):
            with (
                MemmapStorage(max_size=500) as storage,
                SyncCollector(
                    lambda kind=kind: kind(at, -1.0),
                    frames_per_batch=LANES * slots,
                    total_frames=-1,
                    seed=1,
                    storage=storage,
                ) as collector,
            ):
                batches, said, done = iter(collector), "", 0
                try:
                    for call in calls:
                        stepped = call or slots
                        next(batches) if call == 0 else collector.collect(LANES * call)
                        done += stepped
                except TransitionError as error:
                    said = str(error)
                assert bool(said) is (at <= done + (stepped if said else 0))
                found.append((said, done, collector.ledger.counts()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("large")
def test_a_value_that_may_pass_is_told_once() -> None:
    said = []
    for ahead in (False, True):
        with pytest.warns(OutOfRangeWarning) as warned:
            batches = values(SLOTS + 3, -1.0, ahead, validate="warn")[0]
        assert len(batches) == 3
        said.append([str(each.message) for each in warned])
    assert said[0] == said[1]
    assert len(said[0]) == 1


class Failing(First):
    """Raises in its step 40."""

    stepped = 0

    def step(self, action: Sequence[Any], lanes: Any = None) -> Step:
        self.stepped += 1
        if self.stepped == 40:
            raise RuntimeError("out of order")
        return super().step(action, lanes)


def test_rows_before_an_error_are_stored(tmp_path: Path) -> None:
    found = []
    for kind in (Failing, waiting(Failing)):
        path = tmp_path / kind.__name__
        with (
            pytest.raises(RuntimeError, match="out of order"),
            SyncCollector(
                lambda kind=kind: kind(4),
                frames_per_batch=WHOLE,
                total_frames=1000,
                seed=0,
                storage=str(path),
            ) as made,
        ):
            list(made)
        with open_storage(path) as storage:
            found.append(storage[:].clone())
    assert len(found[0]) == 4 * 39
    assert_same(*found)


def test_a_run_that_is_stopped_in_a_batch(taken: list[int]) -> None:
    ends = []
    for made in both(First):
        with made:
            batches = iter(made)
            rows = [next(batches)]
            system = made.env.system
            step = system.step

            def stopping(*args: Any, step: Any = step, made: Any = made) -> Step:
                made.stop()
                return step(*args)

            system.step = stopping
            rows += list(batches)
            ends.append(rows)
    for one, other in zip(*ends, strict=True):
        assert_same(one, other)
    assert len(ends[0][1]) == LANES


# --- memory ---------------------------------------------------------------------------------------


def assert_counts(batch: Any, index: int) -> None:
    for key, first in ((("next", "observation"), 1), (("observation",), 0)):
        wanted = np.tile(np.arange(SLOTS) + first + index * SLOTS, LANES)
        assert np.array_equal(batch[key][:, 0].numpy(), wanted)
        assert np.array_equal(batch[key][:, -1].numpy(), wanted)


@pytest.mark.usefixtures("large")
def test_batches_that_are_held_stay_as_they_are(taken: list[int]) -> None:
    frames = LANES * SLOTS
    with SyncCollector(
        waiting(Counting), frames_per_batch=frames, total_frames=8 * frames
    ) as collector:
        held, places = [], set()
        for index, batch in enumerate(collector):
            assert_counts(batch, index)
            if index < 3:
                held.append(batch)
            else:
                places.add(batch["next", "observation"].data_ptr())
            del batch
    for index, batch in enumerate(held):
        assert_counts(batch, index)
    assert len(places) < 3, "memory of dropped batches was used again"
    assert taken == [2] * 8, "observations, at the root and under next"


@pytest.mark.usefixtures("large")
def test_columns_that_are_not_yielded_are_not_copied(taken: list[int], tmp_path: Path) -> None:
    with SyncCollector(
        waiting(Wide),
        frames_per_batch=LANES * SLOTS,
        total_frames=2 * LANES * SLOTS,
        storage=str(tmp_path / "s"),
        yield_large=False,
    ) as collector:
        assert collector._assembly._ahead is None
        list(collector)
    assert not taken


class Wide(Counting):
    """Rows of more than 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        spec = self.declares.observation["observation",]
        self.declares = replace(
            self.declares, observation={("observation",): spec.unsqueeze(0).expand(4, *spec.shape)}
        )

    def reset(self, lanes: object, seeds: object, **options: object) -> list[Any]:
        return [np.repeat(each[:, None], 4, 1) for each in super().reset(lanes, seeds)]

    def step(self, action: object, lanes: object = None) -> Step:
        step = super().step(action)
        return step._replace(obs=[np.repeat(each[:, None], 4, 1) for each in step.obs])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("stores", [False, True])
def test_rows_of_images(stores: bool, taken: list[int], tmp_path: Path) -> None:
    found = []
    for kind in (Wide, waiting(Wide)):
        path = str(tmp_path / kind.__name__) if stores else None
        with SyncCollector(
            kind,
            frames_per_batch=LANES * SLOTS,
            total_frames=2 * LANES * SLOTS + 3,
            seed=0,
            storage=path,
        ) as collector:
            found.append(list(collector))
        if path is not None:
            assert verify(path).sound
            with open_storage(path) as storage:
                found[-1].append(storage[:].clone())
    for one, other in zip(*found, strict=True):
        assert [*one.keys(True, True)] == [*other.keys(True, True)]
        assert_same(one, other)
    assert taken == [2, 2, 0]


class Mixed(Counting):
    """Observations of 2.4 KB, of 4 KiB and of 40 KiB a row."""

    sizes = (600, 1024, 10_240)

    def __init__(self) -> None:
        super().__init__()
        spec = self.declares.observation["observation",]
        specs = {(f"of {n}",): spec[:1].expand(n) for n in self.sizes}
        self.declares = replace(self.declares, observation=specs)

    def wider(self, values: Any) -> list[Any]:
        return [np.repeat(values[0][:, :1], n, 1) + np.arange(n, dtype="f4") for n in self.sizes]

    def reset(self, lanes: object, seeds: object, **options: object) -> list[Any]:
        return self.wider(super().reset(lanes, seeds))

    def step(self, action: object, lanes: object = None) -> Step:
        step = super().step(action)
        return step._replace(obs=self.wider(step.obs))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("slots", "columns"), [(5, 4), (40, 4), (SLOTS, 6)])
def test_rows_of_several_widths(slots: int, columns: int, taken: list[int]) -> None:
    """All large rows go ahead, and of others those of which a batch is large."""
    how = {"frames_per_batch": LANES * slots, "total_frames": 2 * LANES * slots, "seed": 0}
    found = []
    for kind in (Mixed, waiting(Mixed)):
        with SyncCollector(kind, **how) as collector:
            found.append(list(collector))
    for one, other in zip(*found, strict=True):
        assert [*one.keys(True, True)] == [*other.keys(True, True)]
        assert_same(one, other)
    assert taken == [columns] * 2


def test_the_memory_goes_with_the_collector() -> None:
    system = waiting(First)(4)
    collector = SyncCollector(system, frames_per_batch=WHOLE, total_frames=-1)
    next(iter(collector))
    known = weakref.ref(collector._assembly._ahead)
    assert known() is not None
    assert system.while_waiting is None, "between batches it has nothing to do"
    gc.collect()
    gc.disable()
    try:
        collector.shutdown()
        del collector
        assert known() is None, "it waits for the garbage collector"
    finally:
        gc.enable()


# --- where it is not for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (waiting(TOYS["WithResetSlots"]), {}),
        (Toy, {}),
        (waiting(Toy), {"frames_per_batch": WHOLE - 1}),
    ],
)
def test_others_are_gathered(kind: type[Any], how: Made) -> None:
    how = {"frames_per_batch": WHOLE, "total_frames": 50, **how}
    with SyncCollector(lambda: kind(4), **how) as collector:
        assert collector._assembly._ahead is None
        assert sum(map(len, collector)) == 50


def test_none_where_batches_are_larger_than_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    from tallyroll.collector.rollout import slab_plan

    monkeypatch.setattr(slab_plan, "MOST_SLOTS", 5)
    plain, ahead = both(First)
    assert ahead._assembly._ahead is None
    assert_equal(plain, ahead)


@pytest.mark.parametrize("slots", [1, 4])
def test_none_of_few_slots(slots: int) -> None:
    plain, ahead = both(First, frames_per_batch=4 * slots, total_frames=50)
    assert ahead._assembly._ahead is None
    assert_equal(plain, ahead)


def test_rows_are_tensors_of_their_own(taken: list[int]) -> None:
    """What somebody writes to a batch reaches no other."""
    plain, ahead = both(Toy)
    with plain, ahead:
        for one, other in zip(plain, ahead, strict=True):
            assert_same(one, other)
            for leaf in other.values(True, True):
                leaf.copy_(torch.ones_like(leaf))
    assert any(taken)
