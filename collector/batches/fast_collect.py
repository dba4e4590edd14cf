"""Few slots, by ``collect(n)`` or as a batch, whose rows one call of the extension stores."""

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
from tallyroll.collector.batches.rows.in_slab import InSlab
from tallyroll.collector.batches.state.run_state import Phase, RunState
from tallyroll.collector.batches.stored.sinks import stores_slots
from tallyroll.collector.compat import set_gradients
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.episode_ring import EpisodeRing
from tallyroll.collector.counting.ledger import COUNTS, amounts
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.native.kernel import require_names
from tallyroll.collector.native.slot_rows import SlotRows
from tallyroll.collector.policies.acting import Acting
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
    """The objects by which the plain slots of a slab are filled and stored."""

    rows: SlotRows
    """Rows that were made for this ``state``, ``eased`` and ``seed``."""
    few: FewSlots
    writer: RowWriter
    reader: FileReader
    """The reader of the storage; it has no engine after the storage was closed."""
    episodes: EpisodeLog
    ring: EpisodeRing
    """The ring in which ``rows`` note episodes, which ``episodes`` takes from there."""
    acting: Acting
    state: LaneState
    eased: int
    seed: int | None
    masks: Callable[[int], bool] | None
    """A check of all masks of legal actions in slots; None: there are none to check."""
    batches: SmallBatches | None
    """The maker of batches that are yielded; None: rows are stored alone."""

    def was_made_for(self, state: LaneState, eased: int, seed: int | None) -> bool:
        """Return whether ``rows`` were made for these values."""
        return state is self.state and (eased, seed) == (self.eased, self.seed)

    def fill(self, want: int) -> None:
        """Step all lanes until ``want`` rows are there; a signal's handler may raise at any point.

        The caller raises an exception again within the run's guard, which leaves ``acting`` too.
        """
        acting = self.acting  # not by `with`: that is two calls more
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
        """Check, number, count and store ``want`` rows; False, with nothing done, if refused.

        An empty ``batch`` of `SmallBatches` is filled with them, and they are stored lane by lane.
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
            with deferred():  # replay buffers hear of all rows that are stored
                stored = append(rows)
        if self.ring.counts.due:
            self.episodes.take()
        return bool(stored)


class FastCollect:
    """Collects the rows of few slots at a time; whatever else comes up is left to the run's loop.

    Slots that were filled and not stored, or an exception that was raised meanwhile, wait here
    until the loop takes them over.

    Args:
        run: its state.
        rollout: fills slots.
        in_slab: has the rows.
        counts: what the delivery of rows changes in the ledger.
        checks: of values.
        finals: must see rows in which an episode begins or ends, until they are judged.
        acting: the context of steps.
        batch: number of rows of a batch; 0: batches are made by the loop.
    """

    def __init__(
        self,
        run: RunState,
        rollout: Rollout,
        in_slab: InSlab,
        counts: DeliveredCounts,
        checks: RangeChecks,
        finals: FinalsWatch,
        acting: Acting,
        batch: int,
    ) -> None:
        self._run, self._ledger, self._total = run, run.ledger, run.budget.total
        self._rollout, self._in_slab, self._counts = rollout, in_slab, counts
        self._checks, self._finals, self._acting = checks, finals, acting
        self._lanes = rollout.lanes
        self._only = rollout.lanes if run.options.surplus != "carry" else 0
        """The only number of rows that leaves no surplus; 0 where a surplus is carried."""
        self.batch = batch
        self._batches: list[TensorDictBase] = []
        """The batch that is ready as soon as all its rows are stored."""
        self._stored_then = 0
        """Number of rows stored in the run then."""
        self._made: FastPath | None = None
        self.ready: FastPath | None = None
        """The plain slots of the last call, if the next call may store some at once."""
        self._left: FastPath | None = None
        """Plain slots that were filled and may not be stored yet."""
        self.raised: BaseException | None = None
        """The exception raised while they were filled or stored."""
        self._by_store = False
        """True if that exception came after all lanes were stepped."""
        self._thread: int | None = None
        """The thread that was here last."""

    def collect(self, want: int, *, yields: bool = False) -> bool:
        """Collect ``want`` rows of few slots; return False if the loop has to do it.

        An exception may come anywhere here: before the one call that stores the rows,
        :meth:`settle` keeps the slots for the next block; after that call everything is done, but
        that :meth:`settle` makes the batch ready where the call ``yields`` one.
        """
        plain, total, run = self.ready, self._total, self._run
        if plain is None or run.phase is not Phase.IDLE or want > FEW_SLOTS * self._lanes:
            return False
        if self._left is not None:
            return False
        if total is not None and self._ledger.stored + want >= total:
            return False
        if run.stopped or plain.reader.engine is None or (self._only and want != self._only):
            return False
        outside = run.outside
        if outside is not None and outside.find():
            return False  # the loop finds it too, and raises
        self._thread = get_ident()
        try:
            run.begin_call()
            self._by_store, self._left = False, plain
            if yields:
                with self._rollout.interruptible:
                    plain.fill(want)
            else:
                plain.fill(want)
            self._by_store = True
            if self._store_batch(plain, want) if yields else plain.store(want, self._finals):
                self._left = None  # before that it would find nothing to count
                return yields or not run.stopped
        except BaseException as error:  # noqa: BLE001  raised by the loop
            self.raised = error
        finally:
            if outside is not None:
                outside.remember()
            run.end_call()
        self.ready = None
        return False

    def _store_batch(self, plain: FastPath, want: int) -> bool:
        """Store the rows, and make them the batch that is ready; False if the loop has to."""
        if plain.few.board[HALT]:  # it ends the run, or calls handlers
            return False
        assert plain.batches is not None
        batch = plain.batches.empty(want)
        self._stored_then = self._ledger.stored + want
        self._batches = [batch[2]]  # in this order: the last call's number is the present one
        stored = plain.store(want, self._finals, batch)
        self._hand_over()
        return stored

    def _hand_over(self) -> None:
        """Make the batch ready whose rows are stored, once."""
        if self._batches and self._ledger.stored == self._stored_then:
            # One instruction takes it from one list to the other, so that no exception parts them.
            self._run.ready.extend(map(self._batches.pop, (0,)))
        self._batches = []

    def leave(self) -> None:
        """End a call that an exception left at any instruction, in this thread."""
        if self._thread == get_ident():
            self._run.end_call()

    def settle(self) -> None:
        """Count the slots that :meth:`collect` left unstored; they are the next block."""
        self.ready = None
        self._hand_over()
        left, self._left = self._left, None
        if left is not None:
            self._rollout.put_back()
            self._run.episodes.take()  # or there may be no room for more

    def take_raised(self) -> BaseException | None:
        """Return the exception raised while lanes were stepped; raise one that came later."""
        error, self.raised = self.raised, None
        if error is not None and self._by_store:
            raise error
        return error

    def prepare(self) -> None:
        """Get ready for the next call, if it has nothing else to do than to fill and to store."""
        slab = self._rollout.slab
        if not self._finals.curious and self._rollout.make_ready():
            self.ready = self._plain_of(slab)

    def _plain_of(self, slab: Slab) -> FastPath | None:
        """Return what all plain slots share; None if slots are not plain."""
        plain, checks, seed = self._made, self._checks, self._ledger.seed
        writer, state, few = self._run.writer, self._run.lanes, self._rollout.few
        if plain is not None and plain.was_made_for(state, checks.eased, seed):
            return plain
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
            amounts=amounts(self._counts.of_rows(1)).tobytes() + table.places(self._counts.masks),
        )
        self._made = plain = FastPath(
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
        return plain


class _Guard(deferred):
    """One that may be left before it was entered."""

    __slots__ = ()

    def __init__(self) -> None:
        self._inner = self._outer = False


class FastCollectOfWorkers(FastCollect):
    """A `FastCollect` during which signal handlers wait until the step of workers is stored.

    They would interrupt the step that workers are making.
    """

    _guard: _Guard | None = None
    """The one of the call under way, or that an exception left."""

    def collect(self, want: int, *, yields: bool = False) -> bool:
        """Collect ``want`` rows of few slots; return False if the loop has to do it."""
        assert not yields, "batches are made by the loop, as the plan says"
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
        """End a call that an exception left at any instruction, in this thread."""
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
    """Return a check of the masks in the first slots, by their number; None: none is checked."""

    @cache
    def look(used: int) -> Callable[[], bool]:
        return checks.masks_of(slab, used) or (lambda: True)

    return None if checks.masks_of(slab, 1) is None else lambda used: look(used)()
