"""Push a packed dataset to an object store. It becomes visible only when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from rich.filesize import decimal

from tallyroll.storage.errors import CorruptStorage, InvalidAddress, NotAStorage, PathIsTaken
from tallyroll.storage.ext.packed.archives import ZarrArchive
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.remote.address import s3_path
from tallyroll.storage.ext.remote.objects import ListedObject, Objects
from tallyroll.storage.ext.remote.options import S3Options
from tallyroll.storage.ext.remote.push_plan import (
    LAST,
    PLAN,
    ROOT,
    PlannedObject,
    PushPlan,
    files_of,
    parsed,
)
from tallyroll.storage.files.paths import refuse_nothing, translated, user_path
from tallyroll.storage.files.safe_files import JSON_LIMIT, Inside
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.user_code import user_callback

SHA256: Final = "tallyroll-sha256"
"""The attribute of each object that holds the SHA-256 of its bytes."""
_AT_A_TIME: Final = 4
_PIECE: Final = 2**20


@dataclass(frozen=True)
class PushReport(PageSource):
    """The result of a push."""

    address: str
    rows: int
    objects: int
    nbytes: int
    """The total size of all objects of the dataset."""
    sent: int
    """The number of objects that this call wrote. The others were present already."""
    sent_nbytes: int

    def _show_on_(self, page: Page) -> None:
        page.print(
            f"{self.address}: {self.rows:,} rows, {decimal(self.nbytes)} in {self.objects:,} "
            f"objects, {self.sent:,} of them sent"
        )


@user_callback("push")
def push(
    source: str | os.PathLike[str],
    address: str | os.PathLike[str],
    *,
    options: S3Options | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> PushReport:
    """Write a packed dataset to ``s3://bucket/key``.

    The dataset can be opened there once it is complete: the objects of rows are written first and
    the manifest last. After a kill or a failure of the store, a call with the same arguments
    resumes. Objects that already have the right size and checksum are not written again.

    Args:
        source: the directory of a local packed dataset.
        address: the destination.
        options: the options of the store; see `S3Options`.
        replace: replace a different dataset at the address. Readers that have it open raise
            `ObjectChanged`.
        progress: called after each object with the number of bytes present and the total.

    Raises:
        PathIsTaken: the address holds another dataset, or objects that belong to no dataset.
        NotAStorage: the source is not packed as Zarr.
        CorruptStorage: a file of the source is missing or changed during the push, or the list of
            objects at the address is too large.
        InvalidAddress: the address contains credentials, or is invalid.
        ObjectStoreFailed: the store rejects a request, or does not answer in time.
        MissingLibrary: the extra ``s3`` is not installed.
    """
    place = s3_path(address)
    if place is None:
        raise InvalidAddress("address: expected s3://BUCKET/KEY, got another path.")
    root = user_path(source)
    refuse_nothing(root, "Give the path of a packed dataset.")
    rows, plan = _planned(root)
    objects = Objects(place, options or S3Options())
    there = objects.listed()
    before = _previous_plan(objects, there, plan, replace)
    if before != plan:
        # Delete the objects that make a dataset visible first, so that a mix of two datasets is
        # never visible. Then delete the objects that only the previous dataset has, while its list
        # still exists. Keep all other objects, which no list names.
        own = set(before.objects) - set(plan.objects) if before is not None else set()
        objects.delete(name for name in (LAST, ROOT, *sorted(own)) if name in there)
        objects.put(PLAN, plan.to_json(), {})
    sent = _send_missing(objects, Inside(root), plan, there if before == plan else {}, progress)
    return PushReport(
        str(place), rows, len(plan.objects), plan.nbytes, len(sent),
        sum(plan.objects[name].nbytes for name in sent),
    )  # fmt: skip


def _planned(root: Path) -> tuple[int, PushPlan]:
    archive = ZarrArchive(root)
    if not root.is_dir() or not archive.is_there():
        raise NotAStorage(
            f"{root} is not packed as Zarr. Pack it first: `tallyroll pack {root} PACKED`, and "
            "push PACKED."
        )
    with contextlib.closing(PackedReader(archive, cache_nbytes=0)) as reader:
        layout, manifest = reader.layout, reader.manifest
        rows, id = len(reader.span), str(manifest["id"])
    found = {}
    for name, needed in files_of(layout, manifest).items():
        try:
            found[name] = _planned_object(archive.inside, root / name)
        except FileNotFoundError as error:
            if needed:
                raise CorruptStorage(
                    f"{root / name} is missing. Restore it from a copy, or pack the rows again."
                ) from error
    return rows, PushPlan(id, found)


def _planned_object(inside: Inside, path: Path) -> PlannedObject:
    digest, nbytes = hashlib.sha256(), 0
    with _file(inside, path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            nbytes += len(piece)
    return PlannedObject(nbytes, digest.hexdigest())


@contextlib.contextmanager
def _file(inside: Inside, path: Path) -> Iterator[BinaryIO]:
    with open(inside.open(path, os.O_RDONLY), "rb") as file:
        yield file


def _previous_plan(
    objects: Objects, there: dict[str, ListedObject], plan: PushPlan, replace: bool
) -> PushPlan | None:
    """Return the object list of the complete or partial dataset at the address, or None.

    Raises:
        PathIsTaken: the address holds other objects, which must not be replaced.
    """
    if not there:
        return None
    place, found = objects.place, None
    if PLAN in there:
        if there[PLAN].nbytes > JSON_LIMIT:
            raise CorruptStorage(
                f"{place / PLAN} is too large for a list of objects. Remove it, or push to another "
                "address."
            )
        content = objects.read(PLAN, 0, there[PLAN].nbytes, there[PLAN])
        with contextlib.suppress(CorruptStorage):
            found = parsed(content, place / PLAN)
    elif LAST not in there:
        raise PathIsTaken(
            f"{place} has objects, such as {min(there)}, but no dataset of Tallyroll. A push does "
            "not replace such objects. Give another address."
        )
    if found != plan and not replace:
        raise PathIsTaken(
            f"{place} has a different dataset, or a part of one"
            + (f" (its id is {found.id}, not {plan.id})" if found is not None else "")
            + ". Give another address, or replace the dataset with replace=True (--replace)."
        )
    return found


def _send_missing(
    objects: Objects,
    inside: Inside,
    plan: PushPlan,
    there: dict[str, ListedObject],
    progress: Progress | None,
) -> list[str]:
    """Write the objects that are missing or differ, and return their names."""
    done, sent = 0, []
    names = plan.order
    groups = [[name for name in names if name not in (ROOT, LAST)], [ROOT], [LAST]]
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="tallyroll-push") as pool:
        looks = pool.map(lambda name: _is_uploaded(objects, name, plan, there), names)
        right = {name for name, found in zip(names, looks, strict=True) if found}
        if LAST in there and len(right) < len(names):
            # Hide the dataset until it is complete again.
            objects.delete([LAST, ROOT])
            right -= {LAST, ROOT}

        def one(name: str) -> bool:
            if name in right:
                return False
            path = inside.root / name
            with translated(path), _file(inside, path) as file:
                if os.fstat(file.fileno()).st_size != plan.objects[name].nbytes:
                    raise CorruptStorage(
                        f"{path} changed while it was pushed. Push the dataset again."
                    )
                objects.put(name, file, {SHA256: plan.objects[name].sha256})
            return True

        for group in groups:
            waiting = [pool.submit(one, name) for name in group]
            try:
                for name, each in zip(group, waiting, strict=True):
                    if each.result():
                        sent.append(name)
                    done += plan.objects[name].nbytes
                    if progress is not None:
                        progress(done, plan.nbytes)
            except BaseException:
                for each in waiting:
                    each.cancel()
                raise
    return sent


def _is_uploaded(
    objects: Objects, name: str, plan: PushPlan, there: dict[str, ListedObject]
) -> bool:
    wanted, found = plan.objects[name], there.get(name)
    if found is None or found.nbytes != wanted.nbytes:
        return False
    return objects.note(name, SHA256) == wanted.sha256
