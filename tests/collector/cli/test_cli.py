"""``tallyroll collect`` and ``tallyroll inspect``, in this process and in others."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import foreign_traceback, main
from tallyroll.collector.cli.collect import Signals
from tallyroll.collector.cli.output import CommandError, shortened
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.collector.workers.local.nonblocking_stdio import unblocked
from tallyroll.storage import MemmapStorage, fast_paths, open_storage
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.files.manifest import exported

from oracles import check_rows
from warm_cli import LENGTHS, Command, WarmServer

ORACLE = "warm_cli:Oracle-v0"
AT_ONCE = 10.0
"""Seconds within which a signalled command must end. The value allows for busy machines."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def tallyroll(*words: object) -> int:
    return main([str(word) for word in words])


def cartpole(out: str = "data", frames: int = 101, *more: object) -> tuple[object, ...]:
    return ("collect", "CartPole-v1", "--frames", frames, "--out", out, *more)


def rows_in(path: Path | str) -> int:
    with open_storage(path) as storage:
        return storage.head


def files(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a folder, and None for everything else."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


# --- collect --------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 101, 2053])
def test_collect_gives_exactly_n(
    here: Path, capsys: pytest.CaptureFixture[str], frames: int
) -> None:
    assert tallyroll(*cartpole(frames=frames), "--num-envs", 3, "--seed", 0) == 0
    said = capsys.readouterr()
    assert rows_in("data") == frames
    assert f"\n{frames:,} frames of CartPole-v1, " in said.out
    assert f"stored  {frames:>15,}"[-12:].strip() in said.out
    assert "tallyroll inspect data" in said.out
    append = f"tallyroll collect CartPole-v1 --frames {frames} --num-envs 3 --out data --append"
    assert append in said.out
    assert f"tallyroll: {frames:,} of {frames:,} frames (100 %), " in said.err
    assert "\x1b" not in said.out + said.err


def test_the_same_seed_gives_the_same_data(here: Path) -> None:
    for out, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert tallyroll(*cartpole(out), "--seed", seed, "--num-envs", 2, "--quiet") == 0
    found = [open_storage(out) for out in "abc"]
    first, same, other = (np.array(each.column("observation")) for each in found)
    assert (first == same).all()
    assert not (first == other).all()
    for each in found:
        each.close()


def test_quiet_says_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll(*cartpole(), "--quiet") == 0
    said = capsys.readouterr()
    assert said.out + said.err == ""


def test_the_plan_is_said_before_the_run_begins(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fast_paths.switched_off("fast-collect"):
        assert tallyroll(*cartpole(), "--plan") == 0
    said = capsys.readouterr().err.splitlines()
    at = said.index("tallyroll: the plan of the run:")
    assert said[at + 1 : at + 3] == ["acts       drawn", "steps      in turn"]
    assert "commits    rows, because -fast-collect switches it off" in said[at:]
    assert tallyroll(*cartpole("more"), "--plan", "--quiet") == 0
    assert "plan" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_setting_that_names_no_way_is_one_line(here: Path) -> None:
    words = [sys.executable, "-m", "tallyroll.collector.cli", *map(str, cartpole())]
    environment = {**os.environ, "TALLYROLL_PLAN": "-warp"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "TALLYROLL_PLAN: expected the fast paths to switch off, one or more of" in done.stderr


def test_episodes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("collect", "CartPole-v1", "--episodes", 7, "--num-envs", 3, "--out", "data")
    assert tallyroll(*words) == 0
    assert "7 of 7 episodes (100 %)" in capsys.readouterr().err
    assert tallyroll("inspect", "data", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trajectories"] | {"terminated": 7} == {
        "total": 7, "terminated": 7, "truncated": 0, "cut": 0, "open": 0, "begun_earlier": 0,
    }  # fmt: skip
    assert tallyroll("collect", "--resume", "--out", "data", "--quiet") == 0
    assert rows_in("data") == found["rows"]


def test_options_reach_the_collector(here: Path) -> None:
    kwargs = json.dumps({"lanes": 2, "kind": "dict"})
    words = ("collect", ORACLE, "--frames", "1e2", "--out", "data", "--num-envs", 2)
    more = ("--env-kwargs", kwargs, "--info-keys", "lives,tick", "--frame-skip", "tick")
    last = ("--max-frames-per-traj", 4, "--frames-per-batch", 9, "--validate", "warn", "--quiet")
    assert tallyroll(*words, *more, *last) == 0
    with open_storage("data") as storage:
        assert storage.head == 100
        assert ("lives",) in storage.schema
        assert storage.column(("collector", "step")).max() == 3
        (run,) = storage.manifest["runs"]
    assert run["call"]["frames_per_batch"] == 9
    assert run["command"] == {
        "env": ORACLE, "frames": 100, "num_envs": 2, "frames_per_batch": 9,
        "env_kwargs": {"lanes": 2, "kind": "dict"}, "max_frames_per_traj": 4, "validate": "warn",
        "frame_skip": "tick", "info_keys": ["lives", "tick"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lanes", "batch"), [(1, 1024), (3, 1023), (64, 4096), (100, 6400), (1000, 8000), (9999, 9999)]
)
def test_the_default_batch_is_a_multiple_of_the_lanes(lanes: int, batch: int) -> None:
    from tallyroll.collector.cli.collect import default_batch
    from tallyroll.collector.cli.plan import Plan

    assert default_batch(Plan(num_envs=lanes)) == batch
    assert default_batch(Plan(num_envs=lanes), ring=100_000) == batch
    assert default_batch(Plan(num_envs=lanes), ring=lanes + 1) == (lanes if lanes > 1 else 2)
    assert default_batch(Plan(num_envs=5), ring=3) == 3


# --- append and resume ----------------------------------------------------------------------------


def test_append_adds_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll(*cartpole(), "--seed", 1, "--num-envs", 2) == 0
    assert tallyroll(*cartpole(frames=57), "--seed", 2, "--append", "--num-envs", 4) == 0
    assert "warning" not in capsys.readouterr().err
    assert rows_in("data") == 158
    assert tallyroll("inspect", "data", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(r["first_row"], r["rows"], r["seed"], r["lanes"]) for r in runs] == [
        (0, 101, 1, 2),
        (101, 57, 2, 4),
    ]


def test_append_with_a_seed_that_was_used_warns(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tallyroll(*cartpole(), "--seed", 1) == 0
    assert tallyroll(*cartpole(), "--seed", 1, "--append") == 0
    assert "an earlier run in data also has the seed 1, so this run may" in capsys.readouterr().err


def test_resume_of_a_complete_run_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll(*cartpole(), "--seed", 1) == 0
    before = files(here)
    capsys.readouterr()
    for words in (("CartPole-v1", "--frames", 101, "--seed", 1), ()):
        assert tallyroll("collect", *words, "--resume", "--out", "data") == 0
        said = capsys.readouterr()
        assert said.err == "tallyroll: data is complete already: it has all 101 frames\n"
    now = files(here)
    now["data/tallyroll.lock"] = before["data/tallyroll.lock"]
    assert now == before


def test_resume_with_more_frames_goes_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll(*cartpole(), "--seed", 1, "--num-envs", 2) == 0
    assert tallyroll("collect", "--resume", "--frames", 250, "--out", "data") == 0
    said = capsys.readouterr().out
    assert "resumed once" in said
    again = "tallyroll collect CartPole-v1 --frames 250 --num-envs 2 --out data --append"
    assert said.endswith(f"more of the same: {again}\n")
    assert rows_in("data") == 250
    with open_storage("data") as storage:
        first, second = (run["lane_seeds"] for run in storage.manifest["runs"])
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)


@pytest.mark.parametrize("what", ["nothing", "an empty directory", "an interrupted creation"])
@pytest.mark.parametrize("how", ["--resume", "--resume=auto"])
def test_resume_of_nothing_starts_anew(
    here: Path, capsys: pytest.CaptureFixture[str], what: str, how: str
) -> None:
    if what != "nothing":
        Path("data").mkdir()
    if what == "an interrupted creation":
        for name in ("tallyroll.lock", "tallyroll.header", "action.memmap"):
            (here / "data" / name).touch()
    assert tallyroll(*cartpole(), how) == 0
    assert "data held no run to resume: starting from the beginning" in capsys.readouterr().err
    assert rows_in("data") == 101


def test_resume_goes_on_after_a_run_of_a_script(here: Path) -> None:
    with SyncCollector(
        "CartPole-v1", num_envs=2, frames_per_batch=10, total_frames=100, seed=3, storage="data"
    ) as collector:
        next(iter(collector))
    assert tallyroll("collect", "--resume", "--out", "data", "--quiet") == 0
    assert rows_in("data") == 100


def test_an_option_that_a_resumed_run_lacks_is_no_usage_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest records whether the run has workers."""
    assert tallyroll(*cartpole()) == 0
    capsys.readouterr()
    assert tallyroll("collect", "--resume", "--out", "data", "--frames", 200, "--mode", "sync") == 1
    assert capsys.readouterr().err == ("tallyroll: error: --mode needs workers. Give --workers.\n")
    assert rows_in("data") == 101


# --- bad input ------------------------------------------------------------------------------------

USAGE = {
    "--frames 0": "argument --frames: expected a whole number above 0, got '0'",
    "--frames -5": "argument --frames: expected a whole number above 0, got '-5'",
    "--frames 1.5": "argument --frames: expected a whole number below 2**63, got '1.5'",
    "--frames many": "argument --frames: expected a whole number below 2**63, got 'many'",
    "--frames nan": "argument --frames: expected a whole number below 2**63, got 'nan'",
    "--frames 5 --out ''": "argument --out: expected a path, got ''",
    "--episodes 0": "argument --episodes: expected a whole number above 0, got '0'",
    "--episodes 1 --frames 1": "not allowed with argument",
    "": "one of the arguments --frames --episodes is required",
    "--frames 5 --append --resume": "not allowed with argument",
    "--frames 5 --seed -1": "argument --seed: expected a whole number of at least 0, got '-1'",
    "--frames 5 --num-envs 0": "argument --num-envs: expected a whole number above 0, got '0'",
    "--frames 5 --env-kwargs x": "argument --env-kwargs: expected JSON, got 'x'",
    "--frames 5 --env-kwargs [1]": "argument --env-kwargs: expected a JSON object like",
    "--frames 5 --info-keys a,,b": "argument --info-keys: expected names with commas between",
    "--frames 5 --validate maybe": "--validate: expected noise, raise, warn or off, got 'maybe'",
    "--frames 5 --frame-skip 0": "argument --frame-skip: expected a whole number above 0, got '0'",
    "--frames 5 --rename a=b --rename a=c": "--rename: a has two new names. Give one",
    "--frames 5 --workers -1": "argument --workers: expected a whole number of at least 0",
    "--frames 5 --mode both": "argument --mode: expected sync or async, got 'both'",
    "--frames 5 --step-timeout 0": "argument --step-timeout: expected a number of seconds above 0",
    "--frames 5 --step-timeout nan": "argument --step-timeout: expected a number of seconds",
    "--frames 5 --num-envs 2 --workers 3": "--workers: expected at most the number of lanes, "
    "2, got 3. Give fewer workers, or a larger --num-envs.",
    "--frames 5 --workers 1 --transport fiber": "--transport: expected process, thread or ray, got "
    "'fiber'",
    "--frames 5 --transport thread": "--transport needs workers. Give --workers.",
    "--frames 5 --workers 1 --transport thread --respawns 1 --step-timeout 2": (
        "--transport thread: a thread that hangs cannot be ended and replaced. Leave out "
    ),
    "--frames 5 --mode async": "--mode needs workers. Give --workers.",
    "--frames 5 --workers 0 --respawns 2": "--respawns needs workers. Give",
    "--frames 5 --step-timeout 0.5": "--step-timeout needs workers. Give",
}


@pytest.mark.parametrize("words", USAGE)
def test_usage_errors(here: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    with pytest.raises(SystemExit) as end:
        tallyroll("collect", "CartPole-v1", "--out", "data", *shlex.split(words))
    assert end.value.code == 2
    assert USAGE[words] in capsys.readouterr().err
    assert files(here) == {}


def test_a_missing_part_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ("collect --frames 5 --out x", "the following arguments are required: ENV"),
        ("collect CartPole-v1 --frames 5", "the following arguments are required: --out"),
        ("", "the following arguments are required: COMMAND"),
        ("inspect", "the following arguments are required: PATH"),
        ("verify", "the following arguments are required: PATH"),
    ):
        with pytest.raises(SystemExit) as end:
            tallyroll(*words.split())
        assert end.value.code == 2
        assert message in capsys.readouterr().err


ERRORS = {
    "Nope-v0 --frames 5": "gymnasium cannot make 'Nope-v0': Environment `Nope` doesn't exist.",
    "no_module:Nope-v0 --frames 5": "no_module:Nope-v0: there is neither a module nor an "
    "environment system called no_module. `tallyroll envs` lists the systems",
    "CartPole-v1 --frames 5 --env-kwargs '{\"nope\": 1}'": "gymnasium cannot make 'CartPole-v1' "
    "with {'nope': 1}: CartPoleEnv.__init__() got an unexpected keyword argument 'nope'",
    "CartPole-v1 --frames 5 --info-keys nope": "info key 'nope' is not in the infos of a reset",
    "CartPole-v1 --frames 5 --policy agent": "--policy: expected module:attr or file.py:attr, got "
    "'agent'",
    "CartPole-v1 --frames 5 --policy no.py:act": "--policy no.py:act: expected a Python file, but ",
    "os:b:c --frames 5": "gymnasium cannot make 'os:b:c'",
    "CartPole-v1 --frames 5 --num-envs 1e18": "num_envs: expected at most 1,048,576, got 1,000,000",
    "CartPole-v1 --frames 5 --workers 65_537": "num_workers: expected at most 65,536, got 65,537",
    "CartPole-v1 --frames 5 --env-kwargs '{\"max_episode_steps\":0}'": "gymnasium cannot make "
    "'CartPole-v1' with {'max_episode_steps': 0}: ",
    f"CartPole-v1 --frames 5 --env-kwargs '{{\"a\":{100 * '['}{100 * ']'}}}'": "env_kwargs: "
    "expected values that are nested at most 64 deep",
    "CartPole-v1 --frames 5 --info-keys x:float32[99999999999999]": "there is not enough memory",
    "CartPole-v1 --frames 5 --policy no_agent:act": "--policy no_agent:act: importing no_agent "
    "failed: ModuleNotFoundError: No module named 'no_agent' (--traceback shows where)",
    "CartPole-v1 --frames 5 --policy agent:nope": "--policy agent:nope: module 'agent' has no "
    "attribute 'nope'",
    "CartPole-v1 --frames 5 --policy agent:number": "--policy agent:number: expected a policy (a "
    "callable from TensorDict to TensorDict), a class or a function that makes one, got int",
    "CartPole-v1 --frames 5 --policy agent:broken": "--policy agent:broken: calling broken "
    "failed: ZeroDivisionError: division by zero (--traceback shows where)",
    "CartPole-v1 --frames 5 --policy agent:idle": "policy: expected the key action in the "
    "output, got no new key; set out_keys",
    "CartPole-v1 --frames 5 --policy agent:network": "policy: Bilinear is a plain nn.Module whose "
    "arguments are ['input1', 'input2'], but the observations are ['observation']. Name the "
    "arguments after observations, or wrap the module in tensordict.nn.TensorDictModule",
    "CartPole-v1 --frames 5 --append": "--append: data does not exist. Leave --append out to "
    "create it.",
    "--resume --frames 5": "data has no earlier run to take ENV from. Give ENV",
    "CartPole-v1 --resume": "data has no earlier run to take --frames or --episodes from. Give "
    "--frames or --episodes.",
}
AGENT = """
import torch
from tensordict.nn import TensorDictModule
number = 7
network = torch.nn.Bilinear(4, 4, 2)
def act(td):
    return td.set("action", (td["observation"][..., 2] > 0).long())
def idle(td):
    return td
def make():
    return act
def broken():
    return 1 / 0
class Greedy(TensorDictModule):
    def __init__(self):
        net = torch.nn.Linear(4, 2)
        choose = lambda observation: net(observation).argmax(-1)
        super().__init__(choose, in_keys=["observation"], out_keys=["action"])
class Box:
    best = Greedy()
"""


@pytest.mark.parametrize("words", ERRORS)
def test_errors_are_one_line_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    (here / "agent.py").write_text(AGENT)
    sys.modules.pop("agent", None)
    before = files(here)
    assert tallyroll("collect", *shlex.split(words), "--out", "data") == 1
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith(f"tallyroll: error: {ERRORS[words]}")
    assert said.out == ""
    assert files(here) == before


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("storage", "data holds a storage already. Use --append to add a new run after its "
         "rows, --resume to continue its last run, or give another --out."),
        ("file", "data should be a directory, but "),
        ("below a file", "file is a file. Give another path."),
        ("foreign", "data is not empty: it holds notes.txt."),
        ("another format", "data holds a storage already"),
        ("locked", "tallyroll.lock is locked by this process itself: a storage has "),
    ],
)  # fmt: skip
def test_an_out_that_will_not_do(
    here: Path, capsys: pytest.CaptureFixture[str], what: str, message: str
) -> None:
    out, more = "data", ()
    held: list[MemmapStorage] = []
    if what in ("storage", "locked"):
        assert tallyroll(*cartpole(), "--quiet") == 0
    if what == "locked":
        held, more = [MemmapStorage("data", mode="append")], ("--append",)
    elif what == "file":
        Path("data").touch()
    elif what == "below a file":
        Path("file").touch()
        out = "file/data"
    elif what in ("foreign", "another format"):
        Path("data").mkdir()
        name = "notes.txt" if what == "foreign" else "manifest.json"
        (here / "data" / name).write_text('{"format": "other"}')
    before = files(here)
    assert tallyroll(*cartpole(out), *more) == 1
    assert files(here) == before
    for each in held:
        each.close()
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("tallyroll: error: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("Pendulum-v1 --frames 500", "the run to be continued was made by another environment: id "
         "was 'CartPole-v1', is 'Pendulum-v1'. Append a new run instead."),
        ("--seed 9 --frames 500", "the run to be continued has the seed 1, got 9. Leave seed out."),
        ("--frames 500 --num-envs 3", "--resume: the run has 1 lane, but --num-envs 3 was given. "
         "Leave --num-envs out, or use --append for a new run."),
        ("--frames 50", "--resume: the run in data already has 101 frames, more than the 50 asked "
         "for. Give a larger --frames, or another --out."),
        ("--frames 500 --policy agent:act", "--resume: the run was made with random actions, "
         "but --policy was given. Leave --policy out, or use --append for a new run."),
    ],
)  # fmt: skip
def test_a_resume_that_does_not_fit(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert tallyroll(*cartpole(), "--quiet", "--seed", 1) == 0
    before = files(here)
    assert tallyroll("collect", *words.split(), "--resume", "--out", "data") == 1
    assert capsys.readouterr().err == f"tallyroll: error: {message}\n"
    now = files(here)
    now["data/tallyroll.lock"] = before["data/tallyroll.lock"]
    assert now == before


def test_append_of_another_environment_names_every_difference(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tallyroll(*cartpole(), "--quiet") == 0
    words = ("collect", "Pendulum-v1", "--frames", 5, "--out", "data", "--append")
    assert tallyroll(*words) == 1
    said = capsys.readouterr().err
    assert "data has other columns than the data: observation has shape [3] per row" in said
    assert "action has dtype float32, expected int64" in said
    assert rows_in("data") == 101


def test_resume_of_a_policy_that_the_manifest_cannot_name(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(td: TensorDict) -> TensorDict:
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

    with SyncCollector(
        "CartPole-v1", act, frames_per_batch=10, total_frames=100, storage="data"
    ) as collector:
        next(iter(collector))
    assert tallyroll("collect", "--resume", "--out", "data") == 1
    assert "that its manifest cannot name. Give the policy with --policy" in capsys.readouterr().err


def test_a_traceback_is_shown_on_request(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tallyroll(*cartpole(), "--policy", "no_agent:x", "--traceback") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setenv("TALLYROLL_TRACEBACK", "1")
    assert tallyroll(*cartpole(), "--policy", "no_agent:x") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


MISTYPED = {
    "collect CartPole-v1 --fames 3 --ot x": "collect: error: unrecognized option --fames; did you "
    "mean --frames?",
    "collect CartPole-v1 --frames 3 --zzz=4 --out x": "collect: error: unrecognized option --zzz",
    "verify --jsn x": "verify: error: unrecognized option --jsn; did you mean --json?",
    "collect CartPole-v1 --out x --frames 1e999999999": "expected a whole number below 2**63",
    "collect CartPole-v1 --out x --frames 1e-999999999": "expected a whole number below 2**63",
    "collect CartPole-v1 --out x --frames " + 9000 * "9": "expected a whole number below 2**63",
    "collect CartPole-v1 --out x --frames 3 --env-kwargs " + 99999 * "[": "fewer nested levels",
}


@pytest.mark.parametrize("words", MISTYPED, ids=range(len(MISTYPED)))
def test_what_is_mistyped_shows_the_usage_of_its_command(
    here: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    with pytest.raises(SystemExit) as end:
        tallyroll(*words.split())
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: tallyroll {words.split()[0]} ")
    assert MISTYPED[words] in said.splitlines()[-1]
    assert len(said.splitlines()[-1]) < 2100


def test_an_error_is_no_longer_than_a_screen(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tallyroll("collect", 9000 * "x" + "-v0", "--frames", 5, "--out", "data") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("tallyroll: error: gymnasium cannot make 'xxx")
    assert len(said) < 2100


def test_a_time_beyond_what_clocks_show(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress("episodes", quiet=False) as progress:
        for done in (1, 2, 3):
            progress(done, 2**63 - 1, last=True)
            time.sleep(0.01)
    assert "-:--:-- left" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attr", ["act", "Actor"])
def test_a_policy_of_a_file(server: WarmServer, tmp_path: Path, attr: str, workers: int) -> None:
    """The policy may import its neighbors, and its name does not shadow a module of the library."""
    (tmp_path / "my code").mkdir()
    (tmp_path / "my code" / "beside.py").write_text("def zeros(td): return td.long() * 0\n")
    (tmp_path / "my code" / "wave.py").write_text("raise RuntimeError('not the library')\n")
    (tmp_path / "my code" / "random.py").write_text(
        "import wave, beside\n"
        "def act(td):\n"
        "    return td.set('action', beside.zeros(td['observation'][..., 0]))\n"
        "class Actor:\n"
        "    def __call__(self, td): return act(td)\n"
    )
    words = (*cartpole(), "--num-envs", 2, "--workers", workers)
    server.run(tmp_path, *words, "--policy", f"my code/random.py:{attr}")
    with open_storage(tmp_path / "data") as storage:
        assert storage.head == 101
        assert not storage.column("action").any()
    command = server.start(tmp_path, *words, "--append", "--policy", "my code/random.py:atc")
    assert command.wait() == 1
    assert command.err.endswith("has no attribute 'atc'; did you mean act?\n")


POLICIES_THAT_FAIL = """
import torch
from tensordict.nn import TensorDictModule

def act(td):
    raise ValueError("their words")

def chained(td):
    try:
        act(td)
    except ValueError as error:
        raise TypeError("on top") from error

class Net(torch.nn.Module):
    def forward(self, observation):
        raise ValueError("their words")

module = TensorDictModule(Net(), in_keys=["observation"], out_keys=["action"])

def make():
    raise ValueError("their words")
"""


@pytest.mark.parametrize(
    ("attr", "tracebacks"), [("act", 1), ("chained", 2), ("module", 1), ("make", 0)]
)
def test_a_policy_that_fails_has_its_own_traceback_alone(
    here: Path, capsys: pytest.CaptureFixture[str], attr: str, tracebacks: int
) -> None:
    (here / "failing.py").write_text(POLICIES_THAT_FAIL)
    assert tallyroll(*cartpole(), "--policy", f"failing:{attr}") == 1
    said = capsys.readouterr().err
    assert said.count("Traceback") == said.count("direct cause") + (tracebacks > 0) == tracebacks
    assert "/collector/" not in said
    assert (f"{here}/failing.py" in said) == (tracebacks > 0)
    assert said.splitlines()[-1].startswith("tallyroll: error: ")
    assert tallyroll(*cartpole(), "--policy", f"failing:{attr}", "--traceback") == 1
    said = capsys.readouterr().err
    assert said.count("Traceback") == max(1, tracebacks)
    assert f"{here}/failing.py" in said
    sys.modules.pop("failing")


def test_an_error_in_mid_run_keeps_the_rows_and_says_how_to_go_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "moody.py").write_text(
        "calls = 0\n"
        "def act(td):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 42: raise RuntimeError('enough')\n"
        "    return td.set('action', td['observation'][..., 0].long() * 0)\n"
    )
    words = cartpole("data", 100, "--policy", "moody:act", "--frames-per-batch", 10)
    assert tallyroll(*words) == 1
    said = capsys.readouterr().err
    assert said.endswith("tallyroll: error: RuntimeError: enough\n")
    assert "rows are committed in data. Once the cause of the error is gone, continue with" in said
    assert 30 <= rows_in("data") <= 42
    words = ("--policy", "moody:act", "--resume", "--out", "data", "--quiet")
    assert tallyroll("collect", "CartPole-v1", *words) == 0
    assert rows_in("data") == 100


def test_a_lock_file_that_was_removed(server: WarmServer, tmp_path: Path) -> None:
    """The last run may be that of the writer that took the lock."""
    command = server.start(tmp_path, *endless("--frames-per-batch", 10))
    deadline = time.monotonic() + 30
    lock = tmp_path / "data" / "tallyroll.lock"
    while not (tmp_path / "data/manifest.json").exists() or not rows_in(tmp_path / "data"):
        assert time.monotonic() < deadline, command.err
        time.sleep(0.02)
    lock.unlink()
    assert command.wait() == 1
    assert "check which process made the last run:\n    tallyroll inspect data\n" in command.err
    assert (
        "\ntallyroll: if the last run is this one, continue with\n    tallyroll collect "
        in command.err
    )


def test_code_that_a_storage_names_is_not_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "sly.py").write_text(AGENT)
    assert tallyroll(*cartpole("data", 20), "--policy", "sly:act", "--quiet") == 0
    sys.modules.pop("sly")
    (here / "sly.py").write_text("open('was-run', 'w').close()\n" + AGENT)
    assert tallyroll("collect", "--resume", "--frames", 30, "--out", "data") == 1
    assert (
        "names your own code, or an environment system. Tallyroll does not run code"
        in capsys.readouterr().err
    )
    assert not (here / "was-run").exists()
    assert "sly" not in sys.modules
    named = ("--policy", "sly:act", "--resume", "--frames", 30, "--out", "data", "--quiet")
    assert tallyroll("collect", *named) == 0
    assert rows_in("data") == 30


# --- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attr", ["act", "make", "Greedy", "Box.best"])
def test_a_policy_from_the_current_directory(here: Path, server: WarmServer, attr: str) -> None:
    """One case uses a process of its own, started in that directory."""

    def run(*words: object) -> None:
        if attr == "act":
            server.run(here, *words)
            return
        sys.modules.pop("agent", None)
        assert tallyroll(*words, "--quiet") == 0

    (here / "agent.py").write_text(AGENT)
    run(*cartpole(), "--policy", f"agent:{attr}", "--num-envs", 2)
    with open_storage("data") as storage:
        assert storage.head == 101
        assert (storage.column(("collector", "policy_version")) == 0).all()
        if attr in ("act", "make"):
            wanted = storage.column("observation")[:, 2] > 0
            assert (storage.column("action") == wanted).all()
    policy = ("--policy", f"agent:{attr}")
    run("collect", *policy, "--resume", "--frames", 150, "--out", "data")
    assert rows_in("data") == 150


# --- signals --------------------------------------------------------------------------------------


def endless(*more: object) -> tuple[object, ...]:
    kwargs = json.dumps({"lanes": 3, "kind": "seeded", "slow": 0.001})
    words = ("collect", ORACLE, "--frames", 1_000_000, "--num-envs", 3, "--out", "data")
    return (*words, "--env-kwargs", kwargs, "--seed", 4, *more)


def check_oracle(path: Path) -> None:
    with open_storage(path) as storage:
        firsts = [run["first_row"] for run in storage.manifest["runs"]]
        for first, stop in zip(firsts, [*firsts[1:], storage.head], strict=True):
            rows = storage.get(slice(first, stop))
            check_rows(rows, LENGTHS, kind="seeded", ends="mixed", from_start=True)


def stop_in_the_middle(command: Command, number: signal.Signals) -> float:
    """Signal a command once it has rows, and return how long it took to end."""
    deadline = time.monotonic() + 30
    while not (command.folder / "data/manifest.json").exists() or not rows_in(
        command.folder / "data"
    ):
        assert time.monotonic() < deadline, command.err
        time.sleep(0.02)
    began = time.monotonic()
    command.kill(number)
    command.status = command.wait(10)  # type: ignore[attr-defined]
    return time.monotonic() - began


def test_a_traceback_has_our_frames_where_the_error_is_ours() -> None:
    def policy(td: Any) -> Any:
        raise LookupError("of its own")

    def traceback_of(act: Callable[[], Any], kind: type[Exception]) -> str:
        with pytest.raises(kind) as found:
            act()
        return foreign_traceback(found.value)

    ours = traceback_of(lambda: shortened(3), TypeError)  # type: ignore[arg-type]
    options: dict[str, Any] = {"frames_per_batch": 2, "total_frames": 2}
    theirs = traceback_of(lambda: SyncCollector("CartPole-v1", policy, **options), LookupError)
    assert "of its own" in theirs
    folder = f"{os.sep}tallyroll{os.sep}collector{os.sep}"
    assert (f"{folder}cli{os.sep}output.py" in ours, folder in theirs) == (True, False)


def test_an_error_with_a_command_says_its_message_alone() -> None:
    error = CommandError("expected this, got that", "tallyroll collect again")
    assert (str(error), error.command) == ("expected this, got that", "tallyroll collect again")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_commits_what_is_complete(
    server: WarmServer, tmp_path: Path, number: signal.Signals
) -> None:
    command = server.start(tmp_path, *endless("--frames-per-batch", 50))
    assert stop_in_the_middle(command, number) < AT_ONCE
    assert command.status == 128 + number  # type: ignore[attr-defined]
    resume = f"tallyroll collect {ORACLE} --out data --resume"
    kept = "all complete transitions are committed"
    said = f"stopped by {number.name}; {kept}. Continue with\n    {resume}\n"
    assert command.err.endswith(said)
    committed = rows_in(tmp_path / "data")
    assert f"\n{committed:,} frames of {ORACLE}" in command.out
    check_oracle(tmp_path / "data")
    total = committed + 101
    server.run(tmp_path, *shlex.split(resume)[1:], "--frames", total)
    assert rows_in(tmp_path / "data") == total
    check_oracle(tmp_path / "data")


def test_a_signal_in_the_first_batch_loses_nothing(server: WarmServer, tmp_path: Path) -> None:
    command = server.start(tmp_path, *endless("--frames-per-batch", 100_000))
    deadline = time.monotonic() + 30
    while not (tmp_path / "data" / "manifest.json").exists():
        assert time.monotonic() < deadline, command.err
        time.sleep(0.01)
    time.sleep(0.3)
    command.kill(signal.SIGINT)
    assert command.wait(AT_ONCE) == 130
    assert rows_in(tmp_path / "data") > 0
    check_oracle(tmp_path / "data")


def test_a_signal_before_anything_was_made(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(
        "import sys, time\nsys.stderr.write('importing')\nsys.stderr.flush()\ntime.sleep(60)\n"
    )
    words = cartpole("my data", 77, "--policy", "sleepy:act")
    command = server.start(tmp_path, *words)
    command.wait_for("importing")
    command.kill(signal.SIGTERM)
    assert command.wait(AT_ONCE) == 143
    again = "collect CartPole-v1 --frames 77 --policy sleepy:act --out 'my data'"
    said = "stopped by SIGTERM; nothing was collected yet. Continue with\n    tallyroll"
    assert command.err.endswith(f"{said} {again}\n")
    assert not (tmp_path / "my data").exists()


def test_a_signal_before_an_appended_run_began(server: WarmServer, tmp_path: Path) -> None:
    """Resuming would continue the previous run instead."""
    server.run(tmp_path, *cartpole())
    (tmp_path / "sleepy.py").write_text(
        "import sys, time\nsys.stderr.write('importing')\nsys.stderr.flush()\ntime.sleep(60)\n"
    )
    command = server.start(tmp_path, *cartpole(), "--append", "--policy", "sleepy:act")
    command.wait_for("importing")
    command.kill(signal.SIGINT)
    assert command.wait(AT_ONCE) == 130
    assert command.err.endswith(" --policy sleepy:act --out data --append\n")
    assert rows_in(tmp_path / "data") == 101


def test_a_second_signal_interrupts(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import sys, time\n"
        "calls = 0\n"
        "def act(td):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 30:\n"
        "        sys.stderr.write('stuck')\n"
        "        sys.stderr.flush()\n"
        "        time.sleep(60)\n"
        "    return td.set('action', td['observation'][..., 0].long() * 0)\n"
    )
    words = cartpole("data", 1000, "--policy", "stuck:act", "--frames-per-batch", 10)
    command = server.start(tmp_path, *words)
    command.wait_for("stuck")
    command.kill(signal.SIGINT)
    time.sleep(0.2)
    command.kill(signal.SIGINT)
    assert command.wait(AT_ONCE) == 130
    assert 20 <= rows_in(tmp_path / "data") < 30
    server.run(tmp_path, *cartpole("data", 45), "--policy", "stuck:act", "--resume")
    assert rows_in(tmp_path / "data") == 45


def test_handlers_are_put_back(here: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert tallyroll(*cartpole(), "--quiet") == 0
    assert tallyroll(*cartpole()) == 1
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before


# --- a separate process, cold ---------------------------------------------------------------------


@pytest.mark.slow
def test_python_minus_m(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error:::tallyroll", "-m", "tallyroll.collector.cli"]
    words = [str(word) for word in cartpole("data", 333, "--num-envs", 2, "--seed", 0)]
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "333 frames of CartPole-v1" in done.stdout
    assert rows_in(tmp_path / "data") == 333


# --- progress -------------------------------------------------------------------------------------


def read_terminal(controller: int, done: Callable[[], bool]) -> str:
    """Read a terminal until `done` returns True and no more text arrives."""
    text = b""
    while True:
        ready, _, _ = select.select([controller], [], [], 0.1)
        if ready:
            try:
                text += os.read(controller, 65536)
            except OSError:
                break
        elif done():
            break
    return text.decode()


def test_a_terminal_shows_a_bar(server: WarmServer, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    try:
        words = endless("--frames-per-batch", 10)
        words = tuple(400 if word == 1_000_000 else word for word in words)
        command = server.start(tmp_path, *words, tty=os.ttyname(terminal))
        ended: list[int] = []

        def done() -> bool:
            path = tmp_path / "data" / "manifest.json"
            return bool(path.exists() and rows_in(tmp_path / "data") == 400)

        shown = read_terminal(controller, done)
        ended.append(command.wait())
        os.set_blocking(controller, False)  # read what it wrote after its last row
        with contextlib.suppress(OSError):
            while more := os.read(controller, 65536):
                shown += more.decode(errors="replace")
    finally:
        os.close(controller)
        os.close(terminal)
    assert ended == [0]
    assert "━" in shown
    assert "\x1b[" in shown
    assert "400/400 " in shown
    assert "/s" in shown
    assert " return " in shown
    assert shown.count("/400 ") > 3, "it should move"


def test_elsewhere_there_is_a_line_now_and_then(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.collector.ext.progress.LINE_SECONDS", 0.0)
    assert tallyroll(*cartpole("data", 100, "--frames-per-batch", 10)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[0].startswith("tallyroll: 100 rows of 75 bytes: 7.5 kB; ")
    assert lines[4].startswith("tallyroll: 30 of 100 frames (30 %), ")
    assert lines[4].endswith(" left")


# --- inspect --------------------------------------------------------------------------------------


@pytest.fixture
def collected(here: Path) -> Path:
    """Collect two runs, and resume the second one."""
    assert tallyroll(*cartpole("data", 500), "--num-envs", 3, "--seed", 0, "--quiet") == 0
    assert tallyroll(*cartpole("data", 211), "--append", "--seed", 1, "--quiet") == 0
    more = ("collect", "--resume", "--frames", 300, "--out", "data", "--quiet")
    assert tallyroll(*more) == 0
    return here / "data"


def by_hand(path: Path) -> tuple[list[float], list[int], int]:
    """Return the returns and lengths of finished trajectories, and the number of open ones."""
    sums: dict[int, list[float]] = {}
    returns, lengths = [], []
    with open_storage(path) as storage:
        columns = [storage.column(("next", name))[:, 0] for name in ("reward", "done")]
        for id, reward, done in zip(
            storage.column(("collector", "traj_ids")), *columns, strict=True
        ):
            so_far = sums.setdefault(int(id), [])
            so_far.append(float(reward))
            if done:
                returns.append(sum(so_far))
                lengths.append(len(so_far))
    return returns, lengths, len(sums) - len(returns)


def test_inspect_json(collected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll("inspect", "data", "--json", "--rows", 2) == 0
    found = json.loads(capsys.readouterr().out)
    returns, lengths, unfinished = by_hand(collected)
    assert found["rows"] == 800
    assert found["bytes"] == 800 * found["row_bytes"]
    assert {c["name"]: (c["dtype"], c["shape"]) for c in found["columns"]}["next/observation"] == (
        "float32",
        [4],
    )
    assert [(run["rows"], run["resumed"]) for run in found["runs"]] == [(500, 0), (300, 1)]
    assert found["trajectories"] == {
        "total": len(returns) + unfinished,
        "terminated": len(returns),
        "truncated": 0,
        "cut": unfinished,
        "open": 0,
        "begun_earlier": 0,
    }
    for values, wanted in ((found["returns"], returns), (found["lengths"], lengths)):
        assert values["episodes"] == len(wanted)
        assert values["mean"] == pytest.approx(np.mean(wanted))
        assert (values["min"], values["max"]) == (min(wanted), max(wanted))
        assert values["q50"] == pytest.approx(np.median(wanted))
    assert found["ledger"]["stored"] == 300
    assert len(found["first_rows"]) == 2
    assert found["first_rows"][1]["collector/step"] == 1


def test_inspect_says_at_which_rows_a_run_was_resumed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers count all rows, including those of earlier runs."""
    given: dict[str, Any] = {"frames_per_batch": 5, "seed": 1}
    with MemmapStorage(here / "data") as storage:
        for frames, resume in ((7, False), (10, False), (12, True), (15, True), (19, True)):
            with SyncCollector(
                "CartPole-v1", total_frames=frames, storage=storage, resume=resume, **given
            ) as made:
                made.collect(frames)
    assert tallyroll("inspect", "data", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["resumed_at"] for run in runs] == [[], [17, 19, 22]]
    assert tallyroll("inspect", "data") == 0
    assert "seed 1, resumed 3 times (at row 17, 19, 22), total" in capsys.readouterr().out
    again = ("collect", "--resume", "--frames", 22, "--out", "data", "--quiet", "--num-envs", 1)
    assert tallyroll(*again) == 0
    assert tallyroll("inspect", "data") == 0
    assert "seed 1, resumed 4 times (at row …, 19, 22, 26), total" in capsys.readouterr().out


def test_inspect_for_people(collected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll("inspect", "data") == 0
    said = capsys.readouterr().out
    for part in (
        "data: 800 rows of 75 bytes, 60.0 kB (tallyroll.memmap, created ",
        "next/observation          float32    [4]           16",
        "0  CartPole-v1, 500 rows from row 0, 3 lanes, seed 0, total frames 500",
        "1  CartPole-v1, 300 rows from row 500, 1 lane, seed 1, resumed once",
        "gymnasium ",
        " terminated, 0 truncated, ",
        "return  ",
        "Ledger of the last run, at its last commit\nslots                         300  = executed",
        "\n  executed                    300  = stored + discarded + carried + lost\n",
        "First rows\n",
        "row 4",
    ):
        assert part in said, said


def test_inspect_while_a_process_writes(server: WarmServer, tmp_path: Path) -> None:
    command = server.start(tmp_path, *endless("--frames-per-batch", 10))
    try:
        while not (tmp_path / "data/manifest.json").exists():
            time.sleep(0.02)
        time.sleep(0.5)
        looks = []
        for _ in range(3):
            seen = json.loads(server.run(tmp_path / "look", "inspect", "../data", "--json").out)
            looks.append(seen["trajectories"]["open"])
        assert 0 < seen["rows"] <= rows_in(tmp_path / "data")
        assert 1 <= max(looks) <= 3  # sometimes all lanes have just ended
        assert seen["trajectories"]["cut"] == 0
        assert seen["ledger"]["stored"] >= seen["rows"]
    finally:
        command.kill()
        assert command.wait() == -signal.SIGKILL
    after = json.loads(server.run(tmp_path / "look", "inspect", "../data", "--json").out)
    with open_storage(tmp_path / "data") as storage:
        ids = storage.column(("collector", "traj_ids"))
        ended = ids[storage.column(("next", "done"))[:, 0]]
        unfinished = len(set(ids.tolist()) - set(ended.tolist()))
    assert after["trajectories"]["open"] == 0
    assert after["trajectories"]["cut"] == unfinished


def test_inspect_of_rows_that_no_collector_wrote(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[tuple[str, ...], np.ndarray[Any, Any]] = {
        ("x",): np.array([1.0, np.nan, np.inf]),
        ("z",): np.array([1j, 2, 3]),
    }
    with MemmapStorage("data") as storage:
        storage.extend(rows)
    assert tallyroll("inspect", "data") == 0
    said = capsys.readouterr().out
    assert "Trajectories" not in said
    assert "policy unknown" in said
    assert tallyroll("inspect", "data", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["x"] for row in found["first_rows"]] == [1.0, "nan", "inf"]
    assert found["trajectories"] is found["ledger"] is None


def test_inspect_of_copied_rows(collected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_storage("data") as source, MemmapStorage("other") as storage:
        id, made = source.manifest["id"], source.manifest["runs"]
        storage.extend(source[:510])
        storage.extend(source[510:].clone())
    assert tallyroll("inspect", "other") == 0
    said = capsys.readouterr().out
    for part in (
        f"0  510 rows from row 0, copied from rows 0 to 509 of storage {id}: CartPole-v1, 3 lanes, "
        "seed 0, total frames 500, frames per batch 1023, policy random; CartPole-v1, 1 lane, "
        "seed 1, total frames 211, frames per batch 1024, policy random\n",
        "1  unknown environment, 290 rows from row 510, ? lanes, seed ?, policy unknown\n",
    ):
        assert part in said, said
    assert tallyroll("inspect", "other", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["rows"], second["rows"]) == (510, 290)
    assert first["copied_from"] == {"id": id, "rows": [0, 509]}
    assert first["runs"] == [exported(run) for run in made[:2]]
    assert tallyroll("verify", "other") == 0
    assert tallyroll("collect", "--resume", "--frames", 900, "--out", "other") == 1
    assert "other holds no run of a collector. Use --append" in capsys.readouterr().err
    assert tallyroll(*cartpole("other", 30), "--append", "--quiet") == 0


@pytest.mark.parametrize(
    "change",
    [
        {"copied_from": change, "runs": runs}
        for change in (None, {}, {"id": 3, "rows": [0, 1]}, {"id": "x", "rows": [5, "y"]}, [1])
        for runs in (None, [None, 3, {"environment": 3, "call": []}])
    ],
    ids=str,
)
def test_inspect_of_an_entry_that_is_no_copy(
    here: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    with MemmapStorage("data") as storage:
        storage.extend({("x",): np.arange(3)})
    file = here / "data/manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["crc32"]
    manifest["runs"][0] |= change
    file.write_text(json.dumps(manifest))
    assert tallyroll("inspect", "data") == 0
    assert "0  unknown environment, 3 rows from row 0" in capsys.readouterr().out
    assert tallyroll("verify", "data") == 0
    with MemmapStorage("data", mode="append") as storage, MemmapStorage("more") as more:
        storage.extend({("x",): np.arange(3)})
        assert len(storage.manifest["runs"]) == 1
        storage.extend(storage[:])
        more.extend(storage[:])
    assert tallyroll("inspect", "more") == 0
    assert "copied from rows 0 to 11 of storage " in capsys.readouterr().out


def storage_at(path: Path) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(trajectory_rows(0, 4, steps=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "data does not exist. Give the path of a storage."),
        (lambda path: path.touch(), "data is not a Tallyroll storage: it is an empty file."),
        (lambda path: path.mkdir(), "data is not a Tallyroll storage: it has no manifest.json."),
        (
            lambda path: storage_at(path / "run0"),
            "it has no manifest.json. It contains storages, such as run0. Give the path of one, or "
            "for all of them the pattern 'data/*', in quotes.",
        ),
    ],
)
def test_inspect_of_something_else(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], None],
    message: str,
) -> None:
    make(here / "data")
    assert tallyroll("inspect", "data") == 1
    assert capsys.readouterr().err.startswith("tallyroll: error: ")
    assert tallyroll("inspect", "data", "--json") == 1
    assert message in capsys.readouterr().err


def test_inspect_for_a_reader_that_is_gone(server: WarmServer, tmp_path: Path) -> None:
    """The command ends silently, as in a pipe to `head`."""
    server.run(tmp_path, *cartpole())
    pipe = full_pipe(tmp_path, "pipe")
    try:
        command = server.start(tmp_path, "inspect", "data", stdout="pipe")
        deadline = time.monotonic() + 30
        while os.readlink(f"/proc/{command.pid}/fd/1") != str(tmp_path / "pipe"):
            assert time.monotonic() < deadline, command.err
            time.sleep(0.01)
    finally:
        os.close(pipe)
    assert command.wait() == 1
    assert command.err == ""


@pytest.mark.slow
def test_inspect_for_a_reader_that_has_seen_enough(here: Path, server: WarmServer) -> None:
    server.run(here, *cartpole())
    command = f"{sys.executable} -m tallyroll.collector.cli inspect data --rows 100 | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.startswith("data: 101 rows")
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["memmap", "hdf5", "zarr"])
def test_inspect_of_every_format_finalized(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert tallyroll(*cartpole("data", 500), "--format", name, "--finalize", "--quiet") == 0
    assert tallyroll("inspect", "data") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"data: 500 rows of 75 bytes, 37.5 kB (tallyroll.{name}, created ")
    assert ", with checksums of 500 rows\n" in said
    assert tallyroll("inspect", "data", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finalized"]["rows"] == 500
    assert found["trajectories"]["total"] > 0


def test_inspect_of_a_ring(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"num_envs": 3, "frames_per_batch": 50, "total_frames": 700, "seed": 0}
    with (
        MemmapStorage("data", max_size=300) as storage,
        SyncCollector("CartPole-v1", storage=storage, **made) as collector,
    ):
        for _ in collector:
            pass
        whole = [e for e in collector.episodes if e.length]
    assert tallyroll("inspect", "data") == 0
    assert "\na ring of 300 rows: it holds those from row 400 on\n" in capsys.readouterr().out
    assert tallyroll("inspect", "data", "--json", "--rows", 3) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["first_row"], found["ring"]) == (300, 400, 300)
    assert [run["rows"] for run in found["runs"]] == [300]
    with open_storage("data") as storage:
        slots = storage.slots_of(np.arange(400, 700))
        ids, step = (storage.column(("collector", n))[slots] for n in ("traj_ids", "step"))
        done = storage.column(("next", "done"))[slots, 0]
    begun = set(ids[step == 0].tolist())
    ended = set(ids[done].tolist())
    wanted = [e.total_return for e in whole if e.traj_id in begun & ended]
    assert found["returns"]["episodes"] == len(wanted)
    assert found["returns"]["mean"] == pytest.approx(np.mean(wanted))
    assert found["trajectories"]["terminated"] == len(ended)
    assert found["trajectories"]["begun_earlier"] == len(ended - begun) > 0
    assert [row["collector/traj_ids"] for row in found["first_rows"]] == ids[:3].tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"environment": []}, {"call": 3}, {"command": {"frames": "many"}}, {"versions": "old"},
        {"lanes": 10**30}, {"incarnation": "twice"}, {"respawned": {}}, {"respawned": 10**30},
        {"command": {"workers": -1}}, {"command": {"step_timeout": "long"}},
        {"first_row_of_run": "x"}, {"seed": {}}, {"first_row": 10**9},
    ],
)  # fmt: skip
def test_inspect_and_verify_of_a_damaged_manifest(
    here: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    assert tallyroll(*cartpole(), "--quiet") == 0
    file = here / "data" / "manifest.json"
    manifest = json.loads(file.read_bytes())
    manifest["runs"][0] |= change
    del manifest["crc32"]
    file.write_text(json.dumps(manifest))
    for words in (("inspect",), ("inspect", "--json"), ("verify",)):
        assert tallyroll(*words, "data") in (0, 1)
        assert "Traceback" not in capsys.readouterr().err
    assert tallyroll("collect", "--resume", "--frames", 200, "--out", "data") in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


# --- verify ---------------------------------------------------------------------------------------


def test_verify_says_that_all_is_well(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll(*cartpole("data", 500), "--num-envs", 3, "--finalize", "--quiet") == 0
    assert tallyroll("verify", "data") == 0
    said = capsys.readouterr()
    assert said.out.startswith("data: sound; 500 rows (tallyroll.memmap), ")
    assert said.err == ""
    assert tallyroll("verify", "data", "--quiet") == 0
    said = capsys.readouterr()
    assert said.out + said.err == ""


def test_verify_says_what_is_wrong_and_where(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tallyroll(*cartpole("data", 500), "--quiet") == 0
    rewards = np.memmap("data/next/reward.memmap", np.float32, "r+")
    rewards[[7, *range(100, 110)]] = np.nan
    del rewards
    assert tallyroll("verify", "data") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("data: not sound, 2 findings; 500 rows")
    assert said[2] == "nan: NaN or infinity in next/reward (11 times)"
    assert said[3].startswith("    row 7, lane 0, trajectory 0, step 7, column next/reward")
    assert said[8] == "    and 6 more"
    assert said[10].startswith("episodes: the table gives another return than the rows")
    assert tallyroll("verify", "data", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    finding, _ = found["findings"]
    assert (finding["check"], finding["count"], found["sound"]) == ("nan", 11, False)
    assert finding["places"][1] == {
        **finding["places"][1], "row": 100, "lane": 0, "column": "next/reward",
    }  # fmt: skip
    assert tallyroll("verify", "data", "--quiet") == 1
    assert tallyroll("verify", "data", "--skip", "nan,episodes,videos") == 0
    assert "not checked: nan, episodes (not wanted)" in capsys.readouterr().out


def test_verify_checks_datasets_of_different_columns_one_by_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tallyroll(*cartpole("runs/a"), "--quiet") == 0
    assert tallyroll("collect", "Pendulum-v1", "--frames", 20, "--out", "runs/b", "--quiet") == 0
    assert tallyroll("export", "runs/b", "npz:runs/c.npz", "--quiet") == 0
    for words in (["runs/*"], ["runs/a", "runs/b", "runs/c.npz"]):
        assert tallyroll("verify", *words) == 0
        said = capsys.readouterr().out
        for name in ("a", "b", "c.npz"):
            assert f"runs/{name}: sound; " in said
        assert "3 datasets checked one by one, because their columns or formats differ" in said
    np.memmap("runs/a/next/reward.memmap", np.float32, "r+")[3] = np.nan
    Path("runs/notes.txt").write_text("text")
    assert tallyroll("verify", "runs/*", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["sound"] for each in found["datasets"]] == [False, True, True]
    assert (found["sound"], [*found["unchecked"]]) == (False, ["runs/notes.txt"])
    assert tallyroll("verify", "runs/b", "runs/notes.txt", "--quiet") == 2
    assert capsys.readouterr() == ("", "")
    assert tallyroll("verify", "runs/b", "runs/c.npz", "--skip", "lanes") == 2
    assert "not checked: runs/c.npz: skip: expected names of checks" in capsys.readouterr().out


def test_verify_of_different_columns_finds_missing_shards(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--frames", 20, "--num-envs", 2, "--quiet")
    assert tallyroll("collect", "Pendulum-v1", *words, "--out", "runs/other") == 0
    for shard, status in (("0/2", 1), ("1/2", 0)):
        path = f"runs/{shard[0]}"
        command = ("collect", "CartPole-v1", *words, "--out", path)
        assert tallyroll(*command, "--shard", shard, "--seed", 3) == 0
        assert tallyroll("verify", "runs/*", "--quiet") == status
        assert capsys.readouterr() == ("", "")
        assert tallyroll("verify", "runs/*") == status
        assert (": shards 1 of 2 are missing\n" in capsys.readouterr().out) == status
        assert tallyroll("verify", "runs/*", "--json") == status
        found = json.loads(capsys.readouterr().out)
        assert found["sound"] == (not status)
        assert [each["missing"] for each in found["shards"]] == [[1] if status else []]


def test_verify_of_what_it_cannot_check(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll("verify", "nothing") == 2
    assert capsys.readouterr().err == (
        "tallyroll: error: nothing does not exist. Give the path of a storage.\n"
    )
    Path("notes.h5").write_text("text")
    assert tallyroll("verify", "notes.h5") == 2
    assert (
        "notes.h5 is not a Tallyroll storage: it is a file of another program"
        in capsys.readouterr().err
    )
    assert tallyroll(*cartpole(), "--quiet") == 0
    with pytest.raises(SystemExit) as end:
        tallyroll("verify", "data", "--skip", "nan,nam")
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "argument --skip: expected checks among files, " in said
    assert ", got 'nam'" in said
    (here / "data" / "action.memmap").unlink()
    assert tallyroll("verify", "data") == 1
    assert capsys.readouterr().out.startswith("data cannot be read\n\nfiles: ")


def test_verify_shows_how_far_it_is(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.collector.ext.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr("tallyroll.storage.ext.verification.row_checks._CHUNK_ROWS", 100)
    assert tallyroll(*cartpole("data", 500), "--quiet") == 0
    assert tallyroll("verify", "data") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("tallyroll: 7.5 kB of 37.5 kB verified (20 %), ")
    assert lines[-1] == "tallyroll: 37.5 kB of 37.5 kB verified (100 %), 0:00:00 left"


def test_verify_on_a_terminal(server: WarmServer, tmp_path: Path) -> None:
    server.run(tmp_path, *cartpole())
    controller, terminal = pty.openpty()
    try:
        command = server.start(tmp_path, "verify", "data", tty=os.ttyname(terminal))
        assert command.wait() == 0
        shown = read_terminal(controller, lambda: True)
    finally:
        os.close(controller)
        os.close(terminal)
    assert "data: sound; 101 rows" in shown
    assert "verified" in shown


# --- standard streams -----------------------------------------------------------------------------

CLI = f"{sys.executable} -m tallyroll.collector.cli"


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    ("stdout", "why"), [("/dev/full", "No space left on device"), (None, "Bad file descriptor")]
)
def test_a_stdout_that_takes_nothing(
    tmp_path: Path, server: WarmServer, stdout: str | None, why: str
) -> None:
    server.run(tmp_path, *cartpole())
    error = f"tallyroll: error: cannot write to standard output ({why}); the report is incomplete"
    for status, words in (
        (1, "inspect data"), (1, "inspect data --json"), (1, "--help"), (2, "verify data"),
    ):  # fmt: skip
        command = server.start(tmp_path, *words.split(), stdout=stdout)
        assert command.wait() == status, words
        assert command.err == f"{error}\n"
    command = server.start(tmp_path, *cartpole("more", 50), stdout=stdout)
    assert command.wait() == 1
    assert command.err.endswith(f"{error}\n")
    assert "continue with" not in command.err
    assert rows_in(tmp_path / "more") == 50


NOISY = """
import sys
from pathlib import Path

def act(td):
    print(1000 * "noise ", file=sys.{stream})
    return td.set("action", td["observation"][..., 0].long() * 0)
"""


def full_pipe(folder: Path, name: str) -> int:
    """Create a named pipe and fill it. Return its reading end."""
    os.mkfifo(folder / name)
    ours = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(ours, bytes(4096))
    return ours


def rows_that_grow(folder: Path) -> int:
    """Wait until rows are added between two looks at the storage, and return their number."""
    deadline, first = time.monotonic() + 60, 0
    while time.monotonic() < deadline:
        if (folder / "data" / "manifest.json").exists() and (now := rows_in(folder / "data")):
            if now > first > 0:
                return now
            first = now
        time.sleep(0.02)
    raise AssertionError("no rows were added")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_output_that_is_not_read(
    server: WarmServer, tmp_path: Path, stream: str, workers: int
) -> None:
    """The run continues without the output, and ends on request."""
    (tmp_path / "noisy.py").write_text(NOISY.format(stream=stream))
    pipe = full_pipe(tmp_path, "pipe")
    try:
        words = cartpole("data", 10**7, "--policy", "noisy:act", "--frames-per-batch", 20)
        command = server.start(tmp_path, *words, "--workers", workers, **{stream: "pipe"})
        rows_that_grow(tmp_path)
        command.kill(signal.SIGTERM)
        assert command.wait(AT_ONCE) == 143
    finally:
        os.close(pipe)


def test_output_that_is_read_late_says_what_is_missing(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY.format(stream="stderr"))
    pipe = full_pipe(tmp_path, "pipe")
    try:
        words = cartpole("data", 10**7, "--policy", "noisy:act", "--frames-per-batch", 20)
        command = server.start(tmp_path, *words, stderr="pipe")
        rows_that_grow(tmp_path)
        read = b""
        while b"read in time" not in read:
            with contextlib.suppress(BlockingIOError):
                read += os.read(pipe, 2**20)
        command.kill(signal.SIGTERM)
        assert command.wait(AT_ONCE) == 143
    finally:
        os.close(pipe)
    assert re.search(rb"\ntallyroll: dropped [\d,]+ bytes of output that were not read in", read)


PRINTS_AT_EXIT = """
import atexit, logging, sys
from tallyroll.collector.cli import main

atexit.register(lambda: print("x" * 2**17, file=sys.{stream}, flush=True))
status = main(sys.argv[1:])
logging.getLogger("noisy").warning("at the end")
atexit._run_exitfuncs()
sys.exit(status)
"""
LOGS = """
import logging, sys

logging.getLogger("noisy").addHandler(logging.StreamHandler())  # it keeps the stderr of the run
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_is_printed_at_exit_and_not_read(
    server: WarmServer, tmp_path: Path, stream: str
) -> None:
    """A command that was asked to end does not block on the output."""
    (tmp_path / "noisy.py").write_text(LOGS + NOISY.format(stream=stream))
    (tmp_path / "script.py").write_text(PRINTS_AT_EXIT.format(stream=stream))
    pipe = full_pipe(tmp_path, "pipe")
    try:
        words = cartpole("data", 10**7, "--policy", "noisy:act", "--frames-per-batch", 20)
        command = server.start(tmp_path, "python", "script.py", *words, **{stream: "pipe"})
        rows_that_grow(tmp_path)
        command.kill(signal.SIGTERM)
        assert command.wait(10 * AT_ONCE) == 143
    finally:
        os.close(pipe)
    assert "Logging error" not in command.err
    server.run(tmp_path, "verify", "data", "--quiet")


def test_after_a_signal_no_write_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Poll:
        def register(self, *_: int) -> None:
            pass

        def poll(self, milliseconds: float) -> list[int]:
            waited.append(milliseconds)
            return []

    monkeypatch.setattr("tallyroll.collector.workers.local.nonblocking_stdio.select.poll", Poll)
    monkeypatch.setattr(
        "tallyroll.collector.workers.local.nonblocking_stdio._patience_seconds", 0.25
    )
    end, pipe = os.pipe()
    with os.fdopen(end), os.fdopen(pipe, "w") as stream:
        signals = Signals()
        signals.stop = lambda: None
        with signals.install():
            for stopped in (False, True):
                if stopped:
                    signal.raise_signal(signal.SIGTERM)
                # only the first write to each wrapper waits, and only before the signal
                for _ in range(2):
                    ours = unblocked(stream)
                    print("a line", file=ours, flush=True)
                    print("another", file=ours, flush=True)
    assert [milliseconds > 0 for milliseconds in waited] == [True, False, True, False] + 4 * [False]


@pytest.mark.parametrize("imported", ["json", "ale_py"])
def test_the_interpreter_looks_for_no_garbage_when_a_command_has_ended(imported: str) -> None:
    """Garbage collection would take longer than everything else after a signal.

    With ale_py, nanobind would print the garbage as leaks.
    """
    script = (
        "import atexit, gc, sys, types\n"
        f"sys.modules.setdefault({imported!r}, types.ModuleType({imported!r}))\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "from tallyroll.collector.cli import main\n"
        "sys.exit(main(['--version']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (int(done.stdout.split()[-1]) > 1000) == (imported != "ale_py")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_whose_reader_is_gone(server: WarmServer, tmp_path: Path, stream: str) -> None:
    (tmp_path / "noisy.py").write_text(NOISY.format(stream=stream))
    pipe = full_pipe(tmp_path, "pipe")
    try:
        words = cartpole("data", 3000, "--policy", "noisy:act", "--frames-per-batch", 20)
        command = server.start(tmp_path, *words, "--quiet", **{stream: "pipe"})
        rows_that_grow(tmp_path)
    finally:
        os.close(pipe)
    assert command.wait() == 0
    assert rows_in(tmp_path / "data") == 3000


def test_all_streams_closed(here: Path) -> None:
    """No file of the storage gets the descriptor of a closed stream, which would receive output."""
    done = shell(here, f"{CLI} collect CartPole-v1 --frames 50 --out data <&- >&- 2>&-")
    assert done.returncode == 1
    assert rows_in(here / "data") == 50
    assert tallyroll("verify", "data", "--quiet") == 0


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "format"),
    [
        ("--out data", "memmap"), ("--out data.h5", "hdf5"), ("--out data.HDF5", "hdf5"),
        ("--out data.zarr", "zarr"), ("--out data --format zarr", "zarr"),
        ("--out data --format hdf5", "hdf5"), ("--out data.d --format memmap", "memmap"),
    ],
)  # fmt: skip
def test_formats(here: Path, words: str, format: str) -> None:
    given = shlex.split(words)
    assert tallyroll("collect", "CartPole-v1", "--frames", 300, "--quiet", *given) == 0
    with open_storage(given[1]) as storage:
        assert storage.manifest["format"] == f"tallyroll.{format}"
        assert storage.head == 300
    more = ("--out", given[1], "--quiet")
    assert tallyroll("collect", "--resume", "--frames", 450, *more) == 0
    assert tallyroll("collect", "CartPole-v1", "--frames", 60, "--append", *more) == 0
    assert rows_in(given[1]) == 510
    assert tallyroll("verify", given[1], "--quiet") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--frames 5 --out data.h5 --format zarr", "--format: data.h5 has the suffix of hdf5, but "
         "the format zarr was requested. Leave the format out, or give another path."),
        ("--frames 5 --out old --format hdf5 --append", "--format: old holds a storage of format "
         "memmap, but the format hdf5 was requested. Leave the format out, or give another path."),
        ("--episodes 5 --out data.h5", "data.h5: an HDF5 file needs a fixed number of rows, but "
         "--episodes does not give one. Use --frames, or --format memmap or zarr."),
    ],
)  # fmt: skip
def test_formats_that_do_not_fit(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert tallyroll(*cartpole("old"), "--quiet") == 0
    before = files(here)
    assert tallyroll("collect", "CartPole-v1", *words.split()) == 1
    assert capsys.readouterr().err == f"tallyroll: error: {message}\n"
    now = files(here)
    now["old/tallyroll.lock"] = before["old/tallyroll.lock"]
    assert now == before


def test_durability_reaches_the_storage_and_stays(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    before = MemmapStorage.__init__

    def init(self: MemmapStorage, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        seen.append(kwargs.get("durability", "process"))

    monkeypatch.setattr(MemmapStorage, "__init__", init)
    assert tallyroll(*cartpole(), "--durability", "power", "--quiet") == 0
    assert seen == ["power"]
    assert tallyroll("collect", "--resume", "--frames", 150, "--out", "data", "--quiet") == 0
    assert seen[-2:] == ["process", "power"]
    with open_storage("data") as storage:
        assert storage.manifest["runs"][-1]["command"]["durability"] == "power"


def test_a_ring_keeps_the_last_rows(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll(*cartpole("data", 700, "--max-size", 300, "--num-envs", 7, "--quiet")) == 0
    for words in (("--resume", "--frames", 900), ("CartPole-v1", "--append", "--frames", 100)):
        assert tallyroll("collect", *words, "--out", "data", "--quiet") == 0
    with open_storage("data") as storage:
        assert storage.span == range(700, 1000)
    assert tallyroll("verify", "data") == 0
    capsys.readouterr()
    assert tallyroll(*cartpole("more.zarr", 5, "--max-size", 3)) == 1
    assert "--max-size: max_size=3 requests a ring, but " in capsys.readouterr().err
    assert tallyroll("collect", "CartPole-v1", "--append", "--frames", 9, "--out", "data",
                     "--max-size", 5) == 1  # fmt: skip
    assert "--max-size: max_size=5 was given, but data is a ring of 300" in capsys.readouterr().err


def test_finalize_of_a_run_that_is_complete_already(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tallyroll(*cartpole("data.h5"), "--quiet") == 0
    assert tallyroll("collect", "--resume", "--finalize", "--out", "data.h5") == 0
    assert tallyroll("verify", "data.h5") == 0
    assert "checksums" not in capsys.readouterr().out


def test_a_run_that_is_stopped_is_not_finalized(server: WarmServer, tmp_path: Path) -> None:
    command = server.start(tmp_path, *endless("--frames-per-batch", 50, "--finalize"))
    stop_in_the_middle(command, signal.SIGINT)
    assert command.err.endswith("--out data --resume --finalize\n")
    with open_storage(tmp_path / "data") as storage:
        assert "finalized" not in storage.manifest


@pytest.mark.slow
def test_killed_and_resumed_runs_are_sound(server: WarmServer, tmp_path: Path) -> None:
    for name in ("data", "data.h5", "data.zarr"):
        words = [name if word == "data" else word for word in endless("--frames-per-batch", 50)]
        command = server.start(tmp_path, *words, "--resume")
        command.wait_for(" rows of ")
        time.sleep(0.3)
        command.kill()
        assert command.wait() == -signal.SIGKILL
        server.run(tmp_path, "verify", name)
        total = rows_in(tmp_path / name) + 50
        words = [total if word == 1_000_000 else word for word in words]
        server.run(tmp_path, *words, "--resume")
        server.run(tmp_path, "verify", name)
        with open_storage(tmp_path / name) as storage:
            ids, done = storage.column(("collector", "traj_ids")), storage.column(("next", "done"))
            unfinished = set(ids.tolist()) - set(ids[done[:, 0]].tolist())
            assert storage.record is not None
            assert json.loads(storage.record[1])["ledger"]["episodes_cut"] == len(unfinished)


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--help", "collect --help", "inspect --help", "verify --help"])
def test_help_teaches_with_examples(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        tallyroll(*words.split())
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "examples:" in said
    assert said.count("    tallyroll ") + said.count("\n  tallyroll ") >= 3


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_no_large_library(option: str) -> None:
    code = (
        "import atexit, sys\n"
        "from tallyroll.collector.cli import main\n"
        "large = {'torch', 'numpy', 'gymnasium', 'rich'}\n"
        "atexit.register(lambda: print('imported:', *large & {*sys.modules}))\n"
        f"main([{option!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "imported:")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        tallyroll("--version")
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("tallyroll ")
    assert f"torch {torch.__version__}, " in said
    assert "torchrl" in said


def test_a_run_by_frames_is_not_resumed_by_episodes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tallyroll(*cartpole("data", 50), "--quiet") == 0
    assert tallyroll("collect", "--resume", "--episodes", 3, "--out", "data") == 1
    assert "the run was started with --frames, so --episodes cannot end it" in (
        capsys.readouterr().err
    )
    assert rows_in("data") == 50
