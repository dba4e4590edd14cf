"""Datasets of other libraries with one part dropped, renamed, or changed in type. Also a script::

    changed_sources.py FOLDER FIRST STOP

The script makes sound datasets below FOLDER. For each number it changes a copy in one way, imports,
verifies and repairs it, and prints a JSON line. Numbers below the count of `all_changes` select
these changes, one each, from each file in turn. Larger numbers damage bytes at random. The script
limits its own memory and time. A number without a line means that the process crashed. PYTHONPATH
must have the folders of its imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tallyroll.collector import SyncCollector
from tallyroll.storage import (
    StorageError,
    import_dataset,
    open_storage,
    repair,
    verify_dataset,
)
from tallyroll.storage.ext.exchange.rlds.records import crc_module

from fuzzed_storages import SECONDS, Late, damage, limit_memory, outside_of, touched

OURS = {
    "d4rl": ".hdf5",
    "npz": ".npz",
    "parquet": ".parquet",
    "hf": "",
    "torchrl": "",
    "lerobot": "",
    "rlds": "",
}
THEIRS = {
    "d4rl": ("d4rl_faults", "sound"),
    "minari": ("minari_faults", "sound"),
    "torchrl": ("torchrl_faults", "sound"),
    "rlds": ("rlds_faults", "sound"),
    "lerobot": ("lerobot_recordings", "sound_v3"),
    "lerobot-v2": ("lerobot_recordings", "sound_v2"),
}
"""The module and the function that write a dataset without our code."""
REPAIRED = ("d4rl", "minari", "lerobot", "rlds")
VALUES: list[Any] = [
    None, True, -1, 0, 7, 2**31, 2**62, 2**63, 10**30, -(10**30), 1.5, float("nan"), float("inf"),
    "", "x", "../x", [], [-1], [2**62], ["x"], [[]], [2**31, 2**31], {}, {"x": 1},
]  # fmt: skip
Change = Callable[[Path], None]

# --- sound datasets -------------------------------------------------------------------------------


def make_sound(folder: Path) -> dict[str, tuple[str, Path]]:
    """Return the kind and the path of each dataset, by its name. Each has its own folder."""
    made = {}
    with SyncCollector(
        "CartPole-v1", num_envs=2, frames_per_batch=40, total_frames=40, seed=0,
        storage=folder / "rows",
    ) as collector:  # fmt: skip
        for _ in collector:
            pass
    with open_storage(folder / "rows") as storage:
        for kind, suffix in OURS.items():
            path = folder / f"our-{kind}" / f"it{suffix}"
            path.parent.mkdir()
            storage.export(path, kind)
            made[path.parent.name] = kind, path
    for name, (module, write) in THEIRS.items():
        path = folder / f"their-{name}" / ("it.hdf5" if name == "d4rl" else "it")
        path.parent.mkdir()
        getattr(import_module(module), write)(path)
        made[path.parent.name] = name.partition("-")[0], path
    return made


# --- changes --------------------------------------------------------------------------------------


def changes_of(path: Path) -> Iterator[tuple[str, Change]]:
    """Yield a description of each change of the files at a path, and the function that makes it."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files:
        below = file.relative_to(path.parent)
        for words, change in _changes(file):
            yield f"{below}: {words}", partial(_in_place, below, change)


def _in_place(below: Path, change: Change, folder: Path) -> None:
    change(folder / below)


def _changes(file: Path) -> Iterator[tuple[str, Change]]:
    if file.suffix in (".json", ".jsonl"):
        yield from _of_json(file)
    elif file.suffix == ".parquet":
        yield from _of_parquet(file)
    elif file.suffix == ".hdf5":
        yield from _of_hdf5(file)
    elif file.suffix == ".npz":
        yield from _of_npz(file)
    elif "tfrecord" in file.name:
        yield from _of_records(file)
    elif file.suffix == ".memmap":
        for size in (0, 1, file.stat().st_size * 2, 2**40):
            yield f"{size} bytes", partial(os.truncate, length=size)


