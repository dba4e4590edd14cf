"""Test `verify` on storages that were not closed: harmless faults are notes that a writer heals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import H5Storage, Report, open_storage, verify
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.header_words import word_of
from tallyroll.storage.files.record_slots import STARTS
from tallyroll.storage.formats.hdf5.datasets import FilePlaces
from tallyroll.storage.formats.hdf5.user_block import newest_manifest
from tallyroll.storage.storages import DiskStorage

from formats_kit import KINDS

ROWS = 60
OPEN_AT = 192
PAGE = 4096
HEADERS = {"rows": "tallyroll.header", "rows.zarr": "tallyroll/c.0", "rows.h5": ""}
TABLES = {"rows": "episodes.npy", "rows.zarr": "tallyroll/episodes.npy"}


def header_of(path: Path) -> Path:
    return path / HEADERS[path.name] if HEADERS[path.name] else path


def table_of(path: Path) -> Path:
    return path / TABLES[path.name] if path.name in TABLES else Path(f"{path}.episodes.npy")


def lock_of(path: Path) -> Path:
    return {
        "rows": path / "tallyroll.lock",
        "rows.zarr": path / "tallyroll" / "lock",
        "rows.h5": Path(f"{path}.lock"),
    }[path.name]


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a storage that a collector filled and closed, with durability="power"."""
    path: Path = tmp_path_factory.mktemp("source") / request.param
    storage = KINDS[request.param](path, capacity=2 * ROWS, durability="power")
    with (
        storage,
        SyncCollector(
            "CartPole-v1",
            num_envs=2,
            frames_per_batch=20,
            total_frames=ROWS,
            seed=0,
            storage=storage,
        ) as collector,
    ):
        for _ in collector:
            pass
    return path


@pytest.fixture
def path(source: Path, tmp_path: Path) -> Path:
    """Copy the source, and close the copy."""
    target = tmp_path / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
        shutil.copy2(table_of(source), table_of(target))
    with open_storage(target, "append"):  # opened once, to make it an original
        pass
    assert verify(target).sound
    return target


def leave_open(path: Path) -> None:
    """Leave the storage as after a kill or a power cut."""
    damage(header_of(path), OPEN_AT, struct.pack("<Q", word_of(1)))


def damage(file: Path, at: int, content: bytes) -> None:
    with open(file, "r+b") as target:
        target.seek(at)
        target.write(content)


def rows_of(path: Path) -> dict[Any, np.ndarray]:
    with open_storage(path) as storage:
        return {key: storage.column(key).copy() for key in storage.schema.keys}


def told(*words: object) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return main([str(word) for word in words]), out.getvalue()


def said(report: Report) -> list[str]:
    return [str(each) for each in (*report.findings, *report.notes)]


# --- results of power cuts ------------------------------------------------------------------------


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


Harm = Callable[[Path], None]


def torn_record(path: Path, page: int = 0, *, ahead: int = 1) -> None:
    """Write the next record, of which only one page reached the disk."""
    header = header_of(path)
    content = header.read_bytes()
    slots = STARTS
    sequence = 1 + max(struct.unpack_from("<q", content, at)[0] for at in slots)
    at = slots[sequence % 2]
    payload = b"c" * 2 * PAGE
    head = ROWS + ahead
    crc = zlib.crc32(payload, zlib.crc32(struct.pack("<qqq", sequence, head, len(payload))))
    new = struct.pack("<qqqI", sequence, head, len(payload), crc) + payload
    damage(header, at + page * PAGE, new[page * PAGE : (page + 1) * PAGE])


def provenance(path: Path, content: bytes) -> None:
    with open(path, "rb") as file:
        manifest = json.loads(newest_manifest(file.fileno()) or b"")
    damage(path, FilePlaces.from_json(manifest["places"]).provenance.at + 100, content)


def rows_attribute(path: Path, rows: int) -> None:
    with open(path, "rb") as file:
        manifest = json.loads(newest_manifest(file.fileno()) or b"")
    damage(path, FilePlaces.from_json(manifest["places"]).rows.at, struct.pack("<q", rows))


def shown(path: Path, file: str, change: Callable[[Any], object]) -> None:
    document = json.loads((path / file).read_text())
    change(document)
    (path / file).write_text(json.dumps(document))


