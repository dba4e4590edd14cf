"""Storages that store every pair of columns once, even with small values."""

from __future__ import annotations

from collections.abc import Sequence

from tallyroll.storage import FrameStack, MemmapStorage, ZarrStorage
from tallyroll.storage.engine.frame_layout import FrameLayout
from tallyroll.storage.engine.once_columns import OnceColumn
from tallyroll.storage.rows.keys import COLLECTOR, NEXT
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.stores.opened_files import PlanOnce


def every_pair(schema: Schema) -> list[OnceColumn]:
    """Store every column once that has a column in ``next``; use all kinds of layouts."""
    columns = {column.key: column for column in schema.columns}
    return [
        OnceColumn(key, _layout(each, len(key[-1])))
        for key, each in columns.items()
        if key[0] not in (NEXT, COLLECTOR)
        and (after := columns.get((NEXT, *key))) is not None
        and (after.dtype, after.shape) == (each.dtype, each.shape)
    ]


def _layout(column: Column, number: int) -> FrameLayout:
    stack = column.shape[0] if len(column.shape) > 1 and 2 <= column.shape[0] <= 4 else 1
    delta = number % 2 == 1 and column.row_nbytes // stack % 4 == 0
    return FrameLayout.plan(column.numpy_dtype, column.shape, stack, delta=delta)


class OnceStorage(MemmapStorage):
    """Storage that stores every pair of columns once."""

    def _plan_of(self, once: bool, stacks: Sequence[FrameStack]) -> PlanOnce | None:
        return every_pair if self.mode == "create" else None


class OnceZarr(ZarrStorage):
    """Zarr storage that stores every pair of columns once."""

    def _plan_of(self, once: bool, stacks: Sequence[FrameStack]) -> PlanOnce | None:
        return every_pair if self.mode == "create" else None
