"""The balanced count of a run. Pure: no environment, no tensor, no file."""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from operator import add, attrgetter, index, neg
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.errors import LedgerError
from tallyroll.storage.files.counts import Counts, counts_of
from tallyroll.storage.rows.pages import Page, PageSource, times


class LedgerEntry(NamedTuple):
    """Numbers to add to the counts of the same names in a :class:`Ledger`."""

    slots: int = 0
    executed: int = 0
    reset_slots: int = 0
    lost: int = 0
    discarded: int = 0
    policy_calls_on_reset_slots: int = 0
    stored: int = 0
    random: int = 0
    ticks: int = 0
    reset_ticks: int = 0
    episodes_complete: int = 0
    episodes_cut: int = 0
    agent_transitions: int = 0

    def plus(self, other: "LedgerEntry") -> "LedgerEntry":
        """Return the sum of both entries."""
        return LedgerEntry(*map(add, self, other))

    def undone(self) -> "LedgerEntry":
        """Return the entry that reverts this one."""
        return LedgerEntry(*map(neg, self))


NOTHING = LedgerEntry()


class _InWords:
    """An object with a block of counts."""

    block: Any
    """A `LedgerCounts`, or a constant tuple with the same names in a snapshot."""
    shown: Counts
    """The counts at the last `Ledger.publish`, which any thread may read."""
    _bytes: tuple[memoryview, memoryview]
    """The memory of ``block`` and ``shown``."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)  # not in `__init__`, which a dataclass makes
        made.block, made.shown = LedgerCounts(), LedgerCounts()
        made._bytes = memoryview(made.block).cast("B"), memoryview(made.shown).cast("B")
        return made


@dataclass
class Ledger(PageSource, _InWords):
    """The balanced count of every slot of a run.

    Two equations hold (:meth:`check`)::

        slots    = executed + reset_slots
        executed = stored + discarded + carried + lost

    ``collector.ledger`` is a snapshot, which does not change later. Any thread may take one at any
    time. During a call, a snapshot has the counts of the last commit.

    All counts are in transitions (one lane, one executed action) unless said otherwise.

    Examples:
        >>> from tallyroll.collector import SyncCollector
        >>> with SyncCollector(
        ...     "CartPole-v1", num_envs=8, frames_per_batch=50, total_frames=100, seed=0
        ... ) as collector:
        ...     for batch in collector:
        ...         ledger = collector.ledger
        ...         print(ledger.executed, ledger.stored, ledger.carried, ledger.discarded)
        56 50 6 0
        104 100 0 4
        >>> ledger.executed == ledger.stored + ledger.discarded + ledger.carried + ledger.lost
        True
        >>> ledger.slots == ledger.executed + ledger.reset_slots
        True
    """

    slots: int = 0
    """Number of slots: the lanes of all batched step calls, including reset slots."""
    executed: int = 0
    """Number of transitions that the environments executed."""
    reset_slots: int = 0
    """Slots in which an environment ignored the action and reset itself."""
    stored: int = 0
    """Transitions that were yielded in batches, or written to a storage, or both."""
    discarded: int = 0
    """Transitions that were executed and discarded: surplus, or beyond an episode budget."""
    carried: int = 0
    """Transitions that wait for the next batch; 0 at the end of a run."""
    lost: int = 0
    """Transitions of a worker or a process that died before they were committed."""
    random: int = 0
    """Stored transitions whose action was drawn at random (``init_random_frames``)."""
    policy_calls_on_reset_slots: int = 0
    """Actions that the policy chose and the environment ignored."""
    ticks: int = 0
    """Simulator ticks inside the stored transitions (``frame_skip``).

    Transitions with unknown ticks add 0: the number is unknown if it is below ``stored``."""
    reset_ticks: int = 0
    """Simulator ticks inside resets (no-op starts), which ``ticks`` does not include."""
    episodes_complete: int = 0
    """Number of trajectories that were stored up to their end."""
    episodes_cut: int = 0
    """Number of trajectories that were cut and will not be continued."""
    incarnation: int = 0
    """Number of restarts of the run; counts between its last commit and a restart are unknown."""
    respawned: int = 0
    """Number of workers that replaced a failed one; ``incarnation`` includes them."""
    agent_transitions: int = 0
    """Number of agent transitions in the stored transitions, if a lane has several agents.

    Only agents that were alive, or whose turn it was, count.
    """
    agent_budget: int | None = None
    """The budget in agent transitions; None if the run has another budget, or none."""
    seed: int | None = None
    """The seed of the run."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that made the data."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copy and pickle; a copy has its own block."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    def check(self) -> tuple[int, ...]:
        """Raise :class:`LedgerError` unless both equations hold and no count is negative.

        `balance` calls it at each commit, and so do the functions that load a saved state or a
        checkpoint. `add_to` in ``native/_store.c`` repeats it for small batches, and
        ``record_checks.py`` for `verify`.

        Returns:
            Every count, in the order of `COUNTS`.
        """
        now = self.block
        if now.slots != now.executed + now.reset_slots:
            raise LedgerError(
                f"expected slots = executed + reset_slots, got {now.slots} and "
                f"{now.executed} + {now.reset_slots}"
            )
        if now.executed != now.stored + now.discarded + now.carried + now.lost:
            raise LedgerError(
                "expected executed = stored + discarded + carried + lost, got "
                f"{now.executed} and {now.stored} + {now.discarded} + {now.carried} + {now.lost}"
            )
        values = tuple(now.words.tolist())
        if min(values) < 0:
            negative = {name: count for name, count in self.counts().items() if count < 0}
            raise LedgerError(f"expected counts of at least 0, got {negative}")
        return values

    def publish(self) -> None:
        """Publish the current counts for snapshots. The counts must be consistent at this time.

        It makes one copy, which no other thread interrupts. `StepKernel.store_slots` publishes too.
        """
        live, shown = self._bytes
        shown[:] = live

    def count_respawn(self) -> None:
        """Count a worker that replaces a failed one; the next snapshot includes it."""
        for counts in (self.block, self.shown):  # no equation includes them
            counts.respawned += 1
            counts.incarnation += 1

    def snapshot(self) -> "Ledger":
        """Return the published counts as a ledger that does not change."""
        made = object.__new__(Ledger)  # without its own block
        made.block = _Snapshot._make(self.shown.words.tolist())
        made.agent_budget, made.seed = self.agent_budget, self.seed
        made.versions = dict(self.versions)
        return made

    def balance(self, held: int) -> None:
        """Set ``carried`` to ``held``, the number of transitions that wait in the source.

        Raises:
            LedgerError: the counts do not add up to the executed transitions.
        """
        self.block.carried = held
        self.check()

    def counts(self) -> dict[str, int]:
        """Return every count by name."""
        return dict(zip(COUNTS, self.values, strict=True))

    @property
    def values(self) -> tuple[int, ...]:
        """All counts, in the order of `COUNTS`, balanced or not."""
        return tuple(self.block.words.tolist())

    @property
    def agent_surplus(self) -> int:
        """Number of agent transitions beyond the budget, because the last row may have several."""
        budget = self.agent_budget
        return 0 if budget is None else max(0, self.agent_transitions - budget)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, the seed and the versions for a report of the run.

        If the budget is in agent transitions, include the budget and the surplus.
        """
        found = asdict(self)
        if self.agent_budget is None:
            del found["agent_budget"]
            return found
        return {**found, "agent_surplus": self.agent_surplus}

    def _show_on_(self, page: Page) -> None:
        show_ledger(page, self.counts())

    def load(self, counts: Mapping[str, int]) -> None:
        """Load a result of :meth:`counts`; unknown names are an error."""
        unknown = sorted(set(counts) - set(COUNTS))
        if unknown:
            raise LedgerError(f"expected names of counts among {sorted(COUNTS)}, got {unknown}")
        for name, count in counts.items():
            setattr(self, name, int(count))


_NO_COUNTS = ("agent_budget", "seed", "versions")
COUNTS = tuple(each.name for each in fields(Ledger) if each.name not in _NO_COUNTS)
"""The names of the counts, in their order in a block."""
LedgerCounts = counts_of(*COUNTS)


class _Snapshot(namedtuple("_Snapshot", COUNTS)):  # type: ignore[misc]  # one list of names
    """The counts of a ledger at one moment."""

    __slots__ = ()

    @property
    def words(self) -> NDArray[np.int64]:
        """The counts as an int64 array ``[name]``."""
        return np.array(self, np.int64)


def _count(name: str) -> property:
    """Return an attribute that reads and sets a word of the ledger's block."""

    def put(ledger: Ledger, count: int) -> None:
        if not -_LIMIT <= index(count) < _LIMIT:
            raise LedgerError(f"{name}: expected a count of 64 bits, got {count}")
        if type(ledger.block) is _Snapshot:
            raise AttributeError(
                f"{name}: the ledger of a collector is a read-only snapshot. Change a copy of it "
                "instead (copy.copy)."
            )
        setattr(ledger.block, name, index(count))

    return property(attrgetter(f"block.{name}"), put)  # reading takes no call of Python code


