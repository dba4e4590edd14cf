"""The base class of all collectors: iteration, `collect`, state, seeds and shutdown."""

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from tallyroll.collector.batches.batch_iterator import BatchIterator
from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.batches.collect_guard import CollectGuard, add_end_note
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.run_loop import make_run_loop
from tallyroll.collector.batches.state.env_calls import EnvCalls
from tallyroll.collector.batches.state.restart import Restart
from tallyroll.collector.batches.state.run_seeds import Environments
from tallyroll.collector.batches.state.run_setup import RunSetup
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.batches.stored.resume import Resume
from tallyroll.collector.batches.stored.storing_plan import frames_in
from tallyroll.collector.batches.stored.writer import BatchWriter, ClosedFirstWarning, StorageLike
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import Ledger, known_ticks
from tallyroll.collector.counting.numbering import lane_seed
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.interrupts import defer_signals, release_stand_ins
from tallyroll.collector.options import Options
from tallyroll.collector.options.checks import not_negative, or_none, positive
from tallyroll.collector.options.objects import LayoutName
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.policies.policy import Policy, Weights
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.collector.run_plan import Decision, RunPlan
from tallyroll.collector.user_code import ENDS, user_code
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.files.manifest import UNVERSIONED
from tallyroll.storage.rows.keys import RANDOM_VERSION, format_key, without_next

if TYPE_CHECKING:
    from tallyroll.collector.ext.progress import RunProgress


