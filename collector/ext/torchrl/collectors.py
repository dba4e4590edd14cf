"""TorchRL's collectors by name, each a subclass of a Tallyroll collector."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from tensordict.nn import CudaGraphModule, TensorDictModuleBase
from torch import nn
from torchrl import compile_with_warmup
from torchrl.envs import EnvBase
from torchrl.modules import RandomPolicy

from tallyroll.collector.batches.state.run_seeds import Environments
from tallyroll.collector.compat import service_backend
from tallyroll.collector.envs.setup.make import ReadyEnv
from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.torchrl.arguments import REFUSED_OF_MANY, resolve, whole
from tallyroll.collector.ext.torchrl.names import TorchRLNames
from tallyroll.collector.multiprocess import MultiprocessCollector
from tallyroll.collector.policies.policy import PolicyFn
from tallyroll.collector.policies.several.entries import are_several
from tallyroll.collector.sync import OwnEnvironment, SyncCollector
from tallyroll.collector.user_code import user_code
from tallyroll.collector.workers.worker_options import Mode


def one_env(create: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """Return the ``create_env_fn`` of a single-process collector, with ``create_env_kwargs``."""
    if isinstance(create, (list, tuple)):
        if len(create) != 1:
            raise ArgumentError(
                f"create_env_fn: expected one factory, got {len(create)}. Pass "
                f"num_collectors={len(create)}, or use MultiSyncCollector: both have a process for "
                "each factory."
            )
        create = create[0]
    if not kwargs:
        return create
    if isinstance(create, EnvBase):
        if not hasattr(create, "update_kwargs"):
            raise ArgumentError(
                f"create_env_kwargs: expected a factory, got a {type(create).__name__}, which was "
                "made already"
            )
        with user_code("create_env_kwargs"):
            create.update_kwargs(kwargs)
        return create
    if isinstance(create, str):
        raise ArgumentError("create_env_kwargs needs a factory. With an id, use env_kwargs.")
    return partial(create, **kwargs)


def many_envs(create: Any, workers: int | None, kwargs: Any, init: Any) -> Any:
    """Return the ``create_env_fn`` of a multi-process collector.

    The result includes ``create_env_kwargs`` and ``init_fn``.
    """
    if isinstance(create, str):
        if kwargs or init is not None:
            raise ArgumentError(
                "create_env_kwargs and init_fn need factories. With an id, use env_kwargs."
            )
        return create
    listed = list(create) if isinstance(create, Sequence) else [create] * (workers or 1)
    if kwargs is None or isinstance(kwargs, Mapping):
        kwargs = [kwargs or {}] * len(listed)
    if len(kwargs) != len(listed):
        raise ArgumentError(
            f"create_env_kwargs: expected {len(listed)} mappings, one for each worker, got "
            f"{len(kwargs)}"
        )
    listed = [_Copies(each) if isinstance(each, EnvBase) else each for each in listed]
    made = [partial(each, **own) if own else each for each, own in zip(listed, kwargs, strict=True)]
    return made if init is None else [partial(_begin, init, each) for each in made]


class _Copies:
    """Factory that sends each worker a copy of an existing environment."""

    def __init__(self, env: EnvBase) -> None:
        self._env = env

    def __call__(self, **kwargs: Any) -> EnvBase:
        """Return the copy."""
        made: EnvBase = one_env(self._env, kwargs)
        return made


def _begin(init: Callable[[], Any], create: Callable[[], Any]) -> Any:
    init()
    return create()


def policy_of(policy: Any, factory: Any) -> Any:
    """Return the policy that acts. If there is a ``policy_factory``, call it."""
    if isinstance(factory, (list, tuple)):
        if len({id(each) for each in factory}) > 1:
            raise ArgumentError(
                "policy_factory: expected one for all workers, got several. All rows of a run "
                "come from one policy. Make a collector for each policy."
            )
        factory = factory[0] if factory else None
    if factory is not None:
        with user_code("policy_factory"):
            policy = factory()
    if are_several(policy):
        raise ArgumentError(
            "policy: expected one policy, as in TorchRL's collectors, got "
            f"{type(policy).__name__}. Give several policies to SyncCollector or "
            "MultiprocessCollector."
        )
    if isinstance(policy, RandomPolicy) and policy.action_spec is None:
        return None
    return policy


def pop_compile_options(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Remove ``compile_policy`` and ``cudagraph_policy`` from ``given``; return their keywords."""
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
    """Return ``policy`` wrapped for compilation and graph capture, with its own weights."""
    return CompiledPolicy(policy, wanted, device) if wanted and policy is not None else policy


