"""Tests of the promises of a recorder: transparency, exact counts, refusals and commits."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torchrl.data import ReplayBuffer

from tallyroll.collector import (
    ArgumentError,
    EnvironmentRefused,
    EnvironmentUnknown,
    NameRefused,
    Recorder,
    StateError,
    SyncCollector,
    UnknownArgument,
    replay,
)
from tallyroll.collector import report as report_runs
from tallyroll.collector.cli import main
from tallyroll.collector.errors import PolicyError, TransitionError, ValueRefused
from tallyroll.collector.ext.recorder import recorded_run
from tallyroll.storage import MemmapStorage, TrajectorySliceSampler, open_storage, verify
from tallyroll.storage.errors import SchemaMismatch, StorageExists, StorageLocked

from collect_kit import balanced
from oracles import OracleEnv, OracleVectorEnv, check_rows, make_oracle_vec

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]


def play(envs: Any, steps: int) -> None:
    for _ in range(steps):
        envs.step(np.zeros(envs.num_envs, np.int64))


def head_of(path: Path) -> int:
    assert verify(path).sound
    with open_storage(path) as storage:
        return int(storage.head)


# --- transparency ---------------------------------------------------------------------------------


class Spy(gym.vector.VectorWrapper):
    """A vector that keeps its arguments and results."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.calls: list[Any] = []

    def step(self, actions: Any) -> Any:
        self.calls.append(("step", actions, out := self.env.step(actions)))
        return out

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        out = self.env.reset(seed=seed, options=options)
        self.calls.append(("reset", (seed, options), out))
        return out


def test_it_passes_the_same_objects_and_calls_nothing_of_its_own(tmp_path: Path) -> None:
    spy = Spy(make_oracle_vec(3, LENGTHS))
    generators = torch.get_rng_state(), np.random.get_state()[1].tolist()
    envs = Recorder(spy, storage=tmp_path / "rows", total_frames=20, commit_every=3)
    options: dict[str, Any] = {"note": 1}
    seed, actions = [1, 2, 3], [np.zeros(3, np.int64) for _ in range(12)]
    results = [envs.reset(seed=seed, options=options)]
    results += [envs.step(action) for action in actions]  # the run is full before the last
    envs.close()
    assert [name for name, *_ in spy.calls] == ["reset"] + ["step"] * 12
    assert spy.calls[0][1][0] is seed
    assert spy.calls[0][1][1] is options
    assert all(call[1] is action for call, action in zip(spy.calls[1:], actions, strict=True))
    assert all(call[2] is out for call, out in zip(spy.calls, results, strict=True))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == np.random.get_state()[1].tolist()
    assert isinstance(envs, gym.vector.VectorWrapper)
    assert envs.unwrapped is spy.unwrapped
    assert envs.single_action_space is spy.single_action_space


def test_an_observation_that_the_environment_writes_again_is_copied(tmp_path: Path) -> None:
    vector = make_oracle_vec(2, LENGTHS, vec_kwargs={"copy": False})
    with Recorder(vector, storage=tmp_path / "rows", total_frames=30) as envs:
        envs.reset()
        while not envs.full:
            envs.step(np.ones(2, np.int64))
    with open_storage(tmp_path / "rows") as storage:
        check_rows(storage.get(slice(0, 30)), LENGTHS, from_start=True)


def test_actions_of_other_forms_are_stored_as_the_space_has_them(tmp_path: Path) -> None:
    env = OracleEnv(action="box")
    with Recorder(env, storage=tmp_path / "rows") as recorder:
        recorder.reset()
        recorder.step(np.array([0.1, -0.2], np.float32))
    envs = make_oracle_vec(2, action="discrete")
    with Recorder(envs, storage=tmp_path / "others") as recorder:
        recorder.reset()
        recorder.step(np.array([1, 0], np.int32))
        recorder.step([0, 1])
        with pytest.raises(ValueRefused, match="action at lane 0"):
            recorder.step(np.array([0.5, 1]))
        with pytest.raises(ArgumentError, match=r"action: expected int64 of shape \[2\], got"):
            recorder.step(np.zeros((2, 2), np.int64))
    with open_storage(tmp_path / "rows") as storage:
        assert storage.get(slice(0, 1))["action"].tolist() == [
            np.array([0.1, -0.2], np.float32).tolist()
        ]
    with open_storage(tmp_path / "others") as storage:
        assert storage.get(slice(0, 4))["action"].tolist() == [1, 0, 0, 1]


