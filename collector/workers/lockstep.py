"""Slots that workers fill, all by the same number (``mode="sync"``)."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import WorkerError
from tallyroll.collector.policies.random_actions import Draw
from tallyroll.collector.rollout.driver import Account, Driver, ended_in
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.processes import Member, WorkerPool
from tallyroll.collector.workers.startup import WorkerStartup
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key


class LockstepDriver(Driver):
    """Asks every worker to fill its lanes of the same slots, and waits for all.

    Args:
        crew: the workers.
        slab: of all lanes.
        plan: what it looks like.
        draws: of each action of all lanes, as one process would draw them; None: workers draw.
        rng: what they are drawn with.
        replace: what is done about a worker that failed.
    """

    def __init__(
        self,
        crew: WorkerPool,
        slab: Slab,
        plan: SlabPlan,
        *,
        draws: Mapping[Key, Draw] | None,
        rng: np.random.Generator,
        replace: WorkerStartup,
    ) -> None:
        self.slab, self._worker_pool, self._plan = slab, crew, plan
        self._draws, self._rng = draws, rng
        self._replace = replace
        self._pending = np.zeros(slab.lanes, np.bool_)
        self._fresh = False
        self._died: dict[int, int] = {}
        """Slots that a worker which died in this call had filled, by its index."""
        self._cuts: NDArray[np.bool_] | None = None

    # --- progress ---------------------------------------------------------------------------------

    @property
    def _boards(self) -> Sequence[memoryview]:
        boards = [member.board for member in self._worker_pool.members]
        return [board for board in boards if board is not None]

    @property
    def used(self) -> int:
        """Slots that every lane completed."""
        return min(board[FILLED] for board in self._boards)

    @used.setter
    def used(self, slots: int) -> None:
        for board in self._boards:
            board[FILLED] = slots

    @property
    def stopping(self) -> bool:
        """:meth:`stop` was called."""
        return any(board[HALT] for board in self._boards)

    def stop(self) -> None:
        """End after the step under way."""
        self._worker_pool.halt()

    # --- asking -----------------------------------------------------------------------------------

    def restart(self) -> None:
        """The next :meth:`begin` resets, whatever was reset before."""
        self._fresh = True

    def begin(self) -> None:
        """Start every lane's next trajectory."""
        fresh, self._fresh = self._fresh, False
        self._pending[:] = False
        # Where all have to begin anew: at the same slot, for none is behind it.
        self._ask([m.Begin(fresh) for _ in self._worker_pool.members], empty=0)

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        for key, draw in (self._draws or {}).items():
            self.slab.array(key)[start:stop] = draw(self._rng, stop - start)
        by = "random" if self._draws is None else "given"
        self._ask([m.Steps(start, stop, by) for _ in self._worker_pool.members])  # type: ignore[arg-type]

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        if random_lanes is None:
            self._ask([m.Steps(start, stop, "policy") for _ in self._worker_pool.members])
        else:
            self._part(start, self.slab.lanes, random_lanes)

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only."""
        self._part(at, lanes, random_lanes)

    def _part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        by = "random" if self.slab.version[at, 0] == RANDOM_VERSION else "policy"
        drawn = None
        if self._draws is not None and (random_lanes is not None or by == "random"):
            drawn = {key: draw(self._rng, 1)[0] for key, draw in self._draws.items()}
            if random_lanes is None:
                by = "given"
                for key, action in drawn.items():
                    self.slab.array(key)[at] = action
        questions = []
        for member in self._worker_pool.members:
            own = slice(member.lanes.start, member.lanes.stop)
            both = random_lanes is not None
            questions.append(
                m.Steps(
                    at,
                    at + 1,
                    "policy" if both else by,  # type: ignore[arg-type]
                    lanes=min(max(0, lanes - own.start), own.stop - own.start),
                    random_lanes=random_lanes[own] if random_lanes is not None else None,
                    drawn={key: action[own] for key, action in drawn.items()}
                    if both and drawn is not None
                    else None,
                )
            )
        self._ask(questions)

    def _ask(self, questions: Sequence[object], empty: int = 1) -> None:
        """Ask all, and hear all; who fails is replaced, or else all stops and that is raised.

        ``empty``: slots that are left empty where nobody filled any. What a lane begins with may
        lie where the slot before has its next observation.
        """
        crew, start = self._worker_pool, self.used
        self._died.clear()
        failed: list[tuple[Member, WorkerError]] = []
        try:
            for member, question in zip(crew.members, questions, strict=True):
                crew.ask(member, question)
            while any(member.asked for member in crew.members):
                for member, answer in crew.events():
                    if isinstance(answer, Exception):
                        failed.append((member, self._replace.allowed(answer)))
            if failed:
                self._mend(failed, start + empty)
        except BaseException:
            crew.settle()
            raise

    def _mend(self, failed: Sequence[tuple[Member, WorkerError]], at_least: int) -> None:
        """Put others in the place of workers that failed; what these did in this call is lost."""
        filled = {member.index: _filled(member) for member in self._worker_pool.members}
        gone = {member.index for member, _ in failed}
        alive = [slots for index, slots in filled.items() if index not in gone]
        self._cuts = np.zeros(self.slab.lanes, np.bool_)
        begin_at = min(alive, default=at_least)
        for member, _ in failed:  # whether others take their places or not
            self._died[member.index] = filled[member.index]
            self._cuts[member.lanes.start : member.lanes.stop] = True
        for member, error in failed:
            if self.stopping:  # nobody is going to step any more
                self._set_filled(member, begin_at)
            else:
                self._replace.replace(member, error, begin_at)

    def _set_filled(self, member: Member, slots: int) -> None:
        if member.board is not None:
            member.board[FILLED] = slots

    # --- what came of it --------------------------------------------------------------------------

    def account(self, start: int, stop: int, stepped: int) -> Account:
        """The outcome of the slots ``[start, stop)``."""
        filled = [self._died.get(m.index, _filled(m)) for m in self._worker_pool.members]
        top = max(stop, *filled)
        if top == start:
            return Account(0, 0, np.zeros((0, self.slab.lanes), np.bool_))
        ran = np.zeros((top - start, self.slab.lanes), np.bool_)
        gone = np.zeros(self.slab.lanes, np.bool_)
        failed = np.zeros(self.slab.lanes, np.bool_)
        for member, slots in zip(self._worker_pool.members, filled, strict=True):
            lanes = slice(member.lanes.start, member.lanes.stop)
            ran[: max(0, slots - start), lanes] = True
            gone[lanes] = member.index in self._died
            failed[lanes] = member.failed is not None
        ran[:, stepped:] = False
        executed = self._plan.executed(self.slab, start, top, self._pending) & ran
        count = stop - start
        beyond = executed[count:]
        if self._plan.reset_slots and count:
            self._pending = ended_in(self.slab, stop - 1, stop)[0] & ~gone
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
        """Lanes that had to begin anew since this was last asked, or None."""
        cuts, self._cuts = self._cuts, None
        return cuts


def _filled(member: Member) -> int:
    return 0 if member.board is None else member.board[FILLED]
