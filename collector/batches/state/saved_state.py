"""The state of a run that a later collector goes on from: made, checked and taken over."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tallyroll.collector.batches.state.run_setup import RunSetup
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import StateError
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.source import TransitionSource

_ENTRIES = {"ledger", "seed", "next_id", "open", "policy", "env", "generators"}


def saved_state(run: RunState, beginning: RunSetup, rollout: TransitionSource) -> dict[str, Any]:
    """Return the state of ``run``, with copies of all that a later step would change."""
    policy = beginning.policy
    state = None if policy is None else policy.state_dict()
    if state is not None and isinstance(policy, SeveralPolicies):
        # What waits for the next batch is discarded by the collector that goes on.
        waiting = rollout.drawn_ahead(policy.openings)
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
class Since:
    """Numbers of a run that only grow, as they were before its later rows were taken back."""

    first_row: int
    """The first row of the run in its storage."""
    incarnation: int = -1
    policy_version: int = -1


def take_state_over(
    state: Mapping[str, Any],
    run: RunState,
    beginning: RunSetup,
    rollout: TransitionSource,
    since: Since | None = None,
) -> None:
    """Let ``run``, which begins, and its ``rollout`` go on from the ``state`` of an earlier run.

    ``since`` is given where the storage was taken back to that state, so that it has its rows.

    Raises:
        StateError: the run has begun, or the state has other parts.
    """
    policy, ledger, stored_run = beginning.policy, run.ledger, run.writer.stored_run
    require_fit(state, run, beginning, resumed=since is not None)
    if since is not None:
        stored_run.continues(since.first_row)
    _go_on_counting(ledger, state, -1 if since is None else since.incarnation)
    first_id = max(int(state["next_id"]), stored_run.next_id())
    run.lanes = LaneState.fresh(run.lanes.lanes, first_id)
    beginning.seeds.seed(int(state["seed"]))
    beginning.envs.load(state["env"])
    if policy is not None:
        policy.load_state_dict(state["policy"])
        if since is not None and since.policy_version > policy.version:
            policy.begin_at(since.policy_version + 1)  # no number names two sets of weights
    beginning.seeds.load_generators(state["generators"])
    rollout.random_frames = beginning.random_frames
    rollout.restart_lanes(ledger)
    run.provenance = beginning.provenance(run.lanes)
    if since is not None and since.policy_version >= 0:
        run.provenance["after_version"] = since.policy_version
    stored_run.goes_on_from(ledger, run.provenance, first_id)
    if run.met:
        run.end()
    ledger.publish()


def require_fit(
    state: Mapping[str, Any], run: RunState, beginning: RunSetup, *, resumed: bool = False
) -> None:
    """Raise `StateError` unless ``run`` can go on from ``state``.

    ``resumed``: it may have been begun to be a run in its storage that goes on.
    """
    policy = beginning.policy
    if run.ledger.slots > (run.slots_before if resumed else 0):
        raise StateError(
            "load_state_dict: this collector has collected already"
            if run.ledger.slots > run.slots_before
            else "load_state_dict: this collector goes on with the run in its storage; to take "
            "rows and counts back to a state of it, use save_checkpoint and load_checkpoint"
        )
    missing = sorted(_ENTRIES - set(state))
    if missing:
        raise StateError(
            f"load_state_dict: expected what state_dict() returned, got a mapping without {missing}"
        )
    if state.get("shard") != shard_name(run):
        raise StateError(
            f"load_state_dict: the state is of {_shard(state.get('shard'))}, this collector is "
            f"{_shard(shard_name(run))}; each goes on from its own"
        )
    if (state["policy"] is None) != (policy is None):
        saved = "without" if state["policy"] is None else "with"
        raise StateError(
            f"load_state_dict: the state was saved {saved} a policy, this collector is the "
            "other way round"
        )
    if policy is not None and (why := policy.misfit(state["policy"])) is not None:
        raise StateError(f"load_state_dict: {why}; give the policies that it was saved with")


def shard_name(run: RunState) -> str | None:
    """Return the name of the shard that ``run`` is, ``"2/8"``; None: it is whole."""
    return None if run.options.part is None else str(run.options.part)


def _shard(name: object) -> str:
    return "a whole run" if name is None else f"shard {name!s:.40}"


def _go_on_counting(ledger: Ledger, state: Mapping[str, Any], incarnation: int) -> None:
    """Take the counts over, as of a run that was restarted: what waited is discarded."""
    ledger.load(state["ledger"])
    ledger.incarnation = max(ledger.incarnation, incarnation) + 1
    ledger.discarded += ledger.carried
    ledger.carried = 0
    ledger.episodes_cut += state["open"]
    ledger.check()
