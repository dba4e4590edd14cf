"""PPO with several agents that learn to navigate to their goals, on an exact number of env steps.

    pip install "tallyroll[vmas]"
    python examples/systems/multiagent_ppo.py --seed 1

The task is VMAS's "navigation": each agent of a lane has a goal and is rewarded for approaching it.
All agents share one policy, and one critic that sees the observations of all agents. The agents of
a lane form a group in the batch: ``("agents", "observation")`` is ``[row, agent, ...]``, and so are
the actions, the rewards and the done flags that GAE uses. Episodes end by a time limit, which is
truncation, so GAE bootstraps there from the true final observation.

The budget counts env steps; an env step is one joint step of a lane. The ledger counts agent
transitions as well. Measured with the defaults, on exactly 128,000 env steps, which are 384,000
agent transitions. The table gives the mean return over 128 episodes, for the three agents together,
before and after training.

    seed  before  after
    1     -3.04   9.41
    2     -2.04   9.15
    3     -0.68   9.15

A seed takes 26 to 39 s on two shared cores.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tallyroll.collector import SyncCollector, evaluate

GROUP = "agents"
LOSSES = ("loss_objective", "loss_critic", "loss_entropy")


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    seed: int = option(1, "of weights, environments and actions")
    scenario: str = option("navigation", "a VMAS scenario with continuous actions")
    agents: int = option(3, "agents of a lane")
    num_envs: int = option(64, "lanes")
    max_steps: int = option(100, "env steps after which an episode is truncated")
    total_frames: int = option(128_000, "env steps to train on, exactly")
    frames_per_batch: int = option(6_400, "env steps between two updates")
    epochs: int = option(6, "passes over a batch")
    minibatch: int = option(640, "env steps of a gradient step")
    lr: float = option(1e-3, "learning rate, annealed to 0")
    gamma: float = option(0.95, "discount")
    lmbda: float = option(0.9, "lambda of GAE")
    clip: float = option(0.2, "how far the probability ratio may move")
    entropy: float = option(0.0, "weight of the entropy bonus")
    max_grad_norm: float = option(1.0, "norm at which gradients are clipped")
    eval_episodes: int = option(128, "episodes of an evaluation")


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


def networks(args: Args, inputs: int, outputs: int) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return one policy for all agents, and one critic.

    The policy acts on each agent's own observation; the critic sees the observations of all agents.
    """
    shared: dict[str, Any] = {"n_agents": args.agents, "share_params": True, "num_cells": [64, 64]}
    policy = nn.Sequential(
        MultiAgentMLP(inputs, 2 * outputs, centralized=False, activation_class=nn.Tanh, **shared),
        NormalParamExtractor(),
    )
    parameters = [(GROUP, "loc"), (GROUP, "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(policy, [(GROUP, "observation")], parameters),
        in_keys=parameters,
        out_keys=[(GROUP, "action")],
        distribution_class=TanhNormal,  # actions are in [-1, 1]
        return_log_prob=True,
        log_prob_key=(GROUP, "log_prob"),
    )
    critic = MultiAgentMLP(inputs, 1, centralized=True, activation_class=nn.Tanh, **shared)
    return actor, ValueOperator(critic, [(GROUP, "observation")], [(GROUP, "value")])


def main(args: Args) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    environment: dict[str, Any] = {
        "num_envs": args.num_envs,
        "env_kwargs": {
            "n_agents": args.agents,
            "collisions": False,
            "max_steps": args.max_steps,
        },
    }

    def returns(policy: ProbabilisticActor | None) -> float:
        result = evaluate(
            policy,
            f"vmas:{args.scenario}",
            episodes=args.eval_episodes,
            seed=args.seed + 1000,
            **environment,
        )
        return result.mean_return

    with SyncCollector(
        f"vmas:{args.scenario}", None, frames_per_batch=1, total_frames=1, **environment
    ) as look:
        (row,) = look
    inputs, outputs = (row[GROUP, name].shape[-1] for name in ("observation", "action"))

    actor, critic = networks(args, inputs, outputs)
    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=args.clip,
        entropy_coeff=args.entropy,
        critic_coeff=1.0,
        loss_critic_type="smooth_l1",
        normalize_advantage=True,
        normalize_advantage_exclude_dims=(-2,),  # normalizes each agent's advantages separately
    )
    ends = {name: (GROUP, name) for name in ("reward", "done", "terminated", "value")}
    gae.set_keys(**ends, advantage=(GROUP, "advantage"), value_target=(GROUP, "value_target"))
    loss.set_keys(
        **ends,
        action=(GROUP, "action"),
        sample_log_prob=(GROUP, "log_prob"),
        advantage=(GROUP, "advantage"),
        value_target=(GROUP, "value_target"),
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr)

    before = returns(actor)
    print(f"before: mean return {before:.2f}")
    collector = SyncCollector(
        f"vmas:{args.scenario}",
        actor,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        seed=args.seed,
        **environment,
    )
    with collector:
        for batch in collector:
            done = collector.ledger.stored - len(batch)
            optimizer.param_groups[0]["lr"] = args.lr * (1 - done / args.total_frames)
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

            metrics = collector.metrics(window=args.num_envs)
            print(
                f"env steps {metrics['frames']:7.0f}  episodes {metrics['episodes']:5.0f}  "
                f"return {metrics['return_mean']:6.2f}"
            )
    seconds = time.perf_counter() - start

    ledger = collector.ledger
    assert ledger.stored == args.total_frames
    assert ledger.agent_transitions == args.total_frames * args.agents
    after = returns(actor)
    print(
        f"{ledger.stored} env steps, exactly, and {ledger.agent_transitions} agent transitions; "
        f"{seconds:.1f} s"
    )
    print(f"mean return before {before:.2f}, after {after:.2f}")


if __name__ == "__main__":
    main(parse())
