"""Compare a recorder without an environment with a wrapping one, and with a plain model."""

from __future__ import annotations

import os
import signal
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.collector import (
    ArgumentError,
    EnvironmentUnknown,
    Recorder,
    SpaceError,
    StateError,
    UnknownArgument,
    replay,
)
from tallyroll.collector.cli import main
from tallyroll.collector.errors import TransitionError, ValueRefused
from tallyroll.collector.ext.recorder import manual_recorder, recorded_run
from tallyroll.storage import open_storage, verify

from collect_kit import assert_same, balanced
from oracles import KINDS, Kind, OracleEnv, make_oracle_vec

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]
SPACE = Box(-np.inf, np.inf, (2,))


def rows_in(path: Path) -> Any:
    """Return all rows of a sound storage."""
    assert verify(path).sound
    with open_storage(path) as storage:
        return storage.get(slice(0, storage.head))


# --- the same rows as a wrapper -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_stores_the_rows_of_a_recorder_around_the_environment(
    kind: Kind, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"total_frames": 50, "commit_every": 7, "columns": {"mark": np.float32}}
    vector = make_oracle_vec(3, LENGTHS, mode=AutoresetMode.DISABLED, kind=kind, ends="mixed")
    spaces = vector.single_observation_space, vector.single_action_space
    rng = np.random.default_rng(0)
    with (
        Recorder(vector, storage=tmp_path / "wrapped", **how) as envs,
        Recorder.manual(*spaces, 3, storage=tmp_path / "manual", **how) as manual,
    ):
        obs, _ = envs.reset(seed=[1, 2, 3])
        while not envs.full:
            envs.policy_version = manual.policy_version = manual.policy_version + int(
                rng.integers(3)
            )
            action, mark = rng.integers(0, 2, 3), rng.random(3, np.float32)
            before = deepcopy(obs)
            envs.annotate(mark=mark)
            manual.annotate(mark=mark)
            obs, reward, terminated, truncated, _ = envs.step(action)
            manual.add(before, action, reward, deepcopy(obs), terminated, truncated)
            ended = terminated | truncated
            if ended.any() and not envs.full:
                obs, _ = envs.reset(options={"reset_mask": ended})
        assert manual.full
        manual.add(before, action, reward, obs, terminated, truncated)  # is not recorded
        ours, theirs = manual.ledger.counts(), envs.ledger.counts()
    assert ours == theirs
    assert balanced(manual.ledger)
    assert_same(rows_in(tmp_path / "manual"), rows_in(tmp_path / "wrapped"))


def test_one_lane_needs_no_dimension_of_lanes(tmp_path: Path) -> None:
    env = OracleEnv(0, [3, 1, 4], kind="dict", ends="mixed")
    with (
        Recorder(env, storage=tmp_path / "wrapped", total_frames=20) as wrapped,
        Recorder.manual(
            env.observation_space, env.action_space, storage=tmp_path / "manual", total_frames=20
        ) as manual,
    ):
        obs, _ = wrapped.reset(seed=0)
        while not wrapped.full:
            before = deepcopy(obs)
            obs, reward, terminated, truncated, _ = wrapped.step(1)
            manual.add(before, 1, float(reward), deepcopy(obs), bool(terminated), bool(truncated))
            if (terminated or truncated) and not wrapped.full:
                obs, _ = wrapped.reset()
    assert_same(rows_in(tmp_path / "manual"), rows_in(tmp_path / "wrapped"))


# --- random loops against a plain model -----------------------------------------------------------

OPERATIONS = st.sampled_from(["add"] * 12 + ["gap"] * 3 + ["refused", "commit", "resume"])


