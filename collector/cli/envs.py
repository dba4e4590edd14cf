"""``tallyroll envs``: list the environment systems and their requirements."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec

from rich.table import Table

from tallyroll.collector.cli.output import CommandError, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.envs import registry
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.storage.package.near_names import did_you_mean

_ABOVE = (
    "Gymnasium ids (CartPole-v1, or module:Id-v0) need no system. Name an environment of the "
    "systems below as SYSTEM:ID."
)

PYGAMES = {"pygame", "pygame-ce"}
"""Two distributions that install the same package."""


@dataclass(frozen=True)
class KnownSystem:
    """A system, and the facts that are known without importing its package."""

    name: str
    installed: bool
    package: str = ""
    version: str = ""
    extra: str = ""
    conflicts: str = ""
    about: str = ""
    fault: str = ""
    """Reason why the entry point of the system cannot be used."""

    @property
    def command(self) -> str:
        """Command that installs the system, or the reason why there is none."""
        if self.extra:
            return f'pip install "tallyroll[{self.extra}]"'
        return self.fault or f"needs the package {self.package}"


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll envs`` and return the exit status."""
    names = registry.names()
    if unknown := [name for name in args.systems if name not in names]:
        near = did_you_mean(unknown[0], names)
        raise CommandError(
            f"expected one of the systems {', '.join(names)}, got {unknown[0]}{near}"
        )
    distributions = metadata.packages_distributions()
    found = [look(name, distributions) for name in args.systems or names]
    if args.json:
        emit(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    else:
        emit(as_text(found, {*distributions.get("pygame", ())} >= PYGAMES))
    return 1 if args.systems and not all(each.installed for each in found) else 0


def look(name: str, distributions: Mapping[str, Sequence[str]]) -> KnownSystem:
    """Describe a system; ``distributions`` maps packages to their distributions."""
    try:
        system = registry.load(name)
    except (MissingExtra, ArgumentError) as error:
        return KnownSystem(name, installed=False, fault=str(error).removeprefix(f"{name}: "))
    package = system.package.partition(".")[0]
    of_it = distributions.get(package, ())
    return KnownSystem(
        name,
        installed=not package or find_spec(package) is not None,
        package=system.package,
        version=f"{of_it[0]} {metadata.version(of_it[0])}" if of_it else "",
        extra=system.extra,
        conflicts=system.conflicts,
        about=system.about,
    )


def as_text(found: Sequence[KnownSystem], has_both: bool) -> str:
    """Format the list. ``has_both`` is True if pygame and pygame-ce are both installed."""
    page = Page()
    page.print(_ABOVE)
    for head, there in (("installed", True), ("not installed", False)):
        if rows := [each for each in found if each.installed is there]:
            page.head(head)
            table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
            for _ in range(3):
                table.add_column(overflow="fold")
            for each in rows:
                table.add_row(each.name, each.version if there else each.command, each.about)
            page.print(table)
    if conflicts := [each for each in found if each.conflicts]:
        page.head("known conflicts")
        for each in conflicts:
            page.print(f"{each.name}: {each.conflicts}")
    if has_both:
        page.print(
            "pygame and pygame-ce are both installed, and one has overwritten the other. Uninstall "
            "both, and install the one that is needed."
        )
    return page.text
