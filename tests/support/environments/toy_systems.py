"""Toy systems with every kind of end and reset. Observations encode lane, episode and step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torchrl.data import Binary, Bounded, Categorical, Unbounded

from tallyroll.collector.envs.system import AgentFlags, Declares, Mask, Step, System

LONGEST = 6


class Toy(System):
    """A system whose lanes count their steps. Their generators draw episode lengths of 1 to 6.

    The observation is ``[lane, episode, step, sum of actions, draw]``. An episode of the full
    length is truncated, a shorter one is terminated. ``rest`` has the other fields of `Declares`.
    """

    rest: ClassVar[dict[str, Any]] = {"at_end": "final"}

    def __init__(self, lanes: int, seeds: Sequence[int] | None = None) -> None:
        self.declares = Declares(
            lanes=lanes,
            observation={("observation",): Unbounded((5,), dtype=torch.int64)},
            action={("action",): Categorical(3, shape=(), dtype=torch.int64)},
            **self.rest,
        )
        self.rngs = [np.random.default_rng(seed) for seed in seeds or range(lanes)]
        self.state = np.zeros((lanes, 5), np.int64)
        self.state[:, :2] = [[lane, -1] for lane in range(lanes)]
        self.length = np.zeros(lanes, np.int64)
        self.over = np.zeros(lanes, np.bool_)

    def start(self, lane: int) -> None:
        draw = int(self.rngs[lane].integers(1000))
        self.length[lane] = 1 + draw % LONGEST
        self.state[lane, 0] = self.first_lane + lane
        self.state[lane, 1:] = self.state[lane, 1] + 1, 0, 0, draw
        self.over[lane] = False

    def advance(self, lane: int, action: int) -> tuple[float, bool, bool]:
        assert not self.over[lane], "a lane that ended was stepped"
        self.state[lane, 2:4] += 1, action
        self.over[lane] = self.state[lane, 2] >= self.length[lane]
        cut = bool(self.over[lane]) and self.length[lane] == LONGEST
        return float(self.state[lane, 2] + action / 4), bool(self.over[lane]) and not cut, cut

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        if seeds is not None:
            self.rngs = [np.random.default_rng(seed) for seed in seeds]
        for lane in range(self.declares.lanes):
            if lanes is None or lanes[lane]:
                self.start(lane)
        return [self.state.copy()]

    def step(self, action: Sequence[Any], lanes: Mask | None = None) -> Step:
        (actions,), count = action, self.declares.lanes
        reward, flags, skipped = np.zeros(count), np.zeros((2, count), bool), self.over.copy()
        for lane in range(count) if lanes is None else np.flatnonzero(lanes):
            if self.declares.at_end == "reset_slot" and self.over[lane]:
                self.start(lane)
            else:
                reward[lane], *flags[:, lane] = self.advance(lane, int(actions[lane]))
        return self.finished(reward, flags, skipped)

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
        return Step([self.state.copy()], [reward], *flags)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Any:
        return TOYS[name](lanes, seeds, **kwargs)


class WithResetSlots(Toy):
    rest: ClassVar[dict[str, Any]] = {"at_end": "reset_slot", "resets": "all"}

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
        return super().finished(reward, flags, skipped)._replace(skipped=skipped)


class First(Toy):
    """A toy that resets itself within its step, and returns final observations separately."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "first", "finals": "extra", "resets": "none"}

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
        final = self.state.copy()
        for lane in np.flatnonzero(self.over):
            self.start(lane)
        return Step([self.state.copy()], [reward], *flags, final=[final])


class SomeFinals(First):
    rest: ClassVar[dict[str, Any]] = {"at_end": "first", "finals": "some", "resets": "mask"}

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
        step = super().finished(reward, flags, skipped)
        return step._replace(final_valid=step.final[0][:, 1] % 2 == 0)


class Lost(First):
    rest: ClassVar[dict[str, Any]] = {
        "at_end": "first",
        "finals": "lost",
        "resets": "none",
        "truncation": False,
    }

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
        flags = np.array([flags[0] | flags[1], np.zeros_like(flags[0])])
        return super().finished(reward, flags, skipped)._replace(final=None)


