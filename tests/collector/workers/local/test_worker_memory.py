"""Shared memory of processes: allocation, visibility, release and available size."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.workers.local import memory
from tallyroll.collector.workers.local.memory import (
    ALIGNMENT,
    Area,
    Arena,
    ArenaSizer,
    require,
)
from tallyroll.storage.engine.available_memory import (
    available_bytes,
    cgroup_folders,
    left_in_cgroup,
    mem_available,
)

WAIT_SECONDS = 60.0
MIB = 2**20
TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
NUMPY_DTYPES = ["?", "i1", "u2", "i4", "f2", "f4", "f8", "c16", "S3", [("a", "i8"), ("b", "?")]]

Call = tuple[bool, Any, list[int]]

shapes = st.lists(st.integers(0, 5), max_size=3)
calls = st.lists(
    st.one_of(
        st.tuples(st.just(True), st.sampled_from(TORCH_DTYPES), shapes),
        st.tuples(st.just(False), st.sampled_from(NUMPY_DTYPES), shapes),
    ),
    max_size=8,
)


def carve(area: Area, wanted: list[Call]) -> list[Any]:
    return [
        area.tensor(shape, dtype) if is_torch else area.array(shape, dtype)
        for is_torch, dtype, shape in wanted
    ]


def raw(part: Any) -> np.ndarray:
    """Return the bytes of an allocation."""
    if isinstance(part, torch.Tensor):
        part = part.reshape(-1).view(torch.uint8).numpy()
    return part.reshape(-1).view(np.uint8)


@given(calls)
def test_carving_in_the_same_order_gives_the_same_memory(wanted: list[Call]) -> None:
    measure = ArenaSizer()
    expected = carve(measure, wanted)
    mine = Arena.create(measure.end)
    theirs = Arena.attach(os.dup(mine.fd), measure.end)
    here, there = carve(mine, wanted), carve(theirs, wanted)
    for index, (want, a, b) in enumerate(zip(expected, here, there, strict=True)):
        assert type(a) is type(b)
        assert a.shape == b.shape == want.shape
        assert a.dtype == b.dtype == want.dtype
        assert not raw(a).any(), "fresh memory is zeros, whatever was written elsewhere"
        raw(a)[:] = index + 1
    for index, b in enumerate(there):
        assert (raw(b) == index + 1).all(), "two parts overlap, or lie elsewhere"
        if raw(b).size:
            assert raw(b).ctypes.data % ALIGNMENT == 0
    assert mine.end == theirs.end == measure.end


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_a_tensor_of_each_dtype_holds_its_values(dtype: torch.dtype) -> None:
    arena = Arena.create(1024)
    arena.array([3], np.uint8)
    tensor = arena.tensor([2, 3], dtype)
    tensor.copy_(torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype))
    assert (tensor != 0).tolist() == [[False, True, True], [True, False, True]]


def test_more_than_there_is_is_refused_and_takes_nothing() -> None:
    arena = Arena.create(100)
    arena.array([10], np.uint8)
    with pytest.raises(ValueError, match=r"expected 40 bytes from byte 64 on"):
        arena.tensor([5, 2], torch.float32)
    with pytest.raises(ValueError, match=r"got an arena of 100 bytes\. Carve in the order"):
        arena.array([37], np.uint8)
    assert arena.end == 10
    assert arena.array([36], np.uint8).shape == (36,)


def test_an_arena_of_nothing() -> None:
    arena = Arena.create(0)
    assert arena.tensor([0, 3], torch.float32).shape == (0, 3)
    with pytest.raises(ValueError, match="1 bytes from byte 0"):
        arena.array([], np.bool_)


def test_attaching_to_less_than_was_created_is_refused() -> None:
    arena = Arena.create(100)
    fd = os.dup(arena.fd)
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        Arena.attach(fd, 101)
    assert_closed(fd)


def test_views_outlive_the_arena() -> None:
    arena = Arena.create(64)
    inode, tensor = os.fstat(arena.fd).st_ino, arena.tensor([4], torch.int32)
    fd = arena.fd
    del arena
    assert_closed(fd)
    tensor += 7
    assert tensor.tolist() == [7] * 4
    assert holders(inode) == {os.getpid()}
    del tensor
    assert holders(inode) == set()


def test_an_arena_that_is_forgotten_is_closed() -> None:
    arena = Arena.create(64)
    fd, inode = arena.fd, os.fstat(arena.fd).st_ino
    del arena
    gc.collect()
    assert_closed(fd)
    assert holders(inode) == set()


def assert_closed(fd: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_no_process_can_take_the_memory_away() -> None:
    arena = Arena.create(8192)
    for size in (0, 8191, 8193):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_pages_are_taken_when_they_are_touched() -> None:
    arena = Arena.create(2**36)
    tensor = arena.tensor([2**36], torch.uint8)
    tensor[-1] = 1
    assert os.fstat(arena.fd).st_blocks * 512 < MIB * 4


def test_a_limit_of_the_process_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        Arena.create(2**62)
    assert set(os.listdir("/proc/self/fd")) == before


# Between processes


def holders(inode: int) -> set[int]:
    """Return the processes that map the memory or hold a descriptor of it."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (folder / "maps").read_text().splitlines()
            mapped = {line.split()[4] for line in maps if "/memfd:" in line}
            files = {file.stat().st_ino for file in (folder / "fd").iterdir() if is_memfd(file)}
            if str(inode) in mapped or inode in files:
                found.add(int(folder.name))
    return found


