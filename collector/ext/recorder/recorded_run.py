"""Run of a recorder: the user's loop fills slots, and the run loop of collectors stores them."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tallyroll.collector.base import Collector
from tallyroll.collector.batches.checks.ranges import ranges_of
from tallyroll.collector.batches.stored.resume import Resume
from tallyroll.collector.batches.stored.writer import StorageLike
from tallyroll.collector.counting.transitions import Mask, next_step_transitions
from tallyroll.collector.envs.gymnasium.vector_rules import FORGETS
from tallyroll.collector.envs.setup.make import require_names_of
from tallyroll.collector.envs.setup.traits import ticks_of
from tallyroll.collector.envs.stepping.arrays import fitting, put_flags
from tallyroll.collector.envs.stepping.ends import put_finals
from tallyroll.collector.envs.stepping.stepper import SlotWriter, make_slot_writer
from tallyroll.collector.envs.system import AtEnd, Step
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    StateError,
    ValueRefused,
)
from tallyroll.collector.ext.recorder.recorded_env import RecordedEnv
from tallyroll.collector.interrupts import defer_signals
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.lanes import SlotOutcome
from tallyroll.collector.rollout.rollout import Rollout, Slots
from tallyroll.collector.rollout.slab_plan import plan_slab
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.progress import new_board
from tallyroll.collector.slab.slab import Cursor, Slab, SlabColumn
from tallyroll.storage.package.near_names import did_you_mean
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key

_RECORDED = Decision("recorded", "your own loop steps the environment")


class RecordedSlots(Driver):
    """Driver that makes no steps, because the user's loop fills the slots of its slab.

    Args:
        slab: the memory that the loop fills.
        cursor: the arrays of the slab.
        at_end: what the environment does at the end of an episode; see `Declares.at_end`.
    """

    in_workers = False
    used = 0
    stopping = False
    paused = False

    def __init__(self, slab: Slab, cursor: Cursor, at_end: AtEnd) -> None:
        self.slab, self.run_lanes = slab, slab.lanes
        self._cursor, self._at_end = cursor, at_end
        self._marked = 0
        """Number of slots that `mark` has seen."""
        self.waiting = np.zeros(slab.lanes, np.bool_)
        """Lanes that the next step or the loop has to reset, as of the last call of `mark`."""
        self._fresh = np.ones(slab.lanes, np.bool_)
        """Lanes that made no step since their last reset, as of the last call of `mark`."""

    @property
    def boards(self) -> Sequence[Any]:
        """The board on which steps note a reward that was rounded to the dtype of its column."""
        return (self._cursor.board,)

    def seek(self, slots: int) -> None:
        """Continue after the first ``slots`` slots."""
        self.used, self._marked = slots, min(self._marked, slots)

    def mark(self) -> None:
        """Mark the transitions of the slots since the last call, and note which lanes ended."""
        start, stop = self._marked, self.used
        if start == stop:
            return
        with defer_signals():
            ended = self.ended(start, stop)
            if self._at_end == "reset_slot":
                self.slab.transitions[start:stop] = next_step_transitions(ended, self.waiting)
            if self._at_end != "first":
                self.waiting[:] = ended[-1]
            self._fresh[:] = False
            self._marked = stop

    def interrupted_by(self, lanes: Mask) -> Mask:
        """Return marks of those of ``lanes`` whose episode a reset would interrupt."""
        self.mark()
        return lanes & ~(self.waiting | self._fresh)

    def note_reset(self, lanes: Mask) -> None:
        """Note that the loop reset ``lanes`` before the next slot."""
        self.mark()
        self.waiting[lanes], self._fresh[lanes] = False, True

    def ended(self, start: int, stop: int) -> Mask:
        """Return marks ``[time, lane]`` of slots in which the environment reported an end."""
        cursor = self._cursor
        ended: Mask = cursor.terminated[start:stop] | cursor.truncated[start:stop]
        return ended

    def stop(self) -> None:
        """Take no more slots."""
        self.stopping = True

    def go_on(self) -> None:
        """Do nothing: no signal handler pauses the user's loop."""

    def outcome(self, start: int, stop: int, stepped: int) -> SlotOutcome:
        """Return the counts of the slots."""
        self.mark()
        transitions = self.slab.transitions[start:stop].copy()
        return SlotOutcome(transitions.size, int(np.count_nonzero(transitions)), transitions)

    def upcoming(self) -> Mask:
        """Return a mask of all lanes."""
        return np.ones(self.run_lanes, np.bool_)

    def begin(self) -> None:
        """Raise, because only the user's loop resets."""
        raise StateError("a recorder never steps or resets its environment")

    def restart(self) -> None:
        """Raise, because only the user's loop resets."""
        self.begin()

    def random_steps(self, start: int, stop: int) -> None:
        """Raise, because only the user's loop steps."""
        self.begin()

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Raise, because only the user's loop steps."""
        self.begin()

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Raise, because only the user's loop steps."""
        self.begin()


