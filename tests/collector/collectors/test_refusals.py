"""Each refusal names the expected value, the given one and the remedy, before any file changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.data import Binary, Composite, NonTensor, Unbounded

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector, errors, evaluate
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import (
    ArgumentError,
    CollectorError,
    EnvironmentRefused,
    LedgerError,
    MissingExtra,
    NameRefused,
    SpaceError,
    StateError,
    TransitionError,
)
from tallyroll.storage import (
    MemmapStorage,
    SchemaMismatch,
    StorageExists,
    StorageMissing,
    open_storage,
)
from tallyroll.storage.errors import NotAStorage, NotWritable, PathIsFile

from collect_kit import LENGTHS, collect
from oracles import OracleEnv, OracleTorchEnv, OracleVectorEnv, make_oracle_vec

BUDGET: dict[str, Any] = {"frames_per_batch": 5, "total_frames": 10}


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Path]:
    """Yield a path for a storage, and check that nothing was created."""
    yield tmp_path / "s"
    assert list(tmp_path.iterdir()) == []


def torch_env() -> OracleTorchEnv:
    return OracleTorchEnv(3, LENGTHS)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"frames_per_batch": 0}, "frames_per_batch: expected an integer above 0, got 0"),
        ({"frames_per_batch": -3}, "frames_per_batch: expected an integer above 0, got -3"),
        ({"frames_per_batch": 2.0}, r"frames_per_batch: expected an integer, got 2.0 \(float\)"),
        ({"frames_per_batch": True}, r"frames_per_batch: expected an integer, got True \(bool\)"),
        ({"frames_per_batch": "9"}, r"frames_per_batch: expected an integer, got '9' \(str\)"),
        ({"frames_per_batch": None}, r"frames_per_batch: expected an integer, got None"),
        ({"total_frames": 0}, "total_frames: expected an integer above 0, got 0"),
        ({"total_frames": -2}, "total_frames: expected an integer above 0, got -2"),
        ({"total_frames": 1e6}, r"total_frames: expected an integer, got 1000000.0 \(float\)"),
        ({"total_frames": True}, r"total_frames: expected an integer, got True \(bool\)"),
        ({"total_frames": None}, r"expected either total_frames .* or total_episodes, got"),
        ({"total_episodes": 3}, r"or total_episodes, got total_frames=10, total_episodes=3"),
        (
            {"total_frames": None, "total_episodes": 0},
            "total_episodes: expected an integer above 0",
        ),
        (
            {"total_frames": None, "total_episodes": 2.5},
            "total_episodes: expected an integer, got 2",
        ),
        (
            {"total_frames": None, "total_episodes": 2, "reset_at_each_iter": True},
            "total_episodes counts whole episodes, but reset_at_each_iter cuts them. Drop one.",
        ),
        (
            {"init_random_frames": -1},
            "init_random_frames: expected an integer of at least 0, got -1",
        ),
        ({"init_random_frames": 1.5}, "init_random_frames: expected an integer, got 1.5"),
        ({"max_frames_per_traj": 0}, "max_frames_per_traj: expected an integer above 0, got 0"),
        ({"frame_skip": 0}, "frame_skip: expected an integer above 0, got 0"),
        ({"frame_skip": 1.5}, "frame_skip: expected an integer, got 1.5"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"seed": "7"}, "seed: expected an integer, got '7'"),
        (
            {"layout": "columns"},
            r"layout: expected one of \['rows', 'lanes', 'trajectories', 'torchrl'\], got",
        ),
        (
            {"surplus": "keep"},
            r"surplus: expected one of \['carry', 'discard', 'never_step'\], got",
        ),
        (
            {"validate": "maybe"},
            r"validate: expected one of \['noise', 'raise', 'warn', 'off'\], got",
        ),
        (
            {"num_envs": 3},
            "num_envs=3: expected an id or a fact.* leave num_envs out, because this env",
        ),
        ({"env_kwargs": {"a": 1}}, "env_kwargs: expected the id of an environment"),
        ({"info_keys": ["lives"]}, "lives|info_keys"),
        (
            {"replay_buffer": 7},
            "replay_buffer: expected a torchrl ReplayBuffer, got int. Pass a storage",
        ),
    ],
)
def test_arguments_that_cannot_be_right(
    kwargs: dict[str, Any], match: str, untouched: Path
) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(torch_env(), **{**BUDGET, "storage": untouched, **kwargs})


def test_numpy_integers_are_integers() -> None:
    batches, _ = collect(
        torch_env(), frames_per_batch=np.int64(5), total_frames=np.int32(10), seed=np.uint8(3)
    )
    assert [len(batch) for batch in batches] == [5, 5]


@pytest.mark.parametrize(
    ("create", "kwargs", "match"),
    [
        ("NoSuchEnv-v0", {}, "gymnasium cannot make 'NoSuchEnv-v0'.*NoSuchEnv"),
        ("CartPole-v99", {}, "gymnasium cannot make 'CartPole-v99'"),
        ("no_such_module:Env-v0", {}, "gymnasium cannot make 'no_such_module:Env-v0'|no_such_mod"),
        ("not an id", {}, "gymnasium cannot make 'not an id'"),
        ("CartPole-v1", {"num_envs": 0}, "num_envs: expected an integer above 0, got 0"),
        ("CartPole-v1", {"num_envs": 2.0}, r"num_envs: expected an integer, got 2.0 \(float\)"),
        (
            "CartPole-v1",
            {"env_kwargs": {"gravity_of": 3}},
            "gymnasium cannot make 'CartPole-v1' with {'gravity_of': 3}",
        ),
        (
            "CartPole-v1",
            {"info_keys": ["lives"]},
            "info key 'lives' is not in the infos of a reset or",
        ),
        (lambda: 7, {}, "expected a Gymnasium id, a TorchRL EnvBase, .* got a factory of int"),
        (lambda: None, {}, "create_env_fn: expected a Gymnasium id, .* got a factory of NoneType"),
        (None, {}, "create_env_fn: expected a Gymnasium id, .* got NoneType"),
        (
            gym.make("CartPole-v1"),
            {"num_envs": 3},
            "got a single gymnasium environment, .*. Pass its id, or a function that makes one",
        ),
        (
            lambda: gym.make_vec("CartPole-v1", num_envs=2),
            {"num_envs": 3},
            "num_envs=3: expected an id or a factory of .*, got a factory of CartPoleVectorEnv",
        ),
        (lambda: 7, {"num_envs": 2}, "num_envs=2: expected .*, got a factory of int"),
    ],
)
def test_environments_that_cannot_be_made(
    create: Any, kwargs: dict[str, Any], match: str, untouched: Path
) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(create, storage=untouched, **BUDGET, **kwargs)


def test_a_factory_that_raises_raises(untouched: Path) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("no simulator here")

    with pytest.raises(ZeroDivisionError, match="no simulator here"):
        SyncCollector(broken, storage=untouched, **BUDGET)


def _policy(observation: torch.Tensor, scale: float = 1) -> torch.Tensor:
    raise AssertionError("this is no factory")


@pytest.mark.parametrize(
    ("policy", "needs"),
    [
        (_policy, "_policy, which needs observation"),
        (partial(_policy, scale=2), "partial, which needs observation"),
        (torch.nn.Linear(4, 2), "Linear, which needs input"),
    ],
)
def test_a_policy_in_the_place_of_the_environment(policy: Any, needs: str, untouched: Path) -> None:
    with pytest.raises(ArgumentError, match=needs):
        SyncCollector(policy, storage=untouched, **BUDGET)
    with pytest.raises(ArgumentError, match="If it is the policy, pass it as the second"):
        evaluate("CartPole-v1", policy, episodes=1)  # type: ignore[arg-type]


class Undeclared(OracleVectorEnv):
    """Vector environment that does not declare its autoreset mode."""

    metadata: dict[str, Any] = {}  # noqa: RUF012  gymnasium declares it so


class DisabledNative(OracleVectorEnv):
    """Vector environment that neither resets by mask nor resets itself."""

    metadata: dict[str, Any] = {  # noqa: RUF012  gymnasium declares it so
        "autoreset_mode": AutoresetMode.DISABLED
    }


def test_vectors_that_would_lose_transitions_are_refused(untouched: Path) -> None:
    for make, match in (
        (
            Undeclared,
            "Undeclared does not declare how it resets lanes: expected env.unwrapped.autore",
        ),
        (DisabledNative, "DisabledNative has autoreset disabled and no reset by mask"),
    ):
        with pytest.raises(EnvironmentRefused, match=match):
            SyncCollector(make(3, LENGTHS), storage=untouched, **BUDGET)
    with pytest.raises(
        EnvironmentRefused, match='reset_slots="avoid" resets lanes by mask, but Or'
    ):
        SyncCollector(OracleVectorEnv(3, LENGTHS), reset_slots="avoid", storage=untouched, **BUDGET)
    with pytest.raises(ArgumentError, match=r"reset_slots: expected one of \['mask', 'avoid'\]"):
        SyncCollector(
            OracleVectorEnv(3, LENGTHS),
            reset_slots="skip",  # type: ignore[arg-type]
            storage=untouched,
            **BUDGET,
        )


def test_a_vector_adapter_takes_vectors_only() -> None:
    with pytest.raises(
        ArgumentError, match=r"expected a gymnasium.vector.VectorEnv, got OracleEnv"
    ):
        GymnasiumVectorEnv(OracleEnv())  # type: ignore[arg-type]


class WithSpaces(OracleEnv):
    """Oracle with other spaces."""

    def __init__(self, observation: Any = None, action: Any = None) -> None:
        super().__init__()
        self.observation_space = observation or self.observation_space
        self.action_space = action or self.action_space


SEQUENCE = gym.spaces.Sequence(gym.spaces.Discrete(2))


@pytest.mark.parametrize(
    ("spaces", "match"),
    [
        (
            {"observation": gym.spaces.Graph(gym.spaces.Discrete(2), None)},
            r"Graph.* at observation has no fixed dtype and shape",
        ),
        (
            {"observation": gym.spaces.Dict(a=gym.spaces.Dict(b=SEQUENCE))},
            r"at a/b has no fixed dtype and shape",
        ),
        (
            {"observation": SEQUENCE},
            "no fixed dtype and shape that a column could hold; wrap the environment",
        ),
        (
            {"action": gym.spaces.Dict(a=gym.spaces.Discrete(2))},
            "expected a Box, Discrete, MultiDiscrete or MultiBinary action space, got Dict",
        ),
        ({"action": gym.spaces.Text(5)}, "at action has no fixed dtype and shape"),
    ],
)
def test_spaces_without_columns(spaces: dict[str, Any], match: str, untouched: Path) -> None:
    def make() -> Any:
        return SyncVectorEnv([partial(WithSpaces, **spaces)])

    with pytest.raises(SpaceError, match=match):
        SyncCollector(make, storage=untouched, **BUDGET)


def test_an_info_named_like_an_observation_is_refused(untouched: Path) -> None:
    class Twice(OracleEnv):
        def _info(self) -> dict[str, Any]:
            return {"observation": 1}

    with pytest.raises(
        NameRefused,
        match=r"'observation' is taken twice: an observation has it, and an info has it; .*rename=",
    ):
        SyncCollector(
            SyncVectorEnv([Twice]), info_keys=["observation"], storage=untouched, **BUDGET
        )


# --- storages -----------------------------------------------------------------------------------


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_an_existing_storage_is_not_written_over(tmp_path: Path) -> None:
    collect(torch_env(), storage=tmp_path / "s", **BUDGET)
    before = snapshot(tmp_path)
    with pytest.raises(StorageExists, match=r"holds a storage already\. Pass resume=True"):
        SyncCollector(torch_env(), storage=tmp_path / "s", **BUDGET)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_is_no_place_for_a_storage(below: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(PathIsFile, match=r"should be a directory, but .* is a file. Give another"):
        SyncCollector(torch_env(), storage=tmp_path / "s" / below, **BUDGET)
    assert (tmp_path / "s").read_text() == "precious"


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(
        errors_of_storage("DirectoryNotEmpty"), match="is not empty: it holds thesis"
    ):
        SyncCollector(torch_env(), storage=tmp_path, **BUDGET)
    assert snapshot(tmp_path) == {str(tmp_path / "thesis.tex"): b"precious"}


def errors_of_storage(name: str) -> type[Exception]:
    from tallyroll.storage import errors as storage_errors

    found: type[Exception] = getattr(storage_errors, name)
    return found


def test_a_place_that_cannot_be_written() -> None:
    # Root may write everywhere except here.
    with pytest.raises(NotWritable, match="/proc/tallyroll cannot be created"):
        collect(torch_env(), storage="/proc/tallyroll", **BUDGET)


def test_resuming_what_is_not_there(untouched: Path) -> None:
    with pytest.raises(StorageMissing, match=r"resume=True needs .* or pass resume=.auto. to"):
        SyncCollector(torch_env(), storage=untouched, resume=True, **BUDGET)


def test_resuming_something_else(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "zarr"}')
    before = snapshot(tmp_path)
    with pytest.raises(NotAStorage, match="does not describe a Tallyroll storage"):
        SyncCollector(torch_env(), storage=tmp_path, resume=True, **BUDGET)
    assert snapshot(tmp_path) == before


def test_resuming_without_a_storage() -> None:
    with pytest.raises(ArgumentError, match="resume=True needs a storage that holds the run to be"):
        SyncCollector(torch_env(), resume=True, **BUDGET)


def test_resuming_what_no_collector_wrote(tmp_path: Path) -> None:
    batches, _ = collect(torch_env(), **BUDGET)
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(batches[0])
    before = snapshot(tmp_path)
    with pytest.raises(StateError, match=r"holds no run of a collector|not written by a collector"):
        SyncCollector(torch_env(), storage=tmp_path / "s", resume=True, **BUDGET)
    assert {k: v for k, v in snapshot(tmp_path).items() if "memmap" in k} == {
        k: v for k, v in before.items() if "memmap" in k
    }


@pytest.mark.parametrize("resumes", [True, False])
def test_arguments_that_change_the_columns_are_named(tmp_path: Path, resumes: bool) -> None:
    options: dict[str, Any] = {"frames_per_batch": 10, "storage": tmp_path / "s", "num_envs": 2}
    with SyncCollector("CartPole-v1", total_frames=20, seed=0, **options) as collector:
        collector.collect(10)
    options |= {"total_frames": 20, "max_frames_per_traj": 5}
    if resumes:
        options["resume"] = True
    else:
        options["storage"] = MemmapStorage(tmp_path / "s", mode="append")
    with pytest.raises(
        SchemaMismatch,
        match=r"step_count is not a column here.* changed .*: max_frames_per_traj was None, is 5\.",
    ), SyncCollector("CartPole-v1", **options) as collector:  # fmt: skip
        collector.collect(10)
    if not resumes:
        options["storage"].close()
    with open_storage(tmp_path / "s") as storage:
        assert len(storage) == 10


def test_a_storage_of_other_columns_names_each_difference(tmp_path: Path) -> None:
    collect(torch_env(), storage=tmp_path / "s", **BUDGET)
    before = snapshot(tmp_path)
    with MemmapStorage(tmp_path / "s", mode="append") as storage:
        match = "has other columns than the data: .*action.*; .*; .*observation"
        with pytest.raises(SchemaMismatch, match=match) as caught:
            SyncCollector(
                OracleTorchEnv(3, LENGTHS, kind="uint8", action="box"), storage=storage, **BUDGET
            )
        for named in ("action", "observation", "float32", "uint8"):
            assert named in str(caught.value)
        assert len(storage) == 10
    after = snapshot(tmp_path)
    assert all(after[name] == before[name] for name in before if name.endswith(".memmap"))
    assert (
        after[str(tmp_path / "s" / "manifest.json")]
        == before[str(tmp_path / "s" / "manifest.json")]
    )


def test_a_storage_that_is_only_read_cannot_be_collected_into(tmp_path: Path) -> None:
    collect(torch_env(), storage=tmp_path / "s", **BUDGET)
    with (
        MemmapStorage(tmp_path / "s", mode="read") as storage,
        pytest.raises(ArgumentError, match=r'is open for reading. Open it with mode="append"'),
    ):
        SyncCollector(torch_env(), storage=storage, **BUDGET)


def test_a_torchrl_storage_goes_into_a_replay_buffer() -> None:
    from torchrl.data import LazyTensorStorage

    with pytest.raises(
        ArgumentError, match="storage: expected a path or a tallyroll storage, got Laz"
    ):
        SyncCollector(torch_env(), storage=LazyTensorStorage(9), **BUDGET)  # type: ignore[arg-type]


# --- the error tree, and internal errors --------------------------------------------------------


def test_every_error_has_the_same_root() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    found = [each for each in classes if each.__module__ == errors.__name__]
    assert all(issubclass(each, CollectorError) for each in found)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(errors.MissingExtra, ImportError)
    drawn = errors.__doc__ or ""
    assert all(each.__name__ in drawn and each.__doc__ for each in found)


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        (
            {"slots": 5, "executed": 3},
            r"expected slots = executed \+ reset_slots, got 5 and 3 \+ 0",
        ),
        (
            {"slots": 5, "executed": 5, "stored": 3, "carried": 1},
            r"expected executed = stored \+ .*, got 5 and 3 \+ 0 \+ 1 \+ 0",
        ),
        (
            {"slots": 2, "executed": 2, "stored": 3, "discarded": -1},
            "expected counts of at least 0, got {'discarded': -1}",
        ),
    ],
)
def test_a_ledger_that_does_not_balance_says_so(counts: dict[str, int], match: str) -> None:
    with pytest.raises(LedgerError, match=match):
        Ledger(**counts).check()


def test_a_ledger_knows_its_counts() -> None:
    with pytest.raises(LedgerError, match=r"names of counts among \['agent_tra.*, got \['stars'\]"):
        Ledger().load({"stars": 3})


def test_the_collector_closes_what_it_made_when_it_refuses() -> None:
    vectors = []

    def make() -> Any:
        vectors.append(make_oracle_vec(3, LENGTHS))
        return vectors[0]

    with pytest.raises(ArgumentError, match="never_step"):
        SyncCollector(make, surplus="never_step", **BUDGET)
    assert vectors[0].closed


# --- environments that would falsify data -----------------------------------------------------


class Forgetful(OracleVectorEnv):
    """Vector environment that declares SAME_STEP but returns no final observations."""

    metadata: dict[str, Any] = {  # noqa: RUF012  gymnasium declares it so
        "autoreset_mode": AutoresetMode.SAME_STEP
    }


def test_same_step_without_final_observations_is_an_error() -> None:
    with pytest.raises(TransitionError, match='Forgetful declares finals="extra", but'):
        collect(Forgetful(3, [[2]]), frames_per_batch=50, total_frames=50)


class Widening(OracleVectorEnv):
    """Vector environment whose steps return float64 observations of the declared shape."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, *rest = super().step(actions)
        return obs.astype(np.float64), *rest


