"""The plan of a run states each path and its reason, matches the run, and can be switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector, run_plan
from tallyroll.collector.batches.fast_collect import FastPath
from tallyroll.collector.native.kernel import compiled
from tallyroll.collector.run_plan import (
    Decision,
    PolicyTraits,
    RunPlan,
    StoringTraits,
    VectorTraits,
)
from tallyroll.storage import MemmapStorage, fast_paths

from collect_kit import assert_same
from fork_server import warm_fork_server
from random_runs import flat
from worker_kit import QUICK

LANES = 3
KERNEL = compiled() is not None
POLICY = PolicyTraits("TensorDictModule", True, False, False, (), [("action",)], [("action",)])
VECTOR = VectorTraits("SyncVectorEnv", True, False, True, False)
RUN = StoringTraits(
    postproc=False,
    replay_buffer=False,
    storage="MemmapStorage",
    has_engine=True,
    stores_once=False,
    waits_for_disk=False,
    elsewhere=(),
    by_lane="",
    arrivals=False,
    extension=True,
    few_float_rewards=True,
    surplus="",
    counts_agents=False,
    counts_ticks=False,
    follows_flags=False,
    resets_batches=False,
    computed=(),
    wide_bounds=False,
    slots_of_batch=1,
    yields_large=False,
    arranged="",
)
NO_COMMIT_IN_ONE = {"replay_buffer", "postproc", "elsewhere", "by_lane", "arrivals", "surplus"}
NO_COMMIT_IN_ONE |= {"counts_ticks", "follows_flags", "resets_batches"}
NO_COMMIT_IN_ONE |= {"counts_agents", "few_float_rewards"}
NO_COMMIT_IN_ONE |= {"wide_bounds", "computed", "waits_for_disk", "has_engine", "extension"}
NO_COMMIT_IN_ONE |= {"stores_once"}


# --- pure functions -------------------------------------------------------------------------------


def other(traits: Any, name: str) -> Any:
    """Return the traits with a different value of trait `name`."""
    value = getattr(traits, name)
    if isinstance(value, bool):
        return replace(traits, **{name: not value})
    if isinstance(value, str):
        return replace(traits, **{name: f"its {name} is another"})
    if isinstance(value, int):
        return replace(traits, **{name: 99})
    return replace(traits, **{name: [("odd",)]})


def in_one_call(run: StoringTraits) -> Decision:
    return run_plan.committing(run, run_plan.placing(run))


def laid_out(run: StoringTraits) -> Decision:
    return run_plan.batching(run, run_plan.placing(run), in_one_call(run))


@pytest.mark.parametrize(
    ("decide", "traits", "fast", "names"),
    [
        (
            partial(run_plan.acting, fills_slab=True, extra=()),
            POLICY,
            "network",
            {"is_module", "does_more", "elsewhere", "unseen", "writes", "actions", "central"},
        ),
        (
            run_plan.stepping_vector,
            VECTOR,
            "in turn",
            {"bare", "patched", "known", "many_rewards"},
        ),
        (run_plan.placing, RUN, "slab", {"postproc", "replay_buffer", "elsewhere"}),
        (in_one_call, RUN, "one call", NO_COMMIT_IN_ONE),
        (
            laid_out,
            RUN,
            "one call",
            NO_COMMIT_IN_ONE | {"yields_large", "slots_of_batch", "arranged"},
        ),
    ],
)
def test_each_trait_alone_is_in_the_way_and_is_said(
    decide: Callable[[Any], Decision],
    traits: Any,
    fast: str,
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast_paths, "_off", frozenset())
    assert decide(traits) == Decision(fast)
    said = set()
    for each in fields(traits):
        if each.name in ("kind", "storage"):
            continue
        decision = decide(other(traits, each.name))
        assert (decision.way != fast) == (each.name in names), each.name
        assert bool(decision.because) == (each.name in names)
        said.add(decision.because)
    # two decisions give the same reason for writes and actions
    assert len(said - {""}) >= len(names) - 1


def test_where_nothing_is_stored_there_is_no_faster_way() -> None:
    nowhere = replace(RUN, storage="")
    assert in_one_call(nowhere) == Decision("none")
    assert laid_out(nowhere) == Decision("slab", "there is no storage")
    assert in_one_call(replace(nowhere, replay_buffer=True)) == Decision("buffer")
    assert run_plan.acting(None, fills_slab=False, extra=()) == Decision("drawn")


def test_observations_of_two_slots_are_sent_once_where_that_pays() -> None:
    sent = partial(run_plan.sending, one_memory=False, arrivals=False, nbytes=64)
    assert sent() == Decision("once")
    assert sent(arrivals=True) == Decision("twice", "lanes come back in any order")
    assert sent(nbytes=63) == Decision("twice", "an observation is smaller than 64 bytes")
    with fast_paths.switched_off("once"):
        assert sent() == Decision("twice", "-once switches it off")
        assert sent(one_memory=True) == Decision("once")


# --- runs -----------------------------------------------------------------------------------------


def lane() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", max_episode_steps=7)


def vector(mode: str = "DISABLED", **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv(
        [lane] * LANES, autoreset_mode=AutoresetMode[mode], **{"copy": False, **kwargs}
    )


def leans(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 2] > 0).long()


class Changed(SyncVectorEnv):
    """Subclass that may step differently."""


class Hooked(TensorDictModule):
    """Subclass that may do more."""


def module(kind: type[TensorDictModule] = TensorDictModule) -> TensorDictModule:
    return kind(leans, in_keys=["observation"], out_keys=["action"])


CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "the fastest": ({}, {}),
    "random": ({"policy": None}, {"acts": "drawn"}),
    "a wrapper": (
        {"env": lambda: RecordEpisodeStatistics(vector())},
        {"steps": "through"},
    ),
    "a wrapper that may look at more": (
        {"env": lambda: VectorWrapper(vector())},
        {"steps": "within"},
    ),
    "a wrapper of another vector": (
        {"env": lambda: RecordEpisodeStatistics(Changed([lane] * LANES))},
        {"steps": "vector"},
    ),
    "copies": ({"env": partial(vector, copy=True)}, {}),
    "reset slots": (
        {"env": partial(vector, "NEXT_STEP")},
        {},
    ),
    "reset slots, no surplus": (
        {"env": partial(vector, "NEXT_STEP"), "surplus": "discard"},
        {"batches": "slab", "commits": "rows"},
    ),
    "episodes": (
        {"total_frames": None, "total_episodes": 90},
        {"counts": "by lane", "batches": "slab", "commits": "rows"},
    ),
    "reset within": ({"env": partial(vector, "SAME_STEP")}, {}),
    "a subclass": ({"policy": module(Hooked)}, {"acts": "module"}),
    "a TorchRL environment": (
        {"env": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), "want": 1},
        {"acts": "module", "steps": "environment", "writes": "tensors"},
    ),
    "postproc": (
        {"postproc": lambda td: td},
        {"rows": "gathered", "batches": "gathered", "commits": "rows", "frames": "none"},
    ),
    "opening": ({"init_random_frames": 5}, {}),
    "resets": ({"reset_at_each_iter": True}, {"batches": "slab", "commits": "rows"}),
    "lanes": ({"layout": "lanes"}, {"batches": "slab"}),
    "moved": ({"storing_device": "cpu"}, {"batches": "slab"}),
    "many slots": ({"frames_per_batch": 60}, {"batches": "gathered"}),
}
FASTEST = {
    "acts": "network",
    "steps": "in turn",
    "writes": "at once",
    "counts": "by ends",
    "rows": "slab",
    "batches": "one call",
    "commits": "one call",
    "extension": "yes",
    "sends": "none",
    "masks": "none",
    "frames": "whole",
}
if not KERNEL:
    FASTEST |= {"writes": "columns", "batches": "slab", "commits": "rows", "extension": "no"}


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_as_its_plan_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, expected = {"policy": module(), **CASES[name][0]}, CASES[name][1]
    env, policy = options.pop("env", vector), options.pop("policy")
    want = options.pop("want", LANES)
    stored: list[bool] = []
    original = FastPath.store
    monkeypatch.setattr(
        FastPath, "store", lambda self, *given: stored.append(True) or original(self, *given)
    )
    base: dict[str, Any] = {"frames_per_batch": want, "total_frames": -1}
    with SyncCollector(env, policy, storage=tmp_path / "rows", **(base | options)) as collector:
        plan = collector.plan
        ways_of = {each: decision["way"] for each, decision in plan.as_json().items()}
        assert ways_of == FASTEST | expected
        for _ in range(40):
            collector.collect(want)
        assert bool(stored) == (plan.commits.way == "one call")
        assert str(plan).count("\n") == len(fields(RunPlan)) - 1
        for each in fields(RunPlan):
            decision = getattr(plan, each.name)
            if not KERNEL and each.name in ("writes", "batches", "commits", "extension"):
                continue
            assert bool(decision.because) == (decision.way != FASTEST[each.name]) or (
                decision.way == "drawn" or each.name in ("masks", "frames")
            ), each.name


def test_what_changes_while_it_runs_is_read_anew(tmp_path: Path) -> None:
    env = vector()
    options: dict[str, Any] = {"frames_per_batch": LANES, "total_frames": -1}
    with SyncCollector(env, module(), storage=tmp_path / "rows", **options) as collector:
        assert collector.plan.steps.way == "in turn"
        env.envs = tuple(env.envs)  # type: ignore[assignment]
        collector.set_seed(3)
        collector.collect(LANES)  # after a reset
        assert collector.plan.steps == Decision("vector", "the SyncVectorEnv was changed")


@pytest.mark.parametrize("transport", ["process", "thread"])
def test_workers_say_how_they_step(transport: Any) -> None:
    options: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 12, "num_workers": 1}
    if transport == "process":
        warm_fork_server()
        options |= QUICK
    with (
        fast_paths.switched_off("network"),
        MultiprocessCollector(vector, module(), transport=transport, **options) as collector,
    ):
        plan = collector.plan
    assert plan.acts == Decision("module", "-network switches it off")
    ways_taken = plan.steps.way, plan.writes.way, plan.commits.way
    assert ways_taken == ("in turn", FASTEST["writes"], "none")


def test_a_buffer_says_so() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    options: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 12}
    with SyncCollector(vector, replay_buffer=buffer, **options) as collector:
        assert collector.plan.commits == Decision("buffer")
        assert collector.plan.rows.because == "replay_buffer= takes TensorDicts"


# --- switches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", fast_paths.FAST_PATHS)
def test_each_way_is_switched_off_alone_and_rows_are_the_same(way: str, tmp_path: Path) -> None:
    def run(name: str) -> tuple[RunPlan, Any]:
        options: dict[str, Any] = {"frames_per_batch": LANES, "total_frames": 120, "seed": 5}
        with MemmapStorage(tmp_path / name) as storage:
            with SyncCollector(vector, module(), storage=storage, **options) as collector:
                plan, batches = collector.plan, iter(collector)
                yielded = [next(batches).clone() for _ in range(3)]
                for want in [LANES, LANES, LANES, 1, 7] * 9:
                    collector.collect(want)
            return plan, (flat(storage.get(slice(None)).clone()), torch.cat(yielded))

    plan, wanted = run("all")
    with fast_paths.switched_off(way):
        without, found = run("without")
    for one, another in zip(wanted, found, strict=True):
        assert_same(one, another)
    changed = {n for n, each in without.as_json().items() if each != plan.as_json()[n]}
    said = {
        "kernel": {"writes", "batches", "commits", "extension"} if KERNEL else set(),
        "network": {"acts"},
        "sequential": {"steps"},
        "wrappers": set(),
        "step-write": {"writes"},
        "fast-collect": {"batches", "commits"},  # or the reasons for the slower path
        "once": set(),
        "address": set(),
    }
    assert changed - {"commits"} == said[way] - {"commits"}


@pytest.mark.parametrize("setting", ["kernel", "-fast", "-kernel -once", "--kernel"])
def test_settings_that_are_none_are_refused(setting: str) -> None:
    with pytest.raises(
        ValueError, match="TALLYROLL_PLAN: expected the fast paths to switch off, one or more of -k"
    ):
        fast_paths.parsed(setting)
    assert fast_paths.parsed(" -kernel , -once,") == {"kernel", "once"}
    with pytest.raises(ValueError, match="got '-x'"), fast_paths.switched_off("x"):
        pass
    assert "x" not in fast_paths.off()


def test_the_environment_sets_it() -> None:
    code = "from tallyroll.storage import fast_paths; print(*sorted(fast_paths.off()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TALLYROLL_PLAN": "-kernel,-sequential"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "kernel sequential\n"


def test_columns_that_numpy_cannot_hold_are_named(tmp_path: Path) -> None:
    class Half(GymEnv):
        pass

    from torchrl.envs import DTypeCastTransform, TransformedEnv

    env = TransformedEnv(
        GymEnv("CartPole-v1", categorical_action_encoding=True),
        DTypeCastTransform(torch.float32, torch.bfloat16, in_keys=["observation"]),
    )
    with SyncCollector(env, None, frames_per_batch=2, total_frames=4) as collector:
        rows = collector.plan.rows
    assert rows.way == "gathered"
    assert "NumPy has no view of observation" in rows.because
