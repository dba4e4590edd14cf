"""Fast path that calls a policy's network without the TensorDicts around it.

For a network with one output, the overhead of a `TensorDictModule` is as large as the time of a
small network. It is several times larger after a gradient step has evicted the code from the CPU
caches.
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
    """Determine the traits of ``policy`` for `run_plan.acting`.

    ``rows`` returns the slots of a column; None if the policy does not see the column.
    """
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
    """Calls the network of a `TensorDictModule` with columns of a slab, without its wrapper.

    Args:
        module: the module, which has one output.
        inputs: the slots of each column that the module reads.
    """

    def __init__(self, module: TensorDictModule, inputs: Sequence[Rows]) -> None:
        self.network = network_of(module)
        """Returns the network to call; None if the module itself has to be called."""
        self._inputs = inputs
        self._only = inputs[0] if len(inputs) == 1 else None
        self._out = module.out_keys[0]

    @classmethod
    def of(cls, policy: Policy, rows: Callable[[Key], Rows | None]) -> "DirectForward":
        """Make a direct call of ``policy``, whose traits must allow it.

        ``rows`` returns a column's slots.
        """
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
        """Return the output as the module would unwrap it; None unless it is exactly one value."""
        if isinstance(out, (dict, TensorDictBase)) and self._out in out:
            out = out.get(self._out)
        elif isinstance(out, tuple):
            out = out[0] if len(out) == 1 else None
        if out is None:
            return None
        if isinstance(out, np.ndarray) and out.dtype.kind in "biuf":
            return torch.as_tensor(out)
        return TensorDict().set(self._out, TensorDict.from_any(out)).get(self._out)
