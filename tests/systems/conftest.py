"""Select the test files that run here: see environments.toml."""

from __future__ import annotations

import os
import tomllib
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = tomllib.loads((HERE / "environments.toml").read_text())

if name := os.environ.get("TALLYROLL_TEST_ENVIRONMENT"):
    # A selected environment skips none of its tests. A missing package fails.
    here = {*ENVIRONMENTS[name]["tests"]}
else:
    here = {
        test
        for environment in ENVIRONMENTS.values()
        for test, modules in environment["tests"].items()
        if all(map(find_spec, modules))
    }
collect_ignore = [
    str(file.relative_to(HERE)) for file in HERE.rglob("test_*.py") if file.stem[5:] not in here
]
