"""Steps a system's lanes from slot to slot of a slab, with arrays and without tensors.

A collector drives a `Stepper` (`SystemLanes`, `ArrivingLanes`), and `SystemEnv` is the TorchRL
interface to it. `ends.py` handles ends of episodes, and `restarts.py` handles resets of all lanes.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.compat import count_true
from tallyroll.collector.envs.exact import RoundedWarning, rounding_of
from tallyroll.collector.envs.stepping.arrays import (
    as_flags,
    first_changed_reward,
    fitting,
    put_flags,
    put_valid,
    whole,
)
from tallyroll.collector.envs.stepping.contexts import Contexts, Draw
from tallyroll.collector.envs.stepping.ends import FINISH, Rows
from tallyroll.collector.envs.stepping.restarts import Make, Restarts
from tallyroll.collector.envs.stepping.results import Results, kind_of
from tallyroll.collector.envs.system import Array, Mask, Step, System, require_consistent
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, ValueRefused
from tallyroll.collector.native.kernel import compiled, in_order
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.collector.run_plan import Decision, writing
from tallyroll.collector.slab.names import Rename, renamed, require_names
from tallyroll.collector.slab.progress import FILLED, HALT, note_rounding
from tallyroll.collector.slab.slab import Cursor, Slab
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.rows.keys import NEXT, TERMINATED, TRUNCATED, Key

SlotWriter: TypeAlias = partial[int]
"""Function that writes the result of a step to a slot, and returns the number of ended lanes.

