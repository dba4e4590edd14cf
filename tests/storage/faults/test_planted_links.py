"""Test links and pipes in place of a storage's files: nothing outside of it is touched.

Each replaces each file and directory, including files that will be created later, and the storage
is then used in each way. A random part is tried, `TALLYROLL_LINKS` times as much of it if it is
set.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tallyroll.collector.cli import main
from tallyroll.collector.errors import CollectorError
from tallyroll.storage import H5Storage, open_storage, verify
from tallyroll.storage.errors import (
    CorruptStorage,
    DirectoryNotEmpty,
    PathIsFile,
    StorageError,
    StorageMissing,
)
from tallyroll.storage.files.commit_header import HEADER_NBYTES
from tallyroll.storage.formats.hdf5.user_block import USER_BLOCK_NBYTES

from hostile_kit import KINDS, collect

MORE = int(os.environ.get("TALLYROLL_LINKS", "1"))
TRIALS = 6
ROWS = 20

# Files that are created while a storage is used.
LATER = {
    "rows": "manifest.json.tmp meta.json.tmp next/meta.json.tmp episodes.npy.tmp".split(),  # noqa: SIM905
    "rows.h5": [".tmp", ".episodes.npy.tmp"],
    "rows.zarr": [
        "tallyroll/manifest.json.tmp",
        "tallyroll/episodes.npy.tmp",
        "tallyroll/zarr.json.tmp",
        "zarr.json.tmp",
        "next/zarr.json.tmp",
        "next/reward/zarr.json.tmp",
        "action/c.1",
        "next/reward/c.1.0",
        "observation/c.1.0",
    ],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make storages that a collector filled, and others that were killed at their creation."""
    place = tmp_path_factory.mktemp("bases")
    for name, kind in KINDS.items():
        (place / "whole" / name).mkdir(parents=True)
        (place / "begun" / name).mkdir(parents=True)
        collect(place / "whole" / name / name, ROWS)
        path = place / "begun" / name / name
        with open_storage(place / "whole" / name / name) as whole:
            schema = whole.schema
        with kind(path, capacity=ROWS) as begun:
            begun.initialise(schema)
        if name == "rows.h5":
            with open(path, "r+b") as file:
                file.seek(HEADER_NBYTES)
                file.write(bytes(USER_BLOCK_NBYTES - HEADER_NBYTES))
        else:
            kind._format_class(path).manifest_path.unlink()
        assert not kind._format_class(path).exists()
    return place


# --- planted objects ------------------------------------------------------------------------------


def symbolic(place: Path, outside: Path) -> None:
    """Plant a link to the original."""
    victim = outside / "victim"
    if os.path.lexists(place):
        place.rename(victim)
    else:
        victim.write_bytes(b"precious " * 100)
    place.symlink_to(victim)


def hard(place: Path, outside: Path) -> None:
    victim = outside / "victim"
    if place.is_dir():
        symbolic(place, outside)
        return
    if os.path.lexists(place):
        place.rename(victim)
    else:
        victim.write_bytes(b"precious " * 100)
    place.hardlink_to(victim)


def other(place: Path, outside: Path) -> None:
    """Plant a link to a file of another size that does not belong to a storage."""
    victim = outside / "victim"
    victim.write_bytes(b"precious " * 100_000)
    clear(place)
    place.symlink_to(victim)


def to_directory(place: Path, outside: Path) -> None:
    victim = outside / "victim"
    victim.mkdir()
    (victim / "c.0").write_bytes(b"precious")
    (victim / "meta.json").write_bytes(b"{}")
    clear(place)
    place.symlink_to(victim)


def dangling(place: Path, outside: Path) -> None:
    clear(place)
    place.symlink_to(outside / "new")


def pipe(place: Path, outside: Path) -> None:
    clear(place)
    os.mkfifo(place)


def to_pipe(place: Path, outside: Path) -> None:
    clear(place)
    os.mkfifo(outside / "victim")
    place.symlink_to(outside / "victim")


def to_device(place: Path, outside: Path) -> None:
    clear(place)
    place.symlink_to("/dev/zero")


def directory(place: Path, outside: Path) -> None:
    clear(place)
    place.mkdir()


PLANTS = (symbolic, hard, other, to_directory, dangling, pipe, to_pipe, to_device, directory)


def clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif os.path.lexists(place):
        place.unlink()


def places(path: Path) -> Iterator[Path]:
    """Return files and directories of a storage, including those that may be created."""
    beside = [p for p in path.parent.iterdir() if p != path and p.name.startswith(path.name)]
    inside = sorted(path.rglob("*")) if path.is_dir() else []
    yield from sorted(beside)
    yield from inside
    for name in LATER[path.name]:
        yield path / name if path.is_dir() else path.with_name(path.name + name)


