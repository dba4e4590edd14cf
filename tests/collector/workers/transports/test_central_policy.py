"""The parent acts for all workers: one call for all lanes, correct versions, exactly N rows."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector import (
    ArgumentError,
    Devices,
    MultiprocessCollector,
    PolicyError,
    Supervision,
)
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.workers import central
from tallyroll.collector.workers import messages as m
from tallyroll.storage import open_storage

from collect_kit import ByObservation, joined
from far_kit import FarThreads
from oracles import check_rows
from worker_faults_kit import Faults, FaultyPolicy, check_lives
from worker_faults_kit import factories as faulty
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    Run,
    Versioned,
    assert_alike,
    assert_gone,
    chosen_by,
    collect_all,
    factories,
    in_threads,
    slow_factories,
    start,
    sync_collector,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 120, "seed": 3}
CENTRAL: dict[str, Any] = {**BUDGET, "policy_placement": "central"}
MODES = ("sync", "async")
_here: dict[str, Any] = {}
"""Objects for the policy of this process, which workers do not share."""


class Together(TensorDictModuleBase):
    """Policy whose actions depend on all lanes of the batch and on torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "drawn"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action, and a number for each lane."""
        _here.setdefault("sizes", []).append(td.batch_size.numel())
        lanes = torch.arange(td.batch_size.numel()).reshape(td.batch_size)
        drawn = torch.rand(td.batch_size)
        td.set("action", (td["observation"].long().sum() + lanes + (drawn < 0.5)) % 2)
        return td.set("drawn", drawn.half())


class Surprising(ByObservation):
    """Policy that calls a test's function in its `at`-th call in this process."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        if "surprise" in _here:
            _here["calls"] += 1
            if _here["calls"] == _here["at"]:
                _here.pop("surprise")()
        return super().forward(td)


class Another(ByObservation):
    """Policy that acts for more lanes than requested if a test asks for it."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return the actions in a TensorDict of another size."""
        out = super().forward(td)
        lanes = len(out) + _here.get("more", 0)
        return out if lanes == len(out) else torch.cat([out, out])[:lanes]


class Slow(ByObservation):
    """Policy that reads its weights one after the other, with a test's function in between."""

    def __init__(self) -> None:
        super().__init__()
        self.out_keys = [*self.out_keys, "one", "other"]
        self.one, self.other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write both weights."""
        one = self.one.detach().expand(td.batch_size).clone()
        if "between" in _here:
            _here.pop("between")()
        other = self.other.detach().expand(td.batch_size).clone()
        return super().forward(td).set("one", one).set("other", other)


@pytest.fixture(autouse=True)
def nothing_here() -> Any:
    _here.clear()
    yield
    _here.clear()


def surprise(at: int, what: Any) -> None:
    _here.update(calls=0, at=at, surprise=what)


# --- workers that share no memory, in threads -----------------------------------------------------


class WithoutWeights(FarThreads):
    def publish(self, version: int, tensors: list[Any]) -> None:
        raise AssertionError("weights were sent")


def far_collector(source: str, workers: int, policy: Any, **options: Any) -> MultiprocessCollector:
    made = factories(source, workers)
    return MultiprocessCollector(made, policy, transport=WithoutWeights, **options)


def _acting(run: Run) -> central.CentralPolicy:
    assert isinstance(run.collector, MultiprocessCollector)
    found = run.collector._worker_pool.central
    assert found is not None
    return found


# --- sync mode ------------------------------------------------------------------------------------


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("source", "far"),
    [
        (NEXT, False),
        ("torch", True),
        *(slow(source, far) for source in (SAME, DISABLED, "native") for far in (False, True)),
        slow(NEXT, True),
        slow("torch", False),
    ],
)
def test_in_step_one_call_acts_for_all_lanes_as_in_one_process(source: str, far: bool) -> None:
    """The actions depend on all lanes and on torch's generator."""
    one = collect_all(sync_collector(source, Together(), **BUDGET))
    _here.clear()
    with in_threads():
        make = far_collector if far else worker_collector
        many = collect_all(make(source, 3, Together(), **CENTRAL))
    assert_alike(one, many)
    check_rows(joined(many.batches), LENGTHS, ends="mixed", from_start=True)
    slots, rest = divmod(many.collector.ledger.slots, LANES)
    assert (_acting(many).calls, rest) == (slots, 0)
    assert _here["sizes"][-slots:] == [LANES] * slots


