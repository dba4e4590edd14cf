"""The policy as the rollout sees it: checked once on a copy, then only called."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.envs import EnvBase

from tallyroll.collector.errors import ArgumentError, PolicyError
from tallyroll.collector.policies.own_tensors import own_tensors, own_tensors_on, same_place
from tallyroll.collector.policies.sb3_models import as_policy
from tallyroll.collector.slab.slab import SlabColumn
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.keys import NEXT, Key, as_key, spell

PolicyFn = Callable[[TensorDictBase], TensorDictBase]
Weights: TypeAlias = TensorDictBase | Mapping[str, Any] | nn.Module | None


class Policy:
    """A policy on its device, and the version of its weights.

    Args:
        policy: a TensorDictModule, any callable from TensorDict to TensorDict, or a model of
            Stable-Baselines3.
        device: where it runs; a module elsewhere is copied there, and
            :meth:`update_weights` refreshes the copy. None: wherever it is.
        env_device: where actions are wanted.
    """

    def __init__(
        self, policy: PolicyFn, device: torch.device | None, env_device: torch.device | None
    ) -> None:
        policy = as_policy(policy)
        if not callable(policy):
            raise ArgumentError(
                "policy: expected a TensorDictModule, a callable from TensorDict to TensorDict, or "
                f"None for random actions; got {type(policy).__name__}"
            )
        if isinstance(policy, nn.Module) and not isinstance(policy, TensorDictModuleBase):
            raise ArgumentError(
                f"policy: {type(policy).__name__} is a plain nn.Module that takes tensors; wrap "
                "it in tensordict.nn.TensorDictModule(module, in_keys=[…], out_keys=[…])"
            )
        self.source = policy
        self.version = 0
        self.writes: tuple[Key, ...] = ()
        """What it adds to what it is given, the action among it."""
        self.batch_dims: dict[Key, int] = {}
        """Batch dimensions behind the lanes of the TensorDicts within what it returns."""
        self.device = device
        """Where it is called; None: wherever it is."""
        self._move_back = env_device
        self.module = on_device(policy, device)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Choose actions for ``td``, of which the module gets a copy to write to and to keep."""
        if self.device is None:
            return self.module(own_tensors(td))
        out = self.module(own_tensors_on(td, self.device))
        return out if self._move_back is None else out.to(self._move_back)

    def refresh(self) -> bool:
        """Take newer weights that were published elsewhere; whether there were any."""
        return False

    def update_weights(self, weights: Weights = None) -> None:
        """Take new weights and count a version up.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes those that
                the policy given at construction has now.
        """
        module = self.module
        if weights is not None:
            if not isinstance(module, nn.Module):
                raise ArgumentError("this policy is a plain callable: it has no weights to replace")
            _load(module, weights)
        elif module is not self.source:
            assert isinstance(self.source, nn.Module) and isinstance(module, nn.Module)
            module.load_state_dict(self.source.state_dict())
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """Weights, buffers and version."""
        module = self.module
        weights = module.state_dict() if isinstance(module, nn.Module) else {}
        return {"version": self.version, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        for module in (self.module, self.source):
            if isinstance(module, nn.Module):
                module.load_state_dict(state["weights"])
        self.version = int(state["version"])


def _load(module: nn.Module, weights: TensorDictBase | Mapping[str, Any] | nn.Module) -> None:
    """Load every parameter, and what buffers there are, by name."""
    state: Any = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if isinstance(state, TensorDictBase):
        state = dict(state.flatten_keys(".").items())
    if not isinstance(state, Mapping):
        raise ArgumentError(
            "weights: expected a TensorDict of parameters, a state dict or a module, got "
            f"{type(weights).__name__}"
        )
    now = module.state_dict()
    wanted = {name for name, _ in module.named_parameters()}
    known = wanted | {name for name, _ in module.named_buffers()} | set(now)
    unknown, missing = sorted(set(state) - known), sorted(wanted - set(state))
    if unknown or missing:
        raise ArgumentError(
            "weights: expected the parameters of the policy; "
            f"missing are {missing}, unknown are {unknown}"
        )
    persistent = now.keys() & state.keys()
    # Torch would load those that fit, and raise then.
    if wrong := [each for name in sorted(persistent) if (each := _misfit(name, now, state))]:
        raise ArgumentError(f"weights: {'; '.join(wrong)}")
    module.load_state_dict({name: state[name] for name in persistent}, strict=False)


def _misfit(name: str, now: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    mine, theirs = now[name], new[name]
    if not isinstance(mine, torch.Tensor) or is_lazy(mine):
        return None
    if not isinstance(theirs, torch.Tensor):
        return f"{name}: expected a tensor, got {type(theirs).__name__}"
    if mine.shape != theirs.shape:
        return f"{name}: expected shape {list(mine.shape)}, got {list(theirs.shape)}"
    return None


def for_trial(policy: Policy) -> Policy:
    """A copy of ``policy`` that can be called without a trace, where it can be copied."""
    probe = copy.copy(policy)
    try:
        probe.module = copy.deepcopy(policy.module)
    except Exception:  # noqa: BLE001  a policy may hold anything; then it is tried out itself
        probe.module = policy.module
    return probe


def try_out(policy: Policy, td: TensorDictBase, env: EnvBase) -> dict[Key, SlabColumn]:
    """Call a copy of ``policy`` once on ``td``, and check what it returns.

    Random generators are restored, so that the trial leaves no trace in the data.

    Returns:
        The columns that the policy writes beside the action, in its order.

    Raises:
        PolicyError: a missing action, or one of another shape, dtype, device or range.
    """
    probe = for_trial(policy)
    try:
        with generators_restored():
            out = probe(td)
    except KeyError as error:
        known = sorted(spell(as_key(key)) for key in td.keys(True, True))
        raise PolicyError(
            f"policy: {error.args[0]}; what it is given has the keys {known}"
        ) from error
    if not is_tensor_collection(out):
        raise no_tensordict(out)
    actions = {as_key(key): spec for key, spec in env.full_action_spec.items(True, True)}
    for key, spec in actions.items():
        _check_action(key, spec, out, td)
    lead, given = len(env.batch_size), {as_key(key) for key in td.keys(True)}
    policy.batch_dims = batch_dims_of(out, lead)
    found = {as_key(name): value for name, value in out.items(True, True)}
    policy.writes = tuple(key for key in found if key in actions or key not in given)
    extra: dict[Key, SlabColumn] = {}
    for key in policy.writes:
        value = found[key]
        if key in actions or not isinstance(value, torch.Tensor):
            continue
        if value.shape[:lead] != env.batch_size:
            raise PolicyError(
                f"policy: {spell(key)} has shape {list(value.shape)}, expected the batch size "
                f"{list(env.batch_size)} in front"
            )
        extra[key] = SlabColumn(value.dtype, tuple(value.shape[lead:]))
    return extra


def no_tensordict(got: object) -> PolicyError:
    """The error for a policy that returns something else."""
    return PolicyError(
        f"policy: expected a TensorDict back, got {type(got).__name__}; return the tensordict with "
        "the action set"
    )


def _check_action(key: Key, spec: Any, out: TensorDictBase, td: TensorDictBase) -> None:
    action = out.get(key, None)
    if action is None:
        got = sorted(spell(name) for name in out.keys(True, True) if name not in td.keys(True))
        raise PolicyError(
            f"policy: expected it to write {spell(key)}, got {got or 'no new key'}; set out_keys"
        )
    wanted = SlabColumn(spec.dtype, tuple(spec.shape))
    got_column = SlabColumn(action.dtype, tuple(action.shape))
    if wanted != got_column:
        raise PolicyError(f"policy: {spell(key)} is {got_column}, expected {wanted}")
    if spec.device is not None and action.device.type != spec.device.type:
        raise PolicyError(
            f"policy: {spell(key)} is on {action.device}, expected {spec.device}; pass "
            "policy_device"
        )
    if action.is_floating_point() and not bool(torch.isfinite(action).all()):
        raise PolicyError(f"policy: {spell(key)} holds NaN or infinity on the first observation")
    if not spec.is_in(action):
        raise PolicyError(
            f"policy: {spell(key)} lies outside the action space on the first observation: got "
            f"{action.reshape(-1)[:8].tolist()}, expected {describe(spec)}"
        )


def describe(spec: Any) -> str:
    """The range of a spec, in a few words."""
    if hasattr(spec, "n") and spec.shape[-1:] != (spec.n,):
        return f"0..{int(spec.n) - 1}"
    low, high = getattr(spec, "low", None), getattr(spec, "high", None)
    if low is not None and high is not None:
        form = "g" if low.dtype.is_floating_point else ""
        return f"{low.min().item():{form}}..{high.max().item():{form}}"
    return str(type(spec).__name__)


def next_keys(columns: Mapping[Key, SlabColumn]) -> list[Key]:
    """Columns that the policy writes under ``"next"``: recurrent states."""
    return [key for key in columns if key[0] == NEXT]


@contextmanager
def generators_restored() -> Iterator[None]:
    """Whatever is drawn inside, torch's, NumPy's and Python's global generators do not move."""
    saved = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            np.random.set_state(saved[0])
            random.setstate(saved[1])


def on_device(policy: PolicyFn, device: torch.device | None) -> PolicyFn:
    """``policy``, or a copy on ``device`` where some of it lies elsewhere."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = (*policy.parameters(), *policy.buffers())
    if all(same_place(tensor.device, device) for tensor in tensors):
        return policy
    moved: PolicyFn = copy.deepcopy(policy).to(device)
    return moved
