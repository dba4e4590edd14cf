"""Test HDF5 files that reach a size limit of the system: a Tallyroll error, and nothing is left.

HDF5's own errors do not name the file, and it aborts the process if it cannot close one.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from limited_hdf5 import tries

from tallyroll.storage import Schema
from tallyroll.storage.formats.hdf5.datasets import make_file
from tallyroll.storage.formats.hdf5.guarded_file import GuardedFile, new_hdf5

from storage_contract import rows


@pytest.mark.parametrize("what", ["pack", "d4rl", "minari"])
def test_a_file_that_may_not_grow(what: str, tmp_path: Path) -> None:
    if what == "minari":
        pytest.importorskip("minari")
    found = list(tries(tmp_path, what))
    assert len(found) > 5
    for each in found:
        assert each["error"].startswith("StorageFull: "), each
        assert str(tmp_path / "made" / "it") in each["error"]
        assert not each["signal"], each
        assert not each["there"], each


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_each_call_that_fails_while_a_storage_is_made(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls fail from that one on.

    The caller gets the error of the system, and h5py raises nothing.
    """
    pytest.importorskip("h5py")
    real, calls, first = getattr(os, call), 0, 10**9

    def counted(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(os, call, counted)
    path, schema = tmp_path / "made.h5", Schema.of(rows(0, 1))
    for first in (10**9, *range(100)):
        calls = 0
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            if first == 10**9:
                make_file(file, path, schema, 20)
                most = calls
            elif first < most:
                with pytest.raises(OSError, match="Input/output") as caught:
                    make_file(file, path, schema, 20)
                assert caught.value.errno == errno.EIO
        finally:
            os.close(file)
    assert most > 0


def test_bytes_that_could_not_be_written_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unwritten bytes read like those of a plain file until HDF5 closes it."""
    file = os.open(tmp_path / "it", os.O_RDWR | os.O_CREAT)
    guard, plain = GuardedFile(file), bytearray(b"0123456789")
    guard.write(b"0123456789")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    guard.check()
    monkeypatch.setattr(os, "pwrite", full)
    for at, content in ((4, b"abc"), (6, b"defg"), (12, b"xy"), (0, b"z")):
        guard.seek(at)
        assert guard.write(content) == len(content)
        plain[at : at + len(content)] = content if at <= len(plain) else b"\0\0" + content
        guard.seek(0)
        assert guard.read(100) == plain
        assert guard.seek(0, os.SEEK_END) == len(plain)
    guard.seek(5)
    assert guard.read(3) == plain[5:8]
    with pytest.raises(OSError, match="No space left"):
        guard.check()
    monkeypatch.undo()
    os.close(file)
    assert (tmp_path / "it").read_bytes() == b"0123456789"


def test_an_interrupt_within_a_write_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 then closes the file normally."""
    pytest.importorskip("h5py")
    real, first = os.pwrite, iter([True])

    def interrupted(*args: object) -> object:
        if next(first, False):
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    def write() -> None:
        with new_hdf5(tmp_path / "it.h5") as (file, _):
            monkeypatch.setattr(os, "pwrite", interrupted)
            file["x"] = [1, 2, 3]

    with pytest.raises(KeyboardInterrupt):
        write()


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    (tmp_path / "it.h5").write_bytes(b"precious")
    with pytest.raises(FileExistsError), new_hdf5(tmp_path / "it.h5"):
        pass
    assert (tmp_path / "it.h5").read_bytes() == b"precious"
