"""Rows record the start of a trajectory, from which a manual loop repeats it in every mode."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from reset_kit import LEVELS, Careless, Weather, joined, replay, trajectories

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector, choice, uniform
from tallyroll.storage import fast_paths, open_storage

from collect_kit import assert_same
from worker_kit import QUICK

SAMPLER = {"gravity": uniform(-15, -5), "level": choice(LEVELS)}
RESETS = Resets(sampler=SAMPLER, seeds=True)
RUN: dict[str, Any] = {"frames_per_batch": 37, "total_frames": 150, "seed": 3}


def repeat(rows: Any, resets: Resets = RESETS) -> int:
    """Repeat all of ``rows`` of `Weather`."""
    return replay(rows, Weather, resets.options_of, ("gravity",))


def rows_of(create: Any = Weather, resets: Resets = RESETS, **options: Any) -> Any:
    """Collect rows in this process."""
    with SyncCollector(create, resets=resets, **{**RUN, **options}) as collector:
        return joined(collector)


def rows_of_workers(create: Any = Weather, **options: Any) -> Any:
    """Collect rows in workers."""
    quick = {} if "transport" in options else QUICK
    given = {"num_envs": 5, "num_workers": 3, "resets": RESETS, **RUN, **quick, **options}
    with MultiprocessCollector(create, **given) as collector:
        return joined(collector)


# --- one environment, stepped by hand -------------------------------------------------------------


def vector(mode: AutoresetMode, wrapped: bool = False) -> Any:
    """Make a vector, optionally with a wrapper that reads infos."""
    made = SyncVectorEnv([Weather] * 3, autoreset_mode=mode)
    return RecordEpisodeStatistics(made) if wrapped else made


class Looks(VectorWrapper):
    """Wrapper that reads the lanes themselves around each step."""

    def step(self, actions: Any) -> Any:
        """Read an attribute of each lane and step."""
        assert len(self.env.get_attr("seen")) == 3  # type: ignore[attr-defined]
        return super().step(actions)


NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
WAYS: dict[str, dict[str, Any]] = {
    "lanes": {"num_envs": 3},
    "one lane": {},
    "never_step": {"num_envs": 4, "surplus": "never_step"},
    "resets each batch": {"num_envs": 3, "reset_at_each_iter": True},
    "infos": {"num_envs": 3, "info_keys": ["air"]},
    "episodes": {"num_envs": 3, "total_frames": None, "total_episodes": 20},
    "wrapped": {"create": partial(vector, AutoresetMode.DISABLED, wrapped=True)},
    "avoided": {"create": partial(vector, NEXT_STEP), "reset_slots": "avoid"},
    "next step": {"create": partial(vector, NEXT_STEP)},
    "next step, wrapped": {"create": partial(vector, NEXT_STEP, wrapped=True)},
    "next step, infos": {"create": partial(vector, NEXT_STEP), "info_keys": ["air"]},
    "next step, each batch": {"create": partial(vector, NEXT_STEP), "reset_at_each_iter": True},
    "same step": {"create": partial(vector, SAME_STEP)},
    "same step, wrapped": {"create": partial(vector, SAME_STEP, wrapped=True)},
    "same step, looked at": {"create": lambda: Looks(vector(SAME_STEP))},
    "same step, infos": {"create": partial(vector, SAME_STEP), "info_keys": ["air"]},
    "same step, episodes": {
        "create": partial(vector, SAME_STEP),
        "total_frames": None,
        "total_episodes": 20,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_hand_loop_repeats_the_rows(way: str) -> None:
    """The loop crosses batch boundaries, surplus and resets, on each path of stepping."""
    assert repeat(rows_of(**WAYS[way])) > 15


@pytest.mark.parametrize("way", ["lanes", "next step", "same step"])
def test_a_hand_loop_repeats_the_rows_of_the_slowest_way(way: str) -> None:
    """The slowest path, without any fast path, gives the same rows."""
    fast = rows_of(**WAYS[way])
    with fast_paths.switched_off(*fast_paths.FAST_PATHS):
        assert_same(rows_of(**WAYS[way]), fast)


@pytest.mark.parametrize("way", ["lanes", "next step", "same step"])
def test_a_time_limit_of_ours_ends_what_a_hand_loop_goes_on_with(way: str) -> None:
    """Transforms stand between the driver and the environment."""
    rows = rows_of(**WAYS[way], max_frames_per_traj=4)
    short = [part for part in trajectories(rows) if not part["next", "truncated"].any()]
    assert repeat(torch.cat(short)) > 15
    starts = torch.cat([part[:1] for part in trajectories(rows)])
    starts["next", "truncated"][:] = starts["next", "truncated"] & False
    seeds = starts["collector", "reset_seed"].tolist()
    for row, seed in zip(starts, seeds, strict=True):
        seen, _ = Weather().reset(seed=seed, options=RESETS.options_of(seed))
        assert np.array_equal(seen, row["observation"].numpy())


def test_a_hand_loop_repeats_cartpole_and_its_options(tmp_path: Path) -> None:
    """``collect(n)`` stores few slots at a time, with carried surplus."""
    resets = Resets(sampler={"low": uniform(-0.1, 0.0), "high": 0.1}, seeds=True)
    given = {**RUN, "total_frames": 300, "num_envs": 4, "storage": tmp_path / "s"}
    with SyncCollector("CartPole-v1", resets=resets, **given) as collector:
        for size in (1, 2, 3, 7, 90, *[5] * 39, 2):
            collector.collect(size)
    with open_storage(tmp_path / "s") as storage:
        rows, table = storage[:], storage.trajectories.table
        (run,) = storage.manifest["runs"]
    made = partial(gymnasium.make, "CartPole-v1")
    assert replay(rows, made, resets.options_of, ("low", "high")) > 8
    assert run["call"]["resets"] == {
        "seeds": True,
        "sampler": {"low": "uniform(-0.1, 0.0)", "high": "0.1"},
    }
    assert run["lane_seeds"] == [
        int(part["collector", "reset_seed"][0])
        for part in trajectories(rows)
        if part["collector", "traj_ids"][0] < 4
    ]
    for line in table:
        own = rows[rows["collector", "traj_ids"] == int(line["id"])]["collector"]
        assert (own["reset_seed"] == int(line["reset_seed"])).all()


def test_a_vector_is_handed_back_with_its_own_lanes() -> None:
    """Lanes with seeds replace the vector's own lanes only during a call."""
    env = vector(SAME_STEP, wrapped=True)
    own = [*env.unwrapped.envs]
    rows_of(env, total_frames=40)
    assert env.unwrapped.envs == own
    env.close()


