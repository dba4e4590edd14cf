"""The plan of a run: which way each part of it goes, and why not a faster one.

All conditions that are known when a run begins are here, and nowhere else: each function takes the
traits of environment, policy, storage and options as plain values, and chooses. Conditions that
change while it runs are asked where they change; they are few:

* a policy's module is hooked or changed, or newer weights arrive (`bare_call`, `Rollout.fill`);
* someone replaces the step of a vector environment (`SequentialStep.are_alone`);
* a value outside its space was let pass, so that bounds are others (`RangeChecks.eased`);
* final observations are not judged yet (`FinalsWatch.curious`);
* a call asks for more than few slots, or for other than whole ones (`FastCollect.collect`);
* random actions at the beginning of a run are over (`Rollout.make_ready`);
* the budget ends, the run was stopped, or the storage was closed (`FastCollect.collect`);
* the extension finds other arrays than it knows, a full file or a lost lock (`store_slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tallyroll.storage import fast_paths
from tallyroll.storage.rows.keys import Key, format_key

FEW_SLOTS = 4
"""Most slots that are numbered and checked one by one, which is faster for so few."""
FEW_REWARDS = 7
"""Most rewards of a lane that NumPy adds up one after the other, as the extension does."""
TWICE_NBYTES = 2**6
"""The size of a row below which looking whether it came costs more than sending it again."""
POOLED_NBYTES = 2**20
"""The size from which memory is pooled: the kernel would give it page by page, each time."""

_NOT_BUILT = "not built, for there was no C compiler"

Obstacle = tuple[bool, str]
"""Whether an obstacle is there, and the words that say so."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The way that a part of a run goes, and why it is not a faster one."""

    way: str
    because: str = ""

    def __str__(self) -> str:
        return f"{self.way}, because {self.because}" if self.because else self.way


def choose(fast: str, slow: str, *obstacles: Obstacle, way: str = "") -> Decision:
    """Choose ``fast`` unless ``way``, if there is one, is switched off or an obstacle is there."""
    if way and not fast_paths.is_on(way):
        return Decision(slow, f"-{way} switches it off")
    for stands, why in obstacles:
        if stands:
            return Decision(slow, why)
    return Decision(fast)


# --- how actions are chosen, and lanes stepped ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """A policy, as far as calls of its network without TensorDicts depend on it."""

    kind: str
    """Its type's name."""
    is_module: bool
    """True for a `TensorDictModule` itself, and no subclass."""
    does_more: bool
    """True if its module was changed or hooked."""
    elsewhere: bool
    """True if it is called on a device of its own."""
    unseen: Sequence[Key]
    """Keys that the policy reads and that are no observations in the slab."""
    writes: Sequence[Key]
    actions: Sequence[Key]
    """Keys of the environment's actions."""
    central: bool = False
    """True if it is called in the parent of this worker."""


def acting(policy: PolicyTraits | None, *, fills_slab: bool, extra: Sequence[Key]) -> Decision:
    """Choose the actor: ``network``, ``module`` (the policy as it is), or ``drawn`` at random.

    ``central`` is the policy in the parent, for lanes of all workers.

    Args:
        policy: None draws random actions.
        fills_slab: the environment writes to the slab what policies see.
        extra: keys that the policy writes and that become columns, beside the action.
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
        (not policy.is_module, f"the policy is a {policy.kind}, and no TensorDictModule"),
        (policy.does_more, "the policy's module was changed or hooked"),
        (bool(policy.unseen), f"the policy reads {_listed(policy.unseen)}, no observation"),
        (
            len(policy.actions) != 1 or [*policy.writes] != [*policy.actions],
            f"the policy writes {_listed(policy.writes)}, and the action is "
            f"{_listed(policy.actions)}",
        ),
        way="network",
    )


def masking(*, infos: bool, observations: bool) -> Decision:
    """Choose where random actions find which values are legal: ``infos``, ``observations``.

    ``none`` where every value of the action space may be drawn.
    """
    if infos:
        return Decision("infos", "an action_mask is in the infos of the first reset")
    if observations:
        return Decision("observations", "an observation has an action_mask")
    return Decision("none", "no action_mask is an observation, or at the root of the first infos")


@dataclass(frozen=True, slots=True)
class VectorTraits:
    """A Gymnasium vector environment, as far as stepping its lanes ourselves depends on it."""

    kind: str
    """Its type's name."""
    bare: bool
    """True for a `SyncVectorEnv` itself, without a wrapper, and no subclass."""
    patched: bool
    """True if ``step`` or ``reset`` is not Gymnasium's, or its lanes are kept differently."""
    known: bool
    """True if Gymnasium itself says how observations and actions are put together."""
    many_rewards: bool
    """A lane's reward is no single number."""


def stepping_vector(vector: VectorTraits) -> Decision:
    """Choose how lanes are stepped: ``in turn`` by us, or by the ``vector`` itself."""
    return choose(
        "in turn",
        "vector",
        (not vector.bare, f"the environment is a {vector.kind}, and no bare SyncVectorEnv"),
        (vector.patched, "the SyncVectorEnv was changed"),
        (not vector.known, "its observations or actions are of a space that is not Gymnasium's"),
        (vector.many_rewards, "a lane's reward is no single number"),
        way="sequential",
    )


