"""The method of a storage that writes its rows in the formats of other libraries."""

from __future__ import annotations

import os

from tallyroll.storage.datasets.exchange.exporting import Cuts, ExportReport, export
from tallyroll.storage.datasets.exchange.following import Follow, export_followed
from tallyroll.storage.overlays.face import HasOverlays
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.rows.progress import Progress


class HasExports(HasOverlays):
    """A storage whose rows can be exported."""

    def export(
        self,
        path: str | os.PathLike[str],
        kind: str,
        *,
        columns: Keys | None = None,
        cuts: Cuts = "keep",
        follow: Follow | None = None,
        options: object = None,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Write the committed rows in a format of another library, there whole or not at all.

        Whatever the format cannot hold is counted in the report. `import_dataset` reads it back.
        Another process may write to this storage meanwhile: the rows that are committed now are
        exported. Of chosen trajectories: ``storage.trajectories.where(...).export(...)``.

        Args:
            path: where it will be, a file or a folder as the format has it; nothing may be there.
                With ``follow`` a folder of versions; those of this storage may be there.
            kind: the format: ``"d4rl"``, ``"hf"``, ``"lerobot"``, ``"minari"``, ``"npz"``,
                ``"parquet"``, ``"rlds"``, ``"torchrl"``, or one that another package brings.
            columns: those that are wanted, overlays too, which become columns; None: all but
                overlays.
            cuts: what becomes of trajectories that neither ended nor were truncated: ``"keep"``,
                they are written as they are; ``"drop"``, they are left out; ``"truncate"``, their
                last rows are written as truncated.
            follow: keep the export up until the process that writes to this storage closes it. Each
                version is written beside the others, whole, and then the link ``current`` (with
                the end of the format's files, as ``current.npz``) in the folder ``path`` is
                replaced at once by one that leads to it. The version before the newest stays, and
                older ones go: a reader resolves the link once, with `os.path.realpath`, and has
                what it leads to until the second version after it. An error, a signal or a kill
                leaves the last version, and the same call goes on with it.
            options: choices of the format, as `LeRobotOptions`; None: its defaults.
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
        named = (columns,) if isinstance(columns, str) else columns or ()
        reader = self.reader_with([*self.reader.keys, *named]) if named else self.reader
        if follow is None:
            return export(
                reader, path, kind, columns=columns, cuts=cuts, options=options, progress=progress
            )
        return export_followed(
            reader,
            path,
            kind,
            follow,
            columns=columns,
            cuts=cuts,
            options=options,
            progress=progress,
        )
