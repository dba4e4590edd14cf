"""Weights in shared memory arrive whole, even if a process dies during the update."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn

from tallyroll.collector.errors import ArgumentError, SharedMemoryBusy, StateError
from tallyroll.collector.workers.local.memory import Arena, ArenaSizer
from tallyroll.collector.workers.local.rwlock import FileLock, holders
from tallyroll.collector.workers.local.weights import SharedWeights

from fork_server import warm_fork_server
from storage_contract import WAIT_SECONDS, process, receive

SIZE = 50_000
"""Entries of each tensor, enough for a copy to take time."""


class Net(nn.Module):
    """Network with a shared parameter, buffers of both kinds, odd dtypes and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool), persistent=False)
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("same", torch.zeros(1, 3).expand(2, 3))


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def fill(module: nn.Module, value: int) -> None:
    with torch.no_grad():
        for tensor in tensors(module):
            (tensor if tensor.is_contiguous() else tensor[:1]).fill_(value)


def assert_filled(module: nn.Module, value: int) -> None:
    for tensor in tensors(module):
        assert torch.equal(tensor, torch.full_like(tensor, value))


@contextlib.contextmanager
def shared(module: nn.Module, **kwargs: Any) -> Iterator[tuple[Arena, SharedWeights]]:
    measure = ArenaSizer()
    SharedWeights(module, measure)
    arena = Arena.create(measure.end)
    weights = SharedWeights(module, arena, **kwargs)
    assert arena.end == measure.end
    yield arena, weights


def test_published_weights_are_loaded() -> None:
    source, target = Net(), Net()
    with shared(source) as (arena, weights):
        there = SharedWeights(target, Arena.attach(os.dup(arena.fd), arena.nbytes))
        assert weights.version == there.version == -1
        for version in (0, 1, 5, 3, 2**40):
            fill(source, version % 2)
            weights.publish(source, version)
            fill(source, 77)
            assert weights.version == there.version == version
            pointers = [tensor.data_ptr() for tensor in tensors(target)]
            assert there.load_into(target) == version
            assert_filled(target, version % 2)
            assert pointers == [tensor.data_ptr() for tensor in tensors(target)]
        assert target.two.weight is target.one.weight


def test_a_shared_parameter_has_room_once() -> None:
    tied, free = Net(), Net()
    free.two.weight = nn.Parameter(torch.zeros(4, 4))
    sizes = []
    for module in (tied, free):
        measure = ArenaSizer()
        SharedWeights(module, measure)
        sizes.append(measure.end)
    assert sizes[1] - sizes[0] == 2 * 4 * 4 * 4


def test_modules_of_tensordict() -> None:
    module = TensorDictModule(nn.Linear(2, 2), in_keys=["a"], out_keys=["b"])
    module.extra = TensorDictParams(TensorDict({"x": torch.ones(3), "y": {"z": torch.arange(2)}}))
    with shared(module) as (_, weights):
        before = [tensor.clone() for tensor in tensors(module)]
        weights.publish(module, 1)
        fill(module, 9)
        weights.load_into(module)
        assert all(map(torch.equal, tensors(module), before))
        assert len(before) == 4


@pytest.mark.parametrize("mode", ["grad", "no grad", "inference", "views", "backward", "expanded"])
def test_targets_of_every_kind(mode: str) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    if mode == "inference":
        with torch.inference_mode():
            target = nn.Linear(3, 2)
    elif mode == "no grad":
        target.requires_grad_(False)
    elif mode == "views":
        flat = torch.zeros(8)
        target.weight, target.bias = (
            nn.Parameter(part) for part in (flat[:6].view(3, 2).T, flat[6:])
        )
    elif mode == "backward":
        target(torch.ones(1, 3)).sum().backward()
    elif mode == "expanded":
        source.weight = nn.Parameter(torch.full((2, 3), 4.0))
        target.weight = nn.Parameter(torch.zeros(1, 1).expand(2, 3))
    with shared(source) as (_, weights):
        weights.publish(source, 0)
        weights.load_into(target)
        assert torch.equal(target.weight, source.weight)
        assert torch.equal(target.bias, source.bias)
        assert target.weight.requires_grad is (mode != "no grad")
        with torch.inference_mode():
            weights.publish(target, 1)
            weights.load_into(target)
        assert torch.equal(target.weight, source.weight)


