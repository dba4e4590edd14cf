"""Options of a run: random frames, time limits, resets, postproc, infos, ticks, devices, stop."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential
from torchrl.envs.utils import ExplorationType, exploration_type

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.cli.parser import make_parser
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.multiprocess import Mode
from tallyroll.collector.options.objects import Finals, Validate

from collect_kit import (
    LENGTHS,
    ByObservation,
    OwnTicks,
    assert_same,
    balanced,
    collect,
    joined,
)
from oracles import (
    OracleTorchEnv,
    OracleVectorEnv,
    check_rows,
    expected_ledger,
    make_oracle_vec,
)

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
MODES = list(AutoresetMode)


def vec(mode: AutoresetMode, lanes: int = 3, reset_slots: Any = "mask", **kwargs: Any) -> Any:
    vector = make_oracle_vec(lanes, LENGTHS, mode=mode, ends="mixed", **kwargs)
    return GymnasiumVectorEnv(vector, reset_slots=reset_slots)


DRIVERS: dict[str, Any] = {
    **{mode.value: partial(vec, mode) for mode in MODES},
    "avoided": partial(vec, NEXT, 3, "avoid"),
    "native": partial(OracleVectorEnv, 3, LENGTHS, ends="mixed"),
    "torch": partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"),
    "torch-one-lane": partial(OracleTorchEnv, None, LENGTHS, ends="mixed"),
}


class RecordingPolicy(ByObservation):
    """Policy that also writes a column filled with 7."""

    def __init__(self) -> None:
        super().__init__()
        self.out_keys = ["action", "told"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and the column."""
        return super().forward(td).set("told", torch.full((*td.batch_size, 2), 7.0))


# --- places of options --------------------------------------------------------------------------


def test_the_command_takes_the_values_that_collectors_take() -> None:
    words = ["collect", "CartPole-v1", "--frames", "5", "--out", "data"]
    for name, values in (("finals", Finals), ("validate", Validate), ("mode", Mode)):
        for value in get_args(values):
            args = make_parser().parse_args([*words, f"--{name}", value])
            assert getattr(args, name) == value


# --- random frames ------------------------------------------------------------------------------


@given(
    random_frames=st.integers(0, 60),
    per_batch=st.integers(1, 30),
    driver=st.sampled_from(list(DRIVERS)),
)
@settings(max_examples=60, deadline=None)
def test_exactly_the_first_frames_in_slot_order_are_random(
    random_frames: int, per_batch: int, driver: str
) -> None:
    batches, collector = collect(
        DRIVERS[driver](),
        RecordingPolicy(),
        frames_per_batch=per_batch,
        total_frames=70,
        init_random_frames=random_frames,
    )
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    version = rows["collector", "policy_version"]
    random = version == -1
    assert int(random.sum()) == random_frames == collector.ledger.random
    lanes = collector.lanes
    wanted = expected_ledger(
        lanes, LENGTHS, random_frames, reset_slots=driver in ("native", NEXT.value)
    )
    lane = rows["collector", "lane"]
    assert np.bincount(lane[random], minlength=lanes).tolist() == wanted.stored_by_lane
    for each in range(lanes):
        own = random[lane == each].tolist()
        assert own == sorted(own, reverse=True)
    assert rows["told"].eq(torch.where(random, 0.0, 7.0).unsqueeze(-1)).all()
    by_policy = rows[~random]
    assert_same(
        ByObservation()(by_policy.select("observation")).select("action"),
        by_policy.select("action"),
    )


def test_without_a_policy_no_frame_counts_as_opening() -> None:
    _, collector = collect(vec(DISABLED), frames_per_batch=5, total_frames=20)
    assert collector.ledger.random == 0
    assert collector.policy_version == -1


@pytest.mark.parametrize("driver", list(DRIVERS))
def test_random_actions_vary(driver: str) -> None:
    batches, _ = collect(DRIVERS[driver](), frames_per_batch=50, total_frames=100, seed=0)
    assert 20 < int(joined(batches)["action"].sum()) < 80


# --- limits, resets, stop -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "driver", [NEXT.value, SAME.value, DISABLED.value, "avoided", "torch", "torch-one-lane"]
)
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_time_limit_truncates(driver: str, limit: int) -> None:
    batches, _ = collect(
        DRIVERS[driver](),
        ByObservation(),
        frames_per_batch=9,
        total_frames=60,
        max_frames_per_traj=limit,
    )
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed", time_limit=limit, from_start=True)
    assert len(rows) == 60


def test_a_time_limit_is_refused_where_reset_masks_are_ignored() -> None:
    with pytest.raises(EnvironmentRefused, match="max_frames_per_traj resets lanes by mask, but"):
        SyncCollector(
            DRIVERS["native"](), frames_per_batch=5, total_frames=10, max_frames_per_traj=3
        )


