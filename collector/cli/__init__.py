"""Command line interface: ``tallyroll COMMAND``, with a module for each command.

Exit status: 0 success, 1 error, 2 usage error, 130 after SIGINT, 143 after SIGTERM, 129 after
SIGHUP. Some commands define their own status:

``verify``: 0 the storage is sound, 1 it has problems, 2 usage error, or it could not be checked.
``repair``: 0 the storage is whole, 1 data was lost, 2 usage error, or nothing could be repaired.
``diff``: 0 the storages are equal, 1 they differ, 2 usage error, or they could not be compared.
``replay``: 0 all trajectories are equal, 1 one differs, 2 usage error, or one was not replayed.
``report``: 0 all runs are in the report, 1 a run is left out, 2 usage error.
``envs``: 0 all named systems are installed, 1 one is not installed, 2 usage error.
``prove``: 0 all runs are proved, 1 one is refuted, 2 usage error, or one could not be checked.
"""

import argparse
import atexit
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from tallyroll.collector.cli.datasets import copy as copying
from tallyroll.collector.cli.datasets import store
from tallyroll.collector.cli.output import (
    CommandError,
    emit,
    reopen_closed,
    say,
    shortened,
    visible_warnings,
)
from tallyroll.collector.cli.parser import make_parser
from tallyroll.collector.errors import WorkerError
from tallyroll.collector.workers.local.nonblocking_stdio import output_dropped
from tallyroll.storage.errors import InvalidExpression

_QUICK = ("completion", "envs", "info")
"""Commands that do not import torch."""
_READING = ("diff", "inspect", "prove", "replay", "report", "verify", "view", "watch")
"""Commands whose modules are in `inspection`."""
_STATUS_2 = ("diff", "prove", "repair", "replay", "verify")
"""Commands that report an error with exit status 2, because 1 is a result."""
_OF_DATASETS = {
    **dict.fromkeys(copying.NAMES, "copy"),
    **dict.fromkeys(store.NAMES, "store"),
    **dict.fromkeys(("export", "import"), "exchange"),
    **{name: name for name in ("card", "pack", "repair", "split", "stats")},
}
"""Name of the module of each command whose module is in `datasets`."""


def main(argv: Sequence[str] | None = None, *, ready: Callable[[], object] = lambda: None) -> int:
    """Run the command line ``argv`` and return the exit status.

    If ``argv`` is None, the command line of the process is used. ``ready`` is called after
    the module of the command is imported, and before the command runs.
    """
    reopen_closed()
    atexit.register(_keep_garbage)
    with output_dropped("stderr"):
        return _main(argv, ready)


def _keep_garbage() -> None:
    """Let the interpreter exit without collecting garbage, which takes half a second.

    With ale_py, garbage is collected: otherwise nanobind, which ale_py uses, prints its objects as
    leaks. Only ale_py itself could switch this off.
    """
    if "ale_py" not in sys.modules:
        gc.freeze()


def _main(argv: Sequence[str] | None, ready: Callable[[], object]) -> int:
    show, status = False, 1
    try:
        try:
            args = make_parser().parse_args(argv)
        except SystemExit:
            emit("")  # write the buffered output of --help and --version
            raise
        show = args.traceback or os.environ.get("TALLYROLL_TRACEBACK", "") not in ("", "0")
        status = 2 if args.command in _STATUS_2 else 1
        with visible_warnings():
            # Import the command only now: torch takes seconds, which would delay --help.
            with _startup_message(args):
                module = import_module(f"{__name__}.{_module_of(args.command)}")
            ready()
            return int(module.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output, such as `| head`, has closed the pipe.
        return status
    except Exception as error:  # noqa: BLE001  environments and policies may raise anything
        _say_error(error, show)
        return 2 if isinstance(error, InvalidExpression) else status


def _module_of(command: str) -> str:
    """Return the name of the module of a command, in this package."""
    if command in _OF_DATASETS:
        return f"datasets.{_OF_DATASETS[command]}"
    if command in _READING:
        return f"inspection.{command}"
    return "dry_run" if command == "plan" else command  # the module `plan` has the options


@contextlib.contextmanager
def _startup_message(args: argparse.Namespace) -> Iterator[None]:
    """Show a line on a terminal while a command is imported, and erase it afterwards."""
    if args.command in _QUICK or getattr(args, "quiet", False) or not sys.stderr.isatty():
        yield
        return
    can_erase = os.environ.get("TERM", "dumb") != "dumb"
    sys.stderr.write("tallyroll: starting, which takes a few seconds" + ("" if can_erase else "\n"))
    sys.stderr.flush()
    try:
        yield
    finally:
        if can_erase:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _say_error(error: Exception, show_traceback: bool) -> None:
    foreign = type(error).__module__.partition(".")[0] != "tallyroll"
    if show_traceback:
        # If a policy cannot be loaded, show the original error; the line below has the rest.
        cause = error.__cause__ if isinstance(error, CommandError) else None
        say("".join(traceback.format_exception(cause or error)).rstrip(), lines=True)
    elif foreign and not _lacks_memory(error):
        say(foreign_traceback(error).rstrip(), lines=True)
    text = f"{type(error).__name__}: {error}" if foreign else str(error)
    if _lacks_memory(error):
        text = (
            f"there is not enough memory ({text}). Give a smaller --num-envs, --frames-per-batch "
            "or --workers."
        )
    # The traceback of a worker, and the position in an expression, span several lines.
    lines = isinstance(error, WorkerError | InvalidExpression)
    if isinstance(error, WorkerError) and error.worker_traceback:
        text = text.replace(error.worker_traceback, without_ours(error.worker_traceback))
    command = error.command if isinstance(error, CommandError) else ""
    said = text.rstrip() if lines else shortened(text.strip())
    say(f"tallyroll: error: {said}", below=command, lines=lines)


def _lacks_memory(error: Exception) -> bool:
    """Return True if Python, NumPy or torch ran out of memory."""
    by_torch = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return by_torch or isinstance(error, MemoryError)


def foreign_traceback(error: Exception) -> str:
    """Format a traceback without frames of this package, unless this package raised the error.

    Causes without a traceback, such as those that tensordict adds, are left out.
    """
    found = traceback.TracebackException.from_exception(error)
    if _is_ours(found.stack[-1]):
        return "".join(found.format())
    each: traceback.TracebackException | None = found
    while each is not None:
        each.stack = _without_our_frames(each.stack)
        for name in ("__cause__", "__context__"):
            below = getattr(each, name)
            if below is not None and not _without_our_frames(below.stack):
                setattr(each, name, None)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "".join(found.format())


def _without_our_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    return traceback.StackSummary.from_list([each for each in stack if not _is_ours(each)])


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(f"{Path(__file__).parents[1]}{os.sep}")


def without_ours(text: str) -> str:
    """Remove the frames of this package from a formatted traceback."""
    ours = f'  File "{Path(__file__).parents[1]}{os.sep}'
    kept, skip = [], False
    for line in text.splitlines():
        if line.startswith("  File "):
            skip = line.startswith(ours)
        elif not line.startswith("    "):
            skip = False
        if not skip:
            kept.append(line)
    return "\n".join(kept)
