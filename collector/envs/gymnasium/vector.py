"""Any Gymnasium vector environment, in any autoreset mode, with every final observation true."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

from tallyroll.collector.compat import OBSERVATIONS, own_observations
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.gymnasium.info_merge import install
from tallyroll.collector.envs.gymnasium.infos import RESET_SLOT, InfoColumns
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.reuse import share_memory, sharing
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, TransitionError
from tallyroll.collector.options import ResetSlots, one_of
from tallyroll.collector.slab.info import Info, infos_of
from tallyroll.collector.slab.names import Named, Rename, renamed, require_names
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Array, Cursor
from tallyroll.storage.rows.keys import VALID, Key, spell

_REFUSED = {
    "gymnasium.envs.functional_jax_env": "a functional (phys2d) vector environment gives reward 1 "
    "in reset slots and loses the transitions of every other lane there; use the CPU version of "
    "the environment",
    "envpool": "EnvPool needs an adapter of its own, which this version does not have; use "
    "gymnasium.make_vec",
    "supersuit": "SuperSuit's vectors are wrong where agents die unevenly; use gymnasium.make_vec",
}


_NOTHING = np.empty(0)


class GymnasiumVectorEnv(EnvBase):
    """A TorchRL environment over a ``gymnasium.vector.VectorEnv``.

    Observations: Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple of them; a plain
    space is ``"observation"``, a Dict's names are root keys, a Tuple stands under
    ``"observation"`` as ``"0"``, ``"1"``, …. Actions: Box, Discrete, MultiDiscrete or
    MultiBinary, under ``"action"``; discrete ones are integers ``[lanes]``, not one-hot.
    Reward is float32 ``[lanes, 1]``; done, terminated, truncated are bool ``[lanes, 1]``.

    Args:
        env: the vector environment, its ``num_envs`` lanes. Closing this closes it.
        reset_slots: what to do with the slots in which a NEXT_STEP environment resets itself.
            ``"mask"`` lets them happen and marks them; ``"avoid"`` resets by mask right after
            the end, so that no policy call is wasted (worth it for costly policies).
        info_keys: entries of ``info`` that become observation columns: names, nested ones as
            tuples or ``"episode/r"``, or :class:`Info`. A name alone takes dtype and shape from
            the first reset, and is a column from then on; every step and reset has to give it.
        reset_masks: whether ``reset(options={"reset_mask": …})`` resets a part of the lanes;
            known for Sync and Async, False otherwise unless you say so.
        rename: other names for columns, ``{"action": "previous_action"}``: old name -> new name,
            of an observation, or else of an info; nested ones as tuples or ``"a/b"``.

    Raises:
        ArgumentError: an argument that cannot be right.
        NameRefused: names of columns that collide; settled by ``rename``.
        EnvironmentRefused: an environment that cannot be driven without losing transitions.
        SpaceError: a space that no column can hold.

    Source of the semantics: Gymnasium's ``AutoresetMode``, read from
    ``env.unwrapped.autoreset_mode``, then from ``env.metadata``.
    """

    in_place: ClassVar[bool] = True

    def __init__(
        self,
        env: VectorEnv,
        *,
        reset_slots: ResetSlots = "mask",
        info_keys: Sequence[str | tuple[str, ...] | Info] = (),
        reset_masks: bool | None = None,
        rename: Rename | None = None,
    ) -> None:
        if not isinstance(env, VectorEnv):
            raise ArgumentError(
                f"expected a gymnasium.vector.VectorEnv, got {type(env).__name__}; make one with "
                "gymnasium.make_vec(id, num_envs=…)"
            )
        one_of("reset_slots", reset_slots, ResetSlots)
        for base in type(env.unwrapped).__mro__:
            for module, reason in _REFUSED.items():
                if base.__module__.startswith(module):
                    raise EnvironmentRefused(reason)
        lanes = int(env.num_envs)
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([lanes]))
        self.is_closed = False
        self._vec = env
        self.autoreset = autoreset_mode(env)
        known = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self.resets_by_mask = known if reset_masks is None else reset_masks
        if self.autoreset is AutoresetMode.DISABLED and not self.resets_by_mask:
            raise EnvironmentRefused(
                f"{type(env.unwrapped).__name__} has autoreset disabled and no reset by mask, so "
                "a lane whose episode ended could not be restarted alone; use SyncVectorEnv, or "
                'pass reset_masks=True if it honours options["reset_mask"]'
            )
        if reset_slots == "avoid" and not self.resets_by_mask:
            raise EnvironmentRefused(
                f'reset_slots="avoid" resets lanes by mask, which {type(env.unwrapped).__name__} '
                'ignores; use reset_slots="mask"'
            )
        self._avoid = reset_slots == "avoid" and self.autoreset is AutoresetMode.NEXT_STEP
        self._infos = InfoColumns(infos_of(info_keys), lanes)
        leaves = observation_leaves(env.single_observation_space, lanes)
        columns = [Named(leaf.key, leaf.path) for leaf in leaves] + self._infos.columns
        keys = renamed(columns, rename or {})
        require_names(columns, given=keys)
        self._leaves = [replace(leaf, key=key) for leaf, key in zip(leaves, keys, strict=False)]
        self._info_keys = tuple(keys[len(leaves) :])
        self._getters = [leaf.getter() for leaf in self._leaves]
        self._action = action_leaf(env.single_action_space, lanes)
        if self._infos:
            install(env, {info.key[-1] for info in self._infos.infos})
        self._seeds: list[int] | None = None
        self._pending = np.zeros(lanes, np.bool_)
        self._fresh: list[Array] = []
        self._fresh_lanes = np.zeros(lanes, np.bool_)
        self._set_specs(lanes)
        self._bind_step()

    def _set_specs(self, lanes: int) -> None:
        shape = torch.Size([lanes])
        observation = Composite(shape=shape, device=self.device)
        for leaf in self._leaves:
            observation[leaf.key] = leaf.spec
        if self._infos.declared:
            for key, info_spec in zip(self._info_keys, self._infos.specs(), strict=True):
                observation[key] = info_spec
        if self.marks_transitions:
            observation[VALID] = Binary(1, shape=(lanes, 1), dtype=torch.bool)
        self.observation_spec = observation
        self.action_spec = self._action.spec
        self.reward_spec = Unbounded(shape=(lanes, 1), dtype=torch.float32)
        flag = Binary(1, shape=(lanes, 1), dtype=torch.bool)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape
        )

    @property
    def marks_transitions(self) -> bool:
        """Reset slots cannot be avoided, so plain steps mark them in ``("collector", "valid")``."""
        return self.autoreset is AutoresetMode.NEXT_STEP and not self.resets_by_mask

    @property
    def has_reset_slots(self) -> bool:
        """Some slots of an in-place rollout are reset slots."""
        return self.autoreset is AutoresetMode.NEXT_STEP and not self._avoid

    @property
    def can_step_part(self) -> bool:
        """Some lanes can be stepped while others wait."""
        return (
            type(self._vec) is SyncVectorEnv and self.autoreset is AutoresetMode.DISABLED
        ) or self.batch_size[0] == 1

    @property
    def vector_env(self) -> VectorEnv:
        """The Gymnasium environment underneath."""
        return self._vec

    @property
    def observation_keys(self) -> tuple[Key, ...]:
        """Columns of the observation, in the order of a slot's arrays.

        Those of infos are among them from the first reset on, or where they are declared.
        """
        keys = tuple(leaf.key for leaf in self._leaves)
        return keys + self._info_keys if self._infos.declared else keys

    @property
    def info_keys(self) -> tuple[Key, ...]:
        """Columns of infos, also of those that the first reset will declare."""
        return self._info_keys

    @property
    def info_names(self) -> tuple[str, ...]:
        """Names at the root of ``info`` that columns are read from."""
        return tuple(dict.fromkeys(info.key[0] for info in self._infos.infos))

    @property
    def first_lane(self) -> int:
        """The number of the first lane in a run; 0 unless a collector says otherwise."""
        return self._infos.first_lane

    @first_lane.setter
    def first_lane(self, lane: int) -> None:
        self._infos.first_lane = lane

    def seed_lanes(self, seeds: Sequence[int]) -> None:
        """Seed every lane at the next full reset (where one seed is taken, the first)."""
        if len(seeds) != self.batch_size[0]:
            raise ArgumentError(
                f"expected {self.batch_size[0]} seeds, one a lane, got {len(seeds)}"
            )
        self._seeds = [int(seed) for seed in seeds]

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the Gymnasium environment too."""
        if not self.is_closed:
            self._vec.close()
        super().close(raise_if_closed=raise_if_closed)

    # --- in place: the collector's path -------------------------------------------------------

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """One batched step; lanes whose episode ended start the next one.

        With a tensordict of a slab (it has the attribute ``cursor``) the slab is filled in place,
        and the tensordict returned as it is; any other is treated as TorchRL's own environments
        treat it.
        """
        cursor: Cursor | None = getattr(tensordict, "cursor", None)
        if cursor is None:
            return self._step_and_maybe_reset_copied(tensordict)
        self.step_block(cursor, cursor.at, cursor.at + 1)
        return tensordict, tensordict

    def step_block(self, cursor: Cursor, start: int, stop: int) -> None:
        """Step through the slots ``[start, stop)``, whose actions are all known beforehand.

        ``cursor.at`` is the slot under way; ``cursor.board`` may end the block after it.
        """
        if self._lent is None:
            self._step_block(cursor, start, stop)
            return
        own = getattr(self._lent, OBSERVATIONS)
        try:
            self._step_block(cursor, start, stop)
        finally:
            setattr(self._lent, OBSERVATIONS, own)

    def _step_block(self, cursor: Cursor, start: int, stop: int) -> None:
        step, copies, plain, finish = self._vec_step, self._copy_action, self._plain, self._finish
        actions, rewards, next_obs = cursor.action, cursor.reward, cursor.next_obs
        terminations, truncations, first_obs = cursor.terminated, cursor.truncated, next_obs[0]
        board, lend, lent = cursor.board, self._lent, _NOTHING
        infos = self._infos if self._infos else None
        ends = RESET_SLOT if self.has_reset_slots else 0
        for at in range(start, stop):
            cursor.at = at
            action = actions[at].copy() if copies else actions[at]
            if lend is not None:
                lent = first_obs[at]
                setattr(lend, OBSERVATIONS, lent)
            obs, reward, terminated, truncated, info = step(action)
            if plain is None:
                self._write_observations([column[at] for column in next_obs], obs)
            elif obs is not lent:
                if type(obs) is not np.ndarray or obs.shape != plain[0] or obs.dtype != plain[1]:
                    self._check_leaf(0, obs)
                first_obs[at] = obs
            try:
                rewards[at] = reward
                terminations[at] = terminated
                truncations[at] = truncated
            except (TypeError, ValueError) as error:
                raise self._wrong_shapes(reward, terminated, truncated) from error
            if infos is not None:
                self._write_infos([column[at] for column in next_obs], info, terminated | truncated)
            if finish is not None:
                for root, after in zip(cursor.root_obs, next_obs, strict=True):
                    root[at] = after[at]
                ended = terminated | truncated
                if ended.any():
                    finish(cursor, ended, obs, info)
            if infos is not None:
                infos.count(terminated | truncated, ends)
            board[FILLED] = at + 1
            if board[HALT]:
                break

    def _step_and_maybe_reset_copied(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        if self.marks_transitions:
            tensordict = self.step(tensordict)
            return tensordict, self._reset_flags(self._step_mdp(tensordict))
        stepped: tuple[TensorDictBase, TensorDictBase] = super().step_and_maybe_reset(tensordict)
        return stepped

    def _bind_step(self) -> None:
        """Choose once what would otherwise be asked at every step."""
        self._vec_step = self._vec.step
        # A discrete action reaches each sub-environment as a number; an array is handed over
        # as a copy, for an environment may keep it or write to it.
        self._copy_action = not (type(self._vec) is SyncVectorEnv and len(self._action.shape) == 1)
        plain = len(self._leaves) == 1 and not self._leaves[0].path and not self._infos
        self._plain = (self._leaves[0].shape, self._leaves[0].dtype) if plain else None
        # The vector may put observations together where they are wanted: one copy less.
        lends = plain and type(self._vec) is SyncVectorEnv and not self._vec.copy
        self._lent = self._vec if lends and hasattr(self._vec, OBSERVATIONS) else None
        finish: dict[AutoresetMode, Callable[..., None]] = {
            AutoresetMode.SAME_STEP: self._finish_same_step,
            AutoresetMode.DISABLED: self._finish_by_mask,
        }
        self._finish = self._finish_by_mask if self._avoid else finish.get(self.autoreset)

    def _write_infos(
        self, rows: Sequence[Array], info: Mapping[str, Any], ended: NDArray[np.bool_]
    ) -> None:
        """Those of the step; in SAME_STEP mode lanes that ended show those of their reset here."""
        others = None
        if self.autoreset is AutoresetMode.SAME_STEP and ended.any():
            others = ~ended
        self._infos.write(rows[len(self._getters) :], info, others)

    def _write_observations(self, rows: Sequence[Array], obs: Any) -> None:
        for index, get in enumerate(self._getters):
            value = get(obs)
            self._check_leaf(index, value)
            rows[index][...] = value

    def _check_leaf(self, index: int, value: Any) -> None:
        leaf = self._leaves[index]
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape != leaf.shape or dtype != leaf.dtype:
            raise TransitionError(
                f"{spell(leaf.key)}: the space declares {leaf.dtype} {list(leaf.shape)}, the "
                f"environment returned {dtype} {list(shape or ())} ({type(value).__name__}); "
                "correct the environment's space, or cast in a wrapper"
            )

    def _wrong_shapes(self, *got: Any) -> TransitionError:
        names = ("reward", "terminated", "truncated")
        shapes = {name: list(np.shape(value)) for name, value in zip(names, got, strict=True)}
        return TransitionError(
            f"expected reward, terminated and truncated of shape {list(self.batch_size)}, one "
            "number "
            f"a lane, got the shapes {shapes}; reduce a vector of rewards in a wrapper"
        )

    def _finish_by_mask(
        self, cursor: Cursor, ended: NDArray[np.bool_], obs: Any, info: Any
    ) -> None:
        rows = [column[cursor.at] for column in cursor.root_obs]
        if self._lent is not None:
            setattr(self._lent, OBSERVATIONS, rows[0])
        obs, info = self._vec.reset(options={"reset_mask": ended})
        for row, get in zip(rows, self._getters, strict=False):
            row[ended] = get(obs)[ended]
        self._infos.write_reset(rows[len(self._getters) :], info, ended)

    def _finish_same_step(
        self, cursor: Cursor, ended: NDArray[np.bool_], obs: Any, info: Mapping[str, Any]
    ) -> None:
        self._put_finals([column[cursor.at] for column in cursor.next_obs], ended, obs, info)
        first = [column[cursor.at] for column in cursor.root_obs[len(self._getters) :]]
        self._infos.write_first(first, info, ended)

    def _put_finals(
        self, rows: Sequence[Array], ended: NDArray[np.bool_], obs: Any, info: Mapping[str, Any]
    ) -> None:
        """Replace the first observations of the next episodes by the final ones."""
        if "final_obs" not in info:
            raise TransitionError(
                f"{type(self._vec.unwrapped).__name__} reported SAME_STEP autoreset but no "
                'info["final_obs"] at the end of an episode, so final observations are lost; '
                "use NEXT_STEP or DISABLED"
            )
        finals = info["final_obs"]
        for lane in np.nonzero(ended)[0].tolist():
            final = finals[lane] if not isinstance(finals, Mapping) else None
            for index, get in enumerate(self._getters):
                value = get(finals)[lane] if final is None else get(final)
                self._refuse_reused(lane, get, value, obs)
                rows[index][lane] = value
        self._infos.write_final(rows[len(self._getters) :], info, ended)

    def _refuse_reused(self, lane: int, get: Callable[[Any], Any], final: Any, obs: Any) -> None:
        """Refuse a lane whose final observation is in the array of the next first one.

        That is a lane which returns one array each time, or a vector whose final observations
        are views of what it returns.
        """
        if not isinstance(final, np.ndarray):
            return
        held = own_observations(self._vec)
        first = get(held[lane]) if held else get(obs)[lane]
        if share_memory(first, final):
            raise EnvironmentRefused(
                f"lane {lane} returns its observations in one array that it overwrites, so in "
                "SAME_STEP mode the final observation is gone when the step returns; use "
                "NEXT_STEP or DISABLED, or return copies"
            )

    def _refuse_shared(self) -> None:
        """Lanes that return one array for all of them overwrite each other's observations."""
        if pair := sharing(own_observations(self._vec)):
            raise EnvironmentRefused(
                f"lanes {pair[0]} and {pair[1]} return their observations in the same array, so "
                "that one overwrites the other's; give each its own, or return copies"
            )

    def step_part(self, cursor: Cursor, lanes: int) -> None:
        """Step only the first ``lanes`` lanes; the others keep what they had.

        Only where :attr:`can_step_part` holds; no lane at all can always be stepped.
        """
        at = cursor.at
        after, root, seen = (
            [column[at] for column in columns]
            for columns in (cursor.next_obs, cursor.root_obs, cursor.seen_obs)
        )
        for row, following, before in zip(after, root, seen, strict=True):
            row[lanes:] = following[lanes:] = before[lanes:]
        if not lanes:
            cursor.board[FILLED] = at + 1
            return
        assert isinstance(self._vec, SyncVectorEnv)
        for lane, env in enumerate(self._vec.envs[:lanes]):
            obs, reward, terminated, truncated, info = env.step(cursor.action[at, lane].copy())
            self._write_lane(after, lane, obs, info, False)
            cursor.reward[at, lane] = reward
            cursor.terminated[at, lane], cursor.truncated[at, lane] = terminated, truncated
            ended = bool(terminated or truncated)
            if ended:
                obs, info = env.reset()
            self._write_lane(root, lane, obs, info, ended)
            self._infos.steps[lane] = 0 if ended else self._infos.steps[lane] + 1
        cursor.board[FILLED] = at + 1

    def _write_lane(
        self, rows: Sequence[Array], lane: int, obs: Any, info: Mapping[str, Any], reset: bool
    ) -> None:
        for index, get in enumerate(self._getters):
            rows[index][lane] = get(obs)
        self._infos.write_one(rows[len(self._getters) :], lane, info, reset)

    # --- TorchRL's own protocol ---------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get("action").numpy().copy()
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        obs, reward, terminated, truncated, info = self._vec.step(action)
        rows = self._new_rows()
        ended = terminated | truncated
        self._write_observations(rows, obs)
        self._write_infos(rows, info, ended)
        if self.autoreset is AutoresetMode.SAME_STEP and ended.any():
            self._fresh, self._fresh_lanes = [row.copy() for row in rows], ended.copy()
            self._put_finals(rows, ended, obs, info)
            self._infos.write_first(self._fresh[len(self._getters) :], info, ended)
        transitions = ~self._pending
        if self.autoreset is AutoresetMode.NEXT_STEP:
            self._pending = ended.copy()
        self._infos.count(ended, RESET_SLOT if self.marks_transitions else 0)
        td = self._td(rows)
        td.set("reward", torch.from_numpy(np.array(reward, np.float32)).unsqueeze(-1))
        for name, flag in (("done", ended), ("terminated", terminated), ("truncated", truncated)):
            td.set(name, torch.from_numpy(np.array(flag)).unsqueeze(-1))
        if self.marks_transitions:
            td.set(VALID, torch.from_numpy(transitions).unsqueeze(-1))
        return td

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        lanes = None if mask is None else mask.reshape(-1).cpu().numpy()
        if lanes is None or (lanes.all() and not self._fresh_lanes.any()):
            return self._reset_all(kwargs)
        rows = [row.copy() for row in self._fresh] if self._fresh else self._new_rows()
        asked = lanes & ~self._fresh_lanes
        if asked.any():
            if not self.resets_by_mask:
                raise EnvironmentRefused(
                    f"{type(self._vec.unwrapped).__name__} ignores reset masks and would reset "
                    "every lane; do not wrap it in TransformedEnv or reset a part of it: apply "
                    "Gymnasium's vector wrappers underneath, or use SyncVectorEnv"
                )
            obs, info = self._vec.reset(options={**kwargs.get("options", {}), "reset_mask": asked})
            reset = self._new_rows()
            self._write_observations(reset, obs)
            self._infos.write_reset(reset[len(self._getters) :], info, asked)
            for row, new in zip(rows, reset, strict=True):
                row[~self._fresh_lanes] = new[~self._fresh_lanes]
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        self._pending = self._pending & ~lanes
        self._infos.steps[lanes] = 0
        return self._with_flags(self._td(rows))

    def _reset_all(self, kwargs: Mapping[str, Any]) -> TensorDictBase:
        seed = kwargs.get("seed", self._seeds)
        if isinstance(seed, list) and not self._takes_seed_list:
            seed = seed[0]
        self._seeds = None
        obs, info = self._vec.reset(seed=seed, options=kwargs.get("options"))
        self._refuse_shared()
        if not self._infos.declared:
            self._infos.declare(info)
            self._set_specs(self.batch_size[0])
            self.empty_cache()
        rows = self._new_rows()
        self._write_observations(rows, obs)
        self._infos.steps[:] = 0
        self._infos.write_reset(rows[len(self._getters) :], info)
        self._fresh, self._fresh_lanes = [], np.zeros_like(self._fresh_lanes)
        self._pending = np.zeros_like(self._pending)
        return self._with_flags(self._td(rows))

    @property
    def _takes_seed_list(self) -> bool:
        return isinstance(self._vec.unwrapped, (SyncVectorEnv, AsyncVectorEnv))

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            self._seeds = None
        else:
            self._seeds = lane_seeds(seed, self.batch_size[0], 0)

    def _new_rows(self) -> list[Array]:
        rows = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
        return rows + self._infos.new_rows()

    def _td(self, rows: Sequence[Array]) -> TensorDict:
        td = TensorDict({}, self.batch_size, device=self.device)
        for key, row in zip(self.observation_keys, rows, strict=True):
            td.set(key, torch.from_numpy(row))
        return td

    def _with_flags(self, td: TensorDict) -> TensorDict:
        if self.marks_transitions:
            td.set(VALID, torch.ones((*self.batch_size, 1), dtype=torch.bool))
        self._reset_flags(td)
        return td

    def _reset_flags(self, td: TensorDictBase) -> TensorDictBase:
        for name in ("done", "terminated", "truncated"):
            td.set(name, torch.zeros((*self.batch_size, 1), dtype=torch.bool))
        return td


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """The autoreset mode that ``env`` declares.

    Raises:
        EnvironmentRefused: it declares none.
    """
    mode = getattr(env.unwrapped, "autoreset_mode", None)
    if mode is None:
        mode = (env.metadata or {}).get("autoreset_mode")
    if mode is None:
        raise EnvironmentRefused(
            f"{type(env.unwrapped).__name__} does not say how it resets itself: expected "
            "env.unwrapped.autoreset_mode or env.metadata['autoreset_mode'] (gymnasium "
            f"{gymnasium.__version__}: one of {[m.value for m in AutoresetMode]})"
        )
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
