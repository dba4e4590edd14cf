"""Replay storage on disk, with exact row counts and batches that survive a kill at any time."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tallyroll.storage.package.moved_paths import moved_modules
from tallyroll.storage.package.public_names import homes_of_names

if __name__ != "tallyroll.storage":  # imported from the root of a checkout
    raise ImportError(
        f"expected the name tallyroll.storage, got {__name__}; import tallyroll.storage"
    )

_homes = homes_of_names(__file__)
__all__ = [*_homes]

moved_modules(
    __name__,
    {
        "datasets": "tallyroll.storage.ext",
        "datasets.exchange.door": "tallyroll.storage.ext.exchange.base",
        "datasets.exchange.following": "tallyroll.storage.ext.exchange.followed_export",
        "datasets.exchange.formats": "tallyroll.storage.ext.exchange",
        "verification": "tallyroll.storage.ext.verification",
    },
)


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
