"""Build and read the metadata that travels with exported rows: columns, storage and runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.files.copied_runs import (
    COPIES_NBYTES,
    MOVED,
    bounded,
    copied_runs,
    copy_entry,
    is_copied,
    is_unchanged,
    makers,
    rows_copied,
    runs_left_out,
    source_of,
)
from tallyroll.storage.files.run_events import LEFT_OUT
from tallyroll.storage.package.versions import installed
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.readers.spaces import spaces_of
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.episodes import END_NAMES

LIMIT: Final = 2**22
"""The maximum size in bytes of the metadata that is read from a source."""
_VERSION: Final = 1
_MOST_COUNT: Final = 2**48


def about_rows(reader: RowReader, schema: Schema, span: range | None = None) -> dict[str, Any]:
    """Return the metadata of the rows in ``span`` as JSON. None selects all rows."""
    span, manifest = reader.span if span is None else span, reader.manifest
    found: dict[str, Any] = {
        "tallyroll_exchange": _VERSION,
        "tallyroll": installed("tallyroll") or "",
        "columns": schema.to_json(),
    }
    if len(span):
        runs, _ = makers(manifest["runs"], span)
        source = source_of(manifest, [span.start, span.stop - 1])
        entry = copy_entry({}, source, runs, COPIES_NBYTES, unchanged=True)
        found["rows"] = entry
    return found


def omitted_counts(about: Mapping[str, Any]) -> dict[str, int]:
    """Count the runs that the metadata leaves out, and the runs whose events it leaves out."""
    entry = about.get("rows", {})
    events = sum(each.get(LEFT_OUT) is True for each in copied_runs(entry))
    return {"runs": recorded_omissions(about), "runs_without_events": events}


def recorded_counts(about: Any) -> dict[str, int]:
    """Return the recorded number of trajectories for each kind of end.

    The result is empty without such a record.
    """
    ends = about.get("ends") if isinstance(about, dict) else None
    found = ends if isinstance(ends, dict) else {}
    return {end: n for end in END_NAMES if type(n := found.get(end)) is int and 0 < n < _MOST_COUNT}


def recorded_runs(about: Any) -> list[Mapping[str, Any]]:
    """Return the entries of the runs that made the rows, as far as the metadata has them."""
    entry = _rows_entry(about)
    return [] if entry is None else flat_runs([entry])


def _rows_entry(about: Any) -> dict[str, Any] | None:
    """Return the entry of the copied rows, if the metadata have one."""
    entry = about.get("rows") if isinstance(about, dict) else None
    return entry if isinstance(entry, dict) else None


def recorded_omissions(about: Any) -> int:
    """Return the number of runs that the metadata leave out."""
    entry = _rows_entry(about)
    return 0 if entry is None else runs_left_out(entry)


def recorded_spaces(about: Any, schema: Schema) -> dict[Key, dict[str, Any]]:
    """Return the spaces of columns that the entries of the runs record, as JSON."""
    entry = about.get("rows") if isinstance(about, dict) else None
    return spaces_of([entry], schema) if isinstance(entry, dict) else {}


def flat_runs(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of collector runs, including the runs that made copied rows."""
    found: list[Mapping[str, Any]] = []
    for each in entries:
        found += flat_runs(copied_runs(each)) if is_copied(each) else [each]
    return [each for each in found if "environment" in each]


def recorded_schema(about: Any) -> Schema | None:
    """Return the columns that the export recorded, or None for a source of another program.

    Raises:
        InvalidSchema: the record is invalid, or of another version.
    """
    if not isinstance(about, dict) or "tallyroll_exchange" not in about:
        return None
    if about["tallyroll_exchange"] != _VERSION:
        raise InvalidSchema(
            "it was exported by another version of Tallyroll: expected metadata of version "
            f"{_VERSION}, got {about['tallyroll_exchange']!r:.20}. "
            "Use a newer version of Tallyroll."
        )
    return Schema.from_json(about.get("columns"))


def entry_of(
    about: Mapping[str, Any] | None, imported: Mapping[str, Any], room: int
) -> dict[str, Any]:
    """Return the manifest entry for imported rows.

    The entry names the storage and the runs that the source records as the origin of the rows, as
    many as fit into ``room`` bytes.
    """
    entry: dict[str, Any] = {"first_row": 0, "imported_from": dict(imported)}
    said = about.get("rows") if isinstance(about, dict) else None
    found = rows_copied(said) if isinstance(said, dict) else None
    if found is None or not isinstance(said, dict):
        return entry
    runs, unchanged = copied_runs(said), is_unchanged(said)
    # Each format numbers trajectories in its own way, so the shift of the ids is unknown.
    source = {**bounded(said), MOVED: None}
    return copy_entry(entry, source, runs, room, unchanged=unchanged)
