"""Slots that workers fill, all by the same number (``mode="sync"``)."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import WorkerError
from tallyroll.collector.policies.slot_rng import Array, Draw, SlotRng
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.lanes import Account, ended_in
from tallyroll.collector.rollout.os_signals import pausable
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import FILLED, HALT, PAUSE, STOP
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import WorkerPool
from tallyroll.collector.workers.start_and_replace import WorkerStartup
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key


class LockstepDriver(Driver):
    """Asks every worker to fill its lanes of the same slots, and waits for all.

    Args:
        pool: the workers.
        slab: of all lanes.
        plan: what it looks like.
        draws: of each action of all lanes, as one process would draw them; None: workers draw.
        width: numbers of a slot's actions.
        rng: what they are drawn with.
        startup: puts others in the place of workers that failed.
    """

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
        self._startup = startup
        self._pending = np.zeros(slab.lanes, np.bool_)
        self._fresh = False
        self._died: dict[int, int] = {}
        """Slots that a worker which died in this call had filled, by its index."""
        self._cuts: NDArray[np.bool_] | None = None

    # --- progress ---------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Slots that every lane completed."""
        return min(member.board[FILLED] for member in self._worker_pool.members)

    @used.setter
    def used(self, slots: int) -> None:
        for member in self._worker_pool.members:
            member.board[FILLED] = slots

    @property
    def stopping(self) -> bool:
        """:meth:`stop` was called."""
        return _halted(self._worker_pool, STOP)

    def stop(self) -> None:
        """End after the step under way."""
        self._worker_pool.halt()

    @property
    def paused(self) -> bool:
        """A signal's handler waits."""
        return _halted(self._worker_pool, PAUSE)

    def go_on(self) -> None:
        """None does."""
        self._worker_pool.go_on()

    # --- asking -----------------------------------------------------------------------------------

    def restart(self) -> None:
        """The next :meth:`begin` resets, whatever was reset before."""
        self._fresh = True

    def begin(self) -> None:
        """Start every lane's next trajectory."""
        fresh, self._fresh = self._fresh, False
        self._pending[:] = False
        # All are reset: at the same slot, for none is behind it.
        self._ask([m.Begin(fresh)] * len(self._worker_pool.members), empty=0)

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        place = self._rng.state
        for key, drawn in self._drawn(stop - start).items():
            self.slab.array(key)[start:stop] = drawn
        self._steps(start, stop, "random" if self._draws is None else "given")
        if self._draws and (filled := self.used) < stop:  # what comes is drawn again
            self._rng.return_to(place, list(self._draws.values()), filled - start, self._width)

    def _drawn(self, slots: int) -> dict[Key, Array]:
        draws = self._draws or {}
        drawn = self._rng.take(list(draws.values()), slots, self._width) if draws else []
        return dict(zip(draws, drawn, strict=True))

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        if random_lanes is None:
            self._steps(start, stop, "policy")
        else:
            self.part(start, self.slab.lanes, random_lanes)

    def _steps(self, start: int, stop: int, by: m.Actor) -> None:
        self._ask([m.Steps(start, stop, by)] * len(self._worker_pool.members))
        while self.paused and not (self._died or self.stopping):
            filled = [member.board[FILLED] for member in self._worker_pool.members]
            if min(filled) == max(filled):
                return
            self._even_out(filled, by)

    def _even_out(self, filled: Sequence[int], by: m.Actor) -> None:
        """Let workers that are behind others fill as many slots as these, before all pause."""
        pool, top = self._worker_pool, max(filled)
        pool.go_on()
        self._ask([None if slots == top else m.Steps(slots, top, by) for slots in filled])
        pool.pause()

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only."""
        by: m.Actor = "policy"
        if random_lanes is None and self.slab.version[at, 0] == RANDOM_VERSION:
            by = "random"
        drawn: dict[Key, m.Action] | None = None
        if self._draws is not None and (random_lanes is not None or by == "random"):
            drawn = {key: each[0] for key, each in self._drawn(1).items()}
        if by == "random" and drawn is not None:
            by = "given"
            for key, action in drawn.items():
                self.slab.array(key)[at] = action
            drawn = None
        questions = []
        for member in self._worker_pool.members:
            own = slice(member.lanes.start, member.lanes.stop)
            questions.append(
                m.Steps(
                    at,
                    at + 1,
                    by,
                    lanes=min(max(0, lanes - own.start), len(member.lanes)),
                    random_lanes=None if random_lanes is None else random_lanes[own],
                    drawn=None if drawn is None else {k: each[own] for k, each in drawn.items()},
                )
            )
        self._ask(questions)

    def _ask(self, questions: Sequence[object], empty: int = 1) -> None:
        """Ask all that have a question, and hear all.

        A worker that fails is replaced, or else all stop and its error is raised.

        ``empty``: slots that are left empty where no worker filled any. What a lane begins with may
        lie where the slot before has its next observation.
        """
        pool, start = self._worker_pool, self.used
        self._died.clear()
        failed: list[tuple[Member, WorkerError]] = []
        try:
            for member, question in zip(pool.members, questions, strict=True):
                if question is not None:
                    pool.ask(member, question)
            while any(member.asked for member in pool.members):
                for member, answer in pool.events(during=pausable(pool.pause)):
                    if isinstance(answer, Exception):
                        failed.append((member, self._startup.allowed(answer)))
            if failed:
                self._mend(failed, start + empty)
        except BaseException:
            self._startup.replacements.give_up()  # slots will be others when it goes on
            pool.settle()
            raise

    def _mend(self, failed: Sequence[tuple[Member, WorkerError]], at_least: int) -> None:
        """Put others in the place of workers that failed; what these did in this call is lost."""
        self._cuts = np.zeros(self.slab.lanes, np.bool_)
        for member, _ in failed:  # whether others take their places or not
            self._died[member.index] = member.board[FILLED]
            self._cuts[member.lanes.start : member.lanes.stop] = True
        alive = [each for each in self._worker_pool.members if each.index not in self._died]
        begin_at = min((member.board[FILLED] for member in alive), default=at_least)
        for member, error in failed:
            if self.stopping:  # no worker is going to step any more
                member.board[FILLED] = begin_at
            else:
                self._startup.replace(member, error, begin_at)
        self._startup.replacements.finish()  # none advances without the others

    # --- what came of it --------------------------------------------------------------------------

    def account(self, start: int, stop: int, stepped: int) -> Account:
        """The outcome of the slots ``[start, stop)``."""
        members = self._worker_pool.members
        filled = [self._died.get(member.index, member.board[FILLED]) for member in members]
        top = max(stop, *filled)
        if top == start:
            return Account(0, 0, np.zeros((0, self.slab.lanes), np.bool_))
        ran = np.zeros((top - start, self.slab.lanes), np.bool_)
        gone = np.zeros(self.slab.lanes, np.bool_)
        failed = np.zeros(self.slab.lanes, np.bool_)
        for member, slots in zip(members, filled, strict=True):
            lanes = slice(member.lanes.start, member.lanes.stop)
            ran[: max(0, slots - start), lanes] = True
            gone[lanes] = member.index in self._died
            failed[lanes] = member.failed is not None
        ran[:, stepped:] = False
        executed = self._plan.executed(self.slab, start, top, self._pending) & ran
        count = stop - start
        beyond = executed[count:]
        if self._plan.reset_slots and count:
            ended = ended_in(self.slab, stop - 1, stop)[0]
            self._pending = np.where(ran[count - 1], ended, self._pending) & ~gone
        return Account(
            slots=int(ran.sum()),
            executed=int(executed.sum()),
            transitions=executed[:count] & ~gone,
            ran=ran[:count] & ~gone,
            lost=int(executed[:count, gone].sum() + beyond[:, gone | failed].sum()),
            beyond=int(beyond[:, ~(gone | failed)].sum()),
        )

    def upcoming(self) -> NDArray[np.bool_]:
        """Lanes whose next slot will be a transition."""
        return ~self._pending

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Lanes that had to be reset since this was last asked, or None."""
        cuts, self._cuts = self._cuts, None
        return cuts


def _halted(pool: WorkerPool, how: int) -> bool:
    return any(member.board[HALT] == how for member in pool.members)
