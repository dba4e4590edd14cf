"""Store rows and lay out small batches directly from the memory of a slab."""

from tensordict import TensorDictBase

from tallyroll.collector.batches.layouts.batch_layout import BatchLayout
from tallyroll.collector.batches.layouts.small_batches import SmallBatches
from tallyroll.collector.batches.rows.compiled_rows import rows_of_slab
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.rows.slab_rows import SlabBatch, SlabTable
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.columns import FixedRows


class SlabOutput:
    """Stores rows that stay in their slab, and lays out small batches from the slab.

    Args:
        source: turns blocks into rows.
        run: the state of the run, whose writer stores the rows.
        laying_out: the layout of batches.
        batches: True if small batches too are laid out from a slab.
    """

    def __init__(
        self,
        source: RowSource,
        run: RunState,
        laying_out: BatchLayout,
        *,
        batches: bool,
    ) -> None:
        self._source, self._writer, self._laying_out = source, run.writer, laying_out
        self._device = run.options.storing_device
        self._most_slots = FEW_SLOTS if batches else 0
        self._tables: dict[Slab, SlabTable] = {}
        """The row table of each slab."""
        self._small: dict[SlabTable, SmallBatches] = {}

    def takes(self, block: Block, *, yields: bool) -> bool:
        """Return True if the rows of ``block`` stay in their slab instead of being gathered."""
        return not yields or block.used <= self._most_slots

    def table_of(self, slab: Slab) -> SlabTable:
        """Return the row table of ``slab``."""
        table = self._tables.get(slab)
        if table is None:
            table = self._tables[slab] = rows_of_slab(slab, self._source.plan)
        return table

    def store(self, part: SlabBatch, ledger: Ledger, open_lanes: int) -> None:
        """Commit the rows of ``part``, and the ledger that includes them."""
        rows = part.table.as_stored or self._fixed(part.table)
        if rows is not None:
            self._writer.write_fixed(rows, part.index, part.next_id, ledger, open_lanes)

    def _fixed(self, table: SlabTable) -> FixedRows | None:
        schema = self._writer.schema
        return None if schema is None else table.fixed(schema)

    def batch(self, part: SlabBatch) -> TensorDictBase:
        """Lay ``part`` out, one row after the other."""
        batch = self.batches_of(part.table).batch(part)
        return batch if self._device is None else batch.to(self._device)

    def batches_of(self, table: SlabTable) -> SmallBatches:
        """Return the `SmallBatches` of ``table``."""
        batches = self._small.get(table)
        if batches is None:
            laying_out, source = self._laying_out, self._source
            batches = self._small[table] = SmallBatches(
                table,
                laying_out.keys,
                source.plan.dones,
                source.inner_dims,
                marks=laying_out.marks,
                inits=laying_out.inits,
            )
        return batches
