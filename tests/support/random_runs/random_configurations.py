"""Configurations of random runs, and the reasons why a run may be refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from random_faults import FaultKind
from random_several import SeveralKind

from tallyroll.collector import Info

import random_spaces as sp
from random_environments import EnvKind
from random_interrupts import How
from random_lanes import CHANGING, SOMETIMES, LaneKind
from random_policies import PolicyKind
from random_resets import Given
from random_spaces import Key

Sink = Literal["", "memmap", "h5", "zarr", "ring", "buffer", "buffer on disk", "memory and disk"]
Phase = Literal[
    "",
    "stop",
    "resume",
    "state",
    "seed",
    "append",
    "weights",
    "interrupt",
    "in turn",
    "change",
    "outside",
]
Copy = Literal["", "memmap", "h5", "zarr", "larger ring"]


@dataclass(frozen=True)
class Configuration:
    """All parameters of a run."""

    number: int
    env: EnvKind
    policy: PolicyKind | None = None
    given: Literal["factory", "object"] = "factory"
    seed: int = 0
    frames_per_batch: int = 10
    total_frames: int | None = 40
    total_episodes: int | None = None
    layout: Literal["rows", "lanes", "trajectories"] = "rows"
    surplus: Literal["carry", "discard", "never_step"] = "carry"
    init_random_frames: int = 0
    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool = False
    postproc: bool = False
    info_keys: bool = False
    validate: Literal["raise", "warn", "off"] = "raise"
    yield_large: bool = True
    once: bool = False
    """Whether the storage stores frames once."""
    exclude: tuple[Key, ...] = ()
    """Columns that are not stored."""
    reset_slots: Literal["mask", "avoid"] = "mask"
    sink: Sink = ""
    phase: Phase = ""
    phase_after: int = 1
    """Number of batches before the phase."""
    workers: int = 0
    """Number of worker processes; 0 selects the single-process collector."""
    mode: Literal["sync", "async"] = "sync"
    threads: bool = True
    """Whether workers are threads of this process."""
    settled: bool = False
    """Whether the run passes the argument that avoids a refusal, if there is one."""
    interrupt: How = ""
    """Signal of the phase "interrupt". Python's own handler raises, or the caller's."""
    interrupt_at: int = 0
    """Number of calls of our functions before the signal."""
    meddles: tuple[str, ...] = ()
    """Tensors that are overwritten in place after each batch (`random_meddling`)."""
    copy: Copy = ""
    """Kind of storage to which the rows are appended."""
    copy_by: Literal["all", "slice", "numbers", "twice"] = "all"
    collects: bool = False
    """Whether `collect(n)` collects the rows, which are then read from the storage."""
    updates: bool = False
    """Whether the policy gets new weights before the run stops and resumes."""
    notes: bool = False
    """Whether a user writes attributes next to ours."""
    resets: Given = ""
    """Whether resets receive seeds, options, or both."""
    several: SeveralKind | None = None
    """Several policies, of which each behaves like :attr:`policy`."""
    fault: FaultKind | None = None
    """An exception that user code raises at one of its calls."""
    looks: bool = False
    """Whether a thread reads the ledger during the run."""
    reads: bool = False
    """Whether slices, trajectories and n-step returns are compared with a model."""
    saves: bool = False
    """Whether values are saved with the run after a batch, and loaded."""
    policy_device: str | None = None
    storing_device: str | None = None

    @property
    def uses_files(self) -> bool:
        """True if lanes are in other processes."""
        apart = self.env.system in ("async", "parallel")
        return apart or (self.workers > 0 and not self.threads)

    @property
    def far(self) -> bool:
        """True if the workers share no memory with their parent."""
        return self.workers > 0 and self.threads and self.number % 2 == 0

    @property
    def policy_keys(self) -> tuple[Key, ...]:
        """Columns that the policy reads."""
        return tuple(self.column(key) for key in observation_keys(self.env.lane))

    def own_column(self, name: str) -> Key:
        """Return the column of the action or of the reward."""
        return ("agents", name) if self.env.lane.agents else (name,)

    def column(self, key: Key) -> Key:
        """Return the column of an observation."""
        lane = self.env.lane
        if self.settled and key[0] in lane.names:
            return (f"own {lane.names.index(key[0])}", *key[1:])
        return ("agents", *key) if lane.agents and key[0] != "agents" else key

    @property
    def driven(self) -> EnvKind:
        """The environment. If its mask has another name, it is an ordinary observation."""
        bound = self.column(("action_mask",)) == ("action_mask",)
        if self.env.lane.mask_in_infos:
            several = self.several is not None and not all(self.several.random)
            bound = self.policy is None and not several
        return replace(self.env, lane=replace(self.env.lane, bound=bound))

    @property
    def settling(self) -> dict[str, Any]:
        """Arguments of the collector that avoid refusals."""
        lane, given = self.env.lane, {}
        if not self.settled:
            return {}
        if lane.names:
            given["rename"] = {name: f"own {i}" for i, name in enumerate(lane.names)}
        given["finals"] = "lost" if self.loses_finals else "kept"
        return given

    @property
    def loses_finals(self) -> bool:
        """True if the run declares that final observations are lost."""
        lost = self.env.lane.self_reset != "" and not self.env.auto_reset
        return lost and self.settled

    @property
    def infos(self) -> tuple[Any, ...]:
        """The `info_keys`."""
        names = self.env.lane.infos if self.info_keys else ()
        if not self.settled:
            return names
        return tuple(Info(name, *DECLARED[name]) if name in DECLARED else name for name in names)

    def given_column(self, name: str) -> Key | None:
        """Return the column that marks the rows that have an info."""
        declared = self.settled and name in SOMETIMES
        return (f"{name}_given",) if declared else None


DECLARED: dict[str, tuple[Any, ...]] = {
    "drift": ("float64",),
    "flag": ("int64",),
    "wide": ("int64",),
    "unsigned": ("int64",),
    "won": ("int64", (), 0),
    "now and then": ("float64", (), -1.0),
}


def observation_keys(lane: LaneKind) -> tuple[Key, ...]:
    """Return the columns of an observation."""
    if lane.agents:
        return (("agents", "observation"),)
    value = sp.drawn(lane.observation_space(), np.random.default_rng(0))
    return tuple(key for key in sp.leaves(value) if key != ("action_mask",))


# --- reasons for a refusal ------------------------------------------------------------------------


def refusals(config: Configuration) -> list[str]:
    """Return the reasons why the run may end with one of our errors. Without any, it must not."""
    env, lane = config.env, config.env.lane
    same_step = env.is_vector and env.mode == "SameStep" and env.system != "native"
    names = {name for key in config.policy_keys for name in key[:1]}
    infos = {each for each in config.infos if isinstance(each, str)}
    found = {
        "names that collide": bool(names & set(sp.COLLIDING)),
        "odd names": bool(names & {*sp.ODD, *sp.TAKEN}),
        "spaces that no column holds": lane.observation in sp.REFUSABLE,
        "torch lacks operations of TorchRL's": "uint16" in lane.observation
        and (env.system == "torch" or config.sink in ("buffer", "memory and disk")),
        "rewards and flags of a shape": lane.form == "array of one",
        "a mask of another length": lane.mask_extra != 0,
        "episodes end where the next begins": lane.dull in ("zeros", "all equal")
        and not config.settled,
        "statistics apart": "norm" in env.transforms and config.workers > 1,
        # An environment that resets itself may return its first observation twice.
        "a reused array in SAME_STEP": bool(lane.reuse or lane.self_reset) and same_step,
        "reused observations that cannot be split": bool(lane.reuse or env.tensors)
        and (env.system in ("parallel", "serial")),
        "resets itself": bool(lane.self_reset) and not config.loses_finals,
        "spoilt": bool(lane.spoil),
        "infos that change": bool(infos & {*CHANGING, *SOMETIMES}),
        "the policy returns less than at first": config.policy is not None
        and config.policy.since > 1
        and config.policy.habit in ("select", "deletes"),
        "the program stepped a lane": config.phase == "outside",
        "user code raises": config.fault is not None,
        "the policy raises": config.policy is not None and config.policy.habit == "raises",
        "a part cannot be stepped": config.surplus == "never_step"
        and not env.flat
        and not (env.system in ("serial", "parallel") and not stands_outside(config))
        and not (env.system == "sync" and env.mode == "Disabled" and not stands_outside(config)),
        "TorchRL has no such names": env.system in ("torch", "one", "serial", "parallel")
        and bool(set(lane.names) & set(sp.COLLIDING)),
        "statistics twice": env.vector_statistics and "statistics" in lane.wrappers,
        "masks are ignored": env.system == "native"
        and bool(env.transforms or config.max_frames_per_traj),
    }
    return [reason for reason, holds in found.items() if holds]


def stands_outside(config: Configuration) -> bool:
    """Return whether a wrapper or a transform surrounds the vector."""
    env = config.env
    recurrent = config.policy is not None and config.policy.recurrent
    return bool(env.vector_statistics or env.transforms or recurrent or config.max_frames_per_traj)