def test_seeds_alone_seed_every_episode_of_an_async_vector() -> None:
    """The vector accepts seeds with a mask of lanes, but not options per lane."""
    vector = partial(
        AsyncVectorEnv,
        [Weather] * 2,
        autoreset_mode=AutoresetMode.DISABLED,
        context="fork",
    )
    resets = Resets(seeds=True)
    rows = rows_of(vector, resets, total_frames=60)
    assert replay(rows, Weather, resets.options_of) > 5
    assert_same(rows, rows_of(num_envs=2, resets=resets, total_frames=60))


# --- workers, replacements and resumed runs -------------------------------------------------------


def test_workers_give_the_rows_of_one_process() -> None:
    """The rows of one worker, three workers and one process are equal bit for bit."""
    alone = rows_of(num_envs=5)
    assert_same(rows_of_workers(num_workers=1, transport="thread"), alone)
    assert_same(rows_of_workers(transport="thread"), alone)


def test_workers_that_do_not_wait_have_trajectories_of_the_same_beginnings() -> None:
    """Each lane's k-th trajectory begins as in one process, independent of arrival."""

    def begun(rows: Any) -> dict[int, int]:
        first = rows[rows["collector", "step"] == 0]["collector"]
        return dict(zip(first["traj_ids"].tolist(), first["reset_seed"].tolist(), strict=True))

    rows = rows_of_workers(mode="async", transport="thread")
    assert repeat(rows) > 15
    there, alone = begun(rows), begun(rows_of(num_envs=5))
    common = there.keys() & alone.keys()
    assert len(common) > 15
    assert all(there[each] == alone[each] for each in common)