@settings(max_examples=60, deadline=None)
@given(
    lanes=st.integers(1, 4),
    operations=st.lists(OPERATIONS, max_size=60),
    commit_every=st.integers(1, 9),
    total=st.integers(1, 150),
    seed=st.integers(0, 2**31),
)
def test_random_loops_store_what_a_plain_model_keeps(
    tmp_path_factory: pytest.TempPathFactory,
    lanes: int,
    operations: list[str],
    commit_every: int,
    total: int,
    seed: int,
) -> None:
    path, rng = tmp_path_factory.mktemp("random") / "rows", np.random.default_rng(seed)
    how: dict[str, Any] = {"storage": path, "total_frames": total, "commit_every": commit_every}
    how["finals"] = "kept"  # random observations may be equal
    recorder = Recorder.manual(SPACE, Discrete(5), lanes, **how)
    rows: list[tuple[Any, ...]] = []
    number, step = [0] * lanes, [0] * lanes

    def observation() -> Any:
        return rng.choice([0.0, -0.0, 1.0, 2.0], (lanes, 2)).astype(np.float32)

    obs = observation()
    for operation in operations:
        if operation == "commit":
            recorder.commit()
            continue
        if operation == "resume":
            recorder.close()
            assert balanced(recorder.ledger)
            recorder = Recorder.manual(SPACE, Discrete(5), lanes, **how, resume=True)
            begins = np.ones(lanes, np.bool_)
        else:
            begins = np.zeros(lanes, np.bool_)
        if operation == "gap":
            other = observation()
            begins |= [one.tobytes() != old.tobytes() for one, old in zip(other, obs, strict=True)]
            obs = other
        after, action, reward = observation(), rng.integers(0, 5, lanes), rng.random(lanes)
        over, cut = rng.random((2, lanes)) < 0.15
        if operation == "refused" and not recorder.full:
            for wrong in ([0.5] * lanes, [0] * (lanes + 1)):
                with pytest.raises((ArgumentError, ValueRefused)):
                    recorder.add(obs, wrong, reward, after, over, cut)
            with pytest.raises(ArgumentError):
                recorder.add(obs, action, reward, after[:, :1], over, cut)
        recorder.add(obs, action, reward, after, over, cut)
        for lane in range(lanes):
            if begins[lane] and step[lane]:
                number[lane], step[lane] = number[lane] + 1, 0
            if len(rows) < total:
                values = obs[lane].tobytes(), after[lane].tobytes(), int(action[lane])
                flags = bool(over[lane]), bool(cut[lane])
                rows.append((lane, number[lane], step[lane], *values, *flags))
                step[lane] += 1
                if any(flags):
                    number[lane], step[lane] = number[lane] + 1, 0
        obs = after.copy()
    recorder.close()
    assert balanced(recorder.ledger)
    assert recorder.ledger.stored == len(rows)
    if not rows:
        return
    found = rows_in(path)
    ids, of_lane = found["collector", "traj_ids"].tolist(), found["collector", "lane"].tolist()
    names = {
        lane: sorted({i for i, own in zip(ids, of_lane, strict=True) if own == lane})
        for lane in range(lanes)
    }
    stored = [
        (
            *(lane, names[lane].index(ids[row]), found["collector", "step"][row].item()),
            *(found["observation"][row].numpy().tobytes(),),
            *(found["next", "observation"][row].numpy().tobytes(), found["action"][row].item()),
            *(found["next", "terminated"][row].item(), found["next", "truncated"][row].item()),
        )
        for row, lane in enumerate(of_lane)
    ]
    assert stored == rows


