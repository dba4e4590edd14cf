"""Checks of LeRobot datasets in order: lists, rows, videos, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.dataset_checks.checker import (
    Checker,
    CheckResults,
    DatasetFolder,
    Where,
    declared_count,
    text_of,
)
from tallyroll.storage.ext.dataset_checks.lerobot.listing import Listing, listing_of
from tallyroll.storage.ext.dataset_checks.lerobot.rows import (
    COUNTED_APART,
    FiniteStatistics,
    LeRobotRowChecks,
)
from tallyroll.storage.ext.dataset_checks.lerobot.videos import check_videos

_STATS: Final = "meta/stats.json"
_SLACK: Final = 1e-3
"""The tolerance of a mean or standard deviation, as a fraction of the range of values."""
_ROUNDING: Final = 1e-5


def check_statistics(
    folder: DatasetFolder,
    info: Mapping[str, Any],
    listing: Listing,
    counted: Mapping[int, Mapping[str, FiniteStatistics]],
    found: CheckResults,
) -> None:
    """Compare the saved statistics of each episode and of all rows with the data."""
    features = info["features"]
    for episode in listing.episodes:
        if episode.statistics is not None and episode.number in counted:
            where = Where(episode.listed_in, episode.number)
            _compare(episode.statistics, counted[episode.number], features, where, found)
    if listing.version == "v2.1":
        return
    kept = folder.json(_STATS)
    if not isinstance(kept, dict):
        return
    total: dict[str, FiniteStatistics] = {}
    for columns in counted.values():
        for name, each in columns.items():
            total.setdefault(name, FiniteStatistics()).merge(each)
    _compare(kept, total, features, Where(_STATS), found)


def _compare(
    kept: Mapping[str, Any],
    counted: Mapping[str, FiniteStatistics],
    features: Mapping[str, Any],
    where: Where,
    found: CheckResults,
) -> None:
    for column, each in counted.items():
        dtype = features.get(column, {}).get("dtype")
        if column in COUNTED_APART or dtype not in ("float32", "float64") or not each.count:
            continue
        said = kept.get(column)
        if said is None:
            found.add("statistics", "a column has no statistics", where, column=column)
        elif isinstance(said, Mapping):
            # LeRobot itself writes NaN or infinity if some values are not finite.
            partial = each.finite < each.count
            for name, wanted, slack in _expected(each):
                open_to_nan = np.zeros(1, np.bool_) if name == "count" else partial
                why = _differs(said.get(name), wanted, slack, open_to_nan)
                if why is not None:
                    message = f"the {name} does not match the rows"
                    found.add("statistics", message, where, why, column)


def _expected(each: FiniteStatistics) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return the name, value and tolerance of each statistic of the finite values."""
    with np.errstate(all="ignore"):  # sums of very large numbers are infinite
        return _computed(each)


def _computed(each: FiniteStatistics) -> list[tuple[str, np.ndarray, np.ndarray]]:
    finite = np.maximum(each.finite, 1)
    mean = each.total / finite
    deviation = np.sqrt(np.maximum(0.0, each.squares / finite - mean * mean))
    low, high = (np.where(each.finite > 0, bound, 0.0) for bound in (each.low, each.high))
    size = np.maximum(np.abs(low), np.abs(high))
    rounding = _ROUNDING * size + 1e-30
    slack = _SLACK * (high - low) + rounding
    # If the mean is far from zero, the difference of squares has few exact digits.
    lost = np.sqrt(1e-7) * size * (size > 100 * np.maximum(deviation, 1e-30)) + slack
    return [
        ("count", np.asarray([each.count]), np.zeros(1)),
        ("min", low, rounding),
        ("max", high, rounding),
        ("mean", mean, slack),
        ("std", deviation, lost),
    ]


def _differs(
    said: Any, wanted: np.ndarray, slack: np.ndarray, open_to_nan: np.ndarray
) -> str | None:
    """Describe how a saved statistic differs from ``wanted``, or return None if it does not."""
    try:
        value = np.asarray(said, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return f"it is {said!r:.60}, expected numbers"
    if value.shape != wanted.shape:
        return f"it has {value.size} numbers, expected {wanted.size}"
    # An infinite sum cannot refute a saved value, which may have been computed in another way.
    with np.errstate(all="ignore"):
        wrong = ~(np.abs(value - wanted) <= slack) & np.isfinite(wanted)
    wrong &= ~(open_to_nan & ~np.isfinite(value))
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    return f"{value[at]:.6g}, expected {wanted[at]:.6g}"


_INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")


class LerobotChecker(Checker):
    """Checks the lists, the Parquet files and the videos of a LeRobot dataset."""

    name = "lerobot"
    checks = (
        "files",
        "metadata",
        "columns",
        "episodes",
        "steps",
        "timestamps",
        "tasks",
        "ends",
        "nan",
        "zeros",
        "videos",
        "statistics",
    )

    @classmethod
    def recognises(cls, place: Path) -> bool:
        """Look for the info file of the dataset."""
        return (place / _INFO).is_file()

    def check(self, place: Path, found: CheckResults) -> None:
        """Read the lists, then all rows, then the videos."""
        folder = DatasetFolder(place, found)
        info = folder.json(_INFO)
        if info is None:
            return
        if not isinstance(info, dict) or not isinstance(info.get("features"), dict):
            found.add("metadata", "the file declares no columns", Where(_INFO))
            return
        version = info.get("codebase_version")
        if version not in VERSIONS:
            what = f"{text_of(version)}, expected one of {', '.join(VERSIONS)}"
            found.add("metadata", "the version is not supported", Where(_INFO), what)
            return
        rate = info.get("fps")
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < 1e6:
            found.add(
                "metadata", "the frame rate is not a number above 0", Where(_INFO), text_of(rate)
            )
            info = info | {"fps": None}
        listing = listing_of(folder, info, found)
        if listing is None:
            return
        rows = LeRobotRowChecks(folder, info, listing, found)
        rows.check()
        _check_counts(info, listing, rows.rows, found)
        check_videos(folder, info, listing, found)
        check_statistics(folder, info, listing, rows.counted, found)


def _check_counts(info: dict[str, Any], listing: Listing, rows: int, found: CheckResults) -> None:
    """Compare the counts in ``info.json`` with the lists and the rows."""
    found.rows = rows
    wanted = {
        "total_episodes": len(listing.episodes),
        "total_frames": rows,
        "total_tasks": len(listing.tasks),
    }
    if listing.version != "v3.0":
        chunks = {each.data.split("/")[1] for each in listing.episodes if "/" in each.data}
        wanted["total_chunks"] = len(chunks)
        if "total_videos" in info:
            wanted["total_videos"] = len(listing.episodes) * len(listing.cameras)
    for name, count in wanted.items():
        if declared_count(info.get(name)) != count:
            what = f"{name} is {text_of(info.get(name))}, expected {count:,}"
            found.add("metadata", "a count does not match the data", Where(_INFO), what)
    splits = info.get("splits")
    for name, said in splits.items() if isinstance(splits, dict) else ():
        begin, _, end = str(said).partition(":")
        bounds = [int(each) for each in (begin, end) if each.isdecimal() and len(each) < 18]
        if len(bounds) == 2 and not bounds[0] <= bounds[1] <= len(listing.episodes):
            what = f"{name!s:.40} is {said!s:.40}, but there are {len(listing.episodes):,} episodes"
            found.add("metadata", "a split names episodes that do not exist", Where(_INFO), what)
