"""``tallyroll collect``: run a collector, show its progress, and report the results."""

import argparse
import atexit
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.filesize import decimal

from tallyroll.collector.base import Collector
from tallyroll.collector.batches.stored.resume import has_begun, last_run_of
from tallyroll.collector.batches.stored.storing_plan import stored_size
from tallyroll.collector.cli.output import CommandError, emit, pasteable, say
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.plan import Plan, import_named, load_policy, open_output, part
from tallyroll.collector.cli.row_space import RowSpace
from tallyroll.collector.counting.ledger import show_ledger
from tallyroll.collector.envs import registry
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.checkpoints.regular import RegularCheckpoints
from tallyroll.collector.ext.logs.run_log import EVERY, RunLog
from tallyroll.collector.ext.logs.target import LogTarget, open_target
from tallyroll.collector.ext.progress import Display, run_details, shown_progress
from tallyroll.collector.multiprocess import MultiprocessCollector, RayCollector
from tallyroll.collector.options.draws import Draw
from tallyroll.collector.options.draws import parsed as parsed_draw
from tallyroll.collector.options.resets import Resets
from tallyroll.collector.slab.info import parsed
from tallyroll.collector.sync import SyncCollector
from tallyroll.collector.workers.local.nonblocking_stdio import (
    drop_blocked_output,
    drop_output,
    output_dropped,
)
from tallyroll.storage import StorageLocked
from tallyroll.storage.files.paths import free_bytes
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.pages import counted
from tallyroll.storage.storages import DiskStorage

_BATCHES = 8
"""Batches of a sharded run between two progress updates. Workers wait at the last of them."""
_OTHERS = (
    "append",
    "format",
    "durability",
    "max_size",
    "finalize",
    "accept_copy",
    "checkpoint",
)
"""Options that do not apply to a sharded storage."""
_NO_EFFECT = (None, False, "auto", "no")
"""Values of these options that change nothing."""


def wrong_sharded(plan: Plan, args: argparse.Namespace) -> str | None:
    """Return the error message for --sharded, or None if the options are valid."""
    if not plan.sharded:
        return None
    if not plan.workers:
        return "--sharded needs workers, because each of them writes a shard. Give --workers."
    if plan.mode == "sync":
        return (
            "--sharded cannot be combined with --mode sync, because rows of several shards have no "
            "order. Leave --mode out."
        )
    if plan.frames is None or plan.by_agent or plan.shard is not None:
        return (
            "--sharded: expected --frames, the number of transitions of the whole run, without "
            "--episodes, --budget-unit agent_transitions and --shard"
        )
    if plan.policy_placement == "central":
        return (
            "--policy-placement central cannot be combined with --sharded. Leave "
            "--policy-placement out."
        )
    for name in _OTHERS:
        if getattr(args, name) not in _NO_EFFECT:
            option = "--" + name.replace("_", "-")
            return f"{option} cannot be combined with --sharded. Leave {option} out."
    return None


def steps_of(collector: Collector, plan: Plan) -> Iterator[object]:
    """Collect until the budget is met or the run is stopped, and yield at intervals."""
    if plan.sharded:
        while collected := collector.collect(_BATCHES * collector.frames_per_batch):
            yield collected
    else:
        yield from collector


_CHECKPOINTS = ("checkpoint", "checkpoint_every", "checkpoint_on", "checkpoint_rows")


class Signals:
    """Temporary handlers for SIGINT, SIGTERM, SIGHUP, and the signals in ``more``.

    The first signal calls ``stop``, or raises KeyboardInterrupt if there is nothing to stop yet. A
    second signal always raises KeyboardInterrupt.
    """

    def __init__(self, more: Sequence[signal.Signals] = ()) -> None:
        self._numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more)
        self.number = signal.SIGINT
        """The last signal received; SIGINT before any."""
        self.stop: Callable[[], None] | None = None
        self.received = False

    @contextmanager
    def install(self) -> Iterator[None]:
        """Install the handlers for the duration of the context, if this is the main thread."""
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup relies on it
                    before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.received, self.number = self.received, True, signal.Signals(number)
        drop_blocked_output()
        if self.stop is None or again:
            raise KeyboardInterrupt
        self.stop()

    @property
    def exit_status(self) -> int:
        """Exit status of a process that the signal ended, as in shells."""
        return 128 + self.number


