"""Faults of a configuration: in its own rows, and in comparison with the rows of its twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from random_excluding import drawn_exclusion, wrong_in_excluding

from random_configurations import Configuration
from random_drawing import twin
from random_judge import differences, judge, other_rows
from random_more import with_fault
from random_runs import Outcome, carry_out
from random_spaces import Key


def exclusion(config: Configuration, outcome: Outcome) -> tuple[Key, ...]:
    """Return columns that another run of ``config`` excludes; () if a run cannot be repeated."""
    if config.meddles or config.mode == "async" or config.phase == "interrupt":
        return ()
    return drawn_exclusion(config.number, outcome)


def examined(config: Configuration, folder: Path) -> list[str]:
    """Run ``config`` and its twin, if it has one, in ``folder``. Return the faults."""
    (folder / "it").mkdir()
    outcome = carry_out(config, folder / "it")
    wrong = judge(config, outcome)
    if (fault := config.fault) is not None and fault.stops and config.mode != "async":
        (folder / "other error").mkdir()
        error = with_fault(config, replace(fault, stops=False))
        wrong += other_rows(outcome, carry_out(error, folder / "other error"))
    if excluded := exclusion(config, outcome):
        (folder / "excluding").mkdir()
        without = carry_out(replace(config, exclude=excluded), folder / "excluding")
        wrong += wrong_in_excluding(outcome, without, excluded, collects=config.collects)
    other = twin(config)
    if other is not None and outcome.error is None:
        (folder / "twin").mkdir()
        wrong += differences(outcome, carry_out(other, folder / "twin"))
    return wrong
