"""Estimators of a group stop where a trajectory's rows end; storages hold the original flags."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    Categorical,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import EnvBase, SerialEnv
from torchrl.objectives.value import GAE

from tallyroll.collector import SyncCollector, split_trajectories
from tallyroll.collector.batches.layouts.cuts import (
    own_flags,
    with_beginnings,
    with_cuts,
    without_cuts,
)
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import (
    MemmapStorage,
    TrajectorySliceSampler,
    fast_paths,
    open_storage,
    verify,
)

from agents_kit import AGENTS, DEEP, GROUP, RED, AgentsEnv, check_agents
from collect_kit import LENGTHS, assert_same, collect
from oracles import flat_rows
from worker_kit import collect_all, in_threads, start

GAMMA, LAMBDA = 0.9, 0.8
every_layout = pytest.mark.parametrize("layout", ["rows", "lanes", "trajectories"])


def serial() -> EnvBase:
    makes = [partial(AgentsEnv, None, LENGTHS, first_lane=lane) for lane in range(3)]
    return SerialEnv(3, makes)


ENVS: dict[str, Any] = {
    "lanes": partial(AgentsEnv, 3, LENGTHS),
    "one-lane": partial(AgentsEnv, None, LENGTHS),
    "serial": serial,
}


def gae(group: tuple[str, ...], gamma: float = GAMMA, lmbda: float = LAMBDA) -> GAE:
    made = GAE(gamma=gamma, lmbda=lmbda, value_network=None)
    made.set_keys(
        advantage=(*group, "advantage"),
        value_target=(*group, "value_target"),
        value=(*group, "value"),
        **{name: (*group, name) for name in ("reward", "done", "terminated")},
    )
    return made


def valued(batch: TensorDictBase, group: tuple[str, ...]) -> TensorDictBase:
    """Add a value of each observation to the batch."""
    for key in (group, ("next", *group)):
        batch[(*key, "value")] = value_of(batch[(*key, "observation")])
    return batch


def value_of(observation: torch.Tensor) -> torch.Tensor:
    return (observation * torch.tensor([0.5, 1 / 3, 1.0, 0.25])).sum(-1, keepdim=True)


def plain_advantages(stored: TensorDictBase, group: tuple[str, ...]) -> dict[Any, float]:
    """Compute each agent's advantages lane by lane from the environment's own flags."""
    reward, observation = stored[("next", *group, "reward")], stored[(*group, "observation")]
    done, terminated = (stored[("next", *group, name)] for name in ("done", "terminated"))
    value, following = (
        value_of(stored[(*key, "observation")]) for key in (group, ("next", *group))
    )
    ids = stored["collector", "traj_ids"].tolist()
    found: dict[Any, float] = {}
    for agent in range(reward.shape[1]):
        advantage = 0.0
        for row in reversed(range(len(ids))):
            goes_on = row + 1 < len(ids) and ids[row + 1] == ids[row] and not done[row, agent]
            bootstrap = GAMMA * float(following[row, agent]) * (not terminated[row, agent])
            delta = float(reward[row, agent]) + bootstrap - float(value[row, agent])
            advantage = delta + (GAMMA * LAMBDA * advantage if goes_on else 0.0)
            found[tuple(observation[row, agent].tolist())] = advantage
    return found


def by_agent(batch: TensorDictBase, group: tuple[str, ...]) -> dict[Any, float]:
    rows = flat_rows(batch)
    names = rows[(*group, "observation")].reshape(-1, 4).tolist()
    return dict(
        zip(map(tuple, names), rows[(*group, "advantage")].reshape(-1).tolist(), strict=True)
    )


def stored_of(batch: TensorDictBase) -> TensorDictBase:
    """Recompute the environment's own flags from the observations."""
    from agents_kit import model

    rows = batch.clone()
    told = rows[GROUP, "observation"].long().numpy()
    root, own = model(told[:, 0, 0], told[:, 0, 1], told[:, 0, 2], LENGTHS)
    for name in ("done", "terminated", "truncated"):
        rows["next", name] = torch.from_numpy(root[name])
        rows["next", GROUP, name] = torch.from_numpy(own[name])
        rows[("next", *DEEP, name)] = torch.zeros(len(rows), RED, 1, dtype=torch.bool)
    return rows


