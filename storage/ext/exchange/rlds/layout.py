"""The file names of an RLDS folder, and the content of ``dataset_info.json``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.folders import expand_template

INFO, FEATURES, ABOUT = "dataset_info.json", "features.json", "tallyroll.json"
SPLIT: Final = "train"
"""The split that an export writes."""
SHARD_NBYTES: Final = 2**28
"""The size in bytes at which the next episode starts a new shard."""
_TEMPLATE: Final = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_FORMAT: Final = "tfrecord"
_VERSION: Final = "1.0.0"
_MOST_SHARDS, _MOST_SPLITS = 2**16, 2**10
_MOST_COUNT: Final = 2**48
SHARD: Final = re.compile(r".*\.tfrecord(-[0-9]+(-of-[0-9]+)?)?")
"""The pattern of the names that writers give to record files."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True)
class Split:
    """The shards of a split."""

    name: str
    files: tuple[str, ...]
    lengths: tuple[int, ...]
    """The number of episodes in each shard."""
    nbytes: int | None
    """The size in bytes of all records, or None if the file does not record it."""


@dataclass(frozen=True)
class RldsInfo:
    """The validated fields of ``dataset_info.json`` that a reader needs."""

    version: str
    splits: tuple[Split, ...]

    @classmethod
    def of(cls, said: Any) -> RldsInfo:
        """Return the fields of a parsed ``dataset_info.json``.

        Raises:
            InvalidDataset: the value is invalid, names another record format, or contains a path
                out of the folder.
        """
        if not isinstance(said, dict):
            raise InvalidDataset(f"{INFO} is not a JSON object")
        name, version = said.get("name"), said.get("version", "")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidDataset(f"its name {name!r:.80} is invalid")
        if not isinstance(version, str):
            raise InvalidDataset(f"its version is {version!r:.80}, expected a text")
        if (form := said.get("fileFormat", _FORMAT)) != _FORMAT:
            raise InvalidDataset(
                f"its fileFormat is {form!r:.40}, expected {_FORMAT}. Convert the dataset with "
                "TensorFlow Datasets"
            )
        splits = said.get("splits")
        if not isinstance(splits, list) or not splits or len(splits) > _MOST_SPLITS:
            raise InvalidDataset(f"{INFO} has no splits")
        lengths = [each.get("shardLengths") for each in splits if isinstance(each, dict)]
        if sum(len(each) for each in lengths if isinstance(each, list)) > _MOST_SHARDS:
            raise InvalidDataset(f"it has more than {_MOST_SHARDS:,} shards")
        found = tuple(_split(name, each) for each in splits)
        names = [each.name for each in found]
        files = [file for each in found for file in each.files]
        if len({*names}) < len(names) or len({*files}) < len(files):
            raise InvalidDataset("a split is listed twice")
        return cls(version, found)


def _split(dataset: str, said: Any) -> Split:
    if not isinstance(said, dict):
        raise InvalidDataset("a split is not a JSON object")
    name, lengths = said.get("name"), said.get("shardLengths", [])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidDataset(f"the name {name!r:.80} of a split is invalid")
    if not isinstance(lengths, list):
        raise InvalidDataset(f"the split {name} has no list of shards")
    nbytes = said.get("numBytes")
    files = shards(dataset, name, len(lengths), said.get("filepathTemplate") or _TEMPLATE)
    counts = tuple(_count(each, f"a shard's length in the split {name}") for each in lengths)
    return Split(name, files, counts, None if nbytes is None else _count(nbytes, "numBytes"))


def _count(said: Any, what: str) -> int:
    """Return a 64-bit number, which JSON stores as a string."""
    text = str(said) if type(said) in (int, str) else ""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) >= _MOST_COUNT:
        raise InvalidDataset(f"{what} is {said!r:.40}, expected a count")
    return int(text)


def shards(dataset: str, split: str, count: int, template: Any = _TEMPLATE) -> tuple[str, ...]:
    """Return the file names of a split."""
    return tuple(
        expand_template(
            template,
            DATASET=dataset,
            SPLIT=split,
            FILEFORMAT=_FORMAT,
            SHARD_X_OF_Y=f"{number:05d}-of-{count:05d}",
            SHARD_INDEX=f"{number:05d}",
            NUM_SHARDS=f"{count:05d}",
        )
        for number in range(count)
    )


def name_of(title: str) -> str:
    """Return a name that TensorFlow Datasets accepts.

    Such a name has lower-case letters, digits and underscores.
    """
    name = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")[:100]
    return name if name[:1].isalpha() else f"rows_{name}".strip("_")


def info_json(name: str, lengths: Sequence[int], nbytes: int) -> dict[str, Any]:
    """Return the content of ``dataset_info.json`` for an export with one split."""
    split = {
        "filepathTemplate": _TEMPLATE,
        "name": SPLIT,
        "numBytes": str(nbytes),
        "shardLengths": [str(length) for length in lengths],
    }
    return {
        "description": "Transitions of reinforcement learning as episodes, exported by Tallyroll.",
        "fileFormat": _FORMAT,
        "name": name,
        "splits": [split],
        "version": _VERSION,
    }
