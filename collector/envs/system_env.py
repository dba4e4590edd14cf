"""The environment that a collector drives over any `System`; it fills the slab itself.

It is put together from one file an idea: `declared_env` (specs, names, seeds, contexts),
`checked_env` (what is refused), `torchrl_protocol` (``step`` and ``reset``) and `slot_ends` (what
follows a step); here is the way that a collector takes at every step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.compat import count_true
from tallyroll.collector.envs.arrays import are_small, fitting
from tallyroll.collector.envs.slot_ends import SlotEnds
from tallyroll.collector.envs.system import Array, Step
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.run_plan import SMALL_NBYTES, Decision, writing
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Cursor
from tallyroll.storage.engine.kernel import compiled, table_of
from tallyroll.storage.rows.keys import TERMINATED, TRUNCATED

_BOOL = np.dtype(np.bool_)


class SystemEnv(SlotEnds):
    """A TorchRL environment over a :class:`System`.

    Keys are those that the system declares, with a leading dimension of its lanes; reward is
    float32 where it declares nothing else; done, terminated and truncated are bool
    ``[lanes, 1]``, and those of a group of agents ``[lanes, agents, 1]`` below its name.

    Args:
        system: a system, which is closed with this.
        rename: other names for columns, old name -> new name; nested ones as tuples or ``"a/b"``.
        make: makes it again with seeds, where it takes them only then.
        draw: draws contexts, from a generator of each lane; one a lane ahead, for some systems
            reset within their step. Needed where the system declares a context.

    Raises:
        ArgumentError: the system declares what cannot be, or lacks what it needs.
        NameRefused: names of columns that collide.
    """

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """One batched step; lanes whose episode ended start the next one.

        With a tensordict of a slab (it has the attribute ``cursor``) the slab is filled in place,
        and the tensordict returned as it is; any other is treated as TorchRL's own environments
        treat it.
        """
        cursor: Cursor | None = getattr(tensordict, "cursor", None)
        if cursor is not None:
            self.step_block(cursor, cursor.at, cursor.at + 1)
            return tensordict, tensordict
        if self.marks_transitions:
            tensordict = self.step(tensordict)
            return tensordict, self._set_flags(self._step_mdp(tensordict))
        stepped: tuple[TensorDictBase, TensorDictBase] = super().step_and_maybe_reset(tensordict)
        return stepped

    def step_block(self, cursor: Cursor, start: int, stop: int) -> None:
        """Step through the slots ``[start, stop)``, whose actions are all known beforehand.

        ``cursor.at`` is the slot under way; ``cursor.board`` may end the block after it.
        """
        system = self.system
        lend = system.lend if system.lends else None
        system.while_waiting = cursor.while_waiting
        try:
            self._step_block(cursor, start, stop, lend, system.step)
        finally:
            system.while_waiting = None
            if lend is not None:
                lend(None)

    def writes_to(self, cursor: Cursor) -> Decision:
        """Choose how steps are written to slots of ``cursor``."""
        return writing(
            small=cursor.next_obs[0][0].nbytes <= SMALL_NBYTES,
            single=len(cursor.next_obs) == len(cursor.actions) == len(cursor.rewards) == 1,
            looks_behind=self._looks_behind,
            lost_finals=cursor.next_valid is not None,
        )

    def step_of(self, cursor: Cursor, at: int) -> Callable[[], None]:
        """Return a function that steps through slot ``at``, and copies results to views of it.

        To let the system write there would cost more; `writes_to` has chosen it.
        """
        action, *slot = cursor.slot(at)
        row, _, terminated, truncated, _ = slot
        put, compiled = _putting(*slot), _compiled_putting(*slot)
        board, finish, array = cursor.board, self._finish, np.ndarray

        def step() -> None:
            cursor.at = at
            if cursor.while_waiting is None:
                out = self.system.step((action.copy(),))
            else:
                out = self._step_while_waiting(cursor, action)
            obs, reward, over, cut = out[:4]
            ended = -1
            more = out.skipped is not None or self._tells_skips
            if len(obs) == len(reward) == 1 and type(obs[0]) is array and not more:
                if compiled is not None:
                    ended = compiled(obs[0], reward[0], over, cut)
                if ended < 0:
                    ended = put(obs[0], reward[0], over, cut)
            if ended < 0:
                self._step_block(cursor, at, at + 1, None, lambda _: out)
                return
            if finish is not None and ended:
                finish(cursor, terminated | truncated, out, (row,))
            board[FILLED] = at + 1

        return step

    def _step_while_waiting(self, cursor: Cursor, action: Array) -> Step:
        system = self.system
        system.while_waiting = cursor.while_waiting
        try:
            return system.step((action.copy(),))
        finally:
            system.while_waiting = None

    def _step_block(
        self,
        cursor: Cursor,
        start: int,
        stop: int,
        lend: Callable[[Any], None] | None,
        step: Callable[[Sequence[Array]], Step],
    ) -> None:
        finish, write = self._finish, self._write
        next_obs, root_obs, board = cursor.next_obs, cursor.root_obs, cursor.board
        terminated, truncated = cursor.terminated, cursor.truncated
        looks_behind = self._looks_behind
        if cursor.next_valid is not None:
            cursor.next_valid[start:stop] = True
        lanes, keys = terminated.shape[1:], self.next_rewards
        for at in range(start, stop):
            cursor.at = at
            rows = [column[at] for column in next_obs]
            if lend is not None:
                lend(rows)
            out = step([column[at].copy() for column in cursor.actions])
            write(rows, out.obs)
            try:
                for key, column, value in zip(keys, cursor.rewards, out.reward, strict=True):
                    column[at] = fitting(value, column[at], key)
                for flags, value in ((terminated, out.terminated), (truncated, out.truncated)):
                    if (
                        type(value) is not np.ndarray
                        or value.shape != lanes
                        or value.dtype is not _BOOL
                    ):
                        key = TERMINATED if flags is terminated else TRUNCATED
                        value = fitting(value, flags[at], key)
                    flags[at] = value
            except (TypeError, ValueError, ValueRefused) as error:
                raise self._unfit(out, error) from error
            if finish is not None:
                for root, row in zip(root_obs, rows, strict=True):
                    root[at] = row
                ended = terminated[at] | truncated[at]
                if count_true(ended):
                    finish(cursor, ended, out, rows)
            if looks_behind or out.skipped is not None:
                self._after_step(cursor, out)
                looks_behind = self._looks_behind
            board[FILLED] = at + 1
            if board[HALT]:
                break

    def _write(self, rows: Sequence[NDArray[Any]], values: Sequence[Array]) -> None:
        for index, (row, value) in enumerate(zip(rows, values, strict=True)):
            # A row of a slab has the declared shape and dtype.
            if type(value) is np.ndarray and value.shape == row.shape and value.dtype == row.dtype:
                row[...] = value
            elif value is not row:
                row[...] = self._array(index, value)


_Putting: TypeAlias = Callable[[Array, Array, Array, Array], int]
"""Writes the result of a step to a slot, and returns how many lanes ended.