def test_a_module_without_tensors() -> None:
    with shared(nn.ReLU()) as (_, weights):
        weights.publish(nn.ReLU(), 4)
        assert weights.load_into(nn.ReLU()) == 4


def test_asking_for_the_version_costs_next_to_nothing() -> None:
    with shared(nn.Linear(1, 1)) as (_, weights):
        seconds = min(timeit.repeat(lambda: weights.version, number=10_000, repeat=20))
        assert seconds / 10_000 < 0.5e-6, "0.1 us as measured, lambda included"


def test_weights_that_do_not_fit_are_refused() -> None:
    with shared(nn.Linear(3, 2)) as (_, weights):
        with pytest.raises(ArgumentError) as caught:
            weights.publish(nn.Linear(2, 2), 0)
        assert str(caught.value) == (
            "expected a module with the weights weight [2, 3] of torch.float32, got weight [2, 2] "
            "of torch.float32. Pass a module with the same structure as at the start."
        )
        with pytest.raises(ArgumentError, match=r"bias .* of torch.float32, got nothing more"):
            weights.publish(nn.Linear(3, 2, bias=False), 0)
        with pytest.raises(ArgumentError, match=r"nothing more, got 1\.weight \[1\] of"):
            weights.publish(named(nn.Linear(3, 2), nn.PReLU()), 0)
        with pytest.raises(ArgumentError, match=r"torch.float32, got weight .* torch.float64"):
            weights.load_into(nn.Linear(3, 2).double())
        with pytest.raises(
            ArgumentError, match="version: expected an integer of at least 0, got -1"
        ):
            weights.publish(nn.Linear(3, 2), -1)
        with pytest.raises(
            StateError, match=r"expected shared weights, got none\. Publish weights first"
        ):
            weights.load_into(nn.Linear(3, 2))
        assert weights.version == -1


def named(first: nn.Module, more: nn.Module) -> nn.Module:
    """Return a module with the tensors of ``first`` under their names, and another module."""
    module = nn.Module()
    for name, parameter in first.named_parameters():
        setattr(module, name, parameter)
    module.add_module("1", more)
    return module


def test_tensors_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ArgumentError, match="weight: expected weights, got a parameter without a"):
        SharedWeights(nn.LazyLinear(3), ArenaSizer())
    module = nn.Module()
    module.register_buffer("sparse", torch.zeros(2, 2).to_sparse())
    with pytest.raises(
        ArgumentError, match="sparse: expected a dense tensor, got one with the lay"
    ):
        SharedWeights(module, ArenaSizer())