class CollectRun:
    """One ``tallyroll collect``: its plan, its storage, and its messages."""

    def __init__(self, args: argparse.Namespace, storage: DiskStorage, signals: Signals) -> None:
        self.args, self.storage, self.signals = args, storage, signals
        self.out: str = args.out
        self.head = self.first_row = storage.head
        """Rows in the storage when it was opened, and the first row of the run."""
        self.resumes = args.resume and has_begun(storage)
        """True if a run is continued. With nothing to resume, --resume begins a run."""
        self.runs: list[Any] = storage.manifest["runs"] if storage.mode == "append" else []
        if self.resumes:
            if not self.runs or "first_row_of_run" not in self.runs[-1]:
                raise CommandError(
                    f"--resume: {self.out} holds no run of a collector. Use --append."
                )
            self.first_row = last_run_of(self.runs, storage.path, self.head).first_row
        self.began, self.has_begun = 0, False
        """Rows that the run had before this command, and whether the manifest lists the run."""
        self.is_over = False
        """True if all rows of the run are collected and committed."""
        self.plan = self._planned()
        self.frames = self.plan.own_frames
        """Frames of the run, or of its shard; None if the budget is a number of episodes."""
        self.checkpoints = RegularCheckpoints(
            None if args.checkpoint is None else Path(args.checkpoint),
            args.checkpoint_every,
            resumes=self.resumes,
        )
        if wrong := wrong_workers(self.plan, args) or wrong_sharded(self.plan, args):
            raise CommandError(wrong)

    def _planned(self) -> Plan:
        given = Plan.of(self.args)
        before = Plan.of_run(self.runs[-1]) if self.resumes else Plan()
        plan = given.or_else(before)
        if plan.env is None or (plan.frames is None and plan.episodes is None):
            missing = "ENV" if plan.env is None else "--frames or --episodes"
            raise CommandError(
                f"{self.out} has no earlier run to take {missing} from. Give {missing}."
            )
        if self.resumes:
            self._require_fit(given, before, plan)
        if wrong := wrong_shard(plan):
            raise CommandError(wrong)
        if plan.frames is None and not self.storage.grows:
            raise CommandError(
                f"{self.out}: an HDF5 file needs a fixed number of rows, but --episodes does not "
                "give one. Use --frames, or --format memmap or zarr."
            )
        return plan

    def _require_fit(self, given: Plan, before: Plan, plan: Plan) -> None:
        """Raise if ``given`` cannot continue the run ``before``, or lacks required options.

        `batches/stored/resume.py` repeats some of these checks for the collector. Here the messages
        name options.
        """
        # Nothing that a storage names is imported; the command line must name the code again.
        env_module = given.env is None and ":" in (before.env or "")
        if env_module or (given.policy is None and before.policy is not None):
            raise CommandError(
                f"--resume: the manifest in {self.out} names your own code, or an environment "
                "system. Tallyroll does not run code only because a storage names it. If the names "
                "are right, repeat them:",
                self._resume_command(plan),
            )
        if given.episodes is not None and before.frames is not None:
            raise CommandError(
                "--resume: the run was started with --frames, so --episodes cannot end it. Give "
                "--frames, or leave both out."
            )
        if given.shard is not None and given.shard != before.shard:
            was = "a whole run" if before.shard is None else f"shard {before.shard}"
            raise CommandError(
                f"--resume: {self.out} has {was}, but --shard {given.shard} was given. Give each "
                "shard its own --out, or leave --shard out."
            )
        if given.num_envs is not None and given.num_envs != (before.num_envs or 1):
            raise CommandError(
                f"--resume: the run has {counted(before.num_envs or 1, 'lane')}, but --num-envs "
                f"{given.num_envs} was given. Leave --num-envs out, or use --append for a new run."
            )
        policy = part(self.runs[-1], "call").get("policy")
        if policy is not None and plan.policy is None:
            raise CommandError(
                f"--resume: the run was made with a policy ({policy}) that its manifest cannot "
                "name. Give the policy with --policy."
            )
        if policy is None and plan.policy is not None:
            raise CommandError(
                "--resume: the run was made with random actions, but --policy was given. Leave "
                "--policy out, or use --append for a new run."
            )

    def note(self, text: str, below: str = "", *, lines: bool = False) -> None:
        """Write ``text``, and a command ``below`` it, to stderr, unless --quiet is given.

        ``lines`` is True if the text may have several lines.
        """
        if not self.args.quiet:
            say(f"tallyroll: {text}", below=below, lines=lines)

    # --- collecting -------------------------------------------------------------------------------

    def run(self) -> int:
        """Collect the missing data, report it, and return the exit status."""
        report, done = "", False
        try:
            done = self._is_complete()
            if not done:
                with output_dropped("stdout"):
                    collector, seconds = self._collect()
                have, wanted = self._budget(collector)
                done = have >= wanted
                report = self._report(collector, seconds, done)
        except KeyboardInterrupt:
            done = False
        except Exception as error:
            if self.storage.head > self.head:
                self._note_after_error(error)
            raise
        # Collecting is over, so later errors are reported without advice to resume.
        try:
            if done and self.args.finalize:
                with shown_progress("finalized", self.args.quiet) as progress:
                    total = 2 * self.storage.nbytes  # read once for checksums, once for the hash
                    self.storage.finalize(partial(progress.add, total=total))
            if report and not self.args.quiet:
                # If stdout is not read, it must not block a run that a signal ended.
                with output_dropped(*["stdout"] * self.signals.received):
                    emit(report)
        finally:
            if not done:
                self._note_after_signal()
        return 0 if done else self.signals.exit_status

    def load(self) -> tuple[str, Any]:
        """Import the module of the environment and the policy; return the id and the policy."""
        env = self.plan.env
        assert env is not None
        module, colon, _ = env.partition(":")
        if colon and registry.find(env) is None:  # the module registers the environment
            _import_module_of(env, module)
        return env, load_policy(self.plan.policy)

    def _collect(self) -> tuple[Collector, float]:
        """Collect, and return the closed collector and the duration in seconds."""
        plan = self.plan
        env, policy = self.load()
        self._warn_of_repetition()
        self.storage.writer.runs.provenance = {"command": plan.as_dict()}
        with (
            self._log_targets() as targets,
            self.make_collector(env, policy) as collector,
            self._logs(collector, targets) as logs,
        ):
            self.checkpoints.load(collector, self.args.checkpoint_rows or "rewind", self.note)
            self.began, self.has_begun = collector.ledger.stored, True
            self._note_space()
            if self.args.plan:
                self.note(f"the plan of the run:\n{collector.plan}", lines=True)
            self.signals.stop = collector.stop
            started = time.monotonic()
            what = "frames" if plan.frames else "episodes"
            with shown_progress(what, self.args.quiet, "{:,}".format, stays=True) as progress:
                show = partial(self._show, progress, collector, started)
                try:
                    show()
                    for _ in steps_of(collector, plan):
                        show()
                        for log in logs:
                            log.update()
                        self.checkpoints.save(collector)
                    self.checkpoints.save(collector, last=True)
                finally:
                    show(last=True)
            seconds = time.monotonic() - started
        self.signals.stop = None
        self.is_over = True
        return collector, seconds

    @contextmanager
    def _log_targets(self) -> Iterator[list[LogTarget]]:
        """Open the targets of --log before the run is added to the storage."""
        with ExitStack() as stack:
            targets = []
            for each in self.args.log or ():
                targets.append(target := open_target(each))
                stack.callback(target.close)
                if target.newest is not None and not self.resumes:
                    raise CommandError(
                        f"--log: {each} already has rows of another run, the last one at "
                        f"{target.newest.frames:,} transitions. Give another --log, or --resume "
                        "that run."
                    )
            yield targets

    @contextmanager
    def _logs(self, collector: Collector, targets: list[LogTarget]) -> Iterator[list[RunLog]]:
        """Open the logs, which write their last row before the collector ends."""
        every = self.args.log_every or EVERY
        with ExitStack() as stack:
            yield [stack.enter_context(RunLog(collector, each, every=every)) for each in targets]

    def make_collector(self, env: str, policy: Any) -> Collector:
        """Make the collector of the run."""
        plan = self.plan
        arguments: dict[str, Any] = {
            "storage": self.storage,
            "resume": self.resumes,
            "frames_per_batch": plan.frames_per_batch or default_batch(plan, self.storage.ring),
            "total_frames": plan.frames,
            "total_episodes": plan.episodes,
            "num_envs": plan.lanes,
            "shard": plan.shard,
            "info_keys": tuple(parsed(each) for each in plan.info_keys or ()),
            "rename": dict(each.rsplit("=", 1) for each in plan.rename or ()),
            "exclude": tuple(plan.exclude or ()),
            "resets": Resets(sampler=_sampler(plan.reset), seeds=plan.reset_seeds or False),
        }
        same = ["env_kwargs", "seed", "max_frames_per_traj", "frame_skip", "validate", "finals"]
        same += ["budget_unit", "reward_dtype"]
        if plan.workers:
            arguments["num_workers"] = plan.workers
            arguments["on_worker_death"] = "respawn" if plan.respawns else "raise"
            arguments["max_respawns"] = plan.respawns or 0
            same += ["mode", "step_timeout", "address" if plan.by_ray else "transport", "sharded"]
            same.append("policy_placement")
            if plan.sharded:
                arguments["mode"] = "async"
        # Options that are left out have the defaults of the collector.
        arguments |= {name: value for name, value in plan.as_dict().items() if name in same}
        with_workers = RayCollector if plan.by_ray else MultiprocessCollector
        make = with_workers if plan.workers else SyncCollector
        return make(env, policy, **arguments)

    def _budget(self, collector: Collector) -> tuple[int, int]:
        """Return the amount of the budget that is used, and the budget."""
        if self.frames is not None:
            ledger = collector.ledger
            have = ledger.agent_transitions if self.plan.by_agent else ledger.stored
            return have, self.frames
        return collector.ledger.episodes_complete, self.plan.episodes or 0

    def _is_complete(self) -> bool:
        """Return True, and print a note, if the resumed run already has its whole budget."""
        run_rows, frames = self.head - self.first_row, self.frames
        if not self.resumes or frames is None or run_rows < frames or self.plan.by_agent:
            return False
        if run_rows > frames:
            raise CommandError(
                f"--resume: the run in {self.out} already has {run_rows:,} frames, more than the "
                f"{frames:,} asked for. Give a larger --frames, or another --out."
            )
        self.note(f"{self.out} is complete already: it has all {run_rows:,} frames")
        return True

    def _warn_of_repetition(self) -> None:
        plan = self.plan
        if self.resumes or plan.seed is None or not self.head:
            return
        earlier = [(Plan.of_run(run), run.get("seed")) for run in self.runs]
        if (plan.env, plan.policy, plan.seed) in [(p.env, p.policy, seed) for p, seed in earlier]:
            self.note(
                f"warning: an earlier run in {self.out} also has the seed {plan.seed}, so this run "
                "may repeat its data. Give another --seed, or leave --seed out."
            )

    # --- reporting ----------------------------------------------------------------------------

    def _note_space(self) -> None:
        if self.args.resume and not self.resumes:
            self.note(f"{self.out} held no run to resume: starting from the beginning")
        rows = None if self.frames is None or self.plan.by_agent else self.frames - self.began
        space = RowSpace.of(self.storage, rows)
        free = decimal(free_bytes(self.storage.path))
        self.note(
            f"{space.takes}; {free} are free in {self.out}, besides the space already reserved for "
            "these rows"
        )
        if space.hint:
            self.note(space.hint)

    def _show(
        self, progress: Display, collector: Collector, started: float, last: bool = False
    ) -> None:
        def details() -> list[str]:
            fresh = collector.ledger.stored - self.began
            unit = "" if self.plan.frames and not self.plan.by_agent else " frames"
            rate = f"{fresh / max(1e-9, time.monotonic() - started):,.0f}{unit}/s"
            return run_details(collector, rate, self._nbytes())

        progress(*self._budget(collector), details, last)

    def _nbytes(self) -> int | None:
        """Return the bytes of the rows on disk; None if shards store their frames once."""
        size = stored_size(self.storage)
        if size is not None and size.once:
            return len(self.storage) * size.row_nbytes
        return None if self.storage.stores_once else self.storage.nbytes

    def _report(self, collector: Collector, seconds: float, done: bool) -> str:
        page, ledger = Page(), collector.ledger
        fresh = ledger.stored - self.began
        rate = f"{fresh / seconds:,.0f}/s" if seconds > 0 else "at once"
        already = f" ({self.began:,} of them were stored before)" if self.began else ""
        size, nbytes = stored_size(self.storage), self._nbytes()
        bytes_of_rows = "frames stored once" if nbytes is None else decimal(nbytes)
        page.print()
        page.print(
            f"{ledger.stored:,} frames of {self.plan.env}{already}, {seconds:.1f} s, {rate}, "
            f"{bytes_of_rows} in {self.out}"
        )
        if size is not None and size.once and size.ring_nbytes is not None:
            frames = f"frames of {', '.join(map(format_key, size.once))} are stored once"
            page.print(
                f"{frames}: {size.row_nbytes:,} bytes a row, {decimal(size.ring_nbytes)} in the "
                "full ring"
            )
        page.print(f"{'seed':<17} {ledger.seed:>15}")
        if (own := collector.shard) is not None:
            first, last = own.lanes[0], own.lanes[-1]
            meaning = f"lanes {first} to {last} of {own.run_lanes}, of {own.asked:,} frames in all"
            page.print(f"{'shard':<17} {own!s:>15}  {meaning}")
        show_ledger(page, ledger.counts(), _returns(collector))
        if ledger.agent_surplus:
            meaning = "agent transitions of the last row beyond the budget"
            page.print(f"{'agent surplus':<17} {ledger.agent_surplus:>15,}  {meaning}")
        if done:
            page.print()
            page.print(f"show it:         {self._inspect_command()}")
            if self.plan.shard is None and not self.plan.sharded:
                more = replace(self.plan, seed=None).command(self.out, "--append")
                page.print(f"more of the same: {more}")
        return page.text

    def _inspect_command(self) -> str:
        return pasteable(shlex.join(["tallyroll", "inspect", self.out]))

    def _resume_command(self, plan: Plan) -> str:
        # All other options are in the manifest.
        options = [*self._repeated_options(), *["--finalize"] * self.args.finalize]
        return Plan(env=plan.env, policy=plan.policy).command(self.out, "--resume", *options)

    def _repeated_options(self) -> list[str]:
        every = [] if self.args.log_every is None else ["--log-every", str(self.args.log_every)]
        logs = [word for each in self.args.log or () for word in ("--log", each)]
        given = [(name, getattr(self.args, name)) for name in _CHECKPOINTS]
        saved = [("--" + name.replace("_", "-"), str(value)) for name, value in given if value]
        return [*logs, *every, *(word for pair in saved for word in pair)]

    def _note_after_error(self, error: Exception) -> None:
        """Report the committed rows after an error, and how to continue."""
        committed = f"{self.storage.head:,} rows are committed in {self.out}"
        resume = self._resume_command(self.plan)
        if not isinstance(error, StorageLocked):
            self.note(f"{committed}. Once the cause of the error is gone, continue with", resume)
            return
        self.note(
            f"{committed}, perhaps some by another process. Before you continue, check which "
            "process made the last run:",
            self._inspect_command(),
        )
        self.note("if the last run is this one, continue with", resume)

    def _note_after_signal(self) -> None:
        """Report the state after a signal, and how to continue."""
        name = self.signals.number.name
        has_rows = self.storage.head > self.first_row
        kept = "all complete transitions are committed" if has_rows else "nothing was collected yet"
        how = self._resume_command(self.plan)
        if not self.resumes and not self.has_begun:
            options = ["--format", self.args.format] if self.args.format else []
            options += self._repeated_options()
            options += [f"--{name}" for name in ("append", "finalize") if getattr(self.args, name)]
            how = self.plan.command(self.out, *options)
        say(f"tallyroll: stopped by {name}; {kept}. Continue with", below=how)