The arguments are observations, reward, terminated, truncated, and final observations or None. If
their form differs from that of the slot, the function returns -1 and leaves the slot undefined.
"""


def make_slot_writer(
    rows: Sequence[NDArray[Any]],
    payoff: NDArray[Any],
    terminated: NDArray[Any],
    truncated: NDArray[Any],
    roots: Sequence[NDArray[Any]],
) -> SlotWriter | None:
    """Return a function that writes steps to these arrays of a slot.

    An element of ``roots`` may be the same array as the corresponding element of ``rows``.

    Return None without the C extension, and for arrays that it does not support: it requires
    contiguous arrays and scalar float rewards.
    """
    floats = np.dtype(np.float32), np.dtype(np.float64)
    kernel = compiled()
    if kernel is None or payoff.ndim > 1 or payoff.dtype not in floats:
        return None
    if not all(each.flags.c_contiguous for each in (*rows, *roots, payoff, terminated, truncated)):
        return None
    words: list[Any] = in_order(
        "SLOT",
        reward=payoff,
        terminated=terminated,
        truncated=truncated,
        reward_is_double=payoff.dtype == np.float64,
        lanes=len(terminated),
    )
    for row, root in zip(rows, roots, strict=True):
        other = 0 if root.ctypes.data == row.ctypes.data else root
        words += [*in_order("OBSERVATION", row=row, root=other, ndim=row.ndim), *row.shape]
    formats = tuple(row.data.format.encode() for row in rows)
    return partial(kernel.put_step, table_of(words), formats)


class Stepper:
    """The lanes of a :class:`System`, and their state.

    Args:
        system: the system.
        rename: new names for columns, old name -> new name.
        make: function that makes the system again, if it accepts seeds only when it is made.
        draw: function that draws contexts, if the system declares any.
        draws_later: True if a collector will decide how contexts are drawn.

    Raises:
        ArgumentError: the declaration of the system is inconsistent, or a required argument is
            missing.
        NameRefused: names of columns collide.
    """

    def __init__(
        self,
        system: System,
        *,
        rename: Rename | None = None,
        make: Make | None = None,
        draw: Draw | None = None,
        draws_later: bool = False,
    ) -> None:
        require_consistent(system.declares)
        self.system = system
        self.contexts = Contexts(system, draw, later=draws_later)
        self.restarts = Restarts(make, self.contexts)
        self._names = renamed(system.columns, rename or {})
        d = system.declares
        require_names(system.columns, [*d.action], [*d.reward], given=self._names)
        self.pending = np.zeros(d.lanes, np.bool_)
        """Lanes whose next step is a reset slot, if reset slots are tracked."""
        self._follows = False
        self.board: memoryview | None = None
        """Progress words of the collector that steps these lanes; None without a collector."""
        self.doubts_finals = False
        """True if final observations of agents are marked as lost, as the user declares them."""
        self._has_warned = False
        self._declare()

    def _declare(self) -> None:
        """Update the columns from the system's present declaration."""
        self._declared = d = self.system.declares
        if (dtype := self.system.reward_dtype) is not None:
            d = replace(d, reward={key: spec.to(dtype) for key, spec in d.reward.items()})
        self.declares = d
        self.observation_keys: tuple[Key, ...] = tuple(self._names[: len(d.observation)])
        """Columns of observations, in order. Info columns are included from the first reset on."""
        self.action_keys: tuple[Key, ...] = tuple(d.action)
        self.reward_keys: tuple[Key, ...] = tuple(d.reward)
        """Columns of rewards, without the prefix "next"."""
        self._next_rewards = [(NEXT, *key) for key in d.reward]
        self.results = Results(self.system, self.observation_keys)
        finish = FINISH.get(d.at_end)
        self._finish = None if finish is None else partial(finish, self)
        self._looks_behind = self._follows or bool(d.groups)
        if d.context or self.contexts.resets is not None:
            self.track_reset_slots()

    def store_rewards_as(self, dtype: torch.dtype | None) -> None:
        """Store rewards as ``dtype``; None selects the dtype that the system declares."""
        if dtype is not self.system.reward_dtype:
            self.system.reward_dtype = dtype
            self._declare()

    def keep_on(self, device: torch.device) -> bool:
        """Keep the arrays of the system on ``device`` if possible, as `System.keep_on` does."""
        kept = self.system.keep_on(device)
        if kept:
            self._declare()
        return kept

    def mark_lost_finals(self, doubts: bool) -> None:
        """Set whether the final observations of agents are marked as lost."""
        self.doubts_finals = doubts

    def report_to(self, board: memoryview) -> None:
        """Write the number of complete slots to ``board``."""
        self.board = board

    def track_reset_slots(self) -> None:
        """From now on, track which lanes wait for a reset slot, if the system has reset slots."""
        if self.declares.has_reset_slots:
            self._follows = self._looks_behind = True

    @property
    def fills(self) -> bool:
        """True if the stepper can fill slots of a slab: its arrays are NumPy arrays."""
        return self.results.are_arrays

    @property
    def info_keys(self) -> tuple[Key, ...]:
        """Columns that hold info entries instead of the environment's state."""
        columns = zip(self._names, self.system.columns, strict=True)
        return tuple(name for name, column in columns if column.what == "info")

    # --- resets, and steps without a slab ---------------------------------------------------------

    @property
    def takes_seeds(self) -> bool:
        """True if each lane can be given a seed."""
        return self.restarts.takes_seeds(self.declares)

    def look_for_masks(self) -> None:
        """Make the next reset look for masks of legal actions in infos, for random actions.

        If the user gave a column of such masks another name, the masks are not used.
        """
        columns = zip(self._names, self.system.columns, strict=True)
        others = any(
            each.path[-1:] == (MASK_NAME,) and name[-1] != MASK_NAME for name, each in columns
        )
        self.system.wants_masks = not others

    def seed_lanes(self, seeds: Sequence[int]) -> None:
        """Seed every lane at the next full reset, if the system accepts seeds."""
        if len(seeds) != self.declares.lanes:
            raise ArgumentError(
                f"expected {self.declares.lanes} seeds, one per lane, got {len(seeds)}"
            )
        self.restarts.seed_next([int(seed) for seed in seeds])

    def reset(self, **options: Any) -> Sequence[Array]:
        """Start the next episode in every lane, and return the first observations."""
        system, first = self.restarts.reset(self.system, **options)
        self.pending[:] = False
        if system is not self.system or system.declares is not self._declared:
            self.system = system
            self._declare()
        return first

    def reset_lanes(self, lanes: Mask, **options: Any) -> Sequence[Array]:
        """Start the next episode in ``lanes``, a mask, and return their first observations."""
        first = self.system.reset(lanes, None, **options)
        self.contexts.draw(self.system, lanes)
        return first

    def step(self, action: Sequence[Array]) -> Step:
        """Step all lanes once, also if the system returns them in any order."""
        d = self.declares
        if not d.arrivals:
            return self.system.step(action)
        if d.lanes % d.arrivals:
            raise EnvironmentRefused(
                f"{kind_of(self.system)}: expected a multiple of {d.arrivals} lanes, which is the "
                f"number that one call returns, got {d.lanes}. All lanes are stepped together, for "
                "example through a transform. Make more or fewer lanes."
            )
        lanes = np.arange(d.lanes, dtype=np.int32)
        for part in np.split(lanes, range(d.arrivals, d.lanes, d.arrivals)):
            self.system.send([each[part] for each in action], part)
        return whole(self.system, d.lanes)

    # --- steps into slots of a slab ---------------------------------------------------------------

    def cursor(self, slab: Slab, board: memoryview) -> Cursor:
        """Return the arrays of ``slab`` that steps read and write, with the progress words."""
        groups, self.board = self.declares.groups, board
        keys = self.observation_keys, self.action_keys, self.reward_keys
        return slab.cursor(*keys, groups, board)

    def writes_to(self, cursor: Cursor) -> Decision:
        """Choose how steps are written to slots of ``cursor``."""
        single = len(cursor.actions) == len(cursor.rewards) == 1 <= len(cursor.next_obs)
        return writing(
            single=single,
            compiled=single and make_slot_writer(*cursor.slot(0)) is not None,
            looks_behind=self._looks_behind,
            lost_finals=cursor.next_valid is not None,
        )

    def step_of(self, cursor: Cursor, at: int) -> Callable[[], None]:
        """Return a function that steps through slot ``at`` on the compiled path.

        Call it only if `writes_to` has chosen that path.
        """
        rows, _, terminated, truncated, _ = slot = cursor.slot(at)
        put, action = make_slot_writer(*slot), cursor.actions[0][at]
        assert put is not None, "writes_to has chosen it"
        board, finish, array, row = cursor.board, self._finish, np.ndarray, rows[0]
        table = put.args[0]
        draws = bool(self.declares.context) or self.contexts.resets is not None
        beside = self.declares.at_end == "first" and not draws

        def step() -> None:
            cursor.at = at
            into = self.system.into
            if into is None:
                out = self.system.step((action.copy(),))
            elif (more_to_do := into(action.copy(), row, table)) is None:
                board[FILLED] = at + 1
                return
            else:
                out = more_to_do
            obs, reward, over, cut, final = out[:5]
            if not beside:
                final = None
            ended = -1
            more = out.skipped is not None or self._looks_behind
            known = not more or self._skips_pending(out.skipped)
            if len(reward) == 1 and type(obs[0]) is array and known:
                ended = put(obs, reward[0], over, cut, final)
            if ended < 0:
                self._put(cursor, rows, out)
            elif more:
                self.follow(self.pending, terminated | truncated)
            elif finish is not None and ended and final is None:
                finish(cursor, terminated | truncated, out, rows)
            board[FILLED] = at + 1

        return step

    def step_block(self, cursor: Cursor, start: int, stop: int) -> None:
        """Step through the slots ``[start, stop)``, whose actions are already known.

        ``cursor.at`` is set to the current slot. The word ``HALT`` of ``cursor.board`` ends the
        block after that slot.
        """
        step, put, board = self.system.step, self._put, cursor.board
        for at in range(start, stop):
            cursor.at = at
            rows = [column[at] for column in cursor.next_obs]
            put(cursor, rows, step([column[at].copy() for column in cursor.actions]))
            board[FILLED] = at + 1
            if board[HALT]:
                break

    def step_part(self, cursor: Cursor, lanes: int) -> None:
        """Step only the first ``lanes`` lanes. The others keep their values.

        Requires a system that can step some of its lanes, unless ``lanes`` is 0.
        """
        at = cursor.at
        others = slice(lanes, None)
        if lanes:
            values = (*cursor.rewards, cursor.terminated, cursor.truncated)
            kept = [column[at, others].copy() for column in values]
            some = np.arange(self.declares.lanes) < lanes
            out = self.system.step([column[at].copy() for column in cursor.actions], some)
            self._put(cursor, [column[at] for column in cursor.next_obs], out, some)
            for column, value in zip(values, kept, strict=True):
                column[at, others] = value
        for columns in (cursor.next_obs, cursor.root_obs):
            for column, seen in zip(columns, cursor.seen_obs, strict=bool(columns)):
                column[at, others] = seen[at, others]
        cursor.board[FILLED] = at + 1

    def _put(self, cursor: Cursor, rows: Rows, out: Step, stepped: Mask | None = None) -> None:
        """Write the result of a step of ``stepped`` lanes (None: all) to the slot ``cursor.at``.

        ``rows`` are the next observations of the slot. Rows of other lanes are undefined.
        """
        at = cursor.at
        for index, (row, value) in enumerate(zip(rows, out.obs, strict=True)):
            # A row of a slab has the declared shape and dtype.
            if type(value) is np.ndarray and value.shape == row.shape and value.dtype == row.dtype:
                row[...] = value
            else:
                row[...] = self.results.array(index, value)
        self.put_values(cursor, out)
        if cursor.next_valid is not None:
            cursor.next_valid[at] = True
        if self._finish is not None:
            for root, row in zip(cursor.root_obs, rows, strict=True):
                root[at] = row
            ended = cursor.terminated[at] | cursor.truncated[at]
            ended = ended if stepped is None else ended & stepped
            if count_true(ended):
                self._finish(cursor, ended, out, rows)
        if self._looks_behind or out.skipped is not None:
            self._after_step(cursor, out, stepped)

    def put_values(self, cursor: Cursor, out: Step) -> None:
        """Write rewards and the flags of ends to the slot ``cursor.at``.

        Raises:
            TransitionError: a shape, a dtype or a value does not fit the column.
        """
        at, terminated, truncated = cursor.at, cursor.terminated, cursor.truncated
        try:
            for key, to, value in zip(self._next_rewards, cursor.rewards, out.reward, strict=True):
                row = to[at]
                row[...] = fitting(value, row, key)
                self.note_rounding(key, value, row, out.lanes)
            terminated[at] = fitting(out.terminated, terminated[at], TERMINATED)
            truncated[at] = fitting(out.truncated, truncated[at], TRUNCATED)
        except (TypeError, ValueError, ValueRefused) as error:
            raise self.results.unfit(out, error) from error

    def note_rounding(
        self, key: Key, value: Array, row: NDArray[Any], lanes: Array | None = None
    ) -> None:
        """Report the first reward of ``value`` that ``row`` of its column stores as another number.

        If a collector steps the lanes, the collector warns and names the step of the trajectory.
        Otherwise this method warns, once.
        """
        changed = first_changed_reward(value, row)
        if changed is None:
            return
        lane, reward = self.results.number(changed[0], lanes), changed[1]
        if self.board is not None:
            note_rounding(self.board, lane, reward)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(rounding_of(key, lane, None, reward), RoundedWarning, stacklevel=5)

    def _after_step(self, cursor: Cursor, out: Step, stepped: Mask | None) -> None:
        """Write the flags of agents, and validate the skipped lanes against the declaration."""
        at = cursor.at
        for group, flags in cursor.agents.items():
            put_flags(flags, at, out.agents[group])
        self.put_valid(cursor, out)
        pending, skipped = self.pending, out.skipped
        ended = cursor.terminated[at] | cursor.truncated[at]
        if stepped is not None:  # the other lanes are unchanged
            pending, ended = pending & stepped, np.where(stepped, ended, pending)
            skipped = None if skipped is None else as_flags(skipped) & stepped
        if self._looks_behind or not self.declares.has_reset_slots:
            self.results.require_skipped(skipped, pending)
        if skipped is not None:
            self.track_reset_slots()  # from the first step that names skipped lanes
        if self.declares.has_reset_slots:
            self.follow(pending, ended)

    def put_valid(self, cursor: Cursor, out: Step) -> None:
        """Write to the slot ``cursor.at`` which next observations of agents are present."""
        if not cursor.agents_valid:
            return
        at, lost = cursor.at, None
        if self.doubts_finals:
            lost = cursor.terminated[at] | cursor.truncated[at]
        for group, column in cursor.agents_valid.items():
            put_valid(column[at], out.agents[group], lost)

    def _skips_pending(self, skipped: Array | None) -> bool:
        """Return True if a fast check shows that the step skipped exactly the pending lanes."""
        pending = self.pending
        return (
            self._follows
            and type(skipped) is np.ndarray
            and skipped.dtype == np.bool_
            and skipped.shape == pending.shape
            and skipped.tobytes() == pending.tobytes()
        )

    def follow(self, reset: Mask, ended: Mask) -> None:
        """Track reset slots after a step that reset the lanes ``reset``. Lanes ``ended`` in it."""
        self.contexts.draw(self.system, reset)
        self.pending[...] = ended
