"""The public storage class for rows in the memory of a device."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any, NoReturn, Self

import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.errors import NotAStorage, NotPicklable, StorageExists, StorageMissing
from tallyroll.storage.ext.device.device_rows import DeviceRows
from tallyroll.storage.ext.device.device_writer import DeviceWriter
from tallyroll.storage.ext.device.mirror import Mirror
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.readers.row_reader import RowReader, columns_of
from tallyroll.storage.replay import buffers
from tallyroll.storage.replay.tensor_storage import AsTensorStorage, remedies_named
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.storages import MemmapStorage
from tallyroll.storage.stores.row_store import RowFacts


class DeviceStorage(RowFacts, AsTensorStorage):
    """Ring of rows in the memory of a torch device, with an optional mirror on disk.

    Without a mirror, the rows are lost when the process ends, checkpoints cannot save them, and no
    later process can continue the run. With a mirror, every row is also written to a
    `MemmapStorage`, the durable copy. A new `DeviceStorage` with the same mirror starts with the
    newest rows of the mirror, and a collector with ``resume=True`` continues the run from there.

    A collector writes to it with ``storage=``, with the same rows, counts and ids as to a
    `MemmapStorage`. The class is also a TorchRL storage: ``ReplayBuffer(storage=...)`` accepts it.
    `get` and replay buffers read the rows without a copy to the host; `trajectories` copies them.
    The first rows determine the columns, for which the storage then allocates ``max_size`` rows. It
    never moves this memory. Threads may read while one thread writes, if they use the same stream
    of the device.

    Args:
        max_size: the number of slots of the ring. New rows overwrite the oldest.
        device: the device, such as ``"cuda"`` or ``"cpu"``.
        mirror: the durable copy: a `MemmapStorage` that is open for writing, or a path. It keeps
            all rows, or is a ring of ``max_size`` rows. A path is opened, or a storage that keeps
            all rows is created there; `close` closes it. Only this object may write to the mirror.
        mirror_lag: the number of rows that the device may be ahead of the mirror. With 0, an append
            returns when its rows are committed on disk. Otherwise a thread writes them, and an
            append waits if the disk is too slow. A killed process loses at most ``mirror_lag``
            rows. Rows that do not come from the ``storage=`` of a collector have no lag.

    Raises:
        ValueError: an argument is invalid, or the device is not available.
        NotEnoughMemory: the ring does not fit on the device, for the columns of the mirror.
        StorageLocked: another process writes to the mirror.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tallyroll.storage import DeviceStorage
        >>> ring = DeviceStorage(max_size=4, device="cpu")
        >>> print(ring.extend(TensorDict({"x": torch.arange(6)}, [6])[:3]))
        range(0, 3)
        >>> print(ring.extend(TensorDict({"x": torch.arange(3, 6)}, [3])))
        range(3, 6)
        >>> print(len(ring), ring.span, ring.in_order()["x"], ring.get(-1)["x"])
        4 range(2, 6) tensor([2, 3, 4, 5]) tensor(3)
    """

    reader: DeviceRows
    writer: DeviceWriter
    mode: Mode = "append"

    @remedies_named
    def __init__(
        self,
        *,
        max_size: int,
        device: torch.device | str,
        mirror: str | os.PathLike[str] | MemmapStorage | None = None,
        mirror_lag: int = 0,
    ) -> None:
        super().__init__()
        if type(max_size) is not int or max_size < 1:
            raise ValueError(f"max_size: expected a positive number of rows, got {max_size!r}.")
        self.device = _available(device)
        self._mirror = _mirror_of(mirror, mirror_lag, max_size)
        durable = None if self._mirror is None else self._mirror.storage.reader
        self.reader = DeviceRows(max_size, self.device, durable)
        self.writer = DeviceWriter(self.reader, self._mirror)
        self.path = self.reader.path
        self._fit_ring()
        if self._mirror is not None:
            weakref.finalize(self, self._mirror.close).atexit = False
            try:
                self.reader.refill()
            except BaseException:
                self.close()
                raise

    # --- writing ----------------------------------------------------------------------------------

    def extend(self, rows: TensorDictBase) -> range:
        """Append rows, and return their numbers. Rows on the device stay there.

        Trajectory ids are not checked: the caller must make them unique.

        Args:
            rows: a TensorDict [N] on any device. The first rows determine the schema.

        Raises:
            BatchTooLong: there are more rows than slots.
            NotEnoughMemory: the ring does not fit on the device.
            RowsMismatch: the rows do not have the columns of the storage.
            RunUnderWay: a collector is writing a run to this storage.
        """
        return self.writer.extend(rows)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Append ``data`` at ``cursor``, as `DiskStorage.set` does."""
        cursor = buffers.on_host(self, cursor)
        buffers.write_at(self, cursor, data, set_cursor=set_cursor)

    def attach(self, buffer: Any) -> None:
        """Attach a replay buffer and set its writer to continue after the last row."""
        super().attach(buffer)
        buffers.attach(self, buffer)

    def reserve(self, rows: int) -> None:
        """Reserve space for ``rows`` rows in the mirror, if there is one; see `DiskStorage`."""
        if self._mirror is not None:
            self._mirror.storage.reserve(rows)

    def flush(self) -> None:
        """Wait until all rows are in the mirror, and flush it. Without a mirror, do nothing.

        Raises:
            WriteError: the mirror has refused rows.
        """
        if self._mirror is not None:
            self._mirror.wait()
            self._mirror.storage.flush()

    def refill(self) -> None:
        """Replace the rows by the newest rows of the mirror.

        A checkpoint that rewinds the mirror calls this method.

        Raises:
            ValueError: there is no mirror.
            WriteError: the mirror has refused rows.
        """
        if self._mirror is None:
            raise ValueError("refill: expected a storage with a mirror. Pass mirror=.")
        self._mirror.wait()
        with self.reader.turn:
            self.reader.require_open()
            self.reader.refill()
        buffers.seat_writers(self)

    def close(self) -> None:
        """Wait until all rows are in the mirror, and release the memory.

        The mirror is closed if this object opened it. A second call has no effect.

        Raises:
            WriteError: the mirror has refused rows.
        """
        with self.reader.turn:  # so that no rows come between
            try:
                if self._mirror is not None:
                    self._mirror.close()
            finally:
                self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _empty(self) -> None:
        try:
            self.writer.empty()
        finally:
            # TorchRL's writers reset their cursor to 0 before they empty the storage.
            buffers.seat_writers(self)

    # --- reading ----------------------------------------------------------------------------------

    def get(self, index: Any, keys: Keys | None = None) -> TensorDict:
        """Return copies of the rows at ``index``, on the device; see `DiskStorage.get`.

        The index may be a tensor on the device. The call then waits for the device to check that
        the rows exist, unless the index comes unchanged from the last draw of this storage.

        Raises:
            ColumnsMissing: a column does not exist.
            IndexOutOfRange: a row does not exist.
            ValueError: the index is a tensor on a different device.
        """
        reader = self.reader
        with reader.turn:
            reader.require_open()
            return reader.at_slots(reader.slots_at(index), keys)

    def in_order(self, keys: Keys | None = None) -> TensorDict:
        """Return copies of all rows on the device, oldest first; see `get` for ``keys``."""
        reader = self.reader
        with reader.turn:
            reader.require_open()
            span = reader.span
            slots = torch.arange(span.start, span.stop, device=self.device) % reader.ring
            return reader.at_slots(slots, keys)

    def sample(
        self, count: int, keys: Keys | None = None, *, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Return ``count`` random rows, drawn uniformly with replacement.

        Indices are drawn on the device, and the call does not wait for it. With a generator of the
        CPU, they are drawn on the CPU and copied.

        Raises:
            ColumnsMissing: a column does not exist.
            IndexOutOfRange: the storage has no rows.
            StorageClosed: the storage is closed.
            ValueError: ``count`` is not a number of rows.
        """
        reader = self.reader
        with reader.turn:
            reader.require_open()
            return reader.at_slots(reader.slots_at(reader.draw(count, generator)), keys)

    def _rand_given_ndim(self, batch_size: int) -> torch.Tensor:
        return self.reader.draw(batch_size, self._rng)

    _rand_given_ndim_impl = _rand_given_ndim

    @property
    def _storage(self) -> TensorDict | None:
        return self.get(slice(None)) if self.reader.initialised else None

    def reader_with(self, keys: Keys) -> RowReader:
        """Return the reader of the rows, which must have the columns ``keys``."""
        columns_of(self.reader, keys)
        return self.reader

    @property
    def mirror(self) -> MemmapStorage | None:
        """The durable copy of the rows, or None."""
        return None if self._mirror is None else self._mirror.storage

    @property
    def committed(self) -> int:
        """The number of rows ever committed to the mirror; 0 without a mirror."""
        return 0 if self._mirror is None else self._mirror.committed

    @property
    def nbytes(self) -> int:
        """The size of the ring in bytes; 0 before the first rows."""
        return self.ring * self.schema.row_nbytes if self.reader.initialised else 0

    def __repr__(self) -> str:
        return f"DeviceStorage(max_size={self.ring}, device={str(self.device)!r}, rows={len(self)})"

    # --- states and copies, which a storage in memory does not have -------------------------------

    def dumps(self, path: Any) -> NoReturn:
        """Raise `NotPicklable`, because the rows are in the memory of this process."""
        self._refuse()

    def loads(self, path: Any) -> NoReturn:
        """Raise `NotPicklable`, because the rows are in the memory of this process."""
        self._refuse()

    def state_dict(self) -> dict[str, Any]:
        """Raise `NotPicklable`, because the rows are in the memory of this process."""
        self._refuse()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise `NotPicklable`, because the rows are in the memory of this process."""
        self._refuse()

    def __getstate__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        if self._mirror is not None:
            raise NotPicklable(
                f"{self.path} cannot be saved, loaded or sent to another process, because it is in "
                f"the memory of this one. Use its mirror, {self._mirror.storage.path}."
            )
        raise NotPicklable(
            f"{self.path} cannot be saved, loaded or sent to another process: its rows are only in "
            "the memory of this process. Extend a MemmapStorage(path) with in_order(), or collect "
            "to a MemmapStorage."
        )

    def _fork_safe(self) -> bool:
        return False  # a copy in a forked process would get no later rows


def _mirror_of(
    mirror: str | os.PathLike[str] | MemmapStorage | None, lag: int, max_size: int
) -> Mirror | None:
    if type(lag) is not int or lag < 0:
        raise ValueError(f"mirror_lag: expected a number of rows, 0 or more, got {lag!r}.")
    if mirror is None:
        if lag:
            raise ValueError(f"mirror_lag: expected 0 without a mirror, got {lag}. Pass mirror=.")
        return None
    if not isinstance(mirror, (str, os.PathLike, MemmapStorage)):
        raise ValueError(
            f"mirror: expected a path or a MemmapStorage, got {type(mirror).__name__}."
        )
    owned = not isinstance(mirror, MemmapStorage)
    storage = mirror if isinstance(mirror, MemmapStorage) else _opened(mirror)
    try:
        storage.reader.require_open()
        if storage.mode == "read":
            raise ValueError(
                f"mirror: expected a storage open for writing, got {storage.path} with "
                'mode="read". Open it with mode="append".'
            )
        if storage.ring not in (0, max_size):
            raise ValueError(
                "mirror: expected a storage that keeps all rows, or a ring of "
                f"max_size={max_size:,} rows, got {storage.path}, a ring of {storage.ring:,} rows. "
                f"Pass max_size={storage.ring}, or choose another mirror."
            )
    except BaseException:
        if owned:
            storage.close()
        raise
    return Mirror(storage, lag, owned=owned)


def _opened(path: str | os.PathLike[str]) -> MemmapStorage:
    """Open the storage at ``path`` to append to it, or make a new one."""
    try:
        return MemmapStorage(path, mode="append")
    except (StorageMissing, NotAStorage):
        # "create" accepts the files of a process that was killed before it wrote the manifest.
        with suppress(StorageExists):
            return MemmapStorage(path)
        raise


def _available(device: torch.device | str) -> torch.device:
    """Return the device with its index; raise `ValueError` if it cannot be used."""
    try:
        found = torch.empty(0, device=device).device
        if found.type != "meta":
            return found
        reason = "it has no memory"
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = f"{error!s:.200}"
    raise ValueError(
        f"device: expected a device that torch can use here, such as 'cpu', got {device!r}: "
        f"{reason}. Choose another device."
    )
