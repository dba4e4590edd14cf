"""The event file of a storage: writes, kills, damage and readers."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from level_kit import Levels, require_recorded

from tallyroll.collector import SyncCollector, load_checkpoint, save_checkpoint
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import DiskFailed, StorageFull
from tallyroll.storage.files.run_events import without_events
from tallyroll.storage.formats.hdf5.format import H5Format
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.formats.zarr.format import ZarrFormat
from tallyroll.storage.readers import event_file
from tallyroll.storage.readers.event_file import EventFile

RUN: dict[str, Any] = {"num_envs": 3, "frames_per_batch": 7, "total_frames": 70, "seed": 0}
KILLS = int(os.environ.get("TALLYROLL_KILLS", "4"))
PLACES = {"rows": "rows/run.events", "rows.h5": "rows.h5.run.events"}
PLACES["rows.zarr"] = "rows.zarr/tallyroll/run.events"
FORMATS = {"rows": MemmapFormat, "rows.h5": H5Format, "rows.zarr": ZarrFormat}


def collect(path: Path, batches: int, **more: Any) -> SyncCollector:
    """Collect some batches, with a call after each."""
    with SyncCollector(Levels, storage=path, **{**RUN, **more}) as run:
        iterator = iter(run)
        for number in range(batches):
            next(iterator)
            run.env_set("level", float(number + 1), lanes=[number % 3])
    return run


def levels_of(path: Path) -> list[list[Any]]:
    """Return the values that were set, by run."""
    with open_storage(path) as storage:
        return [[each["args"][0] for each in run.get("events", ())] for run in storage.runs]


def left_out(path: Path) -> list[bool]:
    """Return for each run whether its events are marked as omitted."""
    with open_storage(path) as storage:
        return [run.get("events_left_out", False) for run in storage.runs]


def events_found(path: Path) -> list[str]:
    """Return the findings of `verify` about events, with their places."""
    found = verify(path)
    assert {each.check for each in found.findings} <= {"events"}
    return [f"{each} {' '.join(map(str, each.places))}" for each in found.findings]


@pytest.mark.parametrize("name", PLACES)
def test_a_call_adds_a_line_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a call does not depend on the number of events, in any format."""
    with SyncCollector(Levels, storage=tmp_path / name, **RUN) as run:
        next(iter(run))
        run.env_set("level", 0.5)
        monkeypatch.setattr(FORMATS[name], "write_manifest", None)
        sizes = []
        for _ in range(99):
            run.env_set("level", 1.5)
            sizes.append((tmp_path / PLACES[name]).stat().st_size)
        monkeypatch.undo()
    lines = np.diff(sizes)
    assert lines.max() - lines.min() <= 1  # one digit of the event's number
    assert levels_of(tmp_path / name) == [[0.5, *[1.5] * 99]]
    assert verify(tmp_path / name).findings == ()


def test_a_reader_sees_what_comes(tmp_path: Path) -> None:
    """A reader sees new lines, and events after a rewind are gone."""
    path = tmp_path / "rows"
    with SyncCollector(Levels, storage=path, **RUN) as run:
        iterator = iter(run)
        next(iterator)
        reader = open_storage(path)
        assert "events" not in reader.runs[0]
        kept: Any = []
        for number in range(4):
            run.env_set("level", float(number))
            if number == 1:
                save_checkpoint(tmp_path / "saved", collector=run)
            kept.append(reader.runs[0]["events"])
            next(iterator)
        assert [len(each) for each in kept] == [1, 2, 3, 4]
        assert verify(path).findings == ()
    with SyncCollector(Levels, storage=path, resume=True, **RUN) as run:
        load_checkpoint(tmp_path / "saved", collector=run, rows="rewind")
        assert [each["at"] for each in reader.runs[0]["events"]] == [7]
        next(iter(run))
        run.env_set("level", 9.0)
        assert [each["args"] for each in reader.runs[1]["events"]] == [[9.0]]
        reader.close()
    assert levels_of(path) == [[0.0], [9.0]]
    assert verify(path).findings == ()


