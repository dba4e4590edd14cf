"""Factories of environments and policies, in the forms that TorchRL's collectors take."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import CudaGraphModule, TensorDictModuleBase
from torch import nn
from torchrl import compile_with_warmup
from torchrl.envs import EnvBase
from torchrl.modules import RandomPolicy

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.policies.several.entries import are_several
from tallyroll.collector.user_code import user_code


def one_env(create: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """``create_env_fn`` of a collector of one process, with its ``create_env_kwargs``."""
    if isinstance(create, (list, tuple)):
        if len(create) != 1:
            raise ArgumentError(
                f"create_env_fn: expected one factory, got {len(create)}; pass num_collectors="
                f"{len(create)}, or MultiSyncCollector, which have a process for each"
            )
        create = create[0]
    if not kwargs:
        return create
    if isinstance(create, EnvBase):
        if not hasattr(create, "update_kwargs"):
            raise ArgumentError(
                f"create_env_kwargs: {type(create).__name__} was made already; pass what makes it"
            )
        with user_code("create_env_kwargs"):
            create.update_kwargs(kwargs)
        return create
    if isinstance(create, str):
        raise ArgumentError("create_env_kwargs go with a factory; with an id they are env_kwargs")
    return partial(create, **kwargs)


def many_envs(create: Any, workers: int | None, kwargs: Any, init: Any) -> Any:
    """``create_env_fn`` of a collector of many, with its ``create_env_kwargs`` and ``init_fn``."""
    if isinstance(create, str):
        if kwargs or init is not None:
            raise ArgumentError("create_env_kwargs and init_fn go with factories; use env_kwargs")
        return create
    listed = list(create) if isinstance(create, Sequence) else [create] * (workers or 1)
    if kwargs is None or isinstance(kwargs, Mapping):
        kwargs = [kwargs or {}] * len(listed)
    if len(kwargs) != len(listed):
        raise ArgumentError(
            f"create_env_kwargs: expected one for each of {len(listed)} workers, got {len(kwargs)}"
        )
    listed = [_Copies(each) if isinstance(each, EnvBase) else each for each in listed]
    made = [partial(each, **own) if own else each for each, own in zip(listed, kwargs, strict=True)]
    return made if init is None else [partial(_begin, init, each) for each in made]


class _Copies:
    """A factory of an environment that was made already, and travels to each worker as a copy."""

    def __init__(self, env: EnvBase) -> None:
        self._env = env

    def __call__(self, **kwargs: Any) -> EnvBase:
        """The copy."""
        made: EnvBase = one_env(self._env, kwargs)
        return made


def _begin(init: Callable[[], Any], create: Callable[[], Any]) -> Any:
    init()
    return create()


def policy_of(policy: Any, factory: Any) -> Any:
    """Return the policy that acts: from ``policy_factory``, if that is given."""
    if isinstance(factory, (list, tuple)):
        if len({id(each) for each in factory}) > 1:
            raise ArgumentError(
                "policy_factory: expected one for all workers, got several; all rows of a run are "
                "of one policy: make a collector for each"
            )
        factory = factory[0] if factory else None
    if factory is not None:
        with user_code("policy_factory"):
            policy = factory()
    if are_several(policy):
        raise ArgumentError(
            f"policy: expected one, as TorchRL's collectors take it, got "
            f"{type(policy).__name__}; give several to SyncCollector or MultiprocessCollector"
        )
    if isinstance(policy, RandomPolicy) and policy.action_spec is None:
        return None
    return policy


def asked_for(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take ``compile_policy`` and ``cudagraph_policy`` out of ``given``: keywords, where wanted."""
    wanted = {}
    for name in ("compile", "cudagraph"):
        value = given.pop(f"{name}_policy", None)
        if not isinstance(value, (bool, Mapping, type(None))):
            raise ArgumentError(
                f"{name}_policy: expected True, False or keyword arguments, got {value!r}"
            )
        if value is not None and value is not False:
            wanted[name] = {} if value is True else dict(value)
    return wanted


def compiled(policy: Any, wanted: Mapping[str, Any], device: Any) -> Any:
    """``policy``, compiled and captured as is ``wanted``, with the weights that it has."""
    return CompiledPolicy(policy, wanted, device) if wanted and policy is not None else policy


class CompiledPolicy(TensorDictModuleBase):
    """A policy that is compiled where it is called: in this process, or in a worker.

    Its weights are those of ``policy`` itself, under the same names.

    Args:
        policy: a TensorDictModule, or a callable.
        wanted: keyword arguments of ``"compile"`` and of ``"cudagraph"``, as far as asked for.
        device: of the graph.
    """

    def __init__(self, policy: Any, wanted: Mapping[str, Any], device: Any) -> None:
        super().__init__()
        hidden = self.__dict__
        hidden["_own"] = policy, wanted, device
        hidden["_call"] = None
        if isinstance(policy, nn.Module):
            for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                hidden[name] = getattr(policy, name)
            self.training = policy.training
        self.in_keys = list(getattr(policy, "in_keys", ()))
        self.out_keys = list(getattr(policy, "out_keys", ()))

    def __reduce__(self) -> Any:
        return CompiledPolicy, self._own

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_own"][0], name)

    def forward(self, tensordict: Any) -> Any:
        """Call the policy."""
        call, (policy, wanted, device) = self._call, self._own
        if call is None:
            call = policy
            if "compile" in wanted:
                call = compile_with_warmup(call, **wanted["compile"])
            if "cudagraph" in wanted:
                call = CudaGraphModule(
                    call, in_keys=[], out_keys=[], device=device, **wanted["cudagraph"]
                )
            self.__dict__["_call"] = call
        if torch.cuda.is_available():
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return call(tensordict)