OPTIONS: dict[str, dict[str, Any]] = {
    "never_step": {"surplus": "never_step"},
    "random frames": {"init_random_frames": 33},
    "episodes": {"total_frames": None, "total_episodes": 23},
    "resets, discard": {"reset_at_each_iter": True, "surplus": "discard"},
    "single rows": {"frames_per_batch": 1, "total_frames": 30},
    "a slot a batch": {"frames_per_batch": 5, "total_frames": 40},
    "lanes": {"layout": "lanes"},
}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("random frames", NEXT),
        slow("never_step", DISABLED),
        slow("episodes", SAME),
        slow("resets, discard", DISABLED),
        slow("single rows", NEXT),
        slow("a slot a batch", SAME),
        slow("lanes", DISABLED),
    ],
)
def test_in_step_every_option_means_what_it_means_in_one_process(name: str, source: str) -> None:
    options = OPTIONS[name]
    one = collect_all(sync_collector(source, RecordingPolicy(), **{**BUDGET, **options}))
    with in_threads():
        given = {**CENTRAL, **options}
        near = collect_all(worker_collector(source, 2, RecordingPolicy(), **given))
        far = collect_all(far_collector(source, 2, RecordingPolicy(), **given))
    assert_alike(one, near)
    assert_alike(one, far)


@pytest.mark.slow
def test_lanes_without_a_batch_size_act_in_one_call() -> None:
    with in_threads():
        run = collect_all(worker_collector("single", LANES, Together(), **CENTRAL))
    check_rows(joined(run.batches), LENGTHS, ends="mixed", from_start=True)
    calls = _acting(run).calls
    assert _here["sizes"][-calls:] == [LANES] * calls == [LANES] * 24


@pytest.mark.parametrize("options", [{"total_frames": 90}, slow({"total_frames": None})])
def test_a_signal_while_the_policy_acts_loses_nothing(options: Any) -> None:
    options = {**options, **({} if options["total_frames"] else {"total_episodes": 12})}
    one = collect_all(sync_collector(SAME, Surprising(), **{**BUDGET, **options}))
    with in_threads(), worker_collector(SAME, 2, Surprising(), **{**CENTRAL, **options}) as many:
        surprise(7, lambda: os.kill(os.getpid(), signal.SIGINT))
        batches = []
        with pytest.raises(KeyboardInterrupt):
            batches.extend(many)  # keeps the earlier batches
        batches += list(many)
        many.ledger.check()
    assert (joined(batches) == joined(one.batches)).all()


# --- async mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "far"),
    [
        (NEXT, True),
        slow(NEXT, False),
        *(slow(source, far) for source in (DISABLED, "torch") for far in (False, True)),
    ],
)
def test_out_of_step_rows_are_whole_and_exactly_so_many(source: str, far: bool) -> None:
    with in_threads():
        make = far_collector if far else worker_collector
        run = collect_all(make(source, 3, RecordingPolicy(), mode="async", **CENTRAL))
    rows = joined(run.batches)
    assert len(rows) == run.collector.ledger.stored == 120
    checked = check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert set(checked.lane.tolist()) == set(range(LANES))
    assert run.collector.ledger.episodes_complete == checked.ended.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"total_frames": None, "total_episodes": 23},
        slow({"init_random_frames": 33}),
        slow({"surplus": "never_step"}),
    ],
)
def test_out_of_step_budgets_hold(options: Any) -> None:
    with in_threads():
        given = {**CENTRAL, **options, "mode": "async"}
        run = collect_all(worker_collector(DISABLED, 2, RecordingPolicy(), **given))
    rows, ledger = joined(run.batches), run.collector.ledger
    random = int((rows["collector", "policy_version"] == -1).sum())
    assert random == ledger.random == options.get("init_random_frames", 0)
    if "total_episodes" in options:
        assert ledger.episodes_complete == 23
        assert check_rows(rows, LENGTHS, ends="mixed").ended.sum() == 23
    else:
        assert len(rows) == 120


