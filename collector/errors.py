"""What can go wrong while collecting. One class a condition.

::

    CollectorError
    ├── ArgumentError (ValueError)   an argument that cannot be right
    ├── EnvironmentRefused           an environment that cannot be driven truly
    ├── SpaceError                   a space that has no column layout
    ├── PolicyError                  what the policy returned is not an action of this environment
    ├── TransitionError              what the environment returned differs from what it declared
    ├── LedgerError                  the counts do not balance: a bug, never to be ignored
    ├── StateError                   a state dict or a storage that does not fit this collector
    ├── MissingExtra (ImportError)   a package that only some users need is absent
    └── SharedMemoryBusy (TimeoutError)   another process keeps memory locked
"""


class CollectorError(Exception):
    """Base of every error that :mod:`tallyroll.collector` raises on its own account."""


class ArgumentError(CollectorError, ValueError):
    """An argument that cannot be right, found before anything was touched."""


class EnvironmentRefused(CollectorError):
    """The environment would lose or invent transitions; the message names the way out."""


class SpaceError(CollectorError):
    """A Gymnasium space that cannot be laid out in columns."""


class PolicyError(CollectorError):
    """The policy returned something that is not an action of this environment."""


class TransitionError(CollectorError):
    """The environment returned a value that differs from what its spaces declare."""


class LedgerError(CollectorError):
    """The counts of a run do not balance."""


class StateError(CollectorError):
    """A saved state or an existing storage that does not fit this collector."""


class MissingExtra(CollectorError, ImportError):
    """A package that only some users need is not installed; the message names the extra."""


class SharedMemoryBusy(CollectorError, TimeoutError):
    """Another process kept shared memory locked for as long as was waited for it."""