class SeededWhenMade(First):
    rest: ClassVar[dict[str, Any]] = {
        "at_end": "first",
        "finals": "extra",
        "resets": "none",
        "seeds": "make",
    }

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        assert seeds is None, "seeds were given when it was made"
        return super().reset(lanes, seeds)


class InParts(Toy):
    rest: ClassVar[dict[str, Any]] = {"at_end": "final", "parts": True}


class Arrivals(Toy):
    """A toy whose lanes arrive two per call, in random order."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "final", "arrivals": 2}

    def __init__(self, lanes: int, seeds: Sequence[int] | None = None) -> None:
        super().__init__(lanes, seeds)
        self.away: deque[tuple[int, int]] = deque()
        self.order = np.random.default_rng(3)

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        if lanes is None:
            self.away.clear()
        return super().reset(lanes, seeds)

    def send(self, action: Sequence[Any], lanes: Any) -> None:
        self.away.extend(zip(lanes.tolist(), action[0].tolist(), strict=True))

    def recv(self) -> Step:
        assert len(self.away) >= self.declares.arrivals, "this would wait for ever"
        picked = self.order.permutation(len(self.away))[: self.declares.arrivals]
        chosen = [self.away[index] for index in picked]
        for each in chosen:
            self.away.remove(each)
        lanes = np.array([lane for lane, _ in chosen], np.int32)
        over = self.over[lanes].copy()
        done = np.array([self.arrive(lane, action) for lane, action in chosen])
        return Step(
            [self.state[lanes]],
            [done[:, 0]],
            *done[:, 1:].astype(bool).T,
            lanes=lanes,
            skipped=over if self.declares.at_end == "reset_slot" else None,
        )

    def arrive(self, lane: int, action: int) -> tuple[float, bool, bool]:
        if self.declares.at_end == "reset_slot" and self.over[lane]:
            self.start(lane)
            return 0.0, False, False
        return self.advance(lane, action)


class ArrivalsWithResetSlots(Arrivals):
    rest: ClassVar[dict[str, Any]] = {"at_end": "reset_slot", "resets": "all", "arrivals": 2}


class ReadOnly:
    """A device array: it exports read-only memory by DLPack, and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array = np.array(array)
        self._array.flags.writeable = False

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**{**kwargs, "copy": None})

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape


class OfADevice(Toy):
    """A toy that returns read-only arrays."""

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        return [ReadOnly(each) for each in super().reset(lanes, seeds)]

    def finished(self, reward: Any, flags: Any, skipped: Any) -> Step:
        step = super().finished(reward, flags, skipped)
        return step._replace(obs=[ReadOnly(each) for each in step.obs])


class Contexts(First):
    """A toy whose context gives the length of an episode."""

    rest: ClassVar[dict[str, Any]] = {
        "at_end": "first",
        "finals": "extra",
        "context": {"length": Bounded(1, LONGEST, (), dtype=torch.int64)},
    }

    def start(self, lane: int) -> None:
        super().start(lane)
        self.length[lane] = self.state[lane, 4] = self.next_context["length"][lane]


