"""Only statistics that each worker would keep of its own lanes are refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import (
    CatFrames,
    Compose,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.envs.setup.statistics import StatisticsWarning, StatisticsWatch
from tallyroll.collector.errors import EnvironmentRefused

from oracles import OracleTorchEnv
from worker_kit import in_threads, start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEYS = ["observation"]
IGNORED = "ignore:.*(Support of VecNorm|deprecated|synchronize).*:Warning"


class Mean(Transform):
    """User-defined transform with a mean over all lanes, or per lane."""

    def __init__(self, *shape: int, moves: bool = True) -> None:
        super().__init__(in_keys=KEYS, out_keys=KEYS)
        self.moves = moves
        self.register_buffer("mean", torch.zeros(shape))

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)

    def _call(self, next_tensordict: Any) -> Any:
        if self.moves:
            self.mean += 1 + next_tensordict["observation"].float().mean()
        return next_tensordict


def shared(kind: Any, path: Path) -> Any:
    """Return statistics in a memory map that all processes share."""
    zeros, count = torch.zeros(3), torch.zeros((), dtype=torch.int64)
    if kind is VecNormV2:
        loc, var = TensorDict(observation=zeros), TensorDict(observation=zeros)
        data = TensorDict(loc=loc, var=var, count=TensorDict(observation=count))
        return VecNormV2(KEYS, shared_data=data.memmap_(str(path)), reduce_batch_dims=True)
    names = {f"observation_{name}": torch.zeros(2, 3) for name in ("sum", "ssq")}
    td = TensorDict(**names, observation_count=torch.zeros(1))
    return VecNorm(KEYS, shared_td=td.memmap_(str(path)))


CASES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "VecNormV2": (lambda _: VecNormV2(KEYS), ["VecNormV2"]),
    "VecNorm": (lambda _: VecNorm(KEYS), ["VecNorm"]),
    "within others": (lambda _: Compose(StepCounter(), VecNormV2(KEYS)), ["VecNormV2"]),
    "frozen": (lambda _: VecNormV2(KEYS).freeze(), []),
    "shared": (partial(shared, VecNorm), []),
    "shared data": (partial(shared, VecNormV2), []),
    "of lanes": (
        lambda _: Compose(CatFrames(2, -1, KEYS, ["two"]), RewardSum(), StepCounter()),
        [],
    ),
    "fixed": (lambda _: Compose(RewardScaling(0.0, 2.0), ObservationNorm(0.0, 1.0, KEYS)), []),
    "a user's": (lambda _: Mean(), ["Mean"]),
    "a user's, of lanes": (lambda _: Mean(2, 3), []),
    "a user's, fixed": (lambda _: Mean(moves=False), []),
}


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("case", CASES)
def test_what_keeps_statistics_is_found(case: str, tmp_path: Path) -> None:
    make, wanted = CASES[case]
    env = TransformedEnv(OracleTorchEnv(2, [[3], [5]]), make(tmp_path))
    watch = StatisticsWatch(env)
    env.reset()
    assert watch.found() == wanted


def normed(lanes: int, first: int = 0) -> TransformedEnv:
    return TransformedEnv(OracleTorchEnv(lanes, [[3]], first_lane=first), VecNormV2(KEYS))


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("layout", ["rows", "torchrl"])
def test_several_workers_are_refused_or_warned_of_once(workers: int, layout: Any) -> None:
    makes = [partial(normed, 2, 2 * worker) for worker in range(workers)]
    options: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 16, "layout": layout}
    if workers > 1 and layout == "rows":
        said = r"VecNormV2: expected statistics of all lanes.* 2 workers.*freeze\(\)"
        with pytest.raises(EnvironmentRefused, match=said):
            start(makes, None, **options)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with start(makes, None, **options) as collector:
            collector.set_seed(4)
            assert sum(batch.numel() for batch in collector) == 16
    told = [str(each.message) for each in caught if each.category is StatisticsWarning]
    assert len(told) == (workers > 1)
    assert all("VecNormV2: expected statistics of all lanes" in each for each in told)


@pytest.mark.filterwarnings(IGNORED)
def test_those_of_one_worker_are_of_all_lanes() -> None:
    with in_threads(), warnings.catch_warnings():
        warnings.simplefilter("error", StatisticsWarning)
        given: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 16}
        with MultiprocessCollector([partial(normed, 2)], None, **given) as collector:
            assert sum(batch.numel() for batch in collector) == 16
