"""``collect(n)`` of one slot of all lanes, which one call of the extension stores."""

from tallyroll.collector.batches.checks.final_observations import FinalsWatch
from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.plain_slots import PlainSlots
from tallyroll.collector.batches.rows.compiled_rows import CompiledRows
from tallyroll.collector.batches.rows.in_slab import InSlab
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.counting.ledger import LedgerEntry, amounts
from tallyroll.collector.policies.acting import Acting
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.row_writer import RowWriter


class OneCall:
    """Collects one plain slot after another one; whatever else comes up is left to the run's loop.

    A slot that was filled and not stored, or an exception that was raised meanwhile, waits here
    until the loop takes it over.

    Args:
        run: its state.
        in_slab: has the rows.
        counts: what the delivery of a slot changes in the ledger.
        checks: of values.
        finals: must see a slot in which an episode begins or ends, until they are judged.
        acting: the context of steps.
    """

    def __init__(
        self,
        run: RunState,
        in_slab: InSlab,
        counts: DeliveredCounts,
        checks: RangeChecks,
        finals: FinalsWatch,
        acting: Acting,
    ) -> None:
        self._run, self._ledger, self._total = run, run.ledger, run.budget.total
        self._in_slab, self._counts = in_slab, counts
        self._checks, self._finals, self._acting = checks, finals, acting
        self._plain: dict[Slab, PlainSlots] = {}
        self.ready: PlainSlots | None = None
        """The plain slot that the last call stored, if the next call may store one at once."""
        self._left: PlainSlots | None = None
        """The plain slot that was filled and may not be stored yet."""
        self.raised: BaseException | None = None
        """The exception raised while it was filled or stored."""
        self._by_store = False
        """True if that exception came after all lanes were stepped."""

    def collect(self, want: int) -> bool:
        """Collect one plain slot after another one; return False if the loop has to do it.

        A signal's handler may raise anywhere here: before the one call that stores the slot,
        :meth:`settle` keeps the slot for the next block; after that call everything is done.
        """
        plain, total, run = self.ready, self._total, self._run
        if plain is None or want != plain.slot.count or run.busy:
            return False
        if total is not None and self._ledger.stored + want >= total:
            return False
        if run.stopped or plain.reader.engine is None:
            return False
        try:
            run.busy, self._by_store = True, False
            plain.fill()
            self._by_store = True
            if plain.store(self._finals):
                return not run.stopped
        except BaseException as error:  # noqa: BLE001  raised by the loop
            self.raised = error
        finally:
            run.busy = False
        self._left, self.ready = plain, None
        return False

    def settle(self) -> None:
        """Count the slot that :meth:`collect` left unstored; it is the next block."""
        self.ready = None
        left, self._left = self._left, None
        if left is not None:
            left.again.put_back()
            left.log()

    def take_raised(self) -> BaseException | None:
        """Return the exception raised while lanes were stepped; raise one that came later."""
        error, self.raised = self.raised, None
        if error is not None and self._by_store:
            raise error
        return error

    def store(self, block: Block) -> bool:
        """Store one slot of all lanes at once, as the loop would.

        Return False, with nothing done, if the loop has more to do.
        """
        plain = self._plain_of(block)
        if plain is None or self._finals.curious or not plain.store(self._finals):
            return False
        if block.giver is not None:
            block.giver.given(block)
        self.ready = plain
        return True

    def _plain_of(self, block: Block) -> PlainSlots | None:
        """Return what all plain blocks of a slab share; None if its slots are not plain."""
        plain, checks, seed = self._plain.get(block.slab), self._checks, self._ledger.seed
        writer, state = self._run.writer, self._run.lanes
        if plain is not None and plain.was_made_for(block.entry, state, checks.eased, seed):
            return plain
        table, storage = self._in_slab.table_of(block, yields=False), writer.direct
        count, bounds = len(block), checks.table(block.slab)
        if bounds is None or block.again is None:
            return None
        assert isinstance(table, CompiledRows)  # as the plan says
        assert isinstance(storage, DiskStorage)
        assert isinstance(storage.reader, FileReader)
        assert isinstance(storage.writer, RowWriter)
        if block.entry != LedgerEntry(slots=count, executed=count):
            return None
        slot = writer.slot(
            table.fixed(storage.schema),
            count,
            self._ledger,
            numbering=table.numbering(state),
            checks=bounds,
            carry=block.again.carry,
            amounts=amounts(block.entry.plus(self._counts.of_rows(count))).tobytes(),
        )
        self._plain[block.slab] = plain = PlainSlots(
            table,
            slot,
            block.again,
            storage.writer,
            storage.reader,
            self._run.episodes,
            self._acting,
            block.entry,
            state,
            checks.eased,
            seed,
            checks.masks_of(block.slab, 1),
        )
        return plain
