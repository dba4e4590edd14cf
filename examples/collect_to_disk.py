"""Collect exactly N transitions to disk, and read them back through a TorchRL replay buffer.

    python examples/collect_to_disk.py --frames 100000 --out data/examples/cartpole

Actions are random. The first batch creates the storage, and every batch is committed before the
next one is collected. ``--out`` must not exist yet.

Measured with the defaults, in two runs that gave the same rows: 100,000 transitions, 4488 episodes,
7.2 MiB, in 1.3 to 2.6 s on two shared cores.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, fields
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    env_id: str = option("CartPole-v1", "a Gymnasium id")
    num_envs: int = option(8, "lanes")
    frames: int = option(100_000, "transitions to collect, exactly")
    frames_per_batch: int = option(8192, "transitions between two commits")
    seed: int = option(0, "of environments and actions")
    out: str = option("data/examples/cartpole", "a directory that does not exist yet")
    sample: int = option(256, "transitions to sample at the end")


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


def show(rows: TensorDictBase) -> None:
    for key, value in sorted(rows.items(True, True), key=str):
        name = key if isinstance(key, str) else "/".join(key)
        print(f"  {name:<26} {value.dtype!s:<14} {list(value.shape)}")


def main(args: Args) -> None:
    # Collect.
    start = time.perf_counter()
    with SyncCollector(
        args.env_id,
        num_envs=args.num_envs,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.frames,
        seed=args.seed,
        storage=args.out,
    ) as collector:
        for _ in collector:
            pass
    seconds = time.perf_counter() - start
    returns = collector.episodes.returns
    print(f"{args.frames} transitions in {seconds:.1f} s, {len(returns)} episodes")

    # The ledger accounts for every slot.
    ledger = collector.ledger
    print(
        f"ledger: {ledger.slots} slots = {ledger.executed} executed + {ledger.reset_slots} resets; "
        f"{ledger.executed} executed = {ledger.stored} stored + {ledger.discarded} discarded"
    )
    assert ledger.stored == args.frames

    # Read the rows back. Any other process can do the same, during a run or after it.
    with MemmapStorage(args.out, mode="read") as storage:
        assert len(storage) == args.frames
        print(f"{args.out}: {len(storage)} rows, {storage.nbytes / 2**20:.1f} MiB")
        buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=args.sample)
        batch = buffer.sample()
        print(f"a sample of {len(batch)}:")
        show(batch)


if __name__ == "__main__":
    main(parse())
