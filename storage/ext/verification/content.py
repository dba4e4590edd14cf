"""`content_hash`: one hash of all rows of a storage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tallyroll.storage.ext.joined.members import PathLike
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.storages import DiskStorage, open_storage
from tallyroll.storage.trajectories.content import Numbering
from tallyroll.storage.trajectories.leaves import hash_of, kept_of
from tallyroll.storage.user_code import user_callback


def content_hash(
    storage: DiskStorage | PathLike | Sequence[PathLike],
    *,
    ids: Numbering = "kept",
    incremental: bool = False,
    progress: Progress | None = None,
    accept_copy: bool = False,
) -> str:
    """Return one SHA-256 of all committed rows, as 64 hexadecimal digits.

    It is the same for the same rows in every format, in a ring, in any order of commits. Rows are
    hashed by trajectory and step, each with its columns by name and their bytes (the bits of NaNs
    too), a few trajectories or a part of one at a time; these hashes, and the columns' names,
    dtypes and shapes, make the one of the storage. What made the rows, and the column
    ``collector/cut``, which says how they were committed, stay out.

    Args:
        storage: a storage, or the path of one; of several, as `open_storage` takes them.
        ids: ``"relative"`` numbers trajectories 0, 1, 2 ... in the order of their ids, so that
            copies with ids of their own have the hash of their original.
        incremental: keep the hashes of parts in a file beside the rows, and take those that an
            earlier such call kept, so that only rows that came since are read. Bytes that changed
            on the disk since are not noticed then: `verify` compares all rows with kept hashes.
            Where the file cannot be written, nothing is kept.
        progress: called now and then with the bytes that were read, and with those of all rows.
        accept_copy: as `open_storage`, of a path.

    Raises:
        ColumnsMissing: the rows do not say which trajectory and step they are.
        Overrun: a ring's writer overwrites rows while they are read.
        OpenError, CorruptStorage: the storage cannot be opened, or read.
        ValueError: ``ids`` is neither, or is "relative" with ``incremental``.
    """
    if incremental and ids == "relative":
        raise ValueError(
            "incremental=True: expected ids='kept', got 'relative', which numbers trajectories "
            "otherwise when others come. Leave out incremental."
        )
    with ExitStack() as stack:
        if not isinstance(storage, DiskStorage):
            storage = stack.enter_context(open_storage(storage, accept_copy=accept_copy))
        reader, done = storage.reader, 0
        total = len(reader) * reader.schema.row_nbytes if reader.initialised else 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                with user_callback("progress"):
                    progress(min(done, total), total)

        def made() -> str:
            kept = None
            if incremental and isinstance(reader, FileReader) and reader.initialised:
                kept = kept_of(reader, reader.format)
            return hash_of(reader, ids, tell, kept)

        return read_consistently(reader, made)
