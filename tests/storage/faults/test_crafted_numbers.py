"""Test invalid numbers with valid checksums: a Tallyroll error results, or the storage is sound.

The numbers are in headers, records, manifests, tables, rows, and metadata for other libraries. A
random part of them is tried, `TALLYROLL_NUMBERS` times as many if it is set.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tallyroll.collector.errors import StateError
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import CorruptStorage, StateMismatch
from tallyroll.storage.files.commit_header import HEADER_NBYTES, word_of
from tallyroll.storage.files.manifest import sealed
from tallyroll.storage.formats.hdf5.user_block import (
    USER_BLOCK_NBYTES,
    newest_manifest,
    write_manifest,
)
from tallyroll.storage.stores.rewinds import require_not_rewound, rewind_to

from hostile_kit import (
    GIB,
    KINDS,
    ROWS,
    WAYS,
    collect,
    in_a_child,
    inspect,
    look,
    read,
    told_or_done,
)

MORE = int(os.environ.get("TALLYROLL_NUMBERS", "1"))
TRIALS = 2

WHOLE = [
    *(-1, 0, 1, 2, 7, 255, 4096),
    *(
        s * 2**n + d
        for n in (16, 31, 32, 47, 48, 53, 62, 63, 64)
        for d in (-1, 0, 1)
        for s in (1, -1)
    ),
    *(10**30, -(10**30), 10**4299, -(10**4299)),
]
VALUES = [
    *WHOLE,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "1",
    [],
    {},
    [[]],
    [0],
]

# Offsets in the header, see `commit` and `origin`.
RESERVE, HEAD, ORIGIN, SLOTS, SLOT = 64, 128, 192, 4096, 69632
IDENTITY, RECORD = struct.Struct("<8sqqq"), struct.Struct("<qqqI")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bases")
    for name, kind in KINDS.items():
        (place / name).mkdir()
        collect(place / name / name)
        if name == "rows":
            (place / "ring").mkdir()
            with kind(place / "ring" / name, max_size=30) as ring:
                collect(ring)  # type: ignore[arg-type]
    return place


def other(draw: random.Random, value: Any = None) -> Any:
    """Return another value, mostly a number."""
    if type(value) is int and draw.random() < 0.3:
        return value + draw.choice([-1, 1, 2**31, 2**47])
    return draw.choice(WHOLE if draw.random() < 0.8 else VALUES)


def word(draw: random.Random) -> int:
    return draw.choice(WHOLE) % 2**64


def signed(draw: random.Random) -> int:
    return (draw.choice(WHOLE) + 2**63) % 2**64 - 2**63


def changed(draw: random.Random, value: Any) -> Any:
    """Change one value in a JSON value, at any depth."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        found = value.copy()
        at = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        found[at] = changed(draw, value[at])
        return found
    return other(draw, value)


# --- crafted numbers ------------------------------------------------------------------------------


def header_of(path: Path) -> Path:
    return KINDS[path.name]._format_class(path).header_path


def identity(path: Path, draw: random.Random) -> None:
    with open(header_of(path), "r+b") as file:
        fields = list(IDENTITY.unpack(file.read(IDENTITY.size)))
        fields[draw.choice([1, 2, 2, 2, 3])] = signed(draw)
        content = IDENTITY.pack(*fields)
        file.seek(0)
        file.write(content + struct.pack("<I", zlib.crc32(content)))


def counts(path: Path, draw: random.Random) -> None:
    with open(header_of(path), "r+b") as file:
        places = draw.choice([[RESERVE], [HEAD], [RESERVE, HEAD], [ORIGIN], [ORIGIN + 24]])
        count = draw.choice([draw.randrange(3 * ROWS), word(draw) % 2**48, 2**48 - 1, 2**47])
        for at in places:
            file.seek(at)
            file.write(struct.pack("<Q", word_of(count) if draw.random() < 0.9 else word(draw)))


