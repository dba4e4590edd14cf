"""Answer questions that need an import, which may fail, print, hang or crash.

A separate process answers them in turn. If it ends or does not answer, the current question gets an
error as its answer, and a new process continues with the next question.
"""

import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

Answer = dict[str, Any]

SECONDS = 60.0
"""Timeout for one answer."""
_MOST_LETTERS = 300


def answers(questions: Sequence[str]) -> dict[str, Answer]:
    """Return the answer to each question. A question has the form ``KIND`` or ``KIND NAME``.

    The answer to a question that failed has an ``error``.
    """
    found: dict[str, Answer] = {}
    while left := [each for each in questions if each not in found]:
        found.update(_ask(left))
    return found


def _ask(questions: Sequence[str]) -> Iterator[tuple[str, Answer]]:
    """Yield the answers of one process, up to the first question at which it fails."""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-P", "-m", __name__, *questions]
    child = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    said = b""
    try:
        for question in questions:
            while b"\n" not in said:
                if not select.select([child.stdout], [], [], SECONDS)[0]:
                    yield question, {"error": f"no answer within {SECONDS:g} seconds"}
                    return
                more = os.read(child.stdout.fileno(), 2**16)
                if not more:
                    yield question, {"error": _end(child.wait())}
                    return
                said += more
            line, _, said = said.partition(b"\n")
            yield question, json.loads(line)
    finally:
        child.kill()  # do not wait for exit handlers of packages
        child.wait()
        child.stdout.close()


def _end(status: int) -> str:
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"the process that tried it ended ({how})"


# --- in the separate process ----------------------------------------------------------------------


def _package(name: str) -> Answer:
    """Return the version of a package; "" if it is not installed."""
    if find_spec(name) is None:
        return {"version": ""}
    module = importlib.import_module(name)
    return {"version": str(getattr(module, "__version__", "") or metadata.version(name))}


def _extension(_: str) -> Answer:
    """Return whether both extensions were built and can be loaded."""
    packages = "tallyroll.storage.engine", "tallyroll.collector.native"
    built = all(find_spec(f"{each}._kernel") is not None for each in packages)
    answer: Answer = {"built": built, "loads": False, "error": ""}
    if built:
        try:
            for each in packages:
                importlib.import_module(f"{each}._kernel")
                importlib.import_module(f"{each}.kernel")  # checks that it fits the Python sources
            answer["loads"] = True
        except Exception as error:  # noqa: BLE001  the error is the answer
            answer["error"] = _one_line(error)
    return answer


def _ways(_: str) -> Answer:
    """Return the fast paths that are switched off."""
    from tallyroll.storage import fast_paths

    return {"off": sorted(fast_paths.off())}


def _system(name: str) -> Answer:
    """Return the package version of an environment system, or the command that installs it."""
    from tallyroll.collector.cli.envs import look

    found = look(name, metadata.packages_distributions())
    answer = {
        "installed": found.installed,
        "version": found.version,
        "install": "" if found.installed or found.fault else found.command,
        "error": found.fault,
    }
    if found.installed and found.package:
        try:
            importlib.import_module(found.package)
        except Exception as error:  # noqa: BLE001  the error is the answer
            answer["error"] = _one_line(error)
    return answer


def _devices(_: str) -> Answer:
    """Return the accelerators that torch detects."""
    import torch

    found: dict[str, Any] = {"cuda": [], "mps": False}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
        # MPS has one device, without a name.
        devices = range(torch.accelerator.device_count())
        found[accelerator.type] = True if name is None else [name(each) for each in devices]
    return found


_KINDS: dict[str, Callable[[str], Answer]] = {
    "package": _package,
    "extension": _extension,
    "ways": _ways,
    "system": _system,
    "devices": _devices,
}


def _one_line(error: BaseException) -> str:
    """Format an error as one line, truncated to fit a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} …"


def main(questions: Sequence[str]) -> None:
    """Answer the questions on stdout, one line of JSON each; discard other output."""
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for question in questions:
        kind, _, name = question.partition(" ")
        try:
            answer = _KINDS[kind](name)
        except BaseException as error:  # noqa: BLE001  the error is the answer, even SystemExit
            answer = {"error": _one_line(error)}
        os.write(out, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
