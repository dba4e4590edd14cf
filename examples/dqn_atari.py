"""Train DQN on an Atari game, with a replay ring of a million transitions in half a gigabyte.

    python examples/dqn_atari.py --game breakout --total-frames 1000000

A transition has a stack of four 84 x 84 frames and the next stack, 56 kB in all. The ring stores
each frame once, as its difference from the frame before, and samples return the same stacks. The
script prints the size of the frames, the speed of collection and the time of training. It needs the
extra ``atari``.

The network and the clipped rewards are those of "Human-level control through deep reinforcement
learning" (Mnih et al., 2015). Double DQN, Adam, 3-step returns and a smaller budget differ from it.
We have not trained it to the end, so we state no score.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage, n_step


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    game: str = option("breakout", "name of the game in ALE")
    actions: int = option(4, "number of actions of the game")
    seed: int = option(1, "seed of weights, environments, actions and samples")
    num_envs: int = option(8, "number of lanes")
    total_frames: int = option(1_000_000, "transitions to collect, exactly")
    frames_per_batch: int = option(32, "transitions of each collect")
    random_frames: int = option(50_000, "transitions with random actions at the start, exactly")
    ring: int = option(1_000_000, "capacity of the ring, in transitions")
    updates: int = option(8, "gradient steps after each collect")
    minibatch: int = option(32, "transitions in the batch of a gradient step")
    steps: int = option(3, "number of rewards in an n-step return")
    gamma: float = option(0.99, "discount factor")
    lr: float = option(1e-4, "learning rate")
    epsilon: float = option(0.05, "final share of random actions, after a tenth of total_frames")
    target_every: int = option(1000, "gradient steps between updates of the target network")
    out: str = option("", "directory of the ring; temporary if empty")


def parse() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Args):
        text = f"{each.metadata['help']} (default: {each.default or 'none'})"
        name = "--" + each.name.replace("_", "-")
        parser.add_argument(name, type=type(each.default), default=each.default, help=text)
    return Args(**vars(parser.parse_args()))


class Scaled(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation.float() / 255


def q_network(actions: int) -> nn.Sequential:
    return nn.Sequential(
        Scaled(),
        nn.Conv2d(4, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, actions),
    )


def train(storage: MemmapStorage, args: Args) -> None:
    spec = Categorical(args.actions)
    actor = QValueActor(q_network(args.actions), in_keys=["observation"], spec=spec)
    explore = EGreedyModule(
        spec, eps_end=args.epsilon, annealing_num_steps=max(1, args.total_frames // 10)
    )
    # Return only the action, because all keys that the policy writes become columns.
    policy = TensorDictSequential(actor, explore, selected_out_keys=["action"])
    loss = DQNLoss(actor, loss_function="smooth_l1", delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=args.gamma)
    target = HardUpdate(loss, value_network_update_interval=args.target_every)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr)
    collecting = training = 0.0
    with SyncCollector(
        f"ale:{args.game}",
        policy,
        num_envs=args.num_envs,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        init_random_frames=args.random_frames,
        seed=args.seed,
        storage=storage,
    ) as collector:
        report = 200 * args.frames_per_batch
        while True:
            start = time.perf_counter()
            if not (collected := collector.collect(args.frames_per_batch)):
                break
            explore.step(collected)
            collecting += time.perf_counter() - start
            stored = collector.ledger.stored
            if stored % report == 0 or stored == args.total_frames:
                mean = collector.metrics(window=100)["return_mean"]
                print(f"frames {stored:8d}  in the ring {len(storage):8d}  return {mean:7.1f}")
            if stored < args.random_frames:
                continue
            start = time.perf_counter()
            for _ in range(args.updates):
                index = torch.randint(len(storage), (args.minibatch,))
                rows = n_step(storage, index, args.steps, args.gamma)
                rows["next", "reward"] = rows["next", "reward"].sign()
                optimizer.zero_grad()
                loss(rows)["loss"].backward()
                optimizer.step()
                target.step()
            collector.update_policy_weights_()
            training += time.perf_counter() - start

        ledger = collector.ledger
    assert ledger.stored == args.total_frames
    (pool,) = storage.pool_usage()
    print(
        f"{ledger.stored} transitions, exactly: {ledger.executed} executed - {ledger.discarded} "
        f"beyond the budget; {len(storage)} in the ring"
    )
    print(
        f"frames: {pool.nbytes / 2**20:.1f} MiB for {len(storage)} rows, "
        f"{pool.nbytes / len(storage):.0f} bytes a row; stored whole, a row takes "
        f"{storage.schema.row_nbytes} bytes"
    )
    print(f"{ledger.stored / collecting:.0f} transitions/s collected, {training:.1f} s of training")


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.out or folder, f"{args.game}-{args.seed}")
        with MemmapStorage(path, max_size=args.ring) as storage:
            train(storage, args)


if __name__ == "__main__":
    main(parse())
