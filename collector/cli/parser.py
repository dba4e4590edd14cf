"""Parser of all commands and the help texts of their options."""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from itertools import takewhile
from typing import Any, NoReturn

from tallyroll.collector.cli import texts
from tallyroll.collector.cli.datasets import card, exchange, pack, repair, split, stats, store
from tallyroll.collector.cli.datasets import copy as copying
from tallyroll.collector.cli.inspection import view
from tallyroll.collector.cli.output import emit, shortened, visible
from tallyroll.collector.cli.selection import add_where
from tallyroll.storage.package.near_names import did_you_mean, in_words

_CHECKS = (
    "files, metadata, runs, record, lanes, ids, steps, ends, versions, observations, finals, nan, "
    "zeros, episodes, checksums"
)
_CHECKS_OF_OTHERS = "columns, rows, timestamps, tasks, spaces, videos, statistics"
"""Checks that only apply to datasets of other libraries. Some checks above apply to them too."""
COMMON = (
    "collect",
    "plan",
    "watch",
    "inspect",
    "view",
    "verify",
    "report",
    "copy",
    "export",
    "envs",
)
"""Commands that the first help screen shows, in this order. ``--help --all`` shows all of them."""
SHELLS = ("bash", "zsh", "fish", "tcsh")
"""Shells for which `tallyroll completion` prints a script."""
_FILE = "file"
"""Word by which shtab recognises path arguments."""
_MOST_DIGITS = 20


class _Parser(argparse.ArgumentParser):
    """Parser of the program, or of one of its commands."""

    def __init__(self, **kwargs: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **kwargs)

    def print_help(self, file: Any = None) -> None:
        """Write the help to stdout.

        argparse's own method drops or raises a failed write, depending on the Python version.
        """
        emit(self.format_help())

    def format_help(self) -> str:
        """Format the help. Without ``--all``, the program's help has only the common commands."""
        if self._subparsers is None or self.get_default("all_commands"):
            return super().format_help()
        group: Any = self._subparsers
        listed = group._group_actions[0]._choices_actions  # noqa: SLF001  argparse shows this list
        every = listed[:]
        of = {each.dest: each for each in every}
        listed[:] = [of[name] for name in COMMON]
        try:
            return super().format_help()
        finally:
            listed[:] = every  # completion reads the list too

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject an unknown option, and show the usage of the command to which it was given.

        argparse itself reports missing arguments first, and reports unknown options with the usage
        of the whole program.
        """
        words = list(sys.argv[1:] if args is None else args)
        # Collectors accept resume="auto"; "--resume auto" would take "auto" as the environment.
        words = ["--resume" if each == "--resume=auto" else each for each in words]
        ours = takewhile(lambda word: word[:1] == "-", words) if self._subparsers else words
        ours = list(takewhile(lambda word: word != "--", ours))
        self._refuse_unknown(ours)
        if self._subparsers:  # before argparse shows the help, which may come first
            self.set_defaults(all_commands="--all" in ours)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized argument {unknown[0]}")
        return found, unknown

    def _refuse_unknown(self, words: Iterable[str]) -> None:
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            is_option = name.startswith("--") or (name[:1] == "-" and name[1:2].isalpha())
            if is_option and " " not in name and name not in known:
                near = did_you_mean(f"--{name.lstrip('-')}", known)
                self.error(f"unrecognized option {name}{near}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an invalid value, or the name of an unknown command."""
        if action.choices is None or value in action.choices:
            return
        names = [str(each) for each in action.choices]
        if isinstance(action.choices, dict):
            self.error(f"unrecognized command {value}{did_you_mean(value, names)}")
        near = did_you_mean(value, names)
        raise argparse.ArgumentError(action, f"expected {in_words(names)}, got {value!r}{near}")

    def error(self, message: str) -> NoReturn:
        """Report an error. The words in it may be file names, so they are escaped."""
        super().error(shortened(visible(message)))


