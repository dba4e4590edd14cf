"""Random configurations, drawn by a number, and their twins for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

import random_spaces as sp
from random_configurations import Configuration, Phase, stands_outside
from random_environments import EnvKind
from random_lanes import CHANGING, SOMETIMES, STEADY, LaneKind, is_discrete
from random_policies import PolicyKind

T = TypeVar("T")


class Draw:
    """Random choices from a generator."""

    def __init__(self, number: int, stream: int = 11) -> None:
        self.rng = np.random.default_rng([stream, number])

    def one(self, *values: T) -> T:
        """Return one of the values."""
        return values[int(self.rng.integers(len(values)))]

    def of(self, values: Sequence[T]) -> T:
        """Return one of the values."""
        return values[int(self.rng.integers(len(values)))]

    def some(self, values: Sequence[T], most: int) -> tuple[T, ...]:
        """Return up to `most` different values."""
        count = int(self.rng.integers(min(most, len(values)) + 1))
        return tuple(values[i] for i in self.rng.permutation(len(values))[:count])

    def chance(self, of_a_hundred: float) -> bool:
        """Return True in `of_a_hundred` percent of the calls."""
        return bool(self.rng.random() * 100 < of_a_hundred)

    def number(self, low: int, high: int) -> int:
        """Return a number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))


def configuration(number: int) -> Configuration:
    """Return the configuration of a number."""
    draw = Draw(number)
    env = _env(draw)
    policy = _policy(draw, env)
    if policy is not None:
        env = replace(env, one_hot=False)
    config = Configuration(number, env, policy)
    config = _budget(draw, config)
    config = _options(draw, config)
    config = _habits(draw, config)
    config = _workers(draw, config)
    config = replace(config, settled=draw.chance(50))
    return _phase(draw, config)


def twin(config: Configuration) -> Configuration | None:
    """Return a configuration without bad habits that must have the same data, bit for bit."""
    env, lane = config.env, config.env.lane
    if lane.self_reset or lane.spoil or env.shared or config.phase or config.mode == "async":
        return None
    if "norm" in env.transforms and config.workers:  # statistics per worker, or of all lanes
        return None
    if (config.total_frames or 0) > 150:
        return None
    steady = not set(lane.infos) - {*STEADY}
    clean = replace(
        config,
        env=replace(env, tensors="", lane=replace(lane, reuse="", writes_action=False)),
        policy=config.policy and config.policy.clean(),
        given="factory",
        info_keys=config.info_keys and not steady,
    )
    chosen = config.policy is not None and not config.init_random_frames
    chosen = chosen and (config.several is None or not config.several.draws)
    if env.system == "sync" and (chosen or not stands_outside(config)):
        clean = replace(clean, workers=0)
    if clean.info_keys != config.info_keys:
        return clean
    same_habits = (clean.env, clean.workers) == (config.env, config.workers)
    harmless = config.policy is None or config.policy.habit == ""
    if same_habits and harmless and (clean.given == config.given or config.number % 4):
        return None
    return clean


def _env(draw: Draw) -> EnvKind:
    system = draw.of(
        ["sync"] * 9
        + ["native"] * 3
        + ["torch"] * 6
        + ["one", "one"]
        + ["wrapper"] * 3
        + ["serial"] * 2
    )
    if draw.chance(1.5):
        system = "async"
    elif draw.chance(0.5):
        system = "parallel"
    most = 2 if system in ("async", "parallel") else 5
    lanes = 1 if system in ("one", "wrapper") else draw.number(1, most)
    vector = system in ("sync", "async", "native")
    env = EnvKind(
        _lane(draw, system, lanes),
        lanes,
        system,  # type: ignore[arg-type]
        draw.one("Disabled", "NextStep", "SameStep") if system != "native" else "NextStep",
        copy=not draw.chance(30),
        one_hot=system == "wrapper" and draw.chance(30),
    )
    if vector and draw.chance(35):
        env = replace(env, adapter=draw.one("mask", "avoid") if system != "native" else "mask")
    if vector and env.lane.agents:
        env = replace(env, lane=replace(env.lane, agents=0))
    if system != "native":
        env = replace(env, vector_statistics=vector and draw.chance(8))
    outside = bool(env.adapter) or not vector
    if outside and system != "native" and draw.chance(30) and not env.lane.agents:
        names = ["steps", "init", "sum"]
        if env.lane.observation in sp.FLOAT_VECTORS and not env.lane.names and not env.lane.masked:
            names.append("stack")
        if env.lane.names:  # a user's transform may overwrite them
            names = ["init"] if "is_init" not in env.lane.names else []
        env = replace(env, transforms=draw.some(names, 3))
    if env.one_hot and env.lane.action != "discrete":
        env = replace(env, one_hot=False)
    return env


