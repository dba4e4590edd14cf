"""Paths of storages: checks, free space, directories, and conversion of system errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tallyroll.storage.errors import (
    CorruptStorage,
    DiskFailed,
    InvalidAddress,
    NotWritable,
    PathIsFile,
    StorageFull,
    StorageMissing,
    TooManyFiles,
    UnsupportedPlatform,
)
from tallyroll.storage.files.safe_files import OUT_OF_FILES, Inside, too_many_files

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors that mean that a file system, a quota or a file has no space left."""
OTHER_KINDS = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK}
"""Errors that mean that a path is a link, or not a plain file."""
_SCHEMES = "s3a?|gc?s|az|abfss?|adl|wasbs?|r2|oss|hdfs|hf|dbfs|memory|file|ftps?|https?"
_ADDRESS = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]+)://|({_SCHEMES}):/", re.IGNORECASE)
"""Pattern of the beginning of an address; `pathlib` keeps only one of the slashes."""
_SIGNS = re.compile(r"[*?[]")
_UNABLE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV}


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a user's path in a file system, with ``~`` at its start expanded.

    Raises:
        InvalidAddress: the path is an address, such as ``s3://BUCKET/KEY``, for which a folder
            named ``s3:`` would be created. The message repeats only the scheme.
    """
    if found := _ADDRESS.match(os.fspath(path)):
        raise InvalidAddress(
            "expected a path in a file system, got an address that begins with "
            f"{found[1] or found[2]}://. Only object stores that support S3 can be used: "
            "`tallyroll push` writes packed rows to s3://BUCKET/KEY, and open_storage reads them "
            "from there."
        )
    return Path(os.path.expanduser(path))


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return True if ``path`` begins like an address, such as ``s3://``."""
    return _ADDRESS.match(os.fspath(path)) is not None


def is_pattern(path: object) -> bool:
    """Return True if ``path`` is a glob pattern, and no file has that name."""
    if not isinstance(path, str | os.PathLike):
        return False
    text = os.fspath(path)
    return isinstance(text, str) and bool(_SIGNS.search(text)) and not os.path.lexists(text)


def refuse_nothing(path: Path, what_to_do: str) -> None:
    """Raise `StorageMissing`, with the remedy ``what_to_do``, if nothing exists at ``path``."""
    if path.exists():
        return
    if path.is_symlink():
        raise StorageMissing(
            f"{path} is a link to {os.readlink(path)}, which does not exist. {what_to_do}"
        )
    raise StorageMissing(f"{path} does not exist. {what_to_do}")


def refuse_impossible(path: Path) -> None:
    """Raise `NotWritable` for a path that no file can have."""
    try:
        # exists() would return False for some of these errors.
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise NotWritable(
            f"{path} cannot be the path of a storage: {error.strerror}. Give another path."
        ) from error


def require_creatable(path: Path) -> None:
    """Raise `NotWritable` or `PathIsFile` unless a directory can be created or written to."""
    for place in (path, *path.parents):
        if place.is_dir():
            if not os.access(place, os.W_OK | os.X_OK):
                why = "" if place == path else f"{path} cannot be created: "
                raise NotWritable(f"{why}{place} cannot be written to. Give a writable path.")
            return
        if place.is_symlink() and not place.exists():
            raise PathIsFile(
                f"{path} should be a directory, but {place} is a broken link. Give another path."
            )
        if place.exists():
            raise PathIsFile(
                f"{path} should be a directory, but {place} is a file. Give another path."
            )


def make_directory(path: Path) -> None:
    """Create a directory and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise failed(path, error, 0) from error
        raise NotWritable(
            f"{path} cannot be created: {error.strerror}. Give another path."
        ) from error


def sync_above(path: Path) -> None:
    """Wait until the directory entries that lead to ``path``, on its file system, are on the disk.

    Raises:
        DiskFailed: the system cannot write them.
    """
    with translated(path):
        real = Path(os.path.realpath(path))
        device = os.stat(real).st_dev
        for above in real.parents:
            if os.stat(above).st_dev != device:
                break
            with contextlib.suppress(PermissionError):  # this user created nothing there
                _sync_directory(above)


def _sync_directory(path: Path) -> None:
    try:
        Inside(path).sync_directory(path)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EROFS}:  # the directory has nothing to write
            raise


def open_column(inside: Inside, path: Path, flags: int) -> int:
    """Return a descriptor of a column's file or, with O_DIRECTORY, of its directory.

    Args:
        inside: the storage's files.
        path: the path to open.
        flags: the flags of `os.open`.

    Raises:
        CorruptStorage: the file is missing, or something else is at the path.
        NotWritable: permission is denied.
        DiskFailed: the system cannot open it.
    """
    try:
        return inside.open_directory(path) if flags & os.O_DIRECTORY else inside.open(path, flags)
    except FileNotFoundError as error:
        raise CorruptStorage(
            f"{path}, a column in the manifest, is missing. Restore it from a copy."
        ) from error
    except OSError as error:
        raise failed(path, error, 0) from error


def free_bytes(path: Path) -> int:
    """Return the number of bytes that this user may write at ``path``, which need not exist."""
    found = os.statvfs(nearest(path.absolute()))
    # A file system without blocks, such as /proc, does not report free space.
    return found.f_bavail * found.f_frsize if found.f_blocks else 2**63 - 1


def nearest(path: Path) -> Path:
    """Return ``path`` or its nearest existing parent."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


