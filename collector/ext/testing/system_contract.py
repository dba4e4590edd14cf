"""The parts of the contract of systems, and the instances that they step."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.calls.env_call import EnvCall
from tallyroll.collector.envs.stepping.arrays import as_flags, as_tensor
from tallyroll.collector.envs.system import Mask, Step, System, require_consistent
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.ext.testing.hand import Hand, SeededHand, Values, stepped
from tallyroll.collector.policies.random_actions import block_draw
from tallyroll.collector.sync import SyncCollector
from tallyroll.storage.rows.keys import (
    LANE,
    NEXT,
    NEXT_VALID,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    format_key,
)

SEED = 7


class SystemCase:
    """A system under test. Each part of the contract is a subclass."""

    lanes = 3
    """Number of lanes of the instances. With arrivals, choose more than arrive per call."""
    steps = 60
    """Number of steps by hand. Several episodes of every lane must end within them."""
    frames = 200
    """Number of rows to collect."""
    repeatable = True
    """True if the same seeds and actions give the same values, bit for bit."""
    counts_episodes = False
    """True if observations depend on the number of episodes, so that no two episodes are equal."""
    agents_come_back = False
    """True if agents of a group may join or return during an episode."""

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        """Return a new instance.

        ``seeds`` has one seed per lane, for systems that need seeds when they are made.
        """
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return a context, if the system declares any."""
        return {}

    # --- tools ------------------------------------------------------------------------------------

    def hand(self, seeds: Sequence[int] = (), lanes: int = 0) -> Hand:
        """Return a new instance after a reset."""
        seeds = list(seeds) or lane_seeds(SEED, lanes or self.lanes, 0)
        return Hand(self.make(len(seeds), seeds), seeds, self.draw)

    def actions(self, system: System, steps: int, seed: int = 0) -> Iterator[Values]:
        """Yield random actions of all lanes ``[lane, ...]`` for each step."""
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

    def require_equal(self, one: Values, other: Values, what: str) -> None:
        """Check that two instances with the same seeds gave the same values."""
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a, b), f"{what}: the same seeds gave {a!r:.200} and {b!r:.200}"


class DeclarationContract(SystemCase):
    """Tests that values, ends and final observations match the declaration."""

    def test_the_declaration_is_consistent(self) -> None:
        """Check that the declaration does not contradict itself."""
        system = self.make(self.lanes, lane_seeds(SEED, self.lanes, 0))
        require_consistent(system.declares)
        assert system.declares.lanes == self.lanes, (
            "make(lanes, …): expected as many lanes as requested"
        )
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
                assert as_flags(flags).shape == (d.lanes,), "expected flags [lane]"
        self.close(hand.system)

    def _require_declared(self, values: Values, specs: Mapping[Key, Any], lanes: int) -> None:
        assert len(values) == len(specs), f"declared {len(specs)} observations, got {len(values)}"
        for (key, spec), value in zip(specs.items(), values, strict=True):
            tensor = torch.from_numpy(value)
            wanted = (spec.dtype, (lanes, *spec.shape))
            got = (tensor.dtype, tuple(tensor.shape))
            assert got == wanted, f"{format_key(key)}: declared {wanted}, got {got}"
            grown = spec.cpu().expand(lanes, *spec.shape)
            assert grown.is_in(tensor), f"{format_key(key)}: {value!r:.200} is not in {spec}"

    def test_episodes_end_more_than_once(self) -> None:
        """Check that every lane ends and continues, and that truncation matches the declaration."""
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
        assert (ends >= 2).all(), f"too few episodes ended in {self.steps} steps: {ends.tolist()}"
        assert (longest < ends).all() or (ends < 3).any(), (
            "a lane ends in every step after its first end, so it is not reset. Correct the "
            f'declared at_end="{hand.d.at_end}"'
        )
        assert hand.d.truncation or not truncated.any(), (
            "an episode was truncated, but truncation=False was declared"
        )
        self.close(hand.system)

    def test_a_final_observation_is_not_the_next_first_one(self) -> None:
        """Check that final observations are not the first observations of the next episodes."""
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
            f'system resets itself within its step. Correct the declared at_end="{hand.d.at_end}" '
            f'and finals="{hand.d.finals}"'
        )
        return self.close(hand.system)


