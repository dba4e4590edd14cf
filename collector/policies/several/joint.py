"""Several policies combined into one module, which calls each policy with only its rows."""

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
    """The first observations of a run, or of a worker's lanes, for the trial of policies."""

    td: TensorDictBase
    """The result of a reset of ``env``."""
    env: EnvBase
    observations: Collection[Key]
    """Keys of observations of ``env`` that policies may use."""
    lanes: int
    """Number of lanes of the run."""
    first: int
    """Number, in the run, of the first lane of ``env``."""
    strict: bool
    """True if numbers outside a box are refused, as in `try_out`."""

    @property
    def lead(self) -> int:
        """Number of lane axes; 0 for a single environment."""
        return len(self.env.batch_size)


class Joint(nn.Module):
    """Several policies as one module, so that their weights are handled like one policy's weights.

    Args:
        parts: the policies.
    """

    versions: torch.Tensor
    """Number of weight updates of each part ``[part]``, sent with the weights."""

    def __init__(self, parts: Sequence[PolicyPart]) -> None:
        super().__init__()
        self.parts = list(parts)
        modules = {str(at): part.module for at, part in enumerate(parts)}
        self.policies = nn.ModuleDict({k: m for k, m in modules.items() if m is not None})
        self.register_buffer("versions", torch.zeros(len(parts), dtype=torch.int64))
        self.columns: dict[Key, SlabColumn] = {}
        """The columns of one lane that any part writes, including the actions."""
        self.batch_dims: dict[Key, int] = {}
        self._idle: Mask | None = None
        """Marks ``[part]`` of the parts that the next call skips; None if it skips none."""
        self._draws = np.array([part.policy is None for part in parts])
        """Marks ``[part]`` of the parts whose actions are all random."""

    @abstractmethod
    def bind(self, own: range, lanes: int) -> None:
        """Act for the lanes ``own`` of a run that has ``lanes`` lanes.

        Raises:
            ArgumentError: a lane has no policy, or has two.
        """

    @property
    @abstractmethod
    def described(self) -> list[dict[str, Any]]:
        """Description of the policies for a manifest."""

    @property
    @abstractmethod
    def acts_in(self) -> Mask:
        """Marks ``[part, lane]`` of the lanes in which each part acts."""

    @property
    @abstractmethod
    def version_columns(self) -> list[Key]:
        """The key of each part's version column."""

    @abstractmethod
    def row_versions(self, version: int) -> Any:
        """Return the version of rows without opening random actions: one number, or one per lane.

        ``version`` is the number of updates, summed over all policies.
        """

    @abstractmethod
    def rows_of(self, drawn: Mask, version: int) -> tuple[Mask, Any]:
        """Return the lanes that act at random in a slot, and the versions of its rows.

        Args:
            drawn: marks ``[part, lane]`` of the lanes in which an opening acts at random.
            version: the number of updates, summed over all policies.

        Returns:
            The lanes that act at random, and the version of the row of each lane.
        """

    @abstractmethod
    def of_key(self, key: Key, random_lanes: Mask) -> Mask:
        """Return the part ``[lane]`` of ``random_lanes`` in which no policy writes ``key``."""

    def leave_out(self, random_lanes: Mask) -> None:
        """Skip policies in the next call if all of their lanes act at random.

        ``random_lanes`` is the mask that :meth:`rows_of` returned.
        """
        self._idle = np.logical_and.reduce(~self.acts_in | random_lanes, axis=1)

    @abstractmethod
    def bind_like(self, other: Self) -> None:
        """Act in the same lanes as ``other``, a module of the same kind."""

    def write_like(self, other: Self) -> None:
        """Write the columns that ``other`` writes."""
        self.columns, self.batch_dims = other.columns, other.batch_dims

    def remade(self, parts: Sequence[PolicyPart]) -> Self:
        """Return a module of this kind with other ``parts``."""
        made = type(self)(parts, *self._more)
        made.bind_like(self)
        return made

    def placed(self, device: torch.device | None, env_device: torch.device | None) -> Self:
        """Return a copy whose policies run on ``device``, or on their own devices."""
        made = self.remade([_placed(part, device, env_device) for part in self.parts])
        made.versions.copy_(self.versions)
        return made

    def __deepcopy__(self, memo: Any) -> Self:
        """Copy only the policies, and keep the references to the environment."""
        made = self.remade([part.copied() for part in self.parts])
        made.write_like(self)
        made.versions.copy_(self.versions)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the callers' arguments, whose modules have the current weights."""
        given = [_arguments_of(part) for part in self.parts]
        return _arrived, (type(self), given, self._more, self.versions)

    @property
    def _more(self) -> tuple[Any, ...]:
        """The arguments of the constructor after the parts."""
        return ()

    def seed(self, seed: int, incarnation: int, worker: int | None, *, own: bool) -> None:
        """Seed the random streams of each part."""
        for number, part in enumerate(self.parts):
            part.seed(seed, incarnation, number, worker, own=own)

    def passes(self) -> None:
        """Skip the random numbers of a slot in which only lanes of other workers are stepped."""
        for part in self.parts:
            if part.random is not None:
                part.random.take(1)

    # --- the trial --------------------------------------------------------------------------------

    def try_parts(self, trial: Trial) -> list[str]:
        """Try out each policy on its part of a first observation, and record all columns.

        Returns:
            Warnings for users of the rows.
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
            # Declare actions as the environment does, even if no policy acts.
            self.columns[as_key(key)] = SlabColumn(spec.dtype, tuple(spec.shape[trial.lead :]))
        return notes

    def _prepare(self, trial: Trial) -> None:
        """Inspect the environment before the first trial."""

    @abstractmethod
    def _tried(
        self, number: int, part: PolicyPart, policy: Policy, trial: Trial
    ) -> tuple[SlabColumns, Mapping[Key, int]]:
        """Try out ``policy``, the policy of ``part``.

        Returns:
            The columns that the policy writes, and the batch dimensions of nested TensorDicts, by
            keys from the root of a lane.
        """

    def _add(self, part: PolicyPart, columns: SlabColumns, dims: Mapping[Key, int]) -> None:
        for key, column in columns.items():
            if self.columns.setdefault(key, column) != column:
                raise PolicyError(
                    f"policy {part.id}: expected {format_key(key)} to be {self.columns[key]}, like "
                    f"that of another policy, got {column}. Write the same dtype and shape, or "
                    "another key."
                )
        self.batch_dims |= dims

    def _empty(self, td: TensorDictBase) -> TensorDict:
        """Return a TensorDict of zeros for all columns that any part writes."""
        batch = td.batch_size
        out = TensorDict({}, batch)
        for level in sorted(self.batch_dims, key=len):
            shape = next(c.shape for key, c in self.columns.items() if key[: len(level)] == level)
            out.set(level, TensorDict({}, (*batch, *shape[: self.batch_dims[level]])))
        for key, column in self.columns.items():
            out.set(key, torch.zeros((*batch, *column.shape), dtype=column.dtype, device=td.device))
        return out


def part_of(id: PolicyId, one: OnePolicy) -> PolicyPart:
    """Make a part from a policy in the form in which a caller gave it."""
    policy = None
    with naming(whose(id)):
        if one.policy is not None:
            policy = Policy(one.policy, None, None)
        device_of(one)  # raises if this machine does not have the device
    return PolicyPart(id, policy, one)


def _placed(
    part: PolicyPart, device: torch.device | None, env_device: torch.device | None
) -> PolicyPart:
    if part.policy is None:
        return PolicyPart(part.id, None, part.one)
    return PolicyPart(
        part.id, Policy(part.one.policy, device_of(part.one) or device, env_device), part.one
    )


def _arguments_of(part: PolicyPart) -> tuple[PolicyId, OnePolicy]:
    """Return a part's arguments for pickling; a compiled policy is replaced by its original."""
    source = None if part.policy is None else part.policy.source
    return part.id, replace(part.one, policy=source)


