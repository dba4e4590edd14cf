"""Options of workers: how they start, their time limits, and the reaction to a failure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options import Options
from tallyroll.collector.options.checks import (
    keyword_arguments,
    not_negative,
    one_of,
    or_none,
    positive,
    seconds,
)
from tallyroll.collector.options.objects import MoreOptions, OptionObject

Mode = Literal["sync", "async"]
TransportName = Literal["process", "thread"]
MakesTransport = Callable[[Sequence[bytes]], Any]
"""Function from jobs, one per worker, to a `~tallyroll.collector.workers.transport.Transport`."""
OnDeath = Literal["raise", "respawn"]
_START_SECONDS = 120.0


def _transport(name: str, value: Any) -> Any:
    if not callable(value) and value not in get_args(TransportName):
        raise ArgumentError(
            f"{name}: expected one of {list(get_args(TransportName))}, or a function that returns "
            f"a Transport for jobs, got {value!r}"
        )
    return value


def _start_method(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if value == "fork":
        raise ArgumentError(
            f'{name}: expected "spawn" or "forkserver", got "fork". A forked process has no copies '
            "of the other threads (torch has some), so a lock that one of them holds is never "
            "released."
        )
    one_of(name, value, Literal["spawn", "forkserver"])
    return str(value)


@dataclass(frozen=True)
class Supervision(OptionObject):
    """Argument of :class:`MultiprocessCollector` for the supervision of its workers.

    Args:
        on_worker_death: ``"raise"``, or ``"respawn"`` to replace a worker that raised, died or
            hung. The transitions that it was filling are lost (see the ledger) and collected again,
            and the trajectories of its lanes are cut. A worker that fails before it is ready is
            replaced with a warning, and its lanes keep their seeds.
        max_respawns: maximum number of workers that are replaced; the next failure raises.
        step_timeout: seconds without a completed step after which a worker counts as hung; None
            waits without a limit.
        start_timeout: seconds that a worker may take to be ready. None selects 120.

    Raises:
        ArgumentError: an argument is not valid.
    """

    on_worker_death: OnDeath = "raise"
    max_respawns: int = field(default=10, metadata={"check": not_negative})
    step_timeout: float | None = field(default=None, metadata={"check": seconds})
    start_timeout: float | None = field(default=_START_SECONDS, metadata={"check": seconds})

    @property
    def respawns(self) -> int:
        """Maximum number of workers that may be replaced."""
        return self.max_respawns if self.on_worker_death == "respawn" else 0

    @property
    def start_seconds(self) -> float:
        """Seconds that a worker may take to be ready."""
        return self.start_timeout or _START_SECONDS


@dataclass(frozen=True, kw_only=True)
class Processes(OptionObject):
    """Argument of :class:`MultiprocessCollector` for its worker processes.

    The collector also accepts the fields as the keywords ``mp_start_method`` and
    ``threads_per_worker``.

    Args:
        start_method: ``"forkserver"`` forks workers from a server that imports torch and TorchRL
            once; ``"spawn"`` starts processes that import them themselves. The default is
            ``"forkserver"``, but ``"spawn"`` in a child of multiprocessing, in a frozen executable,
            and if the program called ``set_forkserver_preload``. In the last case ``"forkserver"``
            uses the server of multiprocessing, which then also imports these modules.
        threads_per_worker: threads of torch and of the numerical libraries in each worker; by
            default the cores are divided among the workers.

    Raises:
        ArgumentError: an argument is not valid.
    """

    start_method: str | None = field(
        default=None, metadata={"check": _start_method, "keyword": "mp_start_method"}
    )
    threads_per_worker: int | None = field(default=None, metadata={"check": or_none(positive)})


def _address(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f'{name}: expected "local", "auto", HOST:PORT or None, got {value!r}')
    return value


def _interval(name: str, value: Any) -> float:
    if (checked := seconds(name, value)) is None:
        raise ArgumentError(f"{name}: expected a number of seconds above 0, got None")
    return checked


@dataclass(frozen=True, kw_only=True)
class Actors(OptionObject):
    """Argument of :class:`RayCollector` for the Ray actors that are its workers.

    Args:
        address: ``"local"`` starts Ray on this machine, and stops it at the end; ``"auto"`` or
            ``HOST:PORT`` connects to a cluster; None uses the existing connection of this process,
            or else acts as ``"local"``.
        actor_options: arguments of ``.options()`` of the actors, such as ``num_cpus`` (1),
            ``num_gpus``, ``resources``, ``scheduling_strategy`` (``"SPREAD"``) and ``runtime_env``.
        spares: number of actors that are started in advance, so that a replacement does not take
            seconds to start. Each takes the resources of a worker.
        heartbeat: seconds between requests for a heartbeat. An actor that sent an answer meanwhile
            gets no request. An actor that misses five heartbeats counts as dead.

    Raises:
        ArgumentError: an argument is not valid.
    """

    address: str | None = field(default=None, metadata={"check": or_none(_address)})
    actor_options: dict[str, Any] | None = field(
        default=None, metadata={"check": or_none(keyword_arguments)}
    )
    spares: int = field(default=1, metadata={"check": not_negative})
    heartbeat: float = field(default=1.0, metadata={"check": _interval})


class MoreOfSupervision(MoreOptions, total=False):
    """The fields of :class:`Supervision` as keywords of a collector, for type checkers."""

    on_worker_death: OnDeath
    max_respawns: int
    step_timeout: float | None
    start_timeout: float | None


class MoreOfWorkers(MoreOfSupervision, total=False):
    """The fields of :class:`Supervision` and :class:`Processes` as keywords."""

    mp_start_method: str | None
    threads_per_worker: int | None


class MoreOfActors(MoreOfSupervision, total=False):
    """The fields of :class:`Supervision` and :class:`Actors` as keywords."""

    address: str | None
    actor_options: dict[str, Any] | None
    spares: int
    heartbeat: float


@dataclass(frozen=True)
class SupervisedOptions(Options):
    """Arguments of any collector with workers."""

    mode: Mode
    supervision: Supervision
    sharded: bool

    @property
    def in_shards(self) -> bool:
        """True if each worker stores its own rows in a shard."""
        return self.sharded

    def _refuse_contradictions(self, given: Any) -> None:
        super()._refuse_contradictions(given)
        if self.sharded:
            self._refuse_sharded(given)
        if self.acts_centrally and given["policy"] is None:
            raise ArgumentError(
                'policy_placement="central": expected a policy, got none. Give a policy, or leave '
                "policy_placement out."
            )
        if self.mode == "async":
            self._refuse_in_async()

    def _refuse_sharded(self, given: Any) -> None:
        """Refuse arguments that need rows in this process, or an order of all rows."""
        wrong = {
            'mode="sync", because shards have no common order. Give mode="async"': self.mode
            == "sync",
            "storage=None. Pass a path as storage=": given["storage"] is None,
            "a replay buffer, because it would get no rows. Leave replay_buffer out": given[
                "replay_buffer"
            ]
            is not None,
            "postproc, because it would get no rows. Leave postproc out": self.postproc is not None,
            f'layout="{self.layout.name}", as no batch is yielded. Leave it out': self.layout.name
            != "rows",
            "total_episodes, because no worker knows which start first. Give total_frames": (
                self.total_episodes is not None
            ),
            'budget_unit="agent_transitions". Leave budget_unit out': self.by_agent,
            "init_random_frames, because they are the first frames of the whole run. Leave "
            "init_random_frames out, or collect them in a run of their own": self.init_random_frames
            > 0,
            'policy_placement="central", because each worker acts for its shard. Leave '
            "policy_placement out": (self.acts_centrally),
            "shard, because workers already have shards of this run. Leave one of them out": (
                self.shard is not None
            ),
        }
        for what, there in wrong.items():
            if there:
                raise ArgumentError(f"sharded=True cannot be combined with {what}.")

    def _refuse_in_async(self) -> None:
        if self.reset_at_each_iter:
            raise ArgumentError(
                'reset_at_each_iter needs mode="sync", because in async mode workers continue '
                "while a batch is assembled."
            )
        if self.surplus == "discard":
            raise ArgumentError(
                'surplus="discard" needs mode="sync", because in async mode a batch has no last '
                'step. Use "carry" or "never_step".'
            )


@dataclass(frozen=True)
class ActorOptions(SupervisedOptions):
    """Arguments of a collector whose workers are Ray actors."""

    actors: Actors


@dataclass(frozen=True)
class WorkerOptions(SupervisedOptions):
    """Arguments of a collector whose workers are processes or threads."""

    transport: Annotated[TransportName | MakesTransport, _transport]
    processes: Processes

    def _refuse_contradictions(self, given: Any) -> None:
        super()._refuse_contradictions(given)
        if self.transport != "process" and self.processes.start_method == "forkserver":
            raise ArgumentError(
                f'mp_start_method={self.processes.start_method!r} needs transport="process", '
                "because other workers have no start method. Leave mp_start_method out."
            )
        if self.transport == "thread":
            self._refuse_in_threads()

    def _refuse_in_threads(self) -> None:
        if self.processes.threads_per_worker is not None:
            raise ArgumentError(
                'threads_per_worker needs transport="process", because workers in threads share '
                "the threads of this process. Leave threads_per_worker out, or call "
                "torch.set_num_threads."
            )
        if self.supervision.step_timeout is not None and self.supervision.respawns:
            raise ArgumentError(
                'step_timeout with on_worker_death="respawn" needs transport="process", because a '
                "thread that hangs cannot be ended and replaced. Leave one of them out."
            )
