"""A policy is called unchanged, its trial leaves no trace, and it cannot falsify stored rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential

from tallyroll.collector import CollectorError, GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.errors import ArgumentError, PolicyError
from tallyroll.storage import MemmapStorage

from collect_kit import LENGTHS, ByObservation, assert_same, collect, joined
from oracles import OracleEnv, OracleTorchEnv, OracleVectorEnv, check_rows, make_oracle_vec
from policies_kit import linear


def vec(mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed", **kwargs))


DRIVERS: dict[str, Any] = {
    "next": vec,
    "disabled": partial(vec, AutoresetMode.DISABLED),
    "native": partial(OracleVectorEnv, 3, LENGTHS, ends="mixed"),
    "torch": partial(OracleTorchEnv, 3, LENGTHS, ends="mixed"),
}
every_driver = pytest.mark.parametrize("driver", list(DRIVERS))


@every_driver
def test_values_that_a_module_computes_are_stored(driver: str) -> None:
    policy = linear()
    batches, _ = collect(DRIVERS[driver](), policy, frames_per_batch=9, total_frames=50)
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    again = policy(rows.select("observation"))
    assert torch.allclose(again["logits"], rows["logits"])
    assert torch.equal(again["action"], rows["action"])


@every_driver
def test_the_trial_leaves_no_trace(driver: str) -> None:
    class Drawing(ByObservation):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            torch.rand(3)
            np.random.rand(3)
            return super().forward(td)

    after = []
    for policy in (Drawing(), ByObservation()):
        np.random.seed(5)
        with SyncCollector(DRIVERS[driver](), policy, frames_per_batch=3, total_frames=3, seed=5):
            assert policy.called == 0
            after.append((torch.rand(4).tolist(), np.random.rand(4).tolist()))
    assert after[0] == after[1]


@every_driver
def test_a_policy_that_rewrites_its_observation_sees_the_next_one(
    driver: str,
) -> None:
    """A normalizer that overwrites `observation` must still see new observations."""
    seen: list[torch.Tensor] = []

    def halved(observation: torch.Tensor) -> torch.Tensor:
        seen.append(observation.clone())
        return observation / 2

    policy = Sequential(
        TensorDictModule(halved, in_keys=["observation"], out_keys=["observation"]),
        TensorDictModule(
            lambda x: (2 * x).sum(-1).long() % 2, in_keys=["observation"], out_keys=["action"]
        ),
    )
    batches, collector = collect(DRIVERS[driver](), policy, frames_per_batch=9, total_frames=45)
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert_same(ByObservation()(rows.select("observation")).select("action"), rows.select("action"))
    assert len(torch.cat(seen)) >= collector.ledger.slots


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_policy_that_writes_to_its_observation_changes_no_row(driver: str) -> None:
    def scribbling(td: TensorDictBase) -> TensorDictBase:
        td = ByObservation()(td)
        td["observation"].neg_()
        return td

    batches, _ = collect(DRIVERS[driver](), scribbling, frames_per_batch=9, total_frames=45)
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_callable_may_return_a_tensordict_of_its_own(driver: str) -> None:
    def fresh(td: TensorDictBase) -> TensorDictBase:
        action = ByObservation()(td.clone())["action"]
        return TensorDict({"action": action}, td.batch_size)

    batches, _ = collect(DRIVERS[driver](), fresh, frames_per_batch=9, total_frames=45)
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)


def test_new_weights_are_used_from_the_next_batch_on_and_counted() -> None:
    policy, other = linear(0), linear(3)
    with SyncCollector(
        vec(), policy, frames_per_batch=9, total_frames=36, surplus="discard"
    ) as collector:
        for at, batch in enumerate(collector):
            assert set(batch["collector", "policy_version"].tolist()) == {at}
            wanted = (other if at else linear(0))(batch.select("observation"))
            assert torch.equal(wanted["action"], batch["action"])
            collector.update_policy_weights_(other.state_dict())
        assert collector.policy_version == 4


@pytest.mark.parametrize("form", ["state_dict", "tensordict", "none"])
def test_weights_come_as_a_state_dict_a_tensordict_or_in_place(form: str) -> None:
    policy, other = linear(0), linear(3)
    with SyncCollector(vec(), policy, frames_per_batch=9, total_frames=36) as collector:
        if form == "state_dict":
            collector.update_policy_weights_(other.state_dict())
        elif form == "tensordict":
            collector.update_policy_weights_(TensorDict.from_module(other).data)
        else:
            policy.load_state_dict(other.state_dict())
            collector.update_policy_weights_()
        batch = next(iter(collector))
        assert torch.equal(other(batch.select("observation"))["action"], batch["action"])
        assert set(batch["collector", "policy_version"].tolist()) == {1}


def test_a_policy_on_its_own_device_moves_both_ways() -> None:
    batches, _ = collect(
        vec(), linear(), frames_per_batch=9, total_frames=36, policy_device="cpu", env_device="cpu"
    )
    check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)


def test_random_actions_have_no_weights() -> None:
    with SyncCollector(vec(), frames_per_batch=9, total_frames=36) as collector:
        match = "this collector draws random actions: it has no weights to update"
        with pytest.raises(ArgumentError, match=match):
            collector.update_policy_weights_()


def test_a_callable_has_no_weights_to_replace() -> None:
    with (
        SyncCollector(
            vec(), lambda td: ByObservation()(td), frames_per_batch=9, total_frames=36
        ) as c,
        pytest.raises(
            ArgumentError, match="weights: the policy is a plain callable without weights"
        ),
    ):
        c.update_policy_weights_({})


def writing(**values: Any) -> Any:
    def policy(td: TensorDictBase) -> TensorDictBase:
        for key, value in values.items():
            td.set(key, value)
        return td

    return policy


@pytest.mark.parametrize(
    ("policy", "error", "match"),
    [
        (7, ArgumentError, "policy: expected a TensorDictModule, a callable .* got int"),
        (
            torch.nn.Linear(3, 2),
            PolicyError,
            r"action: expected an index or a one-hot vector, got \[-?0\.\d+, ",
        ),
        (
            torch.nn.Bilinear(3, 3, 2),
            ArgumentError,
            r"Bilinear is a plain nn.Module whose arguments are \['input1', 'input2'\], but",
        ),
        (
            lambda td: td["observation"],
            PolicyError,
            "expected a TensorDict as result, got Tensor. .* The argument 'td' of <lambda> is none "
            r"of the observations \['observation'\], so it is a TensorDict",
        ),
        (lambda _: None, PolicyError, "expected a TensorDict as result, got NoneType"),
        (
            writing(act=torch.zeros(3)),
            PolicyError,
            r"the key action in the output, got \['act'\]; set out_keys",
        ),
        (lambda td: td, PolicyError, "expected the key action in the output, got no new key"),
        (
            writing(action=torch.zeros(3, 1, 1)),
            PolicyError,
            r"action is float32 \[3, 1, 1\], expected int64 \[3\]",
        ),
        (
            writing(action=torch.full((3,), 0.5)),
            PolicyError,
            r"action: expected a number that int64 can hold, got 0\.5",
        ),
        (
            writing(action=torch.zeros(3, 2, dtype=torch.int64)),
            PolicyError,
            r"action: expected an index or a one-hot vector, got \[0\.0, 0\.0\]",
        ),
        (
            writing(action=torch.tensor([0, 5, 1])),
            PolicyError,
            r"outside the action space at the first observation: got \[0, 5, 1\], expected 0\.\.1",
        ),
    ],
)
@every_driver
def test_values_that_are_no_policy_are_refused_before_anything_is_made(
    driver: str, policy: Any, error: type[Exception], match: str, tmp_path: Any
) -> None:
    with pytest.raises(error, match=match):
        SyncCollector(
            DRIVERS[driver](), policy, frames_per_batch=5, total_frames=9, storage=tmp_path / "s"
        )
    assert list(tmp_path.iterdir()) == []


def test_an_action_on_another_device_is_refused() -> None:
    policy = writing(action=torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(PolicyError, match="action is on meta, expected cpu; pass policy_device"):
        SyncCollector(DRIVERS["torch"](), policy, frames_per_batch=5, total_frames=9)


@pytest.mark.parametrize(
    ("action", "match"),
    [
        (torch.full((3, 2), torch.nan), "action is NaN or infinite for the first observation"),
        (torch.full((3, 2), torch.inf), "action is NaN or infinite for the first observation"),
        (torch.full((3, 2), 2.0), r"outside the action space .* got \[2.0, .*expected -1\.\.1"),
    ],
)
def test_an_action_that_is_no_number_is_refused(action: Any, match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        SyncCollector(
            vec(action="box"),
            writing(action=action),
            frames_per_batch=5,
            total_frames=9,
            validate="raise",
        )


def test_a_column_needs_the_lanes_in_front() -> None:
    policy = writing(action=torch.zeros(3, dtype=torch.int64), extra=torch.zeros(3, 2))

    def bad(td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"action": torch.zeros(3, dtype=torch.int64), "x": torch.zeros(5)})

    collect(vec(), policy, frames_per_batch=5, total_frames=9)
    with pytest.raises(
        PolicyError,
        match=r"policy: x: expected a shape that begins with the batch size \[3\], got \[5\]",
    ):
        SyncCollector(vec(), bad, frames_per_batch=5, total_frames=9)


class ChangesItsMind(ByObservation):
    """Policy that is correct until call 4, and then returns another action."""

    def __init__(self, action: Any) -> None:
        super().__init__(action="box")
        self.later = action

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        td = super().forward(td)
        if self.called > 4:
            td.pop("action")
            if self.later is not None:
                td.set("action", self.later)
        return td


@pytest.mark.parametrize(
    ("action", "match"),
    [
        (torch.full((3, 2), torch.nan), r"action lies outside .* at lane 0, step \d of its traj"),
        (torch.full((3, 2), 3.0), r"expected \[-1, 1\] and no NaN, got 3 at \[0\]"),
        (
            torch.zeros(3, 3),
            r"action: expected float32 \[3, 2\] as on the first step, got float32 \[3, 3\]",
        ),
        (None, "action is missing, but the first step had it"),
    ],
)
@pytest.mark.parametrize("driver", list(DRIVERS))
def test_an_action_gone_wrong_later_keeps_all_that_was_before(
    driver: str, action: Any, match: str, tmp_path: Any
) -> None:
    from tallyroll.storage import MemmapStorage

    env = DRIVERS[driver](action="box")
    with (
        SyncCollector(
            env,
            ChangesItsMind(action),
            frames_per_batch=50,
            total_frames=90,
            validate="raise",
            storage=tmp_path / "s",
        ) as collector,
        pytest.raises(PolicyError, match=match),
    ):
        list(collector)
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        rows = check_rows(
            storage.get(slice(None)), LENGTHS, ends="mixed", action="box", from_start=True
        )
        assert len(rows.lane) == collector.ledger.stored > 8
    collector.ledger.check()


PLAIN_DRIVERS = {
    "vector": lambda: make_oracle_vec(3, LENGTHS),
    "torch": lambda: OracleTorchEnv(3, LENGTHS),
    "one lane": lambda: OracleTorchEnv(None, LENGTHS),
}
every_plain_driver = pytest.mark.parametrize("driver", PLAIN_DRIVERS)


@every_plain_driver
def test_observations_are_stored_as_before_the_policy_changed_them(driver: str) -> None:
    def normalising(td: TensorDictBase) -> TensorDictBase:
        td = ByObservation()(td)
        return td.set("observation", td["observation"] / 2)

    batches, _ = collect(PLAIN_DRIVERS[driver](), normalising, frames_per_batch=4, total_frames=24)
    check_rows(joined(batches), LENGTHS, from_start=True)


@pytest.mark.parametrize(
    ("driver", "surplus"),
    [*((driver, "carry") for driver in PLAIN_DRIVERS), ("one lane", "never_step")],
)
def test_a_callable_may_return_another_tensordict(driver: str, surplus: str) -> None:
    def fresh(td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"action": ByObservation()(td.clone())["action"]}, td.batch_size)

    batches, _ = collect(
        PLAIN_DRIVERS[driver](), fresh, frames_per_batch=4, total_frames=24, surplus=surplus
    )
    check_rows(joined(batches), LENGTHS, from_start=True)


def bounded() -> TensorDictModule:
    """Return a policy with weights, whose actions lie within the box."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def test_weights_that_fit_nothing_are_refused() -> None:
    env = make_oracle_vec(2, LENGTHS, action="box")
    with SyncCollector(env, bounded(), frames_per_batch=4, total_frames=8) as collector:
        with pytest.raises(CollectorError, match="nonsense"):
            collector.update_policy_weights_(TensorDict({"nonsense": torch.zeros(3)}))
        assert collector.policy_version == 0


