"""Fields that decide which runs form a group, as seeds of the same experiment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tallyroll.collector.errors import ArgumentError
from tallyroll.storage.files.manifest import policy_of
from tallyroll.storage.formats.by_name import SUFFIXES
from tallyroll.storage.package.near_names import did_you_mean

FIELDS: Final = ("environment", "label", "folder", "policy")
DEFAULT: Final = ("environment", "label")
NOTHING: Final = "-"
"""Text that is shown if a run has no value."""

_MOST_LETTERS = 200
_SEED = re.compile(r"(?:seed|run|s|r)?[-_= ]?\d+", re.IGNORECASE)
_WITH_SEED = re.compile(rf"(.+?)[-_ ]{_SEED.pattern}", re.IGNORECASE)


def label_of(path: str) -> str:
    """Return a storage's name without the seed at its end.

    If the name is only a seed, return the label of its folder: ``runs/ppo-3``,
    ``runs/ppo_seed3.h5`` and ``runs/ppo/3`` all have the label ``ppo``.
    """
    place = Path(path).absolute()
    while True:
        suffix = place.suffix if place.suffix.lower() in SUFFIXES else ""
        name = place.name.removesuffix(suffix)
        if _SEED.fullmatch(name) is None:
            found = _WITH_SEED.fullmatch(name)
            return found[1] if found else name or NOTHING
        place = place.parent


def value_of(field: str, path: str, environment: str, entry: Mapping[str, Any]) -> str | None:
    """Return a run's value for a group field, or None if the run has no value.

    Args:
        field: one of `FIELDS`, or the name of a value in a run's entry, such as
            ``call.frames_per_batch``.
        path: path of the run's storage.
        environment: id of the run's environment.
        entry: entry of the run in the manifest.
    """
    if field == "environment":
        return environment
    if field == "label":
        return label_of(path)
    if field == "folder":
        return Path(path).absolute().parent.name or NOTHING
    if field == "policy":
        return shortened(policy_of(entry)) or "random"
    value: Any = entry
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None else shortened(value)


def shortened(value: Any) -> str:
    """Return a value of a manifest as text that fits on one line."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "nested too deep to be shown"
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def checked_fields(group_by: str | Iterable[str]) -> tuple[str, ...]:
    """Return the group fields as a tuple of names.

    Raises:
        ArgumentError: ``group_by`` is not a list of names.
    """
    names = group_by.split(",") if isinstance(group_by, str) else [*group_by]
    if not names or not all(isinstance(each, str) and each.strip() for each in names):
        raise ArgumentError(f"group_by: expected names such as {', '.join(DEFAULT)}, got {names!r}")
    return tuple(each.strip() for each in names)


def require_known(fields: Sequence[str], entries: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a field for which no run has a value, before any rows are read."""
    runs = [*entries]
    for field in fields:
        if field in FIELDS or any(value_of(field, "", "", run) is not None for run in runs):
            continue
        known = sorted({*FIELDS, *(name for run in runs for name in _names_in(run))})
        raise ArgumentError(
            f"group_by: expected {', '.join(FIELDS)}, or the name of a value in a run's entry, "
            f"such as call.frames_per_batch, got {field!r}{did_you_mean(field, known)}"
        )


def _names_in(entry: Mapping[str, Any], before: str = "", depth: int = 3) -> Iterable[str]:
    for name, value in entry.items():
        if isinstance(value, dict) and depth:
            yield from _names_in(value, f"{before}{name}.", depth - 1)
        else:
            yield f"{before}{name}"
