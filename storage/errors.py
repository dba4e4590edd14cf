"""Exceptions of storages, with one class for each condition.

::

    StorageError
    ├── OpenError                     the path cannot be opened or created as asked
    │   ├── StorageExists             create: a storage already exists there
    │   ├── DirectoryNotEmpty         create: something else already exists there
    │   ├── PathIsTaken               create: a file of another program already exists there
    │   ├── PathIsFile                a file where a directory is wanted
    │   ├── PathIsDirectory           a directory where a file is wanted
    │   ├── NotWritable               the file system does not allow writing there
    │   ├── StorageMissing            append, read: nothing exists there
    │   ├── InvalidAddress            (a ValueError) not an s3:// address, or one with credentials
    │   ├── NotAStorage               append, read: something else exists there
    │   ├── FormatVersionMismatch     written by another version of the format
    │   ├── CopyOfOpenStorage         a copy that was made while a writer had the original open
    │   ├── StorageLocked             another writer holds the storage
    │   ├── RowsDoubled               two members of a union have the same rows
    │   ├── CapacityMissing           create: the format needs to know the number of rows
    │   ├── MissingLibrary            the format needs a library that is not installed
    │   └── UnsupportedPlatform       the platform lacks locks, shared maps or fallocate
    ├── ExtensionMismatch             (an ImportError) the C extension is from another version
    ├── CorruptStorage                the files contradict each other
    ├── InvalidDataset                the source of an import is damaged, hostile or of another kind
    ├── InvalidSchema                 columns that a storage cannot hold
    ├── SchemaMismatch                columns that differ from those of the storage
    ├── InvalidProvenance             provenance that JSON cannot represent
    ├── DiskFailed                    the system cannot read or write, or files are gone
    ├── TooManyFiles                  this process, or the system, may open no more files
    ├── WriteError                    a write that was refused; committed rows are unchanged
    │   ├── RowsMismatch              rows that do not fit the schema
    │   ├── BatchTooLong              more rows at once than a ring has
    │   ├── RunUnderWay               rows from elsewhere while a collector writes a run
    │   ├── TrajectoryIdTaken         trajectory ids that are already stored, or cannot be stored
    │   ├── NotAnAppend               a write anywhere but at the end
    │   ├── CursorOverflow            TorchRL's writer counts in 32 bits
    │   ├── RecordTooLarge            a commit record beyond its slot
    │   ├── StorageFull               the disk has no room for the rows
    │   ├── ForeignContent            a file to be replaced holds data that another program added
    │   ├── ReadOnlyStorage           opened with mode="read"
    │   └── WriterForked              a forked child used its parent's writer
    ├── CallbackStopIteration         a transform, callback, reader or format raised StopIteration
    ├── ObjectStoreFailed             an object store refuses a request, or does not answer in time
    ├── ObjectChanged                 an object was replaced while it was read
    ├── NotInitialised                no schema yet
    ├── StorageClosed                 used after close()
    ├── StateMismatch                 a state or checkpoint of other rows
    ├── NotEnoughMemory               (a MemoryError) less memory is left than is needed
    ├── NotPicklable                  a storage was saved, or sent to another process
    ├── Overrun                       a ring's writer is faster than this reader
    ├── InvalidExpression             (a ValueError) not a condition on trajectories
    ├── ColumnsMissing                a required column does not exist
    ├── UnknownTrajectory             (a KeyError) no row of that trajectory
    ├── NoSlices                      no trajectory is as long as the requested slices
    ├── ShortTrajectory               a trajectory shorter than the slices, and short="error"
    ├── RateStalled                   the other side of a rate limit has not moved
    ├── LoaderForked                  a forked child takes batches of its parent's loader
    ├── SumTooLarge                   n-step returns that their dtype cannot hold
    ├── SlotsMayChange                an index into a ring that another process writes
    ├── DamagedTable                  the table of episodes cannot be used
    ├── DamagedOverlay                the file of an overlay cannot be used
    └── IndexOutOfRange               (an IndexError) no such row

Every message states the expected value, the actual value and the remedy. Wrong values of
constructor arguments raise ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

__all__ = [
    "BatchTooLong",
    "CallbackStopIteration",
    "CapacityMissing",
    "ColumnsMissing",
    "CopyOfOpenStorage",
    "CorruptStorage",
    "CursorOverflow",
    "DamagedOverlay",
    "DamagedTable",
    "DirectoryNotEmpty",
    "DiskFailed",
    "ExtensionMismatch",
    "ForeignContent",
    "FormatVersionMismatch",
    "IndexOutOfRange",
    "InvalidAddress",
    "InvalidDataset",
    "InvalidExpression",
    "InvalidProvenance",
    "InvalidSchema",
    "LoaderForked",
    "MissingLibrary",
    "NoSlices",
    "NotAStorage",
    "NotAnAppend",
    "NotEnoughMemory",
    "NotInitialised",
    "NotPicklable",
    "NotWritable",
    "ObjectChanged",
    "ObjectStoreFailed",
    "OpenError",
    "Overrun",
    "PathIsDirectory",
    "PathIsFile",
    "PathIsTaken",
    "RateStalled",
    "ReadOnlyStorage",
    "RecordTooLarge",
    "RowsDoubled",
    "RowsMismatch",
    "RunUnderWay",
    "SchemaMismatch",
    "ShortTrajectory",
    "SlotsMayChange",
    "StateMismatch",
    "StorageClosed",
    "StorageError",
    "StorageExists",
    "StorageFull",
    "StorageLocked",
    "StorageMissing",
    "SumTooLarge",
    "TooManyFiles",
    "TrajectoryIdTaken",
    "UnknownTrajectory",
    "UnsupportedPlatform",
    "WriteError",
    "WriterForked",
]


class StorageError(Exception):
    """Base class of the exceptions that storages raise."""


class OpenError(StorageError):
    """The path cannot be opened or created in the requested mode. Nothing was changed."""


class StorageExists(OpenError):
    """``mode="create"`` was used on a path that already holds a storage."""


class DirectoryNotEmpty(OpenError):
    """``mode="create"`` was used on a directory that is not empty and is not a storage."""


class PathIsFile(OpenError):
    """The path, or a part of it, is a file where a directory is required."""


class PathIsTaken(OpenError):
    """``mode="create"`` was used on the path of a file that is not a storage."""


class PathIsDirectory(OpenError):
    """The path is a directory where a file is required."""


class NotWritable(OpenError):
    """The file system does not allow this process to write at the path."""


class StorageMissing(OpenError):
    """``mode="append"`` or ``"read"`` was used on a path where nothing exists."""


class NotAStorage(OpenError):
    """``mode="append"`` or ``"read"`` was used on something that is not a Tallyroll storage."""


class InvalidAddress(OpenError, ValueError):
    """The text is not an address of an object store, or it contains credentials.

    The message does not repeat the address.
    """


class FormatVersionMismatch(OpenError):
    """The storage was written by another version of the format."""


class CopyOfOpenStorage(OpenError):
    """The files were copied while a writer had the storage open, so rows may be missing."""


class StorageLocked(OpenError):
    """Another writer holds the storage."""


class RowsDoubled(OpenError):
    """Two members of a union are the same storage or contain copies of the same rows."""


class CapacityMissing(OpenError):
    """A storage in a format that cannot grow was created without ``capacity``."""


class MissingLibrary(OpenError):
    """The format needs a library that is not installed."""


class UnsupportedPlatform(OpenError):
    """The platform or file system lacks locks, shared maps or fallocate."""


class ExtensionMismatch(StorageError, ImportError):
    """The compiled extension was built from the sources of another version of Tallyroll."""


class CorruptStorage(StorageError):
    """The files are truncated, damaged or contradict each other. Nothing was changed."""


class InvalidDataset(StorageError):
    """The source of an import is damaged, hostile or of another kind. Nothing was written."""


class InvalidSchema(StorageError):
    """A storage cannot hold columns like these."""


class SchemaMismatch(StorageError):
    """The columns of the data differ from those of the storage. Nothing was changed."""


class InvalidProvenance(StorageError):
    """The provenance cannot be serialized as JSON."""


class DiskFailed(StorageError):
    """The system cannot read or write, because the disk fails or files have disappeared."""


class TooManyFiles(StorageError):
    """The process or the system has reached its limit of open files. Open files stay usable."""


class CallbackStopIteration(StorageError):
    """User code raised StopIteration: a transform, a callback, a reader or a format.

    The exception would silently end a loop over batches. The message begins with the place of the
    call, and the original exception is the cause.
    """


class ObjectStoreFailed(StorageError):
    """An object store refused a request, or did not answer within the time and retry limits."""


class ObjectChanged(StorageError):
    """An object of a dataset was replaced while a reader had the dataset open."""


class WriteError(StorageError):
    """A write was refused. Committed rows are unchanged."""


class RowsMismatch(WriteError):
    """The names, dtypes or shapes of the rows differ from the schema."""


class BatchTooLong(WriteError):
    """A batch has more rows than the ring has slots."""


class TrajectoryIdTaken(WriteError):
    """A trajectory id is already used by other rows, or the rows cannot be one trajectory."""


class RunUnderWay(WriteError):
    """Other code wrote rows while a collector was writing a run and counting its rows."""


class NotAnAppend(WriteError):
    """A write did not start directly after the last row."""


class CursorOverflow(WriteError):
    """The rows are beyond the range of a TorchRL writer's 32-bit cursor."""


