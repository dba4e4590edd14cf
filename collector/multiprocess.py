"""The collector of many processes, or threads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast

import torch
from gymnasium.vector import VectorEnv
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.base import Collector
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.state.restart import Restart
from tallyroll.collector.batches.stored.resume import Resume
from tallyroll.collector.batches.stored.writer import StorageLike
from tallyroll.collector.counting.ledger import Budget
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.setup.statistics import judge_apart
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.options import Postproc, Surplus
from tallyroll.collector.options.objects import (
    Checks,
    Columns,
    DeviceLike,
    Devices,
    Layout,
    LayoutName,
)
from tallyroll.collector.options.resets import Resets
from tallyroll.collector.options.sharding import Shard
from tallyroll.collector.policies.policy import Weights, on_device
from tallyroll.collector.policies.random_actions import all_drawn
from tallyroll.collector.policies.several.entries import Policies
from tallyroll.collector.policies.several.openings import Openings
from tallyroll.collector.policies.several.policies import (
    SeveralPolicies,
    given_policy,
    openings_of,
    policy_of,
)
from tallyroll.collector.policies.slot_rng import width_of
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.user_code import user_code
from tallyroll.collector.workers.central import CentralPolicy, settle_here
from tallyroll.collector.workers.leases.budget import LeaseBudget
from tallyroll.collector.workers.leases.source import Leases
from tallyroll.collector.workers.local.limits import require_guard
from tallyroll.collector.workers.local.processes import ProcessTransport
from tallyroll.collector.workers.local.threads import ThreadTransport
from tallyroll.collector.workers.lockstep import LockstepDriver
from tallyroll.collector.workers.messages import Job
from tallyroll.collector.workers.pool import WorkerPool
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.startup.jobs import per_worker, pickled
from tallyroll.collector.workers.startup.worker_startup import WorkerStartup
from tallyroll.collector.workers.transport import Link, Place, Transport
from tallyroll.collector.workers.worker_options import (
    ActorOptions,
    Actors,
    MakesTransport,
    Mode,
    MoreOfActors,
    MoreOfWorkers,
    Processes,
    SupervisedOptions,
    Supervision,
    TransportName,
    WorkerOptions,
)
from tallyroll.storage import fast_paths

if TYPE_CHECKING:
    from tallyroll.collector.ext.sharded_leases import ShardedLeases

Factory = Callable[[], EnvBase | VectorEnv]
_SEGMENTS = 2
"""In async mode a worker fills one while the other is read."""


class MultiprocessCollector(Collector):
    """Collects exactly ``total_frames`` transitions with environments in worker processes.

    Examples:
        In a file, which workers import, below ``if __name__ == "__main__":``::

            with MultiprocessCollector(
                "CartPole-v1", num_envs=8, num_workers=2, frames_per_batch=100, total_frames=250
            ) as collector:
                for batch in collector:
                    print(len(batch))

    What it yields, counts and stores is what :class:`SyncCollector` would; arguments that are not
    described here are those of that class. Workers step their lanes and fill shared memory; this
    process alone counts and writes.

    With ``mode="sync"`` all workers advance by the same number of slots, and batches are those
    that one process would give: with a policy that chooses a lane's action by that lane alone and
    deterministically, bit for bit. Every action that is chosen after
    :meth:`update_policy_weights_` returns uses the new weights. With ``mode="async"`` workers
    wait neither for one another nor for the consumer, until what they filled is two leases ahead:
    rows come as they come, still exactly that many, each lane's in order.

    Args:
        create_env_fn: a Gymnasium id, ``SYSTEM:ID`` or a function that makes one Gymnasium
            environment, whose ``num_envs`` lanes (None: one a worker) are split over the workers;
            or a factory that every worker calls, or a list of factories, one a worker.
            Environments and policies travel by cloudpickle.
        policy: as for :class:`SyncCollector`. Weights, buffers included, reach the workers by
            shared memory; only those of an ``nn.Module`` can. With ``policy_placement="central"``
            it acts here, for the lanes of many workers in one call; see :class:`Devices`.
        num_workers: processes, or threads; with a list of factories, as many as those.
        mode: ``"sync"`` or ``"async"``.
        sharded: each worker keeps its rows in a storage of its own, and answers with counts alone:
            what a row costs here does not depend on its size. ``storage`` is a path, where a
            manifest says which rows count; ``open_storage`` reads them as one. With
            ``mode="async"``, and ``collect(n)`` in the place of iterating.
        transport: ``"process"``, or ``"thread"``: workers are threads of this process, which start
            at once and pay where environments wait (for a simulator, a network) and release the
            interpreter; else one keeps the others from running. Random actions and deterministic
            policies give the rows of processes; a policy that draws from torch's generator shares
            it with the other threads, in any order. A thread cannot be ended: one that completes
            no step within ``step_timeout`` ends the run and is not replaced, and
            :meth:`shutdown` waits up to 10 seconds for steps under way, then warns. Or a function
            that returns a transport of your own for pickled jobs, one a worker, in processes of
            their own.
        processes: how worker processes start, and their threads; see :class:`Processes`. By
            default they are forks of a server that has imported torch and TorchRL once.
        supervision: how workers are watched, and replaced; see :class:`Supervision`.
        more: the fields of such objects as keywords: ``on_worker_death="respawn"``.

    Raises:
        ArgumentError, EnvironmentRefused, PolicyError, StorageError: before any file changes.
        SilentReset: while iterating: the environment resets itself; see :class:`Checks`.
        WorkerError: a worker failed, here or while iterating; what was committed is safe.
    """

    _options: SupervisedOptions

    def __init__(
        self,
        create_env_fn: str | Factory | Sequence[Factory],
        policy: Policies | None = None,
        *,
        frames_per_batch: int,
        total_frames: int | None = None,
        num_envs: int | None = None,
        num_workers: int | None = None,
        mode: Mode = "sync",
        sharded: bool = False,
        seed: int | None = None,
        storage: StorageLike | None = None,
        device: DeviceLike = None,
        total_episodes: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        resume: Resume = False,
        replay_buffer: ReplayBuffer | None = None,
        layout: LayoutName | Layout = "rows",
        surplus: Surplus = "carry",
        init_random_frames: int = 0,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        max_frames_per_traj: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Postproc | None = None,
        columns: Columns | None = None,
        checks: Checks | None = None,
        devices: Devices | None = None,
        resets: Resets | None = None,
        shard: Shard | str | None = None,
        transport: TransportName | MakesTransport = "process",
        processes: Processes | None = None,
        supervision: Supervision | None = None,
        **more: Unpack[MoreOfWorkers],
    ) -> None:
        options = WorkerOptions.of(locals())
        if options.transport == "process":
            require_guard()
        self._transport = transport
        kept_in = replay_buffer, storage, resume
        with user_code("making the collector"):
            self._start(create_env_fn, policy, num_workers, options, *kept_in)

    def _start(
        self,
        create_env_fn: str | Factory | Sequence[Factory],
        policy: Policies | None,
        num_workers: int | None,
        options: SupervisedOptions,
        *kept_in: Any,
    ) -> None:
        """Start the workers; ``kept_in``: a replay buffer, a storage, and whether it resumes."""
        factories = per_worker(create_env_fn, num_workers, options)
        self._num_workers, self._mode = len(factories), options.mode
        self._one_system = isinstance(create_env_fn, str)
        central = options.acts_centrally
        where = options.policy_device if central else None
        self._policy = policy_of(given_policy(policy), where, None)
        if central and self._policy is not None:  # else the options refuse it
            settle_here(self._policy)
        copied = None
        if self._policy is not None:
            copied = on_device(self._policy.source, torch.device("cpu"))
        threads = self._threads_of(options)
        jobs = [
            Job(create, copied, options.for_worker(lanes), threads, fast_paths.off())
            for create, lanes in factories
        ]
        sent = [pickled(job) for job in jobs]
        replay_buffer, storage, resume = kept_in
        super().__init__(options, replay_buffer=replay_buffer, storage=storage, resume=resume)
        try:
            self._engine = self._transport_of(sent, options)
            self._worker_pool = WorkerPool(self._engine, len(jobs), options.supervision)
            self._release = partial(_release, self._worker_pool, self._engine)
            self._prepare(policy, options.supervision.respawns)
        except BaseException:
            self.shutdown()
            raise

    def _threads_of(self, options: Any) -> int | None:
        """Threads of each worker's libraries; None: workers are threads themselves."""
        if options.transport == "thread":
            return None
        cores = len(os.sched_getaffinity(0))
        return options.processes.threads_per_worker or max(1, cores // self.num_workers)

    def _transport_of(self, jobs: Sequence[bytes], options: Any) -> Transport[Any]:
        """Return a transport that runs a worker for each job."""
        if options.transport == "thread":
            return ThreadTransport(jobs)
        if callable(options.transport):
            made: Transport[Any] = options.transport(jobs)
            return made
        start, threads = options.processes.start_method, self._threads_of(options)
        return ProcessTransport(jobs, start_method=start, threads=threads or 1)

    def _prepare(self, policy: Any, respawns: int) -> None:
        self._startup = WorkerStartup(self._worker_pool, respawns, self._options.part)
        description = self._startup.made()
        if self._options.sharded:
            self._look_for_shards()
        if isinstance(self._policy, SeveralPolicies):
            self._policy.bind_whole(sum(self._startup.lanes), self._options.part)
        self._begin_run(sum(self._startup.lanes), self._startup)
        self._startup.ledger = self._ledger
        plan, called = self._startup.planned.plan, self._startup.planned.called
        if self._options.acts_centrally:
            assert self._policy is not None and called is not None
            exploration, in_step = self._options.exploration_type, self._mode == "sync"
            self._worker_pool.central = CentralPolicy(
                self._policy, called, exploration, in_step=in_step
            )
        _check_part_stepping(self._options, plan.reset_slots, self.num_workers)
        if plan.arrivals and (self._mode == "sync" or self._options.total_episodes is not None):
            raise EnvironmentRefused(
                "lanes that come back in any order fill no slots in step, and workers have no "
                'episodes of them in turn: pass mode="async" and total_frames, or SyncCollector'
            )
        if plan.arrivals and self._options.init_random_frames:
            raise EnvironmentRefused(
                "init_random_frames: where lanes come back in any order, those of workers are not "
                "the first ones; leave it out, or use SyncCollector"
            )
        if self._startup.apart:
            judge_apart(self._startup.apart, self.num_workers, self._options.layout.name)
        if self._options.sharded:
            self._refuse_unsharded(plan)
            rollout: Any = self._sharded_leases()
        else:
            rollout = self._workers_rollout() if self._mode == "sync" else self._leases()
        call = {"num_workers": self.num_workers, "mode": self._mode, **self._transport_call()}
        if self._options.sharded:
            call["sharded"] = True
        if self._options.acts_centrally:
            call["policy_placement"] = "central"
        self._drive(
            rollout,
            plan,
            self._startup.ranges,
            description,
            torchrl=self._torchrl_layout(plan),
            **call,
        )
        if self._options.sharded:
            from tallyroll.collector.ext.sharded_leases import GoesOnFromStorage

            self._restarting = cast(Restart, GoesOnFromStorage())

    def _transport_call(self) -> dict[str, Any]:
        """Return what of the transport is kept as provenance."""
        if self._transport == "process":
            return {}
        own = callable(self._transport)
        named = getattr(self._transport, "__qualname__", type(self._transport).__qualname__)
        return {"transport": named if own else self._transport}

    def _stepping(self) -> dict[str, Decision]:
        return {**self._startup.decisions}

    def _torchrl_layout(self, plan: SlabPlan) -> TorchrlLayout | None:
        if self._options.layout.name != "torchrl":
            return None
        apart = self._mode == "async"
        shapes = [(lanes,) if plan.batched else () for lanes in self._startup.lanes]
        if self._one_system and not apart:  # however many processes step it
            return TorchrlLayout(self._options, plan, [(self.lanes,)])
        return TorchrlLayout(self._options, plan, shapes, stacked=not apart, apart=apart)

    def _make_place(self, slots: int, segments: int) -> tuple[Place, Share]:
        """The memory of slabs with so many slots, known to the workers."""
        plan, part = self._startup.planned.plan, self._options.part
        share = Share(self._startup.lanes, slots, segments)
        if part is not None:
            share = replace(share, first_lane=part.lanes.start, run_lanes=part.run_lanes)
        local = self._policy is not None and not self._options.acts_centrally
        module = self._policy.module if self._policy is not None and local else None
        place = self._worker_pool.transport.place(share, plan, module)
        self._weights = place.weights
        self._publish()
        self._startup.bind(share, place)
        return place, share

    def _workers_rollout(self) -> TransitionSource:
        planned, plan = self._startup.planned, self._startup.planned.plan
        place, _ = self._make_place(plan.slots(self.lanes, self.frames_per_batch), 0)
        lanes = self._options.run_lanes(self.lanes)
        draws = all_drawn(planned.actions, lanes) if planned.drawn_ahead else None
        driver = LockstepDriver(
            self._worker_pool,
            place.slab_of_all(),
            plan,
            draws=draws,
            width=width_of(planned.actions.values(), lanes),
            rng=self._beginning.seeds.rng,
            startup=self._startup,
        )
        return self._beginning.rollout(driver, plan)

    def _leases(self) -> TransitionSource:
        plan, most = self._startup.planned.plan, max(self._startup.lanes)
        whole = self._options.layout.name == "torchrl"
        # A batch takes one lease of every worker, or, in TorchRL's layout, one of any.
        frames = self.frames_per_batch if whole else ceil(self.frames_per_batch / self.num_workers)
        slots = plan.slots(most, frames, slabs=_SEGMENTS * self.num_workers)
        if whole:
            slots = max(slots, ceil(frames / min(map(plan.columns, self._startup.lanes))))
        place, share = self._make_place(slots, _SEGMENTS)
        budget = LeaseBudget(
            plan,
            self._ledger,
            workers=self.num_workers,
            frames=frames,
            # Agent transitions are counted as they come; what was stepped ahead is discarded.
            budget=Budget(None if self._options.by_agent else self._options.total_frames),
            episodes=self._options.total_episodes,
            openings=openings_of(self._policy)
            or Openings.of_run(self._beginning.random_frames, self._options.run_lanes(self.lanes)),
            exact=self._options.surplus == "never_step",
        )
        return Leases(self._worker_pool, self._startup, place, share, budget)

    # --- rows in shards of the workers ------------------------------------------------------------

    def _look_for_shards(self) -> None:
        """Collect rows again whose shards are gone since."""
        from tallyroll.collector.ext.sharded_leases import lost_since

        if lost := lost_since(self._startup, self._writer.storage):
            shown = "; ".join(lost[:3]) + ("" if len(lost) <= 3 else f"; and {len(lost) - 3} more")
            warnings.warn(
                f"{len(lost)} shards are lost, whose rows are collected again: {shown}",
                stacklevel=4,
            )

    def _refuse_unsharded(self, plan: SlabPlan) -> None:
        if plan.arrivals:
            raise EnvironmentRefused(
                "sharded=True does not go with lanes that come back in any order; leave it out"
            )
        if isinstance(self._policy, SeveralPolicies):
            raise ArgumentError("sharded=True does not go with several policies; give one")

    def _sharded_leases(self) -> ShardedLeases:
        from tallyroll.collector.ext.sharded_leases import ShardedLeases

        frames = ceil(self.frames_per_batch / self.num_workers)
        plan, most = self._startup.planned.plan, max(self._startup.lanes)
        self._make_place(plan.slots(most, frames, slabs=self.num_workers), 1)
        return ShardedLeases(self._worker_pool, self._startup, self._writer.storage, frames)

    # --- workers, weights, seeds, state -----------------------------------------------------------

    @property
    def _acts_here(self) -> bool:
        return self._options.acts_centrally

    @property
    def num_workers(self) -> int:
        """Workers: processes, or threads."""
        return self._num_workers

    @property
    def env(self) -> NoReturn:
        """There is none here: each worker has environments of its own."""
        raise AttributeError(
            "env: environments are in the workers; env_call, env_get and env_set reach them"
        )

    @property
    def _links(self) -> list[Link]:
        return [member.link for member in self._worker_pool.members]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers; none where they are threads."""
        return [link.pid for link in self._links if link.pid is not None]

    def _close_source(self) -> None:
        try:
            if hasattr(self, "_worker_pool"):
                self._worker_pool.close()
        finally:
            if hasattr(self, "_engine"):
                self._engine.close()

    def update_policy_weights_(
        self, weights: Weights = None, *, policy_id: int | str | None = None
    ) -> None:
        """Use new weights, and count the version up.

        With ``mode="sync"`` every action chosen after this returns uses them; with ``"async"`` a
        worker takes them over before its next action. ``policy_version`` of each row says which
        weights chose its action.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes those that
                the policy given at construction has now. Buffers travel too.
            policy_id: of several policies, which one.
        """
        policy = self._policy
        if isinstance(policy, SeveralPolicies):
            policy = policy.of_id(policy_id)
        central = self._options.acts_centrally
        if policy is not None and not (central or isinstance(policy.module, nn.Module)):
            raise ArgumentError(
                f"update_policy_weights_: the policy is a {type(policy.source).__name__}, "
                "whose copies in the workers no weights can reach; make it an nn.Module "
                "(TensorDictModule)"
            )
        acts = self._worker_pool.central
        with nullcontext() if acts is None else acts.turn:
            super().update_policy_weights_(weights, policy_id=policy_id)
        try:
            self._publish()
        except BaseException:
            if self._policy is not None:  # no worker has them
                self._policy.take_back(policy_id)
            raise

    def _publish(self) -> None:
        if self._policy is not None and not self._options.acts_centrally:
            self._weights.publish(self._policy.module, self._policy.version)


class RayCollector(MultiprocessCollector):
    """Collects exactly ``total_frames`` transitions with environments in Ray actors, on any node.

    Examples:
        On this machine alone; ``address="auto"`` is for a cluster::

            with RayCollector(
                "CartPole-v1", num_envs=8, num_workers=2, frames_per_batch=100, total_frames=250
            ) as collector:
                for batch in collector:
                    print(len(batch))

    What it yields, counts and stores is what :class:`MultiprocessCollector` would, whose workers
    are processes of this machine; arguments that are not described here are those of that class.
    A storage that one of them wrote the other resumes. Rows come through Ray's object store, with
    the answer to each lease; this process alone counts and writes. Few of the steps that a dead
    worker made are known here: ``ledger.lost`` says at least so many.

    Each node needs the same versions of the packages as this process; others are refused by name.

    Args:
        create_env_fn: as for :class:`MultiprocessCollector`; it is called on the nodes.
        policy: as for :class:`MultiprocessCollector`; weights are put into the object store once
            a version, and each action is chosen by one version.
        num_workers: actors; with a list of factories, as many as those.
        mode: ``"sync"`` or ``"async"``.
        sharded: as for :class:`MultiprocessCollector`: each actor writes to the disk of its node,
            at the path of ``storage`` there.
        actors: where Ray is, and what its actors need; see :class:`Actors`.
        supervision: how workers are watched, and replaced; see :class:`Supervision`.
        more: the fields of such objects as keywords: ``address="auto"``.

    Raises:
        MissingExtra: Ray is not installed.
        ArgumentError: also where no cluster answers at the address.
        EnvironmentRefused, PolicyError, StorageError: before any file changes.
        WorkerError: a worker failed, here or while iterating; what was committed is safe.
    """

    _options: ActorOptions
    _engine: Any

    def __init__(
        self,
        create_env_fn: str | Factory | Sequence[Factory],
        policy: Policies | None = None,
        *,
        frames_per_batch: int,
        total_frames: int | None = None,
        num_envs: int | None = None,
        num_workers: int | None = None,
        mode: Mode = "sync",
        sharded: bool = False,
        seed: int | None = None,
        storage: StorageLike | None = None,
        device: DeviceLike = None,
        total_episodes: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        resume: Resume = False,
        replay_buffer: ReplayBuffer | None = None,
        layout: LayoutName | Layout = "rows",
        surplus: Surplus = "carry",
        init_random_frames: int = 0,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        max_frames_per_traj: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Postproc | None = None,
        columns: Columns | None = None,
        checks: Checks | None = None,
        devices: Devices | None = None,
        resets: Resets | None = None,
        shard: Shard | str | None = None,
        actors: Actors | None = None,
        supervision: Supervision | None = None,
        **more: Unpack[MoreOfActors],
    ) -> None:
        needs("ray", "ray", "actors of RayCollector")
        options = ActorOptions.of(locals())
        kept_in = replay_buffer, storage, resume
        with user_code("making the collector"):
            self._start(create_env_fn, policy, num_workers, options, *kept_in)

    def _threads_of(self, options: Any) -> int:
        return max(1, int((options.actors.actor_options or {}).get("num_cpus", 1)))

    def _transport_of(self, jobs: Sequence[bytes], options: Any) -> Transport[Any]:
        # Ray is an extra, and takes a second to import.
        from tallyroll.collector.ext.ray.transport import RayTransport

        return RayTransport(jobs, options.actors)

    def _transport_call(self) -> dict[str, Any]:
        return {"transport": "ray", "nodes": self._engine.nodes}


def _release(pool: WorkerPool, engine: Transport[Any]) -> None:
    """End the workers of a run that an error ended.

    A thread that is still in a step is left to `shutdown`, which waits for it.
    """
    if pool.has_stuck:
        return
    try:
        pool.close()
    finally:
        engine.close()


def _check_part_stepping(options: SupervisedOptions, reset_slots: bool, workers: int) -> None:
    if options.surplus == "never_step" and reset_slots and workers > 1:
        raise ArgumentError(
            'surplus="never_step" with several workers needs autoreset to be disabled: a lane that '
            'waits would lose its reset slot; use surplus="carry", or AutoresetMode.DISABLED'
        )
