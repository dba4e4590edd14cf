"""Measure the overhead of a `Recorder`: compare a recorded loop with the bare loop.

Run ``python benchmarks/recorder.py``.

Each contender steps its own CartPole vector with the same actions. The recorders store to rings,
and commit every 64 steps, every step, or outside the measured time ("between commits").
`ReplayBuffer.add` of Stable-Baselines3 copies to memory, and stores reset slots too. CleanRL's
scripts use the same buffer. ``Recorder.manual`` gets the results of the steps, and stores reset
slots too. Minari's `DataCollector` wraps single environments only, and writes each episode to a
file when it ends, so a second table compares it with a recorder of a single environment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from common import (
    Contender,
    Result,
    Tally,
    console,
    play_and_close,
    prepare,
    print_results,
    print_setting,
    write_json,
)

from tallyroll.collector import Recorder
from tallyroll.storage import MemmapStorage

BLOCK = 64
"""Steps per ``advance``."""
RING = 2**17
COMMITS = {"a commit every 64 steps": BLOCK, "a commit every step": 1, "between commits": 2 * BLOCK}


class Loop(Contender):
    """Bare loop, which only steps the vector."""

    def __init__(self, lanes: int) -> None:
        """Make the vector, and draw the actions."""
        self.name, self.lanes = "raw", lanes
        self.envs: Any = self.wrapped(
            gymnasium.make_vec("CartPole-v1", num_envs=lanes, vectorization_mode="sync")
        )
        self.actions = np.random.default_rng(0).integers(0, 2, (BLOCK, lanes))
        self.obs, _ = self.envs.reset(seed=0)

    def wrapped(self, envs: Any) -> Any:
        """Return the vector that the loop steps."""
        return envs

    def advance(self) -> None:
        """Step a block."""
        step = self.envs.step
        for action in self.actions:
            step(action)

    def tally(self) -> Tally:
        """Return the number of steps. Reset slots count as transitions, alike for all."""
        return Tally(transitions=BLOCK * self.lanes, vector_steps=BLOCK)

    def close(self) -> None:
        """Close the vector."""
        self.envs.close()


class RecorderLoop(Loop):
    """The same loop with a recorder."""

    def __init__(self, lanes: int, commits: str, folder: Path) -> None:
        """Make a ring for the rows."""
        self.commits = commits
        rows = max(RING, 2 * lanes * COMMITS[commits])
        self.ring = MemmapStorage(folder / f"{lanes} {commits}", max_size=rows)
        super().__init__(lanes)
        self.name = f"Recorder, {commits}"

    def wrapped(self, envs: Any) -> Any:
        """Wrap the vector."""
        return Recorder(envs, storage=self.ring, commit_every=COMMITS[self.commits])

    def make_ready(self) -> None:
        """Commit before the clock starts, if commits are not measured."""
        if self.commits == "between commits":
            self.envs.commit()

    def close(self) -> None:
        """Close the recorder and its ring."""
        super().close()
        self.ring.close()


class ManualLoop(Loop):
    """The same loop, which passes its transitions to a recorder without an environment."""

    def __init__(self, lanes: int, folder: Path) -> None:
        """Make a ring for the rows."""
        super().__init__(lanes)
        self.name = "Recorder.manual, a commit every 64 steps"
        self.ring = MemmapStorage(folder / f"{lanes} manual", max_size=RING)
        spaces = self.envs.single_observation_space, self.envs.single_action_space
        # A reset slot, stored as a transition, repeats the first observation.
        self.recorder = Recorder.manual(*spaces, lanes, storage=self.ring, finals="kept")

    def advance(self) -> None:
        """Step a block, and add each step."""
        for action in self.actions:
            obs, reward, terminated, truncated, _ = self.envs.step(action)
            self.recorder.add(self.obs, action, reward, obs, terminated, truncated)
            self.obs = obs

    def close(self) -> None:
        """Close the recorder, its ring and the vector."""
        self.recorder.close()
        self.ring.close()
        super().close()


class Sb3Buffer(Loop):
    """The same loop with the buffer of Stable-Baselines3."""

    def __init__(self, lanes: int) -> None:
        """Make the buffer."""
        from stable_baselines3.common.buffers import ReplayBuffer

        super().__init__(lanes)
        self.name = "Stable-Baselines3's ReplayBuffer.add"
        spaces = self.envs.single_observation_space, self.envs.single_action_space
        self.buffer = ReplayBuffer(RING, *spaces, device="cpu", n_envs=lanes)
        self.infos: list[dict[str, Any]] = [{} for _ in range(lanes)]

    def advance(self) -> None:
        """Step a block, and add each step."""
        for action in self.actions:
            obs, reward, terminated, truncated, _ = self.envs.step(action)
            done = np.logical_or(terminated, truncated)
            self.buffer.add(self.obs, obs, action, reward, done, self.infos)
            self.obs = obs


class SingleLoop(Contender):
    """Bare loop over a single environment."""

    name = "raw"

    def __init__(self) -> None:
        """Make the environment, and draw the actions."""
        self.env: Any = self.wrapped(gymnasium.make("CartPole-v1"))
        self.actions = np.random.default_rng(0).integers(0, 2, BLOCK).tolist()
        self.env.reset(seed=0)

    def wrapped(self, env: Any) -> Any:
        """Return the environment that the loop steps."""
        return env

    def advance(self) -> None:
        """Step a block, and reset at the end of each episode."""
        env = self.env
        for action in self.actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    def tally(self) -> Tally:
        """Return the number of steps."""
        return Tally(transitions=BLOCK, vector_steps=BLOCK)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class SingleRecorder(SingleLoop):
    """The same loop with a recorder."""

    name = "Recorder, a commit every 64 steps"

    def __init__(self, folder: Path) -> None:
        """Make a ring for the rows."""
        self.ring = MemmapStorage(folder / "single", max_size=RING)
        super().__init__()

    def wrapped(self, env: Any) -> Any:
        """Wrap the environment."""
        return Recorder(env, storage=self.ring)

    def close(self) -> None:
        """Close the recorder and its ring."""
        super().close()
        self.ring.close()


class MinariLoop(SingleLoop):
    """The same loop with Minari's collector."""

    name = "Minari's DataCollector"

    def wrapped(self, env: Any) -> Any:
        """Wrap the environment."""
        from minari import DataCollector

        return DataCollector(env)


