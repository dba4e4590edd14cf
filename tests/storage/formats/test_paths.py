"""Test paths as users give them, and messages: ``~``, links, locks, full disks."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.errors import (
    CorruptStorage,
    PathIsFile,
    StorageError,
    StorageFull,
    StorageLocked,
    StorageMissing,
)
from tallyroll.storage.files.paths import failed, make_directory, require_creatable
from tallyroll.storage.storages import storage_class

from formats_kit import KINDS
from oracles import make_oracle_vec
from storage_contract import assert_rows, rows

every_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home directory, and another one as the current directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "home"


# --- the home directory ---------------------------------------------------------------------------


@every_kind
def test_a_tilde_is_the_home_directory(name: str, home: Path) -> None:
    with KINDS[name](f"~/{name}", capacity=9) as storage:
        storage.extend(rows(0, 5))
        assert storage.path == home / name
    assert storage_class(f"~/{name}") is KINDS[name]
    with open_storage(f"~/{name}") as storage:
        assert_rows(storage, 5)
    with open_storage(Path(f"~/{name}"), "append", capacity=9) as storage:
        storage.extend(rows(5, 2))
    assert verify(f"~/{name}").sound
    assert main(["verify", f"~/{name}", "--quiet"]) == 0
    assert not os.listdir()


def test_a_tilde_of_what_no_suffix_tells(home: Path) -> None:
    with ZarrStorage("~/plain") as storage:
        storage.extend(rows(0, 5))
    assert storage_class("~/plain") is ZarrStorage


def test_a_tilde_of_a_run_and_a_checkpoint(home: Path) -> None:
    with SyncCollector(
        make_oracle_vec(2, [(3,), (4,)]), frames_per_batch=4, total_frames=8, storage="~/runs/a"
    ) as collector:
        list(collector)
    with MemmapStorage("~/runs/a", mode="append") as storage:
        storage.dumps("~/copy")
    assert main(["collect", "CartPole-v1", "--frames", "9", "--out=~/cli", "--quiet"]) == 0
    with MemmapStorage("~/loaded") as storage:
        storage.loads("~/copy")
        assert len(storage) == 8
    assert sorted(os.listdir(home)) == ["cli", "copy", "loaded", "runs"]
    assert os.listdir() == []


def test_a_tilde_of_a_checkpoint_that_torchrl_makes(home: Path) -> None:
    with MemmapStorage("~/rows") as storage, MemmapStorage("~/loaded") as other:
        storage.extend(rows(0, 5))
        for each in (storage, other):
            each.checkpointer = TensorStorageCheckpointer()
        storage.dumps("~/theirs")
        other.loads("~/theirs")
        assert len(other) == 5
    assert sorted(os.listdir(home)) == ["loaded", "rows", "theirs"]
    assert os.listdir() == []


def test_a_user_that_is_none_is_a_name(home: Path) -> None:
    with MemmapStorage("~no-such-user") as storage:
        storage.extend(rows(0, 5))
    assert os.listdir() == ["~no-such-user"]


# --- links ----------------------------------------------------------------------------------------


def linked(path: Path, blobs: Path, *, hard: bool = False) -> None:
    """Replace the files at ``path`` by links to files in ``blobs``."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    blobs.mkdir()
    for number, file in enumerate(files):
        blob = file.rename(blobs / str(number))
        file.hardlink_to(blob) if hard else file.symlink_to(blob)


@pytest.fixture
def closed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    name: str = request.param
    with KINDS[name](tmp_path / name, capacity=9) as storage:
        storage.extend(rows(0, 5))
    return tmp_path / name


directories = pytest.mark.parametrize("closed", ["rows", "rows.zarr"], indirect=True)


@directories
def test_a_cache_of_links_says_how_to_copy_it(closed: Path, tmp_path: Path) -> None:
    linked(closed, tmp_path / "blobs")
    for mode in ("read", "append"):
        with pytest.raises(CorruptStorage, match=r"is a link .* `cp -rL`"):
            open_storage(closed, mode)  # type: ignore[arg-type]
    (found,) = verify(closed).findings
    assert "cp -rL" in found.message
    shutil.copytree(closed, tmp_path / "copy")  # this follows links
    with open_storage(tmp_path / "copy", "append") as storage:
        assert_rows(storage, 5)


