"""The plan of a run: the implementation of each part, and the reason why no faster one applies.

This module contains all conditions that are known when a run begins. Each function takes traits of
the environment, the policy, the storage and the options as plain values, and chooses. A few
conditions can change during a run, and are tested in the places named here:

* the module of a policy is hooked or changed, or newer weights arrive (`direct_forward`,
  `FewSlots.fill`);
* the step of a vector environment is replaced (`SequentialStep.are_alone`);
* a value outside its space is accepted, so that the bounds change (`RangeChecks.eased`);
* final observations are not judged yet (`FinalsWatch.undecided`);
* a call requests more than a few slots, or a part of a slot (`FastCollect.collect`);
* random actions at the beginning of a run are over (`Rollout.make_ready`);
* the budget ends, the run is stopped, or the storage is closed (`FastCollect.collect`);
* the extension finds different arrays, a full file or a lost lock (`store_slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tallyroll.storage import fast_paths
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.pages import Page, PageSource

FEW_SLOTS = 4
"""Maximum number of slots that are numbered and checked one by one, which is faster for a few."""
FEW_REWARDS = 7
"""Maximum number of rewards of a lane that NumPy adds one after another, as the extension does."""
TWICE_NBYTES = 2**6
"""Row size in bytes below which checking for a duplicate takes longer than sending it."""
POOLED_NBYTES = 2**20
"""Size in bytes from which memory is pooled, because the kernel maps new memory page by page."""

_NOT_BUILT = "not built, for there was no C compiler"

Obstacle = tuple[bool, str]
"""Pair of a bool, which is True if the obstacle exists, and its description."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The implementation chosen for a part of a run, and the reason why no faster one applies."""

    way: str
    because: str = ""

    def __str__(self) -> str:
        return f"{self.way}, because {self.because}" if self.because else self.way


def choose(fast: str, slow: str, *obstacles: Obstacle, way: str = "") -> Decision:
    """Choose ``fast``, or ``slow`` if an obstacle exists or the fast path ``way`` is off."""
    if way and not fast_paths.is_on(way):
        return Decision(slow, f"-{way} switches it off")
    for stands, why in obstacles:
        if stands:
            return Decision(slow, why)
    return Decision(fast)


# --- acting and stepping --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """The traits that determine whether a policy's network can be called without TensorDicts."""

    kind: str
    """Name of the type."""
    is_module: bool
    """True for a `TensorDictModule`, but not for a subclass."""
    does_more: bool
    """True if the module was changed or hooked."""
    elsewhere: bool
    """True if the policy runs on its own device."""
    unseen: Sequence[Key]
    """Keys that the policy reads and that are not observations in the slab."""
    writes: Sequence[Key]
    actions: Sequence[Key]
    """Keys of the environment's actions."""
    central: bool = False
    """True if the policy is called in the parent of this worker."""


def acting(policy: PolicyTraits | None, *, fills_slab: bool, extra: Sequence[Key]) -> Decision:
    """Choose how actions are made: ``network``, ``module``, ``drawn`` or ``central``.

    ``network`` is a direct call of the policy's network, and ``module`` a call of the policy as
    given. ``drawn`` actions are random. ``central`` is a call of the policy in the parent, for
    lanes of all workers.

    Args:
        policy: traits of the policy; None if all actions are random.
        fills_slab: True if the environment writes observations to the slab.
        extra: keys that the policy writes and that become columns, in addition to the action.
    """
    if policy is None:
        return Decision("drawn")
    if policy.central:
        return Decision("central", 'policy_placement="central"')
    return choose(
        "network",
        "module",
        (not fills_slab, "the environment does not write to the slab"),
        (bool(extra), f"the policy writes {_listed(extra)} beside the action"),
        (policy.elsewhere, "policy_device= is not the environment's"),
        (not policy.is_module, f"the policy is a {policy.kind}, not a TensorDictModule"),
        (policy.does_more, "the policy's module was changed or hooked"),
        (
            bool(policy.unseen),
            f"the policy reads {_listed(policy.unseen)}, which is not an observation",
        ),
        (
            len(policy.actions) != 1 or [*policy.writes] != [*policy.actions],
            f"the policy writes {_listed(policy.writes)}, and the action is "
            f"{_listed(policy.actions)}",
        ),
        way="network",
    )


