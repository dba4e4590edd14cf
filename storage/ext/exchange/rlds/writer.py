"""Write rows to an RLDS folder, one episode after another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.exchange.rlds import layout
from tallyroll.storage.ext.exchange.rlds.examples import add_feature, new_example
from tallyroll.storage.ext.exchange.rlds.features import (
    DISCOUNT,
    FIRST,
    LAST,
    STEPS,
    TERMINAL,
    feature_of,
    features_json,
    features_of,
)
from tallyroll.storage.ext.exchange.rlds.records import write_record
from tallyroll.storage.ext.exchange.rlds.values import RldsValues
from tallyroll.storage.ext.exchange.roles import Roles, Successors
from tallyroll.storage.rows.keys import NEXT, TERMINATED, Key
from tallyroll.storage.rows.schema import Column

_MOST_RECORD: Final = 2**31 - 1
"""The maximum size in bytes of a record that protobuf can read."""
_SAID: Final = dict.fromkeys((FIRST, LAST, TERMINAL), torch.bool) | {DISCOUNT: torch.float32}
"""The features of a step that are derived from other features, and their dtypes."""

Rows = Mapping[Key, np.ndarray]


class RldsWriter:
    """Writes an RLDS folder.

    An episode of n transitions has n + 1 steps. The last step holds the final observation, and
    zeros for the features of a transition.
    """

    def __init__(self, rows: ExportRows, place: Path, roles: Roles) -> None:
        self._rows, self._place = rows, place
        self._features = features_of(rows.schema, roles)
        self._values = [(RldsValues(each), _zero(each.column)) for each in self._features]
        self._said = [
            RldsValues(feature_of(f"{STEPS}/{name}", Column((name,), dtype, ())))
            for name, dtype in _SAID.items()
        ]
        self._successors = Successors(roles)
        self._name = layout.name_of(rows.title)
        self._shards = _Shards(place)

    def write(self) -> Mapping[str, int]:
        """Write all rows and return the number of lost items, by reason."""
        self._place.mkdir()
        with self._shards as shards:
            for episode in self._rows.episodes():
                self._successors.count(episode.rows)
                shards.add(self._record(episode.rows))
            info = layout.info_json(self._name, shards.lengths, shards.nbytes)
        for before, after in zip(
            shards.paths,
            layout.shards(self._name, layout.SPLIT, len(shards.paths)),
            strict=True,
        ):
            before.rename(self._place / after)
        self._put(layout.INFO, info)
        self._put(layout.FEATURES, features_json(self._features))
        self._put(layout.ABOUT, self._rows.about)
        return self._successors.lost

    def _put(self, name: str, value: Mapping[str, Any]) -> None:
        (self._place / name).write_text(json.dumps(value))

    def _record(self, rows: Rows) -> bytes:
        example, count = new_example(), len(rows[TERMINATED])
        for each, zero in self._values:
            key = each.feature.column.key
            values = rows[key].reshape(count, *each.feature.column.shape)
            after = rows[(NEXT, *key)][-1:] if each.feature.observed else zero
            found = add_feature(example, each.feature.name)
            each.put(found, np.concatenate([values, after]))
        step, ended = np.arange(count + 1), bool(rows[TERMINATED][-1].any())
        said = {FIRST: step == 0, LAST: step == count, TERMINAL: (step == count) & ended}
        said[DISCOUNT] = np.zeros(count + 1, np.float32)
        said[DISCOUNT][:count] = ~rows[TERMINATED].reshape(count)
        for each in self._said:
            each.put(add_feature(example, each.feature.name), said[each.feature.column.key[0]])
        if (nbytes := example.ByteSize()) > _MOST_RECORD:
            raise InvalidSchema(
                f"a trajectory of {count:,} rows takes {nbytes:,} bytes, but an RLDS episode has "
                f"at most {_MOST_RECORD:,}. Export the trajectory to another format, or in parts."
            )
        content: bytes = example.SerializeToString()
        return content


def _zero(column: Column) -> np.ndarray:
    return np.zeros((1, *column.shape), column.numpy_dtype)


class _Shards:
    """The record files. Their final names include the number of files, known only at the end."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._file: IO[bytes] | None = None
        self._room = 0
        self.paths: list[Path] = []
        self.lengths: list[int] = []
        self.nbytes = 0
        """The size in bytes of all records, without lengths and checksums."""

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, record: bytes) -> None:
        if self._file is None or self._room <= 0:
            if self._file is not None:
                self._file.close()
            self.paths.append(self._place / f"shard-{len(self.paths)}")
            self.lengths.append(0)
            self._file, self._room = self.paths[-1].open("xb"), layout.SHARD_NBYTES
        self._room -= write_record(self._file, record)
        self.lengths[-1] += 1
        self.nbytes += len(record)
