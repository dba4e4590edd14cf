"""Repair: save the readable rows of a damaged or unfinished dataset in a new storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tallyroll.storage.errors import CorruptStorage, InvalidDataset, NotAStorage
from tallyroll.storage.ext.atomic_create import require_free, scratch_folder
from tallyroll.storage.ext.dataset_checks.disk import Ranges, unreadable_in
from tallyroll.storage.ext.dataset_checks.verify_dataset import kind_at
from tallyroll.storage.ext.exchange.base import ExchangeFormat, source_errors
from tallyroll.storage.ext.exchange.dataset_import import imported
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.ext.repair.d4rl import D4rlRepair
from tallyroll.storage.ext.repair.lerobot import LerobotRepair
from tallyroll.storage.ext.repair.losses import Loss, Losses, RowsRepair
from tallyroll.storage.ext.repair.minari import MinariRepair
from tallyroll.storage.ext.repair.ours import OurRepair
from tallyroll.storage.ext.repair.rlds import RldsRepair
from tallyroll.storage.files.paths import refuse_nothing, translated, user_path
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.storages import open_storage

OURS: Final = "tallyroll"
"""The kind of Tallyroll's own storages."""
_KINDS: Final[dict[str, type[RowsRepair]]] = {
    "d4rl": D4rlRepair,
    "minari": MinariRepair,
    "rlds": RldsRepair,
}
_SUFFIX: Final = ".repaired-aside"
_REPAIRED: Final = "repaired"
_SHOWN: Final = 20


@dataclass(frozen=True)
class RepairReport(PageSource):
    """The result of a repair: the saved rows, and a list of the losses."""

    path: str
    format: str
    """The short name of the storage format: ``memmap``, ``hdf5`` or ``zarr``."""
    kind: str
    """The kind of the source; ``tallyroll`` is a storage of Tallyroll."""
    rows: int
    columns: tuple[str, ...]
    lost: tuple[Loss, ...]
    """The losses, in the order of the source."""

    @property
    def whole(self) -> bool:
        """True if nothing was lost."""
        return not self.lost

    @property
    def lost_rows(self) -> int | None:
        """The number of lost rows, or None if the number is unknown for a loss."""
        counts = [each.rows for each in self.lost]
        known = [each for each in counts if each is not None]
        return sum(known) if len(known) == len(counts) else None

    def _show_on_(self, page: Page) -> None:
        show_repair(self, page)


def show_repair(report: RepairReport, page: Page, source: str = "", more: str = "") -> None:
    """Write a report to a page.

    ``source`` is the path of the damaged dataset. ``more`` is a note on where all losses are
        listed.
    """
    of = f" of {source}" if source else ""
    page.print(
        f"{report.path}: {report.rows:,} rows{of} written ({report.format}, "
        f"{len(report.columns)} columns)"
    )
    count = "" if report.lost_rows is None else f": {report.lost_rows:,} rows"
    page.print("nothing was lost" if report.whole else f"lost{count}")
    for each in report.lost[:_SHOWN]:
        page.print(f"    {each}")
    if len(report.lost) > _SHOWN:
        page.print(f"    and {len(report.lost) - _SHOWN:,} more{more}")


def kinds() -> list[str]:
    """Return the kinds of datasets that can be repaired."""
    return sorted([*_KINDS, "lerobot", OURS])


def repair(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    kind: str | None = None,
    *,
    format: str | None = None,
    progress: Progress | None = None,
) -> RepairReport:
    """Save the readable rows of a damaged or unfinished dataset in a new storage.

    Use this for recordings in LeRobot, HDF5 or TFRecord files whose writer was killed, and for
    storages after a disk error. The repair does not change the source. It executes and unpickles
    nothing in it and follows no link. Each row is saved completely or not at all. Rows after a gap
    form a separate trajectory. The report lists each loss with its place. The new storage is
    created completely or not at all.

    Args:
        source: a file or a folder.
        destination: the path of the new storage; it must not exist.
        kind: ``"lerobot"``, ``"minari"``, ``"d4rl"``, ``"rlds"``, or ``"tallyroll"`` for a storage.
            None detects the kind by the files.
        format: ``"memmap"``, ``"hdf5"`` or ``"zarr"``. None selects by the suffix of
            ``destination``.
        progress: called after each block with the number of bytes written and the total.

    Raises:
        InvalidDataset: no row can be read, or the kind is unknown.
        MissingLibrary: a library is not installed.
        NotEnoughMemory: the source claims more or larger rows than fit into memory.
        OpenError: a path cannot be opened, or is taken.
        StorageFull: the rows do not fit on the disk.
        ValueError: an argument has a value that is not allowed.
    """
    whence, place = user_path(source), user_path(destination)
    if kind is not None and kind not in kinds():
        raise ValueError(f"kind: expected one of {', '.join(kinds())}, got {kind!r:.80}.")
    refuse_nothing(whence, "Give the path of a dataset.")
    require_free(place)
    losses = Losses()
    with translated(whence), scratch_folder(place, _SUFFIX) as aside:
        unreadable = unreadable_in(whence)
        wanted = kind or _kind_of(whence, bool(unreadable))
        said = {"kind": wanted, "path": str(whence.absolute()), "repaired": "True"}
        report = imported(
            OurRepair(losses, aside, unreadable)
            if wanted == OURS
            else _door(wanted, whence, losses, aside, unreadable),
            aside / _REPAIRED if wanted == "lerobot" else whence,
            place,
            format=format,
            progress=progress,
            said=said,
        )
    return RepairReport(
        report.path, report.format, wanted, report.rows, report.columns, tuple(losses)
    )


def _kind_of(whence: Path, unreadable: bool) -> str:
    """Return the kind of a dataset. A storage with ``unreadable`` parts is not opened."""
    found = kind_at(whence)
    theirs = found if found in (*_KINDS, "lerobot") else None
    if unreadable:
        return theirs or OURS
    try:
        open_storage(whence, accept_copy=True).close()
        return OURS
    except CorruptStorage:
        return OURS
    except NotAStorage as error:
        if theirs is not None:
            return theirs
        raise InvalidDataset(
            f"{whence} cannot be repaired: its files do not identify its library, or Tallyroll "
            f"does not repair datasets of that library. Give its kind, one of {', '.join(kinds())}."
        ) from error


def _door(
    wanted: str, whence: Path, losses: Losses, aside: Path, unreadable: Mapping[Path, Ranges]
) -> ExchangeFormat:
    """Return the format that reads the rows.

    A LeRobot dataset is first repaired in a folder below ``aside``.
    """
    for path, ranges in unreadable.items():
        for start, stop in ranges:
            what = f"bytes {start:,} to {stop - 1:,}"
            losses.add("the disk cannot read a part of a file", 0, file=str(path), what=what)
    if wanted == "lerobot":
        target = aside / _REPAIRED
        target.mkdir()
        with source_errors(whence):
            LerobotRepair(whence, losses, unreadable).write(target)
        return format_named("lerobot")
    return _KINDS[wanted](losses, unreadable)
