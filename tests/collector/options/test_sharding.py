"""Shards: invalid options, resumption, lanes numbered over the whole run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from random_shards import Wanderer, in_order, joined, next_step_vector, rows_of
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from tallyroll.collector import (
    ArgumentError,
    MultiprocessCollector,
    Shard,
    StateError,
    SyncCollector,
    replay,
)
from tallyroll.collector.batches.stored.resume import last_run_of
from tallyroll.collector.cli.plan import Plan
from tallyroll.storage import CorruptStorage, MemmapStorage, open_storage, verify
from tallyroll.storage.rows.keys import LANE, STEP, TRAJ_IDS

from toy_systems import Arrivals

RUN: dict[str, Any] = {"num_envs": 8, "frames_per_batch": 20, "total_frames": 301, "seed": 0}
PARTS = [76, 114, 111]
"""Sizes of the three shards: lanes 0 to 4 have 38 transitions each, 5 to 7 have 37."""


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (
            {"shard": "3/3"},
            "expected an index from 0 to 2 of 3 shards, got 3. Indices count from 0",
        ),
        ({"shard": "0"}, r'expected "I/N", shard I of N, counted from 0, such as "0/8", got \'0\''),
        ({"shard": "1/0"}, "shard: of: expected an integer above 0, got 0"),
        ({"shard": " 1/2"}, 'expected "I/N"'),
        ({"shard": "٣/4"}, 'expected "I/N"'),
        (
            {"shard": (0, 3)},
            r'expected "I/N", such as "0/8", or Shard\(index=…, of=…\), got \(0, 3\)',
        ),
        ({"num_envs": None}, "expected num_envs, the lanes of all shards together, got None"),
        ({"shard": "0/9"}, "expected at most 8 shards, one for each lane, got 9"),
        ({"seed": None}, "expected a seed, the same in all shards, got None"),
        ({"total_frames": -1}, "the transitions of all shards together, got -1"),
        ({"total_frames": 5}, "at least 6, a transition for each of 3 shards of 8 lanes, got 5"),
        (
            {"total_frames": None, "total_episodes": 9},
            "expected total_frames, got total_episodes. The lanes of all shards determine which",
        ),
        ({"budget_unit": "agent_transitions"}, 'got "agent_transitions". The number of agent tra'),
        ({"create_env_fn": lambda: next_step_vector(8)}, "got a factory of SyncVectorEnv. Lanes"),
        (
            {"create_env_fn": lambda num_envs: next_step_vector(8)},
            "expected 3 lanes from a factory",
        ),
    ],
)
def test_what_cannot_be_a_shard_is_refused(
    more: dict[str, Any], match: str, tmp_path: Path
) -> None:
    given = {"create_env_fn": Wanderer, "shard": "1/3", **RUN, **more}
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(**given, storage=tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_an_instance_cannot_be_cut() -> None:
    env = next_step_vector(8)
    with pytest.raises(ArgumentError, match=r"got an instance, .*. Lanes that are made together"):
        SyncCollector(env, shard="0/2", **RUN)
    env.close()


def test_workers_are_no_more_than_the_lanes_of_the_shard() -> None:
    with pytest.raises(ArgumentError, match="at least one lane for each of 3 workers, got 2"):
        MultiprocessCollector(Wanderer, shard="0/3", num_workers=3, transport="thread", **RUN)
    with pytest.raises(ArgumentError, match="num_envs: expected one factory"):
        MultiprocessCollector([Wanderer] * 2, shard="0/3", transport="thread", **RUN)


def test_index_and_of_are_checked() -> None:
    assert str(Shard.parsed("7/8")) == "7/8" == str(Shard(index=7, of=8))
    for index, of in ((-1, 2), (0, 0), (2, 2), (0.5, 2), (True, 2)):
        with pytest.raises(ArgumentError, match="shard"):
            Shard(index=index, of=of)  # type: ignore[arg-type]


# --- shards are resumed separately ----------------------------------------------------------------


def leg(path: Path, shard: str | None, rows: int | None, **more: Any) -> None:
    """Collect ``rows`` rows of a shard, or all that are left."""
    with SyncCollector(
        Wanderer, storage=path, resume="auto", shard=shard, **{**RUN, **more}
    ) as collector:
        if rows is not None:
            collector.collect(rows)
        else:
            for _ in collector:
                collector.ledger.check()


def test_resumed_shards_are_exactly_as_many_and_no_id_is_there_twice(tmp_path: Path) -> None:
    for index, rows in enumerate(([31, 5, 7], [1, 100], [])):
        for some in (*rows, None):
            leg(tmp_path / str(index), f"{index}/3", some)
        assert not verify(tmp_path / str(index)).findings
    parts = [rows_of(tmp_path / str(index)) for index in range(3)]
    assert [len(part[LANE]) for part in parts] == PARTS
    all_rows = joined(parts)
    assert (all_rows[TRAJ_IDS] % 8 == all_rows[LANE]).all()
    assert len({*zip(*(all_rows[key].tolist() for key in (TRAJ_IDS, STEP)), strict=True)}) == 301
    with open_storage(tmp_path / "0") as storage:
        seeds = [run["lane_seeds"] for run in storage.manifest["runs"]]
        incarnations = [run["incarnation"] for run in storage.manifest["runs"]]
    assert incarnations == [0, 1, 2, 3]
    assert len({seed for each in seeds for seed in each}) == 32, "none is used twice"


def test_a_larger_budget_goes_on_to_its_part(tmp_path: Path) -> None:
    leg(tmp_path / "a", "1/3", None)
    leg(tmp_path / "a", "1/3", None, total_frames=400)
    assert len(rows_of(tmp_path / "a")[LANE]) == 150


def test_another_run_in_the_storage_begins_at_a_multiple_of_the_lanes(tmp_path: Path) -> None:
    leg(tmp_path / "a", "1/3", None)
    before = len(rows_of(tmp_path / "a")[LANE])
    with (
        MemmapStorage(tmp_path / "a", mode="append") as storage,
        SyncCollector(Wanderer, storage=storage, shard="1/3", **{**RUN, "seed": 1}) as collector,
    ):
        for _ in collector:
            pass
    rows = rows_of(tmp_path / "a")
    assert (rows[TRAJ_IDS] % 8 == rows[LANE]).all()
    assert rows[TRAJ_IDS][before:].min() > rows[TRAJ_IDS][:before].max()
    assert not verify(tmp_path / "a").findings


@pytest.mark.parametrize(("was", "now"), [("1/3", "2/3"), ("1/3", None), (None, "1/3")])
def test_a_storage_of_another_part_is_refused(
    was: str | None, now: str | None, tmp_path: Path
) -> None:
    leg(tmp_path / "a", was, 9)
    said = [f"shard {each}" if each else "a whole run" for each in (was, now)]
    with pytest.raises(StateError, match=rf"to be continued is {said[0]}, got {said[1]}\. "):
        leg(tmp_path / "a", now, 9)
    with (
        SyncCollector(Wanderer, shard=was, **RUN) as one,
        SyncCollector(Wanderer, shard=now, **RUN) as other,
        pytest.raises(StateError, match="Load the state of the same shard"),
    ):
        other.load_state_dict(one.state_dict())


def test_a_loaded_state_goes_on_with_ids_of_the_shard(tmp_path: Path) -> None:
    with SyncCollector(Wanderer, shard="1/3", storage=tmp_path / "a", **RUN) as one:
        one.collect(50)
        state = one.state_dict()
    with SyncCollector(Wanderer, shard="1/3", storage=tmp_path / "b", **RUN) as other:
        other.load_state_dict(state)
        for _ in other:
            pass
    parts = [rows_of(tmp_path / name) for name in "ab"]
    assert [len(part[LANE]) for part in parts] == [50, PARTS[1] - 50]
    rows = joined(parts)
    assert (rows[TRAJ_IDS] % 8 == rows[LANE]).all()
    assert not {*parts[0][TRAJ_IDS].tolist()} & {*parts[1][TRAJ_IDS].tolist()}


# --- lanes are those of the whole run -------------------------------------------------------------


def test_lanes_of_calls_and_events_are_those_of_the_run(tmp_path: Path) -> None:
    kinds: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (SyncCollector, {}),
        (MultiprocessCollector, {"num_workers": 2, "transport": "thread"}),
    ]
    for make, more in kinds:
        path = tmp_path / make.__name__
        with make("CartPole-v1", shard="1/3", storage=path, **RUN, **more) as collector:
            collector.collect(30)
            collector.env_set("gravity", [9.1, 9.2], lanes=[4, 2])
            assert collector.env_get("gravity") == [9.2, 9.8, 9.1]
            assert collector.env_get("gravity", lanes=4) == [9.1]
            collector.env_set("gravity", 9.8)
            with pytest.raises(ArgumentError, match="distinct lane numbers from 2 to 4, or None"):
                collector.env_get("gravity", lanes=[0])
            assert [each["lanes"] for each in collector.events] == [[4, 2], None]
            for _ in collector:
                pass
        assert not verify(path).findings


@pytest.mark.parametrize("layout", ["lanes", "torchrl"])
def test_batches_have_the_lanes_of_the_shard(layout: Any) -> None:
    kinds: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (SyncCollector, {}),
        (MultiprocessCollector, {"num_workers": 2, "transport": "thread", "mode": "async"}),
    ]
    run = {**RUN, "frames_per_batch": 24, "total_frames": 8 * 32, "layout": layout}
    for make, more in kinds:
        with make("CartPole-v1", shard="1/3", **run, **more) as collector:
            batches = list(collector)
            found = {int(lane) for each in batches for lane in each[LANE].unique()}
            assert found - {0} == {2, 3, 4}
            if make is SyncCollector:
                assert {tuple(each.shape) for each in batches} == {(3, 8)}
                assert batches[0][LANE][:, 0].tolist() == [2, 3, 4]


def test_errors_name_the_lane_of_the_run() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        nonlocal calls
        calls += 1
        action = torch.zeros(3, 2)
        action[1] = torch.nan if calls > 3 else 0.0
        return td.set("action", action)

    calls = 0

    with (
        SyncCollector(lambda: Wanderer("box"), policy, shard="1/3", **RUN) as collector,
        pytest.raises(Exception, match="lane 3"),
    ):
        next(iter(collector))


@pytest.mark.parametrize("shard", [None, "1/3"])
def test_final_observations_of_a_shard_are_found_right(shard: str | None) -> None:
    with SyncCollector(Wanderer, shard=shard, **{**RUN, "total_frames": 3000}) as collector:
        assert collector._loop._finals.looks
        for _ in collector:
            pass
        assert not collector._loop._finals.looks, "it waits for lanes that are not here"


def test_policies_that_draw_get_other_numbers_in_each_shard() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.rand(td.batch_size[0], 2))

    drawn = []
    for shard in ("0/4", "1/4", None):
        with SyncCollector(lambda: Wanderer("box"), policy, shard=shard, **RUN) as collector:
            drawn.append(next(iter(collector))["action"])
    assert not torch.isin(drawn[0], drawn[1]).any()
    assert torch.isin(drawn[2], drawn[0]).any(), "the first one draws what one run does"


def test_lanes_that_come_in_any_order_are_exactly_as_many(tmp_path: Path) -> None:
    def make(num_envs: int, seeds: Any = None) -> Arrivals:
        return Arrivals(num_envs, seeds)

    for shard in ("0/3", "1/3", "2/3"):
        with SyncCollector(make, storage=tmp_path / shard[0], shard=shard, **RUN) as collector:
            for _ in collector:
                collector.ledger.check()
    parts = [rows_of(tmp_path / name) for name in "012"]
    assert [len(part[LANE]) for part in parts] == PARTS
    rows = joined(parts)
    assert (rows[TRAJ_IDS] % 8 == rows[LANE]).all()


class Failing(Wanderer):
    """Environment that raises once, in a step after the first batch."""

    steps = count()  # threads share it

    def reset(self, **given: Any) -> Any:
        super().reset(**given)
        self.left = 50  # puts the fault within an episode
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        if next(self.steps) == 33:
            raise RuntimeError("a fault")
        return super().step(action)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_is_replaced_has_lanes_of_the_shard(mode: Any, tmp_path: Path) -> None:
    Failing.steps = count()

    def make() -> gym.Env[Any, Any]:
        from test_sharding import Failing  # pickled by name, so that all processes count together

        return Failing()

    with (
        MultiprocessCollector(
            make,
            shard="1/3",
            num_workers=2,
            mode=mode,
            transport="thread",
            on_worker_death="respawn",
            storage=tmp_path / "a",
            **RUN,
        ) as collector,
    ):
        for _ in collector:
            collector.ledger.check()
        assert collector.ledger.respawned == 1
    rows = rows_of(tmp_path / "a")
    assert len(rows[LANE]) == PARTS[1]
    assert (rows[TRAJ_IDS] % 8 == rows[LANE]).all()
    assert {*rows[LANE].tolist()} <= {2, 3, 4}
    ordered = in_order(rows)
    goes_on = ordered[TRAJ_IDS][1:] == ordered[TRAJ_IDS][:-1]
    before, after = ordered["next", "place"][:-1][goes_on], ordered["place",][1:][goes_on]
    assert (before == after).all(), "what another worker goes on with is another trajectory"
    assert not verify(tmp_path / "a").findings


def test_a_shard_is_replayed(tmp_path: Path) -> None:
    with SyncCollector("CartPole-v1", shard="1/3", storage=tmp_path / "a", **RUN) as collector:
        for _ in collector:
            pass
    report = replay(tmp_path / "a")
    assert report.equal > 0
    assert not report.differing
    assert not report.not_replayed


def test_a_factory_with_num_envs_makes_so_many_lanes() -> None:
    made = []

    def make(num_envs: int = 2) -> SyncVectorEnv:
        made.append(num_envs)
        return next_step_vector(num_envs)

    with SyncCollector(make, num_envs=5, frames_per_batch=10, total_frames=10) as collector:
        assert collector.lanes == 5
    with SyncCollector(make, frames_per_batch=10, total_frames=10) as collector:
        assert collector.lanes == 2
    assert made == [5, 2]
    assert collector.shard is None


@pytest.mark.parametrize("said", [7, {}, {"index": 1}, {"index": -1, "of": 2}, {"index": "1\x1b"}])
def test_a_damaged_entry_is_no_shard(said: Any) -> None:
    entry = {"seed": 0, "first_row_of_run": 0, "incarnation": 0, "shard": said}
    with pytest.raises(StateError, match="shard is"):
        last_run_of([entry], Path("data"), 0)
    if isinstance(said, dict) and said:
        with pytest.raises(CorruptStorage, match="last run is damaged: shard is"):
            Plan.of_run(entry)


def test_what_shards_have_in_common_has_a_name_of_its_own() -> None:
    def name(**more: Any) -> str:
        with SyncCollector(Wanderer, **{**RUN, "shard": "1/3", **more}) as collector:
            entry: dict[str, Any] = collector._run.provenance
            return str(entry["shard"]["run"])

    policy = {"policy": lambda place: place[..., 0] > 0}
    same = [{}, {"shard": "0/3"}, {"frames_per_batch": 7}]
    assert len({name(**each) for each in same}) == 1
    others = [
        *({"seed": 1}, {"shard": "1/4"}, {"num_envs": 9}, {"total_frames": 302}, policy),
        *({**policy, "init_random_frames": 9}, {"max_frames_per_traj": 3}, {"reset_seeds": True}),
    ]
    assert len({name(**each) for each in (same[0], *others)}) == len(others) + 1


def places(weight: float) -> TensorDictModule:
    """Return a policy of one weight, which chooses 1 if the weighted first number is above 0."""

    class Place(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(weight))

        def forward(self, place: torch.Tensor) -> torch.Tensor:
            return (self.weight * place[..., 0] > 0).long()

    return TensorDictModule(Place(), ["place"], ["action"])


def shard_of(path: Path, index: int, policy: Any, rows: int | None = None) -> None:
    with SyncCollector(
        Wanderer, policy=policy, storage=path, resume="auto", shard=f"{index}/3", **RUN
    ) as collector:
        if rows is not None:
            collector.collect(rows)
            collector.update_policy_weights_(places(7.0).state_dict())
        else:
            for _ in collector:
                pass


def test_shards_of_other_weights_are_of_another_run(tmp_path: Path) -> None:
    """The weights at the start of a shard count, even if it is resumed with others."""
    paths = [tmp_path / str(index) for index in range(3)]
    shard_of(paths[0], 0, places(1.0))
    shard_of(paths[1], 1, places(1.0), rows=50)
    shard_of(paths[1], 1, places(7.0))
    shard_of(paths[2], 2, places(1.0))
    with open_storage(paths) as union:
        assert len(union.runs) == 4
        assert union.reader.shards.problems == []  # type: ignore[attr-defined]
        assert len(union) == 301
    other = tmp_path / "other"
    shard_of(other, 2, places(-1.0))
    with open_storage([*paths[:2], other]) as union:
        problems = union.reader.shards.problems  # type: ignore[attr-defined]
    assert [each.split(": ")[1] for each in problems] == [
        "shards 2 of 3 are missing",
        "shards 0, 1 of 3 are missing",
    ]
    assert not verify([*paths[:2], other]).sound
    assert verify(paths).sound


def test_shards_of_other_code_are_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def act(place):\n    return place[..., 0] {} 0\n"
    names = []
    for name, sign in (("one", ">"), ("same", ">"), ("other", "<")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard_policy.py").write_text(code.format(sign))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / name))
            patch.delitem(sys.modules, "shard_policy", raising=False)
            policy = importlib.import_module("shard_policy").act
            shard_of(tmp_path / f"{name}-0", 0, policy)
            sys.modules.pop("shard_policy")
        with open_storage(tmp_path / f"{name}-0") as storage:
            names.append(storage.runs[0]["shard"]["run"])
    assert names[0] == names[1] != names[2]