# --- the budget -----------------------------------------------------------------------------------


def test_the_last_step_stores_its_first_lanes_and_discards_the_rest(tmp_path: Path) -> None:
    envs = Recorder(make_oracle_vec(3, [9]), storage=tmp_path / "rows", total_frames=7)
    envs.reset()
    play(envs, 2)
    assert not envs.full
    play(envs, 1)
    assert envs.full
    play(envs, 4)
    envs.reset()
    counts = envs.ledger.counts()
    assert [counts[name] for name in ("slots", "executed", "stored", "discarded")] == [9, 9, 7, 2]
    assert balanced(envs.ledger)
    envs.close()
    assert head_of(tmp_path / "rows") == 7


def test_steps_after_the_budget_raise_on_request(tmp_path: Path) -> None:
    with Recorder(
        make_oracle_vec(3, [9]), storage=tmp_path / "rows", total_frames=3, at_end="raise"
    ) as envs:
        envs.reset()
        play(envs, 1)
        with pytest.raises(StateError, match="all 3 transitions"):
            play(envs, 1)


def test_a_resumed_run_continues_its_counts_ids_and_budget(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with Recorder(make_oracle_vec(2, [3]), storage=path, total_frames=20) as envs:
        envs.reset()
        play(envs, 3)
        first = envs.ledger
    for resume in (True, "auto"):
        with Recorder(
            make_oracle_vec(2, [3]), storage=path, total_frames=20, resume=resume
        ) as envs:
            assert envs.ledger.stored > first.stored - 7
            envs.reset()
            play(envs, 2)
    with Recorder(make_oracle_vec(2, [3]), storage=path, total_frames=20, resume=True) as envs:
        envs.reset()
        while not envs.full:
            play(envs, 1)
        assert envs.ledger.stored == 20
    assert head_of(path) == 20
    with Recorder(make_oracle_vec(2, [3]), storage=path, total_frames=20, resume=True) as envs:
        assert envs.full
        envs.reset()
        play(envs, 3)
    with open_storage(path) as storage:
        ids = storage.get(slice(0, 20))["collector", "traj_ids"].tolist()
        runs = storage.manifest["runs"]
    assert len(runs[-1]["versions"]) > 3
    pairs = {(number, number % 2) for number in ids}
    assert len(pairs) == len(set(ids))
    with pytest.raises(StorageExists, match="resume=True"):
        Recorder(make_oracle_vec(2, [3]), storage=path)


# --- annotations and versions ---------------------------------------------------------------------


def test_annotations_and_versions_belong_to_the_next_step(tmp_path: Path) -> None:
    columns = {"logp": np.float32, "logits": np.dtype((np.float64, (3,))), "greedy": bool}
    with Recorder(
        make_oracle_vec(2, [9]), storage=tmp_path / "rows", columns=columns, commit_every=2
    ) as envs:
        envs.reset()
        assert envs.policy_version == -1
        for step in range(5):
            envs.policy_version = step
            envs.annotate(logp=np.array([step, -step]), greedy=np.array([True, False]))
            envs.annotate(logits=torch.full((2, 3), step / 3, dtype=torch.float64))
            play(envs, 1)
    with open_storage(tmp_path / "rows") as storage:
        rows = storage.get(slice(0, 10))
    rows = rows[rows["collector", "lane"] == 1]
    assert rows["logp"].tolist() == [0, -1, -2, -3, -4]
    assert rows["logits"].tolist() == [[step / 3] * 3 for step in range(5)]
    assert rows["greedy"].tolist() == [False] * 5
    assert rows["collector", "policy_version"].tolist() == [0, 1, 2, 3, 4]


def test_an_annotation_must_come_before_each_step_and_fit(tmp_path: Path) -> None:
    with Recorder(
        make_oracle_vec(2, [9]), storage=tmp_path / "rows", columns={"logp": np.float32}
    ) as envs:
        envs.reset()
        with pytest.raises(StateError, match=r"annotate\(logp=...\) before each step"):
            play(envs, 1)
        with pytest.raises(ArgumentError, match=r"logp: expected float32 of shape \[2\], got"):
            envs.annotate(logp=np.zeros(3))
        with pytest.raises(ArgumentError, match="did you mean logp"):
            envs.annotate(log=np.zeros(2))
        with pytest.raises(ArgumentError, match="logp: expected an array, got lists of unequal"):
            envs.annotate(logp=[[1.0], [2.0, 3.0]])
        envs.annotate(logp=np.zeros(2))
        play(envs, 1)
        envs.annotate(logp=torch.tensor([-0.5, -3.0], dtype=torch.bfloat16, requires_grad=True))
        play(envs, 1)
        with pytest.raises(StateError, match="before each step"):
            play(envs, 1)
        with pytest.raises(ArgumentError, match="policy_version: expected an integer"):
            envs.policy_version = -2
    with open_storage(tmp_path / "rows") as storage:
        assert storage.get(slice(None))["logp"].tolist() == [0, 0, -0.5, -3.0]


def test_wrong_columns_are_refused_before_any_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with pytest.raises(ArgumentError, match="columns: expected a dtype of numbers for 'name'"):
        Recorder(make_oracle_vec(2), storage=path, columns={"name": str})
    for wrong in ({3: np.float32}, ["logp"]):
        with pytest.raises(ArgumentError, match="columns: expected dtypes by name, got"):
            Recorder(make_oracle_vec(2), storage=path, columns=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="storage: expected a storage or a path, got None"):
        Recorder(make_oracle_vec(2), storage=None)
    with pytest.raises(NameRefused, match="observation"):
        Recorder(make_oracle_vec(2), storage=path, columns={"observation": np.float32})
    with pytest.raises(UnknownArgument, match="info_keys"):
        Recorder(make_oracle_vec(2), storage=path, info_key=["tick"])
    with pytest.raises(ArgumentError, match="commit_every: expected an integer above 0"):
        Recorder(make_oracle_vec(2), storage=path, commit_every=0)
    with pytest.raises(ArgumentError, match="at_end: expected one of"):
        Recorder(make_oracle_vec(2), storage=path, at_end="stop")  # type: ignore[arg-type]
    assert not (path / "manifest.json").exists()


# --- calls that no row can follow -----------------------------------------------------------------


def test_steps_without_a_reset_after_a_close_or_past_an_end_are_refused(tmp_path: Path) -> None:
    envs = Recorder(
        make_oracle_vec(2, [1, 2], mode=AutoresetMode.DISABLED), storage=tmp_path / "rows"
    )
    with pytest.raises(StateError, match="expected a reset of all lanes first, because no reset"):
        play(envs, 1)
    envs.reset()
    play(envs, 1)
    with pytest.raises(StateError, match=r"expected a reset of the lanes \[0, 1\]"):
        play(envs, 1)
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(StateError, match=r"expected a reset of the lanes \[1\]"):
        play(envs, 1)
    envs.close()
    envs.close()
    with pytest.raises(StateError, match="the recorder is closed"):
        play(envs, 1)
    with pytest.raises(StateError, match="the recorder is closed"):
        envs.reset()
    assert head_of(tmp_path / "rows") == 2


def test_a_single_environment_is_not_stepped_past_its_end(tmp_path: Path) -> None:
    with Recorder(OracleEnv(lengths=[2]), storage=tmp_path / "rows") as env:
        env.reset()
        env.step(0)
        env.step(1)
        with pytest.raises(StateError, match="whose episodes have ended"):
            env.step(0)
    assert head_of(tmp_path / "rows") == 2


def test_an_environment_is_wrapped_once(tmp_path: Path) -> None:
    envs = Recorder(make_oracle_vec(2), storage=tmp_path / "rows")
    outer = gym.wrappers.vector.ClipReward(envs, 0, 1)
    for each in (envs, outer):
        with pytest.raises(ArgumentError, match="there is a Recorder already"):
            Recorder(each, storage=tmp_path / "again")
    with pytest.raises(ArgumentError, match="env: expected a Gymnasium environment"):
        Recorder(object(), storage=tmp_path / "again")
    envs.close()


def test_a_mask_for_a_vector_that_may_ignore_it_is_refused(tmp_path: Path) -> None:
    with Recorder(OracleVectorEnv(2, [3]), storage=tmp_path / "rows") as envs:
        envs.reset()
        play(envs, 1)
        with pytest.raises(EnvironmentRefused, match="reset_mask: OracleVectorEnv is not known"):
            envs.reset(options={"reset_mask": np.array([True, False])})
        play(envs, 1)  # nothing has changed
        with pytest.raises(ArgumentError, match=r"reset_mask: expected bools of shape \[2\]"):
            envs.reset(options={"reset_mask": np.array([1, 0])})


def test_a_second_recorder_waits_for_the_lock(tmp_path: Path) -> None:
    with Recorder(make_oracle_vec(2), storage=tmp_path / "rows") as envs:
        envs.reset()
        play(envs, 1)
        envs.commit()
        with pytest.raises(StorageLocked):
            Recorder(make_oracle_vec(2), storage=tmp_path / "rows", resume=True)


def test_a_storage_with_other_columns_or_lanes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with Recorder(make_oracle_vec(2), storage=path) as envs:
        envs.reset()
        play(envs, 2)
    with pytest.raises(SchemaMismatch):
        Recorder(make_oracle_vec(2, kind="uint8"), storage=path, resume=True)
    with pytest.raises(SchemaMismatch):
        Recorder(make_oracle_vec(2), storage=path, resume=True, columns={"logp": np.float32})
    with pytest.raises(StateError, match="lanes"):
        Recorder(make_oracle_vec(3), storage=path, resume=True)
    with Recorder(make_oracle_vec(2), storage=path, resume=True) as envs:
        assert envs.ledger.stored == 4


class Nan(gym.vector.VectorWrapper):
    """A vector whose n-th step returns a NaN."""

    def __init__(self, env: Any, at: int) -> None:
        super().__init__(env)
        self.left = at

    def step(self, actions: Any) -> Any:
        obs, *rest = self.env.step(actions)
        self.left -= 1
        if not self.left:
            obs[1, 0] = np.nan
        return obs, *rest


def test_a_value_outside_its_space_ends_the_run_after_the_rows_before_it(tmp_path: Path) -> None:
    envs = Recorder(Nan(make_oracle_vec(2, [9]), 3), storage=tmp_path / "rows", commit_every=5)
    envs.reset()
    with pytest.raises(Exception, match=r"next/observation.*outside its space at lane 1, step 2"):
        play(envs, 5)
    with pytest.raises(StateError, match="the run ended when TransitionError was raised"):
        play(envs, 1)
    assert balanced(envs.ledger)
    envs.close()
    assert head_of(tmp_path / "rows") == 4


class WithoutFinals(gym.vector.VectorWrapper):
    """A vector whose infos lack the final observations."""

    def step(self, actions: Any) -> Any:
        *results, info = self.env.step(actions)
        return *results, {name: value for name, value in info.items() if "final_obs" not in name}


def test_a_step_that_lost_final_observations_is_refused(tmp_path: Path) -> None:
    envs = WithoutFinals(make_oracle_vec(2, [2, 5], mode=AutoresetMode.SAME_STEP))
    with Recorder(envs, storage=tmp_path / "rows") as recorder:
        recorder.reset()
        play(recorder, 1)
        with pytest.raises(TransitionError, match="no final observation at the end of an episode"):
            play(recorder, 1)
        with pytest.raises(StateError, match="expected a reset of all lanes first"):
            play(recorder, 1)
    assert head_of(tmp_path / "rows") == 2


class WithOneFinal(gym.vector.VectorWrapper):
    """A vector whose infos have a final observation for the first of the ended lanes only."""

    def step(self, actions: Any) -> Any:
        *results, info = self.env.step(actions)
        if "_final_obs" in info:
            info["_final_obs"] = np.arange(self.num_envs) == np.argmax(info["_final_obs"])
        return *results, info


@pytest.mark.parametrize("kind", ["float", "dict"])
@pytest.mark.parametrize("loses", [WithoutFinals, WithOneFinal])
def test_lost_final_observations_are_marked_on_request(
    kind: Any, loses: Any, tmp_path: Path
) -> None:
    make = partial(make_oracle_vec, 3, LENGTHS, mode=AutoresetMode.SAME_STEP, kind=kind)
    found = {}
    for name, env, finals in (("true", make(), "check"), ("lost", loses(make()), "lost")):
        path = tmp_path / name
        with Recorder(env, storage=path, total_frames=40, finals=finals, info_keys=["tick"]) as own:
            own.reset()
            play(own, 14)
        assert verify(path).sound
        with open_storage(path) as storage:
            found[name] = storage.get(slice(0, 40))
    true, lost = found["true"], found["lost"]
    ended, valid = lost["next", "done"][:, 0], lost["collector", "next_valid"]
    assert torch.equal(valid, ~ended)
    assert ended.sum() > 10
    name = "observation" if kind == "float" else "pos"
    for lane in range(3):
        rows = lost[lost["collector", "lane"] == lane]
        assert torch.equal(rows["next", name][:-1], rows[name][1:])  # also across ends
    for key in true.keys(True, True):
        same = valid if key[0] == "next" else torch.ones(40, dtype=torch.bool)
        assert torch.equal(true[key][same], lost[key][same]), key
    for key in ("done", "terminated", "truncated", "reward"):
        assert torch.equal(true["next", key], lost["next", key])


def test_an_action_that_is_no_number_is_refused(tmp_path: Path) -> None:
    env = gym.vector.SyncVectorEnv([lambda: gym.make("Pendulum-v1")])
    with Recorder(env, storage=tmp_path / "rows", commit_every=1) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros((1, 1), np.float32))
        with pytest.raises(PolicyError, match="action lies outside"):
            envs.step(np.full((1, 1), np.nan, np.float32))


