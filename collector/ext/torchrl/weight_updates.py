"""Update a policy's weights under TorchRL's method names, and count the versions."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from tallyroll.collector.compat import call_post_hooks, transport_of
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.torchrl import weights as w
from tallyroll.collector.ext.torchrl.arguments import Wishes
from tallyroll.collector.ext.torchrl.iteration import BatchIteration
from tallyroll.collector.user_code import user_code


class WeightUpdates(BatchIteration):
    """Collector that accepts weights in all forms of TorchRL's collectors."""

    _waits_for_steps: ClassVar[bool] = True
    """True if new weights wait for a safe point of the thread.

    Each row then has the version that chose its action.
    """
    _weights_of: Any = None
    """Policy whose weights are used by default; None means the policy that acts."""

    def _take_over(self, wishes: Wishes) -> None:
        super()._take_over(wishes)
        many = self._many and isinstance(self.policy, nn.Module)
        self._weight_sync_schemes = w.checked_schemes(wishes.weight_sync_schemes, many=many)
        self.weight_updater = w.checked_updater(wishes.weight_updater, many=self._many)
        if self.weight_updater is not None:
            with user_code("weight_updater"):
                self.weight_updater.register_collector(self)

    def update_policy_weights_(  # type: ignore[override]
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Use new weights for every following action, and increment the version.

        Args:
            policy_or_weights, weights, policy, policy_weights: a TensorDict of parameters, a state
            dict or a module, passed as one of these arguments. None uses the current weights of the
                policy given at construction.
            worker_ids: must be None, because all workers receive the same weights.
            model_id, weights_dict: ``"policy"`` is the only model.
        """
        self._raise_of_thread()
        forms = {
            "policy_or_weights": policy_or_weights,
            "weights": weights,
            "policy": policy,
            "policy_weights": policy_weights,
        }
        taken = w.one_of_forms(forms, model_id, weights_dict)
        if worker_ids is not None:
            raise ArgumentError(
                "worker_ids: expected None, because all workers act with the weights that "
                "policy_version names"
            )
        background = self._background
        if background is None or not self._waits_for_steps:
            self._update(taken)
        else:
            background.perform(partial(self._update, taken))

    def _update(self, taken: Any) -> None:
        with user_code("update_policy_weights_"):
            self._take_weights(taken)

    def _take_weights(self, taken: Any) -> None:
        updater = self.weight_updater
        if updater is None:
            super().update_policy_weights_(self._weights_of if taken is None else taken)
        elif transport_of(updater) in w.KNOWN_TRANSPORTS:
            super().update_policy_weights_(w.from_updater(updater, taken))
            call_post_hooks(updater)
        else:
            updater(policy_or_weights=taken)
            super().update_policy_weights_()
        self._count_version()

    def _count_version(self) -> None:
        tracker = self.policy_version_tracker
        if tracker is not None and hasattr(tracker, "increment_version"):
            tracker.increment_version()

    def increment_version(self) -> None:
        """Increment the policy's version without changing its weights."""
        background = self._background
        if background is None or not self._waits_for_steps:
            self._increment()
        else:
            background.perform(self._increment)

    def _increment(self) -> None:
        if self._policy is not None:
            self._policy.version += 1
            self._announce()
        self._count_version()

    def _announce(self) -> None:
        """Announce the version to workers. A collector without workers has nothing to announce."""

    def get_policy_version(self) -> int:
        """Return the number of updates of the policy's weights; -1 if actions are random."""
        return self.policy_version

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call ``init`` of the weight updater, if there is one."""
        if self.weight_updater is not None:
            with user_code("weight_updater"):
                self.weight_updater.init(*args, **kwargs)

    @property
    def policy(self) -> Any:
        """The policy that acts, on its device; None if actions are random."""
        return None if self._policy is None else self._policy.module

    def get_model(self, model_id: str) -> Any:
        """Return the policy, which is the only model."""
        if model_id != w.POLICY:
            raise ArgumentError(f"model_id: expected {w.POLICY!r}, got {model_id!r}")
        return self.policy
