"""Save the state of a run, check it, and load it into a later collector."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tallyroll.collector.batches.state.run_setup import RunSetup
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import StateError
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.source import TransitionSource

_ENTRIES = {"ledger", "seed", "next_id", "open", "policy", "env", "generators"}


def saved_state(run: RunState, beginning: RunSetup, rollout: TransitionSource) -> dict[str, Any]:
    """Return the state of ``run``, with copies of everything that a later step would change."""
    policy = beginning.policy
    state = None if policy is None else policy.state_dict()
    if state is not None and isinstance(policy, SeveralPolicies):
        # The collector that continues discards the transitions that wait for the next batch.
        waiting = rollout.undelivered_random(policy.openings)
        state["openings"] = (policy.openings.left + waiting).tolist()
    return {
        "ledger": run.ledger.snapshot().counts(),
        "seed": run.ledger.seed,
        "lanes": run.lanes.lanes,
        "shard": shard_name(run),
        "next_id": run.lanes.next_id,
        "open": int(run.lanes.open.sum()),
        "policy": state,
        "env": beginning.envs.state(),
        "generators": beginning.seeds.generators(),
    }


@dataclass(frozen=True)
class MonotonicCounts:
    """Numbers of a run that never decrease, as they were before a rewind removed its later rows."""

    first_row: int
    """The first row of the run in its storage."""
    incarnation: int = -1
    policy_version: int = -1


def restore_state(
    state: Mapping[str, Any],
    run: RunState,
    beginning: RunSetup,
    rollout: TransitionSource,
    since: MonotonicCounts | None = None,
) -> None:
    """Let a new ``run`` and its ``rollout`` continue from the ``state`` of an earlier run.

    ``since`` is given if the storage was rewound to that state, so that it has the rows of the
    state.

    Raises:
        StateError: the run has already collected, or the state does not fit the run.
    """
    policy, ledger, stored_run = beginning.policy, run.ledger, run.writer.stored_run
    require_fit(state, run, beginning, resumed=since is not None)
    if since is not None:
        stored_run.continues(since.first_row)
    _go_on_counting(ledger, state, -1 if since is None else since.incarnation)
    first_id = max(int(state["next_id"]), stored_run.next_id())
    run.number_from(first_id)
    beginning.seeds.seed(int(state["seed"]))
    beginning.envs.load(state["env"])
    if policy is not None:
        policy.load_state_dict(state["policy"])
        if since is not None and since.policy_version > policy.version:
            policy.begin_at(since.policy_version + 1)  # a version names one set of weights
    beginning.seeds.load_generators(state["generators"])
    # The protocol declares this attribute, so that third-party sources have it too.
    rollout.random_frames = beginning.random_frames
    rollout.restart_lanes(ledger)
    provenance = beginning.provenance(run.lanes)
    if since is not None and since.policy_version >= 0:
        provenance["after_version"] = since.policy_version
    run.replace_provenance(provenance)
    stored_run.goes_on_from(ledger, run.provenance, first_id)
    if run.met:
        run.end()
    ledger.publish()


def require_fit(
    state: Mapping[str, Any], run: RunState, beginning: RunSetup, *, resumed: bool = False
) -> None:
    """Raise `StateError` unless ``run`` can continue from ``state``.

    ``resumed`` is True if ``run`` may continue the run in its storage.
    """
    policy = beginning.policy
    if run.ledger.slots > (run.slots_before if resumed else 0):
        raise StateError(
            "load_state_dict: this collector has already collected. Load the state into a new "
            "collector."
            if run.ledger.slots > run.slots_before
            else "load_state_dict: this collector continues the run in its storage. To rewind rows "
            "and counts to a saved state, use save_checkpoint and load_checkpoint."
        )
    missing = sorted(_ENTRIES - set(state))
    if missing:
        raise StateError(
            f"load_state_dict: expected the result of state_dict(), got a mapping without {missing}"
        )
    if state.get("shard") != shard_name(run):
        raise StateError(
            f"load_state_dict: the state is of {_shard(state.get('shard'))}, but this collector is "
            f"{_shard(shard_name(run))}. Load the state of the same shard."
        )
    if (state["policy"] is None) != (policy is None):
        saved = "without" if state["policy"] is None else "with"
        raise StateError(
            f"load_state_dict: the state was saved {saved} a policy, unlike the state of this "
            "collector. Make both collectors with a policy, or both without."
        )
    if policy is not None and (why := policy.misfit(state["policy"])) is not None:
        raise StateError(
            f"load_state_dict: {why}. Use the policies with which the state was saved."
        )


def shard_name(run: RunState) -> str | None:
    """Return the name of the shard that ``run`` is, such as ``"2/8"``; None for a whole run."""
    return None if run.options.part is None else str(run.options.part)


def _shard(name: object) -> str:
    return "a whole run" if name is None else f"shard {name!s:.40}"


def _go_on_counting(ledger: Ledger, state: Mapping[str, Any], incarnation: int) -> None:
    """Load the counts as for a restarted run, and count its waiting transitions as discarded."""
    ledger.load(state["ledger"])
    counts = ledger.counts()
    counts["incarnation"] = max(counts["incarnation"], incarnation) + 1
    counts["discarded"] += counts["carried"]
    counts["carried"] = 0
    counts["episodes_cut"] += state["open"]
    ledger.load(counts)
    ledger.check()