# --- refusals -------------------------------------------------------------------------------------


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def add(recorder: Any, **other: Any) -> None:
    """Add a transition of two lanes, with some other arguments."""
    flags = np.zeros(2, np.bool_)
    call = {"obs": zeros(2, 2), "action": np.zeros(2, np.int64), "reward": zeros(2)}
    call |= {"next_obs": zeros(2, 2), "terminated": flags, "truncated": flags}
    recorder.add(**call | other)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"obs": zeros(2)}, r"obs: expected float32 of shape \[2, 2\] for 2 lanes, got float32 of"),
        ({"obs": zeros(3, 2)}, r"obs: expected .* for 2 lanes, got float32 of shape \[3, 2\]"),
        ({"obs": np.zeros((2, 2))}, "obs: expected float32 .*, got float64 of .*Convert the value"),
        ({"obs": [[1.0], [1.0, 2.0]]}, "obs: expected an array, got lists of unequal lengths"),
        ({"next_obs": None}, "next_obs: expected float32 .*, got object"),
        ({"action": np.zeros(3, np.int64)}, r"action: expected int64 of shape \[2\], got"),
        ({"reward": 1.0}, r"reward: expected numbers of shape \[2\] for 2 lanes, got float64"),
        ({"reward": ["a", "b"]}, "reward: expected numbers"),
        ({"terminated": False}, r"terminated: expected bool of shape \[2\] for 2 lanes, got bool"),
        ({"truncated": np.zeros(2)}, "truncated: expected bool of shape .*, got float64"),
    ],
)
def test_a_call_with_a_wrong_argument_records_nothing(
    other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with Recorder.manual(SPACE, Discrete(2), 2, storage=tmp_path / "rows") as recorder:
        with pytest.raises(ArgumentError, match=message):
            add(recorder, **other)
        add(recorder)
        with pytest.raises(ArgumentError, match=message):
            add(recorder, **other)
        add(recorder)
    rows = rows_in(tmp_path / "rows")
    assert rows["collector", "step"].tolist() == [0, 0, 1, 1]
    assert recorder.ledger.counts()["episodes_cut"] == 2  # by the end of the loop


def test_an_observation_that_overwrites_the_one_before_is_refused(tmp_path: Path) -> None:
    with Recorder.manual(SPACE, Discrete(2), 2, storage=tmp_path / "rows") as recorder:
        same = zeros(2, 2)
        with pytest.raises(ArgumentError, match="next_obs: expected another object than obs"):
            add(recorder, obs=same, next_obs=same)


def test_a_missing_part_of_an_observation_is_named(tmp_path: Path) -> None:
    space = Dict({"pose": Dict({"angle": SPACE}), "goal": Discrete(4)})
    with Recorder.manual(space, Discrete(2), storage=tmp_path / "rows") as recorder:
        obs = {"pose": {"angle": zeros(2)}, "goal": 3}
        for wrong in ({"pose": {}, "goal": 1}, {"goal": 1}, {"goal": 1, "pose": zeros(2)}):
            with pytest.raises(ArgumentError, match=r"next_obs: expected next_obs\['pose'\]"):
                recorder.add(obs, 0, 0.0, wrong, False, False)
        with pytest.raises(ArgumentError, match=r"obs\['pose'\]\['angle'\]: expected float32 of"):
            recorder.add({"pose": {"angle": zeros(3)}, "goal": 1}, 0, 0.0, obs, False, False)
        recorder.add(obs, 0, 0.0, {**obs, "goal": 2}, False, False)
        recorder.add({**obs, "goal": 2}, 1, torch.tensor(0.5), obs, False, True)
    rows = rows_in(tmp_path / "rows")
    assert rows["goal"].tolist() == [3, 2]
    assert rows["next", "truncated"].flatten().tolist() == [False, True]


def test_wrong_spaces_and_options_are_refused_before_any_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with pytest.raises(ArgumentError, match="observation_space: expected the Gymnasium space"):
        Recorder.manual((2,), Discrete(2), storage=path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="action_space: expected the Gymnasium space"):
        Recorder.manual(SPACE, 2, storage=path)  # type: ignore[arg-type]
    with pytest.raises(SpaceError, match="action space"):
        Recorder.manual(SPACE, Dict({"a": SPACE}), storage=path)
    with pytest.raises(ArgumentError, match="lanes: expected an integer above 0"):
        Recorder.manual(SPACE, Discrete(2), 0, storage=path)
    with pytest.raises(UnknownArgument, match="info_keys"):
        Recorder.manual(SPACE, Discrete(2), storage=path, info_keys=["a"])
    assert not path.exists()


def test_annotations_the_end_of_the_budget_and_close(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    how: dict[str, Any] = {"storage": path, "total_frames": 4, "at_end": "raise"}
    with Recorder.manual(SPACE, Discrete(2), 2, **how, columns={"logp": np.float32}) as recorder:
        with pytest.raises(StateError, match=r"annotate\(logp=...\) before each step"):
            add(recorder)
        for step in range(2):
            recorder.annotate(logp=[step, -step])
            add(recorder, obs=zeros(2, 2) + step)  # the second call begins trajectories
        assert recorder.full
        with pytest.raises(StateError, match="all 4 transitions"):
            add(recorder)
    rows = rows_in(path)
    assert rows["logp"].tolist() == [0, 0, 1, -1]
    assert rows["collector", "step"].tolist() == [0, 0, 0, 0]
    recorder = Recorder.manual(SPACE, Discrete(2), 2, storage=tmp_path / "closed")
    add(recorder)
    recorder.close()
    recorder.close()
    with pytest.raises(StateError, match="the recorder is closed"):
        add(recorder)


def test_a_value_outside_its_space_ends_the_run_after_the_rows_before_it(tmp_path: Path) -> None:
    how: dict[str, Any] = {"storage": tmp_path / "rows", "commit_every": 3}
    with Recorder.manual(Box(-1, 1, (2,)), Discrete(2), 2, **how) as recorder:
        add(recorder)
        add(recorder)
        with pytest.raises(TransitionError, match="outside its space at lane 1, step 2"):
            add(recorder, next_obs=np.array([[0, 0], [0, 2]], np.float32))
        with pytest.raises(StateError, match="the run ended when TransitionError was raised"):
            add(recorder)
    assert len(rows_in(tmp_path / "rows")) == 4


# --- durability -----------------------------------------------------------------------------------


def count(recorder: Any, start: int, stop: int) -> None:
    """Add transitions of two lanes that count from ``start``. Every seventh ends an episode."""
    for step in range(start, stop):
        end = step % 7 == 6
        here, after = zeros(2, 2) + step, zeros(2, 2) + step + (0.5 if end else 1)
        add(recorder, obs=here, next_obs=after, terminated=np.full(2, end))


@pytest.mark.parametrize(("steps", "commit_every"), [(13, 5), (4, 5), (9, 1), (15, 64)])
def test_a_kill_loses_at_most_the_calls_since_the_last_commit(
    steps: int, commit_every: int, tmp_path: Path
) -> None:
    path, child = tmp_path / "rows", os.fork()
    how: dict[str, Any] = {"storage": path, "commit_every": commit_every}
    if not child:
        try:
            recorder = Recorder.manual(SPACE, Discrete(2), 2, **how)
            count(recorder, 0, steps)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    stored = steps - steps % commit_every
    with Recorder.manual(SPACE, Discrete(2), 2, **how, resume=True) as recorder:
        assert recorder.ledger.stored == 2 * stored
        count(recorder, 20, 23)
    rows = rows_in(path)
    assert rows["observation"][::2, 0].tolist() == [*range(stored), 20, 21, 22]
    ids = rows["collector", "traj_ids"].tolist()
    assert not {*ids[: 2 * stored]} & {*ids[2 * stored :]}


def interrupted_at(line: int, call: Any) -> bool:
    """Interrupt ``call`` at that line of the recorder; return False if it has fewer lines."""
    left, files = [line], (recorded_run.__file__, manual_recorder.__file__)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
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
def test_an_interrupt_at_any_line_records_a_call_whole_or_not_at_all(
    commit_every: int, tmp_path: Path
) -> None:
    with Recorder.manual(
        SPACE, Discrete(2), 2, storage=tmp_path / "rows", commit_every=commit_every
    ) as recorder:
        for line in range(1, 1000):
            start = 7 * line
            count(recorder, start, start + 2)
            if not interrupted_at(line, partial(count, recorder, start + 2, start + 3)):
                break
            count(recorder, start + 3, start + 7)
        assert line > 20
    rows = rows_in(tmp_path / "rows")
    assert balanced(recorder.ledger)
    rows = rows[rows["collector", "lane"] == 0]
    seen, steps = rows["observation"][:, 0].int().tolist(), rows["collector", "step"].tolist()
    whole = 0
    for start in range(7, 7 * line, 7):
        own = [
            (number - start, step)
            for number, step in zip(seen, steps, strict=True)
            if 0 <= number - start < 7
        ]
        if own == [(step, step) for step in range(7)]:
            whole += 1
        else:  # the call was not recorded, so the next one begins a trajectory
            assert own == [(0, 0), (1, 1), (3, 0), (4, 1), (5, 2), (6, 3)]
    assert 0 < whole < line - 1


def test_the_tools_for_collected_runs_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    with Recorder.manual(SPACE, Discrete(2), 2, storage=path) as recorder:
        count(recorder, 0, 20)
    for command in ("inspect", "verify", "stats"):
        assert main([command, str(path)]) in (0, None)
        out = capsys.readouterr().out
        if command == "inspect":
            assert "2 lanes, recorded without an environment" in out
    with pytest.raises(EnvironmentUnknown, match="a Recorder stored"):
        replay(path, create_env_fn="CartPole-v1")
