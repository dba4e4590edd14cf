"""The devices of the environment, the policy and the batches of a run."""

from __future__ import annotations

from dataclasses import replace

from tensordict import TensorDictBase

from devices_kit import SIMULATED
from random_configurations import Configuration
from random_drawing import Draw

MOVABLE = ("torch", "one")
"""Systems whose environments can lie on a device."""


def on_a_device(config: Configuration, device: str) -> Configuration:
    """Return the configuration with one or more of its parts on ``device``."""
    draw, env, policy = Draw(config.number, 53), config.env, config.policy
    workers = config.workers > 0
    places = ["batches"] * (not workers)
    if env.system in MOVABLE and not workers and config.phase != "outside":
        places += ["environment", "environment"]
    fused = policy is not None and policy.recurrent and SIMULATED
    if policy is not None and config.several is None and not fused:
        places += ["policy"]
        if policy.habit == "fills":  # it writes to a NumPy array
            policy = replace(policy, habit="writes")
    chosen = {*draw.some(places, 3)} or {*places[-1:]}
    return replace(
        config,
        policy=policy,
        env=replace(env, device=device if "environment" in chosen else "cpu"),
        policy_device=device if "policy" in chosen else None,
        storing_device=device if "batches" in chosen else draw.one(None, "cpu"),
        threads=True,
        meddles=(),
        saves=False,
    )


def on_host(batch: TensorDictBase) -> TensorDictBase:
    """Return a copy of a batch on the host, without a device.

    The `clone` of a TensorDict with a device turns -0.0 into 0.0, and refuses uint32.
    """
    return batch.apply(lambda leaf: leaf.to("cpu", copy=True), device=None)