METADATA: dict[str, list[str]] = {
    "rows": ["meta.json", "next/meta.json", "collector/meta.json"],
    "rows.zarr": [
        *("zarr.json", "next/zarr.json", "next/reward/zarr.json", "tallyroll/zarr.json"),
        "collector/lane/zarr.json",
    ],
}
HOWS: tuple[Harm, ...] = (empty, cut, zeros, os.unlink)
CUTS: dict[str, tuple[str, Harm]] = {
    **{
        f"{kind} {file} {how.__name__}": (
            kind,
            lambda path, file=file, how=how: how(path / file),
        )
        for kind, files in METADATA.items()
        for turn, file in enumerate(files)
        for how in HOWS[turn % 2 :: 2]
    },
    **{
        f"{kind} table {how.__name__}": (kind, lambda path, how=how: how(table_of(path)))
        for kind in KINDS
        for how in (empty, cut, zeros)
    },
    **{f"{kind} record": (kind, torn_record) for kind in KINDS},
    **{
        f"{kind} record without rows": (kind, lambda path: torn_record(path, ahead=0))
        for kind in KINDS
    },
    "rows.h5 provenance": ("rows.h5", lambda path: provenance(path, bytes(PAGE))),
    "rows.h5 provenance, no text": ("rows.h5", lambda path: provenance(path, b"\xff" * 90)),
    "rows.h5 rows": ("rows.h5", lambda path: rows_attribute(path, ROWS + 1)),
    "rows.h5 rows, no number": ("rows.h5", lambda path: rows_attribute(path, -(2**62))),
    "rows.zarr rows ahead": (
        "rows.zarr",
        lambda path: shown(path, "next/reward/zarr.json", lambda d: d.update(shape=[99, 1])),
    ),
}


@pytest.mark.parametrize(
    ("source", "name"), [(CUTS[name][0], name) for name in CUTS], indirect=["source"]
)
def test_a_note_that_a_writer_heals(path: Path, name: str) -> None:
    harm = CUTS[name][1]
    before = rows_of(path)
    harm(path)
    # In a closed storage, it is a finding, as no writer leaves that.
    closed = verify(path)
    assert (closed.sound, closed.notes, closed.healing) == (False, (), None), said(closed)
    assert told("verify", path)[0] == 1

    leave_open(path)
    report = verify(path)
    assert (report.sound, len(report.notes)) == (True, len(closed.findings)), said(report)
    assert {each.check for each in report.notes} <= {"metadata", "record", "episodes"}
    status, out = told("verify", path)
    first, *rest = out.splitlines()
    many = "note" if len(report.notes) == 1 else "notes"
    assert (status, f": sound, {len(report.notes)} {many}; {ROWS:,} rows" in first) == (0, True)
    assert [line for line in rest if line.startswith("note: ")]
    assert 'open_storage(path, mode="append").close()' in out
    status, out = told("verify", "--json", path)
    value = json.loads(out)
    assert (status, value["sound"], value["findings"]) == (0, True, [])
    assert [each["check"] for each in value["notes"]] == [each.check for each in report.notes]
    assert value["healing"] == report.healing

    open_storage(path, mode="append").close()
    healed = verify(path)
    assert (healed.sound, healed.notes, healed.healing) == (True, (), None), said(healed)
    assert "note: " not in told("verify", path)[1]
    after = rows_of(path)
    assert all(np.array_equal(after[key], column) for key, column in before.items())


def test_every_one_at_once(path: Path) -> None:
    for name, (kind, harm) in CUTS.items():
        with contextlib.suppress(FileNotFoundError, ValueError):  # the file may be damaged already
            if path.name == kind and "without rows" not in name:  # one record is torn, not both
                harm(path)
    leave_open(path)
    report = verify(path)
    assert (report.sound, len(report.notes) >= 3) == (True, True), said(report)
    assert verify(path, skip=["metadata", "record", "episodes"]).healing is None
    status, _ = told("collect", "--resume", "--frames", ROWS + 20, "--out", path, "--quiet")
    assert status == 0
    healed = verify(path)
    assert (healed.sound, healed.notes, healed.rows) == (True, (), ROWS + 20), said(healed)


def test_a_lock_file_that_is_gone(path: Path) -> None:
    leave_open(path)
    lock_of(path).unlink()
    report = verify(path)
    assert (report.findings, report.notes) == ((), ())
    assert told("inspect", path)[0] == 0
    open_storage(path, mode="append").close()
    assert lock_of(path).exists()
    assert verify(path).sound


def test_nothing_is_noted_where_nothing_is_wrong(path: Path) -> None:
    leave_open(path)
    report = verify(path)
    assert (report.findings, report.notes, report.healing) == ((), (), None)
    assert "note: " not in told("verify", path)[1]


