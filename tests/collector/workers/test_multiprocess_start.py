"""Invalid arguments are refused early without traces; workers get their seeds and limits."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn import TensorDictSequential as Sequential

from tallyroll.collector import (
    GymnasiumVectorEnv,
    MultiprocessCollector,
    SyncCollector,
)
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, PolicyError
from tallyroll.collector.workers.local import memory
from tallyroll.storage import MemmapStorage

from collect_kit import ByObservation, assert_same, joined
from fork_server import warm_fork_server
from oracles import OracleEnv, OracleTorchEnv, check_rows, make_oracle_vec
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    QUICK,
    SAME,
    collect_all,
    drawing,
    factories,
    factory,
    start,
    sync_collector,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 60, "seed": 3}
TWO = {"num_workers": 2}


def refused(error: type[Exception], match: str, *args: Any, **kwargs: Any) -> Exception:
    """Return the error of the constructor."""
    warm_fork_server()
    with pytest.raises(error, match=match) as found:
        MultiprocessCollector(*args, **{**BUDGET, **QUICK, **kwargs}).shutdown()
    return found.value


# --- refused before a process starts ------------------------------------------------------------

CREATE = factory(SAME, 0, 2)

REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "mode": ((CREATE,), {**TWO, "mode": "both"}, r"mode: expected one of \['sync', 'async'\]"),
    "fork": (
        (CREATE,),
        {**TWO, "mp_start_method": "fork"},
        'expected "spawn" or "forkserver", got "fork". A forked process has no copies of the other',
    ),
    "start method": (
        (CREATE,),
        {**TWO, "mp_start_method": "threads"},
        r"mp_start_method: expected one of \['spawn', 'forkserver'\], got 'threads'",
    ),
    "no workers": (
        (CREATE,),
        {"num_workers": 0},
        "num_workers: expected an integer above 0, got 0",
    ),
    "workers unsaid": ((CREATE,), {}, "num_workers: expected an integer, got None"),
    "other workers": (
        ([CREATE, CREATE],),
        {"num_workers": 3},
        "num_workers: expected 2, as many as there are factories, got 3",
    ),
    "a number": ((5,), {"num_envs": 4}, "create_env_fn: expected a Gymnasium id, .*got int"),
    "ids": ((["CartPole-v1"],), {}, "got a list of ids; pass one id, and num_workers"),
    "no mapping": (
        ("CartPole-v1",),
        {"env_kwargs": "x"},
        "env_kwargs: expected a mapping of keyword arguments",
    ),
    "no factory": (([],), {}, "create_env_fn: expected at least one factory, got an empty list"),
    "few lanes": (
        ("CartPole-v1",),
        {"num_workers": 3, "num_envs": 2},
        "num_envs: expected at least one lane for each of 3 workers, got 2; use fewer workers",
    ),
    "no lanes": (
        ("CartPole-v1",),
        {**TWO, "num_envs": 0},
        "num_envs: expected an integer above 0, got 0",
    ),
    "lanes of factories": (
        ([CREATE, CREATE],),
        {"num_envs": 4},
        "num_envs: expected one factory, got a list of factories",
    ),
    "kwargs of a factory": (
        (CREATE,),
        {**TWO, "env_kwargs": {"a": 1}},
        "env_kwargs: expected the id of",
    ),
    "neither": ((7,), TWO, "create_env_fn: expected a Gymnasium id, a factory or a list of factor"),
    "resets": (
        (CREATE,),
        {**TWO, "mode": "async", "reset_at_each_iter": True},
        'reset_at_each_iter needs mode="sync", because in async mode workers continue while',
    ),
    "discard": (
        (CREATE,),
        {**TWO, "mode": "async", "surplus": "discard"},
        'surplus="discard" needs mode="sync", .*Use "carry" or "never_step"',
    ),
    "threads": (
        (CREATE,),
        {**TWO, "threads_per_worker": 0},
        "threads_per_worker: expected an integer above 0, got 0",
    ),
    "on death": (
        (CREATE,),
        {**TWO, "on_worker_death": "ignore"},
        r"on_worker_death: expected one of \['raise', 'respawn'\], got 'ignore'",
    ),
    "respawns": ((CREATE,), {**TWO, "max_respawns": -1}, "max_respawns: expected an integer of at"),
    "step timeout": (
        (CREATE,),
        {**TWO, "step_timeout": 0},
        "step_timeout: expected a number of seconds above 0, or None, got 0",
    ),
    "start timeout": (
        (CREATE,),
        {**TWO, "start_timeout": -1.0},
        "start_timeout: expected a number of seconds above 0, or None, got -1.0",
    ),
    "batch": (
        (CREATE,),
        {**TWO, "frames_per_batch": 0},
        "frames_per_batch: expected an integer abo",
    ),
    "two budgets": ((CREATE,), {**TWO, "total_episodes": 3}, "total_frames .* or total_episodes"),
    "no policy at all": ((CREATE, 3), TWO, "policy: expected a TensorDictModule, a callable from"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_arguments_that_cannot_be_right(case: str, tmp_path: Path) -> None:
    args, kwargs, match = REFUSED[case]
    refused(ArgumentError, match, *args, storage=tmp_path / "s", **kwargs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("listed", [False, True])
def test_an_environment_that_was_made_here_cannot_be_stepped_there(listed: bool) -> None:
    for env in (OracleTorchEnv(2, LENGTHS), make_oracle_vec(2, LENGTHS)):
        create = [env, env] if listed else env
        match = f"got {type(env).__name__}. An environment that was made in this process cannot be"
        refused(ArgumentError, match, create, **({} if listed else TWO))
        env.close()


def test_an_argument_that_cannot_travel_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(_: Any = lock) -> Any:
        return CREATE()

    def locked_policy(td: TensorDictBase, _: Any = lock) -> TensorDictBase:
        return ByObservation()(td)

    what = "expected an object that cloudpickle can send to a worker, got TypeError: cannot pickle"
    kwargs = {**TWO, "storage": tmp_path / "s"}
    refused(ArgumentError, f"create_env_fn: {what}", locked, **kwargs)
    refused(ArgumentError, f"create_env_fn: {what}", [CREATE, locked], storage=tmp_path / "s")
    refused(ArgumentError, f"policy: {what}.*inside the factory", CREATE, locked_policy, **kwargs)
    refused(
        ArgumentError, f"env_kwargs: {what}", "CartPole-v1", env_kwargs={"render": lock}, **kwargs
    )
    assert not list(tmp_path.iterdir())


def test_closures_and_classes_of_a_function_travel() -> None:
    lengths = [[2, 3]]

    class Local(ByObservation):
        pass

    run = collect_all(start(lambda: make_oracle_vec(2, lengths), Local(), **BUDGET, **TWO))
    rows = joined(run.batches)
    assert len(rows) == 60
    first = rows[rows["collector", "lane"] < 2]
    check_rows(first, lengths, from_start=True)


# --- refused once the environments exist --------------------------------------------------------


def no_action(td: TensorDictBase) -> TensorDictBase:
    return td.set("choice", torch.zeros(td.batch_size))


EARLY: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "other columns": (
        ([factory(SAME, 0, 2), factory(SAME, 2, 2, kind="uint8")],),
        {},
        EnvironmentRefused,
        r"worker 1 .lanes 2 to 3.*: its columns differ from those of worker 0: next/observation "
        r"is uint8 \[4, 4, 3\] and not float32 \[3\]; observation is .*same environment in every",
    ),
    "another action": (
        ([factory(SAME, 0, 2), factory(SAME, 2, 2, action="multibinary")],),
        {},
        EnvironmentRefused,
        r"worker 1.*: action is int8 \[3\] and not int64 \[\]",
    ),
    "another autoreset mode": (
        ([factory(SAME, 0, 2), factory(NEXT, 2, 2)],),
        {},
        EnvironmentRefused,
        "environments of another kind, or in another autoreset mode. Make the same environment",
    ),
    "another way of driving": (
        ([factory("torch", 0, 2), factory(DISABLED, 2, 2)], ByObservation()),
        {},
        EnvironmentRefused,
        "its columns differ from those of worker 0",
    ),
    "part steps of reset slots": (
        (factories(NEXT, 2),),
        {"surplus": "never_step"},
        ArgumentError,
        'surplus="never_step" ',
    ),
    "part steps of one who cannot": (
        (factories("torch", 2),),
        {"surplus": "never_step"},
        ArgumentError,
        'surplus="never_step" needs an environment that can step some of its lanes',
    ),
    "a time limit without masks": (
        (factories("native", 2),),
        {"max_frames_per_traj": 3},
        EnvironmentRefused,
        "max_frames_per_traj resets lanes by mask, but FurtherVectorEnv ignores",
    ),
    "a policy without action": (
        (factories(SAME, 2), no_action),
        {},
        PolicyError,
        r"policy: expected the key action in the output, got \['choice'\]",
    ),
    "an unknown id": (
        ("NoSuchEnv-v0",),
        TWO,
        ArgumentError,
        "gymnasium cannot make 'NoSuchEnv-v0'",
    ),
    "lanes of a vector": (
        (factories(SAME, 2)[0],),
        {**TWO, "num_envs": 4},
        ArgumentError,
        "num_envs=2: expected an id or a factory of a single Gymnasium environment, got a factory",
    ),
    "an unknown info": (
        (factories(SAME, 2),),
        {"info_keys": ["luck"]},
        ArgumentError,
        "info key 'luck' is not in the infos of a reset",
    ),
}
FORMATS = ("other columns", "a policy without action")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "s") for case in EARLY),
        *((c, f"s{end}") for c in FORMATS for end in (".h5", ".zarr")),
    ],
)
def test_early_errors_leave_no_storage_behind(case: str, name: str, tmp_path: Path) -> None:
    args, kwargs, kind, match = EARLY[case]
    error = refused(kind, match, *args, storage=tmp_path / name, **kwargs)
    assert type(error) is kind
    assert not list(tmp_path.iterdir())


def test_an_error_of_our_own_says_which_worker_raised_it() -> None:
    makes = [factory(SAME, 0, 2), factory("single", 2, 1)]
    error = refused(
        ArgumentError, r"info_keys: \['tick'\] are not columns", makes, info_keys=["tick"]
    )
    (note,) = error.__notes__
    assert note.startswith("raised in worker 1")
    assert "Traceback" in note


def choosing(choices: int) -> SyncVectorEnv:
    """Return lanes with `choices` actions."""

    def make() -> OracleEnv:
        env = OracleEnv()
        env.action_space = Discrete(choices)
        return env

    return SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.DISABLED)


def test_action_spaces_that_differ_are_refused() -> None:
    """The columns are equal, but random actions of one may be invalid in the other."""
    makes = [partial(choosing, choices) for choices in (2, 3)]
    refused(EnvironmentRefused, "its action space differs from that of worker 0", makes)


@pytest.mark.parametrize(
    ("mode", "slabs"), [("sync", "a slab"), ("async", "2 slabs for each of 2")]
)
def test_too_little_shared_memory_is_told_with_the_numbers(
    mode: str, slabs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
    match = (
        rf"expected (\d+) MiB of shared memory for {slabs}.*slots of 4 lanes.*, got 1 MiB "
        r"available\. "
        "Make frames_per_batch smaller, or use fewer lanes or workers"
    )
    options = {"mode": mode, "frames_per_batch": 100_000, "total_frames": 200_000}
    makes = factories(SAME, 2, 4, kind="uint8")
    error = refused(ArgumentError, match, makes, storage=tmp_path / "s", **options)
    found = re.search(match, str(error))
    assert found
    assert 1 < int(found[1]) < 300
    assert not list(tmp_path.iterdir())


def test_more_workers_than_the_system_allows(tmp_path: Path) -> None:
    """Workers are spawned, because Python's fork server does not survive its client's limit."""
    here, (soft, hard) = psutil.Process(), resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    before = here.num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 12, hard))
    try:
        with pytest.raises(ArgumentError, match=r"^num_workers: 30 workers .*Too many open files"):
            MultiprocessCollector(
                factory(SAME, 0, 1), num_workers=30, storage=tmp_path / "data", **BUDGET
            )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()
    assert here.num_fds() == before
    assert not (tmp_path / "data").exists()


def test_memory_that_suffices_is_as_much_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte less than a collector needs is too little, and exactly that much is enough."""
    wanted: list[int] = []
    require = memory.require
    for module in ("tallyroll.collector.workers.local.pipes",):
        monkeypatch.setattr(
            f"{module}.require", lambda n, what: (wanted.append(n), require(n, what))
        )
    collect_all(worker_collector(SAME, 2, **BUDGET))
    monkeypatch.setattr(memory, "available_bytes", lambda: wanted[0])
    collect_all(worker_collector(SAME, 2, **BUDGET))
    monkeypatch.setattr(memory, "available_bytes", lambda: wanted[0] - 1)
    with pytest.raises(ArgumentError, match="of shared memory"):
        worker_collector(SAME, 2, **BUDGET)


