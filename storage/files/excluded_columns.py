"""Columns that runs excluded from their rows, as the entries of a manifest record them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tallyroll.storage.files.copied_runs import copied_runs
from tallyroll.storage.rows.keys import Key, format_key, without_next

Entries = Iterable[Mapping[str, Any]]


def excluded_by(entries: Entries) -> list[str]:
    """Return the names of the columns that the runs of ``entries`` excluded, without ``next``.

    The runs of copied rows are included.
    """
    return list(dict.fromkeys(name for entry in entries for name in _of_entry(entry)))


def excluded_note(entries: Entries, missing: Iterable[Key] | None = None) -> str:
    """Return a space and a sentence that names the excluded columns, or "" if there are none.

    If ``missing`` is given, the sentence names only columns that are among these keys, or in groups
    with these keys.
    """
    found = excluded_by(entries)
    if missing is not None:
        names = [format_key(without_next(key)) for key in missing]
        found = [each for each in found if any(f"{each}/".startswith(f"{name}/") for name in names)]
    if not found:
        return ""
    return f" The run that collected the rows excluded {', '.join(found)} (Columns(exclude=...))."


def _of_entry(entry: Mapping[str, Any]) -> Iterator[str]:
    call = entry.get("call")
    said = call.get("exclude") if isinstance(call, dict) else None
    yield from (each for each in said if isinstance(each, str)) if isinstance(said, list) else ()
    for each in copied_runs(entry):
        yield from _of_entry(each)