# --- durability -----------------------------------------------------------------------------------

_PROGRAM = """
import sys
import numpy as np
from tallyroll.collector import Recorder
from oracles import make_oracle_vec
envs = Recorder(make_oracle_vec(3, [4, 2]), storage=sys.argv[1], commit_every=5)
envs.reset()
for step in range(13):
    envs.step(np.zeros(3, np.int64))
raise RuntimeError("the loop fails")
"""


def continued(path: Path, stored: int) -> None:
    """Check the rows after the end of a program, and continue the run."""
    with Recorder(make_oracle_vec(3, [4, 2]), storage=path, resume=True, total_frames=90) as envs:
        assert envs.ledger.stored == stored
        envs.reset()
        while not envs.full:
            play(envs, 1)
    assert head_of(path) == 90
    with open_storage(path) as storage:
        rows = storage.get(slice(0, 90))
    check_rows(rows[stored:], [4, 2], from_start=True)
    if stored:
        check_rows(rows[:stored], [4, 2], from_start=True)
        ids = rows["collector", "traj_ids"]
        assert ids[:stored].max() < ids[stored:].min()


def test_a_program_that_ends_without_close_commits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "rows")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("RuntimeError: the loop fails\n")
    # Of 13 slots of a lane with episodes of 4 and 2, three are reset slots.
    continued(tmp_path / "rows", 30)


