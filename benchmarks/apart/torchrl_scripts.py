"""Do TorchRL's scripts reach the same returns with the collector's import swapped?

    python benchmarks/apart/torchrl_scripts.py CHECKOUT --only a2c_mujoco,dqn_cartpole --seeds 0,1,2

CHECKOUT is a checkout of TorchRL's repository at the installed release. It is not changed. Each
script is copied with its folder to a temporary folder, and runs there with a small budget: first
unchanged, then with ``from torchrl.collectors import X`` replaced by
``from tallyroll.collector.torchrl import X``. Logged returns are read from the files of TorchRL's
CSV logger. The tutorial scripts log nothing, so their results are read from a variable.

The scripts need additional packages: ``hydra-core tqdm pandas matplotlib mujoco pygame vmas
pettingzoo``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOTA, TUTORIALS = "sota-implementations", "tutorials/sphinx-tutorials"


@dataclass(frozen=True)
class Script:
    path: str
    options: tuple[str, ...] = ()
    """Overrides of its configuration."""
    edits: tuple[tuple[str, str], ...] = ()
    """Patterns and their replacements, to set the budgets of scripts without an option for it."""
    tells: str = "None"
    """An expression over the script's variables at its end."""


def sota(path: str, *options: str) -> Script:
    folder = {"logger.backend=csv", *options}
    return Script(f"{SOTA}/{path}", tuple(sorted(folder)))


def off_policy(path: str, *options: str) -> Script:
    return sota(
        path,
        "env.seed={seed}",
        "collector.total_frames=3000",
        "optim.batch_size=32",
        "optim.utd_ratio=0.1",
        "logger.eval_iter=100000",
        *options,
    )


def agents(path: str) -> Script:
    return sota(
        f"multiagent/{path}",
        "seed={seed}",
        "collector.frames_per_batch=600",
        "collector.n_iters=3",
        "env.max_steps=50",
        "train.num_epochs=2",
        "train.minibatch_size=200",
        "train.lr=5e-4",
        "eval.evaluation_interval=1000",
    )


def tutorial(path: str, tells: str, *edits: tuple[str, str]) -> Script:
    return Script(f"{TUTORIALS}/{path}", edits=edits, tells=tells)


RANDOM = "collector.init_random_frames=1000"
TESTS = ("logger.test_interval=4000", "logger.num_test_episodes=1")
SCRIPTS = {
    "a2c_mujoco": sota("a2c/a2c_mujoco.py", "collector.total_frames=6400", *TESTS),
    "ppo_mujoco": sota(
        "ppo/ppo_mujoco.py", "collector.total_frames=4096", "loss.ppo_epochs=2", *TESTS
    ),
    "rnd_mujoco": sota(
        "rnd/rnd_mujoco.py", "collector.total_frames=4096", "loss.ppo_epochs=2", *TESTS
    ),
    "ddpg": off_policy("ddpg/ddpg.py", RANDOM),
    "td3": off_policy("td3/td3.py", RANDOM, "collector.env_per_collector=2"),
    "sac": off_policy("sac/sac.py", RANDOM, "collector.env_per_collector=2"),
    "tqc": off_policy("tqc/tqc.py", RANDOM, "collector.env_per_collector=2"),
    "crossq": off_policy("crossq/crossq.py", RANDOM, "env.library=gymnasium"),
    "discrete_sac": off_policy("discrete_sac/discrete_sac.py", RANDOM, "env.library=gymnasium"),
    "iql_online": off_policy("iql/iql_online.py", RANDOM),
    "discrete_iql": off_policy("iql/discrete_iql.py"),
    "cql_online": sota(
        "cql/cql_online.py",
        "env.seed={seed}",
        "collector.total_frames=3000",
        "optim.utd_ratio=0.02",
        "optim.batch_size=32",
        RANDOM,
    ),
    "dqn_cartpole": sota(
        "dqn/dqn_cartpole.py",
        "collector.total_frames=10000",
        "collector.init_random_frames=2000",
        "collector.annealing_frames=10000",
        "loss.num_updates=10",
    ),
    "mappo": agents("mappo_ippo.py"),
    "maddpg": agents("maddpg_iddpg.py"),
    "multiagent_iql": agents("iql.py"),
    "qmix": agents("qmix_vdn.py"),
    "multiagent_sac": agents("sac.py"),
    "coding_ppo": tutorial(
        "coding_ppo.py", "logs['reward']", ("total_frames = [0-9_]+", "total_frames = 8000")
    ),
    "coding_ddpg": tutorial(
        "coding_ddpg.py",
        "[each[1] for each in rewards]",
        ("total_frames = [0-9_]+ // frame_skip", "total_frames = 4000 // frame_skip"),
        ("init_random_frames = .*", "init_random_frames = 500"),
    ),
    "multiagent_ppo": tutorial(
        "multiagent_ppo.py",
        "episode_reward_mean_list",
        ("frames_per_batch = 6_000", "frames_per_batch = 2_000"),
        ("n_iters = [0-9]+", "n_iters = 3"),
        ("num_epochs = [0-9]+", "num_epochs = 3"),
    ),
    "multiagent_competitive_ddpg": tutorial(
        "multiagent_competitive_ddpg.py",
        "[each[-1] for each in episode_reward_mean_map.values()]",
        ("n_iters = [0-9]+", "n_iters = 3"),
        ("n_optimiser_steps = [0-9]+", "n_optimiser_steps = 3"),
        ("iteration_when_stop_training_evaders = .*", "iteration_when_stop_training_evaders = 2"),
    ),
    "getting-started-5": tutorial(
        "getting-started-5.py",
        "[total_count / total_episodes]",
        ("if max_length > 200:", "if max_length > 200 or total_count >= 3000:"),
    ),
}

