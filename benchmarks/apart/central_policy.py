"""Compare a driver that chooses actions for all workers with workers that choose their own.

    python benchmarks/apart/central_policy.py --rounds 3
    python benchmarks/apart/central_policy.py --ray --width 1024

Each contender runs in its own process, in turns within each round. After a warm-up it collects a
number of rows from an environment with a policy of two hidden layers. It prints the CPU time of the
driver's process (all of its threads), the wall-clock time, and the number of policy calls in all
processes together. Workers that choose their own actions call the policy once per slot, each for
its own lanes.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from by_turns import cpu_seconds, in_turns, ours, say_and_end

PLACES = ("local", "central")
MODES = ("sync", "async")


def policy_of(env: str, width: int) -> Any:
    import gymnasium
    import torch
    from tensordict.nn import TensorDictModule

    torch.set_num_threads(1)
    made = gymnasium.make(env)
    seen, acts = made.observation_space.shape, made.action_space
    discrete = hasattr(acts, "n")
    network = torch.nn.Sequential(
        torch.nn.Linear(seen[0], width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, int(acts.n) if discrete else acts.shape[0]),
    ).to(torch.float64 if made.observation_space.dtype == "float64" else torch.float32)
    made.close()

    class Acts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            out = self.network(observation)
            return out.argmax(-1) if discrete else torch.tanh(out).float()

    return TensorDictModule(Acts(), in_keys=["observation"], out_keys=["action"])


def child(args: argparse.Namespace) -> None:
    """Collect the rows of one contender, and print the figures as JSON."""
    over, mode, place = args.child.split()
    kind, more = ours(over)
    warm = wall = cpu = began = used = rows = 0.0
    with kind(
        args.env,
        policy_of(args.env, args.width),
        num_envs=args.lanes,
        num_workers=args.workers,
        mode=mode,
        frames_per_batch=args.batch,
        total_frames=-1,
        seed=0,
        start_timeout=900,
        policy_placement=place,
        **more,
    ) as collector:
        central = collector._worker_pool.central
        calls = 0
        for batch in collector:
            if not warm:
                warm, began, used = 1, time.perf_counter(), cpu_seconds()
                calls = 0 if central is None else central.calls
                continue
            rows += len(batch)
            if rows >= args.rows:
                break
        wall, cpu = time.perf_counter() - began, cpu_seconds() - used
        made = rows / (args.lanes / args.workers) if central is None else central.calls - calls
    say_and_end({"us": 1e6 * cpu / rows, "rate": rows / wall, "calls": 1000 * made / rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16 * 4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    over = ("processes", "ray") if args.ray else ("processes",)
    names = (f"{each} {mode} {place}" for each in over for mode in MODES for place in PLACES)
    found = in_turns(names, args.rounds)
    print("| | driver us a row | rows a second | calls of the policy in 1,000 rows |")
    print("|---|---|---|---|")
    for name, each in found.items():
        us, rate, calls = (median(one[what] for one in each) for what in ("us", "rate", "calls"))
        print(f"| {name} | {us:.1f} | {rate:,.0f} | {calls:.1f} |")


if __name__ == "__main__":
    main()
