"""Compare two policies on the same exact budget: their ledgers and their returns.

    python examples/exact_benchmark.py --frames 50000

A vector environment in NEXT_STEP mode, Gymnasium's default, spends one slot per episode on the
reset. A budget that counts slots therefore gives fewer transitions to the policy with the shorter
episodes. A budget that counts transitions gives both policies the same number. The first returns
are those of the episodes that finish within the budget. ``evaluate`` gives the returns of full
episodes that are chosen before they are played.

Measured with the defaults, on two shared cores: 50,000 transitions each took 52,320 slots with
random actions and 50,096 with the controller; returns 21.5 and 500.0 (2318 and 96 episodes), in
100 full episodes 22.6 and 500.0; 17,000 to 70,000 transitions per second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase

from tallyroll.collector import SyncCollector, evaluate

Policy = Callable[[TensorDictBase], TensorDictBase]


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    frames: int = option(50_000, "transitions for each policy, exactly")
    frames_per_batch: int = option(5000, "transitions a batch")
    num_envs: int = option(8, "lanes")
    episodes: int = option(100, "whole episodes of the evaluation")
    seed: int = option(0, "of environments and actions")


def parse() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Args):
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=type(each.default),
            default=each.default,
            help=f"{each.metadata['help']} (default: {each.default})",
        )
    return Args(**vars(parser.parse_args()))


def random_actions(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.randint(2, td.batch_size))


def balance(td: TensorDictBase) -> TensorDictBase:
    """Push the cart towards the side to which the pole is falling."""
    _, _, angle, speed = td["observation"].unbind(-1)
    return td.set("action", (angle + 0.5 * speed > 0).long())


def make_env(num_envs: int) -> VectorEnv[Any, Any, Any]:
    return gymnasium.make_vec(
        "CartPole-v1",
        num_envs=num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP},
    )


def run(policy: Policy, args: Args) -> dict[str, str]:
    start = time.perf_counter()
    with SyncCollector(
        lambda: make_env(args.num_envs),
        policy,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.frames,
        seed=args.seed,
    ) as collector:
        for _ in collector:
            pass
    seconds = time.perf_counter() - start

    ledger = collector.ledger
    assert ledger.stored == args.frames
    assert ledger.slots == ledger.executed + ledger.reset_slots
    assert ledger.executed == ledger.stored + ledger.discarded
    metrics = collector.metrics(window=args.frames)  # all episodes
    whole = evaluate(
        policy, "CartPole-v1", num_envs=args.num_envs, episodes=args.episodes, seed=args.seed
    )
    return {
        "slots": f"{ledger.slots}",
        "- reset slots": f"{ledger.reset_slots}",
        "= executed": f"{ledger.executed}",
        "- discarded": f"{ledger.discarded}",
        "= stored": f"{ledger.stored}",
        "episodes complete": f"{ledger.episodes_complete}",
        "their mean return": f"{metrics['return_mean']:.1f}",
        "episodes cut": f"{ledger.episodes_cut}",
        f"mean return, {args.episodes} whole episodes": f"{whole.mean_return:.1f}",
        "transitions a second": f"{args.frames / seconds:.0f}",
    }


def main(args: Args) -> None:
    torch.set_num_threads(1)
    policies: dict[str, Policy] = {"random": random_actions, "balance": balance}
    columns = {name: run(policy, args) for name, policy in policies.items()}

    table = Table(title=f"CartPole-v1, {args.frames} transitions each")
    table.add_column("")
    for name in policies:
        table.add_column(name, justify="right")
    for label in columns["random"]:
        table.add_row(label, *(column[label] for column in columns.values()))
    Console(width=80).print(table)


if __name__ == "__main__":
    main(parse())
