"""``tallyroll collect``: run a collector, show how far it is, report what it made."""

import argparse
import shlex
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.cli.errors import CommandError
from tallyroll.collector.cli.escaped_text import pasteable
from tallyroll.collector.cli.plan import (
    OutputPath,
    Plan,
    Target,
    import_registry,
    load_policy,
    open_target,
)
from tallyroll.collector.cli.progress import progress_for, reading_progress
from tallyroll.collector.cli.report import (
    ledger_table,
    plain_console,
    readable_bytes,
    text_of,
    times,
)
from tallyroll.collector.cli.streams import emit, say
from tallyroll.collector.multiprocess import MultiprocessCollector
from tallyroll.collector.slab.info import parsed
from tallyroll.collector.sync import SyncCollector
from tallyroll.storage import StorageLocked
from tallyroll.storage.files.paths import free_bytes

_MOST_BATCH = 8192


class Signals:
    """SIGINT, SIGTERM and SIGHUP, taken over for a while.

    The first one calls what :meth:`ask` was given, and KeyboardInterrupt is raised where there
    is nothing to ask yet; a second one always raises it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._stop: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def ask(self, stop: Callable[[], None] | None) -> None:
        """Let the first signal call ``stop``."""
        self._stop = stop

    def __enter__(self) -> Self:
        """Install the handlers, where that is possible: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_IGN:  # nohup means it
                    continue
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received is not None, signal.Signals(number)
        if self._stop is None or again:
            raise KeyboardInterrupt
        self._stop()

    @property
    def exit_status(self) -> int:
        """The exit status of a process that a signal ended, as shells have it."""
        return 128 + (self.received or signal.SIGINT)


