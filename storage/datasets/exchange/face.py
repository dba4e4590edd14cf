"""The method of a storage that writes its rows in the formats of other libraries."""

from __future__ import annotations

import os

from tallyroll.storage.datasets.exchange.exporting import Cuts, ExportReport, export
from tallyroll.storage.datasets.exchange.formats.lerobot.options import LeRobotOptions
from tallyroll.storage.datasets.exchange.outgoing import Progress
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Keys


class HasExports:
    """A storage whose rows can be exported."""

    reader: RowReader

    def export(
        self,
        path: str | os.PathLike[str],
        kind: str,
        *,
        columns: Keys | None = None,
        cuts: Cuts = "keep",
        options: LeRobotOptions | None = None,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write the committed rows in a format of another library, there whole or not at all.

        Whatever the format cannot hold is counted in the report. `import_dataset` reads it back.
        Another process may write to this storage meanwhile: the rows that are committed now are
        exported. Of chosen trajectories: ``storage.trajectories.where(...).export(...)``.

        Args:
            path: where it will be, a file or a folder as the format has it; nothing may be there.
            kind: the format: ``"d4rl"``, ``"hf"``, ``"lerobot"``, ``"minari"``, ``"npz"``,
                ``"parquet"``, ``"torchrl"``, or one that another package brings.
            columns: those that are wanted; None: all.
            cuts: what becomes of trajectories that neither ended nor were truncated: ``"keep"``,
                they are written as they are; ``"drop"``, they are left out; ``"truncate"``, their
                last rows are written as truncated.
            options: choices of the format, as `LeRobotOptions`.
            progress: called now and then with the bytes that were read, and with all.

        Raises:
            InvalidSchema: the format cannot hold the columns.
            MissingLibrary: a library is not installed.
            OpenError: ``path`` is taken, or cannot be written; or another process writes to it.
            StorageFull: the rows do not fit on the disk.
            ColumnsMissing: there is no such column, or rows do not say whose they are.
            Overrun: a ring's writer overwrites rows before they are written.
            StateMismatch: rows are taken back meanwhile.
            ValueError: an argument is none of its values.
        """
        self.reader.require_open()
        return export(
            self.reader, path, kind, columns=columns, cuts=cuts, options=options, progress=progress
        )
