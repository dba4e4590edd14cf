"""Run examples as a user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# As in pyproject.toml, warnings are errors, except the one that the import of torchrl emits.
WARNINGS = ("-W", "error", "-W", "ignore:Creating:DeprecationWarning")


def options_of(values: dict[str, float | str]) -> list[str]:
    """Convert options to words of a command line."""
    return [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]


def run(name: str, directory: Path, **options: float | str) -> str:
    """Run an example in ``directory`` and return its output."""
    done = subprocess.run(
        [sys.executable, *WARNINGS, str(EXAMPLES / name), *options_of(options)],
        cwd=directory,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "TMPDIR": str(directory)},
        capture_output=True,
        encoding="utf-8",
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[int]:
    """Return the groups of the only match of ``pattern`` in ``text``."""
    (match,) = re.finditer(pattern, text, re.MULTILINE)
    return [int(group) for group in match.groups()]
