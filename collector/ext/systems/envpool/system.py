"""EnvPool, whose lanes reset themselves in the step after an end, with either of its APIs.

With a ``batch_size`` below ``num_envs`` EnvPool is asynchronous: each call returns the
``batch_size`` lanes that are ready first.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.close import closing_on_error
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.gymnasium.info_system import InfoSystem
from tallyroll.collector.envs.gymnasium.infos import RESET_SLOT, InfoColumns
from tallyroll.collector.envs.gymnasium.spaces import Leaf, action_leaf, observation_leaves
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, SpaceError
from tallyroll.collector.ext.systems.envpool.qt import made_with_qt
from tallyroll.collector.ext.systems.envpool.spaces import cast, dm_getter, is_pool, true_space

Lanes = NDArray[np.int32] | slice
"""Lanes that a call returned. A slice means all lanes, in order."""


class EnvPoolResults:
    """Reader of the results of ``env``.

    EnvPool's dm API does not distinguish a time limit from a termination: the discount is 0 at
    both, except in dm_control's tasks. The reader therefore counts steps, so that both APIs give
    the same rows.
    """

    def __init__(self, env: Any, leaves: Sequence[Leaf], lanes: int) -> None:
        self._is_dm = hasattr(env, "observation_spec")
        self._leaves = [
            (dm_getter(leaf, env) if self._is_dm else leaf.getter(), leaf.dtype) for leaf in leaves
        ]
        self._limit = int(env.config.get("max_episode_steps", 0)) or np.iinfo(np.int64).max
        self._steps = np.zeros(lanes, np.int64)

    def begin(self, lanes: Mask | None) -> None:
        """Record a reset of the lanes of a mask, or of all lanes."""
        self._steps[... if lanes is None else lanes] = 0

    def values(self, made: Any) -> list[Any]:
        """Return the observations, in the declared dtypes."""
        observation = made.observation if self._is_dm else made[0]
        return [cast(get(observation), dtype) for get, dtype in self._leaves]

    def infos(self, made: Any) -> dict[str, Any]:
        """Return the infos; the dm API stores them among the observations."""
        return _fields(made.observation) if self._is_dm else made[-1]  # type: ignore[no-any-return]

    def lanes(self, made: Any) -> NDArray[np.int32]:
        """Return the lanes in a result."""
        ids = made.observation.env_id if self._is_dm else made[-1]["env_id"]
        lanes: NDArray[np.int32] = ids.astype(np.int32)
        return lanes

    def begins(self, made: Any) -> Mask:
        """Return a mask of the lanes that returned a first observation."""
        found: Mask = made.step_type == 0 if self._is_dm else made[-1]["elapsed_step"] == 0
        return found

    def step(self, made: Any, lanes: Lanes) -> Step:
        """Return the result of a step of ``lanes``."""
        values = self.values(made)
        if not self._is_dm:
            _, reward, terminated, truncated, info = made
            skipped = info["elapsed_step"] == 0
            return Step(values, (reward,), terminated, truncated, None, None, None, skipped)
        skipped = self.begins(made)
        last = made.step_type == 2
        steps = np.where(skipped, 0, self._steps[lanes] + 1)
        self._steps[lanes] = steps
        truncated = last & (steps >= self._limit)
        return Step(values, (made.reward,), last & ~truncated, truncated, skipped=skipped)


def _fields(state: Any) -> Any:
    if not hasattr(state, "_asdict"):
        return state
    return {name: _fields(value) for name, value in state._asdict().items()}


def put_lanes(
    infos: dict[str, Any], found: Mapping[str, Any], ids: NDArray[np.int32], lanes: int
) -> None:
    """Write ``found``, which has one row per entry of ``ids``, into ``infos`` ``[lane, ...]``."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            put_lanes(infos.setdefault(name, {}), value, ids, lanes)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (len(ids),):
            if name not in infos:
                infos[name] = np.zeros((lanes, *value.shape[1:]), value.dtype)
            infos[name][ids] = value


def with_infos(step: Step, columns: InfoColumns, infos: Mapping[str, Any], lanes: Lanes) -> Step:
    """Return ``step`` of ``lanes`` with the columns of its ``infos``."""
    rows, ended = columns.new_rows(), step.terminated | step.truncated
    if isinstance(lanes, slice):
        columns.write(rows, infos)
    else:
        of_all: dict[str, Any] = {}
        put_lanes(of_all, infos, lanes, len(columns.steps))
        stepped = np.zeros(len(columns.steps), np.bool_)
        stepped[lanes] = True
        columns.write(rows, of_all, stepped)
        rows = [row[lanes] for row in rows]
    columns.steps[lanes] = np.where(ended, RESET_SLOT, columns.steps[lanes] + 1)
    return step._replace(obs=[*step.obs, *rows])


_OF_RUN = {"num_envs", "seed", "env_seed"}
_ALL = slice(None)


