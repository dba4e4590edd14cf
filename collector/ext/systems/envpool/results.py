"""Results of EnvPool's resets and steps, in either of its APIs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.gymnasium.infos import RESET_SLOT, InfoColumns
from tallyroll.collector.envs.gymnasium.spaces import Leaf
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.ext.systems.envpool.spaces import cast, dm_getter

Lanes = NDArray[np.int32] | slice
"""Lanes that came back; a slice: all of them, in order."""


class Results:
    """A reader of the results of ``env``.

    Its dm API does not tell a time limit from a termination (the discount is 0 at both, but for
    dm_control's tasks), so steps are counted here, and both APIs give the same rows.
    """

    def __init__(self, env: Any, leaves: Sequence[Leaf], lanes: int) -> None:
        self._is_dm = hasattr(env, "observation_spec")
        self._leaves = [
            (dm_getter(leaf, env) if self._is_dm else leaf.getter(), leaf.dtype) for leaf in leaves
        ]
        self._limit = int(env.config.get("max_episode_steps", 0)) or np.iinfo(np.int64).max
        self._steps = np.zeros(lanes, np.int64)

    def begin(self, lanes: Mask | None) -> None:
        """Note a reset of the lanes of a mask, or of all."""
        self._steps[... if lanes is None else lanes] = 0

    def values(self, made: Any) -> list[Any]:
        """Return the observations, in the declared dtypes."""
        observation = made.observation if self._is_dm else made[0]
        return [cast(get(observation), dtype) for get, dtype in self._leaves]

    def infos(self, made: Any) -> dict[str, Any]:
        """Return the infos; the dm API has them among the observations."""
        return _fields(made.observation) if self._is_dm else made[-1]  # type: ignore[no-any-return]

    def lanes(self, made: Any) -> NDArray[np.int32]:
        """The lanes that came back."""
        ids = made.observation.env_id if self._is_dm else made[-1]["env_id"]
        lanes: NDArray[np.int32] = ids.astype(np.int32)
        return lanes

    def begins(self, made: Any) -> Mask:
        """Return marks of the lanes that returned a first observation."""
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
    """Put ``found``, which has a row for each of ``ids``, into ``infos`` ``[lane, ...]``."""
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
