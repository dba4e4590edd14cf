"""Calls of a policy's network without the TensorDicts around it.

Around a network of one output a `TensorDictModule` takes as long as a small network itself, and
several times as long when a gradient step has driven its code out of the processor's caches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from tallyroll.collector.compat import calls_plainly, hooks_of
from tallyroll.collector.policies.policy import Policy
from tallyroll.storage.rows.keys import Key, as_key

Rows = Sequence[torch.Tensor]


class BareCall:
    """What a `TensorDictModule` does with the columns of a slab, and nothing else.

    Args:
        module: of one output.
        inputs: the slots of each column that it reads.
    """

    def __init__(self, module: TensorDictModule, inputs: Sequence[Rows]) -> None:
        self._around = module
        self.hooks, self.earlier_hooks = hooks_of(module)
        """Of calls of the `TensorDictModule` itself: where there are some, it is to be called."""
        # Where what it calls is now, for it may be replaced during a run.
        own = vars(module)
        self._place: Mapping[str, Any] = own if "module" in own else own["_modules"]
        self._inputs = inputs
        self.has_one_input = len(inputs) == 1
        self._out = module.out_keys[0]

    @staticmethod
    def of(
        policy: Policy | None, action: Sequence[Key], rows: Callable[[Key], Rows | None]
    ) -> "BareCall | None":
        """A call of ``policy`` that writes one ``action``; None where it does more than that.

        ``rows`` finds the slots of a column.
        """
        if policy is None or policy.device is not None:
            return None
        module: Any = policy.around
        if type(module) is not TensorDictModule or not calls_plainly(module):
            return None
        inputs = [rows(as_key(key)) for key in module.in_keys]
        found = [each for each in inputs if each is not None]
        writes = [as_key(key) for key in module.out_keys]
        if len(found) < len(inputs) or writes != [*action] or [*policy.writes] != writes:
            return None
        return BareCall(module, found)

    def __call__(self, at: int, given: NDArray[Any] | None = None) -> Any:
        """What it chooses in slot ``at``, of inputs of its own.

        ``given``: the values of the only observation, where nobody else has that array.
        """
        module = self.network()
        if given is not None:
            out = module(torch.from_numpy(given))
        else:
            out = module(*[rows[at].clone() for rows in self._inputs])
        return self.one(out)

    def network(self) -> Any:
        """What it calls."""
        try:
            return self._place["module"]
        except KeyError:
            return self._around.module

    def one(self, out: Any) -> Any:
        """The output, where it comes wrapped."""
        if isinstance(out, torch.Tensor):
            return out
        if isinstance(out, (dict, TensorDictBase)):
            return out.get(self._out)
        if isinstance(out, tuple):
            return out[0] if len(out) == 1 else None
        return torch.as_tensor(out) if isinstance(out, (np.ndarray, list)) else None
