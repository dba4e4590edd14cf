"""``tallyroll collect --checkpoint``: saved now and then and at the end, loaded by --resume."""

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.batches.state.checkpoints.checkpoint import (
    Rows,
    load_checkpoint,
    save_checkpoint,
)
from tallyroll.collector.batches.state.checkpoints.folder import entries_of
from tallyroll.collector.cli.output import CommandError

EVERY = 10_000
"""Transitions between two checkpoints, by default."""
KEPT = 2


class RunCheckpoints:
    """The checkpoints of a run; without --checkpoint every method does nothing.

    Args:
        args: the options.
        resumes: whether a run is continued.
        note: writes a line to stderr.
    """

    def __init__(
        self, args: argparse.Namespace, *, resumes: bool, note: Callable[[str], None]
    ) -> None:
        self._args, self._note = args, note
        self._folder = None if args.checkpoint is None else Path(args.checkpoint)
        self._there = [] if self._folder is None else entries_of(self._folder)
        if self._there and not resumes:
            raise CommandError(
                f"--checkpoint: {self._folder} has checkpoints of another run already; give "
                "another --checkpoint, or --resume that run"
            )

    def load(self, collector: Collector) -> None:
        """Go back to the newest one, where there is one."""
        if self._there:
            rows: Rows = self._args.checkpoint_rows or "rewind"
            loaded = load_checkpoint(self._there[-1].path, collector=collector, rows=rows)
            self._note(str(loaded))

    def save(self, collector: Collector, *, last: bool = False) -> None:
        """Save one, if it is due or the ``last``."""
        if self._folder is not None:
            every = None if last else self._args.checkpoint_every or EVERY
            save_checkpoint(self._folder, collector=collector, every=every, keep_last=KEPT)

    def options(self) -> list[str]:
        """Return the options as words of a command that goes on."""
        if self._folder is None:
            return []
        names = ("checkpoint", "checkpoint_every", "checkpoint_on", "checkpoint_rows")
        given = [(name, getattr(self._args, name)) for name in names]
        words = [("--" + name.replace("_", "-"), str(each)) for name, each in given if each]
        return [word for pair in words for word in pair]


def preemption(args: argparse.Namespace) -> list[signal.Signals]:
    """Return the signal that ends a run beside those that always do: that of --checkpoint-on."""
    return [signal.Signals[args.checkpoint_on]] if args.checkpoint_on else []


def wrong_options(args: argparse.Namespace) -> str | None:
    """The fault of the options; None if there is none."""
    for name in ("checkpoint_every", "checkpoint_on", "checkpoint_rows"):
        if getattr(args, name) is not None and args.checkpoint is None:
            option = "--" + name.replace("_", "-")
            return f"{option} is for --checkpoint, and there is none; give --checkpoint DIR"
    if args.checkpoint_rows is not None and not args.resume:
        return "--checkpoint-rows is for --resume, which loads a checkpoint"
    return None
