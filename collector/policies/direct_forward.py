"""Calls of a policy's network without the TensorDicts around it.

Around a network of one output a `TensorDictModule` takes as long as a small network itself, and
several times as long when a gradient step has driven its code out of the processor's caches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from tallyroll.collector.compat import network_of
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.run_plan import PolicyTraits
from tallyroll.collector.user_code import ENDS, user_code
from tallyroll.storage.rows.keys import Key, as_key

Rows = Sequence[torch.Tensor]


def traits_of(
    policy: Policy, actions: Sequence[Key], rows: Callable[[Key], Rows | None]
) -> PolicyTraits:
    """Look at ``policy`` for `run_plan.acting`; ``rows`` finds the slots of a column."""
    module: Any = policy.around
    is_module = isinstance(module, TensorDictModule)
    reads = [as_key(key) for key in module.in_keys] if is_module else []
    writes = [as_key(key) for key in module.out_keys] if is_module else [*policy.writes]
    return PolicyTraits(
        kind=type(module).__name__,
        is_module=is_module,
        does_more=is_module and network_of(module)() is None,
        elsewhere=policy.device is not None,
        central=policy.is_elsewhere,
        unseen=[key for key in reads if rows(key) is None],
        writes=writes if writes != [*actions] else [*policy.writes],
        actions=actions,
    )


class DirectForward:
    """A call of a `TensorDictModule`'s network with columns of a slab, without its wrapper.

    Args:
        module: of one output.
        inputs: the slots of each column that it reads.
    """

    def __init__(self, module: TensorDictModule, inputs: Sequence[Rows]) -> None:
        self.network = network_of(module)
        """Finds the network to call; None if the module itself has to be called."""
        self._inputs = inputs
        self._only = inputs[0] if len(inputs) == 1 else None
        self._out = module.out_keys[0]

    @classmethod
    def of(cls, policy: Policy, rows: Callable[[Key], Rows | None]) -> "DirectForward":
        """Make a call of ``policy``, whose traits allow it; ``rows`` finds a column's slots."""
        module: Any = policy.around
        inputs = (rows(as_key(key)) for key in module.in_keys)
        return cls(module, [each for each in inputs if each is not None])

    def __call__(self, network: Any, at: int) -> Any:
        """Return the output of ``network`` in slot ``at``, given copies of its inputs."""
        try:
            if self._only is not None:
                out = network(self._only[at].clone())
            else:
                out = network(*[rows[at].clone() for rows in self._inputs])
        except ENDS as error:
            raise user_code.error("policy", error) from error
        return out if isinstance(out, torch.Tensor) else self._one(out)

    def _one(self, out: Any) -> Any:
        """The output, as the module unwraps it; None where it is not one output."""
        if isinstance(out, (dict, TensorDictBase)) and self._out in out:
            out = out.get(self._out)
        elif isinstance(out, tuple):
            out = out[0] if len(out) == 1 else None
        if out is None:
            return None
        if isinstance(out, np.ndarray) and out.dtype.kind in "biuf":
            return torch.as_tensor(out)
        return TensorDict().set(self._out, TensorDict.from_any(out)).get(self._out)
