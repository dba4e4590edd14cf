"""Log target that writes TensorBoard event files.

The module uses torch's writer directly. TorchRL's `TensorboardLogger` wraps that writer, but has no
option for ``purge_step``, the step from which TensorBoard hides the points of earlier files.
"""

import fcntl
import os
from pathlib import Path
from typing import Any

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.logs.target import LogTarget, Newest, Row, known_numbers

_LEFT_OUT = ("frames", "seed")
"""Names without a curve. ``frames`` is the axis of all curves."""


class TensorboardLog(LogTarget):
    """Curves over the number of transitions, in the event files of a folder.

    The log locks the folder while it is open.

    Args:
        path: path of the folder, created if missing.

    Raises:
        ArgumentError: another process writes to the folder.
        MissingExtra: TensorBoard is not installed.
        OSError: the folder cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.name, self._path = f"tensorboard:{path}", path
        self._writer: Any = None
        needs("tensorboard", "tensorboard", "logs for TensorBoard")
        self._make = needs("torch.utils.tensorboard", "tensorboard").SummaryWriter
        Path(path).mkdir(parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ArgumentError(
                f"log: another run is writing to {path}. Give this run another folder."
            ) from error
        self.newest = _newest_in(path)
        self._after: int | None = None if self.newest is None else self.newest.frames + 1

    def write(self, row: Row) -> None:
        """Add a point to each curve, except for unknown numbers."""
        if self._writer is None:
            self._writer = self._make(self._path, purge_step=self._after)
        for name, value in known_numbers(row).items():
            if name not in _LEFT_OUT:
                self._writer.add_scalar(name, value, row["frames"])
        self._writer.flush()

    def forget_after(self, frames: int) -> None:
        """Make TensorBoard hide the points after ``frames`` transitions."""
        self._after = frames + 1
        if (writer := self._writer) is not None:
            self._writer = None  # the next one begins with the mark that hides them
            writer.close()

    def close(self) -> None:
        """Close the event file and release the lock."""
        writer, self._writer = self._writer, None
        folder, self._folder = self._folder, -1
        try:
            if writer is not None:
                writer.close()
        finally:
            if folder >= 0:
                fcntl.flock(folder, fcntl.LOCK_UN)
                os.close(folder)


def _newest_in(path: str) -> Newest | None:
    """Return the last step in the event files of a folder; None if there are no files."""
    files = sorted(Path(path).glob("events.out.tfevents.*"))
    if not files:
        return None
    loader = needs("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
    last, seconds = 0, 0.0
    for file in files:
        for event in loader.EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                last = max(last, event.step)
                if value.tag == "seconds":
                    seconds = _number(value)
    return Newest(last, seconds)


def _number(value: Any) -> float:
    return float(value.tensor.float_val[0]) if value.tensor.float_val else value.simple_value
