"""Driver of workers that all fill the same slots (``mode="sync"``)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import WorkerError
from tallyroll.collector.interrupts import pause_on_signal
from tallyroll.collector.policies.slot_rng import Array, Draw, SlotRng
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.lanes import SlotOutcome, ended_in
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import FILLED, HALT, PAUSE, STOP, new_board
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import WorkerPool
from tallyroll.collector.workers.startup.worker_startup import WorkerStartup
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key


class LockstepFiller:
    """Asks all workers to fill the same slots, and tracks the slots that each completed.

    While workers fill slots, their boards hold the number of complete slots. Afterwards the number
    is on the board of this process, which a call of the extension also changes.

    Args:
        pool: the workers.
        startup: the object that replaces workers that failed.
        lanes: number of lanes of the run.
    """

    def __init__(self, pool: WorkerPool, startup: WorkerStartup, lanes: int) -> None:
        self._worker_pool, self._startup, self._lanes = pool, startup, lanes
        self._interruptible = pause_on_signal(pool.pause)
        self.board = new_board()
        self._by_workers = False
        """True if the number of complete slots is on the boards of workers, not on ``board``."""
        self.start = 0
        """The first slot of the last question to the workers."""
        self.died: dict[int, int] = {}
        """Number of slots that each worker had filled when it failed in this call, by its index."""
        self.cuts: NDArray[np.bool_] | None = None
        """Lanes that had to be reset; None if there were none."""

    @property
    def used(self) -> int:
        """Number of slots that every lane completed."""
        return min(self.filled) if self._by_workers else self.board[FILLED]

    def seek(self, slots: int) -> None:
        """Set the number of complete slots to ``slots``, so that all lanes continue after these."""
        for member in self._worker_pool.members:
            member.board[FILLED] = slots
        self.board[FILLED], self._by_workers = slots, False

    @property
    def filled(self) -> list[int]:
        """Number of slots that the lanes of each worker completed."""
        if not self._by_workers:
            return [self.board[FILLED]] * len(self._worker_pool.members)
        return [member.board[FILLED] for member in self._worker_pool.members]

    @property
    def stopping(self) -> bool:
        """True if the workers have to end after the step in progress."""
        return any(member.board[HALT] == STOP for member in self._worker_pool.members)

    @property
    def paused(self) -> bool:
        """True if a signal handler is waiting for the step to end."""
        return any(member.board[HALT] == PAUSE for member in self._worker_pool.members)

    def fill(self, start: int, stop: int, by: m.Actor) -> None:
        """Let all workers fill slots ``[start, stop)``, or fewer if they halt."""
        self.seek(start)
        self.start = start
        self.died.clear()
        self._by_workers = True
        try:
            if not self._worker_pool.broadcast(m.whole_steps(start, stop, by), self._interruptible):
                self._receive(start + 1)
        except BaseException:
            self._settle()
            raise
        filled = self.filled
        if min(filled) == stop == max(filled):
            self.board[FILLED], self._by_workers = stop, False
            return
        while self.paused and not (self.died or self.stopping):
            filled = self.filled
            if min(filled) == max(filled):
                return
            self._even_out(filled, by)

    def ask(self, questions: Sequence[object], empty: int = 1) -> None:
        """Send each worker its question, if it has one, and wait for all answers.

        A worker that fails is replaced. If that is not allowed, all workers stop and its error is
        raised.

        Args:
            questions: one question per worker; None for a worker without a question.
            empty: number of slots that stay empty if no worker filled any. The first observation of
                a lane may share memory with the next observation of the previous slot.
        """
        pool, start = self._worker_pool, self.used
        self.start = start
        self.died.clear()
        self._by_workers = True
        try:
            for member, question in zip(pool.members, questions, strict=True):
                if question is not None:
                    pool.ask(member, question)
            self._receive(start + empty)
        except BaseException:
            self._settle()
            raise

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Return the lanes that had to be reset since the last call, or None."""
        cuts, self.cuts = self.cuts, None
        return cuts

    def _settle(self) -> None:
        """Let all workers finish after an exception."""
        self._startup.replacements.give_up()  # the slots will differ when the run continues
        self._worker_pool.settle()

    def _receive(self, at_least: int) -> None:
        """Wait for the answers of all workers that were asked."""
        pool, failed = self._worker_pool, []
        while any(member.asked for member in pool.members):
            for member, answer in pool.events(during=self._interruptible):
                if isinstance(answer, Exception):
                    failed.append((member, self._startup.allowed(answer)))
        if failed:
            self._mend(failed, at_least)

    def _mend(self, failed: Sequence[tuple[Member, WorkerError]], at_least: int) -> None:
        """Replace workers that failed; the transitions that they made in this call are lost."""
        self.cuts = np.zeros(self._lanes, np.bool_)
        for member, _ in failed:  # whether they are replaced or not
            self.died[member.index] = member.board[FILLED]
            self.cuts[member.columns.start : member.columns.stop] = True
        alive = [each for each in self._worker_pool.members if each.index not in self.died]
        begin_at = min((member.board[FILLED] for member in alive), default=at_least)
        for member, error in failed:
            if self.stopping:  # no worker will step again
                member.board[FILLED] = begin_at
            else:
                self._startup.replace(member, error, begin_at)
        self._startup.replacements.finish()  # no worker advances without the others

    def _even_out(self, filled: Sequence[int], by: m.Actor) -> None:
        """Let workers that are behind catch up with the others, before all pause."""
        pool, top = self._worker_pool, max(filled)
        pool.go_on()
        self.ask([None if slots == top else m.Steps(slots, top, by) for slots in filled])
        pool.pause()


