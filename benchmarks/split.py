"""Compare ``split_trajectories`` with TorchRL's. Run ``python benchmarks/split.py``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
from common import Contender, Tally, console, interleave, prepare, print_results, print_setting
from tensordict import TensorDict
from torchrl.collectors.utils import split_trajectories as torchrl_split_trajectories

from tallyroll.collector import split_trajectories

if TYPE_CHECKING:
    from collections.abc import Callable


def make_rows(count: int, trajectories: int) -> TensorDict:
    """Return ``count`` CartPole-like rows: adjacent trajectories of random lengths, at least 1."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randperm(count - 1, generator=generator)[: trajectories - 1] + 1
    first = torch.zeros(count, dtype=torch.int64)
    first[starts] = 1
    ids = first.cumsum(0)
    last = torch.cat([first[1:], torch.ones(1, dtype=torch.int64)]).bool().unsqueeze(-1)
    observation = torch.randn(count, 4, generator=generator)
    following = {
        "observation": torch.randn(count, 4, generator=generator),
        "reward": torch.ones(count, 1),
        "done": last,
        "terminated": last.clone(),
        "truncated": torch.zeros_like(last),
    }
    rows = {
        "observation": observation,
        "action": torch.randint(2, (count,), generator=generator),
        "next": TensorDict(following, [count]),
        "collector": TensorDict({"traj_ids": ids}, [count]),
    }
    return TensorDict(rows, [count])


class Split(Contender):
    """One of the two functions on the same rows. A call counts as one vector step of all rows."""

    def __init__(
        self, name: str, split: Callable[[TensorDict], TensorDict], rows: TensorDict
    ) -> None:
        """Store the name, the function and the rows."""
        self.name, self.split, self.rows = name, split, rows

    def advance(self) -> None:
        """Split once."""
        self.result = self.split(self.rows)

    def tally(self) -> Tally:
        """Return the number of rows that were split."""
        return Tally(transitions=len(self.rows), vector_steps=1)


def check_same(ours: TensorDict, theirs: TensorDict) -> None:
    """Exit unless both results have the same trajectories at the same padded positions."""
    mask = theirs["collector", "mask"]
    same_mask = torch.equal(ours["collector", "mask"], mask)
    if not same_mask or not torch.equal(ours["observation"][mask], theirs["observation"][mask]):
        raise SystemExit("the two results differ: there is nothing to compare")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, two rounds: does it run?")
    parser.add_argument("--rows", type=int, default=64_000)
    parser.add_argument("--trajectories", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.trajectories, args.rounds = 2000, 100, 2
    return args


def main() -> None:
    """Check that both functions agree, then time them in interleaved rounds."""
    args = parse_args()
    prepare()
    print_setting()
    rows = make_rows(args.rows, args.trajectories)
    check_same(split_trajectories(rows), torchrl_split_trajectories(rows.clone()))
    theirs = Split("TorchRL", torchrl_split_trajectories, rows)
    ours = Split("tallyroll", split_trajectories, rows)
    results = interleave([theirs, ours], args.rounds, seconds=0.01 if args.quick else 0.3)
    title = f"split {args.rows} rows, {args.trajectories} trajectories (one call = a vector step)"
    print_results(title, results, against="TorchRL")
    factor = results[0].transition_us / results[1].transition_us
    console.print(f"tallyroll is {factor:.1f} times as fast")


if __name__ == "__main__":
    main()
