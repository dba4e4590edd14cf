"""``tallyroll info``: describe the installation and the machine for bug reports."""

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tallyroll
from tallyroll.collector.cli.output import emit, visible
from tallyroll.collector.cli.probe import answers
from tallyroll.storage.package.versions import installed

PACKAGES = ("torch", "tensordict", "torchrl", "numpy", "gymnasium", "h5py", "zarr")
EXTRAS = {"h5py": "hdf5"}
"""Packages that an extra installs."""
SYSTEMS = "tallyroll.envs"
"""Group of entry points, repeated here because its registry imports torch, which may be broken."""
_HOMES = re.compile(r"/(?:home|Users)/[^/\s:;,'\"]+")


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll info`` and return the exit status."""
    facts = examine()
    emit(json.dumps(facts, indent=2) + "\n" if args.json else as_text(facts))
    return 0


# --- facts ----------------------------------------------------------------------------------------


def examine() -> dict[str, Any]:
    """Collect all facts as JSON values, without the user's folders."""
    systems = sorted({point.name for point in entry_points(group=SYSTEMS)})
    by_package = {name: f"package {name}" for name in PACKAGES}
    by_system = {name: f"system {name}" for name in systems}
    ours = ("extension", "ways", "devices")
    found = answers([*by_package.values(), *ours, *by_system.values()])
    facts = {
        "tallyroll": tallyroll.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "packages": {
            name: {"version": installed(name), "install": _extra(name), "error": ""}
            | found[question]
            for name, question in by_package.items()
        },
        "extension": {"built": None, "loads": None, "error": ""} | found["extension"],
        "ways": {"off": [], "error": ""} | found["ways"],
        "systems": {
            name: {"installed": None, "version": "", "install": "", "error": ""} | found[question]
            for name, question in by_system.items()
        },
        "devices": {"cpus": os.cpu_count(), "usable_cpus": _usable(), "cuda": [], "mps": False}
        | {"error": ""}
        | found["devices"],
        "limits": {"shared_memory": _shared_memory(), "open_files": _open_files()},
    }
    return {name: _without_folders(fact) for name, fact in facts.items()}


def _extra(package: str) -> str:
    extra = EXTRAS.get(package)
    return f'pip install "tallyroll[{extra}]"' if extra else ""


def _usable() -> int | None:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _shared_memory() -> dict[str, int] | None:
    """Return the total and free bytes of /dev/shm, which workers share; None if it is missing."""
    try:
        found = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"bytes": found.total, "free": found.free}


def _open_files() -> dict[str, int | None]:
    """Return the soft and the hard limit of open files per process; None means no limit."""
    import resource

    soft, hard = (
        None if each == resource.RLIM_INFINITY else each
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return {"soft": soft, "hard": hard}


def _without_folders(fact: Any) -> Any:
    """Replace home folders in ``fact`` by ``~``. Errors name them, and bug reports are public."""
    match fact:
        case dict():
            return {name: _without_folders(each) for name, each in fact.items()}
        case list():
            return [_without_folders(each) for each in fact]
        case str():
            return _HOMES.sub("~", _without_ours(fact))
    return fact


def _without_ours(text: str) -> str:
    """Replace this user's folders in ``text``: the Python environment and the home folder."""
    ours = {"PREFIX": (Path(sys.prefix), 2), "~": (Path(os.path.expanduser("~")), 1)}
    for short, (folder, least) in ours.items():
        for each in {folder, folder.resolve()}:
            if len(each.parts) > least:  # skips /usr as environment, and / as home
                text = re.sub(rf"{re.escape(str(each))}(?![\w.-])", short, text)
    return text


# --- output ---------------------------------------------------------------------------------------


def as_text(facts: Mapping[str, Any]) -> str:
    """Format ``facts`` as text, suitable for pasting into an issue."""
    return "".join(f"{visible(line)}\n" for line in _lines(facts))


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield _line("tallyroll", facts["tallyroll"])
    for name in ("python", "platform"):
        yield _line(name, facts[name])
    yield _line("extension", _extension(facts["extension"]))
    ways = facts["ways"]
    yield _line("switched off", ways["error"] or ", ".join(ways["off"]) or "nothing")
    yield from ("", "packages")
    for name, package in facts["packages"].items():
        yield _line(f"  {name}", _package(package))
    yield from ("", "environment systems")
    for name, system in facts["systems"].items():
        yield _line(f"  {name}", _package(system))
    if not facts["systems"]:
        yield "  none registered; install tallyroll with pip"
    yield from ("", "machine")
    devices = facts["devices"]
    yield _line("  cpus", f"{devices['cpus']}, {devices['usable_cpus']} for this process")
    yield _line("  cuda", devices["error"] or ", ".join(devices["cuda"]) or "none that torch sees")
    for kind in sorted(devices.keys() - {"cpus", "usable_cpus", "cuda", "error"}):
        if found := devices[kind]:
            yield _line(f"  {kind}", "yes" if found is True else ", ".join(found))
    limits = facts["limits"]
    memory = limits["shared_memory"]
    shared = f"{_mib(memory['bytes'])}, {_mib(memory['free'])} free" if memory else "not there"
    yield _line("  /dev/shm", shared)
    soft, hard = (
        "no limit" if each is None else f"{each:,}" for each in limits["open_files"].values()
    )
    yield _line("  open files", f"{soft}, at most {hard}")


def _line(name: str, value: str) -> str:
    return f"{name:<15} {value}"


def _extension(extension: Mapping[str, Any]) -> str:
    if extension["built"] is False:
        return "not built, for there was no C compiler"
    if extension["loads"]:
        return "built, loads"
    return f"does not load: {extension['error']}"


def _package(package: Mapping[str, Any]) -> str:
    """Format a version, or the command that installs the package, with its error if any."""
    if package["error"]:
        return ", ".join(filter(None, (package["version"], f"not usable: {package['error']}")))
    if package.get("installed", package["version"]):
        return package["version"] or "needs no package"
    return ": ".join(filter(None, ("not installed", package["install"])))


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
