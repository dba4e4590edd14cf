"""Several policies, each for some lanes, combined into one policy."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.joint import (
    Joint,
    Rows,
    Trial,
    named,
    naming,
    opening_of,
    put,
)
from tallyroll.collector.policies.several.lane_sets import LaneSet, in_words, lanes_of_each
from tallyroll.collector.policies.several.policy_part import PolicyPart, whose
from tallyroll.collector.policies.trial import settle_inputs, try_out
from tallyroll.collector.slab.slab import SlabColumns
from tallyroll.storage.rows.keys import POLICY_VERSION, RANDOM_VERSION, Key


class JointByLane(Joint):
    """Policies that each act in some lanes, and are called with only these lanes.

    Args:
        parts: the policies.
        sets: the lanes of each policy, in any form that a user may pass.
    """

    def __init__(self, parts: Sequence[PolicyPart], sets: Sequence[LaneSet]) -> None:
        super().__init__(parts)
        self.sets = list(sets)
        self.lanes: list[tuple[int, ...]] = []
        """The lanes of each policy, numbered over the run."""
        self.of_lane: NDArray[np.int64] = np.zeros(0, np.int64)
        """The number of the policy of each lane of the environment ``[lane]``."""
        self.rows: list[Rows | None] = []
        """For each part, its rows in the environment's TensorDicts; None if it has none."""

    def bind_like(self, other: Self) -> None:
        """Act in the same lanes as ``other``."""
        self.lanes, self.of_lane, self.rows = other.lanes, other.of_lane, other.rows

    @property
    def _more(self) -> tuple[Any, ...]:
        return (self.sets,)

    def bind(self, own: range, lanes: int) -> None:
        """Act for the lanes ``own`` of a run that has ``lanes`` lanes.

        Raises:
            ArgumentError: a lane has no policy, or has two.
        """
        self.lanes = lanes_of_each(self.sets, lanes)
        of_lane = np.zeros(lanes, np.int64)
        for number, of_it in enumerate(self.lanes):
            of_lane[list(of_it)] = number
        self.of_lane = of_lane[own.start : own.stop]
        self.rows = []
        for number in range(len(self.parts)):
            rows = np.flatnonzero(self.of_lane == number)
            if not len(rows):
                self.rows.append(None)
            elif rows[-1] - rows[0] + 1 == len(rows):
                self.rows.append(slice(int(rows[0]), int(rows[-1]) + 1))
            else:
                self.rows.append(torch.from_numpy(rows))

    @property
    def described(self) -> list[dict[str, Any]]:
        """Description of the policies for a manifest."""
        return [
            {"id": part.id, "lanes": in_words(lanes), "policy": named(part)} | opening_of(part)
            for part, lanes in zip(self.parts, self.lanes, strict=True)
        ]

    @property
    def version_columns(self) -> list[Key]:
        """The version column of each part, which is the same for all."""
        return [POLICY_VERSION] * len(self.parts)

    def row_versions(self, version: int) -> NDArray[np.int64]:
        """Return the version of each lane's policy; -1 in lanes without a policy."""
        versions = np.where(self._draws, RANDOM_VERSION, self.versions.cpu().numpy())
        return versions[self.of_lane]

    @property
    def acts_in(self) -> Mask:
        """Marks ``[part, lane]`` of the lanes in which each part acts."""
        found: Mask = np.arange(len(self.parts))[:, None] == self.of_lane
        return found

    def rows_of(self, drawn: Mask, version: int) -> tuple[Mask, Any]:
        """Return the lanes ``[lane]`` that act at random, and the version of each lane's row."""
        lanes: Mask = np.logical_or.reduce(drawn, axis=0)
        return lanes, np.where(lanes, RANDOM_VERSION, self.row_versions(version))

    def of_key(self, key: Key, random_lanes: Mask) -> Mask:
        """Return all of ``random_lanes``, because the policy of a lane writes all its columns."""
        return random_lanes

    def _tried(
        self, number: int, part: PolicyPart, policy: Policy, trial: Trial
    ) -> tuple[SlabColumns, Mapping[Key, int]]:
        """Try out a policy, even if it only acts in lanes of other workers."""
        own = self.rows[number]
        rows: Rows = slice(0, 1) if own is None else own
        some, specs = trial.td, trial.env.full_action_spec
        if trial.lead:
            some, specs = some[rows], specs[rows]
        acted = SimpleNamespace(full_action_spec=specs, batch_size=some.batch_size)
        with naming(f"{whose(part.id)}, of the lanes {in_words(self.lanes[number])}"):
            settle_inputs(policy, some, acted, trial.observations)
            return try_out(policy, some, acted, strict=trial.strict), policy.batch_dims

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return the output of the policies, each in its lanes, and zeros elsewhere."""
        out, idle, self._idle = self._empty(td), self._idle, None
        for number, (part, rows) in enumerate(zip(self.parts, self.rows, strict=True)):
            if part.policy is None:
                found = part.at_random(td)
                if rows is not None and td.batch_size:
                    found = {key: value[rows] for key, value in found.items()}
            elif rows is None or (idle is not None and idle[number]):
                continue
            else:
                found = part(td[rows] if td.batch_size else td)
            if rows is not None:
                put(part, out, rows if td.batch_size else None, found)
        return out