class _Version(argparse.Action):
    """Action that looks up and shows the versions."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Show the versions and exit."""
        from tallyroll.storage.package.versions import (
            versions,  # imported here because metadata takes 30 ms
        )

        found = versions()
        own = found.pop("tallyroll")
        rest = ", ".join(f"{name} {version}" for name, version in found.items())
        sys.stdout.write(f"tallyroll {own} ({rest})\n")
        parser.exit()


def _integer(text: str) -> int:
    """Parse a whole number: 1000, 1_000 or 1e3."""
    try:
        number = Decimal(text)
        # Check the size first: writing out 1e999999999 takes hours.
        whole = number.is_finite() and number.adjusted() < _MOST_DIGITS and int(number)
        if whole is not False and abs(whole) < 2**63 and number == whole:
            return whole
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number below 2**63, got {text!r}")


def _path(text: str) -> str:
    if not text:  # an unset variable in a script must not mean the current directory
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return text


def _positive(text: str) -> int:
    if (number := _integer(text)) <= 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return number


def _count(text: str) -> int:
    if (number := _integer(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from error
    except RecursionError as error:
        raise argparse.ArgumentTypeError(
            f"expected JSON with fewer nested levels, got {text!r}"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"expected a JSON object like '{{\"a\": 1}}', got {text!r}"
        )
    return value


def _checks(text: str) -> list[str]:
    names, known = _names(text), f"{_CHECKS}, {_CHECKS_OF_OTHERS}".split(", ")
    if unknown := [name for name in names if name not in known]:
        near = did_you_mean(unknown[0], known)
        raise argparse.ArgumentTypeError(
            f"expected checks among {', '.join(known)}, got {unknown[0]!r}{near}"
        )
    return names


def _frame_skip(text: str) -> int | str:
    return text if all(map(str.isidentifier, text.split("/"))) else _positive(text)


def _rename(text: str) -> str:
    _, equals, new = text.rpartition("=")
    if not equals or not new:
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got {text!r}")
    return text


def _shard(text: str) -> str:
    from tallyroll.collector.errors import ArgumentError
    from tallyroll.collector.options.sharding import Shard  # here because torch takes seconds

    try:
        return str(Shard.parsed(text))
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("shard: ")) from error


def _reset(text: str) -> str:
    from tallyroll.collector.errors import ArgumentError
    from tallyroll.collector.options.draws import parsed  # here because torch takes seconds

    name, equals, draw = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        parsed(draw)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _infos(text: str) -> list[str]:
    from tallyroll.collector.errors import ArgumentError
    from tallyroll.collector.slab.info import parsed  # here because torch takes seconds

    names = _names(text)
    try:
        for name in names:
            parsed(name)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _scale(text: str) -> tuple[str, tuple[float, float]]:
    name, equals, ends = text.rpartition("=")
    try:
        low, high = map(float, ends.split(":"))
    except ValueError:
        low = high = math.nan
    if not name or not equals or not low < high or math.inf in (-low, high):
        raise argparse.ArgumentTypeError(
            f"expected ENV=LOW:HIGH, such as CartPole-v1=0:500, got {text!r}"
        )
    return name, (low, high)


def _ids(text: str) -> list[int]:
    return [_count(name) for name in _names(text)]


def _tolerance(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return found


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names


_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")

# For each option: the parser of its value (a function, the allowed values, or None for a flag), the
# name of the value in --help, and the help text.
# fmt: off
_OPTIONS: dict[str, tuple[Any, str, str]] = {
    "--out": (_path, "PATH",
        "the storage: a directory, an HDF5 file NAME.h5, or a Zarr group NAME.zarr"),
    "--frames": (_positive, "N", "exactly N transitions"),
    "--episodes": (_positive, "E", "exactly E whole episodes, the first E to start"),
    "--budget-unit": (("transitions", "agent_transitions"), "",
        "unit of --frames. agent_transitions counts, for groups of agents, each agent that was "
        "alive or had its turn in a transition; the run ends with the transition that reaches N "
        "(default: transitions)"),
    "--append": (None, "", "append a new run"),
    "--resume": (None, "",
        "continue its last run up to N; options that are left out are taken from that run. "
        "Starts the run if nothing was written yet, as resume=\"auto\" of collectors does"),
    "--accept-copy": (None, "",
        "open a copy that was made while a writer had the storage open; the copy may lack rows "
        "that were written meanwhile"),
    "--num-envs": (_positive, "K",
        "number of lanes: environments that are stepped together (default: 1, or one for each "
        "worker; if steps are cheap, 8 or more are several times faster)"),
    "--seed": (_count, "S",
        "random seed; the same seed gives the same data (default: drawn, and recorded)"),
    "--shard": (_shard, "I/N",
        "collect part I (from 0) of N into its own --out. --frames, --num-envs and --seed describe "
        "the whole run and are the same for each part. The N parts together have exactly --frames "
        "transitions, with the ids and seeds of one run. They equal those of one run bit for bit, "
        "by id and step, if every slot is a transition (a Gymnasium id), each lane has its own "
        "seed, and actions are random or from a deterministic policy that acts on each lane "
        "independently"),
    "--policy": (str, "MODULE:ATTR",
        "a TensorDictModule or a callable from TensorDict to TensorDict, in a module or in a "
        "file (FILE.py:ATTR). A class, or a function that needs no arguments, is called once to "
        "make the policy. Modules of the current directory can be imported (default: random "
        "actions)"),
    "--env-kwargs": (_mapping, "JSON",
        "keyword arguments for gymnasium.make, or for the environment system"),
    "--max-frames-per-traj": (_positive, "M", "truncate episodes after M transitions"),
    "--frame-skip": (_frame_skip, "T",
        "simulator ticks in a transition, or the info key that counts ticks (default: the number "
        "that the environment and its wrappers report; unknown if it is drawn at random)"),
    "--reward-dtype": (("float32", "float64"), "",
        "dtype of the stored rewards. float64 keeps all bits of an environment's floats; "
        "float32 rounds them, and the command warns about the first reward that becomes 0 or "
        "another integer (default: as the environment declares it, usually float32)"),
    "--info-keys": (_infos, "A,B",
        "info entries that become columns: NAME, GROUP/NAME, NAME:DTYPE, NAME:DTYPE[2x3]; "
        "NAME:DTYPE=FILL if some steps lack the entry"),
    "--rename": (_rename, "OLD=NEW",
        "new name for a column whose name collides; may be given several times"),
    "--exclude": (str, "KEY",
        "do not store the column KEY and its next/KEY, although the policy sees it; GROUP/NAME for "
        "a nested column; may be given several times"),
    "--reset": (_reset, "NAME=VALUE",
        "an option to pass to each reset: uniform(LOW, HIGH), choice(A, B), or a JSON value; "
        "numbers become columns collector/context/NAME; may be given several times"),
    "--reset-seeds": (None, "",
        "seed each reset, and store the seed in the column collector/reset_seed"),
    "--workers": (_count, "W",
        "number of processes (see --transport) that step the lanes, for costly environments "
        "(default: 0, the command's own process)"),
    "--mode": (("sync", "async"), "",
        "sync: workers advance together, and the rows equal those of one process; async: no "
        "worker waits for another, rows are stored in order of arrival, and they differ from run "
        "to run (default: sync)"),
    "--transport": (("process", "thread", "ray"), "",
        "process: processes, forked from one that has imported torch, so that they start fast. "
        "thread: threads of this process, for environments that release the interpreter lock "
        "while they wait; a hanging thread cannot be replaced. ray: actors of a Ray cluster "
        "(default: process)"),
    "--address": (str, "ADDRESS",
        "with --transport ray: local (Ray is started for this run), auto, or HOST:PORT of a "
        "cluster (default: local)"),
    "--sharded": (None, "",
        "each worker writes its rows to its own shard, at PATH on its node, and this command "
        "records which of them count, so that its cost per row does not depend on the row's size; "
        "with --mode async"),
    "--policy-placement": (("local", "central"), "",
        "local: each worker acts with a copy of the policy; central: this command "
        "calls the policy once for the lanes of many workers (default: local)"),
    "--respawns": (_count, "R",
        "replace workers that raise, die or hang, R times in all (default: 0, the run ends "
        "with an error)"),
    "--step-timeout": (_seconds, "S",
        "a worker hangs if it completes no step within S seconds (default: no limit)"),
    "--format": (("memmap", "hdf5", "zarr"), "",
        "format of the storage (default: by the end of PATH: .h5 and .hdf5 are hdf5, .zarr is "
        "zarr, others are memmap). hdf5 needs --frames"),
    "--durability": (("process", "power"), "",
        "process: committed rows survive the death of any process; power: a power cut too, and "
        "each commit waits for the disk (default: process)"),
    "--max-size": (_positive, "M",
        "keep the last M rows, and overwrite older ones: a ring (memmap only)"),
    "--once": (("auto", "yes", "no"), "",
        "store frames of large observations once, and images as differences from the previous "
        "frame (memmap and zarr). auto: uint8 observations of 1 KiB or more, with --max-size "
        "(default: auto)"),
    "--finalize": (None, "",
        "when the run is complete, trim the storage to its rows, and add checksums for verify"),
    "--frames-per-batch": (_positive, "F",
        "transitions in a commit (default: 64 for each lane, at least 1024, at most 8192)"),
    "--validate": (("noise", "raise", "warn", "off"), "",
        "response to values outside their spaces. noise: as raise, except that a continuous action "
        "outside its box warns once and is kept (default: noise)"),
    "--finals": (("check", "lost", "kept"), "",
        "final observations of episodes. check: compare the first few with the observations "
        "that follow, and end the run if step resets the environment and returns the first "
        "observation of the next episode instead. lost: the environment does this; store the "
        "column collector/next_valid, which is False in rows without their true next observation. "
        "kept: final observations are right, although they equal the observations that follow, "
        "because a reset of this task keeps the state (default: check)"),
    "--log": (str, "TARGET",
        "write a row of metrics every --log-every transitions to a .csv file, tensorboard:DIR, or "
        "wandb:PROJECT (offline with WANDB_MODE=offline); may be given several times"),
    "--log-every": (_positive, "L", "transitions between two rows (default: 1000)"),
    "--checkpoint": (_path, "DIR",
        "save checkpoints to DIR every --checkpoint-every transitions, when a signal ends the run, "
        "and at its end; with --resume the run continues from the newest one"),
    "--checkpoint-every": (_positive, "C",
        "transitions between two checkpoints (default: 10000)"),
    "--checkpoint-on": (_SIGNALS, "",
        "another signal that ends the run, besides SIGINT, SIGHUP and SIGTERM, such as the one "
        "that a scheduler sends before it stops the job (default: SIGTERM)"),
    "--checkpoint-rows": (("rewind", "keep"), "",
        "rows stored after the checkpoint. rewind: remove them, so that policy, counts and rows "
        "match the checkpoint; keep: keep them (default: rewind)"),
    "--runs": (None, "", "show only the runs, with their host, commit, policy hashes and returns"),
    "--trajectories": (None, "", "show only the trajectories, one per line"),
    "--rows": (_count, "R", "number of rows to show (default: 5)"),
    "--skip": (_checks, "A,B",
        f"checks to skip because the data violates them on purpose: {_CHECKS}; for datasets of "
        f"other libraries also {_CHECKS_OF_OTHERS}"),
    "--ids": (("kept", "relative"), "",
        "how to pair trajectories. kept: by equal ids; relative: by rank among the ids (first with "
        "first), for copies with new ids (default: kept)"),
    "--hash": (None, "", "read all rows and show a hash of their content"),
    "--trajectory": (_ids, "ID,ID", "replay the trajectories with these ids"),
    "--sample": (_positive, "N",
        "replay N trajectories, spread over all that can be replayed (default: 20)"),
    "--all": (None, "", "replay all trajectories"),
    "--env": (str, "ENV",
        "the environment, as for collect, if the manifest does not describe how to create it"),
    "--env-factory": (str, "MODULE:FUNCTION",
        "a function that creates the environment; modules of the current directory can be "
        "imported"),
    "--tolerance": (_tolerance, "X", "floats that differ by at most X count as equal (default: 0)"),
    "--render": (_path, "FILE.mp4",
        "also record a video of the replayed trajectories, one after the other, if the environment "
        'can render; needs the extra: pip install "tallyroll[video]"'),
    "--picture": (_path, "FILE.png",
        "if the first difference is in an image, write the stored image, the replayed image, and "
        "their difference"),
    "--group-by": (str, "A,B",
        "group runs by these fields: environment, label, folder, policy, or the name of a value "
        "in a run's entry, such as call.frames_per_batch (default: environment,label)"),
    "--window": (_positive, "E",
        "number of episodes in a mean: a run's return is the mean of its last E episodes, and each "
        "point of a curve is the mean of the E episodes before it (default: 100)"),
    "--scale": (_scale, "ENV=LOW:HIGH",
        "scale the returns of ENV so that LOW becomes 0 and HIGH becomes 1, for groups of several "
        "environments; may be given several times"),
    "--html": (_path, "FILE", "also write the report as a self-contained HTML page"),
    "--latex": (_path, "FILE", "also write the groups as a LaTeX table, for the package booktabs"),
    "--curves": (_path, "FILE", "also write the points of the learning curves as CSV"),
    "--png": (_path, "FILE",
        'also draw the learning curves as a PNG; needs the extra: pip install "tallyroll[plot]"'),
    "--pdf": (_path, "FILE", "also draw the learning curves as a PDF; needs the same extra"),
    "--force": (None, "", "replace files that are not reports"),
    "--csv": (None, "", "print one CSV line per run instead of text"),
    "--json": (None, "", "print one JSON object instead of text"),
    "--plan": (None, "", "print the execution plan, and why faster paths are off"),
    "--quiet": (None, "", "print no progress and no report"),
    "--traceback": (None, "", "print the traceback of an error"),
}
# fmt: on


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Its result has the name of the command in ``command``."""
    parser = _Parser(prog="tallyroll", description=texts.ABOUT, epilog=texts.EXAMPLES)
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and exit")
    text = "with --help: list all commands"
    parser.add_argument("--all", action="store_true", dest="all_commands", help=text)
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", dest="command"
    )

    def command(name: str, about: str) -> _Parser:
        """Add a command with its help texts."""
        usage, description, examples = (
            getattr(texts, name.upper() + end) for end in ("_USAGE", "", "_EXAMPLES")
        )
        added: _Parser = commands.add_parser(
            name, help=about, usage=usage, description=description, epilog=examples
        )
        return added

    card.add_to(commands, _path, _FILE)
    _add_collect(command("collect", "collect transitions into a storage"))
    completion = command("completion", "print a shell completion script")
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=in_words(SHELLS))
    text = "write the script to the folder that the shell searches, and print any further steps"
    completion.add_argument("--install", action="store_true", help=text)
    _add_output(completion)
    copying.add_to(commands, _path, _FILE)
    diff = command("diff", "compare two storages row by row")
    _add_path(diff)
    other = diff.add_argument("other", metavar="OTHER", help="another storage, of any format")
    other.complete = _FILE  # type: ignore[attr-defined]
    _add(diff, "--ids", default="kept")
    _add(diff, "--accept-copy")
    _add_output(diff, "--json", "--quiet")
    envs = command("envs", "list environment systems and how to install them")
    envs.add_argument("systems", nargs="*", metavar="SYSTEM", help="only these (default: all)")
    _add_output(envs, "--json")
    exchange.add_to(commands, _path, _FILE)
    info = command("info", "show versions, systems and devices for bug reports")
    _add_output(info, "--json")
    _add_inspect(command("inspect", "show the contents of one or more storages"))
    pack.add_to(commands, _path, _FILE)
    _add_plan(command("plan", "print how collect would run, and the disk space, without running"))
    _add_prove(command("prove", "verify, replay and hash runs, in one statement for a reviewer"))
    repair.add_to(commands, _path, _FILE)
    replay = command("replay", "replay stored trajectories and compare them bit for bit")
    _add_paths(replay)
    _add(replay.add_mutually_exclusive_group(), "--trajectory", "--sample", "--all")
    _add(replay.add_mutually_exclusive_group(), "--env", "--env-factory")
    _add(replay, "--env-kwargs", "--tolerance", "--render", "--picture", "--accept-copy")
    _add_output(replay, "--json", "--quiet")
    report = command("report", "summarize many runs in a table and a page")
    report.set_defaults(usage_error=report.error)
    _add_folders(report)
    _add(report, "--group-by", default="environment,label")
    _add(report, "--window", default=100)
    _add(report, "--scale", action="append")
    _add(report, "--html", "--latex", "--curves", "--png", "--pdf", "--force", "--accept-copy")
    _add(report.add_mutually_exclusive_group(), "--csv", "--json")
    _add_output(report, "--quiet")
    split.add_to(commands, _path, _FILE)
    stats.add_to(commands, _path, _FILE)
    store.add_to(commands, _path, _FILE)
    verify = command("verify", "check a storage or another library's dataset row by row")
    _add_paths(verify)
    _add(verify, "--skip", "--accept-copy")
    _add_output(verify, "--json", "--quiet")
    view.add_to(commands, _path, _FILE)
    _add_watch(command("watch", "follow a running collection"))
    return parser


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_paths(parser)
    _add(parser.add_mutually_exclusive_group(), "--runs", "--trajectories")
    _add(parser, "--rows", default=5)
    add_where(parser)
    parser.set_defaults(usage_error=parser.error)
    _add(parser, "--hash", "--accept-copy")
    _add_output(parser, "--json")


def _add_prove(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser)
    _add(parser.add_mutually_exclusive_group(), "--sample", "--all")
    _add(parser.add_mutually_exclusive_group(), "--env", "--env-factory")
    _add(parser, "--env-kwargs", "--accept-copy")
    _add_output(parser, "--json", "--quiet")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    text = "seconds between two updates (default: 2)"
    parser.add_argument("--interval", type=_seconds, metavar="S", default=2.0, help=text)
    parser.add_argument("--once", action="store_true", help="show one update, and exit")
    output = parser.add_argument_group("output")
    text = "print each update as a line of JSON"
    output.add_argument("--json", action="store_true", help=text)
    _add(output, "--traceback")


def _add_collect(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``collect``. A default of None lets --resume detect absent options."""
    _add_env(parser)
    _add(parser, "--out", required=True)
    _add_budget(parser)
    there = parser.add_argument_group("if PATH holds a storage already", texts.COLLECT_THERE)
    _add(there.add_mutually_exclusive_group(), "--append", "--resume")
    _add(there, "--accept-copy")
    _add_source(parser, texts.COLLECT_SOURCE, texts.COLLECT_SHARDS, texts.COLLECT_WORKERS)
    storage = _add_storage(parser, texts.COLLECT_STORAGE)
    _add(storage, "--finalize")
    _add(parser.add_argument_group("validation"), "--validate", "--finals")
    logs = parser.add_argument_group("logs", texts.COLLECT_LOGS)
    _add(logs, "--log", action="append")
    _add(logs, "--log-every")
    saved = parser.add_argument_group("checkpoints", texts.COLLECT_CHECKPOINTS)
    _add(saved, "--checkpoint", "--checkpoint-every", "--checkpoint-on", "--checkpoint-rows")
    _add_output(parser, "--plan", "--quiet")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``, which are the options of ``collect`` that affect a new run."""
    without = dict.fromkeys(("append", "resume", "accept_copy", "finalize", "quiet"), False)
    saved = ("checkpoint", "checkpoint_every", "checkpoint_on", "checkpoint_rows", "log")
    parser.set_defaults(**without, **dict.fromkeys(saved))
    _add_env(parser)
    _add(parser, "--out")
    _add_budget(parser)
    _add_source(parser)
    _add_storage(parser)
    _add(parser.add_argument_group("validation"), "--validate", "--finals")
    _add_output(parser, "--json")


def _add_env(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(usage_error=parser.error)
    help_of_env = (
        "Gymnasium id, module:Id-v0 of a module that registers it on import, or SYSTEM:ID of an "
        "environment system (`tallyroll envs` lists them). If a system and a module have the same "
        "name, the system is used"
    )
    parser.add_argument("env", nargs="?", metavar="ENV", help=help_of_env)


def _add_budget(parser: argparse.ArgumentParser) -> None:
    budget = parser.add_argument_group("budget (one of them)")
    _add(budget.add_mutually_exclusive_group(), "--frames", "--episodes")
    _add(budget, "--budget-unit")


def _add_source(
    parser: argparse.ArgumentParser,
    of_source: str | None = None,
    of_shards: str | None = None,
    of_workers: str | None = None,
) -> None:
    """Add the options of the environment, the policy, the shards and the workers."""
    source = parser.add_argument_group("environment and policy", of_source)
    _add(source, "--num-envs", "--seed", "--policy", "--env-kwargs", "--max-frames-per-traj")
    _add(source, "--frame-skip", "--reward-dtype", "--info-keys")
    _add(source, "--rename", "--exclude", "--reset", action="append")
    _add(source, "--reset-seeds", default=None)
    _add(parser.add_argument_group("shards", of_shards), "--shard")
    workers = parser.add_argument_group("workers", of_workers)
    _add(workers, "--workers", "--mode", "--transport", "--address", "--respawns")
    _add(workers, "--step-timeout", "--policy-placement")
    _add(workers, "--sharded", default=None)


def _add_storage(parser: argparse.ArgumentParser, about: str | None = None) -> Any:
    storage = parser.add_argument_group("storage", about)
    _add(storage, "--format", "--durability", "--max-size", "--once")
    _add(storage, "--frames-per-batch")
    return storage


def _add_path(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the storage that a command reads."""
    added: Any = parser.add_argument(
        "path", type=_path, metavar="PATH", help="the storage, of any format"
    )
    added.complete = _FILE


def _add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the argument for storages that a command reads as one."""
    text = "the storage, of any format; several storages or a quoted pattern are read as one"
    added: Any = parser.add_argument("path", nargs="+", type=_path, metavar="PATH", help=text)
    added.complete = _FILE


def _add_folders(parser: argparse.ArgumentParser) -> None:
    """Add the argument for storages that a command reads one by one, or for their folders."""
    text = "storages, or folders with storages"
    added: Any = parser.add_argument("paths", nargs="+", type=_path, metavar="PATH", help=text)
    added.complete = _FILE


def _add_output(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the output options of a command: ``names`` and --traceback."""
    _add(parser.add_argument_group("output"), *names, "--traceback")


def _add(group: Any, *names: str, **more: Any) -> None:
    """Add options of the table above to a parser or to an argument group."""
    for name in names:
        kind, metavar, text = _OPTIONS[name]
        if kind is None:
            group.add_argument(name, action="store_true", help=text, **more)
        elif isinstance(kind, tuple):
            group.add_argument(name, choices=kind, help=text, **more)
        else:
            added = group.add_argument(name, type=kind, metavar=metavar, help=text, **more)
            if kind is _path:
                added.complete = _FILE
