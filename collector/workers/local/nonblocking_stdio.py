"""Standard output and error that never block: output that a full pipe does not accept is dropped.

A pipe that is not read, or a terminal that was stopped, blocks a write without a limit, and a
worker that is blocked blocks its parent. Workers treat their output as their parent treats its own.
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
"""Seconds that a write waits for room, if the previous write found some."""
_CHUNK_NBYTES = 512
"""Size that fits into any pipe that reports room (POSIX's smallest PIPE_BUF)."""


class _DroppingStream(io.RawIOBase):
    """File of a stream on which no write blocks or fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._number = stream, stream.fileno()
        self._file, self._chunk = self._number, _CHUNK_NBYTES
        with contextlib.suppress(OSError):
            # A new file description, because other programs share that of the stream.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            self._file, self._chunk = os.open(f"/proc/self/fd/{self._number}", flags), 2**16
        self._dropped = 0
        """Number of bytes dropped since the last successful write."""

    def write(self, content: Any) -> int:
        """Write the part that finds room in time, and report all of it as written."""
        left = memoryview(content).cast("B")
        length = len(left)
        until = time.monotonic() + (0 if self._dropped else _patience_seconds)
        if self._dropped and self._write_chunk(self._notice(), until):
            self._dropped, until = 0, time.monotonic() + _patience_seconds
        while left and not self._dropped and (taken := self._write_chunk(left, until)):
            left = left[taken:]
        self._dropped += len(left)
        return length

    def _notice(self) -> bytes:
        text = (
            f"\ntallyroll: dropped {self._dropped:,} bytes of output that were not read in time\n"
        )
        return text.encode()

    def _write_chunk(self, content: bytes | memoryview, until: float) -> int:
        """Write a chunk if there is room before ``until``; return the number of bytes written."""
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
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor of the stream itself."""
        return self._number

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self._stream.isatty()

    def close(self) -> None:
        """Close the file that this object opened; the stream stays open."""
        if not self.closed and self._file != self._number:
            os.close(self._file)
        super().close()


def unblocked(stream: TextIO | None) -> TextIO | None:
    """Wrap ``stream`` so that writes never block; return it unchanged if they cannot block."""
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
    """Return True if standard output or error of this process drops output that would block."""
    buffers = (getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr))
    return any(isinstance(getattr(each, "raw", None), _DroppingStream) for each in buffers)


def drop_output() -> None:
    """Make standard output and error non-blocking, for as long as this process runs."""
    sys.stdout, sys.stderr = unblocked(sys.stdout), unblocked(sys.stderr)


def drop_blocked_output() -> None:
    """From now on, drop output that would block, because the process is about to end."""
    global _patience_seconds
    _patience_seconds = 0.0


@contextlib.contextmanager
def output_dropped(*names: str) -> Iterator[None]:
    """Make the named streams, ``"stdout"`` and ``"stderr"``, non-blocking within the context.

    Objects that get a stream there, such as handlers of `logging`, may keep it.
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