def _of_json(file: Path) -> Iterator[tuple[str, Change]]:
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    for line in range(min(2, len(lines))):
        for place in _places(json.loads(lines[line])):
            words = f"line {line}, {'/'.join(map(str, place))}"
            if place:
                yield f"{words} dropped", partial(_change_json, line, place, "drop", None)
                yield f"{words} renamed", partial(_change_json, line, place, "rename", None)
            for value in VALUES:
                yield f"{words} = {value!r}", partial(_change_json, line, place, "set", value)


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*above, key))
    elif isinstance(value, list):
        for at in range(min(2, len(value))):
            yield from _places(value[at], (*above, at))


def _change_json(line: int, place: tuple[Any, ...], way: str, new: Any, file: Path) -> None:
    text = file.read_text()
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    value = json.loads(lines[line])
    if not place:
        value = new
    else:
        holder = value
        for key in place[:-1]:
            holder = holder[key]
        if way == "set":
            holder[place[-1]] = new
        else:
            old = holder.pop(place[-1])
            if way == "rename" and isinstance(holder, dict):
                holder[f"{place[-1]}_other"] = old
    lines[line] = json.dumps(value)
    file.write_text("\n".join(lines))


def _of_parquet(file: Path) -> Iterator[tuple[str, Change]]:
    for name in parquet.read_schema(file).names:
        for way in ("drop", "rename", "double", *_ARRAYS):
            yield f"{name} {way}", partial(_change_parquet, name, way)


_ARRAYS: dict[str, Callable[[int], Any]] = {
    "nulls": lambda count: pa.nulls(count, pa.int64()),
    "nothing": lambda count: pa.nulls(count),
    "texts": lambda count: pa.array(["x"] * count),
    "bytes": lambda count: pa.array([b"\xff\x00"] * count),
    "floats": lambda count: pa.array([1.5] * count),
    "nans": lambda count: pa.array([float("nan")] * count),
    "small": lambda count: pa.array([-1] * count, pa.int8()),
    "large": lambda count: pa.array([2**62] * count),
    "least": lambda count: pa.array([-(2**63)] * count),
    "unsigned": lambda count: pa.array([2**64 - 1] * count, pa.uint64()),
    "flags": lambda count: pa.array([True] * count),
    "lists": lambda count: pa.array([[1, 2]] * count),
    "ragged": lambda count: pa.array([[1] * (at % 3) for at in range(count)]),
    "deep": lambda count: pa.array([[[[1]]]] * count),
    "structs": lambda count: pa.array([{"bytes": b"x", "path": "/etc/passwd"}] * count),
    "times": lambda count: pa.array([1] * count, pa.timestamp("us")),
    "words": lambda count: pa.array(["x"] * count).dictionary_encode(),
    "decimals": lambda count: pa.nulls(count, pa.decimal128(10, 2)),
}


def _change_parquet(name: str, way: str, file: Path) -> None:
    table = parquet.read_table(file)
    at = table.column_names.index(name)
    if way == "drop":
        table = table.remove_column(at)
    elif way == "rename":
        table = table.rename_columns(
            [f"{each}_other" if each == name else each for each in table.column_names]
        )
    elif way == "double":
        table = table.append_column(name, table.column(at))
    else:
        table = table.set_column(at, name, _ARRAYS[way](len(table)))
    parquet.write_table(table, file)


def _of_hdf5(file: Path) -> Iterator[tuple[str, Change]]:
    names = list[tuple[str, bool]]()
    attributes = list[tuple[str, str]]()
    with h5py.File(file) as opened:

        def look(name: str, node: Any) -> None:
            names.append((name, isinstance(node, h5py.Dataset)))
            attributes.extend((name, each) for each in node.attrs)

        opened.visititems(look)
    for name, leaf in names:
        for way in ("drop", "rename", *(_SETS if leaf else ("leaf",))):
            yield f"{name} {way}", partial(_change_hdf5, name, way)
    for name, attribute in attributes:
        for value in (None, -1, 2**62, 1.5, "x", np.zeros(3)):
            words = f"{name}@{attribute} = {value!r}"
            yield words, partial(_change_attribute, name, attribute, value)