def masking(*, infos: bool, observations: bool) -> Decision:
    """Choose the source of masks for random actions: ``infos`` or ``observations``.

    Choose ``none`` if every value of the action space may be drawn.
    """
    if infos:
        return Decision("infos", "an action_mask is in the infos of the first reset")
    if observations:
        return Decision("observations", "an observation has an action_mask")
    return Decision("none", "no action_mask is an observation, or at the root of the first infos")


@dataclass(frozen=True, slots=True)
class VectorTraits:
    """The traits that determine whether we can step the lanes of a Gymnasium vector environment."""

    kind: str
    """Name of the type."""
    bare: bool
    """True for a `SyncVectorEnv` without a wrapper, but not for a subclass."""
    patched: bool
    """True if ``step`` or ``reset`` is not Gymnasium's, or if the lanes are stored differently."""
    known: bool
    """True if Gymnasium itself defines how to batch the observations and actions."""
    many_rewards: bool
    """True if a lane's reward is not a single number."""


def stepping_vector(vector: VectorTraits) -> Decision:
    """Choose how lanes are stepped: by us ``in turn``, or by the ``vector`` itself."""
    return choose(
        "in turn",
        "vector",
        (not vector.bare, f"the environment is a {vector.kind}, not a bare SyncVectorEnv"),
        (vector.patched, "the SyncVectorEnv was changed"),
        (not vector.known, "its observations or actions are of a space that is not Gymnasium's"),
        (vector.many_rewards, "a lane's reward is not a single number"),
        way="sequential",
    )


def stepping_wrapped(wrapped: Decision, inner: Decision, others: Sequence[str]) -> Decision:
    """Choose how wrapped lanes are stepped: in turn within the wrappers, or by the ``vector``.

    If lanes are stepped in turn, the decision is ``through`` for wrappers that only use rewards and
    ends, and ``within`` for any other wrappers.

    Args:
        wrapped: the decision for the wrapped environment, which is not a bare vector.
        inner: the decision for the vector inside the wrappers.
        others: wrappers that may use more than rewards and ends.
    """
    if inner.way != "in turn":
        return wrapped
    found = choose(
        "through",
        "within",
        (bool(others), f"a wrapper may look at more than rewards: {', '.join(others)}"),
        way="wrappers",
    )
    return Decision(found.way, found.because or wrapped.because)


def writing(*, single: bool, compiled: bool, looks_behind: bool, lost_finals: bool) -> Decision:
    """Choose how a step is written to its slot: ``at once``, or by ``columns``.

    Args:
        single: True if there is one column of actions, and one of rewards.
        compiled: True if the extension is used and supports the type of the rewards.
        looks_behind: True if groups of agents, contexts or skipped slots are read after each step.
        lost_finals: True if some final observations are lost and marked.
    """
    return choose(
        "at once",
        "columns",
        (not single, "actions or rewards are several columns"),
        (looks_behind, "groups of agents, contexts or skipped slots are read after a step"),
        (lost_finals, "some final observations are lost"),
        (not compiled, "the extension is not used, or a lane's reward is not a float"),
        way="step-write",
    )


def counting(*, ends_tell: bool, episodes: bool, several: bool = False) -> Decision:
    """Choose how the transitions of slots are counted: ``by ends`` or ``by lane``.

    Args:
        ends_tell: True if all slots are transitions, or all except the slots after an end.
        episodes: True if the budget counts episodes.
        several: True if several policies act, whose versions differ within a slot.
    """
    return choose(
        "by ends",
        "by lane",
        (several, "several policies act, each with its own version"),
        (episodes, "total_episodes= needs only the transitions of its episodes"),
        (not ends_tell, "the environment reports for each slot whether it is a transition"),
    )


