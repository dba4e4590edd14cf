"""The formats that are installed, found by their entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from tallyroll.storage.ext.exchange.base import ExchangeFormat

GROUP = "tallyroll.exchange"
"""The group of entry points, each of them a subclass of `ExchangeFormat`."""


def kinds() -> list[str]:
    """Return the names of all formats."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def format_named(kind: str, chosen: object = None) -> ExchangeFormat:
    """Return the format of a name; raise ValueError without one, or for choices of another."""
    for entry in entry_points(group=GROUP, name=kind):
        found: type[ExchangeFormat] = entry.load()
        if chosen is not None and (found.options is None or type(chosen) is not found.options):
            wanted = "no options" if found.options is None else f"{found.options.__name__}(...)"
            raise ValueError(f"{kind} takes {wanted}, got {chosen!r:.200}.")
        return found(chosen)
    raise ValueError(f"kind is one of {', '.join(kinds())}, got {kind!r:.80}.")