@pytest.mark.parametrize(("steps", "commit_every"), [(13, 5), (4, 5), (15, 5), (9, 1), (7, 64)])
def test_a_kill_loses_at_most_the_steps_since_the_last_commit(
    steps: int, commit_every: int, tmp_path: Path
) -> None:
    path, child = tmp_path / "rows", os.fork()
    if not child:
        try:
            envs = Recorder(make_oracle_vec(3, [4, 2]), storage=path, commit_every=commit_every)
            envs.reset()
            play(envs, steps)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    committed = steps - steps % commit_every
    continued(path, 3 * sum(slot % 8 not in (4, 7) for slot in range(committed)))


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Interrupt ``call`` at that line of the run's module; return False if it has fewer lines."""
    left = [line]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != recorded_run.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left[0] <= 0


@pytest.mark.parametrize("commit_every", [1, 4])
def test_an_interrupt_at_any_line_leaves_a_recorder_that_goes_on(
    commit_every: int, tmp_path: Path
) -> None:
    """Ctrl-C in a step that ends an episode, and in the reset of a running one."""
    vec = make_oracle_vec(2, [3, 4])
    with Recorder(vec, storage=tmp_path / "rows", commit_every=commit_every) as envs:
        for call in (partial(play, envs, 1), envs.reset):
            for line in range(1, 1000):
                envs.reset()
                play(envs, 2)
                reached = interrupted_at(line, call)
                envs.reset()
                play(envs, 3)
                if not reached:
                    break
            assert line > 20
    assert balanced(envs.ledger)
    head_of(tmp_path / "rows")


