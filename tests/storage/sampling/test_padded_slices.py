"""Test slices with padding, with burn-in rows, and from the start: of storages and of buffers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.modules import GRUModule, set_recurrent_mode
from torchrl.objectives.value import GAE

from tallyroll.storage import MemmapStorage, TrajectorySliceSampler, n_step, open_storage
from tallyroll.storage.errors import NoSlices, NotEnoughMemory, ShortTrajectory

from lane_model import Model

MASK = ("collector", "mask")


def big(rows: int = 2000, lanes: int = 8, mean_length: float = 9.0) -> Model:
    return Model.random(np.random.default_rng(0), rows=rows, lanes=lanes, mean_length=mean_length)


def rows_of(model: Model) -> TensorDict:
    """Return the rows of a recurrent multi-agent policy, with a column of 16 bits."""
    rows = model.rows()
    starts = (rows["collector", "step"] == 0)[:, None]
    rows["is_init"] = starts
    rows["agents"] = TensorDict({"is_init": starts[..., None].expand(-1, 2, 1)}, [len(rows), 2])
    rows["next", "agents"] = TensorDict(
        {"done": rows["next", "done"][..., None].expand(-1, 2, 1)}, [len(rows), 2]
    )
    rows["half"] = rows["observation"].bfloat16() + 1
    return rows


@pytest.fixture(params=[None, 900], ids=["all rows", "a ring"])
def max_size(request: pytest.FixtureRequest) -> int | None:
    size: int | None = request.param
    return size


def filled(max_size: int | None) -> MemmapStorage:
    storage = MemmapStorage(max_size=max_size)
    for part in rows_of(big()).split(100):
        storage.extend(part)
    return storage


def buffer_of(storage: Any, slices: int, slice_len: int, **options: Any) -> TensorDictReplayBuffer:
    sampler = TrajectorySliceSampler(slice_len, **options)
    length = slice_len + options.get("burn_in", 0)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=slices * length)


def expected(model: Model, slices: TensorDict, first: int) -> TensorDict:
    """Return the same slices, built row by row from the stored rows."""
    rows, found = rows_of(model), slices.clone().zero_()
    flags = [key for key in rows.keys(True, True) if key[-1] == "done"]
    inits = [key for key in rows.keys(True, True) if key in ("is_init", ("agents", "is_init"))]
    found["collector", "cut"] = torch.zeros(slices.batch_size, dtype=torch.bool)
    for n, mask in enumerate(slices[MASK]):
        places = mask.nonzero()[:, 0].tolist()
        numbers = slices["observation"][n, places, 0].long().tolist()
        assert numbers[0] >= first
        assert all(model.next_of(a) == b for a, b in pairwise(numbers))
        for place, number in zip(places, numbers, strict=True):
            for key in rows.keys(True, True):
                found.get(key)[n, place] = rows.get(key)[number]
            found[MASK][n, place] = True
        for key in flags:
            found.get(key)[n, places[-1]] = True
        for key in inits:
            found.get(key)[n, places[0]] = True
        found["collector", "cut"][n, places[-1]] = not model.ended(numbers[-1])
    return found


@pytest.mark.parametrize(
    "options", [{"short": "pad"}, {"short": "pad", "burn_in": 5}, {"burn_in": 3}], ids=str
)
@pytest.mark.parametrize("buffered", [False, True])
def test_padded_slices_are_the_rows_that_there_are_and_zeros(
    max_size: int | None, options: dict[str, Any], buffered: bool
) -> None:
    with filled(max_size) as storage:
        length = 8 + options.get("burn_in", 0)
        if buffered:
            slices = buffer_of(storage, 60, 8, **options).sample().reshape(60, length)
            index = slices.pop("index")
            assert (storage.get(index)["observation"] == slices["observation"])[slices[MASK]].all()
        else:
            slices = storage.trajectories.sample_slices(60, 8, **options)
        assert slices.batch_size == (60, length)
        assert slices["agents"].batch_size[:2] == (60, length)
        assert 0 < slices[MASK].sum() < slices[MASK].numel()
        want = expected(big(), slices, storage.span.start)
        assert {*want.keys(True, True)} == {*slices.keys(True, True)}
        assert (want == slices).all()


def test_where_all_places_are_full_the_mask_says_so(max_size: int | None) -> None:
    with filled(max_size) as storage:
        one = storage.trajectories.sample_slices(50, 1, short="pad")
        assert one[MASK].all()
        assert buffer_of(storage, 50, 1, short="pad").sample()[MASK].all()
        assert MASK not in storage.trajectories.sample_slices(5, 2).keys(True)


def test_slices_from_the_first_step_on(max_size: int | None) -> None:
    with filled(max_size) as storage:
        whole = storage.trajectories.sample_slices(50, 6, from_start=True)
        padded = buffer_of(storage, 50, 6, from_start=True, short="pad").sample().reshape(50, 6)
        assert (whole["collector", "step"] == torch.arange(6)).all()
        steps = torch.where(padded[MASK], padded["collector", "step"], torch.arange(6))
        assert (steps == torch.arange(6)).all()
        assert not padded[MASK].all()


def test_a_plain_buffer_has_the_values_in_its_info(max_size: int | None) -> None:
    with filled(max_size) as storage:
        sampler = TrajectorySliceSampler(20, short="pad")
        batch, info = ReplayBuffer(storage=storage, sampler=sampler, batch_size=400).sample(
            return_info=True
        )
        mask = info[MASK]
        assert (info["observation",][mask] == batch["observation"][mask]).all()
        assert not info["observation",][~mask].any()
        ids = batch["collector", "traj_ids"].reshape(20, 20)
        assert (ids == ids[:, :1]).all()  # padding holds rows of the same trajectory


def test_prefetched(max_size: int | None) -> None:
    with filled(max_size) as storage:
        sampler = TrajectorySliceSampler(8, short="pad", burn_in=2)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=200, prefetch=3
        )
        for _ in range(5):
            slices = buffer.sample().reshape(20, 10).exclude("index")
            assert (expected(big(), slices, storage.span.start) == slices).all()


def test_buffers_say_whether_they_can_be_sampled(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        pads, starts, errors = (
            TrajectorySliceSampler(3, **options)  # type: ignore[arg-type]
            for options in ({"short": "pad"}, {"from_start": True}, {"short": "error"})
        )
        assert not pads.can_sample(storage, 3)
        rows = big(2, 1).rows()
        rows["collector", "step"], rows["collector", "traj_ids"] = (
            torch.tensor([4, 5]),
            0 * rows["collector", "traj_ids"],
        )
        storage.extend(rows)
        assert pads.can_sample(storage, 3)
        assert not starts.can_sample(storage, 3)
        assert errors.can_sample(storage, 3)
        with pytest.raises(NoSlices, match="from the first step of a trajectory"):
            starts.sample(storage, 3)
        with pytest.raises(ShortTrajectory, match="drawn has 2"):
            errors.sample(storage, 3)
        with pytest.raises(ValueError, match="a multiple of the slice length 5"):
            TrajectorySliceSampler(3, burn_in=2).sample(storage, 3)
    assert repr(pads) == "TrajectorySliceSampler(slice_len=3, short='pad')"


def test_advantages_of_rows_are_those_of_the_slice_without_its_padding() -> None:
    with filled(None) as storage:
        slices = storage.trajectories.sample_slices(40, 8, short="pad", burn_in=3)
        slices = slices.apply(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf)
        value = TensorDictModule(lambda seen: seen / 100, ["observation"], ["state_value"])
        estimator = GAE(gamma=0.9, lmbda=0.8, value_network=value)
        mask = slices[MASK]
        padded = estimator(slices.clone())["advantage"]
        for n in range(40):
            alone = estimator(slices[n][mask[n]][None].clone())["advantage"][0]
            torch.testing.assert_close(padded[n][mask[n]], alone)


def test_a_recurrent_state_is_made_anew_by_the_rows_before(tmp_path: Path) -> None:
    """The replay starts with the state stored before the slice, or with zeros."""
    torch.manual_seed(0)
    gru = GRUModule(
        input_size=1,
        hidden_size=3,
        in_keys=["observation", "state", "is_init"],
        out_keys=["embed", ("next", "state")],
    )
    model, lanes = big(600, 4), {}
    rows = rows_of(model).select("observation", "is_init", "collector", "next", "action")
    rows["observation"] = rows["observation"].float() / 600
    rows["state"] = torch.zeros(600, 1, 3)
    with torch.no_grad():
        for row in range(600):  # step by step, as a policy does
            one = rows[row : row + 1]
            lane = int(model.lane[row])
            if not one["is_init"] and lane in lanes and model.next_of(lanes[lane][0]) == row:
                rows["state"][row] = lanes[lane][1]
            else:
                one["is_init"][:] = True
            step = one.select("observation", "state", "is_init").clone()
            step["is_init"][:] = False  # the state is given
            lanes[lane] = row, gru(step)["next", "state"][0]
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        slices = storage.trajectories.sample_slices(80, 6, short="pad", burn_in=4)
    stored = slices["state"].clone()
    for place in range(1, 10):  # only the state of the first row is known
        slices["state"][:, place] *= slices["is_init"][:, place, :, None]
    with torch.no_grad(), set_recurrent_mode(True):
        again = gru(slices.select("observation", "state", "is_init"))["embed"]
    mask = slices[MASK]
    follows = mask[:, 1:] & mask[:, :-1] & ~slices["is_init"][:, 1:, 0]
    torch.testing.assert_close(again[:, :-1][follows], stored[:, 1:, 0][follows])
    assert follows.sum() > 300


def test_targets_over_n_steps_of_padded_slices(max_size: int | None) -> None:
    with filled(max_size) as storage:
        batch = buffer_of(storage, 30, 10, short="pad", burn_in=2).sample()
        found, mask = n_step(storage, batch, 3, 0.9), batch[MASK]
        want = n_step(storage, batch["index"][mask], 3, 0.9)
        assert (found[MASK] == mask).all()
        for key in want.keys(True, True):
            assert (found.get(key)[mask] == want.get(key)).all()
            assert not found.get(key)[~mask].any()


def test_slices_that_no_memory_holds_are_refused_beforehand() -> None:
    with filled(None) as storage:
        draw = storage.trajectories.sample_slices
        with pytest.raises(NotEnoughMemory, match="for 4 slices of 10,000,000,000 rows"):
            draw(4, 10**10, short="pad")
        with pytest.raises(NotEnoughMemory, match="Ask for fewer slices, or shorter ones"):
            draw(4, 2, burn_in=10**10)


def test_a_reader_of_a_ring_pads_too(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows", max_size=300) as ring:
        for part in big(500).rows().split(100):
            ring.extend(part)
        with open_storage(tmp_path / "rows") as reader:
            slices = reader.trajectories.sample_slices(60, 12, short="pad", by="trajectory")
        assert slices["observation"][slices[MASK]].min() >= 200
