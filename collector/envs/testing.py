"""The contract of an environment system, as tests: subclass `SystemContract` and run pytest.

    class TestMySystem(SystemContract):
        def make(self, lanes, seeds):
            return MySystem(lanes, seeds)

It steps the system by hand, compares what it does with what it declares, and compares the rows that
a collector makes of it, bit for bit, with another instance that is stepped by hand.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.stepping.arrays import as_flags, as_tensor, whole
from tallyroll.collector.envs.system import Mask, Step, System, require_consistent
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.policies.random_actions import block_draw
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import (
    LANE,
    NEXT,
    NEXT_VALID,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    spell,
)

Values: TypeAlias = list[NDArray[Any]]
SEED = 7


class Hand:
    """A system that is stepped by hand: all lanes at a time, ends finished as it declares.

    Args:
        system: the system.
        seeds: of its first reset, where that takes any.
        contexts: a generator a lane that draws contexts by ``draw``, one ahead.
    """

    def __init__(self, system: System, seeds: Sequence[int] | None, draw: Any = None) -> None:
        self.system, self.d = system, system.declares
        self._draw = draw
        self._rngs = [np.random.default_rng(seed) for seed in seeds or range(self.d.lanes)]
        if self.d.context:
            system.next_context = {
                name: np.zeros((self.d.lanes, *spec.shape), NUMPY[spec.dtype])
                for name, spec in self.d.context.items()
            }
            self._redraw(np.ones(self.d.lanes, np.bool_))
        self.pending = np.zeros(self.d.lanes, np.bool_)
        """Lanes whose next step is a reset slot."""
        given = seeds if self.d.seeds in ("reset", "shared") else None
        self.seen = self._values(system.reset(None, given))
        self._redraw(np.ones(self.d.lanes, np.bool_))

    def _redraw(self, lanes: Mask) -> None:
        for lane in np.flatnonzero(lanes) if self.d.context else ():
            drawn = self._draw(self._rngs[lane])
            for name, values in self.system.next_context.items():
                values[lane] = drawn[name]

    def _values(self, values: Sequence[Any]) -> Values:
        return [as_tensor(each, torch.device("cpu")).numpy() for each in values]

    def reset(self, lanes: Mask | None) -> None:
        """Reset the lanes of a mask, or all."""
        self.system.reset(lanes, None)
        everyone = np.ones(self.d.lanes, np.bool_)
        self._redraw(everyone if lanes is None else lanes)
        self.pending[everyone if lanes is None else lanes] = False

    def step(self, action: Values) -> tuple[Step, Values, Mask]:
        """Step all lanes.

        Returns:
            What was returned, the observations that it led to (final ones where episodes ended),
            and the lanes that executed their action.
        """
        d = self.d
        out = _stepped(self.system, action)
        after = self._values(out.obs)
        executed, ended = ~self.pending, as_flags(out.terminated) | as_flags(out.truncated)
        following = [value.copy() for value in after]
        if d.at_end == "final" and ended.any():
            reset = self._values(self.system.reset(ended, None))
            for value, new in zip(following, reset, strict=True):
                value[ended] = new[ended]
        if d.at_end == "first" and out.final is not None:
            for value, final in zip(after, self._values(out.final), strict=True):
                value[ended] = final[ended]
        self._redraw(self.pending if d.at_end == "reset_slot" else ended)
        if d.at_end == "reset_slot":
            self.pending = ended
        self.seen = following
        return out, after, executed


def _stepped(system: System, action: Values, lanes: Mask | None = None) -> Step:
    d = system.declares
    given: Any = action
    if d.device != "cpu":
        given = [torch.from_numpy(each).to(d.device) for each in action]
    if not d.arrivals:
        return system.step(given) if lanes is None else system.step(given, lanes)
    assert d.lanes % d.arrivals == 0, f"lanes: choose a multiple of the {d.arrivals} arrivals"
    everyone = np.arange(d.lanes, dtype=np.int32)
    for part in np.split(everyone, range(d.arrivals, d.lanes, d.arrivals)):
        system.send([each[part] for each in given], part)
    return whole(system, d.lanes)


class SystemContract:
    """Tests that every environment system passes. Subclass it, and say how yours is made."""

    lanes = 3
    """Lanes of the instances that are made; with arrivals more than come a call."""
    steps = 60
    """Steps by hand; several episodes of every lane have to end within them."""
    frames = 200
    """Rows that are collected."""
    repeatable = True
    """The same seeds and actions give the same values, bit for bit."""
    agents_come_back = False
    """Agents of a group may join, or come back, while a lane's episode goes on."""

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        """A new instance; ``seeds`` are one a lane, for one that takes them when it is made."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """A context, where the system declares any."""
        return {}

    # --- tools ------------------------------------------------------------------------------------

    def hand(self, seeds: Sequence[int] = (), lanes: int = 0) -> Hand:
        """A new instance, reset."""
        seeds = list(seeds) or lane_seeds(SEED, lanes or self.lanes, 0)
        return Hand(self.make(len(seeds), seeds), seeds, self.draw)

    def actions(self, system: System, steps: int, seed: int = 0) -> Iterator[Values]:
        """Random actions of all lanes ``[lane, ...]``, step by step."""
        rng, lanes = np.random.default_rng(seed), system.declares.lanes
        draws = [
            block_draw(spec.expand(lanes, *spec.shape)) for spec in system.declares.action.values()
        ]
        for _ in range(steps):
            yield [
                draw(rng, 1)[0]
                if draw is not None
                else np.stack([spec.rand().numpy() for _ in range(lanes)])
                for draw, spec in zip(draws, system.declares.action.values(), strict=True)
            ]

    def close(self, *systems: System) -> None:
        """Close instances."""
        for system in systems:
            system.close()

    # --- what is declared is so -------------------------------------------------------------------

    def test_the_declaration_is_consistent(self) -> None:
        """Check that the declaration does not contradict itself."""
        system = self.make(self.lanes, lane_seeds(SEED, self.lanes, 0))
        require_consistent(system.declares)
        assert system.declares.lanes == self.lanes, "make(lanes, …) makes so many lanes"
        self.close(system)

    def test_values_are_as_declared(self) -> None:
        """Check shapes, dtypes and ranges of the results of resets and steps."""
        hand = self.hand()
        d = hand.d
        self._require_declared(hand.seen, d.observation, d.lanes)
        for action in self.actions(hand.system, self.steps):
            out, after, _ = hand.step(action)
            self._require_declared(after, d.observation, d.lanes)
            self._require_declared(hand.seen, d.observation, d.lanes)
            for reward, spec in zip(out.reward, d.reward.values(), strict=True):
                shape = (d.lanes, *spec.shape)
                wanted = shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
                got = tuple(as_tensor(reward, torch.device("cpu")).shape)
                assert got == wanted, f"reward: declared {wanted}, got {got}"
            for flags in (out.terminated, out.truncated):
                assert as_flags(flags).shape == (d.lanes,), "flags are [lane]"
        self.close(hand.system)

    def _require_declared(self, values: Values, specs: Mapping[Key, Any], lanes: int) -> None:
        assert len(values) == len(specs), f"declared {len(specs)} observations, got {len(values)}"
        for (key, spec), value in zip(specs.items(), values, strict=True):
            tensor = torch.from_numpy(value)
            wanted = (spec.dtype, (lanes, *spec.shape))
            got = (tensor.dtype, tuple(tensor.shape))
            assert got == wanted, f"{spell(key)}: declared {wanted}, got {got}"
            grown = spec.cpu().expand(lanes, *spec.shape)
            assert grown.is_in(tensor), f"{spell(key)}: {value!r:.200} is not in {spec}"

    def test_episodes_end_more_than_once(self) -> None:
        """Check that every lane ends and goes on, and that truncation is reported as declared."""
        hand = self.hand()
        ends, truncated = np.zeros((2, hand.d.lanes), np.int64)
        runs = np.zeros(hand.d.lanes, np.int64)
        longest = np.zeros(hand.d.lanes, np.int64)
        for action in self.actions(hand.system, self.steps):
            out, _, executed = hand.step(action)
            ended = as_flags(out.terminated) | as_flags(out.truncated)
            ends += ended
            truncated += as_flags(out.truncated)
            runs = np.where(ended, runs + executed, 0)
            longest = np.maximum(longest, runs)
            assert not (ended & ~executed).any(), "an episode ended in the slot that resets it"
        assert (ends >= 2).all(), f"so few episodes ended in {self.steps} steps: {ends.tolist()}"
        assert (longest < ends).all() or (ends < 3).any(), (
            "a lane ends in every step after its first end, so it is not reset: "
            f'declared at_end="{hand.d.at_end}"'
        )
        assert hand.d.truncation or not truncated.any(), "truncated, and declared truncation=False"
        self.close(hand.system)

    def test_a_final_observation_is_not_the_next_first_one(self) -> None:
        """Check that a system that declares to wait for resets does not reset itself."""
        hand = self.hand()
        if hand.d.finals == "lost":
            return self.close(hand.system)
        same = ends = 0
        starts = [value.copy() for value in hand.seen]
        varied = False
        for action in self.actions(hand.system, self.steps):
            out, after, _ = hand.step(action)
            ended = as_flags(out.terminated) | as_flags(out.truncated)
            valid = ended if out.final_valid is None else ended & as_flags(out.final_valid)
            for lane in np.flatnonzero(valid) if hand.d.at_end != "reset_slot" else ():
                ends += 1
                same += all(
                    np.array_equal(a[lane], s[lane]) for a, s in zip(after, hand.seen, strict=True)
                )
                varied |= any(
                    not np.array_equal(s[lane], first[lane])
                    for s, first in zip(hand.seen, starts, strict=True)
                )
        assert not (ends >= 3 and same == ends and varied), (
            f"each of {ends} final observations is the first one of the next episode, so the "
            f'system resets itself within its step; declared at_end="{hand.d.at_end}", '
            f'finals="{hand.d.finals}"'
        )
        return self.close(hand.system)

    def test_only_a_reset_slot_ignores_its_action(self) -> None:
        """Two instances that act differently in the step after each end, and nowhere else."""
        if not self.repeatable:
            return
        one, other = self.hand(), self.hand()
        differs, ends = False, 0
        for same, ended in self._twins(one, other):
            if not same:
                differs = True
                break
            ends += int(ended.sum())
        declared = one.d.at_end
        if declared == "reset_slot":
            assert not differs, (
                'declared at_end="reset_slot", and the action after an end had an effect'
            )
        else:
            assert differs or ends < 5 or not self._acts(one), (
                f'declared at_end="{declared}", and the actions after {ends} ends had no effect: '
                "is the step after an end a reset slot?"
            )
        self.close(one.system, other.system)

    def test_a_lane_that_was_reset_executes_its_next_action(self) -> None:
        """Check with ``resets="mask"`` that a lane that was reset does not reset itself again."""
        self._require_executed_after_resets("mask")

    def test_lanes_that_were_all_reset_execute_their_next_actions(self) -> None:
        """Check the same with resets of all lanes, or that the system refuses them after ends."""
        self._require_executed_after_resets("all")

    def _require_executed_after_resets(self, how: str) -> None:
        """Two instances that are reset after ends, and act differently in the step that follows."""
        one, other = self.hand(), self.hand()
        whole, possible = how == "all", one.d.resets
        if not self.repeatable or possible == "none" or (possible == "all" and not whole):
            return self.close(one.system, other.system)
        differs, ends = False, 0
        for same, ended in self._twins(one, other):
            if not same:
                differs = True
                break
            ends += int(ended.sum())
            if ended.any():
                try:
                    one.reset(None if whole else ended)
                    other.reset(None if whole else ended)
                except EnvironmentRefused:
                    return self.close(one.system, other.system)
        assert differs or ends < 5 or not self._acts(one), (
            f"the actions that followed {ends} ends and resets had no effect: does the system "
            "reset such lanes once more?"
        )
        return self.close(one.system, other.system)

    def _twins(self, one: Hand, other: Hand) -> Iterator[tuple[bool, Mask]]:
        """Step both, with other actions after ends: whether they observe the same, and new ends."""
        after_end = np.zeros(one.d.lanes, np.bool_)
        others = self.actions(one.system, self.steps, seed=1)
        for action, another in zip(self.actions(one.system, self.steps), others, strict=True):
            changed = [value.copy() for value in action]
            for value, new in zip(changed, another, strict=True):
                value[after_end] = new[after_end]
            out, after, _ = one.step(action)
            after_other = other.step(changed)[1]
            same = all(np.array_equal(a, b) for a, b in zip(after, after_other, strict=True))
            after_end = as_flags(out.terminated) | as_flags(out.truncated)
            yield same, after_end

    def _acts(self, hand: Hand) -> bool:
        """Return whether actions change the results of this system at all."""
        one, other = self.hand(), self.hand()
        try:
            pairs = zip(
                self.actions(one.system, self.steps),
                self.actions(one.system, self.steps, seed=1),
                strict=True,
            )
            for action, another in pairs:
                after, after_other = one.step(action)[1], other.step(another)[1]
                if any(not np.array_equal(a, b) for a, b in zip(after, after_other, strict=True)):
                    return True
            return False
        finally:
            self.close(one.system, other.system)

    # --- seeds, masks, parts, contexts, arrivals, agents ------------------------------------------

    def test_seeds_repeat_a_run(self) -> None:
        """Check that the same seeds and actions give the same values."""
        if not self.repeatable:
            return None
        one, other = self.hand(), self.hand()
        if one.d.seeds == "none":
            return self.close(one.system, other.system)
        self._require_equal(one.seen, other.seen, "the first observations")
        for action in self.actions(one.system, self.steps):
            self._require_equal(one.step(action)[1], other.step(action)[1], "a step")
        return self.close(one.system, other.system)

    def _require_equal(self, one: Values, other: Values, what: str) -> None:
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a, b), f"{what}: the same seeds gave {a!r:.200} and {b!r:.200}"

    def test_a_reset_by_mask_leaves_other_lanes_alone(self) -> None:
        """Check with ``resets="mask"`` that the other lanes go on undisturbed.

        If lanes draw from one generator, their next episodes may begin differently.
        """
        if not self.repeatable or self.lanes < 2:
            return None
        one, other = self.hand(), self.hand()
        if one.d.resets != "mask" or one.d.seeds == "none":
            return self.close(one.system, other.system)
        mask = np.zeros(self.lanes, np.bool_)
        mask[0] = True
        same = ~mask
        for at, action in enumerate(self.actions(one.system, self.steps)):
            if at % 3 == 1:
                one.system.reset(mask, None)
                one.pending[0] = False
            out, after, _ = one.step(action)
            after_other = other.step(action)[1]
            self._require_equal(
                [a[same] for a in after], [b[same] for b in after_other], "lane 0 was reset"
            )
            if one.d.seeds == "shared":
                same &= ~(as_flags(out.terminated) | as_flags(out.truncated))
        return self.close(one.system, other.system)

    def test_a_part_of_the_lanes_is_stepped(self) -> None:
        """Check with ``parts`` that lanes that are left out do not change."""
        one, other = self.hand(), self.hand()
        if not one.d.parts or self.lanes < 2 or not self.repeatable:
            return self.close(one.system, other.system)
        ahead = np.zeros(self.lanes, np.bool_)
        ahead[0] = True
        own = next(self.actions(one.system, 1))
        first = _stepped(one.system, own, ahead)
        if as_flags(first.terminated)[0] or as_flags(first.truncated)[0]:
            return self.close(one.system, other.system)
        rest = _stepped(one.system, own, ~ahead)
        whole_step = _stepped(other.system, own)
        for index, value in enumerate(whole_step.obs):
            got = np.asarray(first.obs[index]).copy()
            got[1:] = np.asarray(rest.obs[index])[1:]
            assert np.array_equal(got, np.asarray(value)), "parts and a whole step differ"
        return self.close(one.system, other.system)

    def test_the_driver_works_while_a_step_is_computed(self) -> None:
        """Check with ``waits`` that each step calls ``while_waiting``, with the same results."""
        one, other = self.hand(), self.hand()
        if not one.system.waits:
            return self.close(one.system, other.system)
        worked = []
        one.system.while_waiting = lambda: worked.append(True)
        for step, action in enumerate(self.actions(one.system, self.steps)):
            after, after_other = one.step(action)[1], other.step(action)[1]
            assert len(worked) > step, "waits: a step did not call while_waiting"
            if self.repeatable:
                self._require_equal(after, after_other, "the driver worked meanwhile")
            del worked[step + 1 :]
        return self.close(one.system, other.system)

    def test_a_context_is_copied_when_it_is_used(self) -> None:
        """Check that contexts drawn ahead have no effect before the next reset."""
        one, other = self.hand(), self.hand()
        if not one.d.context or not self.repeatable:
            return self.close(one.system, other.system)
        for action in self.actions(one.system, self.steps):
            drawn = {name: value.copy() for name, value in one.system.next_context.items()}
            out, after, _ = one.step(action)
            if (as_flags(out.terminated) | as_flags(out.truncated)).any():
                break
            self._require_equal(after, other.step(action)[1], "the next context was changed")
            for name, value in one.system.next_context.items():
                value[...] = drawn[name] + 1 if drawn[name].dtype != np.bool_ else ~drawn[name]
        return self.close(one.system, other.system)

    def test_lanes_arrive_once_for_each_time_they_are_sent(self) -> None:
        """Check with ``arrivals`` that so many lanes come a call, each of them sent before."""
        hand = self.hand()
        d, system = hand.d, hand.system
        if not d.arrivals:
            return self.close(system)
        away = np.zeros(d.lanes, np.int64)
        everyone = np.arange(d.lanes, dtype=np.int32)
        actions = self.actions(system, self.steps)
        given = next(actions)
        for part in np.split(everyone, range(d.arrivals, d.lanes, d.arrivals)):
            system.send([each[part] for each in given], part)
        away += 1
        for action in actions:
            out = system.recv()
            lanes = np.asarray(out.lanes)
            assert len(lanes) == d.arrivals, f"declared {d.arrivals} arrivals, got {len(lanes)}"
            assert (away[lanes] == 1).all(), f"lanes {lanes.tolist()} were not all sent"
            assert len(set(lanes.tolist())) == len(lanes), "a lane came twice in one call"
            ended = as_flags(out.terminated) | as_flags(out.truncated)
            if d.at_end == "final" and ended.any():
                mask = np.zeros(d.lanes, np.bool_)
                mask[lanes[ended]] = True
                system.reset(mask, None)
            system.send([each[lanes] for each in action], lanes.astype(np.int32))
        return self.close(system)

    def test_a_reset_drops_the_steps_under_way(self) -> None:
        """Check with ``arrivals`` that lanes sent before a reset of all do not come back."""
        hand = self.hand()
        d, system = hand.d, hand.system
        if not d.arrivals or d.resets == "none":
            return self.close(system)
        for action in self.actions(system, 4):
            everyone = np.arange(d.lanes, dtype=np.int32)
            for part in np.split(everyone, range(d.arrivals, d.lanes, d.arrivals)):
                system.send([each[part] for each in action], part)
            system.recv()
            system.reset(None, None)
            assert as_flags(_stepped(system, action).terminated).shape == (d.lanes,)
            system.reset(None, None)
        return self.close(system)

    def test_agents_that_are_dead_stay_dead(self) -> None:
        """Check that an agent that ended is masked until its lane begins the next episode.

        Where agents take turns, a masked one may only be waiting. Where they come back, one that
        ends has acted still.
        """
        hand = self.hand()
        groups = hand.d.groups
        keys = list(hand.d.observation)
        dead: dict[str, Mask] = {}
        if self.agents_come_back and hand.d.turns:
            return self.close(hand.system)
        for action in self.actions(hand.system, self.steps if groups else 0):
            alive = {g: hand.seen[keys.index((g, "mask"))].copy() for g in groups}
            if hand.d.turns:
                alive = {g: ~dead.get(g, np.zeros_like(a)) for g, a in alive.items()}
            out, after, executed = hand.step(action)
            ended = as_flags(out.terminated) | as_flags(out.truncated)
            for group, size in groups.items():
                flags = [as_flags(each) for each in out.agents[group]]
                assert flags[0].shape == (hand.d.lanes, size), "agents' flags are [lane, agent]"
                over = flags[0] | flags[1]
                was_dead = ~alive[group] & executed[:, None]
                assert not (over & was_dead).any(), f"{group}: an agent ended that was dead"
                if self.agents_come_back:
                    continue
                dead[group] = (~alive[group] | over) & ~ended[:, None]
                now = after[keys.index((group, "mask"))]
                revived = now & (over | ~alive[group]) & (executed & ~ended)[:, None]
                assert not revived.any(), f"{group}: an agent came back within an episode"
        return self.close(hand.system)

    # --- collected --------------------------------------------------------------------------------

    def env(self, seeds: Sequence[int] | None = None) -> SystemEnv:
        """The environment that a collector drives."""
        seeds = seeds or lane_seeds(SEED, self.lanes, 0)
        system = self.make(self.lanes, seeds)
        draw = self.draw if system.declares.context else None
        return SystemEnv(system, make=lambda seeds: self.make(self.lanes, seeds), draw=draw)

    def test_rows_are_what_was_stepped_by_hand(self) -> None:
        """Rows that a collector makes, against an instance with the same seeds and actions."""
        from tallyroll.collector.sync import SyncCollector

        with SyncCollector(
            self.env, None, frames_per_batch=self.frames, total_frames=self.frames, seed=SEED
        ) as collector:
            (rows,) = list(collector)
        assert rows.numel() == self.frames, f"{self.frames} rows were wanted, got {rows.numel()}"
        if self.repeatable and self.make(self.lanes, None).declares.seeds != "none":
            self._compare(rows)

    def _compare(self, rows: TensorDictBase) -> None:
        hand = self.hand()
        d = hand.d
        columns = {key: rows.get(key).cpu().numpy() for key in rows.keys(True, True)}
        left = _in_order(columns, d.lanes)
        spare = self.actions(hand.system, 2 * self.frames, seed=3)
        compared = 0
        while all(left):
            action = next(spare)
            here = [None if hand.pending[lane] else left[lane].pop(0) for lane in range(d.lanes)]
            for lane, row in enumerate(here):
                for key, value in zip(d.action, action, strict=True):
                    if row is not None:
                        value[lane] = columns[_name(key)][row]
            seen = hand.seen
            out, after, _ = hand.step(action)
            for lane, row in enumerate(here):
                if row is not None:
                    self._compare_row(columns, row, lane, seen, out, after, hand)
                    compared += 1
        assert compared >= self.frames // 2, f"only {compared} rows could be compared"
        self.close(hand.system)

    def _compare_row(
        self,
        columns: Mapping[Any, NDArray[Any]],
        row: int,
        lane: int,
        seen: Values,
        out: Step,
        after: Values,
        hand: Hand,
    ) -> None:
        where = f"row {row}, lane {lane}"
        ended = bool(as_flags(out.terminated)[lane] | as_flags(out.truncated)[lane])
        lost = ended and hand.d.finals == "lost"
        if ended and out.final_valid is not None:
            lost = not as_flags(out.final_valid)[lane]
        for key, before, value in zip(hand.d.observation, seen, after, strict=True):
            got = columns[_name(key)][row]
            assert np.array_equal(got, before[lane]), f"{where}: {spell(key)} {got} {before[lane]}"
            got = columns[_name((NEXT, *key))][row]
            assert lost or np.array_equal(got, value[lane]), f"{where}: next {spell(key)}"
        for key, value in zip(hand.d.reward, out.reward, strict=True):
            got = columns[_name((NEXT, *key))][row].reshape(-1)
            wanted = as_tensor(value, torch.device("cpu")).numpy()[lane]
            assert np.array_equal(got, np.asarray(wanted, got.dtype).reshape(-1)), f"{where}: {key}"
        for key, flags in ((TERMINATED, out.terminated), (TRUNCATED, out.truncated)):
            assert bool(columns[key][row]) == as_flags(flags)[lane], f"{where}: {spell(key)}"
        if NEXT_VALID in columns:
            assert bool(columns[NEXT_VALID][row]) != lost, f"{where}: {spell(NEXT_VALID)}"


def _name(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


def _in_order(columns: Mapping[Any, NDArray[Any]], lanes: int) -> list[list[int]]:
    """Rows of each lane, in the order in which they were stepped."""
    order = np.lexsort((columns[STEP], columns[TRAJ_IDS]))
    lane = columns[LANE][order]
    return [order[lane == each].tolist() for each in range(lanes)]
