"""Axes that extend the configuration of a number."""

from __future__ import annotations

from dataclasses import replace

from random_faults import FaultKind, Where
from random_several import SeveralKind

import random_spaces as sp
from random_configurations import Configuration, refusals
from random_drawing import Draw, configuration
from random_environments import EnvKind
from random_lanes import LaneKind
from random_meddling import MEDDLES
from random_networks import CHANGES
from random_policies import PolicyKind

PHASES_OF_CALLS = ("", "stop", "weights", "seed", "change", "interrupt")
ON_DISK = ("memmap", "h5", "zarr", "ring")


def extended(number: int) -> Configuration:
    """Return the configuration of a number, extended by up to three axes."""
    draw = Draw(number, 13)
    config = configuration(number)
    for axis in draw.some(AXES, 3):
        config = axis(draw, config)
    config = _resets(Draw(number, 17), _consistent(config))
    config = _several(Draw(number, 19), config)
    config = _fault(Draw(number, 37), replace(config, saves=Draw(number, 31).chance(25)))
    config = _others(Draw(number, 43), replace(config, looks=Draw(number, 41).chance(20)))
    return _once(Draw(number, 53), _wider(Draw(number, 47), config))


def _consistent(config: Configuration) -> Configuration:
    """Remove options that make no sense with the other axes."""
    policy, phase = config.policy, config.phase
    no_weights = policy is None or not policy.module or config.mode == "async"
    no_network = policy is None or not policy.network
    if (phase == "weights" and no_weights) or (phase == "change" and no_network):
        phase = ""
    if config.total_frames == -1 and phase != "stop":
        config = replace(config, total_frames=60)
    return replace(
        config,
        phase=phase,
        interrupt=config.interrupt if phase == "interrupt" else "",
        updates=config.updates and phase in ("resume", "state") and not no_weights,
    )


def _plain_env(draw: Draw, config: Configuration, system: str) -> Configuration:
    """Replace the environment by one without habits."""
    env = EnvKind(
        LaneKind(
            lengths=tuple(
                tuple(draw.number(1, 9) for _ in range(3)) for _ in range(draw.number(1, 3))
            ),
            ends=draw.one("terminated", "truncated", "mixed"),
        ),
        draw.number(1, 4),
        system,  # type: ignore[arg-type]
        draw.one("Disabled", "NextStep", "SameStep"),
    )
    surplus = "carry" if config.surplus == "never_step" else config.surplus
    return replace(
        config,
        env=env,
        policy=None,
        info_keys=False,
        settled=False,
        reset_slots="mask",
        surplus=surplus,
        max_frames_per_traj=None,
        yield_large=True,
        workers=min(config.workers, env.lanes),
    )


def _agents(draw: Draw, config: Configuration) -> Configuration:
    """Add agents that join and leave."""
    config = _plain_env(draw, config, "pettingzoo")
    lane = replace(config.env.lane, agents=draw.number(1, 4), joins=True)
    policy = draw.one(None, PolicyKind(), PolicyKind("writes", extra=("told",)))
    return replace(
        config,
        env=replace(config.env, lane=lane, mode="Disabled"),
        policy=policy,
        sink="memmap" if config.sink == "buffer" else config.sink,
    )


def _masks(draw: Draw, config: Configuration) -> Configuration:
    """Add action masks of every kind, some of them wrong."""
    config = _plain_env(draw, config, draw.one("sync", "sync", "torch"))
    names = ("discrete", "discrete from 5", "discrete from -2", "multidiscrete from 1")
    lane = replace(config.env.lane, masked=True, action=draw.of((*names, "multidiscrete")))
    if draw.chance(10):
        lane = replace(lane, mask_extra=draw.one(-1, 1))
    elif draw.chance(15):
        lane = replace(
            lane,
            spoil="nothing legal",
            spoil_lane=draw.number(0, config.env.lanes - 1),
            spoil_at=draw.number(1, 12),
        )
    policy = draw.one(None, PolicyKind(), PolicyKind("new", extra=("told",)))
    env = replace(config.env, lane=lane)
    if env.system == "sync" and not (lane.mask_extra or lane.spoil) and draw.chance(40):
        system = draw.one("sync", "sync", "async", "native")
        env = replace(env, system=system, lane=replace(lane, masked=False, mask_in_infos=True))
        policy = None
    return replace(config, env=env, policy=policy)