class CollectRun:
    """One ``tallyroll collect``: its plan, its storage, and what is said on the way."""

    def __init__(self, args: argparse.Namespace, target: Target) -> None:
        self.out: str = args.out
        self.target, self.resume = target, args.resume and target.run is not None
        self.anew: bool = args.resume and target.run is None
        self.quiet: bool = args.quiet
        self.finalize: bool = args.finalize
        self.options = ["--format", args.format] if args.format else []
        self.options += ["--append"] if args.append else []
        self.options += ["--finalize"] if args.finalize else []
        self.plan = self._planned(args)
        self._require_capacity()
        if wrong := _wrong_workers(self.plan, args):
            raise CommandError(wrong)
        self.began = 0
        """Rows of this run that were there before."""
        self.done, self.report = False, ""

    def _planned(self, args: argparse.Namespace) -> Plan:
        given = Plan.of(args)
        if self.target.run is None:
            self._require_complete(given)
            return given
        before = Plan.of_run(self.target.run)
        plan = given.or_else(before)
        self._require_complete(plan)
        self._refuse_imports(given, before)
        if given.episodes is not None and before.frames is not None:
            raise CommandError(
                "--resume: the run was begun with --frames, so that --episodes cannot end it; give "
                "--frames, or leave both out"
            )
        if given.num_envs is not None and given.num_envs != (before.num_envs or 1):
            raise CommandError(
                f"--resume: the run has {before.num_envs or 1} lanes, and --num-envs "
                f"{given.num_envs} was given; leave it out, or use --append for a new run"
            )
        call = self.target.run.get("call")
        policy = call.get("policy") if isinstance(call, dict) else None
        if policy is not None and plan.policy is None:
            raise CommandError(
                f"--resume: the run was made with a policy ({policy}), which its manifest cannot "
                "name; give it with --policy module:attr"
            )
        if policy is None and plan.policy is not None:
            raise CommandError(
                "--resume: the run was made with random actions and --policy was given; leave it "
                "out, or use --append for a new run"
            )
        return plan

    def _refuse_imports(self, given: Plan, before: Plan) -> None:
        """Nothing that a storage names is imported: the command line has to name it again."""
        env_module = given.env is None and ":" in (before.env or "")
        if not env_module and (given.policy is not None or before.policy is None):
            return
        raise CommandError(
            f"--resume: the manifest in {self.out} names code of yours, which is not run on a "
            "storage's word; if it is right, name it again:",
            self._resume_command(given.or_else(before)),
        )

    def _require_complete(self, plan: Plan) -> None:
        if plan.env is None or (plan.frames is None and plan.episodes is None):
            missing = "ENV" if plan.env is None else "--frames or --episodes"
            raise CommandError(
                f"{self.out}: there is nothing to take {missing} from; give {missing}"
            )

    def _require_capacity(self) -> None:
        storage = self.target.storage
        if self.plan.frames is None and not storage.grows:
            raise CommandError(
                f"{self.out}: an HDF5 file is made for a number of rows, which --episodes does not "
                "give; use --frames, or --format memmap or zarr"
            )

    def note(self, text: str, below: str = "") -> None:
        """One line to whoever watches, and a command below it."""
        if not self.quiet:
            say(f"tallyroll: {text}", below=below)

    # --- collecting -------------------------------------------------------------------------------

    def collect(self, signals: Signals) -> int:
        """Collect what is missing; returns the exit status."""
        if self.resume and self._is_complete():
            self.done = True
            return 0
        assert self.plan.env is not None
        import_registry(self.plan.env)
        policy = load_policy(self.plan.policy)
        self._warn_of_repetition()
        self.target.storage.plan = self.plan
        with self._collector(policy) as collector:
            self.began = collector.ledger.stored
            self._say_what_it_takes(collector)
            signals.ask(collector.stop)
            started = time.monotonic()
            with progress_for(collector, self.plan, self.target.storage, self.quiet) as progress:
                for _ in collector:
                    progress.update()
            seconds = time.monotonic() - started
            self.done = self._is_done(collector)
        signals.ask(None)
        self.report = self._reported(collector, seconds)
        return 0 if self.done else signals.exit_status

    def finish(self) -> None:
        """Finalize the storage if that was asked for, and show the report."""
        if self.done and self.finalize:
            with reading_progress("finalizing", self.quiet) as progress:
                self.target.storage.finalize(_of_bytes(progress, self.target.storage.nbytes))
        if not self.quiet and self.report:
            emit(self.report)

    def _collector(self, policy: Any) -> Collector:
        plan = self.plan
        assert plan.env is not None
        arguments: dict[str, Any] = {
            "frames_per_batch": plan.frames_per_batch
            or default_batch(plan, self.target.storage.ring),
            "total_frames": plan.frames,
            "total_episodes": plan.episodes,
            "num_envs": plan.lanes,
            "env_kwargs": plan.env_kwargs,
            "seed": None if self.resume and plan.seed == self._recorded_seed() else plan.seed,
            "storage": self.target.storage,
            "resume": self.resume,
            "max_frames_per_traj": plan.max_frames_per_traj,
            "info_keys": tuple(parsed(each) for each in plan.info_keys or ()),
            "rename": dict(each.rsplit("=", 1) for each in plan.rename or ()),
            "frame_skip": 1 if plan.frame_skip is None else plan.frame_skip,
            "validate": plan.validate or "raise",
            "finals": plan.finals or "check",
        }
        if not plan.workers:
            return SyncCollector(plan.env, policy, **arguments)
        return MultiprocessCollector(
            plan.env,
            policy,
            num_workers=plan.workers,
            mode=plan.mode or "sync",  # type: ignore[arg-type]  # argparse checked it
            on_worker_death="respawn" if plan.respawns else "raise",
            max_respawns=plan.respawns or 0,
            step_timeout=plan.step_timeout,
            **arguments,
        )

    def _recorded_seed(self) -> Any:
        return None if self.target.run is None else self.target.run.get("seed")

    def _is_done(self, collector: Collector) -> bool:
        ledger = collector.ledger
        if self.plan.frames is not None:
            return ledger.stored >= self.plan.frames
        return ledger.episodes_complete >= (self.plan.episodes or 0)

    def _is_complete(self) -> bool:
        """Say so where the run that is to be continued has all it was asked for."""
        run_rows = self.target.storage.head - self.target.first_row
        if self.plan.frames is None or run_rows < self.plan.frames:
            return False
        if run_rows > self.plan.frames:
            raise CommandError(
                f"--resume: the run in {self.out} has {run_rows:,} frames already, more than the "
                f"{self.plan.frames:,} asked for; give a larger --frames, or another --out"
            )
        self.note(f"{self.out} is complete already: it has all {run_rows:,} frames")
        return True

    def _warn_of_repetition(self) -> None:
        storage, plan = self.target.storage, self.plan
        if self.resume or plan.seed is None or not storage.head:
            return
        for run in storage.manifest["runs"]:
            before = Plan.of_run(run)
            if (before.env, before.policy, run.get("seed")) == (plan.env, plan.policy, plan.seed):
                self.note(
                    f"warning: an earlier run in {self.out} has the seed {plan.seed} too, so "
                    "this one may repeat its data; give another --seed, or leave it out"
                )
                return

    # --- reporting ----------------------------------------------------------------------------

    def _say_what_it_takes(self, collector: Collector) -> None:
        storage, plan = self.target.storage, self.plan
        if self.anew:
            self.note(f"{self.out} held no run to resume: starting anew")
        row_nbytes = storage.schema.row_nbytes
        takes = f"{row_nbytes:,} bytes a row"
        if plan.frames is not None:
            missing = plan.frames - collector.ledger.stored
            takes = (
                f"{missing:,} rows of {row_nbytes:,} bytes: {readable_bytes(missing * row_nbytes)}"
            )
        free = readable_bytes(free_bytes(storage.path))
        self.note(f"{takes}; {free} are free beside what is reserved for them in {self.out}")

    def _reported(self, collector: Collector, seconds: float) -> str:
        console = plain_console()
        show = partial(console.print, soft_wrap=True)
        ledger = collector.ledger
        fresh = ledger.stored - self.began
        rate = f"{fresh / seconds:,.0f}/s" if seconds > 0 else "at once"
        console.print()
        already = f" ({self.began:,} of them were there before)" if self.began else ""
        show(
            f"{ledger.stored:,} frames of {self.plan.env}{already}, {seconds:.1f} s, {rate}, "
            f"{readable_bytes(self.target.storage.nbytes)} in {self.out}"
        )
        console.print(ledger_table(collector))
        if ledger.respawned:
            show(
                f"workers were replaced {times(ledger.respawned)}; what they had not handed over "
                "is lost, and was collected anew"
            )
        if resumed := ledger.incarnation - ledger.respawned:
            show(
                f"resumed {times(resumed)}; of a process that was killed, the counts are those of "
                "its last commit"
            )
        if self.done:
            console.print()
            show(f"what is in it:   {self._inspect_command()}")
            show("more of the same: " + self._append_command())
        return text_of(console)

    def _inspect_command(self) -> str:
        return pasteable(shlex.join(["tallyroll", "inspect", self.out]))

    def _append_command(self) -> str:
        return replace(self.plan, seed=None).command(self.out, "--append")

    def _resume_command(self, plan: Plan | None = None) -> str:
        # All else stands in the manifest.
        plan = plan or self.plan
        options = ["--finalize"] if self.finalize else []
        return Plan(env=plan.env, policy=plan.policy).command(self.out, "--resume", *options)

    def failed(self, error: Exception) -> None:
        """Say what an error left, and how to go on."""
        committed = f"{self.target.storage.head:,} rows are committed in {self.out}"
        if isinstance(error, StorageLocked):
            self.note(
                f"{committed}, perhaps some of another process. Before you go on, see whose the "
                "last run is:",
                self._inspect_command(),
            )
            if not self.quiet:
                say("If it is this one, go on with", below=self._resume_command())
            return
        self.note(
            f"{committed}; once the cause of the error is gone, go on with",
            self._resume_command(),
        )

    def stopped(self, signals: Signals) -> None:
        """Say what a signal left, and how to go on."""
        name = (signals.received or signal.SIGINT).name
        has_rows = self.target.storage.head > self.target.first_row
        kept = "what is complete is committed" if has_rows else "nothing was collected yet"
        if self.resume or self.target.storage.begun:
            how = self._resume_command()
        else:
            how = self.plan.command(self.out, *self.options)
        say(f"tallyroll: stopped by {name}; {kept}. Go on with", below=how)


