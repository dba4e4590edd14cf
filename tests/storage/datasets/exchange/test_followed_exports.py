"""Test exports that follow a writer: they are complete at every moment, however the process ends.

``TALLYROLL_EXCHANGES`` multiplies the numbers of kills and looks, 4 and 30 by default.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import (
    ExportReport,
    Follow,
    MemmapStorage,
    diff,
    import_dataset,
    open_storage,
)
from tallyroll.storage.errors import (
    NotWritable,
    PathIsTaken,
    StorageFull,
    StorageLocked,
)
from tallyroll.storage.ext.exchange import dataset_export, export_rows, followed_export, readme
from tallyroll.storage.ext.exchange import followed_export as versions
from tallyroll.storage.ext.exchange.dataset_export import Cuts
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to

from fork_server import warm_fork_server
from killed_storages_kit import Told, forked, in_a_process, killed, lines_of, wait_until
from storage_contract import process

MORE = int(os.environ.get("TALLYROLL_EXCHANGES", "1"))
STEPS = 7
NOW = Follow(every=0.0)
"""Write one version after another without a pause."""
SOON = Follow(every=0.02)
KINDS = ("npz", "torchrl")
ENDS = {"npz": ".npz", "torchrl": ""}


def rows(start: int, count: int) -> TensorDict:
    return trajectory_rows(start, count, steps=STEPS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(rows(0, 20))
    return tmp_path / "source"


def newest(place: Path, kind: str) -> Path:
    """Return the version that a reader opened now would find."""
    return Path(os.path.realpath(place / f"current{ENDS[kind]}"))


def rows_in(version: Path, kind: str) -> int:
    """Read a version with NumPy or tensordict, check that its rows are complete, and count them."""
    if kind == "npz":
        with np.load(version, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files if name != "tallyroll"}
    else:
        loaded = TensorDict.load_memmap(version)
        keys = loaded.keys(include_nested=True, leaves_only=True)
        found = {"/".join(k) if isinstance(k, tuple) else k: loaded[k].numpy() for k in keys}
    (count,) = {len(each) for each in found.values()}
    for key, wanted in rows(0, count).items(include_nested=True, leaves_only=True):
        name = key if isinstance(key, str) else "/".join(key)
        np.testing.assert_array_equal(found.pop(name), wanted, err_msg=name)
    assert not found
    return count


def rows_in_newest(place: Path, kind: str) -> int:
    """Count the rows of the newest version, which stays until the second version after it."""
    while True:
        version = newest(place, kind)
        try:
            return rows_in(version, kind)
        except Exception:
            if version.exists():
                raise


def names_in(place: Path) -> set[str]:
    return {each.name for each in place.iterdir()} - {"follow.json", ".follow.lock"}


# --- with a concurrent writer ---------------------------------------------------------------------


def collect(connection: Any, path: Path, frames: int, link: Path) -> None:
    """Collect CartPole, a few rows at a time, and then end as a run does.

    The collector waits for the first and the second version, however slow the other process is.
    """

    def shown(number: int) -> bool:
        return link.is_symlink() and int(os.readlink(link)[:8]) >= number

    with (
        MemmapStorage(path) as storage,
        SyncCollector(
            "CartPole-v1",
            num_envs=2,
            frames_per_batch=20,
            total_frames=frames,
            seed=3,
            storage=storage,
        ) as collector,
    ):
        for number, _ in enumerate(collector):
            if number == 0:
                connection.send("begun")
            if number in (10, 30):
                wait_until(lambda wanted=number // 20 + 1: shown(wanted))
            time.sleep(0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_run_until_it_has_ended(tmp_path: Path, kind: str) -> None:
    """Every version has whole batches, and the last one has all rows, bit for bit."""
    warm_fork_server()
    seen: list[int] = []

    def look(report: ExportReport) -> None:
        back = tmp_path / f"back{len(seen)}"
        assert import_dataset(newest(place, kind), back, kind).rows == report.rows
        seen.append(report.rows)
        with open_storage(back) as part, open_storage(tmp_path / "run") as run:
            assert_same_rows(part.get(slice(None)), run.get(slice(0, report.rows)))
        assert len(names_in(place)) == 1 + min(2, len(seen))

    place = tmp_path / "kept_up"
    link = place / f"current{ENDS[kind]}"
    with process(collect, tmp_path / "run", 1001, link) as (child, connection):
        assert connection.poll(60)
        with open_storage(tmp_path / "run") as storage:
            report = storage.export(place, kind, follow=Follow(every=0.1, on_version=look))
        child.join(30)
        assert child.exitcode == 0
    assert (report.rows, report.versions) == (1001, len(seen))
    assert report.path == str(link)
    assert seen == sorted({*seen})
    assert len(seen) >= 3, "all rows came before the second version"
    assert all(count % 20 == 0 for count in seen[:-1])
    assert diff(tmp_path / "run", tmp_path / f"back{len(seen) - 1}").same


@pytest.mark.parametrize("cuts", ["keep", "drop"])
def test_the_text_is_of_the_rows_that_are_written(
    cuts: Cuts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the rows nor the text include rows added after the export counted trajectories."""
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(rows(0, 20))

        def slow(*given: Any) -> dict[str, Any]:
            storage.extend(rows(20, 10))
            return readme.about_rows(*given)

        monkeypatch.setattr(dataset_export, "about_rows", slow)
        with open_storage(tmp_path / "source") as reader:
            report = reader.export(tmp_path / "out", "torchrl", cuts=cuts)
    assert report.rows == (20 if cuts == "keep" else 14)
    text = json.loads((tmp_path / "out" / "tallyroll.json").read_text())
    assert text["rows"]["copied_from"]["rows"] == [0, 19]


