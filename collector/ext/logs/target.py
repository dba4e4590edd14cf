"""Interface of log targets, their registry by name, and the CSV target."""

import contextlib
import csv
import fcntl
import io
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.interrupts import defer_signals

Row: TypeAlias = Mapping[str, int | float]
"""Numbers by name. Those of the log come first, from ``frames`` to ``seed``, and are NaN if they
are unknown. Those of the caller follow."""

_KINDS = {
    "tensorboard": "tallyroll.collector.ext.logs.tensorboard:TensorboardLog",
    "wandb": "tallyroll.collector.ext.logs.wandb:WandbLog",
}
EXPECTED = "a path that ends in .csv, tensorboard:DIR, wandb:PROJECT, or a function of a row"


class Newest(NamedTuple):
    """The last row of a log."""

    frames: int
    seconds: float = 0.0
    seed: int | None = None
    """Seed of the run; None if the log does not record it."""


class LogTarget(ABC):
    """A target that accepts the rows of one run. Errors show its name."""

    newest: Newest | None = None
    """Last row when the target was opened; None if there was none, or if it is unknown."""
    name: str

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write a complete row, or raise; ignore a row that the target already has."""

    @abstractmethod
    def forget_after(self, frames: int) -> None:
        """Remove rows whose frame count exceeds ``frames``.

        Their transitions were lost and will be collected again.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the target. Idempotent."""


def known_numbers(row: Row) -> dict[str, int | float]:
    """Return a row without the unknown numbers of the log; NaN of the caller stays."""
    names = [*row]
    own = names[: names.index("seed") + 1]
    return {name: row[name] for name in names if name not in own or not math.isnan(row[name])}


class Function(LogTarget):
    """Adapter for a function of the caller, called with each row as a new dict."""

    name = "the function"

    def __init__(self, call: Callable[[dict[str, int | float]], object]) -> None:
        self._call = call

    def write(self, row: Row) -> None:
        """Call the function."""
        self._call(dict(row))

    def forget_after(self, frames: int) -> None:
        """Do nothing: the adapter keeps no rows."""

    def close(self) -> None:
        """Do nothing: the caller owns the function."""


Target: TypeAlias = str | os.PathLike[str] | Callable[[dict[str, int | float]], object] | LogTarget


def open_target(target: Target) -> LogTarget:
    """Open the target of a log before the run collects.

    Raises:
        ArgumentError: the kind is unknown, another run writes to the target, or it cannot be
            opened.
        MissingExtra: the package that writes the target is not installed.
    """
    if isinstance(target, LogTarget):
        return target
    if callable(target):
        return Function(target)
    if not isinstance(target, str | os.PathLike):
        raise ArgumentError(f"log: expected {EXPECTED}, got {target!r}")
    try:
        return _opened(os.fspath(target))
    except OSError as error:
        raise ArgumentError(
            f"log: {target} cannot be opened: {error.strerror}. Give another path."
        ) from error


def _opened(text: str) -> LogTarget:
    kind, colon, place = text.partition(":")
    if colon and kind in _KINDS:
        if not place:
            raise ArgumentError(
                f"log: expected {EXPECTED}, got {text!r} without a folder or project"
            )
        module, _, name = _KINDS[kind].partition(":")
        opened: LogTarget = getattr(import_module(module), name)(place)
        return opened
    if text.endswith(".csv"):
        return CsvLog(text)
    raise ArgumentError(f"log: expected {EXPECTED}, got {text!r}")


_BEGINNING = b"frames,seconds,"
_END_NBYTES = 2**16
"""Number of bytes at the end of a file that are searched for the last line."""


class CsvLog(LogTarget):
    """Rows in a CSV file. The log appends to rows of an earlier process.

    An incomplete line at the end, left by a full disk or a kill, is truncated.

    Args:
        path: path of the file, created if missing.

    Raises:
        ArgumentError: another process writes to the file, or it is not a log.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path = os.path.realpath(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(self._path, flags, 0o666)
        try:
            self._lock()
            self._names: list[str] = []
            self._end = 0
            self._look()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise ArgumentError(f"log: {self.name} is not a regular file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                raise BlockingIOError  # a writer that added columns replaced the file just now
        except (BlockingIOError, FileNotFoundError) as error:
            raise ArgumentError(
                f"log: another run is writing to {self.name}. Give this run another file."
            ) from error

    def _look(self) -> None:
        """Read the column names and the last complete line, and truncate an incomplete line."""
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, _END_NBYTES, 0)
        first, line_end, _ = head.partition(b"\n")
        names = _cells(first)
        ours = first.startswith(_BEGINNING) and "seed" in names
        if not ours and (line_end or not _BEGINNING.startswith(first[: len(_BEGINNING)])):
            raise ArgumentError(
                f"log: {self.name} is not a log of a run: the first line is "
                f"{first[:60].decode(errors='replace')!r}. Give another file."
            )
        if not line_end:
            os.ftruncate(self._file, 0)
            return
        begin = max(0, size - _END_NBYTES)
        rest = os.pread(self._file, _END_NBYTES, begin)
        self._end = begin + rest.rindex(b"\n") + 1 if b"\n" in rest else 0
        self._names = names
        if self._end > len(first) + 1:
            last = rest[: self._end - begin - 1].rpartition(b"\n")[2]
            self.newest = self._read(last)
        os.ftruncate(self._file, self._end)

    def _read(self, line: bytes) -> Newest:
        values = dict(zip(self._names, _cells(line), strict=False))
        try:
            frames, seed = int(values["frames"]), int(values["seed"])
            return Newest(frames, float(values["seconds"]), seed)
        except (KeyError, ValueError) as error:
            raise ArgumentError(
                f"log: the last line of {self.name} is damaged: {line[:60]!r}. Give another file."
            ) from error

    def write(self, row: Row) -> None:
        """Write a row as one line; a new name becomes a column that is empty in earlier rows.

        Raises:
            OSError: the row cannot be written; no part of it is in the file.
        """
        if self.newest is not None and row["frames"] < self.newest.frames:
            return
        names = [*dict.fromkeys([*self._names, *row])]
        known = known_numbers(row)
        line = _line([known.get(name, "") for name in names])
        if not self._names:
            line = _line(names) + line
        with defer_signals():  # an interrupt could cause the row to be written twice
            if self._names and len(names) > len(self._names):
                self._add_columns(names)
            try:
                done = 0
                while done < len(line):
                    done += os.pwrite(self._file, line[done:], self._end + done)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)
                raise
            self._end += len(line)
            self._names = names
            self.newest = Newest(int(row["frames"]), row["seconds"], int(row["seed"]))

    def _add_columns(self, names: list[str]) -> None:
        """Replace the file by one with more columns, which are empty in the existing rows."""
        lines = os.pread(self._file, self._end, 0).splitlines()[1:]
        empty = b"," * (len(names) - len(self._names)) + b"\n"
        content = _line(names) + b"".join(line + empty for line in lines)
        temporary = f"{self._path}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(temporary, flags, stat.S_IMODE(os.fstat(self._file).st_mode))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = 0
            while done < len(content):
                done += os.pwrite(file, content[done:], done)
            os.replace(temporary, self._path)
        except BaseException:
            os.close(file)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        self.close()
        self._file, self._end, self._names = file, len(content), names

    def forget_after(self, frames: int) -> None:
        """Truncate the file before the first row with more than ``frames`` transitions."""
        if not self._end:
            return
        content = os.pread(self._file, self._end, 0)
        keep = last = content.index(b"\n") + 1
        for line in content[keep:].splitlines(keepends=True):
            if self._read(line.rstrip()).frames > frames:
                break
            last, keep = keep, keep + len(line)
        self.newest = self._read(content[last:keep].rstrip()) if keep > last else None
        os.ftruncate(self._file, keep)
        self._end = keep

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # forked children hold the lock too
            os.close(file)


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]), [])


def _line(values: Sequence[str | int | float]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()