@directories
def test_links_whose_content_is_missing(closed: Path, tmp_path: Path) -> None:
    linked(closed, tmp_path / "blobs")
    shutil.rmtree(tmp_path / "blobs")
    with pytest.raises(CorruptStorage, match=r"manifest.json is a link \("):
        open_storage(closed)


@directories
def test_hard_links_are_read_and_not_written(closed: Path, tmp_path: Path) -> None:
    linked(closed, tmp_path / "blobs", hard=True)
    with open_storage(closed) as storage:
        assert_rows(storage, 5)
    with pytest.raises(CorruptStorage, match=r"is a file that has a second name .*cp -rL"):
        open_storage(closed, "append")


@pytest.mark.parametrize("closed", KINDS, indirect=True)
def test_a_link_to_a_storage_is_one(closed: Path, tmp_path: Path) -> None:
    """The path that a user names may be a link."""
    link = tmp_path / f"link{closed.suffix}"
    link.symlink_to(closed)
    with open_storage(link, "append") as storage:
        assert_rows(storage, 5)
    moved = closed.rename(tmp_path / "moved")
    with pytest.raises(StorageMissing, match=r"is a link to .*, which does not exist\. Give"):
        open_storage(link)
    with pytest.raises(StorageMissing):
        KINDS[closed.name](link, mode="read")
    moved.rename(closed)


def test_a_place_below_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(PathIsFile, match=r"link is a broken link\. Give another path"):
        require_creatable(tmp_path / "link" / "rows")


# --- locks ----------------------------------------------------------------------------------------


@every_kind
def test_a_lock_of_this_process_is_said_so(name: str, tmp_path: Path) -> None:
    with KINDS[name](tmp_path / name, capacity=9) as storage:
        storage.extend(rows(0, 5))
        (tmp_path / "other").symlink_to(tmp_path)
        for path in (tmp_path / name, tmp_path / "other" / name):
            here = rf"by this process itself: .* at {re.escape(__file__)}:\d+ is not closed"
            with pytest.raises(StorageLocked, match=here):
                open_storage(path, "append")
    with open_storage(tmp_path / name, "append") as storage:
        assert_rows(storage, 5)


# --- limits reached -------------------------------------------------------------------------------


def no_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system report that every file system has used its 40 inodes."""
    found = os.statvfs("/")
    used_up = os.statvfs_result([*found[:5], 40, 0, 0, *found[8:]])
    monkeypatch.setattr(os, "statvfs", lambda path: used_up)


@every_kind
def test_inodes_that_are_used_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KINDS[name](tmp_path / name, capacity=9) as storage:
        storage.extend(rows(0, 5))
    real = os.open

    def no_more(path: str, flags: int, *more: object, **options: object) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_more)
    no_inodes(monkeypatch)
    with (
        pytest.raises(StorageFull, match=r"inodes|they need \d+ files, and 0 are free"),
        KINDS[name](tmp_path / f"new-{name}", capacity=9) as storage,
    ):
        storage.extend(rows(0, 5))
    with open_storage(tmp_path / name) as storage:
        assert_rows(storage, 5)


def test_a_lock_file_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage may have been copied, without the lock file, to a disk that is now full."""
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows(0, 5))
    (tmp_path / "rows" / "tallyroll.lock").unlink()
    real = os.open

    def no_more(path: str, flags: int, *more: object, **options: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_more)
    with pytest.raises(StorageFull, match="Free space"):
        open_storage(tmp_path / "rows", "append")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            errno.ENOSPC,
            r"all 40 inodes of the file system are in use, while \d+ bytes are free \(`df -i`",
        ),
        (errno.EDQUOT, r"needs 7 more bytes, and \d+ are free"),
        (errno.EFBIG, r"needs 7 more bytes, which exceeds the maximum file size .*ulimit -f"),
    ],
)
def test_which_limit_it_was(
    code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_inodes(monkeypatch)
    found = failed(tmp_path / "rows", OSError(code, os.strerror(code)), 7)
    with pytest.raises(StorageFull, match=said):
        raise found


def test_a_file_system_that_counts_no_inodes(tmp_path: Path) -> None:
    found = failed(tmp_path, OSError(errno.ENOSPC, "full"), 7)
    assert "needs 7 more bytes, and" in str(found)  # inodes are free here, or not counted


def test_no_room_for_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", no_room)
    with pytest.raises(StorageError, match="Free space, or continue in another location"):
        make_directory(tmp_path / "rows")
