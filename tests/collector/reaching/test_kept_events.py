"""Events of runs in storages: after kills, resumes, rewinds and copies, and in damaged files."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from level_kit import Levels, require_recorded

from tallyroll.collector import SyncCollector, load_checkpoint, save_checkpoint
from tallyroll.collector.cli import main
from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    ZarrStorage,
    diff,
    open_storage,
    verify,
)
from tallyroll.storage.files.run_events import events_of
from tallyroll.storage.readers import event_file

RUN: dict[str, Any] = {"num_envs": 3, "frames_per_batch": 7, "total_frames": 70, "seed": 0}
FORMATS: dict[str, Any] = {"rows": MemmapStorage, "rows.h5": H5Storage, "rows.zarr": ZarrStorage}


def collect(path: Path, batches: int, **more: Any) -> SyncCollector:
    """Collect some batches, with a call after each."""
    with SyncCollector(Levels, storage=path, **{**RUN, **more}) as run:
        iterator = iter(run)
        for number in range(batches):
            next(iterator)
            run.env_set("level", float(number + 1), lanes=[number % 3])
    return run


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_keeps_them(tmp_path: Path, name: str) -> None:
    run = collect(tmp_path / name, 5)
    with open_storage(tmp_path / name) as storage:
        events = storage.runs[0]["events"]
        assert events == [{**event, "row": event["at"]} for event in run.events]
        assert [event["at"] for event in events] == [7, 14, 21, 28, 35]
        require_recorded(storage[:], events)
        storage.runs[0]["events"].clear()
        assert len(storage.runs[0]["events"]) == 5
    assert verify(tmp_path / name).findings == ()


def test_calls_before_the_first_row_and_after_other_rows(tmp_path: Path) -> None:
    """`at` counts the run's own transitions, and `row` those of the storage."""
    collect(tmp_path / "rows", 2)
    with (
        MemmapStorage(tmp_path / "rows", mode="append") as storage,
        SyncCollector(Levels, storage=storage, **RUN) as run,
    ):
        run.env_set("level", 5.0)
        next(iter(run))
        run.env_set("level", 6.0)
        first, second = storage.runs[1]["events"]
        assert (first["at"], first["row"]) == (0, 14)
        assert (second["at"], second["row"]) == (7, 21)
        assert set(storage.get(slice(14, 21))["next", "observation"][:, 0].tolist()) == {5.0}


def test_a_resumed_run_has_events_of_its_own(tmp_path: Path) -> None:
    """The resumed run has new environments, on which earlier calls have no effect."""
    collect(tmp_path / "rows", 3)
    run = collect(tmp_path / "rows", 2, resume=True)
    with open_storage(tmp_path / "rows") as storage:
        before, after = (entry["events"] for entry in storage.runs)
        assert [event["at"] for event in before] == [7, 14, 21]
        assert [(event["at"], event["row"]) for event in after] == [(28, 28), (35, 35)]
        assert after == [{**event, "row": event["at"]} for event in run.events]
        rows = storage.get(slice(21, 35))
        for event in run.events:
            event["at"] -= 21
        require_recorded(rows, [{**e, "at": e["at"] - 21} for e in run.events])


@pytest.mark.parametrize("rows", ["rewind", "keep"])
def test_a_rewind_drops_the_events_after_the_rows_that_stay(tmp_path: Path, rows: Any) -> None:
    with SyncCollector(Levels, storage=tmp_path / "rows", **RUN) as run:
        for number, _ in enumerate(run):
            run.env_set("level", float(number))
            if number == 2:
                save_checkpoint(tmp_path / "checkpoint", collector=run)
            if number == 5:
                break
    with SyncCollector(Levels, storage=tmp_path / "rows", **RUN, resume=True) as run:
        load_checkpoint(tmp_path / "checkpoint", collector=run, rows=rows)
        assert run.events == []
        next(iter(run))
        run.env_set("level", 9.0)
    with open_storage(tmp_path / "rows") as storage:
        found = [[event["at"] for event in entry["events"]] for entry in storage.runs]
    kept = [7, 14] if rows == "rewind" else [7, 14, 21, 28, 35, 42]
    assert found == [kept, [28 if rows == "rewind" else 49]]


