"""Test copies of a storage during a write: they are detected, and a moved original still opens.

``TALLYROLL_COPIES`` sets the number of copies of each kind made during a write, 6 by default.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tallyroll.collector.cli import main
from tallyroll.storage import CorruptStorage, StorageError, StorageFull, open_storage, verify
from tallyroll.storage.errors import CopyOfOpenStorage
from tallyroll.storage.files.commit_header import word_of
from tallyroll.storage.files.header_words import creation_time
from tallyroll.storage.storages import DiskStorage

from killed_storages_kit import (
    CASES,
    Case,
    Told,
    assert_whole,
    check,
    forked,
    in_a_process,
    killed,
    oracle,
    record_of,
    wait_until,
    write_for_ever,
)
from storage_contract import files_of
from storage_damage import damage

COPIES = int(os.environ.get("TALLYROLL_COPIES", "6"))
COPIES_A_WRITER = 10
BLOCK = 2**16
MARK, INODE, BORN, CLOSED_AT = 192, 200, 208, 216


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return small(CASES[request.param])


def small(case: Case) -> Case:
    return replace(case, capacity=3000) if case.capacity else case


def copy_in_random_order(source: Path, target: Path, pick: random.Random) -> None:
    """Copy file by file as `cp`, or block by block as `rsync`, in random order."""
    if source.is_file():
        copy_blocks(source, target, pick)
        return
    files = sorted(file for file in source.rglob("*") if file.is_file())
    pick.shuffle(files)
    for file in files:
        to = target / file.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        aside = to.with_name("." + to.name + ".xyz") if pick.random() < 0.5 else to
        try:
            pick.choice([shutil.copyfile, shutil.copy2])(file, aside)
        except FileNotFoundError:  # it was being renamed
            continue
        aside.rename(to)
        time.sleep(0.002)


def copy_blocks(source: Path, target: Path, pick: random.Random) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        starts = list(range(0, os.fstat(old.fileno()).st_size, BLOCK))
        pick.shuffle(starts)
        for start in starts:
            os.pwrite(new.fileno(), os.pread(old.fileno(), BLOCK, start), start)
            time.sleep(0.0002)


def is_torn(case: Case, path: Path) -> bool:
    """Return whether an accepted copy is torn."""
    try:
        with case.kind(path, mode="read", accept_copy=True) as storage:
            check(storage)
    except (AssertionError, StorageError):
        return True
    return False


def copies_under_a_writer(case: Case, folder: Path, count: int, seed: int) -> int:
    """Copy a storage that another process writes. Return the number of torn copies."""
    pick, told, torn, path = random.Random(seed), Told(), 0, folder / "rows"
    closed_at = 300
    with case.create(path) as storage:
        storage.extend(oracle(0, closed_at), record=record_of(closed_at))
    told.head = -1
    write = lambda: write_for_ever(  # noqa: E731
        case, path, told, seed, most=8, close=False, pause=0.004
    )
    writer = forked(write)
    wait_until(lambda: told.head > closed_at)
    for number in range(count):
        copy = folder / f"copy-{number}"
        copy_in_random_order(path, copy, pick)
        for mode in ("read", "append"):
            with pytest.raises(CopyOfOpenStorage, match=rf"only the first {closed_at}, which"):
                case.kind(copy, mode=mode)
        torn += is_torn(case, copy)
        shutil.rmtree(copy, ignore_errors=True)
        copy.unlink(missing_ok=True) if copy.is_file() else None
        with case.kind(path, mode="read") as reader:
            assert reader.head > closed_at
            assert_whole(reader.get(np.arange(9)))
    killed(writer)
    after_the_kill(case, path, told.head, pick)
    return torn


def after_the_kill(case: Case, path: Path, head: int, pick: random.Random) -> None:
    """Check that a killed original opens, even after a move, and that a copy of it is refused."""
    moved, copy = path.with_name("moved"), path.with_name("copy")
    with case.kind(path, mode="read") as storage:
        head = check(storage, acknowledged=head)
    path.rename(moved)
    copy_in_random_order(moved, copy, pick)
    with pytest.raises(CopyOfOpenStorage):
        open_storage(copy)
    with open_storage(moved, "append") as storage:
        assert check(storage) == head
    shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    copy_in_random_order(moved, copy, pick)
    for mode in ("read", "append"):
        with open_storage(copy, mode) as storage:
            assert check(storage) == head


def all_copies(folder: Path, copies: int) -> dict[str, int]:
    """Count the torn copies of each case."""
    found = dict.fromkeys(CASES, 0)
    for name, seed in itertools.product(CASES, range(0, copies, COPIES_A_WRITER)):
        place = folder / name / str(seed)
        place.mkdir(parents=True)
        count = min(COPIES_A_WRITER, copies - seed)
        found[name] += copies_under_a_writer(small(CASES[name]), place, count, seed)
        shutil.rmtree(place)
    return found


@pytest.mark.slow
@pytest.mark.timeout(60 + 8 * COPIES)
def test_every_copy_under_a_writer_is_refused(tmp_path: Path) -> None:
    torn = in_a_process(all_copies, tmp_path, COPIES, seconds=60 + 8 * COPIES)
    assert all(torn.values()), f"of some kinds no copy was torn, which shows nothing: {torn}"


# -- one at a time


def begun(case: Case, path: Path) -> Path:
    """Make a storage of 40 rows that was closed, then 20 more rows by a killed writer."""
    with case.create(path) as storage:
        storage.extend(oracle(0, 40), record=record_of(40))
    storage = case.kind(path, mode="append")
    storage.extend(oracle(40, 20), record=record_of(60))
    drop(storage)
    return path


def drop(storage: DiskStorage) -> None:
    """Leave the files as a killed writer does."""
    engine = storage.reader.detach_engine()
    assert engine is not None
    engine.abandon()
    assert engine._lock is not None
    engine._lock.release()


def copied(path: Path, to: Path, copy: Callable[..., object] | None = None) -> Path:
    copy = copy or (shutil.copytree if path.is_dir() else shutil.copy2)
    copy(path, to)
    return to


def header_of(case: Case, path: Path) -> Path:
    return case.kind._format_class(path).header_path


def test_a_copy_that_is_accepted_is_none_any_more(case: Case, tmp_path: Path) -> None:
    path = begun(case, tmp_path / "rows")
    copy = copied(path, tmp_path / "copy")
    before = files_of(copy)
    for mode in ("append", "read"):
        with pytest.raises(CopyOfOpenStorage, match=re.escape(str(copy))):
            open_storage(copy, mode)
    with open_storage(copy, accept_copy=True) as storage:
        assert check(storage) == 60
    assert files_of(copy) == before
    with pytest.raises(CopyOfOpenStorage):
        verify(copy)
    assert verify(copy, accept_copy=True).rows == 60
    with open_storage(copy, "append", accept_copy=True) as storage:
        storage.extend(oracle(60, 5), record=record_of(65))
    for place, head in ((copy, 65), (path, 60), (copied(copy, tmp_path / "again"), 65)):
        with open_storage(place) as storage:
            assert check(storage) == head


def test_an_accepted_copy_whose_writer_is_killed_is_an_original(case: Case, tmp_path: Path) -> None:
    copy = copied(begun(case, tmp_path / "rows"), tmp_path / "copy")
    storage = case.kind(copy, mode="append", accept_copy=True)
    storage.extend(oracle(60, 5), record=record_of(65))
    drop(storage)
    with open_storage(copy) as storage:
        assert check(storage) == 65
    with pytest.raises(CopyOfOpenStorage, match="only the first 40"):
        open_storage(copied(copy, tmp_path / "again"))


def test_links_and_other_names_are_the_original(case: Case, tmp_path: Path) -> None:
    path = begun(case, tmp_path / "rows")
    link = tmp_path / "link"
    link.symlink_to(path)
    hard = tmp_path / "hard"
    if path.is_dir():
        shutil.copytree(path, hard, copy_function=os.link)
    else:
        os.link(path, hard)
    for place in (link, hard):
        with open_storage(place) as storage:
            assert check(storage) == 60


def test_a_file_written_anew_is_the_original(tmp_path: Path) -> None:
    case = replace(CASES["hdf5"], capacity=100)
    path = begun(case, tmp_path / "rows")
    storage = case.kind(path, mode="append", capacity=200)
    storage.extend(oracle(60, 5), record=record_of(65))
    storage.reserve(400)
    storage.extend(oracle(65, 5), record=record_of(70))
    drop(storage)
    with open_storage(path, "append") as storage:
        assert check(storage) == 70
        storage.finalize()
    with open_storage(copied(path, tmp_path / "copy")) as storage:
        assert check(storage) == 70
    path = begun(case, tmp_path / "other")
    copy = copied(path, tmp_path / "second")
    before = files_of(copy)
    with pytest.raises(CopyOfOpenStorage):
        open_storage(copy, "append", capacity=500)
    assert files_of(copy) == before


def test_a_writer_that_cannot_open_leaves_no_mark(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with case.create(path) as storage:
        storage.extend(oracle(0, 40), record=record_of(40))
    header = header_of(case, path)
    before = header.read_bytes()[:4096]
    if not case.ring:  # a ring never uses more than its slots
        with pytest.raises(StorageFull):
            open_storage(path, "append", capacity=2**40)
    assert header.read_bytes()[:4096] == before


def test_the_same_inode_of_another_age_is_a_copy(case: Case, tmp_path: Path) -> None:
    path = begun(case, tmp_path / "rows")
    header = header_of(case, path)
    with open(header, "rb") as file:
        if not (born := creation_time(file.fileno())):
            return  # this file system does not record birth times
    damage(header, BORN, word_of(born - 1).to_bytes(8, "little"))
    with pytest.raises(CopyOfOpenStorage):
        open_storage(path)
    damage(header, BORN, bytes(8))  # the file system had none before
    with open_storage(path) as storage:
        assert check(storage) == 60


def test_every_flipped_bit_of_the_mark_is_told(case: Case, tmp_path: Path) -> None:
    path = begun(case, tmp_path / "rows")
    header = header_of(case, path)
    content = header.read_bytes()[:4096]
    for at in (MARK, INODE, BORN, CLOSED_AT):
        for bit in range(0, 64, 7):
            byte = at + bit // 8
            damage(header, byte, bytes([content[byte] ^ 1 << bit % 8]))
            with pytest.raises((CorruptStorage, CopyOfOpenStorage)):
                open_storage(path).close()
            damage(header, byte, content[byte : byte + 1])
    with open_storage(path) as storage:
        assert check(storage) == 60


def test_the_commands_take_a_copy_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = str(copied(begun(CASES["memmap"], tmp_path / "rows"), tmp_path / "copy"))
    for command, refused in (("inspect", 1), ("verify", 2)):
        assert main([command, copy]) == refused
        assert "accept_copy=True (--accept-copy" in capsys.readouterr().err
        assert main([command, copy, "--json", "--accept-copy"]) in (0, 1)
        assert json.loads(capsys.readouterr().out)["rows"] == 60
    for how in ("--resume", "--append"):
        assert main(["collect", "CartPole-v1", "--frames", "9", "--out", copy, how]) == 1
        assert "accept_copy=True (--accept-copy" in capsys.readouterr().err
        accepted = ["collect", "CartPole-v1", "--frames", "9", "--out", copy, how, "--accept-copy"]
        assert main(accepted) == 1  # a collector did not write it, accepted or not
        assert "accept_copy=True" not in capsys.readouterr().err
        shutil.rmtree(copy)
        copied(tmp_path / "rows", Path(copy))
    with pytest.raises(SystemExit):
        main(["collect", "CartPole-v1", "--frames", "9", "--out", copy, "--accept-copy"])
    assert "--accept-copy needs --resume or --append" in capsys.readouterr().err


def test_when_a_file_was_made_is_what_the_system_says(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    said = subprocess.run(["stat", "-c", "%W", path], capture_output=True, text=True, check=True)
    with path.open() as file:
        assert creation_time(file.fileno()) == int(said.stdout)
