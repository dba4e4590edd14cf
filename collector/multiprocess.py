"""Collectors that step their environments in processes, threads or Ray actors."""

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
from tallyroll.collector.envs.setup.statistics import refuse_separate_statistics
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
    openings_of,
    policy_argument,
    policy_of,
)
from tallyroll.collector.policies.slot_rng import width_of
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.user_code import user_code
from tallyroll.collector.workers.central import CentralPolicy, use_own_weights
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
"""Number of segments per worker in async mode: the worker fills one while the other is read."""


class MultiprocessCollector(Collector):
    """Collects exactly ``total_frames`` transitions with environments in worker processes.

    Examples:
        In a file that workers import, below ``if __name__ == "__main__":``::

            with MultiprocessCollector(
                "CartPole-v1", num_envs=8, num_workers=2, frames_per_batch=100, total_frames=250
            ) as collector:
                for batch in collector:
                    print(len(batch))

    It yields, counts and stores the same transitions as :class:`SyncCollector`, whose documentation
    describes the arguments that are missing here. Workers step their lanes and fill shared memory.
    Only this process counts and writes.

    With ``mode="sync"``, all workers advance by the same number of slots, and batches have the same
    transitions as in a single process. Batches are equal bit for bit if the policy is deterministic
    and chooses a lane's action from that lane alone. Every action that is chosen after
    :meth:`update_policy_weights_` returns uses the new weights.

    With ``mode="async"``, workers wait neither for one another nor for the consumer, until they are
    two leases ahead. Rows arrive in any order across lanes, but in order within a lane, and their
    number is still exact.

    Args:
        create_env_fn: a Gymnasium id, ``SYSTEM:ID`` or a function that makes one Gymnasium
            environment, whose ``num_envs`` lanes (None means one per worker) are split over the
            workers; or a factory that every worker calls; or a list of factories, one per worker.
            Environments and policies are sent with cloudpickle.
        policy: as for :class:`SyncCollector`. Workers get the weights of an ``nn.Module``, buffers
            included, through shared memory; other policies cannot be updated. With
            ``policy_placement="central"`` the policy acts here, for the lanes of many workers in
            one call; see :class:`Devices`.
        num_workers: number of processes or threads; with a list of factories, it must be the number
            of factories, or None.
        mode: ``"sync"`` or ``"async"``.
        sharded: True if each worker stores its rows in its own storage and replies only with
            counts, so that the cost of a row in this process does not depend on its size.
            ``storage`` is then a path with a manifest of the valid rows, and ``open_storage`` reads
            all shards as one storage. This needs ``mode="async"``, and ``collect(n)`` instead of
            iterating.
        transport: ``"process"``, or ``"thread"`` if workers are threads of this process. Threads
            start at once. They pay off if environments wait, for a simulator or a network, and
            release the interpreter; otherwise one thread blocks the others. With random actions and
            deterministic policies, threads give the same rows as processes. A policy that draws
            from torch's generator shares the generator with the other threads, in any order. A
            thread cannot be ended: if it completes no step within ``step_timeout``, the run ends
            and the thread is not replaced, and :meth:`shutdown` waits up to 10 seconds for steps in
            progress, then warns. A function is also accepted. It takes pickled jobs, one per
            worker, and returns a custom transport that runs them in separate processes.
        processes: start method and threads of worker processes; see :class:`Processes`. By default,
            the processes are forks of a server that has imported torch and TorchRL once.
        supervision: time limits and replacement of workers; see :class:`Supervision`.
        more: the fields of these objects as keywords, such as ``on_worker_death="respawn"``.

    Raises:
        ArgumentError, EnvironmentRefused, PolicyError, StorageError: raised before any file
            changes.
        SilentReset: the environment resets itself; raised while iterating. See :class:`Checks`.
        WorkerError: a worker failed, at the start or while iterating; committed rows are safe.
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
        progress: bool = False,
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
        """Start the workers.

        ``kept_in`` holds a replay buffer, a storage, and the argument ``resume``.
        """
        factories = per_worker(create_env_fn, num_workers, options)
        self._num_workers, self._mode = len(factories), options.mode
        self._one_system = isinstance(create_env_fn, str)
        central = options.acts_centrally
        where = options.policy_device if central else None
        self._policy = policy_of(policy_argument(policy), where, None)
        if central and self._policy is not None:  # otherwise the options refuse it
            use_own_weights(self._policy)
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
            self._prepare(options.supervision.respawns)
        except BaseException:
            self.shutdown()
            raise

    def _threads_of(self, options: Any) -> int | None:
        """Return the number of threads of each worker's libraries; None if workers are threads."""
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

    def _prepare(self, respawns: int) -> None:
        self._startup = WorkerStartup(self._worker_pool, respawns, self._options.part)
        description = self._startup.made()
        if self._options.sharded:
            self._look_for_shards()
        if isinstance(self._policy, SeveralPolicies):
            self._policy.bind_whole(sum(self._startup.lanes), self._options.part)
        self._begin_run(sum(self._startup.lanes), self._startup)
        self._startup.count_in(self._ledger)
        plan, called = self._startup.planned.plan, self._startup.planned.called
        if self._options.acts_centrally:
            assert self._policy is not None and called is not None
            exploration, in_step = self._options.exploration_type, self._mode == "sync"
            self._worker_pool.set_central_policy(
                CentralPolicy(self._policy, called, exploration, in_step=in_step)
            )
        _check_part_stepping(self._options, plan.reset_slots, self.num_workers)
        if plan.arrivals and (self._mode == "sync" or self._options.total_episodes is not None):
            raise EnvironmentRefused(
                'workers support lanes that come back in any order only with mode="async" and '
                "total_frames. Pass both, or use SyncCollector."
            )
        if plan.arrivals and self._options.init_random_frames:
            raise EnvironmentRefused(
                "init_random_frames: expected 0, because with lanes that come back in any order "
                "workers cannot know which frames are the first. Leave init_random_frames out, or "
                "use SyncCollector."
            )
        if self._startup.apart:
            refuse_separate_statistics(
                self._startup.apart, self.num_workers, self._options.layout.name
            )
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
        """Return the facts about the transport that are stored as provenance."""
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
        if self._one_system and not apart:  # regardless of the number of workers
            return TorchrlLayout(self._options, plan, [(self.lanes,)])
        return TorchrlLayout(self._options, plan, shapes, stacked=not apart, apart=apart)

    def _make_place(self, slots: int, segments: int) -> tuple[Place, Share]:
        """Allocate the memory of slabs with ``slots`` slots, and bind the workers to it."""
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
        # A batch takes one lease of every worker, or one lease of any worker in TorchRL's layout.
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
            # Agent transitions are counted on arrival, and transitions beyond the budget are
            # discarded.
            budget=Budget(None if self._options.by_agent else self._options.total_frames),
            episodes=self._options.total_episodes,
            openings=openings_of(self._policy)
            or Openings.of_run(self._beginning.random_frames, self._options.run_lanes(self.lanes)),
            exact=self._options.surplus == "never_step",
        )
        return Leases(self._worker_pool, self._startup, place, share, budget)

    # --- sharded workers --------------------------------------------------------------------------

    def _look_for_shards(self) -> None:
        """Warn about rows that are collected again because their shards are missing."""
        from tallyroll.collector.ext.sharded_leases import lost_since

        if lost := lost_since(self._startup, self._writer.storage):
            shown = "; ".join(lost[:3]) + ("" if len(lost) <= 3 else f"; and {len(lost) - 3} more")
            warnings.warn(
                f"{len(lost)} shards are lost, and their rows are collected again: {shown}",
                stacklevel=4,
            )

    def _refuse_unsharded(self, plan: SlabPlan) -> None:
        if plan.arrivals:
            raise EnvironmentRefused(
                "sharded=True cannot be combined with lanes that come back in any order. Leave "
                "sharded out."
            )
        if isinstance(self._policy, SeveralPolicies):
            raise ArgumentError("sharded=True: expected one policy, got several. Give one policy.")

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
        """Number of workers: processes, threads or actors."""
        return self._num_workers

    @property
    def env(self) -> NoReturn:
        """Not available: the environments are in the workers."""
        raise AttributeError(
            "env: environments are in the workers. Use env_call, env_get and env_set to reach them."
        )

    @property
    def _links(self) -> list[Link]:
        return [member.link for member in self._worker_pool.members]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers; empty if they are threads."""
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
        """Use new weights, and increment the version.

        With ``mode="sync"``, every action chosen after this method returns uses the new weights.
        With ``"async"``, a worker loads them before its next action. ``policy_version`` of each row
        names the weights that chose its action.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes the current
                weights of the policy given at construction. Buffers are sent too.
            policy_id: the policy to update, if there are several policies.
        """
        policy = self._policy
        if isinstance(policy, SeveralPolicies):
            policy = policy.of_id(policy_id)
        central = self._options.acts_centrally
        if policy is not None and not (central or isinstance(policy.module, nn.Module)):
            raise ArgumentError(
                "update_policy_weights_: expected an nn.Module (TensorDictModule) as the policy, "
                f"got a {type(policy.source).__name__}. Only the weights of a module can be sent "
                "to the copies in the workers."
            )
        acts = self._worker_pool.central
        with nullcontext() if acts is None else acts.turn:
            super().update_policy_weights_(weights, policy_id=policy_id)
        try:
            self._publish()
        except BaseException:
            if self._policy is not None:  # no worker has the new weights
                self._policy.decrement_version(policy_id)
            raise

    def _publish(self) -> None:
        if self._policy is not None and not self._options.acts_centrally:
            self._weights.publish(self._policy.module, self._policy.version)


class RayCollector(MultiprocessCollector):
    """Collects exactly ``total_frames`` transitions with environments in Ray actors, on any node.

    Examples:
        On this machine alone; pass ``address="auto"`` for a cluster::

            with RayCollector(
                "CartPole-v1", num_envs=8, num_workers=2, frames_per_batch=100, total_frames=250
            ) as collector:
                for batch in collector:
                    print(len(batch))

    It yields, counts and stores the same transitions as :class:`MultiprocessCollector`, whose
    workers are processes of this machine and whose documentation describes the arguments that are
    missing here. Either of them can resume a storage that the other wrote. Rows arrive through
    Ray's object store, with the reply to each lease. Only this process counts and writes. It knows
    only a part of the steps of a worker that died, so ``ledger.lost`` is a lower bound.

    Each node needs the same package versions as this process. Other versions are refused, and the
    error names the packages.

    Args:
        create_env_fn: as for :class:`MultiprocessCollector`; a function is called on the nodes.
        policy: as for :class:`MultiprocessCollector`; weights are put into the object store once
            per version, and each action is chosen by one version.
        num_workers: number of actors; with a list of factories, it must be the number of factories,
            or None.
        mode: ``"sync"`` or ``"async"``.
        sharded: as for :class:`MultiprocessCollector`; each actor writes to the disk of its node,
            at the path ``storage``.
        actors: address of Ray, and resources of the actors; see :class:`Actors`.
        supervision: time limits and replacement of workers; see :class:`Supervision`.
        more: the fields of such objects as keywords: ``address="auto"``.

    Raises:
        MissingExtra: Ray is not installed.
        ArgumentError: an argument is not valid, or no cluster answers at the address.
        EnvironmentRefused, PolicyError, StorageError: raised before any file changes.
        WorkerError: a worker failed, at the start or while iterating; committed rows are safe.
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
        progress: bool = False,
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
        # Ray is optional, and takes a second to import.
        from tallyroll.collector.ext.ray.transport import RayTransport

        return RayTransport(jobs, options.actors)

    def _transport_call(self) -> dict[str, Any]:
        return {"transport": "ray", "nodes": self._engine.nodes}


def _release(pool: WorkerPool, engine: Transport[Any]) -> None:
    """End the workers of a run that an error ended.

    If a thread is still in a step, do nothing: `shutdown` waits for it.
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
            'surplus="never_step" with several workers needs autoreset to be disabled, because a '
            'lane that waits would lose its reset slot. Use surplus="carry", or '
            "AutoresetMode.DISABLED."
        )
