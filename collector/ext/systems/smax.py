"""SMAX of JaxMARL: battles of teams whose agents die at different times."""

from collections.abc import Sequence
from typing import Any, Self

from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.system import AgentFlags
from tallyroll.collector.ext.systems.kinds.functional import Context, Functional, StepOutcome
from tallyroll.collector.ext.systems.kinds.functional_specs import made, refuse_bare
from tallyroll.storage.rows.keys import Key

_KINDS = {"smax_env": "SMAX", "heuristic_enemy_smax_env": "EnemySMAX"}
_TEAMS = {"allies": "ally_", "enemies": "enemy_"}


class SmaxSystem(Functional):
    """Lanes of SMAX, with the group ``allies``, and ``enemies`` if they are agents too.

    A group has ``observation``, ``action_mask``, and ``mask``, which marks the living agents. An
    agent that dies is terminated at that step, and its lane continues. A battle that neither team
    has lost at ``max_steps`` is truncated.

    Args:
        env: a ``jaxmarl.environments.SMAX``, or a variant that plays the enemies itself.
        lanes: number of lanes.
        unbounded: names of observations that exceed their declared bounds.
    """

    package, extra = "jaxmarl", "smax"
    about = "a lane ends when a team died; masks say who lives; finals kept; a seed a lane"
    why_no_resets = "its reset accepts only a key, which a seed determines"

    def __init__(self, env: Any, lanes: int, *, unbounded: Sequence[str] = ()) -> None:
        self._env = env
        teams = {
            name: [agent for agent in env.agents if agent.startswith(prefix)]
            for name, prefix in _TEAMS.items()
        }
        self._teams = {name: agents for name, agents in teams.items() if agents}
        action: dict[Key, TensorSpec] = {}
        known: dict[Key, TensorSpec] = {}
        for name, agents in self._teams.items():
            size, first = len(agents), agents[0]
            chosen, seen = env.action_space(first), env.observation_space(first)
            action[name, "action"] = (
                Categorical(int(chosen.n), (size,))
                if hasattr(chosen, "n")
                else Bounded(float(chosen.low), float(chosen.high), (size, *chosen.shape))
            )
            known[name, "observation"] = Bounded(
                float(seen.low), float(seen.high), (size, *seen.shape)
            )
        super().__init__(
            lanes,
            action,
            known=known,
            reward={(name, "reward"): Unbounded((len(a), 1)) for name, a in self._teams.items()},
            groups={name: len(agents) for name, agents in self._teams.items()},
            unbounded=unbounded,
        )

    def begin(self, key: Any, context: Context) -> tuple[Any, Any]:
        """See `Functional.begin`."""
        observation, state = self._env.reset(key)
        return state, self._observed(observation, state)

    def advance(self, key: Any, state: Any, action: Sequence[Any], context: Context) -> StepOutcome:
        """See `Functional.advance`."""
        before = self._alive(state)
        chosen: dict[str, Any] = {}
        for agents, each in zip(self._teams.values(), action, strict=True):
            chosen |= {agent: each[index] for index, agent in enumerate(agents)}
        observation, state, reward, dones, _ = self._env.step_env(key, state, chosen)
        alive, done = self._alive(state), dones["__all__"]
        lost = ~alive["allies"].any() | ~alive["enemies"].any()
        terminated, truncated = done & lost, done & ~lost
        return StepOutcome(
            state,
            self._observed(observation, state),
            [self._stacked(agents, reward) for agents in self._teams.values()],
            terminated,
            truncated,
            {
                name: AgentFlags(
                    before[name] & (~alive[name] | terminated),
                    before[name] & alive[name] & truncated,
                )
                for name in self._teams
            },
        )

    def _alive(self, state: Any) -> dict[str, Any]:
        units = getattr(state, "state", state).unit_alive  # nested in the enemy variants
        return {"allies": units[: self._env.num_allies], "enemies": units[self._env.num_allies :]}

    def _stacked(self, agents: Sequence[str], values: Any) -> Any:
        return self._jax.numpy.stack([values[agent] for agent in agents])

    def _observed(self, observation: Any, state: Any) -> dict[str, Any]:
        legal, alive = self._env.get_avail_actions(state), self._alive(state)
        groups = {
            name: {
                "observation": self._stacked(agents, observation),
                "mask": alive[name],
                "action_mask": self._stacked(agents, legal).astype(bool),
            }
            for name, agents in self._teams.items()
        }
        return {**groups, "world_state": observation["world_state"]}

    def describe(self) -> dict[str, Any]:
        """Return the provenance."""
        return {"id": type(self._env).__name__, "type": type(self).__name__}

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the scenario of ``smax:name``, such as ``3m``, against JaxMARL's heuristic.

        In ``kwargs``, ``self_play=True`` makes the enemies agents too, and ``unbounded`` is an
        argument of the class. The other arguments are the environment's own.
        """
        jaxmarl = needs("jaxmarl", cls.extra)
        smax = needs("jaxmarl.environments.smax.smax_env", cls.extra)
        unbounded, self_play = kwargs.pop("unbounded", ()), kwargs.pop("self_play", False)
        scenario = made(name, {}, smax.map_name_to_scenario)
        kind = "SMAX" if self_play else "HeuristicEnemySMAX"
        env = made(kind, {"scenario": scenario, **kwargs}, jaxmarl.make)
        return cls(env, lanes, unbounded=unbounded)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Return None, or raise ArgumentError for a bare environment, which has no lane count."""
        for module, kind in _KINDS.items():
            refuse_bare(made, f"jaxmarl.environments.smax.{module}", kind, cls.__name__)
        return None
