"""Loader of batches that threads prepare while the learner computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from tallyroll.storage.compat import takes_pinned_memory
from tallyroll.storage.errors import LoaderForked
from tallyroll.storage.rows.transfers import StagedBatch
from tallyroll.storage.user_code import user_callback

Make = Callable[[torch.Generator], Any]
"""Function that makes a batch from random numbers of the generator."""

_AHEAD_PER_WORKER: Final = 2
_BITS: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class _Job:
    """Callable with which a thread makes the batch of a given number."""

    make: Make
    transform: Callable[[Any], Any] | None
    seed: int
    device: torch.device | None
    """The device for which batches are staged in pinned memory; None if they are not."""

    def __call__(self, number: int) -> Any:
        with torch.no_grad():
            with user_callback("a batch"):
                batch = self.make(torch.Generator().manual_seed(_mixed(self.seed, number)))
            if self.transform is not None:
                with user_callback("transform"):
                    batch = self.transform(batch)
            if self.device is None:
                return batch
            return StagedBatch.of(batch, self.device) or batch.pin_memory()


class _Here(Executor):
    """Executor that makes batches in the calling thread."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        made: Future[Any] = Future()
        try:
            made.set_result(job(*args, **named))
        except Exception as error:  # noqa: BLE001 - raised where the batch is taken
            made.set_exception(error)
        return made


class Loader(Iterator[Any]):
    """Iterator over a storage's batches, which threads prepare; see `DiskStorage.loader`.

    The threads stop when the loader is closed (by `close` or the end of a ``with`` block), has
    returned its last batch, raised the error of a batch, or is garbage-collected. Only one thread
    at a time may take batches.
    """

    def __init__(
        self,
        make: Make,
        *,
        transform: Callable[[Any], Any] | None = None,
        workers: int = 2,
        ahead: int | None = None,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        batches: int | None = None,
    ) -> None:
        _check("workers", workers, 0)
        for name, value, least in (("ahead", ahead, 1), ("seed", seed, 0), ("batches", batches, 1)):
            if value is not None:
                _check(name, value, least)
        if transform is not None and not callable(transform):
            raise ValueError(
                f"transform: expected a function of a batch, or None, got {transform!r}."
            )
        # An unavailable device raises here rather than in a thread.
        self._device = None if device is None else torch.empty(0, device=device).device
        if seed is None:  # a seed from torch's generator, as in a DataLoader
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        pins = self._device is not None and takes_pinned_memory(self._device)
        staged_for = self._device if pins else None
        self._job, self._pid = _Job(make, transform, seed, staged_for), os.getpid()
        self._batches, self._begun = batches, 0
        self._ahead = ahead or max(1, _AHEAD_PER_WORKER * workers)
        self._made: deque[Future[Any]] = deque()
        self._pool = ThreadPoolExecutor(workers, "tallyroll-loader") if workers else _Here()
        self._closed = False

    def __next__(self) -> Any:
        """Return the next batch; wait for it if it is not ready yet."""
        if self._pid != os.getpid():
            raise LoaderForked(
                f"the threads of this loader run in process {self._pid}, not in the forked "
                f"process {os.getpid()}. Create a loader in each process."
            )
        made = self._made
        while not self._closed and self._begun != self._batches and len(made) < self._ahead:
            made.append(self._pool.submit(self._job, self._begun))
            self._begun += 1
        if not made:
            self._stop(wait=False)
            raise StopIteration
        try:
            batch = made[0].result()
        except BaseException as error:
            # An interrupt of the wait is not an error of the batch. The next call returns that
            # batch.
            if made[0].done() and made[0].exception() is error:
                self._stop(wait=False)  # do not wait, because other batches may take long
            raise
        if self._device is not None:
            batch = batch.to(self._device, non_blocking=True)
        made.popleft()
        return batch

    def close(self) -> None:
        """Stop the threads once they finish their current batches. A second call has no effect."""
        self._stop(wait=self._pid == os.getpid())

    def _stop(self, *, wait: bool) -> None:
        self._closed = True
        self._made.clear()
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Stop the threads without waiting, because one of them may drop the last reference."""
        pool = getattr(self, "_pool", None)
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=False, cancel_futures=True)


def _mixed(seed: int, number: int) -> int:
    """Return the ``number``-th output of SplitMix64, which differs between seeds and numbers."""
    state = seed + (number + 1) * 0x9E3779B97F4A7C15 & _BITS
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _BITS
    return state ^ state >> 31


def _check(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}.")
