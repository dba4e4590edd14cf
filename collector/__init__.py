"""Collect exactly N true transitions from reinforcement-learning environments."""

from tallyroll.collector.envs.gymnasium_vector import GymnasiumVectorEnv
from tallyroll.collector.episodes import Episode
from tallyroll.collector.errors import CollectorError
from tallyroll.collector.evaluate import Evaluation, evaluate
from tallyroll.collector.ledger import Ledger
from tallyroll.collector.sync import SyncCollector
from tallyroll.collector.trajectories import split_trajectories

__all__ = [
    "CollectorError",
    "Episode",
    "Evaluation",
    "GymnasiumVectorEnv",
    "Ledger",
    "SyncCollector",
    "evaluate",
    "split_trajectories",
]
