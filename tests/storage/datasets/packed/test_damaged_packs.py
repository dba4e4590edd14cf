"""Test damaged and hostile packed storages.

The reader reports the damage, takes bounded memory, and never returns wrong rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zstandard
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, open_storage, repair, verify
from tallyroll.storage.errors import (
    CorruptStorage,
    FormatVersionMismatch,
    MissingLibrary,
    PathIsTaken,
    ReadOnlyStorage,
    StorageError,
    StorageFull,
    StorageLocked,
)
from tallyroll.storage.ext.atomic_create import atomic_creation
from tallyroll.storage.ext.packed import codecs
from tallyroll.storage.ext.packed.codecs import BadChunk, Codec, crc32c
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected
from tallyroll.storage.files.manifest import sealed

FLIPS = int(os.environ.get("TALLYROLL_FLIPS", "0"))
"""Number of flipped bits per file. By default, one bit of some files is flipped."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(collected())
        storage.pack(folder / "packed")
        storage.pack(folder / "packed.h5", format="hdf5")
    return folder


@pytest.fixture
def packed(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base / "packed", tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def packed_file(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(base / "packed.h5", tmp_path / "packed.h5"))


def every_row(path: Path) -> TensorDict:
    with open_storage(path) as storage:
        return storage.get(slice(None))


# --- flipped bits ---------------------------------------------------------------------------------


def test_every_flipped_bit_is_found(base: Path, packed: Path) -> None:
    """Flip bits at any byte of any file.

    `verify` reports each, and a read returns the right rows or raises an error.
    """
    wanted, random = every_row(base / "packed"), np.random.default_rng(0)
    files = sorted(path for path in packed.rglob("*") if path.is_file())
    for file in files if FLIPS else random.permutation(files)[:20]:
        before = file.read_bytes()
        for at in random.integers(0, len(before), FLIPS or 1).tolist():
            spoilt = bytearray(before)
            spoilt[at] ^= 1 << int(random.integers(8))
            file.write_bytes(spoilt)
            report = verify(packed)
            assert not report.sound, (file, at)
            try:
                assert_same_rows(every_row(packed), wanted)
            except StorageError:
                assert {"files", "checksums"} & {each.check for each in report.findings}, file
        file.write_bytes(before)
    assert verify(packed).sound


def test_verify_names_the_column_and_the_rows(packed: Path) -> None:
    file = packed / "action" / "c.0"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    report = verify(packed)
    found = next(each for each in report.findings if each.check == "checksums")
    assert found.places[0].column == "action"
    said = found.places[0].what
    assert "the chunk with rows 0 to 140 of action cannot be read" in said
    assert "Rows in other chunks are intact" in said
    assert "checksums" in report.checked
    assert report.skipped["observations"] == "rows are damaged"
    with open_storage(packed) as storage:
        storage.get([0], ["observation"])
        with pytest.raises(
            CorruptStorage, match=r"action cannot be read \(its checksum does not match"
        ):
            storage.get([0])


def test_flipped_bits_in_hdf5(base: Path, packed_file: Path) -> None:
    wanted, random = every_row(base / "packed.h5"), np.random.default_rng(1)
    before = packed_file.read_bytes()
    # Spare the bytes that locate HDF5's objects: h5py itself may crash on them.
    with h5py.File(packed_file) as file:
        stored = file["action"].id
        _, begin, size = 0, stored.get_chunk_info(0).byte_offset, stored.get_chunk_info(0).size
        mask, chunk = stored.read_direct_chunk((0,))
    begin = before.index(chunk)
    assert (mask, size) == (0, len(chunk))
    for at in random.integers(begin, begin + size, 4).tolist():
        spoilt = bytearray(before)
        spoilt[at] ^= 4
        packed_file.write_bytes(spoilt)
        assert "checksums" in {each.check for each in verify(packed_file).findings}
    packed_file.write_bytes(before)
    assert_same_rows(every_row(packed_file), wanted)


# --- cut short, gone, replaced --------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "index|cut short|damaged"),
        (Path.unlink, "c.0, with rows 0 to 140 of action, is missing"),
        (linked, "a link"),
        (
            lambda path: path.write_bytes(b""),
            "was cut short to 0 bytes, .* It contains rows 0 to 140 of action",
        ),
    ],
    ids=["cut", "gone", "linked", "empty"],
)
def test_a_shard_that_is_not_there(packed: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(packed / "action" / "c.0")
    with pytest.raises(CorruptStorage, match=said):
        every_row(packed)
    assert not verify(packed).sound


def test_an_hdf5_file_that_is_cut_short_or_links_elsewhere(packed_file: Path) -> None:
    other = packed_file.with_name("other.h5")
    shutil.copy(packed_file, other)
    with h5py.File(packed_file, "r+") as file:
        del file["action"]
        file["action"] = h5py.ExternalLink(other.name, "/action")
    with pytest.raises(CorruptStorage, match="action is missing, or is a link"):
        open_storage(packed_file)
    packed_file.write_bytes(other.read_bytes()[:9000])
    with pytest.raises(CorruptStorage, match="damaged"):
        open_storage(packed_file)


def test_an_hdf5_file_that_says_too_much(packed_file: Path) -> None:
    """Rows that do not exist take no memory and are reported."""
    with h5py.File(packed_file, "r+") as file:
        file["action"].resize(2**40, axis=0)
    with pytest.raises(CorruptStorage, match="action does not match the manifest"):
        open_storage(packed_file)
    with h5py.File(packed_file, "r+") as file:
        manifest = json.loads(file["tallyroll/manifest"][()].tobytes())
        del manifest["crc32"]
        for each in manifest["packed"]["arrays"]:
            if each["path"] == ["action"]:
                each.update(rows=2**40, shard_rows=2**21)
        content = np.frombuffer(json.dumps(sealed(manifest)).encode(), np.uint8)
        del file["tallyroll/manifest"]
        file["tallyroll/manifest"] = content
    with pytest.raises(CorruptStorage, match="has the wrong rows, dtype or shape"):
        open_storage(packed_file)


# --- claims that are too large --------------------------------------------------------------------

BOMB = zstandard.ZstdCompressor(level=9).compress(bytes(2**26))


@pytest.mark.parametrize("name", ["zstd", "shuffle", "none"])
def test_a_chunk_has_no_more_bytes_than_it_may(name: str) -> None:
    codec, chunk = Codec.of(name), np.arange(96, dtype=np.int64)
    noise = np.random.default_rng(0).integers(0, 2**62, 96)
    for each in (chunk, noise):
        assert (codec.decode(codec.encode(each), each.nbytes, 8).view(np.int64) == each).all()
    stored = codec.encode(chunk)[:-4]
    for body in (b"", b"x", BOMB, stored[:-1], stored + b"x", bytes(len(stored) + 1), stored[:20]):
        with pytest.raises(BadChunk):
            codec.decode(body + crc32c(body).to_bytes(4, "little"), chunk.nbytes, 8)
    with pytest.raises(BadChunk, match="checksum"):
        codec.decode(stored + b"0000", chunk.nbytes, 8)


def test_a_frame_without_its_size_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(np.arange(96)))
    frame[4] &= 0x1F  # neither a size nor a single segment
    stored = bytes(frame) + crc32c(bytes(frame)).to_bytes(4, "little")
    with pytest.raises(BadChunk):
        Codec.of("zstd").decode(stored, 96 * 8, 8)