def _import_module_of(env: str, module: str) -> None:
    """Import the module before the colon of an environment id."""
    try:
        import_named(module, env)
    except CommandError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name == module.partition(".")[0]:
            raise CommandError(
                f"{env}: there is neither a module nor an environment system called {module}. "
                "`tallyroll envs` lists the systems."
            ) from error
        raise


def _returns(collector: Collector) -> str:
    last = min(100, len(collector.episodes))
    if not last:
        return ""
    metrics = collector.metrics(last)
    return (
        f"the last {last}: mean return {metrics['return_mean']:.5g}, "
        f"mean length {metrics['length_mean']:.5g}"
    )


def wrong_shard(plan: Plan) -> str | None:
    """Return the error message for --shard, or None if the options are valid."""
    if plan.shard is None:
        return None
    option = f"--shard {plan.shard}"
    if plan.seed is None:
        return (
            f"{option}: expected the same --seed for each of the shards, got none. Give one, such "
            "as --seed 0."
        )
    if plan.episodes is not None or plan.by_agent:
        return (
            f"{option}: expected --frames, the number of transitions of all shards. Without it a "
            "shard cannot know which episodes start first, or how many agents live in other shards."
        )
    try:
        assert plan.own is not None
    except ArgumentError as error:
        said = str(error).replace("num_envs", "--num-envs").replace("total_frames", "--frames")
        return f"{option}: {said.removeprefix('shard: ')}"
    return None


