"""The commands' arguments, and what ``--help`` says."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from tallyroll.collector.cli.output import visible

_ABOUT = """\
Collect exactly N true transitions from reinforcement-learning environments into a replay
storage, show the content of a storage, and check that its content is as it was written.
"""
_EXAMPLES = """\
examples:
  a million transitions of CartPole, from 8 lanes, into runs/cartpole:
    tallyroll collect CartPole-v1 --frames 1_000_000 --num-envs 8 --seed 0 --out runs/cartpole
  show its content, and check it:
    tallyroll inspect runs/cartpole
    tallyroll verify runs/cartpole
  continue after Ctrl-C or a kill; the run ends at exactly a million:
    tallyroll collect --resume --out runs/cartpole

`tallyroll COMMAND --help` describes the options of a command.
"""
_COLLECT = """\
Collect exactly N transitions (--frames), or exactly E whole episodes (--episodes), into a new
storage. Actions are random unless --policy names a policy. A transition is one action that an
environment executed. Rows are committed batch by batch, and committed rows survive kill -9.
"""
_COLLECT_EXAMPLES = """\
examples:
  random actions, 8 environments side by side:
    tallyroll collect CartPole-v1 --frames 1_000_000 --num-envs 8 --seed 0 --out runs/cartpole

  costly steps, in 4 processes (the data are those of one process):
    tallyroll collect HalfCheetah-v5 --frames 1e6 --num-envs 32 --workers 4 --out runs/cheetah

  your policy: `policy` in my_agent.py of the current directory, exactly 100 whole episodes:
    tallyroll collect Pendulum-v1 --episodes 100 --policy my_agent:policy --out runs/pendulum

  an environment registered by your own module, with arguments for its constructor:
    tallyroll collect my_envs:Maze-v0 --env-kwargs '{"size": 9}' --frames 5000 --out runs/maze

  append a second run, and continue a run that was stopped or killed:
    tallyroll collect CartPole-v1 --frames 50_000 --out runs/cartpole --append
    tallyroll collect --out runs/cartpole --resume

  one HDF5 file, or one Zarr group, for other programs to read:
    tallyroll collect CartPole-v1 --frames 50_000 --out cartpole.h5 --finalize
    tallyroll collect CartPole-v1 --frames 50_000 --out cartpole.zarr --finalize

On Ctrl-C and SIGTERM the command commits all complete transitions, prints how to resume, and
exits with status 130 and 143. A run that does not fit on the disk is refused before it begins.
"""
_INSPECT = """\
Show a storage: its columns, its runs, how many rows and trajectories it holds, returns and
lengths of the episodes that ended, and its first rows. Another process may write meanwhile.
"""
_INSPECT_EXAMPLES = """\
examples:
  tallyroll inspect runs/cartpole
  tallyroll inspect runs/cartpole --rows 20
  tallyroll inspect runs/cartpole --json | jq .returns.mean
"""


_VERIFY = """\
Read every row of a storage, and report rows that are inconsistent: counts that do not match, ids
and steps with gaps or repeats, rows after an end, next observations that differ from the following
row's observation, lost final observations, NaN, rows that were never written, a ledger that does
not balance, bytes that changed since the storage was finalized. Each finding names its row.
Another process may write meanwhile.
"""
_VERIFY_EXAMPLES = """\
examples:
  tallyroll verify runs/cartpole
  tallyroll verify runs/cartpole.h5 --skip nan,zeros
  tallyroll verify runs/cartpole --json | jq .findings

exit status:
  0  sound
  1  something is wrong with the storage
  2  it could not be checked: no storage there, not readable, or a wrong argument
"""
_CHECKS = (
    "files, metadata, runs, record, lanes, ids, steps, ends, versions, observations, finals, nan, "
    "zeros, episodes, checksums"
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with words that may be names of files."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message))


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands: arguments get ``command``, its name."""
    parser = _new(_Parser, prog="tallyroll", description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and exit")
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", dest="command"
    )
    collect = _new(
        commands.add_parser,
        "collect",
        help="collect transitions into a storage",
        description=_COLLECT,
        epilog=_COLLECT_EXAMPLES,
    )
    collect.set_defaults(usage_error=collect.error)
    _add_collect(collect)
    inspect = _new(
        commands.add_parser,
        "inspect",
        help="show what is in a storage",
        description=_INSPECT,
        epilog=_INSPECT_EXAMPLES,
    )
    inspect.add_argument("path", type=_path, metavar="PATH", help="the storage")
    inspect.add_argument(
        "--rows", type=_count, default=5, metavar="R", help="rows to show (default: 5)"
    )
    _add_accept_copy(inspect)
    inspect.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text"
    )
    _add_common(inspect)
    _add_verify(commands)
    return parser


