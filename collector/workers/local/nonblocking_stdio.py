"""Standard output and error that never block: what a full pipe does not take is dropped.

A pipe that is not read, or a terminal that was stopped, keeps a process in its write for ever,
and a worker in it keeps its parent. Workers do with their output what their parent does with its.
"""

import contextlib
import io
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

_patience_seconds = 0.25
"""How long a write waits for room, where the one before found some."""
_CHUNK_NBYTES = 512
"""Fit into any pipe that says that it has room (POSIX's smallest PIPE_BUF)."""


class _DroppingStream(io.RawIOBase):
    """A stream's file, to which no write blocks or fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._number = stream, stream.fileno()
        self._file, self._chunk = self._number, _CHUNK_NBYTES
        with contextlib.suppress(OSError):
            # A description of its own: that of the stream is shared with other programs.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            self._file, self._chunk = os.open(f"/proc/self/fd/{self._number}", flags), 2**16
        self._dropped = 0
        """Bytes that were not taken since some were taken last."""

    def write(self, content: Any) -> int:
        """Write what finds room soon; all of it counts as written."""
        left = memoryview(content).cast("B")
        length = len(left)
        until = time.monotonic() + (0 if self._dropped else _patience_seconds)
        if self._dropped and self._taken(self._notice(), until):
            self._dropped, until = 0, time.monotonic() + _patience_seconds
        while left and not self._dropped and (taken := self._taken(left, until)):
            left = left[taken:]
        self._dropped += len(left)
        return length

    def _notice(self) -> bytes:
        text = f"\ntallyroll: {self._dropped:,} bytes of output were not read in time: dropped\n"
        return text.encode()

    def _taken(self, content: bytes | memoryview, until: float) -> int:
        """Bytes that found room before ``until``."""
        room = select.poll()
        room.register(self._file, select.POLLOUT)
        while room.poll(1000 * max(0.0, until - time.monotonic())):
            try:
                return os.write(self._file, content[: self._chunk])
            except BlockingIOError:  # another process was faster
                if time.monotonic() >= until:
                    break
            except OSError:  # the reader is gone
                break
        return 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The number of the stream's own file."""
        return self._number

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return self._stream.isatty()

    def close(self) -> None:
        """Close what was opened for it, and not the stream."""
        if not self.closed and self._file != self._number:
            os.close(self._file)
        super().close()


def unblocked(stream: TextIO | None) -> TextIO | None:
    """A stream in the place of ``stream`` that never blocks; itself, where no write to it does."""
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream else 0
    except (OSError, ValueError):
        return stream
    if stream is None or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_DroppingStream(stream)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=bool(stream.line_buffering),
    )


def drops_output() -> bool:
    """Whether a stream of this process is one of these."""
    buffers = (getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr))
    return any(isinstance(getattr(each, "raw", None), _DroppingStream) for each in buffers)


def drop_output() -> None:
    """Let neither stream block, for as long as this process runs."""
    sys.stdout, sys.stderr = unblocked(sys.stdout), unblocked(sys.stderr)


def wait_no_more() -> None:
    """Drop at once what finds no room, from now on: this process was asked to end."""
    global _patience_seconds
    _patience_seconds = 0.0


@contextlib.contextmanager
def output_dropped(*names: str) -> Iterator[None]:
    """Within it, the streams of these names, ``"stdout"`` and ``"stderr"``, never block.

    What got one there, as handlers of `logging` do, may keep it.
    """
    before = {name: getattr(sys, name) for name in names}
    ours = {name: unblocked(stream) for name, stream in before.items()}
    vars(sys).update(ours)
    try:
        yield
    finally:
        vars(sys).update(before)
        for name, stream in ours.items():
            if stream is not None and stream is not before[name]:
                stream.flush()
