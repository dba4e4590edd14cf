"""Prioritized sampling of rows or sequences, for TorchRL's replay buffers and for direct use."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLSampler
from torchrl.data.replay_buffers.samplers import Sampler

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.errors import (
    IndexOutOfRange,
    NoSlices,
    NotPicklable,
    ReadOnlyStorage,
    StateMismatch,
)
from tallyroll.storage.ext.overlays.overlaid_storage import storage_of_rows
from tallyroll.storage.ext.sampling.powers import powers_of
from tallyroll.storage.ext.sampling.priorities import Priorities, leaves_of, moved, number
from tallyroll.storage.ext.sampling.priority_file import (
    SavedPriorities,
    check_leaves,
    read_priorities,
    write_priorities,
)
from tallyroll.storage.ext.sampling.starts import Starts
from tallyroll.storage.ext.sampling.sum_tree import Plain
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import (
    RowReader,
    index_of,
    newest_rows,
    rows_at,
    take_rows,
)
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import Key, Keys, as_key
from tallyroll.storage.sampling.n_steps import n_step as steps_of
from tallyroll.storage.sampling.sampled_storage import (
    require_same,
    require_slots_stay,
    require_storage,
)
from tallyroll.storage.sampling.trajectory_slices import end_marks
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.row_writer import RowWriter
from tallyroll.storage.trajectories.windows import Slices, check_positive


def whole(name: str, given: Any) -> np.ndarray:
    """Convert integers to an int64 array [n], which is a copy."""
    if isinstance(given, torch.Tensor):
        given = given.numpy(force=True)
    found = np.asarray(given)
    if found.dtype.kind not in "iu":
        if found.size:
            raise ValueError(f"{name}: expected whole numbers, got {found.dtype}.")
        found = found.astype(np.int64)
    return found.reshape(-1).astype(np.int64)


def plain(given: Any, *dtypes: torch.dtype) -> Plain | None:
    """Return numbers in a form that the extension reads without copying them; None if it cannot."""
    if isinstance(given, np.ndarray):
        return given
    if type(given) is not torch.Tensor or not given.is_cpu or given.dtype not in dtypes:
        return None
    if given.is_contiguous():
        return given.data_ptr(), given.numel(), given.element_size()
    found: np.ndarray = given.numpy(force=True)
    return found


def numbers(priority: Any) -> np.ndarray:
    """Convert priorities to float64 [n]; raise `ValueError` if they are not numbers."""
    if isinstance(priority, torch.Tensor):
        if priority.dtype is torch.bfloat16:
            priority = priority.float()
        priority = priority.numpy(force=True)
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(priority, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"priority: expected numbers, got {priority!r}.") from error
    return found.reshape(-1)


ROW: Final[Key] = ("collector", "row")
WEIGHT: Final = "priority_weight"
_FILE: Final = "priorities"
_REDUCTIONS: Final = ("max", "mean", "median", "min")
_PATIENCE_SECONDS: Final = 1.0


class PrioritizedSampler(Sampler):
    """Sampler that draws rows in proportion to the power ``alpha`` of their priorities.

    Use it in a TorchRL replay buffer instead of TorchRL's own sampler::

        sampler = PrioritizedSampler(storage, alpha=0.6, beta=0.4)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=256, priority_key="td_error"
        )
        batch = buffer.sample()  # has "priority_weight", "index" and ("collector", "row")
        batch["td_error"] = ...
        buffer.update_tensordict_priority(batch)

    or alone::

        batch = sampler.sample(256)  # or sample(256, n_step=3, gamma=0.99)
        sampler.update_priority(batch, td_error)

    A row is drawn with replacement, with the probability p^alpha / sum(p^alpha), where p is its
    priority plus ``eps``. Rows that any collector, buffer or process has committed since the last
    call get the largest priority of the existing rows. Rows that a ring has overwritten, or that
    ``empty()`` or a rewind has removed, are not drawn. The weight of a row is
    ``(p / least p)^(-alpha * beta)``, where the least p is taken over all rows, so the largest
    possible weight is 1, as in TorchRL.

    A sample contains ``("collector", "row")``, the number of each row among all rows that were ever
    written. An update by these numbers, or by a batch, changes exactly these rows. An update by an
    index, as TorchRL's buffers make it, changes the row that was at this index the last time that
    the index was drawn. If the index was never drawn, the update changes the row that is at this
    index now. If a ring may wrap around between a sample and its update, as with ``prefetch``, pass
    the batch. Updates of rows that are gone are ignored, and counted in `gone`.

    With ``slice_len`` the sampler draws sequences: ``slice_len`` consecutive steps of one
    trajectory, wherever its rows are stored, with the priority of their first row. A row can start
    a sequence as soon as all rows of the sequence are stored. It gets its first priority at that
    time. In a buffer, a sample is flat, one sequence after the other, and is marked as by
    `TrajectorySliceSampler`; in direct use it is [n, slice_len]. All rows of a sequence have the
    same weight. An update has one priority per sequence, or one per row, to which the ``reduction``
    is applied.

    Priorities are stored in a file next to the rows. The sampler writes the file when the storage
    closes, and on `save`. A new sampler for this storage continues with these priorities. If the
    file is damaged or belongs to other rows, the sampler issues a warning and starts with equal
    priorities.

    Args:
        storage: a Tallyroll storage; with ``mode="read"``, another process may append to it. It
            cannot be a ring that this process only reads.
        alpha: the exponent of priorities, 0 or more; 0 draws uniformly. It can be set later.
        beta: the exponent of weights, 0 or more; with 0 all weights are 1. It can be set later.
        eps: a constant that is added to each priority, so that none is 0.
        slice_len: rows per sequence; None: draw single rows.
        reduction: ``"max"``, ``"mean"``, ``"median"`` or ``"min"``, applied to the priorities of a
            sequence.
        generator: the random number generator, which a buffer's generator replaces; None is torch's
            default.

    Raises:
        TypeError: ``storage`` is not a Tallyroll storage.
        ValueError: an argument is out of range.
        SlotsMayChange: ``storage`` is a ring that this process only reads.
        ColumnsMissing: with ``slice_len``, the rows have no trajectory ids.
        NotEnoughMemory: the 5 bytes per row, or 13 bytes in a ring, are not available.
    """

    def __init__(
        self,
        storage: DiskStorage,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        *,
        slice_len: int | None = None,
        reduction: str = "max",
        generator: torch.Generator | None = None,
    ) -> None:
        others = "For a storage of TorchRL, use TorchRL's PrioritizedSampler."
        require_storage(storage, "PrioritizedSampler", others)
        require_slots_stay(storage, "Draw in the process that writes the ring.", "reading them")
        self._saved = False
        self._rewinds_kept: int | None = None
        """The number of rewinds of the storage when the priority file was written."""
        if slice_len is not None:
            check_positive("slice_len", slice_len)
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"reduction: expected one of {', '.join(_REDUCTIONS)}, got {reduction!r}."
            )
        self.storage, self.slice_len, self.reduction = storage, slice_len, reduction
        self._reader: RowReader = storage.reader
        self._alpha, self._beta, self._eps = number("alpha", alpha), 0.0, number("eps", eps)
        self.beta = beta
        self._generator, self._lock = generator, threading.RLock()
        self.gone = 0
        """The number of priorities that were ignored because their rows were gone."""
        self._starts = None if slice_len is None else Starts(self._reader, slice_len)
        first = _first_leaf(self._alpha, self._eps)
        self._priorities = Priorities(self._reader, first, self._starts)
        self._drawn: np.ndarray | None = None
        """One more than the row that was drawn last at each index of a ring; 0 if there is none."""
        if ring := self._reader.ring:
            require_memory(8 * ring, f"the samples of a ring of {ring:,} rows")
            self._drawn = np.zeros(ring, np.int64)
        self._joining = False
        self._written: tuple[Any, np.ndarray] | None = None
        """The index to which a buffer wrote last, and the rows at this index."""
        self._load()
        if isinstance(writer := storage_of_rows(storage).writer, RowWriter):
            writer.closing.append(_called(weakref.WeakMethod(self._save_at_the_end)))

    # --- draws ------------------------------------------------------------------------------------

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the numbers of ``count`` rows, int64 [count], and their weights, float32 [count].

        With ``slice_len`` the rows are [count, slice_len].

        Raises:
            NoSlices: there is nothing to draw.
        """
        with self._lock:
            rows, weights = self._draw(count)
            if self._drawn is not None:
                self._drawn[index_of(self._reader, rows)] = rows + 1
            if self._starts is not None:
                rows = self._starts.sequences(rows)
            return rows, weights

    def _draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        self._joining = False
        if self._written is not None and type(self._written[0]) is int:
            self._written = None
        check_positive("the number of draws", count)
        priorities = self._priorities
        priorities.follow()
        if not priorities.total > 0:
            self._refuse_empty()
        generator = self._generator
        device = None if generator is None else generator.device
        uniform = torch.empty(count, dtype=torch.float64, device=device)
        uniform.uniform_(generator=generator)
        rows, leaves = priorities.draw(uniform.numpy(force=device is not None))
        with np.errstate(over="ignore", under="ignore"):  # priorities may differ by many orders
            leaves /= priorities.least
            return rows, np.power(leaves, np.float32(-self._beta), out=leaves)

    def _refuse_empty(self) -> NoReturn:
        path = self._reader.path
        if self.slice_len is None or not len(self._reader.span):
            raise NoSlices(f"{path} has no rows yet to draw from. Collect some first.")
        raise NoSlices(
            f"no trajectory of {path} has a sequence of {self.slice_len} consecutive steps. Give "
            "a smaller slice_len, or collect more."
        )

    def sample(
        self,
        storage: Any,
        batch_size: int | None = None,
        *,
        n_step: int | None = None,
        gamma: float | torch.Tensor | None = None,
        keys: Keys | None = None,
    ) -> Any:
        """Return a sample: ``sample(n)`` for direct use, ``sample(storage, n)`` for a buffer.

        ``sample(n)`` returns a TensorDict of n rows [n], or of sequences [n, slice_len], with
        ``"priority_weight"`` and ``("collector", "row")``. ``sample(n, n_step=3, gamma=0.99)``
        returns these rows as `n_step` does: rewards cover up to 3 steps, and ``"index"`` is added.
        The ends of sequences are then not marked, because the sums include later steps.

        ``sample(storage, n)``, which TorchRL's buffers call, returns the index of n rows,
        and a mapping that contains these two columns and the values that differ from the stored
        ones. With ``slice_len``, the rows belong to n / slice_len sequences.

        Args:
            storage: n, the number of rows or sequences; or the storage, if a buffer calls this.
            batch_size: the number of rows, if a buffer calls this.
            n_step: the maximum number of rewards to sum, for direct use; None: stored rewards.
            gamma: the discount of one step, see `n_step`.
            keys: the columns to return, for direct use; None: all.

        Raises:
            NoSlices: there is nothing to draw.
            ValueError: the storage is not the sampler's, n is not a multiple of ``slice_len``, or
                only one of ``n_step`` and ``gamma`` was passed.
            ColumnsMissing: one of ``keys`` does not exist.
            SumTooLarge: see `n_step`.
            Overrun: another thread overwrites a ring faster than it is read.
        """
        if (n_step is None) != (gamma is None):
            raise ValueError(
                f"n_step: expected n_step and gamma together, got n_step={n_step}, gamma={gamma}. "
                "Pass both, or none for the stored rewards."
            )
        if batch_size is None:
            take = partial(self._rows_of, n_step=n_step, gamma=gamma, keys=keys)
            return read_consistently(self._reader, lambda: self._sample(storage, take))
        if n_step is not None or keys is not None:
            raise ValueError(
                "batch_size: expected sample(n, n_step=..., keys=...), got a storage as well. "
                "Leave out the storage. For the batch of a buffer, call tallyroll.storage.n_step."
            )
        require_same(self.storage, storage)
        length = self.slice_len or 1
        if batch_size < 1 or batch_size % length:
            raise ValueError(
                f"batch_size: expected a multiple of the sequence length {length}, got "
                f"{batch_size}. Use {length} times the number of sequences."
            )
        with self._lock:
            rows, weights = self.draw(batch_size // length)
            index = index_of(self._reader, rows.reshape(-1))
        info: dict[Any, torch.Tensor] = {
            WEIGHT: torch.from_numpy(np.repeat(weights, length)),
            ROW: torch.from_numpy(rows.reshape(-1)),
        }
        if self._starts is not None:
            info |= self._marks(rows)
        return torch.from_numpy(index), info

    def _marks(self, rows: np.ndarray) -> dict[Any, torch.Tensor]:
        """Return values at both ends of sequences [n, length] that differ from the stored ones."""
        return end_marks(self._reader, Slices(rows))

    def _rows_of(
        self,
        rows: np.ndarray,
        *,
        n_step: int | None,
        gamma: float | torch.Tensor | None,
        keys: Keys | None,
    ) -> TensorDict:
        """Return the rows with these numbers; raise `IndexOutOfRange` if a row is overwritten."""
        reader = self._reader
        if n_step is None or gamma is None:
            own = reader if keys is None else self.storage.reader_with(keys)
            found = take_rows(own, rows, keys)
            if self._starts is not None:
                self._mark(found, rows, None if keys is None else [*map(as_key, keys)])
            return found
        index = index_of(reader, rows)
        found = steps_of(self.storage, index, n_step, gamma, keys=keys)
        self._require_there(rows)
        found.set("index", torch.from_numpy(index))
        return found

    def _mark(self, found: TensorDict, rows: np.ndarray, keys: list[Key] | None) -> None:
        """Mark the ends of sequences in the columns ``keys``, or in all columns if it is None."""
        for key, values in self._marks(rows).items():
            if keys is None or key in keys:
                found.set(key, values.reshape(*rows.shape, *values.shape[1:]))
        self._require_there(rows)

    def _require_there(self, rows: np.ndarray) -> None:
        reader = self._reader
        if rows.min() < reader.span.start:
            raise IndexOutOfRange(f"a row of {reader.path} was overwritten after it was drawn.")

    def _sample(self, count: int, take: Callable[[np.ndarray], TensorDict]) -> TensorDict:
        reader, deadline = self._reader, time.monotonic() + _PATIENCE_SECONDS
        while True:
            rows, weights = self.draw(count)
            with contextlib.suppress(IndexOutOfRange):  # rows were overwritten after the draw
                found = take(rows)
                break
            if time.monotonic() > deadline:
                raise reader.overrun(f"{rows.size} rows")
        found.set(ROW, torch.from_numpy(rows))
        shape = (-1, *(1 for _ in rows.shape[1:]))
        found.set(WEIGHT, torch.from_numpy(weights).reshape(shape).expand(rows.shape).clone())
        return found

    # --- updates ----------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Set priorities of rows, whether they were drawn or not.

        Args:
            index: a batch, whose ``("collector", "row")`` identifies the rows; or positions in the
                storage, such as a buffer's ``"index"``, as a tensor, an array, a list or an int.
                With ``slice_len``, the index of all rows, one sequence after the other.
            priority: one number of at least 0 per row or, with ``slice_len``, per sequence; or a
                single number for all rows.
            storage: the buffer's storage, which TorchRL passes; it is not used.

        Raises:
            ValueError: a priority is negative, infinite or NaN, or the number of priorities does
                not match. No priority was changed.
            IndexOutOfRange: a row never existed.
        """
        if is_tensor_collection(index):
            if (rows := index.get(ROW, None)) is None:
                raise ValueError(
                    f"index: expected a batch with {ROW}, as sample() returns it, got one "
                    "without. Call update_rows with the row numbers, or pass the index of the "
                    "rows."
                )
            self.update_rows(rows, priority)
            return
        with self._lock:
            if self._put_at_once(index, priority, self._drawn, self._reader.span.start):
                return
            joining, self._joining = self._joining, False
            at, rows = whole("index", index), self._just_written(index)
            if joining and self._is_all(at, priority):
                return  # a new buffer initializes all rows with the default priority
            if rows is None:
                self._update(self._rows_at(at), priority)
            elif self._starts is None:  # with sequences, none can start at these rows yet
                self._update(rows, priority, sure=True)

    def update_rows(self, rows: Any, priority: Any) -> None:
        """Set priorities of rows by their numbers among all rows ever written.

        See `update_priority` for the arguments and errors.
        """
        with self._lock:
            if not self._put_at_once(rows, priority):
                self._joining = False
                self._update(whole("rows", rows), priority)

    def _put_at_once(
        self, index: Any, priority: Any, drawn: np.ndarray | None = None, first: int = 0
    ) -> bool:
        """Set priorities of rows in one call of the extension; return False if that is impossible.

        Args:
            index: the index of the rows.
            priority: their priorities.
            drawn: one more than the row at each index; None: the index is the row.
            first: the row at index 0, if ``drawn`` is None.
        """
        written = None if self._written is None else self._written[0]
        if self._joining or (first and drawn is None) or type(written) is int:
            return False
        if written is not None and written is index:
            return False
        at, given = plain(index, torch.int64), plain(priority, torch.float32, torch.float64)
        if at is None or given is None:
            return False
        self._priorities.follow()
        gone = self._priorities.put_at_once(drawn, at, given, powers_of(self._alpha, self._eps))
        if gone is not None:
            self.gone += gone
        return gone is not None

    def _is_all(self, index: np.ndarray, priority: Any) -> bool:
        given, default = numbers(priority), np.float32(self.default_priority)
        if not (
            0 < len(index) == len(self._reader) and bool((index == np.arange(len(index))).all())
        ):
            return False
        with np.errstate(all="ignore"):
            return bool((given.astype(np.float32) == default).all())

    def _just_written(self, index: Any) -> np.ndarray | None:
        """Return the rows that a buffer has just written to ``index``; None if it has not."""
        if self._written is None:
            return None
        written, rows = self._written
        if type(written) is int:  # the buffer passes a copy, immediately after the write
            self._written = None
            return rows.copy() if whole("index", index).tolist() == [written] else None
        return rows.copy() if index is written else None

    def _rows_at(self, index: np.ndarray) -> np.ndarray:
        """Return the row drawn last at each index [n], or the present row if none was drawn."""
        reader = self._reader
        if self._drawn is None:
            return newest_rows(reader, index) if reader.span.start else index
        if len(index) and not 0 <= index.min() <= index.max() < len(self._drawn):
            raise IndexOutOfRange(
                f"index: expected slots of {reader.path} below {len(self._drawn):,}, got "
                f"{index.min()} to {index.max()}. Give the index of a sample of this storage."
            )
        rows: np.ndarray = self._drawn[index] - 1
        if len(rows) and rows.min() < 0:
            rows = np.where(rows < 0, rows_at(reader, index, reader.span), rows)
        return rows

    def _update(self, rows: np.ndarray, priority: Any, *, sure: bool = False) -> None:
        given = numbers(priority)
        if self.slice_len is not None:
            rows, given = self._of_starts(rows, given)
        if len(given) != len(rows):
            if len(given) != 1:
                raise ValueError(
                    f"priority: expected {len(rows)} priorities, one per row, or a single one, "
                    f"got {len(given)}. Nothing was changed."
                )
            given = np.repeat(given, len(rows))
        leaves = leaves_of(given, self._alpha, self._eps)
        self._priorities.follow()
        self.gone += self._priorities.put(rows, leaves, sure=sure)

    def _of_starts(self, rows: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first rows of sequences, and one priority for each."""
        length = self.slice_len
        assert length is not None
        if len(rows) % length:
            raise ValueError(
                f"expected the rows of whole sequences, a multiple of {length}, got {len(rows)} "
                "rows. Nothing was changed."
            )
        if len(given) == len(rows) and length > 1:
            leaves_of(given, self._alpha, self._eps)  # validates each priority
            given = getattr(np, self.reduction)(given.reshape(-1, length), axis=1)
        return rows[::length].copy(), given

    # --- interface for TorchRL's buffers ----------------------------------------------------------

    @property
    def _rng(self) -> torch.Generator | None:
        return self._generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        # A buffer that is created with this sampler sets the generator first.
        self._joining = self._reader.initialised
        if generator is not None or self._generator is None:
            self._generator = generator

    @property
    def alpha(self) -> float:
        """The exponent of priorities. Setting it leaves all priorities unchanged."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        alpha = number("alpha", alpha)
        with self._lock:
            if alpha != self._alpha:
                was, now = (self._alpha, self._eps), (alpha, self._eps)
                self._priorities.follow()
                first = _first_leaf(alpha, self._eps)
                self._priorities.convert(lambda leaves: moved(leaves, was, now), first)
                self._alpha = alpha

    @property
    def beta(self) -> float:
        """The exponent of weights."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = number("beta", beta)

    @property
    def eps(self) -> float:
        """The number that is added to each priority."""
        return self._eps

    @property
    def default_priority(self) -> float:
        """The priority of new rows."""
        if not self._alpha:
            return 1.0
        return float(max(0.0, self._priorities.largest ** (1 / self._alpha) - self._eps))

    def add(self, index: int) -> None:
        """Record the row that a buffer has just written; an update of its priority may follow."""
        self._remember(int(index))

    def extend(self, index: torch.Tensor) -> None:
        """Record the rows that a buffer has just written; updates of priorities may follow."""
        self._remember(index)

    def _remember(self, index: Any) -> None:
        with self._lock:
            self._joining, reader = False, self._reader
            self._written = index, rows_at(reader, whole("index", index), reader.span)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Give the rows that are now at ``index`` the priority of new rows."""
        with self._lock:
            at, reader = whole("index", index), self._reader
            rows = rows_at(reader, at, reader.span) if reader.ring else self._rows_at(at)
            # Later rows get this priority when they are added to the tree.
            rows = rows[rows < self._priorities.there.stop]
            if len(rows):
                priorities = self._priorities
                priorities.follow()
                leaf = np.full(len(rows), priorities.largest, np.float32)
                self.gone += priorities.put(rows, leaf, sure=True)

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        with self._lock:
            self._priorities.follow()
            return len(self._reader) if self._priorities.total > 0 else 0

    def _empty(self) -> None:
        """Do nothing: the storage itself determines which rows are gone."""

    # --- persistence ------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the priorities to the file next to the rows, from which a new sampler loads them.

        Raises:
            ReadOnlyStorage: this process only reads the storage. Use `dumps` with another path.
            StorageFull: there is no space. An older file is kept.
        """
        writer, reader = storage_of_rows(self.storage).writer, self._reader
        if not isinstance(writer, RowWriter) or self.storage.mode == "read":
            raise ReadOnlyStorage(
                f"this process only reads {self.storage.path} and cannot save priorities next to "
                "its rows. Use dumps(path) and loads(path) with another folder."
            )
        with writer.turn, self._lock:
            reader.require_open()
            if reader.initialised and not writer.temporary:
                writer.reader.running().right.require()
                kept, leaves = self._to_save()
                files = writer.files
                write_priorities(files.inside, files.priorities_path, kept, leaves)
                self._priorities.changed, self._saved = False, True
                self._rewinds_kept = kept.rewinds

    def _save_at_the_end(self) -> None:
        with self._lock:
            # Save only if the sampler was used, or has written the file before.
            if self._priorities.most or self._saved:
                self._priorities.follow()
                # Rows that were added and rewound since the last save leave the priorities
                # unchanged, but the file records an old number of rewinds.
                if self._priorities.changed or self._rewinds_kept not in (
                    None,
                    self._reader.rewinds,
                ):
                    self.save()

    def _to_save(self) -> tuple[SavedPriorities, np.ndarray]:
        priorities = self._priorities
        there = priorities.follow()
        kept = SavedPriorities(
            self._reader.id,
            there.first,
            there.stop,
            self._reader.rewinds,
            self.slice_len,
            self._alpha,
            self._beta,
            self._eps,
            priorities.largest,
        )
        return kept, priorities.leaves()

    def _load(self) -> None:
        """Load the priorities from the file next to the rows."""
        reader = storage_of_rows(self.storage).reader
        if not isinstance(reader, FileReader) or not reader.initialised:
            return
        files = reader.format
        try:
            found = read_priorities(files.inside, files.priorities_path, max(reader.head, 2**16))
            if found is None:
                return
            kept, leaves = found
            self._take(kept, leaves, "the file")
        except (ValueError, StateMismatch) as error:
            warnings.warn(
                f"{files.priorities_path} is not used, and all rows start with the same priority: "
                f"{error}",
                stacklevel=4,
            )
            return
        old = kept.stop != reader.head or kept.rewinds != reader.rewinds
        if old:
            warnings.warn(
                f"{files.priorities_path} has priorities of {kept.stop} rows, but {reader.path} "
                f"has {reader.head} rows. Later rows start with the largest priority.",
                stacklevel=4,
            )
        self._priorities.changed, self._rewinds_kept = old, kept.rewinds

    def _take(self, kept: SavedPriorities, leaves: np.ndarray, what: str) -> None:
        until = kept.require_of(self._reader, self.slice_len, what)
        leaves = leaves[: max(0, until - kept.first)]
        was, now = (kept.alpha, kept.eps), (self._alpha, self._eps)
        entering = moved(np.array([kept.entering], np.float32), was, now)
        self._priorities.replace(
            moved(leaves, was, now),
            kept.first,
            float(entering[0]),
            same=kept.rewinds == self._reader.rewinds,
        )

    def _take_all(self, kept: SavedPriorities, leaves: np.ndarray, what: str) -> None:
        kept.require_of(self._reader, self.slice_len, what)
        self._alpha, self._beta, self._eps = kept.alpha, kept.beta, kept.eps
        self._take(kept, leaves, what)

    def state_dict(self) -> dict[str, Any]:
        """Return the priorities, to save together with a model by `torch.save`."""
        with self._lock:
            kept, leaves = self._to_save()
            return {**asdict(kept), "leaves": torch.from_numpy(leaves)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore priorities, alpha, beta and eps; later rows get the largest priority.

        Raises:
            StateMismatch: the state belongs to another storage or to later rows, or is not valid.
        """
        with self._lock:
            try:
                kept = SavedPriorities.of(state_dict)
                leaves = state_dict["leaves"].numpy(force=True)
                if leaves.dtype != np.float32:
                    raise ValueError(f"the priorities have dtype {leaves.dtype}, expected float32")
                check_leaves(leaves, kept)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StateMismatch(
                    "expected the state of a PrioritizedSampler of Tallyroll, got an invalid one: "
                    f"{error}."
                ) from error
            self._take_all(kept, leaves, "this state")

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the priorities to a folder, and create it if it does not exist; see `loads`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            kept, leaves = self._to_save()
            write_priorities(Inside(folder), folder / _FILE, kept, leaves)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load the priorities, alpha, beta and eps that `dumps` wrote to a folder.

        Raises:
            StateMismatch: the file is missing or damaged, or its priorities belong to another
                storage or to later rows.
        """
        folder = Path(path)
        with self._lock:
            try:
                found = read_priorities(
                    Inside(folder), folder / _FILE, max(self._reader.head, 2**16)
                )
            except ValueError as error:
                raise StateMismatch(f"{folder / _FILE} cannot be used: {error}.") from error
            if found is None:
                raise StateMismatch(
                    f"{folder / _FILE} does not exist. Give a folder that dumps() has written."
                )
            self._take_all(*found, f"{folder / _FILE}")

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            "a PrioritizedSampler cannot be sent to another process. Create a sampler over the "
            "storage in that process, and load this sampler's state_dict() there."
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.storage!r}, alpha={self._alpha}, beta={self._beta}, "
            f"eps={self._eps}, slice_len={self.slice_len})"
        )


# TorchRL's buffers forward priorities only to samplers that are instances of this class.
TorchRLSampler.register(PrioritizedSampler)


def _first_leaf(alpha: float, eps: float) -> float:
    """Return the leaf of a priority of 1, which rows have if no priority was ever set."""
    return float(leaves_of(np.ones(1), alpha, eps)[0])


def _called(method: weakref.WeakMethod[Any]) -> Callable[[], None]:
    """Return a function that calls a method as long as its object exists."""

    def call() -> None:
        if (found := method()) is not None:
            found()

    return call
