"""Detection of weights that change without a new version of the policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tallyroll.collector.compat import places_in, version_of

_LEAST = 4
"""Minimum number of tensors that a call compares. Comparing them takes about a microsecond."""


class LiveWeights:
    """The parameters of a policy that acts with live weights, and their versions in torch.

    Detection is best effort. Writes through ``Tensor.data`` change no version of a tensor. Modules
    are found if the policy is a module, is a bound method of a module, or closes over a module.
    Buffers are ignored, because normalization statistics change by themselves. Frozen parameters
    with a single value, such as an annealed epsilon, are ignored too. If any parameter is trained,
    all frozen parameters are ignored.

    No method raises: a policy may be any object.

    Args:
        policy: the policy as its caller passed it.
    """

    def __init__(self, policy: object) -> None:
        self._policy = policy
        self._known = False
        """True if there is a state to compare with."""
        self._links: list[tuple[dict[str, Any], str, Any]] = []
        """Entries of modules and parameters in their parents, as (dictionary, name, object)."""
        self._tensors: list[tuple[torch.Tensor, int, int]] = []
        """The parameters, each with its version and address."""
        self._values: list[torch.Tensor] = []
        """Aliases of the parameters, which keep the values of a replaced parameter."""
        self._at = 0

    def forget(self) -> None:
        """Drop the state, so that the next :meth:`changed` only records a new one."""
        if self._known:
            self._known = False
            self._links, self._tensors, self._values = [], [], []

    def take(self) -> None:
        """Record the current state, with which later calls compare the weights."""
        try:
            if not self._known or not self._take_again():
                self._take()
        except Exception:  # noqa: BLE001  the policy may be any object
            self.forget()
        self._known = True

    def changed(self) -> bool:
        """Return True if parameters changed since the recorded state, and record the new one.

        Exceptions of the policy's objects are ignored, so signal handlers must not run during the
        call.
        """
        found = False
        if self._known:
            with suppress(Exception):
                found = self._differs()
        self.take()
        return found

    def looks_alike(self, rows: int) -> bool:
        """Return True if no compared parameter changed its version, address or place.

        If there are many parameters, a call that collects few ``rows`` compares only a part of
        them. The next call compares the next part.
        """
        if not self._known:
            return False
        most, links, tensors, at = max(_LEAST, rows // 2), self._links, self._tensors, self._at
        self._at = at + most
        if most < len(links):
            links = links[(start := at % len(links)) : start + most]
        if most < len(tensors):
            tensors = tensors[(start := at % len(tensors)) : start + most]
        for tensor, version, address in tensors:
            if version_of(tensor) != version or tensor.data_ptr() != address:
                return False
        for owner, name, each in links:  # noqa: SIM110  twice as fast as `all`
            if owner.get(name) is not each:
                return False
        return True

    def _take(self) -> None:
        self._links, self._tensors, self._values = [], [], []
        modules = [each for root in _modules_of(self._policy) for each in root.modules()]
        for module in modules:
            for owned in places_in(module):
                # TorchScript modules have views of C++ objects, which are new objects each time.
                if isinstance(owned, dict):
                    self._links += [(owned, name, each) for name, each in owned.items()]
        for tensor in _parameters_of(self._policy):
            self._tensors.append((tensor, version_of(tensor), tensor.data_ptr()))
            self._values.append(tensor.detach())

    def _take_again(self) -> bool:
        """Record new versions of unchanged parameter objects; return False if some were replaced.

        A parameter that has moved in memory counts as replaced. This method takes a fifth of the
        time of `_take`, and each update of the weights calls it.
        """
        if any(owner.get(name) is not each for owner, name, each in self._links):
            return False
        now = [(tensor, version_of(tensor), tensor.data_ptr()) for tensor, _, _ in self._tensors]
        if any(one[2] != old[2] for one, old in zip(now, self._tensors, strict=True)):
            return False
        self._tensors = now
        return True

    def _differs(self) -> bool:
        """Return True if values differ; new objects at new addresses may have equal values."""
        now = _parameters_of(self._policy)
        before = [tensor for tensor, _, _ in self._tensors]
        trained = any(each.requires_grad for each in now)
        if len(now) != len(before):
            return any(_counts(each, trained) for each in _only_in_one(now, before))
        for tensor, (old, version, address), value in zip(
            now, self._tensors, self._values, strict=True
        ):
            if not _counts(tensor, trained):
                continue
            if tensor is old and version_of(tensor) != version:
                return True
            if tensor is old and tensor.data_ptr() == address:
                continue
            same = value.to(device=tensor.device, dtype=tensor.dtype)
            if same.shape != tensor.shape or not torch.equal(same, tensor.detach()):
                return True
        return False


def _counts(tensor: torch.Tensor, trained: bool) -> bool:
    """Return True if changes of ``tensor`` count.

    ``trained`` is True if some parameters require gradients.
    """
    return tensor.requires_grad or (not trained and tensor.numel() > 1)


def _only_in_one(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that only one of two lists has."""
    found = {id(each): each for each in (*some, *others)}
    both = {id(each) for each in some} & {id(each) for each in others}
    return [each for key, each in found.items() if key not in both]


def _parameters_of(policy: object) -> list[torch.Tensor]:
    """Return the parameters of a policy that have values, a version and an address, each once."""
    found = {id(each): each for root in _modules_of(policy) for each in root.parameters()}
    return [each for each in found.values() if not is_lazy(each) and _has_version(each)]


def _has_version(tensor: torch.Tensor) -> bool:
    """Return True if torch counts the changes of a tensor; it does not for inference tensors."""
    try:
        return version_of(tensor) >= 0 and tensor.data_ptr() >= 0
    except RuntimeError:
        return False


def _modules_of(policy: object) -> Iterator[nn.Module]:
    """Yield the modules that a policy of any kind uses, as far as they are visible."""
    if isinstance(policy, nn.Module):
        yield policy
    elif isinstance(policy, functools.partial):
        for each in (policy.func, *policy.args, *policy.keywords.values()):
            yield from _modules_of(each)
    elif inspect.ismethod(policy):
        yield from _modules_of(policy.__self__)
    elif inspect.isfunction(policy):
        for cell in policy.__closure__ or ():
            if isinstance(each := _content(cell), nn.Module):
                yield each


def _content(cell: Any) -> Any:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