def change(path: Path, edit: Callable[[Any], None]) -> None:
    file = path / "tallyroll" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["crc32"]
    edit(manifest)
    file.write_text(json.dumps(sealed(manifest)))


def in_packed(edit: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda manifest: edit(manifest["packed"]) and None


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "rows": lambda it: it.update(rows=2**40),
    "no rows": lambda it: it.update(rows=-1),
    "rows of an array": lambda it: it["arrays"][0].update(rows=2**47),
    "all rows": lambda it: (it.update(rows=2**40), [a.update(rows=2**40) for a in it["arrays"]]),
    "shape": lambda it: it["arrays"][0].update(shape=[2**40]),
    "chunks": lambda it: it["arrays"][0].update(chunk_rows=2**40),
    "shards": lambda it: it["arrays"][0].update(shard_rows=2**40),
    "path": lambda it: it["arrays"][0].update(path=["..", "x"]),
    "codec": lambda it: it["arrays"][0].update(codec="pickle"),
    "dtype": lambda it: it["arrays"][0].update(dtype="object"),
    "states": lambda it: it["states"][0].update(states=2**60),
    "stack": lambda it: it["states"][0].update(n=2**50),
    "breaks": lambda it: it["states"][0].update(breaks=10**6),
    "columns": lambda it: it.update(columns=[]),
    "place": lambda it: it["columns"][0].update(states=None, array=-1),
    "nothing": lambda it: it.clear(),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_that_says_too_much(packed: Path, what: str) -> None:
    change(packed, in_packed(HOSTILE[what]))
    with pytest.raises(CorruptStorage):
        open_storage(packed)
    assert not verify(packed).sound


def test_states_that_cannot_be(base: Path, tmp_path: Path) -> None:
    """Breaks that are not row numbers are reported and never lead to other rows."""
    rows = {("x",): np.arange(70), ("next", "x"): np.arange(1, 71)}
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        storage.pack(tmp_path / "packed", codecs="none")
    shard = tmp_path / "packed" / "x" / "breaks" / "c.0"
    stored = Codec.of("shuffle").encode(np.full(2048, 5))
    index = np.array([0, len(stored)], "<u8").tobytes()
    shard.write_bytes(stored + index + crc32c(index).to_bytes(4, "little"))
    with (
        open_storage(tmp_path / "packed") as storage,
        pytest.raises(CorruptStorage, match="breaks are not ascending row numbers"),
    ):
        storage.get([0])


def test_a_later_version_is_named(packed: Path) -> None:
    change(packed, in_packed(lambda it: it.update(version=2)))
    with pytest.raises(FormatVersionMismatch, match=r"version 2 of the layout.*reads version 1"):
        open_storage(packed)


# --- refusals of packing --------------------------------------------------------------------------


def test_without_its_libraries(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codecs.library.cache_clear()
    for name in ("zstandard", "google_crc32c"):
        monkeypatch.setitem(sys.modules, name, None)
    for act in (
        lambda: every_row(base / "packed"),
        lambda: open_storage(base / "rows").pack(tmp_path / "new"),
    ):
        with pytest.raises(MissingLibrary, match=r'pip install "tallyroll\[pack\]"'):
            act()
    assert [*tmp_path.iterdir()] == []
    codecs.library.cache_clear()


def test_a_destination_that_is_taken(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with open_storage(base / "rows") as storage:
        for name in ("file", "folder", "link"):
            with pytest.raises(PathIsTaken, match="already exists"):
                storage.pack(tmp_path / name)
        for inner in (base / "rows", base / "rows" / "inner"):
            with pytest.raises(PathIsTaken):
                storage.pack(inner)
        with contextlib.suppress(KeyboardInterrupt), atomic_creation(tmp_path / "new"):
            with pytest.raises(StorageLocked):
                storage.pack(tmp_path / "new")
            raise KeyboardInterrupt
    assert {each.name for each in tmp_path.iterdir()} == {"file", "folder", "link"}
    assert verify(base / "rows").sound


def test_a_full_disk(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tallyroll.storage.ext.packed.pack.free_bytes", lambda path: 2**20)
    with (
        open_storage(base / "rows") as storage,
        pytest.raises(StorageFull, match="no room for 141 packed rows"),
    ):
        storage.pack(tmp_path / "new")
    assert [*tmp_path.iterdir()] == []


def test_arguments_that_are_wrong(base: Path, tmp_path: Path) -> None:
    from tallyroll.storage import FrameStack

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"format": "npz"}, "expected 'zarr' or 'hdf5', got 'npz'"),
        ({"codecs": "lz4"}, "expected one of zstd, shuffle, none, got 'lz4'"),
        ({"codecs": "zstd:99"}, "expected a level from 1 to 22, got 99"),
        ({"codecs": "none:1"}, "expected \"none\" without a level, got 'none:1'"),
        ({"codecs": "gzip"}, "expected gzip:1 to gzip:9 for HDF5, .*, got gzip:"),
        ({"codecs": "zstd", "format": "hdf5"}, "expected gzip:1 to gzip:9 for HDF5, .*, got zstd:"),
        ({"codecs": {"nobody": "zstd"}}, "codecs: expected some of .*, got nobody"),
        ({"stacks": [FrameStack("nobody")]}, "stacks: expected some of .*, got nobody"),
        ({"stacks": [FrameStack("pixels", axis=3)]}, "expected an axis of pixels, .*, got axis 3"),
        (
            {"stacks": [FrameStack("pixels", 3)]},
            "frames that divide the shape .* of pixels along axis 0, got 3",
        ),
    ]
    with open_storage(base / "rows") as storage:
        for arguments, said in wrong:
            with pytest.raises(ValueError, match=said):
                storage.pack(tmp_path / "new", **arguments)
    assert [*tmp_path.iterdir()] == []


def test_a_failure_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for format in ("zarr", "hdf5"):
        with open_storage(base / "rows") as storage, pytest.raises(KeyboardInterrupt):
            storage.pack(tmp_path / "new", format=format, progress=fail)
        assert [*tmp_path.iterdir()] == []


def test_nothing_is_added_to_it(packed: Path) -> None:
    with pytest.raises(ReadOnlyStorage):
        open_storage(packed, mode="append")


def _bytes_of_hdf5(path: Path) -> np.ndarray:
    """Return the offsets of nonzero bytes that are HDF5's own: no user block and no chunks."""
    content = np.fromfile(path, np.uint8)
    own = content != 0
    with h5py.File(path) as file:
        own[: file.userblock_size] = False

        def leave_out(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset) and node.chunks:
                for number in range(node.id.get_num_chunks()):
                    chunk = node.id.get_chunk_info(number)
                    own[chunk.byte_offset : chunk.byte_offset + chunk.size] = False

        file.visititems(leave_out)
    return np.flatnonzero(own)


METADATA_FLIPS = int(os.environ.get("TALLYROLL_FLIPS", "10"))


def test_one_wrong_byte_in_the_metadata_of_hdf5(base: Path, packed_file: Path) -> None:
    """A read raises a Tallyroll error or returns the same rows. A repair saves all of them."""
    dice = np.random.default_rng(METADATA_FLIPS)
    content, places = packed_file.read_bytes(), _bytes_of_hdf5(packed_file)
    signed = [content.find(each) for each in (b"FADB", b"FAHD", b"EAHD", b"EAIB", b"BTHD", b"BTLF")]
    chosen = [at + 6 for at in signed if at >= 0] + dice.choice(places, METADATA_FLIPS).tolist()
    refused = 0
    with open_storage(base / "packed.h5") as storage:
        rows = storage.get(slice(None)).clone()
    for at in chosen:
        wrong = bytearray(content)
        wrong[at] ^= 1 << int(dice.integers(8))
        packed_file.write_bytes(wrong)
        try:
            with open_storage(packed_file) as storage:
                assert (storage.get(slice(None)) == rows).all(), at
        except StorageError:
            refused += 1
            with contextlib.suppress(StorageError):
                assert not verify(packed_file).sound, at
        out = packed_file.with_name(f"repaired-{at}")
        report = repair(packed_file, out)
        assert report.whole, (at, report.lost)
        with open_storage(out) as storage:
            assert (storage.get(slice(None)) == rows).all(), at
        shutil.rmtree(out)
    assert refused > 2
