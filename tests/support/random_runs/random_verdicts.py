"""Faults of a configuration: in its own rows, and in comparison with the rows of its twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from random_configurations import Configuration
from random_drawing import twin
from random_judge import differences, judge, other_rows
from random_more import with_fault
from random_runs import carry_out


def examined(config: Configuration, folder: Path) -> list[str]:
    """Run ``config`` and its twin, if it has one, in ``folder``. Return the faults."""
    (folder / "it").mkdir()
    outcome = carry_out(config, folder / "it")
    wrong = judge(config, outcome)
    if (fault := config.fault) is not None and fault.stops and config.mode != "async":
        (folder / "other error").mkdir()
        error = with_fault(config, replace(fault, stops=False))
        wrong += other_rows(outcome, carry_out(error, folder / "other error"))
    other = twin(config)
    if other is not None and outcome.error is None:
        (folder / "twin").mkdir()
        wrong += differences(outcome, carry_out(other, folder / "twin"))
    return wrong
