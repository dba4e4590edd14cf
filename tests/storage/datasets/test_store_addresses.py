"""Test parts that need no object store: addresses without secrets, block budgets, object lists."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import (
    MemmapStorage,
    S3Options,
    import_dataset,
    open_storage,
    repair,
    verify_dataset,
)
from tallyroll.storage.errors import CorruptStorage, InvalidAddress, MissingLibrary, ReadOnlyStorage
from tallyroll.storage.ext.joined.members import expand_paths
from tallyroll.storage.ext.remote.address import S3Path, s3_path
from tallyroll.storage.ext.remote.objects import ListedObject
from tallyroll.storage.ext.remote.push_plan import LAST, PLAN, ROOT, PlannedObject, PushPlan, parsed
from tallyroll.storage.ext.remote.ranges import DiskBlocks, MemoryBlocks, ObjectFiles

SECRET = "SeCrEt+of/somebody"


@pytest.mark.parametrize(
    ("address", "bucket", "key"),
    [
        ("s3://datasets/breakout/v2", "datasets", "breakout/v2"),
        ("s3://datasets", "datasets", ""),
        ("s3://my.data-sets/a//b/", "my.data-sets", "a/b"),
        (Path("s3://datasets/breakout"), "datasets", "breakout"),
    ],
)
def test_addresses(address: str | Path, bucket: str, key: str) -> None:
    found = s3_path(address)
    assert found is not None
    assert (found.bucket, found.key) == (bucket, key)
    assert str(found) == f"s3://{bucket}/{key}".rstrip("/")
    assert str(found / "action" / "c.0") == f"{found}/action/c.0"
    assert s3_path(str(found)) == found == pickle.loads(pickle.dumps(found))
    assert type(pickle.loads(pickle.dumps(found))) is S3Path
    assert expand_paths([address]) == [found]


@pytest.mark.parametrize("path", ["runs/pole", "s3/x", "/s3://x", Path("runs"), 3, b"s3://x/y"])
def test_paths_are_no_addresses(path: object) -> None:
    assert s3_path(path) is None


@pytest.mark.parametrize(
    "address",
    [
        f"s3://KEY:{SECRET}@datasets/x",
        f"s3://KEY:{SECRET}/x",
        f"s3://{SECRET}@datasets/x",
        f"s3://datasets/x?X-Amz-Signature={SECRET}",
        f"s3://{SECRET}/x",
        "s3://",
        "s3://Datasets/x",
        "s3://datasets/../x",
        "s3://datasets/" + "x" * 1025,
    ],
)
def test_what_may_hold_a_secret_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(InvalidAddress) as caught:
        open_storage(address)
    assert SECRET not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("scheme", ["s3", "S3", "gs", "az", "https", "file", "hf"])
@pytest.mark.parametrize("kind", [str, Path])
def test_no_folder_is_made_for_an_address(
    scheme: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that expects a path names the scheme and the supported ones."""
    monkeypatch.chdir(tmp_path)
    address = kind(f"{scheme}://{SECRET}/rows")
    with MemmapStorage("rows") as rows:
        rows.extend(TensorDict({"x": torch.zeros(3)}, [3]))
        calls: list[Callable[[], object]] = [
            lambda: MemmapStorage(address),
            lambda: rows.copy_to(address),
            lambda: rows.pack(address),
            lambda: rows.export(address, "npz"),
            lambda: import_dataset(address, "new", "npz"),
            lambda: import_dataset("rows", address, "npz"),
            lambda: verify_dataset(address),
            lambda: repair("rows", address),
        ]
        if scheme.lower() != "s3":
            calls += [lambda: open_storage(address), lambda: open_storage([address])]
        for call in calls:
            with pytest.raises(InvalidAddress, match=f"begins with {scheme}://.*s3://BUCKET") as it:
                call()
            assert SECRET not in str(it.value)
    assert os.listdir() == ["rows"]


@pytest.mark.parametrize("pattern", ["s3://datasets/run-*", "s3://datasets/run-[0-9]"])
def test_patterns_are_not_matched_in_a_store(pattern: str) -> None:
    for given in (pattern, [pattern], [pattern, pattern]):
        with pytest.raises(InvalidAddress, match=r"does not match patterns in a store\. Give"):
            open_storage(given)


@pytest.mark.parametrize(
    "endpoint",
    [f"http://KEY:{SECRET}@host:9000", f"https://host/?token={SECRET}", "ftp://host", "host:9000"],
)
def test_endpoints_with_secrets_are_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidAddress) as caught:
        S3Options(endpoint=endpoint)
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(InvalidAddress) as caught:
        S3Options()
    assert SECRET not in str(caught.value)
    assert S3Options(endpoint="https://host").url == "https://host"


def test_options_out_of_range() -> None:
    for name in ("block_nbytes", "requests", "timeout", "patience"):
        with pytest.raises(ValueError, match=f"{name}: expected a number above 0, got 0"):
            S3Options(**{name: 0})
    for name in ("memory_nbytes", "disk_nbytes"):
        with pytest.raises(ValueError, match=f"{name}: expected 0 or more, got -1"):
            S3Options(**{name: -1})


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingLibrary) as caught:
        open_storage("s3://datasets/x")
    assert str(caught.value) == (
        's3://datasets/x needs obstore, which is not installed: pip install "tallyroll[s3]".'
    )