def is_memfd(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(file).startswith("/memfd:")
    return False


INHERITED = """
import os
for name in os.listdir("/proc/self/fd"):
    try:
        print(os.readlink(f"/proc/self/fd/{name}"))
    except OSError:  # the folder's own
        pass
"""


def mirror(connection: Connection) -> None:
    """Attach to an arena, double its content and wait."""
    arena = Arena.attach(reduction.recv_handle(connection), connection.recv())
    question, answer = arena.array([3], np.int64), arena.tensor([3], torch.bfloat16)
    answer.copy_(torch.from_numpy(question * 2))
    program = [sys.executable, "-c", INHERITED]
    run = subprocess.run(program, close_fds=False, check=True, capture_output=True, text=True)
    connection.send((os.getpid(), run.stdout))
    with contextlib.suppress(EOFError):
        connection.recv()


def own(connection: Connection) -> None:
    """Create an arena, share it with a child process and wait."""
    arena = Arena.create(4096)
    arena.array([4096], np.uint8)[:] = 1
    with started(mirror) as (_, child):
        reduction.send_handle(child, arena.fd, 0)
        child.send(arena.nbytes)
        connection.send((os.getpid(), child.recv()[0], os.fstat(arena.fd).st_ino))
        connection.recv()


@contextlib.contextmanager
def started(target: Callable[[Connection], None]) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there,))
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join(WAIT_SECONDS)
        here.close()


def receive(connection: Connection) -> Any:
    assert connection.poll(WAIT_SECONDS), "the other process said nothing"
    return connection.recv()


def test_processes_share_bytes_and_a_killed_one_leaves_nothing() -> None:
    with started(mirror) as (process, connection):
        arena = Arena.create(4096)
        inode = os.fstat(arena.fd).st_ino
        array, tensor = arena.array([3], np.int64), arena.tensor([3], torch.bfloat16)
        array[:] = [1, -2, 3]
        assert process.pid is not None
        reduction.send_handle(connection, arena.fd, process.pid)
        connection.send(arena.nbytes)
        pid, inherited = receive(connection)
        assert tensor.tolist() == [2, -4, 6]
        assert "pipe:" in inherited
        assert "memfd:" not in inherited, "a program that the worker starts holds the memory"
        assert holders(inode) == {os.getpid(), pid}
        os.kill(pid, signal.SIGKILL)
        process.join(WAIT_SECONDS)
        assert holders(inode) == {os.getpid()}
        assert tensor.tolist() == [2, -4, 6], "what the dead wrote is still there"
    del array, tensor, arena
    assert holders(inode) == set()


@pytest.mark.slow
def test_the_memory_of_a_parent_that_is_killed_goes_with_the_last_child() -> None:
    with started(own) as (process, connection):
        parent, child, inode = receive(connection)
        child_fd = os.pidfd_open(child)
        assert holders(inode) == {parent, child}
        os.kill(parent, signal.SIGKILL)
        process.join(WAIT_SECONDS)
        ended = wait([child_fd], WAIT_SECONDS)  # its connection to the parent has ended
        os.close(child_fd)
        assert ended
        assert holders(inode) == set()


# How much there is

MEMINFO = "MemTotal:       24684084 kB\nMemFree:         100 kB\nMemAvailable:      2048 kB\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:12 - cgroup cgroup rw,memory\n"
)


def test_memory_of_the_machine() -> None:
    assert mem_available(MEMINFO) == 2 * MIB
    assert mem_available("MemTotal: 1 kB\n") is None
    assert mem_available("") is None


