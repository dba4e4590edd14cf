"""Compare ``collect(lanes)`` with the bare loop of the same vector, in each autoreset mode.

Run ``python benchmarks/modes.py``. Each kind of vector is stepped without a collector, and with one
that stores into a ring, with the same random actions. Raw loops do not count resets, so their share
is found beforehand. ``--peers`` adds the loops of other libraries. Results are medians over
interleaved rounds. ``--resets`` measures instead the cost of the seeds and options of resets:
environment ids, collected in batches, in CPU time, over the fastest fifth of rounds of 2,048 rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from common import (
    Contender,
    Tally,
    console,
    play_and_close,
    prepare,
    print_results,
    print_setting,
    ratio,
    write_json,
)
from gymnasium.spaces import Dict
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from loops import Case, Work
from peers import Peer, installed
from peers import Tianshou as TianshouBatches
from small_batch_steps import StableBaselines3, TorchRL, touched_buffer

from tallyroll.collector import Info, Resets, SyncCollector, uniform
from tallyroll.storage import MemmapStorage

if TYPE_CHECKING:
    from common import Result

MODES = {"NEXT_STEP": AutoresetMode.NEXT_STEP, "SAME_STEP": AutoresetMode.SAME_STEP}
MODES["DISABLED"] = AutoresetMode.DISABLED
BLOCK = 64
"""Calls per ``advance``."""
RING = 10_000
COUNTED = 20_000
"""Slots over which the raw loop's resets are counted."""


class Nested(gym.ObservationWrapper):
    """CartPole's four numbers as two entries of a Dict space."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        """Declare both entries."""
        super().__init__(env)
        low, high = env.observation_space.low, env.observation_space.high  # type: ignore[attr-defined]
        box = gym.spaces.Box
        self.observation_space = Dict(
            {"cart": box(low[:2], high[:2]), "pole": box(low[2:], high[2:])}
        )

    def observation(self, observation: Any) -> Any:
        """Return both entries."""
        return {"cart": observation[:2], "pole": observation[2:]}


class Informed(gym.Wrapper[Any, Any, Any, Any]):
    """Adds a number to each info."""

    def step(self, action: Any) -> Any:
        """Step, and add the number."""
        *step, info = self.env.step(action)
        info["speed"] = step[0][1]
        return *step, info

    def reset(self, **options: Any) -> Any:
        """Reset, and add the number."""
        observation, info = self.env.reset(**options)
        info["speed"] = observation[1]
        return observation, info


def cartpole(*wrappers: Callable[[Any], Any]) -> gym.Env[Any, Any]:
    """Return one CartPole environment with the given wrappers."""
    env = gym.make("CartPole-v1")
    for wrap in wrappers:
        env = wrap(env)
    return env


def sync(lanes: int, mode: str, *wrappers: Any) -> SyncVectorEnv:
    """Return Gymnasium's vector in this process."""
    return SyncVectorEnv([partial(cartpole, *wrappers)] * lanes, autoreset_mode=MODES[mode])


def in_processes(lanes: int, mode: str) -> AsyncVectorEnv:
    """Return Gymnasium's vector with one process per lane."""
    return AsyncVectorEnv([cartpole] * lanes, autoreset_mode=MODES[mode])


def with_statistics(lanes: int, mode: str) -> Any:
    """Return the vector with episode statistics in its infos."""
    return gym.wrappers.vector.RecordEpisodeStatistics(sync(lanes, mode))


def wrapped(lanes: int, mode: str) -> Any:
    """Return the vector with clipped rewards."""
    return gym.wrappers.vector.ClipReward(sync(lanes, mode), -1, 1)


def of_baselines(lanes: int, mode: str) -> Any:
    """Return Stable-Baselines3's vector in this process."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([cartpole] * lanes)


def of_envpool(lanes: int, mode: str) -> Any:
    """Return EnvPool's vector."""
    import envpool

    return envpool.make("CartPole-v1", "gymnasium", num_envs=lanes, seed=0)


@dataclass(frozen=True)
class Kind:
    """A vector that users have, and the infos to store."""

    make: Callable[[int, str], Any]
    infos: tuple[str | Info, ...] = ()
    modes: Sequence[str] = tuple(MODES)
    package: str = ""
    """The library of the vector, if it is not Gymnasium; its resets then take no seeds."""


