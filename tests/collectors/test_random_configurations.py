"""Random configurations of environments and policies: every row true, or an error of ours.

A number makes a configuration (`random_drawing.configuration`), its lanes keep journals
of what was truly done, and `random_judge.judge` compares every row with them.
``TALLYROLL_CONFIGURATIONS=2000`` runs so many, ``TALLYROLL_CONFIGURATION=17`` the one of that
number alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from random_drawing import configuration
from random_verdicts import examined

COUNT = int(os.environ.get("TALLYROLL_CONFIGURATIONS", "40"))
ALONE = os.environ.get("TALLYROLL_CONFIGURATION")
NUMBERS = range(COUNT) if ALONE is None else [int(ALONE)]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_row_is_true_or_there_is_an_error_of_ours(number: int, tmp_path: Path) -> None:
    config = configuration(number)
    wrong = examined(config, tmp_path)
    assert not wrong, "\n".join([f"{config}", *wrong])
