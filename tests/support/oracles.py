"""Environments whose every row can be checked on its own, and the plain models that check them.

An observation encodes its lane, episode and step. The reward encodes the step that was left and the
action. So every row that reaches a batch or a storage can be checked on its own: whether the lane
made this transition, whether the next observation followed it, and whether the episode ended as it
should. Resets number the episodes of a lane 0, 1, 2 ... Episode lengths are known in advance
(`Lengths`).

Kinds of observation (`KINDS` and `LARGE_KINDS`), and the columns that they become:

=============== =============================================================================
``float``       Box float32 [3]: lane, episode, step
``uint8``       Box uint8 [4, 4, 3]: the three numbers in bytes, a checksum elsewhere
``dict``        Dict: ``"pos"`` as float, ``"img"`` as uint8, ``("inner", "code")`` int64 [3]
``tuple``       Tuple: ``("observation", "0")`` as float, ``"1"`` Discrete(64): the step, ``"2"``
                as uint8
``discrete``    Discrete: the three numbers in one (lanes below 8, episodes and steps below 32)
``multidiscrete`` MultiDiscrete [64, 512, 513]: lane, episode, step
``multibinary`` MultiBinary(48): 16 bits each
``seeded``      Box float32 [4]: as float, and noise drawn from the environment's generator
``image``       Box uint8 [40, 40, 3], rows of 4,800 bytes: every pixel encodes the three numbers
``images``      Dict: ``"pos"`` as float, ``"img"`` as image
=============== =============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded
from torchrl.envs import EnvBase

Kind = Literal[
    "float",
    "uint8",
    "dict",
    "tuple",
    "discrete",
    "multidiscrete",
    "multibinary",
    "seeded",
    "image",
    "images",
]
Ends = Literal["terminated", "truncated", "mixed", "both"]
Actions = Literal["discrete", "box", "multidiscrete", "multibinary"]
Lengths = Sequence[int] | Sequence[Sequence[int]] | Callable[[int, int], int]
Key = str | tuple[str, ...]
Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

LARGE_KINDS: tuple[Kind, ...] = ("image", "images")
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind not in LARGE_KINDS)
ENDS: tuple[Ends, ...] = get_args(Ends)
ACTIONS: tuple[Actions, ...] = get_args(Actions)

IMAGE_SHAPE = (4, 4, 3)
LARGE_SHAPE = (40, 40, 3)
PATTERN = np.random.default_rng(0).integers(0, 256, LARGE_SHAPE, dtype=np.uint8)
"""The number that each pixel adds to its value, modulo 256."""
MULTIDISCRETE = [64, 512, 513]
ONE_CODE = (8, 32, 32)


# --- the model: lengths, ends, rewards, observations -------------------------------------------


def length_of(lengths: Lengths, lane: int, episode: int) -> int:
    """Return the number of transitions of episode `episode` in lane `lane`, at least 1.

    `lengths` is a list that every lane cycles through, a list of such lists (one per lane), or a
    function of lane and episode.
    """
    if callable(lengths):
        return lengths(lane, episode)
    first = lengths[0]
    if isinstance(first, Sequence):
        own = lengths[lane % len(lengths)]
        assert isinstance(own, Sequence)
        return int(own[episode % len(own)])
    each = lengths[episode % len(lengths)]
    assert not isinstance(each, Sequence)
    return int(each)


def how_it_ends(ends: Ends, lane: int, episode: int) -> tuple[bool, bool]:
    """Return (terminated, truncated) of an episode's last transition; "mixed" alternates."""
    if ends == "mixed":
        return ((lane + episode) % 2 == 0, (lane + episode) % 2 == 1)
    return (ends in ("terminated", "both"), ends in ("truncated", "both"))


def reward_base(lane: npt.ArrayLike, episode: npt.ArrayLike, step: npt.ArrayLike) -> Array:
    """Return the reward for leaving `step`, without the action: 1 to 97, exact in float32."""
    return np.asarray(
        1 + (31 * np.asarray(lane) + 7 * np.asarray(episode) + np.asarray(step)) % 97,
        dtype=np.float64,
    )


def reward_of(lane: int, episode: int, step: int, action: Any) -> float:
    """Return the reward for leaving `step` with `action`, which adds half its sum."""
    return float(reward_base(lane, episode, step)) + 0.5 * float(np.sum(action, dtype=np.float64))


