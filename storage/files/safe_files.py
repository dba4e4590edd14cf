"""Safe access to the files of a storage, which follows no links and opens only plain files.

Another user with write access to a storage's directory may have put a link to a third user's file
there. A path that the user names may be or contain a link; paths below it may not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tallyroll.storage.errors import TooManyFiles

JSON_LIMIT = 2**25
"""Maximum bytes of a JSON file to read. In memory it takes up to 20 times as much."""

OUT_OF_FILES = {errno.EMFILE, errno.ENFILE}

_ASIDE = ".tmp"
_LONGEST = 4095
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WRITES = os.O_WRONLY | os.O_RDWR


def too_many_files(path: object, error: OSError) -> TooManyFiles:
    """Return the `TooManyFiles` error for an error of the system."""
    return TooManyFiles(
        f"{path} cannot be opened: {error.strerror}. This process may have at most "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open (ulimit -n). Raise that "
        "limit, or close storages: a writer keeps one file open for each column, a reader keeps "
        "one."
    )


def open_any(path: Path | str, flags: int, directory: int | None = None) -> int:
    """Open any kind of file at a path; return a descriptor, or raise OSError.

    Raises:
        TooManyFiles: no more files may be open. This error is not an OSError, because many callers
            treat an OSError as a damaged file.
    """
    try:
        return os.open(path, flags, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise too_many_files(path, error) from error
        raise


class Inside:
    """Access to the files below a directory that the user named. All paths must be below it.

    Every method raises OSError with the path as its filename: ELOOP or ENOTDIR for a link, ENXIO
    for anything but a plain file, and EMLINK if a file to write to has another name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held = -1

    def hold(self) -> None:
        """Keep the root open until `release`, so that it is found even after it was moved."""
        if self._held < 0:
            self._held = open_any(self.root, _DIRECTORY)

    def release(self) -> None:
        """Close the root that `hold` opened."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def _below(self, path: Path) -> tuple[str, ...]:
        """Return the parts of a path below the root."""
        parts, root = path.parts, self.root.parts
        if parts[: len(root)] != root:
            raise ValueError(f"{str(path)!r} is not in the subpath of {str(self.root)!r}")
        return parts[len(root) :]

    @contextlib.contextmanager
    def _above(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory that contains ``path``, and the name in it."""
        *above, name = self._below(path)
        _require_short(path)
        held = self._held
        directory = open_any(self.root, _DIRECTORY) if held < 0 else held
        try:
            for part in above:
                inner = open_any(part, _DIRECTORY | os.O_NOFOLLOW, directory)
                if directory != held:
                    _close_quietly(directory)
                directory = inner
            yield directory, name
        except OSError as error:
            error.filename, error.filename2 = str(path), None  # the whole path, not only the name
            raise
        except TooManyFiles as error:
            assert isinstance(error.__cause__, OSError)
            raise too_many_files(path, error.__cause__) from error.__cause__
        finally:
            if directory != held:
                _close_quietly(directory)

    def open(self, path: Path, flags: int) -> int:
        """Open a plain file; return a descriptor."""
        with self._above(path) as (directory, name):
            return open_file(name, flags, directory)

    def open_directory(self, path: Path) -> int:
        """Open a directory; return a descriptor."""
        if path == self.root:
            return open_any(path, _DIRECTORY)
        with self._above(path) as (directory, name):
            return open_any(name, _DIRECTORY | os.O_NOFOLLOW, directory)

    def read(self, path: Path, limit: int) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: the file has more than ``limit`` bytes (EFBIG). Nothing is read.
        """
        with open(self.open(path, os.O_RDONLY), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > limit:
                raise OSError(errno.EFBIG, f"it has {size} bytes, more than the maximum of {limit}")
            return file.read(size)  # not `limit`, which would allocate that much memory

    def read_start(self, path: Path, nbytes: int) -> bytes:
        """Return the first bytes of a file."""
        with open(self.open(path, os.O_RDONLY), "rb") as file:
            return file.read(nbytes)

    def read_end(self, path: Path, nbytes: int) -> bytes:
        """Return the last bytes of a file."""
        with open(self.open(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - nbytes))
            return file.read(nbytes)

    def read_json(self, path: Path) -> Any:
        """Return the value in a JSON file; may also raise ValueError and RecursionError."""
        return json.loads(self.read(path, JSON_LIMIT))

    def write_atomically(
        self,
        path: Path,
        content: bytes | Iterable[bytes | memoryview],
        *,
        synced: bool = False,
        durable: bool = False,
    ) -> None:
        """Write a file atomically: write a temporary file and rename it to ``path``.

        Args:
            path: the path of the file.
            content: the bytes, or an iterable of pieces.
            synced: ensure that the file is complete even after a power cut.
            durable: return only when the new content would survive a power cut.
        """
        with self._above(path) as (directory, name):
            aside = name + _ASIDE
            try:
                with open(_made(directory, aside), "wb") as file:
                    for piece in [content] if isinstance(content, bytes) else content:
                        file.write(piece)
                    if synced or durable:
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                _remove(directory, aside)
                raise
            if durable:
                os.fsync(directory)

    def make(self, path: Path) -> int:
        """Create an empty file; return a descriptor. An existing file or link is removed."""
        _require_short(path)
        with self._above(path) as (directory, name):
            return _made(directory, name)

    def remove(self, path: Path) -> None:
        """Remove a file or a link, if it exists."""
        with self._above(path) as (directory, name):
            _remove(directory, name)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory below the root; do nothing if it is not empty."""
        with self._above(path) as (directory, name):
            try:
                os.rmdir(name, dir_fd=directory)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                    raise

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents below the root."""
        _require_short(path)
        place = self.root
        for part in path.relative_to(self.root).parts:
            above, place = place, place / part
            with (
                closing(self.open_directory(above)) as directory,
                contextlib.suppress(FileExistsError),
            ):
                os.mkdir(part, dir_fd=directory)
        os.close(self.open_directory(path))

    def sync(self, path: Path) -> None:
        """Wait until a file is on the disk; do nothing if there is no plain file at the path."""
        try:
            file = self.open(path, os.O_RDONLY)
        except OSError:
            return
        with closing(file):
            os.fsync(file)

    def sync_directory(self, path: Path) -> None:
        """Wait until the directory's entries are on the disk."""
        with closing(self.open_directory(path)) as directory:
            os.fsync(directory)