class EnvPoolSystem(InfoSystem):
    """An EnvPool environment with the gymnasium API or the dm API.

    Args:
        env: the environment. The system closes it.

    Raises:
        EnvironmentRefused: the environment has several players, or a reset could not await all
            lanes.
        SpaceError: no column can hold a space.
    """

    package = "envpool"
    extra = "envpool"
    about = "a reset slot, which is not a row, follows an end; seeds when made; asynchronous"
    why_no_resets = "EnvPool accepts seeds only when it is made, and no options"

    def __init__(self, env: Any) -> None:
        self.env = env
        lanes = int(env.config["num_envs"])
        batch = int(env.config["batch_size"]) or lanes
        if lanes % batch:
            raise EnvironmentRefused(
                "EnvPool: expected num_envs to be a multiple of batch_size, got "
                f"num_envs={lanes} and batch_size={batch}"
            )
        if (players := env.config.get("max_num_players", 1)) != 1:
            raise EnvironmentRefused(f"expected one player per lane, got {players}")
        action = env.spec.gymnasium_action_space
        if isinstance(action, dict):
            raise SpaceError(f"expected one action per lane, got several: {sorted(action)}")
        leaves = observation_leaves(true_space(env.spec.gymnasium_observation_space), lanes)
        self._results = EnvPoolResults(env, leaves, lanes)
        taken = action_leaf(action, lanes)
        how = {} if batch == lanes else {"arrivals": batch, "resets": "all"}
        self._away = 0  # lanes that were sent and not received
        self._declare(leaves, taken, lanes, at_end="reset_slot", seeds="make", **how)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make an EnvPool task; ``kwargs`` are passed to ``envpool.make``.

        ``env_type`` in ``kwargs`` is ``"gymnasium"``, the default, or ``"dm"``.
        """
        if wrong := sorted(_OF_RUN & kwargs.keys()):
            raise ArgumentError(
                "env_kwargs: expected no arguments that the collector sets (num_envs, seed), got "
                f"{wrong}"
            )
        package = needs("envpool", "envpool")
        api = kwargs.pop("env_type", "gymnasium")
        more = kwargs if seeds is None else {**kwargs, "seed": list(seeds)}
        try:
            env = made_with_qt(name, partial(package.make, name, api, num_envs=lanes, **more))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise ArgumentError(
                f"envpool cannot make {name!r} with {kwargs} by its {api} API: {said}"
            ) from error
        with closing_on_error(env):
            return cls(env)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap an EnvPool environment; return None for other objects."""
        return cls(made) if is_pool(made) else None

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    @property
    def ticks(self) -> int | None:
        """The ``frame_skip`` of the configuration; 1 for tasks without one."""
        return int(self.env.config.get("frame_skip", 1))

    def describe(self) -> dict[str, Any]:
        """Return the kind of environment; EnvPool environments do not know their names."""
        return {"id": None, "type": type(self.env).__name__}

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Reset all lanes, or the lanes of a mask."""
        if options:
            raise ArgumentError(f"reset: expected no options for EnvPool, got {sorted(options)}")
        results = self._results
        results.begin(lanes)
        found = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
        infos: dict[str, Any] = {}
        for ids, made in self._begun(lanes):
            for row, value in zip(found, results.values(made), strict=True):
                row[ids] = value
            if self._looks:
                put_lanes(infos, results.infos(made), ids, self.declares.lanes)
        return [*found, *self._first_infos(infos, lanes)]

    def _begun(self, lanes: Mask | None) -> Iterator[tuple[NDArray[np.int32], Any]]:
        """Yield the lanes and the results of resets."""
        total, batch = self.declares.lanes, self.declares.arrivals
        if not batch:
            ids = np.flatnonzero(np.ones(total) if lanes is None else lanes).astype(np.int32)
            yield ids, self.env.reset(ids)
            return
        for _ in range(0, self._away, batch):
            self.env.recv()
        self._away = 0
        self.env.async_reset()
        for _ in range(0, total, batch):
            made = self.env.recv()
            if not self._results.begins(made).all():
                raise EnvironmentRefused(
                    "expected a new EnvPool, got one that was already stepped. Pass a new EnvPool, "
                    "or a factory."
                )
            yield self._results.lanes(made), made

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Step:
        """Step all lanes; EnvPool resets the lanes whose episode ended."""
        made = self.env.step(action[0])
        return self._step(made, _ALL) if self._infos else self._results.step(made, _ALL)

    def send(self, action: Sequence[NDArray[Any]], lanes: NDArray[np.int32]) -> None:
        """Begin a step of ``lanes``."""
        self._away += len(lanes)
        self.env.send(action[0], lanes)

    def recv(self) -> Step:
        """Receive the lanes that are ready first."""
        made = self.env.recv()
        self._away -= self.declares.arrivals
        lanes = self._results.lanes(made)
        return self._step(made, lanes)

    def _step(self, made: Any, lanes: Lanes) -> Step:
        step, infos = self._results.step(made, lanes), self._infos
        if lanes is not _ALL:
            step = step._replace(lanes=lanes)
        if not infos:
            return step
        step = with_infos(step, infos, self._results.infos(made), lanes)
        return self._without_masks(step, None if lanes is _ALL else lanes)
