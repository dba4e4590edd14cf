"""Policies with weights, and recurrent ones with a plain model of their states."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential
from torchrl.modules import LSTMModule


def linear(seed: int = 0) -> Sequential:
    """Return a greedy linear policy whose weights depend on `seed`."""
    net = torch.nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
        net.bias.zero_()
    logits = TensorDictModule(net, in_keys=["observation"], out_keys=["logits"])
    return Sequential(
        logits, TensorDictModule(lambda x: x.argmax(-1), in_keys=["logits"], out_keys=["action"])
    )


def recurrent(cls: Any) -> tuple[Any, Sequential]:
    torch.manual_seed(0)
    keys = (
        {"in_keys": ["observation", "h", "c"], "out_keys": ["out", ("next", "h"), ("next", "c")]}
        if cls is LSTMModule
        else {"in_keys": ["observation", "h"], "out_keys": ["out", ("next", "h")]}
    )
    memory = cls(input_size=3, hidden_size=4, device="cpu", **keys)
    head = TensorDictModule(
        lambda out: (out.sum(-1) > 0).long(), in_keys=["out"], out_keys=["action"]
    )
    return memory, Sequential(memory, head)


def plain_states(memory: Any, rows: TensorDictBase) -> torch.Tensor:
    """Step a cell by hand through the rows [time] of one trajectory, and return its outputs."""
    is_lstm = isinstance(memory, LSTMModule)
    net = memory.lstm if is_lstm else memory.gru
    zeros = torch.zeros(1, 1, 4)
    state: Any = (zeros, zeros) if is_lstm else zeros
    outputs = []
    with torch.no_grad():
        for observation in rows["observation"]:
            out, state = net(observation.view(1, 1, 3), state)
            outputs.append(out.view(-1))
    return torch.stack(outputs)
