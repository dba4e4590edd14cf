"""Tests that run each example for a few steps, as a user does, and check its output."""

from __future__ import annotations

import csv
import difflib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torchrl.modules import GRUModule

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage, open_storage, verify

from examples_kit import EXAMPLES, numbers, options_of
from examples_kit import run as run_in_new_interpreter
from warm_cli import WarmServer

Run = Callable[..., str]


def cells(label: str, table: str) -> list[str]:
    """Return the cells of the table's only row that begins with ``label``."""
    (line,) = (line for line in table.splitlines() if line.startswith(f"│ {label} "))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def counts(label: str, table: str) -> list[int]:
    return [int(cell) for cell in cells(label, table)]


def names_of(name: str) -> dict[str, Any]:
    """Return the names that the example defines."""
    return runpy.run_path(str(EXAMPLES / name))


def run_here(name: str, capsys: pytest.CaptureFixture[str], **options: float | str) -> str:
    """Run the example in this process, which saves the import of torch, and return its output."""
    names = names_of(name)
    names["main"](names["Args"](**options))
    return capsys.readouterr().out


@pytest.fixture
def run(server: WarmServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs an example in a folder, as a user does, but with torch imported.

    Warnings are errors.
    """

    def run(name: str, directory: Path, **options: float | str) -> str:
        more = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "TMPDIR": str(directory)}
        monkeypatch.setattr(server, "environment", more)
        done = server.start(directory, "python", EXAMPLES / name, *options_of(options))
        assert (done.wait(250), done.err) == (0, "")
        out = done.out
        for name in ("stdout", "stderr"):
            (directory / name).unlink()
        return out

    return run


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_help_names_every_option_with_its_default(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    options = re.findall(r"^  --([a-z-]+)", text, re.MULTILINE)
    assert len(options) >= 5
    assert " ".join(text.split()).count("(default: ") == len(options)
    assert f"python examples/{path.relative_to(EXAMPLES)}" in text


@pytest.mark.slow
def test_collect_to_disk_leaves_exactly_the_rows_it_was_asked_for(run: Run, tmp_path: Path) -> None:
    out = run(
        "collect_to_disk.py",
        tmp_path,
        frames=1001,
        frames_per_batch=300,
        num_envs=3,
        out="rows",
        sample=32,
    )
    with MemmapStorage(tmp_path / "rows", mode="read") as storage:
        assert len(storage) == 1001
    assert out.startswith("1001 transitions in ")
    # 334 steps of 3 lanes; a reset by mask spends no slot.
    assert "ledger: 1002 slots = 1002 executed + 0 resets" in out
    assert "1002 executed = 1001 stored + 1 discarded" in out
    assert "rows: 1001 rows, " in out
    assert "a sample of 32:" in out
    assert re.search(r"^  next/observation +torch\.float32 +\[32, 4\]$", out, re.MULTILINE)


@pytest.mark.slow
def test_ppo_trains_on_exactly_its_budget(run: Run, tmp_path: Path) -> None:
    out = run(
        "ppo.py",
        tmp_path,
        total_frames=300,
        frames_per_batch=128,
        num_envs=4,
        epochs=1,
        minibatch=64,
        eval_episodes=3,
    )
    sizes = re.findall(r"^batch +(\d+)  frames +(\d+) ", out, re.MULTILINE)
    assert sizes == [("128", "128"), ("128", "256"), ("44", "300")]
    stored, slots, resets, beyond = numbers(
        r"(\d+) transitions, exactly: (\d+) slots - (\d+) reset slots - (\d+) beyond", out
    )
    assert stored == 300 == slots - resets - beyond
    assert resets > 0
    (episodes,) = numbers(r"evaluation: mean return [\d.]+ over (\d+) episodes", out)
    assert episodes == 3


def swapped(name: str) -> dict[str, str]:
    """Map the lines that the example replaced to the changed lines."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^# Was: (.*)\n(.*)$", text, re.MULTILINE))


@pytest.mark.slow
def test_torchrl_ppo_swapped_is_torchrls_but_for_a_line(run: Run, tmp_path: Path) -> None:
    assert swapped("coming_from/torchrl_ppo_swapped.py") == {
        "from torchrl.collectors import Collector": (
            "from tallyroll.collector.torchrl import Collector"
        )
    }
    for env in ("serial", "vector"):
        out = run(
            "coming_from/torchrl_ppo_swapped.py",
            tmp_path,
            env=env,
            total_frames=640,
            frames_per_batch=256,
            num_envs=4,
            epochs=1,
            minibatch=64,
            width=16,
        )
        found = re.findall(r"^batch \[(\d+), (\d+)\]  frames +(\d+)  ep", out, re.MULTILINE)
        assert found == [("4", "64", "256"), ("4", "64", "512"), ("4", "32", "640")]
        (total,) = numbers(r"^(\d+) transitions in ", out)
        assert total == 640
        assert re.search(r"^evaluation: return [\d.]+ over \d+ episodes that ended$", out, re.M)