def wrong_workers(plan: Plan, args: argparse.Namespace) -> str | None:
    """Return the error message for the worker options, or None if they are valid."""
    if (plan.workers or 0) > plan.own_lanes:
        of = "" if plan.shard is None else f" in shard {plan.shard}"
        return (
            f"--workers: expected at most the number of lanes{of}, {plan.own_lanes}, got "
            f"{plan.workers}. Give fewer workers, or a larger --num-envs."
        )
    names = ("mode", "transport", "address", "respawns", "step_timeout", "policy_placement")
    for name in names:
        if not plan.workers and getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            return f"{option} needs workers. Give --workers."
    if args.address is not None and not plan.by_ray:
        return "--address needs --transport ray. Give --transport ray, or leave --address out."
    if plan.policy_placement == "central" and plan.policy is None:
        return (
            "--policy-placement central needs a policy. Give --policy, or leave --policy-placement "
            "out."
        )
    if plan.transport == "thread" and plan.respawns and plan.step_timeout:
        return (
            "--transport thread: a thread that hangs cannot be ended and replaced. Leave out "
            "--step-timeout or --respawns, or use --transport process."
        )
    return None


def _sampler(resets: list[str] | None) -> dict[str, Draw] | None:
    """Return the draws of reset options by name; None if there are none."""
    pairs = [each.split("=", 1) for each in resets or ()]
    return {name: parsed_draw(text) for name, text in pairs} or None