@dataclass
class Episode:
    """An episode of a lane: seed and context of its reset, observations and actions."""

    seed: int
    context: Mapping[str, Any]
    seen: list[Values] = field(default_factory=list)
    actions: list[Values] = field(default_factory=list)

    @classmethod
    def of(cls, hand: SeededHand, lane: int) -> Self:
        """Return the current episode of a lane, without steps."""
        return cls(int(hand.seeds[lane]), hand.contexts[lane])


class ResetContract(SystemCase):
    """Tests that resets restart only the intended lanes, and that seeds repeat a run."""

    def test_only_a_reset_slot_ignores_its_action(self) -> None:
        """Compare two instances whose actions differ only in the step after each end."""
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
                'declared at_end="reset_slot", but the action after an end had an effect'
            )
        else:
            assert differs or ends < 5 or not self._acts(), (
                f'declared at_end="{declared}", but the actions after {ends} ends had no effect: '
                "is the step after an end a reset slot?"
            )
        self.close(one.system, other.system)

    def test_a_lane_that_was_reset_executes_its_next_action(self) -> None:
        """Check with ``resets="mask"`` that a lane that was reset does not reset itself again."""
        self._require_executed_after_resets("mask")

    def test_lanes_that_were_all_reset_execute_their_next_actions(self) -> None:
        """Check that a lane does not reset itself again after a reset of all lanes.

        The test ends early if the system refuses such a reset.
        """
        self._require_executed_after_resets("all")

    def _require_executed_after_resets(self, how: str) -> None:
        """Compare two instances that are reset after ends and then act differently for one step."""
        one = self.hand()
        whole, possible = how == "all", one.d.resets
        if not self.repeatable or possible == "none" or (possible == "all" and not whole):
            return self.close(one.system)
        other = self.hand()
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
        assert differs or ends < 5 or not self._acts(), (
            f"the actions that followed {ends} ends and resets had no effect: does the system "
            "reset such lanes again?"
        )
        return self.close(one.system, other.system)

    def _twins(self, one: Hand, other: Hand) -> Iterator[tuple[bool, Mask]]:
        """Step two instances, with different actions after ends.

        Yield whether their observations agree, and a mask of the new ends.
        """
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

    def _acts(self) -> bool:
        """Return True if actions change the results of this system."""
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

    def test_seeds_repeat_a_run(self) -> None:
        """Check that the same seeds and actions give the same values."""
        if not self.repeatable:
            return None
        one = self.hand()
        if one.d.seeds == "none":
            return self.close(one.system)
        other = self.hand()
        self.require_equal(one.seen, other.seen, "the first observations")
        for action in self.actions(one.system, self.steps):
            self.require_equal(one.step(action)[1], other.step(action)[1], "a step")
        return self.close(one.system, other.system)

    def test_an_episode_is_repeated_by_what_its_reset_was_given(self) -> None:
        """Check with ``reset_seeds`` that seed and context determine the start of an episode.

        The test replays the last complete episode of each lane, but never its first episode, as the
        first episode of a new instance.
        """
        seeds = lane_seeds(SEED, self.lanes, 0)
        hand = SeededHand(self.make(self.lanes, seeds), seeds, self.draw)
        if not hand.d.reset_seeds or not self.repeatable or self.counts_episodes:
            return self.close(hand.system)
        whole = self._last_whole_episodes(hand)
        assert whole, "expected a lane with three episodes; choose more steps, or shorter episodes"
        at = [whole.get(lane, next(iter(whole.values()))) for lane in range(self.lanes)]
        contexts = itertools.chain((each.context for each in at), itertools.repeat(at[0].context))
        again = SeededHand(
            self.make(self.lanes, seeds), [each.seed for each in at], lambda _: next(contexts)
        )
        for step in range(max(len(each.actions) for each in at)):
            for lane, each in whole.items():
                if step < len(each.actions):
                    found = [value[lane] for value in again.seen]
                    self.require_equal(each.seen[step], found, f"lane {lane}, step {step}")
            acts = zip(
                *(each.actions[min(step, len(each.actions) - 1)] for each in at), strict=True
            )
            again.step([np.stack(each) for each in acts])
        return self.close(hand.system, again.system)

    def _last_whole_episodes(self, hand: SeededHand) -> dict[int, "Episode"]:
        """Step the system, and return the last complete episode of each lane.

        The first episode of a lane does not count.
        """
        found: dict[int, Episode] = {}
        under_way, begun = [Episode.of(hand, lane) for lane in range(self.lanes)], [0] * self.lanes
        for action in self.actions(hand.system, self.steps):
            before = hand.seen
            _, _, executed = hand.step(action)
            for lane, episode in enumerate(under_way):
                if executed[lane]:
                    episode.seen.append([value[lane].copy() for value in before])
                    episode.actions.append([value[lane].copy() for value in action])
                if hand.seeds[lane] != episode.seed:
                    begun[lane] += 1
                    if begun[lane] > 1:
                        found[lane] = episode
                    under_way[lane] = Episode.of(hand, lane)
        return found

    def test_a_reset_by_mask_leaves_other_lanes_alone(self) -> None:
        """Check with ``resets="mask"`` that the other lanes continue undisturbed.

        If lanes draw from one generator, their next episodes may begin differently.
        """
        if not self.repeatable or self.lanes < 2:
            return None
        one = self.hand()
        if one.d.resets != "mask" or one.d.seeds == "none":
            return self.close(one.system)
        other = self.hand()
        mask = np.zeros(self.lanes, np.bool_)
        mask[0] = True
        same = ~mask
        for at, action in enumerate(self.actions(one.system, self.steps)):
            if at % 3 == 1:
                one.system.reset(mask, None)
                one.pending[0] = False
            out, after, _ = one.step(action)
            after_other = other.step(action)[1]
            self.require_equal(
                [a[same] for a in after], [b[same] for b in after_other], "lane 0 was reset"
            )
            if one.d.seeds == "shared":
                same &= ~(as_flags(out.terminated) | as_flags(out.truncated))
        return self.close(one.system, other.system)