@pytest.mark.slow
def test_torchrl_sac_swapped_is_torchrls_but_for_two_lines(tmp_path: Path) -> None:
    assert swapped("coming_from/torchrl_sac_swapped.py") == {
        "from torchrl.collectors import Collector": (
            "from tallyroll.collector.torchrl import Collector"
        ),
        "from torchrl.data import LazyMemmapStorage": (
            "from tallyroll.storage import MemmapStorage as LazyMemmapStorage"
        ),
    }
    out = run_in_new_interpreter(
        "coming_from/torchrl_sac_swapped.py",
        tmp_path,
        total_frames=610,
        frames_per_batch=50,
        random_frames=199,
        ring=300,
        updates=1,
        minibatch=16,
        width=16,
        eval_every=400,
        eval_episodes=2,
    )
    found = re.findall(r"^frames +(\d+)  in the buffer +(\d+)  alpha", out, re.MULTILINE)
    assert found == [("400", "300"), ("610", "300")]
    (total,) = numbers(r"^(\d+) transitions in ", out)
    assert total == 610
    # The example's temporary ring would be here if the interpreter did not remove it on exit.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ppo_multiprocess_trains_on_exactly_its_budget(run: Run, tmp_path: Path) -> None:
    out = run(
        "ppo_multiprocess.py",
        tmp_path,
        total_frames=300,
        frames_per_batch=128,
        num_envs=2,
        epochs=1,
        minibatch=64,
        eval_episodes=3,
    )
    sizes = re.findall(r"^batch +(\d+)  frames +(\d+) ", out, re.MULTILINE)
    assert sizes == [("128", "128"), ("128", "256"), ("44", "300")]
    stored, slots, resets, beyond = numbers(
        r"(\d+) transitions, exactly: (\d+) slots - (\d+) reset slots - (\d+) beyond", out
    )
    assert stored == 300 == slots - resets - beyond
    assert resets > 0


def test_ppo_multiprocess_differs_from_ppo_by_its_collector() -> None:
    one, many = (
        (EXAMPLES / name).read_text(encoding="utf-8").split('"""\n', 2)[1].splitlines()
        for name in ("ppo.py", "ppo_multiprocess.py")
    )
    changed = [line for line in difflib.unified_diff(one, many, n=0) if line[0] in "+-"]
    assert changed[2:] == [
        "-from tallyroll.collector import "
        "SyncCollector, evaluate, load_checkpoint, save_checkpoint",
        "+from tallyroll.collector import "
        "MultiprocessCollector, evaluate, load_checkpoint, save_checkpoint",
        '-    num_envs: int = option(8, "lanes")',
        '+    num_workers: int = option(2, "processes that step environments")',
        '+    num_envs: int = option(4, "lanes of each of them")',
        "-    collector = SyncCollector(",
        "+    collector = MultiprocessCollector(",
        "+        num_workers=args.num_workers,",
    ]


@pytest.mark.slow
def test_exact_benchmark_gives_both_policies_the_same_budget(run: Run, tmp_path: Path) -> None:
    out = run("exact_benchmark.py", tmp_path, frames=1001, frames_per_batch=300, episodes=3)
    slots, resets = counts("slots", out), counts("- reset slots", out)
    executed, discarded = counts("= executed", out), counts("- discarded", out)
    assert counts("= stored", out) == [1001, 1001]
    assert [a - b for a, b in zip(slots, resets, strict=True)] == executed
    assert [a - b for a, b in zip(executed, discarded, strict=True)] == [1001, 1001]
    assert resets[0] > resets[1]
    mean_random, mean_balance = map(float, cells("mean return, 3 whole episodes", out))
    assert mean_random < 100 < mean_balance


@pytest.mark.slow
def test_dqn_trains_on_exactly_its_budget_from_a_ring(run: Run, tmp_path: Path) -> None:
    out = run(
        "dqn.py",
        tmp_path,
        total_frames=1000,
        random_frames=200,
        num_envs=16,
        frames_per_batch=48,
        ring=300,
        updates=1,
        minibatch=16,
        eval_episodes=3,
    )
    # 63 steps of 16 lanes.
    assert (
        "1000 transitions, exactly: 1008 executed - 8 beyond the budget; 200 with random actions, "
        "700 overwritten, 300 in the ring"
    ) in out
    assert re.search(r"^frames +1000  in the ring +300  epsilon 0\.05 ", out, re.MULTILINE)
    verdict = r"evaluation: mean return [\d.]+ over (\d+) episodes \((?:not )?solved; (\d+) tran"
    episodes, transitions = numbers(verdict, out)
    assert episodes == 3
    assert transitions >= 3 * 8
    assert list(tmp_path.iterdir()) == []  # the temporary directory would be here


