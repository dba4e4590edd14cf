"""Detection of states that a policy writes to its TensorDict and reads in the next step."""

import warnings
from collections.abc import Mapping
from types import FunctionType

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import action_keys
from tallyroll.collector.policies.tensor_copies import own_tensors
from tallyroll.collector.policies.trial import for_trial, generators_restored
from tallyroll.storage.rows.keys import IS_INIT, NEXT, Key, as_key, format_key


def states(policy: Policy, td: TensorDictBase, env: EnvBase) -> tuple[Key, ...]:
    """Return the keys that the policy adds to ``td`` and whose values change its next output.

    A key under ``"next"`` is returned if the policy reads it at the root. The test calls copies of
    the policy on copies of ``td`` with restored generators: twice on the same input, and once with
    its output added. No states are found if the policy cannot be copied, is not repeatable, or
    refuses its own output.
    """
    apart = {*action_keys(env), *map(as_key, td.keys(True, True))}
    places = {key: _place(key) for key in policy.writes if _place(key) not in apart}
    if not places or not _leaves_no_trace(policy):
        return ()
    given = own_tensors(td)
    for name in list(given.keys(True, True)):
        if as_key(name)[-1] == IS_INIT:  # otherwise the policy would reset its state
            given.set(name, torch.zeros_like(given.get(name)))
    try:
        first = _called(policy, given, {})
        kept = {place: first[key] for key, place in places.items() if key in first}
        if not _same(first, _called(policy, given, {})):
            return ()
        after = _called(policy, given, kept)
    except Exception:  # noqa: BLE001  the run will report errors of the policy
        return ()
    if _same(first, after):
        return ()
    found = (key for key, place in places.items() if _matters(policy, given, kept, place, after))
    return tuple(found) or tuple(places)


def _leaves_no_trace(policy: Policy) -> bool:
    """Return True if extra calls have no side effects.

    This holds for a copy, and for a function without a closure.
    """
    module = policy.module
    return for_trial(policy).module is not module or (
        isinstance(module, FunctionType) and module.__closure__ is None
    )


def _matters(
    policy: Policy,
    given: TensorDictBase,
    kept: Mapping[Key, torch.Tensor],
    place: Key,
    after: Mapping[Key, torch.Tensor],
) -> bool:
    """Return True if the policy acts differently, or fails, without its value at ``place``."""
    others = {key: value for key, value in kept.items() if key != place}
    try:
        return not _same(after, _called(policy, given, others))
    except Exception:  # noqa: BLE001  the policy looked for the value
        return True


def _place(key: Key) -> Key:
    """Return the key under which the next step finds a value that was written under ``key``."""
    return key[1:] if key[0] == NEXT else key


def _called(
    policy: Policy, given: TensorDictBase, kept: Mapping[Key, torch.Tensor]
) -> dict[Key, torch.Tensor]:
    td = own_tensors(given)
    for key, value in kept.items():
        td.set(key, value.clone())
    with generators_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first trial issued these warnings
        out = for_trial(policy)(td)
    found = {key: out.get(key, None) for key in policy.writes}
    return {key: value.clone() for key, value in found.items() if isinstance(value, torch.Tensor)}


def _same(one: Mapping[Key, torch.Tensor], other: Mapping[Key, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (value.shape, value.dtype, value.device)
        == (other[key].shape, other[key].dtype, other[key].device)
        and bool(torch.isclose(value, other[key], rtol=0, atol=0, equal_nan=True).all())
        for key, value in one.items()
    )


def refuse_states(policy: Policy, td: TensorDictBase, env: EnvBase, in_place: bool) -> None:
    """Raise an error if states of ``policy`` would not be carried from step to step in each lane.

    Raises:
        PolicyError: the environment drops the states, or does not mark where a trajectory begins.
    """
    found = states(policy, td, env)
    known = {as_key(key)[-1] for key in env.observation_spec.keys(True, True)}
    if not found or (IS_INIT in known and not in_place and all(key[0] != NEXT for key in found)):
        return
    names = [format_key(key) for key in found]
    if any(key[0] == NEXT for key in found):
        raise PolicyError(
            f"the policy writes {names} and reads them in the next step, but no reset provides "
            "their first values. Add a primer to the environment: TransformedEnv(env, "
            "InitTracker(), TensorDictPrimer({...}))"
        )
    raise PolicyError(
        f"the policy writes {names} and reads them in the next step, but the environment does not "
        "mark where a trajectory begins. These states would be lost, or leak into the next "
        "trajectory. Add the key is_init to the environment: TransformedEnv(env, InitTracker())"
    )