def _lane(draw: Draw, system: str, lanes: int) -> LaneKind:
    torchrl = system in ("wrapper", "serial", "parallel")
    actions = [name for name in sp.ACTIONS if not torchrl or name in sp.TORCHRL_ACTIONS]
    observations: list[str] = list(sp.OBSERVATIONS if not torchrl else sp.PLAIN)
    if not draw.chance(15):
        observations = [name for name in observations if not name.startswith("large")]
    length = draw.one((1,), (1, 2), (1, 6), (3, 9), (5, 40), (200, 300))
    each = draw.number(1, 4) if not draw.chance(20) else 1
    lengths = [
        tuple(draw.number(length[0], length[-1]) for _ in range(draw.number(1, 4)))
        for _ in range(min(each, lanes))
    ]
    kind = LaneKind(
        observation=draw.of(observations) if draw.chance(75) else "float32",
        action=draw.of(actions) if draw.chance(70) else "discrete",
        lengths=tuple(lengths),
        ends=draw.one("terminated", "truncated", "mixed", "both"),
    )
    if draw.chance(8) and not torchrl:
        names = draw.some(draw.one(sp.COLLIDING, sp.ODD, sp.TAKEN), 2)
        kind = replace(kind, names=(*names, "pos") if names else ())
    if system == "torch" and draw.chance(15):
        return replace(kind, agents=draw.number(1, 3), names=())
    if not torchrl and is_discrete(kind) and draw.chance(8):
        kind = replace(kind, masked=True)
    names_of_wrappers = ["statistics", "autoreset", "rescale", f"limit {draw.number(1, 12)}"]
    if kind.observation in sp.FLOAT_VECTORS and not kind.names and not kind.masked:
        names_of_wrappers += ["normalize", "stack 2"]
    if draw.chance(25):
        kind = replace(kind, wrappers=draw.some(names_of_wrappers, 2))
    return kind


def _policy(draw: Draw, env: EnvKind) -> PolicyKind | None:
    if env.lane.masked or draw.chance(30):
        return None
    if "normalize" in env.lane.wrappers or "stack 2" in env.lane.wrappers:
        habits: tuple[Any, ...] = ("", "keeps")
    elif draw.chance(45):
        habits = ("",)
    elif draw.chance(5):
        habits = ("raises",)
    else:
        habits = ("new", "select", "writes", "fills", "replaces", "deletes", "keeps", "keeps td")
    plain = env.lane.observation == "float32" and env.lane.action == "discrete"
    plain = plain and not env.lane.names and not env.lane.wrappers and not env.lane.agents
    if plain and env.system != "native" and not env.one_hot and draw.chance(15):
        return PolicyKind(recurrent=True)
    return PolicyKind(
        draw.of(habits),
        since=draw.one(1, 1, 2, 5, 20),
        memory=draw.number(1, 6),
        extra=draw.one((), (), ("told",), ("told", "deep")),
        module=draw.chance(70),
    )


def _budget(draw: Draw, config: Configuration) -> Configuration:
    lanes = config.env.lanes
    longest = max(max(each) for each in config.env.lane.lengths)
    total = draw.number(20, 120) if not draw.chance(15) else draw.number(120, 300)
    frames = draw.one(lanes, draw.number(1, 9), draw.number(5, 40), 64, 400)
    config = replace(config, frames_per_batch=max(1, frames), total_frames=total)
    if draw.chance(15) and longest < 50:
        return replace(config, total_frames=None, total_episodes=draw.number(1, 12))
    return config


