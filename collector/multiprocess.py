"""The collector of many processes, or threads."""

import os
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, Literal

import torch
from gymnasium.vector import VectorEnv
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.batches.stored.resume import Resume
from tallyroll.collector.batches.stored.writer import StorageLike
from tallyroll.collector.counting.ledger import Budget
from tallyroll.collector.envs.driven.statistics import judge_apart
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.options import (
    Finals,
    Layout,
    Options,
    Postproc,
    ResetSlots,
    Surplus,
    Validate,
    one_of,
    or_none,
    positive,
)
from tallyroll.collector.policies.policy import Policy, PolicyFn, Weights, on_device
from tallyroll.collector.policies.random_actions import all_drawn
from tallyroll.collector.policies.slot_rng import width_of
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import Rename
from tallyroll.collector.workers.jobs import per_worker, pickled
from tallyroll.collector.workers.leases.budget import LeaseBudget
from tallyroll.collector.workers.leases.source import Leases
from tallyroll.collector.workers.local.limits import require_guard
from tallyroll.collector.workers.local.processes import Processes
from tallyroll.collector.workers.local.threads import Threads
from tallyroll.collector.workers.lockstep import LockstepDriver
from tallyroll.collector.workers.messages import Job
from tallyroll.collector.workers.pool import WorkerPool
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.start_and_replace import WorkerStartup
from tallyroll.collector.workers.supervision_options import OnDeath, Supervision, supervision_of
from tallyroll.collector.workers.transport import Link, Place, Transport
from tallyroll.storage import ways

Factory = Callable[[], EnvBase | VectorEnv]
Mode = Literal["sync", "async"]
TransportName = Literal["process", "thread"]
_SEGMENTS = 2
"""In async mode a worker fills one while the other is read."""


