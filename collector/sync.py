"""The collector that steps its environments in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Unpack

from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.base import Collector
from tallyroll.collector.batches.checks.ranges import ranges_of
from tallyroll.collector.batches.collect_guard import OWN_INSTANCE
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.state.run_seeds import Environments
from tallyroll.collector.batches.stored.resume import Resume
from tallyroll.collector.batches.stored.writer import StorageLike
from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.envs.calls.environments import reach_env
from tallyroll.collector.envs.failures import env_code
from tallyroll.collector.envs.setup.instances import take_over
from tallyroll.collector.envs.setup.make import CreateEnv, ReadyEnv, make_env
from tallyroll.collector.envs.setup.outside_steps import OutsideSteps
from tallyroll.collector.envs.setup.prepare import first_reset, prepare_env, seed_env
from tallyroll.collector.errors import EnvironmentRefused, StateError
from tallyroll.collector.interrupts import allow_signals
from tallyroll.collector.options import Options, Postproc, Surplus
from tallyroll.collector.options.objects import (
    Checks,
    Columns,
    DeviceLike,
    Devices,
    Layout,
    LayoutName,
    MoreOptions,
)
from tallyroll.collector.options.resets import Resets
from tallyroll.collector.options.sharding import Shard
from tallyroll.collector.policies.several.entries import Policies
from tallyroll.collector.policies.several.policies import (
    SeveralPolicies,
    policy_argument,
    policy_of,
)
from tallyroll.collector.rollout.slab_plan import make_driver, plan_slab
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.progress import new_board
from tallyroll.collector.user_code import user_code


class SyncCollector(Collector):
    """Collects exactly ``total_frames`` transitions in batches of exactly ``frames_per_batch``.

    Examples:
        >>> from tallyroll.collector import SyncCollector
        >>> with SyncCollector(
        ...     "CartPole-v1", num_envs=8, frames_per_batch=100, total_frames=250, seed=0
        ... ) as collector:
        ...     for batch in collector:
        ...         print(len(batch), batch["next", "observation"].shape)
        100 torch.Size([100, 4])
        100 torch.Size([100, 4])
        50 torch.Size([50, 4])

    Iterating yields TensorDicts in TorchRL's episode data format; the last one has the remaining
    transitions. A transition is one action that an environment executed. Slots in which a vector
    environment resets itself are neither counted nor stored. Arguments that TorchRL's collectors
    also have share their names and meanings.

    Args:
        create_env_fn: a Gymnasium id, ``SYSTEM:ID`` (``tallyroll envs`` lists the systems) or a
            function that makes one Gymnasium environment, with ``num_envs`` lanes; a TorchRL
            environment of batch size ``[]`` or ``[lanes]``, a Gymnasium vector environment, an
            environment of such a system, or a factory of one of these. The collector closes
            environments that it makes; the caller closes an instance. If a factory has an argument
            ``seeds``, the collector passes it None, or one seed per lane, and calls the factory
            again when the run is seeded or resumed. A factory with an argument ``num_envs`` makes
            that many lanes, if the collector is given the number.
        policy: a TensorDictModule, a callable from TensorDict to TensorDict, a module or a function
            of tensors, or a model of Stable-Baselines3, which acts with ``predict``. The arguments
            of a module or a function of tensors have the names of observations; a single argument
            of a module may have any name. None draws random actions, which obey an
            ``"action_mask"``. Several policies are ``[(lanes, policy), …]`` or ``{group: policy}``;
            see `OnePolicy`. The policy gets its own tensors, which it may write to and keep.
            Everything that it adds to them becomes columns, except names that begin with an
            underscore. To store only the action, pass ``TensorDictSequential(policy,
            selected_out_keys=["action"])``. Actions are converted to the form that the environment
            takes if the conversion is lossless: another dtype, one axis more or less, a one-hot for
            an index or the reverse. The converted action is stored.
        frames_per_batch: number of transitions per batch.
        total_frames: total number of transitions; -1 continues until :meth:`stop`.
        num_envs: number of lanes, if ``create_env_fn`` is an id or a function that makes a single
            environment; None means one lane.
        seed: seed that makes the data repeatable from the first observation on; it also seeds
            torch's global generator. With None, the seed for environments and random actions is
            drawn from torch's generator, which is not reseeded; :attr:`ledger` reports the seed.
        storage: a Tallyroll storage, or a path for a new one, to which each batch is written before
            it is yielded. A path that ends in ``.h5`` or ``.hdf5`` is an HDF5 file, and one that
            ends in ``.zarr`` is a Zarr group.
        device: the device of the policy, of the environment (Gymnasium environments stay on the
            CPU) and of yielded batches.

    Other Parameters:
        total_episodes: number of complete episodes to collect, instead of ``total_frames``. The
            number is exact, and the episodes are those that start first.
        env_kwargs: keyword arguments of ``gymnasium.make``, or of the system's function, if
            ``create_env_fn`` is an id.
        resume: True to continue the last run in ``storage`` up to ``total_frames``; ``"auto"``
            starts a run if there is no storage yet, or no row in it, as ``--resume`` does.
        replay_buffer: a TorchRL replay buffer to which each batch is added before it is yielded.
        layout: ``"rows"`` ``[frames]``, ``"lanes"`` ``[lane, time]``, ``"trajectories"``
            ``[trajectory, time]``, or ``"torchrl"``; see :class:`Layout` for its options.
        surplus: handling of surplus transitions of a batch's last batched step: ``"carry"`` starts
            the next batch with them, ``"discard"`` drops them, and ``"never_step"`` avoids them by
            stepping only as many lanes as are needed.
        init_random_frames: number of transitions at the start that have random actions. The number
            is exact. In these rows, ``policy_version`` is -1 and the policy's other columns are 0;
            a recurrent state does not change. If lanes return in any order, these are the
            transitions that return first.
        exploration_type: TorchRL's exploration type during collection.
        max_frames_per_traj: time limit after which trajectories are truncated.
        reset_at_each_iter: True to reset all lanes at the start of every batch.
        postproc: a function applied to the rows of each batch before they are stored and yielded.
        columns: options of columns: infos, new names, ticks, large rows; see :class:`Columns`.
        checks: checks of values outside their spaces and of final observations; see
            :class:`Checks`.
        devices: devices of policy, environment and batches, if they differ; see :class:`Devices`.
        resets: seeds and options with which each episode starts, as columns; see :class:`Resets`.
        shard: one part of a run, such as ``"2/8"`` for part 2 of 8, counted from 0. ``num_envs``
            and ``total_frames`` then describe all parts together; see :class:`Shard`.
        progress: True to show a bar on the terminal or in the notebook, and lines on stderr
            elsewhere, with the rate, the finished episodes and their mean return.
        more: the fields of these objects as keywords, such as ``frame_skip=4`` or
            ``policy_device="cuda"``. A keyword is refused if the object already has that field.

    Raises:
        ArgumentError, EnvironmentRefused, PolicyError, StorageError: raised before any file
            changes.
        SilentReset: the environment resets itself; raised while collecting. The batch or commit in
            which the reset is detected is not stored.
    """

    def __init__(
        self,
        create_env_fn: CreateEnv,
        policy: Policies | None = None,
        *,
        frames_per_batch: int,
        total_frames: int | None = None,
        num_envs: int | None = None,
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
        **more: Unpack[MoreOptions],
    ) -> None:
        options = Options.of(locals())
        super().__init__(options, replay_buffer=replay_buffer, storage=storage, resume=resume)
        self._owns_env = False
        try:
            with user_code("making the collector"):
                made = make_env(create_env_fn, options)
                self._env: EnvBase = made.env
                self._owns_env = made.owned
                self._prepare(policy, made)
        except BaseException:
            self.shutdown()
            raise

    @property
    def env(self) -> EnvBase:
        """The environment that this collector steps, as a TorchRL environment."""
        return self._env

    def _environments(self, env: EnvBase) -> Environments:
        return OwnEnvironment(env, self._options)

    def _prepare(self, policy: Any, made: ReadyEnv) -> None:
        given, lanes = policy_argument(policy), self._env.batch_size.numel()
        self._env = prepare_env(self._env, given, self._options)
        self._options = self._options.for_env_on(self.env.device)
        self._policy = policy_of(given, self._options.policy_device, self.env.device)
        if isinstance(self._policy, SeveralPolicies):
            self._policy.bind_whole(lanes, self._options.part)
        self._begin_run(lanes, self._environments(self.env))
        options = self._options
        take_over(self.env, made.instance, self._lost_env)
        first = first_reset(self.env, options.first_lane)
        plan = plan_slab(self.env, self._policy, first, options)
        if plan.arrivals and options.total_episodes is not None and options.init_random_frames:
            raise EnvironmentRefused(
                "init_random_frames: the number is not exact with total_episodes if lanes come "
                "back in any order. Give total_frames, or leave init_random_frames out."
            )
        slab = plan.slab(
            plan.slots(self.lanes, self.frames_per_batch),
            self.lanes,
            device=None if plan.in_place else self.env.device,
            first_lane=options.first_lane,
        )
        rng, part = self._beginning.seeds.rng, options.part
        run_lanes = None if part is None else part.run_lanes
        driver = make_driver(self.env, self._policy, plan, slab, rng, new_board(), run_lanes)
        driver.start_from(first)
        lost, first_lane = plan.lost_finals, options.first_lane
        ranges = ranges_of(
            self.env, policy=policy is not None, lost_finals=lost, first_lane=first_lane
        )
        torchrl = None
        if options.layout.name == "torchrl":
            torchrl = TorchrlLayout(options, plan, [tuple(self.env.batch_size)])
        self._driver = driver
        rollout = self._beginning.rollout(driver, plan)
        self._drive(
            rollout,
            plan,
            ranges,
            made.description,
            torchrl=torchrl,
        )
        self._run.watch(OutsideSteps(self.env, lambda: rollout.resets_first))

    def _stepping(self) -> dict[str, Decision]:
        return self._driver.decisions()

    def _close_source(self) -> None:
        if self._owns_env:
            with allow_signals(), env_code("closing the environment"):
                self.env.close(raise_if_closed=False)

    def _lost_env(self) -> None:
        """Refuse later collecting calls, because another collector drives the environment.

        Raises:
            StateError: this collector is stepping the environment.
        """
        if not hasattr(self, "_guard"):
            return
        if self._guard.is_entered:
            raise StateError(f"a collector is stepping this environment. {OWN_INSTANCE}")
        self._run.lose()


class OwnEnvironment:
    """The environment that a collector steps itself, with the operations that its run needs."""

    def __init__(self, env: EnvBase, options: Options) -> None:
        self._env = env
        self._lanes = options.own_lanes(env.batch_size.numel())

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        """Seed the environment's lanes; see `Environments`."""
        return seed_env(self._env, seed, incarnation, self._lanes, asked=asked)

    def state(self) -> Any:
        """Return a copy of the environment's state, because statistics change in place."""
        return deepcopy(self._env.state_dict())

    def load(self, state: Any) -> None:
        """Restore a result of :meth:`state`.

        If ``state`` is a list of workers' states, restore the first one that is not empty.
        """
        if isinstance(state, list):
            state = next((each for each in state if each), {})
        self._env.load_state_dict(state)

    def reach(self, asked: EnvCall, lanes: Sequence[int]) -> list[CallOutcome]:
        """Call the environments of ``lanes``; see `Environments`."""
        if self._env.is_closed:
            raise StateError(f"{asked}: the environment was closed, for example by shutdown()")
        own = [lane - self._lanes.start for lane in lanes]
        return list(reach_env(self._env, asked, own))
