"""The collector of one process."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.batches.checks.ranges import ranges_of
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.rows.rows_ahead import planned
from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.batches.state.run_seeds import Environments
from tallyroll.collector.batches.stored.resume import Resume
from tallyroll.collector.batches.stored.writer import StorageLike
from tallyroll.collector.batches.undivided import OWN_INSTANCE
from tallyroll.collector.envs.driven.instances import take_over
from tallyroll.collector.envs.driven.make import CreateEnv, Made, make_env
from tallyroll.collector.envs.driven.prepare import first_reset, prepare_env, seed_env
from tallyroll.collector.errors import EnvironmentRefused, StateError
from tallyroll.collector.options import (
    Finals,
    Layout,
    Options,
    Postproc,
    ResetSlots,
    Surplus,
    Validate,
)
from tallyroll.collector.policies.policy import Policy, PolicyFn
from tallyroll.collector.rollout.os_signals import admitted
from tallyroll.collector.rollout.slab_plan import make_driver, plan_slab
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import Rename
from tallyroll.collector.slab.progress import new_board


class SyncCollector(Collector):
    """Collects exactly ``total_frames`` transitions in batches of exactly ``frames_per_batch``.

    Iterating yields TensorDicts in TorchRL's episode data format; the last one holds what
    remains. A transition is one action that an environment executed: slots in which a vector
    environment resets itself are neither counted nor stored. Names and meanings of arguments
    are those of TorchRL's collectors where it has them.

    Args:
        create_env_fn: a Gymnasium id, ``SYSTEM:ID`` (``tallyroll envs`` lists the systems) or a
            function that makes one Gymnasium environment, with ``num_envs`` lanes; a TorchRL
            environment of batch size ``[]`` or ``[lanes]``, a Gymnasium vector environment, an
            environment of such a system, or a factory of one of these. What the collector makes it
            closes; an instance stays yours to close. A factory with an argument ``seeds`` is called
            by that name, with None or a seed a lane, and with a seed or a resume once more.
        policy: a TensorDictModule, a callable from TensorDict to TensorDict, a module or a
            function of tensors (its arguments are called like observations; a module of one
            argument may call it anything) or a model of Stable-Baselines3 (it acts by
            ``predict``); None draws random actions, and honours an ``"action_mask"``. It gets
            tensors of its own, to write to and to keep as it likes. All that it adds to them
            becomes columns, but for names that begin with an underscore: where the action is
            enough, make it ``TensorDictSequential(policy, selected_out_keys=["action"])``.
            Actions of another dtype, of an axis of one more or less, one-hots for indices and
            the other way round become what the environment takes, where nothing is lost; that
            is what is stored.
        frames_per_batch: transitions a batch.
        total_frames: transitions in all; -1 goes on until :meth:`stop`.
        total_episodes: instead, exactly that many episodes, whole, those that start first.
        num_envs: lanes, with an id or a function that makes a single environment; None: one.
        env_kwargs: keyword arguments of ``gymnasium.make``, or of the system's own, with an id.
        seed: makes the data repeatable from the first observation on; it also seeds torch's
            global generator. None draws one from torch's generator, for the environments and
            for random actions, which :attr:`ledger` reports, and goes on with that generator.
        layout: ``"rows"`` ``[frames]``, lane by lane and in time within the lane; ``"lanes"``
            ``[lane, time]`` and ``"trajectories"`` ``[trajectory, time]``, padded, with
            ``("collector", "mask")``; ``"torchrl"`` what TorchRL's collectors give:
            ``[lanes, time]`` (``[time]`` of an environment without a batch size), ``time`` named,
            done flags at the root too, and ``("next", "done")`` not True on cuts. Where lanes
            differ in length it is padded, with a mask, done at each lane's last row, and a warning.
        split_trajs: TorchRL's name for ``layout="trajectories"``; in ``"torchrl"`` trajectories
            come lane by lane.
        set_truncated: as in TorchRL, the last row of each lane of a batch is ``truncated`` and
            ``done``; in ``layout="torchrl"`` only, and never in what is stored.
        surplus: what the last batched step of a batch made beyond it: ``"carry"`` opens the
            next batch with it, ``"discard"`` throws it away, ``"never_step"`` steps only as
            many lanes as are needed.
        replay_buffer: a TorchRL replay buffer that each batch goes into before it is yielded.
        storage: a Tallyroll storage, or a path for a new one (``.h5``, ``.hdf5``: an HDF5 file,
            ``.zarr``: a Zarr group); likewise.
        resume: continue the last run in ``storage`` up to ``total_frames``; ``"auto"`` begins
            it where there is no storage yet, or no row in it, as ``--resume`` does.
        device, policy_device, env_device, storing_device: where the policy runs, where the
            environment is moved, where yielded batches lie. ``device`` stands for those that are
            left out (Gymnasium environments stay on the CPU).
        init_random_frames: exactly that many transitions at the start have random actions
            (``policy_version`` -1, the policy's other columns 0, a recurrent state as it was);
            where lanes come back in any order, those that come back first.
        max_frames_per_traj: a time limit: such trajectories are truncated.
        reset_at_each_iter: every batch starts with a reset of all lanes.
        postproc: applied to the rows of each batch before they are stored and yielded.
        info_keys: entries of infos (of Gymnasium, Stable-Baselines3, EnvPool, gym3) that become
            columns: names, or :class:`Info` with dtype, shape and fill. Of a name alone, a
            Gymnasium environment that the collector makes is asked by way of another one, which
            is closed again; any other declares it with its first reset.
        rename: other names for columns of observations and infos, where they collide:
            ``{"action": "previous_action"}``, nested ones as tuples or ``"a/b"``. Random actions
            do not keep to an ``action_mask`` that has another name.
        frame_skip: simulator ticks a transition, or an info key that counts the ticks since
            the episode's reset (ALE: ``"episode_frame_number"``).
        exploration_type: TorchRL's exploration type during collection.
        validate: values outside their spaces. ``"noise"`` raises, but for numbers outside the box
            of a continuous action, as exploration noise makes them: they are executed and stored
            as they are, and the first is a warning; ``"raise"`` raises for these too, ``"warn"``
            warns once of the first of all, ``"off"`` lets them pass. An action that is NaN or
            infinite raises in any case.
        reset_slots: with a Gymnasium vector environment, see :class:`GymnasiumVectorEnv`.
        yield_large: False leaves columns with rows of 4 KiB and more (images) out of the batches
            that are yielded: they go straight to ``storage``, one copy less.
        finals: what final observations are. ``"check"`` compares the first few with the first
            observations that follow them, and raises :class:`SilentReset` where the environment
            resets itself within step and so returns the next episode's first observation as the
            final one; ``"lost"`` says that it does so, and adds ``("collector", "next_valid")``,
            False at ends; ``"kept"`` says that they are right, for a reset keeps the state.

    Raises:
        ArgumentError, EnvironmentRefused, PolicyError, StorageError: before any file changes.
        SilentReset: while collecting; the batch, or the commit, that shows it is not stored.

    Examples:
        >>> from tallyroll.collector import SyncCollector
        >>> collector = SyncCollector(
        ...     "CartPole-v1", num_envs=8, frames_per_batch=100, total_frames=250, seed=0
        ... )
        >>> with collector:
        ...     for batch in collector:
        ...         print(len(batch), batch["next", "observation"].shape)
        100 torch.Size([100, 4])
        100 torch.Size([100, 4])
        50 torch.Size([50, 4])
        >>> collector.ledger.stored
        250
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
    ) -> None:
        options = Options.of(locals())
        super().__init__(options, replay_buffer=replay_buffer, storage=storage, resume=resume)
        self._owns_env = False
        try:
            made = make_env(create_env_fn, options)
            self.env: EnvBase = made.env
            self._owns_env = made.owned
            self._prepare(policy, made)
        except BaseException:
            self.shutdown()
            raise

    def _environments(self, env: EnvBase) -> Environments:
        return OwnEnvironment(env)

    def _prepare(self, policy: PolicyFn | None, made: Made) -> None:
        self.env = prepare_env(self.env, policy, self._options)
        self._policy = None
        if policy is not None:
            self._policy = Policy(policy, self._options.policy_device, self.env.device)
        self._begin_run(self.env.batch_size.numel(), self._environments(self.env))
        options = self._options
        take_over(self.env, made.instance, self._lost_env)
        first = first_reset(self.env)
        plan = plan_slab(self.env, self._policy, first, options)
        if plan.arrivals and options.total_episodes is not None and options.init_random_frames:
            raise EnvironmentRefused(
                "init_random_frames: with total_episodes they are not exact where lanes come back "
                "in any order; give total_frames, or leave init_random_frames out"
            )
        slab = plan.slab(
            plan.slots(self.lanes, self.frames_per_batch),
            self.lanes,
            device=None if plan.in_place else self.env.device,
        )
        rng = self._beginning.seeds.rng
        driver = make_driver(self.env, self._policy, plan, slab, rng, new_board())
        driver.start_from(first)
        ranges = ranges_of(self.env, policy=policy is not None, lost_finals=plan.lost_finals)
        torchrl = None
        if options.layout == "torchrl":
            torchrl = TorchrlLayout(options, plan, [tuple(self.env.batch_size)])
        self._driver = driver
        self._rows_ahead, ahead = planned(driver.stepped, driver.board, plan, options)
        self._drive(
            self._beginning.rollout(driver, plan),
            plan,
            ranges,
            made.description,
            torchrl=torchrl,
            ahead=ahead,
        )

    def _stepping(self) -> dict[str, Decision]:
        return {**self._driver.decisions(), "ahead": self._rows_ahead}

    def _close_source(self) -> None:
        if self._owns_env:
            with admitted():
                self.env.close(raise_if_closed=False)

    def _lost_env(self) -> None:
        """Note that another collector takes the environment over, and changes its lanes.

        Raises:
            StateError: this one is stepping it.
        """
        if not hasattr(self, "_assembly"):
            return
        if self._run.busy and not self._run.lost:
            raise StateError(f"a collector is stepping this environment; {OWN_INSTANCE}")
        self._run.busy = self._run.lost = True


class OwnEnvironment:
    """The environment that a collector steps itself, as its run seeds and saves it."""

    def __init__(self, env: EnvBase) -> None:
        self._env = env

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        """Seed its lanes; see `Environments`."""
        return seed_env(self._env, seed, incarnation, asked=asked)

    def state(self) -> Any:
        """Return a copy of its state: statistics are changed in place."""
        return deepcopy(self._env.state_dict())

    def load(self, state: Any) -> None:
        """Take over a state, of workers' environments the first one that there is."""
        if isinstance(state, list):
            state = next((each for each in state if each), {})
        self._env.load_state_dict(state)