def _arrived(
    kind: type[Joint], given: Sequence[tuple[PolicyId, OnePolicy]], more: Any, versions: Any
) -> Joint:
    made = kind([part_of(id, one) for id, one in given], *more)
    made.versions.copy_(versions)
    return made


def opening_of(part: PolicyPart) -> dict[str, int]:
    """Return the manifest entry of a policy's opening random actions; empty if there are none."""
    return {"init_random_frames": part.opening} if part.opening else {}


def named(part: PolicyPart) -> str | None:
    """Return the name of a policy's class; None if it draws random actions."""
    return None if part.policy is None else type(part.policy.source).__qualname__


@contextmanager
def naming(whose: str) -> Iterator[None]:
    """Add a note that names the policy to errors in the context."""
    try:
        yield
    except Exception as error:
        error.add_note(f"tallyroll: raised for {whose}")
        raise


def put(
    part: PolicyPart, out: TensorDictBase, rows: Rows | None, found: Mapping[Key, torch.Tensor]
) -> None:
    """Write the values of a part to its ``rows`` of ``out``; None means all rows."""
    lead = len(out.batch_size)
    for key, value in found.items():
        full = out.get(key, None)
        if full is None:  # a private key of the policy, which is not a column
            shape = (*out.batch_size, *value.shape[lead:])
            out.set(key, torch.zeros(shape, dtype=value.dtype, device=value.device))
            full = out.get(key)
        to = full if rows is None else full[rows]
        if to.shape != value.shape or to.dtype != value.dtype:
            raise PolicyError(
                f"policy {part.id}: {format_key(key)}: expected "
                f"{SlabColumn(to.dtype, tuple(to.shape))} as on the first step, got "
                f"{SlabColumn(value.dtype, tuple(value.shape))}"
            )
        if rows is None:
            full.copy_(value)
        else:
            full[rows] = value


def _of_whom(part: PolicyPart) -> str:
    return f"policy {part.id}" if isinstance(part.id, int) else part.id
