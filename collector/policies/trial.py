"""Trial of a policy: a copy is called once on a first observation, without side effects."""

import copy
import random
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from torchrl.data import Bounded

from tallyroll.collector.compat import accelerators_in_use, generator_states
from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.action_forms import form_of
from tallyroll.collector.policies.plain_modules import inputs_of, outputs_of, unnamed_argument
from tallyroll.collector.policies.policy import Policy, copy_of
from tallyroll.collector.slab.slab import SlabColumn
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.keys import COLLECTOR, NEXT, Key, as_key, format_key


class Acts(Protocol):
    """The actions for which a policy is tried: all actions of an environment, or a part of them."""

    @property
    def full_action_spec(self) -> Any:
        """The specs of the actions."""

    @property
    def batch_size(self) -> Any:
        """The shape of the lanes."""


def for_trial(policy: Policy) -> Policy:
    """Return a copy of ``policy`` whose calls have no side effects, if it can be copied."""
    probe = copy.copy(policy)
    try:
        module = copy_of(policy.module)
    except Exception:  # noqa: BLE001  without a copy, the policy itself is called
        return probe
    probe.calls(module)
    return probe


def settle_inputs(
    policy: Policy, td: TensorDictBase, env: Acts, observations: Collection[Key]
) -> None:
    """If ``policy`` takes tensors, determine its inputs and its number of outputs.

    ``observations`` are the observation keys of ``env`` that the policy may use.

    Raises:
        ArgumentError: the arguments of the policy are not observations.
        PolicyError: the policy returns fewer values than there are actions.
    """
    inputs = inputs_of(policy.module, observations)
    if inputs is None:
        return
    actions = [as_key(key) for key in env.full_action_spec.keys(True, True)]
    with generators_restored(), _noting_what_it_got(td):
        count = outputs_of(for_trial(policy).module, inputs, td)
    if count < len(actions):
        raise PolicyError(
            f"policy: expected values for {', '.join(map(format_key, actions))}, got {count} values"
        )
    policy.takes(inputs, actions, count - len(actions))


def try_out(
    policy: Policy, td: TensorDictBase, env: Acts, *, strict: bool = False
) -> dict[Key, SlabColumn]:
    """Call a copy of ``policy`` once on ``td``, and check its output.

    `Actor.put_column` checks later outputs; with several policies, `PolicyPart.__call__` and `put`
    in ``several/joint.py`` do.

    Random generators are restored, so that the trial does not change the data. If ``strict`` is
    True, numbers outside an action's box are refused too.

    Returns:
        The columns that the policy writes in addition to the action, in the order of its output.
        Names that begin with an underscore are private to the policy and are not included.

    Raises:
        PolicyError: the action is missing, or has another shape, dtype, device or range.
    """
    probe = for_trial(policy)
    try:
        with generators_restored(), _noting_what_it_got(td, policy):
            out = probe(td)
    except KeyError as error:
        known = sorted(format_key(as_key(key)) for key in td.keys(True, True))
        raise PolicyError(
            f"policy: {error.args[0]}; the input of the policy has the keys {known}"
        ) from error
    if not is_tensor_collection(out):
        hint = "" if policy.inputs else unnamed_argument(policy.module, _policy_inputs(td))
        raise no_tensordict(out, hint)
    actions = {as_key(key): spec for key, spec in env.full_action_spec.items(True, True)}
    for key, spec in actions.items():
        action = _action_of(policy, key, spec, out, td, len(env.batch_size))
        _check_action(key, spec, action, strict)
    lead, given = len(env.batch_size), {as_key(key) for key in td.keys(True)}
    batch_dims = batch_dims_of(out, lead)
    notes = [
        f"the policy writes {format_key(as_key(name))} as {type(value).__name__}, which no column "
        "can hold, so rows do not contain it"
        for name, value in out.items(True)
        if is_non_tensor(value) and as_key(name) not in given
    ]
    found = {as_key(name): value for name, value in out.items(True, True)}
    writes = tuple(key for key in found if key in actions or key not in given)
    policy.record_output(writes, batch_dims, notes)
    extra: dict[Key, SlabColumn] = {}
    for key in policy.writes:
        value = found[key]
        private = any(part.startswith("_") for part in key)  # as in TorchRL
        if key in actions or private or not isinstance(value, torch.Tensor):
            continue
        if value.shape[:lead] != env.batch_size:
            raise PolicyError(
                f"policy: {format_key(key)}: expected a shape that begins with the batch size "
                f"{list(env.batch_size)}, got {list(value.shape)}"
            )
        extra[key] = SlabColumn(value.dtype, tuple(value.shape[lead:]))
    return extra


def no_tensordict(got: object, hint: str = "") -> PolicyError:
    """Return the error for an output that is not a TensorDict; ``hint`` is one more sentence."""
    return PolicyError(
        f"policy: expected a TensorDict as result, got {type(got).__name__}. Return the tensordict "
        f"with the action set{f'. {hint}' if hint else ''}"
    )


