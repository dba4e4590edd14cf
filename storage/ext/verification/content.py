"""The `content_hash` function, which hashes all rows of a storage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tallyroll.storage.ext.joined.members import PathLike
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.replay.tensor_storage import AsTensorStorage
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.storages import open_storage
from tallyroll.storage.trajectories.content import Numbering
from tallyroll.storage.trajectories.leaves import hash_of, leaf_hashes_of
from tallyroll.storage.user_code import user_callback


def content_hash(
    storage: AsTensorStorage | PathLike | Sequence[PathLike],
    *,
    ids: Numbering = "kept",
    incremental: bool = False,
    progress: Progress | None = None,
    accept_copy: bool = False,
) -> str:
    """Return one SHA-256 of all committed rows, as 64 hexadecimal digits.

    Equal rows have the same hash in every format, in a ring, and whatever the order of commits.
    Rows are hashed by trajectory and step, a few trajectories or a part of one at a time. Each row
    contributes its columns by name with their bytes, including the bits of NaNs. The hash of the
    storage combines these hashes with the names, dtypes and shapes of the columns. It excludes the
    provenance and the column ``collector/cut``, which records how the rows were committed.

    Args:
        storage: a storage or its path; for several storages, any argument of `open_storage`.
        ids: ``"relative"`` numbers trajectories 0, 1, 2 ... in the order of their ids, so that
            copies with different ids have the hash of their original.
        incremental: store the hashes of parts in a file next to the rows, and reuse those that an
            earlier call has stored, so that only new rows are read. Later changes of bytes on the
            disk then go unnoticed; `verify` compares all rows with the stored hashes. If the file
            cannot be written, nothing is stored.
        progress: a callback that is called periodically with the number of bytes read and the total
            number of bytes.
        accept_copy: as in `open_storage`, for a path.

    Raises:
        ColumnsMissing: the rows have no trajectory ids or no steps.
        Overrun: a ring's writer overwrites rows while they are read.
        OpenError, CorruptStorage: the storage cannot be opened or read.
        ValueError: ``ids`` is invalid, or is "relative" together with ``incremental``.
    """
    if incremental and ids == "relative":
        raise ValueError(
            "incremental=True: expected ids='kept', got 'relative'. Relative ids may change when "
            "rows are added. Leave incremental out."
        )
    with ExitStack() as stack:
        if not isinstance(storage, AsTensorStorage):
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
                kept = leaf_hashes_of(reader, reader.format)
            return hash_of(reader, ids, tell, kept)

        return read_consistently(reader, made)