# --- rows and storage -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoringTraits:
    """The traits that determine how the rows of a run get from the slab to a storage."""

    postproc: bool
    replay_buffer: bool
    storage: str
    """Type name of the storage that is written to directly; empty if there is none."""
    has_engine: bool
    """True if the extension writes to the storage's files."""
    stores_once: bool
    """True if the storage stores the frames of some columns once."""
    waits_for_disk: bool
    """True if ``durability="power"``."""
    elsewhere: Sequence[Key]
    """Columns that NumPy cannot represent, or that are on another device."""
    by_lane: str
    """The reason why slots are counted lane by lane; empty if they are not."""
    arrivals: bool
    """True if lanes return in any order."""
    extension: bool
    """True if the extension was built."""
    few_float_rewards: bool
    """True if a lane's rewards are one column of at most `FEW_REWARDS` float32 or float64."""
    surplus: str
    """The handling of surplus transitions of a call; empty if they start the next call."""
    counts_agents: bool
    """True if the budget counts agent transitions."""
    counts_ticks: bool
    """True if ``frame_skip`` is the key of a column."""
    follows_flags: bool
    """True if TorchRL's layout uses flags below the root."""
    resets_batches: bool
    """True if ``reset_at_each_iter=True``."""
    computed: Sequence[Key]
    """Columns that are computed in Python and not by the extension."""
    wide_bounds: bool
    """True if slots are too large to be compared with their spaces one by one."""
    slots_of_batch: int
    """Minimum number of slots of a batch."""
    yields_large: bool
    """True if columns with rows of 4 KiB and more are yielded."""
    arranged: str
    """The reason why a batch is not laid out in the order of stored rows; empty if it is."""


def placing(run: StoringTraits) -> Decision:
    """Choose the source of stored rows: the ``slab``, or ``gathered`` copies."""
    return choose(
        "slab",
        "gathered",
        (run.postproc, "postproc= is applied to them"),
        (run.replay_buffer, "replay_buffer= takes TensorDicts"),
        (bool(run.elsewhere), f"NumPy has no view of {_listed(run.elsewhere)} in the slab"),
    )


def batching(run: StoringTraits, placed: Decision, committed: Decision) -> Decision:
    """Choose how yielded batches are laid out.

    With ``one call``, the call that stores the rows also lays out the batch. Otherwise the batch is
    laid out later, from the ``slab`` or from ``gathered`` copies.
    """
    source = choose(
        "slab",
        "gathered",
        (placed.way != "slab", placed.because),
        (run.yields_large, "rows of 4 KiB and more are yielded; yield_large=False avoids that"),
        (
            run.slots_of_batch > FEW_SLOTS,
            f"a batch has {run.slots_of_batch:,} slots; above {FEW_SLOTS}, copying all of them "
            "together is faster",
        ),
        way="fast-collect",
    )
    if source.way == "gathered":
        return source
    return choose(
        "one call",
        "slab",
        (committed.way != "one call", committed.because or "there is no storage"),
        (bool(run.arranged), run.arranged),
    )


def committing(run: StoringTraits, placed: Decision) -> Decision:
    """Choose how a ``collect(n)`` of a few slots is stored.

    The rows are stored in ``one call``, stored as ``rows``, added to a ``buffer``, or not stored
    (``none``).
    """
    if not run.storage:
        return Decision("buffer" if run.replay_buffer else "none")
    return choose(
        "one call",
        "rows",
        (placed.way != "slab", placed.because),
        (not fast_paths.is_on("kernel"), "-kernel switches the extension off"),
        (not run.extension, f"the extension was {_NOT_BUILT}"),
        (bool(run.by_lane), run.by_lane),
        (run.arrivals, "lanes come back in any order"),
        (run.stores_once, "frames are stored once"),
        (not run.has_engine, f"a {run.storage} has no files that the extension writes to"),
        (run.waits_for_disk, 'durability="power" waits for the disk'),
        (
            not run.few_float_rewards,
            f"a lane's rewards are not one column of up to {FEW_REWARDS} float32 or float64",
        ),
        (bool(run.surplus), run.surplus),
        (run.counts_agents, 'budget_unit="agent_transitions"'),
        (run.counts_ticks, "frame_skip= is a column"),
        (run.follows_flags, "TorchRL's layout follows flags below the root"),
        (run.resets_batches, "reset_at_each_iter=True"),
        (bool(run.computed), f"{_listed(run.computed)}: computed in Python"),
        (run.wide_bounds, "slots are too large to be compared with their spaces at once"),
        way="fast-collect",
    )


