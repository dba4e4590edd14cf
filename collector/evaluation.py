"""Unbiased evaluation of a policy, on a budget of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.counting.episode_log import Episode
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.envs.make import CreateEnv
from tallyroll.collector.policies.policy import PolicyFn
from tallyroll.collector.policies.trial import generators_restored
from tallyroll.collector.sync import SyncCollector

_FRAMES_PER_BATCH = 4096


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. ``ledger`` counts what the evaluation itself cost."""

    episodes: list[Episode]
    ledger: Ledger

    @property
    def returns(self) -> NDArray[np.float64]:
        """Return of each episode, ``[episode]``."""
        return np.array([episode.total_return for episode in self.episodes])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Transitions of each episode, ``[episode]``."""
        return np.array([episode.length for episode in self.episodes], np.int64)

    @property
    def mean_return(self) -> float:
        """Mean return over the episodes."""
        return float(self.returns.mean())


def evaluate(
    policy: PolicyFn | None,
    create_env_fn: CreateEnv,
    *,
    episodes: int,
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    seed: int | None = None,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
    max_frames_per_traj: int | None = None,
    rename: Mapping[str | tuple[str, ...], str | tuple[str, ...]] | None = None,
) -> Evaluation:
    """Run exactly the ``episodes`` first-started episodes, whole, and report them.

    Taking the episodes that *end* first would favour short ones; these are those that start
    first, whichever lane runs them. Nothing is stored, and no training budget is touched: pass
    an id or a factory, so that the environment is not the one that training drives.

    Args:
        policy: as for :class:`SyncCollector`; None evaluates random actions.
        create_env_fn: as for :class:`SyncCollector`.
        episodes: how many.
        num_envs: lanes, with an id.
        env_kwargs: keyword arguments of ``gymnasium.make``, or of the system's own, with an id.
        seed: as for :class:`SyncCollector`; None draws a fresh one, which the ledger reports.
            Global generators are as before afterwards.
        exploration_type: by default actions are deterministic where the policy knows how.
        max_frames_per_traj: a time limit.
        rename: as for :class:`SyncCollector`.
    """
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    with (
        generators_restored(),
        SyncCollector(
            create_env_fn,
            policy,
            frames_per_batch=_FRAMES_PER_BATCH,
            total_episodes=episodes,
            num_envs=num_envs,
            env_kwargs=env_kwargs,
            seed=seed,
            exploration_type=exploration_type,
            max_frames_per_traj=max_frames_per_traj,
            rename=rename,
            finals="lost",  # nothing is computed from final observations
        ) as collector,
    ):
        for _ in collector:
            pass
    return Evaluation(list(collector.episodes), collector.ledger)
