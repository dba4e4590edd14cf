"""PPO in one file, with its own loop, whose transitions a recorder stores on disk.

    python examples/own_loop_ppo.py --total-steps 100000 --out runs/own_ppo

The script steps the environment, computes advantages and trains, in the style of CleanRL. Only the
lines that end with ``# recorder`` are Tallyroll's: they also store the log-probability of each
action and the value of each observation. Without them the script trains in the same way, with the
same random numbers, and stores nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical

from tallyroll.collector import Recorder  # recorder

COLUMNS = {"logp": np.float32, "value": np.float32}  # recorder


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    out: str = option("runs/own_ppo", "storage of the transitions")
    seed: int = option(1, "of weights, environments and actions")
    num_envs: int = option(4, "lanes")
    num_steps: int = option(128, "steps of each lane between two updates")
    total_steps: int = option(100_000, "transitions of all lanes; the last update may need more")
    epochs: int = option(4, "passes over the steps of an update")
    minibatch: int = option(128, "transitions of a gradient step")
    gamma: float = option(0.99, "discount")
    lmbda: float = option(0.95, "lambda of the advantages")
    clip: float = option(0.2, "how far the probability ratio may move")
    lr: float = option(1e-3, "learning rate")


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


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def advantages_of(
    rewards: torch.Tensor, values: torch.Tensor, ended: torch.Tensor, args: Args
) -> torch.Tensor:
    """Return generalized advantages ``[step, lane]``; ``values`` has one more step."""
    advantages, last = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for step in reversed(range(len(rewards))):
        goes_on = 1 - ended[step]
        delta = rewards[step] + args.gamma * goes_on * values[step + 1] - values[step]
        advantages[step] = last = delta + args.gamma * args.lmbda * goes_on * last
    return advantages


def main(args: Args) -> None:
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    envs: Any = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=args.num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    envs = Recorder(envs, storage=args.out, columns=COLUMNS)  # recorder
    actor, critic = mlp(2), mlp(1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.lr, eps=1e-5)
    shape = args.num_steps, args.num_envs
    observations, actions = torch.zeros(*shape, 4), torch.zeros(shape, dtype=torch.int64)
    logps, rewards, ended = torch.zeros(3, *shape)
    values = torch.zeros(args.num_steps + 1, args.num_envs)
    returns, episodes = np.zeros(args.num_envs), [0.0]

    obs, _ = envs.reset(seed=args.seed)
    for update in range(-(-args.total_steps // (args.num_steps * args.num_envs))):
        envs.policy_version = update  # recorder
        for step in range(args.num_steps):
            observations[step] = torch.as_tensor(obs)
            with torch.no_grad():
                chosen = Categorical(logits=actor(observations[step]))
                actions[step] = chosen.sample()
                logps[step] = chosen.log_prob(actions[step])
                values[step] = critic(observations[step])[:, 0]
            envs.annotate(logp=logps[step], value=values[step])  # recorder
            obs, reward, terminated, truncated, _ = envs.step(actions[step].numpy())
            over = terminated | truncated
            rewards[step], ended[step] = torch.as_tensor(reward), torch.as_tensor(over)
            returns += reward
            episodes += returns[over].tolist()
            returns[over] = 0
        with torch.no_grad():
            values[-1] = critic(torch.as_tensor(obs))[:, 0]
        advantages = advantages_of(rewards, values, ended, args)
        targets = advantages + values[:-1]
        for _ in range(args.epochs):
            for rows in torch.randperm(actions.numel()).split(args.minibatch):
                seen = observations.flatten(0, 1)[rows]
                policy = Categorical(logits=actor(seen))
                gain = advantages.flatten()[rows]
                gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
                ratio = (policy.log_prob(actions.flatten()[rows]) - logps.flatten()[rows]).exp()
                clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
                error = critic(seen)[:, 0] - targets.flatten()[rows]
                loss = -torch.min(ratio * gain, clipped * gain).mean() + 0.5 * error.square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        print(f"update {update:4d}  return {np.mean(episodes[-20:]):6.1f}")
    envs.close()
    print(f"weights {sum(p.abs().sum().item() for p in parameters)}")
    print(f"{envs.ledger.stored} transitions in {args.out}")  # recorder


if __name__ == "__main__":
    main(parse())