class AbilityContract(SystemCase):
    """Tests of parts, waiting, contexts, arrivals and agents, if the system declares them."""

    def test_a_part_of_the_lanes_isstepped(self) -> None:
        """Check with ``parts`` that lanes outside the mask do not change."""
        one = self.hand()
        if not one.d.parts or self.lanes < 2 or not self.repeatable:
            return self.close(one.system)
        other = self.hand()
        ahead = np.zeros(self.lanes, np.bool_)
        ahead[0] = True
        own = next(self.actions(one.system, 1))
        first = stepped(one.system, own, ahead)
        if as_flags(first.terminated)[0] or as_flags(first.truncated)[0]:
            return self.close(one.system, other.system)
        rest = stepped(one.system, own, ~ahead)
        whole_step = stepped(other.system, own)
        for index, value in enumerate(whole_step.obs):
            got = np.asarray(first.obs[index]).copy()
            got[1:] = np.asarray(rest.obs[index])[1:]
            assert np.array_equal(got, np.asarray(value)), (
                "stepping the lanes in two parts differs from stepping them all"
            )
        return self.close(one.system, other.system)

    def test_a_context_is_copied_when_it_is_used(self) -> None:
        """Check that contexts drawn ahead have no effect before the next reset."""
        one = self.hand()
        if not one.d.context or not self.repeatable:
            return self.close(one.system)
        other = self.hand()
        for action in self.actions(one.system, self.steps):
            drawn = {name: value.copy() for name, value in one.system.next_context.items()}
            out, after, _ = one.step(action)
            if (as_flags(out.terminated) | as_flags(out.truncated)).any():
                break
            self.require_equal(after, other.step(action)[1], "the next context was changed")
            for name, value in one.system.next_context.items():
                value[...] = drawn[name] + 1 if drawn[name].dtype != np.bool_ else ~drawn[name]
        return self.close(one.system, other.system)

    def test_lanes_are_reached_one_by_one(self) -> None:
        """Check with ``reached`` that each lane has an outcome, and that steps do not change."""
        one = self.hand()
        reached = one.system.reached
        if reached is None or one.d.arrivals:
            return self.close(one.system)
        other = self.hand()
        for lanes in ([self.lanes - 1], list(range(self.lanes))[::-1]):
            outcomes = list(reached(EnvCall("env_get", "an_attribute_that_no_one_has"), lanes))
            assert len(outcomes) == len(lanes), (
                "reached: expected an outcome for each requested lane"
            )
            for outcome in outcomes:
                missing = isinstance(outcome.error, AttributeError)
                assert missing, f"an unknown attribute gave {outcome!r:.200}"
        for action in self.actions(one.system, 3):
            after, after_other = one.step(action)[1], other.step(action)[1]
            if self.repeatable:
                self.require_equal(after, after_other, "lanes were reached")
        return self.close(one.system, other.system)

    def test_lanes_arrive_once_for_each_time_they_are_sent(self) -> None:
        """Check with ``arrivals`` how many lanes each call returns, and that all were sent."""
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
            assert len(set(lanes.tolist())) == len(lanes), "a call returned a lane twice"
            ended = as_flags(out.terminated) | as_flags(out.truncated)
            if d.at_end == "final" and ended.any():
                mask = np.zeros(d.lanes, np.bool_)
                mask[lanes[ended]] = True
                system.reset(mask, None)
            system.send([each[lanes] for each in action], lanes.astype(np.int32))
        return self.close(system)

    def test_a_reset_drops_the_steps_under_way(self) -> None:
        """Check with ``arrivals`` that lanes sent before a reset of all lanes do not come back."""
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
            assert as_flags(stepped(system, action).terminated).shape == (d.lanes,)
            system.reset(None, None)
        return self.close(system)

    def test_agents_that_are_dead_stay_dead(self) -> None:
        """Check that an agent that ended is masked until its lane begins the next episode.

        If agents take turns, a masked agent may only be waiting. If agents may return, the test
        only checks that an agent that ends was alive.
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
                flags = [as_flags(each) for each in out.agents[group][:2]]
                assert flags[0].shape == (hand.d.lanes, size), "expected flags [lane, agent]"
                over = flags[0] | flags[1]
                was_dead = ~alive[group] & executed[:, None]
                assert not (over & was_dead).any(), f"{group}: an agent that was dead ended again"
                if self.agents_come_back:
                    continue
                dead[group] = (~alive[group] | over) & ~ended[:, None]
                now = after[keys.index((group, "mask"))]
                revived = now & (over | ~alive[group]) & (executed & ~ended)[:, None]
                assert not revived.any(), f"{group}: an agent came back within an episode"
        return self.close(hand.system)


class CollectedContract(SystemCase):
    """Tests that collected rows equal the results of another instance that is stepped by hand."""

    def env(self, seeds: Sequence[int] | None = None) -> SystemEnv:
        """Return the environment that a collector drives."""
        seeds = seeds or lane_seeds(SEED, self.lanes, 0)
        system = self.make(self.lanes, seeds)
        draw = self.draw if system.declares.context else None
        return SystemEnv(system, make=lambda seeds: self.make(self.lanes, seeds), draw=draw)

    def test_rows_are_what_was_stepped_by_hand(self) -> None:
        """Compare collected rows with an instance that has the same seeds and actions."""
        with SyncCollector(
            self.env, None, frames_per_batch=self.frames, total_frames=self.frames, seed=SEED
        ) as collector:
            (rows,) = list(collector)
        assert rows.numel() == self.frames, f"expected {self.frames} rows, got {rows.numel()}"
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
            assert np.array_equal(got, before[lane]), (
                f"{where}: {format_key(key)} {got} {before[lane]}"
            )
            got = columns[_name((NEXT, *key))][row]
            assert lost or np.array_equal(got, value[lane]), f"{where}: next {format_key(key)}"
        for key, value in zip(hand.d.reward, out.reward, strict=True):
            got = columns[_name((NEXT, *key))][row].reshape(-1)
            wanted = as_tensor(value, torch.device("cpu")).numpy()[lane]
            assert np.array_equal(got, np.asarray(wanted, got.dtype).reshape(-1)), f"{where}: {key}"
        for key, flags in ((TERMINATED, out.terminated), (TRUNCATED, out.truncated)):
            assert bool(columns[key][row]) == as_flags(flags)[lane], f"{where}: {format_key(key)}"
        if NEXT_VALID in columns:
            assert bool(columns[NEXT_VALID][row]) != lost, f"{where}: {format_key(NEXT_VALID)}"


def _name(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


def _in_order(columns: Mapping[Any, NDArray[Any]], lanes: int) -> list[list[int]]:
    """Return the rows of each lane in the order of their steps."""
    order = np.lexsort((columns[STEP], columns[TRAJ_IDS]))
    lane = columns[LANE][order]
    return [order[lane == each].tolist() for each in range(lanes)]


class SystemContract(DeclarationContract, ResetContract, AbilityContract, CollectedContract):
    """Tests that every environment system must pass. Subclass it and define ``make``."""
