"""Fast path for few slots, by ``collect(n)`` or as a batch: one C call stores their rows.

It does the work of the run loop in few lines. Between the steps of an environment, and more so
after a gradient step, the code has left the caches, and each line costs several times more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any

import torch
from tensordict import TensorDictBase

from tallyroll.collector.batches.checks.final_observations import FinalsWatch
from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.layouts.small_batches import SmallBatches
from tallyroll.collector.batches.rows.compiled_rows import CompiledRows
from tallyroll.collector.batches.rows.slab_output import SlabOutput
from tallyroll.collector.batches.state.run_state import Phase, RunState
from tallyroll.collector.batches.stored.sinks import stores_slots
from tallyroll.collector.compat import set_gradients
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.episode_ring import EpisodeRing
from tallyroll.collector.counting.ledger import COUNTS, amounts
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.native.kernel import require_names
from tallyroll.collector.native.slot_rows import SlotRows
from tallyroll.collector.policies.action_context import ActionContext
from tallyroll.collector.rollout.few_slots import FewSlots
from tallyroll.collector.rollout.os_signals import deferred, waits
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
    """Rows for this ``state``, ``eased`` and ``seed``."""
    few: FewSlots
    writer: RowWriter
    reader: FileReader
    """The reader of the storage; its ``engine`` is None after the storage was closed."""
    episodes: EpisodeLog
    ring: EpisodeRing
    """The ring in which ``rows`` note episodes, and from which ``episodes`` takes them."""
    acting: ActionContext
    state: LaneState
    eased: int
    seed: int | None
    masks: Callable[[int], bool] | None
    """A check of all masks of legal actions in slots; None if there are none to check."""
    batches: SmallBatches | None
    """Lays out the batches that are yielded; None if rows are only stored."""

    def was_made_for(self, state: LaneState, eased: int, seed: int | None) -> bool:
        """Return whether ``rows`` were made for these values."""
        return state is self.state and (eased, seed) == (self.eased, self.seed)

    def fill(self, want: int) -> None:
        """Step all lanes until ``want`` rows are there; a signal handler may raise at any point.

        The caller raises the exception again within the run's guard, which leaves ``acting`` too.
        """
        acting = self.acting  # not by `with`, which makes two calls more
        before = acting.before = torch.is_grad_enabled(), acting.place.get()
        try:
            set_gradients(False)
            acting.place.put(acting.exploration)
            self.few.fill(want)
        finally:
            set_gradients(before[0])
            acting.place.put(before[1])
            acting.before = None

    def store(self, want: int, finals: FinalsWatch, batch: Any = None) -> bool:
        """Check, number, count and store ``want`` rows; if refused, do nothing and return False.

        With an empty ``batch`` of `SmallBatches`, fill it, and store the rows lane by lane.
        """
        few, rows, append = self.few, self.rows, self.writer.append
        used = few.board[FILLED]
        if few.has_rounded or not few.sound or (self.masks is not None and not self.masks(used)):
            return False
        rows.used, rows.count = used, want
        rows.version, rows.watched, rows.batch = few.version, finals.looks, batch
        if self.writer.tell is None:
            stored = append(rows)
        else:
            with deferred():  # replay buffers are notified of all rows that are stored
                stored = append(rows)
        if self.ring.counts.due:
            self.episodes.take()
        return bool(stored)


class FastCollect:
    """Fast path for few slots: one C call numbers, stores and commits their rows.

    If a call needs anything else, :meth:`collect` returns False and the run loop takes over. Slots
    that were filled and not stored, and an exception that was raised meanwhile, stay here until
    the loop takes them (:meth:`settle`, :meth:`take_raised`).

    Args:
        run: the state of the run.
        rollout: fills slots.
        in_slab: the row tables of slabs.
        counts: the changes of the ledger when rows are stored.
        checks: of values.
        finals: must see rows in which an episode begins or ends, until they are judged.
        acting: the context of steps.
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
        self._batches: list[TensorDictBase] = []
        """The batch that becomes ready when its rows are stored."""
        self._stored_then = 0
        """Number of stored rows at which the batch in ``_batches`` is complete."""
        self._made: FastPath | None = None
        self.ready: FastPath | None = None
        """The path that the next call may take; None if the loop has to make the call."""
        self._left: FastPath | None = None
        """The path whose slots were filled and may not be stored yet."""
        self.raised: BaseException | None = None
        """The exception that was raised while these were filled or stored."""
        self._by_store = False
        """True if it was raised after all lanes were stepped."""
        self._thread: int | None = None
        """The thread of the last call."""

    def collect(self, want: int, *, yields: bool = False) -> bool:
        """Store ``want`` rows, also as a batch if ``yields``; return False if the loop has to.

        An exception may be raised at any instruction. If it comes before the C call that stores
        the rows, :meth:`settle` keeps the slots for the next block. If it comes after that call,
        only the batch may be missing, and :meth:`settle` makes it ready.
        """
        path, total, run = self.ready, self._total, self._run
        if path is None or run.phase is not Phase.IDLE or want > FEW_SLOTS * self._lanes:
            return False
        if run.lost or self._left is not None:
            return False
        if total is not None and self._ledger.stored + want >= total:
            return False
        if run.stopped or path.reader.engine is None or (self._only and want != self._only):
            return False
        outside = run.outside
        if outside is not None and outside.find():
            return False  # the loop raises
        self._thread = get_ident()
        try:
            self._by_store, self._left = False, path
            run.begin_call()
            if yields:
                with self._rollout.interruptible:
                    path.fill(want)
            else:
                path.fill(want)
            self._by_store = True
            if self._store_batch(path, want) if yields else path.store(want, self._finals):
                self._left = None
                return yields or not run.stopped
        except BaseException as error:  # noqa: BLE001  raised by the loop
            self.raised = error
        finally:
            if outside is not None:
                outside.remember()
            run.end_call()
        self.ready = None
        return False

    def _store_batch(self, path: FastPath, want: int) -> bool:
        """Store the rows and make their batch ready; return False if the loop has to."""
        if path.few.board[HALT]:  # the loop ends the run, or calls signal handlers
            return False
        assert path.batches is not None
        batch = path.batches.empty(want)
        self._stored_then = self._ledger.stored + want
        # Set last: until then `_stored_then` is the present count, and the batch would be yielded.
        self._batches = [batch[2]]
        stored = path.store(want, self._finals, batch)
        self._hand_over()
        return stored

    def _hand_over(self) -> None:
        """Make the batch ready if its rows are stored."""
        if self._batches and self._ledger.stored == self._stored_then:
            # One instruction moves it from list to list, so that no exception can come between.
            self._run.ready.extend(map(self._batches.pop, (0,)))
        self._batches = []

    def leave(self) -> None:
        """End this thread's call, which an exception left at any instruction."""
        if self._thread == get_ident():
            self._run.end_call()

    def settle(self) -> None:
        """Make the slots that :meth:`collect` left unstored the next block."""
        self.ready = None
        self._hand_over()
        left, self._left = self._left, None
        if left is not None:
            self._rollout.put_back()
            self._run.episodes.take()  # makes room for those of the block

    def take_raised(self) -> BaseException | None:
        """Return the exception that was raised while lanes stepped; raise one that came later."""
        error, self.raised = self.raised, None
        if error is not None and self._by_store:
            raise error
        return error

    def prepare(self) -> None:
        """Let the next call take the fast path, if it only has to fill and store slots."""
        slab = self._rollout.slab
        if not self._finals.undecided and self._rollout.make_ready():
            self.ready = self._path_of(slab)

    def _path_of(self, slab: Slab) -> FastPath | None:
        """Return the fast path of ``slab``; None if it has none."""
        path, checks, seed = self._made, self._checks, self._ledger.seed
        writer, state, few = self._run.writer, self._run.lanes, self._rollout.few
        if path is not None and path.was_made_for(state, checks.eased, seed):
            return path
        table, storage = self._in_slab.table_of(slab), writer.direct
        bounds = checks.table(slab)
        if bounds is None or few is None:
            return None
        assert isinstance(table, CompiledRows)  # as the plan says
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


class _Guard(deferred):
    """A deferral of signal handlers that may be left before it was entered."""

    __slots__ = ()

    def __init__(self) -> None:
        self._inner = self._outer = False


class FastCollectOfWorkers(FastCollect):
    """A `FastCollect` during which signal handlers wait until the step of workers is stored.

    In the base class they may interrupt a step. The step of workers goes on in other processes.
    """

    _guard: _Guard | None = None
    """The guard of the call under way, or of one that an exception left."""

    def collect(self, want: int, *, yields: bool = False) -> bool:
        """Store ``want`` rows; return False if the loop has to."""
        assert not yields, "the plan lets the loop make batches"
        if self.ready is None or self._run.phase is not Phase.IDLE:
            return False
        self._guard = guard = _Guard()
        try:
            with guard:
                done = super().collect(want)
                if waits():  # workers pause, and the loop lets them go on
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
        """Let workers go on after a pause, and get ready for the next call."""
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