def test_out_of_step_a_slow_worker_holds_up_no_other() -> None:
    with in_threads():
        made = slow_factories(2, 4, slow=[0], seconds=0.05)
        options = {**CENTRAL, "mode": "async", "frames_per_batch": 50, "total_frames": -1}
        with start(made, RecordingPolicy(), **options) as collector:
            lanes: list[int] = []
            began = False
            for batch in collector:
                lane = batch["collector", "lane"]
                lanes += lane.tolist() if began else []
                began = began or bool((lane < 2).any())  # however late worker 0 is
                if lanes.count(0) > 30:
                    break
    slow = sum(lane < 2 for lane in lanes)
    assert len(lanes) - slow > 2 * slow  # in sync mode, the numbers would be equal


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", slow("sync")])
def test_each_row_has_the_version_that_acted(mode: Any) -> None:
    """Weights that are trained in place act with the next version, and not before."""
    policy, batches = Versioned(), []
    with in_threads(), worker_collector(SAME, 2, policy, mode=mode, **CENTRAL) as collector:
        for batch in collector:
            batches.append(batch)
            policy.set_to(collector.policy_version + 1)
            if len(batches) % 2:
                collector.update_policy_weights_()
        assert collector._weights.version == -1
    rows = joined(batches)
    version = rows["collector", "policy_version"]
    for name in ("low", "high"):
        assert torch.equal(rows[name], version.float())
    assert torch.equal(rows["mark"], torch.stack([version, version], -1).float())
    assert torch.equal(rows["action"], chosen_by(rows, version))
    newest = [int(batch["collector", "policy_version"].max()) for batch in batches]
    if mode == "sync":
        # The last row was carried, and has the weights of the previous batch.
        assert newest == [*((number + 1) // 2 for number in range(7)), 3]
    assert max(newest) > 1


def test_weights_of_another_thread_come_between_two_calls() -> None:
    """No row mixes two versions, and each has the version that acted."""
    policy, threads = Slow(), list[threading.Thread]()

    def updated() -> None:
        for each in policy.parameters():
            torch.nn.init.ones_(each)
        threads.append(threading.Thread(target=collector.update_policy_weights_))
        threads[0].start()
        threads[0].join(0.2)  # the waiting update continues after the call

    with in_threads(), worker_collector(SAME, 2, policy, mode="sync", **CENTRAL) as collector:
        _here["between"] = updated
        rows = joined([*collector])
        threads[0].join()
    versions = rows["collector", "policy_version"].reshape(-1).tolist()
    assert rows["one"].reshape(-1).tolist() == rows["other"].reshape(-1).tolist() == versions
    assert {*versions} == {0, 1}


# --- faults ---------------------------------------------------------------------------------------


def before_acting(monkeypatch: pytest.MonkeyPatch, call: int, do: Any) -> None:
    """Call ``do`` before the policy acts for the ``call``-th time."""
    choose, calls = central.CentralPolicy.choose, []

    def choosing(self: central.CentralPolicy, wanted: Any) -> Any:
        calls.append(len(wanted))
        if len(calls) == call:
            do()
        return choose(self, wanted)

    monkeypatch.setattr(central.CentralPolicy, "choose", choosing)


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        slow("sync", signal.SIGKILL),  # the contract tests cover async mode
        slow("async", signal.SIGKILL),
        slow("sync", signal.SIGSTOP),
        slow("async", signal.SIGSTOP),
    ],
)
def test_exactly_so_many_where_a_worker_ends_or_hangs_while_it_waits(
    mode: Any, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(tmp_path)
    supervision = Supervision("respawn", step_timeout=2 if number == signal.SIGSTOP else None)
    options = {**CENTRAL, "storage": tmp_path / "rows", "supervision": supervision}
    with start(faulty(faults, LANES, 2), FaultyPolicy(faults), mode=mode, **options) as collector:
        pids = collector.worker_pids
        before_acting(monkeypatch, 6, lambda: os.kill(pids[1], number))
        assert sum(len(batch) for batch in collector) == 120
        pids += collector.worker_pids
        ledger = collector.ledger
    ledger.check()
    assert ledger.respawned == 1
    with open_storage(tmp_path / "rows") as storage:
        assert storage.runs[0]["call"]["policy_placement"] == "central"
        assert len(storage) == 120
        lives = check_lives(storage[:], LANES, gaps=mode == "async")
    assert mode == "async" or max(lives) == 2
    assert_gone(pids)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_policy_is_raised_as_it_is(mode: Any, tmp_path: Path) -> None:
    def fail() -> None:
        surprise(1, fail)
        raise ValueError("no action comes to mind")

    storage = tmp_path / "rows"
    with (
        in_threads(),
        worker_collector(SAME, 2, Surprising(), mode=mode, storage=storage, **CENTRAL) as collector,
    ):
        surprise(11, fail)
        with pytest.raises(ValueError, match="no action comes to mind"):
            list(collector)
        collector.ledger.check()
        members = collector._worker_pool.members
        assert [(each.asked, each.failed) for each in members] == [(0, None)] * 2, "they rest"
        assert collector.ledger.lost == 0
    with open_storage(storage) as rows:
        assert len(rows) == collector.ledger.stored > 10
        check_rows(rows[:], LENGTHS, ends="mixed")


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("mode", MODES)
def test_actions_of_other_lanes_are_the_policys_error(mode: Any, more: int) -> None:
    """No action is dropped, and the error names no worker."""
    with in_threads(), worker_collector(SAME, 2, Another(), mode=mode, **CENTRAL) as collector:
        batches = iter(collector)
        assert len(next(batches)) == 17
        _here["more"] = more
        with pytest.raises(
            PolicyError, match=r"^action: expected int64 \[\d\] .*, got int64 \[\d\]"
        ):
            list(batches)
        collector.ledger.check()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (None, {}, 'policy_placement="central": expected a policy, got none'),
        ([([0, 1], ByObservation()), ([2, 3, 4], None)], {}, "expected one policy, got several"),
        (
            ByObservation(),
            {"sharded": True, "mode": "async", "storage": "rows"},
            'sharded=True cannot be combined with policy_placement="central", because',
        ),
    ],
)
def test_what_central_does_not_go_with_is_refused(policy: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        worker_collector(SAME, 2, policy, **CENTRAL, **options)


def test_weights_without_a_shape_are_refused() -> None:
    class Lazy(ByObservation):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LazyLinear(2)

    with pytest.raises(ArgumentError, match=r"layer\.weight: expected weights, got a parameter"):
        worker_collector(SAME, 2, Lazy(), **CENTRAL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.float64, torch.bool])
