"""The choice of ``once="auto"``: which storages store frames once, and what the tools say of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tallyroll.collector import Columns, MultiprocessCollector, SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, Schema, ZarrStorage, open_storage, verify
from tallyroll.storage.engine.kernel import compiled
from tallyroll.storage.engine.once_columns import plan_once_auto, row_nbytes_once

LANES, FRAMES, RING = 3, 400, 150


class Images(gymnasium.Env):
    """Environment of images: static ones with a moving mark, or noise."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(
        self, shape: tuple[int, ...] = (36, 36), dtype: Any = np.uint8, *, noise: bool = False
    ) -> None:
        high = 255 if dtype is np.uint8 else np.inf
        self.observation_space = gymnasium.spaces.Box(0, high, shape, dtype)
        self.noise, self.at = noise, 0

    def frame(self) -> np.ndarray:
        space = self.observation_space
        if self.noise:
            return self.np_random.integers(0, 256, space.shape).astype(space.dtype)
        frame = np.full(space.shape, 9, space.dtype)
        frame[..., self.at % space.shape[-2], :4] = 77
        return frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.at = 0
        return self.frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.at += 1
        return self.frame(), 1.0, self.at >= 20, False, {}


class Both(gymnasium.ObservationWrapper):
    """Wrapper that puts the image beside a state of 4 KiB of floats and a small image."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Dict(
            image=env.observation_space,
            state=gymnasium.spaces.Box(-1, 1, (1024,), np.float32),
            small=gymnasium.spaces.Box(0, 255, (31, 33), np.uint8),
        )

    def observation(self, observation: Any) -> dict[str, Any]:
        state = np.full(1024, 0.5, np.float32)
        return {"image": observation, "state": state, "small": observation[:31, :33]}


def stacked() -> gymnasium.Env:
    return FrameStackObservation(Images(), 4)


def collected(storage: Any, make: Callable[[], Any] = Images, **options: Any) -> Any:
    """Collect rows to ``storage``, and return the decision of the plan."""
    kind = MultiprocessCollector if options.get("num_workers") else SyncCollector
    options = {"frames_per_batch": 50, "total_frames": FRAMES, "num_envs": LANES} | options
    with storage, kind(make, seed=5, storage=storage, **options) as collector:
        for _ in collector:
            pass
        return collector.plan.frames


def once_in(path: Path) -> dict[str, tuple[int, bool]]:
    """Return the stack and the kind of pool of each column that is stored once."""
    with open_storage(path) as storage:
        assert storage.stores_once == bool(storage.reader.once)
        return {
            "/".join(each.key): (each.layout.stack, each.layout.delta)
            for each in storage.reader.once
        }


# --- the table ------------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, bool] | None]] = {
    "stack": (torch.uint8, (4, 84, 84), (4, True)),
    "small stack": (torch.uint8, (4, 32, 32), (4, True)),
    "frames of less than 1 KiB": (torch.uint8, (4, 16, 16), (1, True)),
    "color": (torch.uint8, (3, 64, 64), (1, True)),
    "1 KiB": (torch.uint8, (32, 32), (1, True)),
    "less than 1 KiB": (torch.uint8, (31, 33), None),
    "no whole words": (torch.uint8, (33, 33), (1, False)),
    "int8": (torch.int8, (64, 64), None),
    "float state": (torch.float32, (4096,), None),
    "bool": (torch.bool, (64, 64), None),
    "too large for a pool": (torch.uint8, (2**31,), None),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name: str) -> None:
    dtype, shape, expected = COLUMNS[name]
    empty = torch.empty((0, *shape), dtype=dtype)
    schema = Schema.of(TensorDict({"x": empty, "next": {"x": empty}}, [0]))
    found = [(each.layout.stack, each.layout.delta) for each in plan_once_auto(schema)]
    assert found == ([] if expected is None else [expected])


def test_columns_without_a_place_for_a_pool_are_stored_whole() -> None:
    image = torch.zeros(0, 40, 40, dtype=torch.uint8)
    other = image.to(torch.int16)
    for rows in (
        {"x": image},  # no next column
        {"x": image, "next": {"x": other}},
        {"x": image, "next": {"x": image}, "x.frames": {"y": other}},  # a folder has the path
    ):
        assert plan_once_auto(Schema.of(TensorDict(rows, [0]))) == ()


STORAGES: dict[str, tuple[Callable[[Path], Any], dict[str, tuple[int, bool]]]] = {
    "ring": (lambda path: MemmapStorage(path, max_size=RING), {"observation": (1, True)}),
    "power": (
        lambda path: MemmapStorage(path, max_size=RING, durability="power"),
        {"observation": (1, True)},
    ),
    "growing": (MemmapStorage, {}),
    "False": (lambda path: MemmapStorage(path, max_size=RING, once=False), {}),
    "zarr": (ZarrStorage, {}),
    "True": (lambda path: MemmapStorage(path, once=True), {"observation": (1, True)}),
}


@pytest.mark.parametrize("name", STORAGES)
def test_storages(name: str, tmp_path: Path) -> None:
    make, expected = STORAGES[name]
    decision = collected(make(tmp_path / "rows"))
    assert once_in(tmp_path / "rows") == expected
    assert decision.way == ("once" if expected else "whole")


def test_kinds_of_columns(tmp_path: Path) -> None:
    collected(MemmapStorage(tmp_path / "rows", max_size=RING), lambda: Both(Images()))
    assert once_in(tmp_path / "rows") == {"image": (1, True)}


def test_rows_without_a_collector_are_stored_whole(tmp_path: Path) -> None:
    """A first batch may be one row, and determines nothing beyond the schema."""
    image = torch.zeros(5, 40, 40, dtype=torch.uint8)
    rows = TensorDict({"observation": image, "next": {"observation": image}}, [5])
    with MemmapStorage(tmp_path / "a", max_size=9) as storage:
        storage.extend(rows)
    with MemmapStorage(tmp_path / "b", max_size=9) as storage:
        storage.initialise(Schema.of(rows))
        storage.extend(rows)
    with MemmapStorage(tmp_path / "c", max_size=9) as storage:
        ReplayBuffer(storage=storage).extend(rows)
    for name in "abc":
        assert once_in(tmp_path / name) == {}


def test_postproc_makes_rows_of_its_own(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows", max_size=RING)
    collected(storage, postproc=lambda rows: rows)
    assert once_in(tmp_path / "rows") == {}


def test_a_replay_buffer_stores_once(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows", max_size=RING)
    buffer = ReplayBuffer(storage=storage, batch_size=8)
    with (
        storage,
        SyncCollector(
            Images, num_envs=2, frames_per_batch=20, total_frames=60, replay_buffer=buffer
        ) as collector,
    ):
        for _ in collector:
            pass
        assert buffer.sample()["observation"].shape == (8, 36, 36)
    assert once_in(tmp_path / "rows") == {"observation": (1, True)}


def test_excluded_columns_are_not_stored(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows", max_size=RING)
    options = {"columns": Columns(exclude=["image"])}
    collected(storage, lambda: Both(Images()), **options)
    assert once_in(tmp_path / "rows") == {}


# --- the same rows --------------------------------------------------------------------------------


def rows_in(path: Path) -> dict[Any, bytes]:
    with open_storage(path) as storage:
        rows = storage.in_order()
        return {
            "span": repr(storage.span).encode(),
            **{key: rows[key].numpy().tobytes() for key in rows.keys(True, True)},
        }


@pytest.mark.parametrize("make", [Images, stacked], ids=["state", "stack"])
def test_rows_are_those_of_whole_observations(make: Callable[[], Any], tmp_path: Path) -> None:
    for name, once in (("auto", {}), ("whole", {"once": False})):
        collected(MemmapStorage(tmp_path / name, max_size=RING, **once), make)
    assert once_in(tmp_path / "auto")
    assert not once_in(tmp_path / "whole")
    assert rows_in(tmp_path / "auto") == rows_in(tmp_path / "whole")
    assert verify(tmp_path / "auto").sound


def test_workers_of_a_ring(tmp_path: Path) -> None:
    options = {"num_workers": 2, "num_envs": 4, "transport": "thread"}
    for name, once in (("auto", {}), ("whole", {"once": False})):
        collected(MemmapStorage(tmp_path / name, max_size=RING, **once), stacked, **options)
    assert once_in(tmp_path / "auto")
    assert rows_in(tmp_path / "auto") == rows_in(tmp_path / "whole")


@pytest.mark.parametrize("first", ["auto", False])
def test_a_resumed_run_keeps_the_layout(first: Any, tmp_path: Path) -> None:
    for name, once in (("tested", first), ("whole", False)):
        path = tmp_path / name
        collected(MemmapStorage(path, max_size=RING, once=once), total_frames=200)
        collected(MemmapStorage(path, mode="append"), resume=True)
    assert bool(once_in(tmp_path / "tested")) == (first == "auto")
    assert rows_in(tmp_path / "tested") == rows_in(tmp_path / "whole")


def test_a_new_ring_takes_the_layout_of_a_dump(tmp_path: Path) -> None:
    for name, once in (("auto", "auto"), ("whole", False)):
        collected(MemmapStorage(tmp_path / name, max_size=RING, once=once))
        with open_storage(tmp_path / name) as storage:
            storage.dumps(tmp_path / f"dump {name}")
        with MemmapStorage(tmp_path / f"new {name}", max_size=RING) as storage:
            storage.loads(tmp_path / f"dump {name}")
        assert once_in(tmp_path / f"new {name}") == once_in(tmp_path / name)
        assert rows_in(tmp_path / f"new {name}") == rows_in(tmp_path / "auto")


# --- sizes ----------------------------------------------------------------------------------------


def test_noise_takes_little_more_than_whole_frames(tmp_path: Path) -> None:
    """Noise takes about the estimated bytes a row, and images take far fewer."""
    sizes = {}
    for name in ("noise", "images"):
        make = lambda noise=name == "noise": Images((84, 84), noise=noise)  # noqa: E731
        collected(MemmapStorage(tmp_path / name, max_size=2000), make, total_frames=2000)
        with open_storage(tmp_path / name) as storage:
            sizes[name] = storage.reader.stored_size()
            least = row_nbytes_once(storage.schema, storage.reader.once)
            frames = storage.pool_usage()[0].frames
            others = storage.schema.row_nbytes - 2 * 7056
    plain = others + 2 * 4 + 7056 * frames / 2000
    assert 0.98 * plain <= sizes["noise"].row_nbytes <= 1.05 * plain
    assert others + 7056 <= least <= 1.05 * (others + 7056)
    assert 10 * sizes["images"].row_nbytes < least
    assert sizes["noise"].ring_nbytes == 2000 * sizes["noise"].row_nbytes


def test_the_plan_states_the_size(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows", max_size=RING)
    options = {"num_envs": 2, "frames_per_batch": 50, "total_frames": 100, "storage": storage}
    with storage, SyncCollector(Images, **options) as collector:
        before = collector.plan.frames
        assert before.way == "once"
        assert before.because.startswith("rows repeat the frames of observation; 1,")
        assert " bytes a row before compression, " in before.because
        collector.collect(100)
        after = collector.plan.frames
        size = storage.reader.stored_size()
        mega = size.ring_nbytes / 1e6
        assert after.because == (
            "rows repeat the frames of observation; "
            f"{size.row_nbytes:,} bytes a row, {mega:,.1f} MB in the full ring"
        )
        assert collector.plan.as_json()["frames"] == {"way": "once", "because": after.because}
        if compiled() is not None:  # otherwise that is the reason
            assert collector.plan.commits.because == "frames are stored once"
    assert size.row_nbytes < 1296


@pytest.mark.parametrize(
    ("options", "make", "reason"),
    [
        ({"once": False}, Images, "the storage was made with once=False, or from rows"),
        ({"max_size": None}, Images, "the storage is not a memory-mapped ring"),
        ({}, lambda: Images((31, 33)), "no observation is uint8 with 1 KiB or more a row"),
    ],
)
def test_the_plan_states_why_observations_are_whole(
    options: Mapping[str, Any], make: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    storage = MemmapStorage(tmp_path / "rows", **{"max_size": RING, **options})
    decision = collected(storage, make)
    with open_storage(tmp_path / "rows") as stored:
        nbytes, ring = stored.schema.row_nbytes, stored.ring
    full = f", {ring * nbytes / 1e6:,.1f} MB in the full ring" if ring else ""
    assert decision.way == "whole"
    remedy = "MemmapStorage(once=True), Columns(exclude=) and pack make rows of images smaller"
    remedies = "" if "no observation" in reason else f"; {remedy}"
    assert decision.because == f"{reason}; {nbytes:,} bytes a row{full}{remedies}"


# --- commands -------------------------------------------------------------------------------------

gymnasium.register("once-auto/Images-v0", Images)


def command(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> tuple[str, str]:
    assert main([*map(str, words)]) == status
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize("once", [None, "auto", "yes", "no"])
def test_commands_print_the_choice(
    once: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    given = [] if once is None else ["--once", once]
    ring = ["--frames", 300, "--max-size", RING, "--out", path, "--plan"]
    out, err = command(capsys, "collect", "once-auto/Images-v0", *ring, *given)
    shown, _ = command(capsys, "inspect", path)
    facts = json.loads(command(capsys, "inspect", path, "--json")[0])
    head = f"{facts['rows']:,} rows of {facts['stored_row_bytes']:,} bytes, "
    assert head in shown.splitlines()[0]
    whole = f"; {facts['row_bytes']:,} bytes, "
    assert (whole in shown.splitlines()[0]) == bool(facts["once"])
    row, full = facts["stored_row_bytes"], facts["full_ring_bytes"]
    assert full == RING * row
    if once == "no":
        assert row == facts["row_bytes"]
        assert facts["once"] == []
        assert "frames     whole, because the storage was made with once=False" in err
        assert f"a full ring of 150 rows of {row:,} bytes: {full / 1000:,.1f} kB; " in err
        assert f"observations stored whole: {row:,} bytes a row, " in shown
        return
    assert 5 * row < facts["row_bytes"]
    assert [each["name"] for each in facts["once"]] == ["observation"]
    assert "frames     once, because rows repeat the frames of observation; 1," in err
    assert " kB before compression (frames of observation are stored once and compressed, " in err
    progress = next(line for line in err.splitlines() if "300 of 300" in line)
    assert f", {RING * row / 1000:,.1f} kB" in progress
    stated = f"{row:,} bytes a row, {full / 1000:,.1f} kB in the full ring\n"
    assert f"\nframes of observation are stored once: {stated}" in out
    assert f"\nobservations stored once: {stated}" in shown


def test_inspect_adds_up_the_pools_of_a_union(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Members with the same layout share a line. Whole observations count as they are stored."""
    found = {}
    for name, rows in {"a": 100, "b": 170, "whole": 60}.items():
        collected(MemmapStorage(tmp_path / name, once=name != "whole"), total_frames=rows)
        found[name] = json.loads(command(capsys, "inspect", tmp_path / name, "--json")[0])
    paths = [tmp_path / name for name in found]
    facts = json.loads(command(capsys, "inspect", *paths, "--json")[0])
    sizes = ("frames", "used_bytes", "bytes")
    (line,), (one,), (other,) = (each["once"] for each in (facts, found["a"], found["b"]))
    assert line == one | {size: one[size] + other[size] for size in sizes}
    stored = sum(each["stored_row_bytes"] * each["rows"] for each in found.values())
    assert facts["stored_row_bytes"] == -(-stored // facts["rows"])
    assert facts["full_ring_bytes"] is None
    shown, _ = command(capsys, "inspect", *paths)
    assert f"; {facts['row_bytes']:,} bytes, " in shown.splitlines()[0]
    assert f"{line['frames']:,} frames as differences from the frame before, " in shown
    assert " in the pools of its members\n" in shown
    with open_storage([tmp_path / "whole"]) as union:
        assert union.pool_usage() == []
        assert union.reader.stored_size().row_nbytes == union.schema.row_nbytes


def test_a_storage_keeps_its_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows"
    words = ["collect", "once-auto/Images-v0", "--frames", 50, "--out", path]
    command(capsys, *words, "--max-size", 90)
    for given in ([], ["--once", "auto"], ["--once", "yes"]):
        command(capsys, *words, "--append", *given)
    assert once_in(path) == {"observation": (1, True)}
    _, err = command(capsys, *words, "--append", "--once", "no", status=1)
    assert f"--once no: {path} stores frames once, and a storage keeps its layout" in err
    words[-1] = tmp_path / "growing"
    command(capsys, *words)
    _, err = command(capsys, *words, "--append", "--once", "yes", status=1)
    assert "--once yes: " in err
    assert " stores whole observations, and a storage keeps its layout" in err
