"""A controller drives a robot at a fixed rate, and a recorder stores each transition.

    python examples/robot_loop.py --hz 30 --seconds 2
    python examples/robot_loop.py --hz 30 --seconds 2    # run again to continue the recording

There is no environment: the loop reads sensors, sends a command, waits for the next tick and reads
the sensors again. It passes these values to ``add`` of ``Recorder.manual``. The observation after
one tick is also the one before the next tick: the loop reads it once and passes it twice, so that
the trajectory continues. When an episode ends, the arm gets another target.

Ctrl-C ends the loop, and the end of the ``with`` block then commits all recorded rows. A kill loses
at most ``--commit-every`` ticks. The arm is simulated: to drive a real one, replace the methods of
``Arm``.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from tallyroll.collector import Recorder

OBSERVATION = Box(-np.inf, np.inf, (3,), np.float32)
"""Angle in rad, angular velocity in rad/s, and target angle in rad."""
ACTION = Box(-1, 1, (1,), np.float32)
"""Torque in N m."""


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    hz: float = option(30.0, "ticks per second")
    seconds: float = option(2.0, "duration of the recording")
    limit: float = option(1.0, "seconds after which an episode is truncated")
    out: str = option("runs/robot", "storage of the rows")
    commit_every: int = option(30, "ticks between two commits")
    seed: int = option(0, "of the targets and of the controller's noise")


def parse() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Args):
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=type(each.default),
            default=each.default,
            help=f"{each.metadata['help']} (default: {each.default!r})",
        )
    return Args(**vars(parser.parse_args()))


class Arm:
    """A simulated arm with one joint."""

    def __init__(self, period: float) -> None:
        self.period, self.angle, self.velocity = period, 0.0, 0.0

    def command(self, torque: float) -> None:
        self.velocity += self.period * (20 * torque - 2 * self.velocity)
        self.angle += self.period * self.velocity

    def sensors(self) -> tuple[float, float]:
        return self.angle, self.velocity


def observed(arm: Arm, target: float) -> np.ndarray:
    return np.array([*arm.sensors(), target], np.float32)


def control(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    angle, velocity, target = obs
    torque = 2 * (target - angle) - 0.3 * velocity + rng.normal(0, 0.05)
    return np.array([np.clip(torque, -1, 1)], np.float32)


def run(recorder: Any, args: Args) -> int:
    """Run the loop, and return the number of ticks that were late."""
    rng, period, late = np.random.default_rng(args.seed), 1 / args.hz, 0
    arm = Arm(period)
    target, begun = rng.uniform(-1, 1), 0
    obs, start = observed(arm, target), time.monotonic()
    for tick in range(1, round(args.seconds * args.hz) + 1):
        action = control(obs, rng)
        arm.command(action.item())
        wait = start + tick * period - time.monotonic()
        late += wait < 0
        time.sleep(max(0, wait))
        after = observed(arm, target)
        error = abs(after[2] - after[0])
        terminated = bool(error < 0.02 and abs(after[1]) < 0.1)
        truncated = not terminated and (tick - begun) * period >= args.limit
        recorder.add(obs, action, -error, after, terminated, truncated)
        if terminated or truncated:
            print(f"target {target:5.2f} {'reached' if terminated else 'missed'}", flush=True)
            target, begun = rng.uniform(-1, 1), tick
            after = observed(arm, target)
        obs = after
    return late


def main(args: Args) -> None:
    recorder = Recorder.manual(
        OBSERVATION, ACTION, storage=args.out, resume="auto", commit_every=args.commit_every
    )
    with recorder:
        before = recorder.ledger.stored
        print(f"{before} transitions so far, recording at {args.hz:g} Hz", flush=True)
        try:
            print(f"{run(recorder, args)} ticks were late")
        except KeyboardInterrupt:
            print("interrupted")
    ledger = recorder.ledger
    print(
        f"{ledger.stored - before} transitions stored; {ledger.stored} in all, of "
        f"{ledger.episodes_complete} complete and {ledger.episodes_cut} cut episodes"
    )


if __name__ == "__main__":
    main(parse())
