"""Errors of collectors, one class for each condition.

::

    CollectorError
    ├── ArgumentError (ValueError)   an argument that cannot be right
    │   ├── NameRefused              columns whose names collide, or that no storage can hold
    │   └── UnknownArgument (TypeError)   an argument that there is not
    ├── EnvironmentRefused           an environment that cannot be driven truly
    │   ├── EnvironmentUnknown       a storage does not tell how it is made again
    │   └── SilentReset              it resets itself within step: found while collecting
    ├── EnvironmentDied              a process of a vector environment exited or was killed
    ├── SpaceError                   a space that has no column layout
    ├── PolicyError                  what the policy returned is not an action of this environment
    ├── TransitionError              what the environment returned differs from what it declared
    │   └── ValueRefused             one value of a lane, which no column can hold as it is
    ├── UserStopIteration            code of the user's raised StopIteration
    ├── EnvCallError                 a call of an environment by `env_call` and its kin raised
    ├── LedgerError                  the counts do not balance: a bug, never to be ignored
    ├── StateError                   a state dict or a storage that does not fit this collector
    │   └── ItemsDiffer              rows that make no item of a TorchRL buffer's length
    ├── MissingExtra (ImportError)   a package that only some users need is absent
    ├── SharedMemoryBusy (TimeoutError)   another process keeps memory locked
    └── WorkerError                  a worker process failed; says which lanes, seeds and actions
        ├── WorkerRaised             code in it raised; the cause is the original where it travels
        ├── WorkerDied               it exited, or a signal killed it
        └── WorkerHung               it made no progress within the time that it was given
"""

from collections.abc import Sequence
from typing import Any

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
    """Base of every error that :mod:`tallyroll.collector` raises on its own account."""


class ArgumentError(CollectorError, ValueError):
    """An argument that cannot be right, found before anything was touched."""


class NameRefused(ArgumentError):
    """A column's name is taken, empty, or none that a storage can hold; see ``rename=``."""


class UnknownArgument(ArgumentError, TypeError):
    """An argument of a name that there is not; the message says which may have been meant."""


class EnvironmentRefused(CollectorError):
    """The environment would lose or invent transitions; the message names the way out."""


class EnvironmentUnknown(EnvironmentRefused):
    """A storage does not say enough of its environment to make it again, or names code."""


class SilentReset(EnvironmentRefused):
    """The environment resets itself, and returns a first observation as the final one.

    Raised while collecting, before the batch that shows it is stored; the message names the rows
    that are stored already.
    """


class EnvironmentDied(CollectorError):
    """A process of an ``AsyncVectorEnv`` or a ``SubprocVecEnv`` exited or was killed.

    ``lanes`` are those of the processes that ended, numbered over the run. ``exitcodes`` say how
    (negative: the signal; None: not known). The cause is the exception of the vector. Rows that
    were committed before are unharmed. The other processes of the vector are ended, too.
    """

    def __init__(
        self, message: str, *, lanes: Sequence[int] = (), exitcodes: Sequence[int | None] = ()
    ) -> None:
        super().__init__(message)
        self.lanes, self.exitcodes = list(lanes), list(exitcodes)


class SpaceError(CollectorError):
    """A Gymnasium space that cannot be laid out in columns."""


class PolicyError(CollectorError):
    """The policy returned something that is not an action of this environment."""


class TransitionError(CollectorError):
    """The environment returned a value that differs from what its spaces declare."""


class ValueRefused(TransitionError):
    """A value that one lane returned, and that its column cannot hold as it is.

    Its place is said as far as it is known: ``key``, ``lane``, numbered over the run, and the
    ``step`` of its trajectory.
    """

    lane: int | None = None
    step: int | None = None
    slot: int | None = None
    """The slot of the slab, while the step is not known."""

    def __init__(self, key: tuple[str, ...], wanted: str, got: str, advice: str) -> None:
        super().__init__(key, wanted, got, advice)
        self.key, self.wanted, self.got, self.advice = key, wanted, got, advice

    def __str__(self) -> str:
        where = "" if self.lane is None else f" at lane {self.lane}"
        if self.step is not None:
            where += f", step {self.step} of its trajectory"
        return f"{'/'.join(self.key)}{where}: expected {self.wanted}, got {self.got}; {self.advice}"


class UserStopIteration(CollectorError):
    """An environment, a policy or other code that was given to a collector raised StopIteration.

    A loop over batches would end by it as if the budget were met. The message begins with the place
    of the call; the cause is the original exception (``StopAsyncIteration`` is treated alike). A
    worker's arrives as :class:`WorkerRaised`, like any other exception there.
    """


class EnvCallError(CollectorError):
    """A call of an environment by ``env_call``, ``env_get`` or ``env_set`` raised there.

    ``lane`` is the first lane in which it did, ``failed`` are all of them, and ``done`` those in
    which it was done. The cause is the original exception, where it travels from a worker;
    ``traceback`` is its traceback. The run goes on.
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
    """Rows make no item of the length that those of a TorchRL buffer have."""


class MissingExtra(CollectorError, ImportError):
    """A package that only some users need is not installed; the message names the extra."""


class SharedMemoryBusy(CollectorError, TimeoutError):
    """Another process kept shared memory locked for as long as was waited for it."""


class WorkerError(CollectorError):
    """A worker process failed. Rows that were committed before are unharmed.

    ``worker`` is its number, ``lanes`` are the lanes that it steps, ``lane`` is the one that
    failed, if known, ``seeds`` are the seeds of the lanes' last start, ``action`` is the last
    action (of ``lane``, or of all ``lanes``), ``worker_traceback`` the traceback in the worker.
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
    """Code that runs in a worker raised: an environment, a policy, a factory."""


class WorkerDied(WorkerError):
    """A worker exited or was killed; ``exitcode`` says how (negative: the signal)."""


class WorkerHung(WorkerError):
    """A worker made no progress for as long as it was given."""
