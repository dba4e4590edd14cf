"""Stage of a replay: an environment, and a slab with actions from stored rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase

from tallyroll.collector.counting.numbering import driver_seed
from tallyroll.collector.envs.calls.env_call import EnvCall
from tallyroll.collector.envs.calls.environments import reach_env
from tallyroll.collector.envs.setup.prepare import first_reset, seed_env
from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.ext.replay.calls import Call
from tallyroll.collector.options import Options
from tallyroll.collector.policies.random_actions import action_keys
from tallyroll.collector.policies.slot_rng import SlotRng
from tallyroll.collector.rollout.driver import LocalDriver
from tallyroll.collector.rollout.slab_plan import SlabPlan, make_driver, plan_slab
from tallyroll.collector.slab.progress import new_board
from tallyroll.storage.rows.keys import DONE, NEXT, TERMINATED, TRUNCATED, Key

Array = np.ndarray[Any, Any]

_BLOCK_NBYTES = 2**26
_MOST_SLOTS = 512

BeforeStep = Callable[[int], None]
"""Hook called before each slot with its number, counted from the start of the block."""


class Stage:
    """Environment that is stepped through given actions, starting from resets of all lanes.

    Args:
        env: the environment. The stage drives and closes it.
        options: options of the collector that would drive it.
    """

    def __init__(self, env: EnvBase, options: Options) -> None:
        self.env, self._options = env, options
        self.lanes: int = env.batch_size.numel()
        self._rng = SlotRng()
        self._rng.seed(np.random.SeedSequence(0))
        self._driver: LocalDriver | None = None
        self.slots = 0
        """Number of slots in one block."""

    @property
    def kind(self) -> str:
        """Name of the environment in messages."""
        base = system_of(self.env)
        return type(self.env).__name__ if base is None else base.kind

    @property
    def shares_seed(self) -> bool:
        """True if the lanes may influence one another."""
        base = system_of(self.env)
        if base is None:
            return self.lanes > 1
        return self.lanes > 1 and base.system.declares.seeds == "shared"

    @property
    def has_reset_slots(self) -> bool:
        """True if the slot after an end only resets its lane."""
        base = system_of(self.env)
        return base is not None and bool(base.system.declares.has_reset_slots)

    def seed_run(self, seed: int, incarnation: int, lanes: range, worker: int | None) -> None:
        """Seed everything as the run did for these lanes.

        Raises:
            EnvironmentRefused: the environment does not accept seeds.
        """
        words = driver_seed(seed, incarnation, worker).generate_state(
            3 if worker is not None else 1
        )
        torch.manual_seed(int(words[0]))
        if worker is not None:  # a worker seeds its own process
            np.random.seed(int(words[1]))
            random.seed(int(words[2]))
        base = system_of(self.env)
        takes = base is None or base.stepper.takes_seeds or base.stepper.contexts.resets is not None
        if not takes:
            raise EnvironmentRefused(
                f"{self.kind} does not accept seeds, so a replay cannot start where the run started"
            )
        seed_env(self.env, seed, incarnation, lanes)

    def begin(self) -> None:
        """Reset all lanes with the given seeds."""
        first = first_reset(self.env)
        if self._driver is None:
            self._prepare(first)
        driver = self.driver
        driver.seek(0)
        driver.start_from(first)
        driver.begin()

    def resets_alike(self) -> bool:
        """Return True if two resets with the same seeds give bit-identical observations."""
        one, other = first_reset(self.env).clone(), first_reset(self.env)
        return all(
            as_array(value).tobytes() == as_array(other.get(key)).tobytes()
            for key, value in one.items(True, True)
            if isinstance(value, torch.Tensor)
        )

    @property
    def driver(self) -> LocalDriver:
        """The driver, available after :meth:`begin`."""
        assert self._driver is not None
        return self._driver

    def _prepare(self, first: Any) -> None:
        self.plan: SlabPlan = plan_slab(self.env, None, first, self._options)
        if self.plan.arrivals:
            raise EnvironmentRefused(
                f"{self.kind} returns lanes in any order, and the storage does not record the "
                "order of the run"
            )
        row = sum(
            torch.empty(column.shape, dtype=column.dtype).nbytes
            for column in self.plan.layout.values()
        )
        self.slots = max(1, min(_MOST_SLOTS, _BLOCK_NBYTES // max(1, row * self.lanes)))
        device = None if self.plan.in_place else self.env.device
        self._slab = self.plan.slab(self.slots, self.lanes, device=device)
        self._driver = make_driver(self.env, None, self.plan, self._slab, self._rng, new_board())

    @property
    def actions(self) -> tuple[Key, ...]:
        """Keys of the action columns."""
        return action_keys(self.env)

    def step(
        self,
        actions: Mapping[Key, Array],
        at: tuple[Array, Array],
        slots: int,
        before: BeforeStep | None = None,
    ) -> None:
        """Fill ``slots`` slots. Lanes without a given action act at random.

        Args:
            actions: values of each action, one entry per place.
            at: the slots and lanes of these places.
            slots: number of slots, at most :attr:`slots`.
            before: hook called before each slot.
        """
        driver = self.driver
        driver.seek(0)
        if len(at[0]) == slots * self.lanes and before is None:
            self._put(actions, at, slice(None))
            driver.stepped.step(0, slots)
        else:
            self._step_each(actions, at, slots, before)
        driver.outcome(0, slots, self.lanes)

    def _step_each(
        self,
        actions: Mapping[Key, Array],
        at: tuple[Array, Array],
        slots: int,
        before: BeforeStep | None,
    ) -> None:
        # Places are ordered by slot.
        bounds = np.searchsorted(at[0], np.arange(slots + 1))
        for slot in range(slots):
            if before is not None:
                before(slot)
            some = slice(int(bounds[slot]), int(bounds[slot + 1]))
            if some.stop - some.start < self.lanes:
                for _ in self.driver.actor.each_at_random(slot, slot + 1):
                    pass
            self._put(actions, at, some)
            self.driver.stepped.step(slot, slot + 1)

    def _put(self, actions: Mapping[Key, Array], at: tuple[Array, Array], some: slice) -> None:
        slots, lanes = at[0][some], at[1][some]
        for key, values in actions.items():
            column = self._slab.arrays.get(key)
            if column is not None:
                column[slots, lanes] = values[some]
            else:
                tensor = as_tensor(values[some], self._slab.columns[key].dtype)
                where = torch.from_numpy(slots), torch.from_numpy(lanes)
                self._slab.columns[key][where] = tensor.to(self._slab.columns[key].device)

    def values(self, key: Key, at: tuple[Array, Array]) -> Array:
        """Return the results at some slots and lanes, ``[n, ...]``, as a storage holds them."""
        columns = self._slab.columns
        if key == DONE and DONE not in columns:
            done: Array = self.values(TERMINATED, at) | self.values(TRUNCATED, at)
            return done
        if key == TRUNCATED and TRUNCATED not in columns:
            cut: Array = self.values(DONE, at) & ~self.values(TERMINATED, at)
            return cut
        array = self._slab.arrays.get(key)
        if array is None:
            array = as_array(columns[key])
        found: Array = array[at]
        return found

    @property
    def keys(self) -> Sequence[Key]:
        """Columns that the stage produces: observations first, then in the order of the layout."""
        found = [key for key in self.plan.layout if key not in self.actions]
        found += [key for key in (TRUNCATED, DONE) if key not in found]
        return sorted(found, key=lambda key: key[0] == NEXT)

    def go_on(self, slots: int) -> None:
        """Make room for the next block, after ``slots`` slots were filled."""
        self._slab.keep_last(slots, None)

    def call(self, call: Call, lane: int) -> None:
        """Repeat a call of a lane's environment.

        Raises:
            EnvironmentRefused: the call raises, or the environment is out of reach.
        """
        asked = EnvCall("env_set", call.name, values=call.args)
        if call.way == "env_call":
            asked = EnvCall("env_call", call.name, call.args, call.kwargs)
        for outcome in reach_env(self.env, asked, [lane]):
            if outcome.error is not None:
                raise EnvironmentRefused(
                    f"{asked} succeeded in the run, but raised {type(outcome.error).__name__} "
                    f"here: {outcome.error}. Make the environment as the run did."
                ) from outcome.error

    def close(self) -> None:
        """Close the environment."""
        self.env.close(raise_if_closed=False)


def as_tensor(values: Array, dtype: torch.dtype) -> torch.Tensor:
    """Convert stored values to a tensor; bfloat16 is stored as its bits."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.view(torch.bfloat16) if dtype is torch.bfloat16 else tensor


def as_array(column: torch.Tensor) -> Array:
    """Convert a column to the array that a storage holds."""
    column = column.detach().cpu()
    if column.dtype is torch.bfloat16:
        column = column.view(torch.uint16)
    return column.numpy()