def test_a_worker_in_the_place_of_a_dead_one_draws_others(tmp_path: Path) -> None:
    """A manual loop repeats the rows before and after the kill, and no seed repeats."""
    rows = rows_of_workers(
        partial(Careless, str(tmp_path / "mark"), 12),
        num_envs=4,
        num_workers=2,
        on_worker_death="respawn",
    )
    assert (tmp_path / "mark").exists()
    found = [int(part["collector", "reset_seed"][0]) for part in trajectories(rows)]
    assert repeat(rows) == len(set(found)) == len(found)


def test_a_resumed_run_draws_others(tmp_path: Path) -> None:
    """A manual loop repeats the trajectories of both parts. Open trajectories are cut."""
    given = {"num_envs": 3, "storage": tmp_path / "s"}
    rows_of(**given, total_frames=60)
    rows_of(**given, total_frames=120, resume=True)
    with open_storage(tmp_path / "s") as storage:
        rows = storage[:]
    found = [int(part["collector", "reset_seed"][0]) for part in trajectories(rows)]
    assert repeat(rows) == len(set(found)) == len(found)


# --- draws ----------------------------------------------------------------------------------------


def test_draws_are_as_they_were_asked_for() -> None:
    """The test checks the range and mean of uniform draws, shares of choices, and column types."""
    sampler = {
        "gravity": uniform(-15, -5),
        "integer": choice([1, 2, 3]),
        "mixed": choice([1, 2.5]),
        "flag": choice([True, False]),
        "level": choice(LEVELS),
        "same": [1, "a"],
    }
    resets = Resets(sampler=sampler, seeds=True)
    rows = rows_of(resets=resets, num_envs=10, frames_per_batch=3000, total_frames=6000)
    first = rows[rows["collector", "step"] == 0]["collector"]
    context, count = first["context"], len(first)
    kinds = {name: context[name].dtype for name in context.keys()}
    assert kinds == {
        "gravity": torch.float64,
        "integer": torch.int64,
        "mixed": torch.float64,
        "flag": torch.bool,
    }
    gravity = context["gravity"]
    assert gravity.min() >= -15
    assert gravity.max() < -5
    # Five standard errors of a mean of uniform numbers are exceeded with probability 1 in 2
    # million.
    assert abs(gravity.mean() + 10) < 5 * 10 / np.sqrt(12 * count)
    for name, share in (("integer", 1 / 3), ("mixed", 1 / 2), ("flag", 1 / 2)):
        for times in context[name].unique(return_counts=True)[1].tolist():
            assert abs(times - share * count) < 5 * np.sqrt(count * share * (1 - share))
    drawn = [resets.options_of(seed) for seed in first["reset_seed"].tolist()]
    assert {each["level"] for each in drawn} == {*LEVELS}
    assert all(each["same"] == [1, "a"] for each in drawn)
    assert len(first["reset_seed"].unique()) == count
    # Options have their own stream, although the environment's start uses the same seed.
    start = rows[rows["collector", "step"] == 0]["observation"][:, 2]
    assert abs(np.corrcoef(gravity, start)[0, 1]) < 5 / np.sqrt(count)


def test_a_function_draws_options() -> None:
    """The drawn numbers are also stored as columns."""

    def sampler(rng: np.random.Generator) -> dict[str, Any]:
        gravity = np.float32(rng.normal(-10))
        return {"gravity": gravity, "level": str(rng.choice(LEVELS))}

    resets = Resets(sampler=sampler, seeds=True)
    assert repeat(rows_of(num_envs=3, resets=resets), resets) > 15


def test_options_without_seeds_are_drawn_alike_for_any_number_of_workers() -> None:
    """The column of seeds is absent, because the resets have none."""
    resets = Resets(sampler={"gravity": uniform(0, 1)})
    alone = rows_of(num_envs=5, resets=resets)
    assert ("collector", "reset_seed") not in alone.keys(True)
    assert torch.equal(alone["collector", "context", "gravity"], alone["observation"][:, 0])
    assert_same(rows_of_workers(resets=resets, transport="thread"), alone)