def sending(*, one_memory: bool, arrivals: bool, nbytes: int) -> Decision:
    """Choose how often a worker that sends its rows sends each observation.

    An observation that ends one slot and starts the next is sent ``once`` or ``twice``.

    Args:
        one_memory: True if observations and next observations share memory.
        arrivals: True if lanes return in any order.
        nbytes: size in bytes of an observation of a lane.
    """
    if one_memory:
        return Decision("once")
    return choose(
        "once",
        "twice",
        (arrivals, "lanes come back in any order"),
        (nbytes < TWICE_NBYTES, f"an observation is smaller than {TWICE_NBYTES} bytes"),
        way="once",
    )


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunPlan(PageSource):
    """The decisions of a run: `SyncCollector.plan` and `MultiprocessCollector.plan`.

    When printed, it has one line per decision, with the reason why no faster implementation
    applies::

        acts     network
        steps    vector, because the environment is a NormalizeObservation, and no bare ...
    """

    acts: Decision
    """How actions are chosen: ``network``, ``module``, ``drawn``, ``central``."""
    steps: Decision
    """How lanes are stepped.

    It is ``in turn``, ``through`` or ``within`` wrappers, by the ``vector``, the ``system`` or the
    ``environment``, or ``arriving`` in any order.
    """
    writes: Decision
    """How a step is written to its slot: ``at once``, ``columns``, ``tensors``."""
    counts: Decision
    """How the transitions of slots are counted: ``by ends``, ``by lane``."""
    rows: Decision
    """The source of stored rows: ``slab``, ``gathered``."""
    batches: Decision
    """How yielded batches are laid out: in ``one call``, from the ``slab``, ``gathered``."""
    commits: Decision
    """How a ``collect`` of a few slots is stored: ``one call``, ``rows``, ``buffer``, ``none``."""
    extension: Decision
    """Use of the compiled C functions: ``yes``, ``no``."""
    sends: Decision = Decision("none")
    """How often an observation that ends one slot and starts the next is sent: ``once``, ``twice``.

    It is ``none`` unless a worker shares no memory with this process.
    """

    masks: Decision = Decision("none")
    """Source of masks for random actions: ``infos``, ``observations``, ``none``."""
    frames: Decision = Decision("none")
    """How the storage stores large observations: ``once``, ``whole``.

    The reason has the bytes a row, and the size of the full ring. It is ``none`` if the run has no
    storage on disk, or none with columns yet.
    """

    def __str__(self) -> str:
        names = [each.name for each in fields(self)]
        width = max(map(len, names))
        return "\n".join(f"{name:{width}}  {getattr(self, name)}" for name in names)

    def _show_on_(self, page: Page) -> None:
        rows = [(name, *each.values()) for name, each in self.as_json().items()]
        page.table(("part", "way", "because"), rows)

    def as_json(self) -> dict[str, dict[str, str]]:
        """Return the implementation and the reason of each decision, by name of the decision."""
        return {
            each.name: {"way": decision.way, "because": decision.because}
            for each in fields(self)
            for decision in [getattr(self, each.name)]
        }


def extension_used(*, built: bool) -> Decision:
    """Decide whether the extension is used."""
    return choose("yes", "no", (not built, f"it was {_NOT_BUILT}"), way="kernel")


def _listed(keys: Sequence[Key]) -> str:
    return ", ".join(map(format_key, keys)) or "nothing"
