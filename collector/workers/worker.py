"""A worker: an environment, a policy, and the slab that they fill."""

import gc
import random
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import set_exploration_type

from tallyroll.collector.batches.checks.ranges import Range, ranges_of
from tallyroll.collector.batches.stored.worker_shard import (
    FindShards,
    FoundShards,
    OpenShard,
    ShardCommit,
    WorkerShard,
    find_shards,
)
from tallyroll.collector.counting.numbering import driver_seed
from tallyroll.collector.envs.calls.serialization import answers_of
from tallyroll.collector.envs.failures import env_code, lane_of
from tallyroll.collector.envs.setup.instances import take_over
from tallyroll.collector.envs.setup.make import make_env
from tallyroll.collector.envs.setup.prepare import first_reset, prepare_env, seed_env
from tallyroll.collector.envs.setup.statistics import StatisticsWatch
from tallyroll.collector.errors import CollectorError, EnvironmentRefused, UserStopIteration
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import RandomActions, lane_actions
from tallyroll.collector.policies.several.policies import SeveralPolicies, policy_of
from tallyroll.collector.policies.slot_rng import SlotRng
from tallyroll.collector.rollout.actor import raised_by_policy
from tallyroll.collector.rollout.driver import LocalDriver
from tallyroll.collector.rollout.slab_plan import SlabPlan, make_driver, plan_slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.central import EndOfSteps, PolicyProxy
from tallyroll.collector.workers.leased_rollout import LeasedRollout
from tallyroll.collector.workers.transport import Channel, Weights
from tallyroll.storage import fast_paths

_trial = threading.Lock()
"""Serializes trials of policies: threads share the generators and warning filters that they use."""


def work(channel: Channel, job: Any) -> None:
    """Create the environment and answer questions until the parent closes the worker.

    Args:
        channel: the worker's side of its link.
        job: a pickled :class:`~messages.Job`.
    """
    try:
        loaded = cloudpickle.loads(job)
        if loaded.threads is not None:  # a process of its own
            fast_paths.switch_off(loaded.off)
        worker = Worker(loaded, channel)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the parent raises it
        channel.send(exception_report(error, "making the environment"))
        return
    try:
        channel.send(worker.made())
        worker.serve()
    finally:
        worker.close()


class WorkerPolicy(Policy):
    """A policy whose weights come from the parent."""

    _weights: Weights | None = None

    def take_from(self, weights: Weights) -> None:
        """Load weights from ``weights``, now and whenever they have another version."""
        self._weights, self.refreshes = weights, True
        self.version = weights.load_into(self.module)

    def refresh(self) -> bool:
        """Load the published weights if their version changed; return True if so."""
        if self._weights is None or self._weights.version == self.version:
            return False
        self.take_from(self._weights)
        return True


class WorkerPolicies(WorkerPolicy, SeveralPolicies):
    """Several policies whose weights, and versions, come from the parent."""


