"""Save the state of a run, and continue from a saved state."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any
from weakref import WeakMethod

from tallyroll.collector.batches.state.run_setup import RunSetup
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.batches.state.saved_state import (
    MonotonicCounts,
    require_fit,
    restore_state,
    saved_state,
)
from tallyroll.collector.batches.stored.stored_run import StoredRun
from tallyroll.collector.errors import StateError, UserStopIteration
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.source import TransitionSource
from tallyroll.storage.stores.row_sink import RowSink


class Restart:
    """Saves the state of a run, and loads one before the run collects.

    Args:
        run: the state of the run.
        beginning: the set-up of the run, which has its seeds and its policy.
        rollout: the source of the run's transitions.
        publish: a method that sends the policy's weights to workers that act with copies.
    """

    def __init__(
        self,
        run: RunState,
        beginning: RunSetup,
        rollout: TransitionSource,
        publish: Callable[[], None],
    ) -> None:
        self._run, self._beginning, self._rollout = run, beginning, rollout
        self._publisher = WeakMethod(publish)  # does not keep the method's owner alive
        self.loads: list[int] = []
        """The number of stored transitions after each load of a state."""

    @property
    def storage(self) -> RowSink | None:
        """The storage that gets the rows, directly or through a replay buffer."""
        return self._run.writer.storage

    @property
    def stored_run(self) -> StoredRun:
        """The run in its storage."""
        return self._run.writer.stored_run

    @property
    def policies(self) -> list[object]:
        """The policies as the caller passed them; a random policy is None."""
        policy = self._beginning.policy
        if isinstance(policy, SeveralPolicies):
            return [None if each.policy is None else each.policy.source for each in policy.parts]
        return [None if policy is None else policy.source]

    def saved(self) -> dict[str, Any]:
        """Return the state, with copies of everything that a later step would change."""
        return saved_state(self._run, self._beginning, self._rollout)

    def require_fit(self, state: Mapping[str, Any], *, keep: bool) -> None:
        """Raise `StateError` unless the run can continue from ``state``; change nothing.

        ``keep`` is True if :meth:`keep` will load the state, so that the run continues after the
        rows in its storage.
        """
        require_fit(state, self._run, self._beginning, resumed=True)
        lanes, own = state.get("lanes"), self._run.lanes.lanes
        if lanes not in (None, own):
            raise StateError(
                f"the checkpoint is of a collector with {lanes} lanes, got one with {own}. Make "
                f"the collector with num_envs={lanes}, in any number of workers."
            )
        if keep and not self.stored_run.goes_on:
            raise StateError(
                'rows="keep": expected a collector that continues the run in its storage. Make the '
                "collector with resume=True."
            )
        self._try(state)

    def _try(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` unless policy and environments can load ``state``; change nothing."""
        policy, envs = self._beginning.policy, self._beginning.envs
        of_envs = deepcopy(envs.state())
        of_policy = {} if policy is None else deepcopy(policy.state_dict())
        name = "the policy"
        try:
            if policy is not None:
                policy.load_state_dict(state["policy"])
            name = "the environment"
            envs.load(state["env"])
        except UserStopIteration:
            raise
        except Exception as error:  # torch, transforms and user code raise many kinds
            raise StateError(
                f"{name} cannot load the saved state: {error}. Rows and counts are unchanged. "
                "Construct the object with the arguments that the saved object had."
            ) from error
        finally:
            if policy is not None:
                policy.load_state_dict(of_policy)
            if name != "the policy":
                envs.load(of_envs)

    def go_on_from(self, state: Mapping[str, Any], since: MonotonicCounts | None = None) -> None:
        """Load counts, ids, seeds, policy and generators; see `restore_state`."""
        restore_state(state, self._run, self._beginning, self._rollout, since)
        self.loads.append(self._run.ledger.stored)
        self._publish()

    def keep(self, state: Mapping[str, Any]) -> None:
        """Load only policy and transforms; counts, ids and seeds continue after the newest row."""
        policy = self._beginning.policy
        self._beginning.envs.load(state["env"])
        if policy is not None:
            policy.load_newer(state["policy"])
            self._publish()

    def _publish(self) -> None:
        if (publish := self._publisher()) is not None:
            publish()
