"""Every argument, attribute and method of TorchRL's collectors is honored, neutral or refused.

The signatures are those of the installed version. New arguments fail here until they are
classified.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torchrl
import torchrl.collectors
from torchrl.collectors import BaseCollector

import tallyroll.collector.torchrl as ours
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.torchrl.arguments import NEUTRAL, REFUSED, REFUSED_OF_MANY
from tallyroll.collector.ext.torchrl.names import REFUSED_NAMES

from collect_kit import ByObservation
from oracles import OracleTorchEnv
from worker_kit import in_threads

HERE = Path(__file__).parent

# Names of arguments, each with the test that shows its effect.
HONOURED = {
    "backend": "test_many_collectors_are_made_where_they_are_asked_for",
    "backend_options": "test_many_collectors_are_made_where_they_are_asked_for",
    "cat_results": "test_batches_of_workers_are_put_together_as_torchrl_does",
    "compact_obs": "test_compact_batches_have_observations_once",
    "compile_policy": "test_a_policy_is_compiled_and_acts_the_same",
    "create_env_fn": "test_batches_are_those_of_torchrl",
    "create_env_kwargs": "test_factories_get_their_keywords",
    "cudagraph_policy": "test_a_policy_is_compiled_and_acts_the_same",
    "device": "test_devices_are_those_of_our_collectors",
    "env_device": "test_devices_are_those_of_our_collectors",
    "exploration_type": "test_the_exploration_type_is_set",
    "extend_buffer": "test_steps_go_one_by_one_into_a_buffer",
    "frames_per_batch": "test_whole_floats_and_limits_that_are_none",
    "init_fn": "test_workers_call_init_fn_before_their_factory",
    "init_random_frames": "test_random_frames_are_counted_with_what_a_buffer_holds",
    "interruptor": "test_an_interruptor_ends_the_batch_and_not_the_run",
    "max_frames_per_traj": "test_whole_floats_and_limits_that_are_none",
    "num_collectors": "test_many_collectors_are_made_where_they_are_asked_for",
    "num_sub_threads": "test_threads_are_set",
    "num_threads": "test_threads_are_set",
    "num_workers": "test_many_collectors_are_made_where_they_are_asked_for",
    "policy": "test_batches_are_those_of_torchrl",
    "policy_device": "test_devices_are_those_of_our_collectors",
    "policy_factory": "test_a_policy_factory_makes_the_policy",
    "post_collect_hook": "test_hooks_are_called_around_each_batch",
    "postproc": "test_a_postproc_gets_what_is_yielded",
    "pre_collect_hook": "test_hooks_are_called_around_each_batch",
    "replay_buffer": "test_with_a_buffer_none_is_yielded_and_the_rows_are_in_it",
    "replay_write_mode": "test_whole_trajectories_go_to_a_buffer",
    "reset_at_each_iter": "test_lanes_are_reset_before_each_batch",
    "set_truncated": "test_last_frames_are_truncated_where_it_is_wished",
    "split_trajs": "test_trajectories_are_split",
    "storing_device": "test_devices_are_those_of_our_collectors",
    "sync": "test_many_collectors_are_made_where_they_are_asked_for",
    "total_frames": "test_whole_floats_and_limits_that_are_none",
    "track_policy_version": "test_versions_stand_where_torchrl_has_them",
    "traj_format": "test_whole_trajectories_are_those_of_torchrl",
    "trajs_per_batch": "test_whole_trajectories_are_those_of_torchrl",
    "trajs_per_write": "test_whole_trajectories_go_to_a_buffer",
    "update_at_each_batch": "test_weights_are_updated_at_each_batch",
    "weight_sync_schemes": "test_schemes_of_shared_memory_are_taken",
    "weight_updater": "test_a_weight_updater_says_which_weights",
    "worker_idx": "test_attributes_are_those_of_torchrl",
}
SINCE = {"replay_write_mode": (0, 15)}
"""Arguments that the oldest release lacks, with the first release that has them."""
# a nightly build has the year as its version
INSTALLED = tuple(int(part) for part in torchrl.__version__.split(".")[:2])

PAIRS = [
    (ours.Collector, torchrl.collectors.Collector, REFUSED),
    (ours.MultiCollector, torchrl.collectors.MultiCollector, REFUSED_OF_MANY),
    (ours.MultiSyncCollector, torchrl.collectors.MultiSyncCollector, REFUSED_OF_MANY),
    (ours.AsyncCollector, torchrl.collectors.AsyncCollector, REFUSED_OF_MANY),
]


def arguments(kind: type) -> set[str]:
    found = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {name for name, each in found.items() if each.kind is not each.VAR_KEYWORD} - {"self"}


def public_names(kind: type) -> set[str]:
    """Return the public names of the class, including those that its methods set on ``self``."""
    names = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("torchrl"):
            continue
        names |= {name for name in vars(base) if not name.startswith("_")}
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                if own and not node.attr.startswith("_"):
                    names.add(node.attr)
    return names


@pytest.mark.parametrize(
    ("mine", "theirs", "refused"), PAIRS, ids=lambda p: getattr(p, "__name__", "")
)
def test_every_argument_is_decided(mine: type, theirs: type, refused: dict[str, Any]) -> None:
    decided = {*HONOURED, *NEUTRAL, *refused}
    undecided = arguments(theirs) - decided
    assert not undecided, f"decide what becomes of {sorted(undecided)}, and test it"


def test_what_is_decided_is_there() -> None:
    known = set().union(*(arguments(theirs) for _, theirs, _ in PAIRS))
    later = {name for name, since in SINCE.items() if since > INSTALLED}
    gone = {*HONOURED, *REFUSED_OF_MANY, *NEUTRAL} - known - {"local_init_rb"} - later
    assert not gone, f"TorchRL has no longer {sorted(gone)}"
    assert not set(HONOURED) & set(NEUTRAL)
    assert not set(HONOURED) & set(REFUSED)


def test_what_is_honoured_has_a_test() -> None:
    text = "".join(path.read_text() for path in HERE.glob("test_torchrl_*.py"))
    missing = {test for test in HONOURED.values() if f"def {test}(" not in text}
    assert not missing


def test_every_name_of_torchrl_is_exported_with_its_older_ones() -> None:
    collectors = {
        name
        for name in torchrl.collectors.__all__
        if inspect.isclass(each := getattr(torchrl.collectors, name))
        and issubclass(each, BaseCollector)
    }
    assert collectors - set(ours.__all__) == {"AsyncBatchedCollector", "BaseCollector"}
    assert ours.SyncDataCollector is ours.Collector
    assert ours.MultiSyncDataCollector is ours.MultiSyncCollector
    assert ours.MultiAsyncDataCollector is ours.MultiaSyncDataCollector is ours.MultiAsyncCollector


def one(**given: Any) -> ours.Collector:
    env = OracleTorchEnv(None, (3,))
    return ours.Collector(env, ByObservation(), **{"frames_per_batch": 4, **given})


def test_every_name_of_a_collector_is_there_or_says_why_not() -> None:
    with one(total_frames=8) as collector:
        for name in sorted(public_names(torchrl.collectors.Collector)):
            if name in REFUSED_NAMES:
                with pytest.raises(AttributeError, match=name):
                    getattr(collector, name)
            else:
                assert hasattr(collector, name), name


def test_every_name_of_many_is_there_or_says_why_not(workers_in_threads: None) -> None:
    kinds = torchrl.collectors.MultiSyncCollector, torchrl.collectors.MultiAsyncCollector
    made = ours.MultiSyncCollector, ours.MultiAsyncCollector
    for theirs, mine in zip(kinds, made, strict=True):
        envs = [lambda: OracleTorchEnv(None, (3,))] * 2
        with mine(envs, ByObservation(), frames_per_batch=4, total_frames=8) as collector:
            for name in sorted(public_names(theirs)):
                assert name in REFUSED_NAMES or hasattr(collector, name), name
                assert name not in REFUSED_NAMES or not hasattr(collector, name), name


def test_methods_take_the_arguments_of_torchrl() -> None:
    for mine, theirs, _ in PAIRS:
        for name in dir(theirs):
            wanted, got = getattr(theirs, name), getattr(mine, name, None)
            if name.startswith("_") or not callable(wanted) or got is None:
                continue
            known = inspect.signature(got).parameters
            for each in inspect.signature(wanted).parameters.values():
                if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                    assert each.name in known, f"{theirs.__name__}.{name}({each.name}=)"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_values_raise_with_the_way_out(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}=.*: "):
        one(**{name: "another"})


def test_refused_values_of_many_raise_with_the_way_out(workers_in_threads: None) -> None:
    for name in sorted(REFUSED_OF_MANY):
        with pytest.raises(ArgumentError, match=f"^{name}=.*: "):
            ours.MultiSyncCollector(
                [lambda: OracleTorchEnv(None, (3,))], frames_per_batch=4, **{name: "another"}
            )


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_neutral_values_change_nothing(name: str, workers_in_threads: None) -> None:
    values: dict[str, Any] = {"preemptive_threshold": 0.5}
    other = values.get(name, NEUTRAL[name][0] is not True)
    want = next(iter(one(seed=0)))
    if name == "preemptive_threshold":
        envs = [lambda: OracleTorchEnv(None, (3,))]
        with ours.MultiSyncCollector(
            envs, ByObservation(), frames_per_batch=4, seed=0, preemptive_threshold=0.5
        ) as collector:
            assert (next(iter(collector))[0]["observation"] == want["observation"]).all()
        return
    with one(seed=0, **{name: other}) as collector:
        got = next(iter(collector))
        assert (got == want).all()
        assert getattr(collector, name, other) == other


def test_names_that_nobody_has_are_refused() -> None:
    with pytest.raises(TypeError, match="frames_per_bath"):
        one(frames_per_bath=3)
    with pytest.raises(TypeError, match="update_at_each_batch"):
        one(update_at_each_batch=True)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda c: c.update_policy_weights_(worker_ids=1), "worker_ids"),
        (lambda c: c.update_policy_weights_(model_id="critic"), "model_id"),
        (lambda c: c.update_policy_weights_(weights_dict={"critic": {}}), "weights_dict"),
        (lambda c: c.update_policy_weights_({0: {}, 1: {}}), "one set for all workers"),
        (lambda c: c.update_policy_weights_({}, weights={}), "in one argument"),
        (lambda c: c.reset(index=0), "reset"),
        (lambda c: c.load_state_dict({}, strict=False), "strict"),
        (lambda c: c.get_model("critic"), "model_id"),
        (lambda c: c.start(), "replay_buffer="),
    ],
)
def test_calls_that_cannot_be_meant_here_raise(call: Callable[[Any], Any], match: str) -> None:
    with one() as collector, pytest.raises(ArgumentError, match=match):
        call(collector)


def test_values_that_cannot_be_right_raise() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backend": "ray"}, "one machine"),
        ({"sync": True}, "num_collectors"),
        ({"create_env_kwargs": {"a": 1}}, "made already"),
        ({"frames_per_batch": 2.5}, "frames_per_batch"),
        ({"replay_buffer": []}, "ReplayBuffer"),
        ({"traj_format": "cat"}, "trajs_per_batch"),
        ({"trajs_per_batch": 2, "set_truncated": True}, "set_truncated"),
        ({"compile_policy": "yes"}, "compile_policy"),
        ({"weight_sync_schemes": {"policy": object()}}, "shared memory"),
        ({"weight_updater": 3}, "weight_updater"),
        ({"device": ["cpu", "meta"]}, "one device"),
        ({"policy_factory": ByObservation}, "one of them"),
    ]
    for given, match in wrong:
        with pytest.raises(ArgumentError, match=match):
            one(**given)


@pytest.fixture
def workers_in_threads() -> Iterator[None]:
    with in_threads():
        yield


def test_attributes_are_those_of_torchrl() -> None:
    given: dict[str, Any] = {
        "frames_per_batch": 20,
        "total_frames": 40,
        "init_random_frames": -1,
        "max_frames_per_traj": None,
        "worker_idx": 3,
    }
    found = []
    for kind in (torchrl.collectors.Collector, ours.Collector):
        own = {} if kind is ours.Collector else {"auto_register_policy_transforms": False}
        collector = kind(OracleTorchEnv(4, (3,)), ByObservation(), **given, **own)
        names = [
            *("total_frames", "requested_frames_per_batch", "frames_per_batch", "n_env"),
            *("init_random_frames", "max_frames_per_traj", "worker_idx", "exploration_type"),
            *("split_trajs", "set_truncated", "reset_at_each_iter", "compact_obs", "postproc"),
            *("replay_buffer", "extend_buffer", "interruptor", "trajs_per_batch", "traj_format"),
            *("trust_policy", "return_same_td", "no_cuda_sync", "reset_when_done", "verbose"),
            *("compiled_policy", "cudagraphed_policy", "closed", "storing_device", "device"),
            *("policy_device", "pre_collect_hook", "post_collect_hook", "local_init_rb"),
        ]
        found.append({name: getattr(collector, name) for name in names})
        found[-1]["length"] = len(collector)
        found[-1]["batch"] = collector.getattr_env("batch_size")
        collector.shutdown()
    assert found[0] == found[1]
    with one() as endless:
        assert endless.total_frames == float("inf")
        with pytest.raises(TypeError, match="no length"):
            len(endless)
