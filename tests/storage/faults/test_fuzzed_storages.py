"""Test damaged storages.

Each gives a clear Tallyroll error or a right answer, in little memory and time, and nothing outside
is touched. ``TALLYROLL_FUZZED=10000`` tries that many, 80 by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "storages" / "fuzzed_storages.py"
COUNT = int(os.environ.get("TALLYROLL_FUZZED", "80"))
PARTS = 2
SECONDS_EACH = 5.0


@pytest.mark.slow
@pytest.mark.timeout(120 + SECONDS_EACH * COUNT)
@pytest.mark.parametrize("part", range(PARTS))
def test_damage_is_told_and_touches_nothing_else(part: int, tmp_path: Path) -> None:
    first, stop = part * COUNT // PARTS, (part + 1) * COUNT // PARTS
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "fuzzed", str(first), str(stop)],
        capture_output=True,
        text=True,
        timeout=100 + SECONDS_EACH * COUNT,
    )
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [json.dumps(case) for case in cases if case["wrong"]]
    assert not wrong, "\n".join(wrong)
    # A crash, such as a bus error, ends the process before it prints the line.
    assert done.returncode == 0, f"case {first + len(cases)}: {done.returncode}\n{done.stderr}"
    assert [case["number"] for case in cases] == list(range(first, stop))
    # The damage is real: much of it is detected, by several checks.
    told = Counter(name for case in cases for name in case["refused"])
    assert sum(1 for case in cases if case["refused"]) > len(cases) / 4
    assert len(told) > 2, told