def test_rows_added_as_a_version_begins_are_exported_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a version already has do not cause another version."""
    reports: list[ExportReport] = []
    with MemmapStorage(source, mode="append") as storage:

        def late(*given: Any, **options: Any) -> tuple[ExportReport, int]:
            if not reports:
                storage.extend(rows(20, 10))
            return dataset_export.export_with_head(*given, **options)

        monkeypatch.setattr(followed_export, "export_with_head", late)
        looks = iter([False, False, False, True])
        options = Follow(every=0.0, stop=lambda: next(looks), on_version=reports.append)
        with open_storage(source) as reader:
            reader.export(tmp_path / "out", "torchrl", follow=options)
    assert [each.rows for each in reports] == [30]


def append(path: Path, told: Told) -> None:
    """Append rows forever."""
    with MemmapStorage(path) as storage:
        pick = random.Random(0)
        while True:
            storage.extend(rows(told.head, count := pick.randrange(1, 20)))
            told.head += count
            time.sleep(0.005)


def follow(folder: Path, kind: str, small: bool = True) -> None:
    if small:
        export_rows.BLOCK_NBYTES = 4000  # type: ignore[misc]
    with open_storage(folder / "source") as storage:
        storage.export(folder / "out", kind, follow=SOON)


def look_at_random(folder: Path, kind: str, looks: int) -> list[int]:
    """Open the export at random moments. Return the number of rows found each time."""
    told, pick, found = Told(), random.Random(1), []
    writer = forked(lambda: append(folder / "source", told))
    wait_until(lambda: told.head > 0)
    follower = forked(lambda: follow(folder, kind))
    wait_until(lambda: newest(folder / "out", kind).exists() and (folder / "out").is_dir())
    end = time.monotonic() + 30
    while len(found) < looks or (len({*found}) < 5 and time.monotonic() < end):
        found.append(rows_in_newest(folder / "out", kind))
        time.sleep(pick.uniform(0, 0.03))
    killed(follower)
    killed(writer)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_finds_a_whole_version_at_every_moment(tmp_path: Path, kind: str) -> None:
    found = in_a_process(look_at_random, tmp_path, kind, 30 * MORE, seconds=60 + 10 * MORE)
    assert found == sorted(found)
    assert len({*found}) >= 5, "there were few versions"


def kill_at_random(folder: Path, kills: int) -> int:
    """Kill processes that keep an export up to date. Return the number of versions found."""
    told, pick, found, kind = Told(), random.Random(2), {0}, "torchrl"
    writer = forked(lambda: append(folder / "source", told))
    wait_until(lambda: told.head > 0)
    link = folder / "out" / "current"
    for _ in range(kills):
        follower = forked(lambda: follow(folder, kind))
        wait_until(lambda: link.exists() and rows_in_newest(folder / "out", kind) not in found)
        time.sleep(pick.uniform(0, 0.08))
        killed(follower)
        count = rows_in_newest(folder / "out", kind)
        assert count >= max(found), "an older version has come back"
        found.add(count)
    killed(writer)
    follow(folder, kind, small=False)  # ends, as the storage has no writer
    assert rows_in_newest(folder / "out", kind) == told.head
    assert len(names_in(folder / "out")) == 3, names_in(folder / "out")
    return len(found)


@pytest.mark.timeout(60 + 10 * MORE)
def test_a_kill_leaves_a_whole_version(tmp_path: Path) -> None:
    kills = 4 * MORE
    assert in_a_process(kill_at_random, tmp_path, kills, seconds=50 + 8 * MORE) > min(kills, 3)


def kill_at_lines(folder: Path, points: int) -> int:
    """Kill at lines of the code that changes the folder. Return the number of lines."""
    base, work = folder / "base", folder / "work"
    with MemmapStorage(base / "source") as storage:
        storage.extend(rows(0, 20))
        with open_storage(base / "source") as reader:
            ahead = iter([10, 10])

            def more(report: ExportReport) -> None:
                if count := next(ahead, 0):
                    storage.extend(rows(len(storage), count))

            asked = iter([False, False, True])
            options = Follow(every=0.0, on_version=more, stop=lambda: next(asked))
            reader.export(base / "out", "torchrl", follow=options)
        storage.extend(rows(40, 10))

    def act(line: int, told: Told) -> None:
        run = lambda: follow(work, "torchrl", small=False)  # noqa: E731
        told.lines = lines_of(run, line, inside=str(versions.__file__))

    def run(line: int) -> int:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work, symlinks=True)
        told = Told()
        os.waitpid(forked(lambda: act(line, told)), 0)
        return told.lines

    total = run(0)
    assert rows_in(newest(work / "out", "torchrl"), "torchrl") == 50
    stride, offset = max(1.0, total / points), random.Random(0).random()
    for number in range(min(points, total)):
        run(1 + int((number + offset) * stride) % total)
        assert rows_in(newest(work / "out", "torchrl"), "torchrl") in (40, 50)
        for each in names_in(work / "out"):
            if each.isdigit():
                assert rows_in(work / "out" / each, "torchrl") in (30, 40, 50)
        follow(work, "torchrl", small=False)
        assert rows_in(newest(work / "out", "torchrl"), "torchrl") == 50
        assert len(names_in(work / "out")) == 3, names_in(work / "out")
    return total


@pytest.mark.timeout(60 + 30 * MORE)
def test_a_kill_in_the_middle_of_a_swap(tmp_path: Path) -> None:
    points = 5 if MORE == 1 else 10**6
    assert in_a_process(kill_at_lines, tmp_path, points, seconds=50 + 30 * MORE) > 30


# --- versions -------------------------------------------------------------------------------------


class Growing:
    """Storage that gains rows when a version is complete, and is closed after some versions."""

    def __init__(self, path: Path, versions: int, act: Callable[[int], object] = int) -> None:
        self.writer, self.left, self.act = MemmapStorage(path, mode="append"), versions, act
        self.reports: list[ExportReport] = []

    def __call__(self, report: ExportReport) -> None:
        self.reports.append(report)
        self.left -= 1
        if self.left:
            self.writer.extend(rows(len(self.writer), 10))
            self.act(self.left)
        else:
            self.writer.close()


def test_the_last_two_versions_stay(source: Path, tmp_path: Path) -> None:
    place, growing = tmp_path / "out", Growing(source, 4)
    with open_storage(source) as storage:
        report = storage.export(place, "npz", follow=Follow(every=0.0, on_version=growing))
        assert [each.rows for each in growing.reports] == [20, 30, 40, 50]
        assert [each.versions for each in growing.reports] == [1, 2, 3, 4]
        assert report == growing.reports[-1]
        assert names_in(place) == {"00000003.npz", "00000004.npz", "current.npz"}
        assert os.readlink(place / "current.npz") == "00000004.npz"
        assert [rows_in(place / f"0000000{n}.npz", "npz") for n in (3, 4)] == [40, 50]
        # Export again while no process writes. The version takes the next number.
        assert storage.export(place, "npz", follow=NOW).versions == 1
    assert names_in(place) == {"00000004.npz", "00000005.npz", "current.npz"}


def test_parts_that_a_kill_left_are_removed(source: Path, tmp_path: Path) -> None:
    """Hidden files of other programs stay."""
    place = tmp_path / "out"
    with open_storage(source) as storage:
        storage.export(place, "npz", follow=NOW)
        (place / ".00000007.npz.written-aside").mkdir()
        (place / ".00000007.npz.written-aside" / "rows.npz").write_text("half")
        (place / ".00000003.npz.removed").write_text("half")
        (place / ".hidden").write_text("mine")
        storage.export(place, "npz", follow=NOW)
    wanted = {"00000001.npz", "00000002.npz", "current.npz", ".hidden"}
    assert names_in(place) == wanted


def test_no_version_without_new_rows(source: Path, tmp_path: Path) -> None:
    """No version appears before its time, either.

    The end of the writer is detected immediately.
    """
    with MemmapStorage(source, mode="append") as writer, open_storage(source) as storage:
        asked = iter(range(10))
        options = Follow(every=0.01, stop=lambda: next(asked) == 9)
        assert storage.export(tmp_path / "one", "npz", follow=options).versions == 1
        timer = threading.Timer(0.3, lambda: (writer.extend(rows(20, 5)), writer.close()))

        def on(report: ExportReport) -> None:
            if report.versions == 1:
                timer.start()

        began = time.monotonic()
        options = Follow(every=1000, on_version=on)
        report = storage.export(tmp_path / "two", "npz", follow=options)
        timer.join()
        assert (report.versions, report.rows) == (2, 25)
        assert time.monotonic() - began < 60


def test_stop_writes_the_rows_that_came_since_the_last_version(
    source: Path, tmp_path: Path
) -> None:
    with MemmapStorage(source, mode="append") as writer, open_storage(source) as storage:

        def stop() -> bool:
            if len(storage) == 20:
                writer.extend(rows(20, 5))
            return True

        report = storage.export(tmp_path / "it", "npz", follow=Follow(every=1000, stop=stop))
        assert (report.versions, report.rows) == (2, 25)


def test_a_version_waits_for_its_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval runs from the start of one version to the start of the next.

    The clock advances only when the code waits.
    """
    times, now = list[float](), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(followed_export, "time", clock)
    growing = Growing(source, 4)

    def on(report: ExportReport) -> None:
        now[0] += 50 if len(times) == 2 else 10  # seconds that the version took
        times.append(now[0])
        growing(report)

    with open_storage(source) as storage:
        storage.export(tmp_path / "out", "npz", follow=Follow(on_version=on))
    assert times == pytest.approx([10, 30 + 10, 60 + 50, 110 + 10], abs=0.2)