class LockstepDriver(Driver):
    """Asks every worker to fill its lanes of the same slots, and waits for all.

    Args:
        pool: the workers.
        slab: the slab of all lanes.
        plan: the layout of the slab.
        draws: a function per action key that draws the random actions of all lanes of the run, as
            one process would; None if workers draw them.
        width: number of random numbers for the actions of one slot.
        rng: the generator of random actions.
        startup: the object that replaces workers that failed.
    """

    board: memoryview
    """Board of this process. While workers fill slots, the workers' boards show the progress."""

    def __init__(
        self,
        pool: WorkerPool,
        slab: Slab,
        plan: SlabPlan,
        *,
        draws: Mapping[Key, Draw] | None,
        width: int,
        rng: SlotRng,
        startup: WorkerStartup,
    ) -> None:
        self.slab, self._worker_pool, self._plan = slab, pool, plan
        self.run_lanes = slab.lanes
        self._draws, self._width, self._rng = draws, width, rng
        self._drawers = list((draws or {}).values())
        self._actions = [slab.array(key) for key in draws or {}]
        self.ends_tell = not (plan.marked or plan.arrivals)
        self._pending = np.zeros(slab.lanes, np.bool_)
        self.pending = self._pending if plan.reset_slots else None
        self._turns = LockstepFiller(pool, startup, slab.lanes)
        self.board = self._turns.board
        self.used_at = np.frombuffer(self.board, np.int64)[FILLED:].ctypes.data
        self._fresh = False

    # --- progress ---------------------------------------------------------------------------------

    @property
    def boards(self) -> list[Any]:
        """The board of each worker."""
        return [member.board for member in self._worker_pool.members]

    @property
    def used(self) -> int:
        """Number of slots that every lane completed."""
        return self._turns.used

    def seek(self, slots: int) -> None:
        """Set the number of complete slots to ``slots``, so that all lanes continue after these."""
        self._turns.seek(slots)

    @property
    def mended(self) -> bool:
        """True if a worker failed the last time that slots were filled."""
        return bool(self._turns.died)

    @property
    def stopping(self) -> bool:
        """True if :meth:`stop` was called."""
        return self._turns.stopping

    def stop(self) -> None:
        """End after the step in progress."""
        self._worker_pool.halt()

    @property
    def paused(self) -> bool:
        """True if a signal handler is waiting for the step to end."""
        return self._turns.paused

    def go_on(self) -> None:
        """Continue after a signal handler was called. This also undoes :meth:`stop`."""
        self._worker_pool.go_on()

    # --- stepping ---------------------------------------------------------------------------------

    def restart(self) -> None:
        """Make the next :meth:`begin` reset all lanes, even those that were reset before."""
        self._fresh = True

    def begin(self) -> None:
        """Start every lane's next trajectory."""
        fresh, self._fresh = self._fresh, False
        self._pending[:] = False
        # All lanes are reset at the same slot, because no lane is behind.
        self.seek(self.used)
        self._turns.ask([m.Begin(fresh)] * len(self._worker_pool.members), empty=0)

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        place = self._rng.state
        for actions, drawn in zip(self._actions, self._take(stop - start), strict=True):
            actions[start:stop] = drawn
        self._turns.fill(start, stop, "random" if self._draws is None else "given")
        # The actions of the other slots are drawn again.
        if self._draws and (filled := self.used) < stop:
            self._rng.return_to(place, self._drawers, filled - start, self._width)

    def _take(self, slots: int) -> Sequence[Array]:
        """Return the next slots' actions ``[slot, lane, ...]``, if this process draws them."""
        if not self._drawers:
            return ()
        drawn, first = self._rng.take(self._drawers, slots, self._width), self.slab.first_lane
        if first == 0 and drawn[0].shape[1] == self.slab.lanes:
            return drawn
        return [each[:, first : first + self.slab.lanes] for each in drawn]

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        if random_lanes is None:
            self._turns.fill(start, stop, "policy")
        else:
            self.part(start, self.slab.lanes, random_lanes)

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping only the first ``lanes`` lanes."""
        by: m.Actor = "policy"
        if random_lanes is None and self.slab.version[at, 0] == RANDOM_VERSION:
            by = "random"
        drawn: dict[Key, m.Action] | None = None
        if self._draws is not None and (random_lanes is not None or by == "random"):
            drawn = {key: each[0] for key, each in zip(self._draws, self._take(1), strict=True)}
        if by == "random" and drawn is not None:
            by = "given"
            for key, action in drawn.items():
                self.slab.array(key)[at] = action
            drawn = None
        questions = []
        for member in self._worker_pool.members:
            own = slice(member.columns.start, member.columns.stop)
            questions.append(
                m.Steps(
                    at,
                    at + 1,
                    by,
                    lanes=min(max(0, lanes - own.start), len(member.lanes)),
                    random_lanes=None if random_lanes is None else random_lanes[..., own],
                    drawn=None if drawn is None else {k: each[own] for k, each in drawn.items()},
                )
            )
        self._turns.ask(questions)

    # --- results ----------------------------------------------------------------------------------

    def outcome(self, start: int, stop: int, stepped: int) -> SlotOutcome:
        """Return the outcome of the slots ``[start, stop)``."""
        members = self._worker_pool.members
        turns = self._turns
        filled = [
            turns.died.get(member.index, slots)
            for member, slots in zip(members, turns.filled, strict=True)
        ]
        top = max(stop, *filled)
        if top == start:
            return SlotOutcome(0, 0, np.zeros((0, self.slab.lanes), np.bool_))
        ran = np.zeros((top - start, self.slab.lanes), np.bool_)
        gone = np.zeros_like(ran)
        failed = np.zeros(self.slab.lanes, np.bool_)
        for member, slots in zip(members, filled, strict=True):
            lanes = slice(member.columns.start, member.columns.stop)
            ran[: max(0, slots - start), lanes] = True
            gone[max(0, turns.start - start) :, lanes] = member.index in turns.died
            failed[lanes] = member.failed is not None
        ran[:, stepped:] = False
        executed = self._plan.executed(self.slab, start, top, self._pending) & ran
        count = stop - start
        beyond, never = executed[count:], gone[count:] | failed
        gone = gone[:count]
        if self._plan.reset_slots and count:
            ended = ended_in(self.slab, stop - 1, stop)[0]
            self._pending[:] = np.where(ran[count - 1], ended, self._pending) & ~gone[-1]
        return SlotOutcome(
            slots=int(ran.sum()),
            executed=int(executed.sum()),
            transitions=executed[:count] & ~gone,
            ran=ran[:count] & ~gone,
            lost=int((executed[:count] & gone).sum() + (beyond & never).sum()),
            beyond=int((beyond & ~never).sum()),
        )

    def upcoming(self) -> NDArray[np.bool_]:
        """Return the lanes whose next slot will be a transition."""
        return ~self._pending

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Return the lanes that had to be reset since the last call, or None."""
        return self._turns.take_cuts()
