"""A folder of checkpoints on disk. Writes are atomic, and only the newest checkpoints are kept."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Self, cast

import torch

from tallyroll.collector.errors import StateError
from tallyroll.storage.files.manifest import seal_fits, sealed
from tallyroll.storage.files.paths import failed, sync_above, translated
from tallyroll.storage.files.safe_files import JSON_LIMIT, Inside

STATE, ABOUT, ROWS = "state.pt", "checkpoint.json", "rows"
FORMAT = "tallyroll.checkpoint"
VERSION = 2
"""The format version that is written.

Version 1 changed the types of values; version 2 keeps them.
"""
_READ = (1, 2)

_NAME = re.compile(r"(\d{6,})-at-(\d+)")
_WRITING, _OLD = ".writing-", ".old-"
_LOCK = ".lock"
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, order=True)
class Entry:
    """A checkpoint in a folder."""

    number: int
    """Sequence number, counted over all checkpoints that were ever saved in the folder."""
    transitions: int
    path: Path

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Return the entry for a path, or None if it is not the path of a checkpoint."""
        found = _NAME.fullmatch(path.name)
        return None if found is None else cls(int(found[1]), int(found[2]), path)


def entries_of(folder: Path) -> list[Entry]:
    """Return the checkpoints in a folder, oldest first."""
    with translated(folder):
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
    return sorted(entry for name in names if (entry := Entry.of(folder / name)) is not None)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against saves by other processes.

    Raises:
        StateError: another process holds the lock for longer than the timeout.
    """
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StateError(
                        f"another process has been saving a checkpoint to {folder} for "
                        f"{_PATIENCE_SECONDS:.0f} s. Give each run its own folder."
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(file)


def write(
    folder: Path,
    transitions: int,
    state: dict[str, Any],
    about: dict[str, Any],
    copy_rows: Callable[[Path], None] | None,
    keep_last: int | None,
) -> Path:
    """Write a checkpoint to a temporary folder, sync it, rename it, and remove old ones.

    Args:
        folder: folder of checkpoints, created if missing.
        transitions: number of transitions, which is part of the checkpoint's name.
        state: plain values.
        about: JSON values that describe the checkpoint.
        copy_rows: function that copies the rows to a path. None copies no rows.
        keep_last: number of checkpoints to keep. None keeps all.

    Raises:
        StateError: another process saves to the folder.
        StorageError: the disk is full, or writing is not permitted.
    """
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            _sweep(folder)
            there = entries_of(folder)
            number = there[-1].number + 1 if there else 1
            aside = folder / f"{_WRITING}{number:06d}"
            try:
                aside.mkdir()
                _save(state, aside / STATE, folder)
                if copy_rows is not None:
                    copy_rows(aside / ROWS)
                about = {
                    "format": FORMAT,
                    "version": VERSION,
                    **about,
                    "nbytes": (aside / STATE).stat().st_size,
                    "sha256": _sha256(aside / STATE),
                }
                (aside / ABOUT).write_text(json.dumps(sealed(about), indent=1))
                _sync_tree(aside)
                path = folder / f"{number:06d}-at-{transitions}"
                aside.rename(path)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            sync_above(path)
            for entry in [] if keep_last is None else there[: max(0, len(there) + 1 - keep_last)]:
                _remove(entry.path)
    return path


def _save(state: dict[str, Any], path: Path, folder: Path) -> None:
    """Write a state to a new file; errors name ``folder``.

    Raises:
        StorageError: the system cannot write the file.
    """
    written = _CheckedFile(open(path, "xb"))  # noqa: SIM115 - closed below, where errors are kept
    try:
        torch.save(state, cast(IO[bytes], written))  # needs `write` and `flush`
    finally:
        written.close()
        if written.error is not None:
            raise failed(folder, written.error, written.nbytes) from written.error


class _CheckedFile:
    """File for `torch.save` that keeps the first system error and discards later bytes.

    `torch.save` would replace an error of the file by a RuntimeError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = 0
        """Size of the whole state in bytes, including discarded bytes."""
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        self.nbytes += len(content)
        if self.error is None:
            try:
                self._file.write(content)
            except OSError as error:
                self.error = error
        return len(content)

    def flush(self) -> None:
        """Do nothing: `close` writes the buffered bytes."""

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error


def read(path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Read the checkpoint at a path, or the newest checkpoint in a folder.

    Returns:
        The path of the checkpoint, its description, and its state.

    Raises:
        StateError: there is no checkpoint, or it is damaged.
        StorageError: the checkpoint cannot be read.
    """
    chosen = _chosen(path)
    inside = Inside(Path(os.path.abspath(chosen)))
    with translated(chosen):
        about = _about(inside, chosen)
        try:
            opened = inside.open(inside.root / STATE, os.O_RDONLY)
        except FileNotFoundError as error:
            raise _damaged(chosen, f"{STATE} is missing") from error
        with os.fdopen(opened, "rb") as file:
            size, nbytes = os.fstat(file.fileno()).st_size, about.get("nbytes")
            if size != nbytes:
                raise _damaged(chosen, f"expected {nbytes} bytes in {STATE}, got {size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != about.get("sha256"):
                raise _damaged(chosen, f"{STATE} does not match its checksum")
            file.seek(0)
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
            except OSError:
                raise
            except Exception as error:  # torch.load raises many types
                raise _damaged(chosen, f"{STATE} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise _damaged(chosen, f"{STATE} does not hold a mapping")
    return chosen, about, state


def _chosen(path: Path) -> Path:
    if (path / ABOUT).exists():
        return path
    if entries := entries_of(path):
        return entries[-1].path
    raise StateError(
        f"{path} holds no checkpoint: expected a folder that save_checkpoint made, or a checkpoint "
        "in that folder"
    )


def _about(inside: Inside, chosen: Path) -> dict[str, Any]:
    try:
        about = json.loads(inside.read(inside.root / ABOUT, JSON_LIMIT))
    except (ValueError, RecursionError) as error:
        raise _damaged(chosen, f"{ABOUT} is not valid JSON ({error})") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise StateError(
            f"{chosen} is not a checkpoint of Tallyroll: another program wrote {ABOUT}"
        )
    if about.get("version") not in _READ:
        raise StateError(
            f"{chosen} is a checkpoint of version {about.get('version')!r}, but this "
            f"version of Tallyroll reads versions {', '.join(map(str, _READ))}. Use the version "
            "that wrote the checkpoint."
        )
    if not seal_fits(about):
        raise _damaged(chosen, f"{ABOUT} does not match its checksum")
    return about


def _damaged(path: Path, why: str) -> StateError:
    others = [entry.path.name for entry in entries_of(path.parent) if entry.path != path]
    older = f". Other checkpoints in this folder: {', '.join(others)}" if others else ""
    return StateError(f"{path} is damaged: {why}{older}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path) -> None:
    """Sync all files and directories below a folder to disk."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(os.path.join(place, name))
        _sync(place)


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync directories
            raise
    finally:
        os.close(file)


def _sweep(folder: Path) -> None:
    """Remove leftovers of a process that was killed while it saved or removed a checkpoint."""
    for name in os.listdir(folder):
        if name.startswith((_WRITING, _OLD)):
            shutil.rmtree(folder / name)


def _remove(path: Path) -> None:
    old = path.with_name(_OLD + path.name)  # a partly removed checkpoint must not keep its name
    path.rename(old)
    shutil.rmtree(old)
