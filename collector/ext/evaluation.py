"""Unbiased evaluation of a policy, outside of the training budget."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.batches.state.run_seeds import Environments
from tallyroll.collector.counting.episode_log import Episode
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.envs.setup.make import CreateEnv
from tallyroll.collector.envs.setup.statistics import load_frozen
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.policies.sb3_models import as_policy
from tallyroll.collector.policies.several.entries import Policies, each_of, without_openings
from tallyroll.collector.policies.trial import generators_restored
from tallyroll.collector.sync import SyncCollector
from tallyroll.collector.user_code import user_code
from tallyroll.storage.rows.pages import counted

_FRAMES_PER_BATCH = 4096


EnvState: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any] | None]


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    ``ledger`` counts the transitions that the evaluation executed.
    """

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
        with np.errstate(all="ignore"):  # infinite returns of both signs give NaN
            return float(self.returns.mean())

    def metrics(self) -> dict[str, float]:
        """Return metrics to log: ``episodes``, mean and spread of the returns, mean length.

        ``return_std`` is the standard deviation over the episodes. Without episodes, the means and
        the deviation are NaN.
        """
        count = len(self.episodes)
        return {
            "episodes": count,
            "return_mean": float(self.returns.mean()) if count else math.nan,
            "return_std": float(self.returns.std()) if count else math.nan,
            "length_mean": float(self.lengths.mean()) if count else math.nan,
        }

    def __repr__(self) -> str:
        return (
            f"Evaluation({counted(len(self.episodes), 'episode')}, mean return "
            f"{self.mean_return:.5g}, mean length {self.lengths.mean():.5g}, "
            f"{self.ledger.executed:,} transitions executed)"
        )


def evaluate(
    policy: Policies | None,
    create_env_fn: CreateEnv,
    *,
    episodes: int,
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    seed: int | None = None,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
    max_frames_per_traj: int | None = None,
    rename: Mapping[str | tuple[str, ...], str | tuple[str, ...]] | None = None,
    reward_dtype: torch.dtype | str | None = None,
    env_state: EnvState | None = None,
) -> Evaluation:
    """Run the first ``episodes`` episodes that start, each to its end, and return their statistics.

    Taking the episodes that *end* first would favour short ones. This function takes the episodes
    that start first, in any lane. It stores nothing and uses no training budget. Pass an id or a
    factory, so that the evaluation does not drive the training environment. During the evaluation,
    the policy's modules are in evaluation mode: dropout is off and BatchNorm uses its running
    statistics. Afterwards the function restores the modes and buffers.

    Args:
        policy: the policy to evaluate; see :class:`SyncCollector`. None evaluates random actions.
            If there are several policies, none of them starts with random actions.
        create_env_fn: the environment or its factory; see :class:`SyncCollector`.
        episodes: number of episodes.
        num_envs: number of lanes, if ``create_env_fn`` is an id or a function that makes a single
            environment. None means one lane.
        env_kwargs: keyword arguments of ``gymnasium.make``, or of the environment system, if
            ``create_env_fn`` is an id.
        seed: the seed of the evaluation; see :class:`SyncCollector`. None draws a seed, which the
            ledger reports. The function restores the global random generators afterwards.
        exploration_type: how the policy chooses actions. By default, actions are deterministic if
            the policy supports it.
        max_frames_per_traj: a time limit, in transitions.
        rename: new names of columns; see :class:`SyncCollector`.
        reward_dtype: the dtype of rewards; see :class:`Columns`. ``torch.float64`` sums rewards at
            full precision.
        env_state: ``collector.state_dict()["env"]``, or ``env.state_dict()``: the state of the
            environment's transforms, such as the statistics of `VecNorm`. The evaluation does not
            update it. If the state has an entry for each of several workers, the first non-empty
            entry applies. None keeps the state of a new environment.

    Raises:
        ArgumentError: ``env_state`` is not a state, or is the state of another environment.
    """
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    policy = without_openings(policy)
    with (
        user_code("evaluate"),
        generators_restored(),
        _as_it_was(each_of(policy)),
        _EvaluationRun(
            env_state,
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
            reward_dtype=reward_dtype,
            finals="lost",  # nothing is computed from final observations
        ) as collector,
    ):
        for _ in collector:
            pass
    return Evaluation(list(collector.episodes), collector.ledger)


class _EvaluationRun(SyncCollector):
    """Collector that loads ``env_state`` into the environment before the first reset."""

    def __init__(self, env_state: EnvState | None, *args: Any, **kwargs: Any) -> None:
        self._given = _one_of(env_state)
        super().__init__(*args, **kwargs)

    def _begin_run(self, lanes: int, envs: Environments) -> None:
        if self._given is not None:
            try:
                load_frozen(self.env, self._given)
            except (KeyError, RuntimeError) as error:
                raise ArgumentError(
                    "env_state: expected the state of an environment with the same transforms and "
                    f"number of lanes, got a different state ({error}). Give both environments the "
                    "same transforms and lanes."
                ) from error
        super()._begin_run(lanes, envs)


def _one_of(state: EnvState | None) -> Mapping[str, Any] | None:
    if state is None or isinstance(state, Mapping):
        return state
    if isinstance(state, Sequence) and not isinstance(state, str):
        return next((each for each in state if each), None)
    raise ArgumentError(
        f'env_state: expected collector.state_dict()["env"], got {type(state).__name__}'
    )


@contextmanager
def _as_it_was(policies: Sequence[Any]) -> Iterator[None]:
    """Put ``policies`` in evaluation mode; restore their modes and buffers on exit."""
    found = [each for one in policies if isinstance(each := as_policy(one), nn.Module)]
    modes = [(module, module.training) for each in found for module in each.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module, _ in modes
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if not is_lazy(buffer)
    ]
    for each in found:
        each.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
