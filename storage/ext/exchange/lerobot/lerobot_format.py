"""The ``lerobot`` format: a writer for v3, and a reader for v2 and v3."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import Block, ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.exchange.folders import read_json
from tallyroll.storage.ext.exchange.lerobot import layout, tables
from tallyroll.storage.ext.exchange.lerobot.episodes import LeRobotInfo, episodes_of
from tallyroll.storage.ext.exchange.lerobot.features import features_of
from tallyroll.storage.ext.exchange.lerobot.foreign import DerivedColumns, declared_features
from tallyroll.storage.ext.exchange.lerobot.options import LeRobotOptions, Video
from tallyroll.storage.ext.exchange.lerobot.reader import LeRobotSource
from tallyroll.storage.ext.exchange.lerobot.videos import av_module
from tallyroll.storage.ext.exchange.lerobot.writer import LeRobotWriter
from tallyroll.storage.ext.exchange.readme import recorded_schema
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.rows.schema import Schema

_BESIDE: Final = (layout.STATS, layout.TASKS)


class LeRobotFormat(ExchangeFormat):
    """A folder in the layout of LeRobot 0.4 and later, written without LeRobot.

    Columns without a name in LeRobot, such as next observations and policy versions, become
    additional features. bfloat16 is stored as float32, and a complex number as two numbers.
    """

    name, extra, sorted, compressed = "lerobot", "lerobot", True, True
    options = LeRobotOptions
    loading = (
        "from lerobot.datasets.lerobot_dataset import LeRobotDataset\n\n"
        'rows = LeRobotDataset("me/rows", root=PATH)'
    )
    data_files = "data/*/*.parquet"

    def names(self, schema: Schema) -> list[str]:
        """Return the names of the features."""
        return [each.name for each in features_of(schema, video=False)]

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write rows, metadata and videos."""
        tables.arrow_module()
        choices = self.chosen if isinstance(self.chosen, LeRobotOptions) else LeRobotOptions()
        if choices.video is not None:
            av_module()
        place.mkdir()
        return LeRobotWriter(rows, place, choices).write()

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Read the metadata. The data files are opened one after another when rows are read."""
        tables.arrow_module()
        inside, stack = Inside(place), contextlib.ExitStack()
        try:
            info = LeRobotInfo.of(read_json(inside, layout.INFO, place))
            about = None
            if os.path.lexists(place / layout.ABOUT):
                about = read_json(inside, layout.ABOUT, place)
            said = recorded_schema(about)
            for name in _BESIDE:
                if os.path.lexists(place / name):
                    os.close(inside.open(place / name, os.O_RDONLY))
            incoming = (
                _theirs(inside, info, place, stack)
                if said is None
                else _ours(inside, info, place, said, about, stack)
            )
        except (OSError, InvalidDataset) as error:
            raise refused(place, str(error)) from error
        with stack:
            yield incoming


def _ours(
    inside: Inside,
    info: LeRobotInfo,
    place: Path,
    schema: Schema,
    about: Any,
    stack: contextlib.ExitStack,
) -> Incoming:
    said = about.get("lerobot")
    video = said.get("video") if isinstance(said, dict) else None
    if video is not None and video not in get_args(Video):
        raise InvalidDataset(f"its metadata name the unknown codec {video!r:.40}")
    even = video in ("av1", "h264")
    features = features_of(schema, video=video is not None, even=even)
    names = [each.name for each in features if each.kind == "video"]
    episodes = episodes_of(inside, info, names, place)
    source = LeRobotSource(inside, features, episodes, info.fps, place, schema.row_nbytes)
    stack.callback(source.close)

    def blocks() -> Iterator[Block]:
        for block, _, _ in _named(source, place):
            yield block

    return Incoming(schema, episodes.rows, blocks(), about, info.version)


def _theirs(
    inside: Inside, info: LeRobotInfo, place: Path, stack: contextlib.ExitStack
) -> Incoming:
    features, lost = declared_features(info.features)
    if not features:
        raise InvalidDataset("it has no feature that a storage can hold")
    names = [each.name for each in features if each.kind == "video"]
    episodes = episodes_of(inside, info, names, place)
    derived = DerivedColumns(features)
    derived.lost |= {"columns": lost, "tasks": info.tasks}
    source = LeRobotSource(inside, features, episodes, info.fps, place, derived.schema.row_nbytes)
    stack.callback(source.close)
    return Incoming(
        derived.schema,
        episodes.rows,
        derived.blocks(_named(source, place)),
        None,
        info.version,
        derived.lost,
    )


def _named(source: LeRobotSource, place: Path) -> Iterator[Any]:
    """Yield blocks. Errors name the folder."""
    try:
        yield from source.blocks()
    except InvalidDataset as error:
        raise refused(place, str(error)) from error