def _add_verify(commands: Any) -> None:
    verify = _new(
        commands.add_parser,
        "verify",
        help="check that every row of a storage is as it was written",
        description=_VERIFY,
        epilog=_VERIFY_EXAMPLES,
    )
    verify.add_argument("path", type=_path, metavar="PATH", help="the storage, of any format")
    verify.add_argument(
        "--skip", type=_checks, metavar="A,B",
        help="checks to skip because the data violates them on purpose: " + _CHECKS,
    )  # fmt: skip
    _add_accept_copy(verify)
    verify.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    verify.add_argument("--quiet", action="store_true", help="no progress, no report")
    _add_common(verify)


def _new(
    make: Callable[..., argparse.ArgumentParser], *args: Any, **kwargs: Any
) -> argparse.ArgumentParser:
    return make(
        *args, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs
    )


def _add_accept_copy(parser: Any) -> None:
    parser.add_argument(
        "--accept-copy", action="store_true",
        help="open a copy that was made while a writer had the storage open; rows that were "
        "written meanwhile may be missing in it",
    )  # fmt: skip


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true", help="print the traceback of an error")


def _add_collect(parser: argparse.ArgumentParser) -> None:
    """Every option defaults to None, so that --resume can tell what was left out."""
    parser.add_argument(
        "env", nargs="?", metavar="ENV",
        help="Gymnasium id, or module:Id-v0 where importing the module registers it",
    )  # fmt: skip
    parser.add_argument(
        "--out", required=True, type=_path, metavar="PATH",
        help="the storage: a directory, an HDF5 file NAME.h5, or a Zarr group NAME.zarr",
    )  # fmt: skip
    budget = parser.add_argument_group("budget (one of them)").add_mutually_exclusive_group()
    budget.add_argument("--frames", type=_positive, metavar="N", help="exactly N transitions")
    budget.add_argument(
        "--episodes", type=_positive, metavar="E",
        help="exactly E whole episodes: those that start first",
    )  # fmt: skip
    there = parser.add_argument_group("if PATH holds a storage already")
    existing = there.add_mutually_exclusive_group()
    existing.add_argument("--append", action="store_true", help="append a new run")
    existing.add_argument(
        "--resume", action="store_true",
        help="continue its last run up to N; options that are left out are taken from that run. "
        "Begins the run if nothing was written yet",
    )  # fmt: skip
    _add_accept_copy(there)
    _add_source(parser.add_argument_group("environment and policy"))
    _add_workers(parser.add_argument_group("processes"))
    _add_storage(parser.add_argument_group("storage"))
    _add_details(parser.add_argument_group("details"))
    _add_common(parser)


def _add_source(group: Any) -> None:
    group.add_argument(
        "--num-envs", type=_positive, metavar="K",
        help="number of lanes, environments that are stepped side by side (default: 1, or one for "
        "each worker; if steps are cheap, 8 or more are several times faster)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=_count, metavar="S",
        help="seed: the same one gives the same data (default: drawn, and recorded)",
    )  # fmt: skip
    group.add_argument(
        "--policy", metavar="MODULE:ATTR",
        help="a TensorDictModule or a callable from TensorDict to TensorDict. A class, or a "
        "function that needs no arguments, is called once to make the policy. Modules of the "
        "current directory can be imported (default: random actions)",
    )  # fmt: skip
    group.add_argument(
        "--env-kwargs", type=_mapping, metavar="JSON", help="arguments for gymnasium.make"
    )
    group.add_argument(
        "--max-frames-per-traj", type=_positive, metavar="M",
        help="truncate episodes after M transitions",
    )  # fmt: skip
    group.add_argument(
        "--frame-skip", type=_frame_skip, metavar="T",
        help="simulator ticks in a transition, or the info key that counts ticks (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--info-keys", type=_infos, metavar="A,B",
        help="info entries that become columns: NAME, GROUP/NAME, NAME:DTYPE, NAME:DTYPE[2x3]; "
        "NAME:DTYPE=FILL if some steps lack the entry",
    )  # fmt: skip
    group.add_argument(
        "--rename", type=_rename, action="append", metavar="OLD=NEW",
        help="new name for a column whose name collides; may be given several times",
    )  # fmt: skip