# --- seeds, threads, draws ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", [SAME, NEXT, DISABLED])
def test_lanes_have_the_seeds_that_one_process_gives_them(source: str, tmp_path: Path) -> None:
    seeds = []
    for number, make in enumerate(
        (sync_collector, partial(worker_collector, workers=2), partial(worker_collector, workers=3))
    ):
        path = tmp_path / str(number)
        collect_all(make(source, **BUDGET, storage=path))
        with MemmapStorage(path, mode="read") as storage:
            seeds.append(storage.manifest["runs"][0]["lane_seeds"])
    assert seeds[0] == seeds[1] == seeds[2]
    assert len(set(seeds[0])) == LANES


def test_no_two_lanes_copy_each_other_over_workers_and_incarnations(tmp_path: Path) -> None:
    noise = []
    for resume in (False, True, True):
        options = {**BUDGET, "storage": tmp_path / "s", "resume": resume}
        run = collect_all(worker_collector(SAME, 3, oracle={"kind": "seeded"}, **options), 2)
        noise.append(joined(run.batches)["observation"][:, 3])
    assert len(torch.cat(noise).unique()) == 60


def counting(td: TensorDictBase) -> TensorDictBase:
    """Write the number of threads."""
    each = torch.ones(td.batch_size, dtype=torch.int64)
    td.set("threads", each * torch.get_num_threads())
    td.set("variable", each * int(os.environ.get("OMP_NUM_THREADS", -1)))
    return td.set("action", each)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3, None])
