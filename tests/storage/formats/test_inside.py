"""Test access to the files inside a storage: plain files only, and only existing ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tallyroll.storage.files.safe_files import Inside

from open_files import descriptors


@pytest.fixture
def inside(tmp_path: Path) -> Inside:
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "in" / "file").write_bytes(b"mine")
    (tmp_path / "theirs").write_bytes(b"theirs")
    return Inside(root)


def assert_refused(act: Callable[[], object], code: int) -> None:
    before = descriptors()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its number says which one
        act()
    assert caught.value.errno == code
    assert descriptors() <= before, "a descriptor is left"


def test_a_hard_link_is_read_and_not_written_to(inside: Inside) -> None:
    place = inside.root / "in" / "link"
    os.link(inside.root.parent / "theirs", place)
    assert inside.read(place, 100) == b"theirs"
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT):
        assert_refused(lambda flags=flags: inside.open(place, flags), errno.EMLINK)  # type: ignore[misc]
    inside.write_atomically(place, b"new")
    assert place.read_bytes() == b"new"
    assert (inside.root.parent / "theirs").read_bytes() == b"theirs"


@pytest.mark.parametrize("kind", ["file", "link", "hard link", "link to nothing"])
def test_a_file_in_the_place_of_one_aside_goes(inside: Inside, kind: str) -> None:
    """A killed writer may have left the file there, or another program may have put it there."""
    place, theirs = inside.root / "in" / "file", inside.root.parent / "theirs"
    aside = place.with_name("file.tmp")
    if kind == "file":
        aside.write_bytes(b"a longer text than the one that comes")
    elif kind == "hard link":
        os.link(theirs, aside)
    else:
        aside.symlink_to(theirs if kind == "link" else theirs.with_name("nothing"))
    inside.write_atomically(place, b"new", durable=True)
    assert place.read_bytes() == b"new"
    assert sorted(os.listdir(place.parent)) == ["file"]
    assert theirs.read_bytes() == b"theirs"
    assert not theirs.with_name("nothing").exists()


def test_a_link_on_the_way_is_not_followed(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"theirs")
    (inside.root / "way").symlink_to(tmp_path / "outside")
    (inside.root / "file").symlink_to(tmp_path / "theirs")
    assert_refused(lambda: inside.open(inside.root / "way" / "file", os.O_RDONLY), errno.ENOTDIR)
    assert_refused(lambda: inside.make(inside.root / "way" / "new"), errno.ENOTDIR)
    assert_refused(lambda: inside.remove(inside.root / "way" / "file"), errno.ENOTDIR)
    assert_refused(lambda: inside.write_atomically(inside.root / "way" / "a", b""), errno.ENOTDIR)
    assert_refused(lambda: inside.make_directory(inside.root / "way" / "in"), errno.ENOTDIR)
    assert_refused(lambda: inside.sync_directory(inside.root / "way"), errno.ENOTDIR)
    assert_refused(lambda: inside.read(inside.root / "file", 100), errno.ELOOP)
    assert_refused(lambda: inside.read_start(inside.root / "file", 100), errno.ELOOP)
    assert sorted(os.listdir(tmp_path / "outside")) == ["file"]
    inside.remove(inside.root / "file")
    assert (tmp_path / "theirs").exists()


@pytest.mark.timeout(20)
def test_a_path_that_is_no_file_is_not_waited_for(inside: Inside) -> None:
    os.mkfifo(inside.root / "pipe")
    assert_refused(lambda: inside.open(inside.root / "pipe", os.O_RDONLY), errno.ENXIO)
    assert_refused(lambda: inside.open(inside.root / "in", os.O_RDONLY), errno.ENXIO)
    assert_refused(lambda: inside.open(inside.root / "in", os.O_RDWR), errno.EISDIR)


def test_no_more_is_read_than_a_file_may_have(inside: Inside) -> None:
    file = inside.root / "in" / "file"
    assert inside.read(file, 4) == b"mine"
    assert_refused(lambda: inside.read(file, 3), errno.EFBIG)
    os.truncate(file, 2**40)  # sparse
    assert_refused(lambda: inside.read_json(file), errno.EFBIG)
    assert inside.read_start(file, 6) == b"mine\0\0"


def test_a_file_aside_that_cannot_be_written_leaves_the_old_one(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = inside.root / "in" / "file"

    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            assert_refused(lambda: inside.write_atomically(file, b"new", durable=True), errno.EIO)
        assert file.read_bytes() == b"mine"
        assert os.listdir(file.parent) == ["file"]


def test_directories_are_made_below_the_root_alone(inside: Inside) -> None:
    inside.make_directory(inside.root / "a" / "b" / "c")
    inside.make_directory(inside.root / "a" / "b" / "c")
    assert (inside.root / "a" / "b" / "c").is_dir()
    assert_refused(lambda: inside.make_directory(inside.root / "in" / "file"), errno.ENOTDIR)
    inside.remove(inside.root / "a" / "nothing")
    with pytest.raises(ValueError, match="not in the subpath"):
        inside.open(inside.root.parent / "theirs", os.O_RDONLY)
