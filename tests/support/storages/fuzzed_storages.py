"""Random damage to storages, and all uses of the damaged storages. Also a script::

    fuzzed_storages.py FOLDER FIRST STOP

The script makes sound storages below FOLDER. For each number it damages a copy, uses it, and prints
a JSON line with the damage and the faults of the result. The script limits its own memory and time.
A number without a line means that the process crashed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tallyroll.collector import CollectorError, SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    PrioritizedSampler,
    StorageError,
    ZarrStorage,
    open_storage,
    verify,
)
from tallyroll.storage.files.header_words import word_of
from tallyroll.storage.storages import DiskStorage

ROWS, RING = 120, 50
MEMORY = 3 * 2**30
"""Bytes of address space that a case may use beyond those that the process already has."""
SECONDS = 20
"""Time limit of a case."""
HUGE = [2**63 - 1, 2**63, 2**64 - 1, 2**62, 2**48 - 1, 2**47, 2**40, 2**32, 2**31, 10**9, 1, 0]
PRECIOUS = b"precious " * 1000

# --- sound storages -------------------------------------------------------------------------------


def make_sound(folder: Path) -> dict[str, Path]:
    """Make a closed storage of each kind below ``folder``, each in its own folder."""
    kinds: dict[str, Callable[[Path], DiskStorage]] = {
        "rows": MemmapStorage,
        "ring": lambda path: MemmapStorage(path, max_size=RING),
        "rows.h5": lambda path: H5Storage(path, capacity=ROWS + 50),
        "rows.zarr": lambda path: ZarrStorage(path, capacity=ROWS),
    }
    made = {}
    for name, kind in kinds.items():
        for state in ("closed", "finalized"):
            path = folder / f"{state}-{name}" / name
            path.parent.mkdir(parents=True)
            with kind(path) as storage:
                with SyncCollector(
                    "CartPole-v1",
                    num_envs=2,
                    frames_per_batch=40,
                    total_frames=ROWS,
                    seed=0,
                    storage=storage,
                ) as collector:
                    for _ in collector:
                        pass
                _put_beside(storage)
                for packed in (
                    ("packed", "packed.h5") if (name, state) == ("rows", "closed") else ()
                ):
                    copy = folder / packed / packed
                    copy.parent.mkdir()
                    storage.pack(copy)
                    made[packed] = copy
                if state == "finalized":
                    storage.finalize()
            made[path.parent.name] = path
    return made


def _put_beside(storage: DiskStorage) -> None:
    """Write the files of an overlay, of priorities and of statistics."""
    storage.overlay("note", torch.float32)[:10] = torch.ones(10)
    sampler = PrioritizedSampler(storage)
    sampler.update_priority(sampler.sample(8), torch.rand(8))
    sampler.save()
    storage.statistics()


def rows_of(storage: DiskStorage) -> dict[Any, bytes]:
    """Return every valid row, as bytes by column."""
    rows = np.array(storage.span, np.int64)
    return {key: storage.reader.column(key).take(rows).tobytes() for key in storage.schema.keys}


# --- damage ---------------------------------------------------------------------------------------


def damage(path: Path, outside: Path, dice: random.Random) -> list[str]:
    """Damage the storage at ``path`` in one to three ways. Return the kinds of damage."""
    done = []
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        files = _files(path)
        if not files:
            break
        # Choose small files, which describe the others, as often as columns.
        small = [file for file in files if "memmap" not in file.name]
        file = dice.choice(dice.choice([files, small or files]))
        way = dice.choice(WAYS)
        done.append(f"{way.__name__[1:]} {file.relative_to(path.parent)}")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, OSError):
            way(file, outside, dice)
    return done


def _files(path: Path) -> list[Path]:
    """Return the files to damage, without huge files and files that also have a name outside."""
    found = [each for each in path.parent.rglob("*") if each.is_file() and not each.is_symlink()]
    looks = [(each, each.stat()) for each in found]
    return sorted(each for each, it in looks if it.st_nlink == 1 and it.st_size < 2**26)


def _write(file: Path, at: int, content: bytes) -> None:
    with open(file, "r+b") as target:
        target.seek(at)
        target.write(content)


def _place(file: Path, dice: random.Random) -> int:
    """Return an offset in a file, more often near the beginning, where the numbers are."""
    size = max(1, file.stat().st_size)
    return dice.randrange(min(size, dice.choice([64, 256, 4096, 8192, 2**20, size])))


def _flip(file: Path, outside: Path, dice: random.Random) -> None:
    for _ in range(dice.choice([1, 1, 8])):
        at = _place(file, dice)
        byte = file.read_bytes()[at : at + 1] or b"\0"
        _write(file, at, bytes([byte[0] ^ (1 << dice.randrange(8))]))


def _cut(file: Path, outside: Path, dice: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, dice.choice([0, size // 2, max(0, size - 1), dice.randrange(size + 1)]))


def _grow(file: Path, outside: Path, dice: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, dice.choice([size + 1, 2 * size, size + 4096, 2**36, 2**40]))


def _garble(file: Path, outside: Path, dice: random.Random) -> None:
    _write(file, _place(file, dice), dice.randbytes(dice.choice([8, 64, 4096])))


def _number(file: Path, outside: Path, dice: random.Random) -> None:
    """Overwrite an aligned word with another number, with or without the check bits of counts."""
    at, value = _place(file, dice) // 8 * 8, dice.choice(HUGE)
    word = word_of(value % 2**47) if dice.random() < 0.5 else value
    _write(file, at, struct.pack("<Q", word % 2**64))
    if dice.random() < 0.5:  # update the header's own checksum
        start = file.read_bytes()[:32]
        _write(file, 32, struct.pack("<I", zlib.crc32(start)))


def _count(file: Path, outside: Path, dice: random.Random) -> None:
    """Write another count of rows, with its check bits, into the header."""
    word = struct.pack("<Q", word_of(dice.choice(HUGE) % 2**47))
    for at in dice.choice([(64,), (128,), (64, 128), (192,), (200,), (208,), (216,)]):
        _write(file, at, word)


def _swap(file: Path, outside: Path, dice: random.Random) -> None:
    other = dice.choice(_files(file.parent / file.name) or [file])
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    if dice.random() < 0.5:
        other.write_bytes(mine)


def _lose(file: Path, outside: Path, dice: random.Random) -> None:
    file.unlink()


def _rename(file: Path, outside: Path, dice: random.Random) -> None:
    file.rename(file.with_name(dice.choice([file.name + ".tmp", "x" + file.name, "meta.json"])))


def _odd(file: Path, outside: Path, dice: random.Random) -> None:
    """Replace a file by something that is not a file."""
    file.unlink()
    kind = dice.choice(["directory", "pipe", "socket"])
    if kind == "directory":
        file.mkdir()
        (file / "x").write_bytes(b"x")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(file.parent):
            server.bind(file.name[:90])


def _link(file: Path, outside: Path, dice: random.Random) -> None:
    """Put a link in place of a file or a directory, or at the path of a temporary file."""
    places = [file, file.with_name(file.name + ".tmp"), file.parent]
    place = dice.choice(places if file.parent.parent != outside.parent else places[:2])
    target = outside / dice.choice(["file", "folder", "nothing", place.name])
    if place.is_dir():
        shutil.move(place, outside.parent / f"moved-{place.name}")
    else:
        place.unlink(missing_ok=True)
    if dice.random() < 0.2 and (outside / "file").exists():
        os.link(outside / "file", place)
    else:
        place.symlink_to(dice.choice([target, "/dev/zero", "/dev/full", place, target]))


def _json(file: Path, outside: Path, dice: random.Random) -> None:
    """Replace a random value in a JSON document."""
    try:
        document = json.loads(file.read_bytes())
    except ValueError:
        return _garble(file, outside, dice)
    if isinstance(document, dict) and dice.random() < 0.8:
        document.pop("crc32", None)
    holder: Any = document
    while isinstance(holder, (dict, list)) and holder:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = dice.choice(keys)
        if not isinstance(holder[key], (dict, list)) or dice.random() < 0.3:
            holder[key] = dice.choice(_VALUES)
            break
        holder = holder[key]
    file.write_text(json.dumps(document))
    return None


_VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 1.5, 1e308, "", "x", "../x", "/etc/passwd",
    "A" * 20_000, "\x1b]0;x\x07", "\ud800", "float8", "int64", [], [[]], ["x"], [2**62], [1] * 100,
    {}, {"x": 1}, ["..", "x"], ["A"] * 20_000, [0, 0],
]  # fmt: skip
_VALUES.append(json.loads("[" * 500 + "]" * 500))

WAYS = [_flip, _flip, _cut, _grow, _garble, _number, _number, _count, _swap, _lose, _rename, _odd]
WAYS += [_link, _link, _json, _json, _json]

COMMANDS = (
    ["inspect", "PATH"],
    ["inspect", "--json", "PATH"],
    ["verify", "PATH"],
    ["collect", "--resume", "--out", "PATH", "--frames", str(ROWS + 10)],
    ["verify", "--json", "PATH"],
)

# --- use ------------------------------------------------------------------------------------------


class User:
    """A user who does everything with a storage that users do."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        """Names of our errors that were raised."""
        self.wrong: list[str] = []
        """Faults in the results."""

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, CollectorError) as error:
            self.refused.add(type(error).__name__)
        except Exception as error:  # noqa: BLE001  the test looks for such errors
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")

    def use(self, path: Path, rows: Mapping[Any, bytes] | None) -> None:
        """Read, write, verify and finalize the storage at ``path``.

        ``rows`` are its contents, or None if they were damaged.
        """
        with self._doing("read"), open_storage(path) as storage:
            if rows is not None and rows_of(storage) != rows:
                self.wrong.append("other rows than were written")
            _look(storage)
        with self._doing("append"), open_storage(path, "append") as storage:
            _look(storage)
        with self._doing("extend"), open_storage(path, "append") as storage:
            _write_to(storage)
        with self._doing("verify"):
            verify(path)
        for words in COMMANDS:
            self.wrong += _command([str(path) if word == "PATH" else word for word in words])
        with self._doing("finalize"), open_storage(path, "append") as storage:
            storage.finalize()


def _look(storage: DiskStorage) -> None:
    rows = len(storage)
    if rows:
        for at in (0, rows - 1, slice(0, min(rows, 50)), np.arange(min(rows, 50))[::-1]):
            storage.get(at)
    table = storage.trajectories.table
    if len(table):
        storage.trajectories.sample_slices(2, 2)
    for key in storage.overlays:
        storage.overlay(key)[: min(rows, 50)]
    if rows and not (storage.ring and storage.mode == "read"):
        with warnings.catch_warnings(action="ignore"):  # unusable priorities
            PrioritizedSampler(storage).sample(2)
    storage.statistics()
    str(storage.record)
    str(storage.manifest)


def _write_to(storage: DiskStorage) -> None:
    for key in storage.overlays:
        storage.overlay(key)[:2] = 1.0
    if len(storage):
        storage.extend(storage.get(slice(len(storage) - 1, len(storage))), ids="renumber")
    storage.flush()


def _command(words: list[str]) -> Iterator[str]:
    out, status = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                status = main(words)
            except SystemExit as end:
                status = end.code
    except Exception as error:  # noqa: BLE001  the test looks for such errors
        yield f"{words[:2]}: {type(error).__name__}: {error}"
        return
    text = out.getvalue()
    if status not in (0, 1, 2, None):
        yield f"{words[:2]}: exit status {status}"
    if "Traceback" in text:
        yield f"{words[:2]}: a traceback: {text[-500:]}"
    if "\x1b]0;" in text:
        yield f"{words[:2]}: raw escapes"


# --- cases ----------------------------------------------------------------------------------------


class Late(BaseException):
    """Raised when a case takes too long."""


def _too_late(*_: object) -> None:
    raise Late


def outside_of(folder: Path) -> Path:
    """Make files that no storage may touch."""
    outside = folder / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_bytes(PRECIOUS)
    (outside / "folder" / "file").write_bytes(PRECIOUS)
    return outside


def touched(outside: Path) -> list[str]:
    """Return the files that have changed since :func:`outside_of`."""
    found = {str(each.relative_to(outside)) for each in outside.rglob("*")}
    wrong = sorted(found ^ {"file", "folder", "folder/file"})
    return wrong + [
        name
        for name in ("file", "folder/file")
        if (outside / name).is_file() and (outside / name).read_bytes() != PRECIOUS
    ]


def _reaches_rows(done: str) -> bool:
    """Return whether this damage may change or hide rows."""
    way, _, file = done.partition(" ")
    name = file.rpartition("/")[2]
    kept = ("meta.json", "zarr.json", "episodes.npy", "tallyroll.lock", "lock")
    kept += (".overlay", "priorities.leaves", "columns.statistics")
    return way in ("link", "swap", "rename") or not name.endswith(kept)


def case(number: int, sound: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Damage a copy of a sound storage, and use it."""
    dice = random.Random(number)
    name = dice.choice(sorted(sound))
    place = folder / str(number)
    shutil.copytree(sound[name].parent, place / "it")
    outside, path = outside_of(place), place / "it" / sound[name].name
    done = damage(path, outside, dice)
    with open_storage(sound[name]) as storage:
        rows = rows_of(storage)
    user, started = User(), time.monotonic()
    signal.alarm(SECONDS)
    try:
        user.use(path, None if any(map(_reaches_rows, done)) else rows)
    except Late:
        user.wrong.append(f"it took more than {SECONDS} s")
    finally:
        signal.alarm(0)
    user.wrong += [f"touched outside: {each}" for each in touched(outside)]
    shutil.rmtree(place, ignore_errors=True)
    return {
        "number": number,
        "storage": name,
        "done": done,
        "refused": sorted(user.refused),
        "seconds": round(time.monotonic() - started, 2),
        "wrong": user.wrong,
    }


def limit_memory() -> None:
    """Limit this process to `MEMORY` bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run(folder: Path, first: int, stop: int) -> None:
    """Print a line for each number."""
    sound = make_sound(folder / "sound")
    for path in sound.values():
        _require_harmless(path, folder / "copy")
    signal.signal(signal.SIGALRM, _too_late)
    limit_memory()
    for number in range(first, stop):
        sys.stdout.write(json.dumps(case(number, sound, folder)) + "\n")
        sys.stdout.flush()


def _require_harmless(path: Path, copy: Path) -> None:
    """Check that a sound storage shows no faults."""
    shutil.copytree(path.parent, copy)
    with open_storage(path) as storage:
        rows = rows_of(storage)
    user = User()
    user.use(copy / path.name, rows)
    assert not user.wrong, (path, user.wrong)
    known = {"StorageFull", "ReadOnlyStorage"}  # finalized HDF5 is full, and packed rows never grow
    assert user.refused <= known, (path, user.refused)
    shutil.rmtree(copy)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
