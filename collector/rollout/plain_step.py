"""A network acts, and all lanes are stepped in the first slot, in one call.

It does what `LocalDriver.policy_steps` does there. Beside gradient steps, which drive its code out
of the processor's caches, each call and each name that is looked up costs microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tallyroll.collector.policies.bare_call import BareCall
from tallyroll.collector.rollout.lanes import SystemLanes

if TYPE_CHECKING:
    from tallyroll.collector.rollout.driver import LocalDriver


def plain_step(
    bare: BareCall, lanes: SystemLanes, row: torch.Tensor
) -> Callable[[LocalDriver], None]:
    """What fills the first slot of ``lanes``, whose systems hand over what their steps return.

    Args:
        bare: calls the network, of one input.
        lanes: that are stepped.
        row: their action in the first slot.

    Returns:
        It takes the driver, which keeps it and would keep itself: its memory is to go with it.
    """
    cursor = lanes.cursor
    network_now, one = bare.network, bare.one
    from_numpy, tensor = torch.from_numpy, torch.Tensor
    array, shape, dtype = row.numpy(), row.shape, row.dtype

    def fill(driver: LocalDriver) -> None:
        given, cursor.given = cursor.given, None  # also where the policy itself is called
        network = None if given is None else network_now()
        if network is None:
            driver.act(0)
        else:
            out = network(from_numpy(given))
            if type(out) is tensor and out.shape == shape and out.dtype == dtype:
                try:
                    array[...] = out.numpy()
                except (RuntimeError, TypeError):  # on another device, or watched by autograd
                    row.copy_(out)
            else:
                driver.put_column(0, one(out), 0)
        try:
            lanes.step_first()
        except BaseException as error:
            lanes.say_actions(error)
            raise

    return fill