class RecordedRollout(Rollout):
    """Rollout that hands over the slots that the user's loop has filled."""

    def __init__(self, slots: RecordedSlots, extra: Sequence[Any]) -> None:
        super().__init__(slots, None, extra=extra, surplus="carry", random_frames=0, gate=None)
        self.counts = Decision("by lane", "resets of your own loop may cancel reset slots")

    def make_room(self) -> int:
        """Prepare the slab for the next slot, and return the position of that slot."""
        if self._slots is Slots.HANDED_OVER:
            self.slab.keep_last(self.driver.used, None)
            self.driver.seek(0)
            self._slots = Slots.TAKEN
        return self.driver.used

    @property
    def is_queued(self) -> bool:
        """True if a block of slots is queued and was not taken yet."""
        return self._slots is Slots.QUEUED

    def queue(self) -> bool:
        """Make all filled slots the next block. Return False if none of them is a transition."""
        if self._slots is Slots.TAKEN:
            self._queue(0)
            if not self.slab.transitions[: self.driver.used].any():
                self._slots = Slots.HANDED_OVER
        return self.is_queued


class NoEnvironments:
    """Null object for the environments of a run, which a recorder neither seeds nor calls."""

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        """Return no seeds, because the user's loop seeds the environment."""
        return []

    def state(self) -> None:
        """Return no state."""

    def load(self, state: Any) -> None:
        """Do nothing."""

    def reach(self, asked: Any, lanes: Sequence[int]) -> list[Any]:
        """Raise, because users can call the environment themselves."""
        raise StateError(f"{asked}: call the environment itself")