class Collector(EnvCalls, ABC):
    """An iterable of batches, and a context manager that shuts down at its end.

    **Exceptions.** Signal handlers run at the end of the step in progress. If a handler raises, no
    transition is lost, and the next call continues. Any other exception within a call ends the run:
    complete transitions are stored, and every later call raises `StateError`, which reports which
    rows were not yielded and how to continue. Three kinds of handlers may interrupt a step:
    handlers that have waited for one second, handlers during a ``collect(n)`` of a few steps, and
    handlers of SIGALRM, which implement time limits. If one of these raises, the run ends.

    **Subclasses.** A `RunLoop` makes batches from the blocks of a `TransitionSource`. A subclass
    provides the source in three steps: :meth:`__init__` opens the storage, :meth:`_begin_run` gives
    the run its seed and its ledger once the number of lanes is known, and :meth:`_drive` starts
    taking blocks.
    """

    _options: Options
    _ticks: int | None
    """Simulator ticks per transition, as the environment reports them; None if unknown."""
    _ledger: Ledger
    _restarting: Restart
    _episodes: EpisodeLog
    _lanes: int
    _own_lanes: range
    _frames_per_batch: int
    _last_rows: range | None = None
    _policy: Policy | None
    _rollout: TransitionSource
    _watched: Policy | None = None
    """The policy whose live weights are compared before each batch; None after a warning."""
    _progress: "RunProgress | None" = None
    """The display of ``progress=True``."""
    _release: Callable[[], None] | None = None
    """Releases workers when an error ends the run; it holds no reference to the collector."""

    def __init__(
        self,
        options: Options,
        *,
        replay_buffer: ReplayBuffer | None,
        storage: StorageLike | None,
        resume: Resume,
    ) -> None:
        self._options = options
        self._frames_per_batch = options.frames_per_batch
        sizes = options.total_frames, options.largest_batch
        self._writer = BatchWriter(
            storage, replay_buffer, resume, *sizes, options.part, sharded=options.in_shards
        )

    def _begin_run(self, lanes: int, envs: Environments) -> None:
        """Give the run its ledger, and seed ``lanes`` lanes of ``envs``."""
        self._lanes, self._own_lanes = lanes, self._options.own_lanes(lanes)
        self._beginning = RunSetup(self._options, self._policy, self._writer, lanes, envs)
        self._ledger = self._beginning.ledger

    def _drive(
        self,
        rollout: TransitionSource,
        plan: SlabPlan,
        ranges: Sequence[Range],
        description: Mapping[str, Any],
        *,
        torchrl: TorchrlLayout | None = None,
        **call: Any,
    ) -> None:
        """Prepare to take blocks from ``rollout``, and store ``call`` as provenance.

        ``torchrl`` lays out batches in TorchRL's layout; None for other layouts.
        """
        notes = plan.notes
        if plan.fault is not None:
            if self._writer.storage is not None:
                raise EnvironmentRefused(plan.fault)
            notes = (*notes, f"collected as TorchRL does: {plan.fault}")
        for note in notes:
            warnings.warn(note, stacklevel=4)
        source = RowSource(plan)
        call["unobserved"] = [list(key) for key in source.unobserved]
        call["exclude"] = sorted({format_key(without_next(key)) for key in plan.excluded})
        self._rollout = rollout
        self._ticks = plan.ticks
        if self._options.columns.frame_skip is None:
            call = {**call, "frame_skip": plan.ticks}
        self._run = self._beginning.state(description, plan.spaces, call)
        self._restarting = Restart(self._run, self._beginning, rollout, self._publish)
        self._loop = make_run_loop(
            self._run,
            source,
            rollout,
            ranges,
            count_random=self._policy is not None,
            draws=self._beginning.draws,
            torchrl=torchrl,
        )
        if other := self._beginning.other_classes:
            warnings.warn(other, stacklevel=4)
        self._guard = CollectGuard(self._run, self._loop, self._release)
        self._watched = self._policy if self._acts_here else None
        self._episodes, self._ready = self._run.episodes, self._run.ready
        self._ledger.publish()
        if self._options.progress:  # rich takes a moment to import
            from tallyroll.collector.ext.progress import RunProgress

            self._progress = RunProgress(self._options, self._ledger.stored)
            show = partial(self._progress.show, weakref.proxy(self))
            self._loop.call_after_commits(show)

    # --- attributes -------------------------------------------------------------------------------

    @property
    def restarting(self) -> Restart:
        """Access to the state of the run for `save_checkpoint` and `load_checkpoint`."""
        return self._restarting

    @property
    def policy_versions(self) -> dict[int | str, int]:
        """Number of updates of each of several policies, by id; empty if there is only one."""
        policy = self._policy
        return policy.versions if isinstance(policy, SeveralPolicies) else {}

    @property
    def ledger(self) -> Ledger:
        """The balanced count of the run, as a snapshot that does not change later.

        Any thread may take a snapshot. During a call, it has the counts of the last commit.
        """
        return self._ledger.snapshot()

    @property
    def episodes(self) -> EpisodeLog:
        """Finished episodes, the newest last."""
        return self._episodes

    @property
    def lanes(self) -> int:
        """Number of lanes of all workers together; for a shard, number of lanes of the shard."""
        return self._lanes

    @property
    def shard(self) -> ShardOfRun | None:
        """The part of a run that this collector makes; None if it makes the whole run."""
        return self._options.part

    @property
    def frames_per_batch(self) -> int:
        """Number of transitions per batch."""
        return self._frames_per_batch

    @property
    def frame_skip(self) -> int | str | None:
        """Simulator ticks per transition, or the info key that counts them; None if unknown."""
        given = self._options.columns.frame_skip
        return self._ticks if given is None else given

    @property
    def layout(self) -> LayoutName:
        """Name of the layout of batches."""
        return self._options.layout.name

    @property
    def last_rows(self) -> range | None:
        """Row numbers of the last :meth:`collect`, counted over all rows ever stored.

        None before the first call. Also None if a replay buffer writes to a storage of another
        library, which does not report row numbers, and with ``sharded=True``, because row numbers
        change while shards grow.
        """
        return None if self._options.in_shards else self._last_rows

    @property
    def plan(self) -> RunPlan:
        """The implementation of each part of the run, with the reason why no faster one applies.

        Print it to read it. Decisions that may change during the run are updated at each access.
        """
        storing = {**vars(self._loop.plan), "frames": frames_in(self._writer.storage)}
        return RunPlan(**self._stepping(), counts=self._rollout.counts, **storing)

    @abstractmethod
    def _stepping(self) -> dict[str, Decision]:
        """Return the decisions of the plan about acting and stepping."""

    # --- iteration --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is met or :meth:`stop` is called.

        After an exception, iterating continues or raises `StateError`, as the class documentation
        describes. Iteration never ends as if the budget were met.
        """
        return BatchIterator(self._ready, self._make_ready)

    def _make_ready(self) -> bool:
        """Make the next batch ready; return False if the run is over."""
        if self._watched is not None:
            self._watch(self._watched, self._frames_per_batch)
        if (progress := self._progress) is None:
            return self._guard.make_ready()
        try:
            if not self._run.over:
                progress.show(self)
            more = self._guard.make_ready()
            progress.show(self, last=self._run.over)
        except BaseException:
            progress.close()
            raise
        return more

    def collect(self, n: int) -> int:
        """Step until exactly ``n`` more transitions are committed to the storage; yield nothing.

        This is the interface for off-policy loops, with ``n`` as small as one step of all lanes.
        With ``surplus="carry"``, a call stores the same rows as iterating would, in order of time
        within each lane, and both can be mixed. Surplus transitions of the last step wait for the
        next call. The other kinds of ``surplus``, and ``reset_at_each_iter``, treat one call as a
        batch. ``n`` may exceed the capacity of a ring. A replay buffer or a postproc gets batches
        of at most ``frames_per_batch`` transitions. With ``durability="power"``, each call waits
        for the disk.

        Args:
            n: number of transitions, 1 or more.

        Returns:
            The number of transitions stored: ``n``, or fewer if the budget was met or the run
            stopped. :attr:`last_rows` are their row numbers. If an error is raised, all complete
            and valid transitions are stored first, and :attr:`last_rows` includes them.

        Raises:
            ArgumentError: there is neither a storage nor a replay buffer.
            StateError: the method was called within another call, for example by the policy, or
                after an exception ended the run.

        The errors that iterating raises are raised too.

        Examples:
            >>> from tallyroll.collector import SyncCollector
            >>> from tallyroll.storage import MemmapStorage
            >>> ring = MemmapStorage(max_size=10_000)
            >>> collector = SyncCollector(
            ...     "CartPole-v1", num_envs=8, frames_per_batch=8, total_frames=-1, storage=ring
            ... )
            >>> collector.collect(8), collector.last_rows
            (8, range(0, 8))
            >>> collector.collect(3), collector.ledger.carried  # five wait for the next call
            (3, 5)
            >>> collector.shutdown()
            >>> ring.close()
        """
        if not self._writer.stores:
            raise ArgumentError(
                "collect(n) stores transitions, but the collector has no storage. Give the "
                "collector a storage=, or iterate over it."
            )
        if type(n) is not int or n < 1:
            n = positive("n", n)
        if self._watched is not None:
            self._watch(self._watched, n)
        before = self._ledger.stored
        if self._progress is not None and not self._run.over:
            self._progress.show(self)
        try:
            self._guard.collect(n)
        except BaseException as error:
            if self._progress is not None:
                self._progress.close()
            if isinstance(error, ENDS):  # raised by a signal handler
                raise user_code.error("a call of user code", error) from error
            raise
        finally:
            stored = self._ledger.stored
            self._last_rows = self._writer.stored_run.rows_of(before, stored)
        if self._progress is not None:
            self._progress.show(self, last=self._run.over)
        return stored - before

    def __repr__(self) -> str:
        said = _summary_of(self._run, self.lanes) if hasattr(self, "_run") else "not begun"
        return f"{type(self).__name__}({said})"

    def __len__(self) -> int:
        """Return the number of batches still to come in a run with ``total_frames``.

        Before the first batch of a new run, this is the total number. Rows that were already
        stored, by an earlier process, an earlier iteration or :meth:`collect`, are not counted
        again.
        """
        if self._options.by_agent:
            raise TypeError("a collector whose total_frames are agent transitions has no length")
        if self._options.total_frames is None:
            raise TypeError("a collector without total_frames has no length")
        left = self._options.total_frames - self._ledger.stored
        return max(0, ceil(left / self.frames_per_batch))

    def __enter__(self) -> Self:
        """Return the collector; leaving the block shuts it down."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down. If ``error`` is being raised, add errors of the shutdown to it as a note."""
        try:
            self.shutdown()
        except Exception as again:
            if error is None:
                raise
            add_end_note(error, again)

    def stop(self) -> None:
        """End the run after the step in progress; the complete rows form a last, shorter batch.

        Safe to call from a signal handler or another thread.
        """
        self._run.stop()
        self._rollout.stop()

    def shutdown(self) -> None:
        """End the run, and close the environment and the storage if this collector made them.

        Idempotent. If a storage of the caller is already closed, warn about rows that could not be
        written.
        """
        with user_code("shutdown"), defer_signals():
            try:
                if self._progress is not None:
                    self._progress.show(self, last=True)
                if hasattr(self, "_loop"):
                    release_stand_ins(self._loop)
                    if not self._run.over:
                        self._loop.end()
            except StorageClosed as error:
                warnings.warn(str(error), ClosedFirstWarning, stacklevel=2)
            finally:
                try:
                    self._close_source()
                finally:
                    self._writer.close()

    @abstractmethod
    def _close_source(self) -> None:
        """Close the environments that this collector made. Idempotent."""

    # --- policy and metrics -----------------------------------------------------------------------

    @property
    def _acts_here(self) -> bool:
        """True if the policy of this process, and not a copy of it, chooses the actions."""
        return True

    def _watch(self, policy: Policy, rows: int) -> None:
        """Warn, once per run, if live weights changed before a batch without a new version."""
        if policy.looks_unchanged(rows):
            return
        with defer_signals():  # a handler's exception must not look like the policy's
            changed = policy.changed_unversioned()
        ledger = self._ledger
        if changed and ledger.stored > ledger.random:  # the policy has acted before
            self._watched = None
            self._run.writer.stored_run.note(
                {UNVERSIONED: {"at": ledger.stored, "policy_version": policy.version}}
            )
            warnings.warn(
                "policy: its parameters changed without a call of update_policy_weights_(). It "
                f"acts with the new weights, but rows still get policy_version {policy.version}. "
                "Call collector.update_policy_weights_() after each change, so that each version "
                "names one set of weights",
                stacklevel=4,
            )

    @property
    def policy_version(self) -> int:
        """Number of updates of the policy's weights, or of all policies; -1 if actions are random.

        With ``resume=True``, it starts one above the largest version that the run has stored, so
        that no version names two sets of weights. A loaded state restores its version. Another run
        in the same storage starts with 0.
        """
        return RANDOM_VERSION if self._policy is None else self._policy.version

    def update_policy_weights_(
        self, weights: Weights = None, *, policy_id: int | str | None = None
    ) -> None:
        """Use new weights for every later action, and increment the version.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes the current
                weights of the policy given at construction.
            policy_id: the policy to update, if there are several policies.
        """
        if self._policy is None:
            raise ArgumentError("this collector draws random actions: it has no weights to update")
        with user_code("update_policy_weights_"):
            self._policy.update_weights(weights, policy_id)

    def metrics(self, window: int = 100) -> dict[str, float]:
        """Return a flat dict for any logger: counts of the run, and means over the last episodes.

        ``frames`` (stored transitions), ``ticks``, ``reset_slots``, ``discarded`` and ``episodes``
        (complete episodes) are from :attr:`ledger`; unknown ticks are NaN. ``policy_version`` is
        the current version. The means are over the last ``window`` episodes that ended in this
        collector, and NaN before the first episode.
        """
        positive("window", window)
        recent, ledger = self.episodes[-window:], self.ledger
        ticks = known_ticks(ledger.counts())
        return {
            "frames": ledger.stored,
            "ticks": math.nan if ticks is None else ticks,
            "reset_slots": ledger.reset_slots,
            "discarded": ledger.discarded,
            "episodes": ledger.episodes_complete,
            "policy_version": self.policy_version,
            "return_mean": _mean([episode.total_return for episode in recent]),
            "length_mean": _mean([float(episode.length) for episode in recent]),
            **_of_agents(ledger),
        }

    def _publish(self) -> None:
        """Publish the policy's weights to workers that act with copies; by default do nothing."""

    # --- seeds and state --------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed everything and start new trajectories; return a seed for another collector.

        Transitions that wait for the next batch are discarded.
        """
        checked = or_none(not_negative)("seed", seed)
        with user_code("set_seed"):
            self._guard.restart(partial(self._beginning.seeds.seed, checked))
        return seed if static_seed else lane_seed(seed, self.lanes, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a later collector needs to continue.

        The state has the counts, ids, seeds, policy and generators. Environments cannot be saved:
        after loading, every lane starts a new trajectory, from a seed that was not used before.
        Transitions that wait for the next batch are discarded.
        """
        with user_code("state_dict"):
            return self._restarting.saved()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`; call it before iterating.

        Raises:
            StateError: this collector has already collected, or the state does not fit it.
        """
        with user_code("load_state_dict"):
            self._restarting.go_on_from(state)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _of_agents(ledger: Ledger) -> dict[str, float]:
    """Return the counts of agent transitions, if the budget counts them."""
    names = () if ledger.agent_budget is None else ("agent_transitions", "agent_surplus")
    return {name: getattr(ledger, name) for name in names}


def _summary_of(run: RunState, lanes: int) -> str:
    total = None if run.options.by_agent else run.options.total_frames
    storage = run.writer.storage
    of = "" if total in (None, -1) else f" of {total:,}"
    where = "" if storage is None else f", in {storage!r}"
    said = f"{lanes} lane{'s' * (lanes > 1)}, {run.ledger.shown.stored:,}{of} transitions{where}"
    return f"{said}, ended" if run.over else said