@pytest.mark.parametrize("driver", list(DRIVERS))
@pytest.mark.parametrize("per_batch", [3, 4, 7])
def test_every_batch_begins_with_a_reset(driver: str, per_batch: int) -> None:
    batches, collector = collect(
        DRIVERS[driver](),
        ByObservation(),
        frames_per_batch=per_batch,
        total_frames=60,
        reset_at_each_iter=True,
        surplus="discard",
    )
    ids: set[int] = set()
    for batch in batches:
        checked = check_rows(batch, LENGTHS, ends="mixed")
        assert all(checked.of_lane(lane)[0][1] == 0 for lane in set(checked.lane.tolist()))
        own = set(batch["collector", "traj_ids"].tolist())
        assert not own & ids
        ids |= own
    assert len(joined(batches)) == 60
    assert balanced(collector.ledger)


@pytest.mark.parametrize("per_batch", [1, 4, 7])
@pytest.mark.parametrize("driver", list(DRIVERS))
def test_a_carried_transition_keeps_its_trajectory_over_the_reset(
    driver: str, per_batch: int
) -> None:
    batches, collector = collect(
        DRIVERS[driver](), frames_per_batch=per_batch, total_frames=40, reset_at_each_iter=True
    )
    check_rows(joined(batches), LENGTHS, ends="mixed", contiguous=False)
    for batch in batches:
        check_rows(batch, LENGTHS, ends="mixed", contiguous=False)
    assert collector.ledger.stored == 40


def test_setting_a_seed_in_between_starts_new_trajectories() -> None:
    with SyncCollector(vec(DISABLED), ByObservation(), frames_per_batch=4, total_frames=40) as run:
        batches = []
        for batch in run:
            check_rows(batch, LENGTHS, ends="mixed", contiguous=False)
            batches.append(batch)
            run.set_seed(len(batches))
            assert balanced(run.ledger)
    check_rows(joined(batches), LENGTHS, ends="mixed", contiguous=False)


@pytest.mark.parametrize("driver", list(DRIVERS))
def test_without_a_total_it_runs_until_stopped(driver: str) -> None:
    batches = []
    with SyncCollector(DRIVERS[driver](), frames_per_batch=7, total_frames=-1) as collector:
        with pytest.raises(TypeError, match="without total_frames has no length"):
            len(collector)
        for batch in collector:
            batches.append(batch)
            if len(batches) == 9:
                collector.stop()
    assert collector.ledger.stored == sum(map(len, batches))
    assert collector.ledger.carried == 0
    assert balanced(collector.ledger)
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)


def test_a_stop_in_the_middle_of_a_batch_yields_a_shorter_one() -> None:
    collectors: list[SyncCollector] = []

    def stopping(td: TensorDictBase) -> TensorDictBase:
        if collectors and collectors[0].env.vector_env.get_attr("steps_taken")[0] == 4:
            collectors[0].stop()
        return ByObservation()(td)

    with SyncCollector(vec(DISABLED), stopping, frames_per_batch=100, total_frames=-1) as collector:
        collectors.append(collector)
        (batch,) = collector
    check_rows(batch, LENGTHS, ends="mixed", from_start=True)
    assert len(batch) == 15
    assert list(collector) == []


def test_leaving_early_gives_up_what_is_carried() -> None:
    with SyncCollector(vec(DISABLED), frames_per_batch=4, total_frames=40) as collector:
        next(iter(collector))
        assert collector.ledger.carried == 2
    assert (collector.ledger.carried, collector.ledger.discarded) == (0, 2)
    collector.shutdown()


# --- layout and values of a batch ---------------------------------------------------------------


def test_postproc_changes_what_is_yielded_and_stored(tmp_path: Any) -> None:
    from tallyroll.storage import MemmapStorage

    def doubled(rows: TensorDictBase) -> TensorDictBase:
        assert ("collector", "cut") in rows.keys(True)
        return rows.set("twice", rows["next", "reward"] * 2).exclude("observation")

    batches, _ = collect(
        vec(DISABLED), postproc=doubled, frames_per_batch=7, total_frames=30, storage=tmp_path / "s"
    )
    rows = joined(batches)
    assert torch.equal(rows["twice"], rows["next", "reward"] * 2)
    assert "observation" not in rows.keys()
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        assert_same(storage.get(slice(None)), rows)


@pytest.mark.parametrize(
    ("postproc", "got"), [(lambda rows: rows[:-1], r"\[6\]"), (lambda _: None, "NoneType")]
)
def test_postproc_keeps_the_rows(postproc: Any, got: str) -> None:
    match = rf"postproc: expected a result of batch size \[7\], got {got}"
    with pytest.raises(ArgumentError, match=match):
        collect(vec(DISABLED), postproc=postproc, frames_per_batch=7, total_frames=30)


def test_batches_lie_on_the_storing_device() -> None:
    batches, _ = collect(
        vec(DISABLED),
        frames_per_batch=7,
        total_frames=30,
        storing_device="cpu",
        policy_device="cpu",
    )
    assert all(batch.device == torch.device("cpu") for batch in batches)
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)