def record(path: Path, draw: random.Random) -> None:
    with open(header_of(path), "r+b") as file:
        start = SLOTS + draw.randrange(2) * SLOT
        file.seek(start)
        sequence, head, length, _ = RECORD.unpack(file.read(RECORD.size))
        payload = file.read(length)
        if draw.random() < 0.8:
            value = json.loads(payload)
            for _ in range(draw.choice([1, 1, 3])):
                value = changed(draw, value)
            payload = json.dumps(value).encode()
        else:
            sequence, head = draw.choice([(signed(draw), head), (sequence, signed(draw))])
        crc = zlib.crc32(payload, zlib.crc32(struct.pack("<qqq", sequence, head, len(payload))))
        file.seek(start)
        file.write(RECORD.pack(sequence, head, len(payload), crc) + payload)


def manifest(path: Path, draw: random.Random) -> None:
    place = KINDS[path.name]._format_class(path).manifest_path
    with open(place, "r+b") as file:
        content = newest_manifest(file.fileno()) if path.name == "rows.h5" else file.read()
        assert content
        value = json.loads(content)
        value.pop("crc32", None)
        part = draw.choice([*value, "runs", "runs", "schema"])
        value[part] = changed(draw, value[part])
        content = json.dumps(value).encode()
        if path.name == "rows.h5":
            write_manifest(file.fileno(), content)
        else:
            file.seek(0)
            file.truncate()
            file.write(content)


