"""DQN in one file, with its own loop, whose transitions a recorder stores on disk.

    python examples/own_loop_dqn.py --total-steps 50000 --out runs/own_dqn

The script steps the environment, keeps its own replay buffer and trains, in the style of CleanRL.
Only the lines that end with ``# recorder`` are Tallyroll's. Without them the script trains in the
same way, with the same random numbers, and stores nothing.
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

from tallyroll.collector import Recorder  # recorder


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    out: str = option("runs/own_dqn", "storage of the transitions")
    seed: int = option(1, "of weights, environments and actions")
    num_envs: int = option(4, "lanes")
    total_steps: int = option(50_000, "transitions of all lanes")
    start: int = option(1000, "transitions before the first update")
    buffer_size: int = option(10_000, "transitions in the replay buffer")
    minibatch: int = option(128, "transitions of a gradient step")
    gamma: float = option(0.99, "discount")
    lr: float = option(1e-3, "learning rate")
    epsilon: float = option(0.05, "share of random actions, reached after half of the steps")
    target_every: int = option(100, "updates between two copies to the target network")


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


def q_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
    )


class ReplayBuffer:
    """The newest transitions, in tensors."""

    def __init__(self, size: int) -> None:
        self.size, self.added = size, 0
        self.obs, self.next_obs = torch.zeros(2, size, 4)
        self.action = torch.zeros(size, dtype=torch.int64)
        self.reward, self.terminated = torch.zeros(2, size)

    def add(self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any) -> None:
        at = torch.arange(self.added, self.added + len(obs)) % self.size
        for column, value in (
            (self.obs, obs),
            (self.action, action),
            (self.reward, reward),
            (self.next_obs, next_obs),
            (self.terminated, terminated),
        ):
            column[at] = torch.as_tensor(value).to(column.dtype)
        self.added += len(obs)

    def sample(self, count: int) -> tuple[torch.Tensor, ...]:
        at = torch.randint(min(self.added, self.size), (count,))
        columns = self.obs, self.action, self.reward, self.next_obs, self.terminated
        return tuple(column[at] for column in columns)


def final_of(next_obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
    """Return the observations after a step, with the final ones of the episodes that ended."""
    final = next_obs.copy()
    for lane in np.flatnonzero(infos.get("_final_obs", [])):
        final[lane] = infos["final_obs"][lane]
    return final


def main(args: Args) -> None:
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs: Any = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=args.num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    envs = Recorder(envs, storage=args.out, total_frames=args.total_steps)  # recorder
    network, target = q_network(), q_network()
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    buffer, updates = ReplayBuffer(args.buffer_size), 0
    returns, episodes = np.zeros(args.num_envs), []

    obs, _ = envs.reset(seed=args.seed)
    for step in range(0, args.total_steps, args.num_envs):
        epsilon = max(args.epsilon, 1 - 2 * step / args.total_steps)
        with torch.no_grad():
            action = network(torch.as_tensor(obs)).argmax(1).numpy()
        at_random = rng.random(args.num_envs) < epsilon
        action[at_random] = rng.integers(0, 2, at_random.sum())
        next_obs, reward, terminated, truncated, infos = envs.step(action)
        buffer.add(obs, action, reward, final_of(next_obs, infos), terminated)
        obs = next_obs

        returns += reward
        ended = terminated | truncated
        episodes += returns[ended].tolist()
        returns[ended] = 0
        if ended.any() and len(episodes) % 20 == 0:
            print(f"step {step:6d}  return {np.mean(episodes[-20:]):6.1f}")

        if step < args.start:
            continue
        seen, taken, paid, following, over = buffer.sample(args.minibatch)
        with torch.no_grad():
            wanted = paid + args.gamma * (1 - over) * target(following).max(1).values
        loss = nn.functional.mse_loss(network(seen).gather(1, taken[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        envs.policy_version = updates  # recorder
        if updates % args.target_every == 0:
            target.load_state_dict(network.state_dict())
    envs.close()
    print(f"{updates} updates, weights {sum(p.abs().sum().item() for p in network.parameters())}")
    print(f"{envs.ledger.stored} transitions in {args.out}")  # recorder


if __name__ == "__main__":
    main(parse())
