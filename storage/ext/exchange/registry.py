"""Find the installed formats by their entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from tallyroll.storage.ext.exchange.base import ExchangeFormat

GROUP = "tallyroll.exchange"
"""The group of entry points. Each entry point is a subclass of `ExchangeFormat`."""


def kinds() -> list[str]:
    """Return the names of all installed formats."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def format_named(kind: str, chosen: object = None) -> ExchangeFormat:
    """Return an instance of the format named ``kind`` with the options ``chosen``.

    Raises:
        ValueError: no such format is installed, or the options belong to another format.
    """
    for entry in entry_points(group=GROUP, name=kind):
        found: type[ExchangeFormat] = entry.load()
        if chosen is not None and (found.options is None or type(chosen) is not found.options):
            wanted = "no options" if found.options is None else f"{found.options.__name__}(...)"
            raise ValueError(f"options: {kind} accepts {wanted}, got {chosen!r:.200}.")
        return found(chosen)
    raise ValueError(f"kind: expected one of {', '.join(kinds())}, got {kind!r:.80}.")