def test_a_recorder_without_references_commits(tmp_path: Path) -> None:
    envs = Recorder(make_oracle_vec(2, [9]), storage=tmp_path / "rows")
    envs.reset()
    play(envs, 3)
    del envs
    gc.collect()
    assert head_of(tmp_path / "rows") == 6


def test_an_exception_in_the_block_commits_and_is_raised(tmp_path: Path) -> None:
    envs = Recorder(make_oracle_vec(2, [9]), storage=tmp_path / "rows")

    def interrupted() -> None:
        with envs:
            envs.reset()
            play(envs, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert head_of(tmp_path / "rows") == 6


def test_a_ring_keeps_the_newest_rows(tmp_path: Path) -> None:
    ring = MemmapStorage(tmp_path / "ring", max_size=20)
    with Recorder(make_oracle_vec(2, [9]), storage=ring, commit_every=4) as envs:
        envs.reset()
        play(envs, 30)
        envs.commit()
        assert ring.head > 50
        assert len(ring) == 20
    ring.close()
    with (
        MemmapStorage(tmp_path / "small", max_size=20) as small,
        pytest.raises(ArgumentError, match="ring"),
    ):
        Recorder(make_oracle_vec(2, [9]), storage=small, commit_every=64)


# --- tools ----------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    with Recorder(
        gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"),
        storage=tmp_path / "rows",
        total_frames=400,
    ) as envs:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        while not envs.full:
            envs.step(envs.action_space.sample())
    return tmp_path / "rows"