def test_copies_keep_them(tmp_path: Path) -> None:
    collect(tmp_path / "rows", 4)
    with open_storage(tmp_path / "rows") as source:
        events, raw = source.runs[0]["events"], source.reader.runs
        source.dumps(tmp_path / "dumped")
        with MemmapStorage(tmp_path / "copied", mode="create") as copy:
            copy.extend(source[:])
            assert copy.runs[0]["runs"][0]["events"] == events
            del raw[0]["events_in_file"]
            assert copy.manifest["runs"][0]["runs"] == raw
    with open_storage(tmp_path / "dumped") as copy:
        assert copy.runs[0]["events"] == events
    assert diff(tmp_path / "rows", tmp_path / "dumped").equal


def test_a_copy_without_room_says_that_events_are_left_out(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path / "rows") as source,
        SyncCollector(Levels, storage=source, **RUN) as run,
    ):
        next(iter(run))
        for _ in range(12):
            run.env_call("take", "x" * 2000)
        with MemmapStorage(tmp_path / "copied") as copy:
            copy.extend(source[:])
            (maker,) = copy.runs[0]["runs"]
        assert maker["events_left_out"] is True
        assert "events" not in maker
        assert maker["environment"] == source.runs[0]["environment"]


def test_a_storage_keeps_so_many_bytes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "EVENTS_NBYTES", 700)
    with SyncCollector(Levels, storage=tmp_path / "rows", **RUN) as run:
        next(iter(run))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(20):
                run.env_set("level", float(number))
        assert [str(each.message).partition(":")[2] for each in caught] == [
            " this call and later ones reach the environments but are not recorded, so later rows "
            "cannot be replayed. Call environments less often"
        ]
        assert caught[0].filename == __file__
        assert len(run.events) == 20
    with open_storage(tmp_path / "rows") as storage:
        (entry,) = storage.runs
        assert entry["events_left_out"] is True
        assert [event["args"] for event in entry["events"]] == [[float(n)] for n in range(6)]


# --- kills ----------------------------------------------------------------------------------------


def killed(path: Path, more: int) -> None:
    """Collect in a process that kills itself after its fourth call, and ``more`` rows."""
    process = os.fork()
    if process:
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        return
    try:
        run = SyncCollector(Levels, storage=path, **RUN)
        for number, _ in enumerate(run):
            run.env_set("level", number + 1.0)
            if number == 3:
                if more:
                    run.collect(more)
                os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("more", [0, 5])
def test_a_kill_after_a_call_leaves_it_with_its_rows(tmp_path: Path, more: int) -> None:
    path = tmp_path / "rows"
    killed(path, more)
    with open_storage(path) as storage:
        events = storage.runs[0]["events"]
        assert [event["at"] for event in events] == [7, 14, 21, 28]
        assert require_recorded(storage[:], events) >= 18
    run = collect(path, 2, resume=True)
    with open_storage(path) as storage:
        assert [len(entry["events"]) for entry in storage.runs] == [4, 2]
    assert run.events[0]["at"] == 35 + more
    assert verify(path).findings == ()


# --- reading --------------------------------------------------------------------------------------


def test_inspect_shows_the_last_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collect(tmp_path / "rows", 4)
    collect(tmp_path / "rows", 1, resume=True)
    assert main(["inspect", str(tmp_path / "rows"), "--runs"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "5 calls of environments: …, env_set level(3.0) of lanes 2 at 21, env_set level(4.0) of "
        "lanes 0 at 28, env_set level(1.0) of lanes 0 at 35" in said
    )
    assert main(["inspect", str(tmp_path / "rows"), "--runs", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert [event["at"] for event in found["events"]] == [7, 14, 21, 28, 35]


GOOD = {"at": 3, "call": "env_set", "name": "level", "args": [1]}


@pytest.mark.parametrize(
    "events",
    [
        None,
        "text",
        [None, 3, [], {}],
        [{**GOOD, "at": -1}],
        [{**GOOD, "at": True}],
        [{**GOOD, "at": 2**70}],
        [{**GOOD, "call": "system"}],
        [{**GOOD, "name": 3}],
        [{**GOOD, "args": "rm"}],
        [{**GOOD, "kwargs": []}],
        [{**GOOD, "lanes": "all"}],
        [{**GOOD, "row": "first"}],
    ],
)
def test_what_is_no_event_is_left_out(events: Any) -> None:
    """A crafted manifest is only data, and nothing in it is called."""
    assert events_of({"first_row": 0, "events": events}) == []
    others = events if isinstance(events, list) else []
    whole = events_of({"first_row": 4, "events": [*others, GOOD]})
    assert whole == [{**GOOD, "row": 7, "kwargs": {}, "lanes": None}]
    assert events_of({"first_row": 4, "events": [GOOD]}, stop=6) == []
