"""TorchRL's collectors and ours with the same names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torchrl.collectors
from tensordict import TensorDictBase

import tallyroll.collector.torchrl as ours

OWN = {
    ("collector", name) for name in ("cut", "lane", "mask", "policy_version", "step", "traj_ids")
}
"""Columns that only ours have, or that number differently from TorchRL's."""


def both(env: Any, policy: Any, name: str = "Collector", **given: Any) -> Iterator[tuple[str, Any]]:
    """Yield TorchRL's collector and ours, each with its own environment, and shut them down."""
    for module in (torchrl.collectors, ours):
        own = {"auto_register_policy_transforms": False} if module is not ours else {}
        collector = getattr(module, name)(env(), policy(), **given, **own)
        try:
            yield "ours" if module is ours else "theirs", collector
        finally:
            collector.shutdown()


def assert_batches_alike(
    theirs: TensorDictBase, mine: TensorDictBase, *, names: bool = True
) -> None:
    """Check that shape, names and TorchRL's columns agree bit for bit, as do trajectory starts."""
    assert mine.batch_size == theirs.batch_size
    assert not names or mine.names == theirs.names
    wanted = {key for key in theirs.keys(True, True) if key not in OWN}
    got = {key for key in mine.keys(True, True) if key not in OWN}
    assert got == wanted, wanted ^ got
    for key in wanted:
        left, right = theirs.get(key), mine.get(key)
        assert left.dtype == right.dtype, key
        assert torch.equal(left, right), key
    ids = [td.get(("collector", "traj_ids"), None) for td in (theirs, mine)]
    if ids[0] is not None:
        changes = [(each[..., 1:] != each[..., :-1]) for each in ids]
        assert torch.equal(*changes)
