"""PettingZoo parallel and AEC environments, one per lane, with agents in groups."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.calls.objects import reach_objects
from tallyroll.collector.envs.exact import ExactRow, reward_reader, terminated_of, truncated_of
from tallyroll.collector.envs.gymnasium.info_entries import as_array, joined
from tallyroll.collector.envs.gymnasium.info_masks import are_bits, marks_of
from tallyroll.collector.envs.system import AgentFlags, Array, Declares, Mask, Step, System
from tallyroll.collector.errors import TransitionError, ValueRefused
from tallyroll.collector.ext.systems.kinds.agents import Group, Groups, declared, described, grouped
from tallyroll.collector.ext.systems.kinds.side_by_side import all_or_none, close_all, numbers
from tallyroll.collector.ext.systems.pettingzoo.envs import alike, make_into
from tallyroll.collector.ext.systems.pettingzoo.turns import AgentTurns
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import NEXT, Key

Infos = Mapping[str, Any]
"""Infos of a lane, by agent."""


class AgentMasks:
    """Action masks of the agents that act next, by group.

    A group has masks if the first infos of any of its agents have a mask, and its observations have
    no mask. An agent without a mask may choose any action.

    Args:
        groups: the groups of agents.
        first: infos of the first reset, by lane.
    """

    def __init__(self, groups: Sequence[Group], first: Sequence[Infos]) -> None:
        self.legal: dict[Key, NDArray[np.bool_]] = {}
        """Masks ``[lane, agent, ...]`` by action, as in `System.legal`."""
        self._groups: list[tuple[Group, NDArray[np.bool_], tuple[int, ...], bool]] = []
        for group in groups:
            if any(leaf.key == (MASK_NAME,) for leaf in group.leaves):
                continue
            masks = [_mask_in(infos, agent) for infos in first for agent in group.agents]
            found = next((each for each in masks if each is not None), None)
            if found is None:
                continue
            bits = are_bits(group.action, found.shape)
            shape = (2 * found.size,) if bits else found.shape
            marks = np.ones((len(first), len(group.agents), *shape), np.bool_)
            self.legal[group.name, "action"] = marks
            self._groups.append((group, marks, found.shape, bits))

    def put(self, lane: int, infos: Infos, acting: Sequence[str], first_lane: int) -> None:
        """Store the masks of the agents of ``lane`` that act next.

        Raises:
            TransitionError: the shape of a mask differs from that of the first mask, or a mask has
                invalid numbers.
        """
        for group, marks, shape, bits in self._groups:
            marks[lane] = True
            for index, agent in enumerate(group.agents):
                found = _mask_in(infos, agent) if agent in acting else None
                if found is None:
                    continue
                place = f"of {agent} in lane {first_lane + lane}"
                if found.shape != shape:
                    raise TransitionError(
                        f"info key {MASK_NAME!r}: expected the shape {list(shape)} of the first "
                        f"mask, got {list(found.shape)} {place}. Return masks of the same shape."
                    )
                marks[lane, index] = marks_of(found[None], bits, [place].__getitem__)[0]


def _mask_in(infos: Infos, agent: str) -> NDArray[Any] | None:
    info = infos.get(agent)
    value = info.get(MASK_NAME) if isinstance(info, Mapping) else None
    found = None if value is None else as_array(joined((MASK_NAME,), value))
    if value is not None and (found is None or found.dtype.kind not in "biuf"):
        raise TransitionError(
            f"info key {MASK_NAME!r}: expected an array of numbers, got {value!r:.80} of {agent}. "
            "Correct the mask."
        )
    return found


class PettingZooSystem(System):
    """PettingZoo environments side by side. One step is a joint step of all living agents.

    Masks mark the agents that act. These are the agents in ``env.agents``: they may be present from
    the reset on, join later, or return. A lane's episode ends when ``env.agents`` is empty. It is
    truncated if one of the last agents was truncated, and terminated otherwise.

    Only an agent that acted in a step can end in it. Its observation after that step is its final
    observation, and later observations are zeros. If an agent acted and then ended or became
    absent, the step may return no observation of it. That observation is zeros too, and
    ``("collector", "next_valid", group)`` is False. A step must return a reward for each agent that
    acted and is not absent, and a flag for each agent that it drops from ``env.agents``. Otherwise
    the system raises an error.

    An agent that joins or returns has no earlier observation. In the row in which it joins or
    returns, its mask is False at the root and True in ``next``, which has its first observation. An
    agent that is absent without an end is not done. The reward of an agent is the reward that the
    step returned for it. Random actions respect the ``action_mask`` in an agent's observation or
    info.

    A parallelizable AEC environment is stepped in cycles. In any other AEC environment, a step is
    the turn of one agent: the mask marks the agent whose turn is next, and each living agent has an
    observation and its reward for the turn. The same step also makes the calls that remove dead
    agents.

    Args:
        envs: parallel or AEC environments, all alike. The system closes them.
        groups: agents by group name. None groups them by name and spaces (`agents.grouped`).
        name: name of the environment, for provenance.

    Raises:
        ArgumentError: the environments or groups are invalid.
        SpaceError: no column can hold a space.
    """

    package = "pettingzoo"
    extra = "pettingzoo"
    about = "an episode ends with its last agent; masks say who lives; a seed a lane"
    conflicts = "mpe2 brings pygame-ce; the pygame of MO-Gymnasium and CARL writes over it"

    def __init__(
        self, envs: Sequence[Any], groups: Groups | None = None, name: str | None = None
    ) -> None:
        self.envs, seen, acts = alike(envs)
        self.reached = partial(reach_objects, self.envs)
        self.name, lanes = name or str(envs[0]), len(self.envs)
        self._groups = grouped(seen, acts, groups)
        self._names = [agent for group in self._groups for agent in group.agents]
        self._turns = isinstance(self.envs[0], AgentTurns)
        self._ids = [not group.action.shape[1:] for group in self._groups]
        shape = lanes, len(self._names)
        self._reward = np.zeros(shape)
        self._seen = np.ones(shape, np.bool_)
        """False for agents that acted in the last step and have no observation after it."""
        self._group_of = {agent: each.name for each in self._groups for agent in each.agents}
        self._mask, self._terminated, self._truncated = np.zeros((3, *shape), np.bool_)
        self._living = np.zeros(shape, np.bool_) if self._turns else self._mask
        """Agents that can end. If agents take turns, more agents live than act."""
        self._over = np.zeros((2, lanes), np.bool_)
        self._masks: AgentMasks | None = None
        self._rows = AgentRows(self._groups, lanes)
        self._arrays = self._rows.with_masks(self._mask)
        self.declares = Declares(
            lanes=lanes,
            at_end="final",
            parts=True,
            turns=self._turns,
            reset_seeds=True,
            options=True,
            agent_finals="some",
            **declared(self._groups),
        )

    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Reset environments with their seeds and the options drawn for them."""
        seeds = seeds if self.next_seeds is None else self.next_seeds.tolist()
        told: dict[int, Any] = {}
        for lane in numbers(lanes, len(self.envs)):
            seed = None if seeds is None else seeds[lane]
            own = options.get("options")
            if self.next_options is not None:
                own = dict(self.next_options[lane])
            seen, told[lane] = self.envs[lane].reset(seed=seed, options=own)
            self._rows.put(lane, seen, self.first_lane)
            self._look(lane)
            self._require_observations(lane, seen)
            if not self.envs[lane].agents:
                raise TransitionError(
                    f"{self._named(lane)} has no agents after its reset, so no agent can act. Let "
                    "reset list the agents in env.agents."
                )
        if self.wants_masks and lanes is None:
            self._masks = AgentMasks(self._groups, [self._infos(lane, told[lane]) for lane in told])
            self.legal = self._masks.legal
        if self.legal:
            for lane, infos in told.items():
                self._put_masks(lane, infos)
        return self._arrays

    def _infos(self, lane: int, infos: Any) -> Mapping[str, Any]:
        """Return the infos of a lane's agents; an AEC environment stores them itself."""
        env = self.envs[lane]
        found = env.infos if self._turns else infos
        return found if isinstance(found, Mapping) else {}

    def _put_masks(self, lane: int, infos: Any) -> None:
        assert self._masks is not None
        acting = self.envs[lane].agents
        self._masks.put(lane, self._infos(lane, infos), acting, self.first_lane)

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step environments one after the other."""
        names, count = self._names, len(self._names)
        parts = [x.tolist() if ids else x for x, ids in zip(action, self._ids, strict=True)]
        for flags in (self._terminated, self._truncated, self._over):
            flags.fill(False)
        self._seen.fill(True)
        reward_of = reward_reader(self.reward_dtype)
        for lane in numbers(lanes, len(self.envs)):
            env = self.envs[lane]
            acting = list(env.agents)
            given = (each for part in parts for each in part[lane])
            actions = dict(zip(names, given, strict=True))
            if len(acting) < count:
                actions = {name: actions[name] for name in acting}
            seen, rewards, terminated, truncated, infos = env.step(actions)
            self._rows.put(lane, seen, self.first_lane)
            if len(seen) < count or len(rewards) < count:
                absent = set(acting).difference(seen, env.agents)
                here = [
                    name
                    for name in acting
                    if name not in absent or terminated.get(name) or truncated.get(name)
                ]
                self._require_rewards(lane, here, rewards)
                lived = self._living[lane]
                self._seen[lane] = [name in seen for name in names] | ~lived
            self._reward[lane] = [
                self._read(reward_of, lane, name, rewards.get(name, 0.0)) for name in names
            ]
            flagged = any(terminated.values()) or any(truncated.values())
            if flagged:
                self._end_agents(lane, terminated, truncated)
            if self._turns or list(env.agents) != acting:
                self._require_flags(lane, acting, terminated, truncated)
                self._look(lane)
                if not env.agents:
                    self._end(lane)
            elif flagged:
                self._require_left(lane)
            self._require_observations(lane, seen)
            if self.legal:
                self._put_masks(lane, infos)
        return Step(
            self._arrays,
            [self._reward[:, part] for part in self._rows.slices.values()],
            self._over[0],
            self._over[1],
            agents={
                group: AgentFlags(
                    self._terminated[:, part], self._truncated[:, part], self._seen[:, part]
                )
                for group, part in self._rows.slices.items()
            },
        )

    def _read(self, read: Callable[[Any], Any], lane: int, agent: str, value: Any) -> Any:
        """Read a reward or flag of an agent."""
        try:
            return read(value)
        except ValueRefused as error:
            error.lane, error.got = self.first_lane + lane, f"{error.got} of {agent}"
            raise

    def _end_agents(
        self, lane: int, terminated: Mapping[str, Any], truncated: Mapping[str, Any]
    ) -> None:
        """Record the ends of agents that lived before this step; ignore those of other agents."""
        over = [
            [self._read(flag_of, lane, name, each.get(name, False)) for name in self._names]
            for flag_of, each in ((terminated_of, terminated), (truncated_of, truncated))
        ]
        self._terminated[lane], self._truncated[lane] = np.array(over) & self._living[lane]

    def _require_rewards(
        self, lane: int, agents: Sequence[str], rewards: Mapping[str, Any]
    ) -> None:
        """Raise if one of ``agents``, all of which acted, has no reward."""
        if unpaid := [name for name in agents if name not in rewards]:
            raise self._lacking(
                lane,
                unpaid[0],
                "reward",
                "let step return a reward for every agent that acted, including agents that end",
            )

    def _require_flags(
        self,
        lane: int,
        acting: Sequence[str],
        terminated: Mapping[str, Any],
        truncated: Mapping[str, Any],
    ) -> None:
        """Raise if an agent that acted left ``env.agents`` without a flag."""
        if self._turns:  # the environment decides which agents it removes
            return
        agents = self.envs[lane].agents
        for name in acting:
            if name not in agents and name not in terminated and name not in truncated:
                raise self._lacking(
                    lane,
                    name,
                    "terminated",
                    "let step return True for an agent that ended and left env.agents, or False "
                    "for an agent that is absent and may come back",
                )

    def _lacking(self, lane: int, agent: str, what: str, advice: str) -> ValueRefused:
        """Return the error for a value that a step did not return for an agent."""
        key = (NEXT, self._group_of[agent], what)
        error = ValueRefused(key, f"a value for agent {agent}, which acted", "none", advice)
        error.lane = self.first_lane + lane
        return error

    def _look(self, lane: int) -> None:
        """Record which agents act next, and which live."""
        env = self.envs[lane]
        agents = set(env.agents)
        if unknown := agents.difference(self._names):
            raise TransitionError(
                f"{self._named(lane)} lists the agents {sorted(unknown)}, but they are not in "
                "possible_agents. List every agent that may ever act in possible_agents."
            )
        self._mask[lane] = [name in agents for name in self._names]
        if self._turns:
            self._living[lane] = [name in env.living for name in self._names]

    def _require_left(self, lane: int) -> None:
        """Raise if all agents that acted ended but are still listed, which is ambiguous."""
        if (self._terminated[lane] | self._truncated[lane])[self._mask[lane]].all():
            raise TransitionError(
                f"{self._named(lane)} ended every agent that acted, but still lists all of them. "
                "Empty env.agents when an episode ends, or report no end of agents that continue."
            )

    def _require_observations(self, lane: int, seen: Mapping[str, Any]) -> None:
        """Raise if an agent would have to act without an observation."""
        if blind := [name for name in self.envs[lane].agents if name not in seen]:
            raise TransitionError(
                f"{self._named(lane)} lists the agents {blind}, but returned no observations of "
                "them. Return an observation of every agent in env.agents."
            )

    def _end(self, lane: int) -> None:
        """Record the end of a lane's episode, after its last agent has left.

        Raises:
            TransitionError: no agent was terminated or truncated.
        """
        terminated, truncated = self._terminated[lane], self._truncated[lane]
        if not (terminated | truncated).any():
            raise TransitionError(
                f"{self._named(lane)} has no agents left, but no agent was terminated or "
                "truncated. Return a termination or a truncation for each agent that leaves."
            )
        cut = bool((truncated & ~terminated).any())
        self._over[:, lane] = not cut, cut

    def _named(self, lane: int) -> str:
        return f"lane {self.first_lane + lane}: {self.name}"

    def close(self) -> None:
        """Close every environment."""
        close_all(self.envs)

    def describe(self) -> dict[str, Any]:
        """Return the name and the groups of agents."""
        return described(self.name, self, self._groups)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make an environment from PettingZoo's registry or from a module.

        Names are like ``pettingzoo:sisl/pursuit-v5`` and ``pettingzoo:mpe2.simple_tag_v3``. A
        function after a colon replaces the module's ``parallel_env`` or ``env``. ``kwargs`` are the
        environment's own arguments and ``groups``.
        """
        groups = kwargs.pop("groups", None)
        with all_or_none() as envs:
            make_into(envs, name, lanes, kwargs)
            return cls(envs, groups, name)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap a parallel or AEC environment, or a list with one per lane.

        Return None for other objects.
        """
        module = sys.modules.get("pettingzoo.utils.env")
        envs = made if isinstance(made, (list, tuple)) else [made]
        kinds = () if module is None else (module.ParallelEnv, module.AECEnv)
        return cls(envs) if envs and all(isinstance(env, kinds) for env in envs) else None


class AgentRows:
    """Arrays of observations ``[lane, agent, ...]`` that are filled agent by agent."""

    def __init__(self, groups: Sequence[Group], lanes: int) -> None:
        self.slices: dict[str, slice] = {}
        """The agents of each group, as a slice of all agents."""
        self._of_groups: list[list[Array]] = []
        self._rows: list[dict[str, list[Any]]] = [{} for _ in range(lanes)]
        """The getter, target array and cast of each value, by lane and agent."""
        at = 0
        for group in groups:
            self.slices[group.name] = slice(at, at := at + len(group.agents))
            specs = list(group.observation.values())[:-1]
            arrays = [np.zeros((lanes, *spec.shape), NUMPY[spec.dtype]) for spec in specs]
            self._of_groups.append(arrays)
            getters = [leaf.getter() for leaf in group.leaves]
            exact = [
                ExactRow((group.name, *leaf.key), array.shape[2:], array.dtype, any_bools=True)
                for leaf, array in zip(group.leaves, arrays, strict=True)
            ]
            for lane, rows in enumerate(self._rows):
                for index, agent in enumerate(group.agents):
                    own = [array[lane, index, ...] for array in arrays]
                    rows[agent] = list(zip(getters, own, exact, strict=True))

    def with_masks(self, masks: Array) -> list[Array]:
        """Return the declared columns; ``masks`` ``[lane, agent]`` are the masks of all agents."""
        pairs = zip(self._of_groups, self.slices.values(), strict=True)
        return [each for arrays, part in pairs for each in (*arrays, masks[:, part])]

    def put(self, lane: int, seen: Mapping[str, Any], first_lane: int) -> None:
        """Copy the observations of a lane's agents; write zeros for agents without an observation.

        Raises:
            TransitionError: an agent with an observation has no columns, or an observation lacks a
                part.
            ValueRefused: a value does not fit its space.
        """
        rows = self._rows[lane]
        if not seen.keys() <= rows.keys():
            raise TransitionError(
                f"lane {first_lane + lane}: expected observations of the agents {[*rows]}, got "
                f"also {sorted(seen.keys() - rows.keys())}. List every agent that can appear in "
                "possible_agents."
            )
        if len(seen) < len(rows):
            for own in (own for name in rows if name not in seen for _, own, _ in rows[name]):
                own.fill(0)
        for name, value in seen.items():
            for take, row, exact in rows[name]:
                try:
                    part = take(value)
                except (KeyError, IndexError, TypeError) as error:
                    refused = exact.refused(
                        f"no such value in {value!r:.80} of {name}", first=False
                    )
                    refused.lane = first_lane + lane
                    raise refused from error
                if exact.is_right(part):
                    row[...] = part
                elif not exact.puts_bits(part, row):
                    row[...] = self._fitted(exact, part, name, first_lane + lane)

    @staticmethod
    def _fitted(exact: ExactRow, part: Any, agent: str, lane: int) -> Array:
        try:
            return exact.array(part)
        except ValueRefused as error:
            error.lane, error.got = lane, f"{error.got} of {agent}"
            raise
