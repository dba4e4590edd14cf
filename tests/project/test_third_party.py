"""Tests that users' packages, written by old recipes of ARCHITECTURE.md and the docs, still work.

The files in ``tests/data/third_party`` are never updated. If a module has moved since, its former
path must still work.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallyroll.collector import MultiprocessCollector, RunLog, SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.envs import System
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import (
    DiskStorage,
    MemmapStorage,
    content_hash,
    import_dataset,
    open_storage,
    verify,
)
from tallyroll.storage.testing import ExchangeContract, ReaderContract

from fork_server import warm_fork_server

MOVED = "ignore:tallyroll.* is tallyroll.* now:DeprecationWarning"
pytestmark = pytest.mark.filterwarnings(MOVED)
INSTALLED = Path(__file__).parents[1] / "data" / "third_party" / "installed"
RUN: dict[str, Any] = {"frames_per_batch": 50, "total_frames": 170, "seed": 3}


def theirs(name: str) -> Any:
    """Import a user's module, whose imports may warn about former paths."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"tallyroll.* is tallyroll.* now", DeprecationWarning)
        return import_module(f"my_{name}")


my_system = theirs("system")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with the entry points of these modules, for other processes too."""
    monkeypatch.syspath_prepend(str(INSTALLED))
    paths = [str(INSTALLED), str(INSTALLED.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def check_corridor(rows: Any) -> None:
    """Compare each row with the rules of the system."""
    lane, episode, step, _ = rows["observation"].T
    after = rows["next", "observation"]
    over = step + 1 >= my_system.length_of(lane, episode)
    assert torch.equal(after, rows["observation"] + torch.tensor([0.0, 0, 1, 0]))
    assert torch.equal(rows["next", "reward"][:, 0], step + rows["action"] / 4)
    assert torch.equal(rows["next", "terminated"][:, 0], over & (episode % 2 == 0))
    assert torch.equal(rows["next", "truncated"][:, 0], over & (episode % 2 == 1))
    pixels = (lane + episode + step).to(torch.uint8)
    assert torch.equal(rows["camera"], pixels[:, None, None, None].expand(-1, 8, 8, 1))
    assert torch.equal(rows["collector", "lane"].float(), lane)
    assert torch.equal(rows["collector", "step"].float(), step)


def test_entry_points_name_them() -> None:
    for group, name in (("envs", "corridor"), ("readers", "npy"), ("exchange", "mine")):
        (found,) = entry_points(group=f"tallyroll.{group}", name=name)
        assert found.load().__module__.startswith("my_")


# --- a system -------------------------------------------------------------------------------------


class TestCorridor(SystemContract):
    counts_episodes = True

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        made: System = my_system.Corridor(lanes)
        return made


def test_a_system_is_collected_by_its_name(tmp_path: Path) -> None:
    with SyncCollector("corridor:any", num_envs=3, storage=tmp_path / "rows", **RUN) as collector:
        assert [len(batch) for batch in collector] == [50, 50, 50, 20]
    assert verify(tmp_path / "rows").sound
    with open_storage(tmp_path / "rows") as storage:
        assert len(storage) == 170
        check_corridor(storage[:])


def test_the_command_collects_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "rows")
    assert (
        main(["collect", "corridor:any", "--frames", "90", "--num-envs", "2", "--out", path]) == 0
    )
    assert main(["verify", path]) == 0
    assert "sound; 90 rows" in capsys.readouterr().out


# --- a reader -------------------------------------------------------------------------------------


class TestNpyReader(ReaderContract):
    def write_rows(self, source: DiskStorage, path: Path) -> None:
        theirs("reader").write_npy(source, path)


# --- a sink ---------------------------------------------------------------------------------------


def test_a_sink_gets_a_run_and_goes_on_with_it() -> None:
    sink = theirs("sink").ListSink(500)
    with SyncCollector(partial(my_system.corridor, 3), storage=sink, **RUN) as collector:
        batches = list(collector)
        assert collector.ledger.stored == sink.reader.count == 170
    assert sink.flushed
    check_corridor(sink.reader.get(slice(None)))
    rows = torch.cat([batch["observation"] for batch in batches])
    assert torch.equal(sink.reader.get(slice(None))["observation"], rows)
    again = {**RUN, "total_frames": 260, "seed": None}
    with SyncCollector(
        partial(my_system.corridor, 3), storage=sink, resume=True, **again
    ) as collector:
        assert collector.collect(1000) == 90
        assert collector.ledger.stored == 260
    found = sink.reader.get(slice(None))
    check_corridor(found)
    ids, steps = (found["collector", key].tolist() for key in ("traj_ids", "step"))
    assert len({*zip(ids, steps, strict=True)}) == 260
    assert [run["first_row"] for run in sink.reader.runs] == [0, 170]


# --- a transport ----------------------------------------------------------------------------------


@pytest.fixture
def transport() -> Iterator[Any]:
    """Return a transport whose workers start from a fork server that has imported torch."""
    warm_fork_server()
    before = threading.active_count()
    yield partial(theirs("transport").PipeTransport, start_method="forkserver")
    assert threading.active_count() <= before, "threads of links are left"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_transport_runs_workers(mode: Any, transport: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    run = {**RUN, "num_envs": 3}
    with MultiprocessCollector(
        my_system.corridor, num_workers=2, mode=mode, transport=transport, storage=rows, **run
    ) as collector:
        batches = list(collector)
        assert collector.ledger.stored == 170
    assert verify(rows).sound
    found = torch.cat([batch.clone().exclude(("collector", "cut")) for batch in batches])
    check_corridor(found)
    if mode == "sync":
        with SyncCollector(my_system.corridor, **run) as one:
            wanted = torch.cat([each.exclude(("collector", "cut")) for each in one])
        assert (found == wanted).all()


def test_a_worker_of_a_transport_is_replaced(transport: Any, tmp_path: Path) -> None:
    with MultiprocessCollector(
        my_system.corridor,
        num_envs=3,
        num_workers=2,
        mode="async",
        transport=transport,
        storage=tmp_path / "rows",
        on_worker_death="respawn",
        **RUN,
    ) as collector:
        collector.collect(40)
        os.kill(collector.worker_pids[0], signal.SIGKILL)
        assert collector.collect(1000) == 130
        assert (collector.ledger.stored, collector.ledger.respawned) == (170, 1)
    assert verify(tmp_path / "rows").sound


# --- a third-party format -------------------------------------------------------------------------


class TestMine(ExchangeContract):
    kind, suffix = "mine", ".mine"


def test_the_command_exports_and_imports_it(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        with SyncCollector(partial(my_system.corridor, 3), storage=storage, **RUN) as collector:
            collector.collect(170)
        wanted = content_hash(storage)
    out = f"mine:{tmp_path / 'rows.mine'}"
    assert main(["export", str(tmp_path / "rows"), out]) == 0
    assert main(["import", out, str(tmp_path / "back")]) == 0
    assert content_hash(tmp_path / "back") == wanted
    report = import_dataset(tmp_path / "rows.mine", tmp_path / "again", "mine")
    assert (report.rows, report.lost) == (170, {})


# --- a log target ---------------------------------------------------------------------------------


def test_a_target_of_logs_gets_rows(tmp_path: Path) -> None:
    target = theirs("log_target").JsonLines(tmp_path / "log.jsonl")
    with (
        SyncCollector(partial(my_system.corridor, 3), **RUN) as collector,
        RunLog(collector, target, every=50) as log,
    ):
        for number, _ in enumerate(collector):
            log.update(loss=number / 2)
    found = target.rows()
    assert [row["frames"] for row in found] == [50, 100, 150, 170]
    assert [row["loss"] for row in found] == [0, 0.5, 1, 1.5]
    assert target.closed
    assert np.isfinite([row["episodes"] for row in found]).all()