def test_weights_may_be_a_module() -> None:
    policy, other = bounded(), bounded()
    env = make_oracle_vec(2, LENGTHS, action="box")
    with SyncCollector(env, policy, frames_per_batch=4, total_frames=8) as collector:
        collector.update_policy_weights_(other)
    for one, two in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@every_plain_driver
def test_an_action_of_another_dtype_later_is_refused(driver: str) -> None:
    calls = 0

    def policy(td: TensorDictBase) -> TensorDictBase:
        nonlocal calls
        calls += 1
        action = torch.ones(td.batch_size, dtype=torch.int64)
        return td.set("action", action if calls < 4 else action * 0.7)

    with pytest.raises(PolicyError, match=r"action: expected int64.*got float32"):
        collect(PLAIN_DRIVERS[driver](), policy, frames_per_batch=4, total_frames=24)


def test_a_multibinary_action_outside_its_space_is_refused() -> None:
    class Lenient(OracleEnv):
        def step(self, action: Any) -> Any:
            return super().step(np.minimum(action, 1))

    calls = 0

    def policy(td: TensorDictBase) -> TensorDictBase:
        nonlocal calls
        calls += 1
        value = 7 if calls > 3 else 1
        return td.set("action", torch.full((*td.batch_size, 3), value, dtype=torch.int8))

    env = SyncVectorEnv([partial(Lenient, 0, (5,), action="multibinary")])
    with pytest.raises(PolicyError, match="outside the action space"):
        collect(env, policy, frames_per_batch=4, total_frames=12)


def test_a_policy_may_hold_a_storage(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "runs") as storage:

        class Holding:
            def __init__(self) -> None:
                self.storage = storage

            def __call__(self, td: TensorDictBase) -> TensorDictBase:
                return ByObservation()(td)

        _, collector = collect(
            make_oracle_vec(2, LENGTHS), Holding(), frames_per_batch=4, total_frames=8
        )
    assert collector.ledger.stored == 8


def test_a_policy_is_not_copied_to_where_it_is_already() -> None:
    policy = bounded()
    env = make_oracle_vec(2, LENGTHS, action="box")
    with SyncCollector(
        env, policy, frames_per_batch=4, total_frames=8, surplus="discard", policy_device="cpu:0"
    ) as collector:
        batches = iter(collector)
        next(batches)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
        with pytest.warns(UserWarning, match="update_policy_weights_"):
            assert not next(batches)["action"].any()
