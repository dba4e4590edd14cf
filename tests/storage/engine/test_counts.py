"""Test blocks of counts: names map to positions.

An extension with different positions is refused.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector.batches.rows.slab_output import MARKS
from tallyroll.collector.counting.episode_ring import EPISODE
from tallyroll.collector.counting.ledger import COUNTS
from tallyroll.collector.envs.gymnasium.lane_results import VALUES
from tallyroll.collector.native import kernel as collector
from tallyroll.collector.native.slot_rows import HeldCounts, LogCounts, RunCounts
from tallyroll.storage import fast_paths
from tallyroll.storage.engine import kernel as storage
from tallyroll.storage.engine.kernel import Extension
from tallyroll.storage.errors import ExtensionMismatch
from tallyroll.storage.files.commit_header import ADDRESSES, CommitCounts
from tallyroll.storage.files.counts import counts_of
from tallyroll.storage.trajectories.blocks.extension import KINDS

BLOCKS: dict[str, tuple[str, ...]] = {
    "COMMIT": CommitCounts.names,
    "SHELVES": KINDS,
    "EPISODE": EPISODE.names or (),
    "RUN": RunCounts.names,
    "LEDGER": COUNTS,
    "HELD": HeldCounts.names,
    "LOG": LogCounts.names,
    "DTYPES": collector.DTYPES,
    "MARKS": MARKS,
    "MODES": ("disabled", "next_step", "same_step"),
    "CALLS": ("step", "last", "reset"),
    "VALUES": VALUES,
    "HEADER": ADDRESSES,
    "NODES": ("sum", "least", "most"),
}
OF_STORAGE = ("COMMIT", "SHELVES", "HEADER", "NODES")


def extension_of(block: str) -> Extension:
    return storage.EXTENSION if block in OF_STORAGE else collector.EXTENSION


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_the_words_of_a_block_are_its_counts_in_order(values: list[int]) -> None:
    names = [f"count_{number}" for number in range(len(values))]
    block: Any = counts_of(*names)()
    assert not block.words.any()
    for name, value in zip(names, values, strict=True):
        setattr(block, name, value)
    assert block.words.tolist() == values
    assert block.words.ctypes.data == block.address
    block.words[:] = np.array(values[::-1], np.int64)
    assert [getattr(block, name) for name in names] == values[::-1]


@pytest.mark.parametrize("block", list(BLOCKS))
def test_the_extension_has_the_same_names(block: str) -> None:
    extension = extension_of(block)
    if extension.functions() is None:
        pytest.skip("there is no compiler")
    extension.require_names(block, BLOCKS[block])
    assert tuple(getattr(extension.module, block).split()) == BLOCKS[block]


@pytest.mark.parametrize("block", list(BLOCKS))
@given(data=st.data())
def test_a_moved_name_is_refused(block: str, data: st.DataObject) -> None:
    names = BLOCKS[block]
    moved = data.draw(st.permutations(names) | st.just(names[:-1]) | st.just((*names, "more")))
    built = SimpleNamespace(**{block: " ".join(moved) + " "}, __file__="kernel.so")
    extension = extension_of(block)
    with pytest.MonkeyPatch.context() as patch, fast_paths.switched_off():
        patch.setattr(extension, "module", built)
        fast_paths.switch_off(frozenset())
        if tuple(moved) == names:
            extension.require_names(block, names)
            return
        with pytest.raises(ExtensionMismatch, match=rf"kernel.so to have .* in {block}, got"):
            extension.require_names(block, names)
        with fast_paths.switched_off("kernel"):
            extension.require_names(block, names)
        assert extension.module is None


def test_words_of_a_table_are_put_in_the_order_of_the_extension() -> None:
    extension = Extension("tallyroll.no_such_module")
    assert extension.in_order("TABLE", one=1, two=2, three=3) == [1, 2, 3]
    extension.module = SimpleNamespace(TABLE="three one two ", __file__="kernel.so")
    with fast_paths.switched_off():
        fast_paths.switch_off(frozenset())
        assert extension.in_order("TABLE", one=1, two=2, three=3) == [3, 1, 2]
        for words in ({"one": 1, "two": 2}, {"one": 1, "two": 2, "three": 3, "four": 4}):
            with pytest.raises(ExtensionMismatch, match=r"in TABLE, got three, one, two\. The ext"):
                extension.in_order("TABLE", **words)
        with pytest.raises(ExtensionMismatch, match=r"in OTHER, got none\. The ext"):
            extension.in_order("OTHER", one=1)
        with fast_paths.switched_off("kernel"):
            assert extension.in_order("TABLE", one=1, two=2) == [1, 2]
        assert extension.module is None


@pytest.mark.parametrize(
    ("block", "module"),
    [
        ("EPISODE", "collector.counting.episode_ring"),
        ("LEDGER", "collector.batches.fast_collect"),
        ("MARKS", "collector.batches.rows.slab_output"),
        ("MODES", "collector.envs.gymnasium.sequential_step"),
        ("CALLS", "collector.envs.gymnasium.lane_results"),
        ("VALUES", "collector.envs.gymnasium.lane_results"),
        ("NODES", "storage.ext.sampling.sum_tree"),
        ("RUN", "collector.native.slot_rows"),
        ("SHELVES", "storage.trajectories.blocks.extension"),
    ],
)
def test_a_stale_extension_is_refused_when_a_module_is_imported(
    block: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older extension does not export the names of the block."""
    others = {name: " ".join(names) for name, names in BLOCKS.items() if name != block}
    built = SimpleNamespace(**others, __file__="kernel.so")
    monkeypatch.setattr(extension_of(block), "module", built)
    found = find_spec(f"tallyroll.{module}")
    assert found is not None
    assert found.loader is not None
    with fast_paths.switched_off():
        fast_paths.switch_off(frozenset())
        with pytest.raises(
            ExtensionMismatch, match=rf"kernel.so .* in {block}, got none\. The ext"
        ):
            found.loader.exec_module(module_from_spec(found))
