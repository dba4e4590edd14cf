"""Observation columns that are filled lane by lane, and final observations in SAME_STEP mode."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from tallyroll.collector.compat import own_observations
from tallyroll.collector.envs.gymnasium.lane_values import part_of, row_of
from tallyroll.collector.envs.gymnasium.spaces import Leaf
from tallyroll.collector.envs.probes.probe import overwrites_itself, single_env
from tallyroll.collector.envs.probes.reuse import share_memory
from tallyroll.collector.envs.probes.trial_env import distinct
from tallyroll.collector.errors import EnvironmentRefused

Rows = list[NDArray[Any]]


class LaneRows:
    """Converts observations to columns ``[lane, ...]``, one for each leaf of the space."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self._getters = [leaf.getter() for leaf in leaves]
        self._exact = [row_of(leaf) for leaf in leaves]

    def values(self, obs: Any) -> Rows:
        """Return the columns of a vector's observation."""
        return [get(obs) for get in self._getters]

    def new(self) -> Rows:
        """Return columns of zeros."""
        return [np.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def put(self, rows: Rows, lane: int, obs: Any, *, first: bool = False) -> None:
        """Write the observation of one lane. ``first`` is True if a reset returned it."""
        for row, get, exact in zip(rows, self._getters, self._exact, strict=True):
            value = part_of(get, obs, exact, lane, first=first)
            row[lane] = exact.of_lane(lane, value, first=first)

    def put_all(self, rows: Rows, seen: Sequence[Any]) -> None:
        """Write the observations of all lanes."""
        for row, get, exact in zip(rows, self._getters, self._exact, strict=True):
            right = exact.is_right
            for lane, (obs, _) in enumerate(zip(seen, row, strict=True)):
                try:
                    value = get(obs)
                except (KeyError, IndexError, TypeError):
                    value = part_of(get, obs, exact, lane)
                row[lane] = value if right(value) else exact.of_lane(lane, value)

    def refuse_overwritten(self, lane: int, final: Any, first: Any) -> None:
        """Raise if a reset returned ``first`` in the memory of the lane's final observation.

        Raises:
            EnvironmentRefused: the two observations share memory.
        """
        for get, exact in zip(self._getters, self._exact, strict=True):
            _refuse_reused(lane, get(final), part_of(get, first, exact, lane))

    def finals(
        self, env: VectorEnv, ended: NDArray[np.bool_], obs: Any, given: Any, there: Any = None
    ) -> Rows:
        """Return the final observations in ``given``, after a step that returned ``obs``.

        ``there`` marks the lanes with a final observation in ``given``. None marks all lanes that
        ended.

        Raises:
            EnvironmentRefused: first observations overwrote the final ones.
            ValueRefused: a lane that ended lacks its final observation or a part of it.
        """
        rows = self.new()
        held = own_observations(env)
        of_lanes = type(given) is np.ndarray or not isinstance(given, Mapping)
        for lane in ended.nonzero()[0].tolist():
            final = given[lane] if of_lanes else None
            lacks = (of_lanes and final is None) or not (there is None or there[lane])
            for row, get, exact in zip(rows, self._getters, self._exact, strict=True):
                if lacks:
                    refused = exact.refused(
                        "none in the infos of the step",
                        first=False,
                        advice="store it in final_obs of the infos before the vector resets a lane",
                    )
                    raise refused.locate(lane=lane)
                part = part_of(get, final if of_lanes else given, exact, lane)
                value = part if of_lanes else part[lane]
                _refuse_reused(lane, value, get(held[lane]) if held else get(obs)[lane])
                row[lane] = exact.of_lane(lane, value)
        return rows


def _refuse_reused(lane: int, final: Any, first: Any) -> None:
    """Raise if a lane's final observation shares memory with its next first observation.

    This happens if a lane returns the same array each time, or if the final observations of a
    vector are views of its observations.
    """
    if isinstance(final, np.ndarray) and share_memory(first, final):
        raise EnvironmentRefused(
            f"lane {lane} returns its observations in one array that it overwrites, so in "
            "SAME_STEP mode the final observation is lost before the step returns. Use "
            "NEXT_STEP or DISABLED, or return copies."
        )


def refuse_overwriting(env: VectorEnv, names: Sequence[str]) -> None:
    """Raise if the observations of a lane do not survive a step and a reset in one call.

    ``names`` are the info entries that become columns.
    """
    holder = vector_of_lanes(env)
    if holder is None:
        return  # `LaneRows.finals` checks its final observations
    sync = isinstance(holder, SyncVectorEnv)
    child = partial(single_env, names=() if sync else names)
    for index in distinct(holder.env_fns):
        if overwrites_itself(holder.env_fns[index], child, warn=not sync):
            raise EnvironmentRefused(
                f"environment {index} of {type(holder).__name__} returns its observations in "
                "one array that it overwrites. In SAME_STEP mode, one call steps and resets the "
                "environment, so the final observation is lost. Use NEXT_STEP or DISABLED, or "
                "return copies."
            )


def vector_of_lanes(vector: VectorEnv) -> Any:
    """Return the vector inside ``vector`` that has ``env_fns``; None if there is none."""
    inner: Any = vector.unwrapped
    for _ in range(4):
        if getattr(inner, "env_fns", None):
            return inner
        held = [each for each in vars(inner).values() if isinstance(each, VectorEnv)]
        if len(held) != 1:
            return None
        inner = held[0].unwrapped
    return None