class Groups(System):
    """A system with three walkers and two flyers in each lane. Agent i dies in step i."""

    sizes: ClassVar[dict[str, int]] = {"walkers": 3, "flyers": 2}

    def __init__(self, lanes: int, seeds: Sequence[int] | None = None) -> None:
        observation: dict[Any, Any] = {}
        action: dict[Any, Any] = {}
        reward: dict[Any, Any] = {}
        for group, size in self.sizes.items():
            observation[group, "observation"] = Unbounded((size, 4), dtype=torch.int64)
            observation[group, "mask"] = Binary(size, (size,), dtype=torch.bool)
            action[group, "action"] = Categorical(4, (size,), dtype=torch.int64)
            reward[group, "reward"] = Unbounded((size, 1), dtype=torch.float32)
        self.declares = Declares(
            lanes=lanes,
            observation=observation,
            action=action,
            reward=reward,
            at_end="final",
            groups=self.sizes,
        )
        self.toy = InParts(lanes, seeds)
        self.sums = {group: np.zeros((lanes, size), np.int64) for group, size in self.sizes.items()}

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        self.toy.reset(lanes, seeds)
        chosen = slice(None) if lanes is None else lanes
        for group in self.sizes:
            self.sums[group][chosen] = 0
        return self.observed()

    def alive(self, group: str) -> Any:
        step = self.toy.state[:, 2:3]
        return step < 1 + np.arange(self.sizes[group])  # agent i dies in step i

    def observed(self) -> list[Any]:
        found = []
        for group, size in self.sizes.items():
            lane, episode, step = (
                np.repeat(self.toy.state[:, i : i + 1], size, 1) for i in (0, 1, 2)
            )
            found += [np.stack([lane, episode, step, self.sums[group]], -1), self.alive(group)]
        return found

    def step(self, action: Sequence[Any], lanes: Mask | None = None) -> Step:
        before = {group: self.alive(group) for group in self.sizes}
        for group, given in zip(self.sizes, action, strict=True):
            self.sums[group] += np.where(before[group], given, 0)
        out = self.toy.step([np.zeros(self.declares.lanes, np.int64)])
        agents = {}
        for group in self.sizes:
            died = before[group] & ~self.alive(group)
            agents[group] = AgentFlags(died, np.zeros_like(died))
        rewards = [np.where(before[g], self.sums[g], 0).astype(np.float32) for g in self.sizes]
        return Step(self.observed(), rewards, out.terminated, out.truncated, agents=agents)


TOYS: dict[str, type[System]] = {
    each.__name__: each
    for each in (
        Toy,
        WithResetSlots,
        First,
        SomeFinals,
        Lost,
        SeededWhenMade,
        InParts,
        Arrivals,
        ArrivalsWithResetSlots,
        OfADevice,
        Contexts,
        Groups,
    )
}


class There(System):
    """System that moves the arrays of a toy to a device."""

    def __init__(self, toy: Any, device: str) -> None:
        self.toy, self.device = toy, torch.device(device)
        kept = {name: getattr(toy.declares, name) for name in Declares.__dataclass_fields__}
        self.declares = Declares(**{**kept, "device": device})

    def there(self, array: Any) -> Any:
        return None if array is None else torch.as_tensor(np.array(array)).to(self.device)

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        return [self.there(each) for each in self.toy.reset(lanes, seeds, **options)]

    def step(self, action: Sequence[Any], lanes: Mask | None = None) -> Step:
        for each in action:  # arrays on the CPU, tensors elsewhere
            assert self.device.type == "cpu" or each.device.type == self.device.type
        step = self.toy.step([torch.as_tensor(each).cpu().numpy() for each in action], lanes)
        agents = {
            group: AgentFlags(*map(self.there, flags[:2]))
            for group, flags in (step.agents or {}).items()
        }
        return step._replace(
            obs=[self.there(each) for each in step.obs],
            reward=[self.there(each) for each in step.reward]
            if isinstance(step.reward, list)
            else self.there(step.reward),
            terminated=self.there(step.terminated),
            truncated=self.there(step.truncated),
            final=step.final and [self.there(each) for each in step.final],
            final_valid=self.there(step.final_valid),
            skipped=self.there(step.skipped),
            **({"agents": agents} if agents else {}),
        )


class Exported:
    """An array of a device, which exports its memory by DLPack, and does nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self._tensor.device.type == "cuda":
            return self._tensor.__dlpack__(**kwargs)
        return torch.utils.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> Any:
        if self._tensor.device.type == "cuda":
            return self._tensor.__dlpack_device__()
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, 0


class Kept(There):
    """System that returns arrays of the CPU until it is asked to keep them on its device."""

    def __init__(self, toy: Any, device: str) -> None:
        super().__init__(toy, "cpu")
        self.own = torch.device(device)

    def keep_on(self, device: torch.device) -> bool:
        if device.type != self.own.type:
            return False
        self.device, self.declares = device, replace(self.declares, device=str(device))
        return True

    def there(self, array: Any) -> Any:
        found = super().there(array)
        return found if found is None or self.device.type == "cpu" else Exported(found)