_FLAGS = {"done", "terminated", "truncated"}


def _policy_inputs(td: TensorDictBase) -> dict[Key, torch.Tensor]:
    """Return the tensors in ``td`` that a policy may use."""
    found = {as_key(key): value for key, value in td.items(True, True)}
    return {
        key: value
        for key, value in found.items()
        if key[-1] not in _FLAGS and key[0] != COLLECTOR and isinstance(value, torch.Tensor)
    }


@contextmanager
def _noting_what_it_got(td: TensorDictBase, policy: Policy | None = None) -> Iterator[None]:
    """Add a note with the observations to errors of a policy that is called in the context.

    If a ``policy`` is given, the note explains why its argument is a TensorDict.
    """
    try:
        yield
    except Exception as error:
        given = _policy_inputs(td)
        columns = [
            f"{format_key(key)} {SlabColumn(value.dtype, tuple(value.shape))}"
            for key, value in given.items()
        ]
        note = f"tallyroll: raised by the policy, on the first {', '.join(columns)}"
        if any(value.dtype is torch.float64 for value in given.values()):
            note += "; rows keep the environment's float64, so call .float() in the policy"
        hint = "" if policy is None or policy.inputs else unnamed_argument(policy.module, given)
        if hint:
            note += f". {hint}"
        error.add_note(note)
        raise


def _action_of(
    policy: Policy, key: Key, spec: Any, out: TensorDictBase, td: TensorDictBase, lead: int
) -> torch.Tensor:
    """Return the action in ``out`` in the form that the environment takes.

    If this needs a conversion, add it to ``policy``.
    """
    action: Any = out.get(key, None)
    if action is None:
        got = sorted(format_key(name) for name in out.keys(True, True) if name not in td.keys(True))
        raise PolicyError(
            f"policy: expected the key {format_key(key)} in the output, got {got or 'no new key'}; "
            "set out_keys"
        )
    wanted = SlabColumn(spec.dtype, tuple(spec.shape))
    if not isinstance(action, torch.Tensor):
        raise PolicyError(
            f"policy: {format_key(key)} is {type(action).__name__}, expected {wanted}"
        )
    got_column = SlabColumn(action.dtype, tuple(action.shape))
    if wanted == got_column:
        return action
    form = form_of(key, action, spec, lead)
    if form is None:
        raise PolicyError(f"policy: {format_key(key)} is {got_column}, expected {wanted}")
    policy.forms[key] = form
    if form.note:
        policy.notes.append(form.note)
    return form(action)


def _check_action(key: Key, spec: Any, action: torch.Tensor, strict: bool) -> None:
    if spec.device is not None and action.device.type != spec.device.type:
        raise PolicyError(
            f"policy: {format_key(key)} is on {action.device}, expected {spec.device}; pass "
            "policy_device"
        )
    if action.is_floating_point() and not bool(torch.isfinite(action).all()):
        raise PolicyError(f"policy: {format_key(key)} is NaN or infinite for the first observation")
    may_leave = isinstance(spec, Bounded) and action.is_floating_point() and not strict
    if not may_leave and not spec.is_in(action):
        raise PolicyError(
            f"policy: {format_key(key)} is outside the action space at the first observation: "
            f"got {action.reshape(-1)[:8].tolist()}, expected {describe(spec)}"
        )


def describe(spec: Any) -> str:
    """Describe the range of a spec for messages."""
    if hasattr(spec, "n") and spec.shape[-1:] != (spec.n,):
        return f"0..{int(spec.n) - 1}"
    low, high = getattr(spec, "low", None), getattr(spec, "high", None)
    if low is not None and high is not None:
        form = "g" if low.dtype.is_floating_point else ""
        return f"{low.min().item():{form}}..{high.max().item():{form}}"
    return str(type(spec).__name__)


def next_keys(columns: Mapping[Key, SlabColumn]) -> list[Key]:
    """Return the columns that the policy writes under ``"next"``: recurrent states."""
    return [key for key in columns if key[0] == NEXT]


_here = threading.local()


def leave_generators() -> None:
    """Stop restoring generators in this thread, because other threads draw from them."""
    _here.left = True


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the global generators of torch, NumPy and Python after the context.

    The context does nothing in a thread that has called :func:`leave_generators`.
    """
    if getattr(_here, "left", False):
        yield
        return
    saved = np.random.get_state(), random.getstate()
    devices = accelerators_in_use()
    own, *of_devices = generator_states(devices)
    try:
        yield
    finally:
        torch.set_rng_state(own)
        for device, state in zip(devices, of_devices, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
        if not devices:  # generators first used in the context return to their initial state
            for device in accelerators_in_use():
                generator = torch.get_device_module(device).default_generators[device.index]
                generator.manual_seed(generator.initial_seed())
        np.random.set_state(saved[0])
        random.setstate(saved[1])
