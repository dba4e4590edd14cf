"""``tallyroll view``: show storages in a local web page, or write the page to a file."""

import argparse
import contextlib
import json
import os
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from typing import Any

from tallyroll.collector.cli.selection import add_accept_copy

# Lines have at most 78 columns.

_ABOUT = "show storages in a local web page"
_USAGE = "%(prog)s PATH [PATH ...] [options]"
_DESCRIPTION = """\
Show storages in a web page that only you can open, on this machine: the run
and its ledger, returns and ends over transitions, a table of episodes, and each
episode with its frames and curves. Histograms, and the findings of verify with
links to their episodes, are computed on request. Several paths are shown side
by side; a quoted pattern is read as one storage. Nothing is written to a
storage. A dataset of another library is given as KIND:PATH, as in tallyroll
import, and is imported into a temporary storage, which is deleted at the end.
Needs the extra: pip install "tallyroll[view]". Ctrl-C stops it.
"""
_EXAMPLES = """\
examples:
  tallyroll view runs/pole
  tallyroll view runs/pole-0 runs/pole-1 --port 8000 --no-browser
  keep flags on episodes in a file:
    tallyroll view runs/pole --flags flags.jsonl
  look at a dataset of another library:
    tallyroll view minari:datasets/pole-v0
  write one self-contained page, without the extra:
    tallyroll view runs/pole --export page.html

exit status:
  0    the page is written, or the server was stopped
  1    no result: no storage, the port is in use, or the extra is not installed
  2    invalid argument
  130  Ctrl-C ended the server
"""
_MOST_PORT = 65535


def add_to(commands: Any, path: Callable[[str], str], complete: str) -> None:
    """Add the command to ``commands``. ``path`` parses paths; ``complete`` marks them for shtab."""
    parser = commands.add_parser(
        "view", help=_ABOUT, usage=_USAGE, description=_DESCRIPTION, epilog=_EXAMPLES
    )
    parser.set_defaults(usage_error=parser.error)
    text = "a storage of any format, a quoted pattern, an address, or KIND:PATH of a dataset"
    parser.add_argument(
        "paths", nargs="+", type=path, metavar="PATH", help=text
    ).complete = complete
    text = "port of the server (default: 0, any free port)"
    parser.add_argument("--port", type=_port, default=0, metavar="P", help=text)
    text = "print the address, and open no browser"
    parser.add_argument("--no-browser", action="store_true", help=text)
    text = "file of the flags that you set on episodes, as JSON lines; created with the first flag"
    parser.add_argument("--flags", type=path, metavar="FILE", help=text).complete = complete
    text = (
        "write a self-contained page of at most 20 MB to FILE, and start no server; needs no extra"
    )
    parser.add_argument("--export", type=path, metavar="FILE", help=text).complete = complete
    text = "let --export replace a file that is not such a page"
    parser.add_argument("--force", action="store_true", help=text)
    add_accept_copy(parser)
    output = parser.add_argument_group("output")
    text = "print the address, or the exported file, as one JSON object"
    output.add_argument("--json", action="store_true", help=text)
    output.add_argument("--traceback", action="store_true", help="print the traceback of an error")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) <= _MOST_PORT):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to {_MOST_PORT}, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll view`` and return the exit status."""
    from tallyroll.collector.ext.report.files import require_report
    from tallyroll.collector.ext.viewer.dataset import Dataset
    from tallyroll.collector.ext.viewer.flags import Flags
    from tallyroll.collector.ext.viewer.server import Viewer, require_server

    if args.export:
        require_report(args.export, force=args.force)
    else:
        require_server()
    flags = Flags(args.flags, args.paths) if args.flags else None
    with contextlib.ExitStack() as opened:
        datasets = []
        for name in args.paths:
            path = opened.enter_context(_as_storage(name, args))
            dataset = Dataset(path, flags, name, accept_copy=args.accept_copy)
            opened.callback(dataset.close)
            datasets.append(dataset)
        if args.export:
            return _export(args, datasets)
        viewer = Viewer(datasets, args.port)
        opened.callback(viewer.close)
        _print_address(viewer.url, args)
        viewer.serve()
    return 0


@contextlib.contextmanager
def _as_storage(name: str, args: argparse.Namespace) -> Iterator[str]:
    """Yield the path of the storage ``name``, or of a temporary import of a dataset."""
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.storage import import_dataset
    from tallyroll.storage.ext.exchange.registry import kinds

    kind, _, place = name.partition(":")
    if not place or kind not in kinds() or os.path.exists(name):
        yield name
        return
    if args.flags:
        args.usage_error(
            f"--flags: expected storages, got the dataset {name}. Import it first, so that its "
            "flags keep their storage"
        )
    with tempfile.TemporaryDirectory(prefix="tallyroll-view-") as folder:
        path = os.path.join(folder, "rows")
        with shown_progress("imported", args.json) as progress:
            import_dataset(place, path, kind, progress=progress)
        yield path


def _print_address(url: str, args: argparse.Namespace) -> None:
    from tallyroll.collector.cli.output import emit

    emit(json.dumps({"url": url}) + "\n" if args.json else f"{url}\nCtrl-C ends the viewer.\n")
    if not args.no_browser:
        webbrowser.open(url)


def _export(args: argparse.Namespace, datasets: list[Any]) -> int:
    from tallyroll.collector.cli.output import CommandError, emit
    from tallyroll.collector.ext.progress import shown_progress
    from tallyroll.collector.ext.viewer.export import export_page

    try:
        with shown_progress("rows counted", args.json, "{:,}".format) as progress:
            export_page(datasets, args.export, force=args.force, progress=progress)
    except OSError as error:
        raise CommandError(f"--export {args.export} cannot be written: {error.strerror}") from error
    emit(json.dumps({"path": args.export}) + "\n" if args.json else f"wrote {args.export}\n")
    return 0