KINDS = {
    "bare": Kind(sync),
    "info": Kind(lambda lanes, mode: sync(lanes, mode, Informed), ("speed",)),
    "nested": Kind(lambda lanes, mode: sync(lanes, mode, Nested)),
    "statistics": Kind(with_statistics, (Info("episode/r", dtype="float64", fill=0),)),
    "wrapped": Kind(wrapped),
    "async": Kind(in_processes),
    "sb3": Kind(of_baselines, modes=("SAME_STEP",), package="stable_baselines3"),
    "envpool": Kind(of_envpool, modes=("NEXT_STEP",), package="envpool"),
}


class Stepping(Contender):
    """The vector's own loop, which resets finished lanes by mask if the vector does not."""

    name = "raw"

    def __init__(self, kind: Kind, lanes: int, mode: str) -> None:
        """Create and reset the vector, and find the share of its reset slots."""
        self.env, self.lanes = kind.make(lanes, mode), lanes
        self.masks = mode == "DISABLED"
        self.rng = np.random.default_rng(0)
        self.env.reset(**({} if kind.package else {"seed": 0}))
        self.share, resets = 0.0, 0
        if mode == "NEXT_STEP":
            for action in self.rng.integers(2, size=(COUNTED // lanes, lanes)):
                _, _, terminated, truncated, _ = self.env.step(action)
                resets += int(np.count_nonzero(terminated | truncated))
            self.share = resets / (COUNTED // lanes * lanes)

    def advance(self) -> None:
        """Step a block."""
        env, step = self.env, self.env.step
        for action in self.rng.integers(2, size=(BLOCK, self.lanes)):
            out = step(action)
            if self.masks:
                ended = out[2] | out[3]
                if ended.any():
                    env.reset(options={"reset_mask": ended})

    def tally(self) -> Tally:
        """Return the slots minus the expected reset slots."""
        return Tally(BLOCK * self.lanes * (1 - self.share), BLOCK)

    def close(self) -> None:
        """Close the vector."""
        self.env.close()


class Collecting(Contender):
    """``collect(n)`` from the vector, where n is a step of all lanes plus ``more`` rows."""

    def __init__(self, kind: Kind, lanes: int, mode: str, scratch: Path, more: int = 0) -> None:
        """Fill the ring."""
        self.name = f"tallyroll collect(lanes{f' + {more}' if more else ''})"
        self.count = lanes + more
        self.storage = MemmapStorage(
            scratch / f"{id(kind)}-{lanes}-{mode}-{more}", max_size=RING // self.count * self.count
        )
        self.collector = SyncCollector(
            kind.make(lanes, mode),
            info_keys=kind.infos,
            frames_per_batch=self.count,
            total_frames=-1,
            seed=None if kind.package == "envpool" else 0,
            storage=self.storage,
        )
        for _ in range(RING // self.count):
            self.collector.collect(self.count)

    def advance(self) -> None:
        """Make the calls of a block."""
        collect, count = self.collector.collect, self.count
        for _ in range(BLOCK):
            collect(count)

    def tally(self) -> Tally:
        """Return the stored rows."""
        return Tally(BLOCK * self.count, BLOCK)

    def close(self) -> None:
        """Close the vector and the ring."""
        self.collector.shutdown()
        self.storage.close()


class CleanRL(Peer):
    """A SAME_STEP vector and Stable-Baselines3's buffer, as in CleanRL's off-policy scripts."""

    name = "CleanRL's structure"

    def __init__(self, work: Work) -> None:
        """Build the vector and the buffer."""
        from stable_baselines3.common.buffers import ReplayBuffer

        super().__init__(work.case)
        self.env = env = sync(work.case.lanes, "SAME_STEP")
        spaces = env.single_observation_space, env.single_action_space
        options = {"handle_timeout_termination": False}
        self.buffer = touched_buffer(ReplayBuffer, *spaces, work.case, RING, **options)
        self.rng = np.random.default_rng(0)
        self.seen, _ = env.reset(seed=0)

    def advance(self) -> None:
        """Step and store a block."""
        env, seen, add = self.env, self.seen, self.buffer.add
        for action in self.rng.integers(2, size=(self.case.block, self.case.lanes)):
            following, reward, terminated, truncated, infos = env.step(action)
            stored = following.copy()
            if (ended := terminated | truncated).any():
                for lane in np.flatnonzero(ended):
                    stored[lane] = infos["final_obs"][lane]
            add(seen, stored, action, reward, terminated, infos)
            seen = following
        self.seen = seen

    def close(self) -> None:
        """Close the vector."""
        self.env.close()


class Tianshou(TianshouBatches):
    """The same with one vector step per call: ``Collector.collect(n_step=lanes)``."""

    def advance(self) -> None:
        """Collect a block, call by call."""
        for _ in range(self.case.block):
            self.collector.collect(n_step=self.case.lanes, random=self.random)


def peers_of(lanes: int, scratch: Path) -> tuple[list[Contender], list[str]]:
    """Return the loops of other libraries, and a remark for each one that is not installed."""
    work = Work(Case("modes", lanes, native=False, frames=BLOCK * lanes), "random", scratch)
    return installed(
        {
            "Stable-Baselines3": partial(StableBaselines3, work, None, RING),
            "CleanRL": partial(CleanRL, work),
            "TorchRL": partial(TorchRL, work, None, RING, memmap=False),
            "Tianshou": partial(Tianshou, work),
        }
    )


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two tiny rounds: does it run?")
    parser.add_argument("--kinds", default="bare", help=f"of {','.join(KINDS)} (default: bare)")
    parser.add_argument("--modes", default=",".join(MODES), help="of them (default: all)")
    parser.add_argument("--lanes", default="1,8,64", help="numbers of lanes (default: 1,8,64)")
    parser.add_argument("--calls", type=int, default=20_000, help="calls a contender in all")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--peers", action="store_true", help="other libraries' loops too")
    parser.add_argument("--resets", action="store_true", help="what resets are given, instead")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    for name, known in (("kinds", KINDS), ("modes", MODES)):
        chosen = getattr(args, name).split(",")
        if set(chosen) - set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {chosen}")
        setattr(args, name, chosen)
    args.lanes = [int(lanes) for lanes in args.lanes.split(",")]
    if args.quick:
        args.lanes, args.calls, args.rounds = [8], 4 * BLOCK, 2
    return args


class Rounds(Contender):
    """Advances a contender by several blocks at a time: a round has a fixed number of calls."""

    def __init__(self, inner: Any, blocks: int) -> None:
        """Take over its name, and its collector for the line about its plan."""
        self.inner, self.blocks, self.name = inner, blocks, inner.name
        self.collector = getattr(inner, "collector", None)

    def advance(self) -> None:
        """Advance all blocks."""
        for _ in range(self.blocks):
            self.inner.advance()

    def tally(self) -> Tally:
        """Return the work of all blocks."""
        one = self.inner.tally()
        return Tally(one.transitions * self.blocks, one.vector_steps * self.blocks)

    def close(self) -> None:
        """Close it."""
        self.inner.close()


def beside(raw: Result, result: Result, rows: int) -> float:
    """Return the additional microseconds over the raw loop, for the rows of one call."""
    return rows * (result.transition_us - raw.transition_us)


def compared(kind: str, mode: str, lanes: int, scratch: Path, args: argparse.Namespace) -> Any:
    """Run one table, print it, and return its figures."""
    counts = {"raw": lanes}
    found: list[Contender] = [Stepping(KINDS[kind], lanes, mode)]
    for more in (0, 1):
        found.append(Collecting(KINDS[kind], lanes, mode, scratch, more))
        counts[found[-1].name] = lanes + more
    remarks: list[str] = []
    if args.peers and kind == "bare":
        theirs, remarks = peers_of(lanes, scratch)
        found += theirs
    blocks = max(1, args.calls // args.rounds // BLOCK)
    played = [Rounds(each, blocks) for each in found]
    results: Sequence[Result] = play_and_close(played, args.rounds, 0.0001)
    raw = results[0]
    print_results(
        f"{kind}, {mode}, {lanes} lanes; {blocks * BLOCK * args.rounds:,} calls each",
        results,
        remarks,
        more={"us beside": lambda r: f"{beside(raw, r, counts.get(r.name, lanes)):.1f}"},
    )
    return [
        {
            "kind": kind,
            "mode": mode,
            "lanes": lanes,
            "contender": each.name,
            "us_per_transition": each.transition_us,
            "speed_to_raw": ratio(raw, each),
            "us_beside_raw": beside(raw, each, counts.get(each.name, lanes)),
            "spread": each.spread,
        }
        for each in results
    ]


# --- seeds and options of resets ------------------------------------------------------------------

GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "seeds": {"seeds": True},
    "seeds and two options": {
        "seeds": True,
        "sampler": {"low": uniform(-0.05, 0.0), "high": uniform(0.0, 0.05)},
    },
}


class Given:
    """A loop whose resets get seeds or options. Records its CPU time and its resets."""

    def __init__(self, given: str, lanes: int) -> None:
        """Start with no rounds."""
        self.given, self.lanes = given, lanes
        self.cpu: list[float] = []
        self.resets: list[int] = []

    def play(self) -> int:
        """Step 2,048 rows, and return the number of lane resets."""
        raise NotImplementedError

    @property
    def fastest(self) -> float:
        """The mean CPU time of the fastest fifth of the rounds."""
        return float(np.mean(sorted(self.cpu)[: max(1, len(self.cpu) // 5)]))

    def round(self) -> None:
        """Play, and measure the CPU time of this thread."""
        start = time.thread_time()
        self.resets.append(self.play())
        self.cpu.append(time.thread_time() - start)


class GivenRaw(Given):
    """The lanes of a vector, stepped and reset by hand, with seeds and options made beforehand."""

    def __init__(self, *how: Any) -> None:
        """Create lanes, seeds and actions."""
        super().__init__(*how)
        self.envs = [cartpole() for _ in range(self.lanes)]
        self.rng = np.random.default_rng(0)
        for env in self.envs:
            env.reset(seed=0)

    def play(self) -> int:
        """Step lane by lane."""
        seeds = self.rng.integers(2**31, size=2048).tolist()
        options = {"low": -0.04, "high": 0.04}
        more: dict[str, Any] = {"options": options} if "options" in self.given else {}
        actions, count, seeded = self.rng.integers(2, size=2048), 0, self.given != "nothing"
        for row in actions.reshape(-1, self.lanes):
            for env, action in zip(self.envs, row, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset(seed=seeds[count] if seeded else None, **more)
                    count += 1
        return count


class GivenOurs(Given):
    """Batches of a collector."""

    def __init__(self, *how: Any) -> None:
        """Create the collector, and collect a batch."""
        super().__init__(*how)
        resets = Resets(**GIVEN[self.given])
        self.collector = SyncCollector(
            "CartPole-v1",
            num_envs=self.lanes,
            frames_per_batch=2048,
            total_frames=-1,
            seed=0,
            resets=resets,
        )
        self.batches = iter(self.collector)
        next(self.batches)

    def play(self) -> int:
        """Collect batches."""
        before = self.collector.metrics()["episodes"]
        next(self.batches)
        return int(self.collector.metrics()["episodes"] - before)


def given(lanes: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the cost per reset of each kind of seeds and options."""
    kinds: tuple[type[Given], ...] = (GivenRaw, GivenOurs)
    loops = [{name: kind(name, lanes) for name in GIVEN} for kind in kinds]
    for _ in range(max(5, args.calls // 2048)):
        for of_kind in loops:
            for loop in of_kind.values():
                loop.round()
    found = []
    for name in [*GIVEN][1:]:
        own, ours = (
            (of[name].fastest - of["nothing"].fastest) / float(np.mean(of[name].resets)) * 1e6
            for of in loops
        )
        console.print(
            f"{lanes} lanes, {name}: {own:.1f} us a reset in a loop of the environments alone, "
            f"{ours:.1f} in ours: {ours - own:.1f} beside it"
        )
        found.append({"lanes": lanes, "given": name, "own_us": own, "ours_us": ours})
    return found


def main() -> None:
    """Measure every selected table."""
    args = parse_args()
    prepare()
    print_setting()
    figures: list[dict[str, Any]] = []
    for lanes in args.lanes if args.resets else ():
        figures += given(lanes, args)
    with tempfile.TemporaryDirectory() as folder:
        for kind in () if args.resets else args.kinds:
            if KINDS[kind].package and not find_spec(KINDS[kind].package):
                console.print(f"{kind}: {KINDS[kind].package} is not installed")
                continue
            for mode in (each for each in args.modes if each in KINDS[kind].modes):
                for lanes in args.lanes:
                    figures += compared(kind, mode, lanes, Path(folder), args)
    if args.json:
        write_json(args.json, figures)
        console.print(f"written to {args.json}")


if __name__ == "__main__":
    main()