@contextlib.contextmanager
def translated(path: Path, nbytes: int = 0) -> Iterator[None]:
    """Convert an OSError within the context to the error that `failed` returns for it."""
    try:
        yield
    except OSError as error:
        raise failed(path, error, nbytes) from error


def translates_errors(
    method: Callable[Concatenate[Any, _Args], _Result],
) -> Callable[Concatenate[Any, _Args], _Result]:
    """Decorate a method of an object that has a ``path``, to convert errors as `translated` does.

    The decorator is too slow for methods that are called for every row.
    """

    @functools.wraps(method)
    def wrapper(self: Any, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except OSError as error:  # read the path only here, because a constructor sets it
            raise failed(self.path, error, 0) from error

    return wrapper


def failed(
    path: Path, error: OSError, nbytes: int
) -> StorageFull | TooManyFiles | UnsupportedPlatform | NotWritable | CorruptStorage | DiskFailed:
    """Return the Tallyroll error for a system error at ``path``, if ``nbytes`` were needed."""
    if error.errno in FULL:
        return StorageFull(
            f"{path} {_shortage(path, error, nbytes)} ({error.strerror}). Committed rows are "
            "intact. Free space, or continue in another location."
        )
    if error.errno in OUT_OF_FILES:
        return too_many_files(path, error)
    if error.errno in _UNABLE:
        return UnsupportedPlatform(
            f"the file system of {path} cannot reserve or map space ({error.strerror}). Use a "
            "local file system."
        )
    if error.errno == errno.ENOMEM:
        return UnsupportedPlatform(
            f"this process cannot map {path} ({error.strerror}): the system limits the number of "
            "maps (vm.max_map_count) or the address space (ulimit -v). Raise the limit."
        )
    if error.errno in OTHER_KINDS:
        return CorruptStorage(_other_kind(path, error))
    if error.errno == errno.ENAMETOOLONG:
        return NotWritable(
            f"{path} would need longer paths than the system allows ({error.strerror}). Use "
            "shorter names, or another location."
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return NotWritable(
            f"{path} cannot be opened or written to ({error.strerror}). Open the storage as a user "
            "who has permission, or use another location."
        )
    if error.errno in {errno.ENOENT, errno.ESTALE}:
        return DiskFailed(
            f"{_named_in(error, path)} is gone: the storage, or a part of it, was deleted or moved "
            "while it was open. Committed rows moved with it."
        )
    return DiskFailed(
        f"the system cannot read or write {path}: {error.strerror or error}. Committed rows were "
        "not changed, but the disk may have lost some. Check them with `tallyroll verify`."
    )


def _shortage(path: Path, error: OSError, nbytes: int) -> str:
    """Return a phrase that names the limit that was reached, if the system reveals it."""
    try:
        found, free = os.statvfs(nearest(path.absolute())), str(free_bytes(path))
    except OSError:
        return f"needs {nbytes} more bytes, and the system does not report how many are free"
    if error.errno == errno.ENOSPC and found.f_files and not found.f_favail:
        return (
            f"needs another file, but all {found.f_files} inodes of the file system are in use, "
            f"while {free} bytes are free (`df -i` counts inodes)"
        )
    if error.errno == errno.EFBIG:
        return (
            f"needs {nbytes} more bytes, which exceeds the maximum file size (of the file system, "
            f"or ulimit -f), while {free} bytes are free"
        )
    return f"needs {nbytes} more bytes, and {free} are free"


def _named_in(error: OSError, path: Path) -> Path:
    """Return the path that an error names, or ``path`` if it names none or a file descriptor."""
    for name in (error.filename2, error.filename):
        if isinstance(name, str | bytes | os.PathLike):
            return Path(os.fsdecode(name))
    return path


def _other_kind(path: Path, error: OSError) -> str:
    """Return a sentence about a link, or another kind of file, in place of a storage's file."""
    what = _named_in(error, path)
    if what.is_symlink() or error.errno == errno.EMLINK:
        link = "a link" if what.is_symlink() else "a file that has a second name"
        return (
            f"{what} is {link} ({error.strerror}). A storage neither reads through links nor "
            "writes to files with a second name. Caches and data versioning (the Hugging Face "
            "hub's, DVC, git-annex) replace files by links: copy the storage with `cp -rL`, and "
            "open the copy. If you use none of these, something else replaced the file: restore it "
            "from a copy."
        )
    return (
        f"{what} was replaced by a link or another kind of file ({error.strerror}). Restore it "
        "from a copy."
    )
