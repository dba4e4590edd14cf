"""``--shard``: jobs of an array are killed and restarted by the same command.

``TALLYROLL_KILLS`` is the number of kills, 4 by default.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from random_shards import joined, rows_of

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli.parser import make_parser
from tallyroll.storage import open_storage, verify
from tallyroll.storage.rows.keys import LANE, STEP, TRAJ_IDS

from collect_kit import check_numbers
from warm_cli import Command, WarmServer

KILLS = int(os.environ.get("TALLYROLL_KILLS", "4"))
EXAMPLES = Path(__file__).parents[3] / "examples"
FRAMES, LANES, SHARDS = 2001, 13, 3
COLLECT = ["collect", "CartPole-v1", "--frames", "3001", "--num-envs", "13", "--seed", "0"]


def words_of(
    tmp_path: Path, *script: str | Path, command: str = "collect", **environment: str
) -> list[str]:
    """Return the arguments that a script gives to a command of ``tallyroll``."""
    fake = tmp_path / "commands" / "tallyroll"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!/bin/sh\n[ $1 = {command} ] || exit 0\nprintf '%s\\n' \"$@\"\n")
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
    script = ("bash", EXAMPLES / "cluster" / "shards_slurm.sh", *more)
    return words_of(tmp_path, *script, SLURM_ARRAY_TASK_ID=str(task), SHARDS=str(SHARDS))


def test_kubernetes_and_slurm_give_the_same_command(tmp_path: Path) -> None:
    text = (EXAMPLES / "cluster" / "shards_kubernetes.yaml").read_text()
    assert re.findall(r"(completions|parallelism): (\d+)", text) == [
        ("completions", "8"),
        ("parallelism", "8"),
    ]
    script, merging = re.findall(r"(?ms)>-\n(.*?)^ +volumeMounts", text)
    found = words_of(tmp_path, "sh", "-c", " ".join(script.split()), JOB_COMPLETION_INDEX="5")
    slurm = ("bash", EXAMPLES / "cluster" / "shards_slurm.sh")
    wanted = words_of(tmp_path, *slurm, SLURM_ARRAY_TASK_ID="5", RUNS=str(tmp_path / "data"))
    assert [each.removeprefix(str(tmp_path)) for each in wanted] == found
    args = make_parser().parse_args(found)
    assert (args.shard, args.resume, args.out) == ("5/8", True, "/data/part-5")
    # Only the last job of an array merges them.
    merged = words_of(tmp_path, "sh", "-c", " ".join(merging.split()), command="merge")
    for task in ("7", "5"):
        more = {"SLURM_ARRAY_TASK_ID": task, "RUNS": str(tmp_path / "data")}
        found = words_of(tmp_path, *slurm, command="merge", **more)
        said = [each.removeprefix(str(tmp_path)) for each in found]
        assert said == (merged if task == "7" else []), task
    args = make_parser().parse_args(merged)
    assert (args.destination, args.sources) == ("/data/all", ["/data/part-*"])
    assert (args.shards, args.wait, args.timeout) == (8, True, 86400)
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
    server.run(folders[0], *jobs[0])  # queued again, the job has nothing to do
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


def alone() -> list[str]:
    """Return the prefix that runs a command without a network, or nothing if not permitted."""
    words = ["unshare", "-rn"]
    try:
        may = subprocess.run([*words, "true"], capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        may = False
    return words if may else []


@pytest.mark.timeout(180)
def test_jobs_of_an_array_end_with_one_storage_of_all(tmp_path: Path) -> None:
    """The script runs as in Slurm: one process per job, and only a folder in common."""
    command = tmp_path / "commands" / "tallyroll"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tallyroll.collector.cli "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "RUNS": str(tmp_path / "runs"),
        "SHARDS": str(SHARDS),
        "WAIT": "90",
    }
    script, jobs = EXAMPLES / "cluster" / "shards_slurm.sh", []
    try:
        for task in reversed(range(SHARDS)):  # the job that waits starts first
            jobs.append(
                subprocess.Popen(
                    [*alone(), "bash", script, "--frames", str(FRAMES), "--num-envs", str(LANES)],
                    env={**environment, "SLURM_ARRAY_TASK_ID": str(task)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for job in jobs:
            _, err = job.communicate(timeout=120)
            assert job.returncode == 0, err
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    parts = [rows_of(tmp_path / "runs" / f"part-{task}") for task in range(SHARDS)]
    whole = rows_of(tmp_path / "runs" / "all")
    assert len(whole[LANE]) == FRAMES
    for key, values in joined(parts).items():
        assert (values == joined([whole])[key]).all(), key
    assert verify(tmp_path / "runs" / "all").sound


class TestWaiting:
    """``merge --shards`` merges all shards of a run, or names the missing ones in an error."""

    @pytest.fixture(scope="class")
    @classmethod
    def parts(cls, server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Collect shards 0 and 2 of 3 completely, and shard 1 in several states."""
        folder = tmp_path_factory.mktemp("parts")
        for index, name in ((0, "part-0"), (1, "later"), (2, "part-2")):
            server.run(folder, *COLLECT, "--shard", f"{index}/3", "--out", name, "--quiet")
        server.run(
            folder, *COLLECT, "--shard", "1/3", "--out", "begun", "--frames", "1500", "--quiet"
        )
        return folder

    def merge(self, server: WarmServer, folder: Path, *more: str) -> Command:
        return server.start(folder, "merge", "all", "part-*", *more)

    def test_what_is_missing_is_named(self, server: WarmServer, parts: Path) -> None:
        command = self.merge(server, parts, "--shards", "3", "--json")
        assert command.wait() == 1
        assert "not all of 3 shards are complete: shards 1 of 3 are missing." in command.err
        said = json.loads(command.out)
        assert (said["complete"], said["missing"], said["unfinished"]) == (False, [1], {})
        assert said["asked"] == 3001
        assert not (parts / "all").exists()

    def test_one_that_is_not_complete_is_named(self, server: WarmServer, tmp_path: Path) -> None:
        for index in range(2):
            with SyncCollector(
                "CartPole-v1",
                num_envs=4,
                frames_per_batch=100,
                total_frames=1001,
                seed=0,
                shard=f"{index}/2",
                storage=tmp_path / f"part-{index}",
            ) as collector:
                for _ in collector:
                    if index:
                        break
        command = self.merge(server, tmp_path, "--shards", "2", "--json")
        assert command.wait() == 1
        assert "shard 1 (part-1) has 100 of 500 rows. Nothing was written" in command.err
        unfinished = {"1": {"rows": 100, "wanted": 500, "path": "part-1"}}
        assert json.loads(command.out)["unfinished"] == unfinished
        assert not (tmp_path / "all").exists()

    def test_it_waits_no_longer_than_it_may(self, server: WarmServer, parts: Path) -> None:
        began = time.monotonic()
        command = self.merge(server, parts, "--shards", "3", "--wait", "--timeout", "1.2")
        assert command.wait() == 1
        assert 1.2 <= time.monotonic() - began < 20
        assert "complete after 1.2 s: shards 1 of 3 are missing" in command.err

    def test_it_waits_for_what_comes(self, server: WarmServer, parts: Path) -> None:
        command = self.merge(server, parts, "--shards", "3", "--wait", "--timeout", "60")
        time.sleep(1.5)
        assert not (parts / "all").exists()
        (parts / "later").rename(parts / "part-1")
        assert command.wait() == 0
        with open_storage(parts / "all") as storage:
            assert len(storage) == 3001
        (parts / "part-1").rename(parts / "later")
        (parts / "all").rename(parts / "done")

    def test_another_run_is_no_shard_of_it(self, server: WarmServer, parts: Path) -> None:
        (parts / "begun").rename(parts / "part-1")
        command = self.merge(server, parts, "--shards", "3")
        assert command.wait() == 1
        assert "part-1: expected one of 3 shards of one run, got shard 1/3 of run" in command.err
        assert "of 1500 transitions" in command.err
        (parts / "part-1").rename(parts / "begun")
        command = self.merge(server, parts, "--shards", "4", "--wait")  # does not wait for it
        assert command.wait() == 1
        assert "expected one of 4 shards of one run" in command.err

    @pytest.mark.parametrize("words", ["--wait", "--shards 0", "--shards 3 --timeout 0"])
    def test_wrong_words(self, server: WarmServer, parts: Path, words: str) -> None:
        assert self.merge(server, parts, *words.split()).wait() == 2


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            "--shard 3/3",
            "0 to 2 of 3 shards, got 3. Indices count from 0, so the last of 3 shards is 2/3",
        ),
        ("--shard 3", 'expected "I/N", shard I of N, counted from 0, such as "0/8", got \'3\''),
        ("--shard -1/3", "expected one argument"),
        ("--shard=-1/3", 'expected "I/N", shard I of N, counted from 0'),
        ("--shard 0/14", "--shard 0/14: expected at most 13 shards, one for each lane, got 14"),
        ("--shard 0/3 --workers 5", "at most the number of lanes in shard 0/3, 4, got 5"),
        (
            "--shard 0/3 --frames 8",
            "at least 9, a transition for each of 3 shards of 13 lanes, got 8",
        ),
        ("--shard 0/3 --budget-unit agent_transitions", "expected --frames, the number of transit"),
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
        ("--frames 100", "--shard 0/2: expected the same --seed for each of the shards"),
        ("--episodes 9 --seed 0", "--shard 0/2: expected --frames, the number of transitions"),
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
        ("--shard 2/3", "data has shard 1/3, but --shard 2/3 was given. Give each shard"),
        ("--shard 1/4", "data has shard 1/3, but --shard 1/4 was given. Give each shard"),
    ):
        command = server.start(tmp_path, *COLLECT, *words.split(), "--out", "data", "--resume")
        assert command.wait() == 1
        assert match in " ".join(command.err.split())
    # Omitted options come from the manifest. A larger budget takes its share from each lane.
    again = server.run(tmp_path, "collect", "--frames", 3100, "--out", "data", "--resume")
    assert "954 frames of CartPole-v1" in again.out
    server.run(tmp_path, *COLLECT, "--out", "whole")
    command = server.start(tmp_path, *COLLECT, "--shard", "0/3", "--out", "whole", "--resume")
    assert command.wait() == 1
    assert "whole has a whole run, but --shard 0/3 was given" in " ".join(command.err.split())