_LIMIT = 2**63
for _name in COUNTS:
    setattr(Ledger, _name, _count(_name))


def post(ledger: Ledger, entry: LedgerEntry) -> None:
    """Add ``entry`` atomically: no signal handler sees a part of it, or interrupts it.

    While a run collects, only this function and `StepKernel.store_slots` add to the counts.
    """
    if entry is not NOTHING:
        words = ledger.block.words
        np.add(words, amounts(entry), words)


@lru_cache(maxsize=256)
def amounts(entry: LedgerEntry) -> NDArray[np.int64]:
    """Return the numbers that ``entry`` adds to `COUNTS`, in their order; do not change them.

    The results are cached, because most entries equal the previous one.
    """
    added = LedgerCounts()
    for name, count in zip(LedgerEntry._fields, entry, strict=True):
        if count:
            added.words[COUNTS.index(name)] = count
    return added.words


@dataclass(frozen=True)
class Budget:
    """The budget of a run: ``total`` transitions, or no limit if it is None.

    Args:
        total: number of transitions, or of agent transitions.
        agents: the maximum number of agents in a transition, if agent transitions are counted; None
            otherwise.
    """

    total: int | None
    agents: int | None = None

    def remaining(self, counted: int) -> int | None:
        """Return how many transitions may follow after ``counted``; None means no limit.

        With a budget of agent transitions, the number is small enough for any number of acting
        agents; the caller asks again until the budget is met.
        """
        if self.total is None:
            return None
        left = max(0, self.total - counted)
        return left if self.agents is None else -(-left // self.agents)

    def batch(self, counted: int, frames_per_batch: int) -> int:
        """Return the size of the next batch; 0 ends the run.

        The size is ``frames_per_batch``, or the remaining budget if that is smaller. A budget of
        agent transitions does not limit it, because the number of remaining rows is unknown.
        """
        remaining = self.remaining(counted)
        if remaining is None or (remaining and self.agents is not None):
            return frames_per_batch
        return min(frames_per_batch, remaining)


def known_ticks(counts: Mapping[str, Any]) -> int | None:
    """Return the ticks in the counts of a ledger; None if some rows have unknown ticks."""
    ticks = counts.get("ticks", 0)
    return ticks if ticks is not None and ticks >= counts.get("stored", 0) else None


_LEDGER = {
    "slots": ("slots", "= executed + reset slots"),
    "executed": ("  executed", "= stored + discarded + carried + lost"),
    "stored": ("    stored", "transitions in the storage"),
    "discarded": ("    discarded", "beyond the budget or given up"),
    "carried": ("    carried", "waiting for a next batch"),
    "lost": ("    lost", "died with a process, uncommitted"),
    "reset_slots": ("  reset slots", "never stored, never counted"),
    "ticks": ("ticks", "of the simulator, in stored transitions"),
    "episodes_complete": ("episodes complete", ""),
    "episodes_cut": ("episodes cut", "left unfinished"),
}
"""Counts that are always shown, with their labels and meanings."""
_AGENTS = ("agent transitions", "of agents that lived or had their turn, in stored transitions")


def show_ledger(page: Page, counts: Mapping[str, Any], episodes: str = "") -> None:
    """Write the counts of a ledger to a page, one per line.

    ``episodes`` is the text after the count of complete episodes.
    """
    shown = {**_LEDGER, "episodes_complete": ("episodes complete", episodes)}
    for name, count in counts.items():
        if count and name not in ("incarnation", "respawned"):
            plain = (name.replace("_", " "), "")
            shown.setdefault(name, _AGENTS if name == "agent_transitions" else plain)
    for name, (label, meaning) in shown.items():
        known = name != "ticks" or known_ticks(counts) is not None
        shown_count = f"{counts.get(name, 0):,}" if known else "unknown"
        page.print(f"{label:<17} {shown_count:>15}  {meaning}".rstrip())
    if respawned := counts.get("respawned", 0):
        page.print(
            f"workers were replaced {times(respawned)}; transitions that they had not "
            "delivered are lost, and were collected again"
        )
    # The incarnation also counts each replacement of a worker.
    if (resumed := counts.get("incarnation", 0) - respawned) > 0:
        page.print(
            f"resumed {times(resumed)}; the counts of a killed process are those of its last "
            "commit, and loading a checkpoint counts as resuming"
        )
