"""Options of workers: how they run, how long they may take, what follows when one fails."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options import Options
from tallyroll.collector.options.checks import not_negative, one_of, or_none, positive, seconds
from tallyroll.collector.options.objects import MoreOptions, OptionObject

Mode = Literal["sync", "async"]
TransportName = Literal["process", "thread"]
OnDeath = Literal["raise", "respawn"]
_START_SECONDS = 120.0


def _start_method(name: str, value: Any) -> str:
    if value == "fork":
        raise ArgumentError(
            f'{name}: "fork" copies a process whose threads (torch has some) do not come '
            'along, so that a lock which one of them holds is never released; use "spawn" or '
            '"forkserver"'
        )
    one_of(name, value, Literal["spawn", "forkserver"])
    return str(value)


@dataclass(frozen=True)
class Supervision(OptionObject):
    """How a :class:`MultiprocessCollector` watches its workers: an argument of it.

    Args:
        on_worker_death: ``"raise"``, or ``"respawn"``: a worker that raised, died or hung is
            replaced. What it was filling is lost (see the ledger) and collected again, and its
            lanes' trajectories are cut. One that fails before it is ready is replaced with a
            warning, and its lanes keep their seeds.
        max_respawns: workers that are replaced in all; the next one that fails raises.
        step_timeout: seconds without a completed step after which a worker counts as hung; None
            waits for ever.
        start_timeout: seconds that a worker may take to be ready; None: 120.

    Raises:
        ArgumentError: one of them cannot be right.
    """

    on_worker_death: OnDeath = "raise"
    max_respawns: int = field(default=10, metadata={"check": not_negative})
    step_timeout: float | None = field(default=None, metadata={"check": seconds})
    start_timeout: float | None = field(default=_START_SECONDS, metadata={"check": seconds})

    @property
    def respawns(self) -> int:
        """Workers that may be replaced in all."""
        return self.max_respawns if self.on_worker_death == "respawn" else 0

    @property
    def start_seconds(self) -> float:
        """Seconds that a worker may take to be ready."""
        return self.start_timeout or _START_SECONDS


@dataclass(frozen=True, kw_only=True)
class Processes(OptionObject):
    """Worker processes of a :class:`MultiprocessCollector`: an argument of it.

    As keywords of the collector they are ``mp_start_method`` and ``threads_per_worker``.

    Args:
        start_method: ``"spawn"``, or ``"forkserver"``, which starts more quickly (its socket in
            the temporary directory is left there where this process is killed).
        threads_per_worker: of torch and of the numerical libraries; by default the cores are
            shared out.

    Raises:
        ArgumentError: one of them cannot be right.
    """

    start_method: str = field(
        default="spawn", metadata={"check": _start_method, "keyword": "mp_start_method"}
    )
    threads_per_worker: int | None = field(default=None, metadata={"check": or_none(positive)})


class MoreOfWorkers(MoreOptions, total=False):
    """The fields of these objects as keywords of a collector too, for type checkers."""

    on_worker_death: OnDeath
    max_respawns: int
    step_timeout: float | None
    start_timeout: float | None
    mp_start_method: str
    threads_per_worker: int | None


@dataclass(frozen=True)
class WorkerOptions(Options):
    """Arguments of a collector with workers."""

    mode: Mode
    transport: TransportName
    processes: Processes
    supervision: Supervision

    def _refuse_contradictions(self, given: Any) -> None:
        super()._refuse_contradictions(given)
        if self.mode == "async":
            self._refuse_in_async()
        if self.transport == "thread":
            self._refuse_in_threads()

    def _refuse_in_async(self) -> None:
        if self.reset_at_each_iter:
            raise ArgumentError(
                'reset_at_each_iter needs mode="sync": in async mode workers go on while a batch '
                "is put together"
            )
        if self.surplus == "discard":
            raise ArgumentError(
                'surplus="discard" needs mode="sync": in async mode there is no last step of a '
                'batch; use "carry" or "never_step"'
            )

    def _refuse_in_threads(self) -> None:
        if self.processes.threads_per_worker is not None:
            raise ArgumentError(
                'threads_per_worker needs transport="process": workers in threads share those of '
                "this process; leave it out, or call torch.set_num_threads"
            )
        if self.processes.start_method != "spawn":
            raise ArgumentError(
                f'mp_start_method={self.processes.start_method!r} needs transport="process": '
                "threads are not started that way; leave it out"
            )
        if self.supervision.step_timeout is not None and self.supervision.respawns:
            raise ArgumentError(
                'step_timeout with on_worker_death="respawn" needs transport="process": a thread '
                "that hangs cannot be ended, so that none can take its place; leave one of them out"
            )