def test_a_writer_at_work(path: Path) -> None:
    """The writer has the storage open, and its unfinished work is a note as well."""
    with open_storage(path, "append"):
        empty(table_of(path))
        report = verify(path)
        assert (report.sound, [each.check for each in report.notes]) == (True, ["episodes"])
    assert verify(path).notes == ()


# --- remaining findings ---------------------------------------------------------------------------


def spoilt_row(path: Path) -> None:
    with open_storage(path, "append") as storage:
        column = storage.reader.engine.space.columns.arrays[0]  # type: ignore[union-attr]
        column[7] = 99


def older_record(path: Path) -> None:
    """Remove the last record, with which rows were committed."""
    header = header_of(path)
    content = header.read_bytes()
    slots = STARTS
    for at in slots:
        damage(header, at, bytes(28))
    assert content != header.read_bytes()


def other_schema(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs.modify("capacity", np.int64(7))


def rows_attribute_gone(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file.attrs["rows"]


STAYS = [(kind, harm) for kind in KINDS for harm in (spoilt_row, older_record)]
STAYS += [("rows.h5", other_schema), ("rows.h5", rows_attribute_gone)]


@pytest.mark.parametrize(("source", "harm"), STAYS, indirect=["source"])
def test_a_fault_that_no_writer_heals_is_a_finding(path: Path, harm: Harm) -> None:
    harm(path)
    leave_open(path)
    report = verify(path)
    assert (report.sound, told("verify", path)[0]) == (False, 1), said(report)


def test_finding_and_note_together(path: Path) -> None:
    spoilt_row(path)
    empty(table_of(path))
    leave_open(path)
    report = verify(path)
    assert [len(report.notes), report.sound] == [1, False]
    status, out = told("verify", path)
    assert status == 1
    assert "not sound, " in out.splitlines()[0]
    assert ", 1 note; " in out.splitlines()[0]


def test_a_damaged_record_of_a_closed_storage_is_kept_for_a_second_look(path: Path) -> None:
    """A later writer does not erase acknowledged data that are damaged."""
    torn_record(path)
    open_storage(path, mode="append").close()
    assert not verify(path).sound


# --- real ends of writers -------------------------------------------------------------------------


def test_after_a_kill(path: Path) -> None:
    """The writer sets the mark itself, and another session removes it."""
    child = os.fork()
    if not child:
        try:
            storage = open_storage(path, "append")
            storage.flush()
            empty(table_of(path))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    report = verify(path)
    assert (report.sound, [each.check for each in report.notes]) == (True, ["episodes"])
    open_storage(path, mode="append").close()
    assert (verify(path).sound, verify(path).notes) == (True, ())


@pytest.fixture
def survivors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """Collect headers left by power cuts: the first page is new, the others are as last synced."""
    left: list[bytes] = []
    synced: dict[str, bytes] = {}
    sync = Header.sync
    set_head = Header.set_head

    def cut_after(header: Header, rows: int) -> None:
        set_head(header, rows)
        now = bytes(header._map)
        left.append(now[:PAGE] + synced.get(str(header._path), now)[PAGE:])

    def remember(header: Header) -> None:
        sync(header)
        synced[str(header._path)] = bytes(header._map)

    monkeypatch.setattr(Header, "sync", remember)
    monkeypatch.setattr(Header, "set_head", cut_after)
    return left


@pytest.mark.parametrize("kind", KINDS)
def test_committed_rows_have_their_record(
    tmp_path: Path, survivors: list[bytes], kind: str
) -> None:
    """Pages reach the disk in any order. A head without its record would not balance."""
    path = tmp_path / kind
    rows = {("x",): np.zeros((10, 4), np.float32)}
    storage: DiskStorage
    with KINDS[kind](path, capacity=60, durability="power") as storage:
        for number in range(1, 6):
            storage.extend(rows, record=b"%d" % number * 5000)
            survivors_now = survivors[-1]
            if isinstance(storage, H5Storage):  # rows and header are one file, synced
                continue
            copy = tmp_path / f"copy-{number}{path.suffix}"
            shutil.copytree(path, copy)
            damage(copy / HEADERS[kind], 0, survivors_now)
            with open_storage(copy, accept_copy=True) as found:
                assert found.head == 10 * number
                assert found.record == (10 * number, b"%d" % number * 5000)
    assert survivors