def _image(numbers: Ints) -> Array:
    """Encode int64 [..., 3] as uint8 [..., 4, 4, 3]."""
    checksum = (numbers @ np.array([7, 13, 31])) % 256
    image = np.broadcast_to(checksum[..., None], (*checksum.shape, 48)).copy()
    image[..., 0:6:2] = numbers >> 8
    image[..., 1:6:2] = numbers & 255
    return image.astype(np.uint8).reshape(*checksum.shape, *IMAGE_SHAPE)


def _numbers_in_image(image: Array) -> Ints:
    flat = image.reshape(*image.shape[:-3], 48).astype(np.int64)
    return np.asarray((flat[..., 0:6:2] << 8) | flat[..., 1:6:2])


def _large_image(numbers: Ints) -> Array:
    """Encode int64 [..., 3] as uint8 [..., 40, 40, 3]."""
    return np.asarray(numbers.astype(np.uint8)[..., None, None, :] + PATTERN)


def encode(
    kind: Kind, lane: npt.ArrayLike, episode: npt.ArrayLike, step: npt.ArrayLike
) -> dict[Key, Array]:
    """Return the observation columns of these numbers, each [..., *its shape], by column key.

    The result leaves out the noise of "seeded", so its column is [..., 3] here.
    """
    numbers = np.stack(
        np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (lane, episode, step))), -1
    )
    floats = numbers.astype(np.float32)
    if kind in ("float", "seeded"):
        return {"observation": floats}
    if kind == "uint8":
        return {"observation": _image(numbers)}
    if kind == "dict":
        return {"pos": floats, "img": _image(numbers), ("inner", "code"): numbers}
    if kind == "image":
        return {"observation": _large_image(numbers)}
    if kind == "images":
        return {"pos": floats, "img": _large_image(numbers)}
    if kind == "tuple":
        return {
            ("observation", "0"): floats,
            ("observation", "1"): numbers[..., 2] % 64,
            ("observation", "2"): _image(numbers),
        }
    if kind == "discrete":
        assert (numbers < ONE_CODE).all(), f"kind 'discrete' holds numbers below {ONE_CODE}"
        return {"observation": np.asarray(numbers @ np.array([1024, 32, 1]))}
    if kind == "multidiscrete":
        return {"observation": numbers}
    bits = (numbers[..., None] >> np.arange(16)) & 1
    return {"observation": bits.reshape(*numbers.shape[:-1], 48).astype(np.int8)}


def decode(kind: Kind, columns: dict[Key, Array]) -> tuple[Ints, Ints, Ints]:
    """Return (lane, episode, step), each [...], from one column. `encode` restores all columns."""
    key: Key = "observation"
    if kind in ("dict", "tuple", "images"):
        key = ("observation", "0") if kind == "tuple" else "pos"
    column = np.asarray(columns[key])
    if kind == "uint8":
        numbers = _numbers_in_image(column)
    elif kind == "image":
        numbers = (column[..., 0, 0, :] - PATTERN[0, 0]).astype(np.int64)
    elif kind == "discrete":
        numbers = np.stack(np.unravel_index(column, ONE_CODE), -1)
    elif kind == "multibinary":
        bits = column.reshape(*column.shape[:-1], 3, 16).astype(np.int64)
        numbers = bits @ (1 << np.arange(16))
    else:
        numbers = column[..., :3].astype(np.int64)
    return numbers[..., 0], numbers[..., 1], numbers[..., 2]


# --- Gymnasium ----------------------------------------------------------------------------------


def _box() -> spaces.Box:
    return spaces.Box(0, 1e6, (3,), np.float32)


def _image_box(shape: tuple[int, ...] = IMAGE_SHAPE) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def observation_space(kind: Kind) -> spaces.Space[Any]:
    """Return the Gymnasium space of a kind of observation."""
    if kind == "float":
        return _box()
    if kind == "uint8":
        return _image_box()
    if kind == "dict":
        inner = spaces.Dict({"code": spaces.Box(0, 2**40, (3,), np.int64)})
        return spaces.Dict({"pos": _box(), "img": _image_box(), "inner": inner})
    if kind == "image":
        return _image_box(LARGE_SHAPE)
    if kind == "images":
        return spaces.Dict({"pos": _box(), "img": _image_box(LARGE_SHAPE)})
    if kind == "tuple":
        return spaces.Tuple((_box(), spaces.Discrete(64), _image_box()))
    if kind == "discrete":
        return spaces.Discrete(int(np.prod(ONE_CODE)))
    if kind == "multidiscrete":
        return spaces.MultiDiscrete(MULTIDISCRETE)
    if kind == "multibinary":
        return spaces.MultiBinary(48)
    return spaces.Box(0, 1e6, (4,), np.float32)


