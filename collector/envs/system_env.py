"""The environment that a collector drives over any `System`; it fills the slab itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, TensorSpec
from torchrl.envs import EnvBase

from tallyroll.collector.compat import count_true
from tallyroll.collector.counting.numbering import lane_seed, lane_seeds
from tallyroll.collector.envs.system import (
    AgentFlags,
    Array,
    Mask,
    Step,
    System,
    require_consistent,
)
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, TransitionError
from tallyroll.collector.slab.names import Rename, renamed, require_names
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Cursor
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import NEXT_VALID, VALID, Key, spell

Make = Callable[[Sequence[int] | None], System]
"""Makes a system from one seed a lane; None: from any."""

Draw = Callable[[np.random.Generator], Mapping[str, Any]]
"""Draws a lane's context: a value for each name in ``Declares.context``."""

_SMALL_NBYTES = 2**12
_FLAGS = ("terminated", "truncated", "done")


class SystemEnv(EnvBase):
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
        """Specs of what the system declares now."""
        self._declares = d = self.system.declares
        shape = torch.Size([d.lanes])

        def grown(spec: TensorSpec) -> TensorSpec:
            return spec.expand(d.lanes, *spec.shape).clone().to(self.device)

        def flags(*inner: int) -> dict[str, TensorSpec]:
            spec = Binary(1, shape=(d.lanes, *inner, 1), dtype=torch.bool, device=self.device)
            return {name: spec.clone() for name in ("done", "terminated", "truncated")}

        def composite() -> Composite:
            made = Composite(shape=shape, device=self.device)
            for group, size in d.groups.items():
                made[group] = Composite(shape=(d.lanes, size), device=self.device)
            return made

        observation, action, reward, done = composite(), composite(), composite(), composite()
        for key, spec in zip(self.observation_keys, d.observation.values(), strict=True):
            observation[key] = grown(spec)
        if self.marks_transitions:
            observation[VALID] = flags()["done"]
        if d.finals == "some":
            observation[NEXT_VALID] = Binary(shape=shape, dtype=torch.bool, device=self.device)
        for target, declared in ((action, d.action), (reward, d.reward)):
            for key, spec in declared.items():
                target[key] = grown(spec)
        for name, spec in flags().items():
            done[name] = spec
        for group, size in d.groups.items():
            for name, spec in flags(size).items():
                done[group, name] = spec
        self.observation_spec = observation
        self.action_spec, self.reward_spec, self.done_spec = (
            _without_empty(each) for each in (action, reward, done)
        )
        self._expected = [
            ((d.lanes, *spec.shape), NUMPY[spec.dtype])
            for spec in d.observation.values()
            if spec.dtype is not torch.bfloat16
        ]
        finish = {"final": self._finish_by_mask, "first": self._finish_first}
        self._finish = finish.get(d.at_end)

    # --- what it is -------------------------------------------------------------------------------

    @property
    def fills(self) -> bool:
        """It fills slots of a slab itself: its arrays are NumPy's."""
        return self.device.type == "cpu" and len(self._expected) == len(self._declares.observation)

    @property
    def resets_by_mask(self) -> bool:
        """Some lanes can be reset while the others go on."""
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
        """Observations that say how an episode went, and not what was observed."""
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
        """Draw what the next reset of a mask of ``lanes`` takes; None: of all."""
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

    # --- in place: the collector's path -----------------------------------------------------------

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
        if start == 0 and stop == 1 and self._step_first(cursor):
            return
        lend = self.system.lend if self.system.lends else None
        try:
            self._step_block(cursor, start, stop, lend, self.system.step)
        finally:
            if lend is not None:
                lend(None)

    def _step_first(self, cursor: Cursor) -> bool:
        """Step through slot 0 alone, by views that stay; False, and nothing done, if it is more.

        That is one small column of each kind: to let the system write there would cost more than
        to copy it.
        """
        slot = cursor.first
        if slot is None:
            slot = cursor.first = cursor.slot(0) if self._is_plain(cursor) else ()
        if not slot:
            return False
        action, row, payoff, terminated, truncated, root = slot
        cursor.at, system = 0, self.system
        out = system.step((action.copy(),))
        (value, *more), (reward, *others) = out.obs, out.reward
        if (
            more
            or others
            or not type(value) is type(reward) is type(out.terminated) is np.ndarray
            or value.shape != row.shape
            or value.dtype != row.dtype
            or reward.shape != payoff.shape
            or out.terminated.shape != terminated.shape
            or out.truncated.shape != truncated.shape
            or out.skipped is not None
        ):
            self._step_block(cursor, 0, 1, None, lambda _: out)
            return True
        row[...] = value
        try:
            payoff[...], terminated[...], truncated[...] = reward, out.terminated, out.truncated
        except (TypeError, ValueError) as error:
            raise self._wrong_shapes(out) from error
        if self._finish is not None:
            root[...] = row
            ended = terminated | truncated
            if count_true(ended):
                try:
                    self._finish(cursor, ended, out, (row,))
                finally:
                    if system.lends:
                        system.lend(None)
        cursor.board[FILLED] = 1
        return True

    def _is_plain(self, cursor: Cursor) -> bool:
        """A slot has one small column of each kind, and no more than these is to be done."""
        columns = cursor.next_obs, cursor.actions, cursor.rewards
        small = cursor.next_obs[0][0].nbytes <= _SMALL_NBYTES
        more = self._looks_behind or self.has_reset_slots or cursor.next_valid is not None
        return small and not more and [*map(len, columns)] == [1, 1, 1]

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
        # Most systems have one column of each kind, and a list costs as much as a step of some.
        single = len(cursor.actions) == len(next_obs) == len(cursor.rewards) == 1
        action, first, payoff = cursor.actions[0], next_obs[0], cursor.rewards[0]
        paid, lanes = payoff.shape[1:], terminated.shape[1:]
        for at in range(start, stop):
            cursor.at = at
            rows = (first[at],) if single else [column[at] for column in next_obs]
            if lend is not None:
                lend(rows)
            if single:
                out = step((action[at].copy(),))
                value, row = out.obs[0], rows[0]
                if value is not row:
                    if (
                        type(value) is np.ndarray
                        and value.shape == row.shape
                        and value.dtype == row.dtype
                    ):
                        row[...] = value
                    else:
                        write(rows, out.obs)
            else:
                out = step([column[at].copy() for column in cursor.actions])
                write(rows, out.obs)
            try:
                if single:
                    (value,) = out.reward
                    if type(value) is not np.ndarray or value.shape != paid:
                        value = fitting(value, payoff[at])
                    payoff[at] = value
                else:
                    for column, value in zip(cursor.rewards, out.reward, strict=True):
                        column[at] = fitting(value, column[at])
                for flags, value in ((terminated, out.terminated), (truncated, out.truncated)):
                    if type(value) is not np.ndarray or value.shape != lanes:
                        value = fitting(value, flags[at])
                    flags[at] = value
            except (TypeError, ValueError) as error:
                raise self._wrong_shapes(out) from error
            if finish is not None:
                if single:
                    root_obs[0][at] = rows[0]
                else:
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

    @property
    def _looks_behind(self) -> bool:
        """A step is more than observations, rewards and ends."""
        d = self._declares
        return bool(d.groups) or (self.has_reset_slots and (bool(d.context) or self._tells_skips))

    def _write(self, rows: Sequence[NDArray[Any]], values: Sequence[Array]) -> None:
        for index, (row, value) in enumerate(zip(rows, values, strict=True)):
            # A row of a slab has the declared shape and dtype.
            if type(value) is np.ndarray and value.shape == row.shape and value.dtype == row.dtype:
                row[...] = value
            elif value is not row:
                row[...] = self._array(index, value)

    def _array(self, index: int, value: Array, count: int | None = None) -> NDArray[Any]:
        """An observation as NumPy has it; what its spec does not declare is refused.

        ``count`` are its rows, where they are not those of all lanes.
        """
        if isinstance(value, torch.Tensor):
            value = value.detach().numpy()
        elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
            value = np.from_dlpack(value)
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        wanted = self._expected[index]
        if count is not None:
            wanted = (count, *wanted[0][1:]), wanted[1]
        if not isinstance(value, np.ndarray) or (shape, dtype) != wanted:
            raise TransitionError(
                f"{spell(self.observation_keys[index])}: the space declares {wanted[1]} "
                f"{list(wanted[0])}, the environment returned {dtype} {list(shape or ())} "
                f"({type(value).__name__}); correct the environment's space, or cast in a wrapper"
            )
        return value

    def _wrong_shapes(self, out: Step) -> TransitionError:
        got: dict[str, Any] = {
            "reward": [list(np.shape(each)) for each in out.reward],
            "terminated": list(np.shape(out.terminated)),
            "truncated": list(np.shape(out.truncated)),
        }
        if len(out.reward) == 1:
            got["reward"] = got["reward"][0]
        return TransitionError(
            f"expected reward, terminated and truncated of shape {list(self.batch_size)}, one "
            f"number a lane, got the shapes {got}; reduce a vector of rewards in a wrapper"
        )

    def _finish_by_mask(
        self, cursor: Cursor, ended: Mask, out: Step, rows: Sequence[NDArray[Any]]
    ) -> None:
        roots = [column[cursor.at] for column in cursor.root_obs]
        if self.system.lends:
            self.system.lend(roots)
        first = self.system.reset(ended, None)
        for index, (_, value) in enumerate(zip(roots, first, strict=True)):
            if value is not roots[index]:
                roots[index][ended] = self._array(index, value)[ended]
        self._draw_contexts(ended)

    def _finish_first(
        self, cursor: Cursor, ended: Mask, out: Step, rows: Sequence[NDArray[Any]]
    ) -> None:
        self._put_finals(cursor, ended, out, rows)
        self._draw_contexts(ended)

    def _put_finals(
        self, cursor: Cursor, ended: Mask, out: Step, rows: Sequence[NDArray[Any]]
    ) -> None:
        """Replace the first observations of the next episodes by the final ones."""
        if out.final is not None:
            for index, row in enumerate(rows):
                row[ended] = self._array(index, out.final[index], len(ended))[ended]
        elif self._declares.finals == "extra" and ended.any():
            raise self._lost_finals(ended)
        if cursor.next_valid is not None:
            valid = np.zeros_like(ended) if out.final_valid is None else as_flags(out.final_valid)
            cursor.next_valid[cursor.at] = ~ended | valid

    def _lost_finals(self, ended: Mask) -> TransitionError:
        return TransitionError(
            f"{self.kind} declares that final observations come beside the first ones, and "
            "gave none at the end of an episode of lane "
            f"{self.first_lane + int(np.argmax(ended))}, so they are lost; let a wrapper hand "
            "them out, or use a mode that does not reset within the step"
        )

    def _after_step(self, cursor: Cursor, out: Step, stepped: Mask | None = None) -> None:
        """Agents' flags, and what a reset slot does."""
        at = cursor.at
        for group, flags in cursor.agents.items():
            _put_flags(flags, at, out.agents[group])
        pending, skipped = self._pending, out.skipped
        ended = cursor.terminated[at] | cursor.truncated[at]
        if stepped is not None:  # the others are as they were
            pending, ended = pending & stepped, np.where(stepped, ended, pending)
            skipped = None if skipped is None else as_flags(skipped) & stepped
        if self._looks_behind or not self.has_reset_slots:
            self._require_skipped(skipped, pending)
        # Which lanes wait for a reset slot is followed from the first time that it speaks of it.
        if skipped is not None and not self._tells_skips:
            self._tells_skips = True
        if self.has_reset_slots:
            self._draw_contexts(pending)
            self._pending[...] = ended  # setting an attribute of a module costs five times as much

    def _require_skipped(
        self, skipped: Array | None, pending: Mask, lanes: Array | None = None
    ) -> None:
        """Raise where the system ignored other actions than it declares."""
        if skipped is None:
            return
        wrong = as_flags(skipped) != pending
        if wrong.any():
            row = int(np.argmax(wrong))
            lane = self.first_lane + (row if lanes is None else int(lanes[row]))
            did, when = "ignored", "that followed no"
            if pending[row]:
                did, when = "executed", "after an"
            raise TransitionError(
                f'lane {lane}: {self.kind} declares at_end="{self._declares.at_end}", and it {did} '
                f"the action of a step {when} end of an episode"
            )

    def step_part(self, cursor: Cursor, lanes: int) -> None:
        """Step only the first ``lanes`` lanes; the others keep what they had.

        Only where :attr:`can_step_part` holds; no lane at all can always be stepped.
        """
        at = cursor.at
        rows = [column[at] for column in cursor.next_obs]
        roots = [column[at] for column in cursor.root_obs]
        for row, seen in zip(rows, cursor.seen_obs, strict=True):
            row[lanes:] = seen[at, lanes:]
        for root, seen in zip(roots, cursor.seen_obs, strict=bool(roots)):
            root[lanes:] = seen[at, lanes:]
        if lanes:
            some = np.arange(self.batch_size[0]) < lanes
            out = self.system.step([column[at].copy() for column in cursor.actions], some)
            try:
                for column, value in zip(cursor.rewards, out.reward, strict=True):
                    column[at, :lanes] = fitting(value, column[at])[:lanes]
                for flags, value in (
                    (cursor.terminated, out.terminated),
                    (cursor.truncated, out.truncated),
                ):
                    flags[at, :lanes] = fitting(value, flags[at])[:lanes]
            except (TypeError, ValueError) as error:
                raise self._wrong_shapes(out) from error
            for index, (row, value) in enumerate(zip(rows, out.obs, strict=True)):
                row[:lanes] = self._array(index, value)[:lanes]
            for root, row in zip(roots, rows, strict=bool(roots)):
                root[:lanes] = row[:lanes]
            if cursor.next_valid is not None:
                cursor.next_valid[at] = True
            ended = (cursor.terminated[at] | cursor.truncated[at]) & some
            if self._finish is not None and ended.any():
                self._finish(cursor, ended, out, rows)
            if self._looks_behind or out.skipped is not None:
                self._after_step(cursor, out, some)
        cursor.board[FILLED] = at + 1

    # --- in place, in any order -------------------------------------------------------------------

    def receive(self, cursor: Cursor, out: Step, pending: Mask) -> Mask:
        """Write down what ``recv`` returned, in the slot ``cursor.at``; returns who ended.

        ``pending`` are the arrivals of reset slots.
        """
        at = cursor.at
        rows = [column[at] for column in cursor.next_obs]
        for index, (row, value) in enumerate(zip(rows, out.obs, strict=True)):
            row[...] = self._array(index, value, len(pending))
        try:
            for column, value in zip(cursor.rewards, out.reward, strict=True):
                column[at] = fitting(value, column[at])
            cursor.terminated[at] = fitting(out.terminated, cursor.terminated[at])
            cursor.truncated[at] = fitting(out.truncated, cursor.truncated[at])
        except (TypeError, ValueError) as error:
            raise self._wrong_shapes(out) from error
        ended: Mask = cursor.terminated[at] | cursor.truncated[at]
        for group, flags in cursor.agents.items():
            _put_flags(flags, at, out.agents[group])
        if self._declares.at_end == "first":
            self._put_finals(cursor, ended, out, rows)
        self._require_skipped(out.skipped, pending, out.lanes)
        if self.has_reset_slots:
            self._draw_contexts_of(np.asarray(out.lanes)[pending])
        return ended

    def following(self, lanes: NDArray[np.int32], ended: Mask, out: Step) -> list[NDArray[Any]]:
        """What the ``lanes`` that arrived see next ``[arrival, ...]``."""
        count, at_end = len(lanes), self._declares.at_end
        seen = [self._array(index, value, count) for index, value in enumerate(out.obs)]
        if at_end == "final" and ended.any():
            asked = np.zeros(self.batch_size[0], np.bool_)
            asked[lanes[ended]] = True
            first = self.system.reset(asked, None)
            seen = [value.copy() for value in seen]
            for index, (_, value) in enumerate(zip(seen, first, strict=True)):
                seen[index][ended] = self._array(index, value)[lanes[ended]]
        if at_end != "reset_slot":
            self._draw_contexts_of(lanes[ended])
        return seen

    def wrong_arrivals(self, lanes: NDArray[np.int32]) -> TransitionError:
        """The error for lanes that were not under way, or are more or fewer than declared."""
        return TransitionError(
            f"{self.kind}: expected {self.arrivals} different lanes that were sent, got "
            f"{lanes.tolist()!r:.200}"
        )

    # --- TorchRL's own protocol -------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        d = self._declares
        out = self._stepped([self._action(tensordict.get(key)) for key in d.action])
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        values = [self._tensor(index, value) for index, value in enumerate(out.obs)]
        terminated, truncated = (as_flags(each) for each in (out.terminated, out.truncated))
        ended = terminated | truncated
        valid = np.ones(d.lanes, np.bool_)
        if d.at_end == "first" and ended.any():
            self._fresh, self._fresh_lanes = [value.clone() for value in values], ended
            at = torch.from_numpy(ended).to(self.device)
            for index, value in enumerate(values):
                if out.final is not None:
                    value[at] = self._tensor(index, out.final[index])[at]
            if out.final is None and d.finals == "extra":
                raise self._lost_finals(ended)
            if d.finals == "some":
                given = out.final is not None and out.final_valid is not None
                valid[ended] = as_flags(out.final_valid)[ended] if given else False
            self._draw_contexts(ended)
        self._require_skipped(out.skipped, self._pending)
        transitions = ~self._pending
        if d.at_end == "reset_slot":
            self._draw_contexts(self._pending)
            self._pending = ended.copy()
        td = self._td(values)
        for key, value in zip(d.reward, out.reward, strict=True):
            spec = self.full_reward_spec[key]
            td.set(key, as_tensor(value, self.device).to(spec.dtype).reshape(spec.shape))
        flags = {"terminated": terminated, "truncated": truncated, "done": ended}
        for name in _FLAGS:
            td.set(name, torch.from_numpy(flags[name]).to(self.device)[:, None])
        for group in d.groups:
            ends = [as_flags(each) for each in out.agents[group]]
            for name, flag in zip(_FLAGS, [*ends, ends[0] | ends[1]], strict=True):
                td.set((group, name), torch.from_numpy(flag).to(self.device)[..., None])
        if self.marks_transitions:
            td.set(VALID, torch.from_numpy(transitions).to(self.device)[:, None])
        if d.finals == "some":
            td.set(NEXT_VALID, torch.from_numpy(valid).to(self.device))
        return td

    def _stepped(self, action: Sequence[Array]) -> Step:
        """A step of all lanes, also where lanes come back in any order."""
        d = self._declares
        if not d.arrivals:
            return self.system.step(action)
        if d.lanes % d.arrivals:
            raise EnvironmentRefused(
                f"{self.kind}: {d.lanes} lanes that are stepped together, as through a transform, "
                f"have to be a multiple of the {d.arrivals} that come a call; make more or fewer"
            )
        lanes = np.arange(d.lanes, dtype=np.int32)
        for part in np.split(lanes, range(d.arrivals, d.lanes, d.arrivals)):
            self.system.send([each[part] for each in action], part)
        return whole(self.system, d.lanes)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        lanes = None if mask is None else mask.reshape(-1).cpu().numpy()
        if lanes is None or (lanes.all() and not self._fresh_lanes.any()):
            return self._reset_all(kwargs)
        asked = lanes & ~self._fresh_lanes
        values = self._fresh
        if asked.any():
            if not self.resets_by_mask:
                raise EnvironmentRefused(
                    f"{self.kind} ignores reset masks and would reset every lane; do not wrap it "
                    "in TransformedEnv or reset a part of it: apply wrappers of its own "
                    "underneath, or use one that resets by mask"
                )
            reset = self._values(self.system.reset(asked, None, **kwargs))
            self._draw_contexts(asked)
            kept = torch.from_numpy(self._fresh_lanes).to(self.device)
            for new, old in zip(reset, values, strict=bool(values)):
                new[kept] = old[kept]
            values = reset
        elif not values:
            values = [
                torch.zeros_like(self.observation_spec[k].zero()) for k in self.observation_keys
            ]
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        self._pending = self._pending & ~lanes
        return self._with_flags(self._td(values))

    def _reset_all(self, kwargs: Mapping[str, Any]) -> TensorDictBase:
        kwargs = dict(kwargs)
        seeds = kwargs.pop("seed", self._seeds)
        if isinstance(seeds, int):
            seeds = [seeds + lane for lane in range(self.batch_size[0])]
        self._seeds = None
        how = self._declares.seeds
        again = self._declares.resets == "none" and self._started
        if seeds is not None:
            self._last, self._remade = list(seeds), 0
        elif again and self._last:
            self._remade += 1
            seeds = [lane_seed(each, 0, self._remade) for each in self._last]
        if (how == "make" and seeds is not None) or again:
            if self._make is not None:
                first_lane = self.first_lane
                self.system.close()
                self.system = self._make(seeds)
                self.first_lane = first_lane
            elif again:
                raise EnvironmentRefused(
                    f"{self.kind} cannot be reset, and nothing says how it is made again; pass a "
                    "factory that takes seeds (def make(seeds): …)"
                )
        self._seed_contexts(seeds)
        given = seeds if how in ("reset", "shared") else None
        observation = self.system.reset(None, given, **kwargs)
        self._started = True
        self._draw_contexts()
        if self.system.declares is not self._declares:
            self._declare()
            self.empty_cache()
        values = self._values(observation)
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        self._pending = np.zeros_like(self._pending)
        return self._with_flags(self._td(values))

    @property
    def kind(self) -> str:
        """What the system is called in messages."""
        return str(self.system.describe()["type"])

    def _action(self, action: torch.Tensor) -> Array:
        return action.clone() if self.device.type != "cpu" else action.numpy().copy()

    def _values(self, values: Sequence[Array]) -> list[torch.Tensor]:
        return [self._tensor(index, value) for index, value in enumerate(values)]

    def _tensor(self, index: int, value: Array) -> torch.Tensor:
        if self.fills:
            return torch.from_numpy(np.array(self._array(index, value)))
        key = self.observation_keys[index]
        found, spec = as_tensor(value, self.device), self.observation_spec[key]
        if (found.shape, found.dtype) != (spec.shape, spec.dtype):
            raise TransitionError(
                f"{spell(key)}: the space declares {spec.dtype} {list(spec.shape)}, the "
                f"environment returned {found.dtype} {list(found.shape)}"
            )
        return found

    def _td(self, values: Sequence[torch.Tensor]) -> TensorDict:
        td = TensorDict({}, self.batch_size, device=self.device)
        for group, size in self.groups.items():
            td.set(group, TensorDict({}, (*self.batch_size, size), device=self.device))
        for key, value in zip(self.observation_keys, values, strict=True):
            td.set(key, value)
        return td

    def _with_flags(self, td: TensorDict) -> TensorDict:
        if self.marks_transitions:
            td.set(VALID, torch.ones((*self.batch_size, 1), dtype=torch.bool, device=self.device))
        if self._declares.finals == "some":
            td.set(NEXT_VALID, torch.ones(self.batch_size, dtype=torch.bool, device=self.device))
        self._set_flags(td)
        return td

    def _set_flags(self, td: TensorDictBase) -> TensorDictBase:
        for key in self.done_spec.keys(True, True):
            td.set(key, torch.zeros_like(self.full_done_spec[key].zero()))
        return td