@pytest.mark.parametrize(
    ("limit", "used", "stat", "left"),
    [
        ("max\n", "5\n", "inactive_file 3\n", None),
        ("100\n", "70\n", "anon 9\ninactive_file 20\ninactive_filet 1\n", 50),
        ("100\n", "70\n", "total_inactive_file 20\n", 30),
        ("100\n", "130\n", "", 0),
        ("100\n", "10\n", "inactive_file 20\n", 100),
        ("100\n", "", "", None),
        ("", "", "", None),
    ],
)
def test_memory_that_a_cgroup_leaves(limit: str, used: str, stat: str, left: int | None) -> None:
    assert left_in_cgroup(limit, used, stat, "inactive_file") == left


@pytest.mark.parametrize(
    ("mounts", "cgroup", "folders"),
    [
        pytest.param(
            V2_MOUNT,
            "0::/user.slice/a.scope\n",
            ["/sys/fs/cgroup/user.slice/a.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"],
            id="v2",
        ),
        pytest.param(V2_MOUNT, "0::/\n", ["/sys/fs/cgroup"], id="v2 in a container"),
        pytest.param(V2_MOUNT, "0::/../b\n", ["/sys/fs/cgroup"], id="v2, moved out of sight"),
        pytest.param(
            V1_MOUNTS.format(root="/"),
            "9:name=systemd:/\n4:cpu,memory:/a:b/c\n0::/\n",
            [f"/sys/fs/cgroup/memory{part}" for part in ("/a:b/c", "/a:b", "")],
            id="v1",
        ),
        pytest.param(
            V1_MOUNTS.format(root="/docker/1"),
            "4:memory:/docker/1/x\n",
            ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory"],
            id="v1 in a container",
        ),
        pytest.param(
            V1_MOUNTS.format(root="/docker/1"),
            "4:memory:/docker/12\n",
            ["/sys/fs/cgroup/memory"],
            id="v1, another's",
        ),
        pytest.param(
            V2_MOUNT.replace("/sys/fs", "sys/fs"), "0::/\n", [], id="mounted out of sight"
        ),
        pytest.param("", "0::/\n", [], id="no mounts"),
        pytest.param(V2_MOUNT, "", [], id="no cgroup"),
        pytest.param("nonsense\n1 2 - cgroup2\n", "nonsense", [], id="nonsense"),
    ],
)
def test_folders_of_a_cgroup(mounts: str, cgroup: str, folders: list[str]) -> None:
    assert [folder for folder, _ in cgroup_folders(mounts, cgroup)] == [
        PurePosixPath(folder) for folder in folders
    ]


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {
        "proc/meminfo": f"MemAvailable: {900 * 1024} kB\n",
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/outer/inner\n",
        f"{group}/outer/inner/memory.max": "max\n",
        f"{group}/outer/inner/memory.current": "0\n",
        f"{group}/outer/memory.max": f"{500 * MIB}\n",
        f"{group}/outer/memory.current": f"{200 * MIB}\n",
        f"{group}/outer/memory.stat": f"inactive_file {50 * MIB}\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 350 * MIB
    tighter = {
        f"{group}/outer/inner/memory.max": f"{90 * MIB}\n",
        f"{group}/outer/inner/memory.current": f"{20 * MIB}\n",
    }
    assert available_bytes(machine(tmp_path, tighter)) == 70 * MIB
    assert available_bytes(machine(tmp_path, {"proc/meminfo": "MemAvailable: 3 kB"})) == 3072


def test_the_limit_of_version_1_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
        "proc/self/cgroup": "4:memory:/a\n",
        f"{group}/a/memory.limit_in_bytes": f"{500 * MIB}\n",
        f"{group}/a/memory.usage_in_bytes": f"{200 * MIB}\n",
        f"{group}/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 350 * MIB


def test_a_system_that_does_not_say_sets_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == sys.maxsize


def test_this_machine_says() -> None:
    assert MIB < available_bytes() < psutil.virtual_memory().total


def test_sizes_that_are_too_large_are_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * MIB + 5)
    require(3 * MIB + 5, "slabs")
    with pytest.raises(ArgumentError) as caught:
        require(3 * MIB + 6, "the slabs of 4 workers")
    assert str(caught.value) == (
        "expected 4 MiB of shared memory for the slabs of 4 workers, got 3 MiB available. Make "
        "frames_per_batch smaller, or use fewer lanes or workers."
    )