@every_layout
@pytest.mark.parametrize("env", list(ENVS))
def test_gae_of_a_group_is_that_of_each_agent_alone(env: str, layout: Any) -> None:
    budget: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 40, "seed": 0}
    plain, _ = collect(ENVS[env](), **budget)
    laid_out, _ = collect(ENVS[env](), **budget, layout=layout)
    for rows, batch in zip(plain, laid_out, strict=True):
        check_agents(rows, LENGTHS, stored=False)
        for group in ((GROUP,), DEEP):
            wanted = plain_advantages(stored_of(rows), group)
            got = by_agent(gae(group)(valued(batch, group)), group)
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-3)


class ThreeSteps(EnvBase):
    """Environment of two endless lanes with one agent, whose rewards are 1, 2 and 3."""

    def __init__(self) -> None:
        super().__init__(device="cpu", batch_size=torch.Size([2]))

        def group(**leaves: Any) -> Composite:
            return Composite(a=Composite(leaves, shape=(2, 1)), shape=(2,))

        flag = Categorical(2, shape=(2, 1), dtype=torch.bool)
        self.observation_spec = group(x=Unbounded((2, 1, 1)))
        self.full_action_spec = group(action=Categorical(2, shape=(2, 1)))
        self.full_reward_spec = group(reward=Unbounded((2, 1, 1)))
        own = group(done=flag.unsqueeze(1).clone(), terminated=flag.unsqueeze(1).clone())
        self.full_done_spec = own.update({"done": flag, "terminated": flag.clone()})
        self.count = 0

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        return TensorDict({"a": TensorDict({"x": torch.zeros(2, 1, 1)}, [2, 1])}, [2])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        leaves = {"x": torch.zeros(2, 1, 1), "reward": torch.full((2, 1, 1), float(self.count))}
        return TensorDict({"a": TensorDict(leaves, [2, 1])}, [2])


def test_returns_of_three_steps_do_not_run_into_the_next_lane() -> None:
    (batch,), _ = collect(ThreeSteps(), frames_per_batch=6, total_frames=6)
    for key in ("a", ("next", "a")):
        batch[key]["value"] = torch.zeros(6, 1, 1)
    advantage = gae(("a",), 1.0, 1.0)(batch)["a", "advantage"]
    assert advantage.view(2, 3).tolist() == [[6, 5, 3], [6, 5, 3]]


# --- stored flags -------------------------------------------------------------------------------


def test_storages_and_buffers_hold_the_environments_own_flags(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=10)
    env = ENVS["lanes"]()
    with SyncCollector(
        env, frames_per_batch=10, total_frames=40, storage=tmp_path / "s", replay_buffer=buffer
    ) as collector:
        for batch in collector:
            check_agents(batch, LENGTHS, stored=False)
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        rows = storage.get(slice(None)).clone()
    check_agents(rows, LENGTHS, stored=True)
    check_agents(buffer[:], LENGTHS, stored=True)
    assert verify(tmp_path / "s").sound


@pytest.mark.skipif(compiled() is None, reason="there is no compiler")
@pytest.mark.parametrize("frames", [2, 5, 8])
def test_flags_of_a_group_are_marked_by_the_call_that_stores_rows(
    frames: int, tmp_path: Path
) -> None:
    found = []
    for off in ((), ("fast-collect",)):
        options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": 60, "seed": 1}
        with (
            fast_paths.switched_off(*off),
            SyncCollector(ThreeSteps(), storage=tmp_path / f"{off}", **options) as collector,
        ):
            assert collector.plan.batches.way == ("gathered" if off else "one call")
            found.append([*collector])
        with open_storage(tmp_path / f"{off}") as storage:
            found[-1].append(storage.get(slice(None)).clone())
    for batch, other in zip(*found, strict=True):
        assert_same(batch, other)
    assert all(batch["next", "a", "done"].any() for batch in found[0][:-1])
    assert not found[0][-1]["next", "a", "done"].any()


