"""The oracles agree with plain models when raw Gymnasium drives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict
from torchrl.envs import GymWrapper, check_env_specs

from collect_kit import ByObservation
from oracles import (
    ACTIONS,
    ENDS,
    KINDS,
    Actions,
    Ends,
    Key,
    Kind,
    OracleEnv,
    OracleTorchEnv,
    OracleVectorEnv,
    check_row,
    check_rows,
    decode,
    encode,
    expected_ledger,
    expected_stream,
    length_of,
    make_oracle_vec,
)

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]
MODES = list(AutoresetMode)


def lengths_by_rule(lane: int, episode: int) -> int:
    return 1 + (lane + episode) % 4


def as_columns(kind: Kind, obs: Any) -> dict[Key, np.ndarray]:
    """Return copies of the columns of a raw, batched or single Gymnasium observation."""
    if kind == "dict":
        code = obs["inner"]["code"]
        raw: dict[Key, Any] = {"pos": obs["pos"], "img": obs["img"], ("inner", "code"): code}
    elif kind == "tuple":
        raw = {("observation", str(i)): part for i, part in enumerate(obs)}
    else:
        raw = {"observation": obs}
    return {key: np.array(value) for key, value in raw.items()}


def lane_of(columns: dict[Key, np.ndarray], lane: int) -> dict[Key, np.ndarray]:
    return {key: value[lane] for key, value in columns.items()}


def drive(
    envs: VectorEnv[Any, Any, Any], kind: Kind, mode: AutoresetMode, slots: int
) -> TensorDict:
    """Step by hand, and return the transitions in slot order as rows of a TensorDict."""
    obs = as_columns(kind, envs.reset(seed=0)[0])
    pending = np.zeros(envs.num_envs, bool)
    rows = []
    for _ in range(slots):
        actions = envs.action_space.sample()
        raw, reward, terminated, truncated, info = envs.step(actions)
        next_obs = as_columns(kind, raw)
        done = terminated | truncated
        for lane in range(envs.num_envs):
            following = lane_of(next_obs, lane)
            if mode == AutoresetMode.SAME_STEP and done[lane]:
                following = as_columns(kind, info["final_obs"][lane])
            flags = {"terminated": terminated[lane], "truncated": truncated[lane]}
            row: dict[Any, Any] = {
                **lane_of(obs, lane),
                "action": actions[lane],
                "next": {**following, "reward": [reward[lane]], "done": [done[lane]], **flags},
            }
            if not pending[lane]:
                rows.append(as_row(row))
        pending = done.copy() if mode == AutoresetMode.NEXT_STEP else pending
        if mode == AutoresetMode.DISABLED and done.any():
            next_obs = as_columns(kind, envs.reset(options={"reset_mask": done.copy()})[0])
        obs = next_obs
    return torch.stack(rows)


def as_row(row: dict[Any, Any]) -> TensorDict:
    out = TensorDict({})
    for key, value in row.items():
        out[key] = as_row(value) if isinstance(value, dict) else torch.as_tensor(np.asarray(value))
    return out


def torch_rows(env: OracleTorchEnv, steps: int) -> TensorDict:
    """Return rows lane by lane, ordered in time."""
    return env.rollout(steps, break_when_any_done=False, auto_cast_to_device=False).reshape(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_undoes_encode(kind: Kind) -> None:
    lane, episode, step = np.array([0, 1, 7]), np.array([0, 31, 5]), np.array([0, 30, 31])
    for got, wanted in zip(
        decode(kind, encode(kind, lane, episode, step)), (lane, episode, step), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reuse_buffer", [False, True])
def test_observations_lie_in_their_space(kind: Kind, reuse_buffer: bool) -> None:
    env = OracleEnv(1, [3], kind=kind, reuse_buffer=reuse_buffer)
    first = env.reset(seed=1)[0]
    second = env.step(1)[0]
    assert env.observation_space.contains(first)
    assert env.observation_space.contains(second)
    if kind == "float":
        assert (first is second or np.shares_memory(first, second)) == reuse_buffer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_sync_vectors_make_the_expected_streams(kind: Kind, mode: AutoresetMode) -> None:
    envs = make_oracle_vec(3, LENGTHS, mode=mode, kind=kind, ends="mixed")
    rows = check_rows(
        drive(envs, kind, mode, 20), LENGTHS, kind=kind, ends="mixed", from_start=True
    )
    assert tuple(rows.counts(3)) == envs.get_attr("steps_taken")
    envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_async_vectors_make_the_expected_streams(mode: AutoresetMode) -> None:
    envs = make_oracle_vec(2, lengths_by_rule, mode=mode, cls="async", kind="dict")
    rows = check_rows(drive(envs, "dict", mode, 12), lengths_by_rule, kind="dict", from_start=True)
    assert tuple(rows.counts(2)) == envs.get_attr("steps_taken")
    envs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_native_vectors_make_the_expected_streams(kind: Kind) -> None:
    envs = OracleVectorEnv(3, LENGTHS, kind=kind, ends="both")
    rows = drive(envs, kind, AutoresetMode.NEXT_STEP, 20)
    checked = check_rows(rows, LENGTHS, kind=kind, ends="both", from_start=True)
    assert checked.counts(3) == envs.steps_taken
    assert envs.lanes[0].seeds[0] == 0


def test_native_vectors_ignore_masks_and_reuse_their_arrays() -> None:
    envs = OracleVectorEnv(2, [3])
    first = envs.reset(seed=0)[0]
    again = envs.reset(options={"reset_mask": np.array([True, False])})[0]
    assert first is again
    assert envs.resets_done == [2, 2]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("ends", ENDS)
def test_actions_and_ends(action: Actions, ends: Ends) -> None:
    envs = make_oracle_vec(3, LENGTHS, action=action, ends=ends)
    rows = drive(envs, "float", AutoresetMode.NEXT_STEP, 15)
    check_rows(rows, LENGTHS, action=action, ends=ends, from_start=True)
    torch_env = OracleTorchEnv(3, LENGTHS, action=action, ends=ends)
    check_rows(torch_rows(torch_env, 9), LENGTHS, action=action, ends=ends, from_start=True)
    envs.close()


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_environment_meets_its_specs(kind: Kind, num_envs: int | None) -> None:
    env = OracleTorchEnv(num_envs, [7], kind=kind)
    check_env_specs(env, seed=0)
    env = OracleTorchEnv(num_envs, LENGTHS, kind=kind, ends="mixed")
    check_env_specs(env, break_when_any_done="both")


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_environment_makes_the_expected_streams(kind: Kind, num_envs: int | None) -> None:
    env = OracleTorchEnv(num_envs, LENGTHS, kind=kind, ends="mixed")
    rows = check_rows(torch_rows(env, 20), LENGTHS, kind=kind, ends="mixed", from_start=True)
    assert rows.counts(num_envs or 1) == [20] * (num_envs or 1) == env.steps_taken


def test_torch_environment_resets_by_mask() -> None:
    env = OracleTorchEnv(3, [9])
    td = env.reset()
    mask = torch.tensor([[True], [False], [True]])
    after = env.reset(td.update({"_reset": mask}))
    assert after["observation"][:, 1].tolist() == [1, 0, 1]
    assert env.resets_done == [2, 1, 2]


def test_stepping_past_the_end_is_an_error() -> None:
    env = OracleEnv(0, [1])
    with pytest.raises(AssertionError, match="past the end"):
        env.step(0)
    env.reset()
    env.step(0)
    with pytest.raises(AssertionError, match="past the end of episode 0"):
        env.step(0)
    torch_env = OracleTorchEnv(2, [1])
    td = torch_env.rand_step(torch_env.reset())
    with pytest.raises(AssertionError, match=r"past the end in lanes \[0, 1\]"):
        torch_env.step(td)


def test_an_environment_counts_what_happened_to_it() -> None:
    env = OracleEnv(0, [2], frame_skip=4, noops=3)
    env.reset(seed=5)
    env.step(0)
    info = env.step(1)[4]
    env.reset(options={"x": 1})
    assert (info["tick"], env.ticks) == (11, 14)
    assert (env.steps_taken, env.resets_done) == (2, 2)
    assert (env.seeds, env.options_seen) == ([5, None], [None, {"x": 1}])


def test_noise_follows_the_seed() -> None:
    def noise(seed: int) -> list[float]:
        env = OracleEnv(0, [9], kind="seeded")
        return [float(env.reset(seed=seed)[0][3]), float(env.step(0)[0][3])]

    assert noise(1) == noise(1) != noise(2)


def test_lengths_may_be_a_list_a_list_a_lane_or_a_function() -> None:
    assert [length_of([2, 3], 1, e) for e in range(3)] == [2, 3, 2]
    assert [length_of(LENGTHS, lane, 1) for lane in range(3)] == [1, 1, 5]
    assert length_of(lengths_by_rule, 2, 1) == 4


def test_expected_stream_of_a_lane() -> None:
    rows = expected_stream(1, [2, 1], 4, ends="mixed")
    assert [(r.episode, r.step) for r in rows] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert [r.truncated for r in rows] == [False, True, False, False]
    assert [r.terminated for r in rows] == [False, False, True, False]
    assert rows[1].next_obs["observation"].tolist() == [1, 0, 2]
    assert rows[2].reward_base == 1 + 31 + 7


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_expected_ledger_is_what_gymnasium_does(mode: AutoresetMode) -> None:
    envs = make_oracle_vec(3, LENGTHS, mode=mode)
    n = 23
    wanted = expected_ledger(3, LENGTHS, n, reset_slots=mode == AutoresetMode.NEXT_STEP)
    rows = drive(envs, "float", mode, wanted.slots // 3)
    checked = check_rows(rows[:n], LENGTHS)
    assert sum(wanted.stored_by_lane) == n
    assert checked.counts(3) == wanted.stored_by_lane
    assert int(checked.ended.sum()) == wanted.episodes_complete
    assert sum(envs.get_attr("steps_taken")) == wanted.executed == len(rows)
    assert wanted.slots == wanted.executed + wanted.reset_slots
    envs.close()


def good_rows() -> TensorDict:
    """Return two lanes of 8 rows each, with bookkeeping columns."""
    rows = torch_rows(OracleTorchEnv(2, [3, 1, 4], kind="dict", ends="mixed"), 8)
    lane, episode, step = rows["pos"].long().unbind(-1)
    rows["collector"] = TensorDict(
        {
            "lane": lane.int(),
            "step": step,
            "traj_ids": episode * 2 + lane,
            "cut": torch.zeros(16, dtype=torch.bool),
        },
        batch_size=[16],
    )
    return rows.contiguous()


def judge(rows: TensorDict, **kwargs: Any) -> None:
    check_rows(rows, [3, 1, 4], kind="dict", ends="mixed", **kwargs)


def test_good_rows_pass() -> None:
    rows = good_rows()
    judge(rows, from_start=True)
    judge(rows.reshape(2, 8))
    check_row(rows[3], [3, 1, 4], kind="dict", ends="mixed")


def test_padding_is_left_out() -> None:
    rows = good_rows()
    rows["collector", "mask"] = torch.ones(16, dtype=torch.bool)
    rows["collector", "mask"][7] = False
    rows["pos"][7] = 99
    judge(rows.reshape(2, 8))


def test_cut_rows_are_done_for_consumers() -> None:
    rows = good_rows()
    rows["collector", "cut"][5] = True
    with pytest.raises(AssertionError, match="done is wrong"):
        judge(rows)
    rows["next", "done"][5] = True
    judge(rows)


def test_lost_final_observations_are_forgiven_at_an_end_only() -> None:
    rows = good_rows()
    valid = torch.ones(16, dtype=torch.bool)
    valid[2] = False
    rows["next", "pos"][2] = torch.nan
    with pytest.raises(AssertionError, match="next observation 'pos' is not the true one"):
        judge(rows)
    rows["collector", "next_valid"] = valid
    judge(rows)
    rows["collector", "next_valid"][1] = False
    with pytest.raises(AssertionError, match="next_valid is False in mid-episode"):
        judge(rows)


FAULTS: dict[str, tuple[Callable[[TensorDict], Any], str]] = {
    "next observation": (lambda r: r["next", "pos"][0].fill_(0), "next observation 'pos'"),
    "image": (lambda r: r["img"][4, 3, 3].fill_(0), "observation 'img'"),
    "nested": (lambda r: r["inner", "code"][4].add_(1), r"observation \('inner', 'code'\)"),
    "another action": (lambda r: r["action"][6].sub_(1).abs_(), "reward is not what"),
    "reward": (lambda r: r["next", "reward"][6].zero_(), "reward is not what"),
    "ends swapped": (
        lambda r: r["next"].update(
            {"terminated": r["next", "truncated"], "truncated": r["next", "terminated"]}
        ),
        "terminated is wrong",
    ),
    "an end missed": (lambda r: r["next", "done"][2].fill_(False), "done is wrong"),
    "lane": (lambda r: r["collector", "lane"][0].add_(1), "column lane"),
    "step": (lambda r: r["collector", "step"][0].add_(1), "column step"),
    "two ids": (lambda r: r["collector", "traj_ids"][0].add_(50), "two ids"),
    "one id": (lambda r: r["collector", "traj_ids"].copy_(r["collector", "lane"]), "share one id"),
    "ids shrink": (lambda r: r["collector", "traj_ids"].mul_(-1), "ids do not grow"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_row_is_found(name: str) -> None:
    fault, message = FAULTS[name]
    rows = good_rows()
    fault(rows)
    with pytest.raises(AssertionError, match=message):
        judge(rows)


def test_a_phantom_row_is_found() -> None:
    rows = good_rows()
    rows["pos"][3] = rows["pos"][2] + torch.tensor([0, 0, 1])
    rows["img"][3] = rows["next", "img"][2]
    rows["inner", "code"][3] = rows["next", "inner", "code"][2]
    rows["next", "pos"][3] = rows["next", "pos"][2] + torch.tensor([0, 0, 1])
    rows["next", "inner", "code"][3] = rows["next", "inner", "code"][2] + torch.tensor([0, 0, 1])
    rows["next", "img"][3] = torch.from_numpy(encode("uint8", 0, 0, 4)["observation"])
    with pytest.raises(AssertionError, match="in an episode of 3 steps"):
        judge(rows)


def test_gaps_repeats_and_disorder_are_found() -> None:
    rows = good_rows()
    without_one = rows[[0, *range(2, 16)]]
    with pytest.raises(AssertionError, match="after episode 0, step 0 comes episode 0, step 2"):
        judge(without_one)
    judge(without_one, contiguous=False)
    for wrong in (rows[[1, 0, *range(2, 16)]], rows[[0, 0, *range(1, 16)]]):
        with pytest.raises(AssertionError, match="lane 0: after episode 0"):
            judge(wrong, contiguous=False)
    with pytest.raises(AssertionError, match="lane 0 begins at episode 0, step 1"):
        judge(rows[1:], from_start=True)


def test_a_time_limit_truncates() -> None:
    rows = torch_rows(OracleTorchEnv(1, [2], ends="truncated"), 6)
    check_rows(rows, [5], time_limit=2)
    with pytest.raises(AssertionError, match="truncated is wrong"):
        check_rows(rows, [5], time_limit=3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tuple"])
@pytest.mark.parametrize("action", ACTIONS)
def test_torchrls_wrapper_in_disabled_mode_makes_the_expected_streams(
    kind: Kind, action: Actions
) -> None:
    envs = make_oracle_vec(
        3, LENGTHS, mode=AutoresetMode.DISABLED, kind=kind, ends="mixed", action=action
    )
    env = GymWrapper(envs)
    rows = env.rollout(15, break_when_any_done=False)
    check_rows(rows, LENGTHS, kind=kind, ends="mixed", action=action, from_start=True)
    env.close()


def test_the_policy_acts_by_the_observation_alone() -> None:
    env = OracleTorchEnv(3, LENGTHS, kind="dict", action="box")
    policy = ByObservation("dict", "box")
    td = env.reset()
    first = policy(td.clone())["action"]
    assert env.action_spec.is_in(first)
    assert torch.equal(first, policy(td.clone())["action"])
    assert len(np.unique(policy(env.rand_step(td)["next"])["action"].numpy())) > 1
