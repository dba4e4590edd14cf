"""A target of logs as a user writes one by `LogTarget`: a line of JSON for each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tallyroll.collector.batches.logs.target import LogTarget


class JsonLines(LogTarget):
    """Appends rows to a file."""

    def __init__(self, path: Path) -> None:
        self.name, self.path, self.closed = str(path), path, 0
        self.path.touch()

    def rows(self) -> list[dict[str, float]]:
        """Return the rows that were written."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def write(self, row: Mapping[str, float]) -> None:
        """Append a row, unless it is there."""
        if row["frames"] not in {each["frames"] for each in self.rows()}:
            with open(self.path, "a") as file:
                file.write(json.dumps(dict(row)) + "\n")

    def forget_after(self, frames: int) -> None:
        """Remove later rows."""
        kept = [json.dumps(each) + "\n" for each in self.rows() if each["frames"] <= frames]
        self.path.write_text("".join(kept))

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1