def test_an_interrupted_publish_leaves_the_current_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Net(), Net()

    def half(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        targets[0].copy_(sources[0])
        raise KeyboardInterrupt

    with shared(source) as (_, weights):
        for version in (3, 4):
            fill(source, version)
            weights.publish(source, version)
        fill(source, 5)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", half)
            with pytest.raises(KeyboardInterrupt):
                weights.publish(source, 5)
        assert weights.load_into(target) == weights.version == 4
        assert_filled(target, 4)
        fill(source, 6)
        weights.publish(source, 6)
        assert weights.load_into(target) == 6
        assert_filled(target, 6)


# Between processes


class Big(nn.Module):
    """Module whose tensor entries all equal its version."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
        self.register_buffer("count", torch.zeros(SIZE, dtype=torch.int64), persistent=False)

    def fill(self, version: int) -> None:
        fill(self, version)

    def version(self) -> set[float]:
        """Return the distinct entries, a single one if the weights are whole."""
        return {float(end) for tensor in tensors(self) for end in tensor.detach().aminmax()}


def attached(connection: Connection) -> tuple[SharedWeights, Big]:
    arena = Arena.attach(reduction.recv_handle(connection), connection.recv())
    torch.set_num_threads(1)
    module = Big()
    return SharedWeights(module, arena), module


def publish_for_ever(connection: Connection) -> None:
    weights, module = attached(connection)
    while True:
        version = weights.version + 1
        module.fill(version)
        weights.publish(module, version)


def load_for_ever(connection: Connection) -> None:
    """Load repeatedly, and report errors and regular success."""
    weights, module = attached(connection)
    before = -1
    for count in itertools.count(1):
        # Several loads per check keep the lock mostly held.
        version = [weights.load_into(module) for _ in range(8)][-1]
        if module.version() != {version} or version < before:
            connection.send(f"{sorted(module.version())} as version {version} after {before}")
            time.sleep(WAIT_SECONDS)
        before = version
        if count % 20 == 0:
            connection.send(None)
        # The lock is not fair: readers without pauses could starve the writer.
        time.sleep(0.001)


def hold(connection: Connection, kind: str) -> None:
    """Hold the lock until killed, in the middle of a write if ``kind`` is "writing"."""
    weights, _ = attached(connection)
    with getattr(weights._lock, kind)():
        if kind == "writing":
            weights._copies[1 - (weights._word[0] & 1)][0].fill_(-7)
        connection.send(os.getpid())
        time.sleep(WAIT_SECONDS)


@contextlib.contextmanager
def worker(target: Any, arena: Arena, *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    warm_fork_server()
    with process(target, *args) as (child, connection):
        assert child.pid is not None
        reduction.send_handle(connection, arena.fd, child.pid)
        connection.send(arena.nbytes)
        yield child, connection


def stop(pid: int) -> None:
    """Stop a process and wait until it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_SECONDS
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.slow
def test_no_weights_are_torn_and_no_lock_outlives_its_holder() -> None:
    """Processes are killed at random moments while they hold the lock, and the others continue."""
    source, dice = Big(), random.Random(5)
    targets = [publish_for_ever, load_for_ever, load_for_ever]
    with shared(source) as (arena, weights), contextlib.ExitStack() as stack:
        weights.publish(source, 0)
        stacks = [stack.enter_context(contextlib.ExitStack()) for _ in targets]

        def start(index: int) -> tuple[BaseProcess, Connection]:
            return stacks[index].enter_context(worker(targets[index], arena))

        running = [start(index) for index in range(len(targets))]
        for index in (0, 1, 2) * 3:
            pid = running[index][0].pid
            assert pid is not None
            stop_as_holder(pid, weights, dice)
            os.kill(pid, signal.SIGKILL)
            for _, connection in running:
                while connection.poll():
                    with contextlib.suppress(EOFError, ConnectionResetError):
                        assert connection.recv() is None
            stacks[index].close()
            running[index] = start(index)
        for _, connection in running[1:]:
            assert receive(connection) is None


def stop_as_holder(pid: int, weights: SharedWeights, dice: random.Random) -> None:
    """Stop a process at a random moment while it holds the lock."""
    while True:
        wait_for(lambda: pid in weights._lock._holders() or not alive(pid))
        assert alive(pid), f"process {pid} ended by itself"
        time.sleep(dice.random() * 0.001)
        stop(pid)
        if pid in weights._lock._holders():
            return
        os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing goes on"
        time.sleep(0.001)


# The lock


@contextlib.contextmanager
def locks(count: int, seconds: float) -> Iterator[list[FileLock]]:
    """Yield locks of one file, as separate processes would have them."""
    arena = Arena.create(1)
    made = [FileLock(arena.fd, "the memory", seconds) for _ in range(count)]
    try:
        yield made
    finally:
        for lock in made:
            lock.close()
            lock.close()


def test_readers_read_together_and_writers_write_alone() -> None:
    with locks(3, 0.01) as (a, b, c):
        with a.reading(), b.reading(), pytest.raises(SharedMemoryBusy), c.writing():
            pass
        for other in (b.reading, b.writing):
            with a.writing(), pytest.raises(SharedMemoryBusy), other():
                pass
        with c.writing():
            pass


@pytest.mark.parametrize("kind", [pytest.param("reading", marks=pytest.mark.slow), "writing"])
def test_the_holder_of_the_lock_is_named(kind: str) -> None:
    source, target = Big(), Big()
    with shared(source, lock_seconds=0.05) as (arena, weights):
        source.fill(3)
        weights.publish(source, 3)
        with worker(hold, arena, kind) as (child, connection):
            pid = receive(connection)
            stop(pid)
            began = time.monotonic()
            with pytest.raises(SharedMemoryBusy) as caught:
                weights.publish(source, 4)
            assert time.monotonic() - began < 20
            assert str(caught.value) == (
                "expected the shared weights for writing within 0.05 s, got no access: process "
                f"{pid} "
                "(stopped) holds the lock. Let that process continue, or kill it."
            )
            if kind == "writing":
                with pytest.raises(SharedMemoryBusy, match=f"for reading within .* process {pid} "):
                    weights.load_into(target)
            else:
                assert weights.load_into(target) == 3, "readers do not wait for each other"
            child.kill()
            child.join(WAIT_SECONDS)
            assert weights.load_into(target) == 3
            assert target.version() == {3}, "what the dead was writing is not current"
            source.fill(4)
            weights.publish(source, 4)
            assert weights.load_into(target) == 4
            assert target.version() == {4}


def hold_and_fork(connection: Connection) -> None:
    """Hold the lock, with a child that lives on."""
    weights, _ = attached(connection)
    with weights._lock.writing():
        child = os.fork()
        if child:
            connection.send(child)
        time.sleep(WAIT_SECONDS)
    os._exit(0)


def test_a_lock_does_not_live_on_in_a_forked_child() -> None:
    source = Big()
    with (
        shared(source, lock_seconds=10.0) as (arena, weights),
        worker(hold_and_fork, arena) as (parent, connection),
    ):
        child = psutil.Process(receive(connection))
        parent.kill()
        parent.join(WAIT_SECONDS)
        try:
            assert child.is_running()
            weights.publish(source, 1)
        finally:
            child.kill()
            child.wait(WAIT_SECONDS)


def test_a_fork_leaves_the_parents_lock_and_has_its_own() -> None:
    with locks(2, 0.05) as (a, b):
        with a.writing():
            assert in_a_fork(lambda: refused(a)) == 0, "the fork has what is the parent's"
            assert refused(b), "the fork released what was the parent's"
        assert in_a_fork(lambda: not refused(a)) == 0


def refused(lock: FileLock) -> bool:
    try:
        with lock.writing():
            return False
    except SharedMemoryBusy:
        return True


def in_a_fork(check: Callable[[], bool]) -> int:
    """Return 0 if `check` is true in a fork."""
    with warnings.catch_warnings():
        # warning of forks in processes with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def test_threads_of_a_process_take_turns() -> None:
    with locks(1, 0.05) as (lock,), lock.writing():
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(refused(lock)))
        thread.start()
        thread.join(WAIT_SECONDS)
        assert found == [True]


def test_an_error_raised_inside_releases_the_lock() -> None:
    with locks(2, 0.05) as (a, b):
        for kind in (a.writing, a.reading):
            with pytest.raises(KeyboardInterrupt), kind():
                raise KeyboardInterrupt
            assert not refused(b)


def test_a_lock_that_is_closed_or_forgotten_leaves_no_descriptor() -> None:
    arena = Arena.create(1)
    kept, forgotten = FileLock(arena.fd, "it", 1.0), FileLock(arena.fd, "it", 1.0)
    files = [kept._fd, forgotten._fd]
    assert len({os.fstat(fd).st_ino for fd in files}) == 1
    kept.close()
    del forgotten
    for fd in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_holders_of_a_lock() -> None:
    device = os.makedev(0, 0x1B)
    text = (
        "1: POSIX  ADVISORY  WRITE 3568 00:1b:77 0 EOF\n"
        "2: FLOCK  ADVISORY  READ 11 00:1b:77 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 12 00:1b:77 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE 13 00:1b:7 0 EOF\n"
        "4: FLOCK  ADVISORY  READ 14 00:1b:77 0 EOF\n"
    )
    assert holders(text, device, 77) == [11, 14]
    assert holders("", device, 77) == []