def _wrong_workers(plan: Plan, args: argparse.Namespace) -> str | None:
    """The fault of the options for workers; empty if there is none."""
    if (plan.workers or 0) > plan.lanes:
        return (
            f"--workers: expected at most as many as there are lanes, {plan.lanes}, got "
            f"{plan.workers}; give fewer, or a larger --num-envs"
        )
    for name in ("mode", "respawns", "step_timeout"):
        if not plan.workers and getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            return f"{option} is for workers, and there are none; give --workers"
    return None


def default_batch(plan: Plan, ring: int = 0) -> int:
    """Transitions a commit: 64 a lane, within bounds, a multiple of the lanes."""
    lanes = plan.lanes
    batch = max(lanes, min(max(1024, 64 * lanes), _MOST_BATCH) // lanes * lanes)
    if 0 < ring < batch:
        return max(ring // lanes * lanes, min(ring, lanes))
    return batch


def run(args: argparse.Namespace) -> int:
    """Carry out ``tallyroll collect``; returns the exit status."""
    if not args.resume and args.env is None:
        args.usage_error("the following arguments are required: ENV")
    if not args.resume and args.frames is None and args.episodes is None:
        args.usage_error("one of the arguments --frames --episodes is required")
    if args.accept_copy and not (args.resume or args.append):
        args.usage_error("--accept-copy is for --resume and --append, which open a storage")
    old = [each.rpartition("=")[0] for each in args.rename or ()]
    if twice := [name for name in old if old.count(name) > 1]:
        args.usage_error(f"--rename: {twice[0]} is given two new names; give one")
    # What a resumed run leaves out stands in its manifest.
    if not args.resume and (wrong := _wrong_workers(Plan.of(args), args)):
        args.usage_error(wrong)
    with Signals() as signals:
        try:
            target = open_target(place_of(args), append=args.append, resume=args.resume)
        except KeyboardInterrupt:
            return signals.exit_status
        with target.storage:
            return _collect(args, target, signals)


def _collect(args: argparse.Namespace, target: Target, signals: Signals) -> int:
    work = None
    try:
        work = CollectRun(args, target)
        status = work.collect(signals)
    except KeyboardInterrupt:
        status = signals.exit_status
    except Exception as error:
        if work is not None and target.storage.head > target.head:
            work.failed(error)
        raise
    if work is not None:
        # The rows are complete, or as complete as they could be: what fails here is said as it is.
        try:
            work.finish()
        finally:
            if status:
                work.stopped(signals)
    return status


def place_of(args: argparse.Namespace) -> OutputPath:
    """The path and options of the storage on a command line."""
    return OutputPath(args.out, args.format, args.durability, args.max_size, args.accept_copy)


def _of_bytes(
    progress: Callable[[int, int], None] | None, total: int
) -> Callable[[int], None] | None:
    """Turns "so many more" into "so many of ``total``"."""
    if progress is None:
        return None
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(min(done, total), total)

    return add