@pytest.mark.slow
def test_dqn_atari_stores_frames_once(run: Run, tmp_path: Path) -> None:
    out = run(
        "dqn_atari.py",
        tmp_path,
        total_frames=300,
        random_frames=200,
        num_envs=4,
        frames_per_batch=30,
        ring=250,
        updates=1,
        minibatch=4,
        target_every=2,
    )
    assert "300 transitions, exactly: 300 executed - 0 beyond the budget; 250 in the ring" in out
    assert re.search(r"^frames: [\d.]+ MiB for 250 rows, \d+ bytes a row; stored whole", out, re.M)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ppo_on_a_device_stores_its_budget_in_a_ring_there(run: Run, tmp_path: Path) -> None:
    out = run(
        "devices/ppo_on_device.py",
        tmp_path,
        device="cpu",
        total_frames=1001,
        frames_per_batch=400,
        num_envs=8,
        epochs=1,
        minibatch=200,
        ring=600,
    )
    assert re.findall(r"^ +(\d+) transitions, mean return \d", out, re.M) == ["400", "800", "1001"]
    assert "the ring has 600 of 1001 rows on cpu, " in out
    assert "the mean reward of 600 of them is 1.0" in out


@pytest.mark.slow
def test_dqn_with_a_device_ring_resumes_from_its_disk(run: Run, tmp_path: Path) -> None:
    for frames, begins in ((300, 0), (501, 300)):
        out = run(
            "devices/dqn_device_ring.py",
            tmp_path,
            device="cpu",
            out="kept",
            total_frames=frames,
            random_frames=100,
            num_envs=8,
            ring=200,
            updates=1,
            minibatch=16,
        )
        assert f"begins with {begins} transitions, {min(begins, 200)} in the ring" in out
        assert f"200 rows on cpu, {frames} on disk" in out
    assert open_storage(tmp_path / "kept" / "rows").head == 501
    assert not verify(tmp_path / "kept" / "rows").findings


@pytest.mark.slow
def test_async_offpolicy_trains_on_exactly_its_budget(run: Run, tmp_path: Path) -> None:
    out = run(
        "async_offpolicy.py",
        tmp_path,
        total_frames=1001,
        random_frames=200,
        num_envs=16,
        frames_per_batch=64,
        ring=300,
        updates=1,
        minibatch=16,
        eval_episodes=3,
    )
    executed, beyond = numbers(
        r"^1001 transitions, exactly: (\d+) executed - (\d+) beyond the budget; 200 with random "
        r"actions, 701 overwritten, 300 in the ring$",
        out,
    )
    assert executed - beyond == 1001
    assert beyond < 16
    # 16 batches. None of the first three begins an update, and the last one has 41 transitions.
    versions, most = numbers(
        r"^weights: (\d+) versions, one for every 64 transitions; [\d.]+ versions old on average "
        r"when a transition arrived, at most (\d+)$",
        out,
    )
    assert versions == 13
    assert 1 <= most <= versions  # the lag depends on the scheduler
    verdict = r"evaluation: mean return [\d.]+ over (\d+) episodes \((?:not )?solved; (\d+) tran"
    episodes, _ = numbers(verdict, out)
    assert episodes == 3
    assert list(tmp_path.iterdir()) == []  # the temporary directory would be here


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sac_learns_on_exactly_its_budget_from_a_ring(run: Run, tmp_path: Path) -> None:
    # The pendulum needs no extra, and takes fewer transitions to learn than running does.
    out = run(
        "sac.py",
        tmp_path,
        env_id="Pendulum-v1",
        total_frames=4001,
        random_frames=1003,
        ring=3500,
        updates=4,
        minibatch=64,
        width=64,
        gamma=0.95,
        lr=3e-3,
        tau=0.03,
        eval_episodes=11,
    )
    # 501 steps of 8 lanes.
    assert (
        "4001 transitions, exactly: 4008 executed - 7 beyond the budget; 1003 with random actions, "
        "501 overwritten, 3500 in the ring"
    ) in out
    assert re.search(r"^frames +4001  in the ring +3500  alpha 0\.\d+ ", out, re.MULTILINE)
    verdict = r"^evaluation: mean return (-\d+)\.\d over (\d+) episodes \((\d+) transitions, none"
    mean, episodes, transitions = numbers(verdict, out)
    assert (episodes, transitions) == (11, 11 * 200)
    assert mean > -400  # seeds 1 to 6: -243 to -137; random actions: -1340
    assert list(tmp_path.iterdir()) == []  # the temporary directory would be here