def whole(system: System, lanes: int) -> Step:
    """All lanes of a system, each once, as one step; they came back in any order."""
    parts: list[Step] = []
    while sum(len(part.terminated) for part in parts) < lanes:
        parts.append(system.recv())
    came = np.concatenate([np.asarray(part.lanes) for part in parts])
    order = np.argsort(came, kind="stable")
    if not np.array_equal(came[order], np.arange(lanes)):
        raise TransitionError(f"expected each of {lanes} lanes once, got {came.tolist()!r:.200}")

    def joined(values: Sequence[Array]) -> Array:
        return np.concatenate([np.asarray(value) for value in values])[order]

    def columns(values: Sequence[Sequence[Array]]) -> list[Array]:
        return [joined(each) for each in zip(*values, strict=True)]

    def flags(values: Sequence[Array | None]) -> Array | None:
        if all(each is None for each in values):
            return None
        sizes = [len(part.terminated) for part in parts]
        return joined(
            [np.zeros(n, np.bool_) if v is None else v for v, n in zip(values, sizes, strict=True)]
        )

    finals = None
    if any(part.final is not None for part in parts):
        finals = columns([part.obs if part.final is None else part.final for part in parts])
    return Step(
        columns([part.obs for part in parts]),
        columns([part.reward for part in parts]),
        joined([part.terminated for part in parts]),
        joined([part.truncated for part in parts]),
        finals,
        flags([part.final_valid for part in parts]),
        None,
        flags([part.skipped for part in parts]),
        {
            group: AgentFlags(*columns([part.agents[group] for part in parts]))
            for group in parts[0].agents
        },
    )


