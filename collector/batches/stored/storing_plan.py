"""Plan how rows of a slab are kept, stored and laid out."""

from dataclasses import dataclass
from math import ceil
from typing import Self

from tallyroll.collector.batches.checks.value_checks import RangeChecks
from tallyroll.collector.batches.delivered_counts import DeliveredCounts
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.rows.computed_columns import computed_columns
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.stored.sinks import stores_slots
from tallyroll.collector.batches.stored.writer import BatchWriter
from tallyroll.collector.native.kernel import is_built
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.collector.run_plan import (
    Decision,
    StoringTraits,
    batching,
    committing,
    extension_used,
    placing,
)
from tallyroll.storage.engine.frame_pools import StoredSize
from tallyroll.storage.engine.once_columns import plan_once_auto
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.keys import NEXT, Key, format_key
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.row_sink import RowSink


@dataclass(frozen=True)
class StoringPlan:
    """The decisions of a `RunPlan` about storing rows."""

    rows: Decision
    batches: Decision
    commits: Decision
    extension: Decision

    @classmethod
    def of(cls, traits: StoringTraits) -> Self:
        """Decide for a run with ``traits``."""
        rows = placing(traits)
        commits = committing(traits, rows)
        extension = extension_used(built=traits.extension)
        return cls(rows, batching(traits, rows, commits), commits, extension)


def traits_of(
    options: Options,
    source: RowSource,
    rollout: TransitionSource,
    writer: BatchWriter,
    counts: DeliveredCounts,
    checks: RangeChecks,
    torchrl: TorchrlLayout | None,
) -> StoringTraits:
    """Return the traits of a run on which its `StoringPlan` depends."""
    plan, storage, slab = source.plan, writer.target, rollout.slabs[0]
    writes = None if storage is None else storage.writer
    files = writes if writes is not None and stores_slots(writes) else None
    return StoringTraits(
        postproc=options.postproc is not None,
        replay_buffer=writer.replay_buffer is not None,
        storage="" if storage is None else type(storage).__name__,
        has_engine=files is not None,
        stores_once=isinstance(storage, DiskStorage) and storage.stores_once,
        waits_for_disk=files is not None and files.durability == "power",
        elsewhere=[key for key in plan.layout if key not in slab.flat],
        by_lane=rollout.counts.because if rollout.counts.way == "by lane" else "",
        arrivals=slab.lane is not None,
        extension=is_built(),
        few_float_rewards=plan.few_float_rewards,
        surplus=_surplus(options, rollout),
        counts_agents=options.by_agent,
        counts_ticks=counts.column is not None,
        follows_flags=torchrl is not None and torchrl.follows,
        resets_batches=options.reset_at_each_iter,
        computed=[each.key for each in computed_columns(plan) if not each.by_extension],
        wide_bounds=checks.table(slab) is None,
        slots_of_batch=ceil(options.largest_batch / slab.lanes),
        yields_large=bool(source.large) and options.columns.yield_large,
        arranged=_arranged(options, rollout),
    )


def _arranged(options: Options, rollout: TransitionSource) -> str:
    """Return the reason why a batch cannot be laid out while its rows are stored; "" if it can."""
    if isinstance(rollout, Rollout) and rollout.driver.in_workers:
        return "workers fill the slots"
    if options.layout.name != "rows":
        return f'layout="{options.layout.name}" puts rows in another order'
    return "" if options.storing_device is None else "storing_device= moves batches"


def _surplus(options: Options, rollout: TransitionSource) -> str:
    """Return the reason why one call of the extension cannot handle the surplus; "" if it can."""
    if options.surplus == "carry" or _has_whole_slots(rollout):
        return ""
    return f'slots may lack the transition of a lane, and surplus="{options.surplus}"'


def _has_whole_slots(rollout: TransitionSource) -> bool:
    """Return True if each slot is a transition of every lane, and no lane is ever cut."""
    if not isinstance(rollout, Rollout) or rollout.counts.way == "by lane":
        return False
    return rollout.driver.all_are_transitions and not rollout.driver.in_workers


# --- frames ---------------------------------------------------------------------------------------


def stored_size(storage: RowSink | None) -> StoredSize | None:
    """Return the disk space of the rows; None if the storage has no files, or no columns yet."""
    reader = None if storage is None else storage.reader
    known = isinstance(reader, FileReader) and reader.initialised
    return reader.stored_size() if known else None  # type: ignore[union-attr]


def whole_images(storage: RowSink | None) -> tuple[Key, ...]:
    """Return the columns of large images, also in ``next``, that ``storage`` stores whole."""
    if not isinstance(storage, DiskStorage) or storage.stores_once:
        return ()
    keys = [each.key for each in plan_once_auto(storage.schema)]
    return (*keys, *((NEXT, *key) for key in keys))


def frames_in(storage: RowSink | None) -> Decision:
    """Return how ``storage`` stores large observations; the reason states the bytes per row."""
    size = stored_size(storage)
    if isinstance(storage, DiskStorage) and storage.sharded and storage.stores_once:
        return Decision("once", "each shard has pools of its own")
    if storage is None or size is None:
        return Decision("none")
    takes = f"{size.row_nbytes:,} bytes a row"
    if not size.measured:
        takes += " before compression"
    if (ring := size.ring_nbytes) is not None:
        full = f"{ring / 1e9:,.1f} GB" if ring >= 1e9 else f"{ring / 1e6:,.1f} MB"
        takes += f", {full} in the full ring"
    if size.once:
        names = ", ".join(map(format_key, size.once))
        return Decision("once", f"rows repeat the frames of {names}; {takes}")
    if not plan_once_auto(storage.reader.schema):
        why = "no observation is uint8 with 1 KiB or more a row"
        return Decision("whole", f"{why}; {takes}")
    why = "the storage was made with once=False, or from rows"
    if not storage.reader.ring:
        why = "the storage is not a memory-mapped ring"
    less = "MemmapStorage(once=True), Columns(exclude=) and pack make rows of images smaller"
    return Decision("whole", f"{why}; {takes}; {less}")