def _rare(draw: Draw, config: Configuration) -> Configuration:
    """Add rare spaces and forms of values."""
    config = _plain_env(draw, config, draw.one("sync", "sync", "torch"))
    form = draw.one("", "array of one", "array of none", "numpy", "half", "whole")
    lane = replace(
        config.env.lane,
        observation=draw.of(["float32", *sp.RARE]),
        form=form if config.env.is_vector else "",
    )
    policy = draw.one(None, PolicyKind())
    return replace(config, env=replace(config.env, lane=lane), policy=policy)


def _dull(draw: Draw, config: Configuration) -> Configuration:
    """Make observations and rewards almost indistinguishable."""
    config = _plain_env(draw, config, draw.one("sync", "torch"))
    lane = replace(config.env.lane, dull=draw.one("zeros", "goal at 0", "all equal"))
    if draw.chance(40):
        lane = replace(lane, lengths=((1,),))
    return replace(
        config,
        env=replace(config.env, lane=lane),
        settled=draw.chance(60),
        # Rows after skipped ones could not be matched.
        surplus="carry",
        phase="" if config.phase == "seed" else config.phase,
    )


def _statistics(draw: Draw, config: Configuration) -> Configuration:
    """Add a transform with statistics."""
    env = config.env
    if env.lane.observation not in sp.FLOAT_VECTORS or env.system == "native":
        config = _plain_env(draw, config, draw.one("sync", "torch", "one"))
        env = config.env
    apart = env.system in ("parallel", "async") or env.lane.agents or env.lane.masked
    if apart or env.lane.names or config.info_keys or "norm" in env.transforms:
        return config
    if env.is_vector and not env.adapter:
        env = replace(env, adapter=draw.one("mask", "avoid"))
    env = replace(env, transforms=(*env.transforms, "norm"))
    return replace(config, env=env, workers=0 if env.flat else config.workers)


def _network(draw: Draw, config: Configuration) -> Configuration:
    """Add a network that changes during the run."""
    config = _plain_env(draw, config, draw.one("sync", "sync", "torch"))
    change = draw.of(list(CHANGES))
    lane = config.env.lane
    if change == "in keys":
        lane = replace(lane, names=("first", "second"))
    return replace(
        config,
        env=replace(config.env, lane=lane),
        policy=PolicyKind(network=True, change=change),
        phase="change",
        phase_after=draw.number(1, 3),
        frames_per_batch=min(config.frames_per_batch, 20),
        workers=0,
        meddles=(),
    )


def _recurrent(draw: Draw, config: Configuration) -> Configuration:
    """Add a recurrent policy, in every layout."""
    config = _plain_env(draw, config, draw.one("sync", "torch", "one"))
    lanes = 1 if config.env.flat else config.env.lanes
    return replace(
        config,
        env=replace(config.env, lanes=lanes),
        workers=0 if config.env.flat else config.workers,
        policy=PolicyKind(recurrent=True, lstm=draw.chance(50)),
    )


def _interrupt(draw: Draw, config: Configuration) -> Configuration:
    """Add a signal after which the loop continues."""
    processes = config.workers and not config.threads
    if processes or config.env.system in ("parallel", "async") or config.env.lane.spoil:
        return config
    if config.policy is not None and config.policy.habit == "raises":
        return config
    return replace(
        config,
        phase="interrupt",
        interrupt=draw.one("ctrl-c", "term", "user"),
        interrupt_at=draw.number(1, draw.one(30, 300, 2000)),
        frames_per_batch=min(config.frames_per_batch, 20),
        total_frames=None if config.total_episodes else max(40, config.total_frames or 0),
        meddles=(),
    )


