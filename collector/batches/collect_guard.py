"""Calls that collect: all of one, or the run ends and nothing of it is stored."""

from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import TracebackType

from tallyroll.collector.batches.fast_collect import OneCall
from tallyroll.collector.batches.run_loop import Assembly
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.errors import StateError
from tallyroll.collector.rollout.os_signals import deferred, keep_for, let_go
from tallyroll.collector.user_code import ENDS, user_code

OWN_INSTANCE = "make an environment for each collector, or shut this one down before"


class Undivided(deferred):
    """Do all that is inside, or end the run and store nothing of it. Signals' handlers wait."""

    __slots__ = ("_assembly", "_kept", "_one_call", "_release", "_run", "_thread")

    def __init__(
        self, run: RunState, assembly: Assembly, release: Callable[[], None] | None = None
    ) -> None:
        self._run, self._assembly = run, assembly
        self._release = release
        """Releases what no call needs after an error ended the run; None: there is nothing."""
        self._one_call, self._kept = assembly.one_call, False
        self._inner = self._outer = False
        self._thread: int | None = None
        """The thread that is inside."""

    def __enter__(self) -> None:
        """Let handlers wait, and stay where they are until the run is over."""
        run = self._run
        if run.busy:
            if run.lost:
                raise StateError(
                    "another collector drove the environment since, and what followed here would "
                    f"be rows that never were; {OWN_INSTANCE}"
                )
            raise StateError(
                "the collector is collecting already: it was called from within, by its policy or "
                "its environment, or from another thread; let the call under way return before"
            )
        # What is raised from here on ends this call, and no call before.
        run.given, run.yields = run.ledger.stored, False
        # Handlers must not wait for ever after what is raised here, wherever that is.
        self._inner, self._outer, run.intact = False, False, True
        self._thread = get_ident()
        try:
            super().__enter__()
            run.busy, run.intact = True, False
            run.look_outside()
            if not self._kept:
                self._kept = keep_for(self._assembly)
            if self._one_call is not None:
                self._one_call.settle()
            run.waiting = len(run.ready)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the run where there was an error, and call the handlers."""
        run, original = self._run, error
        if isinstance(error, ENDS):
            error = user_code.error("a call of user code", error)
        try:
            if run.outside is not None:
                run.outside.remember()
            run.busy = False
            if error is not None:
                self._assembly.leave()
            if error is not None and not run.intact:
                for end in (partial(self._assembly.end_by, error), self._release):
                    try:
                        if end is not None:
                            end()
                    except Exception as again:  # noqa: BLE001  `error` is raised
                        add_end_note(error, again)
            if run.over:
                let_go(self._assembly)
            self._thread = None  # what is raised from here on is of a handler, and loses nothing
        finally:
            run.ledger.publish()
            super().__exit__(kind, error, trace)
        if error is not None and error is not original:
            raise error from original

    def leave(self, error: BaseException, *, was_busy: bool) -> None:
        """Exit after ``error``, if it was raised between the guard and what it guards.

        An exception that is raised at any instruction, such as that of a thread that another one
        interrupts, can come before the interpreter calls :meth:`__exit__`. ``was_busy``: another
        call was under way before this one, which was refused.
        """
        if was_busy:
            return
        if self._run.outside is not None:  # steps of this call are not the program's
            self._run.outside.remember()
        if self._one_call is not None:
            self._one_call.leave()
        if self._thread == get_ident():
            self.__exit__(type(error), error, error.__traceback__)
        elif not self.is_left:
            super().__exit__(type(error), error, error.__traceback__)

    def make_ready(self) -> bool:
        """Make the next batch ready, where there is one; False where the run is over."""
        run, one_call = self._run, self._one_call
        if run.over:
            run.refuse_ended()
            return False
        few = one_call is not None and one_call.batch and not run.busy
        if one_call is None or not few or not self._make_at_once(one_call):
            self.ready_batch()
        return True

    def _make_at_once(self, one_call: OneCall) -> bool:
        """Make the next batch ready in one call; return False if the loop has to. Handlers wait."""
        try:
            super().__enter__()
            made = one_call.collect(one_call.batch, yields=True)
            super().__exit__(None, None, None)
        except BaseException as error:
            self.leave(error, was_busy=False)
            raise
        return made

    def ready_batch(self, size: int | None = None) -> None:
        """Make the next batch ready, of ``size`` rows where not of ``frames_per_batch``."""
        busy = self._run.busy
        try:
            with self:
                batch = self._assembly.batch(size)
                if batch is not None:
                    self._run.ready.append(batch)
        except BaseException as error:
            self.leave(error, was_busy=busy)
            raise

    def restart(self, then: Callable[[], None] | None = None) -> None:
        """Start new trajectories; transitions that wait for the next batch are discarded."""
        busy = self._run.busy
        try:
            with self:
                self._run.moved = ""
                self._assembly.discard()
                self._assembly.restart_lanes()
                if then is not None:
                    then()
        except BaseException as error:
            self.leave(error, was_busy=busy)
            raise


def add_end_note(error: BaseException, again: Exception) -> None:
    """Add a note to ``error``, which is raised, on further errors at the end of the run."""
    error.add_note(f"tallyroll: and at the end of the run: {type(again).__name__}: {again}")
