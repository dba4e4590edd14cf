"""The policy in the form that a rollout calls, and the versions of its weights."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.policies.action_forms import Form
from tallyroll.collector.policies.live_weights import LiveWeights
from tallyroll.collector.policies.plain_modules import Inputs, around
from tallyroll.collector.policies.sb3_models import Sb3Policy, as_policy
from tallyroll.collector.policies.tensor_copies import own_tensors, own_tensors_on
from tallyroll.collector.user_code import ENDS, user_code
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.transfers import move_batch, same_place

PolicyFn = Callable[[TensorDictBase], TensorDictBase]
Weights: TypeAlias = TensorDictBase | Mapping[str, Any] | nn.Module | None
_CPU = torch.device("cpu")


class Policy:
    """A policy on its device, and the version of its weights.

    Args:
        policy: a TensorDictModule, any callable from TensorDict to TensorDict, a module or a
            function of tensors, or a model of Stable-Baselines3.
        device: the device on which the policy is called. A module on another device is copied
            there, and :meth:`update_weights` refreshes the copy. None means the device of its
            tensors.
        env_device: the device of the actions; None means the CPU.
    """

    def __init__(
        self, policy: PolicyFn, device: torch.device | None, env_device: torch.device | None
    ) -> None:
        policy = as_policy(policy)
        if not callable(policy):
            raise ArgumentError(
                "policy: expected a TensorDictModule, a callable from TensorDict to TensorDict, or "
                f"None for random actions, got {type(policy).__name__}"
            )
        # A compiled module shares the weights of the original module.
        compiled, policy = policy, getattr(policy, "_orig_mod", policy)
        self.source = policy
        self.version = 0
        self._between_steps: Callable[[], None] | None = None
        self.refreshes = False
        """True if newer weights may arrive while slots are filled."""
        self.writes: tuple[Key, ...] = ()
        """Keys that the policy adds to its input, including the action."""
        self.batch_dims: dict[Key, int] = {}
        """Number of batch dimensions, after the lanes, of each nested TensorDict in the output."""
        self.forms: dict[Key, Form] = {}
        """Conversions of actions into the form that the environment takes, by key."""
        self.notes: list[str] = []
        """Warnings for users of the rows."""
        self.device = device = _place(policy, env_device) if device is None else device
        """The device of the policy's calls; None if inputs and outputs need no move."""
        self._move_back = _CPU if env_device is None else env_device
        self.is_elsewhere = False
        """True if another process acts and reports the version."""
        self.inputs: tuple[Inputs, Sequence[Key], int] | None = None
        """The arguments of :meth:`takes`; None if the policy takes a TensorDict."""
        self._live = LiveWeights(policy)
        module = on_device(policy, device)
        self.calls(module, compiled if module is policy else module)

    def calls(self, module: PolicyFn, called: PolicyFn | None = None) -> None:
        """Act with ``module``, which has the weights; if ``called`` is given, call it instead."""
        self.module = module
        self._called = called = module if called is None else called
        self.around = called if self.inputs is None else around(called, *self.inputs)
        """The called policy, from TensorDict to TensorDict."""

    def keep_copy(self) -> None:
        """Act with a copy of the given module, which changes only with new versions."""
        if self.module is self.source:
            called = copy_of(self._called)
            self.calls(getattr(called, "_orig_mod", called), called)

    def takes(self, inputs: Inputs, actions: Sequence[Key], more: int) -> None:
        """Call the policy with tensors; it returns ``actions`` followed by ``more`` other values.

        ``inputs`` are the keys of the tensors.
        """
        self.inputs = inputs, actions, more
        self.calls(self.module, self._called)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Choose actions for ``td``. The module gets a copy, which it may change and keep."""
        try:
            if self.device is None:
                return self.around(own_tensors(td))
            out = self.around(own_tensors_on(td, self.device))
        except ENDS as error:
            raise user_code.error("policy", error) from error
        return move_batch(out, self._move_back)

    def refresh(self) -> bool:
        """Load newer weights that were published elsewhere; return True if there were any."""
        before = self.version
        if self._between_steps is not None:
            self._between_steps()
        return self.version != before

    def record_output(
        self, writes: Sequence[Key], batch_dims: Mapping[Key, int], notes: Sequence[str]
    ) -> None:
        """Record the keys and batch dimensions of the output that a trial found.

        ``notes`` are further warnings for users of the rows.
        """
        self.writes, self.batch_dims = tuple(writes), dict(batch_dims)
        self.notes += notes

    def serve_between_steps(self, serve: Callable[[], None]) -> None:
        """Call ``serve`` before each action, so that it can load newer weights."""
        self._between_steps, self.refreshes = serve, True

    @property
    def row_version(self) -> Any:
        """Version for the rows of a slot; an array ``[lane]`` if several policies act by lane."""
        return self.version

    @property
    def draws(self) -> bool:
        """True if some actions are random even without ``init_random_frames``."""
        return False

    def seed(
        self, seed: int, incarnation: int, worker: int | None = None, *, own: bool = True
    ) -> None:
        """Seed the random streams of several policies; a single policy has no stream."""

    def update_weights(self, weights: Weights = None, policy_id: int | str | None = None) -> None:
        """Load new weights and increment the version.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes the current
                weights of the policy given at construction.
            policy_id: the policy to update, if there are several policies.
        """
        if policy_id is not None:
            raise ArgumentError(
                f"policy_id: expected None, because there is only one policy, got {policy_id!r}"
            )
        module = self.module
        if weights is not None:
            if not isinstance(module, nn.Module):
                raise ArgumentError(
                    "weights: the policy is a plain callable without weights to replace"
                )
            _load(module, weights)
        elif module is not self.source:
            assert isinstance(self.source, nn.Module) and isinstance(module, nn.Module)
            module.load_state_dict(self.source.state_dict())
            _load_fleeting(module, self.source)
        self.version += 1
        if self.acts_live:
            self._live.take()

    @property
    def acts_live(self) -> bool:
        """True if the object that the caller passed acts itself, so that changes to it count."""
        return self.module is self.source and not self.is_elsewhere

    def looks_unchanged(self, rows: int) -> bool:
        """Return True if live weights seem unchanged since the last batch of ``rows`` rows."""
        return not self.acts_live or self._live.looks_alike(rows)

    def changed_unversioned(self) -> bool:
        """Return True if live weights changed since the last call, but their version did not.

        The first call only records the weights. Signal handlers must not run during the call.
        """
        return self.acts_live and self._live.changed()

    def decrement_version(self, policy_id: int | str | None = None) -> None:
        """Decrement the version, after an update that reached no worker."""
        self.version -= 1

    def begin_at(self, version: int) -> None:
        """Raise the version to ``version`` if it is lower."""
        self.version = max(self.version, version)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, the buffers and the version."""
        module = self.module
        weights = module.state_dict() if isinstance(module, nn.Module) else {}
        return {"version": self.version, "weights": weights}

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Return the reason why a state does not fit this policy; None if it fits."""
        if "parts" in state:
            return f"the state is of the policies {state['ids']}, but this collector has one policy"
        return None

    def load_newer(self, state: Mapping[str, Any]) -> None:
        """Restore the weights of an earlier state, under a version that no weights have had."""
        newest = self.version
        self.load_state_dict(state)
        self.version = max(newest, self.version)
        self.update_weights()  # a version names one set of weights
        self._live.forget()  # a caller may load its module after this

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        for module in (self.module, self.source):
            if isinstance(module, nn.Module):
                module.load_state_dict(state["weights"])
        self.version = int(state["version"])
        self._live.forget()


def _load(module: nn.Module, weights: TensorDictBase | Mapping[str, Any] | nn.Module) -> None:
    """Load every parameter, and any given buffers, by name."""
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
    # Torch would load the tensors that fit before it raises.
    if wrong := [each for name in sorted(persistent) if (each := _misfit(name, now, state))]:
        raise ArgumentError(f"weights: {'; '.join(wrong)}")
    module.load_state_dict({name: state[name] for name in persistent}, strict=False)
    if isinstance(weights, nn.Module):
        _load_fleeting(module, weights)


def _load_fleeting(module: nn.Module, weights: nn.Module) -> None:
    """Load the non-persistent buffers of ``weights`` that have the same shape."""
    persistent, given = module.state_dict().keys(), dict(weights.named_buffers())
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            new = given.get(name)
            if name not in persistent and new is not None and new.shape == buffer.shape:
                buffer.copy_(new)


def _misfit(name: str, now: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    mine, theirs = now[name], new[name]
    if not isinstance(mine, torch.Tensor) or is_lazy(mine):
        return None
    if not isinstance(theirs, torch.Tensor):
        return f"{name}: expected a tensor, got {type(theirs).__name__}"
    if mine.shape != theirs.shape:
        return f"{name}: expected shape {list(mine.shape)}, got {list(theirs.shape)}"
    return None


def on_device(policy: PolicyFn, device: torch.device | None) -> PolicyFn:
    """Return ``policy``, or a copy on ``device`` if a tensor of it is on another device."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = (*policy.parameters(), *policy.buffers())
    if all(same_place(tensor.device, device) for tensor in tensors):
        return policy
    moved: PolicyFn = copy_of(policy).to(device)
    return moved


def copy_of(module: Any) -> Any:
    """Return a deep copy, in which weights of RNNs are contiguous on a GPU, as cuDNN requires."""
    copied = copy.deepcopy(module)
    if isinstance(copied, nn.Module):
        for each in copied.modules():
            if isinstance(each, nn.RNNBase):
                each.flatten_parameters()
    return copied


def _place(policy: PolicyFn, env_device: torch.device | None) -> torch.device | None:
    """Return the one device of a module's tensors; None if it is the environment's device.

    Return None for several devices too, and for a model of Stable-Baselines3, which moves inputs to
    its device itself.
    """
    if not isinstance(policy, nn.Module) or isinstance(policy, Sb3Policy):
        return None
    places = {tensor.device for tensor in (*policy.parameters(), *policy.buffers())}
    place = places.pop() if len(places) == 1 else None
    if place is None or same_place(place, _CPU if env_device is None else env_device):
        return None
    return place