def single_contenders(folder: Path, *, peers: bool) -> list[Contender]:
    """Return all loops over a single environment."""
    made: list[Contender] = [SingleLoop(), SingleRecorder(folder)]
    if peers and all(find_spec(name) is not None for name in ("minari", "jax")):
        os.environ["MINARI_DATASETS_PATH"] = str(folder)
        made.append(MinariLoop())
    return made


def contenders(lanes: int, folder: Path, *, peers: bool) -> list[Contender]:
    """Return all loops over ``lanes`` lanes."""
    made: list[Contender] = [Loop(lanes)]
    made += [RecorderLoop(lanes, commits, folder) for commits in COMMITS]
    made.append(ManualLoop(lanes, folder))
    if peers and find_spec("stable_baselines3") is not None:
        made.append(Sb3Buffer(lanes))
    return made


def over_raw(raw: Result, result: Result) -> str:
    """Return how much longer a vector step takes than in the raw loop, in microseconds.

    The figure is the difference of the lower quartiles of the rounds. The speed of a shared machine
    may change by half from one round to the next, and the median may then lie at either speed.
    """
    low, raw_low = (statistics.quantiles(each.per_vector_step, n=4)[0] for each in (result, raw))
    return f"{low - raw_low:.1f}"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds: does it run?")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--seconds", type=float, default=0.03, help="per round and contender")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.lanes, args.rounds, args.seconds = [2], 2, 0.01
    return args


def main() -> None:
    """Time the loops in interleaved rounds."""
    args = parse_args()
    prepare()
    print_setting()
    found = []
    for lanes in args.lanes:
        with tempfile.TemporaryDirectory() as folder:
            made = contenders(lanes, Path(folder), peers=not args.no_peers)
            results = play_and_close(made, args.rounds, args.seconds)
        over = partial(over_raw, results[0])
        print_results(f"CartPole, {lanes} lanes", results, more={"us over raw": over})
        found.append({"lanes": lanes, **{each.name: each.vector_step_us for each in results}})
    with tempfile.TemporaryDirectory() as folder:
        made = single_contenders(Path(folder), peers=not args.no_peers)
        results = play_and_close(made, args.rounds, args.seconds)
    over = partial(over_raw, results[0])
    print_results("CartPole, a single environment", results, more={"us over raw": over})
    found.append({"lanes": None, **{each.name: each.vector_step_us for each in results}})
    if args.json:
        write_json(args.json, found)
        console.print(f"written to {args.json}")


if __name__ == "__main__":
    main()
