"""SAC on Pendulum-v1, evaluated every 500 transitions, that resumes after a kill at any moment.

    python examples/off_policy_restart.py --seed 1 --csv curve.csv
    python examples/off_policy_restart.py --seed 1 --tensorboard runs/pendulum
    python examples/off_policy_restart.py --seed 1 --folder runs/pendulum --csv curve.csv

``collect(n)`` stops after exactly n more transitions, whatever the number of lanes, so the points
of the curve are at exactly 500, 1000, … transitions. ``evaluate`` runs full episodes in a separate
environment, always from the same initial states and with deterministic actions. None of its
transitions count towards the budget. Each point is written to the CSV file as soon as it is known,
so a run that is killed leaves its curve.

With ``--folder`` the script saves a checkpoint there at each point, and on SIGTERM. The same
command resumes from the newest checkpoint. It restores the networks, optimizers, random numbers,
counts and rows of that point, and drops everything later, including later points of the curve.

Measured with the defaults, mean return of ten episodes:

    transitions  seed 1   seed 2   seed 3
              0  -1392.4  -1582.6  -1084.3
            500  -1183.5  -1070.2  -1558.3
           1000  -1348.5  -1590.0  -1562.0
           1500   -943.4   -965.3  -1201.1
           2000   -667.4   -275.2   -329.5
           2500   -124.8   -123.7   -123.7
           5000   -122.8   -124.0   -122.9
"""

from __future__ import annotations

import argparse
import csv
import signal
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from tallyroll.collector import SyncCollector, evaluate, load_checkpoint, save_checkpoint
from tallyroll.storage import MemmapStorage


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    seed: int = option(1, "of weights, environments, actions and samples")
    num_envs: int = option(4, "lanes")
    total_frames: int = option(5000, "transitions to train on, exactly")
    random_frames: int = option(500, "transitions with random actions at the start, exactly")
    eval_every: int = option(500, "transitions between two points of the curve, exactly")
    eval_episodes: int = option(10, "whole episodes of a point")
    csv: str = option("", "file for the curve, new unless the run continues")
    folder: str = option("", "directory for rows and checkpoints, from which the run continues")
    tensorboard: str = option("", "directory for TensorBoard")
    updates: int = option(2, "gradient steps after each step of all lanes")
    minibatch: int = option(128, "transitions of a gradient step")


def parse() -> Args:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for each in fields(Args):
        name, kind = each.name.replace("_", "-"), type(each.default)
        text = f"{each.metadata['help']} (default: {each.default or 'none'})"
        parser.add_argument(f"--{name}", type=kind, default=each.default, help=text)
    return Args(**vars(parser.parse_args()))


class Curve:
    """A learning curve. Its points are printed and written to the outputs that ``args`` selects."""

    def __init__(self, args: Args) -> None:
        self.path, self.newest = Path(args.csv) if args.csv else None, -1
        if self.path and self.path.exists() and not args.folder:
            raise SystemExit(f"--csv: {self.path} exists; name a new file")
        self.board = None
        if args.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise SystemExit(
                    f'--tensorboard: {error}; pip install "tallyroll[tensorboard]"'
                ) from error
            self.board = SummaryWriter(args.tensorboard)

    def go_on_from(self, frames: int) -> None:
        """Drop the points after ``frames`` transitions, because the resumed run repeats them."""
        if self.path and self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                head, *lines = csv.reader(file)
            kept = [line for line in lines if line and int(line[0]) <= frames]
            # After a kill either the old or the new file is complete.
            aside = self.path.with_name(f"{self.path.name}.new")
            with aside.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([head, *kept])
            aside.replace(self.path)
            self.newest = int(kept[-1][0]) if kept else -1

    def add(self, frames: int, **point: float) -> None:
        print(f"frames {frames:5d}", *(f" {name} {value:8.2f}" for name, value in point.items()))
        if self.path:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                lines = [] if file.tell() else [["frames", *point]]
                csv.writer(file).writerows([*lines, [frames, *point.values()]])
        if self.board:
            for name, value in point.items():
                self.board.add_scalar(name, value, frames)
            self.board.flush()


def main(args: Args) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    curve = Curve(args)
    net = nn.Sequential(MLP(3, 2, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-2.0, 2.0, [1]),
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0, "tanh_loc": False},
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, loss_function="l2")
    loss.make_value_estimator(gamma=0.95)
    target = SoftUpdate(loss, tau=0.02)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    rows = Path(args.folder, "rows") if args.folder else None
    parts = {"loss": loss, "optimizer": optimizer}
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with (
        MemmapStorage(rows, mode="append" if rows and rows.exists() else "create") as storage,
        SyncCollector(
            "Pendulum-v1",
            TensorDictSequential(actor, selected_out_keys=["action"]),  # store only actions
            num_envs=args.num_envs,
            frames_per_batch=args.num_envs,
            total_frames=args.total_frames,
            init_random_frames=args.random_frames,
            storage=storage,
            seed=None if len(storage) else args.seed,
            resume="auto",
        ) as collector,
    ):
        saved = Path(args.folder, "checkpoints")
        if len(storage):
            print(load_checkpoint(saved, collector=collector, **parts))
        frames = collector.ledger.stored
        curve.go_on_from(frames)
        while not ended:
            due = frames % args.eval_every == 0 or frames == args.total_frames
            if due and frames > curve.newest:
                result = evaluate(
                    actor, "Pendulum-v1", num_envs=10, episodes=args.eval_episodes, seed=1000
                )
                curve.add(
                    frames,
                    evaluation=result.mean_return,
                    lowest=result.returns.min(),
                    training=collector.metrics(window=10)["return_mean"],
                    seconds=time.perf_counter() - start,
                )
                if rows:
                    save_checkpoint(saved, collector=collector, **parts)
            # Take one step of all lanes, or fewer if the next point comes first.
            n = min(args.num_envs, args.eval_every - frames % args.eval_every)
            if not collector.collect(n):
                break
            frames = collector.ledger.stored
            for _ in range(args.updates if frames >= args.random_frames else 0):
                losses = loss(storage.get(torch.randint(len(storage), (args.minibatch,))))
                optimizer.zero_grad()
                (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
                optimizer.step()
                target.step()
            collector.update_policy_weights_()
        if ended and rows:
            print(f"saved {save_checkpoint(saved, collector=collector, **parts)}")
    ledger = collector.ledger
    if ended:
        raise SystemExit(f"ended by a signal at {ledger.stored} transitions")
    assert ledger.stored == args.total_frames
    print(f"{ledger.stored} transitions, exactly; {ledger.random} of them with random actions")


if __name__ == "__main__":
    main(parse())
