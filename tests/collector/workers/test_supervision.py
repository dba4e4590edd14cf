"""Supervision of workers, by an object or by its keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tallyroll.collector import MultiprocessCollector, Supervision
from tallyroll.collector.errors import ArgumentError, WorkerDied

from worker_faults_kit import Fault, Faults, factories, no_process_left, warm_server

__all__ = ["no_process_left", "warm_server"]

RUN: dict[str, Any] = {
    "frames_per_batch": 20,
    "total_frames": 100,
    "mp_start_method": "forkserver",
}


def collected(folder: Path, **options: Any) -> MultiprocessCollector:
    """Return a run of two workers, one of which exits after 20 steps."""
    faults = Faults(folder, [Fault("step", "exit", 0, 20)])
    with MultiprocessCollector(factories(faults, 2, 2), **RUN, **options) as collector:
        for _ in collector:
            pass
    return collector


def test_an_object_does_what_its_keywords_do(tmp_path: Path) -> None:
    keywords: dict[str, Any] = {"on_worker_death": "respawn", "max_respawns": 1}
    mixed = {"supervision": Supervision(on_worker_death="respawn"), "max_respawns": 1}
    for number, options in enumerate((keywords, mixed)):
        (tmp_path / str(number)).mkdir()
        ledger = collected(tmp_path / str(number), **options).ledger
        assert (ledger.respawned, ledger.stored) == (1, 100)


@pytest.mark.parametrize("supervision", [None, Supervision(), Supervision("respawn", 0)])
def test_a_failure_raises_where_no_worker_may_be_replaced(
    tmp_path: Path, supervision: Supervision | None
) -> None:
    with pytest.raises(WorkerDied, match="exited with status"):
        collected(tmp_path, supervision=supervision)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_worker_death": "ignore"}, "on_worker_death: expected one of"),
        ({"max_respawns": -1}, "max_respawns: expected an integer of at least 0"),
        ({"max_respawns": 1.5}, "max_respawns: expected an integer"),
        ({"step_timeout": 0}, "step_timeout: expected a number of seconds above 0"),
        ({"start_timeout": "long"}, "start_timeout: expected a number of seconds above 0"),
    ],
)
def test_values_are_checked_when_the_object_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Supervision(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"supervision": {"max_respawns": 3}},
            r"supervision: expected Supervision\(...\), got dict",
        ),
        (
            {"supervision": Supervision(max_respawns=1), "max_respawns": 1},
            "max_respawns: expected only once, got both max_respawns=1 and Supervision",
        ),
    ],
)
def test_an_option_given_twice_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MultiprocessCollector("CartPole-v1", num_workers=2, **RUN, **options)


def test_without_a_start_timeout_it_is_two_minutes() -> None:
    assert Supervision(start_timeout=None).start_seconds == Supervision().start_seconds == 120
    assert Supervision("raise", 5).respawns == 0
    assert Supervision("respawn", 5).respawns == 5
