"""Pull a dataset from an object store, completely or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.filesize import decimal

from tallyroll.storage.errors import CorruptStorage, InvalidAddress, StorageFull
from tallyroll.storage.ext.atomic_create import atomic_creation, require_free
from tallyroll.storage.ext.packed.archives import ZarrArchive
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.remote.address import s3_path
from tallyroll.storage.ext.remote.objects import ListedObject
from tallyroll.storage.ext.remote.options import S3Options
from tallyroll.storage.ext.remote.push_plan import PLAN, PlannedObject, files_of, is_inside, parsed
from tallyroll.storage.ext.remote.remote_archive import RemoteArchive
from tallyroll.storage.files.paths import free_bytes, translated, user_path
from tallyroll.storage.files.safe_files import JSON_LIMIT, Inside
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.user_code import user_callback

_AT_A_TIME: Final = 4
_PIECE: Final = 2**23
_SPARE_NBYTES: Final = 2**22


@dataclass(frozen=True)
class PullReport(PageSource):
    """The result of a pull."""

    path: str
    address: str
    rows: int
    objects: int
    nbytes: int
    checked_by: str
    """The kind of check: ``"checksums"`` of the objects, or ``"chunks"``.

    Chunks are checked only if `push` did not write the dataset.
    """

    def _show_on_(self, page: Page) -> None:
        page.print(
            f"{self.path}: {self.rows:,} rows, {decimal(self.nbytes)} in {self.objects:,} files, "
            f"checked by {self.checked_by}"
        )


@user_callback("pull")
def pull(
    address: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    options: S3Options | None = None,
    progress: Progress | None = None,
) -> PullReport:
    """Copy a packed dataset from ``s3://bucket/key`` to a directory.

    The dataset is written next to the destination, checked, and then renamed. If the call fails or
    the process is killed, nothing is at ``destination``.

    Args:
        address: the address of a pushed dataset.
        destination: the path of the copy; it must not exist.
        options: the options of the store; see `S3Options`.
        progress: called after each object with the number of bytes received and the total.

    Raises:
        PathIsTaken: ``destination`` exists.
        StorageMissing: there is nothing at the address.
        NotAStorage: the dataset was pushed only in part, or is not a packed dataset.
        CorruptStorage: an object is missing, or differs from the one that was pushed.
        ObjectChanged: an object was replaced during the pull.
        ObjectStoreFailed: the store rejects a request, or does not answer in time.
        StorageFull: the dataset does not fit on the disk.
        InvalidAddress: the address contains credentials, or is invalid.
        MissingLibrary: the extra ``s3`` is not installed.
    """
    source, place = s3_path(address), user_path(destination)
    if source is None:
        raise InvalidAddress("address: expected s3://BUCKET/KEY, got another path.")
    require_free(place)
    archive = RemoteArchive(source, options or S3Options())
    with contextlib.closing(archive):
        wanted, plan = _wanted(archive)
        nbytes = sum(each.nbytes for each in wanted.values())
        if nbytes + _SPARE_NBYTES > (free := free_bytes(place)):
            raise StorageFull(
                f"{place} has no room for the {nbytes:,} bytes of {source}: {free:,} bytes are "
                "free. Nothing was written. Free space, or give another path."
            )
        with atomic_creation(place) as target, translated(target):
            target.mkdir()
            _copy(archive, Inside(target), wanted, plan, progress)
            rows = _checked(target, source, chunks=not plan)
    return PullReport(
        str(place), str(source), rows, len(wanted), nbytes, "checksums" if plan else "chunks"
    )


def _wanted(archive: RemoteArchive) -> tuple[dict[str, ListedObject], dict[str, PlannedObject]]:
    """Return the objects to copy, and their entries in the list of the push, if there is one."""
    archive.read_manifest()  # raises an error if there is no dataset
    listed, source = archive.files.listed, archive.path
    if PLAN not in listed:
        with contextlib.closing(PackedReader(archive, cache_nbytes=0)) as reader:
            names = files_of(reader.layout, reader.manifest)
        return {name: listed[name] for name in names if name in listed}, {}
    plan = parsed(archive.files.whole(source / PLAN, JSON_LIMIT), source / PLAN).objects
    for name, each in plan.items():
        found = listed.get(name)
        if found is None or found.nbytes != each.nbytes:
            has = "is missing" if found is None else f"has {found.nbytes:,} bytes"
            raise CorruptStorage(
                f"{source / name} {has}, but {each.nbytes:,} bytes were pushed. Push the dataset "
                "again."
            )
    return {name: listed[name] for name in plan}, plan


def _copy(
    archive: RemoteArchive,
    inside: Inside,
    wanted: dict[str, ListedObject],
    plan: dict[str, PlannedObject],
    progress: Progress | None,
) -> None:
    done, total = 0, sum(each.nbytes for each in wanted.values())
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="tallyroll-pull") as pool:
        waiting = {
            name: pool.submit(_copy_one, archive, inside, name, found, plan.get(name))
            for name, found in wanted.items()
        }
        try:
            for name, each in waiting.items():
                each.result()
                done += wanted[name].nbytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            for each in waiting.values():
                each.cancel()
            raise
    for folder, _, _ in os.walk(inside.root):
        inside.sync_directory(Path(folder))


def _copy_one(
    archive: RemoteArchive,
    inside: Inside,
    name: str,
    found: ListedObject,
    known: PlannedObject | None,
) -> None:
    if not is_inside(name):
        raise CorruptStorage(
            f"{archive.path} is not a dataset: it names an object outside its address."
        )
    path, digest = inside.root / name, hashlib.sha256()
    inside.make_directory(path.parent)
    with open(inside.make(path), "wb") as file:
        for begin in range(0, found.nbytes, _PIECE):
            stop = min(begin + _PIECE, found.nbytes)
            piece = archive.files.objects.read(name, begin, stop, found)
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    if known is not None and digest.hexdigest() != known.sha256:
        raise CorruptStorage(
            f"{archive.path / name} differs from the pushed object: its checksum does not match. "
            "Pull again. If that fails too, push the dataset again."
        )


def _checked(target: Path, source: object, *, chunks: bool) -> int:
    """Check the copy, and return its number of rows.

    Raises:
        CorruptStorage: the copy is damaged.
    """
    with contextlib.closing(PackedReader(ZarrArchive(target), cache_nbytes=0)) as reader:
        for _, wrong in reader.damaged_chunks(lambda _: None) if chunks else ():
            raise CorruptStorage(f"{source} is damaged: {wrong}")
        return len(reader.span)
