"""Repair a damaged or unfinished RLDS folder: save the episodes with intact records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from tallyroll.storage.errors import InvalidDataset, InvalidSchema
from tallyroll.storage.ext.dataset_checks.checker import DatasetFolder
from tallyroll.storage.ext.exchange.base import Incoming
from tallyroll.storage.ext.exchange.readme import recorded_schema
from tallyroll.storage.ext.exchange.rlds import layout
from tallyroll.storage.ext.exchange.rlds.examples import features_in
from tallyroll.storage.ext.exchange.rlds.foreign import ForeignRows
from tallyroll.storage.ext.exchange.rlds.reader import (
    Steps,
    count_of,
    episode_in,
)
from tallyroll.storage.ext.exchange.rlds.records import Damage, records
from tallyroll.storage.ext.exchange.rlds.rlds_format import OwnRows, rows_of
from tallyroll.storage.ext.exchange.rlds.values import RldsValues
from tallyroll.storage.ext.repair.losses import Losses, RowsRepair


class RldsRepair(RowsRepair):
    """Repair of an RLDS folder. The steps of a damaged record are lost."""

    name: ClassVar[str] = "rlds"

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Find and yield the episodes with intact records."""
        folder = self.folder(place)
        rows = _rows(folder, place)
        found = _Records(folder, _files(folder), [RldsValues(each) for each in rows.read])
        counts = (count_of(steps, rows.features) for steps in found.episodes(self._losses))
        count = sum(max(0, each) for each in counts)
        if not count:
            raise InvalidDataset(f"{place} cannot be repaired: no step can be read.")
        every = (rows.of(steps) for steps in found.episodes(Losses()))
        blocks = (block for block in every if block is not None)
        yield Incoming(rows.schema, count, blocks, None, "rlds")


def _rows(folder: DatasetFolder, place: Path) -> OwnRows | ForeignRows:
    """Return the reader of the rows.

    The reader uses the columns that an export recorded, if they are valid.
    """
    features = folder.json(layout.FEATURES)
    about = folder.json(layout.ABOUT) if os.path.lexists(place / layout.ABOUT) else None
    try:
        said = recorded_schema(about)
    except InvalidSchema:
        said = None
    try:
        return rows_of(features, said)
    except (InvalidDataset, InvalidSchema) as error:
        raise InvalidDataset(
            f"{place} cannot be repaired: {error!s:.300}. Copy {layout.FEATURES} from an intact "
            "dataset with the same features."
        ) from error


def _files(folder: DatasetFolder) -> dict[str, int | None]:
    """Return the record files with their expected numbers of episodes, or None if unknown."""
    there = sorted(each for each in os.listdir(folder.root) if layout.SHARD.fullmatch(each))
    found: dict[str, int | None] = {}
    with contextlib.suppress(InvalidDataset):  # damaged metadata has no counts
        for split in layout.RldsInfo.of(folder.json(layout.INFO)).splits:
            found |= zip(split.files, split.lengths, strict=True)
    return found | {name: None for name in there if name not in found}


class _Records:
    """The records of files that may be damaged."""

    def __init__(
        self, folder: DatasetFolder, files: Mapping[str, int | None], values: list[RldsValues]
    ) -> None:
        self._folder, self._files, self._values = folder, files, values

    def episodes(self, losses: Losses) -> Iterator[Steps]:
        """Yield the values of each readable episode, and report the others."""
        for name, wanted in self._files.items():
            file, count = self._folder.opened(name), 0
            if file is None:
                losses.add("a file of records is missing, or a link", None, file=name)
                continue
            with file:
                for content in records(file):
                    steps = self._steps(content)
                    if isinstance(steps, str):
                        message = "an episode cannot be read"
                        losses.add(message, None, file=name, episode=count, what=steps)
                    else:
                        yield steps
                    count += 1
            if count == 0 and wanted is None:
                losses.add("a file of records is empty", None, file=name)
            elif count < (wanted or 0):
                what = f"it has {count:,} of {wanted:,}"
                losses.add("a file of records lacks episodes", None, file=name, what=what)

    def _steps(self, content: bytes | Damage) -> Steps | str:
        """Return the values of an episode, or the reason why it cannot be read."""
        if isinstance(content, Damage):
            return content.why
        try:
            return episode_in(features_in(content), self._values)
        except InvalidDataset as error:
            return f"{error!s:.200}"
