"""Compare worker processes with one process, and with other libraries' workers.

Run ``python benchmarks/workers.py``. Each case runs in interleaved rounds, in one process, with
Tallyroll's workers and with the peers', all on the same environments and the same policy.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import worker_envs
import worker_images
from common import (
    Contender,
    Result,
    comparisons,
    console,
    play_and_close,
    prepare,
    print_results,
    print_setting,
    ratio,
    write_json,
)
from loops import (
    ENV_ID,
    Case,
    Tallyroll,
    Work,
    count_reset_share,
    make_policy,
    make_raw,
    records_of,
)
from peers import installed
from processes import START, Apart, none_left
from small_batch_steps import RING, Calling, CallingWorkers, ring_of
from storage_work import image_rows, row_nbytes
from worker_ours import AHEAD, MODES, name_of, workers_collecting
from worker_peers import (
    RawProcesses,
    StableBaselines3Vector,
    TorchRLProcesses,
    WakingProcesses,
    gymnasium_vector,
    loop_over,
)

from tallyroll.collector import MultiprocessCollector, SyncCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensordict.nn import TensorDictModule

ONE = "tallyroll"
IMAGES, WAKEUPS = "images", "wakeups"


@dataclass(frozen=True)
class Kind:
    """A kind of environment.

    Args:
        name: name on the command line.
        env_id: id of the Gymnasium environment.
        lanes: lanes per worker.
        frames: frames per worker and batch.
        policies: random actions, or a network.
        time_limit: steps of every episode; None if episodes differ in length.
        needs: a package that the environment requires.
    """

    name: str
    env_id: str
    lanes: int
    frames: int
    policies: tuple[str, ...] = ("random",)
    time_limit: int | None = None
    needs: str | None = None

    def case(self, workers: int, env_kwargs: dict[str, Any]) -> Case:
        """Return the case with the lanes and frames of all workers."""
        return Case(
            self.name,
            lanes=workers * self.lanes,
            native=False,
            frames=workers * self.frames,
            env_id=self.env_id,
            env_kwargs=env_kwargs,
        )


LIMIT = worker_envs.TIME_LIMIT
KINDS = (
    Kind("cartpole", ENV_ID, 8, 2048, ("random", "sampled")),
    Kind("cheetah", worker_envs.CHEETAH, 4, 512, time_limit=LIMIT, needs="mujoco"),
    Kind("busy", worker_envs.BUSY, 4, 128, time_limit=LIMIT),
)
IMAGE_LANES, IMAGE_FRAMES = 8, 256
"""Lanes, and frames per batch, of a worker that collects images."""
STILL_LANES, STILL_STEPS = 4, 256
"""Lanes of a worker whose step costs nothing, and steps, one per call, in an ``advance``."""
KNOWN = (*(kind.name for kind in KINDS), IMAGES, WAKEUPS)
QUICK = f"cartpole,{IMAGES},{WAKEUPS}"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"two tiny rounds of {QUICK}: does it run?"
    )
    parser.add_argument("--only", default="", help=f"of {','.join(KNOWN)} (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds a contender (default: 15)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a round")
    parser.add_argument("--no-peers", action="store_true", help="the raw loop and Tallyroll only")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    args.wanted = (args.only or (QUICK if args.quick else ",".join(KNOWN))).split(",")
    if set(args.wanted) - set(KNOWN):
        parser.error(f"cases are {', '.join(KNOWN)}")
    args.kinds, args.image_lanes, args.image_frames = KINDS, IMAGE_LANES, IMAGE_FRAMES
    if args.quick:
        args.rounds, args.seconds = 2, 0.001
        args.image_lanes, args.image_frames = 1, 4
        args.kinds = [
            replace(kind, lanes=1, frames=16, policies=kind.policies[:1]) for kind in KINDS
        ]
    return args


def share_of_resets(kind: Kind, work: Work, policy: TensorDictModule | None, quick: bool) -> float:
    """Return the share of a NEXT_STEP vector's slots that are resets."""
    if kind.time_limit is not None:
        return 1 / (kind.time_limit + 1)
    blocks = 1 if quick else max(2, 200_000 // work.case.frames)
    return count_reset_share(make_raw(work, policy), blocks)


def peers(
    work: Work, policy: TensorDictModule | None, workers: int, resets: float
) -> tuple[list[Contender], list[str]]:
    """Return the peers, and remarks on those left out.

    A vector with one process per lane runs twice: with as many lanes as the other contenders have,
    and with as many lanes as there are workers.
    """
    factories: dict[str, Callable[[], Contender]] = {
        "TorchRL, sync": lambda: Apart(
            partial(TorchRLProcesses, work, policy, workers, sync=True), ahead=2
        ),
        "TorchRL, async": lambda: Apart(
            partial(TorchRLProcesses, work, policy, workers, sync=False), ahead=2
        ),
    }
    for lanes in dict.fromkeys((workers, work.case.lanes)):
        fewer = replace(work, case=replace(work.case, lanes=lanes))
        factories[f"Stable-Baselines3, {lanes}"] = partial(
            Apart, partial(over_stable_baselines3, fewer, policy)
        )
        factories[f"Gymnasium, {lanes}"] = partial(
            Apart, partial(over_gymnasium, fewer, policy, resets)
        )
    return installed(factories)


def over_stable_baselines3(work: Work, policy: TensorDictModule | None) -> Contender:
    """Return the raw loop over ``SubprocVecEnv``, which resets in the step that ends an episode."""
    return loop_over("SB3 SubprocVecEnv", StableBaselines3Vector(work.case), work, policy, 0.0)


def over_gymnasium(work: Work, policy: TensorDictModule | None, resets: float) -> Contender:
    """Return the raw loop over ``AsyncVectorEnv``."""
    return loop_over("AsyncVectorEnv", gymnasium_vector(work.case), work, policy, resets)


def contenders(
    kind: Kind, work: Work, args: argparse.Namespace
) -> tuple[list[Contender], list[str]]:
    """Return the raw loop, one process, the workers, and the peers."""
    policy, workers = make_policy(work.policy), args.workers
    resets = share_of_resets(kind, work, policy, args.quick)
    raw = make_raw(work, policy)
    raw.reset_share = resets
    found: list[Contender] = [raw, Tallyroll(work, policy)]
    for mode in MODES:
        found.append(Apart(partial(workers_collecting, work, policy, workers, mode), AHEAD[mode]))
    found.append(Apart(partial(RawProcesses, work, workers, resets)))
    theirs, remarks = ([], []) if args.no_peers else peers(work, policy, workers, resets)
    return found + theirs, remarks


def play_case(
    kind: Kind, case: Case, policy: str, args: argparse.Namespace, scratch: Path
) -> list[dict[str, Any]]:
    """Run one case with one policy, print its table, return its figures."""
    work = Work(case, policy, scratch)
    found, remarks = contenders(kind, work, args)
    results = play_and_close(found, args.rounds, args.seconds)
    one = results[1]
    print_results(
        work.title,
        results,
        [*remarks, *comparisons(results, pairs(args.workers))],
        more={
            "to one process": lambda result: f"{ratio(one, result):.3f}",
            "parent's us": lambda result: f"{result.own_us:.3f}",
        },
    )
    return report(work, results, one)


def pairs(workers: int) -> list[tuple[str, str]]:
    """Return the pairs of contenders to compare."""
    compared = []
    for mode, theirs in zip(MODES, ("MultiSyncCollector", "MultiAsyncCollector"), strict=True):
        name = name_of(workers, mode)
        compared += [(name, ONE), (name, f"TorchRL {theirs}")]
    return compared


def play_images(case: Case, args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Run the image case, print its table, and return its figures."""
    work = Work(case, "random", scratch)
    found = worker_images.contenders(work, args.workers)
    results = play_and_close(found, args.rounds, args.seconds)
    nbytes, one = row_nbytes(image_rows(1)), results[1]
    print_results(
        f"images: {case.lanes} lanes, rows of {nbytes} bytes, batches of {case.frames}",
        results,
        against="floor",
        more={
            "parent's us": lambda result: f"{result.own_us:.2f}",
            "GB/s stored": lambda result: f"{nbytes / result.transition_us / 1000:.2f}",
        },
    )
    return report(work, results, one)


def play_wakeups(case: Case, args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Compare one step per call with processes that only wake each other, and print the table."""
    work, workers = Work(case, "random", scratch), args.workers

    def ours(count: int) -> Calling:
        storage = ring_of(work, str(count), RING)
        options: dict[str, Any] = {"frames_per_batch": case.frames, "total_frames": -1, "seed": 0}
        make = partial(worker_envs.Still, case.lanes // count)
        if count == 1:
            one = SyncCollector(make, storage=storage, **options)
            return Calling("tallyroll collect", case, one, storage)
        many = MultiprocessCollector(
            make, num_workers=count, mp_start_method=START, storage=storage, **options
        )
        return CallingWorkers(name_of(count, "sync"), case, many, storage)

    found: list[Contender] = [
        Apart(partial(WakingProcesses, case, workers)),
        Apart(partial(ours, workers)),
        ours(1),
    ]
    results = play_and_close(found, args.rounds, args.seconds)
    waking, many, one = results
    title = f"one step a call of an environment that returns at once: {case.lanes} lanes"
    times = many.vector_step_us / waking.vector_step_us
    beside = (many.vector_step_us - one.vector_step_us) / waking.vector_step_us
    remark = f"{many.name}: {times:.2f} wake-ups, {beside:.2f} beside one process's call"
    print_results(title, results, [remark], against="wake-ups")
    return report(work, results, one)


def report(work: Work, results: list[Result], one: Result) -> list[dict[str, Any]]:
    """Return the results as plain records. ``one`` is the result of one process."""
    return [
        {
            **record,
            "transitions_per_second": 1e6 / result.transition_us,
            "speed_to_one_process": ratio(one, result),
            "parent_cpu_us_per_transition": result.own_us,
            "rounds_parent_cpu_us_per_transition": result.own_per_transition,
        }
        for record, result in zip(records_of(work, results), results, strict=True)
    ]


def env_kwargs_of(kind: Kind, quick: bool) -> dict[str, Any]:
    """Return the arguments with which a step of the busy environment takes a millisecond here.

    They are measured once and used by all contenders, so that all do the same work.
    """
    if kind.env_id != worker_envs.BUSY:
        return {}
    return {"iterations": worker_envs.iterations_for(1e-5 if quick else 1e-3)}


def jobs(args: argparse.Namespace) -> Iterator[Callable[[Path], list[dict[str, Any]]]]:
    """Yield the benchmarks to run, in order. Each is called with a folder for files."""
    for kind in args.kinds:
        if kind.name not in args.wanted:
            continue
        if kind.needs is not None and find_spec(kind.needs) is None:
            console.print(f'{kind.name}: left out, {kind.needs} is missing: install ".[bench]"')
            continue
        case = kind.case(args.workers, env_kwargs_of(kind, args.quick))
        for policy in kind.policies:
            yield partial(play_case, kind, case, policy, args)
    if WAKEUPS in args.wanted:
        lanes = args.workers * STILL_LANES
        steps = 4 if args.quick else STILL_STEPS
        yield partial(play_wakeups, Case(WAKEUPS, lanes, native=False, frames=steps * lanes), args)
    if IMAGES in args.wanted:
        case = worker_images.image_case(args.workers, args.image_lanes, args.image_frames)
        yield partial(play_images, case, args)


def main() -> None:
    """Run every case with every policy."""
    args = parse_args()
    with none_left():
        prepare()
        print_setting()
        console.print(f"{args.rounds} interleaved rounds of at least {args.seconds} s, one thread")
        records: list[dict[str, Any]] = []
        for job in jobs(args):
            with tempfile.TemporaryDirectory(prefix="tallyroll-bench-") as scratch:
                records += job(Path(scratch))
            if args.json:
                write_json(args.json, records)


if __name__ == "__main__":
    main()
