"""TorchRL interface to a `System`: specs, TensorDicts, ``step`` and ``reset``.

Transforms, batched environments and code that steps an environment by itself use this interface.
A collector on the CPU drives `SystemEnv.stepper` directly, without specs and TensorDicts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.stepping.arrays import as_flags, as_tensor, fitting, put_valid
from tallyroll.collector.envs.stepping.contexts import Draw
from tallyroll.collector.envs.stepping.restarts import Make
from tallyroll.collector.envs.stepping.results import kind_of
from tallyroll.collector.envs.stepping.specs import batched_specs
from tallyroll.collector.envs.stepping.stepper import Stepper
from tallyroll.collector.envs.system import Array, Mask, Step, System
from tallyroll.collector.errors import EnvironmentRefused, ValueRefused
from tallyroll.collector.slab.names import Rename
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import NEXT, NEXT_VALID, VALID, Key

_FLAGS = ("terminated", "truncated", "done")


class SystemEnv(EnvBase):
    """A TorchRL environment over a :class:`System`.

    The keys are the same as in the declaration of the system, and each value has a leading
    dimension of lanes.
    Rewards are float32 unless the system declares another dtype. ``done``, ``terminated`` and
    ``truncated`` are bool ``[lanes, 1]``. The flags of a group of agents are bool
    ``[lanes, agents, 1]`` and are nested below the name of the group.

    Args:
        system: the system. Closing the environment closes it too.
        rename: new names for columns, old name -> new name. Write a nested name as a tuple or as
            ``"a/b"``.
        make: function that makes the system again, if it accepts seeds only when it is made.
        draw: function that draws the context of a lane from that lane's generator. Some systems
            that reset within their step need one context per lane in advance. Required if the
            system declares a context.
        draws_later: True if a collector draws the contexts, through its ``resets``.

    Raises:
        ArgumentError: the declaration of the system is inconsistent, or a required argument is
            missing.
        NameRefused: names of columns collide.
    """

    owns_system = True
    """True if closing the environment closes the system."""

    def __init__(
        self,
        system: System,
        *,
        rename: Rename | None = None,
        make: Make | None = None,
        draw: Draw | None = None,
        draws_later: bool = False,
    ) -> None:
        stepper = Stepper(system, rename=rename, make=make, draw=draw, draws_later=draws_later)
        d = stepper.declares
        super().__init__(device=torch.device(d.device), batch_size=torch.Size([d.lanes]))
        self.is_closed = False
        self.stepper = stepper
        """The lanes, in the form that a collector steps."""
        self._fresh: list[torch.Tensor] = []
        """First observations of episodes that began within the last step; see ``_fresh_lanes``."""
        self._fresh_lanes = np.zeros(d.lanes, np.bool_)
        self._last: list[torch.Tensor] = []
        """Observations of the last step or reset."""
        self._declare()

    def _declare(self) -> None:
        """Set the specs from the system's present declaration."""
        self._declares = d = self.stepper.declares
        specs = batched_specs(d, self.observation_keys)
        self.observation_spec, self.action_spec, self.reward_spec, self.done_spec = specs

    def store_rewards_as(self, dtype: torch.dtype | None) -> None:
        """Store rewards as ``dtype``; None selects the dtype that the system declares."""
        self.stepper.store_rewards_as(dtype)
        if self.stepper.declares is not self._declares:
            self._declare()
            self.empty_cache()

    @property
    def system(self) -> System:
        """The system. A reset may replace it."""
        return self.stepper.system

    @property
    def kind(self) -> str:
        """Name of the system in messages."""
        return kind_of(self.system)

    @property
    def observation_keys(self) -> tuple[Key, ...]:
        """Observation columns, in the order of a slot's arrays.

        Columns of info entries are included if the system declares them, and otherwise from the
        first reset on.
        """
        return self.stepper.observation_keys

    @property
    def info_keys(self) -> tuple[Key, ...]:
        """Columns that hold info entries instead of the environment's state."""
        return self.stepper.info_keys

    def seed_lanes(self, seeds: Sequence[int]) -> None:
        """Seed every lane at the next full reset, if the system accepts seeds."""
        self.stepper.seed_lanes(seeds)

    def _set_seed(self, seed: int | None) -> None:
        lanes = self.batch_size[0]
        seeds = None if seed is None else lane_seeds(seed, lanes, 0)
        self.stepper.restarts.seed_next(seeds)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environment, and the system unless the caller owns it.

        TorchRL closes an environment when the last reference to it is dropped.
        """
        if not self.is_closed and self.owns_system:
            self.system.close()
        super().close(raise_if_closed=raise_if_closed)

    # --- steps ------------------------------------------------------------------------------------

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step all lanes, and start the next episode in lanes whose episode ended."""
        if self._declares.marks_transitions:
            tensordict = self.step(tensordict)
            return tensordict, self._set_flags(self._step_mdp(tensordict))
        stepped: tuple[TensorDictBase, TensorDictBase] = super().step_and_maybe_reset(tensordict)
        return stepped

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        stepper, d, tensors = self.stepper, self._declares, self.stepper.results.tensors
        out = stepper.step([self._action(tensordict.get(key)) for key in d.action])
        self._forget_fresh()
        values = tensors(out.obs)
        flags = [as_flags(each) for each in (out.terminated, out.truncated)]
        ended = flags[0] | flags[1]
        if d.at_end == "first" and ended.any():
            self._fresh, self._fresh_lanes = values, ended
            stepper.results.require_final_observations(out, ended)
            if out.final is not None:
                values = self._chosen(ended, tensors(out.final), values)
            stepper.contexts.draw(stepper.system, ended)
        stepper.results.require_skipped(out.skipped, stepper.pending)
        transitions = ~stepper.pending
        if d.has_reset_slots:
            stepper.follow(stepper.pending, ended)
        self._last = values
        td = self._td(values)
        for key, reward in zip(d.reward, self._rewards(out), strict=True):
            td.set(key, reward)
        for name, flag in zip(_FLAGS, (*flags, ended), strict=True):
            td.set(name, self._flag(flag)[:, None])
        for group in d.groups:
            ends = [as_flags(each) for each in out.agents[group][:2]]
            for name, flag in zip(_FLAGS, (*ends, ends[0] | ends[1]), strict=True):
                td.set((group, name), self._flag(flag)[..., None])
        if d.marks_transitions:
            td.set(VALID, self._flag(transitions)[:, None])
        if d.finals == "some":
            td.set(NEXT_VALID, self._flag(~ended | _final_mask(out, ended)))
        for group, valid in self._agents_valid().items():
            put_valid(valid, out.agents[group], ended if stepper.doubts_finals else None)
            td.set((*NEXT_VALID, group), self._flag(valid))
        return td

    def _rewards(self, out: Step) -> list[torch.Tensor]:
        """Convert the rewards of a step to the shapes and dtypes of their specs.

        Raises:
            TransitionError: a reward does not fit its spec.
        """
        found = []
        for key, given in zip(self._declares.reward, out.reward, strict=True):
            spec, reward = self.full_reward_spec[key], given
            if self.stepper.fills:
                row = np.empty(tuple(spec.shape), NUMPY[spec.dtype])
                row = row if np.shape(given) == row.shape else row[..., 0]
                try:
                    reward = fitting(given, row, (NEXT, *key))
                except (TypeError, ValueError, ValueRefused) as error:
                    raise self.stepper.results.unfit(out, error) from error
            found.append(as_tensor(reward, self.device).to(spec.dtype).reshape(spec.shape))
            if self.stepper.fills:
                self.stepper.note_rounding(
                    (NEXT, *key), reward, found[-1].numpy().reshape(row.shape)
                )
        return found

    # --- resets -----------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        lanes = None if mask is None else mask.reshape(-1).cpu().numpy()
        if lanes is None or (lanes.all() and not self._fresh_lanes.any()):
            observation = self.stepper.reset(**kwargs)
            values = self.stepper.results.tensors(observation)
            if self.stepper.declares is not self._declares:
                self._declare()
                self.empty_cache()
        else:
            values = self._reset_some(lanes, kwargs)
        self._forget_fresh()
        self._last = values
        td = self._td(values)
        if self._declares.marks_transitions:
            td.set(VALID, self._flag(np.ones((*self.batch_size, 1), np.bool_)))
        if self._declares.finals == "some":
            td.set(NEXT_VALID, self._flag(np.ones(self.batch_size, np.bool_)))
        for group, valid in self._agents_valid().items():
            td.set((*NEXT_VALID, group), self._flag(valid))
        return self._set_flags(td)

    def _reset_some(self, lanes: Mask, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Reset ``lanes``, some of which may already have begun an episode within the last step.

        The other lanes keep their values. TorchRL discards these values, but a transform that
        keeps statistics (`VecNorm`) sees them first.
        """
        asked = lanes & ~self._fresh_lanes
        values = self._fresh
        if asked.any():
            if not self._declares.resets_by_mask:
                raise EnvironmentRefused(
                    f"{self.kind} ignores reset masks and would reset every lane, so it cannot be "
                    "wrapped in TransformedEnv or reset in part. Apply wrappers of its own "
                    "library instead, or use an environment that resets by mask."
                )
            values = self.stepper.results.tensors(self.stepper.reset_lanes(asked, **kwargs))
            if self._fresh:
                values = self._chosen(self._fresh_lanes, self._fresh, values)
        elif not values:
            values = [self.observation_spec[key].zero() for key in self.observation_keys]
        self.stepper.pending[lanes] = False
        return self._chosen(lanes, values, self._last or values)

    # --- tensors ----------------------------------------------------------------------------------

    def _action(self, action: torch.Tensor) -> Array:
        return action.clone() if self.device.type != "cpu" else action.numpy().copy()

    def _flag(self, flags: Mask) -> torch.Tensor:
        return torch.from_numpy(flags).to(self.device)

    def _chosen(
        self, lanes: Mask, values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return ``values`` in ``lanes`` and ``others`` in the other lanes, as new tensors."""
        at = self._flag(lanes)
        return [
            torch.where(at.reshape(-1, *[1] * (value.ndim - 1)), value, other)
            for value, other in zip(values, others, strict=True)
        ]

    def _agents_valid(self) -> dict[str, Mask]:
        """Return flags, all True, for each group that may lose observations of agents."""
        d = self._declares
        groups = d.groups if d.agent_finals == "some" else {}
        return {group: np.ones((d.lanes, size), np.bool_) for group, size in groups.items()}

    def _forget_fresh(self) -> None:
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)

    def _td(self, values: Sequence[torch.Tensor]) -> TensorDict:
        td = TensorDict({}, self.batch_size, device=self.device)
        for group, size in self._declares.groups.items():
            td.set(group, TensorDict({}, (*self.batch_size, size), device=self.device))
        for key, value in zip(self.observation_keys, values, strict=True):
            td.set(key, value)
        return td

    def _set_flags(self, td: TensorDictBase) -> TensorDictBase:
        # Leaf by leaf: tensordict imports pandas to make zeros of a whole spec.
        for key, spec in self.full_done_spec.items(True, True):
            td.set(key, spec.zero())
        return td


def _final_mask(out: Step, ended: Mask) -> Mask:
    """Mark the lanes whose final observations the step contains."""
    given = out.final is not None and out.final_valid is not None
    return as_flags(out.final_valid) if given else np.zeros_like(ended)