def _in_turn(draw: Draw, config: Configuration) -> Configuration:
    """Run two collectors on one storage."""
    if config.workers and not config.threads:
        config = replace(config, workers=0)
    return replace(
        config,
        phase="in turn",
        collects=False,
        updates=False,
        given="factory",
        sink=draw.one("memmap", "memmap", "zarr", "h5") if config.total_frames else "memmap",
        frames_per_batch=min(config.frames_per_batch, 20),
        total_frames=None if config.total_episodes else max(20, config.total_frames or 0),
        meddles=(),
    )


def _meddling(draw: Draw, config: Configuration) -> Configuration:
    """Overwrite yielded and read data in place."""
    config = _on_disk(draw, config)
    if config.phase not in ("", "stop", "weights", "seed"):
        config = replace(config, phase="")
    ways = draw.some(MEDDLES, 4)
    return replace(
        config,
        meddles=ways,
        collects=False,
        frames_per_batch=min(config.frames_per_batch, 20),
        yield_large=True,
    )


def _copy(draw: Draw, config: Configuration) -> Configuration:
    """Copy the rows to another storage."""
    return replace(
        _on_disk(draw, config),
        copy=draw.one("memmap", "h5", "zarr", "larger ring"),
        copy_by=draw.one("all", "all", "slice", "numbers", "twice"),
    )


def _reads(draw: Draw, config: Configuration) -> Configuration:
    """Read slices, trajectories and n-step returns."""
    return replace(_on_disk(draw, config), reads=True)


def _notes(draw: Draw, config: Configuration) -> Configuration:
    """Write a user's attributes."""
    return replace(_on_disk(draw, config), notes=True)


def _calls(draw: Draw, config: Configuration) -> Configuration:
    """Collect rows by number."""
    config = _on_disk(draw, config)
    if config.sink not in ("memmap", "h5", "zarr") or config.phase not in PHASES_OF_CALLS:
        return config
    return replace(config, collects=True, layout="rows", meddles=())


def _updates(draw: Draw, config: Configuration) -> Configuration:
    """Set new weights, then stop and resume the run."""
    if config.policy is None or not config.policy.module or config.mode == "async":
        return config
    if config.env.system == "parallel" or config.total_frames is None:
        return config
    sink = config.sink if config.sink in ("memmap", "h5", "zarr") else "memmap"
    return replace(
        config,
        phase=draw.one("resume", "state"),
        sink=sink,
        given="factory",
        updates=True,
        collects=False,
        meddles=(),
        frames_per_batch=min(config.frames_per_batch, 20),
    )


def _resets(draw: Draw, config: Configuration) -> Configuration:
    """Add seeds and options to the resets of most vectors that accept them."""
    lane = config.env.lane
    if config.env.system != "sync" or lane.self_reset or lane.spoil or not draw.chance(60):
        return config
    return replace(config, resets=draw.one("seeds", "options", "both"))


def _several(draw: Draw, config: Configuration) -> Configuration:
    """Add several policies to some of the runs that have one."""
    policy, lanes = config.policy, config.env.lanes
    if policy is None or policy.network or not draw.chance(35):
        return config
    if config.updates or config.phase in ("weights", "change"):
        return config
    # A function without keys gets its group's TensorDict, and not the columns these policies read.
    group = config.env.lane.agents and policy.module and draw.chance(60)
    count = 1 if group else draw.number(1, min(3, lanes))
    of_lane = [*range(count), *(draw.number(0, count - 1) for _ in range(lanes - count))]
    if group:
        of_lane = [0] * lanes
    draw.rng.shuffle(of_lane)
    random = tuple(draw.chance(15) for _ in range(count))
    kind = SeveralKind(
        tuple(of_lane),
        random,
        tuple(
            0 if always or draw.chance(35) else draw.number(1, draw.one(6, 40)) for always in random
        ),
        draw.number(0, 3),
        "agents" if group else "",
    )
    return replace(
        config,
        several=kind,
        init_random_frames=0 if kind.draws else config.init_random_frames,
    )


