"""bfloat16 columns, which NumPy cannot view, are collected, carried, yielded and stored."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from tallyroll.collector import SyncCollector
from tallyroll.collector.rollout import slab_plan
from tallyroll.storage import open_storage, verify

from collect_kit import ByObservation, assert_same, joined
from oracles import OracleTorchEnv, check_rows
from worker_kit import (
    LANES,
    LENGTHS,
    Run,
    assert_alike,
    collect_all,
    in_threads,
    lanes_of_workers,
    start,
)

RUN: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 87, "seed": 3}
HALF = ("half", "wide", "more")
LARGE = ("wide", "more")


class Halves(OracleTorchEnv):
    """Oracle with bfloat16 columns [3] and [2060], and a uint8 column [4100] between them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = self.batch_size
        self.observation_spec = Composite(
            {
                "wide": Unbounded((*shape, 2060), dtype=torch.bfloat16),
                "more": Unbounded((*shape, 4100), dtype=torch.uint8),
                "half": Unbounded((*shape, 3), dtype=torch.bfloat16),
                "observation": self.observation_spec["observation"],
            },
            shape=shape,
        )

    def _out(self, *flags: Any) -> TensorDict:
        return with_halves(super()._out(*flags))


def with_halves(td: Any) -> Any:
    """Add the columns that belong to ``observation``. All numbers below 256 are exact."""
    seen = td["observation"]
    td["half"] = seen.bfloat16()
    td["wide"] = told(seen, 2060).bfloat16()
    td["more"] = told(seen, 4100).to(torch.uint8)
    return td


def told(seen: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat lane, episode and step over `width`, and add the position to each."""
    place = torch.arange(width) % 100
    return seen.repeat_interleave(width // 3 + 1, dim=-1)[..., :width] + place


def halves(first: int = 0, lanes: int = LANES) -> EnvBase:
    return Halves(lanes, LENGTHS, first_lane=first, ends="mixed")


def check(rows: TensorDictBase, **kwargs: Any) -> None:
    """Check that the bfloat16 columns of each row match its observation."""
    check_rows(rows, LENGTHS, ends="mixed", **kwargs)
    for where in (rows, rows["next"]):
        wanted = with_halves(TensorDict({"observation": where["observation"]}))
        for key in HALF:
            if key in where.keys():
                assert torch.equal(where[key], wanted[key]), key


def stored(path: Path) -> TensorDict:
    with open_storage(path, mode="read") as storage:
        rows = storage.get(slice(None)).clone()
    assert isinstance(rows, TensorDict)
    assert verify(path).sound
    return rows


def bits(rows: TensorDictBase) -> TensorDictBase:
    """View the bfloat16 columns of `rows` as integers."""
    return rows.apply(lambda c: c.view(torch.int16) if c.dtype is torch.bfloat16 else c)


def run_to(path: Path | None, workers: int, **kwargs: Any) -> Run:
    options = {**RUN, "storage": path, **kwargs}
    if not workers:
        return collect_all(SyncCollector(halves(), ByObservation(), **options))
    makes = [partial(halves, first, own) for first, own in lanes_of_workers(LANES, workers)]
    with in_threads():
        return collect_all(start(makes, ByObservation(), **options))


@pytest.mark.parametrize(
    ("mode", "workers", "slots"),
    [
        *(("sync", 0, 3), ("sync", 3, 3), ("async", 1, 4096)),
        pytest.param("sync", 0, 4096, marks=pytest.mark.slow),
        pytest.param("sync", 1, 4096, marks=pytest.mark.slow),
        pytest.param("async", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_every_number_is_the_one_of_its_row(
    mode: str, workers: int, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_plan, "MOST_SLOTS", slots)
    options = {"mode": mode} if workers else {}
    run = run_to(tmp_path / "s", workers, **options)
    assert_same(bits(joined(run.batches)), bits(stored(tmp_path / "s")))
    check(joined(run.batches), from_start=True)
    assert len(joined(run.batches)) == 87
    if mode == "sync":
        one = run_to(None, 0)
        for each in (one, run):
            each.batches = [bits(batch) for batch in each.batches]
        assert_alike(one, run)


@pytest.mark.parametrize("workers", [0, 2])
def test_large_ones_are_left_out_of_batches_where_that_is_asked_for(
    workers: int, tmp_path: Path
) -> None:
    whole = run_to(None, 0)
    run = run_to(tmp_path / "s", workers, yield_large=False)
    rows = stored(tmp_path / "s")
    check(rows, from_start=True)
    assert_same(bits(joined(whole.batches)), bits(rows))
    large = [*LARGE, *(("next", key) for key in LARGE)]
    for batch in run.batches:
        assert "half" in batch.keys()
        assert not {*large} & {*batch.keys(True, True)}
    assert_same(bits(joined(run.batches)), bits(rows.clone().exclude(*large)))


class HalfActions(OracleTorchEnv):
    """Oracle whose actions are bfloat16 [2]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, action="box", **kwargs)
        shape = (*self.batch_size, 2)
        self.action_spec = Bounded(-1, 1, shape, dtype=torch.bfloat16)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict.set("action", tensordict["action"].float()))


def half_actions(first: int = 0, lanes: int = LANES) -> EnvBase:
    return HalfActions(lanes, LENGTHS, first_lane=first, ends="mixed")


def acting_by_halves(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", (td["observation"][..., 1:] / 64).bfloat16())


def test_actions_of_workers(tmp_path: Path) -> None:
    one = collect_all(SyncCollector(half_actions(), acting_by_halves, **RUN))
    makes = [partial(half_actions, first, own) for first, own in lanes_of_workers(LANES, 3)]
    with in_threads():
        many = collect_all(start(makes, acting_by_halves, storage=tmp_path / "s", **RUN))
    rows = joined(many.batches)
    assert rows["action"].dtype is torch.bfloat16
    assert_same(bits(joined(one.batches)), bits(rows))
    assert_same(bits(rows), bits(stored(tmp_path / "s")))