def stochastic() -> Sequential:
    logits = TensorDictModule(
        lambda obs: torch.stack([obs.sum(-1) * 0, obs.sum(-1) * 0 + 2.0], -1),
        in_keys=["observation"],
        out_keys=["logits"],
    )
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )
    return Sequential(logits, draw)


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(ExplorationType.RANDOM, 60, 99), (ExplorationType.MODE, 100, 100)]
)
def test_the_exploration_type_holds_while_collecting(
    kind: ExplorationType, least: int, most: int
) -> None:
    batches, _ = collect(
        vec(NEXT),
        stochastic(),
        frames_per_batch=50,
        total_frames=100,
        seed=0,
        exploration_type=kind,
    )
    assert least <= int(joined(batches)["action"].sum()) <= most
    assert exploration_type() is not kind or kind is ExplorationType.RANDOM


def test_keys_that_a_policy_writes_beside_the_action_become_columns() -> None:
    batches, _ = collect(vec(NEXT), stochastic(), frames_per_batch=10, total_frames=40, seed=0)
    rows = joined(batches)
    assert rows["logits"].shape == (40, 2)
    log_prob = torch.distributions.Categorical(logits=rows["logits"]).log_prob(rows["action"])
    assert torch.allclose(rows["action_log_prob"], log_prob)


def test_nothing_that_is_collected_requires_a_gradient() -> None:
    net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
    policy = Sequential(
        net,
        TensorDictModule(lambda logits: logits.argmax(-1), in_keys=["logits"], out_keys=["action"]),
    )
    batches, _ = collect(vec(NEXT), policy, frames_per_batch=10, total_frames=20)
    assert not any(leaf.requires_grad for leaf in batches[0].values(True, True))
    assert torch.is_grad_enabled()


# --- infos and ticks ----------------------------------------------------------------------------


def with_infos(mode: AutoresetMode, keys: Any, cls: Any = OwnTicks, **kwargs: Any) -> Any:
    reset_slots = kwargs.pop("reset_slots", "mask")
    makes = [partial(cls, lane, LENGTHS, ends="mixed", **kwargs) for lane in range(3)]
    return GymnasiumVectorEnv(
        SyncVectorEnv(makes, autoreset_mode=mode), info_keys=keys, reset_slots=reset_slots
    )


@pytest.mark.parametrize("reset_slots", ["mask", "avoid"])
@pytest.mark.parametrize("mode", MODES)
def test_infos_are_those_of_their_step_at_ends_too(mode: AutoresetMode, reset_slots: Any) -> None:
    env = with_infos(mode, ["lives", "tick"], frame_skip=4, noops=3, reset_slots=reset_slots)
    batches, _ = collect(env, ByObservation(), frames_per_batch=9, total_frames=60)
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed")
    step = rows["collector", "step"]
    assert torch.equal(rows["lives"], 3 - step % 3)
    assert torch.equal(rows["next", "lives"], 3 - (step + 1) % 3)
    assert torch.equal(rows["tick"], 3 + 4 * step)
    assert torch.equal(rows["next", "tick"], 3 + 4 * (step + 1))


@pytest.mark.parametrize("mode", MODES)
def test_infos_under_a_transformed_environment(mode: AutoresetMode) -> None:
    env = with_infos(mode, ["tick"], frame_skip=2)
    batches, _ = collect(env, frames_per_batch=9, total_frames=60, max_frames_per_traj=3)
    rows = joined(batches)
    assert torch.equal(rows["tick"], 2 * rows["collector", "step"])
    assert torch.equal(rows["next", "tick"], 2 * rows["collector", "step"] + 2)


def test_a_number_of_ticks_a_transition() -> None:
    _, collector = collect(vec(NEXT), frames_per_batch=9, total_frames=60, frame_skip=4)
    assert (collector.ledger.ticks, collector.ledger.reset_ticks) == (240, 0)


@pytest.mark.parametrize("surplus", ["carry", "discard"])
@pytest.mark.parametrize("mode", MODES)
def test_ticks_are_read_from_an_info_and_those_of_resets_apart(
    mode: AutoresetMode, surplus: Any
) -> None:
    makes = [partial(OwnTicks, lane, LENGTHS, frame_skip=4, noops=3) for lane in range(3)]
    batches, collector = collect(
        SyncVectorEnv(makes, autoreset_mode=mode),
        frames_per_batch=4,
        total_frames=60,
        frame_skip="tick",
        surplus=surplus,
    )
    begun = int((joined(batches)["tick"] == 3).sum())
    assert collector.ledger.ticks == 240
    assert collector.ledger.reset_ticks == 3 * begun


def test_ticks_of_an_environment_that_has_the_column_already() -> None:
    _, collector = collect(
        with_infos(DISABLED, ["tick"], frame_skip=4),
        frames_per_batch=4,
        total_frames=60,
        frame_skip="tick",
    )
    assert collector.ledger.ticks == 240
