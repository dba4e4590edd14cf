"""Recorder, which stores the transitions of a user's own training loop."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import DTypeLike

from tallyroll.collector.batches.collect_guard import add_end_note
from tallyroll.collector.batches.stored.resume import Resume
from tallyroll.collector.batches.stored.writer import StorageLike
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.calls.objects import own_attribute
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.ext.recorder.recorded_env import (
    RecordedEnv,
    recorded_env,
    recorded_vector,
)
from tallyroll.collector.ext.recorder.recorded_run import RecordedRun
from tallyroll.collector.options import Options
from tallyroll.collector.options.checks import one_of, positive, refuse_unknown
from tallyroll.collector.options.objects import MoreOptions
from tallyroll.collector.slab.slab import SlabColumn
from tallyroll.collector.sync import SyncCollector
from tallyroll.storage.rows.dtypes import TORCH

if TYPE_CHECKING:
    from tallyroll.collector.ext.recorder.manual_recorder import ManualRecorder

AtEnd = Literal["pass", "raise"]
_KEYWORDS = frozenset(
    ("info_keys", "rename", "frame_skip", "reward_dtype", "exclude", "validate", "finals")
)


class Recorder:
    """Environment wrapper that stores each transition of your own training loop.

    Examples:
        >>> import gymnasium
        >>> from tallyroll.collector import Recorder
        >>> from tallyroll.storage import MemmapStorage
        >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        >>> with MemmapStorage() as rows, Recorder(envs, storage=rows, total_frames=25) as envs:
        ...     obs, info = envs.reset(seed=0)
        ...     while not envs.full:
        ...         obs, reward, ended, cut, info = envs.step(envs.action_space.sample())
        ...     print(envs.ledger.stored)
        25

    The recorder returns the objects that the environment returns, and never steps, seeds or resets
    on its own. It stores the results of the wrappers that it wraps, and does not see wrappers
    around it. Columns have the same names as those of a `SyncCollector`. A reset in the middle of
    an episode cuts its trajectory, and never marks it as truncated.

    An instance is also a wrapper of the library of ``env``, such as a
    `gymnasium.vector.VectorWrapper`. All rows are committed at the end of its ``with`` block, or of
    the program. A kill loses at most ``commit_every`` steps.

    Args:
        env: a Gymnasium environment, a Gymnasium vector in any autoreset mode, a `VecEnv` of
            Stable-Baselines3, or a `ParallelEnv` of PettingZoo, whose rows are joint transitions.
        storage: a Tallyroll storage, or a path for a new one, as for `SyncCollector`.
        total_frames: number of transitions to store; None: no limit. If the last step has more
            lanes than transitions are missing, its first lanes are stored and the others are
            discarded.
        resume: True to continue the last run in ``storage``, with its counts, trajectory ids and
            budget; ``"auto"`` begins a run if there is none.
        commit_every: number of steps of all lanes between two commits. The recorder may commit
            earlier, if rows are large, a reset cuts a trajectory, or the run is nearly full.
        at_end: behavior of steps after ``total_frames``: ``"pass"`` steps the environment without
            storing anything, ``"raise"`` raises `StateError`.
        columns: additional columns, name -> dtype, whose values :meth:`annotate` sets before each
            step. For an array in each row, give a dtype with a shape, such as
            ``np.dtype((np.float32, (4,)))``.
        more: options of `SyncCollector`: ``info_keys``, ``rename``, ``frame_skip``,
            ``reward_dtype``, ``exclude``, ``validate`` and ``finals``. With ``info_keys``, a vector
            merges infos of these names without Gymnasium's casts.

    Raises:
        ArgumentError, EnvironmentRefused, StorageError: an argument is wrong, or the environment or
            the storage cannot be used. No file has changed.
        StateError: a step comes before the first reset, after an exception, while a lane waits for
            a reset, without its annotations, or after :meth:`close`.
    """

    _keywords: ClassVar[frozenset[str]] = _KEYWORDS
    env: Any
    """The environment, in recorders that are wrappers of its library."""

    def __new__(cls, env: Any, **_: Any) -> Self:
        """Choose the class for the library of ``env``."""
        kind = cls if cls is not Recorder else _kind_of(env)
        made: Self = super().__new__(kind)
        return made

    def __init__(
        self,
        env: Any,
        *,
        storage: StorageLike,
        total_frames: int | None = None,
        resume: Resume = False,
        commit_every: int = 64,
        at_end: AtEnd = "pass",
        columns: Mapping[str, DTypeLike] | None = None,
        **more: Unpack[MoreOptions],
    ) -> None:
        refuse_unknown(more, self._keywords, "Recorder")
        one_of("at_end", at_end, AtEnd)
        commit_every = positive("commit_every", commit_every)
        if storage is None:
            raise ArgumentError("storage: expected a storage or a path, got None")
        super().__init__(env)  # type: ignore[call-arg]  # of the library's wrapper
        options = _options(storage, total_frames, commit_every * _lanes_of(env), more)
        self._at_end = at_end
        self._run = RecordedRun(
            self._recorded_env(env, options),
            options,
            storage=storage,
            resume=resume,
            commit_every=commit_every,
            annotations=_annotations(columns or {}),
        )
        self._finish = weakref.finalize(self, self._run.finish)
        # At exit, finalizers run after storages have closed, but this function runs before that.
        atexit.register(self._finish)

    @staticmethod
    def manual(
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        lanes: int | None = None,
        *,
        storage: StorageLike,
        total_frames: int | None = None,
        resume: Resume = False,
        commit_every: int = 64,
        at_end: AtEnd = "pass",
        columns: Mapping[str, DTypeLike] | None = None,
        **more: Unpack[MoreOptions],
    ) -> ManualRecorder:
        """Return a recorder for a loop without an environment, which passes each transition.

        Its method ``add(obs, action, reward, next_obs, terminated, truncated)`` records one
        transition of each lane.

        Examples:
            >>> import numpy as np
            >>> from gymnasium.spaces import Box, Discrete
            >>> from tallyroll.collector import Recorder
            >>> from tallyroll.storage import MemmapStorage
            >>> rows = MemmapStorage()
            >>> with Recorder.manual(Box(-1, 1, (2,)), Discrete(3), storage=rows) as recorder:
            ...     obs = np.zeros(2, np.float32)
            ...     for step in range(5):
            ...         next_obs = obs + np.float32(0.1)
            ...         recorder.add(obs, 1, 0.5, next_obs, step == 4, False)
            ...         obs = next_obs
            >>> rows[:]["collector", "step"].tolist()
            [0, 1, 2, 3, 4]

        A lane's trajectory continues if ``obs`` has the same bits as its last ``next_obs``.
        Otherwise the trajectory is cut, and never marked as truncated.

        Args:
            observation_space: space of a lane's observations.
            action_space: space of a lane's actions.
            lanes: number of lanes; None: one lane, and no argument of ``add`` has a dimension of
                lanes.
            storage: as for `Recorder`, as are all further arguments, except that there are no
                ``info_keys``.
            total_frames: number of transitions to store.
            resume: True to continue the last run in ``storage``.
            commit_every: number of calls of ``add`` between two commits.
            at_end: behavior of calls of ``add`` after ``total_frames``: ``"pass"`` ignores them,
                ``"raise"`` raises `StateError`.
            columns: additional columns, whose values :meth:`annotate` sets before each call.
            more: options of `SyncCollector`.
        """
        from tallyroll.collector.ext.recorder.manual_recorder import ManualRecorder, ManualSystem

        return ManualRecorder(
            ManualSystem(observation_space, action_space, lanes),
            storage=storage,
            total_frames=total_frames,
            resume=resume,
            commit_every=commit_every,
            at_end=at_end,
            columns=columns,
            **more,
        )

    # --- the run ----------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """True if ``total_frames`` transitions are stored. Later steps are not recorded."""
        return self._run.is_full

    @property
    def ledger(self) -> Ledger:
        """Snapshot of the balanced counts of the run, up to the last commit."""
        return self._run.ledger

    @property
    def episodes(self) -> EpisodeLog:
        """Finished episodes among the committed rows, the newest last."""
        return self._run.episodes

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose the next actions, stored with each row; -1 at first.

        Assign it after each update of the weights.
        """
        return self._run.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._run.version = version

    def annotate(self, **values: Any) -> None:
        """Set the values of ``columns`` for the next step.

        Args:
            values: an array ``[lane, ...]`` for each column, or ``[...]`` for a single environment.

        Raises:
            ArgumentError: ``columns`` does not have the name, or has it with another shape or
                dtype.
        """
        if not self._run.is_full:
            self._run.annotate(values)

    def commit(self) -> int:
        """Commit the rows of all steps so far. Return the number of newly committed rows."""
        return self._run.commit()

    def close(self, **kwargs: Any) -> None:
        """Commit, release the storage, and close the environment. Idempotent."""
        try:
            self._finish()
        finally:
            atexit.unregister(self._finish)
            super().close(**kwargs)  # type: ignore[misc]  # of the library's wrapper

    def __enter__(self) -> Self:
        """Return the recorder, which the end of the block closes."""
        return self

    def __exit__(self, *raised: Any) -> Any:
        """Close. If the block raised an error, add errors of closing to it as a note."""
        try:
            self.close()
        except Exception as again:
            if raised[1] is None:
                raise
            add_end_note(raised[1], again)
        return False

    def _recorded_env(self, env: Any, options: Options) -> RecordedEnv:
        """Return the `RecordedEnv` of ``env``."""
        raise NotImplementedError

    def _passes(self) -> bool:
        """Return True if the run is full, so that a step is passed on without being recorded.

        Raises:
            StateError: ``at_end="raise"``.
        """
        if not self._run.is_full or self._run.is_closed:
            return False
        if self._at_end == "raise":
            raise StateError(
                f"step: all {self.ledger.stored:,} transitions of the run are stored already. End "
                'the loop when `full` is True, or pass at_end="pass".'
            )
        return True

    def _step_env(self, action: Any) -> Any:
        """Step the environment, and record its transitions."""
        run = self._run
        if run.is_full and self._passes():
            return self.env.step(action)
        run.before_step(action)
        try:
            returned = self.env.step(action)
        except BaseException as error:
            self._commit_before(error)
            raise
        run.after_step(returned)
        return returned

    def _reset_env(self, seed: Any, options: dict[str, Any] | None) -> Any:
        """Reset the environment, or some of its lanes, and cut running episodes."""
        if self._run.is_full:
            return self.env.reset(seed=seed, options=options)
        mask = self._mask_in(options)
        self._run.before_reset(mask)
        try:
            returned = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            self._commit_before(error)
            raise
        self._run.after_reset(returned, mask)
        return returned

    def _mask_in(self, options: Mapping[str, Any] | None) -> Mask | None:
        """Return the mask of the lanes that a reset resets; None if it resets all."""
        return None

    def _commit_before(self, error: BaseException) -> None:
        """Commit the rows before a step or reset in which the environment raised ``error``."""
        try:
            self._run.commit()
        except Exception as again:  # noqa: BLE001  `error` is raised
            add_end_note(error, again)


