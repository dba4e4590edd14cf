"""Option objects and the keywords that they replace."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from groups_kit import GroupsEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from reset_kit import Weather
from tensordict import TensorDictBase

from tallyroll.collector import (
    Actors,
    ArgumentError,
    Checks,
    Columns,
    Devices,
    Info,
    Layout,
    MissingExtra,
    MultiprocessCollector,
    Processes,
    RayCollector,
    Resets,
    Supervision,
    SyncCollector,
    UnknownArgument,
    uniform,
)
from tallyroll.collector.options import Options
from tallyroll.collector.options.objects import MoreOptions, keywords_of
from tallyroll.collector.torchrl import Collector as TorchRLCollector
from tallyroll.collector.torchrl import MultiSyncCollector
from tallyroll.collector.workers.worker_options import (
    ActorOptions,
    MoreOfActors,
    MoreOfWorkers,
    WorkerOptions,
)

from collect_kit import ByObservation, assert_same
from oracles import OracleTorchEnv, make_oracle_vec
from worker_kit import in_threads

SHARED = {
    "columns": Columns,
    "checks": Checks,
    "devices": Devices,
    "resets": Resets,
    "layout": Layout,
}
OF_WORKERS = {"processes": Processes, "supervision": Supervision}
OF_ACTORS = {"actors": Actors, "supervision": Supervision}
RUN: dict[str, Any] = {"frames_per_batch": 7, "total_frames": 20}
LENGTHS = (3, 5)


def weather() -> SyncVectorEnv:
    return SyncVectorEnv([Weather] * 2, autoreset_mode=AutoresetMode.DISABLED)


@pytest.fixture
def workers_in_threads() -> Iterator[None]:
    with in_threads():
        yield


def options_of(collector: Any = SyncCollector, **given: Any) -> Options:
    """Return the options of a call, without an environment."""
    bound = inspect.signature(collector).bind(None, **RUN | given)
    bound.apply_defaults()
    kinds = {SyncCollector: Options, RayCollector: ActorOptions}
    kind = kinds.get(collector, WorkerOptions)
    return kind.of(bound.arguments)


# --- each option is stated once -----------------------------------------------------------------


def described(collector: type) -> list[str]:
    """Return the arguments that a collector's docstring describes."""
    args = (inspect.getdoc(collector) or "").partition("Args:")[2].partition("Raises:")[0]
    return re.findall(r"^ {4}(\w+):", args, re.MULTILINE)


def test_collectors_state_options_alike() -> None:
    one = inspect.signature(SyncCollector).parameters
    shared = [name for name in one if name not in ("create_env_fn", "more")]
    assert described(SyncCollector) == [*one]
    for collector in (MultiprocessCollector, RayCollector):
        many = inspect.signature(collector).parameters
        assert [name for name in many if name in shared] == shared
        assert all(one[name] == many[name] for name in shared)
        assert set(described(collector)) == {*many} - {*shared} | {"policy"}
    options = [each.name for each in fields(Options) if each.init]
    assert [name for name in shared if name in options] == options
    assert len(one) <= 26
    assert len(many) <= 31


def test_type_checkers_are_told_of_each_field_as_a_keyword() -> None:
    def hints(kinds: dict[str, Any]) -> dict[str, Any]:
        of = [(keywords_of(kind), get_type_hints(kind)) for kind in kinds.values()]
        found = {key: types[each.name] for keys, types in of for key, each in keys.items()}
        return {key: hint for key, hint in found.items() if key != "layout"}

    assert get_type_hints(MoreOptions) == hints(SHARED)
    assert get_type_hints(MoreOfWorkers) == hints(SHARED | OF_WORKERS)
    assert get_type_hints(MoreOfActors) == hints(SHARED | OF_ACTORS)
    assert Options.keywords() == {*MoreOptions.__annotations__, "layout"}
    assert WorkerOptions.keywords() == {*MoreOfWorkers.__annotations__, "layout"}
    assert ActorOptions.keywords() == {*MoreOfActors.__annotations__, "layout"}


# --- objects and keywords -----------------------------------------------------------------------


def vector() -> SyncVectorEnv:
    """Return lanes with reset slots."""
    return make_oracle_vec(2, LENGTHS, mode=AutoresetMode.NEXT_STEP, ends="mixed")


