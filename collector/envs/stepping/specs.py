"""Specs of a TorchRL environment over a system, built from the declared specs of one lane."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torchrl.data import Binary, Composite, TensorSpec

from tallyroll.collector.envs.system import Declares
from tallyroll.storage.rows.keys import NEXT_VALID, VALID, Key


class Specs(NamedTuple):
    """Specs of all lanes. Only ``observation`` keeps a group of agents without columns."""

    observation: Composite
    action: Composite
    reward: Composite
    done: Composite


def batched_specs(d: Declares, names: Sequence[Key]) -> Specs:
    """Expand the specs of ``d`` by a leading dimension of lanes, and add specs of the end flags.

    Args:
        d: the declaration of a system.
        names: names of the observation columns, in order.
    """
    device, shape = torch.device(d.device), torch.Size([d.lanes])

    def grown(spec: TensorSpec) -> TensorSpec:
        return spec.expand(d.lanes, *spec.shape).clone().to(device)

    def flags(*inner: int) -> dict[str, TensorSpec]:
        spec = Binary(1, shape=(d.lanes, *inner, 1), dtype=torch.bool, device=device)
        return {name: spec.clone() for name in ("done", "terminated", "truncated")}

    def composite() -> Composite:
        made = Composite(shape=shape, device=device)
        for group, size in d.groups.items():
            made[group] = Composite(shape=(d.lanes, size), device=device)
        return made

    specs = Specs(composite(), composite(), composite(), composite())

    def of_all(key: Key, spec: TensorSpec) -> TensorSpec:
        own = d.of_lanes.get(key)
        return grown(spec) if own is None else own.clone().to(device)

    for column, (key, spec) in zip(names, d.observation.items(), strict=True):
        specs.observation[column] = of_all(key, spec)
    if d.marks_transitions:
        specs.observation[VALID] = flags()["done"]
    if d.finals == "some":
        specs.observation[NEXT_VALID] = Binary(shape=shape, dtype=torch.bool, device=device)
    if d.agent_finals == "some":
        for group, size in d.groups.items():
            valid = Binary(shape=(d.lanes, size), dtype=torch.bool, device=device)
            specs.observation[(*NEXT_VALID, group)] = valid
    for target, declared in ((specs.action, d.action), (specs.reward, d.reward)):
        for key, spec in declared.items():
            target[key] = of_all(key, spec)
    for name, spec in flags().items():
        specs.done[name] = spec
    for group, size in d.groups.items():
        for name, spec in flags(size).items():
            specs.done[group, name] = spec
    for each in (specs.action, specs.reward, specs.done):
        for name in [
            name for name, part in each.items() if isinstance(part, Composite) and not part
        ]:
            del each[name]
    return specs
