"""TorchRL's multi-process collectors by name: their batches, and their construction."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.collectors
from tensordict import TensorDict
from torchrl import service_backend
from torchrl.collectors import MultiProcessedWeightUpdater, WeightUpdaterBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from torchrl_kit import assert_batches_alike, both

from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.torchrl import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)

from collect_kit import ByObservation
from oracles import OracleTorchEnv
from policies_kit import linear
from worker_kit import in_threads

LENGTHS = [[3, 1, 4], [1, 1, 2], [5]]


@pytest.fixture
def workers_in_threads() -> Iterator[None]:
    with in_threads():
        yield


pytestmark = pytest.mark.usefixtures("workers_in_threads")


def envs(lanes: int | None = None, workers: int = 2) -> list[Any]:
    own = lanes or 1
    return [
        partial(OracleTorchEnv, lanes, lengths=LENGTHS, first_lane=own * number, ends="mixed")
        for number in range(workers)
    ]


BUDGET: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 36}


def put_together(lanes: int | None, workers: int, frames: int, batches: int) -> list[Any]:
    """Stack the batches of ``frames`` rows that TorchRL's collector yields in each worker."""
    given = {"frames_per_batch": frames, "auto_register_policy_transforms": False}
    found = []
    for create in envs(lanes, workers):
        collector = torchrl.collectors.Collector(create(), ByObservation(), **given)
        found.append([each.clone() for each, _ in zip(collector, range(batches), strict=False)])
        collector.shutdown()
    return [torch.stack(each) for each in zip(*found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 3])
def test_batches_of_workers_are_put_together_as_torchrl_does(lanes: int | None) -> None:
    found = []
    if lanes is None:  # TorchRL's processes take seconds to start
        with MultiSyncCollector(envs(), ByObservation(), **BUDGET) as collector:
            found = [put_together(None, 2, 6, 3), list(collector)]
    else:
        for _, each in both(partial(envs, lanes), ByObservation, "MultiSyncCollector", **BUDGET):
            found.append([batch.clone() for batch in each])
            if len(found) == 1:
                for one, other in zip(found[0], put_together(lanes, 2, 6, 3), strict=True):
                    assert_batches_alike(one, other)
    assert len(found[0]) == len(found[1]) == 3
    for theirs, mine in zip(*found, strict=True):
        assert_batches_alike(theirs, mine)
    for cat in ("stack", 0, -1):
        with MultiSyncCollector(
            envs(lanes), ByObservation(), cat_results=cat, **BUDGET
        ) as collector:
            assert collector.cat_results == cat
            for theirs, mine in zip(found[0], collector, strict=True):
                of_each = theirs.unbind(0)
                want = theirs if cat == "stack" else torch.cat(list(of_each), cat)
                assert_batches_alike(want, mine, names=cat == "stack")
                assert mine.names[-1] == "time"
    with (
        MultiSyncCollector(envs(lanes), ByObservation(), cat_results=3, **BUDGET) as collector,
        pytest.raises(StateError, match="cat_results"),
    ):
        next(iter(collector))