class RecordTooLarge(WriteError):
    """A commit record is larger than its slot."""


class StorageFull(WriteError):
    """The rows do not fit on the disk, or exceed a quota or a file size limit."""


class ForeignContent(WriteError):
    """A file that must be replaced contains data that another program added."""


class ReadOnlyStorage(WriteError):
    """A storage that was opened with ``mode="read"`` cannot be written."""


class WriterForked(WriteError):
    """A forked child used the writer of its parent."""


class NotInitialised(StorageError):
    """A new storage was read before its schema was known."""


class StorageClosed(StorageError):
    """A storage was used after ``close()``."""


class StateMismatch(StorageError):
    """A state dict or checkpoint does not belong to the rows of the storage."""


class NotEnoughMemory(StorageError, MemoryError):
    """The available memory is less than the operation needs."""


class NotPicklable(StorageError):
    """A storage that cannot be shared was pickled, copied or saved."""


class Overrun(StorageError):
    """A writer of a ring repeatedly overwrote rows while they were being read."""


class InvalidExpression(StorageError, ValueError):
    """The expression is not a valid condition on trajectories. The message shows the position."""


class ColumnsMissing(StorageError):
    """The storage lacks requested columns, or the columns that assign rows to trajectories."""


class UnknownTrajectory(StorageError, KeyError):
    """The storage has no row of the trajectory."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class NoSlices(StorageError):
    """No trajectory is as long as the requested slices."""


class ShortTrajectory(StorageError):
    """A drawn trajectory is shorter than the slices, and ``short`` is ``"error"``."""


class RateStalled(StorageError):
    """The other side of a rate limit made no progress within the timeout."""


class LoaderForked(StorageError):
    """A forked child took a batch from its parent's loader, whose threads run in the parent."""


class SlotsMayChange(StorageError):
    """Rows of a ring were requested by slot while another process may overwrite the slots."""


class SumTooLarge(StorageError):
    """The dtype of a sum of rewards cannot represent the sum exactly enough."""


class DamagedTable(StorageError):
    """The file of the episode table is damaged or does not belong to these rows."""


class DamagedOverlay(StorageError):
    """The file of an overlay is damaged, truncated, a link, or belongs to another storage."""


class IndexOutOfRange(StorageError, IndexError):
    """The index lies beyond the committed rows."""
