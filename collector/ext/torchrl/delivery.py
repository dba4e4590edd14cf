"""Changes that TorchRL's arguments make to a batch in TorchRL's layout."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from tallyroll.collector.batches.stored.buffer_items import extend_buffer, require_items
from tallyroll.collector.batches.stored.sinks import takes_rows
from tallyroll.collector.errors import StateError
from tallyroll.collector.user_code import user_code
from tallyroll.storage.rows.keys import MASK, NEXT, POLICY_VERSION, as_key, is_done


def stores_rows(buffer: ReplayBuffer | None) -> bool:
    """Return whether ``buffer`` has a storage of ours, which takes rows of any batch."""
    return buffer is not None and takes_rows(buffer.storage)


def with_policy_version(batch: TensorDictBase) -> TensorDictBase:
    """``batch`` with each row's version where TorchRL's ``PolicyVersion`` writes it."""
    version = batch.get(POLICY_VERSION)
    batch.set("policy_version", version)
    batch.set((NEXT, "policy_version"), version.clone())
    return batch


def compact(batch: TensorDictBase) -> TensorDictBase:
    """Return ``batch`` without values under ``"next"`` that are at the root too."""
    at_root = {as_key(key) for key in batch.keys(True, True)}
    again = [
        key
        for key, leaf in batch.items(True, True)
        if key[0] == NEXT
        and as_key(key[1:]) in at_root
        and key[-1] not in ("done", "terminated", "truncated", "reward")
        and not is_done(as_key(key), leaf.dtype)
    ]
    return batch.exclude(*again)


def joined_workers(batch: TensorDictBase, cat: int) -> TensorDictBase:
    """Join ``[worker, *batch size, time]`` along a dimension of the workers' batches."""
    own = batch.ndim - 1
    at = cat + own if cat < 0 else cat
    if not 0 <= at < own:
        raise StateError(
            f"cat_results: expected a dimension of a worker's batches {list(batch.shape[1:])}, got "
            f"{cat}"
        )
    if own == 1:
        return flat(batch)
    pieces = batch.unbind(0)
    joined: TensorDictBase = torch.cat(list(pieces), at)
    joined.refine_names(..., "time")
    return joined


def flat(batch: TensorDictBase) -> TensorDictBase:
    """Rows lane by lane, without those that pad it."""
    mask = batch.get(MASK, None)
    rows = batch.reshape(-1) if mask is None else batch[mask].exclude(MASK)
    rows.names = ["time"]
    return rows


def joined(pieces: Sequence[TensorDictBase]) -> TensorDictBase:
    """Steps of all lanes one after the other.

    Raises:
        StateError: a step of some lanes only is among them.
    """
    if any(piece.get(MASK, None) is not None for piece in pieces):
        raise StateError(
            "interruptor: expected steps of all lanes, got one of some; make frames_per_batch and "
            "total_frames multiples of the lanes, and use an environment without reset slots"
        )
    batch: TensorDictBase = torch.cat(list(pieces), -1)
    batch.refine_names(..., "time")
    return batch


def extend(buffer: ReplayBuffer, batch: TensorDictBase) -> None:
    """Add ``batch``, whose trajectories are numbered, to a replay buffer.

    Raises:
        ItemsDiffer: an interruptor made it shorter than the buffer's items are.
    """
    require_items(buffer.storage, batch)
    with user_code("the replay buffer"):
        extend_buffer(buffer, [batch])
