"""The environment systems to measure, one entry each.

An entry says how Tallyroll, the system itself and TorchRL create and step the same task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torchrl import envs as torchrl_envs
from torchrl.envs import EnvBase, GymWrapper, SerialEnv

from tallyroll.collector import GymnasiumVectorEnv
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.system_env import SystemEnv

if TYPE_CHECKING:
    from numpy.typing import NDArray

Step = Callable[..., Any]
"""A function of the actions ``[lane, ...]`` of a vector step, one array per action of the system.

If the legal actions depend on the observations, it takes no arguments and draws the actions itself.
"""
Raw = tuple[Step, Callable[[], None]]
"""A step function, and a function that releases its resources."""


@dataclass(frozen=True)
class Entry:
    """A system on one task. Each of the three factories is called with the number of lanes."""

    name: str
    raw: Callable[[int], Raw]
    task: str = ""
    """``SYSTEM:task`` is made by `System.make`, with ``kwargs``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[int], EnvBase] | None = None
    """Creates the environment if the task has no such name."""
    torchrl: Callable[[int], EnvBase] | None = None
    masked: bool = False
    """Whether the raw step draws legal actions itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the collector that the task needs."""
    costs: int = 1
    """Divides the number of steps in a batch, for tasks whose step is expensive."""

    def ours(self, lanes: int) -> EnvBase:
        """Return the environment that Tallyroll's collector gets."""
        if self.make is not None:
            return self.make(lanes)
        system = registry.load(self.name)
        return SystemEnv(system.make(self.task, lanes, range(lanes), **self.kwargs))


def serial(lanes: int, make: Callable[[], EnvBase]) -> EnvBase:
    """TorchRL's way to step several copies of an environment that has one lane."""
    return make() if lanes == 1 else SerialEnv(lanes, make)


def seeded(env: EnvBase) -> EnvBase:
    """Seed a wrapper that cannot be reset before it has a seed."""
    env.set_seed(0)
    return env


# --- TorchRL and Gymnasium ------------------------------------------------------------------------


def pendulums(lanes: int) -> EnvBase:
    """TorchRL's own pendulum."""
    return serial(lanes, torchrl_envs.PendulumEnv)


def raw_torchrl(lanes: int) -> Raw:
    """The loop that TorchRL's collectors are built on."""
    env = pendulums(lanes)
    state = {"now": env.reset()}

    def step(action: NDArray[Any]) -> None:
        state["now"]["action"] = torch.from_numpy(action)
        _, state["now"] = env.step_and_maybe_reset(state["now"])

    return step, env.close


