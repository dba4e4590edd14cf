"""Test storages without a path.

Their folder is removed with them, but never while it is in use.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tallyroll.storage import (
    DeviceStorage,
    H5Storage,
    MemmapStorage,
    ShardedStorage,
    StorageMissing,
    ZarrStorage,
    open_storage,
)
from tallyroll.storage.errors import NotAStorage
from tallyroll.storage.storages import FORMATS, DiskStorage

WAIT_SECONDS = 60


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the parent of temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    gc.collect()
    assert not list(tmp_path.glob("tallyroll-*"))


def rows(start: int, count: int) -> TensorDict:
    number = torch.arange(start, start + count)
    return TensorDict({"number": number, "wide": number[:, None].expand(-1, 2000).clone()}, [count])


@pytest.fixture(params=["memmap", "ring", "hdf5", "zarr"])
def storage(request: pytest.FixtureRequest, folder: Path) -> Iterator[DiskStorage]:
    kind = FORMATS["memmap" if request.param == "ring" else request.param]
    made = kind(**({"max_size": 50} if request.param == "ring" else {"capacity": 100}))
    yield made
    made.close()
    # pytest keeps the storage alive longer, which would keep its buffers' semaphores.
    made._attached_entities_list.clear()


def test_closing_removes_it(storage: DiskStorage, folder: Path) -> None:
    assert storage.path.parent.parent == folder
    storage.extend(rows(0, 20))
    assert storage.path.exists()
    storage.close()
    assert not list(folder.iterdir())
    storage.close()
    assert storage.last_head == 20


def test_nothing_stays_of_one_that_was_never_written(folder: Path) -> None:
    with MemmapStorage(max_size=5):
        pass
    MemmapStorage(max_size=5)
    gc.collect()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", FORMATS)
def test_it_goes_when_nobody_has_it(name: str, folder: Path) -> None:
    storage = FORMATS[name](capacity=100)
    storage.extend(rows(0, 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a temporary storage may be dropped while open
        del storage
        gc.collect()
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_nothing_is_said_of_it_when_its_process_ends(folder: Path) -> None:
    code = (
        "import torch; from tensordict import TensorDict; from tallyroll.storage import "
        "MemmapStorage; s = MemmapStorage(max_size=9); "
        "s.extend(TensorDict({'x': torch.zeros(5)}, [5]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", code],
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "unclosed storage" not in done.stderr
    assert not list(folder.iterdir())


def test_a_ring_goes_with_its_buffer(folder: Path) -> None:
    buffer = ReplayBuffer(storage=MemmapStorage(max_size=10), batch_size=4)
    buffer.extend(rows(0, 20))
    assert list(folder.iterdir())
    sample, shown = buffer.sample(), buffer[:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del buffer
        gc.collect()
    assert not list(folder.iterdir())
    # Returned rows refer to the maps of deleted files.
    assert (sample["wide"] == sample["number"][:, None]).all()
    assert (shown == rows(10, 10)).all()


def test_batches_and_readers_keep_their_rows(storage: DiskStorage) -> None:
    storage.extend(rows(0, 40))
    path, views, copies = storage.path, storage.get(slice(None)), storage.get(torch.arange(40))
    column = storage.column("wide")
    with open_storage(path) as reader:
        storage.close()
        for _ in range(3):
            assert (views == rows(0, 40)).all()
            assert (copies == rows(0, 40)).all()
            assert (torch.from_numpy(column[:, 0].copy()) == torch.arange(40)).all()
            assert (reader.get(torch.arange(40)) == rows(0, 40)).all()
            gc.collect()
    with pytest.raises(StorageMissing):
        open_storage(path)


def test_a_forked_child_leaves_it_to_its_parent(storage: DiskStorage, folder: Path) -> None:
    storage.extend(rows(0, 20))
    code = 1
    child = os.fork()
    if child == 0:
        try:
            storage.close()
            del storage
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert storage.path.exists()
    storage.extend(rows(20, 20))
    assert (storage.get(torch.arange(40)) == rows(0, 40)).all()
    storage.close()
    assert not list(folder.iterdir())


SCRIPT = """
    import os, sys, time
    import torch
    from tensordict import TensorDict
    from torchrl.data import ReplayBuffer
    from tallyroll.storage import MemmapStorage

    buffer = ReplayBuffer(storage=MemmapStorage(max_size=10), batch_size=4)
    buffer.extend(TensorDict({"a": torch.arange(8)}, [8]))
    print(buffer.storage.path, flush=True)
    END