def _options(draw: Draw, config: Configuration) -> Configuration:
    env, episodes = config.env, config.total_episodes is not None
    disk = draw.of(["memmap"] * 5 + ["h5", "zarr"] + ["ring"])
    sink = disk if draw.chance(55) else ""
    if draw.chance(10):
        sink = draw.one("buffer", "buffer on disk", "memory and disk")
    if episodes and sink == "h5":
        sink = "memmap"
    if sink == "ring":
        config = replace(config, frames_per_batch=min(config.frames_per_batch, 16))
    surplus = "carry"
    if draw.chance(15) and not episodes:
        surplus = "discard"
    elif draw.chance(15) and env.system in ("sync", "serial", "one", "wrapper"):
        surplus = "never_step" if env.mode == "Disabled" or not env.is_vector else "carry"
    limit = None
    if draw.chance(15) and env.system != "native":
        limit = draw.number(1, 15)
    config = replace(
        config,
        given=draw.one("factory", "factory", "object"),
        seed=draw.number(0, 2**31 - 1),
        layout=draw.one("rows", "rows", "rows", "lanes", "trajectories"),
        surplus=surplus,
        init_random_frames=draw.one(0, 0, 0, draw.number(1, 60)),
        max_frames_per_traj=limit,
        reset_at_each_iter=draw.chance(10) and not episodes,
        postproc=draw.chance(10),
        validate=draw.of(["raise"] * 8 + ["warn", "off"]),
        sink=sink,
        reset_slots="avoid" if env.system == "sync" and draw.chance(30) else "mask",
    )
    large = env.lane.observation.startswith("large")
    if large and sink in ("memmap", "h5", "zarr") and not config.postproc and draw.chance(50):
        config = replace(config, yield_large=False)
    return config


def _habits(draw: Draw, config: Configuration) -> Configuration:
    """Add forbidden habits of environments."""
    env, lane = config.env, config.env.lane
    if draw.chance(18):
        reuse = draw.one("same", "one key", "view", "double", "ring")
        if env.system in ("torch", "one") and draw.chance(80):
            env = replace(env, tensors=reuse)
        else:
            lane = replace(lane, reuse=reuse)
    if draw.chance(7) and not lane.masked and not config.total_episodes:
        lane = replace(lane, self_reset=draw.one("once", "once", "twice"))
        if env.system == "wrapper" and not lane.reuse and draw.chance(50):
            env = replace(env, auto_reset=True)
            lane = replace(lane, self_reset="once")
        config = replace(config, max_frames_per_traj=None, reset_at_each_iter=False)
        if env.system == "native":
            lane = replace(lane, self_reset="")
    if draw.chance(6):
        lane = replace(lane, writes_action=True)
    if draw.chance(10) and not lane.self_reset:
        lane = _spoilt(draw, env, lane)
    if env.is_vector and draw.chance(15) and not env.transforms:
        names = draw.some(STEADY, 3)
        if draw.chance(40):
            names = (*names, draw.of(CHANGING + SOMETIMES))
        lane = replace(lane, infos=names)
        config = replace(config, info_keys=bool(names))
    return replace(config, env=replace(env, lane=lane))


def _spoilt(draw: Draw, env: EnvKind, lane: LaneKind) -> LaneKind:
    spoils = ["raise", "raise in reset"]
    simple = lane.observation in ("float32", "float32 matrix") and not lane.names
    if simple and not lane.wrappers and not lane.masked and not lane.agents:
        spoils += ["nan", "range", "dtype", "shape"]
    return replace(
        lane,
        spoil=draw.of(spoils),
        spoil_lane=draw.number(0, env.lanes - 1),
        spoil_at=draw.number(1, 30),
    )


def _workers(draw: Draw, config: Configuration) -> Configuration:
    env = config.env
    apart = draw.chance(3)
    if not (apart or draw.chance(12)) or env.system in ("async", "parallel"):
        return config
    if env.flat or env.lane.agents or config.sink == "buffer on disk":
        return config
    workers = draw.number(1, min(3, env.lanes))
    mode = draw.one("sync", "async")
    config = replace(config, workers=workers, mode=mode, threads=not apart, given="factory")
    if mode == "async":
        config = replace(config, reset_at_each_iter=False)
        if config.surplus == "discard":
            config = replace(config, surplus="carry")
    if config.surplus == "never_step" and env.mode != "Disabled":
        config = replace(config, surplus="carry")
    return config


def _phase(draw: Draw, config: Configuration) -> Configuration:
    phases: list[Phase] = ["stop", "state", "seed"]
    if config.policy is not None and config.policy.module and config.mode == "sync":
        phases.append("weights")
    if config.sink in ("memmap", "zarr", "h5") and config.total_frames is not None:
        phases += ["resume", "resume"]
    if config.sink in ("memmap", "zarr"):
        phases += ["append"]
    if not draw.chance(25) or config.env.system == "parallel":
        return config
    phase = draw.of(phases)
    if phase in ("state", "seed") and config.sink in ("buffer", "buffer on disk"):
        phase = "stop"
    if phase in ("resume", "state", "append"):
        config = replace(config, given="factory")
    frames = min(config.frames_per_batch, 20)
    if phase == "stop" and config.total_frames and config.sink != "h5" and draw.chance(40):
        config = replace(config, total_frames=-1)
    return replace(config, phase=phase, phase_after=draw.number(1, 3), frames_per_batch=frames)
