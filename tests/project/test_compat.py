"""Tests that the private parts of other libraries that we use exist and behave as we expect."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import inspect
import os
import signal
import sys
from functools import partial, wraps
from multiprocessing import forkserver, get_context, process, resource_tracker, spawn
from pathlib import Path
from traceback import walk_tb
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeReward, RecordEpisodeStatistics, RescaleAction
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torchrl import service_backend
from torchrl.collectors import VanillaWeightUpdater
from torchrl.data import LazyMemmapStorage, ReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

import tallyroll.collector
from tallyroll.collector import compat
from tallyroll.storage import compat as storage_compat

from oracles import OracleEnv, OracleTorchEnv, make_oracle_vec


def test_handlers_are_those_that_signal_has() -> None:
    before = compat.get_handler(signal.SIGINT)
    assert before is signal.getsignal(signal.SIGINT)
    try:
        compat.set_handler(signal.SIGINT, signal.default_int_handler)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_vector_keeps_what_each_lane_returned() -> None:
    env = make_oracle_vec(2, [3], mode=AutoresetMode.NEXT_STEP)
    env.reset(seed=0)
    held = compat.own_observations(env)
    assert [lane.tolist() for lane in held] == [[0, 0, 0], [1, 0, 0]]
    assert compat.own_observations(gymnasium.make_vec("CartPole-v1", 2)) == ()


def test_a_vector_knows_which_lanes_ended() -> None:
    env = make_oracle_vec(2, [2], mode=AutoresetMode.NEXT_STEP)
    env.reset(seed=0)
    found = []
    for _ in range(3):
        env.step(np.zeros(2, np.int64))
        found.append(getattr(env, compat.ENDED).tolist())
    assert found == [[False, False], [True, True], [False, False]]


def test_a_vector_puts_infos_together_by_its_merge() -> None:
    env = make_oracle_vec(2, [3], mode=AutoresetMode.NEXT_STEP)
    seen: list[int] = []
    merge = compat.info_merge(env)

    def watched(infos: dict[str, Any], info: dict[str, Any], lane: int) -> dict[str, Any]:
        seen.append(lane)
        merged: dict[str, Any] = merge(infos, info, lane)
        return merged

    compat.set_info_merge(env, watched)
    assert env.reset(seed=0)[1]["tick"].tolist() == [0, 0]
    assert seen == [0, 1]


def test_a_vector_takes_rewards_of_the_shape_of_its_own_array() -> None:
    env = make_oracle_vec(2, [3], mode=AutoresetMode.NEXT_STEP)
    assert isinstance(env, SyncVectorEnv)
    env.reset(seed=0)
    compat.widen_rewards(env, (2,))
    assert env.step(np.zeros(2, np.int64))[1].shape == (2, 2)


def test_wrappers_keep_what_they_know_of_lanes_in_arrays() -> None:
    env = make_oracle_vec(2, [3], mode=AutoresetMode.NEXT_STEP)
    for wrapper in (RecordEpisodeStatistics(env), NormalizeReward(env)):
        wrapper.reset(seed=0)
        names = compat.states_of_lanes(wrapper)
        assert len(names) >= 1
        assert all(getattr(wrapper, name).shape == (2,) for name in names)
    boxes = make_oracle_vec(2, [3], action="box")
    assert compat.states_of_lanes(RescaleAction(boxes, np.float32(0), np.float32(1))) == ()


@pytest.mark.parametrize("call", ["step", "reset"])
def test_the_lane_under_way_is_in_a_vectors_frame(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_oracle_vec(3, [3], mode=AutoresetMode.NEXT_STEP)
    env.reset(seed=0)

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(env.envs[1].unwrapped, call, broken)
    with pytest.raises(ValueError, match="broken") as error:
        env.step(np.zeros(3, np.int64)) if call == "step" else env.reset()
    found = [compat.lane_in(frame) for frame, _ in walk_tb(error.value.__traceback__)]
    assert {lane for lane in found if lane is not None} == {1}


def test_the_observation_after_a_step() -> None:
    env = OracleTorchEnv(2, [3])
    td = env.rand_step(env.reset())
    assert torch.equal(compat.step_mdp(env, td)["observation"], td["next", "observation"])


def test_hooks_behind_steps_are_an_attribute_of_every_environment() -> None:
    assert "_post_step_mdp_hooks" in vars(EnvBase)
    assert compat.post_step_hook(OracleTorchEnv(2, [3])) is None


def test_an_environment_with_auto_reset_is_told() -> None:
    one = partial(OracleEnv, 0, [3])
    plain = GymWrapper(one(), categorical_action_encoding=True)
    assert not compat.resets_itself(plain)
    assert "_torchrl_native_autoreset" in inspect.getsource(sys.modules[EnvBase.__module__])


def test_stepping_and_resetting_are_two_calls_of_the_base_class() -> None:
    for name in ("step_and_maybe_reset", "_step_and_maybe_reset", "maybe_reset"):
        assert callable(getattr(EnvBase, name)), name
    assert "_compiled_step_and_maybe_reset" in inspect.getsource(sys.modules[EnvBase.__module__])
    assert compat.splits(OracleTorchEnv(2, [3]))


def test_a_parallel_environment_steps_in_buffers() -> None:
    env = ParallelEnv(2, partial(OracleTorchEnv, None, [3]), mp_start_method="fork")
    assert compat.steps_in_buffers(env)
    assert not compat.steps_in_buffers(OracleTorchEnv(2, [3]))


def test_tensors_are_copied_in_one_call() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    compat.copy_all(targets, sources)
    assert all(bool((target == 1).all()) for target in targets)


def test_gradients_are_switched_as_torch_does() -> None:
    before = torch.is_grad_enabled()
    compat.set_gradients(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        compat.set_gradients(before)
    assert torch.is_grad_enabled() == before


def test_the_exploration_type_is_torchrls() -> None:
    place = compat.ExplorationPlace()
    with set_exploration_type(ExplorationType.MEAN):
        assert place.get() is ExplorationType.MEAN
        place.put(ExplorationType.MODE)
        assert exploration_type() is place.get() is ExplorationType.MODE
        place.put(ExplorationType.MEAN)


def test_counting_is_numpys() -> None:
    assert compat.count_true(np.array([[True, False], [True, True]])) == 3
    assert compat.count_true(np.array([0, 5, -1])) == 2


def test_a_network_is_called_where_nothing_else_is() -> None:
    plain = TensorDictModule(torch.nn.Identity(), in_keys=["a"], out_keys=["b"])
    network = compat.network_of(plain)
    assert network() is plain.module
    with plain.register_forward_hook(lambda *given: None):
        assert network() is None
    with register_module_forward_pre_hook(lambda *given: None):
        assert network() is None
    assert network() is plain.module
    named = TensorDictModule(torch.nn.Identity(), in_keys={"input": "a"}, out_keys=["b"])
    assert compat.network_of(named)() is None


@pytest.mark.parametrize("name", compat._CALLED)
def test_a_class_that_was_changed_before_is_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper that looks like the wrapped function counts as a change, too."""
    plain = TensorDictModule(torch.nn.Identity(), in_keys=["a"], out_keys=["b"])
    original = getattr(TensorDictModule, name)
    if isinstance(original, property):
        monkeypatch.setattr(TensorDictModule, name, property(lambda self: original.fget(self)))
    else:
        monkeypatch.setattr(TensorDictModule, name, wraps(original)(lambda *_: None))
    assert compat.network_of(plain)() is None