def _add_workers(group: Any) -> None:
    group.add_argument(
        "--workers", type=_count, metavar="W",
        help="number of processes that step the lanes, for environments whose steps are costly "
        "(default: 0, the command's own process)",
    )  # fmt: skip
    group.add_argument(
        "--mode", choices=("sync", "async"),
        help="sync: workers advance together, and the rows are those of one process; async: no "
        "worker waits for another, rows are stored in order of arrival, and which rows differs "
        "from run to run (default: sync)",
    )  # fmt: skip
    group.add_argument(
        "--respawns", type=_count, metavar="R",
        help="replace workers that raise, die or hang, R times in all (default: 0, the run ends "
        "with an error)",
    )  # fmt: skip
    group.add_argument(
        "--step-timeout", type=_seconds, metavar="S",
        help="a worker hangs if it completes no step within S seconds (default: no limit)",
    )  # fmt: skip


def _add_storage(group: Any) -> None:
    group.add_argument(
        "--format", choices=("memmap", "hdf5", "zarr"),
        help="format of the storage (default: by the end of PATH: .h5 and .hdf5 are hdf5, .zarr is "
        "zarr, others are memmap). hdf5 needs --frames",
    )  # fmt: skip
    group.add_argument(
        "--durability", choices=("process", "power"),
        help="committed rows survive the death of any process (process), or a power cut too "
        "(power: each commit waits for the disk) (default: process)",
    )  # fmt: skip
    group.add_argument(
        "--max-size", type=_positive, metavar="M",
        help="keep the last M rows, and overwrite older ones: a ring (memmap only)",
    )  # fmt: skip
    group.add_argument(
        "--finalize", action="store_true",
        help="when the run is complete, trim the storage to its rows, and add checksums for verify",
    )  # fmt: skip


def _add_details(group: Any) -> None:
    group.add_argument(
        "--frames-per-batch", type=_positive, metavar="F",
        help="transitions in a commit (default: 64 for each lane, at least 1024, at most 8192)",
    )  # fmt: skip
    group.add_argument(
        "--validate", choices=("raise", "warn", "off"),
        help="reaction to values outside their spaces (default: raise)",
    )  # fmt: skip
    group.add_argument(
        "--finals", choices=("check", "lost", "kept"),
        help="final observations of episodes. check: compare the first few with the observations "
        "that follow, and end the run if the environment resets itself within step and returns the "
        "next episode's first observation instead; lost: it does, so mark ends in the column "
        "collector/next_valid, which is False where nothing should be bootstrapped; kept: they are "
        "right, because a reset of this task keeps the state (default: check)",
    )  # fmt: skip
    group.add_argument("--quiet", action="store_true", help="no progress, no report")


class _Version(argparse.Action):
    """Versions are looked up when they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Show them and exit."""
        from tallyroll.collector.batches.provenance import versions

        found = versions()
        own = found.pop("tallyroll")
        rest = ", ".join(f"{name} {version}" for name, version in found.items())
        sys.stdout.write(f"tallyroll {own} ({rest})\n")
        parser.exit()


def _integer(text: str) -> int:
    """A whole number: 1000, 1_000 or 1e3."""
    try:
        number = Decimal(text)
        if number.is_finite() and abs(number) < 2**63 and number == int(number):
            return int(number)
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number below 2**63, got {text!r}")


def _path(text: str) -> str:
    if not text:  # an unset variable in a script, and not the current directory
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
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"expected a JSON object like '{{\"a\": 1}}', got {text!r}"
        )
    return value


def _checks(text: str) -> list[str]:
    names = _names(text)
    if unknown := [name for name in names if name not in _CHECKS.split(", ")]:
        raise argparse.ArgumentTypeError(f"no check is called {unknown[0]!r}; there are {_CHECKS}")
    return names


def _frame_skip(text: str) -> int | str:
    return text if all(map(str.isidentifier, text.split("/"))) else _positive(text)


def _rename(text: str) -> str:
    _, equals, new = text.rpartition("=")
    if not equals or not new:
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got {text!r}")
    return text


def _infos(text: str) -> list[str]:
    from tallyroll.collector.errors import ArgumentError
    from tallyroll.collector.slab.info import parsed  # torch takes seconds, and --help none

    names = _names(text)
    try:
        for name in names:
            parsed(name)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names
