"""Workers of every transport write the same rows to storages that store frames once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from pixel_kit import assert_frames_show_their_place, stacked
from tensordict import TensorDict

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.cli import main
from tallyroll.storage import (
    FrameStack,
    MemmapStorage,
    ShardedStorage,
    open_storage,
    verify,
)
from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.ext.sharded.files import ShardedFiles

from far_kit import FarThreads
from fork_server import warm_fork_server

LANES, FRAMES = 4, 400
gymnasium.register("once-of-workers/Pixels-v0", stacked)


def run(storage: Any, **options: Any) -> MultiprocessCollector:
    given = {"frames_per_batch": 50, "total_frames": FRAMES, "num_envs": LANES, "seed": 5}
    return MultiprocessCollector(stacked, storage=storage, **{**given, **options})


def collected(storage: Any, **options: Any) -> None:
    """Collect rows to ``storage``, and close it."""
    with storage, run(storage, **options) as collector:
        while collector.ledger.stored < options.get("total_frames", FRAMES):
            collector.collect(70)


def bits_of(rows: TensorDict) -> dict[Any, bytes]:
    return {key: rows[key].contiguous().numpy().tobytes() for key in rows.keys(True, True)}


def by_number(path: Path) -> dict[tuple[int, int], dict[Any, bytes]]:
    """Return the bits of each row by its trajectory and step."""
    with open_storage(path) as storage:
        rows = storage[:].clone()
    ids, steps = rows["collector", "traj_ids"].tolist(), rows["collector", "step"].tolist()
    found = {place: bits_of(rows[i]) for i, place in enumerate(zip(ids, steps, strict=True))}
    assert len(found) == len(rows)
    return found


def layouts(path: Path) -> list[dict[Any, int]]:
    """Return the columns that each shard stores once, with the number of frames of a value."""
    files = ShardedFiles(path)
    shards = [each for each in files.acknowledged().shards if each.rows]
    found = []
    for each in shards:
        with open_storage(files.place_of(each.name), accept_copy=True) as shard:
            found.append({once.key: once.layout.stack for once in shard.reader.once})
    return found


TRANSPORTS: dict[str, dict[str, Any]] = {
    "threads": {"transport": "thread", "num_workers": 2},
    "threads that send rows": {"transport": FarThreads, "num_workers": 2},
    "async thread": {"transport": "thread", "num_workers": 1, "mode": "async"},
    "async thread that sends rows": {"transport": FarThreads, "num_workers": 1, "mode": "async"},
}


@pytest.mark.parametrize("max_size", [None, 150], ids=["growing", "ring"])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_workers_write_the_same_rows(name: str, max_size: int | None, tmp_path: Path) -> None:
    found = []
    for once in (True, False):
        path = tmp_path / str(once)
        collected(MemmapStorage(path, max_size=max_size, once=once), **TRANSPORTS[name])
        with open_storage(path) as storage:
            assert storage.stores_once is once or not once
            assert (len(storage), storage.head) == (max_size or FRAMES, FRAMES)
            found.append(bits_of(storage.in_order()))
        assert verify(path).sound
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_have_the_same_rows(workers: int, tmp_path: Path) -> None:
    found = []
    for once in (True, False):
        path = tmp_path / str(once)
        options = {"transport": "thread", "num_workers": workers, "mode": "async", "sharded": True}
        with ShardedStorage(path, once=once) as storage, run(storage, **options) as collector:
            assert storage.stores_once is once
            while collector.collect(70):
                pass
            assert (collector.plan.frames.way == "once") is once
        assert layouts(path) == [{("observation",): 4} if once else {}] * workers
        assert verify(path).sound
        found.append(by_number(path))
    one, other = found
    assert len(one) == len(other) == FRAMES
    shared = one.keys() & other.keys()  # workers run at their own pace
    assert len(shared) == FRAMES if workers == 1 else len(shared) > FRAMES / 2
    assert all(one[place] == other[place] for place in shared)


@pytest.mark.slow
def test_shards_of_killed_workers_are_whole(tmp_path: Path) -> None:
    warm_fork_server()
    path = tmp_path / "rows"
    options = {"num_workers": 2, "mode": "async", "sharded": True, "total_frames": 900}
    storage = ShardedStorage(path, once=True)
    with (
        storage,
        run(storage, on_worker_death="respawn", max_respawns=100, **options) as collector,
    ):
        collector.collect(300)
        os.kill(collector.worker_pids[0], signal.SIGKILL)
        while collector.collect(300):
            pass
    found = layouts(path)
    assert len(found) >= 2
    assert found == [{("observation",): 4}] * len(found)
    assert verify(path).sound
    with open_storage(path) as stored:
        assert len(stored) == 900
    assert_frames_show_their_place(path)


def test_a_resumed_sharded_run_keeps_its_layout(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    options = {"transport": "thread", "num_workers": 2, "mode": "async", "sharded": True}
    collected(
        ShardedStorage(path, once=True, stacks=[FrameStack("observation")]),
        **{**options, "total_frames": 150},
    )
    with run(path, resume=True, **options) as collector:
        collector.collect(FRAMES)
    assert layouts(path) == [{("observation",): 4}] * 4
    assert_frames_show_their_place(path)
    with pytest.raises(ValueError, match='once: expected mode="create"'):
        ShardedStorage(path, mode="append", once=True)


def test_layouts_of_shards_that_are_refused(tmp_path: Path) -> None:
    path, stacks = tmp_path / "rows", [FrameStack("observation")]
    with pytest.raises(ValueError, match="stacks: expected once=True, got once='auto'"):
        ShardedStorage(path, stacks=stacks)
    options: dict[str, Any] = {
        "num_workers": 1,
        "mode": "async",
        "sharded": True,
        "total_frames": 9,
    }
    with (
        ShardedStorage(path, once=True) as storage,
        pytest.raises(InvalidSchema, match="once=True: expected a column of 64 bytes"),
    ):
        MultiprocessCollector(
            "CartPole-v1", storage=storage, transport="thread", frames_per_batch=9, **options
        )
    assert not path.exists()


def test_a_command_stores_the_frames_of_shards_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "rows")
    words = ["collect", "once-of-workers/Pixels-v0", "--workers", "2", "--num-envs", "4"]
    words += ["--sharded", "--transport", "thread", "--seed", "1", "--out", out]
    assert main([*words, "--frames", "300", "--once", "yes", "--plan"]) == 0
    said = capsys.readouterr()
    assert "frames     once, because each shard has pools of its own" in said.err
    assert " at most, because the shards store frames once and compress them" in said.err
    assert "frames stored once in" in said.out
    assert main([*words, "--frames", "400", "--resume", "--once", "no"]) == 1
    assert "stores frames once, and a storage keeps its layout" in capsys.readouterr().err
    assert main(["collect", "--resume", "--frames", "400", "--quiet", "--out", out]) == 0
    assert layouts(Path(out)) == [{("observation",): 4}] * 4
    assert_frames_show_their_place(Path(out))
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    assert " in the pools of its members\n" in capsys.readouterr().out
    with open_storage(out) as storage:
        assert storage.reader.stored_size().row_nbytes < storage.schema.row_nbytes
        assert len(storage) == 400
        assert torch.equal(storage[7:9]["observation"], storage[:]["observation"][7:9])
