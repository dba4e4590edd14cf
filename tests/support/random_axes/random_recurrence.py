"""A recurrent module, applied to a yielded batch, repeats the outputs that chose the actions."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.modules import set_recurrent_mode

from random_policies import recurrent_module


def wrong_in_recurrence(batch: TensorDictBase, rows: TensorDictBase, *, lstm: bool) -> list[str]:
    """Compare ``batch`` as yielded with ``rows``, the same lane by lane and without padding."""
    ids, init = rows["collector", "traj_ids"], rows["is_init"].reshape(len(rows))
    first = torch.ones(len(rows), dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    if not bool(init[first].all()):
        return ["is_init is False where the rows of a trajectory begin"]
    module = recurrent_module(rows["observation"].shape[-1], lstm=lstm)
    with set_recurrent_mode(True), torch.no_grad():
        again = module(batch.clone())["hid"]
    mask = batch.get(("collector", "mask"), None)
    if mask is None:
        mask = torch.ones(batch.batch_size, dtype=torch.bool)
    chosen = mask & (batch["collector", "policy_version"] >= 0)
    apart = (again - batch["hid"]).abs().amax(-1)[chosen]
    worst = float(apart.max()) if len(apart) else 0.0
    return [f"the recurrent mode gives others, by {worst}"] if worst > 1e-5 else []
