"""Weights in the forms that TorchRL's ``update_policy_weights_`` accepts."""

from collections.abc import Mapping
from typing import Any

from torchrl.collectors import (
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from tallyroll.collector.compat import server_weights, transport_of
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.user_code import user_code

POLICY = "policy"
"""Name of the only model of a collector."""
_SCHEMES = (SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme)
_GETTERS = (MultiProcessedWeightUpdater, RemoteModuleWeightUpdater, VanillaWeightUpdater)


def one_of_forms(forms: Mapping[str, Any], model_id: str | None, weights_dict: Any) -> Any:
    """Return the weights from the one argument that was given; None without an argument."""
    given = {name: value for name, value in forms.items() if value is not None}
    if weights_dict is not None:
        if given or model_id is not None:
            raise ArgumentError(
                "weights_dict: expected no other argument, got model_id or other weights too. Pass "
                "weights_dict alone."
            )
        if set(weights_dict) != {POLICY}:
            raise ArgumentError(
                f"weights_dict: expected only weights of {POLICY!r}, got {sorted(weights_dict)}. "
                "A collector has no other model."
            )
        return weights_dict[POLICY]
    if model_id not in (None, POLICY):
        raise ArgumentError(
            f"model_id: expected {POLICY!r}, got {model_id!r}. A collector has no other model."
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


def checked_schemes(schemes: Any, *, many: bool) -> dict[str, Any]:
    """Return ``weight_sync_schemes``; refuse schemes that shared memory cannot replace.

    ``many`` is True if there are workers. The default is then a shared-memory scheme.
    """
    if schemes is None and many:
        return {POLICY: SharedMemWeightSyncScheme()}
    for name, scheme in dict(schemes or {}).items():
        of_each = getattr(scheme, "per_worker_weights", False)
        if name != POLICY or not isinstance(scheme, _SCHEMES) or of_each:
            raise ArgumentError(
                "weight_sync_schemes: expected a SharedMemWeightSyncScheme or a "
                f"MultiProcessWeightSyncScheme of {POLICY!r}, got {type(scheme).__name__} of "
                f"{name!r}. Leave weight_sync_schemes out: weights reach the workers through "
                "shared memory."
            )
    return dict(schemes or {})


def checked_updater(updater: Any, *, many: bool) -> Any:
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


def from_updater(updater: WeightUpdaterBase, weights: Any) -> Any:
    """Return the weights that ``updater`` would send to workers instead of ``weights``."""
    found = server_weights(updater, weights)
    if found is None and isinstance(updater, RemoteModuleWeightUpdater):
        raise ArgumentError(
            "update_policy_weights_: RemoteModuleWeightUpdater needs weights as an argument"
        )
    return found


KNOWN_TRANSPORTS = [*map(transport_of, (MultiProcessedWeightUpdater, RemoteModuleWeightUpdater))]
"""TorchRL transports that shared memory replaces."""