def _require_short(path: Path) -> None:
    # This class could open a longer path part by part, but other libraries could not.
    if len(os.fsencode(path)) + len(_ASIDE) > _LONGEST:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))


@contextlib.contextmanager
def closing(file: int) -> Iterator[int]:
    """Yield a descriptor, and close it at the end of the context."""
    try:
        yield file
    finally:
        os.close(file)


def close_all(files: Iterable[int]) -> None:
    """Close every descriptor, even if closing one fails; raise that error afterwards."""
    with contextlib.ExitStack() as exits:
        for file in files:
            exits.callback(os.close, file)


def _close_quietly(directory: int) -> None:
    # An error is harmless, because nothing was written through the descriptor. Raising it here
    # would lose the descriptor that the caller opened.
    with contextlib.suppress(OSError):
        os.close(directory)


def open_file(path: Path | str, flags: int, directory: int | None = None) -> int:
    """Open a plain file without following a link; return a descriptor, or raise OSError.

    With an open ``directory``, the rules of `Inside` apply. Without one, the user named the file,
    which may then have other names.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    file = open_any(path, flags, directory)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ENXIO, "it is not a file", str(path))
        if directory is not None and flags & _WRITES and found.st_nlink > 1:
            raise OSError(errno.EMLINK, "it is a hard link")
    except BaseException:
        os.close(file)
        raise
    return file


def data_ranges(file: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the ranges of an open file from ``start`` on that are not holes.

    Reading a hole takes time and gives zeros. The position of the descriptor does not change.
    """
    size, at = os.fstat(file).st_size, start
    while at < size:
        position = os.lseek(file, 0, os.SEEK_CUR)
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
            stop = os.lseek(file, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more data
                return
            begin, stop = at, size  # the file system does not support holes
        finally:
            os.lseek(file, position, os.SEEK_SET)
        yield begin, min(stop, size)
        at = stop


def write_all(file: int, content: bytes | memoryview, at: int) -> None:
    """Write all of ``content`` at byte ``at``."""
    rest = memoryview(content)
    while len(rest):
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written


def _made(directory: int, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return open_file(name, flags, directory)
    except FileExistsError:
        _remove(directory, name)  # a leftover of a killed process, or a link
        return open_file(name, flags, directory)


def _remove(directory: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