class TestBlocks:
    """Both caches keep the most recently used blocks within their limit of bytes."""

    def test_memory_against_a_model(self) -> None:
        pick, blocks, model = random.Random(2), MemoryBlocks(1000), dict[str, bytes]()
        for _ in range(3000):
            name = str(pick.randrange(20))
            if pick.random() < 0.4:
                content = bytes(pick.randrange(1, 400))
                blocks.put(name, content)
                model.pop(name, None)
                while sum(map(len, model.values())) + len(content) > 1000:
                    del model[next(iter(model))]
                model[name] = content
            elif pick.random() < 0.1:
                blocks.drop(name)
                model.pop(name, None)
            else:
                assert blocks.get(name) == model.get(name)
                if name in model:
                    model[name] = model.pop(name)
            assert blocks.nbytes == sum(map(len, model.values())) <= 1000
        blocks.put("large", bytes(1001))
        assert blocks.get("large") is None

    def test_a_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "blocks"
        one, other = DiskBlocks(folder, 1000), DiskBlocks(folder, 1000)
        (folder / "left.block.tmp").write_bytes(bytes(300))  # of a process that was killed
        os.utime(folder / "left.block.tmp", (1, 1))
        for number in range(12):
            (one, other)[number % 2].put(str(number), bytes([number]) * 240)
            os.utime(folder / f"{number}.block", (number + 2, number + 2))
            found = [each.stat().st_size for each in folder.iterdir() if each.name != "lock"]
            assert sum(found) <= 1000
        assert not (folder / "left.block.tmp").exists()
        assert one.get("11", 240) == bytes([11]) * 240
        assert other.get("0", 240) is None
        assert one.get("11", 239) is None  # another size is another block
        other.drop("11")
        assert one.get("11", 240) is None
        assert folder.stat().st_mode & 0o077 == 0

    def test_files_of_others_stay_and_links_are_not_followed(self, tmp_path: Path) -> None:
        folder = tmp_path / "blocks"
        blocks = DiskBlocks(folder, 1000)
        (folder / "thesis.pdf").write_bytes(bytes(900))
        blocks.put("a", bytes(200))
        assert blocks.get("a", 200) is None
        assert (folder / "thesis.pdf").stat().st_size == 900
        (tmp_path / "secret").write_bytes(bytes(50))
        (folder / "b.block").symlink_to(tmp_path / "secret")
        assert blocks.get("b", 50) is None


class OneObject:
    """Store with a single object."""

    place = S3Path("s3://datasets/x")
    content = bytes(range(200))
    is_of_this_process = True

    def __init__(self, folder: Path) -> None:
        self.options = S3Options(block_nbytes=100, folder=folder)

    def listed(self) -> dict[str, ListedObject]:
        return {"c": ListedObject(len(self.content), "etag")}

    def read(self, _: str, begin: int, stop: int, __: ListedObject) -> bytes:
        return self.content[begin:stop]

    def require_own_process(self) -> None:
        """Do nothing."""


def test_a_damaged_copy_is_not_read_again_by_requests_under_way(tmp_path: Path) -> None:
    """Two threads read one damaged block, and one of them detects the damage while both read."""
    files = ObjectFiles(OneObject(tmp_path))  # type: ignore[arg-type]
    disk, found_damaged, distrusted = files.disk, threading.Event(), threading.Event()
    assert disk is not None
    real = disk.get

    def damaged(name: str, nbytes: int) -> bytes | None:
        if real(name, nbytes) is None:
            return None
        found_damaged.set()
        assert distrusted.wait(30)
        return bytes(nbytes)

    disk.get = damaged  # type: ignore[method-assign]
    assert files.read("c", 200, 0) == OneObject.content
    for _, name in files._blocks("c", 0, 100):
        files.memory.drop(name)
    under_way = threading.Thread(target=files.read, args=("c", 50, 0))
    under_way.start()
    assert found_damaged.wait(30)
    assert files.distrust("c", 50, 50)
    assert files.read("c", 50, 50) == OneObject.content[50:100]
    distrusted.set()
    under_way.join()
    assert files.read("c", 200, 0) == OneObject.content
    files.end()


def plan() -> PushPlan:
    names = ["zarr.json", "x/zarr.json", "x/c.0", LAST, "tallyroll/row/c.0"]
    return PushPlan("id", {name: PlannedObject(3, "ab" * 32) for name in names})


def test_a_list_of_objects_comes_back_and_ends_with_what_shows_the_dataset() -> None:
    assert parsed(plan().to_json(), "place") == plan()
    assert plan().order[-2:] == [ROOT, LAST]
    assert plan().order[:2] == ["tallyroll/row/c.0", "x/c.0"]
    assert PLAN not in plan().order


@pytest.mark.parametrize(
    "change",
    [
        {"../x": [3, "ab" * 32]},
        {"/x": [3, "ab" * 32]},
        {"x\\y": [3, "ab" * 32]},
        {"x": [-3, "ab" * 32]},
        {"x": [True, "ab" * 32]},
        {"x": [3, "xy" * 32]},
        {"x": [3]},
        {"x": "no"},
    ],
)
def test_lists_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    said = json.loads(plan().to_json())
    said["objects"] |= change
    with pytest.raises(CorruptStorage, match="place is damaged: it is not a list"):
        parsed(json.dumps(said).encode(), "place")
    for content in (b"[]", b"{", b"\xff", b'{"id": 3, "objects": {}}', b"[" * 100_000):
        with pytest.raises(CorruptStorage, match="not a list"):
            parsed(content, "place")


def test_nothing_is_asked_of_a_store_to_refuse_writing() -> None:
    with pytest.raises(ReadOnlyStorage, match="s3://datasets/x can only be opened with mode"):
        open_storage("s3://datasets/x", mode="append", s3=S3Options(endpoint="http://127.0.0.1:9"))
