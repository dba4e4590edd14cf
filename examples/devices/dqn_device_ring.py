"""DQN that samples from a ring on a device, of which the disk has a durable copy.

    python examples/devices/dqn_device_ring.py --device cuda --out runs/dqn
    python examples/devices/dqn_device_ring.py --device cpu --total-frames 5000

Gymnasium's CartPole-v1 runs on the CPU. Its rows go to the ring, in one copy for each ``collect``,
and from the same arrays to a `MemmapStorage`, which is at most ``--lag`` rows behind. Samples are
drawn and gathered on the device. Run the script again after a kill: the ring is filled from the
disk, and the run ends with exactly ``--total-frames`` rows there. The network starts again; see
``save_checkpoint`` for its weights.

The script was run on the CPU and on a simulated GPU. It was not measured on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from tallyroll.collector import SyncCollector
from tallyroll.storage import DeviceStorage

ACTIONS = Categorical(2)


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    device: str = option("cpu", "of the ring and of the updates")
    out: str = option("", "folder of the durable copy, which resumes a killed run; none: temporary")
    seed: int = option(1, "of weights, environments, actions and samples")
    num_envs: int = option(64, "lanes")
    total_frames: int = option(50_000, "transitions to train on, exactly")
    random_frames: int = option(2000, "transitions with random actions at the start, exactly")
    ring: int = option(20_000, "transitions on the device")
    lag: int = option(1000, "transitions that the device may be ahead of the disk")
    updates: int = option(8, "gradient steps after each collect")
    minibatch: int = option(128, "transitions of a gradient step")


def parse() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Args):
        name, text = "--" + each.name.replace("_", "-"), each.metadata["help"]
        text += f" (default: {each.default or 'none'})"
        parser.add_argument(name, type=type(each.default), default=each.default, help=text)
    return Args(**vars(parser.parse_args()))


def train(ring: DeviceStorage, args: Args) -> None:
    network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2)).to(args.device)
    actor = QValueActor(network, in_keys=["observation"], spec=ACTIONS)
    explore = EGreedyModule(ACTIONS, eps_end=0.05, annealing_num_steps=args.total_frames // 5 + 1)
    loss = DQNLoss(actor, loss_function="l2", delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    with SyncCollector(
        "CartPole-v1",
        # Store only the action: other keys that the policy writes would become columns.
        TensorDictSequential(actor, explore, selected_out_keys=["action"]),
        num_envs=args.num_envs,
        frames_per_batch=args.num_envs,
        total_frames=args.total_frames,
        init_random_frames=min(args.random_frames, args.total_frames),
        policy_device="cpu",  # a copy, because the environments are on the CPU
        seed=args.seed,
        storage=ring,
        resume="auto",
    ) as collector:
        print(f"begins with {collector.ledger.stored} transitions, {len(ring)} in the ring")
        while (left := args.total_frames - collector.ledger.stored) > 0:
            collector.collect(min(args.num_envs, left))
            for _ in range(args.updates):
                value = loss(ring.sample(args.minibatch))["loss"]
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                target.step()
            explore.step(args.num_envs)
            collector.update_policy_weights_()
            if collector.ledger.stored % (100 * args.num_envs) == 0 or left <= args.num_envs:
                returns = collector.episodes.returns[-100:]
                mean = float(returns.mean()) if len(returns) else float("nan")
                print(f"{collector.ledger.stored:>8} transitions, mean return {mean:.1f}")


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(args.out or temporary) / "rows"
        with DeviceStorage(
            max_size=args.ring, device=args.device, mirror=path, mirror_lag=args.lag
        ) as ring:
            train(ring, args)
            print(f"{len(ring)} rows on {ring.device.type}, {ring.committed} on disk")


if __name__ == "__main__":
    main(parse())