def looks(outside: Path) -> dict[str, Any]:
    """Return all content below a folder: names, kinds and bytes."""
    found: dict[str, Any] = {}
    for each in sorted(outside.rglob("*")):
        kind = stat.S_IFMT(each.lstat().st_mode)
        found[str(each)] = kind, each.read_bytes() if stat.S_ISREG(kind) else None
    return found


# --- ways to open ---------------------------------------------------------------------------------


def append(path: Path) -> None:
    with open_storage(path, "append", capacity=3 * ROWS) as storage:
        storage.extend(storage.get(np.arange(5)), ids="renumber")
        storage.flush()


def grow(path: Path) -> None:
    with open_storage(path, "append") as storage:
        storage.reserve(70_000)


def resume(path: Path) -> None:
    collect(path, 2 * ROWS, resume=True)


def finalize(path: Path) -> None:
    with open_storage(path, "append") as storage:
        storage.finalize()


def read(path: Path) -> None:
    with open_storage(path) as storage:
        storage.get(np.arange(len(storage)))
        assert len(storage.trajectories)


def look(path: Path) -> None:
    verify(path)


def inspect(path: Path) -> None:
    main(["inspect", str(path)])


def create(path: Path) -> None:
    schema_rows = {("x",): np.zeros(3), ("next", "reward"): np.zeros((3, 1))}
    with KINDS[path.name](path, capacity=ROWS) as storage:
        storage.extend(schema_rows)


WAYS = (append, grow, resume, finalize, read, look, inspect, create)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:unclosed storage")
def test_nothing_outside_is_touched(
    name: str,
    way: Callable[[Path], None],
    bases: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All errors are Tallyroll's, if there are any."""
    base = bases / ("begun" if way is create else "whole") / name
    draw = random.Random(f"{name} {way.__name__}")
    trials = [(place, plant) for place in places(base / name) for plant in PLANTS]
    draw.shuffle(trials)
    for place, plant in trials[: TRIALS * MORE]:
        work, outside = tmp_path / "work", tmp_path / "outside"
        shutil.copytree(base, work)
        outside.mkdir()
        plant(work / place.relative_to(base), outside)
        before = looks(outside)
        try:
            way(work / name)
        except (StorageError, CollectorError):
            pass
        except Exception as error:
            error.add_note(f"{plant.__name__} at {place.relative_to(base)}")
            raise
        assert looks(outside) == before, (plant.__name__, place.relative_to(base))
        assert "Traceback" not in capsys.readouterr().err
        shutil.rmtree(work)
        shutil.rmtree(outside)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("plant", [symbolic, hard, dangling])
def test_files_that_are_written_to_are_no_links(
    name: str, plant: Callable[[Path, Path], None], bases: Path, tmp_path: Path
) -> None:
    """The files are the lock, the header, row files, and temporary files, in turn."""
    written = {
        "rows": ["tallyroll.lock", "tallyroll.header", "action.memmap", "manifest.json.tmp"],
        "rows.h5": [".lock", ".tmp", ".episodes.npy.tmp"],
        "rows.zarr": ["tallyroll/lock", "tallyroll/c.0", "action/c.0", "zarr.json.tmp"],
    }[name]
    for file in written:
        work, outside = tmp_path / file.replace("/", "-"), tmp_path / "outside"
        shutil.copytree(bases / "whole" / name, work)
        outside.mkdir()
        path = work / name
        plant(path / file if path.is_dir() else path.with_name(name + file), outside)
        before = looks(outside)
        if file.endswith(".tmp"):
            append(path)
            grow(path)
        else:
            with pytest.raises(CorruptStorage, match=r"link|another kind of file"):
                append(path)
        assert looks(outside) == before
        shutil.rmtree(outside)


def test_a_chunk_that_is_to_be_made_is_no_link(bases: Path, tmp_path: Path) -> None:
    """The chunk would grow and be written to, whatever file a hard link names."""
    work, victim = tmp_path / "work", tmp_path / "victim"
    shutil.copytree(bases / "whole" / "rows.zarr", work)
    path = work / "rows.zarr"
    victim.write_bytes(b"precious")
    with open_storage(path, "append") as storage:
        (path / "observation" / "c.1.0").hardlink_to(victim)
        with pytest.raises(CorruptStorage, match="hard link"):
            storage.reserve(70_000)
        assert victim.read_bytes() == b"precious"
        storage.reserve(70_000)  # the unusable chunk is gone
    assert victim.read_bytes() == b"precious"


# --- planted during the call ----------------------------------------------------------------------


def test_a_link_that_comes_while_hdf5_makes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, victim, make = tmp_path / "rows.h5", tmp_path / "victim", h5py.File
    victim.write_bytes(b"precious")

    def planting(*args: Any, **options: Any) -> Any:
        if "userblock_size" in options:
            aside = tmp_path / "rows.h5.tmp"
            aside.unlink()
            aside.symlink_to(victim)
        return make(*args, **options)

    monkeypatch.setattr(h5py, "File", planting)
    try:
        with H5Storage(path, capacity=5) as storage:
            storage.extend({("x",): np.arange(5)})
    except StorageError:
        pass
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["rows", "rows.zarr"])
def test_a_link_that_comes_while_an_unfinished_creation_is_removed(
    name: str, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bases / "begun" / name, tmp_path / "work")
    path, outside, find = tmp_path / "work" / name, tmp_path / "outside", Path.rglob
    planted = False

    def planting(self: Path, pattern: str) -> list[Path]:
        nonlocal planted
        found = list(find(self, pattern))
        if sys._getframe(1).f_code.co_name == "discard" and not planted:
            planted = True  # all was checked, and nothing is removed yet
            (path / "next").rename(outside)
            (path / "next").symlink_to(outside)
        return found

    monkeypatch.setattr(Path, "rglob", planting)
    with pytest.raises(StorageError):
        create(path)
    monkeypatch.undo()
    assert planted
    left = {str(each.relative_to(outside)) for each in outside.rglob("*")}
    base = bases / "begun" / name / name / "next"
    assert left == {str(each.relative_to(base)) for each in base.rglob("*")}


