"""A storage on disk as users and TorchRL's replay buffers have it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.engine.columns import FixedRows, IndexedRows, RowIndex
from tallyroll.storage.engine.commit_engine import Durability
from tallyroll.storage.errors import (
    IndexOutOfRange,
    NotAnAppend,
    NotAStorage,
    NotPicklable,
    ReadOnlyStorage,
    StateMismatch,
)
from tallyroll.storage.files.run_events import shown
from tallyroll.storage.package.moved_attributes import MovedAttribute
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.readers.row_reader import ReusedRows, RowReader
from tallyroll.storage.replay import buffers, foreign_checkpoints
from tallyroll.storage.replay.checkpoint import DiskStorageCheckpointer
from tallyroll.storage.replay.loader import Loader, Make
from tallyroll.storage.replay.tensor_storage import IN_PLACE, AsTensorStorage
from tallyroll.storage.rows.indexing import consecutive
from tallyroll.storage.rows.keys import Key, Keys, as_key
from tallyroll.storage.rows.progress import MoreDone, Progress
from tallyroll.storage.stores.rewinds import require_kept
from tallyroll.storage.stores.row_store import RowStore
from tallyroll.storage.stores.row_writer import NoWriter, RowWriter
from tallyroll.storage.stores.temporary import TemporaryFolder
from tallyroll.storage.trajectories.id_checks import Ids

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from tallyroll.storage.ext.card.page import Card
    from tallyroll.storage.ext.exchange.dataset_export import Cuts, ExportReport
    from tallyroll.storage.ext.exchange.followed_export import Follow
    from tallyroll.storage.ext.packed.column_writers import FrameStack
    from tallyroll.storage.ext.packed.pack import Format, PackReport
    from tallyroll.storage.ext.statistics.normaliser import Normaliser
    from tallyroll.storage.ext.statistics.statistics import Statistics
    from tallyroll.storage.ext.storage_copy import CopyReport
    from tallyroll.storage.ext.training.row_dataset import Last, RowDataset
    from tallyroll.storage.ext.views.trajectories import StoredTrajectories
    from tallyroll.storage.ext.views.view_reader import ViewReader

_IDS = ("check", "renumber", "fresh")


def _extend_fixed(append: Callable[..., range]) -> Callable[..., range]:
    def extend_fixed(rows: FixedRows, index: RowIndex, *, record: bytes | None = None) -> range:
        return append(IndexedRows(rows, index), record)

    return extend_fixed


class DiskStorage(RowStore, AsTensorStorage):
    """Rows on disk, growing or a ring, that survive the end of the process in any way.

    A row is in the storage for good once `extend` has returned. Other processes
    may read at any time and see committed rows only; threads of this process may write
    in turn. It is a TorchRL storage: ``ReplayBuffer(storage=...)`` works on a new, a
    reopened and a read-only one.

    Args:
        path: where it is, or will be. Without one it is temporary: in a folder
            ``tallyroll-*`` of its own where `tempfile` makes them, which goes when the storage is
            closed or collected, and at the exit of the process that made it; not with a
            forked child. Batches and readers keep the rows that they refer to. What is
            killed leaves its folder behind.
        mode: ``"create"`` refuses an existing one, and writes nothing until the
            schema is known; ``"append"`` goes on after the last row;
            ``"read"`` never writes.
        capacity: rows to reserve space for at once, those that are there included.
            The storage grows beyond them, where its format can.
        max_size: slots of a ring, in which new rows overwrite the oldest; None keeps
            every row. Only memory-mapped storages can be rings. A replay buffer's ``empty()``
            leaves no row of a ring valid; the numbers of later rows go on from these.
        durability: what committed rows survive: ``"process"``, the death of any
            process; ``"power"``, a power cut too, at the price of waiting for
            the disk in every commit, and once, when it is opened, for the rows of
            earlier writers.
        accept_copy: open a copy of files that were copied while a writer had the storage
            open. Rows that were committed since the original was last closed may be missing
            in it, and read as zeros; `verify` detects some of that. A copy that is appended
            to counts as a storage of its own. Without ``accept_copy`` such a copy is refused;
            a copy of a storage that was closed never is.

    Raises:
        CopyOfOpenStorage: it is such a copy, and ``accept_copy`` is False.
        OpenError: the path cannot be opened or created so (its subclasses say why).
        CorruptStorage: the files are damaged.
    """

    sharded: ClassVar[bool] = False
    """True if workers write the rows, each to a shard of its own."""

    _default_checkpointer = DiskStorageCheckpointer

    _reopening: Mapping[str, Any]
    """The path, absolute, and other arguments with which a reader is opened again."""
    _leave_folder: Callable[[], Any] | None = None
    """Removes the folder of a temporary storage."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        mode: Mode = "create",
        capacity: int | None = None,
        max_size: int | None = None,
        durability: Durability = "process",
        accept_copy: bool = False,
    ) -> None:
        AsTensorStorage.__init__(self)
        temporary = TemporaryFolder(mode) if path is None else None
        place = _path_of(path) if temporary is None else temporary.rows
        try:
            RowStore.__init__(self, place, mode, capacity, durability, max_size, accept_copy)
        except BaseException:
            if temporary is not None:
                temporary.remove()
            raise
        self._fit_ring()
        self._reopening = {"path": str(self.path.absolute()), "accept_copy": accept_copy}
        if temporary is not None:
            assert isinstance(self.writer, RowWriter)
            self.writer.temporary = True
            self._leave_folder = temporary.leave_with(self, self.writer.close)

    def close(self) -> None:
        """Trim the files to the committed rows and let the next writer in. Twice is harmless.

        Another thread's write is finished first. A temporary storage is deleted.
        """
        super().close()
        if self._leave_folder is not None:
            self._leave_folder()

    def finalize(self, progress: MoreDone | None = None) -> None:
        """Finalize as `RowStore.finalize` does; raise `NotAStorage` for a temporary storage."""
        if self._leave_folder is not None:
            raise NotAStorage(
                f"{self.path} is temporary, and goes when it is closed. Give it a path, or dump it."
            )
        super().finalize(progress)

    def extend(
        self,
        rows: TensorDictBase | Mapping[Key, np.ndarray],
        *,
        record: bytes | None = None,
        ids: Ids = "check",
    ) -> range:
        """Write rows after the last one and commit them; return their numbers.

        Args:
            rows: a TensorDict [N], on any device, or one array [N, ...] for each
                column by its key. The first rows of a new storage decide its schema.
            record: a payload that becomes `record` with the same commit.
            ids: of the trajectories of rows that have ``("collector", "traj_ids")``,
                ``"step"`` and ``"lane"``. ``"check"`` refuses an id that is stored already,
                unless its rows go on from that id's last row: same lane, next step, not
                ended, and no other trajectory of the lane in between. Rows that are gone from
                a ring do not count, nor those that a batch which fills it replaces.
                ``"renumber"`` moves all ids of the call by one number, to above the largest
                stored id: so append the rows of another storage, ``extend(other.get(...),
                ids="renumber")``, in one call, because a trajectory whose rows come in two
                calls becomes two. After a collector's run they are a run of their own.
                ``"fresh"`` writes the ids as they are: the caller must have made them unique.

        For rows that come unchanged from ``other[:]``, ``other.get(slice)`` or
        ``other.in_order()``, the manifest records the other storage and the runs that made them
        there: ``copied_from`` and ``runs`` of an entry. It does not know of values that the
        caller wrote into them since.

        Raises:
            TrajectoryIdTaken: an id that is stored already, or rows that cannot be those of
                one trajectory.
            RunUnderWay: a collector is writing a run to this storage; not with ``"fresh"``.
            ColumnsMissing: ``"renumber"`` of rows without ids.
            WriteError: refused, with nothing written (its subclasses say why).
        """
        if ids not in _IDS:
            raise ValueError(f"ids is one of {', '.join(map(repr, _IDS))}, got {ids!r}.")
        writer = self.writer
        span = writer.write(rows, record, None, ids)
        if writer.tell is not None:
            writer.tell(span)
        return span

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Append ``data`` at ``cursor``, which must name the rows right after the last one.

        More rows than a ring has are written piece by piece, so that the last ones stay.

        Raises:
            NotAnAppend: any other cursor.
            TrajectoryIdTaken: as `extend`; to renumber, write with `extend`.
            WriteError: as `extend`.
        """
        self.reader.require_open()
        try:
            if not set_cursor:
                raise NotAnAppend(f"storage[i] = rows was asked for: {IN_PLACE}")
            rows = consecutive(cursor, self.ring)
            buffers.check_cursor(self, rows)
            data = buffers.as_batch(data, single=isinstance(cursor, int))
            if len(data) != len(rows):
                raise NotAnAppend(f"{len(rows)} rows were announced and {len(data)} given.")
            self.writer.write_items(data, buffers.writers_index(self))
        except BaseException:
            # TorchRL's writers count before they write.
            buffers.seat_writers(self)
            raise
        if len(self._attached_entities_list) > 1:
            buffers.seat_writers(self)

    def attach(self, buffer: Any) -> None:
        """Join a replay buffer: its writer goes on after the last row."""
        super().attach(buffer)
        self.writer.tell = partial(_tell_buffers, weakref.ref(self))
        buffers.join(self, buffer)

    def get(self, index: Any, keys: Keys | None = None, *, out: ReusedRows | None = None) -> Any:
        """Return rows as `RowStore.get` does; for a key as the index, all rows of that column.

        ``out`` is memory that `reused` made, to which the rows are copied, and its TensorDict
        is returned: what it had before is overwritten.

        Raises:
            KeyError: no column has that key.
            ValueError: ``out`` has another number of rows, or there are ``keys`` as well.
        """
        if out is not None:
            if not isinstance(out, ReusedRows):
                raise TypeError(f"out is what reused() returned, got {type(out).__name__}.")
            if keys is not None:
                raise ValueError("keys are those of out: give them to reused().")
            reader = self.reader
            if out.schema is not reader.schema:  # with overlays, or of another storage
                reader = self.reader_with(out.keys)
            return reader.get_into(index, out)
        kind = type(index)
        if kind is str or (kind is tuple and index and all(type(name) is str for name in index)):
            reader = self.reader_with([index])
            only = [index] if as_key(index) in reader.keys else None
            return reader.get(slice(None), only)[index]
        return (self.reader if keys is None else self.reader_with(keys)).get(index, keys)

    def reused(self, rows: int, keys: Keys | None = None) -> ReusedRows:
        """Return memory for batches of ``rows`` rows: ``get(index, out=...)`` overwrites it.

        Small batches come in a third of the time so. ``keys`` as in `get`.

        Raises:
            ColumnsMissing: a column that is not there.
            NotEnoughMemory: there is not enough memory.
            NotInitialised: there is no schema yet.
            ValueError: ``rows`` is no positive number.
        """
        return ReusedRows(self.reader if keys is None else self.reader_with(keys), rows, keys)

    def with_overlays(self, *names: str | Key) -> DiskStorage:
        """Return the same rows with some overlays as further columns, to read and to sample.

        For ``get``, slices, trajectories, `n_step` and replay buffers, whose batches then have
        these columns. Rows that are added to this storage show in it, and values that are set;
        rows are added to this storage alone, which also has to be closed.

        Raises:
            ColumnsMissing: there is no overlay of that name.
        """
        from tallyroll.storage.ext.overlays.overlaid_storage import OverlaidStorage

        return OverlaidStorage(self, names)

    @property
    def trajectories(self) -> StoredTrajectories[DiskStorage]:
        """The trajectories that the rows belong to, by id."""
        from tallyroll.storage.ext.views.trajectories import StoredTrajectories

        return StoredTrajectories(self.reader, self, self._over)

    def split(self, *, seed: int = 0, **shares: float) -> dict[str, DiskStorage]:
        """Divide the trajectories at random, and return a view of each part by its name.

        No trajectory is in two parts, and each part has its share of all trajectories, rounded to
        whole ones; if the shares are 1 together, every trajectory is in one part. The parts are the
        same for the same trajectory ids and seed, in whatever order and format rows are stored.
        Views are those of `StoredTrajectories.where`.

        Args:
            seed: of the division, 0 or more.
            shares: the parts, such as ``train=0.9, val=0.1``.

        Raises:
            ValueError: a share is not above 0, the shares are above 1 together, or a part would
                have no trajectory.
            ColumnsMissing: the rows do not say which trajectory they belong to.
        """
        from tallyroll.storage.ext.views.split import split

        parts = split(self.trajectories, shares, seed)
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
        """Write the committed rows to a new storage of any format, which is there whole or not.

        Rows get numbers from 0, in their order. Its manifest says from which rows of which
        storages they are, and which runs made them. Overlays go along, with the values that they
        have when their rows are copied; of several storages, one that keeps something else than
        the first of its name is left out, and the report names it. Another process may write to
        this storage meanwhile: the rows that are committed now are copied.

        Args:
            path: where it will be; nothing may be there.
            columns: those that are wanted, overlays too; None: all.
            drop: those that are not.
            sort: one trajectory after the other, in the order of their first rows.
            format: ``"memmap"``, ``"hdf5"`` or ``"zarr"``; None: by the suffix of ``path``.
            follow: go on with the rows that a process adds, until it closes the storage or
                ``stop`` returns True. Batches are copied whole.
            stop: asked now and then with ``follow``.
            dry_run: return what would be done, and write nothing.
            progress: called now and then with the bytes that were copied, and with all.

        Raises:
            OpenError: ``path`` is taken, or cannot be written; or another process copies to it.
            StorageFull: the rows do not fit on the disk.
            ColumnsMissing: there is no such column.
            Overrun: a ring's writer overwrites rows before they are copied.
            StateMismatch: rows are taken back meanwhile.
            DamagedOverlay: an overlay cannot be used; ``drop`` leaves it out.
            ValueError: an argument is none of its values.
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
        """Write the committed rows to a new storage, compressed, in the order of trajectories.

        They get new numbers; `old_rows` of the packed storage has those of now. All bits of all
        rows are kept. It is there when the call returns, whole; if it fails, or the process is
        killed, nothing is at ``path``.

        Args:
            path: where it will be.
            format: ``"zarr"``, a directory that zarr-python, TensorStore and xarray read, or
                ``"hdf5"``, a file that h5py reads; None: HDF5 if ``path`` ends in ``.h5`` or
                ``.hdf5``, else Zarr.
            codecs: a codec for each column that is named, or for all: ``"zstd:3"``,
                ``"shuffle:5"`` (zstd after a shuffle of bytes, for numbers), ``"none"``; of HDF5
                ``"gzip:4"``.
            once: store an observation once that one row ends and the next begins with, and each
                frame of a stack once.
            stacks: columns that are stacks of frames; None looks which are.
            progress: called now and then with the rows that are packed, and with all.

        Raises:
            OpenError: ``path`` is taken, or cannot be written; or another process packs to it.
            StorageFull: they do not fit on the disk.
            Overrun: a ring's writer overwrites rows before they are packed.
            MissingLibrary: the extra ``pack``, or ``hdf5``, is not installed.
            ValueError: an argument is none of its values.
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
        """Return the numbers that rows had in the storage that was packed, int64.

        Raises:
            NotAStorage: this storage is not packed.
        """
        from tallyroll.storage.ext.packed.packed_reader import old_rows

        return old_rows(self.reader, index)

    def statistics(
        self, keys: Keys | None = None, *, keep: bool = True, progress: Progress | None = None
    ) -> Statistics:
        """Return mean, deviation, extremes, quantiles and the share of NaNs of each column.

        One pass in bounded memory, in float64. They are kept in a file beside the rows, and later
        only rows that came since are read; not those of a ring, a view, several storages or files
        of others. A file that is damaged, or of other rows, is counted again from the rows.

        Args:
            keys: of the columns; None: all but complex ones.
            keep: use the file, and write it, where it can be written.
            progress: called now and then with the bytes that were read, and with all.

        Raises:
            ColumnsMissing: a column that is not there.
            ValueError: a column of complex numbers.
            NotInitialised: there is no schema yet.
        """
        from tallyroll.storage.ext.statistics.statistics import statistics_of

        return statistics_of(self.reader, keys, progress, keep=keep)

    def normaliser(
        self, key: str | Key, *, eps: float = 1e-6, clip: float | None = 10.0, keep: bool = True
    ) -> Normaliser:
        """Return a transform with the mean and the deviation that a column has in these rows.

        Args:
            key: of the column, such as ``"observation"``.
            eps, clip: as `Normaliser`.
            keep: as `statistics`.

        Raises:
            ColumnsMissing: there is no such column.
            ValueError: the column has no finite mean, or ``eps`` or ``clip`` is no number above 0.
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
        """Return the rows of this moment as a map-style dataset of PyTorch.

        Args:
            columns: those that are wanted, overlays among them; None: all.
            slice_len: items are pieces of trajectories of so many rows, from the first row of each
                on, which have each row once: TensorDicts [slice_len] that end as
                `Trajectories.sample_slices` says. None: items are rows.
            short: what becomes of the last piece of a trajectory, if it has fewer rows: ``"pad"``,
                it has zeros at its end, and ``("collector", "mask")`` is True where there is a
                row; ``"skip"``, it is no item.
            where: an expression: only rows of trajectories for which it holds, see
                `StoredTrajectories.where`.
            transform: a function of a batch of items, in the process that reads it.

        Raises:
            ColumnsMissing: a column that is not there; with ``slice_len``, the rows do not say
                which trajectory they belong to.
            InvalidExpression: ``where`` is no condition on trajectories.
            ValueError: an argument is none of its values.
        """
        from tallyroll.storage.ext.training.row_dataset import dataset_of

        return dataset_of(
            self, columns, slice_len=slice_len, short=short, where=where, transform=transform
        )

    def to_pandas(self, columns: Keys | None = None) -> pd.DataFrame:
        """Return the rows as a table of pandas, which the extra ``pandas`` installs.

        A column is named as its key, joined by dots, as ``next.reward``. One with several numbers
        a row becomes as many, ``observation.0``, ``observation.1`` and so on.

        Args:
            columns: those that are wanted; None: all with at most 64 numbers a row.

        Raises:
            MissingLibrary: pandas is not installed.
            ColumnsMissing: there is no such column.
            ValueError: a column that was asked for has more numbers a row than that.
        """
        from tallyroll.storage.ext.training.tables import data_frame

        return data_frame(self.reader if columns is None else self.reader_with(columns), columns)

    def to_arrow(self, columns: Keys | None = None) -> pa.Table:
        """Return the rows as a table of Arrow, which the extra ``arrow`` installs.

        A column is named as its key, joined by dots. One with several numbers a row is a list of
        fixed size, whose field has the shape in its metadata, as JSON. bfloat16 becomes float32.

        Args:
            columns: those that are wanted; None: all.

        Raises:
            MissingLibrary: pyarrow is not installed.
            ColumnsMissing: there is no such column.
            ValueError: a column of complex numbers, which Arrow has not.
        """
        from tallyroll.storage.ext.training.tables import arrow_table

        return arrow_table(self.reader if columns is None else self.reader_with(columns), columns)

    def card(self, *, licence: str | None = None, progress: Progress | None = None) -> Card:
        """Return the card of the rows: a page for a hub, with its facts.

        ``str(card)`` is Markdown, with the front matter that the Hugging Face Hub reads: columns,
        counts, how to load it, the runs that made it with their seeds, policies and versions, kept
        statistics, the licence, and the hash of the content, for which all rows are read.

        Args:
            licence: such as ``"apache-2.0"``; None: unknown.
            progress: called now and then with the bytes that were read, and with all.

        Raises:
            NotInitialised: there is no schema yet.
            Overrun: a ring's writer overwrites rows while they are read.
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
        """Return batches to iterate over, the next of which are made by threads meanwhile.

        The threads run beside the learner where it, or what makes a batch, lets others run:
        torch does in its operations, and the copies of columns of more than 64 KiB a batch.

        Args:
            batch: a number of rows, drawn with replacement; or a function of a
                `torch.Generator`, which threads call, and which returns a batch that it draws
                with it, as ``lambda random: storage.trajectories.sample_slices(8, 16, random)``.
            transform: a function of a batch, called in the thread, without gradients.
            workers: threads. Without any, batches are made when they are taken.
            ahead: the most batches that are made, or are under way, before they are taken; None
                is two a thread. They are of the rows that were there then.
            device: where batches go: a TensorDict or a tensor is pinned by the thread if that is
                CUDA, and copied when it is taken, in the stream of the caller.
            seed: of the batches: batch ``i`` is the same for any number of threads, if the rows
                are. None takes one of torch's numbers.
            batches: how many there are; None: without an end.

        Raises:
            ValueError: one of these is none of its values.
            IndexOutOfRange: a batch is drawn, and there are no rows.
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

    def contains(self, item: Any) -> Any:
        """Return whether a row of that number exists; for a tensor, one bool a number."""
        if isinstance(item, torch.Tensor):
            return (item >= -len(self)) & (item < len(self))
        return -len(self) <= int(item) < len(self)

    def dumps(self, path: Any) -> None:
        """Write a checkpoint to ``path``, by the storage's checkpointer.

        See `DiskStorageCheckpointer`, the default, for the errors. A checkpointer of TorchRL gets
        the rows as one of TorchRL's storages.
        """
        if isinstance(self.checkpointer, DiskStorageCheckpointer):
            self.checkpointer.dumps(self, path)
        else:
            foreign_checkpoints.dump(self.checkpointer, self, path)

    def loads(self, path: Any) -> None:
        """Get the rows of a checkpoint; with one of TorchRL's checkpointers only a new storage.

        Raises:
            StateMismatch: other rows are here.
        """
        if isinstance(self.checkpointer, DiskStorageCheckpointer):
            self.checkpointer.loads(self, path)
        else:
            foreign_checkpoints.load(self.checkpointer, self, path)
        buffers.seat_writers(self)

    def state_dict(self) -> dict[str, Any]:
        """Return which rows these are. The rows themselves are on disk already."""
        reader = self.reader
        return {
            "path": str(self.path),
            "id": reader.id,
            "head": self.head,
            "rewinds": reader.rewinds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the rows of a state are here. Rows that came later stay.

        Raises:
            StateMismatch: they are not.
        """
        mine = self.state_dict()
        if not mine.keys() <= {*state_dict, "rewinds"}:
            raise StateMismatch(
                f"this state has {', '.join(map(repr, state_dict))}, which is not the state of a "
                "storage on disk. Such a state has no rows: dump and load the buffer, or extend "
                "with the rows."
            )
        if state_dict["head"] and state_dict["id"] != mine["id"]:
            raise StateMismatch(
                f"this state belongs to the storage that was at {state_dict['path']}, and "
                f"{self.path} is another one. Open that one."
            )
        if state_dict["head"] > mine["head"]:
            raise StateMismatch(
                f"this state has {state_dict['head']} rows and {self.path} has {mine['head']}. "
                "Restore the storage from a copy that is as new as the state."
            )
        if mine["head"]:
            require_kept(
                self.reader, state_dict["head"], state_dict.get("rewinds", 0), "this state"
            )

    def _empty(self) -> None:
        try:
            if len(self) and not self.ring:
                raise NotAnAppend(
                    f"{self.path} keeps every row it got, {self.head} so far, and only a ring is "
                    "emptied. Create one, MemmapStorage(path, max_size=...), or another storage."
                )
            if len(self):
                self.writer.empty()
        finally:
            # TorchRL's writers count from 0 before they ask.
            buffers.seat_writers(self)

    @property
    def _mutation_revision(self) -> int:
        # TorchRL's samplers drop what they remember when this changes.
        return self.reader.revision

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs that wrote the rows, oldest first: a copy of their entries in the manifest.

        Each begins at its ``first_row``; one that was resumed has an entry for each time, with the
        same ``first_row_of_run``. A collector's has ``environment``, ``versions``, ``seed``,
        ``lanes``, ``call`` and ``made``: its time, its host, the commit of the working folder, and
        hashes of the policy. ``events`` are the calls that changed its environments, in their
        order: see `Collector.env_call`.
        """
        if not self.reader.initialised:
            return []
        return deepcopy(shown(self.reader.runs, self.reader.head))

    @property
    def last_index(self) -> int | None:
        """The index of the newest row, None without any."""
        if not len(self):
            return None
        return int(self.reader.index_of(np.array(self.reader.head - 1)))

    # TorchRL's samplers ask where a ring begins.
    _last_cursor_index = _last_cursor = last_index

    claim = MovedAttribute("writer.claim.take")
    episodes_path = MovedAttribute("writer.files.episodes_path")
    extend_fixed = MovedAttribute("writer.append", _extend_fixed)
    fresh_ids = MovedAttribute("writer.fresh_ids")
    has_claimed = MovedAttribute("writer.claim.is_of")
    inside = MovedAttribute("writer.files.inside")
    lock_path = MovedAttribute("writer.files.lock_path")
    put_record = MovedAttribute("writer.put_record")
    release = MovedAttribute("writer.claim.end")
    require_schema = MovedAttribute("writer.runs.require_schema")
    stage_record = MovedAttribute("writer.stage_record")
    withdraw_run = MovedAttribute("writer.runs.withdraw")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle one opened with ``mode="read"`` as its path: it is opened again, and compared.

        So workers of a data loader get it, however they are started. Replay buffers that it joined
        are left behind.

        Raises:
            NotPicklable: it writes, or is closed.
        """
        if self.mode != "read":
            self.__getstate__()
        if self.closed:
            raise NotPicklable(f"{self.path} is closed, and only an open storage is sent. Open it.")
        return _reopened, (partial(type(self), mode="read", **self._reopening), self.state_dict())

    def __getstate__(self) -> NoReturn:
        raise NotPicklable(
            f"{self.path} cannot be sent to another process or copied: the files would have two "
            'owners. Open it there with tallyroll.storage.open_storage(path, mode="read"), or send '
            "one that was opened so."
        )


class WritesElsewhere(NoWriter):
    """Refuses to write through a storage that reads the rows of another one."""

    def __init__(self, reader: RowReader, how: str, whose: str) -> None:
        super().__init__(reader)
        self._how, self._whose = how, whose

    def refuse(self) -> NoReturn:
        """Raise `ReadOnlyStorage`."""
        raise ReadOnlyStorage(
            f"{self.reader.path} is read here {self._how}, and nothing is written. "
            f"Write to the storage {self._whose}."
        )


def _reopened(make: Callable[[], DiskStorage], state: dict[str, Any]) -> DiskStorage:
    """Open the storage of a pickle; raise `StateMismatch` if it has other rows now."""
    storage = make()
    try:
        storage.load_state_dict(state)
    except BaseException:
        storage.close()
        raise
    return storage


def _tell_buffers(storage: weakref.ref[DiskStorage], rows: range) -> None:
    if (found := storage()) is not None:
        buffers.tell_buffers(found, rows)


def _row_count(batch: object) -> int:
    if type(batch) is not int or batch < 1:
        raise ValueError(
            f"batch is a number of rows above 0, or a function of a torch.Generator, got {batch!r}."
        )
    return batch


def _path_of(path: Any) -> Any:
    if type(path) is int:
        raise TypeError(
            f"path is where the storage is, got {path}. For a temporary ring of so many rows give "
            f"max_size={path}."
        )
    return path
