"""The collector of one process."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tallyroll.collector import arguments
from tallyroll.collector.base import Collector
from tallyroll.collector.batch import Rows, RowSource
from tallyroll.collector.checks import RangeChecks, Validate
from tallyroll.collector.delivery import Delivery, Postproc
from tallyroll.collector.drive import build_rollout
from tallyroll.collector.envs.gymnasium_vector import GymnasiumVectorEnv
from tallyroll.collector.envs.make import (
    CreateEnv,
    can_step_part,
    chain,
    make_env,
    runs_on_cpu,
    with_recurrent_states,
    with_time_limit,
)
from tallyroll.collector.episode_gate import EpisodeGate
from tallyroll.collector.episodes import EpisodeLog
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.keys import POLICY_VERSION, STEP, TERMINATED
from tallyroll.collector.lanes import LaneState, Numbers, driver_seed, lane_seed
from tallyroll.collector.ledger import Budget, Ledger
from tallyroll.collector.policy import Policy, PolicyFn
from tallyroll.collector.provenance import run_provenance, versions
from tallyroll.collector.rollout import Block, Surplus
from tallyroll.collector.sink import Sink, StorageLike
from tallyroll.collector.trajectories import Layout

_STATE = {"ledger", "seed", "next_id", "open", "policy", "env", "generators"}
EPISODES_KEPT = 50_000
"""With a budget of frames, ``collector.episodes`` keeps at least that many of the last ones."""


class SyncCollector(Collector):
    """Collects exactly ``total_frames`` transitions in batches of exactly ``frames_per_batch``.

    Iterating yields TensorDicts in TorchRL's episode data format; the last one holds what
    remains. A transition is one action that an environment executed: slots in which a vector
    environment resets itself are neither counted nor stored. Names and meanings of arguments
    are those of TorchRL's collectors where it has them.

    Args:
        create_env_fn: a Gymnasium id (with ``num_envs`` lanes), a TorchRL environment of batch
            size ``[]`` or ``[lanes]``, a Gymnasium vector environment, or a factory of one. What
            the collector makes it closes; an instance stays yours to close.
        policy: a TensorDictModule or a callable from TensorDict to TensorDict; None draws
            random actions, and honours an ``"action_mask"``. All that it writes becomes
            columns: where the action is enough, make it
            ``TensorDictSequential(policy, selected_out_keys=["action"])``.
        frames_per_batch: transitions a batch.
        total_frames: transitions in all; -1 goes on until :meth:`stop`.
        total_episodes: instead, exactly that many episodes, whole, those that start first.
        num_envs: lanes, with an id.
        env_kwargs: keyword arguments of ``gymnasium.make``, with an id.
        seed: makes the data repeatable from the first observation on; it also seeds torch's
            global generator. None draws one from torch's generator, for the environments and
            for random actions, which :attr:`ledger` reports, and goes on with that generator.
        layout: ``"rows"`` ``[frames]``, lane by lane and in time within the lane; ``"lanes"``
            ``[lane, time]`` and ``"trajectories"`` ``[trajectory, time]``, padded, with
            ``("collector", "mask")``.
        split_trajs: TorchRL's name for ``layout="trajectories"``.
        surplus: what the last batched step of a batch made beyond it: ``"carry"`` opens the
            next batch with it, ``"discard"`` throws it away, ``"never_step"`` steps only as
            many lanes as are needed.
        replay_buffer: a TorchRL replay buffer that each batch goes into before it is yielded.
        storage: a Tallyroll storage, or a path for a new one (``.h5``, ``.hdf5``: an HDF5 file,
            ``.zarr``: a Zarr group); likewise.
        resume: continue the last run in ``storage`` up to ``total_frames``.
        policy_device, env_device, storing_device: where the policy runs, where the environment
            is moved, where yielded batches lie. ``device`` stands for those that are left out
            (Gymnasium environments stay on the CPU).
        init_random_frames: exactly that many transitions at the start have random actions
            (``policy_version`` -1, the policy's other columns 0).
        max_frames_per_traj: a time limit: such trajectories are truncated.
        reset_at_each_iter: every batch starts with a reset of all lanes.
        postproc: applied to the rows of each batch before they are stored and yielded.
        info_keys: names in a Gymnasium ``info`` that become columns.
        frame_skip: simulator ticks a transition, or an info key that counts the ticks since
            the episode's reset (ALE: ``"episode_frame_number"``).
        exploration_type: TorchRL's exploration type during collection.
        validate: values outside their spaces: ``"raise"``, ``"warn"`` or ``"off"``.
        reset_slots: with a Gymnasium vector environment, see :class:`GymnasiumVectorEnv`.

    Raises:
        ArgumentError, EnvironmentRefused, PolicyError, StorageError: before any file changes.
    """

    def __init__(
        self,
        create_env_fn: CreateEnv,
        policy: PolicyFn | None = None,
        *,
        frames_per_batch: int,
        total_frames: int | None = None,
        total_episodes: int | None = None,
        num_envs: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        layout: Layout = "rows",
        split_trajs: bool = False,
        surplus: Surplus = "carry",
        replay_buffer: ReplayBuffer | None = None,
        storage: StorageLike | None = None,
        resume: bool = False,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        env_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        init_random_frames: int = 0,
        max_frames_per_traj: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Postproc | None = None,
        info_keys: Sequence[str] = (),
        frame_skip: int | str = 1,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        validate: Validate = "raise",
        reset_slots: Literal["mask", "avoid"] = "mask",
    ) -> None:
        self._over = True  # until everything stands
        self.frames_per_batch = arguments.positive("frames_per_batch", frames_per_batch)
        total = arguments.total(total_frames, total_episodes, reset_at_each_iter, surplus)
        arguments.positive("num_envs", num_envs, optional=True)
        arguments.positive("max_frames_per_traj", max_frames_per_traj, optional=True)
        self._init_random_frames = arguments.not_negative("init_random_frames", init_random_frames)
        arguments.one_of("layout", layout, ("rows", "lanes", "trajectories"))
        if split_trajs and layout == "lanes":
            raise ArgumentError('split_trajs=True is layout="trajectories", got layout="lanes" too')
        if postproc is not None and not callable(postproc):
            raise ArgumentError(f"postproc: wanted a callable, got {type(postproc).__name__}")
        arguments.one_of("surplus", surplus, ("carry", "discard", "never_step"))
        self.frame_skip = arguments.frame_skip(frame_skip)
        if isinstance(info_keys, str):
            raise ArgumentError(f"info_keys: wanted a sequence of names, got {info_keys!r}")
        self.layout: Layout = "trajectories" if split_trajs else layout
        self._surplus: Surplus = surplus
        self._budget = Budget(total)
        self._postproc = postproc
        self._exploration = exploration_type
        self._reset_each = reset_at_each_iter
        default = arguments.device("device", device)
        self._storing_device = arguments.device("storing_device", storing_device) or default
        policy_device = arguments.device("policy_device", policy_device) or default
        env_device = arguments.device("env_device", env_device)
        largest = min(self.frames_per_batch, total or self.frames_per_batch)
        self._sink = Sink(storage, replay_buffer, resume, total, largest)
        try:
            if isinstance(frame_skip, str) and frame_skip not in info_keys:
                info_keys = (*info_keys, frame_skip)
            made = make_env(
                create_env_fn,
                num_envs=num_envs,
                env_kwargs=env_kwargs,
                info_keys=info_keys,
                reset_slots=reset_slots,
            )
        except BaseException:
            self._sink.close()
            raise
        self._owns_env = made.owned
        self.env: EnvBase = made.env
        try:
            self._prepare(
                policy,
                seed,
                total_episodes,
                env_device or (None if runs_on_cpu(made.env) else default),
                policy_device,
                max_frames_per_traj,
                validate,
                made.description,
            )
        except BaseException:
            self.shutdown()
            raise

    def _prepare(
        self,
        policy: PolicyFn | None,
        seed: int | None,
        total_episodes: int | None,
        env_device: torch.device | None,
        policy_device: torch.device | None,
        max_frames_per_traj: int | None,
        validate: Validate,
        description: dict[str, Any],
    ) -> None:
        if env_device is not None:
            if env_device.type != "cpu" and runs_on_cpu(self.env):
                raise ArgumentError(
                    f"env_device: a Gymnasium environment steps on the CPU, got {env_device}; "
                    "leave it out, and pass policy_device or storing_device"
                )
            self.env = self.env.to(env_device)
        self.env = with_recurrent_states(self.env, policy)
        if max_frames_per_traj is not None:
            self.env = with_time_limit(self.env, max_frames_per_traj)
        if self._surplus == "never_step" and not can_step_part(self.env):
            raise ArgumentError(
                'surplus="never_step" needs an environment that can step some of its lanes '
                "(a Gymnasium id, SyncVectorEnv with autoreset disabled, SerialEnv, ParallelEnv); "
                f'got {self.env}; use surplus="carry" or "discard"'
            )
        self.lanes = self.env.batch_size.numel()
        resumed = self._sink.resumed()
        if resumed is not None and seed is not None and seed != resumed.seed:
            raise StateError(
                f"the run to be continued has the seed {resumed.seed}, got {seed}; leave it out"
            )
        self.ledger = Ledger(versions=versions())
        if resumed is not None:
            seed = resumed.seed
            self.ledger.load({**resumed.counts, "incarnation": resumed.incarnation})
        self._gate = None
        if total_episodes is not None:
            self._gate = EpisodeGate(total_episodes, self.lanes)
            self._gate.restart(self.ledger.episodes_complete)
        self._rng = np.random.default_rng()
        self._policy = None
        if policy is not None:
            self._policy = Policy(policy, policy_device, self.env.device)
        self._state = LaneState.fresh(self.lanes, self._sink.next_id())
        self._seed_everything(arguments.seed(seed))
        self._rollout, source = build_rollout(
            self.env,
            self._policy,
            frames_per_batch=self.frames_per_batch,
            surplus=self._surplus,
            random_frames=max(0, self._init_random_frames - self.ledger.stored),
            rng=self._rng,
            ledger=self.ledger,
            gate=self._gate,
            exploration=self._exploration,
        )
        self._source: RowSource = source
        self._checks = RangeChecks(
            self.env, policy=policy is not None, validate=validate, lost_finals=source.lost_finals
        )
        self.episodes = EpisodeLog(None if total_episodes is not None else EPISODES_KEPT)
        self._provenance = partial(
            run_provenance,
            description,
            lanes=self.lanes,
            frames_per_batch=self.frames_per_batch,
            total_frames=self._budget.total,
            total_episodes=total_episodes,
            policy=None if policy is None else type(policy).__qualname__,
            surplus=self._surplus,
            frame_skip=self.frame_skip,
        )
        self._delivery = Delivery(
            self._sink,
            source,
            self.ledger,
            self._provenance(self.ledger, self._lane_seeds),
            layout=self.layout,
            postproc=self._postproc,
            device=self._storing_device,
            frame_skip=self.frame_skip,
            count_random=policy is not None,
        )
        self._over = False

    # --- iteration --------------------------------------------------------------------------------

    def _collect(self) -> TensorDictBase | None:
        size = self._budget.batch(self.ledger.stored, self.frames_per_batch)
        parts: list[Rows] = []
        if self._reset_each and self._delivery.batches:
            # What was carried belongs to the trajectories that the reset cuts: it comes first.
            carried = self._numbered(self._fill(min(size, self._rollout.held), parts))
            parts = [] if carried is None else [carried]
            if not self._rollout.held:
                self.ledger.episodes_cut += self._restart_lanes()
        have = sum(len(part[STEP]) for part in parts)
        with torch.no_grad(), set_exploration_type(self._exploration):
            while have < size and (self._rollout.held or not self._rollout.stopping):
                part = self._numbered(self._fill(size - have, parts))
                if part is not None:
                    parts.append(part)
                    have += len(part[STEP])
                if self._rollout.finished:
                    break
        batch = self._deliver(parts) if have else None
        if self._surplus == "discard":
            self._discard()
        spent = self._budget.remaining(self.ledger.stored) == 0
        stopped = self._rollout.stopping and not self._rollout.held
        if spent or stopped or self._rollout.finished:
            self._finish()
        return batch

    def _deliver(self, parts: list[Rows]) -> TensorDictBase:
        try:
            return self._delivery.deliver(parts, int(self._state.open.sum()))
        except BaseException:
            self._finish()
            raise

    def _fill(self, want: int, parts: list[Rows]) -> Block:
        """Step, and check what came; on an error, what is complete is stored first."""
        rollout = self._rollout
        try:
            block = rollout.fill(want)
        except (Exception, KeyboardInterrupt) as error:
            culprit = self._checks.bad_action(rollout.slab, rollout.used, self._state)
            self._rescue(parts, rollout.used)
            if culprit is not None and isinstance(error, Exception):
                raise culprit from error
            raise
        bad = self._checks.first_violation(rollout.slab, block.used, self._state)
        if bad is not None:
            self._rescue(parts, bad.slot)
            raise bad.error
        return block

    def _numbered(self, block: Block) -> Rows | None:
        if not len(block):
            return None
        rows, numbers = self._source.rows(block, self._state)
        self._log(rows, numbers, block)
        return rows

    def _log(self, rows: Rows, numbers: Numbers, block: Block) -> None:
        if isinstance(self.frame_skip, str):
            before = rows[(self.frame_skip,)].reshape(-1)
            self.ledger.reset_ticks += int(before[torch.from_numpy(numbers.start_row)].sum())
        at = numbers.end_row
        if len(at):
            version = rows[POLICY_VERSION].numpy()
            self.episodes.extend(
                numbers.traj_ids[at],
                block.lane[at],
                numbers.returns,
                numbers.lengths,
                rows[TERMINATED].reshape(-1).cpu().numpy()[at],
                (numbers.first_versions, version[at]),
            )

    # --- ends, cuts and errors ------------------------------------------------------------------

    def _restart_lanes(self) -> int:
        everywhere = np.ones(self.lanes, np.bool_)
        cut = self._state.cut(everywhere)
        self._state.restart(everywhere)
        self._rollout.restart_lanes()
        return cut

    def _discard(self) -> None:
        """Throw the surplus away; the trajectories that lose a row there are cut."""
        if not self._rollout.held:
            return
        reward, ended = self._rollout.last_slot(self._source.rewards)
        lanes = self._rollout.discard_held()
        self.ledger.episodes_cut += self._state.cut(lanes)
        self._state.returns[lanes] += reward[lanes]
        self._state.length[lanes] += 1
        self._state.restart(lanes & ended)

    def _rescue(self, parts: list[Rows], slots: int) -> None:
        """After an error: the rows of ``parts`` and of the first ``slots`` slots are stored."""
        if not self._sink.stores:  # nobody would get them
            self._finish()
            return
        bad = self._checks.first_violation(self._rollout.slab, slots, self._state)
        rest = self._numbered(self._rollout.salvage(slots if bad is None else bad.slot))
        parts = parts if rest is None else [*parts, rest]
        if parts:
            self._deliver(parts)
        self._finish()

    def _finish(self) -> None:
        """The run is over: nothing is carried any more, open trajectories are cut."""
        self._over = True
        self._rollout.discard_held()
        ledger = self.ledger
        ledger.discarded = ledger.executed - ledger.stored - ledger.lost
        ledger.episodes_cut += self._state.cut(np.ones(self.lanes, np.bool_))
        ledger.check()
        self._sink.finish(ledger)

    def stop(self) -> None:
        """End the run after the step under way; what is complete makes a last, shorter batch.

        Safe to call from a signal handler or another thread.
        """
        self._rollout.stop()

    def shutdown(self) -> None:
        """End the run, close what was made here: the environment, the storage. Idempotent."""
        if hasattr(self, "_rollout") and not self._over:
            self._finish()
        if self._owns_env:
            self.env.close(raise_if_closed=False)
        self._sink.close()

    # --- policy, seeds, state -------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed everything and start new trajectories; returns a seed for another collector.

        Transitions that wait for the next batch are discarded.
        """
        self._discard()
        self.ledger.episodes_cut += self._restart_lanes()
        self._seed_everything(arguments.seed(seed))
        return seed if static_seed else lane_seed(seed, self.lanes, 0)

    def _seed_everything(self, seed: int | None) -> None:
        incarnation = self.ledger.incarnation
        if seed is not None:
            torch.manual_seed(int(driver_seed(seed, incarnation).generate_state(1)[0]))
        else:
            seed = int(torch.randint(2**31 - 1, ()))
        self.ledger.seed = seed
        # The rollout holds this generator: replace its state, not the object.
        fresh = np.random.default_rng(driver_seed(seed, incarnation))
        self._rng.bit_generator.state = fresh.bit_generator.state
        base = list(chain(self.env))[-1]
        seeds = [lane_seed(seed, lane, incarnation) for lane in range(self.lanes)]
        if isinstance(base, GymnasiumVectorEnv):
            base.seed_lanes(seeds)
        else:
            self.env.set_seed(seeds[0])
            seeds = seeds if self.lanes == 1 else []  # the others are TorchRL's choice
        self._lane_seeds = seeds

    def state_dict(self) -> dict[str, Any]:
        """What a later collector needs to go on: budget, ids, seeds, policy, generators.

        Environments cannot be saved: after loading, every lane starts a new trajectory, from a
        seed that was not used before. Transitions that wait for the next batch are discarded.
        """
        return {
            "ledger": self.ledger.counts(),
            "seed": self.ledger.seed,
            "next_id": self._state.next_id,
            "open": int(self._state.open.sum()),
            "policy": None if self._policy is None else self._policy.state_dict(),
            "env": self.env.state_dict(),
            "generators": {
                "torch": torch.get_rng_state(),
                "actions": self._rng.bit_generator.state,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; call it before iterating.

        Raises:
            StateError: this collector has collected already, or the state has other parts.
        """
        if self.ledger.slots:
            raise StateError("load_state_dict: this collector has collected already")
        missing = sorted(_STATE - set(state))
        if missing:
            raise StateError(
                "load_state_dict: wanted what state_dict() returned, got a mapping without "
                f"{missing}"
            )
        if (state["policy"] is None) != (self._policy is None):
            saved = "without" if state["policy"] is None else "with"
            raise StateError(
                f"load_state_dict: the state was saved {saved} a policy, this collector is the "
                "other way round"
            )
        ledger = self.ledger
        ledger.load(state["ledger"])
        ledger.incarnation += 1
        ledger.discarded += ledger.carried
        ledger.carried = 0
        ledger.episodes_cut += state["open"]
        ledger.check()
        self._state = LaneState.fresh(self.lanes, max(int(state["next_id"]), self._sink.next_id()))
        self._seed_everything(int(state["seed"]))
        self.env.load_state_dict(state["env"])
        if self._policy is not None:
            self._policy.load_state_dict(state["policy"])
        torch.set_rng_state(state["generators"]["torch"])
        self._rng.bit_generator.state = state["generators"]["actions"]
        self._rollout.random_frames = max(0, self._init_random_frames - ledger.stored)
        self._rollout.restart_lanes()
        self._delivery.goes_on_from(self._provenance(ledger, self._lane_seeds))
        self._over = self._budget.remaining(ledger.stored) == 0
