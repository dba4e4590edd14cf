"""``tallyroll info``: what reports of bugs need to say about an installation and a machine."""

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
"""Packages that an extra brings."""
SYSTEMS = "tallyroll.envs"
"""The group of entry points; its registry imports torch, which may be broken."""
_HOMES = re.compile(r"/(?:home|Users)/[^/\s:;,'\"]+")


def run(args: argparse.Namespace) -> int:
    """Carry out ``tallyroll info``; returns the exit status."""
    facts = examine()
    emit(json.dumps(facts, indent=2) + "\n" if args.json else as_text(facts))
    return 0


# --- facts ----------------------------------------------------------------------------------------


def examine() -> dict[str, Any]:
    """Everything that is shown, as JSON values without folders of the user's."""
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
    return f"pip install 'tallyroll[{extra}]'" if extra else ""


def _usable() -> int | None:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _shared_memory() -> dict[str, int] | None:
    """The size of /dev/shm, where workers share memory, and what is free there; None: no such."""
    try:
        found = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"bytes": found.total, "free": found.free}


def _open_files() -> dict[str, int | None]:
    """How many files a process may have open, and the most that it may ask for; None: any."""
    import resource

    soft, hard = (
        None if each == resource.RLIM_INFINITY else each
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return {"soft": soft, "hard": hard}


def _without_folders(fact: Any) -> Any:
    """``fact`` with ``~`` in place of home folders, which errors name; reports are public."""
    match fact:
        case dict():
            return {name: _without_folders(each) for name, each in fact.items()}
        case list():
            return [_without_folders(each) for each in fact]
        case str():
            return _HOMES.sub("~", _without_ours(fact))
    return fact


def _without_ours(text: str) -> str:
    """``text`` without this user's folders: the environment of Python, the home."""
    ours = {"PREFIX": (Path(sys.prefix), 2), "~": (Path(os.path.expanduser("~")), 1)}
    for short, (folder, least) in ours.items():
        for each in {folder, folder.resolve()}:
            if len(each.parts) > least:  # not /usr, nor / for a home
                text = re.sub(rf"{re.escape(str(each))}(?![\w.-])", short, text)
    return text


# --- showing --------------------------------------------------------------------------------------


def as_text(facts: Mapping[str, Any]) -> str:
    """``facts`` for people, and for the issue that they are pasted to."""
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
    if devices["mps"]:
        yield _line("  mps", "yes")
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
    """The version, or what installs it; an error beside what is known."""
    if package["error"]:
        return ", ".join(filter(None, (package["version"], f"not usable: {package['error']}")))
    if package.get("installed", package["version"]):
        return package["version"] or "needs no package"
    return ": ".join(filter(None, ("not installed", package["install"])))


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