class Shrinking(OracleVectorEnv):
    """Vector environment whose steps return only the first number, which would be broadcast."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, *rest = super().step(actions)
        return obs[:, :1], *rest


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Widening, r"declares float32 \[3, 3\], the environment returned float64 \[3, 3\]"),
        (Shrinking, r"declares float32 \[3, 3\], the environment returned float32 \[3, 1\]"),
    ],
)
def test_observations_that_are_not_as_declared_are_an_error(
    kind: type[OracleVectorEnv], match: str
) -> None:
    with pytest.raises(TransitionError, match=match):
        collect(kind(3, [[2]]), frames_per_batch=9, total_frames=9)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        ("gymnasium.envs.functional_jax_env", "returns reward 1 in reset slots, and loses the t"),
        ("envpool.python.envpool", "Gymnasium wrappers hide EnvPool environments"),
        ("supersuit.vector", "SuperSuit's vectors return wrong results if agents die"),
    ],
)
def test_vectors_that_are_known_to_be_wrong_are_refused(
    module: str, match: str, untouched: Path
) -> None:
    known = type("Known", (OracleVectorEnv,), {"__module__": module})
    with pytest.raises(EnvironmentRefused, match=match):
        SyncCollector(known(3, LENGTHS), storage=untouched, **BUDGET)


class Odd(OracleTorchEnv):
    """Environment with an additional observation column, or without `done` at its root."""

    def __init__(self, key: Any = None, spec: Any = None) -> None:
        super().__init__(3, LENGTHS)
        self.key, self.spec = key, spec
        if key is not None:
            self.observation_spec[key] = spec

    def _out(self, *args: Any) -> Any:
        out = super()._out(*args)
        return out if self.key is None else out.set(self.key, self.spec.zero())


def test_a_column_that_is_no_tensor_is_refused(untouched: Path) -> None:
    odd = Odd("words", NonTensor(shape=(3,)))
    with pytest.raises(
        EnvironmentRefused, match=r'words is NonTensor, .*FixedWidth\(\{"words": bytes\}\)\), or'
    ):
        SyncCollector(odd, storage=untouched, **BUDGET)


def test_keys_that_tallyroll_keeps_for_itself_are_refused(untouched: Path) -> None:
    odd = Odd(("collector", "mine"), Unbounded((3, 1)))
    with pytest.raises(
        NameRefused, match=r"'collector/mine' and the name 'collector' collide.*rename=\{'coll"
    ):
        SyncCollector(odd, storage=untouched, **BUDGET)


def test_an_environment_without_a_done_of_its_own_is_refused(untouched: Path) -> None:
    env = OracleTorchEnv(3, LENGTHS)
    flag = Binary(1, (3, 1), dtype=torch.bool)
    env.full_done_spec = Composite(
        agent=Composite(done=flag, terminated=flag.clone(), shape=(3,)), shape=(3,)
    )
    with pytest.raises(
        EnvironmentRefused, match="expected a root-level 'done' in addition to those o"
    ):
        SyncCollector(env, storage=untouched, **BUDGET)


@pytest.mark.parametrize(
    ("env_id", "extra"), [("ALE/Pong-v5", "atari"), ("HalfCheetah-v5", "mujoco")]
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, env_id: str, extra: str
) -> None:
    # Hide the modules: they may be installed, and another test may have imported them.
    for name in [*sys.modules]:
        if name.startswith("gymnasium.envs.mujoco"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    monkeypatch.delitem(gym.registry, "ALE/Pong-v5", raising=False)
    monkeypatch.setattr("tallyroll.collector.envs.gymnasium.make.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf'pip install "tallyroll\[{extra}\]"'):
        SyncCollector(env_id, frames_per_batch=8, total_frames=8)


def test_a_reward_of_several_numbers_is_named() -> None:
    class Several(OracleVectorEnv):
        def step(self, actions: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(actions)
            return obs, np.stack([reward, reward], axis=1), terminated, truncated, info

    with pytest.raises(TransitionError, match=r"'reward': \[3, 2\].*reduce a vector of rewards"):
        collect(Several(3, LENGTHS), None, **BUDGET)


def test_info_keys_are_several() -> None:
    with pytest.raises(ArgumentError, match="info_keys: expected a sequence of names, got 'lives'"):
        SyncCollector("CartPole-v1", info_keys="lives", **BUDGET)


class TwoObjectives(OracleVectorEnv):
    """Vector environment whose rewards are vectors."""

    def step(self, actions: Any) -> Any:
        """Step, and repeat each reward."""
        obs, reward, *rest = super().step(actions)
        return obs, np.stack([reward, reward], 1), *rest


def test_vector_rewards_are_told_by_name() -> None:
    with pytest.raises(TransitionError, match="reward"):
        collect(TwoObjectives(2, LENGTHS), frames_per_batch=4, total_frames=12)


def test_a_new_storage_has_nothing_to_resume(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path / "runs") as storage,
        pytest.raises(StateError, match=r"no run yet|begins a storage"),
    ):
        SyncCollector(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=8,
            storage=storage,
            resume=True,
        )


def test_two_layouts_at_once_are_refused() -> None:
    with pytest.raises(ArgumentError, match="split_trajs"):
        SyncCollector(
            make_oracle_vec(2, LENGTHS),
            frames_per_batch=4,
            total_frames=8,
            layout="lanes",
            split_trajs=True,
        )