def torch_env() -> OracleTorchEnv:
    """Return an environment that can be moved between devices."""
    return OracleTorchEnv(2, LENGTHS, ends="mixed")


def groups() -> GroupsEnv:
    """Return two groups of agents, some of which are not alive."""
    return GroupsEnv(2, LENGTHS)


TOLD = {"observation": "told"}
FILLED = [Info("absent", "int64", fill=3)]
GRAVITY = {"gravity": uniform(1, 2)}
OF_RESETS = {"env": weather, "with": {"seed": 0}}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "info_keys": (FILLED, Columns(info_keys=FILLED), {}),
    "rename": (TOLD, Columns(rename=TOLD), {}),
    "frame_skip": (3, Columns(frame_skip=3), {}),
    "reward_dtype": (torch.float64, Columns(reward_dtype=torch.float64), {}),
    "yield_large": (False, Columns(yield_large=False), {"storage": True}),
    "exclude": (("observation",), Columns(exclude=["observation"]), {}),
    "budget_unit": (
        "agent_transitions",
        Columns(budget_unit="agent_transitions"),
        {"env": groups, "with": {"seed": 0}},
    ),
    "validate": ("off", Checks(validate="off"), {}),
    "finals": ("lost", Checks(finals="lost"), {}),
    "reset_slots": ("avoid", Checks(reset_slots="avoid"), {}),
    "policy_device": ("cpu", Devices(policy="cpu"), {}),
    "env_device": ("cpu", Devices(env="cpu"), {"env": torch_env}),
    "storing_device": ("cpu", Devices(storing=torch.device("cpu")), {}),
    "policy_placement": ("central", Devices(placement="central"), {}),
    "split_trajs": (True, Layout(split_trajs=True), {}),
    "set_truncated": (
        True,
        Layout("torchrl", set_truncated=True),
        {"env": torch_env, "with": {"layout": "torchrl"}},
    ),
    "reset_sampler": (GRAVITY, Resets(sampler=GRAVITY), OF_RESETS),
    "reset_seeds": (True, Resets(seeds=True), OF_RESETS),
}
"""Maps a keyword to a value, the object with the same meaning, and the way to run it."""
ARGUMENT_OF = {kind: name for name, kind in (SHARED | OF_WORKERS).items()}


def test_every_keyword_has_its_case() -> None:
    assert {*CASES} == {*MoreOptions.__annotations__}


def run(env: Callable[[], Any], **options: Any) -> tuple[list[TensorDictBase], SyncCollector]:
    policy: Any = ByObservation()
    policy.in_keys = ["told" if "told" in repr(options) else "observation"]
    if env is groups:
        policy = None
    with SyncCollector(env, policy, **RUN, **options) as collector:
        return [batch.clone() for batch in collector], collector


@pytest.mark.parametrize("keyword", CASES)
@pytest.mark.filterwarnings("ignore")  # raised by these options
def test_an_object_does_what_its_keyword_does(keyword: str, tmp_path: Path) -> None:
    value, given, how = CASES[keyword]
    env, name, beside = how.get("env", vector), ARGUMENT_OF[type(given)], how.get("with", {})
    ran = []
    for number, options in enumerate(({**beside, keyword: value}, {**beside, name: given})):
        if "storage" in how:
            options["storage"] = tmp_path / str(number)
        ran.append(run(env, **options))
    (one, of_one), (other, of_other) = ran
    assert of_one._options == of_other._options != options_of(**beside)
    assert of_one.ledger.counts() == of_other.ledger.counts()
    for mine, theirs in zip(one, other, strict=True):
        assert_same(mine, theirs)


