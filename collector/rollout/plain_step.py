"""A network acts, and all lanes are stepped in the first slot, in one call.

It does what `LocalDriver.policy_steps` does there. Beside gradient steps, which drive its code out
of the processor's caches, each call and each name that is looked up costs microseconds.
"""

from collections.abc import Callable
from typing import Any

import torch

from tallyroll.collector.policies.bare_call import BareCall
from tallyroll.collector.rollout.lanes import SystemLanes


def plain_step(
    bare: BareCall,
    lanes: SystemLanes,
    row: torch.Tensor,
    act: Callable[[int], None],
    put: Callable[[int, Any, int], None],
) -> Callable[[], None]:
    """What fills the first slot of ``lanes``, whose systems hand over what their steps return.

    Args:
        bare: calls the network, of one input.
        lanes: that are stepped.
        row: their action in the first slot.
        act: chooses it where the network is not to be called alone.
        put: writes what a network returned that is not as the column.
    """
    cursor = lanes.cursor
    hooks, earlier_hooks, network, one = bare.hooks, bare.earlier_hooks, bare.network, bare.one
    from_numpy, tensor = torch.from_numpy, torch.Tensor
    array, shape, dtype = row.numpy(), row.shape, row.dtype

    def fill() -> None:
        given = cursor.given
        if given is None or hooks or earlier_hooks:
            act(0)
        else:
            cursor.given = None
            out = network()(from_numpy(given))
            if type(out) is tensor and out.shape == shape and out.dtype == dtype:
                try:
                    array[...] = out.numpy()
                except (RuntimeError, TypeError):  # on another device, or watched by autograd
                    row.copy_(out)
            else:
                put(0, one(out), 0)
        try:
            lanes.step_first()
        except BaseException as error:
            lanes.say_actions(error)
            raise

    return fill