def test_a_dump_that_is_brought_up_has_all(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    for batches in (2, 3):
        collect(path, batches, resume=batches == 3)
        with open_storage(path) as storage:
            storage.dumps(tmp_path / "dump")
        assert levels_of(tmp_path / "dump") == levels_of(path)
        assert verify(tmp_path / "dump").findings == ()
        assert (tmp_path / "dump/run.events").read_bytes() == (path / "run.events").read_bytes()


def test_a_copy_keeps_the_events_that_there_were(tmp_path: Path) -> None:
    """Later events of the run are not in the copy, on disk or in memory."""
    with (
        MemmapStorage(tmp_path / "rows") as source,
        MemmapStorage(tmp_path / "copy") as copy,
        SyncCollector(Levels, storage=source, **RUN) as run,
    ):
        next(iter(run))
        run.env_set("level", 1.0)
        copy.extend(source[:])
        run.env_set("level", 2.0)
        assert [len(each["events"]) for each in (*source.runs, *copy.runs[0]["runs"])] == [2, 1]
        assert "events_in_file" not in copy.manifest["runs"][0]["runs"][0]
    with open_storage(tmp_path / "copy") as storage:
        assert len(storage.runs[0]["runs"][0]["events"]) == 1


def test_a_file_of_an_earlier_storage_is_replaced(tmp_path: Path) -> None:
    """HDF5 keeps its event file next to its own file, and an earlier storage may have left one."""
    collect(tmp_path / "rows.h5", 2)
    (tmp_path / "rows.h5").unlink()
    collect(tmp_path / "rows.h5", 3)
    assert levels_of(tmp_path / "rows.h5") == [[1.0, 2.0, 3.0]]
    assert verify(tmp_path / "rows.h5").findings == ()


# --- kills ----------------------------------------------------------------------------------------


def called_until_killed(path: Path, seconds: float) -> None:
    """Collect with calls in a process that is killed after ``seconds``."""
    process = os.fork()
    if not process:
        try:
            with SyncCollector(Levels, storage=path, **{**RUN, "total_frames": 10**6}) as run:
                (path.parent / "begun").touch()
                for number, _ in enumerate(run):
                    run.env_set("level", float(number % 50))
        finally:
            os._exit(1)
    while not (path.parent / "begun").exists():
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_leaves_the_calls_of_all_rows(tmp_path: Path, number: int) -> None:
    path = tmp_path / "rows"
    called_until_killed(path, random.Random(number).uniform(0, 0.05))
    if not path.exists() or not (path / "manifest.json").exists():
        return
    assert verify(path).findings == ()
    with open_storage(path) as storage:
        require_recorded(storage[:], storage.runs[0].get("events", []))
        stored = len(storage)
    collect(path, 2, resume=True, total_frames=stored + 30)
    assert len(levels_of(path)) == 2
    report = verify(path)
    assert (report.findings, report.notes) == ((), ())


def test_a_line_that_was_cut_short_is_written_over(tmp_path: Path) -> None:
    """The kill interrupted the write, so no row follows the call."""
    path, file = tmp_path / "rows", tmp_path / "rows/run.events"
    collect(path, 3)
    whole = file.read_bytes()
    *_, last = whole.splitlines(keepends=True)
    for keep in (1, 8, len(last) - 1):
        file.write_bytes(whole + last[:keep])
        assert levels_of(path) == [[1.0, 2.0, 3.0]]
        assert left_out(path) == [False]
        (found,) = events_found(path)
        assert "the last line of the file of events was cut short" in found
    collect(path, 1, resume=True)
    assert levels_of(path) == [[1.0, 2.0, 3.0], [1.0]]
    assert verify(path).findings == ()


# --- damage ---------------------------------------------------------------------------------------


def other_byte(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def test_each_byte_is_checked(tmp_path: Path) -> None:
    """A damaged line is a finding, and the run lacks the events from that line on."""
    path, file = tmp_path / "rows", tmp_path / "rows/run.events"
    collect(path, 3)
    whole = file.read_bytes()
    for at in random.Random(0).sample(range(len(whole)), 40):
        file.write_bytes(other_byte(whole, at))
        with open_storage(path) as storage:
            (run,) = storage.runs
        found = run.get("events", [])
        assert [each["args"][0] for each in found] == [1.0, 2.0, 3.0][: len(found)]
        if at == len(whole) - 1:  # the end of the last line
            assert len(found) == 2
        else:
            assert run["events_left_out"] is True
        assert events_found(path)
    file.write_bytes(whole)
    assert verify(path).findings == ()


DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str, list[list[float]]]] = {
    "a line is missing": (
        lambda lines: lines[:2] + lines[3:],
        "lacks events of 1 runs",
        [[1.0], [1.0]],
    ),
    "two lines changed places": (
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        "lacks events of 1 runs",
        [[1.0], [1.0]],
    ),
    "the lines of a run are missing": (
        lambda lines: lines[:-1],
        "has no events of 1 runs",
        [[1.0, 2.0, 3.0], []],
    ),
    "a line is there twice": (
        lambda lines: [*lines, lines[-1]],
        "lacks events of 1 runs",
        [[1.0, 2.0, 3.0], [1.0]],
    ),
    "it is another storage's": (
        lambda lines: [lines[0].replace(b"events 1 ", b"events 1 f"), *lines[1:]],
        "is damaged, or belongs to another storage",
        [[], []],
    ),
    "it is empty": (lambda _: [], "is damaged, or belongs to another storage", [[], []]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_lines_that_are_lost_are_found(name: str, tmp_path: Path) -> None:
    path, file = tmp_path / "rows", tmp_path / "rows/run.events"
    collect(path, 3)
    collect(path, 1, resume=True)
    change, said, left = DAMAGE[name]
    file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))
    (found,) = events_found(path)
    assert said in found
    assert levels_of(path) == left
    assert any(left_out(path))
    # The next writer keeps the mark of lost events.
    collect(path, 1, resume=True)
    assert levels_of(path) == [*left, [1.0]]
    assert any(left_out(path)[:2])
    assert not left_out(path)[2]


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder", "large"])
def test_what_is_no_file_of_events(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = tmp_path / "rows", tmp_path / "rows/run.events"
    collect(path, 2)
    other = file.rename(tmp_path / "elsewhere")
    content = other.read_bytes()
    if kind == "link":
        file.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "large":
        file.write_bytes(content)
        monkeypatch.setattr(event_file, "EVENTS_NBYTES", 0)
        monkeypatch.setattr(event_file, "_LONGEST", len(content) - 1)
    assert levels_of(path) == [[]]
    assert left_out(path) == [True]
    (found,) = events_found(path)
    assert str(file) in found
    if kind in ("link", "missing", "pipe"):
        collect(path, 1, resume=True)
        assert levels_of(path) == [[], [1.0]]
        assert other.read_bytes() == content


def test_events_that_do_not_fit_their_run(tmp_path: Path) -> None:
    """The checksums are valid, so a user must have written the events."""
    path = tmp_path / "rows"
    collect(path, 3)
    wrong: dict[str, dict[str, Any]] = {
        "its row is 22, not from 14 to 21": {"at": 22},
        "its row is 3, not from 14 to 21": {"at": 3},
        "it has 15 earlier transitions, but its row implies 21": {"at": 15, "row": 21},
        "its lanes are not different numbers from 0 to 2": {"lanes": [1, 1]},
        "from 0 to 2": {"failed": [3]},
        "a trajectory and a step for each": {"first": [[1, 2], [3, 4]]},
        "for each of its lanes": {"first": [[1, -2]]},
        "it is not an event": {"name": 7},
    }
    for said, change in wrong.items():
        with open_storage(path) as storage:
            manifest = storage.manifest
        run = manifest["runs"][0]
        run.pop("events_in_file", None)
        run["events"][2] = {**run["events"][2], "lanes": [2], **change}
        (path / "manifest.json").write_text(json.dumps(manifest))
        (found,) = events_found(path)
        assert said in found
        assert "run 0, event 2" in found
        del run["events"][2]
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert verify(path).findings == ()
        run["events"].append({"at": 21, "call": "env_set", "name": "level", "args": [3.0]})
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert verify(path).findings == ()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is made and raises that it was not recorded. No partial line remains."""
    path, file = tmp_path / "rows", tmp_path / "rows/run.events"
    with SyncCollector(Levels, storage=path, **RUN) as run:
        iterator = iter(run)
        next(iterator)
        run.env_set("level", 1.0)
        whole = file.read_bytes()

        def half(descriptor: int, content: Any, at: int) -> None:
            os.pwrite(descriptor, bytes(content)[:20], at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(event_file, "write_all", half)
        with pytest.raises(StorageFull, match=r"run\.events"):
            run.env_set("level", 2.0)
        monkeypatch.undo()
        assert file.read_bytes() == whole
    collect(path, 1, resume=True)
    assert levels_of(path) == [[1.0], [1.0]]
    assert verify(path).findings == ()


def test_a_manifest_names_what_the_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is written after the lines. A kill in between leaves lines without a run."""
    path = tmp_path / "rows"
    with SyncCollector(Levels, storage=path, **RUN) as run:
        next(iter(run))
        seen: list[bool] = []

        def refuse(files: MemmapFormat, *_: Any) -> None:
            seen.append(files.events_path.exists())
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(MemmapFormat, "write_manifest", refuse)
        with pytest.raises(DiskFailed):
            run.env_set("level", 1.0)
        monkeypatch.undo()
    assert seen == [True]
    assert levels_of(path) == [[]]
    collect(path, 1, resume=True)
    assert levels_of(path) == [[], [1.0]]
    assert verify(path).findings == ()


def test_a_name_without_events_says_that_they_are_left_out(tmp_path: Path) -> None:
    """A reader of another package copies only the manifest."""
    file = EventFile(MemmapFormat(tmp_path), writable=True)
    runs = [{"first_row": 0, "events_in_file": "other"}, {"first_row": 3}]
    manifest, _ = file.keep({"id": "some", "runs": runs})
    assert manifest["runs"] == [{"first_row": 0, "events_left_out": True}, {"first_row": 3}]
    assert not (tmp_path / "run.events").exists()
    assert [without_events(run) for run in runs] == manifest["runs"]