@pytest.mark.parametrize("name", ["dqn.py", "async_offpolicy.py"])
def test_dqn_says_solved_from_475_on(name: str) -> None:
    assert names_of(name)["SOLVED"] == 475


@pytest.mark.slow
def test_sequence_batches_learns_what_one_observation_does_not_show(
    run: Run, tmp_path: Path
) -> None:
    out = run(
        "batches/sequence_batches.py",
        tmp_path,
        frames=5000,
        frames_per_batch=800,
        num_envs=16,
        slice_len=20,
        slices=16,
        updates=200,
    )
    found = re.findall(r"^updates +(\d+)  error at first ([\d.]+)  later ([\d.]+)$", out, re.M)
    assert [int(update) for update, _, _ in found] == [0, 40, 80, 120, 160, 200]
    first, later = ([float(line[place]) for line in found] for place in (1, 2))
    assert later[-1] < later[0] / 4
    assert later[-1] < 0.7 * first[-1]
    rows, trajectories, long = numbers(
        r"(\d+) transitions, (\d+) trajectories, (\d+) of them at least 20 long", out
    )
    assert rows == 5000
    assert 16 <= long <= trajectories
    drawn, across = numbers(r"(\d+) slices, (\d+) of them across batches, none across traj", out)
    assert drawn == 3200
    assert 0 < across < drawn


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        (("collector", "traj_ids"), torch.tensor([5, 5, 6])),
        (("collector", "step"), torch.tensor([3, 4, 6])),
        (("observation",), torch.tensor([[0.0], [1.0], [3.0]])),
    ],
)
def test_sequence_batches_notices_a_slice_of_two_trajectories(
    key: tuple[str, ...], wrong: torch.Tensor
) -> None:
    check = names_of("batches/sequence_batches.py")["check"]
    values = torch.tensor([[0.0], [1.0], [2.0]])
    slices = TensorDict(
        {
            "observation": values,
            "next": {"observation": values + 1},
            "collector": {"traj_ids": torch.tensor([5, 5, 5]), "step": torch.tensor([3, 4, 5])},
        },
        [3],
    )[None]
    check(slices)
    with pytest.raises(AssertionError):
        check(slices.set(key, wrong[None]))


def test_off_policy_restart_evaluates_at_exactly_the_asked_transitions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_here(
        "off_policy_restart.py",
        capsys,
        total_frames=50,
        random_frames=20,
        eval_every=21,  # neither is a multiple of the number of lanes
        eval_episodes=2,
        updates=1,
        minibatch=8,
        csv=str(tmp_path / "curve.csv"),
    )
    with (tmp_path / "curve.csv").open(newline="", encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert [int(point["frames"]) for point in points] == [0, 21, 42, 50]
    assert list(points[0]) == ["frames", "evaluation", "lowest", "training", "seconds"]
    for point in points:  # possible returns of 200 pendulum steps
        assert -2000 < float(point["lowest"]) <= float(point["evaluation"]) < 0
    assert re.findall(r"^frames +(\d+)", out, re.MULTILINE) == ["0", "21", "42", "50"]
    assert out.endswith("50 transitions, exactly; 20 of them with random actions\n")


def test_off_policy_restart_goes_on_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"random_frames": 20, "eval_every": 21, "eval_episodes": 1, "updates": 1}
    small |= {"minibatch": 8, "folder": str(tmp_path / "run"), "csv": str(tmp_path / "curve.csv")}
    before = signal.getsignal(signal.SIGTERM)
    try:
        run_here("off_policy_restart.py", capsys, total_frames=25, **small)
        out = run_here("off_policy_restart.py", capsys, total_frames=50, **small)
    finally:
        signal.signal(signal.SIGTERM, before)
    with (tmp_path / "curve.csv").open(newline="", encoding="utf-8") as file:
        points = [point["frames"] for point in csv.DictReader(file)]
    assert points == ["0", "21", "25", "42", "50"]
    assert out.startswith(f"25 transitions from {tmp_path}")
    assert out.endswith("50 transitions, exactly; 20 of them with random actions\n")


RESTARTED: dict[str, dict[str, float | str]] = {
    "ppo.py": {"frames_per_batch": 64, "epochs": 1},
    "dqn.py": {
        "frames_per_batch": 10,
        "random_frames": 50,
        "ring": 150,
        "updates": 1,
        "prioritized": True,
    },
    "sac.py": {
        "env_id": "Pendulum-v1",
        "frames_per_batch": 10,
        "random_frames": 50,
        "ring": 150,
        "updates": 1,
        "width": 8,
    },
}