def shuffled(batch: TensorDictBase) -> TensorDictBase:
    return batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))]


def shuffled_in_place(batch: TensorDictBase) -> TensorDictBase:
    return batch.copy_(shuffled(batch.clone()))


def turned(batch: TensorDictBase) -> TensorDictBase:
    """Reverse the rows of each trajectory; each position keeps its trajectory id."""
    ids, step = (batch["collector", name].numpy() for name in ("traj_ids", "step"))
    _, first, whose = np.unique(ids, return_index=True, return_inverse=True)
    return batch[torch.from_numpy(np.lexsort((-step, first[whose])))]


def fewer_columns(batch: TensorDictBase) -> TensorDictBase:
    return batch.exclude(("next", *DEEP, "done"))


@pytest.mark.parametrize(
    "postproc",
    [lambda batch: batch, torch.clone, shuffled, shuffled_in_place, turned, fewer_columns],
)
def test_rows_from_a_postproc_are_stored_with_them(postproc: Any, tmp_path: Path) -> None:
    budget: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 40, "seed": 0}
    collect(ENVS["lanes"](), **budget, storage=tmp_path / "a")
    yielded, _ = collect(ENVS["lanes"](), **budget, storage=tmp_path / "b", postproc=postproc)
    plain, _ = collect(ENVS["lanes"](), **budget)
    with (
        MemmapStorage(tmp_path / "a", mode="read") as one,
        MemmapStorage(tmp_path / "b", mode="read") as other,
    ):
        rows, again = (each.get(slice(None)).clone() for each in (one, other))
    for batch, wanted in zip(yielded, plain, strict=True):
        assert_same(in_order(batch), in_order(postproc(wanted)))
    without = () if postproc is not fewer_columns else (("next", *DEEP, "done"),)
    assert_same(in_order(rows).exclude(*without), in_order(again))


def in_order(rows: TensorDictBase) -> TensorDictBase:
    keys = rows["collector", "traj_ids"] * 1000 + rows["collector", "step"]
    return rows[keys.argsort()]


def renumbered(batch: TensorDictBase) -> TensorDictBase:
    return batch.set(("collector", "traj_ids"), batch["collector", "traj_ids"] + 1)


def flattened(batch: TensorDictBase) -> TensorDictBase:
    done = batch["next", GROUP, "done"].squeeze(-1)
    batch["next"].set(GROUP, TensorDict({"done": done}, [len(batch)]))
    return batch


@pytest.mark.parametrize(
    ("postproc", "match"),
    [
        (renumbered, "postproc: expected unchanged columns collector/traj_ids and collector/step"),
        (flattened, r"expected next/agents/done of shape \[2, 1\] per row, got \[2\]\. Write"),
    ],
)
def test_a_postproc_that_leaves_no_place_for_them_is_refused(
    postproc: Any, match: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=match):
        collect(
            ENVS["lanes"](),
            frames_per_batch=10,
            total_frames=40,
            storage=tmp_path / "s",
            postproc=postproc,
        )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_through_workers(mode: str, tmp_path: Path) -> None:
    makes = [partial(AgentsEnv, 2, LENGTHS), partial(AgentsEnv, 1, LENGTHS, first_lane=2)]
    with in_threads():
        run = collect_all(
            start(
                makes,
                frames_per_batch=10,
                total_frames=40,
                mode=mode,
                storage=tmp_path / "s",
                seed=0,
            )
        )
    for batch in run.batches:
        check_agents(batch, LENGTHS, stored=False)
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        check_agents(storage.get(slice(None)).clone(), LENGTHS, stored=True)


# --- flags in samples ---------------------------------------------------------------------------


