"""One or many workers give the same data as one process, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector, SyncCollector

from collect_kit import ByObservation, assert_same, joined
from oracles import ACTIONS, KINDS, check_rows, decode, make_oracle_vec
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    SAME,
    SOURCES,
    RecordingPolicy,
    assert_alike,
    collect_all,
    factories,
    lanes_of_workers,
    start,
    sync_collector,
    ticking,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 120, "seed": 3}
WITHOUT_LANES_ALONE = [name for name in SOURCES if name != "single"]


@pytest.mark.parametrize(
    ("source", "workers"), [*zip(WITHOUT_LANES_ALONE, (2, 3, 1, 3, 2, 3, 2), strict=True)]
)
def test_batches_ledger_and_episodes_are_those_of_one_process(source: str, workers: int) -> None:
    one = collect_all(sync_collector(source, RecordingPolicy(), **BUDGET))
    many = collect_all(worker_collector(source, workers, RecordingPolicy(), **BUDGET))
    assert_alike(one, many)
    rows = joined(many.batches)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert [len(batch) for batch in many.batches] == [17] * 7 + [1]
    assert many.collector.ledger.stored == 120
    assert len(many.episodes) == many.collector.ledger.episodes_complete > 10


OPTIONS: dict[str, dict[str, Any]] = {
    "discard": {"surplus": "discard"},
    "never_step": {"surplus": "never_step"},
    "random frames": {"init_random_frames": 33},
    "only random frames": {"init_random_frames": 500},
    "random frames, never_step": {"init_random_frames": 33, "surplus": "never_step"},
    "episodes": {"total_frames": None, "total_episodes": 23},
    "episodes, random frames": {
        "total_frames": None,
        "total_episodes": 23,
        "init_random_frames": 33,
    },
    "resets": {"reset_at_each_iter": True},
    "resets, discard": {"reset_at_each_iter": True, "surplus": "discard"},
    "single rows": {"frames_per_batch": 1, "total_frames": 30},
    "a slot a batch": {"frames_per_batch": 5, "total_frames": 40},
    "more than there are": {"frames_per_batch": 1000},
    "lanes": {"layout": "lanes"},
    "trajectories": {"split_trajs": True},
}
PART_ONLY = ("never_step", "random frames, never_step")  # refused by other environments
BY_TURNS = [(NEXT, 2), (SAME, 3), (DISABLED, 2), ("avoided", 3), ("native", 2)]


def _by_turns() -> list[tuple[str, str, int]]:
    """Return each option with a source.

    test_multiprocess_properties combines all options with all sources.
    """
    found = [(name, DISABLED, 2 + turn) for turn, name in enumerate(PART_ONLY)]
    for turn, name in enumerate(each for each in OPTIONS if each not in PART_ONLY):
        found.append((name, *BY_TURNS[turn % 5]))
    return found


@pytest.mark.parametrize(("options", "source", "workers"), _by_turns())
def test_every_option_means_what_it_means_in_one_process(
    options: str, source: str, workers: int
) -> None:
    kwargs = {**BUDGET, **OPTIONS[options]}
    one = collect_all(sync_collector(source, RecordingPolicy(), **kwargs))
    many = collect_all(worker_collector(source, workers, RecordingPolicy(), **kwargs))
    assert_alike(one, many)
    random = sum(int((batch["collector", "policy_version"] == -1).sum()) for batch in many.batches)
    ledger = many.collector.ledger
    if "random" in options:
        assert random == ledger.random == min(kwargs["init_random_frames"], ledger.stored) > 0
    if "episodes" in options:
        assert ledger.episodes_complete == 23
        assert check_rows(joined(many.batches), LENGTHS, ends="mixed").ended.sum() == 23


@pytest.mark.parametrize(
    ("source", "workers", "options"),
    [
        (NEXT, 3, "carry"),
        (NEXT, 2, "episodes"),
        (SAME, 2, "discard"),
        (DISABLED, 3, "never_step"),
        ("native", 2, "carry"),
    ],
)
def test_random_actions_are_those_of_one_process(source: str, workers: int, options: str) -> None:
    kwargs = {**BUDGET, **OPTIONS.get(options, {})}
    one = collect_all(sync_collector(source, None, **kwargs))
    many = collect_all(worker_collector(source, workers, None, **kwargs))
    assert_alike(one, many)
    actions = joined(many.batches)["action"]
    assert 0.3 < actions.double().mean() < 0.7


@pytest.mark.parametrize(("source", "workers"), [(NEXT, 2), (SAME, 3), (DISABLED, 2), ("torch", 3)])
def test_a_time_limit_truncates_the_same_trajectories(source: str, workers: int) -> None:
    kwargs = {**BUDGET, "max_frames_per_traj": 4}
    one = collect_all(sync_collector(source, RecordingPolicy(), **kwargs))
    many = collect_all(worker_collector(source, workers, RecordingPolicy(), **kwargs))
    assert_alike(one, many)
    check_rows(joined(many.batches), LENGTHS, ends="mixed", time_limit=4, from_start=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_observation(kind: Any) -> None:
    """The noise of "seeded" is included, because every lane was reset with its own seed."""
    source = (NEXT, SAME, DISABLED, "avoided")[KINDS.index(kind) % 4]
    # "discrete" can encode only few episodes
    lengths = [[3, 1, 4], [1, 1, 2], [5], [2, 7], [4, 9, 4]]
    kwargs = {**BUDGET, "oracle": {"kind": kind, "lengths": lengths}}
    one = collect_all(sync_collector(source, ByObservation(kind), **kwargs))
    many = collect_all(worker_collector(source, 2, ByObservation(kind), **kwargs))
    assert_alike(one, many)
    check_rows(joined(many.batches), lengths, kind=kind, ends="mixed", from_start=True)


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize("action", ACTIONS[1:])
def test_every_kind_of_action(action: Any, policy: bool) -> None:
    chosen = ByObservation("float", action) if policy else None
    kwargs = {**BUDGET, "oracle": {"action": action}, "init_random_frames": 21}
    one = collect_all(sync_collector(SAME, chosen, **kwargs))
    many = collect_all(worker_collector(SAME, 2, chosen, **kwargs))
    assert_alike(one, many)
    check_rows(joined(many.batches), LENGTHS, ends="mixed", action=action, from_start=True)


@pytest.mark.parametrize("kind", ["dict", "tuple", "uint8"])
def test_images_and_dicts_of_a_torchrl_environment(kind: Any) -> None:
    kwargs = {**BUDGET, "oracle": {"kind": kind}}
    one = collect_all(sync_collector("torch", ByObservation(kind), **kwargs))
    many = collect_all(worker_collector("torch", 3, ByObservation(kind), **kwargs))
    assert_alike(one, many)
    check_rows(joined(many.batches), LENGTHS, kind=kind, ends="mixed", from_start=True)


@pytest.mark.parametrize("surplus", ["carry", "never_step"])
def test_environments_of_one_lane_each_are_as_one_of_several(surplus: Any) -> None:
    kwargs = {**BUDGET, "surplus": surplus, "lanes": 3}
    one = collect_all(sync_collector("serial", ByObservation(), **kwargs))
    many = collect_all(worker_collector("single", 3, ByObservation(), **kwargs))
    assert_alike(one, many)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_infos_and_their_ticks(mode: AutoresetMode) -> None:
    kwargs = {**BUDGET, "info_keys": ["lives"], "frame_skip": "tick"}

    one = collect_all(SyncCollector(partial(ticking, 0, 5, mode), ByObservation(), **kwargs))
    many = collect_all(
        start(
            [partial(ticking, first, own, mode) for first, own in lanes_of_workers(5, 3)],
            ByObservation(),
            **kwargs,
        )
    )
    assert_alike(one, many)
    rows, ledger = joined(many.batches), many.collector.ledger
    assert torch.equal(rows["tick"], 3 + 4 * rows["collector", "step"])
    assert torch.equal(rows["next", "lives"], 3 - (rows["collector", "step"] + 1) % 3)
    assert ledger.ticks == 4 * 120
    assert ledger.reset_ticks == 3 * int((rows["collector", "step"] == 0).sum())


def by_angle(td: TensorDictBase) -> TensorDictBase:
    """Choose an action for CartPole that depends on only one lane."""
    return td.set("action", (td["observation"][..., 2] > 0).long())


@pytest.mark.parametrize("policy", [by_angle, None])
def test_an_id_has_its_lanes_split_five_into_three_and_two(policy: Any) -> None:
    kwargs = {"frames_per_batch": 23, "total_frames": 200, "seed": 5, "num_envs": 5}
    one = collect_all(SyncCollector("CartPole-v1", policy, **kwargs))
    collector = start("CartPole-v1", policy, num_workers=2, **kwargs)
    assert (collector.lanes, collector.num_workers) == (5, 2)
    assert [list(member.lanes) for member in collector._worker_pool.members] == [[0, 1, 2], [3, 4]]
    assert_alike(one, collect_all(collector))


@pytest.mark.slow
def test_with_spawned_workers_and_one_factory_for_all() -> None:
    """The start method is the default. Every worker makes lanes 0 and 1, four lanes in the run."""
    make = partial(make_oracle_vec, 2, LENGTHS, mode=AutoresetMode.DISABLED, kind="seeded")
    kwargs: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 60, "seed": 3}
    run = collect_all(MultiprocessCollector(make, num_workers=2, threads_per_worker=1, **kwargs))
    rows = joined(run.batches)
    lane = rows["collector", "lane"]
    assert lane.bincount().tolist() == [15] * 4
    for worker in range(2):
        own = (lane // 2 == worker).nonzero().flatten()
        part = rows[own].clone()
        part["collector", "lane"] = part["collector", "lane"] - 2 * worker
        check_rows(part, LENGTHS, kind="seeded", from_start=True)
    noise = rows["observation"][:, 3]
    assert len(noise.unique()) == len(noise)


@pytest.mark.parametrize("source", [DISABLED, NEXT])
def test_a_seed_set_in_between_begins_anew_as_in_one_process(source: str) -> None:
    runs = []
    for collector in (
        sync_collector(source, ByObservation(), **BUDGET),
        worker_collector(source, 2, ByObservation(), **BUDGET),
    ):
        batches, seeds, counts = [], [], []
        with collector:
            for batch in collector:
                batches.append(batch)
                if len(batches) in (2, 3):
                    seeds.append(collector.set_seed(len(batches)))
                counts.append(collector.ledger.counts())
        runs.append((batches, seeds, counts, list(collector.episodes)))
    one, many = runs
    for mine, theirs in zip(one[0], many[0], strict=True):
        assert_same(mine, theirs)
    assert one[1:] == many[1:]
    rows = joined(many[0])
    check_rows(rows, LENGTHS, ends="mixed", contiguous=False)
    lane, episode, _ = decode("float", {"observation": rows[34:51]["observation"].numpy()})
    assert len(set(zip(lane.tolist(), episode.tolist(), strict=True))) > 4


def test_the_seed_set_again_gives_the_same_noise_and_actions_again() -> None:
    collector = worker_collector(
        DISABLED,
        2,
        frames_per_batch=15,
        total_frames=-1,
        seed=1,
        oracle={"kind": "seeded", "lengths": [4]},
    )
    with collector:
        batches = iter(collector)
        one = next(batches)
        assert collector.set_seed(1, static_seed=True) == 1
        other = next(batches)
        collector.stop()
    assert torch.equal(one["observation"][:, 3], other["observation"][:, 3])
    assert torch.equal(one["action"], other["action"])
    assert one["collector", "traj_ids"].max() < other["collector", "traj_ids"].min()


def test_without_a_seed_one_is_drawn_and_told() -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 40}
    kwargs["oracle"] = {"kind": "seeded"}
    first = collect_all(worker_collector(SAME, 2, **kwargs))
    seed = first.collector.ledger.seed
    again = collect_all(sync_collector(SAME, seed=seed, **kwargs))
    noise = [joined(run.batches)["observation"] for run in (first, again)]
    assert torch.equal(*noise)
    other = collect_all(worker_collector(SAME, 2, **kwargs))
    assert other.collector.ledger.seed != seed


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_that_was_left_can_be_continued(workers: int) -> None:
    one = collect_all(sync_collector(NEXT, RecordingPolicy(), **BUDGET))
    batches = []
    with worker_collector(NEXT, workers, RecordingPolicy(), **BUDGET) as collector:
        while len(batches) < 8:
            for batch in collector:
                batches.append(batch)
                if len(batches) % 3 == 0:
                    break
        assert list(collector) == []
    for mine, theirs in zip(one.batches, batches, strict=True):
        assert_same(mine, theirs)
    assert collector.ledger.counts() == one.counts[-1]


@pytest.mark.parametrize("source", [DISABLED, NEXT])
def test_leaving_early_gives_up_what_is_carried(source: str) -> None:
    one = collect_all(sync_collector(source, RecordingPolicy(), **BUDGET), batches=3)
    many = collect_all(worker_collector(source, 2, RecordingPolicy(), **BUDGET), batches=3)
    assert_alike(one, many)
    assert many.collector.ledger.carried == 0
    assert list(many.collector) == []


def test_a_length_and_the_pids_of_its_workers() -> None:
    with start(factories(SAME, 3), **BUDGET) as collector:
        assert len(collector) == 8
        assert len(set(collector.worker_pids)) == 3
        assert collector.policy_version == -1
        assert collector.metrics()["frames"] == 0
