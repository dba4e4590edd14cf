"""Private parts of other libraries that collectors use. An upgrade can break only this file.

`tests/project/test_compat.py` reports parts that are missing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import atexit
import ctypes
import gc
import os
import sys
import threading
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, process, resource_tracker, spawn, util
from operator import attrgetter
from pathlib import Path
from queue import Empty
from threading import RLock
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import tensordict
import torch
from numpy._core import multiarray

# Processes that only share weights need neither Gymnasium nor TorchRL, whose imports take seconds.
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
    from numpy.typing import NDArray
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictModule
    from torchrl.envs import EnvBase, ParallelEnv, SerialEnv

# --- Gymnasium ------------------------------------------------------------------------------------

OBSERVATIONS: Final = "_observations"
"""The attribute of a `SyncVectorEnv` with the array that its next step fills."""

ENDED: Final = "_autoreset_envs"
"""The attribute of a `SyncVectorEnv` that marks the lanes that ended in its last step."""


OWN_OBSERVATIONS: Final = "_env_obs"
"""The attribute of a `SyncVectorEnv` with the last observation of each lane."""


def own_observations(env: VectorEnv) -> Sequence[Any]:
    """Return the last observation of each lane of a `SyncVectorEnv`; empty for other vectors."""
    return getattr(env.unwrapped, OWN_OBSERVATIONS, None) or ()


def widen_rewards(env: SyncVectorEnv, shape: tuple[int, ...]) -> None:
    """Make each lane's reward an array of ``shape``, if it is not already."""
    if env._rewards.shape[1:] != shape:
        env._rewards = np.zeros((env.num_envs, *shape))


def replace_values(env: SyncVectorEnv, make: Callable[[str, Any], Any]) -> None:
    """Replace each array of rewards and flags with ``make(name, array)``."""
    env._rewards = make("reward", env._rewards)
    env._terminations = make("terminated", env._terminations)
    env._truncations = make("truncated", env._truncations)


def states_of_lanes(wrapper: VectorWrapper) -> tuple[str, ...]:
    """Return the names of arrays ``[lane, ...]`` that even a reset by mask clears for all lanes."""
    from gymnasium.wrappers.vector import NormalizeReward, RecordEpisodeStatistics

    names: tuple[str, ...] = ()
    if isinstance(wrapper, RecordEpisodeStatistics):
        names = ("episode_returns", "episode_lengths", "episode_start_times", "prev_dones")
    elif isinstance(wrapper, NormalizeReward):
        names = ("accumulated_reward", "_prev_dones")
    return tuple(name for name in names if hasattr(wrapper, name))


def begin_lanes(wrapper: VectorWrapper, name: str, lanes: NDArray[np.bool_]) -> None:
    """Reset only ``lanes`` of a result of `states_of_lanes` to their initial values."""
    state = getattr(wrapper, name)
    if state.dtype == np.bool_:
        state = state.copy()  # the infos of the last step share the array
        setattr(wrapper, name, state)
    state[lanes] = perf_counter() if name == "episode_start_times" else 0


def statistics_key(wrapper: VectorWrapper) -> str:
    """Return the key that `RecordEpisodeStatistics` adds to infos; empty for other wrappers."""
    return str(getattr(wrapper, "_stats_key", ""))


def mend_joint_types() -> None:
    """Fix the detection of hinge joints in gymnasium-robotics.

    The detection tests whether a NumPy integer is ``in`` a tuple of members of an enumeration. For
    equal values, this is True with MuJoCo 3.8.1 and False with 3.13.
    """
    utils: Any = import_module("gymnasium_robotics.utils.mujoco_utils")
    kinds = utils.mujoco.mjtJoint
    if hasattr(kinds, "__members__") and np.int32(3) not in (kinds.mjJNT_HINGE,):
        plain = SimpleNamespace(**{name: int(each) for name, each in kinds.__members__.items()})
        utils.mujoco = SimpleNamespace(**{**vars(utils.mujoco), "mjtJoint": plain})


