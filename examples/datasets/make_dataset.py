"""Make one dataset from nine shards of three policies: check, select, split and pack.

    python examples/datasets/make_dataset.py --out data/policies
    python examples/datasets/make_dataset.py --out data/policies    # run again to resume

A random policy, a poor one, and a good one with half of its actions random collect CartPole in
shards, each exactly the requested number of transitions. Shards do not depend on each other: here
they are collected one after the other, on a cluster each would be a separate job. `verify` checks
every row, and that all shards of a run are present. `open_storage` reads all shards as one storage,
without a copy. The script splits full trajectories into a training and a validation set and packs
both, and packs the good trajectories as well. If you run it again, it keeps complete shards and
packed rows.

With the defaults it prints this after 7 s on one core:

                rows  episodes mean return    best   good
    random     10000       451        22.3      69      0
    poor       10000       239        42.4      68      0
    good       10000        62       163.3     500     38
    all        30000       752        39.4     500     38
    train      27515       677        40.3     500     35
    val         2485        75        31.9     168      3
    observations of good episodes: mean [-0.03  0.01  0.   -0.  ], std [0.48 0.57 0.07 0.4 ]
    all sound; 3,629,446 bytes of shards, 627,754 packed

`examples/datasets/offline_iql.py` learns from this dataset to balance the pole.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from tallyroll.collector import SyncCollector
from tallyroll.storage import content_hash, open_storage, verify


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    out: str = option("data/policies", "folder of the shards, and of the datasets made of them")
    transitions: int = option(10_000, "of each policy, exactly")
    shards: int = option(3, "parts that each policy's transitions are collected in")
    num_envs: int = option(6, "lanes of all shards of a policy together")
    noise: float = option(0.5, "share of the good policy's actions that are random")
    good: float = option(100.0, "return from which on an episode is good")
    seed: int = option(0, "of environments, actions and the split")


def parse() -> Args:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for each in fields(Args):
        name, kind = each.name.replace("_", "-"), type(each.default)
        text = f"{each.metadata['help']} (default: {each.default})"
        parser.add_argument(f"--{name}", type=kind, default=each.default, help=text)
    return Args(**vars(parser.parse_args()))


def policies(args: Args) -> dict[str, Any]:
    def poor(observation: torch.Tensor) -> torch.Tensor:
        return (observation[..., 2] > 0).long()  # looks only at the angle

    def good(observation: torch.Tensor) -> torch.Tensor:
        x, v, angle, speed = observation.unbind(-1)
        best = (angle + 0.5 * speed + 0.05 * x + 0.1 * v > 0).long()
        noisy = torch.rand(best.shape) < args.noise
        return torch.where(noisy, torch.randint(2, best.shape), best)

    return {"random": None, "poor": poor, "good": good}


def collect(path: Path, policy: Any, shard: str, seed: int, args: Args) -> None:
    """Collect one shard, or the rest of it. On a cluster this would be a job."""
    with SyncCollector(
        "CartPole-v1",
        policy,
        num_envs=args.num_envs,
        frames_per_batch=1000,
        total_frames=args.transitions,
        seed=seed,
        shard=shard,
        storage=path,
        resume="auto",
    ) as collector:
        for _ in collector:
            pass


def describe(name: str, rows: Any, args: Args) -> None:
    """Print one line of the table."""
    data = rows.trajectories
    whole = data.where("end == 'terminated' or end == 'truncated'").trajectories.returns
    good = data.where(f"return >= {args.good}")
    print(
        f"{name:8s}{len(rows):8d}{len(data):10d}{whole.mean():12.1f}{whole.max():8.0f}"
        f"{len(good.trajectories):7d}"
    )


def pack(rows: Any, path: Path) -> None:
    """Pack the rows, unless they are already packed."""
    if not path.exists():
        rows.pack(path)
    if content_hash(path) != content_hash(rows):
        raise SystemExit(f"{path} was made with other options: give another --out")


def main(args: Args) -> None:
    out = Path(args.out)
    for number, (name, policy) in enumerate(policies(args).items()):
        for index in range(args.shards):
            path = out / "shards" / f"{name}-{index}"
            collect(path, policy, f"{index}/{args.shards}", args.seed + 1000 * number, args)

    print(f"{'':8s}{'rows':>8s}{'episodes':>10s}{'mean return':>12s}{'best':>8s}{'good':>7s}")
    for name in policies(args):
        one = str(out / "shards" / f"{name}-*")
        report = verify([one])
        if not report.sound:
            raise SystemExit(f"{report}")
        with open_storage([one]) as rows:
            describe(name, rows, args)
    with open_storage([out / "shards" / "*"]) as union:
        describe("all", union, args)
        good = union.trajectories.where(f"return >= {args.good}")
        for name, rows in union.split(train=0.9, val=0.1, seed=args.seed).items():
            describe(name, rows, args)
            pack(rows, out / f"{name}.packed")
        pack(good, out / "good.packed")
        found = good.statistics(["observation"])["observation"]

    print(f"observations of good episodes: mean {found.mean.round(2)}, std {found.std.round(2)}")
    shards, packed = (
        sum(each.stat().st_size for path in paths for each in path.rglob("*") if each.is_file())
        for paths in ([out / "shards"], [out / "train.packed", out / "val.packed"])
    )
    print(f"all sound; {shards:,} bytes of shards, {packed:,} packed")


if __name__ == "__main__":
    main(parse())