def test_the_fork_server_says_what_it_preloads() -> None:
    before = list(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
    get_context("forkserver").set_forkserver_preload([*before, "json"])
    try:
        assert compat.preloaded_modules() == [*before, "json"]
    finally:
        get_context("forkserver").set_forkserver_preload(before)


def test_a_process_can_be_run_from_a_pipe() -> None:
    """Our fork server starts workers this way (test_fork_server.py)."""
    assert hasattr(forkserver._forkserver, "_inherited_fds")  # type: ignore[attr-defined]
    assert hasattr(resource_tracker._resource_tracker, "_fd")
    assert [*inspect.signature(spawn._main).parameters] == ["fd", "parent_sentinel"]


def test_the_threads_of_openblas_can_be_set() -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    # SciPy ships its own OpenBLAS, whose functions have other names.
    (path,) = {line.split()[-1] for line in maps if "openblas" in line and "numpy.libs" in line}
    count = ctypes.CDLL(path).scipy_openblas_get_num_threads64_
    before = count()
    try:
        compat.set_openblas_threads(before + 2)
        assert count() == before + 2
    finally:
        compat.set_openblas_threads(before)


def test_processes_render_on_the_gpus_that_torchrl_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TorchRL chooses the GPU on import, which a fork server does for all of its processes."""
    monkeypatch.setenv("EGL_DEVICE_ID", "as before")
    compat.choose_render_device()
    assert torch.cuda.device_count() > 1 or os.environ["EGL_DEVICE_ID"] == "as before"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    compat.choose_render_device()
    assert os.environ["EGL_DEVICE_ID"] == str(1 + os.getpid() % 3)
    source = inspect.getsource(importlib.import_module("torchrl.envs.libs.dm_control"))
    assert 'os.environ["EGL_DEVICE_ID"] = str(1 + (os.getpid() % n))' in source


def test_a_process_knows_whether_it_still_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.is_starting()
    monkeypatch.setattr(process.current_process(), "_inheriting", True, raising=False)
    assert compat.is_starting()
    assert "_inheriting" in inspect.getsource(sys.modules["multiprocessing.spawn"])


def test_exit_functions_can_be_run_early() -> None:
    assert callable(atexit._run_exitfuncs)


# --- storages -------------------------------------------------------------------------------------


def test_a_tensordict_is_a_dictionary_and_is_made_of_one() -> None:
    td = TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3], names=["x", "y"])
    assert list(storage_compat.entries_of(td)) == ["a"]
    assert list(storage_compat.names_of(td)) == ["x", "y"]
    made = storage_compat.new_tensordict(
        source={"a": td["a"]}, batch_size=torch.Size([2]), nested=False
    )
    assert made["a"] is td["a"]
    assert made.batch_size == (2,)
    entries = {"a": td["a"]}
    plain, usual = storage_compat.plain_tensordict(entries, torch.Size([2])), TensorDict({}, [2])
    assert vars(plain) == vars(usual) | {"_tensordict": entries}
    assert {key: type(value) for key, value in vars(plain).items()} == {
        key: type(value) for key, value in vars(usual).items()
    }
    assert storage_compat.entries_of(plain) is entries


def test_torch_compares_the_looks_of_tensors() -> None:
    """Without the guards of torch, small appends take the slow path."""
    assert storage_compat.tensor_guards() is not None


def test_replay_buffers_have_writers_with_cursors(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path)
    made: list[RoundRobinWriter] = []

    def make() -> RoundRobinWriter:
        made.append(RoundRobinWriter())
        return made[-1]

    buffer = ReplayBuffer(storage=storage, batch_size=2, delayed_init=True)
    assert getattr(buffer, storage_compat.WRITER, None) is None
    for name, value in ((storage_compat.WRITER_MAKER, make), (storage_compat.COLLATE, list)):
        assert getattr(buffer, name) is None
        setattr(buffer, name, value)
    buffer.extend(TensorDict({"a": torch.arange(3)}, [3]))
    assert getattr(buffer, storage_compat.WRITER) is made[0]
    assert list(buffer.sample()) != []
    assert storage_compat.attached_buffers(storage) == [buffer]
    assert getattr(made[0], storage_compat.CURSOR) == 3
    assert not storage_compat.counts_in_64_bits(made[0])
    assert storage_compat.counts_in_64_bits(RoundRobinWriter(compilable=True))


def test_nothing_private_of_others_is_used_elsewhere() -> None:
    """Ruff does not see attributes that code looks up by name."""
    root = Path(tallyroll.collector.__file__).parent
    for path in [*root.rglob("*.py"), *(root.parent / "storage").rglob("*.py")]:
        if path.name != "compat.py":
            text = path.read_text(encoding="utf-8")
            assert 'attr(self._vec, "_' not in text, path
            for name in ("_init_writer", "_env_obs", "_tensordict", "_new_unsafe", "_inheriting"):
                assert f'"{name}"' not in text, (path, name)
                assert f".{name}" not in text, (path, name)


def test_torchrl_says_where_services_run_by_default() -> None:
    assert compat.service_backend() is None
    with service_backend("process"):
        assert compat.service_backend() == "process"


def test_weight_updaters_have_weights_a_transport_and_hooks() -> None:
    weights, hooked = TensorDict({"w": torch.zeros(2)}), []
    updater = VanillaWeightUpdater(weight_getter=lambda: weights, policy_weights=weights.clone())
    assert compat.server_weights(updater, None) is weights
    other = weights + 1
    assert compat.server_weights(updater, other) is other
    assert compat.transport_of(updater) is compat.transport_of(VanillaWeightUpdater)
    updater.register_post_hook(lambda: hooked.append(True))
    compat.call_post_hooks(updater)
    assert hooked == [True]


def test_a_process_of_a_vector_calls_and_says_what_it_raised() -> None:
    env = AsyncVectorEnv([partial(OracleEnv, 0, [3])] * 2, context="fork")
    try:
        assert compat.call_lane(env, 1, "has_wrapper_attr", "lane") is True
        assert compat.call_lane(env, 0, "set_wrapper_attr", "lane", 7, force=False) is True
        assert [compat.call_lane(env, lane, "get_wrapper_attr", "lane") for lane in (0, 1)] == [
            7,
            0,
        ]
        with pytest.raises(AttributeError) as raised:
            compat.call_lane(env, 0, "no_such_name")
        assert "its process has ended" in raised.value.__notes__[0]
        with pytest.raises(RuntimeError, match="the process of the lane has ended"):
            compat.call_lane(env, 0, "has_wrapper_attr", "lane")
    finally:
        env.close(terminate=True)


def test_a_wrapper_has_a_shape_and_no_memory() -> None:
    class Wrapper(torch.Tensor):
        __torch_dispatch__ = None

    made = storage_compat.wrapper_tensor(Wrapper, (2, 3), dtype=torch.uint8)
    assert (type(made), made.shape, made.dtype) == (Wrapper, (2, 3), torch.uint8)
    assert made.device.type == "cpu"