@pytest.mark.filterwarnings("ignore:.*divisible by:UserWarning")  # warning of TorchRL
@pytest.mark.parametrize(
    ("lanes", "workers", "frames"), [(None, 3, 10), (3, 2, 10), (3, 2, [5, 5])]
)
def test_what_workers_give_is_rounded_up(lanes: int | None, workers: int, frames: Any) -> None:
    theirs = put_together(lanes, workers, -(-10 // workers), 2)
    given: dict[str, Any] = {"frames_per_batch": frames, "total_frames": 24}
    with pytest.warns(UserWarning, match="batches have 12"):
        collector = MultiSyncCollector(envs(lanes, workers), ByObservation(), **given)
    with collector:
        assert collector.requested_frames_per_batch == 10
        mine = list(collector)
    assert len(mine) == 2
    for one, other in zip(theirs, mine, strict=True):
        assert_batches_alike(one, other)


@pytest.mark.filterwarnings("ignore:.*as in TorchRL:UserWarning")
def test_batches_of_workers_that_wait_for_nobody_are_of_one_each() -> None:
    for lanes, frames in ((None, 12), (3, 12), (3, 10)):
        given = {**BUDGET, "frames_per_batch": frames}
        with MultiAsyncCollector(envs(lanes), ByObservation(), **given) as collector:
            batches = list(collector)
            assert collector.frames_per_batch_worker() == 12
        assert [batch.shape for batch in batches] == [(12,) if lanes is None else (3, 4)] * 3
        assert all(len(batch["collector", "lane"].unique()) == (lanes or 1) for batch in batches)
    with pytest.raises(ArgumentError, match="MultiSyncCollector"):
        MultiAsyncCollector(envs(), ByObservation(), **BUDGET, cat_results=0)


def test_many_collectors_are_made_where_they_are_asked_for() -> None:
    made: list[tuple[dict[str, Any], type]] = [
        ({"num_collectors": 2}, MultiAsyncCollector),
        ({"num_collectors": 2, "sync": True}, MultiSyncCollector),
        ({"num_collectors": 2.0, "sync": False, "backend": "process"}, MultiAsyncCollector),
        ({"backend": "multiprocessing", "sync": True, "num_collectors": 1}, MultiSyncCollector),
        (
            {"backend": "process", "num_collectors": 2, "backend_options": {"num_sub_threads": 1}},
            MultiAsyncCollector,
        ),
    ]
    for given, kind in made:
        create = envs(workers=int(given["num_collectors"]))
        for factory in (create, create[0]):
            with Collector(factory, ByObservation(), **BUDGET, **given) as collector:
                assert type(collector) is kind
                assert collector.num_workers == len(create)
    with service_backend("process"), Collector(envs()[0], None, **BUDGET) as collector:
        assert type(collector) is MultiAsyncCollector
    with service_backend("ray"), pytest.raises(ArgumentError, match="one machine"):
        Collector(envs()[0], None, **BUDGET)
    for sync, kind in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        with MultiCollector(envs(), ByObservation(), sync=sync, **BUDGET) as many:
            assert type(many) is kind
    with pytest.raises(ArgumentError, match="sync"):
        MultiCollector(envs(), **BUDGET)
    with AsyncCollector(envs()[0], None, create_env_kwargs={"lengths": [2]}, **BUDGET) as alone:
        assert alone.num_workers == 1
        assert next(iter(alone))["next", "done"].reshape(-1).tolist()[1]
    with MultiSyncCollector(envs()[0], None, num_workers=2, **BUDGET) as collector:
        assert collector.num_workers == 2


def test_factories_of_workers_get_their_keywords() -> None:
    kwargs = [{"lengths": [2]}, {"lengths": [3]}]
    with MultiSyncCollector(envs(), None, create_env_kwargs=kwargs, **BUDGET) as collector:
        done = next(iter(collector))["next", "done"].squeeze(-1)
        assert done.int().argmax(-1).tolist() == [1, 2]
    with MultiSyncCollector(envs(), None, create_env_kwargs=kwargs[0], **BUDGET) as collector:
        done = next(iter(collector))["next", "done"].squeeze(-1)
        assert done.int().argmax(-1).tolist() == [1, 1]
    with pytest.raises(ArgumentError, match="preemptive_threshold"):
        MultiSyncCollector(envs(), None, preemptive_threshold=1.5, **BUDGET)
    with pytest.raises(ArgumentError, match="2 mappings, one for each worker, got 1"):
        MultiSyncCollector(envs(), None, create_env_kwargs=kwargs[:1], **BUDGET)


def test_frames_of_each_worker() -> None:
    given: dict[str, Any] = {"total_frames": 24, "frames_per_batch": [6, 6]}
    with MultiSyncCollector(envs(), ByObservation(), **given) as collector:
        assert collector.requested_frames_per_batch == 12
        assert collector.frames_per_batch_worker(worker_idx=0) == 6
        assert [batch.shape for batch in collector] == [(2, 6)] * 2
    given["frames_per_batch"] = [6]
    with pytest.raises(ArgumentError, match="expected one number for each of 2 workers, got 1"):
        MultiSyncCollector(envs(), ByObservation(), **given)
    given["frames_per_batch"] = [6, 8]
    with pytest.raises(ArgumentError, match="the same number for each worker"):
        MultiSyncCollector(envs(), ByObservation(), **given)


def test_workers_call_init_fn_before_their_factory(tmp_path: Path) -> None:
    def create() -> Any:
        assert (tmp_path / "begun").exists()
        return OracleTorchEnv(None, (5,))

    init = (tmp_path / "begun").touch
    with MultiSyncCollector([create], ByObservation(), init_fn=init, **BUDGET) as collector:
        assert next(iter(collector)).shape == (1, 12)


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    try:
        given: dict[str, Any] = {"num_threads": 2, "num_sub_threads": 1}
        with MultiSyncCollector(envs(), ByObservation(), **BUDGET, **given) as collector:
            assert torch.get_num_threads() == collector.num_threads == 2
            assert collector.num_sub_threads == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_weights_are_updated_at_each_batch(kind: Any) -> None:
    with kind(envs(), linear(), **BUDGET, update_at_each_batch=True) as collector:
        assert len(list(collector)) == 3
        assert collector.policy_version == 3


def test_weights_reach_the_workers() -> None:
    policy, new = linear(), linear(seed=1)
    scheme = SharedMemWeightSyncScheme(), MultiProcessWeightSyncScheme()
    for given in ({}, *({"weight_sync_schemes": {"policy": each}} for each in scheme)):
        with MultiSyncCollector(envs(), policy, **BUDGET, **given) as collector:
            collector.update_policy_weights_(TensorDict.from_module(new))
            rows = next(iter(collector)).reshape(-1)
            want = new(rows.select("observation"))["logits"]
            torch.testing.assert_close(rows["logits"], want)
            collector.increment_version()
            assert collector.get_policy_version() == 2
            with pytest.raises(AttributeError, match="in the workers"):
                collector.getattr_env("batch_size")


def test_a_policy_factory_acts_and_the_policy_gives_the_weights() -> None:
    weights = linear(seed=1)
    with MultiSyncCollector(envs(), weights, policy_factory=linear, **BUDGET) as collector:
        assert collector.policy is not weights
        collector.update_policy_weights_()
        rows = next(iter(collector)).reshape(-1)
        torch.testing.assert_close(rows["logits"], weights(rows.select("observation"))["logits"])
    with MultiSyncCollector(envs(), policy_factory=[linear] * 2, **BUDGET) as collector:
        assert collector.policy is not None


def test_the_weights_of_an_updater_are_sent() -> None:
    new = linear(seed=1)
    updater = MultiProcessedWeightUpdater(
        get_server_weights=lambda: TensorDict.from_module(new), policy_weights={}
    )
    with MultiSyncCollector(envs(), linear(), weight_updater=updater, **BUDGET) as collector:
        collector.update_policy_weights_()
        rows = next(iter(collector)).reshape(-1)
        torch.testing.assert_close(rows["logits"], new(rows.select("observation"))["logits"])
    with pytest.warns(DeprecationWarning, match="WeightUpdaterBase"):

        class Own(WeightUpdaterBase):
            def _sync_weights_with_worker(self, **_: Any) -> None:
                raise AssertionError("never called")

    with pytest.raises(ArgumentError, match="sends weights by its own transport"):
        MultiSyncCollector(envs(), linear(), weight_updater=Own(), **BUDGET)


@pytest.mark.parametrize("lanes", [None, 3])
def test_a_buffer_gets_what_torchrls_workers_would_put_there(lanes: int | None) -> None:
    buffers = []
    for name in ("theirs", "ours"):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        if name == "ours":
            with MultiSyncCollector(
                envs(lanes), ByObservation(), replay_buffer=buffer, **BUDGET
            ) as collector:
                assert list(collector) == [None] * 3
        else:
            with MultiSyncCollector(envs(lanes), ByObservation(), **BUDGET) as collector:
                for batch in collector:
                    for piece in batch.unbind(0):
                        buffer.extend(piece)
        buffers.append(buffer[:])
    assert buffers[0].shape == buffers[1].shape
    assert torch.equal(buffers[0]["observation"], buffers[1]["observation"])


def test_rows_of_workers_go_into_a_buffer_of_single_steps() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    given: dict[str, Any] = {**BUDGET, "replay_buffer": buffer, "extend_buffer": False}
    with MultiSyncCollector(envs(), ByObservation(), **given) as collector:
        assert list(collector) == [None] * 3
    assert len(buffer) == 36
    with pytest.raises(ArgumentError, match="extend_buffer"):
        MultiSyncCollector(envs(3), ByObservation(), **given)


def test_compiled_policies_act_in_workers() -> None:
    policy = linear()
    given: dict[str, Any] = {**BUDGET, "compile_policy": {"backend": "eager"}, "seed": 0}
    with MultiSyncCollector(envs(workers=1), policy, **given) as collector:
        rows = next(iter(collector)).reshape(-1)
        torch.testing.assert_close(rows["logits"], policy(rows.select("observation"))["logits"])


def test_whole_trajectories_of_workers() -> None:
    given: dict[str, Any] = {**BUDGET, "trajs_per_batch": 2, "traj_format": "padded"}
    with MultiSyncCollector(envs(), ByObservation(), **given) as collector:
        for batch in collector:
            ends = batch["collector", "mask"].sum(-1) - 1
            assert batch["next", "done"][torch.arange(2), ends].all()
            assert (batch["collector", "step"][:, 0] == 0).all()


def test_environments_that_were_made_travel_as_copies() -> None:
    made = [OracleTorchEnv(None, LENGTHS, first_lane=lane, ends="mixed") for lane in (0, 1)]
    with MultiSyncCollector(made, ByObservation(), **BUDGET) as collector:
        assert next(iter(collector))["observation"][:, 0, 0].tolist() == [0, 1]
    assert [env.steps_taken for env in made] == [[0], [0]]


def test_counts_and_resets_of_workers() -> None:
    with MultiSyncCollector(envs(), ByObservation(), **BUDGET) as collector:
        next(iter(collector))
        stats = collector.stats()
        assert (stats["workers"], stats["workers_alive"], stats["frames"]) == (2, 2, 12)
        with pytest.raises(ArgumentError, match="aggregate"):
            collector.stats("per_worker")
        collector.reset([True, True])
        assert next(iter(collector))["collector", "step"][:, 0].tolist() == [0, 0]
        with pytest.raises(ArgumentError, match="reset"):
            collector.reset([True, False])


def test_what_would_be_done_in_workers_is_refused() -> None:
    with MultiSyncCollector(envs(), ByObservation(), **BUDGET) as collector:
        for call in (
            lambda: collector.set_post_collect_hook(print),
            lambda: setattr(collector, "pre_collect_hook", print),
            lambda: collector.map_fn("stats"),
            lambda: collector.get_distant_attr("ledger"),
        ):
            with pytest.raises(ArgumentError, match="worker"):
                call()
        collector.post_collect_hook = None
        assert collector.getattr_policy("out_keys") == ["action"]


def test_workers_end_with_their_environments() -> None:
    collector = MultiSyncCollector(envs(), None, **BUDGET)
    with pytest.raises(ArgumentError, match="close_env"):
        collector.shutdown(close_env=False)
    collector.shutdown(timeout=5)
    collector.async_shutdown()
    assert collector.closed