def test_objects_of_workers_do_what_their_keywords_do(workers_in_threads: None) -> None:
    keywords: dict[str, Any] = {
        "mp_start_method": "forkserver",
        "threads_per_worker": 1,
        "on_worker_death": "respawn",
        "max_respawns": 2,
        "step_timeout": 50,
        "start_timeout": 60.0,
    }
    assert {*keywords} == {*MoreOfWorkers.__annotations__} - {*MoreOptions.__annotations__}
    objects = {
        "processes": Processes(start_method="forkserver", threads_per_worker=1),
        "supervision": Supervision("respawn", 2, step_timeout=50, start_timeout=60),
    }
    plain = options_of(MultiprocessCollector)
    for given in (keywords, objects):
        assert options_of(MultiprocessCollector, **given) == replace(plain, **objects) != plain
    ran = []
    for given in (keywords, objects):
        with MultiprocessCollector([vector, vector], ByObservation(), **RUN, **given) as collector:
            ran.append([batch.clone() for batch in collector])
    for mine, theirs in zip(*ran, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("keyword", [name for name in CASES if name != "set_truncated"])
def test_keywords_go_beside_an_object_that_says_nothing_of_them(keyword: str) -> None:
    value, given, how = CASES[keyword]
    name, kind = ARGUMENT_OF[type(given)], type(given)
    storage = {"storage": "rows"} if "storage" in how else {}
    others = {
        Columns: {"frame_skip": 5} if keyword != "frame_skip" else {"info_keys": ["a"]},
        Checks: {"finals": "kept"} if keyword != "finals" else {"validate": "warn"},
        Devices: {"env": "cpu"} if keyword != "env_device" else {"policy": "cpu"},
        Resets: {"seeds": True} if keyword != "reset_seeds" else {"sampler": GRAVITY},
        Layout: {"name": "torchrl"},
    }
    mixed = options_of(**{keyword: value, name: kind(**others[kind]), **storage})
    both = {field: getattr(given, field) for field in given.said} | others[kind]
    assert mixed == options_of(**{name: kind(**both), **storage})


def test_a_layout_by_its_name_goes_with_keywords() -> None:
    named = options_of(layout="torchrl", set_truncated=True, split_trajs=True)
    assert named.layout == Layout("torchrl", split_trajs=True, set_truncated=True)
    assert options_of(layout=Layout("lanes")) == options_of(layout="lanes")


def test_collectors_with_torchrl_names_take_objects_too() -> None:
    made = []
    truncates = Layout("torchrl", set_truncated=True)
    for given in ({"layout": truncates}, {"set_truncated": True}):
        run = {"frames_per_batch": 4, "total_frames": 8, **given}
        with TorchRLCollector(torch_env, ByObservation(), **run) as collector:
            made.append(next(iter(collector)).clone())
            assert collector.set_truncated
    assert_same(*made)
    assert made[0]["next", "truncated"].any()


def test_threads_of_processes_stand_in_for_those_of_torchrl(workers_in_threads: None) -> None:
    processes = Processes(threads_per_worker=2)
    run = {"frames_per_batch": 4, "total_frames": 8, "processes": processes}
    with MultiSyncCollector([torch_env], ByObservation(), **run) as collector:
        assert collector._options.processes == processes
    with pytest.raises(ArgumentError, match=r"^threads_per_worker: expected only once, got both"):
        MultiSyncCollector([torch_env], ByObservation(), **run, num_sub_threads=1)


def test_objects_of_actors_do_what_their_keywords_do() -> None:
    keywords: dict[str, Any] = {
        "address": "auto",
        "actor_options": {"num_cpus": 2},
        "spares": 3,
        "heartbeat": 2,
    }
    supervised = {*get_type_hints(Supervision)} & {*MoreOfActors.__annotations__}
    assert {*keywords} == {*MoreOfActors.__annotations__} - {
        *MoreOptions.__annotations__,
        *supervised,
    }
    actors = Actors(address="auto", actor_options={"num_cpus": 2}, spares=3, heartbeat=2.0)
    plain = options_of(RayCollector)
    for given in (keywords, {"actors": actors}):
        assert options_of(RayCollector, **given) == replace(plain, actors=actors) != plain
    with pytest.raises(ArgumentError, match=r"^spares: expected only once, got both"):
        options_of(RayCollector, actors=actors, spares=3)
    with pytest.raises(UnknownArgument, match="mp_start_method"):
        options_of(RayCollector, mp_start_method="spawn")


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtra, match=r'^actors of RayCollector need the package ray, .*\[ray\]"'
    ):
        RayCollector("CartPole-v1", num_workers=2, **RUN)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", [*CASES, "max_respawns", "mp_start_method"])