# --- the user's own links -------------------------------------------------------------------------


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_the_path_itself_may_be_a_link(name: str, above: bool, bases: Path, tmp_path: Path) -> None:
    """A directory above it may be a link, too."""
    shutil.copytree(bases / "whole" / name, tmp_path / "real")
    if above:
        (tmp_path / "link").symlink_to("real")
        path = tmp_path / "link" / name
    else:
        (tmp_path / "links").mkdir()
        path = tmp_path / "links" / name
        path.symlink_to(tmp_path / "real" / name)
    resume(path)
    append(path)
    grow(path)
    finalize(path)
    read(path)
    assert verify(path).sound
    assert main(["inspect", str(path)]) == 0
    assert main(["verify", str(path)]) == 0
    with open_storage(tmp_path / "real" / name) as storage:
        assert len(storage) == 2 * ROWS + 5
    assert verify(path).sound
    assert path.is_symlink() != above
    assert not above or (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", KINDS)
def test_a_link_to_an_empty_place_may_be_created_at(name: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    create(tmp_path / "link" / name)
    assert verify(tmp_path / "real" / name).sound
    if name != "rows.h5":
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / name).symlink_to(tmp_path / "empty")
        create(tmp_path / "other" / name)
        assert verify(tmp_path / "empty").sound


@pytest.mark.parametrize("name", KINDS)
def test_a_path_that_is_a_link_to_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.symlink_to(tmp_path / "real")
    for mode in ("read", "append"):
        with pytest.raises(StorageMissing, match="does not exist"):
            open_storage(path, mode)  # type: ignore[arg-type]
        with pytest.raises(StorageMissing, match="does not exist"):
            KINDS[name](path, mode=mode)  # type: ignore[arg-type]
    if name == "rows.h5":  # as any program that writes to a link
        create(path)
        assert verify(tmp_path / "real").sound
    else:
        with pytest.raises(PathIsFile, match="is a broken link"):
            create(path)
    assert path.is_symlink()


@pytest.mark.parametrize("name", KINDS)
def test_a_path_that_is_a_link_to_itself(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.symlink_to(path)
    for use in (append, read, look):
        with pytest.raises(StorageError):
            use(path)
    assert main(["inspect", str(path)]) == 1
    assert path.is_symlink()


# --- leftovers removed ----------------------------------------------------------------------------


def test_the_sweep_leaves_what_is_not_ours(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "whole" / "rows.zarr", tmp_path / "work")
    path, victim = tmp_path / "work" / "rows.zarr", tmp_path / "victim"
    victim.write_bytes(b"precious")
    theirs = ["notes.tmp", "next/c.partial", "next/x.__lock", "zarr.0f.partial", "next/my.json.tmp"]
    for name in theirs:
        (path / name).write_bytes(b"theirs")
    (path / "next" / "elsewhere").symlink_to(tmp_path)
    (path / "zarr.json.tmp").symlink_to(victim)
    (path / "next" / "zarr.json.tmp").mkdir()
    (path / "next" / "reward" / "c.0.0.__lock").hardlink_to(victim)
    with pytest.raises(CorruptStorage, match="was replaced by a link or another"):
        append(path)  # a directory, in place of a new file
    (path / "next" / "zarr.json.tmp").rmdir()
    append(path)
    assert victim.read_bytes() == b"precious"
    assert all((path / name).read_bytes() == b"theirs" for name in theirs)
    assert (path / "next" / "elsewhere").is_symlink()
    assert not (path / "next" / "reward" / "c.0.0.__lock").exists()


def test_a_directory_of_others_is_no_place_for_a_storage(tmp_path: Path) -> None:
    """A directory that contains only a link counts as another's, too."""
    for name in ("rows", "rows.zarr"):
        path = tmp_path / name
        path.mkdir()
        (path / "next").symlink_to(tmp_path)
        with pytest.raises(DirectoryNotEmpty, match="next"):
            create(path)
