"""Errors of collectors, one class for each condition.

::

    CollectorError
    ├── ArgumentError (ValueError)   an argument that is not valid
    │   ├── NameRefused              columns whose names collide, or that no storage can hold
    │   └── UnknownArgument (TypeError)   an argument that does not exist
    ├── EnvironmentRefused           an environment whose transitions cannot be counted correctly
    │   ├── EnvironmentUnknown       a storage does not record how to make the environment
    │   └── SilentReset              an environment resets itself within step
    ├── EnvironmentDied              a process of a vector environment exited or was killed
    ├── SpaceError                   a space that has no column layout
    ├── PolicyError                  a policy returned no valid action of this environment
    ├── TransitionError              an environment returned values that its specs do not declare
    │   └── ValueRefused             one value of a lane, which no column can hold unchanged
    ├── UserStopIteration            user code raised StopIteration
    ├── EnvCallError                 an environment raised in `env_call`, `env_get` or `env_set`
    ├── LedgerError                  the counts do not balance: a bug, never to be ignored
    ├── StateError                   a state dict or a storage that does not fit this collector
    │   └── ItemsDiffer              rows do not form items of a TorchRL buffer's length
    ├── MissingExtra (ImportError)   an optional package is not installed
    ├── SharedMemoryBusy (TimeoutError)   another process keeps memory locked
    └── WorkerError                  a worker failed; reports its lanes, seeds and actions
        ├── WorkerRaised             code in a worker raised; the cause is its exception, if known
        ├── WorkerDied               a worker exited, or a signal killed it
        └── WorkerHung               a worker made no progress within its time limit
"""

from collections.abc import Sequence
from typing import Any, Self

__all__ = [
    "ArgumentError",
    "CollectorError",
    "EnvCallError",
    "EnvironmentDied",
    "EnvironmentRefused",
    "EnvironmentUnknown",
    "ItemsDiffer",
    "LedgerError",
    "MissingExtra",
    "NameRefused",
    "PolicyError",
    "SharedMemoryBusy",
    "SilentReset",
    "SpaceError",
    "StateError",
    "TransitionError",
    "UnknownArgument",
    "UserStopIteration",
    "ValueRefused",
    "WorkerDied",
    "WorkerError",
    "WorkerHung",
    "WorkerRaised",
]


class CollectorError(Exception):
    """Base class of the errors that :mod:`tallyroll.collector` defines."""


class ArgumentError(CollectorError, ValueError):
    """An argument that is not valid, found before anything was changed."""


class NameRefused(ArgumentError):
    """A column's name is taken, empty, or not valid in any storage; see ``rename=``."""


class UnknownArgument(ArgumentError, TypeError):
    """An argument that does not exist; the message suggests a similar name."""


class EnvironmentRefused(CollectorError):
    """The environment would lose or invent transitions; the message suggests a remedy."""


class EnvironmentUnknown(EnvironmentRefused):
    """A storage lacks the information to make its environment, or refers to code."""


class SilentReset(EnvironmentRefused):
    """The environment resets itself, and returns a first observation as the final one.

    The error is raised while collecting, before the batch that shows the reset is stored. The
    message names the rows that are already stored.
    """


class EnvironmentDied(CollectorError):
    """A process of an ``AsyncVectorEnv`` or a ``SubprocVecEnv`` exited or was killed.

    The cause is the exception of the vector environment. Committed rows are safe. The other
    processes of the vector environment end too.

    Attributes:
        lanes: the lanes of the processes that ended, numbered over the run.
        exitcodes: the exit status of each of these processes; negative for a signal, None if
            unknown.
    """

    def __init__(
        self, message: str, *, lanes: Sequence[int] = (), exitcodes: Sequence[int | None] = ()
    ) -> None:
        super().__init__(message)
        self.lanes, self.exitcodes = list(lanes), list(exitcodes)


class SpaceError(CollectorError):
    """A Gymnasium space that cannot be laid out in columns."""


class PolicyError(CollectorError):
    """The policy returned a value that is not a valid action of this environment."""


