"""The peers with worker processes, and bare processes as an upper bound of their speed."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from common import Contender, Tally, prepare
from gymnasium.vector import VectorEnv
from loops import Case, Work, make_policy, make_raw
from peers import Peer, torchrl_env
from processes import START

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from tensordict.nn import TensorDictModule


def share(work: Work, workers: int) -> Work:
    """Return the work of one worker: the same number of vector steps on fewer lanes."""
    case = work.case
    return replace(
        work, case=replace(case, lanes=case.lanes // workers, frames=case.frames // workers)
    )


def loop_without_end(work: Work, pipe: Connection) -> None:
    """Run the raw loop for one block for each message."""
    prepare()
    loop = make_raw(work, make_policy(work.policy))
    try:
        while pipe.recv():
            loop.advance()
            pipe.send(None)
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        loop.close()


class RawProcesses(Contender):
    """The raw loop in processes that exchange nothing: the speed of the machine."""

    def __init__(self, work: Work, workers: int, reset_share: float) -> None:
        """Start the processes."""
        self.name = f"raw, {workers} processes (ceiling)"
        self.reset_share, self.case = reset_share, work.case
        self._start(workers, partial(loop_without_end, share(work, workers)))

    def _start(self, workers: int, serve: Callable[[Connection], None]) -> None:
        self.pipes, self.processes = [], []
        for _ in range(workers):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def advance(self) -> None:
        """Let each process step one block."""
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()

    def tally(self) -> Tally:
        """Return the slots of all blocks minus the expected reset slots."""
        return Tally(self.case.frames * (1 - self.reset_share), self.case.block)

    def close(self) -> None:
        """Stop the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)


def wake(pipe: Connection) -> None:
    """Answer each byte with a byte."""
    prepare()
    file = pipe.fileno()
    with suppress(ConnectionError, KeyboardInterrupt):
        while os.read(file, 1):
            os.write(file, b"1")


class WakingProcesses(RawProcesses):
    """Processes that only wake each other: the parent wakes all children, and each of them it."""

    def __init__(self, case: Case, workers: int) -> None:
        """Start the processes."""
        self.name = f"{workers} processes that only wake this one"
        self.reset_share, self.case = 0.0, case
        self._start(workers, wake)
        self.files = [pipe.fileno() for pipe in self.pipes]

    def advance(self) -> None:
        """Once per vector step, wake each process and wait until it answers."""
        files, read, write = self.files, os.read, os.write
        for _ in range(self.case.block):
            for file in files:
                write(file, b"1")
            for file in files:
                read(file, 1)


class TorchRLProcesses(Peer):
    """TorchRL's ``MultiSyncCollector`` or ``MultiAsyncCollector``, with one vector per worker.

    A ``SerialEnv`` with as many lanes takes three times as long. ``cat_results=0`` is slightly
    faster than the default, which stacks.
    """

    def __init__(
        self, work: Work, policy: TensorDictModule | None, workers: int, *, sync: bool
    ) -> None:
        """Start the workers."""
        from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

        super().__init__(work.case)
        collector = MultiSyncCollector if sync else MultiAsyncCollector
        self.name = f"TorchRL {collector.__name__}"
        # Without synchronization, each worker yields its own batches.
        self.batches_at_once = 1 if sync else workers
        more: dict[str, Any] = {"cat_results": 0} if sync else {}
        self.collector = collector(
            [partial(torchrl_env, share(work, workers).case)] * workers,
            policy,
            frames_per_batch=work.case.frames,
            total_frames=-1,
            use_buffers=True,
            num_threads=1,
            **more,
        )
        self.batches = iter(self.collector)

    def advance(self) -> None:
        """Collect one batch, or one from each worker."""
        for _ in range(self.batches_at_once):
            next(self.batches)

    def tally(self) -> Tally:
        """Return the work of these batches."""
        batches = self.batches_at_once
        return Tally(batches * self.case.frames, batches * self.case.block)

    def close(self) -> None:
        """Shut down the collector, which makes torch use more threads in this process again."""
        self.collector.shutdown()
        prepare()


class StableBaselines3Vector:
    """``SubprocVecEnv``, one process per lane, with the signatures of a Gymnasium vector."""

    def __init__(self, case: Case) -> None:
        """Start the processes."""
        from stable_baselines3.common.vec_env import SubprocVecEnv

        make = partial(gym.make, case.env_id, **case.env_kwargs)
        self.env = SubprocVecEnv([make] * case.lanes, start_method=START)
        self.single_action_space = self.env.action_space
        self.step, self.close = self.env.step, self.env.close

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Reset all lanes."""
        self.env.seed(seed)
        return self.env.reset(), {}


def gymnasium_vector(case: Case) -> VectorEnv:
    """``AsyncVectorEnv``, one process per lane, with observations in shared memory."""
    return gym.make_vec(
        case.env_id,
        case.lanes,
        vectorization_mode="async",
        **case.env_kwargs,
    )


def loop_over(
    name: str, env: Any, work: Work, policy: TensorDictModule | None, reset_share: float
) -> Contender:
    """Return the raw loop over a vector environment with processes."""
    loop = make_raw(work, policy, env)
    loop.name, loop.reset_share = f"{name}, {work.case.lanes} processes", reset_share
    return loop