def info_merge(env: VectorEnv) -> Any:
    """Return the function that merges the infos of single lanes."""
    return env.unwrapped._add_info


def is_gymnasiums(merge: Any) -> bool:
    """Return True if ``merge``, a result of `info_merge`, is Gymnasium's own function."""
    function = getattr(merge, "__func__", None)
    return str(getattr(function, "__module__", "")).startswith("gymnasium.vector.")


def set_info_merge(env: VectorEnv, merge: Any) -> None:
    """Replace the function that merges the infos of single lanes."""
    base: Any = env.unwrapped
    base._add_info = merge


def lane_in(frame: FrameType, *kinds: type) -> int | None:
    """Return the lane that a vector, or an object of ``kinds``, steps or resets in ``frame``.

    The frame has it in a variable. Return None for any other frame.
    """
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    names = frame.f_locals
    owner = names.get("self")
    package = sys.modules.get("stable_baselines3.common.vec_env")
    if isinstance(owner, AsyncVectorEnv):
        name = {"step_wait": "env_idx", "_raise_if_errors": "index"}.get(frame.f_code.co_name, "i")
    elif package is not None and isinstance(owner, package.DummyVecEnv):
        name = "env_idx"
    else:
        name = "i" if isinstance(owner, (SyncVectorEnv, *kinds)) else ""
    lane = names.get(name)
    return lane if isinstance(lane, int) else None


def is_waiting(vector: Any) -> bool:
    """Return True if ``vector`` is an `AsyncVectorEnv` that is waiting for results of a call."""
    from gymnasium.vector.async_vector_env import AsyncState, AsyncVectorEnv

    return isinstance(vector, AsyncVectorEnv) and vector._state is not AsyncState.DEFAULT


def trace_of_process(frame: FrameType) -> str:
    """Return the traceback, in a lane's process, of the error that `AsyncVectorEnv` re-raises."""
    names = frame.f_locals
    raises = frame.f_code.co_name == "_raise_if_errors"
    return str(names.get("trace", "")) if raises else ""


_SAYS_WHY_SECONDS: Final = 5.0
"""Seconds within which a process that ends must report its error."""


