"""Soft Actor-Critic learns HalfCheetah-v5 from a ring on disk, on exactly 100,000 transitions.

    pip install -c constraints.txt ".[mujoco]"
    python examples/sac.py --seed 1
    python examples/sac.py --seed 1 --checkpoint runs/sac    # run again to resume after a kill

The loop alternates between one step of eight lanes and two gradient steps. ``collect(8)`` adds
exactly eight transitions to a ring of memory-mapped files, in which new transitions overwrite the
oldest. It yields nothing, because training uses only sampled rows. Rows go into TorchRL's SAC loss
unchanged: the last transition of an episode has the final observation as its next observation, and
the loss bootstraps from it if a time limit truncated the episode. Exactly the first 5000 actions
are random.

Measured with the defaults:

    seed  last 8 training episodes  evaluation, 16 episodes
    1     4268.8                    4759.1
    2     4194.4                    4636.7
    3     4021.7                    4731.0

A seed takes 5 to 8 minutes on one of two shared cores. Random actions give -289. Pendulum-v1
needs no extra packages. The options --env-id Pendulum-v1 --total-frames 4001 --random-frames 1003
--width 64 --minibatch 64 --updates 4 --gamma 0.95 --lr 3e-3 --tau 0.03 make the pendulum stand
upright within seconds.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from tallyroll.collector import SyncCollector, evaluate, load_checkpoint, save_checkpoint
from tallyroll.storage import MemmapStorage

LOSSES = ("loss_actor", "loss_qvalue", "loss_alpha")


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    seed: int = option(1, "of weights, environments, actions and samples")
    env_id: str = option("HalfCheetah-v5", "a Gymnasium id with continuous actions")
    num_envs: int = option(8, "lanes")
    total_frames: int = option(100_000, "transitions to train on, exactly")
    frames_per_batch: int = option(8, "transitions between two updates")
    random_frames: int = option(5000, "transitions with random actions at the start, exactly")
    ring: int = option(80_000, "transitions that are kept")
    updates: int = option(2, "gradient steps after each collect")
    minibatch: int = option(256, "transitions of a gradient step")
    width: int = option(256, "units of each hidden layer")
    gamma: float = option(0.99, "discount")
    lr: float = option(1e-3, "learning rate of actor, critics and temperature")
    tau: float = option(0.005, "how far the target critics follow in a gradient step")
    eval_episodes: int = option(16, "episodes of the evaluation at the end")
    checkpoint: str = option("", "directory of ring and checkpoints, from which the run continues")
    save_every: int = option(5000, "transitions between two checkpoints")


def parse() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Args):
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=type(each.default),
            default=each.default,
            help=f"{each.metadata['help']} (default: {each.default or 'none'})",
        )
    return Args(**vars(parser.parse_args()))


def mlp(inputs: int, outputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


class Actor(nn.Module):
    """Mean and standard deviation of a normal distribution, which ``tanh`` then squashes."""

    def __init__(self, observation: Box, action: Box, width: int) -> None:
        super().__init__()
        self.net = mlp(observation.shape[0], 2 * action.shape[0], width)
        self.split = NormalParamExtractor()

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.split(self.net(observation.float()))  # MuJoCo observations are float64


class Critic(nn.Module):
    def __init__(self, observation: Box, action: Box, width: int) -> None:
        super().__init__()
        self.net = mlp(observation.shape[0] + action.shape[0], 1, width)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([observation.float(), action], -1))


def train(storage: MemmapStorage, args: Args) -> ProbabilisticActor:
    with gymnasium.make(args.env_id) as env:
        observation, action = env.observation_space, env.action_space
    assert isinstance(observation, Box)
    assert isinstance(action, Box)
    spec = Bounded(*map(torch.from_numpy, (action.low, action.high)))

    actor = ProbabilisticActor(
        TensorDictModule(Actor(observation, action, args.width), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.low, "high": spec.high, "tanh_loc": False},
    )
    critic = ValueOperator(
        Critic(observation, action, args.width), in_keys=["observation", "action"]
    )
    # Store only the action: other keys that the policy writes would become columns.
    policy = TensorDictSequential(actor, selected_out_keys=["action"])
    loss = SACLoss(actor, critic, loss_function="l2")  # two critics, and two target critics
    loss.make_value_estimator(gamma=args.gamma)
    target = SoftUpdate(loss, tau=args.tau)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, fused=True)

    collector = SyncCollector(
        args.env_id,
        policy,
        num_envs=args.num_envs,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        init_random_frames=args.random_frames,
        seed=args.seed,
        storage=storage,
        resume="auto",
    )
    ended: list[int] = []
    if args.checkpoint:
        signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    saved = Path(args.checkpoint, f"{args.seed}-saved")
    parts = {"loss": loss, "optimizer": optimizer}
    report = 1250 * args.frames_per_batch
    with collector:
        if len(storage):
            print(load_checkpoint(saved, collector=collector, **parts))
        while not ended:
            if args.checkpoint:
                save_checkpoint(saved, collector=collector, every=args.save_every, **parts)
            if not collector.collect(args.frames_per_batch):
                break
            stored = collector.ledger.stored
            if stored < args.random_frames:
                continue
            for _ in range(args.updates):
                rows = storage.get(torch.randint(len(storage), (args.minibatch,)))
                losses = loss(rows)
                optimizer.zero_grad()
                sum(losses[name] for name in LOSSES).backward()
                optimizer.step()
                target.step()
            collector.update_policy_weights_()
            if stored % report == 0 or stored == args.total_frames:
                metrics = collector.metrics(window=args.num_envs)
                print(
                    f"frames {stored:6d}  in the ring {len(storage):6d}  "
                    f"alpha {losses['alpha'].item():.3f}  return {metrics['return_mean']:8.1f}"
                )
        if args.checkpoint:
            save_checkpoint(saved, collector=collector, **parts)
        if ended:
            raise SystemExit(f"saved by a signal at {collector.ledger.stored} transitions")

    ledger = collector.ledger
    assert ledger.stored == args.total_frames
    assert storage.span == range(max(0, args.total_frames - args.ring), args.total_frames)
    print(
        f"{ledger.stored} transitions, exactly: {ledger.executed} executed - {ledger.discarded} "
        f"beyond the budget; {ledger.random} with random actions, {ledger.stored - len(storage)} "
        f"overwritten, {len(storage)} in the ring"
    )
    return actor


def main(args: Args) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    with ExitStack() as stack:
        folder = args.checkpoint or stack.enter_context(tempfile.TemporaryDirectory())
        ring = Path(folder, str(args.seed))
        mode = "append" if ring.exists() else "create"
        storage = stack.enter_context(MemmapStorage(ring, mode=mode, max_size=args.ring))
        actor = train(storage, args)
    print(f"{time.perf_counter() - start:.1f} s")
    result = evaluate(
        actor,
        args.env_id,
        num_envs=args.num_envs,
        episodes=args.eval_episodes,
        seed=args.seed,
    )
    print(
        f"evaluation: mean return {result.mean_return:.1f} over {len(result.returns)} episodes "
        f"({result.ledger.stored} transitions, none of them from the training budget)"
    )


if __name__ == "__main__":
    main(parse())
