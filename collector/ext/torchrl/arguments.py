"""Handling of TorchRL's arguments: translated, implemented here, ignored or refused."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchrl.data import ReplayBuffer
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.multiprocess import MultiprocessCollector
from tallyroll.collector.options import Options
from tallyroll.collector.options.checks import one_of, or_none, positive, refuse_unknown
from tallyroll.collector.sync import SyncCollector
from tallyroll.collector.workers.worker_options import WorkerOptions

NEUTRAL: Mapping[str, tuple[Any, str]] = {
    "trust_policy": (False, "a policy is tried out once on a copy, trusted or not"),
    "use_buffers": (None, "steps are always written in place, into reused memory"),
    "return_same_td": (False, "each batch is a new TensorDict, and nothing writes to it later"),
    "no_cuda_sync": (False, "only the copies between devices synchronise them"),
    "track_traj_ids": (
        True,
        "every row has the id of its trajectory; ignore the column if you do not need it",
    ),
    "preemptive_threshold": (None, "batches are always full: no rollout is interrupted"),
    "local_init_rb": (True, "only this process writes: a buffer is ready with its first batch"),
}
"""Default of each argument that never has an effect, and the reason."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "reset_when_done": (
        (True,),
        "lanes whose episode ended are always reset. Leave reset_when_done out.",
    ),
    "collector_class": (
        (None,),
        "workers have no collectors of their own. Leave collector_class out.",
    ),
    "auto_register_policy_transforms": (
        (None, True),
        "the states of a recurrent policy are added if the environment lacks them. To avoid this, "
        "wrap the environment yourself.",
    ),
    "weight_recv_schemes": (
        (None,),
        "no other collector sends weights to this one. Call update_policy_weights_(weights).",
    ),
}
"""Accepted values of arguments. Other values raise an error that names an alternative."""

_IN_WORKERS = (
    "TorchRL calls it in the workers, but here the workers assemble no batches. Use postproc=."
)
REFUSED_OF_MANY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **REFUSED,
    "pre_collect_hook": ((None,), _IN_WORKERS),
    "post_collect_hook": ((None,), _IN_WORKERS),
    "interruptor": ((None,), "batches of workers are always full. Use Collector, or stop()."),
}

_DEVICES = ("device", "policy_device", "env_device", "storing_device")
_COUNTS = ("frames_per_batch", "num_workers", "trajs_per_batch", "trajs_per_write", "num_envs")
_LIMITS = ("total_frames", "init_random_frames", "max_frames_per_traj")
"""Arguments for which None and numbers below 0 mean no limit."""


_OWN = {"frames_per_batch", "init_random_frames", "total_frames"}