def vector(lanes: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    """CartPole in Gymnasium's own vector."""
    return gymnasium.make_vec(
        "CartPole-v1",
        lanes,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
    )


def stepped(env: Any, **reset: Any) -> Raw:
    """Return the step of a vector, after resetting it."""
    env.reset(**reset)
    return env.step, env.close


def raw_gymnasium(lanes: int) -> Raw:
    """The vector in its default mode."""
    return stepped(vector(lanes), seed=0)


def minigrid(lanes: int) -> Any:
    """A room of MiniGrid, with images and with missions as text."""
    import minigrid  # noqa: F401  importing it registers the environments

    name = "MiniGrid-Empty-8x8-v0"
    how = {"autoreset_mode": AutoresetMode.DISABLED}
    return gymnasium.make_vec(name, lanes, vectorization_mode="sync", vector_kwargs=how)


def raw_minigrid(lanes: int) -> Raw:
    """The vector's step, and a reset of the lanes that ended."""
    env = minigrid(lanes)

    def step(action: NDArray[Any]) -> None:
        _, _, terminated, truncated, _ = env.step(action)
        ended = terminated | truncated
        if ended.any():
            env.reset(options={"reset_mask": ended})

    env.reset(seed=0)
    return step, env.close


def objectives(lanes: int) -> Any:
    """MO-Gymnasium's own vector."""
    import mo_gymnasium
    from mo_gymnasium.wrappers.vector import MOSyncVectorEnv

    return MOSyncVectorEnv([partial(mo_gymnasium.make, "deep-sea-treasure-v0")] * lanes)


# --- vectors of other libraries -------------------------------------------------------------------


def raw_sb3(lanes: int) -> Raw:
    """Stable-Baselines3's vector in this process."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return stepped(DummyVecEnv([partial(gymnasium.make, "CartPole-v1")] * lanes))


def raw_envpool(lanes: int) -> Raw:
    """EnvPool's synchronous step."""
    import envpool

    env = envpool.make_gymnasium("CartPole-v1", num_envs=lanes, seed=0)
    env.reset()
    kind = env.action_space.dtype
    return lambda action: env.step(action.astype(kind)), env.close


def raw_ale(lanes: int) -> Raw:
    """The ALE's own vector of 84 by 84 grey frames."""
    from ale_py.vector_env import AtariVectorEnv

    return stepped(AtariVectorEnv("pong", num_envs=lanes))


def raw_procgen(lanes: int) -> Raw:
    """Procgen's ``act`` and ``observe``."""
    from procgen import ProcgenGym3Env

    env = ProcgenGym3Env(num=lanes, env_name="coinrun", rand_seed=0)

    def step(action: NDArray[Any]) -> None:
        env.act(action)
        env.observe()

    return step, env.close


# --- JAX ------------------------------------------------------------------------------------------


def compiled(reset: Callable[..., Any], step: Callable[..., Any], lanes: int) -> Raw:
    """A loop over ``state, seen = step(state, action)``, which converts all outputs to NumPy."""
    import jax

    advance = jax.jit(step)
    state = {"now": jax.jit(reset)(jax.random.split(jax.random.PRNGKey(0), lanes))}

    def play(action: NDArray[Any]) -> None:
        state["now"], seen = advance(state["now"], action)
        jax.tree_util.tree_map(np.asarray, seen)

    return play, lambda: None


def compiled_masked(reset: Callable[..., Any], step: Callable[..., Any], lanes: int) -> Raw:
    """The same if ``reset`` and ``step`` also return the legal actions, bool ``[..., n]``."""
    import jax

    advance, rng = jax.jit(step), np.random.default_rng(0)
    state, legal = jax.jit(reset)(jax.random.split(jax.random.PRNGKey(0), lanes))
    now = {"state": state, "legal": np.asarray(legal)}

    def play() -> None:
        legal = now["legal"]
        action = (rng.random(legal.shape, np.float32) * legal).argmax(-1)
        now["state"], seen, legal = advance(now["state"], action)
        jax.tree_util.tree_map(np.asarray, seen)
        now["legal"] = np.asarray(legal)

    return play, lambda: None


def raw_brax(lanes: int) -> Raw:
    """Brax's environment for training, which resets itself."""
    from brax import envs

    env = envs.create("ant", batch_size=lanes, auto_reset=True)

    def step(state: Any, action: Any) -> Any:
        state = env.step(state, action)
        return state, (state.obs, state.reward, state.done)

    return compiled(lambda keys: env.reset(keys[0]), step, lanes)


def raw_playground(lanes: int) -> Raw:
    """MuJoCo Playground's environment for training, which resets itself."""
    from mujoco_playground import registry, wrapper

    env = wrapper.wrap_for_brax_training(registry.load("CartpoleBalance"))

    def step(state: Any, action: Any) -> Any:
        state = env.step(state, action)
        return state, (state.obs, state.reward, state.done)

    return compiled(env.reset, step, lanes)


def raw_gymnax(lanes: int) -> Raw:
    """``env.step``, which resets itself."""
    import gymnax
    import jax

    env, params = gymnax.make("CartPole-v1")

    def reset(keys: Any) -> Any:
        return keys, jax.vmap(env.reset, (0, None))(keys, params)[1]

    def step(carry: Any, action: Any) -> Any:
        keys = jax.vmap(jax.random.split)(carry[0])
        seen, state, reward, done, _ = jax.vmap(env.step, (0, 0, 0, None))(
            keys[:, 1], carry[1], action, params
        )
        return (keys[:, 0], state), (seen, reward, done)

    return compiled(reset, step, lanes)


def raw_jumanji(lanes: int) -> Raw:
    """Jumanji's wrapper for training, which resets itself."""
    import jumanji
    from jumanji.wrappers import VmapAutoResetWrapper

    env = VmapAutoResetWrapper(jumanji.make("Snake-v1"))

    def reset(keys: Any) -> Any:
        state, seen = env.reset(keys)
        return state, seen.observation.action_mask

    def step(state: Any, action: Any) -> Any:
        state, seen = env.step(state, action)
        grid, steps, legal = seen.observation
        return state, (grid, steps, seen.reward, seen.discount, seen.step_type), legal

    return compiled_masked(reset, step, lanes)


def raw_smax(lanes: int) -> Raw:
    """``env.step``, which resets itself, and the legal actions of the next state."""
    import jax
    from jaxmarl import make
    from jaxmarl.environments.smax import map_name_to_scenario

    env = make("HeuristicEnemySMAX", scenario=map_name_to_scenario("3m"))

    def legal(state: Any) -> Any:
        each = jax.vmap(env.get_avail_actions)(state)
        return jax.numpy.stack([each[agent] for agent in env.agents], 1)

    def reset(keys: Any) -> Any:
        state = jax.vmap(env.reset)(keys)[1]
        return (keys, state), legal(state)

    def step(carry: Any, action: Any) -> Any:
        keys = jax.vmap(jax.random.split)(carry[0])
        actions = {agent: action[:, index] for index, agent in enumerate(env.agents)}
        seen, state, reward, done, _ = jax.vmap(env.step)(keys[:, 1], carry[1], actions)
        return (keys[:, 0], state), (seen, reward, done), legal(state)

    return compiled_masked(reset, step, lanes)


# --- groups, and environments of one lane ---------------------------------------------------------


def raw_vmas(lanes: int) -> Raw:
    """VMAS's step, and a reset of the lanes that ended."""
    from vmas import make_env

    env = make_env("balance", num_envs=lanes, max_steps=100, seed=0)
    env.reset()

    def step(action: NDArray[Any]) -> None:
        done = env.step(list(torch.from_numpy(action).unbind(1)))[2]
        for lane in done.nonzero().flatten().tolist():
            env.reset_at(lane)

    return step, lambda: None


def raw_pettingzoo(lanes: int) -> Raw:
    """One parallel environment per lane."""
    from mpe2 import simple_spread_v3

    each = [simple_spread_v3.parallel_env(max_cycles=25) for _ in range(lanes)]
    for lane, env in enumerate(each):
        env.reset(seed=lane)
    place = {agent: index for index, agent in enumerate(each[0].possible_agents)}

    def step(action: NDArray[Any]) -> None:
        for env, chosen in zip(each, action.tolist(), strict=True):
            env.step({agent: chosen[place[agent]] for agent in env.agents})
            if not env.agents:
                env.reset()

    return step, lambda: [env.close() for env in each] and None


def agents_as_lanes(lanes: int) -> Any:
    """SuperSuit's vector, whose lanes are agents: of one environment, or of pairs."""
    import supersuit
    from mpe2 import simple_spread_v3

    env = simple_spread_v3.parallel_env(N=1 if lanes == 1 else 2, max_cycles=25)
    each = supersuit.pettingzoo_env_to_vec_env_v1(env)
    return supersuit.concat_vec_envs_v1(each, max(1, lanes // 2), base_class="gymnasium")


def raw_turns(lanes: int) -> Raw:
    """PettingZoo's own loop over one turn-based game per lane: ``last``, and a legal move."""
    from pettingzoo.classic import tictactoe_v3

    each = [tictactoe_v3.env() for _ in range(lanes)]
    rng = np.random.default_rng(0)
    for lane, env in enumerate(each):
        env.reset(seed=lane)

    def step() -> None:
        for env in each:
            seen, _, terminated, truncated, _ = env.last()
            while terminated or truncated:
                env.step(None)
                if not env.agents:
                    env.reset()
                seen, _, terminated, truncated, _ = env.last()
            env.step(int(rng.choice(np.flatnonzero(seen["action_mask"]))))

    return step, lambda: [env.close() for env in each] and None


def raw_dm_control(lanes: int) -> Raw:
    """One environment per lane, which resets itself in the step after its last."""
    from dm_control import suite

    each = [suite.load("cartpole", "balance", {"random": lane}) for lane in range(lanes)]

    def step(action: NDArray[Any]) -> None:
        for env, chosen in zip(each, action, strict=True):
            env.step(chosen)

    return step, lambda: [env.close() for env in each] and None


def raw_openspiel(lanes: int) -> Raw:
    """One game per lane, in which every action is always legal."""
    import pyspiel

    game, rng = pyspiel.load_game("catch"), np.random.default_rng(0)

    def begin() -> Any:
        state = game.new_initial_state()
        while state.is_chance_node():
            outcomes, chances = zip(*state.chance_outcomes(), strict=True)
            state.apply_action(int(rng.choice(outcomes, p=chances)))
        return state

    states = [begin() for _ in range(lanes)]

    def step(action: NDArray[Any]) -> None:
        for lane, chosen in enumerate(action.tolist()):
            states[lane].apply_action(chosen)
            states[lane].rewards()
            if states[lane].is_terminal():
                states[lane] = begin()
            states[lane].observation_tensor()

    return step, lambda: None


def turns(lanes: int) -> EnvBase:
    """The same game, turn by turn."""
    system = registry.load("pettingzoo")
    return SystemEnv(system.make("pettingzoo.classic.tictactoe_v3", lanes, range(lanes)))


def pettingzoo_of_torchrl() -> EnvBase:
    """TorchRL's wrapper, with lanes that continue until their last agent is done."""
    from mpe2 import simple_spread_v3

    env = simple_spread_v3.parallel_env(max_cycles=25)
    return torchrl_envs.PettingZooWrapper(env, done_on_any=False, use_mask=True)


ENTRIES = (
    Entry("torchrl", raw_torchrl, make=pendulums, torchrl=pendulums),
    Entry(
        "gymnasium",
        raw_gymnasium,
        make=lambda lanes: GymnasiumVectorEnv(vector(lanes)),
        torchrl=lambda lanes: GymWrapper(
            vector(lanes, AutoresetMode.DISABLED), categorical_action_encoding=True
        ),
    ),
    Entry(
        "minigrid",
        raw_minigrid,
        make=lambda lanes: GymnasiumVectorEnv(minigrid(lanes)),
        costs=4,
    ),
    Entry(
        "mo-gymnasium",
        lambda lanes: stepped(objectives(lanes), seed=0),
        make=lambda lanes: GymnasiumVectorEnv(objectives(lanes)),
    ),
    Entry("sb3", raw_sb3, "CartPole-v1"),
    Entry(
        "envpool",
        raw_envpool,
        "CartPole-v1",
        torchrl=lambda lanes: torchrl_envs.MultiThreadedEnv(lanes, env_name="CartPole-v1"),
    ),
    Entry("ale", raw_ale, "pong", costs=8),
    Entry(
        "procgen",
        raw_procgen,
        "coinrun",
        torchrl=lambda lanes: torchrl_envs.ProcgenEnv("coinrun", num_envs=lanes),
        costs=4,
    ),
    Entry("brax", raw_brax, "ant", costs=16),
    Entry("playground", raw_playground, "CartpoleBalance", costs=16),
    Entry("gymnax", raw_gymnax, "CartPole-v1"),
    Entry(
        "jumanji",
        raw_jumanji,
        "Snake-v1",
        {"unbounded": ["step_count"]},
        masked=True,
        options={"validate": "warn"},  # a trapped snake has no legal move
        torchrl=lambda lanes: seeded(
            torchrl_envs.JumanjiEnv("Snake-v1", batch_size=[lanes], jit=True)
        ),
        costs=2,
    ),
    Entry("smax", raw_smax, "3m", masked=True, costs=4),
    Entry(
        "vmas",
        raw_vmas,
        "balance",
        {"max_steps": 100},
        torchrl=lambda lanes: torchrl_envs.VmasEnv("balance", num_envs=lanes, max_steps=100),
        costs=8,
    ),
    Entry(
        "pettingzoo",
        raw_pettingzoo,
        "mpe2/simple_spread_v3",
        {"max_cycles": 25},
        torchrl=lambda lanes: serial(lanes, pettingzoo_of_torchrl),
        costs=8,
    ),
    Entry("turns", raw_turns, make=turns, masked=True, costs=8),
    Entry(
        "supersuit",
        lambda lanes: stepped(agents_as_lanes(lanes), seed=0),
        make=lambda lanes: SystemEnv(registry.load("supersuit").adopt(agents_as_lanes(lanes))),
        costs=8,
    ),
    Entry(
        "dm_control",
        raw_dm_control,
        "cartpole/balance",
        torchrl=lambda lanes: serial(
            lanes, partial(torchrl_envs.DMControlEnv, "cartpole", "balance")
        ),
        costs=8,
    ),
    Entry(
        "openspiel",
        raw_openspiel,
        "catch",
        torchrl=lambda lanes: serial(lanes, partial(torchrl_envs.OpenSpielEnv, "catch")),
        costs=4,
    ),
)
