"""The checks of a dataset of RLDS, in their order: metadata, files of records, episodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.rlds.layout import (
    FEATURES,
    INFO,
    SHARD,
    Info,
    Split,
)
from tallyroll.storage.ext.exchange.rlds.records import (
    Damage,
    records,
    require_libraries,
)
from tallyroll.storage.ext.soundness.checker import Checker, Folder, Gathered, Where
from tallyroll.storage.ext.soundness.rlds.episodes import EpisodeChecks


class RldsChecker(Checker):
    """Episodes in files of TFRecord, beside what TensorFlow Datasets says of them."""

    name = "rlds"
    checks = (
        "files",
        "metadata",
        "columns",
        "rows",
        "episodes",
        "timestamps",
        "ends",
        "nan",
        "zeros",
    )

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Look for the list of features."""
        return (place / FEATURES).is_file()

    def check(self, place: Path, found: Gathered) -> None:
        """Read the metadata, then one record after the other."""
        require_libraries()
        folder = Folder(place, found)
        info, episodes = _info(folder, found), _episodes(folder, found)
        if info is None:
            return
        wanted = {name for each in info.splits for name in each.files}
        for name in sorted(os.listdir(place)):
            if SHARD.fullmatch(name) and name not in wanted:
                found.add("files", "no split has a file of records", Where(name))
        shards = _Shards(folder, episodes, found, len(wanted))
        for split in info.splits:
            shards.check(split)


def _info(folder: Folder, found: Gathered) -> Info | None:
    said = folder.json(INFO)
    if said is None:
        return None
    try:
        return Info.of(said)
    except InvalidDataset as error:
        message = "the metadata are none of TensorFlow Datasets"
        found.add("metadata", message, Where(INFO), f"{error!s:.300}")
        return None


def _episodes(folder: Folder, found: Gathered) -> EpisodeChecks | None:
    said = folder.json(FEATURES)
    if said is None:
        return None
    try:
        return EpisodeChecks(said, found)
    except InvalidDataset as error:
        message = "the features are none of RLDS"
        found.add("metadata", message, Where(FEATURES), f"{error!s:.300}")
        return None


class _Shards:
    """The files of records."""

    def __init__(
        self, folder: Folder, episodes: EpisodeChecks | None, found: Gathered, count: int
    ) -> None:
        self._folder, self._episodes, self._found = folder, episodes, found
        self._done, self._count = 0, count

    def check(self, split: Split) -> None:
        """Look at all records of a split."""
        nbytes, whole = 0, True
        for name, length in zip(split.files, split.lengths, strict=True):
            file = self._folder.opened(name)
            if file is None:
                whole = False
                continue
            with file:
                count, size = self._records(name, file)
            self._done += 1
            self._found.tell(self._done, self._count)
            if size is None:
                whole = False
                continue
            nbytes += size
            if count != length:
                what = f"{name} has {count:,}, and {length:,} are said"
                self._add("a shard has another number of episodes", what)
        if whole and split.nbytes not in (None, nbytes):
            what = f"the records of {split.name} have {nbytes:,}, and {split.nbytes:,} are said"
            self._add("a split has another number of bytes", what)

    def _add(self, message: str, what: str) -> None:
        self._found.add("metadata", message, Where(INFO), what)

    def _records(self, name: str, file: Any) -> tuple[int, int | None]:
        """Return how many records a file has, and their bytes; None: not all can be read."""
        count, nbytes, whole = 0, 0, True
        for content in records(file):
            where = Where(name, count)
            count += 1
            if isinstance(content, Damage):
                what = f"{content.why}, at byte {content.at:,}"
                self._found.add("files", "a record cannot be read", where, what)
                whole = False
                continue
            nbytes += len(content)
            if self._episodes is not None:
                self._episodes.check(content, where)
        return count, nbytes if whole else None
