"""Contract tests of the optional abilities of a system."""

import numpy as np

from tallyroll.collector.envs.calls.env_call import EnvCall
from tallyroll.collector.envs.stepping.arrays import as_flags
from tallyroll.collector.envs.system import Mask
from tallyroll.collector.ext.testing.hand import stepped
from tallyroll.collector.ext.testing.system_case import SystemCase


class AbilityContract(SystemCase):
    """Tests of parts, waiting, contexts, arrivals and agents, if the system declares them."""

    def test_a_part_of_the_lanes_isstepped(self) -> None:
        """Check with ``parts`` that lanes outside the mask do not change."""
        one, other = self.hand(), self.hand()
        if not one.d.parts or self.lanes < 2 or not self.repeatable:
            return self.close(one.system, other.system)
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
        one, other = self.hand(), self.hand()
        if not one.d.context or not self.repeatable:
            return self.close(one.system, other.system)
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
        one, other = self.hand(), self.hand()
        reached = one.system.reached
        if reached is None or one.d.arrivals:
            return self.close(one.system, other.system)
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