def test_slices_and_splits_of_stored_rows_stop_every_estimator(tmp_path: Path) -> None:
    lengths = [[7, 5], [6, 9], [8]]
    collect(
        AgentsEnv(3, lengths), frames_per_batch=10, total_frames=90, storage=tmp_path / "s", seed=0
    )
    with MemmapStorage(tmp_path / "s", mode="append") as storage:
        rows = storage.get(slice(None)).clone()
        check_agents(rows, lengths, stored=True)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=TrajectorySliceSampler(4), batch_size=32
        )
        sampled = [buffer.sample(), storage.trajectories.sample_slices(8, 4).reshape(-1)]
        for batch in sampled:
            at = torch.arange(3, 32, 4)
            own = {
                tuple(each): i for i, each in enumerate(rows[GROUP, "observation"][:, 0].tolist())
            }
            place = [own[tuple(each)] for each in batch[GROUP, "observation"][:, 0].tolist()]
            stored = rows[place]
            for key in ((), (GROUP,), DEEP):
                wanted = stored[("next", *key, "done")].clone()
                wanted[at] = True
                assert torch.equal(batch[("next", *key, "done")], wanted)
                for name in ("terminated", "truncated"):
                    each = ("next", *key, name)
                    assert torch.equal(batch[each], stored[each])
        assert_same(storage.get(slice(None)), rows)
    split = split_trajectories(rows)
    for group in ((GROUP,), DEEP):
        got = by_agent(gae(group)(valued(split.clone(), group)), group)
        ordered = rows[(rows["collector", "traj_ids"] * 100 + rows["collector", "step"]).argsort()]
        assert got == pytest.approx(plain_advantages(ordered, group), rel=1e-4, abs=1e-3)
    parts = split_trajectories(rows, out="list")
    assert all(part["next", GROUP, "done"][-1].all() for part in parts)


def test_an_observation_named_done_that_is_no_flag_stays_as_it_is() -> None:
    rows = TensorDict(
        {
            "next": {
                "done": torch.zeros(3, 1, dtype=torch.bool),
                "info": {"done": torch.zeros(3, 1), "undone": torch.zeros(3, 1, dtype=torch.bool)},
            },
            "collector": {"traj_ids": torch.tensor([0, 0, 1])},
        },
        [3],
    )
    marked = split_trajectories(rows, out="offsets").rows
    assert marked["next", "done"].view(-1).tolist() == [False, True, True]
    assert not marked["next", "info", "done"].any()
    assert not marked["next", "info", "undone"].any()


# --- marks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_marks_are_those_of_a_plain_loop_and_are_taken_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, 6)
    ids = np.repeat(rng.permutation(6), lengths)
    step = np.concatenate([np.arange(n) + int(rng.integers(3)) for n in lengths])
    count = len(ids)
    done = np.append(ids[1:] != ids[:-1], True) & (rng.random(count) < 0.5)
    nested, init = ("next", "a", "done"), ("a", "is_init")
    rows = {
        ("next", "done"): torch.from_numpy(done[:, None]),
        nested: torch.from_numpy(rng.random((count, AGENTS, 1)) < 0.3),
        init: torch.from_numpy(rng.random((count, AGENTS, 1)) < 0.3),
        ("collector", "traj_ids"): torch.from_numpy(ids),
        ("collector", "step"): torch.from_numpy(step),
    }
    before = {key: column.clone() for key, column in rows.items()}
    marked = with_beginnings(with_cuts(rows, [nested]), [init])
    for row in range(count):
        last = row + 1 == count or ids[row + 1] != ids[row]
        assert bool(marked["next", "done"][row]) == (bool(done[row]) or last)
        assert bool(marked["collector", "cut"][row]) == (last and not done[row])
        own = rows[nested][row]
        assert torch.equal(marked[nested][row], torch.ones_like(own) if last else own)
        first, own = row == 0 or ids[row - 1] != ids[row], rows[init][row]
        assert torch.equal(marked[init][row], torch.ones_like(own) if first else own)
    order = torch.from_numpy(rng.permutation(count))
    for put in (torch.arange(count), order):
        given = {key: column[put] for key, column in marked.items()}
        again = without_cuts(given, own_flags(rows, [nested], [init]))
        assert again.keys() == before.keys()
        for key, column in again.items():
            assert torch.equal(column, before[key][put]), key
    assert all(torch.equal(rows[key], before[key]) for key in before)
