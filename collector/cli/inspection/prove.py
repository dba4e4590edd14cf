"""``tallyroll prove``: verify, replay and hash storages, and write one statement."""

import argparse
import json

from tallyroll.collector.cli.inspection.replay import factory
from tallyroll.collector.cli.output import as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.collector.ext.proof import PARTS, STATUS, prove


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll prove`` and return the exit status."""
    create = args.env if args.env_factory is None else factory(args.env_factory)
    with shown_progress("checks done", args.quiet, lambda done: f"{done / PARTS:.1f}") as progress:
        found = prove(
            args.paths,
            trajectories="all" if args.all else None,
            sample=args.sample or 20,
            create_env_fn=create,
            env_kwargs=args.env_kwargs,
            progress=progress,
            accept_copy=args.accept_copy,
        )
    if args.json:
        emit(json.dumps(as_json(found.to_dict()), indent=2, allow_nan=False) + "\n")
    elif not args.quiet:
        page = Page()
        found._show_on_(page)
        emit(page.text)
    return STATUS[found.verdict]
