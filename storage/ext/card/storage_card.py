"""Build the card of the rows in a storage."""

from __future__ import annotations

from collections import Counter

from tallyroll.storage.ext.card.page import UNKNOWN, Card
from tallyroll.storage.ext.exchange.readme import flat_runs
from tallyroll.storage.ext.exchange.sidecar import saved_statistics
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.readers.spaces import spaces_of
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import TERMINATED, format_key
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.trajectories.columns import WHOSE, missing
from tallyroll.storage.trajectories.episodes import END_NAMES
from tallyroll.storage.trajectories.leaves import hash_of

_LOADING = """\
from tallyroll.storage import open_storage

with open_storage({path!r}) as storage:
    rows = storage.get(slice(0, 10))"""


def card_of(reader: RowReader, licence: str | None, progress: Progress | None) -> Card:
    """Return the card of the current rows; see `DiskStorage.card`."""
    total, done = len(reader) * reader.schema.row_nbytes, 0

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    def made() -> Card:
        schema = reader.schema
        whose = not missing(schema, (*WHOSE, TERMINATED))
        ends: Counter[str] = Counter()
        if whose:
            ends.update(END_NAMES[end] for end in reader.trajectories.table["end"].tolist())
        spaces = spaces_of(reader.runs, schema)
        kept, _ = saved_statistics(reader, schema, len(reader), ())
        return Card(
            name=reader.path.name,
            kind=str(reader.manifest["format"]).removeprefix("tallyroll."),
            rows=len(reader),
            columns=[
                {
                    "name": format_key(c.key),
                    "dtype": c.dtype_name,
                    "shape": list(c.shape),
                    "space": spaces.get(c.key),
                }
                for c in schema.columns
            ],
            trajectories=ends.total() if whose else None,
            ends=dict(ends),
            runs=flat_runs(reader.runs),
            statistics=kept,
            hashes={"content": hash_of(reader, progress=tell)} if whose else {},
            licence=licence or UNKNOWN,
            loading=_LOADING.format(path=reader.path.name),
        )

    return read_consistently(reader, made)
