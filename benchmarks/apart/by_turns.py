"""Run each contender in its own process, with its own Ray, in turns within each round."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
_FIGURES = "figures: "

Found = dict[str, list[dict[str, float]]]
"""The figures of each contender, in the order of the rounds."""


def in_turns(names: Iterable[str], rounds: int) -> Found:
    """Start this script again with ``--child NAME`` for each contender in each round."""
    found: Found = {name: [] for name in names}
    for number in range(rounds):
        for name, each in found.items():
            words = [sys.executable, *sys.argv, "--child", name]
            done = subprocess.run(
                words, env={**os.environ, **_QUIET}, capture_output=True, text=True, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith(_FIGURES)]
            if not lines:
                print(f"{name}: no figures: {done.stderr.strip()[-600:]}")
                continue
            figures = lines[0].removeprefix(_FIGURES)
            each.append(json.loads(figures))
            print(number, name, figures, flush=True)
    return found


def say_and_end(figures: dict[str, float]) -> None:
    """Print the figures of this contender, and exit immediately: Ray takes a while to shut down."""
    print(_FIGURES + json.dumps(figures), flush=True)
    os._exit(0)


def ours(over: str) -> tuple[Any, dict[str, Any]]:
    """Return our collector class and its arguments.

    With ``"ray"`` it is RayCollector, which starts Ray; otherwise it uses processes.
    """
    from tallyroll.collector import MultiprocessCollector, RayCollector

    if over != "ray":
        return MultiprocessCollector, {}
    return RayCollector, {"address": "local", "spares": 0}


def cpu_seconds() -> float:
    """Return the CPU time of this process, including all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
