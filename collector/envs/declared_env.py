"""An environment as its system declares it: specs, names of columns, seeds and contexts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.envs import EnvBase

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.declared_specs import batched_specs
from tallyroll.collector.envs.system import Mask, System, require_consistent
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.slab.names import Rename, renamed, require_names
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import NEXT, Key

Make = Callable[[Sequence[int] | None], System]
"""Makes a system from one seed a lane; None: from any."""

Draw = Callable[[np.random.Generator], Mapping[str, Any]]
"""Draws a lane's context: a value for each name in ``Declares.context``."""


class DeclaredEnv(EnvBase):
    """A `SystemEnv` without its steps: specs, seeds, contexts and resets; see there."""

    owns_system = True
    """Closing this closes the system."""

    def __init__(
        self,
        system: System,
        *,
        rename: Rename | None = None,
        make: Make | None = None,
        draw: Draw | None = None,
    ) -> None:
        declares = system.declares
        require_consistent(declares)
        if bool(declares.context) != (draw is not None):
            raise ArgumentError(
                f"draw: expected one for the contexts {sorted(declares.context)} that "
                f"{type(system).__name__} declares, got {draw!r}"
            )
        lanes = declares.lanes
        device = torch.device(declares.device)
        super().__init__(device=device, batch_size=torch.Size([lanes]))
        self.is_closed = False
        self.system = system
        self._make, self._draw = make, draw
        self._names = renamed(system.columns, rename or {})
        require_names(system.columns, [*declares.action], [*declares.reward], given=self._names)
        self._seeds: list[int] | None = None
        self._rngs: list[np.random.Generator] = []
        self._started = False
        self._last: list[int] = []
        self._remade = 0
        self._pending = np.zeros(lanes, np.bool_)
        self._tells_skips = False
        self._fresh: list[torch.Tensor] = []
        self._fresh_lanes = np.zeros(lanes, np.bool_)
        self._declare()

    def _declare(self) -> None:
        """Set the specs that the system declares now."""
        self._declares = d = self.system.declares
        self.next_rewards = [(NEXT, *key) for key in d.reward]
        specs = batched_specs(d, self.observation_keys, self.marks_transitions)
        self.observation_spec, self.action_spec, self.reward_spec, self.done_spec = specs
        self._expected = [
            ((d.lanes, *spec.shape), NUMPY[spec.dtype])
            for spec in d.observation.values()
            if spec.dtype is not torch.bfloat16
        ]

    @property
    def fills(self) -> bool:
        """True if it fills slots of a slab itself: its arrays are NumPy's."""
        return self.device.type == "cpu" and len(self._expected) == len(self._declares.observation)

    @property
    def resets_by_mask(self) -> bool:
        """True if some lanes can be reset while the others go on."""
        return self._declares.resets == "mask"

    @property
    def marks_transitions(self) -> bool:
        """Reset slots cannot be avoided, so plain steps mark them in ``("collector", "valid")``."""
        return self._declares.at_end == "reset_slot" and not self.resets_by_mask

    @property
    def has_reset_slots(self) -> bool:
        """Some slots of an in-place rollout are reset slots."""
        return self._declares.at_end == "reset_slot"

    @property
    def loses_finals(self) -> bool:
        """Final observations are lost."""
        return self._declares.finals == "lost"

    @property
    def can_step_part(self) -> bool:
        """Some lanes can be stepped while others wait."""
        return self._declares.parts or (self.batch_size[0] == 1 and not self.arrivals)

    @property
    def arrivals(self) -> int:
        """Lanes that come back a call, in any order; 0: all come."""
        return self._declares.arrivals

    @property
    def groups(self) -> Mapping[str, int]:
        """Groups of agents, and how many each has."""
        return self._declares.groups

    @property
    def observation_keys(self) -> tuple[Key, ...]:
        """Columns of the observation, in the order of a slot's arrays.

        Those of infos are among them from the first reset on, or where they are declared.
        """
        return tuple(self._names[: len(self._declares.observation)])

    @property
    def action_columns(self) -> tuple[Key, ...]:
        """Columns of actions, in the order of a slot's arrays."""
        return tuple(self._declares.action)

    @property
    def reward_columns(self) -> tuple[Key, ...]:
        """Columns of rewards, without "next", in the order of a slot's arrays."""
        return tuple(self._declares.reward)

    @property
    def info_keys(self) -> tuple[Key, ...]:
        """Observations that report on the episode, and not on the environment's state."""
        return tuple(
            name
            for name, column in zip(self._names, self.system.columns, strict=True)
            if column.what == "info"
        )

    @property
    def first_lane(self) -> int:
        """The number of the first lane in a run; 0 unless a collector says otherwise."""
        return self.system.first_lane

    @first_lane.setter
    def first_lane(self, lane: int) -> None:
        self.system.first_lane = lane

    @property
    def kind(self) -> str:
        """The system's name in messages."""
        return str(self.system.describe()["type"])

    # --- seeds and contexts -----------------------------------------------------------------------

    @property
    def takes_seeds(self) -> bool:
        """Each lane can be given a seed."""
        how = self._declares.seeds
        return how in ("reset", "shared") or (how == "make" and self._make is not None)

    def seed_lanes(self, seeds: Sequence[int]) -> None:
        """Seed every lane at the next full reset, where that is possible."""
        if len(seeds) != self.batch_size[0]:
            raise ArgumentError(
                f"expected {self.batch_size[0]} seeds, one a lane, got {len(seeds)}"
            )
        self._seeds = [int(seed) for seed in seeds]

    def _set_seed(self, seed: int | None) -> None:
        self._seeds = None if seed is None else lane_seeds(seed, self.batch_size[0], 0)

    def _draw_contexts(self, lanes: Mask | None = None) -> None:
        """Draw the contexts of the next reset of a mask of ``lanes``; None: of all."""
        if self._draw is not None:
            everyone = np.arange(self.batch_size[0])
            self._draw_contexts_of(everyone if lanes is None else everyone[lanes])

    def _draw_contexts_of(self, lanes: NDArray[Any]) -> None:
        if self._draw is None:
            return
        for lane in lanes:
            drawn = self._draw(self._rngs[lane])
            for name, values in self.system.next_context.items():
                values[lane] = drawn[name]

    def _seed_contexts(self, seeds: Sequence[int] | None) -> None:
        if self._draw is None:
            return
        if seeds is not None or not self._rngs:
            own = seeds or [None] * self.batch_size[0]  # type: ignore[list-item]
            self._rngs = [np.random.default_rng(seed) for seed in own]
        d = self._declares
        if seeds is not None or not hasattr(self.system, "next_context"):
            self.system.next_context = {
                name: np.zeros((d.lanes, *spec.shape), NUMPY[spec.dtype])
                for name, spec in d.context.items()
            }
            self._draw_contexts()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the system too, where it is not a caller's.

        TorchRL closes environments that nothing refers to any more.
        """
        if not self.is_closed and self.owns_system:
            self.system.close()
        super().close(raise_if_closed=raise_if_closed)
