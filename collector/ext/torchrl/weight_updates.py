"""Update a policy's weights under TorchRL's method names, and count the versions."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torchrl.collectors import (
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from tallyroll.collector.compat import call_post_hooks, server_weights, transport_of
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.torchrl.arguments import Wishes
from tallyroll.collector.ext.torchrl.iteration import BatchIteration
from tallyroll.collector.user_code import user_code

_POLICY = "policy"
"""Name of the only model of a collector."""
_SCHEMES = (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme)
_GETTERS = (MultiProcessedWeightUpdater, RemoteModuleWeightUpdater, VanillaWeightUpdater)
_KNOWN_TRANSPORTS = [*map(transport_of, (MultiProcessedWeightUpdater, RemoteModuleWeightUpdater))]
"""TorchRL transports that shared memory replaces."""


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
        self._weight_sync_schemes = _checked_schemes(wishes.weight_sync_schemes, many=many)
        self.weight_updater = _checked_updater(wishes.weight_updater, many=self._many)
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
        taken = _one_of_forms(forms, model_id, weights_dict)
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
        elif transport_of(updater) in _KNOWN_TRANSPORTS:
            super().update_policy_weights_(_from_updater(updater, taken))
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
        if model_id != _POLICY:
            raise ArgumentError(f"model_id: expected {_POLICY!r}, got {model_id!r}")
        return self.policy


def _one_of_forms(forms: Mapping[str, Any], model_id: str | None, weights_dict: Any) -> Any:
    """Return the weights from the one argument that was given; None without an argument."""
    given = {name: value for name, value in forms.items() if value is not None}
    if weights_dict is not None:
        if given or model_id is not None:
            raise ArgumentError(
                "weights_dict: expected no other argument, got model_id or other weights too. Pass "
                "weights_dict alone."
            )
        if set(weights_dict) != {_POLICY}:
            raise ArgumentError(
                f"weights_dict: expected only weights of {_POLICY!r}, got {sorted(weights_dict)}. "
                "A collector has no other model."
            )
        return weights_dict[_POLICY]
    if model_id not in (None, _POLICY):
        raise ArgumentError(
            f"model_id: expected {_POLICY!r}, got {model_id!r}. A collector has no other model."
        )
    if len(given) > 1:
        raise ArgumentError(f"expected weights in one argument, got {sorted(given)}")
    taken = next(iter(given.values()), None)
    if isinstance(taken, dict) and taken and all(isinstance(key, int) for key in taken):
        raise ArgumentError(
            "weights: expected one set for all workers, got one set per worker. All rows of a run "
            "come from one policy."
        )
    return taken


def _checked_schemes(schemes: Any, *, many: bool) -> dict[str, Any]:
    """Return ``weight_sync_schemes``; refuse schemes that shared memory cannot replace.

    ``many`` is True if there are workers. The default is then a shared-memory scheme.
    """
    if schemes is None and many:
        return {_POLICY: SharedMemWeightSyncScheme()}
    for name, scheme in dict(schemes or {}).items():
        of_each = getattr(scheme, "per_worker_weights", False)
        if name != _POLICY or not isinstance(scheme, _SCHEMES) or of_each:
            raise ArgumentError(
                "weight_sync_schemes: expected a SharedMemWeightSyncScheme or a "
                f"MultiProcessWeightSyncScheme of {_POLICY!r}, got {type(scheme).__name__} of "
                f"{name!r}. Leave weight_sync_schemes out: weights reach the workers through "
                "shared memory."
            )
    return dict(schemes or {})


def _checked_updater(updater: Any, *, many: bool) -> Any:
    """Return ``weight_updater``, or the updater that it makes; refuse an unsupported updater."""
    if updater is not None and not isinstance(updater, WeightUpdaterBase) and callable(updater):
        with user_code("weight_updater"):
            updater = updater()
    if updater is None:
        return None
    if not isinstance(updater, WeightUpdaterBase):
        raise ArgumentError(
            "weight_updater: expected a WeightUpdaterBase or a function that makes one, got "
            f"{type(updater).__name__}"
        )
    if many and transport_of(updater) not in [transport_of(each) for each in _GETTERS]:
        raise ArgumentError(
            f"weight_updater: {type(updater).__name__} sends weights by its own transport, but "
            "Tallyroll's workers do not read from it. Give a "
            "MultiProcessedWeightUpdater(get_server_weights=…), or pass weights to "
            "update_policy_weights_."
        )
    return updater


def _from_updater(updater: WeightUpdaterBase, weights: Any) -> Any:
    """Return the weights that ``updater`` would send to workers instead of ``weights``."""
    found = server_weights(updater, weights)
    if found is None and isinstance(updater, RemoteModuleWeightUpdater):
        raise ArgumentError(
            "update_policy_weights_: RemoteModuleWeightUpdater needs weights as an argument"
        )
    return found