def _fault(draw: Draw, config: Configuration) -> Configuration:
    """Add an exception of user code to some of the runs without other faults."""
    lane, policy = config.env.lane, config.policy
    if config.phase or lane.spoil or lane.self_reset or lane.dull or not draw.chance(25):
        return config
    if config.env.system == "parallel":  # TorchRL reports errors of its processes only as text
        return config
    places: list[Where] = ["step", "reset", "postproc"]
    plain = policy is not None and not (policy.habit or policy.network or policy.recurrent)
    if plain and config.several is None:
        places.append("policy")
    if config.resets:
        places.append("sampler")
    most = draw.one(5, 40)
    fault = FaultKind(
        draw.of(places),
        draw.number(2, most),
        draw.number(0, config.env.lanes - 1),
        draw.chance(70),
    )
    return with_fault(replace(config, meddles=(), resets="", total_episodes=None), fault)


def _others(draw: Draw, config: Configuration) -> Configuration:
    """Share an object among lanes, or step a lane in the program, in some plain runs."""
    env, lane = config.env, config.env.lane
    if config.phase or config.fault or env.lanes == 1 or refusals(config) or not draw.chance(50):
        return config
    if env.system not in ("sync", "native", "torch", "serial", "pettingzoo") or config.uses_files:
        return config
    if draw.chance(50):
        lanes = tuple(draw.rng.permutation(env.lanes)[: draw.number(2, env.lanes)].tolist())
        env = replace(env, shared=lanes, shared_wrapped=draw.chance(50))
        return replace(config, env=env, saves=False)
    outer = env.adapter or env.transforms or env.system in ("serial", "pettingzoo")
    if outer or config.workers or not config.total_frames or config.reset_at_each_iter:
        return config
    if lane.masked or lane.mask_in_infos or config.max_frames_per_traj:
        return config
    return replace(config, phase="outside", phase_after=draw.number(1, 3), given="object")


def _wider(draw: Draw, config: Configuration) -> Configuration:
    """Let bounds differ between lanes, in some of Gymnasium's vectors."""
    lane = config.env.lane
    plain = lane.observation == "float32" and not (lane.names or lane.wrappers or lane.masked)
    if config.env.system not in ("sync", "async") or not plain or not draw.chance(25):
        return config
    return replace(config, env=replace(config.env, lane=replace(lane, wider=True)))


def with_fault(config: Configuration, fault: FaultKind) -> Configuration:
    """Return the configuration with an exception of user code."""
    config = replace(config, fault=fault, total_frames=config.total_frames or 60)
    if fault.where == "policy":
        habit = PolicyKind("raises", since=fault.at, stops=fault.stops)
        return replace(config, policy=habit)
    if fault.where not in ("step", "reset"):
        return config
    lane = replace(
        config.env.lane,
        spoil="raise" if fault.where == "step" else "raise in reset",
        spoil_lane=fault.lane,
        spoil_at=fault.at,
        stops=fault.stops,
    )
    return replace(config, env=replace(config.env, lane=lane))


def _on_disk(draw: Draw, config: Configuration) -> Configuration:
    if config.sink in ON_DISK or config.phase not in ("", "weights", "seed", "change"):
        return config
    sink = draw.of(["memmap", "h5", "zarr", "ring"])
    if config.total_frames is None and sink == "h5":
        sink = "memmap"
    if sink == "ring":
        config = replace(config, frames_per_batch=min(config.frames_per_batch, 16))
    return replace(config, sink=sink)


def _once(draw: Draw, config: Configuration) -> Configuration:
    if config.sink not in ("memmap", "zarr", "ring", "buffer on disk"):
        return config
    return replace(config, once=draw.chance(30))


AXES = (
    _agents,
    _masks,
    _rare,
    _dull,
    _statistics,
    _network,
    _recurrent,
    _interrupt,
    _in_turn,
    _meddling,
    _copy,
    _reads,
    _notes,
    _calls,
    _updates,
)
