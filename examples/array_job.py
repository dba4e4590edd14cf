"""Run 15 training jobs that are killed at random and restarted, and check that budgets are exact.

    pip install -c constraints.txt ".[report]"
    python examples/array_job.py

Each run is a job of the Slurm script ``examples/array_job.sh``: PPO, DQN and SAC with five seeds
each. This script runs the jobs as local processes, ``--at-once`` at a time. It kills each job at
random, either with SIGKILL or with SIGTERM, on which the job saves a checkpoint. A killed job goes
to the end of the queue and is restarted with the same command. At the end the script reads and
verifies every storage, checks that it has exactly the requested number of transitions and that its
ledger balances, and writes a report.

Measured with --at-once 3: 45 kills, 25 of them by SIGKILL, and 60 starts; all 15 runs are exact.
It took 19.3 minutes on two cores that were busy with other work. Most of that time goes into
importing torch 60 times.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

from tallyroll.collector import report
from tallyroll.storage import open_storage, verify
from tallyroll.storage.errors import StorageError

SCRIPT = Path(__file__).with_suffix(".sh").resolve()
ALGORITHMS, SEEDS = ("ppo", "dqn", "sac"), 5  # in the order of the script


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    folder: str = option("runs/array", "directory of rows, checkpoints, outputs and the report")
    seeds: int = option(SEEDS, "runs of each algorithm, at most 5")
    total_frames: int = option(5001, "transitions of each run, exactly")
    kills: int = option(3, "how often each run is killed, unless it is done before")
    at_once: int = option(2, "runs at a time")
    limit: float = option(600.0, "seconds after which a start that is not done counts as stuck")
    seed: int = option(0, "of the kills")


def parse() -> Args:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for each in fields(Args):
        name, kind = each.name.replace("_", "-"), type(each.default)
        text = f"{each.metadata['help']} (default: {each.default})"
        parser.add_argument(f"--{name}", type=kind, default=each.default, help=text)
    args = Args(**vars(parser.parse_args()))
    ranges = {"seeds": (1, SEEDS), "total_frames": (1, 10**9), "kills": (0, 99), "at_once": (1, 99)}
    for name, (low, high) in ranges.items():
        if not low <= (value := getattr(args, name)) <= high:
            parser.error(f"--{name.replace('_', '-')}: expected {low} to {high}, got {value}")
    for package in ("scipy", "jinja2"):  # the report, which comes last, needs them
        if find_spec(package) is None:
            parser.error(f'{package} is not installed; pip install "tallyroll[report]"')
    return args


@dataclass
class Job:
    """A job of the array, with the kills and starts that it has had."""

    task: int
    folder: Path
    kills: list[tuple[signal.Signals, float, float]]
    """Kills to come: (signal, share of the remaining transitions, seconds after the start)."""
    killed: list[str] = field(default_factory=list)
    starts: int = 0

    @property
    def name(self) -> str:
        return f"{ALGORITHMS[self.task // SEEDS]}/{self.task % SEEDS + 1}"

    @property
    def stored(self) -> int:
        """The number of committed transitions."""
        try:
            with open_storage(self.folder / self.name) as storage:
                return storage.head
        except StorageError:  # the storage does not exist yet
            return 0

    def run(self, args: Args, stop: Event) -> bool:
        """Start the job, and kill it if a kill is due. Return True if it has finished."""
        self.starts += 1
        number, share, seconds = self.kills.pop() if self.kills else (None, 0.0, 0.0)
        begun = self.stored
        at = begun + int(share * (args.total_frames - begun))
        log = self.folder / f"{self.name.replace('/', '-')}.txt"
        with log.open("a") as output:
            process = subprocess.Popen(
                ["bash", SCRIPT, f"--total-frames={args.total_frames}"],
                cwd=SCRIPT.parents[1],
                env={"PYTHON": sys.executable, **os.environ}
                | {"RUNS": str(self.folder), "SLURM_ARRAY_TASK_ID": str(self.task)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        began, sent = time.monotonic(), False
        try:
            while process.poll() is None:
                ran = time.monotonic() - began
                if stop.is_set():
                    return False
                if ran > args.limit:
                    raise SystemExit(f"{self.name} is stuck: not done after {ran:.0f} s; see {log}")
                if number and not sent and ran >= seconds and (now := self.stored) >= at:
                    sent = True
                    self.killed.append(f"{number.name[3:]} at {now}")
                    if number == signal.SIGKILL:
                        os.killpg(process.pid, number)
                    else:  # like Slurm: signal only the script, which forwards it to the run
                        process.send_signal(number)
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):  # all of its processes have exited
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode and not sent:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise SystemExit(f"{self.name} failed by itself, see {log}:\n{last}")
        return process.returncode == 0


def run_all(jobs: list[Job], args: Args) -> None:
    """Run ``args.at_once`` jobs at a time. Killed jobs go to the end of the queue."""
    stop = Event()
    with ThreadPoolExecutor(args.at_once) as pool:
        try:
            under_way = {pool.submit(job.run, args, stop): job for job in jobs}
            while under_way:
                for ended in wait(under_way, return_when=FIRST_COMPLETED).done:
                    job = under_way.pop(ended)
                    if not ended.result():
                        under_way[pool.submit(job.run, args, stop)] = job
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def main(args: Args) -> None:
    start, draw = time.perf_counter(), random.Random(args.seed)
    folder = Path(args.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = []
    for task in range(len(ALGORITHMS) * SEEDS):
        kills = []
        for _ in range(args.kills):
            number = draw.choice([signal.SIGKILL, signal.SIGTERM])
            # One kill in three hits a job that starts, loads its checkpoint, or begins to collect.
            early = draw.random() < 1 / 3
            kills.append(
                (number, 0.0, 10 * draw.random()) if early else (number, draw.random(), 0.0)
            )
        if task % SEEDS < args.seeds:
            jobs.append(Job(task, folder, kills))
    run_all(jobs, args)
    minutes = (time.perf_counter() - start) / 60

    found = report(folder)
    lines = {Path(line["run"]).relative_to(folder).as_posix(): line for line in found.table}
    wrong = []
    for job in jobs:
        line, checked = lines.get(job.name), verify(folder / job.name)
        if line is None:
            wrong.append(f"{job.name} is not in the report: {found.problems}")
            continue
        balances = line["executed"] == line["stored"] + line["discarded"] + line["lost"]
        complete = line["state"] == "complete" and line["stored"] == args.total_frames
        exact = checked.sound and balances and complete and job.stored == args.total_frames
        wrong += [] if exact else [f"{job.name}: {line}\n{checked}"]
        print(
            f"{job.name}  {line['stored']} transitions, {'exactly' if exact else 'WRONG'}; "
            f"{job.starts} starts, killed by {', '.join(job.killed) or 'nothing'}"
        )
    found.to_html(folder / "report.html", force=True)
    print(found)
    killed = [how for job in jobs for how in job.killed]
    hard = sum(how.startswith("KILL") for how in killed)
    print(
        f"{len(jobs)} runs of {args.total_frames} transitions, {len(jobs) - len(wrong)} of them "
        f"exact; {len(killed)} kills, {hard} by SIGKILL and {len(killed) - hard} by SIGTERM, "
        f"{sum(job.starts for job in jobs)} starts, {minutes:.1f} min; {folder / 'report.html'}"
    )
    if wrong:
        raise SystemExit("\n".join(["not exact:", *wrong]))


if __name__ == "__main__":
    main(parse())
