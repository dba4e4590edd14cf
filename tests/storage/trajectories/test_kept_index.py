"""Test the stored index of trajectories, which is never trusted beyond the rows.

``TALLYROLL_KEPT=2000 pytest -n0 tests/storage/trajectories/test_kept_index.py`` tries that many.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    ZarrStorage,
    fast_paths,
    open_storage,
    verify,
)
from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to
from tallyroll.storage.trajectories import index_file
from tallyroll.storage.trajectories.blocks import tail
from tallyroll.storage.trajectories.blocks.saved_blocks import RebuiltBlocks, SavedBlocks
from tallyroll.storage.trajectories.index_file import (
    IndexOwner,
    UnusableIndex,
    read_index,
    write_index,
)
from tallyroll.storage.trajectories.lane_stretches import RowChunk
from tallyroll.storage.trajectories.row_index import RowIndex

from lane_model import Model

TRIED = int(os.environ.get("TALLYROLL_KEPT", "12"))
LENGTH, ROWS = 3, 300
KINDS = {"rows": MemmapStorage, "rows.h5": H5Storage, "rows.zarr": ZarrStorage}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of few rows, so that few rows make several blocks."""
    monkeypatch.setattr(tail, "_FEWEST", 32)
    monkeypatch.setattr(tail, "_SLOTS", 4)


