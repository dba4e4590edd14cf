"""PPO solves CartPole-v1 on batches with exactly the requested number of transitions.

    python examples/ppo.py --seed 1
    python examples/ppo.py --seed 1 --checkpoint runs/ppo    # run again to resume after a kill

The environment is a Gymnasium vector environment of eight lanes in its default mode, NEXT_STEP. In
this mode the slot after each episode only resets the lane. Tallyroll keeps these slots out of the
batches. GAE bootstraps where a batch ends in the middle of an episode. The loss and the advantages
are TorchRL's. The budget is not a multiple of the batch size, so the last batch is smaller.

The task (a return of at least 450 of 500) is solved on exactly 100,000 transitions. Measured with
the defaults:

    seed  last 100 training episodes  evaluation, 100 episodes
    1     500.0                       500.0
    2     500.0                       500.0
    3     500.0                       500.0
    4     497.5                       500.0
    5     500.0                       500.0

A seed takes 23 to 83 s on two shared cores. With --total-frames 50000 the evaluation also gives
500.0 for each of the five seeds. The last 100 training episodes then give 345 to 376, because they
start with worse policies.
"""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tallyroll.collector import SyncCollector, evaluate, load_checkpoint, save_checkpoint

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    seed: int = option(1, "of weights, environments and actions")
    env_id: str = option("CartPole-v1", "a Gymnasium id with discrete actions")
    num_envs: int = option(8, "lanes")
    total_frames: int = option(100_000, "transitions to train on, exactly")
    frames_per_batch: int = option(2048, "transitions between two updates")
    epochs: int = option(10, "passes over a batch")
    minibatch: int = option(256, "transitions of a gradient step")
    lr: float = option(1e-3, "learning rate, annealed to 0")
    gamma: float = option(0.99, "discount")
    lmbda: float = option(0.95, "lambda of GAE")
    clip: float = option(0.2, "how far the probability ratio may move")
    entropy: float = option(0.0, "weight of the entropy bonus")
    max_grad_norm: float = option(0.5, "norm at which gradients are clipped")
    eval_episodes: int = option(100, "episodes of the evaluation at the end")
    checkpoint: str = option("", "directory of rows and checkpoints, from which the run continues")


def parse() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Args):
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=type(each.default),
            default=each.default,
            help=f"{each.metadata['help']} (default: {each.default!r})",
        )
    return Args(**vars(parser.parse_args()))


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    gain = 2**0.5
    return nn.Sequential(
        linear(inputs, 64, gain),
        nn.Tanh(),
        linear(64, 64, gain),
        nn.Tanh(),
        linear(64, outputs, last_gain),
    )


def make_env(args: Args) -> VectorEnv:
    return gymnasium.make_vec(
        args.env_id,
        num_envs=args.num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP},
    )


def main(args: Args) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)

    with gymnasium.make(args.env_id) as env:
        observation, action = env.observation_space, env.action_space
    assert isinstance(observation, Box)
    assert isinstance(action, Discrete)

    actor = ProbabilisticActor(
        TensorDictModule(
            mlp(observation.shape[0], int(action.n), 0.01), ["observation"], ["logits"]
        ),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(observation.shape[0], 1, 1.0), ["observation"])
    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=args.clip,
        entropy_coeff=args.entropy,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, eps=1e-5)

    ended: list[int] = []
    if args.checkpoint:
        signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    saved = Path(args.checkpoint, f"{args.seed}-saved")
    parts = {"loss": loss, "optimizer": optimizer}
    collector = SyncCollector(
        partial(make_env, args),
        actor,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        seed=args.seed,
        storage=Path(args.checkpoint, str(args.seed)) if args.checkpoint else None,
        resume="auto" if args.checkpoint else False,
    )
    with collector:
        if collector.ledger.stored:
            print(load_checkpoint(saved, collector=collector, **parts))
        elif args.checkpoint:  # a run that is killed before its first batch resumes from here
            save_checkpoint(saved, collector=collector, **parts)
        for batch in collector:
            before = collector.ledger.stored - len(batch)
            optimizer.param_groups[0]["lr"] = args.lr * (1 - before / args.total_frames)
            with torch.no_grad():
                gae(batch)
            for _ in range(args.epochs):
                for rows in torch.split(torch.randperm(len(batch)), args.minibatch):
                    losses = loss(batch[rows])
                    optimizer.zero_grad()
                    sum(losses[name] for name in LOSSES).backward()
                    nn.utils.clip_grad_norm_(loss.parameters(), args.max_grad_norm)
                    optimizer.step()
            collector.update_policy_weights_()

            metrics = collector.metrics(window=100)
            print(
                f"batch {len(batch):5d}  frames {metrics['frames']:7.0f}  "
                f"episodes {metrics['episodes']:5.0f}  return {metrics['return_mean']:6.1f}"
            )
            if args.checkpoint:
                save_checkpoint(saved, collector=collector, **parts)
            if ended:
                raise SystemExit(f"saved by a signal at {collector.ledger.stored} transitions")
    seconds = time.perf_counter() - start

    ledger = collector.ledger
    assert ledger.stored == args.total_frames
    print(
        f"{ledger.stored} transitions, exactly: {ledger.slots} slots - {ledger.reset_slots} reset "
        f"slots - {ledger.discarded} beyond the budget; {seconds:.1f} s"
    )
    result = evaluate(
        actor, args.env_id, num_envs=args.num_envs, episodes=args.eval_episodes, seed=args.seed
    )
    print(
        f"evaluation: mean return {result.mean_return:.1f} over {len(result.returns)} episodes "
        f"({result.ledger.stored} transitions, none of them from the training budget)"
    )


if __name__ == "__main__":
    main(parse())