class CompiledPolicy(TensorDictModuleBase):
    """Policy that is compiled when it is first called, in this process or in a worker.

    It shares the weights of ``policy``, under the same names.

    Args:
        policy: a TensorDictModule, or a callable.
        wanted: keyword arguments of ``"compile"`` and ``"cudagraph"``, for each that is enabled.
        device: device of the graph.
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


_BACKENDS = {None: None, "direct": "direct", "process": "process", "multiprocessing": "process"}


class Collector(TorchRLNames, SyncCollector):
    """TorchRL's ``Collector`` over :class:`~tallyroll.collector.SyncCollector`.

    With ``num_collectors`` it makes a :class:`MultiSyncCollector` or, without ``sync=True``, a
    :class:`MultiAsyncCollector`, as TorchRL does.

    Args:
        create_env_fn: any value that TorchRL accepts, an id, or a vector environment.
        policy: any value that TorchRL accepts. None draws random actions.
        given: arguments of TorchRL's ``Collector`` and of ``SyncCollector``, by name.

    Raises:
        TypeError: neither collector has the argument.
        ArgumentError: a value is refused. The message says what to do.
    """

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Return the collector, or a multi-process collector if the caller requests it."""
        if cls is not Collector:
            return super().__new__(cls)
        backend = given.pop("backend", None) or service_backend()
        options = dict(given.pop("backend_options", None) or {})
        number, sync = whole(given.pop("num_collectors", None)), given.pop("sync", None)
        if backend not in _BACKENDS:
            raise ArgumentError(
                f'backend: expected "direct" or "process", got {backend!r}. This collector runs on '
                "one machine."
            )
        backend = _BACKENDS[backend]
        if backend == "process" or (backend is None and number is not None):
            kind: Any = MultiSyncCollector if sync else MultiAsyncCollector
            return kind(*args, num_workers=number, **given, **options)
        if options or sync is not None or number not in (None, 1):
            raise ArgumentError(
                "sync, backend_options and num_collectors need processes. Pass num_collectors and "
                'leave backend="direct" out.'
            )
        return super().__new__(cls)

    def __init__(self, create_env_fn: Any, policy: PolicyFn | None = None, **given: Any) -> None:
        for name in ("backend", "backend_options", "num_collectors", "sync"):
            given.pop(name, None)
        self._given = policy
        env = one_env(create_env_fn, given.pop("create_env_kwargs", None))
        factory = given.pop("policy_factory", None)
        if policy is not None and factory is not None:
            raise ArgumentError("policy and policy_factory: expected one of them, got both")
        asked = pop_compile_options(given)
        ours, self._wishes = resolve(given, many=False)
        acting = compiled(policy_of(policy, factory), asked, ours.get("policy_device"))
        super().__init__(env, acting, **ours, **self._of_the_run())
        try:
            self._take_over(self._wishes)
            self._compiles(asked)
        except BaseException:
            self.shutdown()
            raise
        self.n_env = self.lanes
        self.requested_frames_per_batch = self._options.frames_per_batch
        self._frames_per_batch = -(-self.requested_frames_per_batch // self.lanes)

    def _prepare(self, policy: PolicyFn | None, made: ReadyEnv) -> None:
        if isinstance(self._given, RandomPolicy):
            self._given.set_action_spec_from_env(self.env)
        super()._prepare(policy, made)

    def _environments(self, env: EnvBase) -> Environments:
        return SeededByMaker(env, self._options)

    def _close_source(self) -> None:
        if self._close_env is not None:  # None after a failed construction
            self._owns_env = self._close_env
        super()._close_source()


class SeededByMaker(OwnEnvironment):
    """A TorchRL environment that keeps the seeds with which the user made it."""

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        """Seed the lanes. At the first start without a requested seed, keep the user's seeds."""
        if not asked and incarnation == 0 and system_of(self._env) is None:
            return []
        return super().seed(seed, incarnation, asked)


class MultiCollector(TorchRLNames, MultiprocessCollector):  # type: ignore[misc]  # more forms
    """TorchRL's ``MultiCollector`` over :class:`~tallyroll.collector.MultiprocessCollector`.

    Args:
        create_env_fn: factories, one per worker, or a single one with ``num_workers``.
        policy: any value that TorchRL accepts. None draws random actions.
        sync: True makes a :class:`MultiSyncCollector`, False a :class:`MultiAsyncCollector`.
        given: arguments of TorchRL's multi-process collectors and of ``MultiprocessCollector``, by
            name.
    """

    _many = True
    _mode_of_kind: Mode = "sync"

    def __new__(cls, *args: Any, sync: bool | None = None, **given: Any) -> Self:
        """Return a collector of the kind that ``sync`` selects."""
        if cls is MultiCollector:
            if sync is None:
                raise ArgumentError(
                    "sync: expected True (MultiSyncCollector) or False (MultiAsyncCollector)"
                )
            cls = MultiSyncCollector if sync else MultiAsyncCollector  # type: ignore[assignment]
        return super().__new__(cls)

    def __init__(self, create_env_fn: Any, policy: PolicyFn | None = None, **given: Any) -> None:
        given.pop("sync", None)
        workers = given["num_workers"] = whole(given.pop("num_workers", None))
        frames = given.get("frames_per_batch")
        if isinstance(frames, (list, tuple)):
            if len(set(frames)) > 1:
                raise ArgumentError(
                    "frames_per_batch: expected the same number for each worker, got "
                    f"{list(frames)}"
                )
            number = len(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else workers
            if len(frames) != number:
                raise ArgumentError(
                    f"frames_per_batch: expected one number for each of {number} workers, got "
                    f"{len(frames)}"
                )
            given["frames_per_batch"] = sum(frames)
        kwargs, init = given.pop("create_env_kwargs", None), given.pop("init_fn", None)
        envs = many_envs(create_env_fn, workers, kwargs, init)
        factory = given.pop("policy_factory", None)
        asked, threads = pop_compile_options(given), given.get("num_sub_threads", 1)
        said = getattr(given.get("processes"), "said", ())
        if given.get("transport") != "thread" and "threads_per_worker" not in said:
            given["num_sub_threads"] = threads
        ours, self._wishes = resolve(given, many=True)
        acting = compiled(policy_of(policy, factory), asked, None)
        if factory is not None and policy is not None:
            self._weights_of = policy
        if self._mode_of_kind == "async" and self._wishes.cat_results not in (None, "stack"):
            raise ArgumentError("cat_results needs MultiSyncCollector. Leave cat_results out.")
        super().__init__(envs, acting, mode=self._mode_of_kind, **ours, **self._of_the_run())
        try:
            self._take_over(self._wishes)
            self._compiles(asked)
            items = self._wishes.replay_buffer is not None and not self._wishes.extend_buffer
            if items and self._startup.planned.plan.batched:
                raise ArgumentError(
                    "extend_buffer=False: expected environments of one lane, got environments of "
                    "several lanes, from which the collector adds only whole batches. Leave "
                    "extend_buffer out."
                )
        except BaseException:
            self.shutdown()
            raise
        self.create_env_fn, self.create_env_kwargs = create_env_fn, kwargs
        self.policy_factory, self.num_sub_threads = factory, threads
        self.num_threads = torch.get_num_threads()
        self.cat_results = self._wishes.cat_results
        self.update_at_each_batch = self._wishes.update_at_each_batch

    def _announce(self) -> None:
        self._publish()

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """Return the number of frames of a batch that each worker contributes."""
        return -(-self._options.frames_per_batch // self.num_workers)

    def reset(  # type: ignore[override]
        self, reset_idx: Sequence[bool] | None = None
    ) -> None:
        """Start new trajectories in all lanes, and discard transitions that wait for a batch.

        Raises:
            ArgumentError: ``reset_idx`` does not select all workers.
        """
        super().reset(None if reset_idx is None or all(reset_idx) else reset_idx)

    def stats(self, workers: str = "aggregate") -> dict[str, int | bool]:
        """Return the counts of :class:`Collector`, with ``"workers"`` and ``"workers_alive"``.

        Raises:
            ArgumentError: the caller requests counts of each worker, but only totals are kept.
        """
        if workers != "aggregate":
            raise ArgumentError(
                f'workers: expected "aggregate", got {workers!r}. Counts are sums over all '
                'workers. See the column ("collector", "lane") for the lane of each row.'
            )
        alive = sum(link.alive for link in self._links)
        return {**super().stats(), "workers": self.num_workers, "workers_alive": alive}

    @property
    def pre_collect_hook(self) -> None:
        """None: TorchRL calls the hook in the workers, which is not supported."""
        return None

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        _refuse_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> None:
        """None: TorchRL calls the hook in the workers, which is not supported."""
        return None

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Any) -> None:
        _refuse_hook("post_collect_hook", hook)

    def map_fn(self, method_name: str, list_of_args: Any = None, list_of_kwargs: Any = None) -> Any:
        """Raise ArgumentError: workers have no collectors."""
        raise ArgumentError(
            f"map_fn: workers have no collectors. Call {method_name} on this collector."
        )

    def get_distant_attr(self, attr: str) -> Any:
        """Raise ArgumentError: workers have no collectors."""
        raise ArgumentError(
            f"get_distant_attr: workers have no collectors. Read {attr} from this collector."
        )

    def getattr_env(self, attr: str) -> Any:
        """Raise AttributeError: environments are in the workers."""
        raise AttributeError(
            f"{attr}: environments are in the workers. Read the attribute with env_get."
        )

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Shut down as :class:`Collector` does; workers always close their environments."""
        if not close_env:
            raise ArgumentError(
                "close_env: workers always close their environments. Leave close_env out."
            )
        super().shutdown(timeout, close_env, raise_on_error)


def _refuse_hook(name: str, hook: Any) -> None:
    if hook is not None:
        raise ArgumentError(f"{name}: {REFUSED_OF_MANY[name][1]}")


class MultiSyncCollector(MultiCollector):
    """TorchRL's ``MultiSyncCollector``: all workers step together; see :class:`MultiCollector`."""

    _mode_of_kind: Mode = "sync"


class MultiAsyncCollector(MultiCollector):
    """TorchRL's ``MultiAsyncCollector``: workers do not wait for one another.

    See :class:`MultiCollector`.
    """

    _mode_of_kind: Mode = "async"
    _waits_for_steps = False  # workers report the version that chose each action

    def _fill_rectangles(self, lanes: int) -> None:
        # A batch comes from one worker, which steps all its lanes until the batch is full.
        each = set(self._startup.lanes)
        super()._fill_rectangles(each.pop() if len(each) == 1 else 1)

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """Return the number of frames of a batch, which comes from one worker."""
        return self._options.frames_per_batch


class AsyncCollector(MultiAsyncCollector):
    """TorchRL's ``AsyncCollector``: a single worker that does not wait for the caller."""

    def __init__(self, create_env_fn: Any, policy: PolicyFn | None = None, **given: Any) -> None:
        kwargs = given.pop("create_env_kwargs", None)
        if kwargs:
            given["create_env_kwargs"] = [kwargs]
        super().__init__([create_env_fn], policy, **given)
