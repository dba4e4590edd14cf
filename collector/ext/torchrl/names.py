"""Attributes and methods of TorchRL's collectors, on top of a Tallyroll collector."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch

from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.ext.torchrl.arguments import Wishes
from tallyroll.collector.ext.torchrl.weight_updates import WeightUpdates
from tallyroll.collector.options.checks import one_of

_OURS = "tallyroll"
"""Key that only the state dicts of Tallyroll's collectors have."""

REFUSED_NAMES: Mapping[str, str] = {
    "buffers": "batches are assembled in this process and yielded",
    "cascade_execute": "there are no collectors inside this one; call the method directly",
    "disable_profile": "use torch.profiler around the loop over the collector",
    "enable_profile": "use torch.profiler around the loop over the collector",
    "fake_tensordict": "use the first batch, or env.fake_tensordict(), for keys and shapes",
    "get_cached_weights": "no weights are cached; the collector uses the weights of the policy",
    "frames_per_worker": "workers have no fixed number of frames; see ledger for the counts",
    "get_weights_fn": "use policy, which has the weights",
    "out_buffer": "batches are assembled in this process and yielded",
    "out_tensordicts": "batches are assembled in this process and yielded",
    "pipes": "messages to workers are internal; see update_policy_weights_ and worker_pids",
    "policy_weights": "use policy, which has the weights",
    "procs": "see worker_pids",
    "queue_out": "rows arrive through shared memory; iterate over the collector",
    "receive_weights": "nothing sends weights here; call update_policy_weights_(weights)",
    "profile_config": "use torch.profiler around the loop over the collector",
    "register_scheme_receiver": "nothing sends weights here; call update_policy_weights_(weights)",
    "worker_policy_versions": "each row can have its version; pass track_policy_version=True",
    "running": "use is_running() after start(); in async mode, workers always run ahead",
}
"""TorchRL attributes and methods that raise AttributeError, with an alternative."""


class TorchRLNames(WeightUpdates):
    """A Tallyroll collector with TorchRL's names for its attributes and methods."""

    verbose: ClassVar[bool] = False

    def _take_over(self, wishes: Wishes) -> None:
        super()._take_over(wishes)
        self.init_random_frames = wishes.init_random_frames
        self.max_frames_per_traj = self._options.max_frames_per_traj or 0
        self.exploration_type = self._options.exploration_type
        self.split_trajs = self._options.layout.split_trajs
        self.storing_device = self._options.storing_device
        self.policy_device = self._options.policy_device
        self.device, self.env_device = self._options.device, self._options.env_device
        self.worker_idx, self.set_truncated = wishes.worker_idx, wishes.set_truncated
        for name, value in wishes.plain.items():
            setattr(self, name, value)
        if wishes.num_threads is not None:
            torch.set_num_threads(wishes.num_threads)

    def _compiles(self, asked: Mapping[str, Any]) -> None:
        """Record how the policy is compiled."""
        self.compiled_policy, self.cudagraphed_policy = "compile" in asked, "cudagraph" in asked
        self.compiled_policy_kwargs = asked.get("compile", {})
        self.cudagraphed_policy_kwargs = asked.get("cudagraph", {})

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED_NAMES:
            raise AttributeError(
                f"{name}: Tallyroll's collectors do not have this attribute: {REFUSED_NAMES[name]}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- state ------------------------------------------------------------------------------------

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new trajectories in all lanes, and discard transitions that wait for a batch.

        Raises:
            ArgumentError: the call selects some of the lanes, or has other arguments.
        """
        if index is not None or kwargs:
            raise ArgumentError(
                "reset: expected no arguments, got some. All lanes are reset, each from its seed. "
                "To reset only some, reset the environment before you make the collector."
            )
        self._guard.restart()
        self._whole.forget()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed everything as Tallyroll's collectors do; return a seed for another collector."""
        self._whole.forget()
        return super().set_seed(seed, static_seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with TorchRL's names if they exist."""
        state = super().state_dict()
        named: dict[str, Any] = OrderedDict()
        policy = state["policy"]
        if policy is not None:
            named["policy_state_dict"] = policy.pop("weights")
        named["env_state_dict"] = state.pop("env")
        named.update(frames=self.ledger.stored, iter=self._batches_made - 1, **{_OURS: state})
        return named

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Restore a result of :meth:`state_dict`. Call it before iterating.

        Raises:
            StateError: this collector has collected already, or another kind of collector saved the
                state.
            ArgumentError: ``strict`` is False.
        """
        if not strict:
            raise ArgumentError(
                "load_state_dict: expected strict=True, because a run needs its whole state"
            )
        if _OURS not in state_dict:
            raise StateError(
                "load_state_dict: expected a state of this collector, got one with "
                f"{sorted(map(str, state_dict))}. Load its weights into the policy, and start a "
                "new run."
            )
        ours = {**state_dict[_OURS], "env": state_dict["env_state_dict"]}
        if ours["policy"] is not None:
            ours["policy"] = {**ours["policy"], "weights": state_dict["policy_state_dict"]}
        super().load_state_dict(ours)
        self._batches_made = int(state_dict["iter"]) + 1

    def stats(self, workers: str = "aggregate") -> dict[str, int | bool]:
        """Return counts under TorchRL's names; :meth:`metrics` and :attr:`ledger` have more.

        With ``workers="per_worker"`` the result is empty, because there are no counts per worker.

        Raises:
            ArgumentError: ``workers`` is not one of TorchRL's values.
        """
        one_of("workers", workers, Literal["aggregate", "per_worker", "both"])
        if workers == "per_worker":
            return {}
        found: dict[str, int | bool] = {
            "frames": self.ledger.stored,
            "batches": self._batches_made,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self.policy_version,
        }
        if math.isfinite(self.total_frames):
            found["total_frames"] = int(self.total_frames)
            found["completed"] = self.ledger.stored >= self.total_frames
        return found

    # --- the collector's parts --------------------------------------------------------------------

    def set_post_collect_hook(self, hook: Callable[[Any], None] | None) -> None:
        """Call ``hook`` with each batch from now on."""
        self.post_collect_hook = hook

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy."""
        return getattr(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment."""
        return getattr(self.env, attr)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer.

        If the thread of :meth:`start` raised an exception, the method raises that exception.
        """
        self._raise_of_thread()
        return getattr(self.replay_buffer, attr)

    def get_distant_attr(self, attr: str) -> Any:
        """Return a nested attribute by its dotted path."""
        return attrgetter(attr)(self)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method once for each set of arguments."""
        calls = max(len(list_of_args or ()), len(list_of_kwargs or ()), 1)
        args, kwargs = list_of_args or [()] * calls, list_of_kwargs or [{}] * calls
        if len(args) != len(kwargs):
            raise ArgumentError(
                f"map_fn: expected list_of_args and list_of_kwargs of one length, got {len(args)} "
                f"of args and {len(kwargs)} of kwargs"
            )
        method = attrgetter(method_name)(self)
        return [method(*one, **other) for one, other in zip(args, kwargs, strict=True)]