class RecordedRun(Collector):
    """Run whose steps the user's loop makes.

    A recorder calls `before_step`, steps the environment, and calls `after_step`. It calls
    `before_reset` and `after_reset` around a reset. After an exception in between, the observations
    of the lanes are unknown until the next reset of all lanes.

    Args:
        recorded: the environment, driven through a stand-in.
        options: the options of the run.
        storage: the storage, or its path.
        resume: True to continue the last run in the storage.
        commit_every: number of steps after which rows are committed.
        annotations: additional columns: name -> dtype and shape of a lane's value.
    """

    def __init__(
        self,
        recorded: RecordedEnv,
        options: Options,
        *,
        storage: StorageLike,
        resume: Resume,
        commit_every: int,
        annotations: Mapping[str, SlabColumn],
    ) -> None:
        super().__init__(options, replay_buffer=None, storage=storage, resume=resume)
        self._policy, self._recorded, self._commit_every = None, recorded, commit_every
        self._annotations = annotations
        self._annotated: dict[str, NDArray[Any]] = {}
        self._version = self._written_version = RANDOM_VERSION
        self._process = os.getpid()
        lanes = recorded.lanes
        self._known = False
        """True if the slab has the observations that the loop acts on."""
        self._never_reset, self._is_stepping = True, False
        self._is_torn = False
        """True while a step is recorded, and after a signal handler raised meanwhile."""
        self._can_step = False
        """True if observations are known, no lane waits for a reset, and the run is not over."""
        self._at = -1
        """Position of the next slot; -1 if the slab has to be prepared for it first."""
        self._puts: list[SlotWriter | None] = []
        """For each slot, the function that writes a step to it; None if Python writes it."""
        self.is_closed = self.is_full = False
        try:
            # A new run draws a seed. This must not change the draws of the user's loop.
            with torch.random.fork_rng(devices=[]):
                self._begin_run(lanes, NoEnvironments())
            self._note_budget()
            if recorded.is_declared:
                self._prepare()
        except BaseException:
            self.shutdown()
            raise

    def _prepare(self) -> None:
        """Lay out the columns, and check that the storage has the same ones."""
        recorded, options = self._recorded, self._options
        env, stepper = recorded.env, recorded.env.stepper
        dtype: Any = options.columns.reward_dtype
        env.store_rewards_as(dtype)
        written: dict[Key, SlabColumn] = {
            (name,): column for name, column in self._annotations.items()
        }
        require_names_of(env, written=written)
        found = plan_slab(env, None, TensorDict({}, env.batch_size), options)
        plan = replace(
            found,
            layout={**written, **found.layout},
            extra=tuple(written),
            # A reset may follow any step, so a slot may begin with another observation.
            shared=False,
            masks=(),
            ticks=ticks_of(recorded.actual) if options.columns.frame_skip is None else 1,
        )
        most = plan.slots(self.lanes, self._commit_every * self.lanes)
        slab = plan.slab(min(self._commit_every, most), self.lanes)
        declares = stepper.declares
        self._cursor = stepper.cursor(slab, new_board())
        self._slots = RecordedSlots(slab, self._cursor, declares.at_end)
        self._slab_rollout = RecordedRollout(self._slots, plan.extra)
        ranges = ranges_of(env, policy=True, lost_finals=plan.lost_finals)
        self._waits_for_reset = declares.at_end == "final"
        self._resets_in_step = declares.at_end == "first"
        # With finals="lost", first observations stay in place of the final ones, and the column
        # `next_valid` marks them.
        self._needs_finals = self._resets_in_step and options.checks.finals != "lost"
        stepper.mark_lost_finals(options.checks.finals == "lost")
        single = len(self._cursor.rewards) == 1 and self._cursor.next_valid is None
        single = single and not declares.groups
        self._puts = [
            make_slot_writer(*self._cursor.slot(at)) if single else None for at in range(slab.slots)
        ]
        self._note_budget()
        self._columns = [slab.arrays[key] for key in written]
        self._actions = [[each[at] for each in self._cursor.actions] for at in range(slab.slots)]
        self._system, self._stand_in = recorded.system, recorded.stand_in
        slab.transitions[:] = True
        slab.version[:] = self._version
        self._drive(
            self._slab_rollout,
            plan,
            ranges,
            recorded.description,
            recorded=recorded.layers,
            policy="unknown",
        )

    # --- state ------------------------------------------------------------------------------------

    def _note_budget(self) -> None:
        """Compute the number of transitions that are missing from the budget."""
        total = self._options.total_frames
        self._room = sys.maxsize if total is None else total - self._ledger.stored
        self.is_full = self._room <= 0
        self._due = min(len(self._puts), -(-self._room // self.lanes))
        """Number of slots after which rows are committed: the slab is full, or perhaps the budget
        is met."""

    @property
    def is_stepping(self) -> bool:
        """True between `before_step` and `after_step`."""
        return self._is_stepping

    @property
    def version(self) -> int:
        """Version of the weights that choose the next actions."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if type(version) is not int or version < RANDOM_VERSION:
            raise ArgumentError(
                f"policy_version: expected an integer of at least {RANDOM_VERSION}, got {version!r}"
            )
        self._version = version

    def _stepping(self) -> dict[str, Decision]:
        return dict.fromkeys(("acts", "steps", "writes"), _RECORDED)

    def _close_source(self) -> None:
        """Do nothing: the loop owns the environment."""

    def _require_running(self) -> None:
        if self.is_closed:
            raise StateError("the recorder is closed. Make another one with resume=True.")
        if hasattr(self, "_run") and self._run.over:
            self._run.refuse_ended()

    # --- annotations ------------------------------------------------------------------------------

    def annotate(self, values: Mapping[str, Any]) -> None:
        """Keep ``values`` ``[lane, ...]`` for the next step."""
        for name, value in values.items():
            column = self._annotations.get(name)
            if column is None:
                raise ArgumentError(
                    f"annotate: expected a name from columns=, got {name!r}"
                    f"{did_you_mean(name, self._annotations)}"
                )
            row = np.empty((self.lanes, *column.shape), NUMPY[column.dtype])
            self._annotated[name] = self._as_row(value, row, name).copy()

    def _as_row(self, value: Any, row: NDArray[Any], name: str) -> NDArray[Any]:
        """Return ``value`` with the shape and the dtype of ``row`` ``[lane, ...]``."""
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            # NumPy has no bfloat16. float32 holds its values.
            value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
        try:
            found = np.asarray(value)
        except ValueError as error:
            raise ArgumentError(
                f"{name}: expected an array, got lists of unequal lengths"
            ) from error
        if self._recorded.is_single and found.shape == row.shape[1:]:
            found = found[None]
        elif _without_ones(found.shape) == _without_ones(row.shape):
            found = found.reshape(row.shape)
        shape = row.shape[1:] if self._recorded.is_single else row.shape
        try:
            return fitting(found, row, (name,))
        except ValueRefused:
            raise
        except ValueError as error:
            raise ArgumentError(
                f"{name}: expected {row.dtype} of shape {list(shape)}, got {found.dtype} of shape "
                f"{list(found.shape)}"
            ) from error

    # --- steps ------------------------------------------------------------------------------------

    def before_step(self, action: Any) -> None:
        """Write the inputs of the next step to a slot.

        Raises:
            StateError: a lane has no running episode, or an annotation is missing.
        """
        if not self._can_step:
            self._refuse_step()
        if len(self._annotated) < len(self._annotations):
            missing = sorted(self._annotations.keys() - self._annotated.keys())
            raise StateError(
                f"step: expected annotate({', '.join(f'{name}=...' for name in missing)}) before "
                "each step, because columns= declares these columns."
            )
        at = self._at if self._at >= 0 else self._next_slot()
        split = self._recorded.actions
        for row, each in zip(
            self._actions[at], (action,) if split is None else split(action), strict=True
        ):
            if type(each) is np.ndarray and each.shape == row.shape and each.dtype == row.dtype:
                row[...] = each
            else:
                row[...] = self._as_row(each, row, "action")
        if self._written_version != self._version:
            self._slots.slab.version[at:] = self._written_version = self._version
        if self._columns:
            for column, name in zip(self._columns, self._annotations, strict=True):
                column[at] = self._annotated[name]
            self._annotated.clear()
        self._known = self._can_step = False
        self._is_stepping = True

    def _refuse_step(self) -> None:
        self._require_running()
        if not self._known:
            reason = "no reset was made" if self._never_reset else "the last step or reset raised"
            raise StateError(
                f"step: expected a reset of all lanes first, because {reason}, so the observations "
                "of the next row are unknown. Call reset()."
            )
        self._slots.mark()
        lanes = np.flatnonzero(self._slots.waiting).tolist()
        raise StateError(
            f"step: expected a reset of the lanes {lanes!r:.100}, whose episodes have ended, "
            "because this environment does not reset itself. Call reset(), or for some lanes "
            'reset(options={"reset_mask": mask}).'
        )

    def after_step(self, returned: Any) -> None:
        """Record the results of a step; commit if the slab is full or the budget may be met."""
        self._is_torn = True
        self._stand_in.returned = returned
        at = self._cursor.at = self._at
        # The system passes an action to the stand-in, which ignores it.
        out = self._system.step(self._actions[at])
        put, ended = self._puts[at], -1
        if put is not None and type(out.obs[0]) is np.ndarray:
            final = out.final if self._resets_in_step else None
            ended = put(out.obs, out.reward[0], out.terminated, out.truncated, final)
            if ended > 0 and final is None and self._needs_finals:
                ended = -1  # `_put` raises, because the final observations are missing
        if ended < 0:
            ended = self._put(out)
        due = at + 1 >= self._due
        self._at = -1 if due else at + 1  # if a signal handler raises, the next step commits
        self._slots.seek(at + 1)
        self._known, self._can_step = True, not (ended and self._waits_for_reset)
        self._is_stepping = self._is_torn = False
        if due:
            self.commit()

    def _put(self, out: Step) -> int:
        """Write a step in Python. Return the number of ended lanes."""
        cursor, stepper = self._cursor, self._recorded.env.stepper
        at = cursor.at
        rows = [column[at] for column in cursor.next_obs]
        for index, (row, value) in enumerate(zip(rows, out.obs, strict=True)):
            row[...] = stepper.results.array(index, value)
        stepper.put_values(cursor, out)
        for root, row in zip(cursor.root_obs, rows, strict=True):
            root[at] = row
        if cursor.next_valid is not None:
            cursor.next_valid[at] = True
        for group, flags in cursor.agents.items():
            put_flags(flags, at, out.agents[group])
        stepper.put_valid(cursor, out)
        ended = cursor.terminated[at] | cursor.truncated[at]
        if self._resets_in_step and ended.any() and (self._needs_finals or out.final is not None):
            put_finals(stepper, cursor, ended, out, rows)
        return int(np.count_nonzero(ended))

    # --- resets -----------------------------------------------------------------------------------

    def before_reset(self, lanes: Mask | None) -> None:
        """Prepare for a reset of ``lanes``; None: all lanes."""
        self._require_running()
        if lanes is not None and not self._known:
            raise StateError(
                "reset: expected a reset of all lanes, got a reset by mask, which leaves the "
                "observations of the other lanes unknown. Call reset() without a mask."
            )
        self._recorded.require_mask(lanes)
        if self._recorded.forgets_resets and not self._never_reset:
            self._slots.mark()
            if self._slots.waiting.any() or not self._known:
                raise EnvironmentRefused(FORGETS)
        self._known = self._is_stepping = self._can_step = False
        self._annotated.clear()

    def begin_at(self, first: Sequence[NDArray[Any]]) -> None:
        """Prepare a step from the observations ``first`` of a loop without an environment.

        A lane begins a trajectory if its episode ended, or if ``first`` differs in any bit from
        its last next observation.
        """
        lanes = None
        if self._known:
            at = self._at if self._at >= 0 else self._next_slot()
            pairs = [(c[at], new) for c, new in zip(self._cursor.seen_obs, first, strict=True)]
            if self._can_step and all(old.tobytes() == new.tobytes() for old, new in pairs):
                return
            self._slots.mark()
            lanes = self._slots.waiting.copy()
            for old, new in pairs:
                lanes |= _bits_differ(old, new)
        self._require_running()
        self._known = self._is_stepping = self._can_step = False
        self.after_reset(first, lanes)

    def after_reset(self, returned: Any, lanes: Mask | None) -> None:
        """Record the results of a reset of ``lanes``; None: all lanes."""
        with defer_signals():
            self._after_reset(returned, lanes)

    def _after_reset(self, returned: Any, lanes: Mask | None) -> None:
        self._recorded.stand_in.returned = returned
        every = lanes is None
        lanes = np.ones(self.lanes, np.bool_) if lanes is None else lanes
        stepper = self._recorded.env.stepper
        if self._never_reset or not stepper.declares.resets_by_mask:
            first = stepper.reset()
            if self._never_reset and not hasattr(self, "_loop"):
                self._prepare()
        else:
            first = self._recorded.system.reset(lanes, None)
        self._never_reset = False
        # A torn step may have begun an episode.
        if (cut := lanes if self._is_torn else self._slots.interrupted_by(lanes)).any():
            self.commit()
            with self._guard:
                self._loop.cut(cut)
        at = self._next_slot()
        for index, (column, value) in enumerate(zip(self._cursor.seen_obs, first, strict=True)):
            array = stepper.results.array(index, value)
            if every:
                column[at] = array
            else:
                column[at][lanes] = array[lanes]
        self._slots.note_reset(lanes)
        self._is_torn = False
        self._known = True
        self._can_step = not (self._waits_for_reset and self._slots.waiting.any())

    # --- commits ----------------------------------------------------------------------------------

    def _next_slot(self) -> int:
        """Return the position of the next slot, after a commit that is due or has failed."""
        self._require_running()
        with defer_signals():
            if self._slab_rollout.is_queued or self._slots.used >= self._due:
                self.commit()
            self._at = at = self._slab_rollout.make_room()
            self._slots.slab.version[at:] = self._written_version = self._version
        return at

    def commit(self) -> int:
        """Commit the rows of all steps so far. Return the number of newly committed rows."""
        with defer_signals():
            return self._commit()

    def _commit(self) -> int:
        if self.is_closed or self.is_full or not hasattr(self, "_loop") or self._run.over:
            return 0
        self._at = -1
        if not self._slab_rollout.queue():
            return 0
        transitions = self._slots.slab.transitions[: self._slots.used]
        stored = self.collect(min(int(np.count_nonzero(transitions)), self._room))
        self._note_budget()
        return stored

    def finish(self) -> None:
        """Commit, end the run and release the storage. Idempotent; forked children do nothing."""
        if self.is_closed or os.getpid() != self._process:
            return
        try:
            self.commit()
        finally:
            self.is_closed, self._can_step = True, False
            self.shutdown()


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Return the sizes in ``shape`` that are not 1."""
    return [size for size in shape if size != 1]


def _bits_differ(one: NDArray[Any], other: NDArray[Any]) -> Mask:
    """Return a mask ``[lane]`` of the lanes in which two arrays of one dtype differ."""
    rows = [np.ascontiguousarray(each).reshape(len(one), -1) for each in (one, other)]
    differ: Mask = (rows[0].view(np.uint8) != rows[1].view(np.uint8)).any(axis=1)
    return differ