def table(path: Path, draw: random.Random) -> None:
    place = KINDS[path.name]._format_class(path).episodes_path
    content = place.read_bytes()[:-12]
    length = struct.unpack_from("<H", content, 8)[0]
    text, lines = content[10 : 10 + length], content[10 + length :]
    how = draw.randrange(4)
    if how < 2:
        array = np.load(place).copy()
        for _ in range(draw.choice([1, 3])):
            name = draw.choice(array.dtype.names or ())
            kind = array.dtype[name]
            value = signed(draw) % 2 ** (8 * kind.itemsize - 1) if kind.kind == "i" else np.nan
            array[name][draw.randrange(len(array))] = value if draw.random() < 0.7 else -value
        lines = array.tobytes()
    elif how == 2:
        shape = draw.choice(
            [
                b"(99999999999999999999999,)",
                b"(-1,)",
                b"(" * 3000,
                b"()",
                b"(1e9,)",
                b"(3",
                b"(0x,)",
            ]
        )
        text = text.replace(b"(%d,)" % (len(lines) // np.load(place).itemsize), shape)
    else:
        text = draw.choice([b"{" * 9000, b"1" * 5000, b"'''", b"{'descr': 3}", b"-" * 9999, b"\0"])
    if draw.random() < 0.2:
        lines = lines[: draw.randrange(len(lines))]
    content = content[:8] + struct.pack("<H", len(text) % 2**16) + text + lines
    place.write_bytes(content + b"tallyCRC" + zlib.crc32(content).to_bytes(4, "little"))


def rows(path: Path, draw: random.Random) -> None:
    """Craft impossible ids, steps, lanes, versions, flags and rewards."""
    with open_storage(path, "append") as storage:
        engine = storage.reader.engine
        assert engine is not None
        for _ in range(draw.choice([1, 1, 4])):
            arrays = engine.space.columns.arrays
            column = draw.choice(arrays)[: len(storage)].reshape(len(storage), -1)
            at = slice(None) if draw.random() < 0.3 else draw.randrange(len(storage))
            if column.dtype.kind == "i":
                column[at] = np.array(signed(draw)).astype(column.dtype)
            elif column.dtype.kind == "b":
                column[at] = draw.random() < 0.5
            else:
                column[at] = draw.choice([np.nan, np.inf, -np.inf, 3e38, 0])
        before = storage.writer.files.episodes_path.read_bytes()
    if draw.random() < 0.5:
        storage.writer.files.episodes_path.write_bytes(before)


def shown(path: Path, draw: random.Random) -> None:
    """Craft metadata for other libraries."""
    if path.name == "rows.h5":
        with h5py.File(path, "r+") as file:
            name = draw.choice(["rows", "capacity", "provenance", "schema"])
            value = draw.choice([signed(draw), 1.5, "text", np.zeros(5000), np.zeros(0), b"\xff"])
            file.attrs[name] = value
        return
    names = "meta.json" if path.name == "rows" else "zarr.json"
    place = draw.choice(sorted(path.rglob(names)))
    place.write_text(json.dumps(changed(draw, json.loads(place.read_bytes()))))


def metadata(path: Path, draw: random.Random) -> None:
    """Craft HDF5's own numbers, before the first dataset and between datasets."""
    with open(path, "r+b") as file:
        size = min(os.fstat(file.fileno()).st_size, USER_BLOCK_NBYTES + 2**17)
        file.seek(USER_BLOCK_NBYTES)
        content = file.read(size - USER_BLOCK_NBYTES)
        used = [at for at in range(0, len(content) - 8, 8) if any(content[at : at + 8])]
        for _ in range(draw.choice([1, 2, 5])):
            file.seek(USER_BLOCK_NBYTES + draw.choice(used) + draw.choice([0, 0, 0, 2, 4]))
            file.write(struct.pack("<Q", word(draw))[: draw.choice([1, 2, 4, 8])])


CRAFTS = (identity, counts, record, manifest, table, rows, shown, metadata)


def cases() -> Iterator[Any]:
    """Yield the cases. The gate combines every craft with every other name."""
    for number, craft in enumerate(CRAFTS):
        for at, name in enumerate(("rows", "ring", "rows.h5", "rows.zarr")):
            if craft is metadata and name != "rows.h5":
                continue
            slow = [pytest.mark.slow] * (craft is not metadata and (number + at) % 2)
            yield pytest.param(name, craft, id=f"{name}-{craft.__name__}", marks=slow)


@pytest.mark.parametrize(("name", "craft"), list(cases()))
@pytest.mark.filterwarnings("ignore:unclosed storage")
def test_numbers_that_nobody_would_write(
    name: str, craft: Callable[[Path, random.Random], None], bases: Path, tmp_path: Path
) -> None:
    def trials() -> list[str]:
        found = []
        for seed in range(TRIALS * MORE):
            draw = random.Random(f"{name} {craft.__name__} {seed}")
            work = tmp_path / str(seed)
            shutil.copytree(bases / name, work)
            (path,) = (each for each in work.iterdir() if each.name in KINDS)
            craft(path, draw)
            ways = WAYS if MORE > 1 else (*WAYS[:3], draw.choice(WAYS[3:]))
            for way in ways:
                copy = tmp_path / "copy"
                shutil.copytree(work, copy)
                if wrong := told_or_done(way, copy / path.name):
                    found.append(f"seed {seed}, {way.__name__}:\n{wrong}")
                shutil.rmtree(copy)
            shutil.rmtree(work)
        return found

    wrong = in_a_child(trials, seconds=100 * MORE, nbytes=4 * GIB)
    assert not wrong, f"{len(wrong)} times\n" + "\n\n".join(wrong[:20])


# --- known cases ----------------------------------------------------------------------------------

LARGE = 9 * 10**4299
"""Number with the most digits that Python parses. A sum of two has one digit too many to print."""


def give_record(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with open_storage(path, "append") as storage:
        assert storage.record is not None
        value = json.loads(storage.record[1])
        change(value)
        storage.writer.put_record(json.dumps(value).encode())


@pytest.mark.parametrize(
    "counts",
    [
        dict.fromkeys(["slots", "executed", "reset_slots", "stored", "discarded"], LARGE),
        {"incarnation": LARGE, "respawned": -LARGE},
        {"stored": LARGE, "lost": -LARGE},
        {"carried": LARGE, "lost": LARGE},
    ],
    ids=["sums", "resumes", "stored", "lost"],
)
def test_a_ledger_of_large_counts(counts: dict[str, int], bases: Path, tmp_path: Path) -> None:
    for way in WAYS:
        work = tmp_path / way.__name__
        shutil.copytree(bases / "rows", work)
        give_record(work / "rows", lambda value: value["ledger"].update(counts))
        assert told_or_done(way, work / "rows") == ""


def test_a_run_of_large_counts(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "rows", tmp_path / "work")
    path = tmp_path / "work" / "rows"
    with open_storage(path, "append") as storage:
        run = storage.manifest["runs"][-1]
        storage.writer.runs.write([{**run, "incarnation": LARGE, "respawned": -LARGE}])
    for way in WAYS:
        assert told_or_done(way, path) == ""


@pytest.mark.parametrize("sequence", [2**63 - 1, 2**63 - 2, 2**62 + 1])
@pytest.mark.parametrize("name", list(KINDS))
def test_a_record_that_no_other_can_follow(
    name: str, sequence: int, bases: Path, tmp_path: Path
) -> None:
    """A writer numbers the next record after it."""
    shutil.copytree(bases / name, tmp_path / "work")
    path = tmp_path / "work" / name
    with open(header_of(path), "r+b") as file:
        file.seek(SLOTS)
        _, head, length, _ = RECORD.unpack(file.read(RECORD.size))
        payload = file.read(length)
        crc = zlib.crc32(payload, zlib.crc32(struct.pack("<qqq", sequence, head, length)))
        file.seek(SLOTS)
        file.write(RECORD.pack(sequence, head, length, crc))
    for way in WAYS:
        assert told_or_done(way, path) == ""
    with pytest.raises(CorruptStorage, match=f"its last record is number {sequence}"):
        open_storage(path)


REWINDS = 264  # offset of the header's count of rewinds


@pytest.mark.parametrize("number", [0, 2, 2**26, 2**47, 2**62, 2**63 - 1, -1, -(2**63)])
@pytest.mark.parametrize("name", ["rows", "rows.h5", "rows.zarr"])
def test_a_rewind_with_a_number_that_it_cannot_have(
    name: str, number: int, bases: Path, tmp_path: Path
) -> None:
    """A writer finishes the rewind and must not build a list of that length."""
    shutil.copytree(bases / name, tmp_path / "work")
    path = tmp_path / "work" / name
    with open_storage(path) as storage:
        head = storage.head
    payload = struct.pack("<qq", number, -1) + b"{}"
    checked = struct.pack("<qqq", 10**6, -1 - head, len(payload))
    crc = zlib.crc32(payload, zlib.crc32(checked))
    with open(header_of(path), "r+b") as file:
        file.seek(SLOTS)  # the newest record, which has an even number
        file.write(checked + struct.pack("<I", crc) + payload)
    require_refused(path, "rewind")


@pytest.mark.parametrize("count", [1, 2**26, 2**47])
@pytest.mark.parametrize("name", ["rows", "rows.h5"])
def test_rewinds_that_the_manifest_does_not_know(
    name: str, count: int, bases: Path, tmp_path: Path
) -> None:
    shutil.copytree(bases / name, tmp_path / "work")
    path = tmp_path / "work" / name
    with open(header_of(path), "r+b") as file:
        file.seek(REWINDS)
        file.write(struct.pack("<Q", word_of(count)))
    found = verify(path).findings
    assert any("rewind" in str(each) for each in found), found
    with open_storage(path, "append") as storage:
        with pytest.raises(StateMismatch):  # none of its rows may remain
            require_not_rewound(storage.reader, 1, 0, "a state")
        with pytest.raises(CorruptStorage, match="rewind"):
            rewind_to(storage.writer, 1, None)


def require_refused(path: Path, words: str) -> None:
    """Check that `verify` reports it and writers are refused, with little memory and time."""
    started = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = verify(path).findings
    assert any(words in str(each) for each in found), found
    with pytest.raises(CorruptStorage, match=words):
        open_storage(path, "append")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB
    assert time.monotonic() - started < 10


def test_a_manifest_that_no_other_can_follow(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "rows.h5", tmp_path / "work")
    path, head = tmp_path / "work" / "rows.h5", struct.Struct("<8sqqI")
    with open(path, "r+b") as file:
        file.seek(HEADER_NBYTES)
        magic, _, length, _ = head.unpack(file.read(head.size))
        crc = zlib.crc32(file.read(length), zlib.crc32(struct.pack("<qq", 2**63 - 1, length)))
        file.seek(HEADER_NBYTES)
        file.write(head.pack(magic, 2**63 - 1, length, crc))
    for way in WAYS:
        assert told_or_done(way, path) == ""
    with pytest.raises(CorruptStorage, match=f"has number {2**63 - 1}"):
        open_storage(path)


@pytest.mark.parametrize("recorded", [False, True])
def test_no_ids_are_left(recorded: bool, bases: Path, tmp_path: Path) -> None:
    """A continued run would have to number its trajectories from there."""
    shutil.copytree(bases / "rows", tmp_path / "work")
    path = tmp_path / "work" / "rows"
    if recorded:
        give_record(path, lambda value: value.update(next_id=2**63))
    else:
        with open_storage(path, "append") as storage:
            assert storage.reader.engine is not None
            keys = storage.schema.keys
            ids = storage.reader.engine.space.columns.arrays[keys.index(("collector", "traj_ids"))]
            ids[:ROWS] = 2**63 - 1
    with pytest.raises(StateError, match="no ids for a new run"):
        collect(path, 2 * ROWS, resume=True)


@pytest.fixture(scope="module")
def packed(bases: Path) -> Path:
    pytest.importorskip("zstandard")
    pytest.importorskip("google_crc32c")
    path = bases / "packed"
    with open_storage(bases / "rows" / "rows") as storage:
        storage.pack(path)
    return path


@pytest.mark.parametrize("part", ["arrays", "states", "columns", "rows", "first", "old_rows"])
def test_numbers_of_how_rows_are_packed(part: str, packed: Path, tmp_path: Path) -> None:
    """Change each number of the layout in the manifest, with a valid checksum."""
    found = json.loads((packed / "tallyroll" / "manifest.json").read_bytes())
    found.pop("crc32")
    shutil.copytree(packed, tmp_path / "packed")
    place = tmp_path / "packed" / "tallyroll" / "manifest.json"
    draw, many = random.Random(part), part in ("arrays", "states", "columns")
    values = [2**26, 2**31, 2**40, 2**62, 2**63, -1, 1.5, float("nan"), True, "x", None, {}]

    def trials() -> list[str]:
        wrong = []
        for number in range((20 if many else 6) * MORE):
            value = json.loads(json.dumps(found["packed"]))
            if many:
                each = draw.choice(value[part])
                name = draw.choice(sorted(each))
                each[name] = draw.choice(values)
            else:
                value[part] = values[number % len(values)]
            place.write_text(json.dumps(sealed({**found, "packed": value})))
            for way in (read, look, inspect):
                if fault := told_or_done(way, tmp_path / "packed"):
                    wrong.append(f"{part} {value[part]!r:.200}, {way.__name__}:\n{fault}")
        return wrong

    wrong = in_a_child(trials, seconds=100 * MORE, nbytes=3 * GIB // 2)
    assert not wrong, "\n\n".join(wrong[:5])


@pytest.mark.parametrize("shape", [[1] * 64, [1] * 63 + [2]])
def test_more_dimensions_than_arrays_have(shape: list[int], tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        storage.extend({("x",): np.zeros((8, *[1] * 62), np.int8)})
    found = json.loads((path / "manifest.json").read_bytes())
    found.pop("crc32")
    found["schema"][0]["shape"] = shape
    (path / "manifest.json").write_text(json.dumps(found))
    with open(path / "tallyroll.header", "r+b") as file:
        crc = zlib.crc32(json.dumps(found["schema"]).encode())
        content = IDENTITY.pack(b"TALLYROL", 3, 0, crc)
        file.write(content + struct.pack("<I", zlib.crc32(content)))
        for at in (RESERVE, HEAD):
            file.seek(at)
            file.write(struct.pack("<Q", word_of(4)))
    with pytest.raises(CorruptStorage, match="65 dimensions, rows included"):
        open_storage(path)
