"""Messages between a parent and its workers. They are small: rows stay in the transport's memory.

The parent asks; a worker answers each question once, in order::

    Job         -> EnvReady       create the environment              (sent with the process)
    Seed        -> SlabRequest    seed it, reset it, call the policy once on trial
    Bind        -> Bound          attach the memory, at the offsets of the worker's lanes
    Steps       -> Done           mode="sync":  fill these slots
    Begin       -> Done           mode="sync":  reset every lane
    Lease       -> LeaseResult    mode="async": fill a segment with this many transitions
    FindShards  -> FoundShards    sharded: which of these shards are on this node?
    OpenShard   -> Done           sharded: store rows in a shard (`batches/stored/worker_shard.py`)
    Lease       -> ShardCommit    sharded: this many transitions are committed to the shard
    Load        -> Done           restore the state of the environment's transforms
    CallRequest -> CallReply      call methods of lanes' environments, or read attributes
    Close       ->                exit

A worker may answer any question with an :class:`ExceptionReport`, and answers none after that. For
a :class:`Lease` the report carries what was filled before the exception; those rows are in their
place. Where the parent acts (``policy_placement="central"``), :class:`Steps` and :class:`Lease`
have intermediate answers, and the parent asks nothing else meanwhile::

    Steps, Lease -> ActionRequest                        these lanes need actions
    ActionReply  -> ActionRequest, Done or LeaseResult   continue with these actions
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torchrl.data import TensorSpec

from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.counting.ledger import LedgerEntry
from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.calls.serialization import PickledOutcome
from tallyroll.collector.options import Options
from tallyroll.collector.policies.plain_modules import Inputs
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.workers.share import Share
from tallyroll.storage.rows.keys import Key

Action = NDArray[Any]
Actor = Literal["policy", "random", "given"]
"""Actor of a step; ``"given"``: the actions are there."""


@dataclass(frozen=True)
class Job:
    """The job of a worker; it travels by cloudpickle."""

    create_env_fn: Any
    policy: Any
    options: Options
    threads: int | None
    """Threads of torch, in a process of its own; None: the worker is a thread, and sets none."""
    off: frozenset[str]
    """Ways that are switched off."""


@dataclass(frozen=True)
class EnvReady:
    """The environment stands."""

    lanes: int
    description: dict[str, Any]


@dataclass(frozen=True)
class Seed:
    """Seed the lanes ``first_lane``, … of the run, and the worker's own generators."""

    seed: int
    incarnation: int
    first_lane: int
    run_lanes: int
    """Lanes of all workers."""
    worker: int
    asked: bool
    """A caller asked for this very seed."""


@dataclass(frozen=True)
class PolicyCall:
    """The way to call a policy, as a trial found it."""

    inputs: tuple[Inputs, Sequence[Key], int] | None
    """Arguments of `Policy.takes`; None: it takes a TensorDict."""
    writes: tuple[Key, ...]
    """Keys that it adds to its input, the action among them."""


@dataclass(frozen=True)
class SlabRequest:
    """The slab that the environment and the policy need, and the values they allow."""

    plan: SlabPlan
    ranges: Sequence[Range]
    lane_seeds: Sequence[int]
    """None where TorchRL chooses some of them."""
    actions: Mapping[Key, TensorSpec]
    """Spec of each action of a lane, by its key."""
    drawn_ahead: bool
    """Random actions may be drawn elsewhere, for all lanes at once."""
    state: bytes | None
    """State of the environment's transforms; None where there is none."""
    statistics: Sequence[str] = ()
    """Transforms that keep statistics of this worker alone."""
    called: PolicyCall | None = None
    """The way to call the policy; None: there is none."""


@dataclass(frozen=True)
class Bind:
    """The memory is there; the transport brings it."""

    share: Share
    worker: int


@dataclass(frozen=True)
class Done:
    """Answer that it was done: of :class:`Steps`, up to the slot that the board names."""

    state: bytes | None = None


DONE = Done()
"""One object for all, which is pickled once."""