That is observation, reward, terminated, truncated. Where they are not as the slot is it returns
-1, whatever it wrote.
"""


def _putting(
    row: NDArray[Any],
    payoff: NDArray[Any],
    terminated: NDArray[Any],
    truncated: NDArray[Any],
    root: NDArray[Any],
) -> _Putting:
    """Write to these arrays of a slot; ``root`` may be ``row``."""
    arrays = row, payoff, terminated, truncated
    apart = root.ctypes.data != row.ctypes.data

    def put(*given: Array) -> int:
        if any(type(each) is not np.ndarray for each in given) or given[0].dtype != row.dtype:
            return -1
        reward, *flags = given[1:]
        if reward.dtype.kind != "f" or _overflows(reward, payoff.dtype):
            return -1
        if any(each.dtype is not _BOOL for each in flags):
            return -1
        if any(each.shape != own.shape for each, own in zip(given, arrays, strict=True)):
            return -1
        try:
            for each, own in zip(given, arrays, strict=True):
                own[...] = each
        except (TypeError, ValueError):
            return -1
        if apart:
            root[...] = row
        return count_true(terminated | truncated)

    return put


def _overflows(reward: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Some finite reward is none as ``dtype``."""
    if reward.dtype == dtype or are_small(reward):
        return False
    with np.errstate(over="ignore"):
        return bool((np.isinf(reward.astype(dtype)) & np.isfinite(reward)).any())


def _compiled_putting(
    row: NDArray[Any],
    payoff: NDArray[Any],
    terminated: NDArray[Any],
    truncated: NDArray[Any],
    root: NDArray[Any],
) -> _Putting | None:
    """The same, which knows contiguous arrays and rewards of floats; None: there is none."""
    places = row, root, payoff, terminated, truncated
    floats = np.dtype(np.float32), np.dtype(np.float64)
    kernel = compiled()
    if kernel is None or payoff.ndim > 1 or payoff.dtype not in floats:
        return None
    if not all(each.flags.c_contiguous for each in places):
        return None
    words = [each.ctypes.data for each in places]
    if words[1] == words[0]:
        words[1] = 0
    table = table_of([*words, payoff.dtype == np.float64, len(terminated), *row.shape])
    return partial(kernel.put_step, table, row.data.format.encode())