class Worker:
    """A worker: its environment, its policy and the slab that they fill."""

    driver: LocalDriver
    """Set by :meth:`bind`, as is ``rollout`` with ``mode="async"``."""
    rollout: LeasedRollout

    def __init__(self, job: m.Job, channel: Channel) -> None:
        self._channel = channel
        self._own_process, self._closed = job.threads is not None, False
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self.options = job.options
        made = make_env(job.create_env_fn, job.options)
        self.env: EnvBase = made.env
        try:
            self.env = prepare_env(made.env, job.policy, job.options)
            if not self._own_process:  # processes have copies of what their parent has
                take_over(self.env, made.instance, self._lost_env)
            self._central = job.options.acts_centrally
            kinds = PolicyProxy if self._central else WorkerPolicy, WorkerPolicies
            device = None if self._central else job.options.policy_device
            self.policy = policy_of(job.policy, device, self.env.device, kinds=kinds)
        except BaseException:
            self.env.close(raise_if_closed=False)
            raise
        self.lanes = self.env.batch_size.numel()
        self.description = made.description
        self.rng = SlotRng()
        self.shared_rng = SlotRng()
        """Generator that is in the same state in all workers."""
        self.doing = ""
        self.plan: SlabPlan | None = None
        self._first: TensorDictBase | None = None
        self._first_lane = 0
        self._has_state = False
        self._statistics: list[str] = []
        self._shard: WorkerShard | None = None

    def made(self) -> m.EnvReady:
        """Return the number of lanes and the description of the environment."""
        return m.EnvReady(self.lanes, self.description)

    def serve(self) -> None:
        """Answer questions until :class:`~messages.Close` arrives."""
        answers: dict[type, Callable[[Any], object]] = {
            m.Seed: self.seed,
            m.Bind: self.bind,
            m.Begin: self.begin,
            m.Steps: self.steps,
            m.Lease: self.lease,
            OpenShard: self.keep,
            FindShards: self.look,
            m.Load: self.load,
            m.CallRequest: self.reach,
        }
        with torch.no_grad(), set_exploration_type(self.options.exploration_type):
            answer: object = None
            while not isinstance(message := self._channel.receive(), m.Close):
                if isinstance(answer, m.ExceptionReport):
                    continue  # an error may have left a state that is not valid
                self.doing = ""
                try:
                    answer = answers[type(message)](message)
                except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the parent raises it
                    answer = exception_report(error, self.doing)
                self._channel.send(answer)

    # --- startup ----------------------------------------------------------------------------------

    def seed(self, message: m.Seed) -> m.SlabRequest:
        """Seed the environment and all generators. The first time, also plan the slab."""
        self.doing = "resetting the environment"
        words = driver_seed(message.seed, message.incarnation, message.worker).generate_state(3)
        if self._own_process:  # the generators of a thread are those of the program
            torch.manual_seed(int(words[0]))
            np.random.seed(int(words[1]))
            random.seed(int(words[2]))
        self.rng.seed(words)
        self.shared_rng.seed(driver_seed(message.seed, message.incarnation))
        lanes = range(message.first_lane, message.first_lane + self.lanes)
        if isinstance(self.policy, SeveralPolicies):
            self.policy.bind(lanes, message.run_lanes)
            ids = message.seed, message.incarnation, message.worker
            self.policy.seed(*ids, own=self._own_process)
        seeds = seed_env(self.env, message.seed, message.incarnation, lanes, asked=message.asked)
        if self.plan is None:
            watch = StatisticsWatch(self.env)
            self._first = first_reset(self.env, message.first_lane)
            self._statistics = watch.found()
            # Some transforms (CatFrames) create their buffers in the first reset.
            self._has_state = bool(self.env.state_dict())
            self.doing = "trying the policy out"
            with _trial:
                self.plan = plan_slab(self.env, self.policy, self._first, self.options)
        lost = self.plan.lost_finals
        self._first_lane = message.first_lane
        ranges = self._ranges(lost)
        drawn = RandomActions(self.env, self.rng).block_drawn
        policy = self.policy
        return m.SlabRequest(
            self.plan,
            ranges,
            seeds,
            lane_actions(self.env),
            drawn,
            self._state(),
            self._statistics,
            None if policy is None else m.PolicyCall(policy.inputs, policy.writes),
        )

    def bind(self, message: m.Bind) -> m.Bound:
        """Attach the memory, and prepare to fill it."""
        assert self.plan is not None
        share = message.share
        weighs = self.policy is not None and not self._central
        place = self._channel.place(share, self.plan, self.policy.module if weighs else None)
        if weighs:
            self.policy.take_from(place.weights)
        elif self.policy is not None:
            self.policy.use_channel(self._channel)
        slab, board = place.slab_of(message.worker), place.board(message.worker)
        # With leases, each worker draws actions for its own lanes. In lockstep, each one draws the
        # actions of all lanes.
        rng, lanes = (self.rng, None) if share.segments else (self.shared_rng, share.of_run)
        driver = make_driver(self.env, self.policy, self.plan, slab, rng, board, lanes)
        self.driver = driver
        if self._first is not None:
            driver.start_from(self._first)
        if share.segments:
            episodes = self.options.total_episodes is not None
            self.rollout = LeasedRollout(
                driver,
                self.policy,
                extra=self.plan.extra,
                surplus=self.options.surplus,
                episodes=episodes,
            )
            self._slots = share.slots
        if self._own_process:
            # Imported modules stay in memory; scanning them for garbage takes a quarter of a
            # second.
            gc.freeze()
        return m.Bound(driver.decisions())

    def load(self, message: m.Load) -> m.Done:
        """Restore the state of the environment's transforms."""
        self.env.load_state_dict(cloudpickle.loads(message.state))
        return m.Done()

    def reach(self, message: m.CallRequest) -> m.CallReply:
        """Call the environments of lanes between steps; return their exceptions as outcomes."""
        self.doing = "calling the environment"
        return m.CallReply(answers_of(self.env, message.content))

    def _state(self) -> bytes | None:
        """Return the pickled state of the environment's transforms; None if they have none."""
        return cloudpickle.dumps(dict(self.env.state_dict())) if self._has_state else None

    # --- collecting -------------------------------------------------------------------------------

    def begin(self, message: m.Begin) -> m.Done:
        """Start every lane's next trajectory."""
        self.doing = "resetting the environment"
        if message.fresh:
            self.driver.restart()
        self.driver.begin()
        return m.Done(self._state())

    def steps(self, message: m.Steps) -> m.Done:
        """Fill the slots that the parent asks for."""
        driver, start, stop = self.driver, message.start, message.stop
        self.doing = "stepping"
        if self.policy is not None:
            self.policy.refresh()
        lanes = self.lanes if message.lanes is None else message.lanes
        driver.actor.use_drawn(message.drawn)
        with suppress(EndOfSteps):  # the board shows which slots are complete
            if message.by == "given":
                driver.step_with_actions(start, stop, lanes)
            elif lanes < self.lanes:
                driver.part(start, lanes, message.random_lanes)
            elif message.by == "random":
                driver.random_steps(start, stop)
            else:
                driver.policy_steps(start, stop, message.random_lanes)
        return m.Done(self._state()) if self._has_state else m.DONE

    def keep(self, message: OpenShard) -> m.Done:
        """Open a shard, which stores the rows of later leases."""
        assert self.plan is not None
        self.doing = "beginning a shard"
        lost = self.plan.lost_finals
        ranges = self._ranges(lost)
        self._shard = WorkerShard(
            message, self.options, self.policy, self.driver, self.plan, ranges
        )
        return m.DONE

    def _ranges(self, lost: bool) -> list[Range]:
        by_policy, first = self.policy is not None, self._first_lane
        return ranges_of(self.env, policy=by_policy, lost_finals=lost, first_lane=first)

    def lease(self, message: m.Lease) -> m.LeaseResult | m.ExceptionReport | ShardCommit:
        """Fill a segment with the transitions of a lease, or store them in the worker's shard."""
        self.doing = "stepping"
        if self._shard is not None:
            kept = self._shard.collect(message.number, message.frames)
            return replace(kept, state=self._state())
        try:
            self.rollout.lease(message, self._slots)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the parent raises it
            return replace(exception_report(error, self.doing), filled=self.rollout.take_filled())
        filled = self.rollout.take_filled()
        assert filled is not None
        return replace(filled, state=self._state())

    def look(self, message: FindShards) -> FoundShards:
        """Look for shards on the disks of this node."""
        self.doing = "looking for shards"
        return find_shards(message.paths)

    def _lost_env(self) -> None:
        """Refuse to let another worker or collector drive the environment.

        Raises:
            EnvironmentRefused: this worker still steps the environment.
        """
        if not self._closed:
            raise EnvironmentRefused(
                "create_env_fn: expected a separate environment for each worker, got one that the "
                "thread of another worker steps. Make each call of the factory return a new "
                "environment with new parts, or shut the other collector down first."
            )

    def close(self) -> None:
        """Close the shard and the environment."""
        self._closed = True
        try:
            if self._shard is not None:
                self._shard.close()
        finally:
            with env_code("closing the environment"):
                self.env.close(raise_if_closed=False)


def exception_report(error: BaseException, doing: str) -> m.ExceptionReport:
    """Return the report of an exception for the parent."""
    frames, acting = "".join(traceback.format_exception(error)), raised_by_policy(error)
    if isinstance(error, UserStopIteration) and error.__cause__ is not None:
        error = error.__cause__  # the parent raises its own error for it, and causes are not sent
    try:
        pickled: bytes | None = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:  # noqa: BLE001  the text of the exception is sent instead
        pickled = None
    kind = type(error).__qualname__
    if isinstance(error, CollectorError):
        doing = ""
    return m.ExceptionReport(kind, str(error), frames, doing, lane_of(error), acting, pickled)
