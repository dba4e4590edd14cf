"""Find the storage for rows, given directly or inside a replay buffer."""

from typing import Any, TypeGuard, cast

from torchrl.data import ReplayBuffer

from tallyroll.collector.errors import ArgumentError
from tallyroll.storage.stores.row_sink import (
    BufferedWriter,
    RowSink,
    RunsOfSink,
    RunWriter,
    TensorWriter,
    absent,
)
from tallyroll.storage.stores.row_writer import RowWriter


def sink_of(storage: object) -> RowSink:
    """Return ``storage`` if it has all members that a run needs.

    Raises:
        ArgumentError: a member is missing, or the storage is read only.
    """
    missing = absent(RowSink, storage)
    if {"reader", "writer"} & {*missing}:
        raise ArgumentError(
            f"storage: expected a path or a tallyroll storage, got {type(storage).__name__}. Put a "
            "torchrl storage into a ReplayBuffer and pass that as replay_buffer=. A custom "
            f"storage must be a RowSink, but this one lacks {', '.join(missing)}."
        )
    return _whole(cast(RowSink, storage), "storage", missing, RunWriter)


def sink_under(buffer: ReplayBuffer | None) -> RowSink | None:
    """Return the storage of a replay buffer if rows can be written to it directly, or None.

    Raises:
        ArgumentError: the storage takes rows, but it is read only or lacks a member that a run
            needs.
    """
    found: Any = None if buffer is None else buffer.storage
    if not accepts_rows(found):
        return None
    return _whole(found, "replay_buffer", absent(RowSink, found), BufferedWriter)


def accepts_rows(storage: object) -> bool:
    """Return True if a TorchRL storage is a `RowSink`, with a reader and a writer of rows."""
    return hasattr(storage, "writer") and hasattr(storage, "reader")


def stores_slots(writer: RunWriter) -> TypeGuard[RowWriter]:
    """Return True if the extension can store a few slots in the writer's files with one call."""
    return writer.in_one_call


def accepts_tensors(writer: RunWriter) -> TypeGuard[TensorWriter]:
    """Return True if the writer accepts rows as tensors on a device."""
    return hasattr(writer, "append_tensors")


def _whole(sink: RowSink, what: str, missing: list[str], writes: type) -> RowSink:
    if not missing and sink.mode == "read":
        raise ArgumentError(
            f'{sink.reader.path} is open for reading. Open it with mode="append" to collect.'
        )
    missing += [f"writer.{name}" for name in absent(writes, sink.writer)]
    if "writer.runs" not in missing:
        missing += [f"writer.runs.{name}" for name in absent(RunsOfSink, sink.writer.runs)]
    missing += [f"reader.{name}" for name in _READ if name not in dir(sink.reader)]
    if missing:
        raise ArgumentError(
            f"{what}: expected a RowSink that a run can be written to, got a {type(sink).__name__} "
            f"without {', '.join(missing)}. See tallyroll.storage.RowSink for these members."
        )
    sink.reader.require_open()
    return sink


_READ = (
    *("path", "ring", "schema", "span", "manifest", "column", "initialised", "record"),
    *("head", "last_head", "closed", "require_open", "shown"),
)
"""The members of a `RowReader` that a run needs."""
