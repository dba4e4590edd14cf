"""The checks of a dataset of LeRobot, in their order: lists, rows, films, statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tallyroll.storage.ext.soundness.checker import (
    Checker,
    Folder,
    Gathered,
    Where,
    count_said,
    text_of,
)
from tallyroll.storage.ext.soundness.lerobot.listing import Listing, listing_of
from tallyroll.storage.ext.soundness.lerobot.rows import RowChecks
from tallyroll.storage.ext.soundness.lerobot.statistics import check_statistics
from tallyroll.storage.ext.soundness.lerobot.videos import check_videos

_INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")


class LerobotChecker(Checker):
    """Episodes in files of Parquet, one or many a file, beside films and lists of episodes."""

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
        """Look for the text about the dataset."""
        return (place / _INFO).is_file()

    def check(self, place: Path, found: Gathered) -> None:
        """Read the lists, then all rows, then the films."""
        folder = Folder(place, found)
        info = folder.json(_INFO)
        if info is None:
            return
        if not isinstance(info, dict) or not isinstance(info.get("features"), dict):
            found.add("metadata", "the text names no columns", Where(_INFO))
            return
        version = info.get("codebase_version")
        if version not in VERSIONS:
            what = f"{text_of(version)}, known are {', '.join(VERSIONS)}"
            found.add("metadata", "the version is none that is known", Where(_INFO), what)
            return
        rate = info.get("fps")
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < 1e6:
            found.add(
                "metadata", "frames a second are no number above 0", Where(_INFO), text_of(rate)
            )
            info = info | {"fps": None}
        listing = listing_of(folder, info, found)
        if listing is None:
            return
        rows = RowChecks(folder, info, listing, found)
        rows.check()
        _check_counts(info, listing, rows.rows, found)
        check_videos(folder, info, listing, found)
        check_statistics(folder, info, listing, rows.counted, found)


def _check_counts(info: dict[str, Any], listing: Listing, rows: int, found: Gathered) -> None:
    """Compare the counts of ``info.json`` with those of the lists and of the rows."""
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
        if count_said(info.get(name)) != count:
            what = f"{name} is {text_of(info.get(name))}, and there are {count:,}"
            found.add("metadata", "a count is not that of the data", Where(_INFO), what)
    splits = info.get("splits")
    for name, said in splits.items() if isinstance(splits, dict) else ():
        begin, _, end = str(said).partition(":")
        bounds = [int(each) for each in (begin, end) if each.isdecimal() and len(each) < 18]
        if len(bounds) == 2 and not bounds[0] <= bounds[1] <= len(listing.episodes):
            what = f"{name!s:.40} is {said!s:.40} of {len(listing.episodes):,} episodes"
            found.add("metadata", "a split has episodes that there are not", Where(_INFO), what)