@dataclass
class Wishes:
    """Values of TorchRL's arguments that Tallyroll's collectors lack."""

    total_frames: float
    """``inf`` means no limit."""
    frames_per_batch: int
    init_random_frames: int
    replay_buffer: ReplayBuffer | None = None
    extend_buffer: bool = True
    postproc: Callable[[Any], Any] | None = None
    set_truncated: bool = False
    interruptor: Any = None
    pre_collect_hook: Callable[[], None] | None = None
    post_collect_hook: Callable[[Any], None] | None = None
    compact_obs: bool = False
    track_policy_version: Any = False
    trajs_per_batch: int | None = None
    trajs_per_write: int | None = None
    replay_write_mode: Literal["rollout", "trajectory"] | None = None
    """An argument since TorchRL 0.15; accepted with any version."""
    traj_format: Literal["padded", "cat"] | None = None
    update_at_each_batch: bool = False
    cat_results: str | int | None = None
    weight_updater: Any = None
    weight_sync_schemes: Any = None
    num_threads: int | None = None
    worker_idx: int | None = None
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Values of ignored arguments, which become attributes with these names."""
    exploration_type: Any = ExplorationType.RANDOM

    @property
    def whole_trajectories(self) -> bool:
        """True if the output, or the data in the buffer, consists of whole trajectories."""
        return self.trajs_per_batch is not None or self.replay_write_mode == "trajectory"


_HERE = {*Wishes.__annotations__} - {"plain", *_OWN}
_BEFORE = {"create_env_kwargs", "policy_factory", "compile_policy", "cudagraph_policy", "init_fn"}
_TO_OURS = {"num_sub_threads": "threads_per_worker"}


def resolve(given: Mapping[str, Any], *, many: bool) -> tuple[dict[str, Any], Wishes]:
    """Return the arguments of Tallyroll's collectors, and the remaining wishes.

    Raises:
        UnknownArgument: neither TorchRL nor Tallyroll has an argument of this name.
        ArgumentError: a value is refused.
    """
    ours = _parameters(MultiprocessCollector if many else SyncCollector)
    refused = REFUSED_OF_MANY if many else REFUSED
    known = {*ours, *_HERE, *NEUTRAL, *refused, *(_TO_OURS if many else ())}
    if not many:
        known -= {"update_at_each_batch", "cat_results", "num_threads", "preemptive_threshold"}
    refuse_unknown(given, known, "TorchRL's collectors or ours")
    for name, (allowed, reason) in refused.items():
        if not any(given.get(name, allowed[0]) is each for each in allowed):
            raise ArgumentError(f"{name}={given[name]!r}: {reason}")
    values = {name: _one_device(name, v) if name in _DEVICES else v for name, v in given.items()}
    for name in (*_COUNTS, *_LIMITS):
        if name in values:
            values[name] = whole(values[name])
    for name in _LIMITS:
        value = values.get(name)
        if isinstance(value, int) and value < 0:
            values[name] = None
    if "frames_per_batch" not in values:
        raise TypeError("frames_per_batch is missing. Pass the number of transitions in a batch.")
    frames, random = values.get("total_frames"), values.get("init_random_frames") or 0
    wishes = Wishes(
        total_frames=float("inf") if frames is None else frames,
        frames_per_batch=values["frames_per_batch"],
        init_random_frames=random,
        plain={
            **{name: given.get(name, default) for name, (default, _) in NEUTRAL.items()},
            **{name: given.get(name, allowed[0]) for name, (allowed, _) in REFUSED.items()},
        },
        **{name: values[name] for name in _HERE & set(values)},
    )
    wishes.set_truncated |= getattr(values.get("layout"), "set_truncated", False)
    _check(wishes)
    threshold = values.get("preemptive_threshold")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ArgumentError(f"preemptive_threshold: expected 0 to 1, got {threshold!r}")
    rest = {n: v for n, v in values.items() if n in ours and n not in ("postproc", "replay_buffer")}
    for name, own in _TO_OURS.items():
        if name in values:
            rest[own] = values[name]
    where = rest.get("env_device")
    if where is not None and where == rest.get("policy_device"):
        rest["storing_device"] = rest.get("storing_device") or where
    rest["init_random_frames"] = random - _written_before(wishes.replay_buffer, random)
    rest["max_frames_per_traj"] = values.get("max_frames_per_traj") or None
    rest["exploration_type"] = wishes.exploration_type or ExplorationType.RANDOM
    for name in ("split_trajs", "set_truncated"):
        if name in values:
            rest[name] = bool(values[name])
    if "total_episodes" not in values or frames is not None:
        rest["total_frames"] = -1 if frames is None else frames
    rest.setdefault("layout", "torchrl")
    return rest, wishes


def whole(value: Any) -> Any:
    """Convert a float that is a whole number, such as 1e6 from YAML, to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check(wishes: Wishes) -> None:
    if wishes.replay_buffer is not None and not isinstance(wishes.replay_buffer, ReplayBuffer):
        raise ArgumentError(
            "replay_buffer: expected a torchrl ReplayBuffer of this process, got "
            f"{type(wishes.replay_buffer).__name__}"
        )
    or_none(positive)("trajs_per_batch", wishes.trajs_per_batch)
    or_none(positive)("trajs_per_write", wishes.trajs_per_write)
    if wishes.traj_format is not None:
        one_of("traj_format", wishes.traj_format, Literal["padded", "cat"])
        if wishes.trajs_per_batch is None:
            raise ArgumentError("traj_format needs trajs_per_batch. Give both or neither.")
    if wishes.replay_write_mode is not None:
        _check_write_mode(wishes, wishes.replay_write_mode)
    if wishes.whole_trajectories and wishes.set_truncated:
        by = "replay_write_mode" if wishes.trajs_per_batch is None else "trajs_per_batch"
        raise ArgumentError(f"{by} gives whole trajectories. Leave set_truncated out.")
    alone = wishes.postproc, wishes.interruptor
    if not wishes.extend_buffer and (alone != (None, None) or wishes.whole_trajectories):
        raise ArgumentError(
            "extend_buffer=False adds single steps, but postproc, interruptor, trajs_per_batch and "
            "replay_write_mode need whole batches. Leave extend_buffer out."
        )
    cat = wishes.cat_results
    if cat not in (None, "stack") and (isinstance(cat, bool) or not isinstance(cat, int)):
        raise ArgumentError(f'cat_results: expected "stack" or a dimension, got {cat!r}')
    version = getattr(wishes.track_policy_version, "version_type", int)
    if version not in (int, "int"):
        raise ArgumentError(
            "track_policy_version: expected integer versions, got a PolicyVersion of another type. "
            "Pass True."
        )


def _check_write_mode(wishes: Wishes, mode: str) -> None:
    one_of("replay_write_mode", mode, Literal["rollout", "trajectory"])
    if wishes.replay_buffer is None:
        raise ArgumentError(
            f"replay_write_mode={mode!r} needs a replay buffer. Give replay_buffer=."
        )
    if wishes.trajs_per_batch is not None:
        raise ArgumentError(
            f"replay_write_mode={mode!r} and trajs_per_batch contradict each other, because "
            "trajs_per_batch is for yielded trajectories. Leave trajs_per_batch out."
        )
    if mode == "rollout" and wishes.trajs_per_write is not None:
        raise ArgumentError('trajs_per_write needs replay_write_mode="trajectory"')


def _written_before(buffer: ReplayBuffer | None, most: int) -> int:
    """Return how many rows in ``buffer`` replace random transitions, as TorchRL counts them."""
    return 0 if buffer is None else min(most, int(buffer.write_count))


def _one_device(name: str, value: Any) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if len(set(map(str, value))) != 1:
        raise ArgumentError(
            f"{name}: expected one device for all workers, got {list(value)}. All workers step on "
            "the same device."
        )
    return value[0]


def _parameters(kind: type) -> frozenset[str]:
    names = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    options = WorkerOptions if issubclass(kind, MultiprocessCollector) else Options
    return frozenset(names) - {"self", "create_env_fn", "policy", "more"} | options.keywords()
