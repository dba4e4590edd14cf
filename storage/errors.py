"""Errors of storages, one class for each condition.

::

    StorageError
    ├── OpenError                     the path cannot be opened or created as asked
    │   ├── StorageExists             create: a storage is already there
    │   ├── DirectoryNotEmpty         create: something else is already there
    │   ├── PathIsTaken               create: another program's file is already there
    │   ├── PathIsFile                a file where a directory is wanted
    │   ├── PathIsDirectory           a directory where a file is wanted
    │   ├── NotWritable               the file system does not let us write there
    │   ├── StorageMissing            append, read: nothing is there
    │   ├── InvalidAddress            (a ValueError) no s3:// address, or one with secrets
    │   ├── NotAStorage               append, read: something else is there
    │   ├── FormatVersionMismatch     written by another version of the format
    │   ├── CopyOfOpenStorage         a copy that was made while a writer had the original open
    │   ├── StorageLocked             another writer holds it
    │   ├── RowsDoubled               two members of a union have the same rows
    │   ├── CapacityMissing           create: the format must know how many rows there will be
    │   ├── MissingLibrary            the format needs a library that is not installed
    │   └── UnsupportedPlatform       no locks, shared maps or fallocate here
    ├── ExtensionMismatch             (an ImportError) the extension is of another version
    ├── CorruptStorage                the files contradict each other
    ├── InvalidDataset                a source of an import is damaged, hostile, or another thing
    ├── InvalidSchema                 columns that a storage cannot hold
    ├── SchemaMismatch                other columns than the storage has
    ├── InvalidProvenance             not JSON
    ├── DiskFailed                    the system cannot read or write, or files are gone
    ├── TooManyFiles                  this process, or the system, may open no more files
    ├── WriteError                    a write that was refused; committed rows are as before
    │   ├── RowsMismatch              rows that do not fit the schema
    │   ├── BatchTooLong              more rows at once than a ring has
    │   ├── RunUnderWay               rows from elsewhere while a collector writes a run
    │   ├── TrajectoryIdTaken         trajectory ids that are stored already, or cannot be
    │   ├── NotAnAppend               a write anywhere but at the end
    │   ├── CursorOverflow            TorchRL's writer counts in 32 bits
    │   ├── RecordTooLarge            a commit record beyond its slot
    │   ├── StorageFull               the disk has no room for the rows
    │   ├── ForeignContent            a file to be replaced holds what another program added
    │   ├── ReadOnlyStorage           opened with mode="read"
    │   └── WriterForked              a forked child used its parent's writer
    ├── CallbackStopIteration         a transform, callback, reader or format raised StopIteration
    ├── ObjectStoreFailed             an object store refuses, or does not answer in time
    ├── ObjectChanged                 an object was replaced while it was read
    ├── NotInitialised                no schema yet
    ├── StorageClosed                 used after close()
    ├── StateMismatch                 a state or checkpoint of other rows
    ├── NotEnoughMemory               (a MemoryError) less memory is left than is needed
    ├── NotPicklable                  a storage was sent to another process
    ├── Overrun                       a ring's writer is faster than this reader
    ├── InvalidExpression             (a ValueError) no condition on trajectories
    ├── ColumnsMissing                rows that do not say which trajectory they belong to
    ├── UnknownTrajectory             (a KeyError) no row of that trajectory
    ├── NoSlices                      no trajectory is as long as the slices asked for
    ├── ShortTrajectory               a trajectory shorter than the slices, and short="error"
    ├── RateStalled                   the other side of a rate limit has not moved
    ├── LoaderForked                  a forked child takes batches of its parent's loader
    ├── SumTooLarge                   n-step returns that their dtype cannot hold
    ├── SlotsMayChange                an index into a ring that another process writes
    ├── DamagedTable                  the table of episodes cannot be used
    ├── DamagedOverlay                the file of an overlay cannot be used
    └── IndexOutOfRange               (an IndexError) no such row

Every message says what was wanted, what was got and what to do. Wrong values of
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
    """Anything that a storage refuses or cannot do."""


class OpenError(StorageError):
    """The path cannot be opened or created as asked. Nothing was changed."""


class StorageExists(OpenError):
    """``mode="create"`` on a path that holds a storage already."""


class DirectoryNotEmpty(OpenError):
    """``mode="create"`` on a directory that holds something else."""


class PathIsFile(OpenError):
    """The path, or a part of it, is a file where a directory is wanted."""


class PathIsTaken(OpenError):
    """``mode="create"`` on the path of a file that is no storage."""


class PathIsDirectory(OpenError):
    """The path is a directory where a file is wanted."""


class NotWritable(OpenError):
    """The file system does not let this process write there."""


class StorageMissing(OpenError):
    """``mode="append"`` or ``"read"`` on a path where nothing is."""


class NotAStorage(OpenError):
    """``mode="append"`` or ``"read"`` on something that is not a Tallyroll storage."""


class InvalidAddress(OpenError, ValueError):
    """No address of an object store, or one with credentials in it, which it does not repeat."""


class FormatVersionMismatch(OpenError):
    """The storage was written by another version of the format."""


class CopyOfOpenStorage(OpenError):
    """Files that were copied while a writer had the storage open: rows may be missing in them."""


class StorageLocked(OpenError):
    """Another writer holds the storage."""


class RowsDoubled(OpenError):
    """Two members of a union are one storage, or have copies of the same rows."""


class CapacityMissing(OpenError):
    """A new storage of a format that cannot grow, without the number of rows it is for."""


class MissingLibrary(OpenError):
    """The format needs a library that is not installed."""


class UnsupportedPlatform(OpenError):
    """The platform or file system lacks locks, shared maps or fallocate."""


class ExtensionMismatch(StorageError, ImportError):
    """The compiled extension was built from the sources of another version."""


class CorruptStorage(StorageError):
    """Files that are cut short, damaged, or contradict each other. Nothing was changed."""


class InvalidDataset(StorageError):
    """A source of an import is damaged, hostile, or no dataset of its kind. Nothing was written."""


class InvalidSchema(StorageError):
    """Columns that a storage cannot hold."""


class SchemaMismatch(StorageError):
    """The data has other columns than the storage. Nothing was changed."""


class InvalidProvenance(StorageError):
    """Provenance that cannot be written as JSON."""


class DiskFailed(StorageError):
    """The system cannot read or write: a failing disk, or files that are gone."""


class TooManyFiles(StorageError):
    """This process, or the system, may open no more files. What was open goes on."""


class CallbackStopIteration(StorageError):
    """A transform, a callback, a reader or a format of the user's raised StopIteration.

    A loop over batches would end by it early. The message begins with the place of the call; the
    cause is the original exception.
    """


class ObjectStoreFailed(StorageError):
    """An object store refuses a request, or does not answer within the limits of time and tries."""


class ObjectChanged(StorageError):
    """An object of a dataset was replaced while a reader had the dataset open."""


class WriteError(StorageError):
    """A write that was refused. Committed rows are as they were."""


class RowsMismatch(WriteError):
    """Rows whose names, dtypes or shapes differ from the schema."""


class BatchTooLong(WriteError):
    """More rows at once than a ring has."""


class TrajectoryIdTaken(WriteError):
    """Rows of a trajectory id that other rows have already, or that is no one trajectory's."""