_SETS: dict[str, Callable[[Any, str, np.ndarray], Any]] = {
    "texts": lambda file, name, old: file.create_dataset(name, data=["x"] * len(old)),
    "half": lambda file, name, old: file.create_dataset(name, data=np.zeros(len(old), np.float16)),
    "long": lambda file, name, old: file.create_dataset(name, data=np.zeros(old.shape, "g")),
    "swapped": lambda file, name, old: file.create_dataset(name, data=np.ones(old.shape, ">f8")),
    "complex": lambda file, name, old: file.create_dataset(name, data=np.ones(old.shape, "c16")),
    "pairs": lambda file, name, old: file.create_dataset(
        name, data=np.zeros(len(old), [("a", "i4"), ("b", "f8")])
    ),
    "scalar": lambda file, name, old: file.create_dataset(name, data=1),
    "empty": lambda file, name, old: file.create_dataset(name, data=h5py.Empty("f4")),
    "shorter": lambda file, name, old: file.create_dataset(name, data=old[:-1]),
    "none": lambda file, name, old: file.create_dataset(name, data=old[:0]),
    "deeper": lambda file, name, old: file.create_dataset(name, data=old[..., None, None]),
    "huge": lambda file, name, old: file.create_dataset(
        name, (2**40, *old.shape[1:]), old.dtype, chunks=True, maxshape=(None, *old.shape[1:])
    ),
    "wide": lambda file, name, old: file.create_dataset(
        name, (len(old), 2**40), old.dtype, chunks=(1, 2**20)
    ),
    "ragged": lambda file, name, old: file.create_dataset(
        name, (len(old),), h5py.vlen_dtype(np.int32)
    ),
    "group": lambda file, name, old: file.create_group(name),
}


def _change_hdf5(name: str, way: str, file: Path) -> None:
    with h5py.File(file, "r+") as opened:
        if way == "rename":
            opened.move(name, f"{name}_other")
            return
        old = opened[name][...] if way in _SETS else None
        del opened[name]
        if way == "leaf":
            opened[name] = np.zeros(3)
        elif old is not None:
            _SETS[way](opened, name, np.atleast_1d(old))


def _change_attribute(name: str, attribute: str, value: Any, file: Path) -> None:
    with h5py.File(file, "r+") as opened:
        del opened[name].attrs[attribute]
        if value is not None:
            opened[name].attrs[attribute] = value


def _of_npz(file: Path) -> Iterator[tuple[str, Change]]:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    for name in names:
        for way in ("drop", "rename", "double", *_HEADERS):
            yield f"{name} {way}", partial(_change_npz, name, way)


_HEADERS: dict[str, bytes] = {
    "huge": b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }",
    "negative": b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    "overflow": b"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
    "endless": b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 400 + b",), }",
    "objects": b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
    "texts": b"{'descr': '<U3', 'fortran_order': False, 'shape': (40,), }",
    "empty texts": b"{'descr': '<U0', 'fortran_order': False, 'shape': (40,), }",
    "pairs": b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (40,), }",
    "scalar": b"{'descr': '<f4', 'fortran_order': False, 'shape': (), }",
    "columns first": b"{'descr': '<f4', 'fortran_order': True, 'shape': (40, 1), }",
    "no shape": b"{'descr': '<f4', 'fortran_order': False, }",
    "a call": b"{'descr': '<f4', 'fortran_order': False, 'shape': exit(), }",
    "deep": b"(" * 200 + b")" * 200,
}


