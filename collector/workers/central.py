"""Actions that the parent chooses for lanes of many workers (``policy_placement="central"``).

A worker that needs actions answers the parent's question with a :class:`~messages.ActionRequest`,
and waits. The pool lets :class:`CentralPolicy` act for all waiting workers in one call, and sends
each an :class:`~messages.ActionReply`. The worker continues until it needs other actions or is
done.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.policies.action_context import ActionContext
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.policies.trial import no_tensordict
from tallyroll.collector.rollout.actor import WHILE_ACTING
from tallyroll.collector.rollout.lanes import changed_error
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.transport import Channel
from tallyroll.storage.rows.keys import Key, as_key


class EndOfSteps(Exception):
    """The parent has ended a request for steps without sending actions."""


# --- the worker's side ----------------------------------------------------------------------------


class PolicyProxy(Policy):
    """Policy that acts in the parent once :meth:`use_channel` was called, and before in the worker.

    A trial before :meth:`use_channel` therefore discovers the keys that the policy writes.
    """

    _channel: Channel | None = None

    def use_channel(self, channel: Channel) -> None:
        """Send requests to the parent through ``channel`` from now on."""
        self._channel, self.is_elsewhere = channel, True

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Return the actions for ``td``, and the other values that the policy writes.

        Raises:
            EndOfSteps: the parent requests no further steps now.
        """
        if self._channel is None:
            return super().__call__(td)
        lead = len(td.batch_size)
        self._channel.send(m.ActionRequest(_policy_inputs(td), _levels(td)))
        chosen = self._channel.receive()
        assert isinstance(chosen, m.ActionReply)
        if chosen.values is None:
            raise EndOfSteps
        self.version = chosen.version
        out = TensorDict({}, td.batch_size)
        for key, value in chosen.values.items():
            tensor = _tensor(value[0].copy(), value[1])
            out.set(key, tensor if lead else tensor[0])
        return out if td.device is None else out.to(td.device)


def _policy_inputs(td: TensorDictBase) -> m.Values:
    """Return the tensors of a policy's input, each ``[lane, ...]``."""
    found = {as_key(key): value for key, value in td.items(True, True)}
    tensors = {key: each for key, each in found.items() if isinstance(each, torch.Tensor)}
    lead = len(td.batch_size)
    return {key: _value(each if lead else each[None]) for key, each in tensors.items()}


def _levels(td: TensorDictBase) -> Mapping[Key, Sequence[int]]:
    """Return the batch dimensions, after the lanes, of the TensorDicts in a policy's input."""
    lead = len(td.batch_size)
    return {
        as_key(key): tuple(value.batch_size[lead:])
        for key, value in td.items(True)
        if isinstance(value, TensorDictBase)
    }


def _value(tensor: torch.Tensor) -> m.Value:
    """Return a tensor in the form that is sent: an array, and the dtype.

    NumPy has no bfloat16, so the array of such a tensor is a view as int16.
    """
    plain = tensor.detach().cpu()
    array = plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain
    return array.numpy(), plain.dtype


def _tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)


# --- the parent's side ----------------------------------------------------------------------------


class CentralPolicy:
    """Chooses actions in this process for the lanes of workers, many workers in one call.

    Args:
        policy: the policy of the collector.
        called: the way to call the policy, as found in the trial of a worker.
        exploration: the exploration type while the policy acts.
        in_step: True if workers step in lockstep. The policy then acts only when every busy worker
            waits, so that one call serves all lanes.
    """

    def __init__(
        self, policy: Policy, called: m.PolicyCall, exploration: ExplorationType, *, in_step: bool
    ) -> None:
        self.in_step = in_step
        self.calls = 0
        """Number of calls of the policy so far."""
        self.turn = threading.RLock()
        """Lock held while the policy acts, and by a thread that updates its weights."""
        self._policy, self._writes = policy, called.writes
        self._acting = ActionContext(exploration)
        if called.inputs is not None:
            policy.takes(*called.inputs)

    def choose(self, wanted: Sequence[m.ActionRequest]) -> list[m.ActionReply]:
        """Return the actions for each of ``wanted``, chosen in as few calls as possible.

        Requests with the same input keys share a call. A worker that has just begun may lack keys
        that the policy writes, so its request needs another call.
        """
        found: dict[int, m.ActionReply] = {}
        for keys in {frozenset(each.seen): None for each in wanted}:
            alike = [at for at, each in enumerate(wanted) if each.seen.keys() == keys]
            with self.turn:
                found |= zip(alike, self._chosen([wanted[at] for at in alike]), strict=True)
        return [found[at] for at in range(len(wanted))]

    def _chosen(self, wanted: Sequence[m.ActionRequest]) -> list[m.ActionReply]:
        sizes = [each.lanes for each in wanted]
        version = self._policy.version
        out = self._called(_joined(wanted, sum(sizes)))
        self.calls += 1
        arrays = {key: _value(each) for key, each in out.items()}
        chosen, start = [], 0
        for size in sizes:
            lanes = slice(start, start := start + size)
            # Copied, because the policy may act again before the reply is sent.
            own = {key: (array[lanes].copy(), dtype) for key, (array, dtype) in arrays.items()}
            chosen.append(m.ActionReply(version, own))
        return chosen

    def _called(self, td: TensorDictBase) -> dict[Key, torch.Tensor]:
        """Call the policy, and return the values that it writes, each ``[lane, ...]``."""
        try:
            with self._acting:
                out = self._policy(td)
            if not isinstance(out, TensorDictBase):
                raise no_tensordict(out)
            values = {key: out.get(key, None) for key in self._writes}
            # The worker reports missing keys, and wrong dimensions other than the lanes.
            found = {k: each for k, each in values.items() if isinstance(each, torch.Tensor)}
            lanes = tuple(td.batch_size)
            for key, each in found.items():
                if each.shape[:1] != lanes:
                    raise changed_error(key, each, each.new_empty((*lanes, *each.shape[1:])))
        except Exception as error:
            setattr(error, WHILE_ACTING, True)
            raise
        return found


def _joined(wanted: Sequence[m.ActionRequest], lanes: int) -> TensorDict:
    """Concatenate the policy inputs of all waiting workers, ``[lane, ...]``, in new memory."""
    td = TensorDict({}, [lanes])
    for level, dims in wanted[0].levels.items():
        td.set(level, TensorDict({}, [lanes, *dims]))
    for key, (_, dtype) in wanted[0].seen.items():
        td.set(key, _tensor(np.concatenate([each.seen[key][0] for each in wanted]), dtype))
    return td


def use_own_weights(policy: Policy) -> None:
    """Give ``policy`` its own copy of the weights, which changes only with new versions.

    Raises:
        ArgumentError: the policy cannot act for all workers.
    """
    if isinstance(policy, SeveralPolicies):
        raise ArgumentError(
            'policy_placement="central": expected one policy, got several. Give one policy, or '
            "leave policy_placement out."
        )
    module = policy.module
    if isinstance(module, nn.Module):
        lazy = [name for name, each in module.named_parameters() if is_lazy(each)]
        if lazy:
            raise ArgumentError(
                f"{lazy[0]}: expected weights, got a parameter without a shape. Call the module "
                "once before you pass it."
            )
        policy.keep_copy()