class RunUnderWay(WriteError):
    """Rows from elsewhere, while a collector writes a run and counts its rows."""


class NotAnAppend(WriteError):
    """A write anywhere but right after the last row."""


class CursorOverflow(WriteError):
    """A TorchRL writer's 32-bit cursor cannot count that far."""


class RecordTooLarge(WriteError):
    """A commit record larger than its slot."""


class StorageFull(WriteError):
    """The disk, a quota or a file size limit has no room for the rows."""


class ForeignContent(WriteError):
    """A file that has to be replaced holds what another program added to it."""


class ReadOnlyStorage(WriteError):
    """A write to a storage opened with ``mode="read"``."""


class WriterForked(WriteError):
    """A forked child used the writer of its parent."""


class NotInitialised(StorageError):
    """A new storage was read before its schema was known."""


class StorageClosed(StorageError):
    """A storage was used after ``close()``."""


class StateMismatch(StorageError):
    """A state dict or checkpoint of rows that are not these."""


class NotEnoughMemory(StorageError, MemoryError):
    """Less memory is left than is needed."""


class NotPicklable(StorageError):
    """A storage was pickled or copied."""


class Overrun(StorageError):
    """Rows of a ring were overwritten again and again while they were read."""


class InvalidExpression(StorageError, ValueError):
    """An expression that is no condition on trajectories; the message shows the place."""


class ColumnsMissing(StorageError):
    """The storage has not the columns that are wanted, or that say which trajectory rows are of."""


class UnknownTrajectory(StorageError, KeyError):
    """No row of that trajectory is stored."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class NoSlices(StorageError):
    """No trajectory is as long as the slices that were asked for."""


class ShortTrajectory(StorageError):
    """A trajectory that was drawn is shorter than the slices, and ``short`` is ``"error"``."""


class RateStalled(StorageError):
    """The other side of a rate limit has not moved for a time."""


class LoaderForked(StorageError):
    """A forked child takes batches of its parent's loader, whose threads it does not have."""


class SlotsMayChange(StorageError):
    """Rows of a ring were asked for by their slots, which another process overwrites."""


class SumTooLarge(StorageError):
    """A sum of rewards that its dtype cannot hold, or only rounded."""


class DamagedTable(StorageError):
    """The file of the table of episodes is damaged, or does not belong to these rows."""


class DamagedOverlay(StorageError):
    """The file of an overlay is damaged, cut short, a link, or of another storage."""


class IndexOutOfRange(StorageError, IndexError):
    """An index beyond the committed rows."""
