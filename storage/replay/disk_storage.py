"""The public storage class for rows on disk, which is also a TorchRL storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.engine.commit_engine import Durability
from tallyroll.storage.errors import (
    IndexOutOfRange,
    NotAnAppend,
    NotAStorage,
    NotPicklable,
    ReadOnlyStorage,
    StateMismatch,
)
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.run_events import shown
from tallyroll.storage.readers.row_reader import ReusedRows, RowReader
from tallyroll.storage.replay import buffers, foreign_checkpoints
from tallyroll.storage.replay.checkpoint import DiskStorageCheckpointer
from tallyroll.storage.replay.loader import Loader, Make
from tallyroll.storage.replay.tensor_storage import AsTensorStorage, remedies_named
from tallyroll.storage.rows.frame_stacks import FrameStack
from tallyroll.storage.rows.keys import Key, Keys, as_key, format_key
from tallyroll.storage.rows.progress import MoreDone, Progress
from tallyroll.storage.stores.rewinds import require_not_rewound
from tallyroll.storage.stores.row_store import Once, OpenMode, RowStore
from tallyroll.storage.stores.row_writer import ReadOnlyWriter, RowWriter
from tallyroll.storage.stores.temporary import TemporaryFolder
from tallyroll.storage.trajectories.id_checks import Ids

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure

    from tallyroll.storage.ext.card.page import Card
    from tallyroll.storage.ext.exchange.dataset_export import Cuts, ExportReport
    from tallyroll.storage.ext.exchange.followed_export import Follow
    from tallyroll.storage.ext.packed.pack import Format, PackReport
    from tallyroll.storage.ext.statistics.normaliser import Normaliser
    from tallyroll.storage.ext.statistics.statistics import Statistics
    from tallyroll.storage.ext.storage_copy import CopyReport
    from tallyroll.storage.ext.training.row_dataset import Last, RowDataset
    from tallyroll.storage.ext.views.trajectories import StoredTrajectories
    from tallyroll.storage.ext.views.view_reader import ViewReader

_IDS = ("check", "renumber", "fresh")


class NotebookViews:
    """The figure and the table of a storage."""

    trajectories: Any

    def plot(self, *, window: int = 100) -> Figure:
        """Draw all trajectories: see `StoredTrajectories.plot`."""
        figure: Figure = self.trajectories.plot(window=window)
        return figure

    def _repr_html_(self) -> str:
        from tallyroll.storage.ext.notebook.tables import storage_as_html

        return storage_as_html(self)


class DiskStorage(RowStore, AsTensorStorage, NotebookViews):
    """Storage for rows on disk, growing or a ring, that survives any end of the process.

    A row is stored durably once `extend` has returned. Other processes may read at any time and see
    only committed rows. Threads of this process may write, one at a time. The class is a TorchRL
    storage: ``ReplayBuffer(storage=...)`` accepts new, reopened and read-only storages.

    Args:
        path: the path of the storage. Without a path the storage is temporary: it lies in its own
            folder ``tallyroll-*`` in the temporary directory of `tempfile`. The folder is deleted
            when the storage is closed or garbage-collected, and when the process that made it
            exits; the exit of a forked child does not delete it. Batches and readers keep the rows
            that they refer to. A killed process leaves its folder behind.
        mode: ``"create"`` refuses an existing storage and writes nothing until the schema is known.
            ``"append"`` continues after the last row. ``"read"`` never writes. ``"auto"`` appends
            to an existing storage, which must have the same ``max_size`` and layout, and creates
            one if there is none. The attribute `mode` is then ``"append"`` or ``"create"``.
        capacity: the number of rows to reserve space for, including existing rows. The storage
            grows beyond it if its format can grow.
        max_size: the number of slots of a ring, in which new rows overwrite the oldest. None keeps
            every row. Only memory-mapped storages can be rings. ``empty()`` of a replay buffer
            invalidates all rows of a ring; the numbers of later rows continue after these.
        durability: the failures that committed rows survive. With ``"process"``, they survive the
            death of any process. With ``"power"``, they also survive a power cut. Each commit then
            waits for the disk, and opening waits for the rows of earlier writers.
        accept_copy: True to open files that were copied while a writer had the storage open. Rows
            that were committed after the original was last closed may be missing and read as zeros;
            `verify` detects some of these. A copy becomes a separate storage when rows are appended
            to it. Without ``accept_copy``, opening such a copy raises. A copy of a closed storage
            is never refused.
        once: True to store each frame of large observations once, for a new `MemmapStorage` or
            `ZarrStorage`. All observations, next observations and stacks that contain a frame share
            it, and uint8 images are stored as differences from the frame before. `get`, slices and
            samples return the same values as with False. `column` returns a copy of such a column.
            ``"auto"`` does so for uint8 observations of 1 KiB or more, in a new memory-mapped ring
            whose columns a collector declares. Storages that `extend` or `initialise` creates, and
            existing ones, keep whole observations or their layout.
        stacks: with ``once=True``, the observations that are stacks of frames along their first
            axis. By default, a uint8 image of 32 x 32 pixels or more whose first axis has 2 or 4 to
            16 entries counts as a stack. A wrong guess takes more space, and changes no value.

    Raises:
        CopyOfOpenStorage: the files are such a copy, and ``accept_copy`` is False.
        OpenError: the path cannot be opened or created in this mode (see the subclass).
        CorruptStorage: the files are damaged.
        ValueError: an argument has an invalid value, or ``max_size``, ``once`` or ``stacks``
            differs from that of an existing storage.
        TypeError: an argument does not exist. For those of TorchRL's storages, the message names
            what to do instead.
    """

    sharded: ClassVar[bool] = False
    """True if each worker writes its rows to its own shard."""

    _default_checkpointer = DiskStorageCheckpointer

    _reopening: Mapping[str, Any]
    """The absolute path and the other arguments that reopen the storage as a reader."""
    _leave_folder: Callable[[], Any] | None = None
    """Callback that removes the folder of a temporary storage."""

    @remedies_named
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        mode: OpenMode = "create",
        capacity: int | None = None,
        max_size: int | None = None,
        durability: Durability = "process",
        accept_copy: bool = False,
        once: Once = "auto",
        stacks: Sequence[FrameStack] = (),
    ) -> None:
        AsTensorStorage.__init__(self)
        temporary = TemporaryFolder(mode) if path is None else None
        place = _path_of(path) if temporary is None else temporary.rows
        try:
            options = (mode, capacity, durability, max_size, accept_copy, once, stacks)
            RowStore.__init__(self, place, *options)
        except BaseException:
            if temporary is not None:
                temporary.remove()
            raise
        self._fit_ring()
        self._reopening = {"path": str(self.path.absolute()), "accept_copy": accept_copy}
        if temporary is not None:
            assert isinstance(self.writer, RowWriter)
            self.writer.mark_temporary()
            self._leave_folder = temporary.remove_with(self, self.writer.close)

    def close(self) -> None:
        """Trim the files to the committed rows and release the writer lock.

        A second call has no effect. A write by another thread is finished first. A temporary
        storage is deleted.
        """
        super().close()
        if self._leave_folder is not None:
            self._leave_folder()

    def finalize(self, progress: MoreDone | None = None) -> None:
        """Finalize as `RowStore.finalize` does. Raise `NotAStorage` if the storage is temporary."""
        if self._leave_folder is not None:
            raise NotAStorage(
                f"{self.path} is temporary and is deleted when the storage is closed. Create the "
                "storage with a path, or dump the rows first."
            )
        super().finalize(progress)

    def extend(
        self,
        rows: TensorDictBase | Mapping[Key, np.ndarray],
        *,
        record: bytes | None = None,
        ids: Ids = "check",
    ) -> range:
        """Append rows and commit them; return their numbers.

        If the rows come unchanged from ``other[:]``, ``other.get(slice)`` or ``other.in_order()``,
        the manifest records the other storage and the runs that wrote the rows there, as
        ``copied_from`` and ``runs`` of an entry. Values that the caller changed in between are not
        detected.

        Args:
            rows: a TensorDict [N] on any device, or one array [N, ...] for each column by its key.
                The first rows of a new storage determine its schema.
            record: a payload that the same commit stores as `record`.
            ids: the treatment of trajectory ids, for rows that have ``("collector", "traj_ids")``,
                ``"step"`` and ``"lane"``. ``"check"`` refuses an id that is already stored, unless
                the rows continue the id's last row: same lane, next step, not ended, and no other
                trajectory of the lane in between. Rows that a ring has overwritten do not count,
                nor do rows that the batch overwrites by filling the ring. ``"renumber"`` moves all
                ids of the call above the largest stored id, by one offset. Append the rows of
                another storage with ``extend(other.get(...), ids="renumber")``, in one call: a
                trajectory whose rows come in two calls becomes two trajectories. After a
                collector's run, these rows form a separate run. ``"fresh"`` writes the ids
                unchanged: the caller must make them unique.

        Raises:
            TrajectoryIdTaken: an id is already stored, or the rows cannot be one trajectory.
            RunUnderWay: a collector is writing a run to this storage; ``"fresh"`` never raises
                this.
            ColumnsMissing: ``"renumber"`` was used for rows without ids.
            WriteError: the write was refused and nothing was written (see the subclass).
        """
        if ids not in _IDS:
            raise ValueError(f"ids: expected one of {', '.join(map(repr, _IDS))}, got {ids!r}.")
        span = self.writer.write(rows, record, None, ids)
        if (tell := self.writer.tell) is not None:
            tell(span)
        return span

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Append ``data`` at ``cursor``, which must name the rows directly after the last one.

        More rows than a ring has slots are written in pieces, so that the last rows remain.

        Raises:
            NotAnAppend: the cursor names other rows.
            TrajectoryIdTaken: see `extend`. To renumber the ids, call `extend` instead.
            WriteError: see `extend`.
        """
        buffers.write_at(self, cursor, data, set_cursor=set_cursor)

    def attach(self, buffer: Any) -> None:
        """Attach a replay buffer and set its writer to continue after the last row."""
        super().attach(buffer)
        buffers.attach(self, buffer)

    def get(self, index: Any, keys: Keys | None = None, *, out: ReusedRows | None = None) -> Any:
        """Return rows as `RowStore.get` does, or all rows of a column if the index is a key.

        With ``out``, which `reused` allocated, the rows are copied into its memory and its
        TensorDict is returned. This overwrites the previous contents.

        Raises:
            KeyError: no column has that key.
            ValueError: ``out`` has space for another number of rows, or ``keys`` were passed as
                well.
        """
        if out is not None:
            if not isinstance(out, ReusedRows):
                raise TypeError(f"out: expected the result of reused(), got {type(out).__name__}.")
            if keys is not None:
                raise ValueError("expected keys or out, got both. Give the keys to reused().")
            own = out.schema is self.reader.schema  # not if out has overlays
            reader = self.reader if own else self.reader_with(out.keys)
            return reader.get_into(index, out)
        kind = type(index)
        if kind is str or (kind is tuple and index and all(type(name) is str for name in index)):
            reader = self.reader_with([index])
            _require_column(reader, as_key(index))
            only = [index] if as_key(index) in reader.keys else None
            return reader.get(slice(None), only)[index]
        return (self.reader if keys is None else self.reader_with(keys)).get(index, keys)

    def reused(self, rows: int, keys: Keys | None = None) -> ReusedRows:
        """Allocate memory for batches of ``rows`` rows, which ``get(index, out=...)`` overwrites.

        Small batches then take a third of the time. See `get` for ``keys``.

        Raises:
            ColumnsMissing: a column does not exist.
            NotEnoughMemory: the available memory is too small.
            NotInitialised: the storage has no schema yet.
            ValueError: ``rows`` is not a positive number.
        """
        return ReusedRows(self.reader if keys is None else self.reader_with(keys), rows, keys)

    def with_overlays(self, *names: str | Key) -> DiskStorage:
        """Return a view of the rows with overlays as additional columns, for reading and sampling.

        The columns appear in ``get``, slices, trajectories, `n_step` and the batches of replay
        buffers. The view shows rows that are added to this storage later, and values that are set
        later. Rows can be added only to this storage, and only this storage has to be closed.

        Raises:
            ColumnsMissing: no overlay has that name.
        """
        from tallyroll.storage.ext.overlays.overlaid_storage import OverlaidStorage

        return OverlaidStorage(self, names)

    @property
    def trajectories(self) -> StoredTrajectories[DiskStorage]:
        """The trajectories that the rows belong to, by id."""
        from tallyroll.storage.ext.views.trajectories import StoredTrajectories

        return StoredTrajectories(self.reader, self, self._over)

    def split(
        self, *, seed: int = 0, by: Literal["trajectory", "run"] = "trajectory", **shares: float
    ) -> dict[str, DiskStorage]:
        """Split the trajectories at random and return a view of each part by its name.

        The parts do not overlap. Each part has its share of all trajectories, rounded to whole
        trajectories. If the shares sum to 1, every trajectory is in one part. The parts depend only
        on the trajectory ids and the seed, not on the order or format of the rows. The views behave
        like the results of `StoredTrajectories.where`.

        Args:
            seed: the seed of the split, 0 or more.
            by: ``"run"`` divides whole runs, so that no run is in two parts. Each part then has its
                share of the runs. All rows that were copied from one storage count as one run, and
                so do all shards of a run.
            shares: the share of each part, such as ``train=0.9, val=0.1``.

        Raises:
            ValueError: a share is not above 0, the shares sum to more than 1, or a part would be
                empty.
            ColumnsMissing: the rows have no trajectory columns.
        """
        from tallyroll.storage.ext.views.split import split

        parts = split(self.trajectories, self.reader, shares, seed, by)
        return {name: self._over(reader) for name, reader in parts.items()}

    def _over(self, reader: ViewReader) -> DiskStorage:
        from tallyroll.storage.ext.views.view_storage import ViewStorage

        return ViewStorage(self, reader)

    # --- extensions -------------------------------------------------------------------------------

    def copy_to(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Keys | None = None,
        drop: Keys = (),
        sort: bool = False,
        format: str | None = None,
        follow: bool = False,
        stop: Callable[[], bool] | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> CopyReport:
        """Copy the committed rows to a new storage of any format, completely or not at all.

        Rows are numbered from 0 in their order. The manifest of the copy records the source
        storages, their rows and the runs that wrote them. Overlays are copied with the values that
        they have when their rows are copied. If several storages have overlays of the same name,
        all that differ from the first one in dtype, shape or fill are left out, and the report
        names them. Another process may write to this storage during the copy: the rows that are
        committed at the time of the call are copied.

        Args:
            path: the path of the copy. Nothing may exist there.
            columns: the columns and overlays to copy; None: all.
            drop: columns and overlays to leave out.
            sort: write one trajectory after the other, in the order of their first rows.
            format: ``"memmap"``, ``"hdf5"`` or ``"zarr"``; None: by the suffix of ``path``.
            follow: continue with the rows that a process adds, until it closes the storage or
                ``stop`` returns True. Batches are copied whole.
            stop: callback that is called regularly with ``follow``.
            dry_run: return the report of the copy without writing anything.
            progress: callback that is called regularly with the number of bytes copied, and the
                total.

        Raises:
            OpenError: ``path`` is taken or not writable, or another process copies to it.
            StorageFull: the rows do not fit on the disk.
            ColumnsMissing: a column does not exist.
            Overrun: the writer of a ring overwrites rows before they are copied.
            StateMismatch: rows are rewound during the copy.
            DamagedOverlay: an overlay cannot be used; ``drop`` leaves it out.
            ValueError: an argument has an invalid value.
        """
        from tallyroll.storage.ext.storage_copy import copy

        self.reader.require_open()
        return copy(
            self.reader,
            path,
            columns=columns,
            drop=drop,
            sort=sort,
            format=format,
            follow=follow,
            stop=stop,
            dry_run=dry_run,
            progress=progress,
        )

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
        """Export the committed rows in a format of another library, completely or not at all.

        The report counts everything that the format cannot hold. `import_dataset` reads the export.
        Another process may write to this storage during the export: the rows that are committed at
        the time of the call are exported. To export some trajectories, use
        ``storage.trajectories.where(...).export(...)``.

        Args:
            path: the path of the export, a file or a folder depending on the format. Nothing may
                exist there. With ``follow``, a folder of versions, which may hold versions of this
                storage.
            kind: the format: ``"d4rl"``, ``"hf"``, ``"lerobot"``, ``"minari"``, ``"npz"``,
                ``"parquet"``, ``"rlds"``, ``"torchrl"``, or a format that another package provides.
            columns: the columns to export, and overlays, which become columns; None: all columns
                and no overlays.
            cuts: the treatment of trajectories that neither terminated nor were truncated.
                ``"keep"`` writes them unchanged, ``"drop"`` leaves them out, and ``"truncate"``
                marks their last rows as truncated.
            follow: keep the export up to date until the process that writes to this storage closes
                it. Each version is first written completely to a new path. Then the link
                ``current`` in the folder ``path`` (with the suffix of the format's files, as
                ``current.npz``) is replaced atomically by a link to it. The version before the
                newest stays, and older ones are deleted. A reader that resolves the link once, with
                `os.path.realpath`, can therefore use its target until the second version after it.
                An error, a signal or a kill leaves the last version intact, and the same call
                continues from it.
            options: options of the format, such as `LeRobotOptions`; None: its defaults.
            progress: callback that is called regularly with the number of bytes read, and the
                total.

        Raises:
            InvalidSchema: the format cannot hold the columns.
            MissingLibrary: a required library is not installed.
            OpenError: ``path`` is taken or not writable, or another process writes to it.
            StorageFull: the rows do not fit on the disk.
            ColumnsMissing: a column does not exist, or the rows have no trajectory columns.
            Overrun: the writer of a ring overwrites rows before they are exported.
            StateMismatch: rows are rewound during the export.
            ValueError: an argument has an invalid value.
        """
        from tallyroll.storage.ext.exchange.followed_export import export_storage

        return export_storage(
            self,
            path,
            kind,
            columns=columns,
            cuts=cuts,
            follow=follow,
            options=options,
            progress=progress,
        )

    def pack(
        self,
        path: str | os.PathLike[str],
        *,
        format: Format | None = None,
        codecs: Mapping[str | Key, str] | str | None = None,
        once: bool = True,
        stacks: Sequence[FrameStack] | None = None,
        progress: Progress | None = None,
    ) -> PackReport:
        """Write the committed rows to a new compressed storage, ordered by trajectory.

        The rows get new numbers; `old_rows` of the packed storage returns the numbers in this one.
        The values are kept bit for bit. The packed storage is complete when the call returns. If
        the call fails or the process is killed, nothing is at ``path``.

        Args:
            path: the path of the packed storage.
            format: ``"zarr"``, a directory that zarr-python, TensorStore and xarray read, or
                ``"hdf5"``, a file that h5py reads; None: HDF5 if ``path`` ends in ``.h5`` or
                ``.hdf5``, else Zarr.
            codecs: one codec for all columns, or a codec for each named column: ``"zstd:3"``,
                ``"shuffle:5"`` (zstd after a byte shuffle, for numbers), ``"none"``; for HDF5
                ``"gzip:4"``.
            once: store an observation only once if one row ends and the next begins with it, and
                store each frame of a stack only once.
            stacks: columns that are stacks of frames; None detects them.
            progress: callback that is called regularly with the number of rows packed, and the
                total.

        Raises:
            OpenError: ``path`` is taken or not writable, or another process packs to it.
            StorageFull: the rows do not fit on the disk.
            Overrun: the writer of a ring overwrites rows before they are packed.
            MissingLibrary: the extra ``pack``, or ``hdf5``, is not installed.
            ValueError: an argument has an invalid value.
        """
        from tallyroll.storage.ext.packed.pack import pack

        self.reader.require_open()
        return pack(
            self.reader,
            path,
            format=format,
            codecs=codecs,
            once=once,
            stacks=stacks,
            progress=progress,
        )

    def old_rows(self, index: Any = slice(None)) -> np.ndarray:
        """Return the row numbers that these rows had in the storage before packing, int64.

        Raises:
            NotAStorage: this storage is not packed.
        """
        from tallyroll.storage.ext.packed.packed_reader import old_rows

        return old_rows(self.reader, index)

    def statistics(
        self, keys: Keys | None = None, *, keep: bool = True, progress: Progress | None = None
    ) -> Statistics:
        """Return mean, deviation, extremes, quantiles and the share of NaNs of each column.

        The computation takes one pass in bounded memory, in float64. The result is kept in a file
        beside the rows, so that later calls read only new rows. Rings, views, unions and storages
        of other formats have no such file. If the file is damaged or belongs to other rows, all
        rows are read.

        Args:
            keys: the columns; None: all columns that are not complex.
            keep: use the file, and update it if it is writable.
            progress: callback that is called regularly with the number of bytes read, and the
                total.

        Raises:
            ColumnsMissing: a column does not exist.
            ValueError: a column holds complex numbers.
            NotInitialised: the storage has no schema yet.
        """
        from tallyroll.storage.ext.statistics.statistics import statistics_of

        return statistics_of(self.reader, keys, progress, keep=keep)

    def normaliser(
        self, key: str | Key, *, eps: float = 1e-6, clip: float | None = 10.0, keep: bool = True
    ) -> Normaliser:
        """Return a transform that normalises a column by its mean and deviation in these rows.

        Args:
            key: the key of the column, such as ``"observation"``.
            eps, clip: see `Normaliser`.
            keep: see `statistics`.

        Raises:
            ColumnsMissing: the column does not exist.
            ValueError: the column has no finite mean, or ``eps`` or ``clip`` is not above 0.
        """
        from tallyroll.storage.ext.statistics.normaliser import normaliser_of

        return normaliser_of(self, key, eps=eps, clip=clip, keep=keep)

    def dataset(
        self,
        columns: Keys | None = None,
        *,
        slice_len: int | None = None,
        short: Last = "pad",
        where: str | None = None,
        transform: Callable[[TensorDict], Any] | None = None,
    ) -> RowDataset:
        """Return the current rows as a map-style dataset for PyTorch.

        Args:
            columns: the columns and overlays of an item; None: all columns.
            slice_len: the number of rows of an item, a piece of a trajectory. Pieces are cut from
                the first row of each trajectory on, so that each row is in one piece. Items are
                TensorDicts [slice_len] whose ends are marked as in `Trajectories.sample_slices`.
                None: items are rows.
            short: the treatment of a last piece with fewer rows. ``"pad"`` appends zeros, and
                ``("collector", "mask")`` is True for stored rows. ``"skip"`` leaves the piece out.
            where: an expression that selects trajectories, see `StoredTrajectories.where`.
            transform: a function of a batch of items, called in the process that reads the batch.

        Raises:
            ColumnsMissing: a column does not exist, such as the trajectory ids that ``slice_len``
                needs.
            InvalidExpression: ``where`` is not a condition on trajectories.
            ValueError: an argument has an invalid value.
        """
        from tallyroll.storage.ext.training.row_dataset import dataset_of

        return dataset_of(
            self, columns, slice_len=slice_len, short=short, where=where, transform=transform
        )

    def to_pandas(self, columns: Keys | None = None) -> pd.DataFrame:
        """Return the rows as a pandas DataFrame. Requires the extra ``pandas``.

        The name of a column is its key, joined by dots, such as ``next.reward``. A column with
        several numbers per row becomes several columns: ``observation.0``, ``observation.1`` and so
        on.

        Args:
            columns: the columns; None: all columns with at most 64 numbers per row.

        Raises:
            MissingLibrary: pandas is not installed.
            ColumnsMissing: a column does not exist.
            ValueError: a requested column has more than 64 numbers per row.
        """
        from tallyroll.storage.ext.training.tables import data_frame

        return data_frame(self.reader if columns is None else self.reader_with(columns), columns)

    def to_arrow(self, columns: Keys | None = None) -> pa.Table:
        """Return the rows as an Arrow table. Requires the extra ``arrow``.

        The name of a column is its key, joined by dots. A column with several numbers per row
        becomes a list of fixed size, whose field metadata holds the shape as JSON. bfloat16 becomes
        float32.

        Args:
            columns: the columns; None: all.

        Raises:
            MissingLibrary: pyarrow is not installed.
            ColumnsMissing: a column does not exist.
            ValueError: a column holds complex numbers, which Arrow does not support.
        """
        from tallyroll.storage.ext.training.tables import arrow_table

        return arrow_table(self.reader if columns is None else self.reader_with(columns), columns)

    def card(self, *, licence: str | None = None, progress: Progress | None = None) -> Card:
        """Return the dataset card of the rows, a page for a hub.

        ``str(card)`` is Markdown with the front matter that the Hugging Face Hub reads. It lists
        the columns, the counts, how to load the data, the runs with their seeds, policies and
        versions, kept statistics, the licence, and the hash of the content. The hash requires
        reading all rows.

        Args:
            licence: the licence, such as ``"apache-2.0"``; None: unknown.
            progress: callback that is called regularly with the number of bytes read, and the
                total.

        Raises:
            NotInitialised: the storage has no schema yet.
            Overrun: the writer of a ring overwrites rows while they are read.
        """
        from tallyroll.storage.ext.card.storage_card import card_of

        self.reader.require_open()
        return card_of(self.reader, licence, progress)

    # --- replay buffers ---------------------------------------------------------------------------

    def loader(
        self,
        batch: int | Make,
        *,
        transform: Callable[[Any], Any] | None = None,
        workers: int = 2,
        ahead: int | None = None,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        batches: int | None = None,
    ) -> Loader:
        """Return an iterator over batches that threads prepare in advance.

        The threads run in parallel with the learner while the learner, or the code that makes a
        batch, releases the GIL. torch releases it in its operations; the copies of columns do so
        above 64 KiB per batch.

        Args:
            batch: the number of rows, drawn with replacement, or a function of a `torch.Generator`.
                Threads call the function, which returns a batch that it draws with the generator,
                as ``lambda random: storage.trajectories.sample_slices(8, 16, random)``.
            transform: a function of a batch, called in the thread, without gradients.
            workers: the number of threads. With 0, a batch is made when it is taken.
            ahead: the maximum number of batches that are prepared in advance; None: two per thread.
                A batch has the rows that were committed when it was made.
            device: the target device. For CUDA, the thread pins a TensorDict or tensor. The batch
                is copied to the device when it is taken, in the stream of the caller.
            seed: the seed. Batch ``i`` does not depend on the number of threads if the rows are the
                same. None draws a seed from torch's generator.
            batches: the number of batches; None: unlimited.

        Raises:
            ValueError: an argument has an invalid value.
            IndexOutOfRange: a batch is drawn from a storage without rows.
            LoaderForked: a forked child takes a batch.
        """
        self.reader.require_open()
        make = batch if callable(batch) else partial(self._random_rows, _row_count(batch))
        return Loader(
            make,
            transform=transform,
            workers=workers,
            ahead=ahead,
            device=device,
            seed=seed,
            batches=batches,
        )

    def _random_rows(self, count: int, random: torch.Generator) -> Any:
        if not (rows := len(self)):
            raise IndexOutOfRange(f"{self.path} has no rows yet to draw from. Collect some first.")
        return self.reader.get(torch.randint(rows, (count,), generator=random).numpy())

    def dumps(self, path: Any) -> None:
        """Write a checkpoint to ``path`` with the storage's checkpointer.

        The default is `DiskStorageCheckpointer`, which documents the errors. A checkpointer of
        TorchRL receives the rows as one of TorchRL's storages.
        """
        if isinstance(self.checkpointer, DiskStorageCheckpointer):
            self.checkpointer.dumps(self, path)
        else:
            foreign_checkpoints.dump(self.checkpointer, self, path)

    def loads(self, path: Any) -> None:
        """Load the rows of a checkpoint. TorchRL's checkpointers require an empty storage.

        Raises:
            StateMismatch: the storage holds other rows.
        """
        if isinstance(self.checkpointer, DiskStorageCheckpointer):
            self.checkpointer.loads(self, path)
        else:
            foreign_checkpoints.load(self.checkpointer, self, path)
        buffers.seat_writers(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the rows. The rows themselves are on disk already."""
        reader = self.reader
        return {
            "path": str(self.path),
            "id": reader.id,
            "head": self.head,
            "rewinds": reader.rewinds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the rows of a state are in the storage. Rows that were added later stay.

        Raises:
            StateMismatch: the storage lacks rows of the state.
        """
        mine = self.state_dict()
        if not mine.keys() <= {*state_dict, "rewinds"}:
            raise StateMismatch(
                "expected the state of a storage on disk, got one with "
                f"{', '.join(map(repr, state_dict))}. The state of a storage on disk has no rows: "
                "dump and load the buffer, or extend the storage with the rows."
            )
        if state_dict["head"] and state_dict["id"] != mine["id"]:
            raise StateMismatch(
                f"this state belongs to the storage that was at {state_dict['path']}, but "
                f"{self.path} is another storage. Open the storage of the state."
            )
        if state_dict["head"] > mine["head"]:
            raise StateMismatch(
                f"this state has {state_dict['head']} rows, but {self.path} has {mine['head']} "
                "rows. Restore the storage from a copy that is as new as the state."
            )
        if mine["head"]:
            require_not_rewound(
                self.reader, state_dict["head"], state_dict.get("rewinds", 0), "this state"
            )

    def _empty(self) -> None:
        try:
            if len(self) and not self.ring:
                raise NotAnAppend(
                    f"{self.path} keeps every row, {self.head} so far, and only a ring can be "
                    "emptied. Create a ring with MemmapStorage(path, max_size=...), or another "
                    "storage."
                )
            if len(self):
                self.writer.empty()
        finally:
            # TorchRL's writers reset their cursor to 0 before they empty the storage.
            buffers.seat_writers(self)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """A copy of the manifest entries of the runs that wrote the rows, oldest first.

        A run begins at its ``first_row``. A resumed run has one entry per start, all with the same
        ``first_row_of_run``. The entry of a collector has ``environment``, ``versions``, ``seed``,
        ``lanes``, ``call`` and ``made``: the time, the host, the commit of the working folder, and
        hashes of the policy. ``events`` are the calls that changed its environments, in order: see
        `Collector.env_call`.
        """
        if not self.reader.initialised:
            return []
        return deepcopy(shown(self.reader.runs, self.reader.head))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a storage that was opened with ``mode="read"`` as its path.

        Unpickling opens it again and compares the rows. Workers of a data loader can thus receive
        the storage with any start method. Attached replay buffers are not pickled.

        Raises:
            NotPicklable: the storage was opened for writing, or is closed.
        """
        if self.mode != "read":
            self.__getstate__()
        if self.closed:
            raise NotPicklable(
                f"{self.path} is closed, and only an open storage can be sent to another process. "
                "Open the storage again."
            )
        return _reopened, (partial(type(self), mode="read", **self._reopening), self.state_dict())

    def __getstate__(self) -> NoReturn:
        raise NotPicklable(
            f"{self.path} cannot be sent to another process or copied: the files would have two "
            "owners. Open the storage there with tallyroll.storage.open_storage(path, "
            'mode="read"), or send a storage that was opened with mode="read".'
        )


class WritesElsewhere(ReadOnlyWriter):
    """Writer stub of a storage that reads the rows of another storage. Every write raises."""

    def __init__(self, reader: RowReader, how: str, whose: str) -> None:
        super().__init__(reader)
        self._how, self._whose = how, whose

    def refuse(self) -> NoReturn:
        """Raise `ReadOnlyStorage`."""
        raise ReadOnlyStorage(
            f"{self.reader.path} is read here {self._how} and cannot be written. Write to the "
            f"storage {self._whose}."
        )


def _reopened(make: Callable[[], DiskStorage], state: dict[str, Any]) -> DiskStorage:
    """Open the storage of a pickle; raise `StateMismatch` if its rows have changed."""
    storage = make()
    try:
        storage.load_state_dict(state)
    except BaseException:
        storage.close()
        raise
    return storage


def _require_column(reader: RowReader, key: Key) -> None:
    """Raise `KeyError` unless ``key`` is a column, or a group of columns."""
    if all(each[: len(key)] != key for each in reader.keys):
        note = excluded_note(reader.runs, [key])
        raise KeyError(f"{reader.path} has no column {format_key(key)}.{note}")


def _row_count(batch: object) -> int:
    if type(batch) is not int or batch < 1:
        raise ValueError(
            "batch: expected a number of rows above 0, or a function of a torch.Generator, got "
            f"{batch!r}."
        )
    return batch


def _path_of(path: Any) -> Any:
    if type(path) is int:
        raise TypeError(
            f"path: expected the location of the storage, got {path}. For a temporary ring of "
            f"that many rows, give max_size={path}."
        )
    return path