@pytest.mark.parametrize("name", RESTARTED)
def test_an_example_that_was_ended_goes_on_from_its_checkpoint(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, args = (names_of(name)[each] for each in ("main", "Args"))
    save = main.__globals__["save_checkpoint"]
    options = RESTARTED[name] | {"seed": 3, "num_envs": 3, "minibatch": 8, "eval_episodes": 1}
    options |= {"total_frames": 201, "checkpoint": str(tmp_path)}

    def run_until(ends: int) -> str:
        """Resume, and send SIGTERM while the checkpoint of ``ends`` transitions is saved."""

        def saving(*path: Path, collector: SyncCollector, **parts: Any) -> Path | None:
            if collector.ledger.stored == ends:
                os.kill(os.getpid(), signal.SIGTERM)
            return save(*path, collector=collector, **parts)

        main.__globals__["save_checkpoint"] = saving
        main(args(**options))
        return capsys.readouterr().out

    before = signal.getsignal(signal.SIGTERM)
    # PPO ends after this checkpoint; the others collect once more before they end.
    later, steps = (0, (64, 128)) if name == "ppo.py" else (10, (50, 100))
    try:
        for ends in steps:
            with pytest.raises(SystemExit, match=rf"^saved by a signal at {ends + later} trans"):
                run_until(ends)
        out = run_until(-1)
    finally:
        signal.signal(signal.SIGTERM, before)
    from_there = re.findall(rf"^(\d+) transitions from {tmp_path}", out, re.MULTILINE)
    assert [int(each) for each in from_there] == [each + later for each in steps]
    (counted,) = re.findall(r"^201 transitions, exactly: (.*) beyond", out, re.MULTILINE)
    made, *minus = (int(each) for each in re.findall(r"\d+", counted))
    assert made - sum(minus) == 201
    assert verify(tmp_path / "3").sound
    with open_storage(tmp_path / "3") as storage:
        assert storage.head == 201


def command(folder: Path, name: str, text: str) -> None:
    """Create a shell script as a command in the first folder of the search path."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that comes first in the search path."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def array_job(task: int | str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", EXAMPLES / "array_job.sh", *arguments],
        env=os.environ
        | {"RUNS": "here", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(task)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_array_job_gives_each_task_its_algorithm_and_seed(commands: Path) -> None:
    command(commands, "python", 'echo "$@"')
    found = []
    for task in range(15):
        out, err = array_job(task, "--total-frames", "11").communicate(timeout=20)
        assert err == ""
        found += re.findall(
            r"^examples/(\w+)\.py --seed (\d) --eval-episodes 10 --checkpoint here/(\w+) "
            r"--.* --total-frames 11$",
            out,
        )
    assert found == [
        (name, str(seed), name) for name in ("ppo", "dqn", "sac") for seed in range(1, 6)
    ]
    for wrong in ("15", "-1", "x", "07", ""):
        job = array_job(wrong)
        said = "SLURM_ARRAY_TASK_ID: expected the number of a job, 0 to 14, got '{}'\n"
        assert job.communicate(timeout=20) == ("", said.format(wrong))
        assert job.returncode == 2


@pytest.mark.parametrize(
    ("number", "status", "queued"),
    [
        (signal.SIGUSR1, 3, "requeue 77_4\n"),
        (signal.SIGUSR1, 0, ""),  # the run was about to end
        (signal.SIGTERM, 3, ""),  # Slurm requeues the job itself
    ],
)
def test_array_job_tells_its_run_and_goes_back_to_the_queue(
    number: signal.Signals, status: int, queued: str, commands: Path
) -> None:
    # The run takes a while to save, and the job waits for it.
    told = f"sleep 0.1; echo told; exit {status}"
    command(commands, "python", f"trap '{told}' TERM; echo ready; while :; do sleep 0.05; done")
    command(commands, "scontrol", 'echo "$@"')
    with array_job(4) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(number)
        assert job.communicate(timeout=20) == (f"told\n{queued}", "")
    assert job.returncode == status


def test_array_job_says_which_run_fails_by_itself_or_is_stuck(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", "python")
    names = names_of("array_job.py")
    main, args = names["main"], names["Args"]
    command(commands, "python", "echo no such environment; exit 1")
    with pytest.raises(
        SystemExit, match=r"^(ppo|dqn|sac)/1 failed by itself, see .*:\nno such env"
    ):
        main(args(folder=str(tmp_path), seeds=1))
    command(commands, "python", "sleep 100")
    with pytest.raises(SystemExit, match=r"^(ppo|dqn|sac)/1 is stuck: not done after 0 s; see "):
        main(args(folder=str(tmp_path), seeds=1, limit=0.1))


@pytest.mark.slow
def test_array_job_ends_with_exact_budgets_however_often_it_is_killed(
    run: Run, tmp_path: Path
) -> None:
    out = run(
        "array_job.py", tmp_path, folder="runs", seeds=1, total_frames=1501, kills=1, at_once=3
    )
    found = re.findall(r"^(\w+)/1  1501 transitions, exactly; (\d) starts, killed by", out, re.M)
    assert [name for name, _ in found] == ["ppo", "dqn", "sac"]
    # On a fast machine a job may end before its kill, or just as the kill arrives.
    assert any(starts == "2" for _, starts in found)
    assert re.search(r"^3 runs of 1501 transitions, 3 of them exact; [1-3] kills, ", out, re.M)
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert "CartPole-v1 · ppo" in page


def test_off_policy_restart_says_what_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of("off_policy_restart.py")
    curve, args = names["Curve"], names["Args"]
    (tmp_path / "old.csv").touch()
    with pytest.raises(SystemExit, match=r"--csv: .*old.csv exists; name a new file"):
        curve(args(csv=str(tmp_path / "old.csv")))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(SystemExit, match=r'--tensorboard: .*; pip install "tallyroll\[tens'):
        curve(args(tensorboard=str(tmp_path / "runs")))
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]


@pytest.mark.parametrize("memory", [8, 0])
def test_recurrent_ppo_trains_on_exactly_its_budget(
    memory: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_here(
        "recurrent_ppo.py",
        capsys,
        memory=memory,
        num_envs=3,
        total_frames=250,  # lanes have different numbers of rows
        frames_per_batch=100,
        epochs=1,
        minibatches=2,
        eval_episodes=3,
    )
    assert re.findall(r"^frames +(\d+)  return", out, re.MULTILINE) == ["100", "200", "250"]
    assert re.search(r"^250 transitions, exactly; ", out, re.MULTILINE)
    (episodes,) = numbers(r"evaluation: mean return [\d.]+ over (\d+) episodes", out)
    assert episodes == 3


def test_recurrent_ppo_computes_again_what_it_computed_step_by_step() -> None:
    """The GRU resets at the start of each lane and trajectory, and losses ignore padding."""
    names = names_of("recurrent_ppo.py")
    torch.manual_seed(0)
    core = GRUModule(2, 8, in_keys=names["SEEN"], out_keys=["_known", ("next", "state")])
    net = TensorDictSequential(
        core,
        TensorDictModule(torch.nn.Linear(8, 2), ["_known"], ["logits"]),
        TensorDictModule(torch.nn.Linear(8, 1), ["_known"], ["state_value"]),
    )
    policy = ProbabilisticTensorDictSequential(
        net,
        names["Sampled"](
            ["logits"], ["action"], distribution_class=names["Categorical"], return_log_prob=True
        ),
    )
    with SyncCollector(
        lambda: names["make"](3, core),
        policy,
        frames_per_batch=200,
        total_frames=400,
        layout="lanes",
        seed=0,
    ) as collector:
        for batch in collector:
            mask = batch["collector", "mask"]
            assert not mask.all()
            assert (batch["collector", "step"][mask] == 0).any()
            with torch.no_grad():
                names["add_targets"](batch, net)
                loss = names["loss_of"](batch, net)
            # Before any update the ratio is 1, so only the mean advantage remains.
            error = (batch["state_value"] - batch["target"])[mask].square().mean()
            assert torch.allclose(loss, error / 2, atol=1e-5)
            follows = (batch["collector", "step"][:, 1:] > 0) & mask[:, 1:]
            assert torch.equal(
                batch["next", "state"][:, :-1][follows], batch["state"][:, 1:][follows]
            )


def test_normalised_ppo_goes_on_with_its_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "num_envs": 3,
        "total_frames": 250,
        "frames_per_batch": 100,
        "epochs": 1,
        "eval_episodes": 3,
        "checkpoint": str(tmp_path / "run.pt"),
    }
    one = run_here("normalised_ppo.py", capsys, stop_after=1, **options)
    other = run_here("normalised_ppo.py", capsys, **options)
    assert re.findall(r"^frames +(\d+)  return", one + other, re.MULTILINE) == ["100", "200", "250"]
    (left,) = re.findall(r"^100 transitions, exactly; (scales .*)$", one, re.MULTILINE)
    assert f"continuing after 100 transitions; {left}\n" in other
    (now,) = re.findall(r"^250 transitions, exactly; (scales .*)$", other, re.MULTILINE)
    assert now != left
    assert re.search(r"^evaluation with frozen statistics: mean return \d", other, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize(
    ("name", "options", "stored"),
    [
        ("own_loop_dqn.py", {"total_steps": 602, "start": 200, "num_envs": 3}, 602),
        ("own_loop_ppo.py", {"total_steps": 500, "num_steps": 32, "num_envs": 3}, 576),
    ],
)
def test_own_loops_train_the_same_without_the_lines_of_the_recorder(
    name: str,
    options: dict[str, Any],
    stored: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows"
    *training, last = run_here(name, capsys, out=str(rows), **options).splitlines()
    assert last == f"{stored} transitions in {rows}"
    assert verify(rows).sound
    with open_storage(rows) as storage:
        columns = storage[:]
    assert len(columns) == stored
    assert columns["collector", "policy_version"].unique().numel() > 5
    if name == "own_loop_ppo.py":
        assert (columns["logp"] < 0).all()
        assert columns["value"].unique().numel() > 100

    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    plain = [line for line in lines if not line.endswith("  # recorder")]
    (tmp_path / "plain.py").write_text("\n".join(plain), encoding="utf-8")
    assert "ecorder(" not in "\n".join(plain)
    names = runpy.run_path(str(tmp_path / "plain.py"))
    names["main"](names["Args"](out=str(tmp_path / "nothing"), **options))
    assert capsys.readouterr().out.splitlines() == training
    assert not (tmp_path / "nothing").exists()

    # The page shows all lines of the recorder, and the lines next to them.
    page = (EXAMPLES.parent / "docs" / "own_loop.md").read_text(encoding="utf-8")
    header = f"+++ examples/{name}\n"
    (shown,) = re.findall(rf"{re.escape(header)}(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [line[1:] for line in shown.splitlines() if line[0] == "+"] == [
        line for line in lines if line not in plain
    ]
    source = "\n".join(lines) + "\n"
    for part in shown.split("...\n"):
        assert "".join(line[1:] for line in part.splitlines(keepends=True)) in source


def test_robot_loop_stores_every_tick_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how: dict[str, Any] = {"out": str(tmp_path / "rows"), "limit": 0.3, "commit_every": 1000}
    start = time.monotonic()
    out = run_here("robot_loop.py", capsys, hz=50, seconds=0.6, **how)
    assert time.monotonic() - start > 0.6
    assert "0 transitions so far, recording at 50 Hz\n" in out
    assert "\n30 transitions stored; 30 in all, of 2 complete and 0 cut episodes\n" in out
    assert out.count(" missed\n") == 2
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    out = run_here("robot_loop.py", capsys, hz=50, seconds=60, **how)
    interrupt.join()
    assert out.startswith("30 transitions so far")
    more, total = numbers(r"^interrupted\n(\d+) transitions stored; (\d+) in all", out)
    assert 0 < more == total - 30 < 100
    assert verify(tmp_path / "rows").sound
    with open_storage(tmp_path / "rows") as storage:
        rows = storage[:]
        ids, ended = rows["collector", "traj_ids"], rows["next", "done"][:, 0]
        follows = (ids[1:] == ids[:-1]).nonzero()[:, 0]
        assert len(rows) == total
    assert torch.equal(rows["next", "observation"][follows], rows["observation"][follows + 1])
    assert not ended[follows].any()


CLONED = {"frames": 1001, "num_envs": 3, "epochs": 2, "minibatch": 100, "eval_episodes": 3}


def test_clone_dataloader_reads_each_row_once_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_here("batches/clone_dataloader.py", capsys, workers=0, **CLONED)
    assert re.search(r"^1001 transitions; return of the data [\d.]+$", out, re.MULTILINE)
    rows = re.findall(r"^epoch +(\d)  rows +(\d+)  return of the clone", out, re.MULTILINE)
    assert rows == [("0", "0"), ("1", "1001"), ("2", "1001")]


@pytest.mark.slow
def test_clone_dataloader_learns_the_same_from_two_workers(
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = CLONED | {"epochs": 1}
    alone = run_here("batches/clone_dataloader.py", capsys, workers=0, **options)
    # Workers send tensors over sockets in the temporary directory. A socket's path is limited to
    # 107 bytes.
    with tempfile.TemporaryDirectory() as short:
        for start_method in ("fork", "spawn"):
            out = run(
                "batches/clone_dataloader.py", Path(short), start_method=start_method, **options
            )
            assert out.splitlines()[:-1] == alone.splitlines()[:-1]  # the last line has the seconds
        assert list(Path(short).iterdir()) == []  # the temporary directory would be here


def test_rows_with_images_become_datasets_of_lerobot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    pytest.importorskip("pyarrow")
    out = run_here("datasets/to_lerobot.py", capsys, out=tmp_path / "data", transitions=203)
    found = re.findall(
        r"^(\S+) +203 rows .* (\d+) rows come back the same  (.*)$", out, re.MULTILINE
    )
    assert [(name, same) for name, same, _ in found] == [
        ("images", "203"),
        ("h264-lossless", "203"),
        ("av1", "0"),
    ]
    assert [lost == "{}" for *_, lost in found] == [True, True, False]
    assert run_here("datasets/to_lerobot.py", capsys, out=tmp_path / "data", transitions=203) == ""


def test_a_dataset_is_made_of_shards_and_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "data")
    small = {"transitions": 601, "epochs": 1, "minibatch": 100, "eval_episodes": 3}
    out = run_here("datasets/offline_iql.py", capsys, data=data, **small)  # makes the dataset first
    table = re.findall(r"^(\w+) +(\d+) +(\d+) +[\d.]+ +\d+ +\d+$", out, re.MULTILINE)
    rows = {name: int(number) for name, number, _ in table}
    episodes = {name: int(number) for name, _, number in table}
    assert list(rows) == ["random", "poor", "good", "all", "train", "val"]
    assert [rows[name] for name in ("random", "poor", "good", "all")] == [601, 601, 601, 1803]
    assert rows["train"] + rows["val"] == 1803
    found = re.findall(r"^epoch +(\d)  rows +(\d+)  return", out, re.MULTILINE)
    assert found == [("0", "0"), ("1", str(rows["train"]))]
    with open_storage([tmp_path / "data" / f"{part}.packed" for part in ("train", "val")]) as both:
        assert len(both) == 1803
        assert len(both.trajectories) == episodes["all"] == episodes["train"] + episodes["val"]
    with open_storage(tmp_path / "data" / "good.packed") as good:
        assert good.trajectories.returns.min() >= 100

    # A second run skips complete shards and keeps packed rows.
    again = run_here("datasets/make_dataset.py", capsys, out=data, transitions=601)
    assert again.splitlines()[:7] == out.splitlines()[:7]
    with pytest.raises(SystemExit, match=r"train\.packed was made with other options"):
        run_here("datasets/make_dataset.py", capsys, out=data, transitions=700)


@pytest.mark.slow
def test_goals_in_hindsight_and_old_rows_are_compared_with_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run_here("batches/hindsight_bits.py", capsys, quick=True)
    assert out.startswith("5 bits, 2000 transitions; share of episodes with success\n")
    ((without, hindsight),) = re.findall(r"^1 +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert float(hindsight) > float(without) + 0.3
    out = run_here("batches/offline_to_online.py", capsys, quick=True, eval_episodes=5)
    assert re.search(r"^1 +[\d.]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)


@pytest.mark.slow
def test_other_libraries_read_what_open_storage_reads(run: Run, tmp_path: Path) -> None:
    out = run(
        "datasets/read_with_h5py_and_zarr.py",
        tmp_path,
        frames=1001,
        frames_per_batch=300,
        num_envs=3,
        out="shared",
    )
    same = "1001 rows, every bit as open_storage gives it"
    for library in ("h5py", "tensordict", "zarr", "tensorstore", "xarray"):
        assert re.search(rf"^  {library} +{same}$", out, re.MULTILINE)
    assert out.count("CartPole-v1, 3 lanes, seed 0") == 2
    assert out.count("finalized, 1001 rows verified: ") == 2
    assert out.endswith("both hold the same rows\n")

    # Read the files without the example, and compare them with its output.
    h5, group = (tmp_path / "shared" / f"cartpole.{ending}" for ending in ("h5", "zarr"))
    root = zarr.open_group(group, mode="r")
    with h5py.File(h5) as file, open_storage(h5) as storage:
        assert storage.manifest["finalized"]["checksums"]["rows"] == 1001
        assert (file.attrs["rows"], root.attrs["rows"]) == (1001, 1001)
        assert json.loads(file.attrs["schema"]) == json.loads(root.attrs["schema"])
        keys = storage.schema.keys
        assert len(keys) == 11
        for key in keys:
            wanted, name = storage.column(key), "/".join(key)
            assert file[name].shape == root[name].shape == wanted.shape
            assert len(wanted) == 1001
            assert file[name][...].tobytes() == root[name][...].tobytes() == wanted.tobytes()


def test_reading_notices_another_bit_name_shape_or_dtype() -> None:
    same = names_of("datasets/read_with_h5py_and_zarr.py")["same"]
    ours = {"reward": np.zeros((4, 1), np.float32)}
    assert same(ours, {"reward": np.zeros((4, 1), np.float32)})
    assert not same(ours, {"reward": -np.zeros((4, 1), np.float32)})
    assert not same(ours, {"reward": np.zeros(4, np.float32)})
    assert not same(ours, {"reward": np.zeros((4, 1), np.int32)})
    assert not same(ours, {"rewards": np.zeros((4, 1), np.float32)})


def test_repair_recording_saves_all_that_was_flushed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_here(
        "datasets/repair_recording.py", capsys, out=str(tmp_path / "out"), rows=200, chunk=16
    )
    (flushed,) = numbers(r"killed after (\d+) rows were flushed", out)
    (saved,) = numbers(r"(\d+) rows saved, at least as many as were flushed: True", out)
    assert saved >= flushed >= 200
    assert "sound: True" in out