def fitting(value: Array, row: NDArray[Any]) -> NDArray[Any]:
    """``value``, of the shape of ``row``: NumPy would spread fewer values over all lanes."""
    if type(value) is np.ndarray and value.shape == row.shape:
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = np.from_dlpack(value)
    found = np.asarray(value)
    if found.shape != row.shape or found.dtype.kind not in "biuf":
        raise ValueError(f"expected the shape {row.shape}, got {found.shape} of {found.dtype}")
    return found


def _put_flags(columns: Sequence[NDArray[Any]], at: int, flags: AgentFlags) -> None:
    """The flags of a group, in a slot of their columns."""
    terminated, truncated, done = columns
    terminated[at], truncated[at] = flags.terminated, flags.truncated
    np.logical_or(terminated[at], truncated[at], out=done[at])


def as_flags(value: Array) -> NDArray[np.bool_]:
    """Flags as NumPy has them, copied."""
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = as_tensor(value, torch.device("cpu")).numpy()
    flags: NDArray[np.bool_] = np.array(value, np.bool_)
    return flags


def as_tensor(value: Array, device: torch.device) -> torch.Tensor:
    """A copy of ``value`` on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        if device.type == "cpu":
            value = np.from_dlpack(value)  # torch takes no array that is read-only
        else:
            found: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
            return found.to(device, copy=True)
    return torch.from_numpy(np.array(value)).to(device)


def _without_empty(spec: Composite) -> Composite:
    for name in [name for name, part in spec.items() if isinstance(part, Composite) and not part]:
        del spec[name]
    return spec