class TransitionError(CollectorError):
    """The environment returned a value that differs from what its spaces declare."""


class ValueRefused(TransitionError):
    """A value that one lane returned and that its column cannot hold unchanged.

    The attributes locate the value as far as it is known: ``key``, ``lane`` (numbered over the
    run), and ``step`` within the trajectory.
    """

    lane: int | None = None
    step: int | None = None
    slot: int | None = None
    """The slot of the slab, while the step is unknown."""

    def __init__(self, key: tuple[str, ...], wanted: str, got: str, advice: str) -> None:
        super().__init__(key, wanted, got, advice)
        self.key, self.wanted, self.got, self.advice = key, wanted, got, advice

    def locate(
        self, *, lane: int | None = None, step: int | None = None, slot: int | None = None
    ) -> Self:
        """Set the lane, the step or the slot of the value; None keeps the current one."""
        self.lane = self.lane if lane is None else lane
        self.step = self.step if step is None else step
        self.slot = self.slot if slot is None else slot
        return self

    def __str__(self) -> str:
        where = "" if self.lane is None else f" at lane {self.lane}"
        if self.step is not None:
            where += f", step {self.step} of its trajectory"
        return f"{'/'.join(self.key)}{where}: expected {self.wanted}, got {self.got}; {self.advice}"


class UserStopIteration(CollectorError):
    """Code of the user, such as an environment or a policy, raised StopIteration.

    This error replaces StopIteration, with which a loop over batches would end as if the budget
    were met. The message begins with the place of the call. The cause is the original exception;
    ``StopAsyncIteration`` is treated in the same way. In a worker, this error becomes
    :class:`WorkerRaised`, like any other exception.
    """


class EnvCallError(CollectorError):
    """A call of an environment by ``env_call``, ``env_get`` or ``env_set`` raised an exception.

    The cause is the original exception, if a worker could send it. The run continues.

    Attributes:
        lane: the first lane in which the call raised.
        failed: all lanes in which the call raised.
        done: the lanes in which the call succeeded.
        traceback: the traceback of the original exception.
    """

    def __init__(
        self,
        message: str,
        *,
        lane: int = -1,
        failed: Sequence[int] = (),
        done: Sequence[int] = (),
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.lane, self.failed, self.done = lane, list(failed), list(done)
        self.traceback = traceback


class LedgerError(CollectorError):
    """The counts of a run do not balance."""


class StateError(CollectorError):
    """A saved state or an existing storage that does not fit this collector."""


class ItemsDiffer(StateError):
    """Rows do not form items of the same length as the items in a TorchRL buffer."""


class MissingExtra(CollectorError, ImportError):
    """An optional package is not installed; the message names the extra."""


class SharedMemoryBusy(CollectorError, TimeoutError):
    """Another process kept shared memory locked until the timeout."""


class WorkerError(CollectorError):
    """A worker failed. Committed rows are safe.

    Attributes:
        worker: the number of the worker.
        lanes: the lanes that the worker steps.
        lane: the lane that failed, if known.
        seeds: the seeds of the lanes' last start.
        action: the last action (of ``lane``, or of all ``lanes``).
        worker_traceback: the traceback in the worker.
        exitcode: the exit status of the worker's process, if known; negative for a signal.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: int = -1,
        lanes: range = range(0),
        lane: int | None = None,
        seeds: Sequence[int] = (),
        action: Any = None,
        worker_traceback: str = "",
        exitcode: int | None = None,
    ) -> None:
        super().__init__(message)
        self.worker, self.lanes, self.lane, self.seeds = worker, lanes, lane, list(seeds)
        self.action, self.worker_traceback, self.exitcode = action, worker_traceback, exitcode


class WorkerRaised(WorkerError):
    """Code in a worker, such as an environment, a policy or a factory, raised an exception."""


class WorkerDied(WorkerError):
    """A worker exited or was killed; ``exitcode`` is its exit status, negative for a signal."""


class WorkerHung(WorkerError):
    """A worker made no progress within its time limit."""