@dataclass(frozen=True)
class Bound:
    """The memory is taken over, and the way of stepping chosen."""

    decisions: Mapping[str, Decision]
    """Decisions of a `RunPlan` on acting and stepping."""


@dataclass(frozen=True)
class Begin:
    """Start every lane's next trajectory; ``fresh``: with a reset, whatever was reset before."""

    fresh: bool


@dataclass(frozen=True)
class Steps:
    """Fill slots ``[start, stop)``."""

    start: int
    stop: int
    by: Actor
    lanes: int | None = None
    """Step only the first so many lanes, of one slot; None: all."""
    random_lanes: Mask | None = None
    """``[lane]``, or by group ``[policy, lane]``: these act at random, of one slot."""
    drawn: Mapping[Key, Action] | None = None
    """``[lane, ...]``: their actions, where they were drawn elsewhere."""


@lru_cache(maxsize=256)
def whole_steps(start: int, stop: int, by: Actor) -> Steps:
    """Return the question for all lanes of slots; one object for each, which is pickled once."""
    return Steps(start, stop, by)


@dataclass(frozen=True)
class Lease:
    """A part of the budget: at least ``frames`` transitions into slots from ``base`` on."""

    number: int
    """Number among all leases, from 1: the board says which one was begun."""
    base: int
    frames: int
    random_frames: Sequence[int]
    """``[policy]``: transitions at its start that have random actions; one number for all."""
    tickets: int
    """Episodes that may be started beyond those granted before."""
    last: bool
    """No more tickets are to be had."""
    fresh: bool
    """Every lane is reset first."""


@dataclass(frozen=True)
class LeaseResult:
    """A lease comes back."""

    used: int
    """Slots of the segment that were filled."""
    entry: LedgerEntry
    """Events to be counted."""
    random_left: Sequence[int]
    """``[policy]``: of the lease's ``random_frames`` the number that were not made."""
    completed: int
    """Episodes that were completed with this lease."""
    state: bytes | None = None


Value = tuple[NDArray[Any], torch.dtype]
"""A tensor as it travels: its memory as an array, and its dtype."""
Values = Mapping[Key, Value]


@dataclass(frozen=True)
class ActionRequest:
    """Actions are wanted for all lanes of the worker; the question is not answered yet."""

    seen: Values = field(repr=False)
    """``[lane, ...]``: what the policy sees."""
    levels: Mapping[Key, Sequence[int]]
    """Batch dimensions after the lanes of the TensorDicts within that."""

    @property
    def lanes(self) -> int:
        """The lanes that wait."""
        return len(next(iter(self.seen.values()))[0])


@dataclass(frozen=True)
class ActionReply:
    """The actions that were wanted."""

    version: int
    """The version of the weights that chose them."""
    values: Values | None = field(repr=False)
    """``[lane, ...]``: what the policy writes; None: answer the question without another step."""


NOTHING_CHOSEN = ActionReply(-1, None)


@dataclass(frozen=True)
class Load:
    """Take over the state of the environment's transforms."""

    state: bytes


@dataclass(frozen=True)
class CallRequest:
    """Call a method, or an attribute, of the environments of some lanes, between steps."""

    content: bytes = field(repr=False)
    """The call; see `envs.calls.serialization.packed`."""


@dataclass(frozen=True)
class CallReply:
    """The outcomes of that, one for each of these lanes."""

    answers: Sequence[PickledOutcome]


@dataclass(frozen=True)
class Close:
    """Close the environment and exit."""


@dataclass(frozen=True)
class ExceptionReport:
    """Code in the worker raised."""

    kind: str
    message: str
    traceback: str
    doing: str
    lane: int | None
    """The lane that was stepped, numbered within the worker, where that is known."""
    acting: bool
    """The policy was choosing actions."""
    error: bytes | None = field(repr=False)
    """The exception itself, where it can be pickled."""
    filled: LeaseResult | None = field(default=None, repr=False)
    """The part of a lease that was complete before the error; None: no lease was begun."""
