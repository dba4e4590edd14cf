"""Messages between a parent and its workers. They are small: rows stay in the transport's memory.

The parent asks; a worker answers each question once, in order::

    Job         -> EnvReady       create the environment              (sent with the process)
    Seed        -> SlabRequest    seed and reset the environment, call the policy once on trial
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
a :class:`Lease` the report carries the slots filled before the exception, whose rows are already in
the segment. If the parent acts (``policy_placement="central"``), :class:`Steps` and :class:`Lease`
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
"""Source of a step's actions; ``"given"``: they are already in the slab."""


@dataclass(frozen=True)
class Job:
    """The job of a worker, serialized with cloudpickle."""

    create_env_fn: Any
    policy: Any
    options: Options
    threads: int | None
    """Number of torch threads in a worker process; None in a thread, which does not set it."""
    off: frozenset[str]
    """Names of fast paths that are disabled."""


@dataclass(frozen=True)
class EnvReady:
    """The environment was created."""

    lanes: int
    description: dict[str, Any]


@dataclass(frozen=True)
class Seed:
    """Seed the worker's lanes, which begin at ``first_lane`` of the run, and its own generators."""

    seed: int
    incarnation: int
    first_lane: int
    run_lanes: int
    """Number of lanes of all workers."""
    worker: int
    asked: bool
    """True if a caller requested exactly this seed."""


@dataclass(frozen=True)
class PolicyCall:
    """The way to call a policy, as found in a trial."""

    inputs: tuple[Inputs, Sequence[Key], int] | None
    """Arguments of `Policy.takes`; None if the policy takes a TensorDict."""
    writes: tuple[Key, ...]
    """Keys that the policy adds to its input, including the action."""


@dataclass(frozen=True)
class SlabRequest:
    """The slab that the environment and the policy need, and the values they allow."""

    plan: SlabPlan
    ranges: Sequence[Range]
    lane_seeds: Sequence[int]
    """Seed of each lane; empty if the environment chooses some of the seeds itself."""
    actions: Mapping[Key, TensorSpec]
    """Spec of each action of one lane, by key."""
    drawn_ahead: bool
    """True if random actions may be drawn elsewhere, for all lanes at once."""
    state: bytes | None
    """State of the environment's transforms; None if they have none."""
    statistics: Sequence[str] = ()
    """Transforms whose statistics cover this worker only."""
    called: PolicyCall | None = None
    """The way to call the policy; None if there is no policy."""


@dataclass(frozen=True)
class Bind:
    """Attach the memory, which the transport provides."""

    share: Share
    worker: int


@dataclass(frozen=True)
class Done:
    """The question was carried out. For :class:`Steps`, the board has the number of slots."""

    state: bytes | None = None


DONE = Done()
"""Shared instance, so that it is pickled once."""


@dataclass(frozen=True)
class Bound:
    """The memory is attached, and the way of stepping chosen."""

    decisions: Mapping[str, Decision]
    """Decisions of a `RunPlan` on acting and stepping."""


@dataclass(frozen=True)
class Begin:
    """Start every lane's next trajectory; ``fresh`` forces a reset."""

    fresh: bool


@dataclass(frozen=True)
class Steps:
    """Fill slots ``[start, stop)``."""

    start: int
    stop: int
    by: Actor
    lanes: int | None = None
    """Step only the first ``lanes`` lanes, in one slot. None steps all lanes."""
    random_lanes: Mask | None = None
    """Lanes that act at random, in one slot: ``[lane]``, or by group ``[policy, lane]``."""
    drawn: Mapping[Key, Action] | None = None
    """``[lane, ...]``: the random actions, if they were drawn elsewhere."""


@lru_cache(maxsize=256)
def whole_steps(start: int, stop: int, by: Actor) -> Steps:
    """Return the question to fill slots of all lanes. Cached, so that each is pickled once."""
    return Steps(start, stop, by)


@dataclass(frozen=True)
class Lease:
    """A part of the budget: fill at least ``frames`` transitions into slots from ``base`` on."""

    number: int
    """Number among all leases, from 1. The board has the number of the lease that was begun."""
    base: int
    frames: int
    random_frames: Sequence[int]
    """``[policy]``: transitions at the start of the lease that have random actions.

    Without several policies this is one number, which covers all lanes.
    """
    tickets: int
    """Additional episodes that may be started."""
    last: bool
    """True if no further tickets will be granted."""
    fresh: bool
    """True if every lane is reset first."""


@dataclass(frozen=True)
class LeaseResult:
    """The result of a lease."""

    used: int
    """Number of slots of the segment that were filled."""
    entry: LedgerEntry
    """Events to add to the ledger."""
    random_left: Sequence[int]
    """``[policy]``: number of the lease's ``random_frames`` that were not collected."""
    completed: int
    """Number of episodes completed during this lease."""
    state: bytes | None = None


Value = tuple[NDArray[Any], torch.dtype]
"""A tensor as it is sent: its memory as an array, and its dtype."""
Values = Mapping[Key, Value]


@dataclass(frozen=True)
class ActionRequest:
    """Request for actions of all lanes of a worker. Its answer to the question follows later."""

    seen: Values = field(repr=False)
    """``[lane, ...]``: the input of the policy."""
    levels: Mapping[Key, Sequence[int]]
    """Batch dimensions, after the lanes, of the TensorDicts in that input."""

    @property
    def lanes(self) -> int:
        """Number of lanes that wait."""
        return len(next(iter(self.seen.values()))[0])


@dataclass(frozen=True)
class ActionReply:
    """Reply to an :class:`ActionRequest`."""

    version: int
    """Version of the weights that chose the actions."""
    values: Values | None = field(repr=False)
    """``[lane, ...]``: the values that the policy writes.

    None asks the worker to answer its question without another step.
    """


NOTHING_CHOSEN = ActionReply(-1, None)


@dataclass(frozen=True)
class Load:
    """Restore the state of the environment's transforms."""

    state: bytes


@dataclass(frozen=True)
class CallRequest:
    """Call a method, or read or set an attribute, of lanes' environments between steps."""

    content: bytes = field(repr=False)
    """The serialized call; see `envs.calls.serialization.packed`."""


@dataclass(frozen=True)
class CallReply:
    """The outcomes of a :class:`CallRequest`, one for each of its lanes."""

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
    """The lane that was stepped, numbered within the worker; None if not known."""
    acting: bool
    """True if the policy was choosing actions."""
    error: bytes | None = field(repr=False)
    """The pickled exception; None if it cannot be pickled."""
    filled: LeaseResult | None = field(default=None, repr=False)
    """The part of a lease that was complete before the error; None if no lease was begun."""
