"""Replay storage on disk, with exact row counts and batches that survive a kill at any time."""

from __future__ import annotations

from tallyroll.storage.package.moved_paths import moved_modules
from tallyroll.storage.package.public_names import public_names

if __name__ != "tallyroll.storage":  # imported from the root of a checkout
    raise ImportError(
        f"expected the name tallyroll.storage, got {__name__}; import tallyroll.storage"
    )

__all__, __getattr__, __dir__ = public_names(__name__, __file__)

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