def test_a_worker_has_so_many_threads(threads: int | None) -> None:
    here, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    options = {"mp_start_method": "spawn"} if threads == 3 else {}
    makes = factories(SAME, 1 if threads == 3 else 2)
    run = collect_all(
        start(makes, counting, **{**BUDGET, **options, "threads_per_worker": threads})
    )
    rows = joined(run.batches)
    cores = len(os.sched_getaffinity(0))
    assert set(rows["threads"].tolist()) == {threads or max(1, cores // 2)}
    if threads == 3:
        assert set(rows["variable"].tolist()) == {3}
    assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == (here, variable)


@pytest.mark.slow
def test_stochastic_runs_are_equal_with_as_many_workers_only() -> None:
    """With two lanes per worker, workers with equal generators would draw equal actions."""
    options = {**BUDGET, "frames_per_batch": 50, "total_frames": 200, "lanes": 4}
    runs = [
        joined(
            collect_all(
                worker_collector(SAME, workers, drawing, **{**options, "seed": seed})
            ).batches
        )
        for workers, seed in ((2, 3), (2, 3), (4, 3), (2, 4))
    ]
    assert_same(runs[0], runs[1])
    for other in runs[2:]:
        assert not torch.equal(runs[0]["action"], other["action"])
    lane = runs[0]["collector", "lane"]
    own = [runs[0]["action"][lane == each] for each in range(4)]
    for one in range(4):
        for other in range(one):
            assert not torch.equal(own[one], own[other]), f"lanes {other} and {one} draw alike"


def test_random_actions_of_torchrl_environments_repeat_themselves_too() -> None:
    options = {**BUDGET, "frames_per_batch": 50, "total_frames": 200}
    runs = [
        joined(collect_all(worker_collector("torch", 2, None, **options)).batches) for _ in range(2)
    ]
    assert_same(runs[0], runs[1])
    lane = runs[0]["collector", "lane"]
    assert not torch.equal(runs[0]["action"][lane == 0], runs[0]["action"][lane == 3])


def test_keywords_of_an_id_travel_and_are_told(tmp_path: Path) -> None:
    kwargs = {**BUDGET, "num_envs": 3, "env_kwargs": {"g": 5.0, "max_episode_steps": 7}}
    one = SyncCollector("Pendulum-v1", **kwargs, storage=tmp_path / "one")
    many = start("Pendulum-v1", num_workers=2, **kwargs, storage=tmp_path / "many")
    for mine, theirs in zip(collect_all(one).batches, collect_all(many).batches, strict=True):
        assert_same(mine, theirs)
    made = []
    for name in ("one", "many"):
        with MemmapStorage(tmp_path / name, mode="read") as storage:
            made.append(storage.manifest["runs"][0]["environment"])
            assert storage.get(slice(None))["next", "truncated"].sum() == 60 // 21 * 3
    assert made[0] == made[1]
    assert made[0]["kwargs"] == {"g": 5.0, "max_episode_steps": 7}


def test_a_policy_whose_weights_have_no_shape_yet_is_refused(tmp_path: Path) -> None:
    lazy = Sequential(
        TensorDictModule(torch.nn.LazyLinear(2), in_keys=["observation"], out_keys=["logits"]),
        TensorDictModule(_argmax, in_keys=["logits"], out_keys=["action"]),
    )
    match = "weight: expected weights, got a parameter without a shape. Call the module once before"
    refused(ArgumentError, match, factories(SAME, 2), lazy, storage=tmp_path / "s")
    assert not list(tmp_path.iterdir())


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def test_avoided_reset_slots_by_the_option() -> None:
    vector = partial(make_oracle_vec, 2, LENGTHS, mode=AutoresetMode.NEXT_STEP, ends="mixed")
    options = {**BUDGET, "reset_slots": "avoid"}
    one = SyncCollector(lambda: GymnasiumVectorEnv(vector(), reset_slots="avoid"), **BUDGET)
    wanted = collect_all(one)
    run = collect_all(start([vector], **options))
    assert run.collector.ledger.reset_slots == 0
    for mine, theirs in zip(wanted.batches, run.batches, strict=True):
        assert_same(mine, theirs)
