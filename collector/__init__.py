"""Collect exactly N true transitions from reinforcement-learning environments."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tallyroll.collector.envs.gymnasium_vector import GymnasiumVectorEnv
    from tallyroll.collector.envs.info import Info
    from tallyroll.collector.episodes import Episode
    from tallyroll.collector.errors import CollectorError
    from tallyroll.collector.evaluation import Evaluation, evaluate
    from tallyroll.collector.ledger import Ledger
    from tallyroll.collector.multiprocess import MultiprocessCollector
    from tallyroll.collector.sync import SyncCollector
    from tallyroll.collector.trajectories import split_trajectories

__all__ = [
    "CollectorError",
    "Episode",
    "Evaluation",
    "GymnasiumVectorEnv",
    "Info",
    "Ledger",
    "MultiprocessCollector",
    "SyncCollector",
    "evaluate",
    "split_trajectories",
]

_HOMES = {
    "CollectorError": "errors",
    "Episode": "episodes",
    "Evaluation": "evaluation",
    "GymnasiumVectorEnv": "envs.gymnasium_vector",
    "Info": "envs.info",
    "Ledger": "ledger",
    "MultiprocessCollector": "multiprocess",
    "SyncCollector": "sync",
    "evaluate": "evaluation",
    "split_trajectories": "trajectories",
}


def __getattr__(name: str) -> Any:
    # Importing torch and TorchRL takes seconds, which `tallyroll --help` need not wait for.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
