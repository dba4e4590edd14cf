"""Collect exactly N true transitions from reinforcement-learning environments."""

from tallyroll.storage.package.moved_paths import moved_modules
from tallyroll.storage.package.public_names import public_names

if __name__ != "tallyroll.collector":  # imported from the root of a checkout
    raise ImportError(
        f"expected the name tallyroll.collector, got {__name__}; import tallyroll.collector"
    )

__all__, __getattr__, __dir__ = public_names(__name__, __file__)

moved_modules(
    __name__,
    {
        "batches.logs": "tallyroll.collector.ext.logs",
        "evaluation": "tallyroll.collector.ext.evaluation",
        "evaluation.evaluating": "tallyroll.collector.ext.evaluation",
        "workers.far": "tallyroll.collector.ext.far",
    },
)