@pytest.fixture(params=["extension", "numpy"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with the extension and without it."""
    with fast_paths.switched_off(*(() if request.param == "extension" else ("kernel",))):
        yield


def model_of(seed: int, rows: int = ROWS, lanes: int | None = None) -> Model:
    """Return rows that give every kind of block, in time."""
    rng = np.random.default_rng(seed)
    model = Model.random(
        rng,
        rows=rows,
        lanes=lanes or int(rng.choice([1, 5, 20])),
        mean_length=float(rng.choice([2, 10])),
        skip=float(rng.choice([0, 0.3])),
        lane_by_lane=bool(rng.integers(2)),
    )
    if lanes or rng.integers(3):
        return model
    turns, took = rng.permutation(model.lane), np.empty(rows, np.int64)
    took[turns.argsort(kind="stable")] = model.lane.argsort(kind="stable")
    return Model(model.ids[took], model.steps[took], model.lane[took] * 100)


def chunk_of(model: Model, start: int, stop: int) -> RowChunk:
    part = slice(start, stop)
    return RowChunk(start, model.ids[part], model.steps[part], model.lane[part].astype(np.int64))


def extend(index: RowIndex, model: Model, stop: int, size: int) -> RowIndex:
    while (start := index.seen) < stop:
        index.extend(chunk_of(model, start, min(stop, start + size)))
    return index


def answers(index: RowIndex, model: Model, first: int) -> list[Any]:
    """Return an index's answers about all rows from ``first`` on."""
    rows = np.arange(first, len(model))
    ids = np.unique(model.ids)
    return [
        [index.rows_of(int(id), first).tolist() for id in ids],
        index.onward(rows, LENGTH).tolist(),
        np.sort(index.windows(rows, LENGTH), axis=1).tolist(),
        index.longest(first),
        index.places(rows)[1].tolist(),
    ]


@pytest.mark.usefixtures("way")
def test_it_goes_on_from_the_file_as_if_it_had_seen_all_rows(tmp_path: Path) -> None:
    inside, path, kinds = Inside(tmp_path), tmp_path / "index", set()
    compiled = fast_paths.is_on("kernel")
    for seed in range(TRIED if compiled else TRIED // 4):
        rng, model = np.random.default_rng(seed), model_of(seed)
        ring = int(rng.choice([0, 0, 150]))
        half, size, owner = (
            int(rng.integers(40, 300)),
            int(rng.integers(1, 60)),
            IndexOwner("x", ring, 0),
        )
        first = max(0, len(model) - ring) if ring else 0
        before = extend(RowIndex(ring), model, half, size)
        if not before.in_blocks:
            continue
        write_index(inside, path, owner, before.state(), synced=False)
        kept = read_index(inside, path, owner, lambda: ROWS, whole=True)
        assert kept is not None
        assert kept.seen == before.in_blocks
        assert kept.state().is_as(before.state())
        index = extend(RowIndex(ring, kept), model, len(model), size)
        whole = extend(RowIndex(ring), model, len(model), size)
        assert answers(index, model, first) == answers(whole, model, first)
        if (says := index.state(first)).by_block.size:
            kinds |= {shelf.key[0] for shelf in says.shelves}
            assert RebuiltBlocks(ring, says).is_made_of(lambda a, b: chunk_of(model, a, b))  # noqa: B023
    assert not compiled or kinds == {0, 1, 2}


def mended(content: bytes, begin: int) -> bytes:
    """Return the content with valid checksums, for a head that ends before ``begin``."""
    head, body = bytearray(content[:begin]), content[begin:-4]
    at = head.index(b"{")
    length = int(head[at - 18 : at - 10], 16)
    head[at - 9 : at - 1] = b"%08x" % zlib.crc32(bytes(head[at : at + length]))
    told = zlib.crc32(bytes(head) + body)
    return bytes(head) + body + told.to_bytes(4, "little")


def begin_of(content: bytes) -> int:
    end = content.index(b"}\n") + 2
    return end + -end % 64


@pytest.mark.usefixtures("way")
def test_damage_is_found_by_its_checksum_or_by_the_rows_and_nothing_is_read_beyond(
    tmp_path: Path,
) -> None:
    inside, path, owner = Inside(tmp_path), tmp_path / "index", IndexOwner("x", 0, 0)
    wrong, tried = 0, TRIED // (2 if fast_paths.is_on("kernel") else 4)
    for seed in range(tried):
        rng, model = np.random.default_rng(seed), model_of(seed)
        index = extend(RowIndex(), model, len(model), 50)
        write_index(inside, path, owner, index.state(), synced=False)
        sound, rows = path.read_bytes(), np.arange(index.in_blocks)
        begin, state = begin_of(sound), index.state()
        for turn in range(6):
            hurt = bytearray(sound)
            at = int(rng.integers(begin, len(sound) - 8))
            if turn % 3 == 0:
                at -= at % 8
                hurt[at : at + 8] = int(rng.choice([-1, 2**62, 2**56 - 1, 255])).to_bytes(
                    8, "little", signed=True
                )
            else:
                hurt[at] ^= int(rng.integers(1, 256))
            path.write_bytes(hurt)
            if hurt != sound:
                with pytest.raises(UnusableIndex, match="checksum"):
                    read_index(inside, path, owner, lambda: ROWS)
            path.write_bytes(mended(bytes(hurt), begin))
            try:
                kept = read_index(inside, path, owner, lambda: ROWS)
            except UnusableIndex:
                continue
            assert kept is not None
            found = RowIndex(0, kept)
            extend(found, model, len(model), 50)
            for ask in (
                lambda: found.rows_of(int(rng.choice(model.ids))),  # noqa: B023
                lambda: found.onward(rows, LENGTH),  # noqa: B023
                lambda: found.windows(rows, LENGTH),  # noqa: B023
                lambda: found.back_from(int(rng.choice(rows))),  # noqa: B023
                lambda: found.count_slices(LENGTH) * 0,  # noqa: B023
                lambda: found.longest() * 0,  # noqa: B023
                lambda: found.draw(  # noqa: B023
                    9,
                    LENGTH,
                    0,
                    lambda count, below: rng.integers(below, size=count),  # noqa: B023
                ),
            ):
                try:
                    told = np.asarray(ask())
                except CorruptStorage as error:
                    assert "Delete the file" in str(error)  # noqa: PT017
                    assert found.damaged
                else:
                    assert not told.size or 0 <= told.min() <= told.max() < len(model)
            try:
                says = kept.state()
                made = RebuiltBlocks(0, says).is_made_of(lambda a, b: chunk_of(model, a, b))  # noqa: B023
            except (IndexError, ValueError):
                made = False
            assert made is (says.rows == state.rows and says.is_as(state))
            wrong += not made
    assert wrong > tried


def test_a_file_that_is_cut_short_or_too_long_or_says_too_much_is_not_used(tmp_path: Path) -> None:
    inside, path, owner = Inside(tmp_path), tmp_path / "index", IndexOwner("x", 0, 0)
    index = extend(RowIndex(), model_of(1, lanes=5), 300, 50)
    write_index(inside, path, owner, index.state(), synced=False)
    sound = path.read_bytes()
    begin = begin_of(sound)
    changes: list[tuple[bytes, bytes]] = [
        (b'"lanes": 5', b'"lanes": 9'),
        (b'"blocks": ', b'"blocks":-'),
        (b'"rows": ', b'"rows":9'),
        (b'"cells": ', b'"cells":9'),
        (b'"ring": 0', b'"ring":[]'),
        (b'"shelves": [', b'"shelves": {'),
        (b'"rewinds": 0', b'"nothing": 0'),
    ]
    hurt = [sound[:cut] for cut in (0, 5, 30, 60, begin, begin + 9, len(sound) - 1)]
    hurt += [sound + b"\0" * 8, b"\0" * len(sound), b"tallyroll trajectories 1\n" + b"f" * 99]
    for old, new in changes:
        assert old in sound
        hurt.append(mended(sound.replace(old, new, 1), begin))
    for content in hurt:
        path.write_bytes(content)
        with pytest.raises(UnusableIndex):
            read_index(inside, path, owner, lambda: ROWS)
    path.write_bytes(sound.replace(b"trajectories 1", b"trajectories 2", 1))
    with pytest.raises(UnusableIndex, match="version 2, but this Tallyroll reads 1"):
        read_index(inside, path, owner, lambda: ROWS)
    path.write_bytes(sound)
    for other in (IndexOwner("y", 0, 0), IndexOwner("x", 7, 0)):
        with pytest.raises(UnusableIndex, match="belongs to another storage"):
            read_index(inside, path, other, lambda: ROWS)
    assert read_index(inside, path, IndexOwner("x", 0, 1), lambda: ROWS) is None
    assert read_index(inside, tmp_path / "none", owner, lambda: ROWS) is None
    path.rename(tmp_path / "other")
    path.symlink_to("other")
    with pytest.raises(UnusableIndex, match="cannot be read"):
        read_index(inside, path, owner, lambda: ROWS)


@pytest.mark.parametrize(("name", "more"), [("blocks", 2**26), ("lanes", 2**25), ("cells", 2**27)])
def test_a_sparse_file_of_more_numbers_than_its_rows_have(
    name: str, more: int, tmp_path: Path
) -> None:
    """Without a check, its arrays would be copied, or all of its bytes read."""
    inside, path, owner = Inside(tmp_path), tmp_path / "index", IndexOwner("x", 0, 0)
    index = extend(RowIndex(), model_of(1, lanes=5), ROWS, 50)
    write_index(inside, path, owner, index.state(), synced=False)
    content = path.read_bytes()
    says = json.loads(content[content.index(b"{") : content.index(b"}\n") + 1])
    line = json.dumps({**says, name: more}).encode() + b"\n"
    start = content[: content.index(b"\n") + 1]
    path.write_bytes(start + b"%08x %08x\n" % (len(line), zlib.crc32(line)) + line)
    with open(path, "r+b") as file:
        head, begin = index_file._head(file.fileno())
        file.truncate(head.nbytes(begin))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for whole in (False, True):
        with pytest.raises(UnusableIndex, match="rows allow"):
            read_index(inside, path, owner, lambda: ROWS, whole=whole)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


# --- with the rows of a storage -------------------------------------------------------------------

MODEL = model_of(3, rows=700, lanes=5)


@pytest.fixture(params=list(KINDS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Make a storage of 500 rows of `MODEL`."""
    return filled(tmp_path / request.param)


def filled(path: Path, ring: int = 0) -> Path:
    kind: Any = KINDS[path.name]
    options = {"max_size": ring} if ring else {"capacity": 1000}
    with kind(path, **options) as storage:
        storage.extend(MODEL.rows(0, 250))
        storage.extend(MODEL.rows(250, 500))
    return path


def index_path(path: Path) -> Path:
    with open_storage(path) as storage:
        found: Path = storage.reader.format.index_path
        return found


def blocks_of(storage: DiskStorage) -> Any:
    """Return the blocks of an up-to-date index."""
    storage.trajectories.rows_of(int(MODEL.ids[storage.reader.head - 1]))
    rows = storage.reader.trajectory_index._rows
    assert rows is not None
    return rows._blocks


def faults(path: Path) -> list[str]:
    """Return `verify`'s findings on the index, which it must check."""
    report = verify(path)
    assert "index" in report.checked
    return [str(each) for each in report.findings if each.check == "index"]


def assert_right(path: Path, *, kept: bool, rows: int = 500) -> None:
    """Check the trajectories, whether from the file or not, and that `verify` finds nothing."""
    trajectories = Model(*(each[:rows] for each in (MODEL.ids, MODEL.steps, MODEL.lane)))
    with open_storage(path) as storage:
        assert isinstance(blocks_of(storage), SavedBlocks) is kept
        first = storage.reader.span.start
        for id, wanted in trajectories.trajectories().items():
            if left := [row for row in wanted if row >= first]:
                assert storage.trajectories.rows_of(id).tolist() == left
    if kept:
        assert not faults(path)


def test_a_reader_maps_what_the_writer_left(made: Path) -> None:
    assert_right(made, kept=True)
    before = index_path(made).stat().st_ino
    with open_storage(made, mode="append") as storage:
        assert isinstance(blocks_of(storage), SavedBlocks)
    assert index_path(made).stat().st_ino == before  # no new rows, no write
    with open_storage(made, mode="append") as storage, open_storage(made) as reader:
        assert isinstance(blocks_of(reader), SavedBlocks)
        storage.extend(MODEL.rows(500, 700))
        storage.close()
        assert index_path(made).stat().st_ino != before
        id = int(MODEL.ids[699])
        rows = reader.trajectories.rows_of(id)
        assert rows.tolist() == MODEL.trajectories()[id]
    assert_right(made, kept=True, rows=700)


def test_a_ring(tmp_path: Path) -> None:
    path = filled(tmp_path / "rows", ring=300)
    assert_right(path, kept=True)
    with open_storage(path, mode="append") as storage:
        storage.extend(MODEL.rows(500, 700))
    assert_right(path, kept=True, rows=700)
    kept = index_path(path).read_bytes()
    with open_storage(path, mode="append") as storage:
        storage.extend(MODEL.rows(100, 400), ids="fresh")
    index_path(path).write_bytes(kept)  # all of its rows are gone
    with open_storage(path) as storage:
        assert storage.trajectories.sample_slices(4, 2).shape == (4, 2)
    assert "the index is older than the rows of the ring" in verify(path).skipped["index"]


def test_a_copy_has_it_too_and_what_is_finalized(tmp_path: Path) -> None:
    path = filled(tmp_path / "rows")
    with open_storage(path, mode="append") as storage:
        storage.finalize()
    shutil.copytree(path, tmp_path / "copy")
    assert_right(tmp_path / "copy", kept=True)
    index_path(path).unlink()
    assert "checksums" not in [each.check for each in verify(path).findings]
    assert_right(path, kept=False)


def test_rows_that_are_taken_back(tmp_path: Path) -> None:
    path = filled(tmp_path / "rows")
    kept = index_path(path).read_bytes()
    with open_storage(path, mode="append") as storage:
        rewind_to(storage.writer, 250, None)
        assert not index_path(path).exists()
        storage.extend(MODEL.rows(250, 500))
    assert_right(path, kept=True)
    index_path(path).write_bytes(kept)  # the previous file: it may be of other rows
    assert_right(path, kept=False)


def damaged(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        (damaged, "its checksum does not match"),
        (lambda content: content[:-9], "bytes, expected"),
        (lambda content: b"", "is not an index"),
        (lambda content: content.replace(b"trajectories 1", b"trajectories 9", 1), "version 9"),
    ],
)
def test_one_that_cannot_be_used_is_built_again_and_verify_says_so(
    tmp_path: Path, hurt: Callable[[bytes], bytes], said: str
) -> None:
    path = filled(tmp_path / "rows")
    place = index_path(path)
    sound = place.read_bytes()
    place.write_bytes(hurt(sound))
    assert_right(path, kept=False)
    (told,) = faults(path)
    assert said in told
    assert "Delete it" in told
    with open_storage(path, mode="append"):
        pass
    assert place.read_bytes() == sound
    assert_right(path, kept=True)


def test_one_of_other_rows_is_not_used(tmp_path: Path) -> None:
    path = filled(tmp_path / "rows")
    place, other = index_path(path), model_of(4, lanes=5)
    with open_storage(path) as storage:
        reader = storage.reader
        owner = IndexOwner(reader.id, 0, reader.rewinds)
        write_index(
            reader.format.inside, place, owner,
            extend(RowIndex(), other, 300, 50).state(), synced=False,
        )  # fmt: skip
    assert_right(path, kept=False)
    (told,) = faults(path)
    assert "the stored index does not match the rows" in told
    with open_storage(path) as storage:
        write_index(
            reader.format.inside, place, owner,
            extend(RowIndex(), MODEL, 700, 50).state(), synced=False,
        )  # fmt: skip
    assert_right(path, kept=False)
    (told,) = faults(path)
    assert "but the storage has 500" in told


def test_damage_that_shows_later_is_told_once_and_the_rows_are_asked_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "rows")
    place = index_path(path)
    content = place.read_bytes()
    says = json.loads(content[content.index(b"{") : content.index(b"}\n") + 1])
    cells = begin_of(content) + 8 * (3 * says["blocks"] + 5 * says["lanes"])
    bases = cells + 8 * says["cells"]
    place.write_bytes(content[:cells] + b"\xff" * (bases - cells) + content[bases:])
    monkeypatch.setattr(index_file, "CHECKED", 0)  # as if it were large
    monkeypatch.setattr("tallyroll.storage.trajectories.index._fits", lambda *_: True)
    with open_storage(path) as storage:
        told = 0
        for id, wanted in MODEL.trajectories().items():
            if wanted[-1] >= 500:
                continue
            try:
                found = storage.trajectories.rows_of(id).tolist()
            except CorruptStorage as error:
                assert str(place) in str(error)  # noqa: PT017
                told += 1
                found = storage.trajectories.rows_of(id).tolist()
            if told:
                assert found == wanted
        assert told == 1


def test_where_it_cannot_be_written_the_storage_closes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Inside.write_atomically

    def refuse(self: Inside, path: Path, content: Any, **options: Any) -> None:
        if path.name == "trajectories.blocks":
            raise OSError(errno.EROFS, "Read-only file system")
        write(self, path, content, **options)

    monkeypatch.setattr(Inside, "write_atomically", refuse)
    path = filled(tmp_path / "rows")
    assert not index_path(path).exists()
    assert_right(path, kept=False)
    assert verify(path).skipped["index"] == "no index is stored with the rows"


def test_a_kill_while_it_is_written_leaves_the_older_one(tmp_path: Path) -> None:
    path = filled(tmp_path / "rows")
    place = index_path(path)
    older, pieces = place.read_bytes(), index_file._content
    for after in (0, 1, 9):

        def killed(line: bytes, state: Any, after: int = after) -> Iterator[Any]:
            for number, piece in enumerate(pieces(line, state)):
                if number == after:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield piece

        if not (child := os.fork()):
            index_file._content = killed
            with open_storage(path, mode="append") as storage:
                at = len(storage)
                storage.extend(MODEL.rows(at, at + 60))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert place.read_bytes() == older
        assert_right(path, kept=True, rows=500 + 60 * ((0, 1, 9).index(after) + 1))
    with open_storage(path, mode="append"):
        pass
    assert place.read_bytes() != older
    assert not place.with_name(place.name + ".tmp").exists()
    assert_right(path, kept=True, rows=680)
