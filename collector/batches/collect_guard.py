"""Guard for collecting calls: a call completes, or it ends the run."""

from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import TracebackType

from tallyroll.collector.batches.run_loop import RunLoop
from tallyroll.collector.batches.state.run_state import Phase, RunState
from tallyroll.collector.errors import StateError
from tallyroll.collector.interrupts import defer_signals, keep_stand_ins, release_stand_ins
from tallyroll.collector.user_code import ENDS, user_code

OWN_INSTANCE = (
    "Make an environment for each collector, or shut one collector down before you use the next."
)


class CollectGuard(defer_signals):
    """Defers signal handlers during a call, and ends the run if the call raises.

    An exception that is raised at a safe point (`RunState.at_safe_point`) does not change the run.
    If an environment or a policy raised, `RunLoop._take` has already stored the complete rows
    (`RunLoop._store_before`).
    """

    __slots__ = ("_fast_collect", "_kept", "_loop", "_release", "_run", "_thread")

    def __init__(
        self, run: RunState, loop: RunLoop, release: Callable[[], None] | None = None
    ) -> None:
        self._run, self._loop = run, loop
        self._release = release
        """Releases resources after an error ended the run; None if there is nothing to release."""
        self._fast_collect, self._kept = loop.fast_collect, False
        self._inner = self._outer = False
        self._thread: int | None = None
        """The thread that is inside the guard; None if no thread is."""

    @property
    def is_entered(self) -> bool:
        """True while a call is in progress."""
        return self._thread is not None or self._run.phase is Phase.COLLECTING

    @property
    def refuses(self) -> bool:
        """True if :meth:`__enter__` raises `StateError`."""
        return self.is_entered or self._run.lost

    def __enter__(self) -> None:
        """Defer signal handlers until the call ends.

        The objects that replace the handlers stay installed until the run ends.

        Raises:
            StateError: a call is in progress, or another collector drives the environment.
        """
        run = self._run
        if run.lost:
            raise StateError(
                "another collector has driven the environment since the last call, so the next "
                f"rows would not continue the trajectories of this run. {OWN_INSTANCE}"
            )
        if self.is_entered:
            raise StateError(
                "the collector is already collecting: its policy, its environment or another "
                "thread called it again. Wait until the call in progress returns."
            )
        # If the run ends from here on, the message describes this call, not an earlier one.
        run.note_stored()
        # Clear the values of the last call: __exit__ must not use them if this call is interrupted
        # here.
        self._inner, self._outer = False, False
        run.reach_safe_point()
        self._thread = get_ident()
        try:
            super().__enter__()
            run.begin_call()
            run.leave_safe_point()
            run.look_outside()
            if not self._kept:
                self._kept = keep_stand_ins(self._loop)
            if self._fast_collect is not None:
                self._fast_collect.settle()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the run after an error, and call the deferred handlers."""
        run, original = self._run, error
        if isinstance(error, ENDS):
            error = user_code.error("a call of user code", error)
        try:
            run.end_call()
            if error is not None:
                self._loop.leave()
            if error is not None and not run.at_safe_point:
                for end in (partial(self._end_run, error), self._release):
                    try:
                        if end is not None:
                            end()
                    except Exception as again:  # noqa: BLE001  `error` is raised
                        add_end_note(error, again)
            if run.over:
                release_stand_ins(self._loop)
            self._thread = None  # a handler's exception, from here on, loses nothing
        finally:
            run.ledger.publish()
            super().__exit__(kind, error, trace)
        if error is not None and error is not original:
            raise error from original

    def _end_run(self, error: BaseException) -> None:
        """End the run because a call raised ``error``."""
        try:
            if not self._run.over:
                self._loop.finish()
        finally:
            self._run.ended_by(error)

    def leave(self, error: BaseException, *, was_refused: bool) -> None:
        """Leave the guard after ``error``, if it was raised just before or after the guarded code.

        An asynchronous exception, such as one that another thread injects, can be raised at any
        instruction, even before the interpreter calls :meth:`__exit__`. ``was_refused`` is True if
        the guard refused this call, which changed nothing.
        """
        if was_refused:
            return
        try:
            if self._fast_collect is not None:
                self._fast_collect.leave()
            if self._thread == get_ident():
                self.__exit__(type(error), error, error.__traceback__)
            elif not self.is_left:
                super().__exit__(type(error), error, error.__traceback__)
        finally:
            if self._thread == get_ident():
                self._thread = None

    def make_ready(self) -> bool:
        """Make the next batch ready; return False if the run is over."""
        run, fast_collect = self._run, self._fast_collect
        if run.over:
            run.refuse_ended()
            return False
        fast = fast_collect is not None and fast_collect.batch and run.phase is Phase.IDLE
        if not fast or not self._make_at_once():
            self.ready_batch()
        return True

    def _make_at_once(self) -> bool:
        """Make the next batch ready by the fast path; return False if the loop has to make it."""
        fast_collect = self._fast_collect
        assert fast_collect is not None
        try:
            super().__enter__()
            made = fast_collect.collect(fast_collect.batch, yields=True)
            super().__exit__(None, None, None)
        except BaseException as error:
            self.leave(error, was_refused=False)
            raise
        return made

    def collect(self, want: int) -> None:
        """Store ``want`` more transitions, or fewer if the run ends first."""
        run, fast_collect, refused = self._run, self._fast_collect, self.refuses
        try:
            if run.over:
                run.refuse_ended()
            elif fast_collect is None or not fast_collect.collect(want):
                with self:
                    self._loop.collect(want)
        except BaseException as error:
            self.leave(error, was_refused=refused)
            raise

    def ready_batch(self, size: int | None = None) -> None:
        """Make the next batch ready, of ``size`` rows (default: ``frames_per_batch``)."""
        refused = self.refuses
        try:
            with self:
                batch = self._loop.batch(size)
                if batch is not None:
                    self._run.ready.append(batch)
        except BaseException as error:
            self.leave(error, was_refused=refused)
            raise

    def restart(self, then: Callable[[], None] | None = None) -> None:
        """Start new trajectories, and discard transitions that wait for the next batch."""
        refused = self.refuses
        try:
            with self:
                self._run.forget_moved()
                self._loop.discard()
                self._loop.restart_lanes()
                if then is not None:
                    then()
        except BaseException as error:
            self.leave(error, was_refused=refused)
            raise


def add_end_note(error: BaseException, again: Exception) -> None:
    """Add a note to ``error``, the raised exception, about another error at the end of the run."""
    error.add_note(
        f"tallyroll: another error at the end of the run: {type(again).__name__}: {again}"
    )
