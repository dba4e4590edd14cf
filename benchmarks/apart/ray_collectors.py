"""Compare the speed, and the driver's cost per row, of collecting over Ray, processes and peers.

    pip install -c constraints.txt ".[mujoco,ray]" && pip install -c constraints.txt "ray[rllib]"
    python benchmarks/apart/ray_collectors.py --env HalfCheetah-v5 --rounds 3

Actions are random, and workers run on this machine. Each contender has its own process and its own
Ray, and runs in turns within each round. After a warm-up it collects a number of rows, and prints
the CPU time of the driver's process (all of its threads: Ray has several) and the wall-clock time.
Rates are compared with those of MultiprocessCollector in the same round. Requested and delivered
rows are counted over the whole run of a contender.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import by_turns
from by_turns import cpu_seconds, in_turns, say_and_end

CONTENDERS = ("processes", "ours", "processes sync", "ours sync", "torchrl", "rllib")


def ours(args: argparse.Namespace, total: int) -> Iterator[int]:
    kind, more = by_turns.ours("ray" if args.child.startswith("ours") else "")
    with kind(
        args.env,
        num_envs=args.lanes,
        num_workers=args.workers,
        mode="sync" if args.child.endswith("sync") else "async",
        frames_per_batch=args.batch,
        total_frames=total,
        seed=0,
        start_timeout=900,
        **more,
    ) as collector:
        for batch in collector:
            yield len(batch)


def start_ray(workers: int) -> None:
    """Start Ray with resources for the actors of a peer."""
    import ray

    ray.init(
        address="local",
        num_cpus=workers + 2,
        include_dashboard=False,
        object_store_memory=400 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=tempfile.mkdtemp(prefix="r", dir="/tmp"),
    )


def torchrl(args: argparse.Namespace, total: int) -> Iterator[int]:
    from torchrl.collectors import Collector
    from torchrl.collectors.distributed import RayCollector
    from torchrl.envs import GymEnv

    start_ray(args.workers)
    lanes = args.lanes // args.workers
    factory: Callable[[], Any] = lambda: GymEnv(args.env, num_envs=lanes)  # noqa: E731
    collector = RayCollector(
        [factory] * args.workers,
        None,
        collector_class=Collector,
        frames_per_batch=args.batch,
        total_frames=total,
        num_collectors=args.workers,
        sync=False,
    )
    for batch in collector:
        yield batch.numel()
    collector.shutdown()


def rllib(args: argparse.Namespace, total: int) -> Iterator[int]:
    from ray.rllib.algorithms.ppo import PPOConfig

    start_ray(args.workers)
    config = (
        PPOConfig()
        .environment(args.env)
        .env_runners(
            num_env_runners=args.workers, num_envs_per_env_runner=args.lanes // args.workers
        )
        .learners(num_learners=0)
    )
    group = config.build_algo().env_runner_group
    share, made = args.batch // args.workers, 0
    while made < total:
        found = group.foreach_env_runner(
            lambda runner: runner.sample(num_timesteps=share, random_actions=True),
            local_env_runner=False,
        )
        rows = sum(len(episode) for episodes in found for episode in episodes)
        made += rows
        yield rows


def child(args: argparse.Namespace) -> None:
    """Collect the rows of one contender, and print the figures as JSON."""
    source = {"torchrl": torchrl, "rllib": rllib}.get(args.child, ours)
    total = args.warm + args.rows + 1  # not a multiple of the batch
    got, began, cpu, warm = 0, 0.0, 0.0, 0
    wall = spent = 0.0
    last = 0
    for rows in source(args, total):
        got += rows
        if not warm and got >= args.warm:
            warm, began, cpu = got, time.perf_counter(), cpu_seconds()
        elif warm and got - warm <= args.rows:
            wall, spent, last = time.perf_counter() - began, cpu_seconds() - cpu, got - warm
    say_and_end({"asked": total, "got": got, "rate": last / wall, "us": 1e6 * spent / last})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--warm", type=int, default=3 * 4096)
    parser.add_argument("--rows", type=int, default=16 * 4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    found = in_turns(args.only.split(","), args.rounds)
    print(
        "| | driver us a row | rows a second | beside processes | asked | got |\n"
        "|---|---|---|---|---|---|"
    )
    for name, each in found.items():
        if not each:
            continue
        base = found.get("processes sync" if name.endswith("sync") else "processes") or each
        beside = median(
            mine["rate"] / theirs["rate"] for mine, theirs in zip(each, base, strict=False)
        )
        print(
            f"| {name} | {median(one['us'] for one in each):.2f} "
            f"| {median(one['rate'] for one in each):,.0f} | {beside:.2f} "
            f"| {each[0]['asked']:,} | {each[0]['got']:,} |"
        )


if __name__ == "__main__":
    main()