def action_space(action: Actions) -> spaces.Space[Any]:
    """Return the Gymnasium space of a kind of action."""
    if action == "discrete":
        return spaces.Discrete(2)
    if action == "box":
        return spaces.Box(-1, 1, (2,), np.float32)
    if action == "multidiscrete":
        return spaces.MultiDiscrete([2, 3])
    return spaces.MultiBinary(3)


class OracleEnv(gym.Env[Any, Any]):
    """One lane as a Gymnasium environment.

    Calling step() before a reset, after the end, or with an action outside the space raises
    AssertionError. A reset always begins the next episode, even in mid-episode. `info["tick"]`
    counts simulator ticks (`frame_skip` a step, `noops` a reset), and `info["lives"]` cycles
    through 3, 2, 1.

    Plain attributes for `envs.get_attr`: `steps_taken` (actions executed), `resets_done`, `seeds`
    and `options_seen` (one entry per reset), `ticks`.

    With `reuse_buffer` all observations share the same arrays, which each step overwrites.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  gymnasium declares it so

    def __init__(
        self,
        lane: int = 0,
        lengths: Lengths = (5,),
        *,
        kind: Kind = "float",
        ends: Ends = "terminated",
        action: Actions = "discrete",
        reuse_buffer: bool = False,
        frame_skip: int = 1,
        noops: int = 0,
    ) -> None:
        self.lane, self.lengths, self.kind, self.ends = lane, lengths, kind, ends
        self.frame_skip, self.noops = frame_skip, noops
        self.observation_space = observation_space(kind)
        self.action_space = action_space(action)
        self.episode, self.step_in_episode = -1, 0
        self.steps_taken, self.resets_done, self.ticks = 0, 0, 0
        self.seeds: list[int | None] = []
        self.options_seen: list[dict[str, Any] | None] = []
        self._ended = True
        self._buffer: Any = (
            create_empty_array(self.observation_space, n=1, fn=np.zeros) if reuse_buffer else None
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.options_seen.append(options)
        self.resets_done += 1
        self.ticks += self.noops
        self.episode += 1
        self.step_in_episode = 0
        self._ended = False
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        assert not self._ended, f"lane {self.lane}: step() past the end of episode {self.episode}"
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = reward_of(self.lane, self.episode, self.step_in_episode, action)
        self.steps_taken += 1
        self.ticks += self.frame_skip
        self.step_in_episode += 1
        self._ended = self.step_in_episode >= length_of(self.lengths, self.lane, self.episode)
        terminated, truncated = how_it_ends(self.ends, self.lane, self.episode)
        return (
            self._observation(),
            reward,
            self._ended and terminated,
            self._ended and truncated,
            self._info(),
        )

    def _info(self) -> dict[str, Any]:
        return {"tick": self.ticks, "lives": 3 - self.step_in_episode % 3}

    def _observation(self) -> Any:
        columns = encode(self.kind, self.lane, self.episode, self.step_in_episode)
        if self.kind == "dict":
            code = columns["inner", "code"]
            observation: Any = {
                "pos": columns["pos"],
                "img": columns["img"],
                "inner": {"code": code},
            }
        elif self.kind == "images":
            observation = {"pos": columns["pos"], "img": columns["img"]}
        elif self.kind == "tuple":
            observation = tuple(columns["observation", str(i)] for i in range(3))
            observation = (observation[0], np.int64(observation[1]), observation[2])
        elif self.kind == "discrete":
            observation = np.int64(columns["observation"])
        elif self.kind == "seeded":
            noise = np.float32(self.np_random.random())
            observation = np.append(columns["observation"], noise)
        else:
            observation = columns["observation"]
        if self._buffer is None:
            return observation
        self._buffer = concatenate(self.observation_space, [observation], self._buffer)
        return next(iter(iterate(batch_space(self.observation_space, 1), self._buffer)))


def make_oracle_vec(
    num_envs: int,
    lengths: Lengths = (5,),
    *,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    cls: Literal["sync", "async"] = "sync",
    first_lane: int = 0,
    vec_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> SyncVectorEnv[Any, Any] | AsyncVectorEnv[Any, Any]:
    """Make a Gymnasium vector of lanes from `first_lane` on; kwargs go to `OracleEnv`."""
    env_fns = [
        partial(OracleEnv, lane, lengths, **kwargs)
        for lane in range(first_lane, first_lane + num_envs)
    ]
    if cls == "async":
        # The default of torchrl is spawn, which takes seconds.
        options = {"context": "fork"} | (vec_kwargs or {})
        return AsyncVectorEnv(env_fns, autoreset_mode=mode, **options)
    return SyncVectorEnv(env_fns, autoreset_mode=mode, **(vec_kwargs or {}))


class OracleVectorEnv(VectorEnv[Any, Any, Any]):
    """The same lanes as a native vector that behaves like Gymnasium's CartPoleVectorEnv.

    Only `metadata` declares the NEXT_STEP autoreset. A reset ignores masks and resets all lanes,
    seeds must be integers, and rewards are float32. Every returned array is reused in place.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  gymnasium declares it so
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(self, num_envs: int, lengths: Lengths = (5,), **kwargs: Any) -> None:
        self.num_envs = num_envs
        self.lanes = [OracleEnv(lane, lengths, **kwargs) for lane in range(num_envs)]
        self.single_observation_space = self.lanes[0].observation_space
        self.single_action_space = self.lanes[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._obs: Any = create_empty_array(self.single_observation_space, num_envs, fn=np.zeros)
        self._reward = np.zeros(num_envs, np.float32)
        self._terminated = np.zeros(num_envs, np.bool_)
        self._truncated = np.zeros(num_envs, np.bool_)
        self._tick = np.zeros(num_envs, np.int64)
        self._to_reset = np.zeros(num_envs, np.bool_)

    @property
    def steps_taken(self) -> list[int]:
        """Number of executed actions, by lane."""
        return [env.steps_taken for env in self.lanes]

    @property
    def resets_done(self) -> list[int]:
        """Number of resets, by lane."""
        return [env.resets_done for env in self.lanes]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every lane, and ignore any mask in `options`."""
        assert seed is None or isinstance(seed, int), f"seed must be an int, got {seed!r}"
        seeds = [None if seed is None else seed + lane for lane in range(self.num_envs)]
        observations = [env.reset(seed=s)[0] for env, s in zip(self.lanes, seeds, strict=True)]
        self._to_reset[:] = False
        return self._gather(observations), {"tick": self._tick}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step the running lanes and reset the others (reward 0, action ignored)."""
        observations = []
        for lane, action in enumerate(iterate(self.action_space, actions)):
            if self._to_reset[lane]:
                out: Any = (self.lanes[lane].reset()[0], 0.0, False, False)
            else:
                out = self.lanes[lane].step(action)
            observations.append(out[0])
            self._reward[lane], self._terminated[lane], self._truncated[lane] = out[1:4]
        np.logical_or(self._terminated, self._truncated, out=self._to_reset)
        obs = self._gather(observations)
        return obs, self._reward, self._terminated, self._truncated, {"tick": self._tick}

    def _gather(self, observations: list[Any]) -> Any:
        self._tick[:] = [env.ticks for env in self.lanes]
        self._obs = concatenate(self.single_observation_space, observations, self._obs)
        return self._obs


# --- TorchRL ------------------------------------------------------------------------------------


def _observation_spec(kind: Kind, shape: tuple[int, ...]) -> Composite:
    def floats(n: int) -> Bounded:
        return Bounded(0, 1e6, (*shape, n), dtype=torch.float32)

    def image(each: tuple[int, ...] = IMAGE_SHAPE) -> Bounded:
        return Bounded(0, 255, (*shape, *each), dtype=torch.uint8)

    specs: dict[str, Any] = {"observation": floats(4 if kind == "seeded" else 3)}
    if kind == "uint8":
        specs = {"observation": image()}
    elif kind == "dict":
        code = Unbounded((*shape, 3), dtype=torch.int64)
        specs = {"pos": floats(3), "img": image(), "inner": Composite(code=code, shape=shape)}
    elif kind == "image":
        specs = {"observation": image(LARGE_SHAPE)}
    elif kind == "images":
        specs = {"pos": floats(3), "img": image(LARGE_SHAPE)}
    elif kind == "tuple":
        parts = {"0": floats(3), "1": Categorical(64, shape=shape), "2": image()}
        specs = {"observation": Composite(parts, shape=shape)}
    elif kind == "discrete":
        specs = {"observation": Categorical(int(np.prod(ONE_CODE)), shape=shape)}
    elif kind == "multidiscrete":
        specs = {"observation": MultiCategorical(MULTIDISCRETE, shape=(*shape, 3))}
    elif kind == "multibinary":
        specs = {"observation": Binary(48, shape=(*shape, 48), dtype=torch.int8)}
    return Composite(specs, shape=shape)


def _action_spec(action: Actions, shape: tuple[int, ...]) -> Any:
    if action == "discrete":
        return Categorical(2, shape=shape)
    if action == "box":
        return Bounded(-1, 1, (*shape, 2), dtype=torch.float32)
    if action == "multidiscrete":
        return MultiCategorical([2, 3], shape=(*shape, 2))
    return Binary(3, shape=(*shape, 3), dtype=torch.int8)


class OracleTorchEnv(EnvBase):
    """The same lanes as a TorchRL environment that resets by mask and never by itself.

    `num_envs=None` is one lane with batch size []. A number N makes lanes 0 to N-1 with batch size
    [N]. Discrete actions and observations are Categorical. `steps_taken` and `resets_done` are
    lists with one entry per lane. The noise of "seeded" comes from a NumPy generator that
    `set_seed` makes.
    """

    def __init__(
        self,
        num_envs: int | None = None,
        lengths: Lengths = (5,),
        *,
        first_lane: int = 0,
        kind: Kind = "float",
        ends: Ends = "terminated",
        action: Actions = "discrete",
    ) -> None:
        shape = () if num_envs is None else (num_envs,)
        super().__init__(device="cpu", batch_size=torch.Size(shape))
        self.lengths, self.kind, self.ends, self.first_lane = lengths, kind, ends, first_lane
        self.observation_spec = _observation_spec(kind, shape)
        self.action_spec = _action_spec(action, shape)
        self.reward_spec = Unbounded((*shape, 1), dtype=torch.float32)
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        self.full_done_spec = Composite(
            done=flag.clone(), terminated=flag.clone(), truncated=flag.clone(), shape=shape
        )
        lanes = num_envs or 1
        self.lane_ids = np.arange(first_lane, first_lane + lanes)
        self.episode = np.full(lanes, -1)
        self.step_in_episode = np.zeros(lanes, np.int64)
        self.ended = np.ones(lanes, np.bool_)
        self.steps_taken, self.resets_done = [0] * lanes, [0] * lanes
        self._noise = np.random.default_rng(0)

    def _set_seed(self, seed: int | None) -> None:
        self._noise = np.random.default_rng(seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = np.ones(len(self.lane_ids), np.bool_)
        if tensordict is not None and "_reset" in tensordict.keys():
            mask = tensordict["_reset"].reshape(-1).numpy()
        for lane in np.flatnonzero(mask):
            self.resets_done[lane] += 1
        self.episode[mask] += 1
        self.step_in_episode[mask] = 0
        self.ended[mask] = False
        still = np.zeros_like(mask)
        return self._out(still, still)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert not self.ended.any(), (
            f"step() past the end in lanes {self.lane_ids[self.ended].tolist()}"
        )
        lanes = len(self.lane_ids)
        values = tensordict["action"].reshape(lanes, -1).numpy().astype(np.float64).sum(-1)
        reward = reward_base(self.lane_ids, self.episode, self.step_in_episode) + 0.5 * values
        self.steps_taken = [taken + 1 for taken in self.steps_taken]
        self.step_in_episode += 1
        each = list(zip(self.lane_ids.tolist(), self.episode.tolist(), strict=True))
        lengths = np.array([length_of(self.lengths, lane, episode) for lane, episode in each])
        ends = np.array([how_it_ends(self.ends, lane, episode) for lane, episode in each])
        self.ended = self.step_in_episode >= lengths
        out = self._out(self.ended & ends[:, 0], self.ended & ends[:, 1])
        out["reward"] = torch.from_numpy(reward).float().reshape(*self.batch_size, 1)
        return out

    def _out(self, terminated: Array, truncated: Array) -> TensorDict:
        columns = encode(self.kind, self.lane_ids, self.episode, self.step_in_episode)
        if self.kind == "seeded":
            noise = self._noise.random((len(self.lane_ids), 1)).astype(np.float32)
            columns["observation"] = np.concatenate([columns["observation"], noise], -1)
        out = TensorDict({}, batch_size=self.batch_size)
        for key, column in columns.items():
            out[key] = torch.from_numpy(column.reshape((*self.batch_size, *column.shape[1:])))
        for name, flag in (
            ("terminated", terminated),
            ("truncated", truncated),
            ("done", terminated | truncated),
        ):
            out[name] = torch.from_numpy(flag.reshape((*self.batch_size, 1)).copy())
        return out


# --- plain models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One transition in the plain model; observations by column key."""

    lane: int
    episode: int
    step: int
    obs: dict[Key, Array]
    next_obs: dict[Key, Array]
    reward_base: float
    terminated: bool
    truncated: bool


def transitions(
    lane: int, lengths: Lengths, *, first_episode: int = 0
) -> Iterator[tuple[int, int, bool]]:
    """Yield (episode, step, whether it is the last of its episode) of one lane, endlessly."""
    episode = first_episode
    while True:
        length = length_of(lengths, lane, episode)
        for step in range(length):
            yield episode, step, step == length - 1
        episode += 1


def expected_stream(
    lane: int, lengths: Lengths, n: int, *, kind: Kind = "float", ends: Ends = "terminated"
) -> list[Row]:
    """Return the first n transitions of a lane."""
    rows: list[Row] = []
    for episode, step, last in transitions(lane, lengths):
        if len(rows) == n:
            break
        terminated, truncated = how_it_ends(ends, lane, episode)
        rows.append(
            Row(
                lane,
                episode,
                step,
                encode(kind, lane, episode, step),
                encode(kind, lane, episode, step + 1),
                float(reward_base(lane, episode, step)),
                last and terminated,
                last and truncated,
            )
        )
    return rows


@dataclass(frozen=True)
class ExpectedLedger:
    """Expected counts of a run for N transitions, and of the stored rows of each lane."""

    slots: int
    executed: int
    reset_slots: int
    stored_by_lane: list[int]
    episodes_complete: int


def expected_ledger(
    num_envs: int, lengths: Lengths, n: int, *, reset_slots: bool
) -> ExpectedLedger:
    """Step all lanes until n transitions exist, counted in slot order.

    `reset_slots` says whether a lane spends a slot on the reset after each end (NEXT_STEP, masked)
    or not. Transitions executed beyond n belong to the last batched step.
    """
    streams = [transitions(lane, lengths) for lane in range(num_envs)]
    stored = [0] * num_envs
    pending = [False] * num_envs
    slots = executed = resets = complete = 0
    while executed < n:
        for lane, stream in enumerate(streams):
            slots += 1
            if pending[lane]:
                resets += 1
                pending[lane] = False
                continue
            last = next(stream)[2]
            pending[lane] = last and reset_slots
            if executed < n:
                stored[lane] += 1
                complete += last
            executed += 1
    return ExpectedLedger(slots, executed, resets, stored, complete)


# --- checking rows ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Lanes, episodes and steps of checked rows, in row order: int64 and bool arrays [rows]."""

    lane: Ints
    episode: Ints
    step: Ints
    ended: npt.NDArray[np.bool_]

    def of_lane(self, lane: int) -> list[tuple[int, int]]:
        """Return (episode, step) of one lane's rows."""
        at = self.lane == lane
        return list(zip(self.episode[at].tolist(), self.step[at].tolist(), strict=True))

    def counts(self, num_envs: int) -> list[int]:
        """Return the number of rows by lane."""
        return [int(n) for n in np.bincount(self.lane, minlength=num_envs)]


def flat_rows(batch: Any) -> Any:
    """Return the rows [n] of a batch of any layout, without padding."""
    if ("collector", "mask") in batch.keys(True, True):
        return batch[batch["collector", "mask"].reshape(batch.batch_size)]
    return batch.reshape(-1)


def _column(batch: Any, key: Any) -> Array:
    return np.asarray(batch[key].detach().cpu().numpy())


def _flags(batch: Any, *key: str) -> npt.NDArray[np.bool_]:
    column = _column(batch, key)
    assert column.dtype == np.bool_, f"{key} is {column.dtype}, not bool"
    return column.reshape(len(column))


def _columns(batch: Any, kind: Kind, *prefix: str) -> dict[Key, Array]:
    """Return the observation columns, with one-hot columns converted to numbers."""
    columns: dict[Key, Array] = {}
    for key, wanted in encode(kind, 0, 0, 0).items():
        column = _column(batch, (*prefix, *([key] if isinstance(key, str) else key)))
        if kind == "multidiscrete":
            column = _from_one_hot(column, MULTIDISCRETE)
        elif wanted.ndim == 0 and column.ndim > 1:
            column = column.argmax(-1) if column.shape[-1] > 1 else column[..., 0]
        columns[key] = column
    return columns


def _from_one_hot(column: Array, nvec: Sequence[int]) -> Array:
    """Return [..., len(nvec)], from itself or from one-hot [..., sum(nvec)]."""
    if column.shape[-1] == len(nvec):
        return column
    assert column.shape[-1] == sum(nvec), f"shape {column.shape} is no encoding of {nvec}"
    parts = np.split(column, np.cumsum(nvec)[:-1], -1)
    return np.stack([part.argmax(-1) for part in parts], -1)


def action_values(batch: Any, action: Actions = "discrete") -> Array:
    """Return the sum of each row's action, one-hot or categorical, as float64 [rows]."""
    column = _column(batch, "action")
    column = column.reshape(len(column), -1)
    if action == "discrete" and column.shape[-1] == 2:
        assert (column.sum(-1) == 1).all(), "a one-hot action must have exactly one 1"
        column = column.argmax(-1)[:, None]
    elif action == "multidiscrete":
        column = _from_one_hot(column, (2, 3))
    return np.asarray(column.astype(np.float64).sum(-1))


def _assert_all(ok: Array, rows: tuple[Ints, Ints, Ints], message: str) -> None:
    """Raise an error that names the first failing row, unless ok [rows, ...] is True throughout."""
    wrong = np.flatnonzero(~ok.reshape(len(ok), -1).all(-1))
    if len(wrong):
        lane, episode, step = (int(x[wrong[0]]) for x in rows)
        raise AssertionError(
            f"{message}: {len(wrong)} of {len(ok)} rows, first row {wrong[0]} "
            f"(lane {lane}, episode {episode}, step {step})"
        )


def check_rows(
    batch: Any,
    lengths: Lengths,
    *,
    kind: Kind = "float",
    ends: Ends = "terminated",
    action: Actions = "discrete",
    time_limit: int | None = None,
    contiguous: bool = True,
    from_start: bool = False,
) -> Rows:
    """Assert that every row of a TensorDict is a transition that its lane really made.

    Args:
        batch: rows in TorchRL's episode format, of any layout (`("collector", "mask")` is
            respected). Columns under "collector" that are absent are not checked.
        lengths: the argument that the environments received.
        kind: the kind of observation.
        ends: how episodes end.
        action: the kind of action.
        time_limit: truncate episodes there as well (`max_frames_per_traj`).
        contiguous: if True, a lane's rows must follow one another without a gap, in the given
            order. If False, they only need to go forward.
        from_start: each lane's first row is step 0 of episode 0.

    Checked: both observations, the reward with the action, terminated, truncated, done (True on cut
    rows too), and lane, step and trajectory ids (one id per trajectory, growing within a lane).
    Rows with `("collector", "next_valid")` False may have any next observation, if they end their
    episode.
    """
    batch = flat_rows(batch)
    rows = decode(kind, _columns(batch, kind))
    _check_observations(batch, kind, rows)
    ended = _check_ends(batch, lengths, ends, time_limit, rows)
    reward = _column(batch, ("next", "reward")).reshape(len(ended))
    wanted = reward_base(*rows) + 0.5 * action_values(batch, action)
    _assert_all(np.abs(reward - wanted) < 1e-4, rows, "reward is not what the action earned")
    _check_bookkeeping(batch, rows)
    for lane in np.unique(rows[0]):
        _check_order(rows, ended, int(lane), contiguous, from_start)
    return Rows(*rows, ended)


def check_row(row: Any, lengths: Lengths, **kwargs: Any) -> Rows:
    """Call `check_rows` on one row with batch size []."""
    return check_rows(row.unsqueeze(0), lengths, **kwargs)


def _check_observations(batch: Any, kind: Kind, rows: tuple[Ints, Ints, Ints]) -> None:
    lane, episode, step = rows
    lost = np.zeros(len(lane), np.bool_)
    if ("collector", "next_valid") in batch.keys(True, True):
        lost = ~_flags(batch, "collector", "next_valid")
        _assert_all(
            ~lost | _flags(batch, "next", "done"), rows, "next_valid is False in mid-episode"
        )
    for prefix, plus in (((), 0), (("next",), 1)):
        columns = _columns(batch, kind, *prefix)
        for key, wanted in encode(kind, lane, episode, step + plus).items():
            column = columns[key][..., :3] if kind == "seeded" else columns[key]
            assert column.shape == wanted.shape, f"{key} is {column.shape}, not {wanted.shape}"
            if kind in (
                "float",
                "uint8",
                "dict",
                "seeded",
                *LARGE_KINDS,
            ):  # the other kinds may be re-encoded
                assert column.dtype == wanted.dtype, f"{key} is {column.dtype}"
            same = (column == wanted).reshape(len(lane), -1).all(-1)
            where = "next observation" if plus else "observation"
            _assert_all(same | (lost & bool(plus)), rows, f"{where} {key!r} is not the true one")


def _check_ends(
    batch: Any,
    lengths: Lengths,
    ends: Ends,
    time_limit: int | None,
    rows: tuple[Ints, Ints, Ints],
) -> npt.NDArray[np.bool_]:
    """Check the three flags. Return which rows end their episode, bool [rows]."""
    wanted = np.zeros((len(rows[0]), 2), np.bool_)
    for i, (lane, episode, step) in enumerate(zip(*(x.tolist() for x in rows), strict=True)):
        length = length_of(lengths, lane, episode)
        assert step < length, f"lane {lane}: step {step} in an episode of {length} steps"
        if step == length - 1:
            wanted[i] = how_it_ends(ends, lane, episode)
        if time_limit is not None and step >= time_limit - 1:
            assert step == time_limit - 1, f"lane {lane}: step {step} past the time limit"
            wanted[i, 1] = True
    ended: npt.NDArray[np.bool_] = wanted.max(-1)
    done = ended.copy()
    if ("collector", "cut") in batch.keys(True, True):
        cut = _flags(batch, "collector", "cut")
        _assert_all(~(cut & ended), rows, "an ended trajectory is marked as cut")
        done |= cut
    for name, column in (("terminated", wanted[:, 0]), ("truncated", wanted[:, 1]), ("done", done)):
        _assert_all(_flags(batch, "next", name) == column, rows, f"{name} is wrong")
    return ended


def _check_bookkeeping(batch: Any, rows: tuple[Ints, Ints, Ints]) -> None:
    lane, episode, step = rows
    keys = batch.keys(True, True)
    for name, wanted, dtype in (("lane", lane, np.int32), ("step", step, np.int64)):
        if ("collector", name) in keys:
            column = _column(batch, ("collector", name))
            assert column.dtype == dtype, f"{name} is {column.dtype}"
            _assert_all(column.reshape(len(lane)) == wanted, rows, f"column {name} is wrong")
    if ("collector", "traj_ids") in keys:
        column = _column(batch, ("collector", "traj_ids"))
        assert column.dtype == np.int64, f"traj_ids is {column.dtype}"
        _check_ids(column.reshape(len(lane)), lane, episode)


def _check_ids(ids: Ints, lane: Ints, episode: Ints) -> None:
    """Check that ids and (lane, episode) pairs match one to one, and ids grow within a lane."""
    triples = np.unique(np.stack([lane, episode, ids], -1), axis=0)
    assert len(np.unique(triples[:, :2], axis=0)) == len(triples), "a trajectory has two ids"
    assert len(np.unique(triples[:, 2])) == len(triples), "two trajectories share one id"
    same_lane = triples[1:, 0] == triples[:-1, 0]
    assert (triples[1:, 2] > triples[:-1, 2])[same_lane].all(), "ids do not grow in a lane"


def _check_order(
    rows: tuple[Ints, Ints, Ints],
    ended: npt.NDArray[np.bool_],
    lane: int,
    contiguous: bool,
    from_start: bool,
) -> None:
    at = rows[0] == lane
    episode, step, ended = rows[1][at], rows[2][at], ended[at]
    if from_start:
        assert (episode[0], step[0]) == (0, 0), (
            f"lane {lane} begins at episode {episode[0]}, step {step[0]}"
        )
    if contiguous:
        wanted_episode = np.where(ended, episode + 1, episode)[:-1]
        wanted_step = np.where(ended, 0, step + 1)[:-1]
        follows = (episode[1:] == wanted_episode) & (step[1:] == wanted_step)
    else:
        order = episode * 2**32 + step
        follows = order[1:] > order[:-1]
    if not follows.all():
        i = int(np.flatnonzero(~follows)[0])
        raise AssertionError(
            f"lane {lane}: after episode {episode[i]}, step {step[i]} comes "
            f"episode {episode[i + 1]}, step {step[i + 1]}"
        )