def test_the_tools_for_collected_runs_work(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["inspect", str(recorded)],
        ["verify", str(recorded)],
        ["inspect", str(recorded), "--trajectories"],
        ["stats", str(recorded)],
        ["pack", str(recorded), str(recorded.parent / "packed")],
        ["copy", str(recorded), str(recorded.parent / "copy.h5")],
    ):
        assert main(command) in (0, None), command
        out = capsys.readouterr().out
        if command == ["inspect", str(recorded)]:
            assert "4 lanes, recorded around SyncVectorEnv, total frames 400" in out
            assert "policy unknown" in out
    assert report_runs(recorded.parent).runs
    with open_storage(recorded) as storage:
        sampler = TrajectorySliceSampler(slice_len=4)
        batch = ReplayBuffer(storage=storage, sampler=sampler, batch_size=32).sample()
    parts = batch["collector", "traj_ids"].reshape(8, 4)
    assert (parts == parts[:, :1]).all()


def test_a_collector_appends_to_a_recorded_run_and_replay_is_refused(recorded: Path) -> None:
    with pytest.raises(EnvironmentUnknown, match="a Recorder stored"):
        replay(recorded, create_env_fn="CartPole-v1")
    with MemmapStorage(recorded, mode="append") as storage:
        with SyncCollector(
            "CartPole-v1", num_envs=4, frames_per_batch=20, total_frames=40, storage=storage
        ) as collector:
            collector.collect(40)
        assert storage.head == 440
    assert verify(recorded).sound