def stepping_wrapped(wrapped: Decision, inner: Decision, others: Sequence[str]) -> Decision:
    """Choose how wrappers are stepped: lanes in turn within them, or all by the ``vector``.

    That is ``through`` wrappers that look at rewards and ends alone, or ``within`` any.

    Args:
        wrapped: the decision for the wrappers, which are no bare vector.
        inner: the decision for the vector in them.
        others: wrappers that may look at more.
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
        single: there is one column of actions, and one of rewards.
        compiled: the extension is used, and knows rewards of their kind.
        looks_behind: groups of agents, contexts or skipped slots are looked at after each step.
        lost_finals: some final observations are lost, and marked.
    """
    return choose(
        "at once",
        "columns",
        (not single, "actions or rewards are several columns"),
        (looks_behind, "more than observations, rewards and ends is looked at after a step"),
        (lost_finals, "some final observations are lost"),
        (not compiled, "the extension is not used, or a lane's reward is no float"),
        way="step-write",
    )


def counting(*, ends_tell: bool, episodes: bool, several: bool = False) -> Decision:
    """Choose how the transitions of slots are counted: ``by ends``, ``by lane``.

    Args:
        ends_tell: all slots are transitions, or all but the one after an end.
        episodes: the budget is one of episodes.
        several: several policies act, whose versions differ within a slot.
    """
    return choose(
        "by ends",
        "by lane",
        (several, "several policies act, each with a version of its own"),
        (episodes, "total_episodes= wants those of its episodes alone"),
        (not ends_tell, "the environment says of each slot whether it is a transition"),
    )


# --- where rows are, and how they are stored ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoringTraits:
    """A run, as far as the way of its rows from the slab to a storage depends on it."""

    postproc: bool
    replay_buffer: bool
    storage: str
    """The type's name of the storage that is written to directly; empty: there is none."""
    has_engine: bool
    """The extension writes to its files."""
    waits_for_disk: bool
    """``durability="power"``."""
    elsewhere: Sequence[Key]
    """Columns that NumPy cannot hold, or that are on another device."""
    by_lane: str
    """Why slots are counted lane by lane; empty where they are not."""
    arrivals: bool
    """Lanes come back in any order."""
    extension: bool
    """The extension was built."""
    few_float_rewards: bool
    """A lane's rewards are one column of at most `FEW_REWARDS` float32 or float64."""
    surplus: str
    """The fate of transitions that a call does not want; empty: they open the next one."""
    counts_agents: bool
    """The budget is one of agent transitions."""
    counts_ticks: bool
    """``frame_skip`` is the key of a column."""
    follows_flags: bool
    """TorchRL's layout follows flags below the root."""
    resets_batches: bool
    """``reset_at_each_iter=True``."""
    computed: Sequence[Key]
    """Columns that Python computes, and the extension does not."""
    wide_bounds: bool
    """Rows of a slot are too many bytes to be compared with their space one slot at a time."""
    slots_of_batch: int
    """Slots that a batch takes, at least."""
    yields_large: bool
    """Columns of rows of 4 KiB and more are yielded."""
    arranged: str
    """A reason that a batch is not laid out as its rows are stored; empty: there is none."""


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

    In the ``one call`` that stores them, later from the ``slab``, or from ``gathered`` copies.
    """
    source = choose(
        "slab",
        "gathered",
        (placed.way != "slab", placed.because),
        (run.yields_large, "rows of 4 KiB and more are yielded; yield_large=False spares that"),
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
    """Choose how ``collect(n)`` of few slots is stored.

    In ``one call``, or as ``rows``; to a ``buffer``, or nowhere (``none``).
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
    """Choose how often an observation comes from a worker that sends its rows.

    ``once``, although it ends one slot and begins the next, or ``twice``.

    Args:
        one_memory: observations and next observations are the same memory.
        arrivals: lanes come back in any order.
        nbytes: the size of an observation of a lane.
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


# --- all of it ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The decisions of a run, as `SyncCollector.plan` and `MultiprocessCollector.plan` give them.

    Printed it is a line a decision, with the reason why it is not a faster one::

        acts     network
        steps    vector, because the environment is a NormalizeObservation, and no bare ...
    """

    acts: Decision
    """The chooser of actions: ``network``, ``module``, ``drawn``."""
    steps: Decision
    """Stepping of lanes: ``in turn``, ``through`` or ``within`` wrappers, by the ``vector`` or
    ``system``, ``arriving``, by the ``environment``."""
    writes: Decision
    """Writing of a step to its slot: ``at once``, ``columns``, ``tensors``."""
    counts: Decision
    """Counting of the transitions of slots: ``by ends``, ``by lane``."""
    rows: Decision
    """The source of stored rows: ``slab``, ``gathered``."""
    batches: Decision
    """Laying out of yielded batches: in ``one call``, from the ``slab``, ``gathered``."""
    commits: Decision
    """Storing of a ``collect`` of few slots: ``one call``, ``rows``, ``buffer``, ``none``."""
    extension: Decision
    """Use of functions compiled in C: ``yes``, ``no``."""
    sends: Decision = Decision("none")
    """Observations that end a slot and begin the next, from workers without memory in common with
    this process: they come ``once``, ``twice``; ``none`` are sent where there is no such worker."""

    masks: Decision = Decision("none")
    """Masks of legal actions to which random actions keep: of ``infos``, ``observations``."""

    def __str__(self) -> str:
        names = [each.name for each in fields(self)]
        width = max(map(len, names))
        return "\n".join(f"{name:{width}}  {getattr(self, name)}" for name in names)

    def as_json(self) -> dict[str, dict[str, str]]:
        """Return the way and the reason of each decision, by its name."""
        return {
            each.name: {"way": decision.way, "because": decision.because}
            for each in fields(self)
            for decision in [getattr(self, each.name)]
        }


def extension_used(*, built: bool) -> Decision:
    """Whether the extension is used."""
    return choose("yes", "no", (not built, f"it was {_NOT_BUILT}"), way="kernel")


def _listed(keys: Sequence[Key]) -> str:
    return ", ".join(map(format_key, keys)) or "nothing"