def call_lane(env: AsyncVectorEnv, lane: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of one lane's environment in its process, which ends if the method raises."""
    pipe, ended = (
        env.parent_pipes[lane],
        "its process has ended, so the lane cannot be stepped again",
    )
    try:
        pipe.send(("_call", (name, args, kwargs)))
        result, good = pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise RuntimeError(f"the process of the lane has ended ({error!r})") from error
    if good:
        return result
    try:
        _, _, raised, trace = env.error_queue.get(timeout=_SAYS_WHY_SECONDS)
    except Empty:
        raise RuntimeError(
            f"the lane did not report the exception that it raised; {ended}"
        ) from None
    raised.add_note(f"{trace}\n{ended}")
    raise raised


# --- Stable-Baselines3 ----------------------------------------------------------------------------


def seed_next_reset(env: Any, seeds: Sequence[int]) -> None:
    """Set one seed per lane for the next reset of a `VecEnv`, whose ``seed`` takes only one."""
    env.unwrapped._seeds = list(seeds)


# --- NumPy ---------------------------------------------------------------------------------------

# `numpy.count_nonzero` wraps this function in three Python functions.
count_true: Callable[[NDArray[Any]], int] = multiarray.count_nonzero


def state_reader(generator: np.random.Generator) -> Callable[[], Any]:
    """Return a function that reads a part of the state of ``generator`` that each draw changes.

    The whole state is a dictionary of large numbers, and reading it takes 50 times as long.
    """
    bits = generator.bit_generator
    if type(bits) is np.random.PCG64:
        address = ctypes.c_void_p.from_address(bits.ctypes.state_address).value
        word = ctypes.c_uint64.from_address(address)  # type: ignore[arg-type]
        state = bits.state["state"]["state"]
        if word.value in (state & 2**64 - 1, state >> 64):
            return partial(getattr, word, "value")
    return lambda: bits.state


# --- TorchRL --------------------------------------------------------------------------------------


def gym_like_info(frame: FrameType) -> Any:
    """Return the invalid value that a reset of `GymWrapper` in ``frame`` used as an info.

    Return None if the value is a valid info.
    """
    name, function = frame.f_globals.get("__name__"), frame.f_code.co_name
    if (name, function) != ("torchrl.envs.gym_like", "_reset"):
        return None
    info = frame.f_locals.get("info")
    return None if isinstance(info, dict) else info


def step_mdp(env: EnvBase, td: TensorDictBase) -> TensorDictBase:
    """Return the TensorDict that a policy sees after the step ``td``."""
    return env._step_mdp(td)


def post_step_hook(env: EnvBase) -> Callable[..., Any] | None:
    """Return the hook that changes a step and the observation after it; None if there is none."""
    return getattr(env, "_post_step_mdp_hooks", None)


def serial_envs(env: SerialEnv) -> Sequence[EnvBase]:
    """Return the environments of a `SerialEnv`."""
    if env.is_closed:
        env.start()
    found: Sequence[EnvBase] = env._envs
    return found


def ended_process(error: Exception) -> RuntimeError:
    """Return the error for a lane's process that ended because a call raised in it."""
    return RuntimeError(
        f"the lane's process raised an exception, wrote it to stderr and ended ({error!r}), so the "
        "lane cannot be stepped again"
    )


def call_in_worker(
    env: ParallelEnv, worker: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a method, or read an attribute, in one process of a `ParallelEnv`.

    The process ends if the call raises, or the name is missing.
    """
    if env.is_closed:
        env.start()
    channel = env.parent_channels[worker]
    try:
        channel.send((name, (list(args), dict(kwargs))))
        _, result = channel.recv()
    except (EOFError, ConnectionError) as error:
        raise ended_process(error) from error
    return result


def resets_itself(env: EnvBase) -> bool:
    """Return True if ``env`` resets itself in the way of TorchRL's ``auto_reset=True``."""
    return bool(env.__dict__.get("_torchrl_native_autoreset", False))


def splits(env: EnvBase) -> bool:
    """Return True if ``env`` steps and then resets in two calls, as :class:`EnvBase` does."""
    from torchrl.envs import EnvBase

    kind = type(env)
    return (
        kind.step_and_maybe_reset is EnvBase.step_and_maybe_reset
        and kind._step_and_maybe_reset is EnvBase._step_and_maybe_reset
        and kind.maybe_reset is EnvBase.maybe_reset
        and "step_and_maybe_reset" not in env.__dict__
        and env.__dict__.get("_compiled_step_and_maybe_reset") is None
        and not resets_itself(env)
    )


def steps_in_buffers(env: EnvBase) -> bool:
    """Return True if ``env`` is a `ParallelEnv` whose workers step and reset in one call."""
    from torchrl.envs import ParallelEnv

    return isinstance(env, ParallelEnv) and env._use_buffers is not False


def network_of(module: TensorDictModule) -> Callable[[], Any]:
    """Return a function that returns the network of ``module`` for a direct call.

    A plain call of ``module`` passes its inputs to the network in order and writes the one output.
    The function returns None if a call does more than that, because the module, its class or all
    modules were changed or hooked. A change may happen at any time, so the function is called
    before each call of the network. To be fast, it tests everything in one expression. Backward
    hooks are ignored, because nothing has gradients in a rollout.
    """
    from tensordict.nn import TensorDictModule

    functions = attrgetter(*_CALLED)
    original = functions(TensorDictModule)
    if type(module) is not TensorDictModule or not all(map(_is_of_a_library, original)):
        return lambda: None
    everywhere = torch.nn.modules.module
    hooks, hooks_before = everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks
    in_keys, out_keys = [*module._in_keys], [*module._out_keys]

    def network() -> Any:
        own = module.__dict__
        if (
            type(module) is not TensorDictModule
            or functions(TensorDictModule) != original
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or hooks
            or hooks_before
            or "forward" in own
            or "_call_impl" in own
            or "_call_module" in own
            or "_write_to_tensordict" in own
            or "_compiled_call_impl" in own
            or own["_kwargs"] is not None
            or own["method"] is not None
            or own["method_kwargs"]
            or own["_get_kwargs"]
            or own["_in_keys"] != in_keys
            or own["_out_keys"] != out_keys
        ):
            return None
        return own["module"] if "module" in own else own["_modules"].get("module")

    return network


_CALLED: Final = (
    "__call__",
    "_call_impl",
    "_call_module",
    "_write_to_tensordict",
    "forward",
    "in_keys",
    "out_keys",
    "out_keys_source",
)
"""Names that a call of a `TensorDictModule` looks up in the class of the module."""


def _is_of_a_library(found: Any) -> bool:
    """Return True if ``found``, an attribute of a class, was defined by torch or tensordict."""
    code = getattr(getattr(found, "fget", found), "__code__", None)
    places = tuple(f"{Path(each).parent}{os.sep}" for each in (torch.__file__, tensordict.__file__))
    return code is not None and code.co_filename.startswith(places)


# --- torch and Python -----------------------------------------------------------------------------

# The functions of `signal` look up handlers in an enumeration, which takes 40 times as long.
get_handler: Callable[[int], Any] = _signal.getsignal
set_handler: Callable[[int, Any], Any] = _signal.signal


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns the number of in-place changes of a tensor.

Raises `RuntimeError` if the tensor has no counter.
"""


def places_in(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries in which ``module`` keeps its children and parameters, not copies."""
    return module._modules, module._parameters


# `torch.no_grad` creates two objects each time.
set_gradients: Callable[[bool], None] = torch._C._set_grad_enabled


class ExplorationPlace:
    """Access to TorchRL's exploration type without the lock that `set_exploration_type` takes."""

    def __init__(self) -> None:
        from tensordict.nn import probabilistic

        # Use the dictionary, because no signal handler may run during a write. After a call of
        # `use_own_exploration_type`, writing the attribute runs Python code.
        place = vars(probabilistic._interaction_type)
        self.get: Callable[[], Any] = partial(place.__getitem__, "_mode")
        self.put: Callable[[Any], None] = partial(place.__setitem__, "_mode")


_reading = RLock()


class _OwnMode:
    """Exploration type that a thread may override for itself."""

    @property
    def _mode(self) -> Any:
        return getattr(_own, "mode", self.__dict__["_mode"])

    @_mode.setter
    def _mode(self, mode: Any) -> None:
        if hasattr(_own, "mode"):
            _own.mode = mode
        else:
            self.__dict__["_mode"] = mode


_own = threading.local()


def use_own_exploration_type() -> None:
    """Give this thread its own exploration type; TorchRL has one type for all threads."""
    from tensordict.nn import probabilistic

    place = probabilistic._interaction_type
    with _reading:
        if not isinstance(place, _OwnMode):
            kind = type(place)
            place.__class__ = type(kind.__name__, (_OwnMode, kind), {})
    _own.mode = place._mode


def accelerators_in_use() -> list[torch.device]:
    """Return the devices of torch's accelerator (CUDA, XPU, MPS) if this process uses them.

    Querying an unused accelerator is slow and allocates memory on it.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    begun = getattr(module, "is_initialized", module.is_available)  # MPS starts with the process
    return [
        torch.device(accelerator.type, n) for n in range(module.device_count() if begun() else 0)
    ]


def generator_states(devices: Sequence[torch.device] = ()) -> list[torch.Tensor]:
    """Return the states of torch's generators for the CPU and for ``devices``.

    Torch makes these tensors while it holds the mutex of the generator. If Python 3.11 collects
    garbage at that time, finalizers may let another thread run. If that thread then waits for the
    mutex without releasing the interpreter, both threads are blocked forever.
    """
    with _reading:
        collects = gc.isenabled()
        try:
            gc.disable()
            modules = map(torch.get_device_module, devices)
            of_devices = [m.get_rng_state(d) for m, d in zip(modules, devices, strict=True)]
            return [torch.get_rng_state(), *of_devices]
        finally:
            if collects:
                gc.enable()


def saved_generators() -> dict[str, Any]:
    """Return the states of torch's global generators in the form for :func:`load_generators`.

    ``"torch"`` holds the state of the CPU's generator. If this process uses an accelerator, the key
    of its type, such as ``"cuda"``, holds a list with the state of each device.
    """
    devices = accelerators_in_use()
    own, *of_devices = generator_states(devices)
    return {"torch": own} | ({devices[0].type: of_devices} if devices else {})


def load_generators(states: Mapping[str, Any]) -> None:
    """Restore torch's global generators, except those of devices that this machine lacks.

    ``states`` is a result of :func:`saved_generators`. `torch.load` may have moved its tensors.
    """
    torch.set_rng_state(states["torch"].cpu())
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not (found := states.get(accelerator.type)):
        return
    module = torch.get_device_module(accelerator)
    for n, state in enumerate(found[: torch.accelerator.device_count()]):
        module.set_rng_state(state.cpu(), torch.device(accelerator.type, n))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy ``sources`` to ``targets`` in one call, which no signal handler interrupts."""
    torch._foreach_copy_(targets, sources)


def preloaded_modules() -> list[str]:
    """Return the modules that the fork server was asked to import, by us and by others."""
    return list(getattr(forkserver._forkserver, "_preload_modules", ()))


def set_openblas_threads(threads: int) -> None:
    """Set the number of threads of NumPy's OpenBLAS, which reads its variable only when loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if "openblas" in line}
    for library in map(ctypes.CDLL, sorted(paths)):
        for name in _OPENBLAS_THREADS:
            if (found := getattr(library, name, None)) is not None:
                found(threads)
                break


_OPENBLAS_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads",
)
"""The names of the same function in different packages of OpenBLAS."""


def interpreter_flags() -> list[str]:
    """Return the command-line flags of this interpreter."""
    flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def run_sent(content: int, tracker: int, *files: int) -> int:
    """Run a multiprocessing process that arrives through a pipe; return its exit status.

    ``tracker`` is the pipe of the resource tracker, and ``files`` are the files with which the
    process was pickled.
    """
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = [*files]  # type: ignore[attr-defined]
    status: int = spawn._main(content, os.dup(content))
    return status


def choose_render_device() -> None:
    """Spread processes over the GPUs for EGL rendering, as TorchRL does when it is imported."""
    others = torch.cuda.device_count() - 1
    if others > 0:
        os.environ["EGL_DEVICE_ID"] = str(1 + os.getpid() % others)


def is_starting() -> bool:
    """Return True if this is a started process that still imports its main module."""
    return bool(getattr(process.current_process(), "_inheriting", False))


def run_exit_functions() -> None:
    """Call the functions registered with `atexit`, once."""
    atexit._run_exitfuncs()


# --- TorchRL's transforms -------------------------------------------------------------------------


def keeps_in_shared_memory(normaliser: Any) -> bool:
    """Return True if a `VecNorm` or `VecNormV2` shares its statistics with other processes."""
    own = vars(normaliser)
    found = own.get("_td", own.get("_loc"))
    return found is not None and bool(found.is_shared() or found.is_memmap())


# --- TorchRL's collectors -------------------------------------------------------------------------


def service_backend() -> str | None:
    """Return the backend for collectors that an enclosing `torchrl.service_backend` chose."""
    from torchrl._comm.backends import _get_service_backend

    found: str | None = _get_service_backend()
    return found


def transport_of(updater: Any) -> Any:
    """Return the function with which a weight updater, or a class of updaters, reaches a worker."""
    kind: Any = updater if isinstance(updater, type) else type(updater)
    return kind._sync_weights_with_worker


def server_weights(updater: Any, weights: Any) -> Any:
    """Return ``weights`` as a weight updater maps them; None means the weights of its server."""
    weights = updater._get_server_weights() if weights is None else weights
    return None if weights is None else updater._maybe_map_weights(weights)


def call_post_hooks(updater: Any) -> None:
    """Call the hooks of a weight updater that has sent weights."""
    updater._call_post_hooks()