# Runs the copy in a separate process, with a CSV logger that accepts lists and writes no videos.
CHILD = """
import json, random, runpy, sys
import numpy, torch
import torchrl.record.loggers.csv as logger
import torchrl.record.loggers.common as common, torchrl.record.recorder as recorder
script, seed, tells, out, *options = sys.argv[1:]
add = logger.CSVExperiment.add_scalar
def add_scalar(self, name, value, global_step=None):
    many = isinstance(value, (list, tuple))
    add(self, name, sum(map(float, value)) / max(1, len(value)) if many else value, global_step)
logger.CSVExperiment.add_scalar = add_scalar
logger.CSVExperiment.add_video = lambda *_, **__: None
for module in (common, logger, recorder):
    module._write_video = lambda *_, **__: None
torch.set_num_threads(1)
torch.manual_seed(int(seed)), numpy.random.seed(int(seed)), random.seed(int(seed))
sys.path.insert(0, script.rpartition("/")[0])
sys.argv = [script, *options]
found = eval(tells, runpy.run_path(script, run_name="__main__"))
with open(out, "w") as file:
    json.dump(found, file, default=float)
"""


def swapped(text: str) -> tuple[str, int]:
    """Return a script with the import swapped, and the number of lines changed."""
    from tallyroll.collector import torchrl as ours

    changed = 0

    def line(match: re.Match[str]) -> str:
        nonlocal changed
        indent, module, names = match.groups()
        told = [name.strip() for name in names.strip("()\n ").split(",") if name.strip()]
        mine = [name for name in told if name in ours.__all__]
        rest = [name for name in told if name not in mine]
        changed += bool(mine)
        lines = [f"from tallyroll.collector.torchrl import {', '.join(mine)}"] if mine else []
        lines += [f"from {module} import {', '.join(rest)}"] if rest else []
        return "\n".join(indent + each for each in lines)

    pattern = r"(?m)^([ \t]*)from (torchrl\.collectors\S*) import (\([^)]*\)|[^\n]*)"
    return re.sub(pattern, line, text), changed


def once(checkout: Path, script: Script, seed: int, swap: bool, patience: float) -> dict[str, Any]:
    """Return the result of one run."""
    with tempfile.TemporaryDirectory() as directory:
        path, changed = Path(directory, script.path), 0
        shutil.copytree((checkout / script.path).parent, path.parent)
        for each in path.parent.rglob("*.py") if swap else ():
            text, lines = swapped(each.read_text(encoding="utf-8"))
            each.write_text(text, encoding="utf-8")
            relevant = each == path or (each.parent == path.parent and each.name == "utils.py")
            changed += lines if relevant else 0
        text = path.read_text(encoding="utf-8")
        for pattern, new in script.edits:
            text = re.sub(pattern, new, text)
        path.write_text(text, encoding="utf-8")
        options = [option.format(seed=seed) for option in script.options]
        if script.path.startswith(SOTA):
            options.append(f"hydra.run.dir={directory}/out")
        start = time.perf_counter()
        command = [sys.executable, "-c", CHILD, str(path), str(seed), script.tells]
        try:
            done = subprocess.run(
                [*command, f"{directory}/told", *options],
                cwd=directory,
                env=os.environ | {"MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"},
                capture_output=True,
                text=True,
                timeout=patience,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {patience:g} s"}
        seconds = time.perf_counter() - start
        if done.returncode:
            errors = re.findall(r"^[\w.]*(?:Error|Refused)\b.*$", done.stderr, re.MULTILINE)
            return {"error": (errors or [done.stderr[-300:]])[0], "lines": changed}
        told = json.loads(Path(directory, "told").read_text()) or logged(Path(directory, "out"))
        return {"told": told, "seconds": seconds, "lines": changed}


def logged(out: Path) -> list[float]:
    """Return the training returns that the script logged."""
    for pattern in ("*train/reward.csv", "*train_reward*mean.csv", "*reward*mean*.csv"):
        for file in sorted(out.rglob(pattern)):
            return [float(row[1]) for row in csv.reader(file.read_text().splitlines())]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="names, by commas")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds a run may take")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    args = parser.parse_args()
    found = []
    print(f"{'script':28} seed  lines  return before  after    seconds before  after")
    for name in args.only.split(","):
        for seed in map(int, args.seeds.split(",")):
            runs = [
                once(args.checkout, SCRIPTS[name], seed, swap, args.patience)
                for swap in (False, True)
            ]
            found.append({"script": name, "seed": seed, "before": runs[0], "after": runs[1]})
            errors = [run["error"] for run in runs if "error" in run]
            if errors:
                print(f"{name:28} {seed:4d}  {errors[-1]}", flush=True)
                continue
            means = [sum(run["told"]) / max(1, len(run["told"])) for run in runs]
            print(
                f"{name:28} {seed:4d}  {runs[1]['lines']:5d}  {means[0]:13.2f}  {means[1]:7.2f}"
                f"  {runs[0]['seconds']:14.1f}  {runs[1]['seconds']:5.1f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
