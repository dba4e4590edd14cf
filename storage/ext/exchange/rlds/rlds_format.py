"""The ``rlds`` format: its writer, and a reader that also accepts datasets of other programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import Block, ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.exchange.folders import read_json
from tallyroll.storage.ext.exchange.readme import recorded_schema
from tallyroll.storage.ext.exchange.rlds import layout
from tallyroll.storage.ext.exchange.rlds.features import features_of
from tallyroll.storage.ext.exchange.rlds.foreign import ForeignRows
from tallyroll.storage.ext.exchange.rlds.layout import RldsInfo
from tallyroll.storage.ext.exchange.rlds.reader import (
    RldsSource,
    Steps,
    count_of,
    transitions,
)
from tallyroll.storage.ext.exchange.rlds.records import require_libraries
from tallyroll.storage.ext.exchange.rlds.writer import RldsWriter
from tallyroll.storage.ext.exchange.roles import Roles
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.rows.schema import Schema


class RldsFormat(ExchangeFormat):
    """A folder that TensorFlow Datasets opens. Neither reading nor writing needs TensorFlow.

    Each observation is stored once, from the first to the final one. Columns without a name in RLDS
    become infos of a step.
    """

    name, extra, sorted, compressed = "rlds", "rlds", True, True
    loading = (
        "import tensorflow_datasets as tfds\n\n"
        'episodes = tfds.builder_from_directory(PATH).as_dataset(split="train")'
    )

    def check(self, schema: Schema) -> None:
        """Raise `InvalidSchema` for rows that are not transitions."""
        Roles.of(schema, self.name)

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write one episode after another."""
        require_libraries()
        return RldsWriter(rows, place, Roles.of(rows.schema, self.name)).write()

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Read the metadata and the length of each episode."""
        require_libraries()
        inside = Inside(place)
        try:
            info = RldsInfo.of(read_json(inside, layout.INFO, place))
            features = read_json(inside, layout.FEATURES, place)
            about = None
            if os.path.lexists(place / layout.ABOUT):
                about = read_json(inside, layout.ABOUT, place)
            rows = rows_of(features, recorded_schema(about))
            files = [p for e in info.splits for p in zip(e.files, e.lengths, strict=True)]
            source = RldsSource(inside, files, rows.read)
            count = sum(max(0, steps - 1) for steps in source.lengths())
        except (OSError, InvalidDataset) as error:
            raise refused(place, str(error)) from error
        if len(info.splits) > 1:
            rows.lost["splits"] = len(info.splits)
        blocks = _blocks(source, rows, place)
        yield Incoming(rows.schema, count, blocks, about, info.version, rows.lost)


class OwnRows:
    """Reads the rows of a Tallyroll export, whose columns its metadata records."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.read = self.features = features_of(schema, Roles.of(schema, RldsFormat.name))
        self.lost: dict[str, int] = {}

    def of(self, steps: Steps) -> Block | None:
        """Return the rows of an episode, or None if it has no transition."""
        count = count_of(steps, self.features)
        if count < 1:
            return None
        block = transitions(steps, self.features, count)
        return {e.key: block[e.key].reshape(count, *e.shape) for e in self.schema.columns}


def rows_of(features: Any, said: Schema | None) -> OwnRows | ForeignRows:
    """Return the reader for the rows of a dataset.

    Args:
        features: the value in ``features.json``.
        said: the columns that a Tallyroll export recorded; None for a foreign dataset.

    Raises:
        InvalidDataset: the features do not describe an RLDS dataset.
    """
    return ForeignRows(features) if said is None else OwnRows(said)


def _blocks(source: RldsSource, rows: OwnRows | ForeignRows, place: Path) -> Iterator[Block]:
    """Yield the rows of all episodes. Errors name the folder."""
    try:
        for steps in source.episodes():
            if (block := rows.of(steps)) is not None:
                yield block
    except InvalidDataset as error:
        raise refused(place, str(error)) from error
