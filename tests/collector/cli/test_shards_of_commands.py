"""``--shard``: jobs of an array that are killed and started again by the same command.

``TALLYROLL_KILLS`` says how many are killed, 4 by default.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from random_shards import joined, rows_of

from tallyroll.collector.cli.parser import make_parser
from tallyroll.storage import open_storage, verify
from tallyroll.storage.rows.keys import LANE, STEP, TRAJ_IDS

from collect_kit import check_numbers
from warm_cli import WarmServer

KILLS = int(os.environ.get("TALLYROLL_KILLS", "4"))
EXAMPLES = Path(__file__).parents[3] / "examples"
FRAMES, LANES, SHARDS = 2001, 13, 3
COLLECT = ["collect", "CartPole-v1", "--frames", "3001", "--num-envs", "13", "--seed", "0"]


def words_of(tmp_path: Path, *script: str | Path, **environment: str) -> list[str]:
    """Return the arguments that a script gives to ``tallyroll``."""
    fake = tmp_path / "commands" / "tallyroll"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    out = subprocess.run(
        script,
        env={**os.environ, **environment, "PATH": path},
        cwd=tmp_path,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=20,
    ).stdout
    return out.split("\n")[:-1]


def of_slurm(tmp_path: Path, task: int, *more: str) -> list[str]:
    script = ("bash", EXAMPLES / "shards_slurm.sh", *more)
    return words_of(tmp_path, *script, SLURM_ARRAY_TASK_ID=str(task), SHARDS=str(SHARDS))


def test_kubernetes_and_slurm_give_the_same_command(tmp_path: Path) -> None:
    text = (EXAMPLES / "shards_kubernetes.yaml").read_text()
    assert re.findall(r"(completions|parallelism): (\d+)", text) == [
        ("completions", "8"),
        ("parallelism", "8"),
    ]
    (script,) = re.findall(r"(?ms)>-\n(.*?)^ +volumeMounts", text)
    found = words_of(tmp_path, "sh", "-c", " ".join(script.split()), JOB_COMPLETION_INDEX="5")
    slurm = ("bash", EXAMPLES / "shards_slurm.sh")
    wanted = words_of(tmp_path, *slurm, SLURM_ARRAY_TASK_ID="5", RUNS=str(tmp_path / "data"))
    assert [each.removeprefix(str(tmp_path)) for each in wanted] == found
    args = make_parser().parse_args(found)
    assert (args.shard, args.resume, args.out) == ("5/8", True, "/data/part-5")
    wrong = subprocess.run(
        slurm, env={**os.environ, "SLURM_ARRAY_TASK_ID": ""}, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "expected the number of a shard, from 0 on, got ''" in wrong.stderr


@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_jobs_of_an_array_are_together_exactly_the_run(
    server: WarmServer, tmp_path: Path
) -> None:
    more = shlex.split(f"--frames {FRAMES} --num-envs {LANES} --frames-per-batch 2")
    jobs = [of_slurm(tmp_path, task, *more) for task in range(SHARDS)]
    chance, folders = random.Random(7), [tmp_path / str(task) for task in range(SHARDS)]
    for number in range(KILLS):
        task = number % SHARDS
        command = server.start(folders[task], *jobs[task])
        header = folders[task] / "runs" / f"part-{task}" / "manifest.json"
        deadline = time.monotonic() + 60
        while not header.exists() and number % 4:
            assert time.monotonic() < deadline, command.err
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.06))
        command.kill(chance.choice([signal.SIGKILL, signal.SIGTERM]))
        command.wait()
    for folder, words in zip(folders, jobs, strict=True):
        server.run(folder, *words)
    server.run(folders[0], *jobs[0])  # queued once more, it has nothing to do
    parts, entries = [], []
    for task, folder in enumerate(folders):
        path = folder / "runs" / f"part-{task}"
        assert not verify(path).findings
        parts.append(rows_of(path))
        with open_storage(path) as storage:
            entries.append(storage.manifest["runs"][-1]["shard"])
    assert [len(part[LANE]) for part in parts] == [616, 616, 769]
    rows = joined(parts)
    assert len(rows[LANE]) == FRAMES
    assert (rows[TRAJ_IDS] % LANES == rows[LANE]).all()
    check_numbers(rows[TRAJ_IDS], rows[STEP])
    assert len({each["run"] for each in entries}) == 1
    assert [each["index"] for each in entries] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            "--shard 3/3",
            "0 to 2 of 3 shards, got 3; it counts from 0, so that the last of 3 is 2/3",
        ),
        ("--shard 3", 'expected "I/N", shard I, from 0 on, of N, as "0/8", got \'3\''),
        ("--shard -1/3", "expected one argument"),
        ("--shard=-1/3", 'expected "I/N", shard I, from 0 on'),
        ("--shard 0/14", "--shard 0/14: expected at most 13 shards, one for each lane, got 14"),
        ("--shard 0/3 --workers 5", "at most as many as there are lanes in shard 0/3, 4, got 5"),
        ("--shard 0/3 --frames 8", "a transition for each of 3 shards of 13 lanes: 9 or more"),
        ("--shard 0/3 --budget-unit agent_transitions", "expected --frames, a number of transit"),
    ],
)
def test_wrong_shards_are_usage_errors(
    words: str, match: str, server: WarmServer, tmp_path: Path
) -> None:
    command = server.start(tmp_path, *COLLECT, "--out", "data", *words.split())
    assert command.wait() == 2
    assert match in " ".join(command.err.split())
    assert not (tmp_path / "data").exists()


def test_a_shard_wants_a_seed_and_a_number_of_frames(server: WarmServer, tmp_path: Path) -> None:
    for words, match in (
        ("--frames 100", "--shard 0/2: expected --seed, the same for each of the shards"),
        ("--episodes 9 --seed 0", "--shard 0/2: expected --frames, a number of transitions"),
    ):
        command = server.start(
            tmp_path,
            "collect",
            "CartPole-v1",
            "--num-envs",
            4,
            *words.split(),
            "--shard",
            "0/2",
            "--out",
            "data",
        )
        assert command.wait() == 2
        assert match in " ".join(command.err.split())


def test_a_shard_is_shown_and_continued_as_itself_alone(server: WarmServer, tmp_path: Path) -> None:
    made = server.run(tmp_path, *COLLECT, "--shard", "1/3", "--out", "data")
    assert "1/3 lanes 4 to 7 of 13, of 3,001 frames in all" in " ".join(made.out.split())
    assert "more of the same" not in made.out
    shown = " ".join(server.run(tmp_path, "inspect", "data").out.split())
    assert "13 lanes, seed 0, shard 1/3: lanes 4 to 7, 3,001 frames in all shards of run" in shown
    for words, match in (
        ("--shard 2/3", "data has shard 1/3, and --shard 2/3 was given; give each shard"),
        ("--shard 1/4", "data has shard 1/3, and --shard 1/4 was given; give each shard"),
    ):
        command = server.start(tmp_path, *COLLECT, *words.split(), "--out", "data", "--resume")
        assert command.wait() == 1
        assert match in " ".join(command.err.split())
    # What is left out stands in the manifest; a larger budget has its part of each lane.
    again = server.run(tmp_path, "collect", "--frames", 3100, "--out", "data", "--resume")
    assert "954 frames of CartPole-v1" in again.out
    server.run(tmp_path, *COLLECT, "--out", "whole")
    command = server.start(tmp_path, *COLLECT, "--shard", "0/3", "--out", "whole", "--resume")
    assert command.wait() == 1
    assert "whole has a whole run, and --shard 0/3 was given" in " ".join(command.err.split())
