"""Collect exactly N true transitions from reinforcement-learning environments."""

from importlib import import_module
from typing import Any

from tallyroll.storage.package.moved_paths import moved_modules
from tallyroll.storage.package.public_names import homes_of_names

if __name__ != "tallyroll.collector":  # imported from the root of a checkout
    raise ImportError(
        f"expected the name tallyroll.collector, got {__name__}; import tallyroll.collector"
    )

_homes = homes_of_names(__file__)
__all__ = [*_homes]

moved_modules(
    __name__,
    {
        "batches.logs": "tallyroll.collector.ext.logs",
        "evaluation": "tallyroll.collector.ext.evaluation",
        "evaluation.evaluating": "tallyroll.collector.ext.evaluation",
        "workers.far": "tallyroll.collector.ext.far",
    },
)


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
