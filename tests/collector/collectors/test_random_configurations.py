"""Random configurations either store correct rows or raise one of our errors.

A number determines the configuration (`random_more.extended`). Its lanes keep journals of their
steps, and `random_judge.judge` compares every row with the journals. Run the whole campaign with::

    TALLYROLL_CONFIGURATIONS=3000 pytest -n0 -k "random_configurations"

``TALLYROLL_CONFIGURATION=17`` runs only the configuration with that number.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fast_paths_kit import drawn_off

from tallyroll.storage import fast_paths

from devices_kit import on_gpu
from pairs import in_gate
from random_configurations import Configuration
from random_devices import on_a_device
from random_environments import EnvKind
from random_lanes import LaneKind
from random_more import extended
from random_verdicts import examined

COUNT = int(os.environ.get("TALLYROLL_CONFIGURATIONS", "24"))
HERE = "tests/collector/collectors/test_random_configurations.py"
ALONE = os.environ.get("TALLYROLL_CONFIGURATION")
NUMBERS = range(COUNT) if ALONE is None else [int(ALONE)]


@pytest.mark.parametrize("number", in_gate(NUMBERS))
def test_every_row_is_true_or_there_is_an_error_of_ours(number: int, tmp_path: Path) -> None:
    _require_true(extended(number), number, tmp_path)


@on_gpu
@pytest.mark.parametrize("number", in_gate(NUMBERS))
def test_every_row_of_a_device_is_true(number: int, device: str, tmp_path: Path) -> None:
    _require_true(on_a_device(extended(number), device), number, tmp_path)


def _require_true(config: Configuration, number: int, tmp_path: Path) -> None:
    off = drawn_off(number)
    with fast_paths.switched_off(*off):
        wrong = examined(config, tmp_path)
    again = f"TALLYROLL_CONFIGURATION={number} pytest -n0 {HERE}"
    assert not wrong, "\n".join([again, *wrong, f"{config}", f"without {off}"])


@pytest.mark.parametrize("settled", [False, True])
def test_a_mask_by_another_name_binds_no_action(settled: bool, tmp_path: Path) -> None:
    """The lane's `action_mask` is renamed, so random actions need not obey it."""
    lane = LaneKind(names=("action_mask", "pos"), masked=True, reuse="one key")
    config = Configuration(0, EnvKind(lane), settled=settled, total_frames=60)
    assert not examined(config, tmp_path)
