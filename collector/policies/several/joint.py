"""Several policies as one, from TensorDict to TensorDict: each is called alone on its rows."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import Composite
from torchrl.envs import EnvBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import ArgumentError, PolicyError
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import MASK_NAME, action_keys
from tallyroll.collector.policies.several.entries import (
    OnePolicy,
    device_of,
    group_entries,
    lane_entries,
)
from tallyroll.collector.policies.several.lane_sets import LaneSet, in_words, lanes_of_each
from tallyroll.collector.policies.several.part import Part, PolicyId
from tallyroll.collector.policies.trial import settle_inputs, try_out
from tallyroll.collector.slab.slab import SlabColumn, SlabColumns
from tallyroll.storage.package.near_names import did_you_mean
from tallyroll.storage.rows.keys import POLICY_VERSIONS, RANDOM_VERSION, Key, as_key, spell

Rows = slice | torch.Tensor


class Joint(nn.Module):
    """Several policies as one module, so that their weights go where those of one go.

    Args:
        parts: the policies.
    """

    versions: torch.Tensor
    """``[part]``: numbers of updates of the weights of each, which travel with the weights."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = list(parts)
        modules = {str(at): part.module for at, part in enumerate(parts)}
        self.policies = nn.ModuleDict({k: m for k, m in modules.items() if m is not None})
        self.register_buffer("versions", torch.zeros(len(parts), dtype=torch.int64))
        self.columns: dict[Key, SlabColumn] = {}
        """The columns that any part writes, the actions among them, of one lane."""
        self.batch_dims: dict[Key, int] = {}

    @abstractmethod
    def bind(self, own: range, lanes: int) -> None:
        """Act for the lanes ``own`` of ``lanes`` that the run has.

        Raises:
            ArgumentError: some lane has no policy, or two.
        """

    @property
    @abstractmethod
    def described(self) -> list[dict[str, Any]]:
        """The policies, for a manifest."""

    @abstractmethod
    def leave_out(self, random_lanes: Mask) -> None:
        """Call no policy all of whose lanes act at random, in the next call."""

    @abstractmethod
    def remade(self, parts: Sequence[Part]) -> Self:
        """Return such a module of other ``parts``."""

    def placed(self, device: torch.device | None, env_device: torch.device | None) -> Self:
        """Return one whose policies run on ``device``, or on devices of their own."""
        made = self.remade([_placed(part, device, env_device) for part in self.parts])
        made.versions.copy_(self.versions)
        return made

    def __deepcopy__(self, memo: Any) -> Self:
        """Copy the policies alone: they refer to the environment."""
        made = self.remade([part.copied() for part in self.parts])
        made.columns, made.batch_dims = self.columns, self.batch_dims
        made.versions.copy_(self.versions)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as what callers gave, with the weights of now."""
        given = [_given(part) for part in self.parts]
        return _arrived, (type(self), given, self._more, self.versions)

    @property
    def _more(self) -> tuple[Any, ...]:
        """The arguments beside its parts."""
        return ()

    def seed(self, seed: int, incarnation: int, worker: int | None, *, own: bool) -> None:
        """Begin the streams of random numbers of each part."""
        for number, part in enumerate(self.parts):
            part.seed(seed, incarnation, number, worker, own=own)

    def passes(self) -> None:
        """Pass over a slot in which no lane here is stepped, and elsewhere some are."""
        for part in self.parts:
            if part.random is not None:
                part.random.take(1)

    # --- the trial --------------------------------------------------------------------------------

    @abstractmethod
    def try_parts(
        self,
        td: TensorDictBase,
        env: EnvBase,
        observations: Collection[Key],
        *,
        lanes: int,
        first: int,
        strict: bool,
    ) -> list[str]:
        """Try each policy out on its rows of ``td``, and learn what all of them write.

        Args:
            td: the result of a reset of ``env``.
            env: whose lanes begin with ``first`` of the ``lanes`` of the run.
            observations: those of ``env`` that policies may be given.
            strict: as of `try_out`.

        Returns:
            Notes for users of the rows.
        """

    def _add(self, part: Part, columns: SlabColumns, dims: Mapping[Key, int]) -> None:
        for key, column in columns.items():
            if self.columns.setdefault(key, column) != column:
                raise PolicyError(
                    f"policy {part.id}: {spell(key)} is {column}, and {self.columns[key]} of "
                    "another policy; let them write the same, or another name"
                )
        self.batch_dims |= dims

    def _add_actions(self, env: EnvBase) -> None:
        """Let every action be a column as ``env`` declares it, also where no policy acts."""
        lead = len(env.batch_size)
        for key, spec in env.full_action_spec.items(True, True):
            self.columns[as_key(key)] = SlabColumn(spec.dtype, tuple(spec.shape[lead:]))

    def _empty(self, td: TensorDictBase) -> TensorDict:
        """A TensorDict of zeros for all that any part writes."""
        batch = td.batch_size
        out = TensorDict({}, batch)
        for level in sorted(self.batch_dims, key=len):
            shape = next(c.shape for key, c in self.columns.items() if key[: len(level)] == level)
            out.set(level, TensorDict({}, (*batch, *shape[: self.batch_dims[level]])))
        for key, column in self.columns.items():
            out.set(key, torch.zeros((*batch, *column.shape), dtype=column.dtype, device=td.device))
        return out


class JointByLane(Joint):
    """Policies of which each acts in some lanes.

    Args:
        parts: the policies.
        sets: the lanes of each, as callers name them.
    """

    def __init__(self, parts: Sequence[Part], sets: Sequence[LaneSet]) -> None:
        super().__init__(parts)
        self.sets = list(sets)
        self.lanes: list[tuple[int, ...]] = []
        """The lanes of each policy, in the run."""
        self.of_lane: NDArray[np.int64] = np.zeros(0, np.int64)
        """``[lane]``, the policy of each lane of the environment."""
        self.rows: list[Rows | None] = []
        """``[part]``: its rows of the TensorDicts of the environment; None: it has none there."""
        self._idle: Mask | None = None
        self._random = np.array([part.policy is None for part in parts])

    def remade(self, parts: Sequence[Part]) -> "JointByLane":
        """Return such a module of other ``parts``."""
        made = type(self)(parts, self.sets)
        made.lanes, made.of_lane, made.rows = self.lanes, self.of_lane, self.rows
        return made

    @property
    def _more(self) -> tuple[Any, ...]:
        return (self.sets,)

    def bind(self, own: range, lanes: int) -> None:
        """Act for the lanes ``own`` of ``lanes`` that the run has.

        Raises:
            ArgumentError: some lane has no policy, or two.
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
        """The policies, for a manifest."""
        return [
            {"id": part.id, "lanes": in_words(lanes), "policy": _named(part)}
            | ({"init_random_frames": part.opening} if part.opening else {})
            for part, lanes in zip(self.parts, self.lanes, strict=True)
        ]

    @property
    def row_versions(self) -> NDArray[np.int64]:
        """``[lane]``: the version of the policy that acts; -1 in lanes without one."""
        versions = np.where(self._random, RANDOM_VERSION, self.versions.cpu().numpy())
        return versions[self.of_lane]

    def leave_out(self, random_lanes: Mask) -> None:
        """Call no policy all of whose lanes act at random, in the next call."""
        self._idle = np.array(
            [bool(random_lanes[self.of_lane == at].all()) for at in range(len(self.parts))]
        )

    def try_parts(
        self,
        td: TensorDictBase,
        env: EnvBase,
        observations: Collection[Key],
        *,
        lanes: int,
        first: int,
        strict: bool,
    ) -> list[str]:
        """Try each policy out, here also one that acts in lanes of other workers alone."""
        notes: list[str] = []
        lead = len(env.batch_size)
        for part, own in zip(self.parts, self.rows, strict=True):
            part.draws_for(env, lanes, first)
            if (policy := part.policy) is None:
                continue
            rows: Rows = slice(0, 1) if own is None else own
            some, specs = td, env.full_action_spec
            if lead:
                some, specs = td[rows], specs[rows]
            acted = SimpleNamespace(full_action_spec=specs, batch_size=some.batch_size)
            with _naming(f"policy {part.id}, of the lanes {in_words(self._of(part))}"):
                settle_inputs(policy, some, acted, observations)
                found = try_out(policy, some, acted, strict=strict)
            notes += [f"policy {part.id}: {note}" for note in policy.notes]
            self._add(part, found, policy.batch_dims)
        self._add_actions(env)
        return notes

    def _of(self, part: Part) -> tuple[int, ...]:
        return self.lanes[self.parts.index(part)]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return what the policies write, each in its lanes, and zeros elsewhere."""
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
                _put(part, out, rows if td.batch_size else None, found)
        return out


class JointByGroup(Joint):
    """Policies of which each acts for a group of agents, in all lanes.

    Args:
        parts: the policies; their ids are names of groups.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        self.relative: list[bool] = []
        """``[part]``: it gets the TensorDict of its group, and else all of them."""
        self.actions: list[tuple[Key, ...]] = []
        """``[part]``: the actions of its group."""

    def remade(self, parts: Sequence[Part]) -> "JointByGroup":
        """Return such a module of other ``parts``."""
        made = type(self)(parts)
        made.relative, made.actions = self.relative, self.actions
        return made

    def bind(self, own: range, lanes: int) -> None:
        """Act in all lanes, whichever there are."""

    @property
    def described(self) -> list[dict[str, Any]]:
        """The policies, for a manifest."""
        return [{"id": part.id, "policy": _named(part)} for part in self.parts]

    def leave_out(self, random_lanes: Mask) -> None:
        """Call all of them: each acts in every lane."""

    def try_parts(
        self,
        td: TensorDictBase,
        env: EnvBase,
        observations: Collection[Key],
        *,
        lanes: int,
        first: int,
        strict: bool,
    ) -> list[str]:
        """Try each policy out, on the TensorDict of its group or on all of it."""
        notes: list[str] = []
        lead = len(env.batch_size)
        groups = _groups_of(env)
        _require_groups([str(part.id) for part in self.parts], groups)
        self.relative, self.actions = [], []
        for part in self.parts:
            group = str(part.id)
            self.actions.append(groups[group])
            part.draws_for(env, lanes, first)
            policy = part.policy
            if policy is None:
                self.relative.append(False)
                continue
            keys = {key[1:] for key in observations if key[0] == group}
            relative = _is_relative(policy, keys, {*observations})
            self.relative.append(relative)
            with _naming(_whose(group)):
                found = self._tried(part, td, env, keys if relative else observations, strict)
            notes += [f"{group}: {note}" for note in policy.notes]
            if relative:
                found = {(group, *key): column for key, column in found.items()}
            dims = {
                ((group, *level) if relative else level): count
                for level, count in policy.batch_dims.items()
            }
            twice = [key for key in found if key in self.columns]
            if twice:
                raise PolicyError(
                    f"the policy of the group {group!r} writes {spell(twice[0])}, as the policy of "
                    f"another group does; give it a name below the group: {group}/{twice[0][-1]}"
                )
            self._add(part, found, dims)
        self._add_actions(env)
        for part in self.parts:
            self.columns[(*POLICY_VERSIONS, str(part.id))] = SlabColumn(torch.int64, ())
        for group in groups:
            inner = env.full_action_spec[group].shape
            if len(inner) > lead:
                self.batch_dims[(group,)] = len(inner) - lead
        return notes

    def _tried(
        self, part: Part, td: TensorDictBase, env: EnvBase, keys: Collection[Key], strict: bool
    ) -> dict[Key, SlabColumn]:
        policy, group = part.policy, str(part.id)
        assert policy is not None
        relative = self.relative[-1]
        specs = env.full_action_spec[group]
        some = td.get(group) if relative else td
        if not relative:
            specs = Composite({group: specs}, shape=env.full_action_spec.shape)
        acted = SimpleNamespace(full_action_spec=specs, batch_size=env.batch_size)
        data = [key for key in keys if key[-1] not in ("mask", MASK_NAME)]
        try:
            settle_inputs(policy, some, acted, keys)
        except ArgumentError:
            if len(data) == len(keys):
                raise
            settle_inputs(policy, some, acted, data)
        found = try_out(policy, some, acted, strict=strict)
        written = [key for key in policy.writes if not relative and key in action_keys(env)]
        others = [key for key in written if key[0] != group]
        if others:
            raise PolicyError(f"it writes {spell(others[0])}, the action of another group")
        return found

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return what the policies write, each for its group."""
        out, versions = self._empty(td), self.versions.tolist()
        for number, part in enumerate(self.parts):
            group, version = str(part.id), versions[number]
            if part.policy is None:
                drawn, version = part.at_random(td), RANDOM_VERSION
                found = {key: drawn[key] for key in self.actions[number]}
            elif self.relative[number]:
                found = {(group, *key): value for key, value in part(td.get(group)).items()}
            else:
                found = part(td)
            _put(part, out, None, found)
            out.get((*POLICY_VERSIONS, group)).fill_(version)
        return out


def joint_of(policy: Any) -> Joint:
    """Return several policies, as a caller gave them, as one.

    Raises:
        ArgumentError: they are no list of lanes and policies, and no mapping of groups.
    """
    if isinstance(policy, Mapping):
        groups = group_entries(policy)
        return JointByGroup([_part(name, one) for name, one in groups.items()])
    entries = lane_entries(policy)
    parts = [_part(at, one) for at, (_, one) in enumerate(entries)]
    return JointByLane(parts, [lanes for lanes, _ in entries])


def _part(id: PolicyId, one: OnePolicy) -> Part:
    policy = None
    with _naming(_whose(id)):
        if one.policy is not None:
            policy = Policy(one.policy, None, None)
        device_of(one)  # this machine has it
    return Part(id, policy, one)


def _placed(part: Part, device: torch.device | None, env_device: torch.device | None) -> Part:
    if part.policy is None:
        return Part(part.id, None, part.one)
    return Part(
        part.id, Policy(part.one.policy, device_of(part.one) or device, env_device), part.one
    )


def _given(part: Part) -> tuple[PolicyId, OnePolicy]:
    """A part as it travels: a policy that was compiled as what it was made of."""
    source = None if part.policy is None else part.policy.source
    return part.id, replace(part.one, policy=source)


def _arrived(
    kind: type[Joint], given: Sequence[tuple[PolicyId, OnePolicy]], more: Any, versions: Any
) -> Joint:
    made = kind([_part(id, one) for id, one in given], *more)
    made.versions.copy_(versions)
    return made


def _whose(id: PolicyId) -> str:
    return f"policy {id}" if isinstance(id, int) else f"the policy of the group {id!r}"


def _named(part: Part) -> str | None:
    return None if part.policy is None else type(part.policy.source).__qualname__


@contextmanager
def _naming(whose: str) -> Iterator[None]:
    """A context whose errors get a note that says whose they are."""
    try:
        yield
    except Exception as error:
        error.add_note(f"tallyroll: raised for {whose}")
        raise


def _put(
    part: Part, out: TensorDictBase, rows: Rows | None, found: Mapping[Key, torch.Tensor]
) -> None:
    """Write the values of a part to its ``rows`` of ``out``; None: to all of them."""
    lead = len(out.batch_size)
    for key, value in found.items():
        full = out.get(key, None)
        if full is None:  # its own: no column
            shape = (*out.batch_size, *value.shape[lead:])
            out.set(key, torch.zeros(shape, dtype=value.dtype, device=value.device))
            full = out.get(key)
        to = full if rows is None else full[rows]
        if to.shape != value.shape or to.dtype != value.dtype:
            raise PolicyError(
                f"policy {part.id}: {spell(key)}: got {SlabColumn(value.dtype, tuple(value.shape))}"
                f", expected {SlabColumn(to.dtype, tuple(to.shape))} as on the first step"
            )
        if rows is None:
            full.copy_(value)
        else:
            full[rows] = value


# --- groups of agents -----------------------------------------------------------------------------


def _groups_of(env: EnvBase) -> dict[str, tuple[Key, ...]]:
    """The actions of each group.

    Raises:
        ArgumentError: some action is of no group.
    """
    found: dict[str, tuple[Key, ...]] = {}
    for key in action_keys(env):
        if len(key) < 2:
            raise ArgumentError(
                "policy: {group: policy} is for groups of agents, and the environment has the "
                f"action {spell(key)}; give one policy, or [(lanes, policy), …]"
            )
        found[key[0]] = (*found.get(key[0], ()), key)
    return found


def _require_groups(given: Sequence[str], groups: Collection[str]) -> None:
    for name in given:
        if name not in groups:
            raise ArgumentError(
                f"policy: expected the groups {sorted(groups)}, got {name!r}"
                f"{did_you_mean(name, groups)}"
            )
    for name in groups:
        if name not in given:
            raise ArgumentError(
                f"policy: expected a policy for each of the groups {sorted(groups)}, got none for "
                f"{name!r}; give it one, or None for random actions"
            )


def _is_relative(policy: Policy, inside: Collection[Key], whole: Collection[Key]) -> bool:
    """Return whether ``policy`` takes the TensorDict of its group, whose keys are ``inside``."""
    reads = getattr(policy.source, "in_keys", None)
    if reads is None:
        return True
    keys = [as_key(key) for key in reads]
    return all(key in inside for key in keys) or not all(key in whole for key in keys)
