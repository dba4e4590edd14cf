"""Several policies as one, from TensorDict to TensorDict: each is called alone on its rows."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.envs import EnvBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.entries import (
    OnePolicy,
    device_of,
)
from tallyroll.collector.policies.several.policy_part import PolicyId, PolicyPart, whose
from tallyroll.collector.slab.slab import SlabColumn, SlabColumns
from tallyroll.storage.rows.keys import Key, as_key, format_key

Rows = slice | torch.Tensor


@dataclass(frozen=True)
class Trial:
    """The first observations of a run, or of a worker's lanes, on which policies are tried out."""

    td: TensorDictBase
    """The result of a reset of ``env``."""
    env: EnvBase
    observations: Collection[Key]
    """Keys of ``env`` that policies may be given."""
    lanes: int
    """How many the run has."""
    first: int
    """The number of the first lane of ``env`` among them."""
    strict: bool
    """Numbers outside a box are refused, as `try_out` has it."""

    @property
    def lead(self) -> int:
        """The number of axes of lanes: none of a single environment."""
        return len(self.env.batch_size)


class Joint(nn.Module):
    """Several policies as one module, so that their weights go where those of one go.

    Args:
        parts: the policies.
    """

    versions: torch.Tensor
    """``[part]``: numbers of updates of the weights of each, which travel with the weights."""

    def __init__(self, parts: Sequence[PolicyPart]) -> None:
        super().__init__()
        self.parts = list(parts)
        modules = {str(at): part.module for at, part in enumerate(parts)}
        self.policies = nn.ModuleDict({k: m for k, m in modules.items() if m is not None})
        self.register_buffer("versions", torch.zeros(len(parts), dtype=torch.int64))
        self.columns: dict[Key, SlabColumn] = {}
        """The columns that any part writes, the actions among them, of one lane."""
        self.batch_dims: dict[Key, int] = {}
        self._idle: Mask | None = None
        """``[part]``: not to be called in the next call; None: all are to be."""
        self._draws = np.array([part.policy is None for part in parts])
        """``[part]``: its actions are random all the time."""

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

    @property
    @abstractmethod
    def acts_in(self) -> Mask:
        """``[part, lane]``: the lanes in which each acts."""

    @property
    @abstractmethod
    def version_columns(self) -> list[Key]:
        """The column of each part that says which of its versions acted."""

    @abstractmethod
    def row_versions(self, version: int) -> Any:
        """Return the version of rows in which no opening draws: a number, or one for each lane.

        ``version`` is the number of updates of any.
        """

    @abstractmethod
    def rows_of(self, drawn: Mask, version: int) -> tuple[Mask, Any]:
        """Return how a slot is acted in of which ``drawn`` ``[part, lane]`` begin at random.

        Returns:
            The lanes that act at random, and the version of the row of each lane.
        """

    @abstractmethod
    def of_key(self, key: Key, random_lanes: Mask) -> Mask:
        """Return the lanes ``[lane]`` of ``random_lanes`` in which a column is not a policy's."""

    def leave_out(self, random_lanes: Mask) -> None:
        """Call no policy all of whose lanes act at random, in the next call.

        ``random_lanes``: as :meth:`rows_of` returns them.
        """
        self._idle = np.logical_and.reduce(~self.acts_in | random_lanes, axis=1)

    @abstractmethod
    def remade(self, parts: Sequence[PolicyPart]) -> Self:
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

    def try_parts(self, trial: Trial) -> list[str]:
        """Try each policy out on its part of a first observation; learn what all of them write.

        Returns:
            Notes for users of the rows.
        """
        notes: list[str] = []
        self._prepare(trial)
        for number, part in enumerate(self.parts):
            part.draws_for(trial.env, trial.lanes, trial.first)
            if part.policy is not None:
                found, dims = self._tried(number, part, part.policy, trial)
                notes += [f"{_of_whom(part)}: {note}" for note in part.policy.notes]
                self._add(part, found, dims)
        for key, spec in trial.env.full_action_spec.items(True, True):
            # As the environment declares it, also where no policy acts.
            self.columns[as_key(key)] = SlabColumn(spec.dtype, tuple(spec.shape[trial.lead :]))
        return notes

    def _prepare(self, trial: Trial) -> None:
        """Look at the environment, before any policy is tried out."""

    @abstractmethod
    def _tried(
        self, number: int, part: PolicyPart, policy: Policy, trial: Trial
    ) -> tuple[SlabColumns, Mapping[Key, int]]:
        """Try ``policy`` out, which is that of ``part``.

        Returns:
            The columns that it writes, and the batch sizes below them, as keys of a whole lane.
        """

    def _add(self, part: PolicyPart, columns: SlabColumns, dims: Mapping[Key, int]) -> None:
        for key, column in columns.items():
            if self.columns.setdefault(key, column) != column:
                raise PolicyError(
                    f"policy {part.id}: {format_key(key)} is {column}, and {self.columns[key]} of "
                    "another policy; let them write the same, or another name"
                )
        self.batch_dims |= dims

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


def part_of(id: PolicyId, one: OnePolicy) -> PolicyPart:
    """Make a part of a policy as a caller gave it."""
    policy = None
    with naming(whose(id)):
        if one.policy is not None:
            policy = Policy(one.policy, None, None)
        device_of(one)  # this machine has it
    return PolicyPart(id, policy, one)


def _placed(
    part: PolicyPart, device: torch.device | None, env_device: torch.device | None
) -> PolicyPart:
    if part.policy is None:
        return PolicyPart(part.id, None, part.one)
    return PolicyPart(
        part.id, Policy(part.one.policy, device_of(part.one) or device, env_device), part.one
    )


def _given(part: PolicyPart) -> tuple[PolicyId, OnePolicy]:
    """A part as it travels: a policy that was compiled as what it was made of."""
    source = None if part.policy is None else part.policy.source
    return part.id, replace(part.one, policy=source)


def _arrived(
    kind: type[Joint], given: Sequence[tuple[PolicyId, OnePolicy]], more: Any, versions: Any
) -> Joint:
    made = kind([part_of(id, one) for id, one in given], *more)
    made.versions.copy_(versions)
    return made


def opening_of(part: PolicyPart) -> dict[str, int]:
    """Return the opening of a policy, for a manifest; empty where it has none."""
    return {"init_random_frames": part.opening} if part.opening else {}


def named(part: PolicyPart) -> str | None:
    """Return the name of a policy's class; None: it draws random actions."""
    return None if part.policy is None else type(part.policy.source).__qualname__


@contextmanager
def naming(whose: str) -> Iterator[None]:
    """A context whose errors get a note that says whose they are."""
    try:
        yield
    except Exception as error:
        error.add_note(f"tallyroll: raised for {whose}")
        raise


def put(
    part: PolicyPart, out: TensorDictBase, rows: Rows | None, found: Mapping[Key, torch.Tensor]
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
                f"policy {part.id}: {format_key(key)}: got "
                f"{SlabColumn(value.dtype, tuple(value.shape))}, expected "
                f"{SlabColumn(to.dtype, tuple(to.shape))} as on the first step"
            )
        if rows is None:
            full.copy_(value)
        else:
            full[rows] = value


def _of_whom(part: PolicyPart) -> str:
    return f"policy {part.id}" if isinstance(part.id, int) else part.id