def default_batch(plan: Plan, ring: int = 0) -> int:
    """Return the number of transitions in a commit.

    It is a multiple of the number of lanes: 64 per lane, within bounds.
    """
    lanes = plan.own_lanes
    batch = max(lanes, min(max(1024, 64 * lanes), 8192) // lanes * lanes)
    if 0 < ring < batch:
        return max(ring // lanes * lanes, min(ring, lanes))
    return batch


def require_usage(args: argparse.Namespace) -> None:
    """Reject invalid combinations of options, and missing ones."""
    if not args.resume and args.env is None:
        args.usage_error("the following arguments are required: ENV")
    if not args.resume and args.frames is None and args.episodes is None:
        args.usage_error("one of the arguments --frames --episodes is required")
    if args.budget_unit == "agent_transitions" and args.episodes is not None:
        args.usage_error("--budget-unit needs --frames, but --episodes was given")
    old = [each.rpartition("=")[0] for each in args.rename or ()]
    if twice := [name for name in old if old.count(name) > 1]:
        args.usage_error(f"--rename: {twice[0]} has two new names. Give one.")
    options = [each.partition("=")[0] for each in args.reset or ()]
    if twice := [name for name in options if options.count(name) > 1]:
        args.usage_error(f"--reset: {twice[0]} is given twice. Give it once.")
    # The manifest has the options that a resumed run leaves out.
    plan = Plan.of(args)
    if not args.resume and (
        wrong := wrong_shard(plan) or wrong_workers(plan, args) or wrong_sharded(plan, args)
    ):
        args.usage_error(wrong)


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll collect`` and return the exit status."""
    require_usage(args)
    if args.log_every is not None and not args.log:
        args.usage_error("--log-every needs --log. Give --log TARGET.")
    if args.accept_copy and not (args.resume or args.append):
        args.usage_error("--accept-copy needs --resume or --append, which open a storage")
    for name in _CHECKPOINTS[1:]:
        if getattr(args, name) is not None and args.checkpoint is None:
            option = "--" + name.replace("_", "-")
            args.usage_error(f"{option} needs --checkpoint. Give --checkpoint.")
    if args.checkpoint_rows is not None and not args.resume:
        args.usage_error("--checkpoint-rows needs --resume, which loads a checkpoint")
    signals = Signals([signal.Signals[args.checkpoint_on]] if args.checkpoint_on else [])
    made: CollectRun | None = None
    with signals.install():
        try:
            with open_output(args) as storage:
                made = CollectRun(args, storage, signals)
                return made.run()
        except KeyboardInterrupt:
            is_over = made is not None and made.is_over
            what = "all rows are committed" if is_over else "nothing was collected yet"
            say(f"tallyroll: stopped by {signals.number.name}; {what}")
            return signals.exit_status
        finally:
            if signals.received:  # exit handlers of other code may print too
                atexit.register(drop_output)
