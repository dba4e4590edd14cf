"""Helpers that the tests of collectors share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from tallyroll.collector import Ledger, SyncCollector

from oracles import Actions, Kind, OracleEnv, encode

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]

Batches = list[TensorDictBase]


def collect(env: Any, policy: Any = None, **kwargs: Any) -> tuple[Batches, SyncCollector]:
    """Return all batches of a run and its closed collector. Check the ledger at every yield."""
    batches = []
    with SyncCollector(env, policy, **kwargs) as collector:
        for batch in collector:
            collector.ledger.check()
            batches.append(batch)
    collector.ledger.check()
    return batches, collector


def joined(batches: Batches) -> TensorDict:
    """Return the rows of all batches in order of arrival, with the environment's own done flags."""
    rows = torch.cat([without_cut(batch) for batch in batches])
    assert isinstance(rows, TensorDict)
    return rows


def without_cut(batch: TensorDictBase) -> TensorDictBase:
    """Return the stored part of a batch: no `cut`, and the environment's own done flags."""
    cut = batch["collector", "cut"].unsqueeze(-1)
    rows = batch.clone().exclude(("collector", "cut"))
    rows["next", "done"] = rows["next", "done"] & ~cut
    return rows


def stream(rows: TensorDictBase, lane: int, count: int) -> TensorDictBase:
    """Return the first `count` rows of one lane."""
    return rows[rows["collector", "lane"] == lane][:count]


def columns(td: TensorDictBase, *without: Any) -> dict[Any, torch.Tensor]:
    """Map keys to leaves."""
    return {key: leaf for key, leaf in td.items(True, True) if key not in without}


def assert_same(one: TensorDictBase, other: TensorDictBase, *without: Any) -> None:
    """Check that keys, dtypes, shapes and every bit are the same."""
    left, right = columns(one, *without), columns(other, *without)
    assert left.keys() == right.keys(), set(left) ^ set(right)
    for key, leaf in left.items():
        assert leaf.dtype == right[key].dtype, key
        assert leaf.shape == right[key].shape, key
        assert leaf.numpy().tobytes() == right[key].numpy().tobytes(), f"{key} differs"


def act(leaves: Sequence[torch.Tensor], action: Actions, batch: torch.Size) -> torch.Tensor:
    """Return an action of the oracles, a function of the observation alone."""
    total = sum(leaf.reshape(*batch, -1).to(torch.int64).sum(-1) for leaf in leaves)
    assert isinstance(total, torch.Tensor)
    if action == "discrete":
        return total % 2
    if action == "box":
        return torch.stack([(total % 5) / 4 - 0.5, (total % 3) / 4], -1).float()
    if action == "multidiscrete":
        return torch.stack([total % 2, total % 3], -1)
    return torch.stack([total % 2, total % 3 % 2, total // 2 % 2], -1).to(torch.int8)


class ByObservation(TensorDictModuleBase):
    """A deterministic policy. `called` counts its calls."""

    def __init__(self, kind: Kind = "float", action: Actions = "discrete") -> None:
        super().__init__()
        self.in_keys = list(encode(kind, 0, 0, 0))
        self.out_keys = ["action"]
        self.action = action
        self.called = 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        self.called += 1
        leaves = [td.get(key) for key in self.in_keys]
        return td.set("action", act(leaves, self.action, td.batch_size))


class OwnTicks(OracleEnv):
    """An oracle whose `info["tick"]` restarts at each reset, like ALE's episode_frame_number."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        self.ticks = 0
        return super().reset(**kwargs)


def balanced(ledger: Ledger) -> bool:
    """Return whether both equations of the ledger hold."""
    accounted = ledger.stored + ledger.discarded + ledger.carried + ledger.lost
    return ledger.slots == ledger.executed + ledger.reset_slots and ledger.executed == accounted


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Flatten a nested state into plain values by dotted name."""
    if hasattr(state, "items"):
        parts = [flat(value, f"{name}.{key}") for key, value in state.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {name: state.tolist() if isinstance(state, torch.Tensor) else state}


def check_numbers(ids: np.ndarray, step: np.ndarray) -> None:
    """Check that (id, step) is unique, and that each trajectory has steps 0, 1, 2 ... in order."""
    order = np.argsort(ids, kind="stable")
    ids, step = ids[order], step[order]
    starts = np.concatenate([[True], ids[1:] != ids[:-1]])
    since = np.arange(len(ids)) - np.maximum.accumulate(np.where(starts, np.arange(len(ids)), 0))
    assert (step == since).all(), "steps are missing, or there twice"
