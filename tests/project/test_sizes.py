"""Each test file has a name of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_two_files_of_tests_have_one_name() -> None:
    """Test modules have no packages, so pytest would confuse two of the same name."""
    files = {*(ROOT / "tests").rglob("*.py")} - {*(ROOT / "tests/systems").rglob("*.py")}
    names = Counter(each.name for each in files if each.name not in ("__init__.py", "conftest.py"))
    assert [name for name, count in names.items() if count > 1] == []