def test_an_option_that_is_said_twice_is_refused(keyword: str) -> None:
    kinds = SHARED | OF_WORKERS
    name = next(name for name, kind in kinds.items() if keyword in keywords_of(kind))
    field = keywords_of(kinds[name])[keyword]
    if keyword == "set_truncated":
        given: Any = Layout("torchrl", set_truncated=False)
    else:
        # explicit, although equal to the default
        given = kinds[name](**{field.name: field.default})
    with pytest.raises(ArgumentError, match=f"^{keyword}: expected only once, got both {keyword}="):
        options_of(MultiprocessCollector, **{name: given, keyword: field.default})


BAD: list[tuple[Callable[[], Any], str]] = [
    (partial(Columns, info_keys="lives"), "^info_keys: expected a sequence of names"),
    (partial(Columns, info_keys=5), "^info_keys: expected a sequence of names"),
    (partial(Columns, rename="a"), "^rename: expected a mapping"),
    (partial(Columns, rename={"a": ""}), "^rename: expected a new name for 'a'"),
    (partial(Columns, frame_skip=0), "^frame_skip: expected an integer above 0, got 0"),
    (partial(Columns, yield_large="no"), "^yield_large: expected True or False, got 'no'"),
    (partial(Columns, exclude="img"), "^exclude: expected a sequence of names, got 'img'"),
    (partial(Columns, exclude=5), "^exclude: expected a sequence of names, got 5"),
    (partial(Columns, exclude=[5]), "^exclude: expected names, each a string or a tuple .*got 5"),
    (partial(Columns, exclude=["a", ("b", 1)]), r"^exclude: expected names, .*got \('b', 1\)"),
    (partial(Columns, exclude=[""]), "^exclude: expected names, each a .*got ''"),
    (partial(Columns, exclude=[()]), r"^exclude: expected names, each a .*got \(\)"),
    (partial(Columns, exclude=["a/b", ("a", "b")]), "^exclude: 'a/b' is named twice"),
    (partial(Columns, exclude=["next/img"]), "^exclude: .* without 'next', got 'next/img'"),
    (partial(Columns, exclude=[("next", "a", "b")]), "^exclude: .* without 'next', .*'a', 'b'"),
    (partial(Checks, validate="nose"), "^validate: expected one of"),
    (partial(Checks, finals=None), "^finals: expected one of"),
    (partial(Checks, reset_slots="skip"), "^reset_slots: expected one of"),
    (partial(Devices, policy="gpu"), "^policy_device: expected a torch device, got 'gpu'"),
    (partial(Devices, env=1.5), "^env_device: expected a torch device"),
    (partial(Devices, storing="cpu:x"), "^storing_device: expected a torch device"),
    (partial(Devices, placement="here"), "^policy_placement: expected one of .*'central'.*'here'"),
    (partial(Layout, "grid"), "^layout: expected one of .*'rows'.* got 'grid'"),
    (partial(Layout, split_trajs=None), "^split_trajs: expected True or False"),
    (
        partial(Layout, set_truncated=True),
        "^set_truncated: expected layout=.torchrl., .*got layout=.rows",
    ),
    (partial(Layout, "lanes", split_trajs=True), '^split_trajs=True selects layout="trajectories"'),
    (partial(Processes, start_method="fork"), '^mp_start_method: .*got "fork". A forked process'),
    (partial(Processes, threads_per_worker=0), "^threads_per_worker: expected an integer above"),
    (partial(options_of, devices=Devices(policy="cuda:99")), "^policy_device: .* this machine"),
    (partial(options_of, columns={"frame_skip": 4}), r"^columns: expected Columns\(.*got dict"),
    (partial(options_of, checks=Columns()), r"^checks: expected Checks\(...\), got Columns; its"),
    (partial(options_of, layout=None), "^layout: expected one of"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_a_bad_field_is_refused_where_it_is_said(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


UNKNOWN: list[tuple[Callable[[], Any], str]] = [
    (
        partial(SyncCollector, frameskip=4),
        "SyncCollector, got frameskip=; did you mean frame_skip?",
    ),
    (
        partial(SyncCollector, total_frame=4),
        "SyncCollector, got total_frame=; did you mean total_f",
    ),
    (
        partial(SyncCollector, max_respawns=4),
        "SyncCollector, got max_respawns=; its docstring lists",
    ),
    (partial(MultiprocessCollector, max_respawn=4), "max_respawn=; did you mean max_respawns?"),
    (partial(TorchRLCollector, policy_devise=4), "ours, got policy_devise=; did you mean policy_d"),
    (partial(Columns, frameskip=4), "of Columns, got frameskip=; did you mean frame_skip?"),
    (partial(Supervision, timeout=4), "of Supervision, got timeout=; did you mean"),
]


@pytest.mark.parametrize(("make", "message"), UNKNOWN)
def test_an_unknown_name_is_refused_with_the_nearest(make: Any, message: str) -> None:
    given = {} if "Collector" not in str(make.func) else {"create_env_fn": "CartPole-v1", **RUN}
    with pytest.raises(UnknownArgument, match=re.escape(message)) as caught:
        make(**given)
    assert isinstance(caught.value, (ArgumentError, TypeError))


# --- properties of option objects ---------------------------------------------------------------


@pytest.mark.parametrize("given", [given for _, given, _ in CASES.values()] + [Processes()])
def test_objects_are_frozen_and_travel(given: Any) -> None:
    back = pickle.loads(pickle.dumps(given))
    assert (back, back.said) == (given, given.said)
    assert replace(given) == given
    assert repr(given).startswith(f"{type(given).__name__}({fields(given)[0].name}=")
    with pytest.raises(FrozenInstanceError):
        setattr(given, fields(given)[0].name, None)


def test_an_object_serves_many_collectors_and_keeps_what_it_was_given() -> None:
    names, infos = {"observation": "seen"}, ["lives"]
    columns = Columns(rename=names, info_keys=infos)
    first = options_of(columns=columns, frame_skip="ticks")
    names["reward"] = "gain"
    infos.append("more")
    assert options_of(columns=columns, frame_skip="ticks") == first
    assert columns == Columns(rename={"observation": "seen"}, info_keys=("lives",))
    assert [str(info) for info in first.info_keys] == ["lives", "ticks"]


# --- help and attributes ------------------------------------------------------------------------

NEEDED = ["create_env_fn", "policy", "frames_per_batch", "total_frames", "num_envs", "seed"]


def test_help_begins_with_an_example_and_what_is_always_needed() -> None:
    text = pydoc.plain(pydoc.render_doc(SyncCollector))
    described = inspect.getdoc(SyncCollector) or ""
    lines = [line.strip(" |") for line in text.splitlines()]
    lines = lines[lines.index(described.partition("\n")[0]) :]  # below the signature
    assert 0 < lines.index("Examples:") < 10
    assert lines.index("Examples:") < lines.index("Args:") < lines.index("Other Parameters:") < 75
    args = described.partition("Args:")[2].partition("Other Parameters:")[0]
    always = re.findall(r"^ {4}(\w+):", args, re.MULTILINE)
    assert always == [*NEEDED, "storage", "device"]
    assert [*inspect.signature(SyncCollector).parameters][: len(always)] == always


ATTRIBUTES = ["env", "episodes", "frame_skip", "frames_per_batch", "lanes", "last_rows", "layout"]
ATTRIBUTES += ["ledger", "plan", "policy_version"]


@pytest.mark.parametrize("kind", [SyncCollector, MultiprocessCollector])
def test_attributes_are_documented_properties(kind: type, workers_in_threads: None) -> None:
    more = ["num_workers", "worker_pids"] if kind is MultiprocessCollector else []
    for name in (*ATTRIBUTES, *more):
        static = inspect.getattr_static(kind, name)
        assert isinstance(static, property), name
        assert static.__doc__, name
    given = {"num_workers": 1} if more else {}
    with kind("CartPole-v1", **RUN, **given) as collector:
        assert [name for name in vars(collector) if not name.startswith("_")] == []
        with pytest.raises(AttributeError):
            collector.lanes = 3
        assert (collector.lanes, collector.layout, collector.frame_skip) == (1, "rows", 1)
        if more:
            with pytest.raises(AttributeError, match="environments are in the workers"):
                _ = collector.env
        else:
            assert collector.env.batch_size == (1,)
