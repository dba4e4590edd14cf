"""Achievements of policies: evaluations on a budget of their own, reports over stored runs."""

from tallyroll.storage.package.moved_paths import moved_names

__getattr__ = moved_names(
    __name__, "tallyroll.collector.evaluation.evaluating", "EnvState", "Evaluation", "evaluate"
)