def _change_npz(name: str, way: str, file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        content = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for each, data in content.items():
            if each != name:
                archive.writestr(each, data)
            elif way == "rename":
                archive.writestr(f"other_{each}", data)
            elif way == "double":
                archive.writestr(each, data)
                archive.writestr(f"{each}/{each}", data)
            elif way != "drop":
                head = _HEADERS[way].ljust(117) + b"\n"
                start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
                archive.writestr(each, start + bytes(160))


def _of_records(file: Path) -> Iterator[tuple[str, Change]]:
    for length in (0, 1, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 17, 2**64 - 1):
        yield f"a record of {length} bytes", partial(_change_length, length)
    for at in range(16, min(400, file.stat().st_size), 3):
        yield f"byte {at} of a record, with its checksum", partial(_change_record, at)


def _masked(content: bytes) -> bytes:
    crc = crc_module().value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _change_length(length: int, file: Path) -> None:
    head = struct.pack("<Q", length)
    content = file.read_bytes()
    file.write_bytes(head + _masked(head) + content[12:])


def _change_record(at: int, file: Path) -> None:
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    content[min(at, 11 + length)] ^= 0xFF
    content[12 + length : 16 + length] = _masked(bytes(content[12 : 12 + length]))
    file.write_bytes(content)


# --- use ------------------------------------------------------------------------------------------


def use(kind: str, path: Path) -> tuple[list[str], list[str]]:
    """Import, verify and repair a dataset. Return each outcome, and the faults in the outcomes."""
    said, wrong = list[str](), list[str]()
    ways: dict[str, Callable[[], Any]] = {
        "import": lambda: import_dataset(path, path.with_name("imported"), kind),
        "verify": lambda: verify_dataset(path, kind),
    }
    if kind in REPAIRED:
        ways["repair"] = lambda: repair(path, path.with_name("repaired"), kind)
    for name, way in ways.items():
        try:
            found = way()
            told = f"{len(found.findings)} findings" if name == "verify" else "done"
        except StorageError as error:
            told = type(error).__name__
        except Exception as error:  # noqa: BLE001  the test looks for such errors
            told = f"{type(error).__name__}: {error!s:.200}"
            wrong.append(f"{name}: {told}")
        said.append(f"{name}: {told}")
        if name != "verify" and told != "done" and path.with_name(f"{name}ed").exists():
            wrong.append(f"{name}: something is left of it")
    return said, wrong


def case(
    number: int,
    sound: dict[str, tuple[str, Path]],
    every: list[tuple[str, str, Change]],
    folder: Path,
) -> dict[str, Any]:
    """Change a copy of a sound dataset, and use it."""
    dice, place = random.Random(number), folder / str(number)
    if number < len(every):
        name, words, change = every[number]
        shutil.copytree(sound[name][1].parent, place / "it")
        change(place / "it")
        done = [words]
        outside = outside_of(place)
    else:
        name = dice.choice(sorted(sound))
        shutil.copytree(sound[name][1].parent, place / "it")
        outside = outside_of(place)
        done = damage(place / "it" / sound[name][1].name, outside, dice)
    kind, started = sound[name][0], time.monotonic()
    said, wrong = list[str](), list[str]()
    signal.alarm(SECONDS)
    try:
        said, wrong = use(kind, place / "it" / sound[name][1].name)
    except Late:
        wrong.append(f"it took more than {SECONDS} s")
    finally:
        signal.alarm(0)
    wrong += [f"touched outside: {each}" for each in touched(outside)]
    shutil.rmtree(place, ignore_errors=True)
    return {
        "number": number,
        "dataset": name,
        "done": done,
        "said": said,
        "seconds": round(time.monotonic() - started, 2),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "wrong": wrong,
    }


def all_changes(sound: dict[str, tuple[str, Path]]) -> list[tuple[str, str, Change]]:
    """Return every change of every dataset, with files in turn and each file's changes shuffled."""
    by_file: dict[tuple[str, str], list[tuple[str, str, Change]]] = {}
    for name, (_, path) in sorted(sound.items()):
        for words, change in changes_of(path):
            file = words.partition(":")[0]
            by_file.setdefault((name, file), []).append((name, words, change))
    dice = random.Random(0)
    for changes in by_file.values():
        dice.shuffle(changes)
    in_turn = zip_longest(*by_file.values())
    return [each for turn in in_turn for each in turn if each is not None]


def too_late(*_: object) -> None:
    """Raise when the alarm rings."""
    raise Late


def run(folder: Path, first: int, stop: int) -> None:
    """Print a line with the count of all changes, and then a line for each number."""
    (folder / "sound").mkdir(parents=True)
    sound = make_sound(folder / "sound")
    for kind, path in sound.values():
        copy = folder / "copy" / path.name
        shutil.copytree(path.parent, copy.parent)
        said, wrong = use(kind, copy)
        assert not wrong, (path, wrong)
        assert all(each.endswith(("done", " 0 findings")) for each in said), (path, said)
        shutil.rmtree(copy.parent)
    every = all_changes(sound)
    sys.stdout.write(json.dumps({"changes": len(every)}) + "\n")
    signal.signal(signal.SIGALRM, too_late)
    limit_memory()
    with contextlib.suppress(BrokenPipeError):
        for number in range(first, stop):
            sys.stdout.write(json.dumps(case(number, sound, every, folder)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