"""


@pytest.mark.parametrize(
    ("end", "stays"),
    [
        ("", False),
        ("time.sleep(60)", True),
        pytest.param("raise RuntimeError('no')", False, marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", False, marks=pytest.mark.slow),
        pytest.param(
            "if os.fork() == 0: sys.exit()\n    os.wait(); assert buffer.storage.path.exists()",
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["end", "killed", "error", "exit", "fork"],
)
def test_it_goes_at_the_exit_of_its_process(end: str, stays: bool, folder: Path) -> None:
    script = textwrap.dedent(SCRIPT.replace("END", end))
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True
    ) as run:
        try:
            assert run.stdout is not None
            path = Path(run.stdout.readline().strip())
            assert path.parent.parent == folder
            if stays:
                run.send_signal(signal.SIGKILL)
            run.wait(WAIT_SECONDS)
        finally:
            run.kill()
    assert path.exists() == stays
    if stays:
        # Its rows remain available, and it is an ordinary folder.
        with MemmapStorage(path, mode="append") as storage:
            assert len(storage) == 8
        for each in sorted(path.parent.rglob("*"), reverse=True):
            each.rmdir() if each.is_dir() else each.unlink()
        path.parent.rmdir()


@pytest.mark.parametrize("options", [{"mode": "read"}, {"mode": "append"}, {"max_size": -1}])
def test_what_cannot_be_leaves_nothing(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"path|max_size"):
        MemmapStorage(**options)
    assert not list(folder.iterdir())


def test_a_number_is_no_path() -> None:
    with pytest.raises(TypeError, match="max_size=1000"):
        MemmapStorage(1000)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [MemmapStorage, H5Storage, ZarrStorage, ShardedStorage])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("device", r'\.to\(device\), or use DeviceStorage\(max_size=n, device="cuda"\)\.$'),
        ("scratch_dir", r"give the directory as the path of a MemmapStorage"),
        ("existsok", r'mode="auto"\) opens or creates'),
        ("compilable", "leave it out"),
    ],
)
def test_arguments_of_torchrl_have_a_remedy(
    kind: Any, name: str, remedy: str, folder: Path
) -> None:
    with pytest.raises(TypeError, match=f"^{name}: {kind.__name__} has no .*{remedy}"):
        kind(folder / "rows", **{name: "cuda"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'devise'"):
        kind(folder / "rows", devise="cuda")
    assert name not in inspect.signature(kind).parameters
    assert not list(folder.iterdir())


def test_a_device_storage_has_a_device_but_no_directory() -> None:
    with pytest.raises(TypeError, match="scratch_dir: DeviceStorage has no such argument"):
        DeviceStorage(max_size=3, device="cpu", scratch_dir="x")  # type: ignore[call-arg]
    DeviceStorage(max_size=3, device="cpu").close()


def test_a_temporary_storage_is_not_finalized(storage: DiskStorage) -> None:
    storage.extend(rows(0, 4))
    with pytest.raises(NotAStorage, match="temporary"):
        storage.finalize()
    storage.close()


def test_a_dump_of_it_stays(storage: DiskStorage, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(rows(0, 20))
    buffer.dumps(tmp_path / "dump")
    storage.close()
    with open_storage(tmp_path / "dump" / "storage") as reader:
        assert (reader.get(slice(None)) == rows(0, 20)).all()
