"""What every format asks of the file system, and how it says what came back."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from .errors import (
    CorruptStorage,
    NotWritable,
    PathIsFile,
    StorageFull,
    UnsupportedPlatform,
)

__all__ = [
    "failed",
    "make_directory",
    "open_inside",
    "open_plain",
    "read_plain",
    "refuse_impossible",
    "require_creatable",
    "space_left",
]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OTHER_KINDS = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}
_UNABLE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV}


def refuse_impossible(path: Path) -> None:
    """Raise `NotWritable` for a path that no file can have."""
    try:
        # Not exists(): that says False to some of these errors.
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise NotWritable(
            f"{path} cannot be the path of a storage: {error.strerror}. Give another path."
        ) from error


def require_creatable(path: Path) -> None:
    """Raise `NotWritable` or `PathIsFile` unless the directory ``path`` is there or can be made."""
    for place in (path, *path.parents):
        if place.is_dir():
            if not os.access(place, os.W_OK | os.X_OK):
                raise NotWritable(
                    f"{path} cannot be created: {place} cannot be written to. Give a path that can."
                )
            return
        if place.is_symlink() and not place.exists():
            raise PathIsFile(
                f"{path} should be a directory, and {place} is a link to nothing. Give another "
                "path."
            )
        if place.exists():
            raise PathIsFile(
                f"{path} should be a directory, and {place} is a file. Give another path."
            )


def make_directory(path: Path) -> None:
    """Make a directory and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWritable(
            f"{path} cannot be created: {error.strerror}. Give another path."
        ) from error


def open_inside(root: Path, parts: Iterable[str], flags: int, *, what: str) -> int:
    """Open ``root/parts...``, through no link: a storage's rows lie inside its directory.

    Args:
        root: the storage.
        parts: names of directories, and of the file or directory itself.
        flags: of `os.open`.
        what: what is there, for messages.

    Raises:
        CorruptStorage: it is missing, or something else is there.
        NotWritable: permission denied.
    """
    *above, name = parts
    place = root.joinpath(*above, name)
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in above:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would keep us waiting
        return _plain(os.open(name, flags, 0o666, dir_fd=directory), flags)
    except FileNotFoundError as error:
        raise CorruptStorage(
            f"{place} is missing, which the manifest says is {what}. Restore it from a copy."
        ) from error
    except PermissionError as error:
        raise NotWritable(
            f"{place} cannot be opened: permission denied. Open the storage as a user who may."
        ) from error
    except OSError as error:
        if error.errno not in _OTHER_KINDS:
            raise
        raise CorruptStorage(
            f"{place} is not {what}, but a link or of another kind ({error.strerror}). Restore it "
            "from a copy."
        ) from error
    finally:
        os.close(directory)


def open_plain(path: Path, flags: int) -> int:
    """Open a file, and nothing but a file; raises OSError."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK
    return _plain(os.open(path, flags), flags)


def read_plain(path: Path) -> bytes:
    """The content of a file, and of nothing but a file; raises OSError."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _plain(file: int, flags: int) -> int:
    if flags & os.O_DIRECTORY or stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.ENXIO, "it is no file")


def space_left(path: Path) -> int:
    """Bytes free for this user on the file system of ``path``, or of what is above it."""
    place = next(place for place in (path, *path.parents) if place.exists())
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def failed(
    path: Path, error: OSError, nbytes: int
) -> StorageFull | UnsupportedPlatform | NotWritable | CorruptStorage | OSError:
    """What an error of the file system means to a storage at ``path`` that wanted ``nbytes``."""
    if error.errno in _FULL:
        return StorageFull(
            f"{path} needs {nbytes} more bytes, and {space_left(path)} are free "
            f"({error.strerror}). Committed rows are intact. Free space, or go on in another place."
        )
    if error.errno in _UNABLE:
        return UnsupportedPlatform(
            f"the file system of {path} cannot reserve or map space ({error.strerror}). Use a "
            "local file system."
        )
    if error.errno == errno.ENOMEM:
        return UnsupportedPlatform(
            f"the system does not let this process map {path} ({error.strerror}): it limits maps "
            "(vm.max_map_count), or address space (ulimit -v). Raise the limit."
        )
    if error.errno in _OTHER_KINDS:
        what = error.filename2 or error.filename or path
        return CorruptStorage(
            f"{what} is not what this storage made there ({error.strerror}): something else took "
            "its place. Restore it from a copy."
        )
    if error.errno == errno.ENAMETOOLONG:
        return NotWritable(
            f"{path} would need longer paths than the system allows ({error.strerror}). Use "
            "shorter names, or another place."
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return NotWritable(
            f"{path} cannot be written to ({error.strerror}). Open the storage as a user who may, "
            "or in a place where one can."
        )
    return error