def test_the_title_is_the_folders(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from tallyroll.storage.ext.exchange.npz import NpzFormat

    titles = []
    write = NpzFormat.write
    monkeypatch.setattr(
        NpzFormat, "write", lambda self, r, place: titles.append(r.title) or write(self, r, place)
    )
    with open_storage(source) as storage:
        storage.export(tmp_path / "pole", "npz", follow=NOW)
        storage.export(tmp_path / "alone", "npz")
    assert titles == ["pole", "alone"]


def test_rows_that_are_taken_back_meanwhile(source: Path, tmp_path: Path) -> None:
    """The version is written again without the rewound rows."""
    with MemmapStorage(source, mode="append") as writer, open_storage(source) as storage:
        acts = iter([lambda: rewind_to(writer.writer, 10, None)])

        def on(*_: int) -> None:
            if (act := next(acts, None)) is not None:
                act()

        options = Follow(every=0.0, on_version=lambda _: writer.close())
        report = storage.export(tmp_path / "out", "npz", follow=options, progress=on)
        assert (report.rows, report.versions) == (10, 1)
    assert rows_in(newest(tmp_path / "out", "npz"), "npz") == 10


# --- faults ---------------------------------------------------------------------------------------


def test_two_at_once(source: Path, tmp_path: Path) -> None:
    def again(_: int) -> None:
        with (
            open_storage(source) as other,
            pytest.raises(StorageLocked, match="adding versions to this export"),
        ):
            other.export(tmp_path / "out", "npz", follow=NOW)

    growing = Growing(source, 2, again)
    with open_storage(source) as storage:
        options = Follow(every=0.0, on_version=growing)
        assert storage.export(tmp_path / "out", "npz", follow=options).versions == 2


def test_two_processes_at_once(source: Path, tmp_path: Path) -> None:
    folder = tmp_path

    def held(told: Told) -> None:
        with MemmapStorage(source, mode="append"), open_storage(source) as storage:
            options = Follow(on_version=lambda _: setattr(told, "head", 1))
            storage.export(folder / "out", "npz", follow=options)

    told = Told()
    child = forked(lambda: held(told))
    wait_until(lambda: told.head == 1)
    with open_storage(source) as storage:
        with pytest.raises(StorageLocked, match="another process is adding versions"):
            storage.export(tmp_path / "out", "npz", follow=NOW)
        killed(child)
        assert storage.export(tmp_path / "out", "npz", follow=NOW).rows == 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_up(source: Path, tmp_path: Path, kind: str) -> None:
    """The previous version stays, and the same call continues once there is space."""
    place, limit = tmp_path / "out", ExitStack()

    def more(_: int) -> None:
        growing.writer.extend(rows(30, 3000))
        limit.enter_context(file_size_limit(4096))

    growing = Growing(source, 2, more)
    with open_storage(source) as storage:
        options = Follow(every=0.0, on_version=growing)
        with limit, pytest.raises(StorageFull):
            storage.export(place, kind, follow=options)
        assert rows_in(newest(place, kind), kind) == 20
        assert names_in(place) == {f"00000001{ENDS[kind]}", f"current{ENDS[kind]}"}
        growing.writer.close()
        assert storage.export(place, kind, follow=NOW).rows == 3030
    assert rows_in(newest(place, kind), kind) == 3030


def test_no_room_for_the_first(source: Path, tmp_path: Path) -> None:
    with open_storage(source) as storage, file_size_limit(300), pytest.raises(StorageFull):
        storage.export(tmp_path / "out", "npz", follow=NOW)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_an_interruption(source: Path, tmp_path: Path) -> None:
    """An interrupt in the middle of the second version leaves the first one and nothing else."""

    def stop(*_: int) -> None:
        if growing.reports:
            raise KeyboardInterrupt

    growing = Growing(source, 2)
    with open_storage(source) as storage, growing.writer:
        options = Follow(every=0.0, on_version=growing)
        with pytest.raises(KeyboardInterrupt):
            storage.export(tmp_path / "out", "npz", follow=options, progress=stop)
    assert names_in(tmp_path / "out") == {"00000001.npz", "current.npz"}
    assert rows_in(newest(tmp_path / "out", "npz"), "npz") == 20


def test_an_interruption_of_the_first(source: Path, tmp_path: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with open_storage(source) as storage, pytest.raises(KeyboardInterrupt):
        storage.export(tmp_path / "out", "npz", follow=NOW, progress=stop)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]
    (tmp_path / "empty").mkdir()
    with open_storage(source) as storage, pytest.raises(KeyboardInterrupt):
        storage.export(tmp_path / "empty", "npz", follow=NOW, progress=stop)
    assert [*(tmp_path / "empty").iterdir()] == []


@pytest.mark.parametrize("every", [-1, float("nan"), float("inf")])
def test_no_time(every: float) -> None:
    with pytest.raises(ValueError, match="every: expected seconds"):
        Follow(every=every)


def test_what_is_there_is_kept(source: Path, tmp_path: Path) -> None:
    """An export never replaces existing content.

    Cases: an unrelated folder, versions of another storage or format, a file in place of the link,
    and a plain file.
    """
    place = tmp_path / "out"
    place.mkdir()
    (place / "mine").write_text("mine")
    with open_storage(source) as storage:
        with pytest.raises(PathIsTaken, match="got other files"):
            storage.export(place, "npz", follow=NOW)
        assert names_in(place) == {"mine"}
        (place / "mine").unlink()
        storage.export(place, "npz", follow=NOW)
        with pytest.raises(PathIsTaken, match="expected versions of this storage as torchrl"):
            storage.export(place, "torchrl", follow=NOW)
        with MemmapStorage(tmp_path / "other") as other:
            other.extend(rows(0, 3))
        with (
            open_storage(tmp_path / "other") as reader,
            pytest.raises(PathIsTaken, match="expected versions of this storage as npz"),
        ):
            reader.export(place, "npz", follow=NOW)
        assert rows_in(newest(place, "npz"), "npz") == 20
        (place / "current.npz").unlink()
        (place / "current.npz").write_text("mine")
        with pytest.raises(PathIsTaken, match="expected a link to a version"):
            storage.export(place, "npz", follow=NOW)
        assert (place / "current.npz").read_text() == "mine"
        (tmp_path / "file").write_text("mine")
        with pytest.raises(Exception, match="file"):
            storage.export(tmp_path / "file", "npz", follow=NOW)
        assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("target", ["/etc", "../source", "nothing"])
def test_a_link_that_leads_elsewhere(source: Path, tmp_path: Path, target: str) -> None:
    """The export neither follows nor replaces the link."""
    place = tmp_path / "out"
    with open_storage(source) as storage:
        storage.export(place, "npz", follow=NOW)
        (place / "current.npz").unlink()
        (place / "current.npz").symlink_to(target)
        with pytest.raises(PathIsTaken, match="expected a link to a version"):
            storage.export(place, "npz", follow=NOW)
    assert os.readlink(place / "current.npz") == target


def test_what_cannot_be_followed(source: Path, tmp_path: Path) -> None:
    with open_storage(source) as storage:
        view = storage.trajectories.where("length > 3")
        with pytest.raises(ValueError, match="expected one storage"):
            view.export(tmp_path / "out", "npz", follow=NOW)
        with pytest.raises(NotWritable, match="is inside the storage"):
            storage.export(source / "out", "npz", follow=NOW)
        assert not (source / "out").exists()
    with open_storage([source]) as union, pytest.raises(ValueError, match="expected one storage"):
        union.export(tmp_path / "out", "npz", follow=NOW)
    with (
        MemmapStorage(source, mode="append") as writer,
        pytest.raises(ValueError, match="would never end"),
    ):
        writer.export(tmp_path / "out", "npz", follow=NOW)
    assert not (tmp_path / "out").exists()


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def grown(source: Path) -> Iterator[DiskStorage]:
    """Make a storage to which a thread adds rows before it interrupts this process.

    The second version exists by then, so the command reports the first one.
    """
    writer, second = MemmapStorage(source, mode="append"), source.with_name("out") / "00000002.npz"

    def write() -> None:
        end = time.monotonic() + 60
        while not second.exists() and time.monotonic() < end:
            writer.extend(rows(len(writer), 10))
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=write)
    thread.start()
    yield writer
    thread.join()
    writer.close()


def test_the_command_ends_by_an_interruption(
    grown: DiskStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(tmp_path / "source"), f"npz:{tmp_path / 'out'}", "--follow"]
    assert main([*words, "--every", "0.01", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    count = rows_in(newest(tmp_path / "out", "npz"), "npz")
    assert 0 < found["rows"] <= count
    assert (found["rows"] % 10, count % 10) == (0, 0)
    assert found["versions"] >= 1


def test_the_command_says_its_versions(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(source), f"npz:{tmp_path / 'out'}"]
    assert main([*words, "--follow"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{tmp_path / 'out' / 'current.npz'}: 20 rows of 3 trajectories")
    assert said[1] == "versions written: 1"
    for wrong in (["--every", "3"], ["--follow", "--where", "length > 3"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *wrong])
        assert ended.value.code == 2
