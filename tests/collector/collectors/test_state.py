"""A saved run continues to its exact total, repeats no id or seed, and keeps a balanced ledger."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torchrl.envs import RewardSum, TransformedEnv, VecNormV2

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import NotAStorage

from collect_kit import (
    LENGTHS,
    Batches,
    ByObservation,
    assert_same,
    balanced,
    flat,
    joined,
    through_a_file,
)
from oracles import OracleTorchEnv, OracleVectorEnv, check_rows, make_oracle_vec
from policies_kit import linear

NUMBERS = (("collector", "step"), ("collector", "traj_ids"))


def vec(mode: AutoresetMode = AutoresetMode.DISABLED) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed"))


DRIVERS: dict[str, Any] = {
    **{mode.value: partial(vec, mode) for mode in AutoresetMode},
    "native": partial(OracleVectorEnv, 3, LENGTHS, ends="mixed"),
    "torch": partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"),
}
every_driver = pytest.mark.parametrize("driver", list(DRIVERS))


def in_two_halves(
    driver: str, policy: Any = ByObservation, batches: int = 3, **kwargs: Any
) -> tuple[Batches, Batches, list[SyncCollector]]:
    """Interrupt a run after some batches and continue it.

    Return the batches of both halves, and both collectors.
    """
    kwargs = {"frames_per_batch": 7, "total_frames": 61, "seed": 3, **kwargs}
    make = partial(SyncCollector, policy=policy() if policy else None, **kwargs)
    first, second = [], []
    one = make(DRIVERS[driver]())
    for batch in one:
        first.append(batch)
        if len(first) == batches:
            break
    state = through_a_file(one.state_dict())
    one.shutdown()
    other = make(DRIVERS[driver]())
    other.load_state_dict(state)
    with other:
        for batch in other:
            second.append(batch)
            assert balanced(other.ledger)
    return first, second, [one, other]


@pytest.mark.parametrize(
    ("driver", "surplus"),
    [
        *((driver, surplus) for driver in DRIVERS for surplus in ("carry", "discard")),
        (AutoresetMode.DISABLED.value, "never_step"),
    ],
)
@pytest.mark.parametrize("policy", [ByObservation, None])
def test_a_run_that_goes_on_ends_at_the_exact_total(driver: str, surplus: Any, policy: Any) -> None:
    first, second, (_, collector) = in_two_halves(driver, policy, surplus=surplus)
    assert [len(batch) for batch in first + second] == [7] * 8 + [5]
    ledger = collector.ledger
    assert (ledger.stored, ledger.carried, ledger.incarnation) == (61, 0, 1)
    assert balanced(ledger)
    mine, theirs = (set(joined(b)["collector", "traj_ids"].tolist()) for b in (first, second))
    assert not mine & theirs
    for batches in (first, second):
        rows = joined(batches).exclude(*NUMBERS if surplus == "discard" else ())
        check_rows(rows, LENGTHS, ends="mixed", contiguous=surplus != "discard")


@every_driver
def test_no_seed_is_used_twice(driver: str) -> None:
    envs: list[Any] = []
    saved: dict[str, Any] = {}
    for _ in range(2):
        env = DRIVERS[driver]()
        with SyncCollector(env, frames_per_batch=7, total_frames=61, seed=3) as collector:
            if saved:
                collector.load_state_dict(saved)
            next(iter(collector))
            saved = collector.state_dict()
        envs.append(env)
    if driver == "torch":
        assert not torch.equal(*(torch.from_numpy(env._noise.random(9)) for env in envs))
        return
    lanes = [env.lanes if driver == "native" else env.vector_env.envs for env in envs]
    seeds = [
        [[seed for seed in lane.unwrapped.seeds if seed is not None][-1] for lane in each]
        for each in lanes
    ]
    assert not set(seeds[0]) & set(seeds[1])


@pytest.mark.parametrize("driver", [AutoresetMode.DISABLED.value, "torch"])
@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_random_frames_stay_exact(driver: str, batches: int) -> None:
    first, second, (_, collector) = in_two_halves(driver, batches=batches, init_random_frames=17)
    version = joined(first + second)["collector", "policy_version"]
    assert int((version == -1).sum()) == collector.ledger.random == 17


@every_driver
@pytest.mark.parametrize("batches", [1, 3])
def test_a_budget_in_episodes_goes_on(driver: str, batches: int) -> None:
    first, second, (_, collector) = in_two_halves(
        driver, batches=batches, total_frames=None, total_episodes=12
    )
    assert collector.ledger.episodes_complete == 12
    whole = check_rows(joined(first), LENGTHS, ends="mixed", contiguous=False).ended.sum()
    again = check_rows(joined(second), LENGTHS, ends="mixed", contiguous=False)
    assert whole + again.ended.sum() == 12


def test_the_policy_and_its_version_go_on() -> None:
    policy, saved = linear(0), {}
    with SyncCollector(vec(), policy, frames_per_batch=7, total_frames=61) as one:
        one.update_policy_weights_(linear(3).state_dict())
        next(iter(one))
        saved = one.state_dict()
    with SyncCollector(vec(), linear(1), frames_per_batch=7, total_frames=61) as other:
        other.load_state_dict(saved)
        batch = next(iter(other))
    assert set(batch["collector", "policy_version"].tolist()) == {1}
    assert torch.equal(linear(3)(batch.select("observation"))["action"], batch["action"])


def test_the_generators_go_on() -> None:
    def drawing(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.randint(0, 2, td.batch_size))

    with SyncCollector(vec(), drawing, frames_per_batch=60, total_frames=121, seed=3) as one:
        next(iter(one))
        saved = through_a_file(one.state_dict())
    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        with SyncCollector(vec(), drawing, frames_per_batch=60, total_frames=121, seed=9) as other:
            other.load_state_dict(saved)
            runs.append(list(other))
    for mine, theirs in zip(*runs, strict=True):
        assert_same(mine, theirs)


def test_transforms_go_on() -> None:
    def make() -> TransformedEnv:
        return TransformedEnv(
            OracleTorchEnv(None, LENGTHS), VecNormV2(in_keys=["observation"], out_keys=["normed"])
        )

    with SyncCollector(make(), frames_per_batch=30, total_frames=90, seed=3) as one:
        next(iter(one))
        saved = through_a_file(one.state_dict())
    with SyncCollector(make(), frames_per_batch=30, total_frames=90, seed=3) as other:
        other.load_state_dict(saved)
        assert flat(other.env.state_dict()) == flat(saved["env"])
        assert any("count" in name for name in flat(saved["env"]))


@pytest.mark.parametrize("saved_after", [1, 4, 9])
def test_a_storage_in_append_mode_goes_on_with_the_run(tmp_path: Any, saved_after: int) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 61, "seed": 3}
    batches = []
    with MemmapStorage(tmp_path / "s") as storage:
        one = SyncCollector(vec(), ByObservation(), storage=storage, **kwargs)
        for batch in one:
            batches.append(batch)
            if len(batches) == saved_after:
                break
        saved = one.state_dict()
        one.shutdown()
    with MemmapStorage(tmp_path / "s", mode="append") as storage:
        other = SyncCollector(vec(), ByObservation(), storage=storage, **kwargs)
        other.load_state_dict(saved)
        batches += list(other)
        other.shutdown()
        assert_same(storage.get(slice(None)), joined(batches))
        assert len(storage) == other.ledger.stored == 61
        ids = storage.get(slice(None))["collector", "traj_ids"]
        split = 7 * saved_after
        assert not set(ids[:split].tolist()) & set(ids[split:].tolist())


@every_driver
def test_a_stored_run_is_resumed_from_its_path(driver: str, tmp_path: Any) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 61, "storage": tmp_path / "s"}
    batches = []
    with SyncCollector(DRIVERS[driver](), ByObservation(), seed=3, **kwargs) as one:
        for batch in one:
            batches.append(batch)
            if len(batches) == 3:
                break
    for stop in (5, 100):
        with SyncCollector(DRIVERS[driver](), ByObservation(), resume=True, **kwargs) as other:
            assert other.ledger.seed == 3
            for batch in other:
                batches.append(batch)
                assert balanced(other.ledger)
                if len(batches) == stop:
                    break
    assert (other.ledger.stored, other.ledger.incarnation) == (61, 2)
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        assert_same(storage.get(slice(None)), joined(batches))
        runs = storage.manifest["runs"]
        assert [run["incarnation"] for run in runs] == [0, 1, 2]


@pytest.mark.parametrize("path", ["s", "s.h5", "s.zarr"])
def test_resume_auto_begins_a_run_and_goes_on(path: str, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 61, "resume": "auto"}
    batches = []
    # resume nothing, a run without rows, and a run with rows; then run to the end
    for stop in (0, 0, 3, 100):
        with SyncCollector(vec(), ByObservation(), storage=tmp_path / path, **kwargs) as one:
            while len(batches) < stop and (batch := next(iter(one), None)) is not None:
                batches.append(batch)
    assert (one.ledger.stored, one.ledger.incarnation) == (61, 3)
    with open_storage(tmp_path / path) as storage:
        assert_same(storage.get(slice(None)), joined(batches))


def test_resume_auto_with_a_storage_that_is_open(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "resume": "auto"}
    with MemmapStorage(tmp_path / "s") as storage:
        for total in (14, 28):
            with SyncCollector(vec(), storage=storage, total_frames=total, **kwargs) as one:
                list(one)
        assert (len(storage), one.ledger.incarnation) == (28, 1)


def test_resume_auto_of_rows_without_a_run(tmp_path: Path) -> None:
    batch, *_ = SyncCollector(vec(), frames_per_batch=7, total_frames=7)
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(batch)
        with pytest.raises(StateError, match="Append to the storage instead"):
            SyncCollector(vec(), frames_per_batch=7, total_frames=9, storage=storage, resume="auto")


def test_resume_auto_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "zarr"}')
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 9, "resume": "auto"}
    with pytest.raises(NotAStorage, match="does not describe a Tallyroll storage"):
        SyncCollector(vec(), storage=tmp_path, **kwargs)


@pytest.mark.parametrize("resume", ["yes", "", 1, None])
def test_other_values_of_resume(resume: Any, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 9}
    with pytest.raises(ArgumentError, match='resume: expected True, False or "auto", got '):
        SyncCollector(vec(), storage=tmp_path / "s", resume=resume, **kwargs)
    with pytest.raises(ArgumentError, match="resume='auto' needs a storage"):
        SyncCollector(vec(), resume="auto", **kwargs)


def test_a_run_that_is_complete_has_nothing_to_resume(tmp_path: Any) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 21, "storage": tmp_path / "s"}
    with SyncCollector(vec(), seed=3, **kwargs) as one:
        list(one)
    with SyncCollector(vec(), resume=True, **kwargs) as other:
        assert list(other) == []
        assert balanced(other.ledger)
        assert other.ledger.stored == 21


def test_a_run_of_another_seed_environment_or_lanes_is_not_resumed(tmp_path: Any) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "storage": tmp_path / "s"}
    with SyncCollector(vec(), seed=3, total_frames=7, **kwargs) as one:
        list(one)
    kwargs |= {"total_frames": 61, "resume": True}
    with pytest.raises(StateError, match=r"to be continued has the seed 3, got 4\. Leave seed"):
        SyncCollector(vec(), seed=4, **kwargs)
    with pytest.raises(
        StateError, match=r"made by another environment: .*type was 'SyncVectorEnv'"
    ):
        SyncCollector(OracleTorchEnv(3, LENGTHS), **kwargs)
    with pytest.raises(
        StateError, match=r"continued has 3 lanes, got 2\. .* with num_envs=3, or app"
    ):
        SyncCollector(GymnasiumVectorEnv(make_oracle_vec(2, LENGTHS, ends="mixed")), **kwargs)
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        assert (len(storage), len(storage.manifest["runs"])) == (7, 1)


def test_a_run_without_rows_binds_no_later_one(tmp_path: Any) -> None:
    """With other lanes or another seed, the run before it continues, or a new run begins."""
    next_step = AutoresetMode.NEXT_STEP

    def run(lanes: int, seed: int | None, total: int, batches: int | None = None) -> Any:
        env = GymnasiumVectorEnv(make_oracle_vec(lanes, LENGTHS, mode=next_step, ends="mixed"))
        more: dict[str, Any] = {"resume": "auto", "storage": tmp_path / "s"}
        with SyncCollector(env, seed=seed, frames_per_batch=7, total_frames=total, **more) as made:
            list(islice(made, batches))
        return made.ledger

    assert run(2, 1, 14, 0).stored == 0
    assert run(3, 4, 14).stored == 14
    storage = MemmapStorage(tmp_path / "s", mode="append")
    assert [(each["lanes"], each["seed"]) for each in storage.runs] == [(3, 4)]
    again = GymnasiumVectorEnv(make_oracle_vec(2, LENGTHS, ends="mixed"))
    kwargs: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 14, "storage": storage}
    left = SyncCollector(again, seed=9, **kwargs)
    storage.close()  # like a kill: the record is not written
    with pytest.warns(UserWarning, match="was closed before its collector"):
        left.shutdown()
    ledger = run(3, None, 28)
    assert (ledger.stored, ledger.seed, ledger.incarnation) == (28, 4, 1)
    assert ledger.reset_slots  # the sum of both runs, because the record was kept
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        assert [(each["first_row"], each["lanes"]) for each in storage.runs] == [(0, 3), (14, 3)]
        for half in (slice(14), slice(14, None)):
            check_rows(storage[half], LENGTHS, ends="mixed", contiguous=False)
    assert not verify(tmp_path / "s").findings
    with MemmapStorage(tmp_path / "s", mode="append") as storage:
        again = GymnasiumVectorEnv(make_oracle_vec(2, LENGTHS, ends="mixed"))
        SyncCollector(again, seed=9, **kwargs | {"storage": storage}).shutdown()
    with pytest.raises(StateError, match="has 2 lanes, got 3"):  # its record is the newest
        run(3, None, 35)


def test_a_state_belongs_to_a_collector_of_its_kind() -> None:
    with SyncCollector(vec(), frames_per_batch=7, total_frames=61) as one:
        next(iter(one))
        saved = one.state_dict()
        with pytest.raises(StateError, match="this collector has already collected"):
            one.load_state_dict(saved)
    with (
        SyncCollector(vec(), ByObservation(), frames_per_batch=7, total_frames=61) as other,
        pytest.raises(StateError, match="the state was saved without a policy, unlike the state"),
    ):
        other.load_state_dict(saved)
    with SyncCollector(vec(), ByObservation(), frames_per_batch=7, total_frames=61) as one:
        saved = one.state_dict()
    with (
        SyncCollector(vec(), frames_per_batch=7, total_frames=61) as other,
        pytest.raises(StateError, match="the state was saved with a policy, unlike the state"),
    ):
        other.load_state_dict(saved)


def test_a_state_that_was_saved_before_the_first_batch() -> None:
    with SyncCollector(vec(), frames_per_batch=7, total_frames=21) as one:
        saved = one.state_dict()
    with SyncCollector(vec(), frames_per_batch=7, total_frames=21) as other:
        other.load_state_dict(saved)
        assert [len(batch) for batch in other] == [7, 7, 7]


def test_a_state_of_the_end_is_the_end() -> None:
    with SyncCollector(vec(), frames_per_batch=7, total_frames=21) as one:
        list(one)
        saved = one.state_dict()
    with SyncCollector(vec(), frames_per_batch=7, total_frames=21) as other:
        other.load_state_dict(saved)
        assert list(other) == []


def test_reward_sums_do_not_go_on_over_a_restart() -> None:
    def make() -> TransformedEnv:
        return TransformedEnv(OracleTorchEnv(3, LENGTHS), RewardSum())

    with SyncCollector(make(), frames_per_batch=4, total_frames=61, seed=3) as one:
        next(iter(one))
        saved = one.state_dict()
    with SyncCollector(make(), frames_per_batch=4, total_frames=61, seed=3) as other:
        other.load_state_dict(saved)
        rows = joined(list(other))
    begin = rows["collector", "step"] == 0
    assert torch.equal(rows["next", "episode_reward"][begin], rows["next", "reward"][begin])


def test_a_run_that_went_on_from_a_state_is_resumed_to_the_exact_total(tmp_path: Path) -> None:
    def part(**kwargs: Any) -> SyncCollector:
        env = make_oracle_vec(2, LENGTHS, kind="seeded")
        return SyncCollector(env, frames_per_batch=5, total_frames=60, **kwargs)

    first = part(storage=tmp_path / "runs", seed=1)
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    first.shutdown()
    with MemmapStorage(tmp_path / "runs", mode="append") as storage:
        second = part(storage=storage, seed=1)
        second.load_state_dict(state)
        batches = iter(second)
        next(batches), next(batches)
        second.shutdown()
    with part(storage=tmp_path / "runs", resume=True) as third:
        assert third.ledger.stored == 20
        assert third.ledger.incarnation > second.ledger.incarnation
        list(third)
        assert third.ledger.stored == 60
    with MemmapStorage(tmp_path / "runs", mode="read") as storage:
        assert len(storage) == 60


def test_a_seed_set_in_mid_run_is_the_one_that_is_resumed(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 5, "total_frames": 20}
    with SyncCollector(
        make_oracle_vec(2, LENGTHS), storage=tmp_path / "runs", seed=1, **kwargs
    ) as collector:
        collector.set_seed(5)
        next(iter(collector))
    with SyncCollector(
        make_oracle_vec(2, LENGTHS), storage=tmp_path / "runs", resume=True, **kwargs
    ) as resumed:
        assert resumed.ledger.seed == 5


def test_a_state_without_its_parts_is_refused() -> None:
    made = SyncCollector(make_oracle_vec(2, LENGTHS), frames_per_batch=4, total_frames=8)
    with made, pytest.raises(StateError, match="policy"):
        made.load_state_dict({})


def test_a_storage_that_this_process_created_is_resumed(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "runs") as storage:
        for resume in (False, True):
            with SyncCollector(
                make_oracle_vec(2, LENGTHS),
                frames_per_batch=5,
                total_frames=20,
                storage=storage,
                resume=resume,
            ) as collector:
                batches = iter(collector)
                next(batches), next(batches)
        assert len(storage) == 20
