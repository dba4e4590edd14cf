"""The ``hf`` format: a folder of Parquet files and a card for the Hugging Face Hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tallyroll.storage.ext.card.storage_card import PAGE, card_of_export
from tallyroll.storage.ext.exchange.arrow import names_of
from tallyroll.storage.ext.exchange.base import ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.exchange.parquet import parquet_rows, write_parquet
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.rows.schema import Schema

_GROUPS: Final = 16
"""Row groups per file: about 500 MB of rows."""
_MOST_FILES: Final = 2**14
_DATA: Final = "data"


class HfFormat(ExchangeFormat):
    """A folder of files that `datasets.load_dataset` reads, from disk or from the Hub.

    The columns have the same form as in the ``parquet`` format.
    """

    name, extra, compressed = "hf", "arrow", True
    loading = 'from datasets import load_dataset\n\nrows = load_dataset(PATH, split="train")'
    data_files = f"{_DATA}/train-*.parquet"

    def names(self, schema: Schema) -> list[str]:
        """Return keys joined by dots."""
        return names_of(schema)

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write one file per half a gigabyte of rows, and the card."""
        data = place / _DATA
        data.mkdir(parents=True)
        files = write_parquet(rows, lambda number: data / f"{number}.parquet", _GROUPS)
        for number in range(files):
            name = f"train-{number:05}-of-{files:05}.parquet"
            (data / f"{number}.parquet").rename(data / name)
        card = card_of_export(self, rows.title, rows.schema, len(rows), rows.about, place)
        (place / PAGE).write_text(str(card))
        return {}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open all files. The card is not read."""
        data = place / _DATA
        with contextlib.ExitStack() as stack:
            held = Inside(place)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                import os

                os.close(held.open_directory(data))
            names = sorted(data.glob("*.parquet"))[: _MOST_FILES + 1]
            if not names or len(names) > _MOST_FILES:
                raise refused(place, f"expected 1 to {_MOST_FILES} files {_DATA}/*.parquet")
            yield parquet_rows(names, place, stack)
