"""``tallyroll completion``: print a shell completion script, generated from the parser."""

import argparse

from tallyroll.collector.cli.output import emit
from tallyroll.collector.cli.parser import make_parser
from tallyroll.collector.errors import MissingExtra


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll completion`` and return the exit status."""
    try:
        import shtab
    except ImportError as error:
        raise MissingExtra(
            f"completion needs a package that cannot be imported ({error}); "
            "pip install 'tallyroll[completion]'"
        ) from error
    emit(shtab.complete(make_parser(), args.shell) + "\n")
    return 0
