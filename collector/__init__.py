"""Collect exactly N true transitions from reinforcement-learning environments."""

from importlib import import_module
from typing import Any

from tallyroll.storage.package.moved_paths import moved_modules
from tallyroll.storage.package.public_names import homes_of_names

if __name__ != "tallyroll.collector":  # from the root of a checkout, where its folder lies
    raise ImportError(
        f"expected the name tallyroll.collector, got {__name__}; import tallyroll.collector"
    )

_homes = homes_of_names(__file__)
__all__ = [*_homes]

moved_modules(
    __name__,
    {
        "base": "tallyroll.collector.batches.run_loop",
        "envs.gymnasium_vector": "tallyroll.collector.envs.gymnasium.vector",
        "envs.info": "tallyroll.collector.slab.info",
        "envs.systems.agents": "tallyroll.collector.ext.systems.kinds.agents",
        "envs.systems.functional": "tallyroll.collector.ext.systems.kinds.functional",
        "envs.systems.functional_lanes": "tallyroll.collector.ext.systems.kinds.functional_lanes",
        "envs.systems.functional_specs": "tallyroll.collector.ext.systems.kinds.functional_specs",
        "envs.testing": "tallyroll.collector.ext.testing",
        "episodes": "tallyroll.collector.counting.episode_log",
        "checks": "tallyroll.collector.batches.checks.value_checks",
        "exact": "tallyroll.collector.batches.run_loop",
        "finals": "tallyroll.collector.batches.checks.final_observations",
        "interrupts": "tallyroll.collector.rollout.os_signals",
        "keys": "tallyroll.storage.rows.keys",
        "ledger": "tallyroll.collector.counting.ledger",
        "names": "tallyroll.collector.slab.names",
        "policy": "tallyroll.collector.policies.policy",
        "random_actions": "tallyroll.collector.policies.random_actions",
        "sink": "tallyroll.collector.batches.stored.writer",
        "trajectories": "tallyroll.collector.batches.layouts.trajectories",
    },
)


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