def test_tensors_of_every_dtype_travel(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.5], [-2.0, 0.25]]).to(dtype)
    back = central._tensor(*central._value(tensor))
    assert (back.dtype, back.tolist()) == (dtype, tensor.tolist())


def test_lanes_that_see_other_keys_act_in_a_call_of_their_own() -> None:
    """A new worker does not yet have the policy's earlier outputs among its inputs."""
    called, seen = m.PolicyCall(None, (("action",), ("told",))), torch.tensor([[1.0, 2.0, 3.0]])
    policy = central.CentralPolicy(
        Policy(RecordingPolicy(), None, None), called, ExplorationType.RANDOM, in_step=True
    )
    observation = {("observation",): central._value(seen)}
    more = {**observation, ("told",): central._value(seen.double())}
    chosen = policy.choose([m.ActionRequest(each, {}) for each in (more, observation, more)])
    assert policy.calls == 2
    for each in chosen:
        assert each.values is not None
        assert each.values["told",][0].tolist() == [[1.25, 2.25]]


@pytest.mark.slow
def test_a_compiled_policy_stays_compiled() -> None:
    compiled = torch.compile(torch.nn.Linear(4, 2), backend="eager")
    policy = Policy(compiled, None, None)
    policy.keep_copy()
    assert type(policy._called) is type(compiled)
    assert policy.module is policy._called._orig_mod is not policy.source
    inputs = torch.ones(1, 4)
    assert torch.equal(policy._called(inputs), compiled(inputs))
    compiled._orig_mod.weight.data.zero_()
    assert not torch.equal(policy._called(inputs), compiled(inputs))


def test_the_plan_says_where_the_policy_acts() -> None:
    devices = Devices(placement="central")
    with in_threads(), worker_collector(SAME, 1, ByObservation(), devices=devices, **BUDGET) as run:
        assert str(run.plan.acts) == 'central, because policy_placement="central"'