class EnvRecorder(Recorder, gymnasium.Wrapper[Any, Any, Any, Any]):
    """`Recorder` of a single Gymnasium environment."""

    def _recorded_env(self, env: Any, options: Options) -> RecordedEnv:
        return recorded_env(env, options)

    def step(self, action: Any) -> Any:
        """Step the environment, and record the transition."""
        return self._step_env(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment, and cut a running episode."""
        return self._reset_env(seed, options)


class VectorRecorder(Recorder, VectorWrapper[Any, Any, Any, Any, Any]):
    """`Recorder` of a Gymnasium vector."""

    def _recorded_env(self, env: Any, options: Options) -> RecordedEnv:
        return recorded_vector(env, options)

    def step(self, actions: Any) -> Any:
        """Step all lanes, and record their transitions."""
        return self._step_env(actions)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Reset all lanes, or the lanes of ``options["reset_mask"]``, and cut running episodes."""
        return self._reset_env(seed, options)

    def _mask_in(self, options: Mapping[str, Any] | None) -> Mask | None:
        """Return a copy of the reset mask, because Gymnasium removes it from ``options``."""
        if options is None or "reset_mask" not in options:
            return None
        mask = np.array(options["reset_mask"])
        if mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ArgumentError(
                f"reset_mask: expected bools of shape [{self.num_envs}], got {mask.dtype} of shape "
                f"{list(mask.shape)}. Pass one bool for each lane."
            )
        return mask


def _kind_of(env: Any) -> Any:
    """Return the class of recorder for the library of ``env``.

    Raises:
        ArgumentError: no recorder supports ``env``, or ``env`` contains a recorder already.
    """
    if any(isinstance(each, Recorder) for each in _chain(env)):
        raise ArgumentError(
            f"env: expected an environment without a recorder, got {type(env).__name__}, in which "
            "there is a Recorder already. Wrap it once."
        )
    if isinstance(env, VectorEnv):
        return VectorRecorder
    if isinstance(env, gymnasium.Env):
        return EnvRecorder
    package = sys.modules.get("stable_baselines3.common.vec_env.base_vec_env")
    if package is not None and isinstance(env, package.VecEnv):
        from tallyroll.collector.ext.recorder.sb3_recorder import Sb3Recorder

        return Sb3Recorder
    package = sys.modules.get("pettingzoo.utils.env")
    if package is not None and isinstance(env, package.ParallelEnv):
        from tallyroll.collector.ext.recorder.parallel_recorder import ParallelRecorder

        return ParallelRecorder
    raise ArgumentError(
        "env: expected a Gymnasium environment, a Gymnasium vector, a VecEnv or a ParallelEnv, got "
        f"{type(env).__name__}. SyncCollector drives environments of other libraries."
    )


def _chain(env: Any) -> Iterable[Any]:
    """Yield ``env`` and its inner environments, outermost first."""
    while env is not None:
        yield env
        inner = own_attribute(env, "env")
        env = own_attribute(env, "venv") if inner is None else inner


def _lanes_of(env: Any) -> int:
    return int(getattr(env, "num_envs", 1))


def _options(
    storage: StorageLike, total_frames: int | None, frames_per_batch: int, more: Mapping[str, Any]
) -> Options:
    """Return the options of a collector that has the arguments of a recorder."""
    from inspect import signature

    bound = signature(SyncCollector).bind(
        None,
        frames_per_batch=frames_per_batch,
        total_frames=-1 if total_frames is None else total_frames,
        storage=storage,
        **more,
    )
    bound.apply_defaults()
    return Options.of(bound.arguments)


def _annotations(columns: Mapping[str, DTypeLike]) -> dict[str, SlabColumn]:
    """Return the dtype and shape of each of ``columns``.

    Raises:
        ArgumentError: columns of such a dtype do not exist.
    """
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
        raise ArgumentError(
            f"columns: expected dtypes by name, got {columns!r:.100}. Write "
            'columns={"logp": np.float32}.'
        )
    found = {}
    for name, given in columns.items():
        try:
            dtype = np.dtype(given)
            found[name] = SlabColumn(TORCH[dtype.base], dtype.shape)
        except (TypeError, KeyError) as error:
            raise ArgumentError(
                f"columns: expected a dtype of numbers for {name!r}, got {given!r}. Write "
                'columns={"logp": np.float32}.'
            ) from error
    return found
