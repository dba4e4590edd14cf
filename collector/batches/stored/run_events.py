"""The list of calls that changed the environments of a run, kept with its rows."""

import warnings
from collections.abc import Mapping
from typing import Any

from tallyroll.storage.files.run_events import EVENTS, LEFT_OUT, stored_form
from tallyroll.storage.stores.row_sink import RowSink


class RunEvents:
    """The events of a run since its collector was made."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.entry: Mapping[str, Any] | None = None
        """The run's entry in the manifest; None before it has one."""

    def enter(self, entry: Mapping[str, Any] | None) -> None:
        """Add later events to ``entry``, the run's entry in the manifest; None if there is none."""
        self.entry = entry

    def at_beginning(self, at: int, row: int, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the events before the first row, for the entry ``run``.

        ``at`` is the number of transitions of the run, and ``row`` is the number of its next row.
        """
        for event in self.all:
            event["at"] = at
        made = [stored_form({**event, "row": row}, run) for event in self.all]
        return {EVENTS: made} if made else {}

    def add(self, event: dict[str, Any], storage: RowSink | None) -> None:
        """Add an event. ``storage`` is the storage of the run, or None if nothing is stored."""
        self.all.append(event)
        if self.entry is None or storage is None or storage.reader.closed:
            return  # the entry will have it
        before = self.entry.get(LEFT_OUT)
        event = {**event, "row": storage.reader.head}
        self.entry = storage.writer.runs.add_event(self.entry, event)
        if self.entry.get(LEFT_OUT) and not before:
            warnings.warn(
                f"{storage.reader.path} holds the maximum number of events of its runs: this call "
                "and later ones reach the environments but are not recorded, so later rows cannot "
                "be replayed. Call environments less often",
                stacklevel=5,
            )
