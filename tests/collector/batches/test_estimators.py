"""TorchRL's estimators return for each lane of a batch the values that plain Python computes."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torchrl.objectives.value import GAE, TD0Estimator, TDLambdaEstimator

from tallyroll.collector import GymnasiumVectorEnv

from collect_kit import LENGTHS, ByObservation, collect
from estimators_kit import GAMMA, LAMBDA, plain_gae, value_net
from oracles import OracleTorchEnv, OracleVectorEnv, flat_rows, make_oracle_vec


def vec(mode: AutoresetMode, reset_slots: Any = "mask") -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(
        make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed"), reset_slots=reset_slots
    )


DRIVERS: dict[str, Any] = {
    **{mode.value: lambda mode=mode: vec(mode) for mode in AutoresetMode},
    "avoided": lambda: vec(AutoresetMode.NEXT_STEP, "avoid"),
    "native": lambda: OracleVectorEnv(3, LENGTHS, ends="mixed"),
    "torch": lambda: OracleTorchEnv(3, LENGTHS, ends="mixed"),
}


def by_row(batch: TensorDictBase, key: str) -> dict[tuple[int, ...], float]:
    """Return the value of each transition by lane, episode and step, in every layout."""
    rows = flat_rows(batch)
    names = rows["observation"].long().tolist()
    return dict(zip(map(tuple, names), rows[key].view(-1).tolist(), strict=True))


@pytest.mark.parametrize("layout", ["rows", "lanes", "trajectories"])
@pytest.mark.parametrize("driver", list(DRIVERS))
def test_gae_is_that_of_each_lane_alone(driver: str, layout: Any) -> None:
    gae = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=value_net())
    plain, _ = collect(DRIVERS[driver](), ByObservation(), frames_per_batch=23, total_frames=100)
    laid_out, _ = collect(
        DRIVERS[driver](), ByObservation(), frames_per_batch=23, total_frames=100, layout=layout
    )
    for rows, batch in zip(plain, laid_out, strict=True):
        wanted = plain_gae(rows)
        got = by_row(gae(batch), "advantage")
        names = map(tuple, rows["observation"].long().tolist())
        assert [got[name] for name in names] == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("layout", ["rows", "lanes", "trajectories"])
@pytest.mark.parametrize("estimator", [TD0Estimator, TDLambdaEstimator])
def test_other_estimators_agree_over_layouts(estimator: Any, layout: Any) -> None:
    kwargs = {"lmbda": LAMBDA} if estimator is TDLambdaEstimator else {}
    estimate = estimator(gamma=GAMMA, value_network=value_net(), **kwargs)

    def targets(name: str) -> dict[tuple[int, ...], float]:
        batches, _ = collect(
            OracleTorchEnv(1, [[5, 1, 3]], ends="mixed"),
            ByObservation(),
            frames_per_batch=23,
            total_frames=23,
            layout=name,
        )
        return by_row(estimate(batches[0]), "value_target")

    wanted, got = targets("rows"), targets(layout)
    assert got.keys() == wanted.keys()
    assert [got[key] for key in wanted] == pytest.approx(list(wanted.values()), rel=1e-5)


def test_gae_after_a_reset_in_the_middle_of_a_lane() -> None:
    gae = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=value_net())
    batches, _ = collect(
        DRIVERS["torch"](), frames_per_batch=4, total_frames=40, reset_at_each_iter=True
    )
    for batch in batches:
        advantage = gae(batch)["advantage"].view(-1).tolist()
        assert advantage == pytest.approx(plain_gae(batch).tolist(), rel=1e-4, abs=1e-3)


def test_stored_rows_need_the_split_before_an_estimate(tmp_path: Any) -> None:
    from tallyroll.collector import split_trajectories
    from tallyroll.storage import MemmapStorage

    gae = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=value_net())
    collect(DRIVERS["torch"](), frames_per_batch=7, total_frames=60, storage=tmp_path / "s", seed=0)
    whole, _ = collect(DRIVERS["torch"](), frames_per_batch=60, total_frames=60, seed=0)
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        got = by_row(gae(split_trajectories(storage.get(slice(None)))), "advantage")
    names = map(tuple, whole[0]["observation"].long().tolist())
    wanted = plain_gae(whole[0])
    assert [got[name] for name in names] == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-3)
