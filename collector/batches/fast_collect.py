"""Fast path for a few slots, in ``collect(n)`` or for a batch: one C call stores their rows.

It does the work of the run loop in as few lines as possible. A step of the environment, and even
more a gradient step, evicts the code from the CPU caches, so that each line takes several times
longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any

from tensordict import TensorDictBase

from tallyroll.collector.batches.checks.final_observation_checks import FinalsWatch
from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.rows.slab_output import SlabOutput, SmallBatches
from tallyroll.collector.batches.rows.slab_rows import CompiledSlabTable
from tallyroll.collector.batches.state.run_state import Phase, RunState
from tallyroll.collector.batches.stored.sinks import stores_slots
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.episode_ring import EpisodeRing
from tallyroll.collector.counting.ledger import COUNTS, amounts
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.interrupts import defer_signals, signal_waits
from tallyroll.collector.native.kernel import require_names
from tallyroll.collector.native.slot_rows import SlotRows
from tallyroll.collector.policies.action_context import ActionContext
from tallyroll.collector.rollout.few_slots import FewSlots
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.stores.row_writer import RowWriter

require_names("LEDGER", COUNTS)


@dataclass(frozen=True, slots=True)
class FastPath:
    """The objects that fill and store the slots of a slab by the fast path."""

    rows: SlotRows
    """The rows to store, prepared for this ``state``, ``eased`` and ``seed``."""
    few: FewSlots
    writer: RowWriter
    reader: FileReader
    """The reader of the storage. Its ``engine`` is None once the storage is closed."""
    episodes: EpisodeLog
    ring: EpisodeRing
    """The ring in which ``rows`` note episodes, and from which ``episodes`` takes them."""
    acting: ActionContext
    state: LaneState
    eased: int
    seed: int | None
    masks: Callable[[int], bool] | None
    """Checks all masks of legal actions in the first slots; None if there are no masks to check."""
    batches: SmallBatches | None
    """Lays out the batches that are yielded; None if rows are only stored."""

    def was_made_for(self, state: LaneState, eased: int, seed: int | None) -> bool:
        """Return True if ``rows`` were made for these values."""
        return state is self.state and (eased, seed) == (self.eased, self.seed)

    def fill(self, want: int) -> None:
        """Step all lanes until there are ``want`` rows; a signal handler may raise at any point.

        The caller raises the handler's exception again within the guard of the run, which also
        leaves ``acting``.
        """
        self.acting.call(self.few.fill, want)

    def store(self, want: int, finals: FinalsWatch, batch: Any = None) -> bool:
        """Check, number, count and store ``want`` rows; if a check fails, only return False.

        If ``batch`` is an empty batch of `SmallBatches`, fill it too, and store the rows lane by
        lane.
        """
        few, rows, append = self.few, self.rows, self.writer.append
        used = few.board[FILLED]
        if few.has_rounded or not few.sound or (self.masks is not None and not self.masks(used)):
            return False
        rows.select(used, want, few.version, finals.looks, batch)
        if self.writer.tell is None:
            stored = append(rows)
        else:
            with defer_signals():  # so that replay buffers are notified of all stored rows
                stored = append(rows)
        if self.ring.counts.due:
            self.episodes.take()
        return bool(stored)


class PendingCall:
    """Work that a call of the fast path left for the run loop: slots, a batch, an exception.

    The slots are queued once, by :meth:`settle`. The batch becomes ready if its rows are stored,
    and is dropped otherwise. The exception is raised once, by :meth:`take_error`.
    """

    __slots__ = ("_batches", "_complete_at", "_error", "_settled", "_stepped")

    def __init__(self) -> None:
        self._batches: list[TensorDictBase] = []
        """The batch that becomes ready when its rows are stored."""
        self._complete_at = 0
        """Number of stored rows at which the batch is complete."""
        self._error: BaseException | None = None
        self._stepped = self._settled = False

    @property
    def has_error(self) -> bool:
        """True if the call raised an exception, which :meth:`take_error` returns or raises."""
        return self._error is not None

    def expect(self, batch: TensorDictBase, complete_at: int) -> None:
        """Take a batch that is complete when the run has stored ``complete_at`` rows."""
        self._complete_at = complete_at
        self._batches.append(batch)  # after `_complete_at`, which says when it is complete

    def fail(self, error: BaseException, *, stepped: bool) -> None:
        """Keep the exception of the call. ``stepped`` is True if all lanes were stepped before."""
        self._stepped, self._error = stepped, error

    def hand_over(self, run: RunState) -> None:
        """Make the batch ready if its rows are stored; drop it otherwise."""
        if self._batches and run.ledger.stored == self._complete_at:
            # One instruction moves the batch from list to list: no exception can interrupt it.
            run.ready.extend(map(self._batches.pop, (0,)))
        self._batches.clear()

    def settle(self, run: RunState, rollout: Rollout) -> None:
        """Hand the batch over, and queue the slots as the next block."""
        self.hand_over(run)
        if not self._settled:
            self._settled = True
            rollout.requeue()
            run.episodes.take()  # makes room for the episodes of the block

    def take_error(self) -> BaseException | None:
        """Return the exception if it was raised while lanes stepped; raise a later one."""
        if self._error is not None and self._stepped:
            raise self._error
        return self._error


class FastCollect:
    """Fast path for a few slots: one C call numbers, stores and commits their rows.

    If a call needs anything else, :meth:`collect` returns False, and the run loop finishes the
    call: it calls :meth:`settle`, then :meth:`take_raised`.

    Args:
        run: the state of the run.
        rollout: fills slots.
        in_slab: the row tables of slabs.
        counts: computes what the ledger adds when rows are stored.
        checks: the checks of values.
        finals: the watch on final observations, which must see the rows at ends of episodes until
            it has decided.
        acting: the context in which steps are made.
        batch: number of rows of a batch; 0 if the loop makes all batches.
    """

    def __init__(
        self,
        run: RunState,
        rollout: Rollout,
        in_slab: SlabOutput,
        counts: DeliveredCounts,
        checks: RangeChecks,
        finals: FinalsWatch,
        acting: ActionContext,
        batch: int,
    ) -> None:
        self._run, self._ledger, self._total = run, run.ledger, run.budget.total
        self._rollout, self._in_slab, self._counts = rollout, in_slab, counts
        self._checks, self._finals, self._acting = checks, finals, acting
        self._lanes = rollout.lanes
        self._only = rollout.lanes if run.options.surplus != "carry" else 0
        """The only number of rows that leaves no surplus; 0 if a surplus is carried."""
        self.batch = batch
        self._made: FastPath | None = None
        self.ready: FastPath | None = None
        """The path that the next call may take; None if the next call has to use the loop."""
        self._pending: PendingCall | None = None
        """The work of the call in progress, or that an earlier call left; None if complete."""
        self._thread: int | None = None
        """The thread of the last call."""

    def collect(self, want: int, *, yields: bool = False) -> bool:
        """Store ``want`` rows; with ``yields``, also make a batch. Return False if impossible.

        An exception may be raised at any instruction. If it comes before the C call that stores
        the rows, :meth:`settle` keeps the slots for the next block. If it comes after that call,
        only the batch may be missing, and :meth:`settle` makes it ready.
        """
        path, total, run = self.ready, self._total, self._run
        if path is None or run.phase is not Phase.IDLE or want > FEW_SLOTS * self._lanes:
            return False
        if run.lost or self._pending is not None:
            return False
        if total is not None and self._ledger.stored + want >= total:
            return False
        if run.stopped or path.reader.engine is None or (self._only and want != self._only):
            return False
        if run.outside is not None and run.outside.find():
            return False  # the loop raises the error
        self._thread = get_ident()
        pending, stepped = PendingCall(), False
        try:
            self._pending = pending
            run.begin_call()
            if yields:
                with self._rollout.interruptible:
                    path.fill(want)
            else:
                path.fill(want)
            stepped = True
            if yields:
                stored = self._store_batch(pending, path, want)
            else:
                stored = path.store(want, self._finals)
            if stored:
                self._pending = None
                return yields or not run.stopped
        except BaseException as error:  # noqa: BLE001  the loop raises it again
            pending.fail(error, stepped=stepped)
        finally:
            run.end_call()
        self.ready = None
        return False

    def _store_batch(self, pending: PendingCall, path: FastPath, want: int) -> bool:
        """Store the rows and make their batch ready; return False if the loop has to do it."""
        if path.few.board[HALT]:  # the loop ends the run, or calls signal handlers
            return False
        assert path.batches is not None
        batch = path.batches.empty(want)
        pending.expect(batch[2], self._ledger.stored + want)
        stored = path.store(want, self._finals, batch)
        pending.hand_over(self._run)
        return stored

    def leave(self) -> None:
        """End this thread's call, which an exception left at any instruction."""
        if self._thread == get_ident():
            self._run.end_call()

    def settle(self) -> None:
        """Queue the slots that :meth:`collect` left unstored as the next block."""
        self.ready = None
        if self._pending is not None:
            self._pending.settle(self._run, self._rollout)
            if not self._pending.has_error:
                self._pending = None

    @property
    def has_raised(self) -> bool:
        """True if :meth:`take_raised` has an exception to return or raise."""
        return self._pending is not None and self._pending.has_error

    def take_raised(self) -> BaseException | None:
        """Return the exception that was raised while lanes stepped; raise a later one.

        Return None if there was no exception. Call this method after :meth:`settle`.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.take_error()

    def prepare(self) -> None:
        """Enable the fast path for the next call if it only has to fill and store slots."""
        slab = self._rollout.slab
        if not self._finals.undecided and self._rollout.make_ready():
            self.ready = self._path_of(slab)

    def _path_of(self, slab: Slab) -> FastPath | None:
        """Return the fast path of ``slab``, or None if the path cannot be used."""
        path, checks, seed = self._made, self._checks, self._ledger.seed
        writer, state, few = self._run.writer, self._run.lanes, self._rollout.few
        if path is not None and path.was_made_for(state, checks.eased, seed):
            return path
        table, storage = self._in_slab.table_of(slab), writer.direct
        bounds = checks.table(slab)
        if bounds is None or few is None:
            return None
        assert isinstance(table, CompiledSlabTable)  # as the plan says
        assert storage is not None
        files = storage.writer
        assert stores_slots(files)
        ring = self._run.episodes.ring(slab.slots * slab.lanes)
        rows = writer.slots(
            table.fixed(files.reader.schema),
            self._ledger,
            numbering=table.numbering(state),
            checks=bounds,
            slab=few.table(),
            held=few.held.counts,
            log=ring.counts,
            amounts=table.amounts(amounts(self._counts.of_rows(1)), self._counts.masks),
        )
        self._made = path = FastPath(
            rows,
            few,
            files,
            files.reader,
            self._run.episodes,
            ring,
            self._acting,
            state,
            checks.eased,
            seed,
            _by_slots(checks, slab),
            self._in_slab.batches_of(table) if self.batch else None,
        )
        return path


class _Guard(defer_signals):
    """A deferral of signal handlers that a caller may leave without having entered it."""

    __slots__ = ()

    def __init__(self) -> None:
        self._inner = self._outer = False


class FastCollectOfWorkers(FastCollect):
    """A `FastCollect` that defers signal handlers until the step of the workers is stored.

    In the base class, handlers may interrupt a step. A step of workers continues in other
    processes.
    """

    _guard: _Guard | None = None
    """The guard of the call in progress, or of a call that an exception ended."""

    def collect(self, want: int, *, yields: bool = False) -> bool:
        """Store ``want`` rows; return False if the fast path cannot."""
        assert not yields, "the plan lets the loop make batches"
        if self.ready is None or self._run.phase is not Phase.IDLE:
            return False
        self._guard = guard = _Guard()
        try:
            with guard:
                done = super().collect(want)
                if signal_waits():  # workers pause until the loop lets them go on
                    self.ready = None
                return done
        finally:
            if guard.is_left:
                self._guard = None

    def leave(self) -> None:
        """End this thread's call, which an exception left at any instruction."""
        super().leave()
        guard, self._guard = self._guard, None
        if guard is not None and not guard.is_left:
            guard.__exit__(None, None, None)

    def prepare(self) -> None:
        """Resume the workers after a pause, and prepare for the next call."""
        rollout = self._rollout
        if rollout.paused:
            rollout.go_on()
            if self._run.stopped:
                rollout.stop()
        super().prepare()


def _by_slots(checks: RangeChecks, slab: Slab) -> Callable[[int], bool] | None:
    """Return a check of the masks in the first n slots; None if there are no masks to check."""

    @cache
    def look(used: int) -> Callable[[], bool]:
        return checks.masks_of(slab, used) or (lambda: True)

    return None if checks.masks_of(slab, 1) is None else lambda used: look(used)()
