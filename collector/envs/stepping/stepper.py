"""The lanes of a system, stepped from slot to slot of a slab: arrays, and no tensors.

A collector drives it (`SystemLanes`, `ArrivingLanes`); `SystemEnv` is TorchRL's face over it. What
follows the end of an episode is in `ends.py`, resets of all lanes are in `restarts.py`.
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
    first_change,
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

Putting: TypeAlias = partial[int]
"""Writes the result of a step to a slot, and returns how many lanes ended.

That is observations, reward, terminated, truncated, and final observations or None. Where they are
not as the slot is it returns -1, whatever it wrote.
"""


def putting(
    rows: Sequence[NDArray[Any]],
    payoff: NDArray[Any],
    terminated: NDArray[Any],
    truncated: NDArray[Any],
    roots: Sequence[NDArray[Any]],
) -> Putting | None:
    """Write to these arrays of a slot; each of ``roots`` may be that of ``rows``.

    None: there is no extension, or it does not know them: contiguous ones, and rewards of floats.
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
    """The lanes of a :class:`System`, and the state that they are in.

    Args:
        system: the system.
        rename: other names for columns, old name -> new name.
        make: makes it again with seeds, where it takes them only then.
        draw: draws contexts, where it declares any.
        draws_later: a collector will say how they are drawn.

    Raises:
        ArgumentError: the system declares what cannot be, or lacks what it needs.
        NameRefused: names of columns that collide.
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
        """Lanes whose next step is a reset slot, where that is followed."""
        self._follows = False
        self.board: memoryview | None = None
        """Words for progress, of the collector that steps these lanes; None: no collector does."""
        self.doubts_finals = False
        """True if a user says that final observations are lost: agents' are marked so."""
        self._has_warned = False
        self._declare()

    def _declare(self) -> None:
        """Take what the system declares now."""
        self._declared = d = self.system.declares
        if (dtype := self.system.reward_dtype) is not None:
            d = replace(d, reward={key: spec.to(dtype) for key, spec in d.reward.items()})
        self.declares = d
        self.observation_keys: tuple[Key, ...] = tuple(self._names[: len(d.observation)])
        """Columns of observations, in their order; those of infos from the first reset on."""
        self.action_keys: tuple[Key, ...] = tuple(d.action)
        self.reward_keys: tuple[Key, ...] = tuple(d.reward)
        """Columns of rewards, without "next"."""
        self._next_rewards = [(NEXT, *key) for key in d.reward]
        self.results = Results(self.system, self.observation_keys)
        finish = FINISH.get(d.at_end)
        self._finish = None if finish is None else partial(finish, self)
        self._looks_behind = self._follows or bool(d.groups)
        if d.context or self.contexts.resets is not None:
            self.follow_resets()

    def store_rewards_as(self, dtype: torch.dtype | None) -> None:
        """Give columns of rewards a dtype; None: the one that the system declares."""
        if dtype is not self.system.reward_dtype:
            self.system.reward_dtype = dtype
            self._declare()

    def follow_resets(self) -> None:
        """Follow which lanes wait for a reset slot, where there are any, from now on."""
        if self.declares.has_reset_slots:
            self._follows = self._looks_behind = True

    @property
    def fills(self) -> bool:
        """True if it fills slots of a slab: its arrays are NumPy's."""
        return self.results.are_arrays

    @property
    def info_keys(self) -> tuple[Key, ...]:
        """Observations that report on the episode, and not on the environment's state."""
        columns = zip(self._names, self.system.columns, strict=True)
        return tuple(name for name, column in columns if column.what == "info")

    # --- resets, and steps into no slab -----------------------------------------------------------

    @property
    def takes_seeds(self) -> bool:
        """Each lane can be given a seed."""
        return self.restarts.takes_seeds(self.declares)

    def look_for_masks(self) -> None:
        """Let the next reset look for masks of legal actions in infos, for random actions.

        A column of such masks that was given another name says that they are not to be used.
        """
        columns = zip(self._names, self.system.columns, strict=True)
        others = any(
            each.path[-1:] == (MASK_NAME,) and name[-1] != MASK_NAME for name, each in columns
        )
        self.system.wants_masks = not others

    def seed_lanes(self, seeds: Sequence[int]) -> None:
        """Seed every lane at the next full reset, where that is possible."""
        if len(seeds) != self.declares.lanes:
            raise ArgumentError(
                f"expected {self.declares.lanes} seeds, one a lane, got {len(seeds)}"
            )
        self.restarts.seeds = [int(seed) for seed in seeds]

    def reset(self, **options: Any) -> Sequence[Array]:
        """Begin every lane's next episode, and return the first observations."""
        system, first = self.restarts.reset(self.system, **options)
        self.pending[:] = False
        if system is not self.system or system.declares is not self._declared:
            self.system = system
            self._declare()
        return first

    def reset_lanes(self, lanes: Mask, **options: Any) -> Sequence[Array]:
        """Begin the next episodes of some lanes."""
        first = self.system.reset(lanes, None, **options)
        self.contexts.draw(self.system, lanes)
        return first

    def step(self, action: Sequence[Array]) -> Step:
        """Step all lanes, also where they come back in any order."""
        d = self.declares
        if not d.arrivals:
            return self.system.step(action)
        if d.lanes % d.arrivals:
            raise EnvironmentRefused(
                f"{kind_of(self.system)}: {d.lanes} lanes that are stepped together, as through a "
                f"transform, have to be a multiple of the {d.arrivals} that come a call; make more "
                "or fewer"
            )
        lanes = np.arange(d.lanes, dtype=np.int32)
        for part in np.split(lanes, range(d.arrivals, d.lanes, d.arrivals)):
            self.system.send([each[part] for each in action], part)
        return whole(self.system, d.lanes)

    # --- steps into slots of a slab ---------------------------------------------------------------

    def cursor(self, slab: Slab, board: memoryview) -> Cursor:
        """Return the arrays of ``slab`` that steps read and write, with words for progress."""
        groups, self.board = self.declares.groups, board
        keys = self.observation_keys, self.action_keys, self.reward_keys
        return slab.cursor(*keys, groups, board)

    def writes_to(self, cursor: Cursor) -> Decision:
        """Choose how steps are written to slots of ``cursor``."""
        single = len(cursor.actions) == len(cursor.rewards) == 1 <= len(cursor.next_obs)
        return writing(
            single=single,
            compiled=single and putting(*cursor.slot(0)) is not None,
            looks_behind=self._looks_behind,
            lost_finals=cursor.next_valid is not None,
        )

    def step_of(self, cursor: Cursor, at: int) -> Callable[[], None]:
        """Return a function that steps through slot ``at``, as `writes_to` has chosen it."""
        rows, _, terminated, truncated, _ = slot = cursor.slot(at)
        put, action = putting(*slot), cursor.actions[0][at]
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
        """Step through the slots ``[start, stop)``, whose actions are all known beforehand.

        ``cursor.at`` is the slot under way; ``cursor.board`` may end the block after it.
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
        """Step only the first ``lanes`` lanes; the others keep their values.

        Only where lanes can be stepped in part; no lane at all can always be stepped.
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

        ``rows`` are its next observations. Other lanes have arbitrary values there.
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
        """Write rewards and both flags to the slot ``cursor.at``.

        Raises:
            TransitionError: they do not fit.
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
        """Report the first reward of ``value`` that is another number in ``row`` of its column.

        The collector warns of it, with the step of its trajectory; without one, this does.
        """
        changed = first_change(value, row)
        if changed is None:
            return
        lane, reward = self.results.number(changed[0], lanes), changed[1]
        if self.board is not None:
            note_rounding(self.board, lane, reward)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(rounding_of(key, lane, None, reward), RoundedWarning, stacklevel=5)

    def _after_step(self, cursor: Cursor, out: Step, stepped: Mask | None) -> None:
        """Write agents' flags, and compare the reset slots with the declared ones."""
        at = cursor.at
        for group, flags in cursor.agents.items():
            put_flags(flags, at, out.agents[group])
        self.put_valid(cursor, out)
        pending, skipped = self.pending, out.skipped
        ended = cursor.terminated[at] | cursor.truncated[at]
        if stepped is not None:  # the others are as they were
            pending, ended = pending & stepped, np.where(stepped, ended, pending)
            skipped = None if skipped is None else as_flags(skipped) & stepped
        if self._looks_behind or not self.declares.has_reset_slots:
            self.results.require_skipped(skipped, pending)
        if skipped is not None:
            self.follow_resets()  # from the first step on that names skipped lanes
        if self.declares.has_reset_slots:
            self.follow(pending, ended)

    def put_valid(self, cursor: Cursor, out: Step) -> None:
        """Write which next observations of agents are there to the slot ``cursor.at``."""
        if not cursor.agents_valid:
            return
        at, lost = cursor.at, None
        if self.doubts_finals:
            lost = cursor.terminated[at] | cursor.truncated[at]
        for group, column in cursor.agents_valid.items():
            put_valid(column[at], out.agents[group], lost)

    def _skips_pending(self, skipped: Array | None) -> bool:
        """Return whether a quick look finds that a step skipped those lanes that were to be."""
        pending = self.pending
        return (
            self._follows
            and type(skipped) is np.ndarray
            and skipped.dtype == np.bool_
            and skipped.shape == pending.shape
            and skipped.tobytes() == pending.tobytes()
        )

    def follow(self, reset: Mask, ended: Mask) -> None:
        """Follow reset slots over a step, which ``reset`` some lanes; ``ended`` are reset next."""
        self.contexts.draw(self.system, reset)
        self.pending[...] = ended