class MultiprocessCollector(Collector):
    """Collects exactly ``total_frames`` transitions with environments in worker processes.

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
            shared memory; only those of an ``nn.Module`` can.
        num_workers: processes, or threads; with a list of factories, as many as those.
        mode: ``"sync"`` or ``"async"``.
        threads_per_worker: of torch and of the numerical libraries; by default the cores are
            shared out.
        on_worker_death, max_respawns, step_timeout, start_timeout: see :class:`Supervision`.
        supervision: these four as one object, in their place.
        transport: ``"process"``, or ``"thread"``: workers are threads of this process, which start
            at once and pay where environments wait (for a simulator, a network) and release the
            interpreter; else one keeps the others from running. Random actions and deterministic
            policies give the rows of processes; a policy that draws from torch's generator shares
            it with the other threads, in any order. A thread cannot be ended: one that completes
            no step within ``step_timeout`` ends the run and is not replaced, and
            :meth:`shutdown` waits up to 10 seconds for steps under way, then warns.
        mp_start_method: of processes: ``"spawn"``, or ``"forkserver"``, which starts more quickly
            (its socket in the temporary directory is left there where this process is killed).

    Raises:
        ArgumentError, EnvironmentRefused, PolicyError, StorageError: before any file changes.
        SilentReset: while iterating: the environment resets itself; see ``finals``.
        WorkerError: a worker failed, here or while iterating; what was committed is safe.
    """

    def __init__(
        self,
        create_env_fn: str | Factory | Sequence[Factory],
        policy: PolicyFn | None = None,
        *,
        num_workers: int | None = None,
        mode: Mode = "sync",
        frames_per_batch: int,
        total_frames: int | None = None,
        total_episodes: int | None = None,
        num_envs: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        layout: Layout = "rows",
        split_trajs: bool = False,
        set_truncated: bool = False,
        surplus: Surplus = "carry",
        replay_buffer: ReplayBuffer | None = None,
        storage: StorageLike | None = None,
        resume: Resume = False,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        env_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        init_random_frames: int = 0,
        max_frames_per_traj: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Postproc | None = None,
        info_keys: Sequence[str | tuple[str, ...] | Info] = (),
        rename: Rename | None = None,
        frame_skip: int | str = 1,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        validate: Validate = "noise",
        reset_slots: ResetSlots = "mask",
        yield_large: bool = True,
        finals: Finals = "check",
        threads_per_worker: int | None = None,
        on_worker_death: OnDeath = "raise",
        max_respawns: int = 10,
        step_timeout: float | None = None,
        start_timeout: float | None = 120.0,
        supervision: Supervision | None = None,
        transport: TransportName = "process",
        mp_start_method: str = "spawn",
    ) -> None:
        one_of("transport", transport, TransportName)
        if transport == "process":
            require_guard()
        options = Options.of(locals())
        _check_mode(mode, options)
        _check_start_method(mp_start_method)
        supervision = supervision_of(locals())
        if transport == "thread":
            _check_threads(threads_per_worker, mp_start_method, supervision)
        factories = per_worker(create_env_fn, num_workers, options)
        self.num_workers, self._mode = len(factories), mode
        self._one_system = isinstance(create_env_fn, str)
        threads = or_none(positive)("threads_per_worker", threads_per_worker)
        threads = threads or max(1, len(os.sched_getaffinity(0)) // self.num_workers)
        self._transport, own = transport, threads if transport == "process" else None
        self._policy = None if policy is None else Policy(policy, None, None)
        copied = None
        if self._policy is not None:
            copied = on_device(self._policy.source, torch.device("cpu"))
        jobs = [
            Job(create, copied, options.for_worker(lanes), own, ways.off())
            for create, lanes in factories
        ]
        sent = [pickled(job) for job in jobs]
        super().__init__(options, replay_buffer=replay_buffer, storage=storage, resume=resume)
        try:
            runs: Transport[Any] = Threads(sent)
            if transport == "process":
                runs = Processes(sent, start_method=mp_start_method, threads=threads)
            self._worker_pool = WorkerPool(runs, len(jobs), supervision)
            self._prepare(policy, supervision.respawns)
        except BaseException:
            self.shutdown()
            raise

    def _prepare(self, policy: PolicyFn | None, respawns: int) -> None:
        self._startup = WorkerStartup(self._worker_pool, respawns)
        description = self._startup.made()
        self._begin_run(sum(self._startup.lanes), self._startup)
        self._startup.ledger = self.ledger
        plan = self._startup.planned.plan
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
            judge_apart(self._startup.apart, self.num_workers, self._options.layout)
        rollout = self._workers_rollout() if self._mode == "sync" else self._leases()
        call: dict[str, Any] = {"num_workers": self.num_workers, "mode": self._mode}
        if self._transport != "process":
            call["transport"] = self._transport
        self._drive(
            rollout,
            plan,
            self._startup.ranges,
            description,
            torchrl=self._torchrl_layout(plan),
            **call,
        )

    def _stepping(self) -> dict[str, Decision]:
        ahead = Decision("after", "workers fill the slots")
        return {**self._startup.decisions, "ahead": ahead}

    def _torchrl_layout(self, plan: SlabPlan) -> TorchrlLayout | None:
        if self._options.layout != "torchrl":
            return None
        apart = self._mode == "async"
        shapes = [(lanes,) if plan.batched else () for lanes in self._startup.lanes]
        if self._one_system and not apart:  # however many processes step it
            return TorchrlLayout(self._options, plan, [(self.lanes,)])
        return TorchrlLayout(self._options, plan, shapes, stacked=not apart, apart=apart)

    def _make_place(self, slots: int, segments: int) -> tuple[Place, Share]:
        """The memory of slabs with so many slots, known to the workers."""
        plan, share = self._startup.planned.plan, Share(self._startup.lanes, slots, segments)
        module = None if self._policy is None else self._policy.module
        place = self._worker_pool.transport.place(share, plan, module)
        self._weights = place.weights
        self._publish()
        self._startup.bind(share, place)
        return place, share

    def _workers_rollout(self) -> TransitionSource:
        planned, plan = self._startup.planned, self._startup.planned.plan
        place, _ = self._make_place(plan.slots(self.lanes, self.frames_per_batch), 0)
        draws = all_drawn(planned.actions, self.lanes) if planned.drawn_ahead else None
        driver = LockstepDriver(
            self._worker_pool,
            place.slab_of_all(),
            plan,
            draws=draws,
            width=width_of(planned.actions.values(), self.lanes),
            rng=self._beginning.seeds.rng,
            startup=self._startup,
        )
        return self._beginning.rollout(driver, plan)

    def _leases(self) -> TransitionSource:
        plan, most = self._startup.planned.plan, max(self._startup.lanes)
        whole = self._options.layout == "torchrl"
        # A batch takes one lease of every worker, or, in TorchRL's layout, one of any.
        frames = self.frames_per_batch if whole else ceil(self.frames_per_batch / self.num_workers)
        slots = plan.slots(most, frames, slabs=_SEGMENTS * self.num_workers)
        if whole:
            slots = max(slots, ceil(frames / min(map(plan.columns, self._startup.lanes))))
        place, share = self._make_place(slots, _SEGMENTS)
        budget = LeaseBudget(
            plan,
            self.ledger,
            workers=self.num_workers,
            frames=frames,
            budget=Budget(self._options.total_frames),
            episodes=self._options.total_episodes,
            random_frames=self._beginning.random_frames,
            exact=self._options.surplus == "never_step",
        )
        return Leases(self._worker_pool, self._startup, place, share, budget)

    # --- workers, weights, seeds, state -----------------------------------------------------------

    @property
    def _links(self) -> list[Link]:
        return [member.link for member in self._worker_pool.members]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers; none where they are threads."""
        return [link.pid for link in self._links if link.pid is not None]

    def _close_source(self) -> None:
        if hasattr(self, "_worker_pool"):
            self._worker_pool.close()

    def update_policy_weights_(self, weights: Weights = None) -> None:
        """Use new weights, and count the version up.

        With ``mode="sync"`` every action chosen after this returns uses them; with ``"async"`` a
        worker takes them over before its next action. ``policy_version`` of each row says which
        weights chose its action.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes those that
                the policy given at construction has now. Buffers travel too.
        """
        if self._policy is not None and not isinstance(self._policy.module, nn.Module):
            raise ArgumentError(
                f"update_policy_weights_: the policy is a {type(self._policy.source).__name__}, "
                "whose copies in the workers no weights can reach; make it an nn.Module "
                "(TensorDictModule)"
            )
        super().update_policy_weights_(weights)
        try:
            self._publish()
        except BaseException:
            if self._policy is not None:  # no worker has them
                self._policy.version -= 1
            raise

    def _publish(self) -> None:
        if self._policy is not None:
            self._weights.publish(self._policy.module, self._policy.version)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; call it before iterating.

        Raises:
            StateError: this collector has collected already, or the state has other parts.
        """
        super().load_state_dict(state)
        self._publish()


def _check_mode(mode: str, options: Options) -> None:
    one_of("mode", mode, Mode)
    if mode == "sync":
        return
    if options.reset_at_each_iter:
        raise ArgumentError(
            'reset_at_each_iter needs mode="sync": in async mode workers go on while a batch is '
            "put together"
        )
    if options.surplus == "discard":
        raise ArgumentError(
            'surplus="discard" needs mode="sync": in async mode there is no last step of a batch; '
            'use "carry" or "never_step"'
        )


def _check_part_stepping(options: Options, reset_slots: bool, workers: int) -> None:
    if options.surplus == "never_step" and reset_slots and workers > 1:
        raise ArgumentError(
            'surplus="never_step" with several workers needs autoreset to be disabled: a lane that '
            'waits would lose its reset slot; use surplus="carry", or AutoresetMode.DISABLED'
        )


def _check_threads(
    threads_per_worker: int | None, start_method: str, supervision: Supervision
) -> None:
    if threads_per_worker is not None:
        raise ArgumentError(
            'threads_per_worker needs transport="process": workers in threads share those of this '
            "process; leave it out, or call torch.set_num_threads"
        )
    if start_method != "spawn":
        raise ArgumentError(
            f'mp_start_method={start_method!r} needs transport="process": threads are not '
            "started that way; leave it out"
        )
    if supervision.step_timeout is not None and supervision.respawns:
        raise ArgumentError(
            'step_timeout with on_worker_death="respawn" needs transport="process": a thread that '
            "hangs cannot be ended, so that none can take its place; leave one of them out"
        )


def _check_start_method(method: str) -> None:
    if method == "fork":
        raise ArgumentError(
            'mp_start_method: "fork" copies a process whose threads (torch has some) do not come '
            'along, so that a lock which one of them holds is never released; use "spawn" or '
            '"forkserver"'
        )
    one_of("mp_start_method", method, Literal["spawn", "forkserver"])
