"""Collect exactly N true transitions from reinforcement-learning environments."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tallyroll.storage.moved_paths import moved_modules

if TYPE_CHECKING:
    from tallyroll.collector.batches.layouts import split_trajectories
    from tallyroll.collector.counting.episode_log import Episode
    from tallyroll.collector.counting.ledger import Ledger
    from tallyroll.collector.envs.fixed_width import FixedWidth
    from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv
    from tallyroll.collector.errors import CollectorError
    from tallyroll.collector.evaluation import Evaluation, evaluate
    from tallyroll.collector.multiprocess import MultiprocessCollector
    from tallyroll.collector.slab.info import Info
    from tallyroll.collector.sync import SyncCollector
    from tallyroll.collector.workers.supervision_options import Supervision

__all__ = [
    "CollectorError",
    "Episode",
    "Evaluation",
    "FixedWidth",
    "GymnasiumVectorEnv",
    "Info",
    "Ledger",
    "MultiprocessCollector",
    "Supervision",
    "SyncCollector",
    "evaluate",
    "split_trajectories",
]

_HOMES = {
    "CollectorError": "errors",
    "Episode": "counting.episode_log",
    "Evaluation": "evaluation",
    "FixedWidth": "envs.fixed_width",
    "GymnasiumVectorEnv": "envs.gymnasium.vector",
    "Info": "slab.info",
    "Ledger": "counting.ledger",
    "MultiprocessCollector": "multiprocess",
    "Supervision": "workers.supervision_options",
    "SyncCollector": "sync",
    "evaluate": "evaluation",
    "split_trajectories": "batches.layouts",
}

moved_modules(
    __name__,
    {
        "base": "tallyroll.collector.batches.run_loop",
        "envs.gymnasium_vector": "tallyroll.collector.envs.gymnasium.vector",
        "envs.info": "tallyroll.collector.slab.info",
        "episodes": "tallyroll.collector.counting.episode_log",
        "checks": "tallyroll.collector.batches.value_checks",
        "exact": "tallyroll.collector.batches.run_loop",
        "finals": "tallyroll.collector.batches.final_observations",
        "interrupts": "tallyroll.collector.rollout.os_signals",
        "keys": "tallyroll.storage.rows.keys",
        "ledger": "tallyroll.collector.counting.ledger",
        "names": "tallyroll.collector.slab.names",
        "policy": "tallyroll.collector.policies.policy",
        "random_actions": "tallyroll.collector.policies.random_actions",
        "sink": "tallyroll.collector.batches.writer",
        "trajectories": "tallyroll.collector.batches.layouts",
    },
)


def __getattr__(name: str) -> Any:
    # Importing torch and TorchRL takes seconds, which `tallyroll --help` need not wait for.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
