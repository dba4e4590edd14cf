"""Supervision of worker processes: how long they may take, and what follows when one fails."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options import not_negative, one_of, seconds

OnDeath = Literal["raise", "respawn"]
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Supervision:
    """How a :class:`MultiprocessCollector` watches its workers.

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
    max_respawns: int = 10
    step_timeout: float | None = None
    start_timeout: float | None = _START_SECONDS

    def __post_init__(self) -> None:
        one_of("on_worker_death", self.on_worker_death, OnDeath)
        not_negative("max_respawns", self.max_respawns)
        seconds("step_timeout", self.step_timeout)
        seconds("start_timeout", self.start_timeout)

    @property
    def respawns(self) -> int:
        """Workers that may be replaced in all."""
        return int(self.max_respawns) if self.on_worker_death == "respawn" else 0

    @property
    def start_seconds(self) -> float:
        """Seconds that a worker may take to be ready."""
        return self.start_timeout or _START_SECONDS


def supervision_of(arguments: Mapping[str, Any]) -> Supervision:
    """The one among the ``arguments`` of a collector, or that of its keywords.

    Raises:
        ArgumentError: both say something.
    """
    given = arguments["supervision"]
    keywords = {field.name: arguments[field.name] for field in fields(Supervision)}
    if given is None:
        return Supervision(**keywords)
    if not isinstance(given, Supervision):
        raise ArgumentError(f"supervision: expected a Supervision, got {type(given).__name__}")
    unsaid = asdict(Supervision())
    if twice := [name for name, value in keywords.items() if value != unsaid[name]]:
        raise ArgumentError(
            f"supervision: expected all in one place, got {', '.join(twice)} beside it; give "
            "them to Supervision(...)"
        )
    return given
