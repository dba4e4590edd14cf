"""Test that pushed and pulled datasets are complete or absent, however the process ends.

``TALLYROLL_KILLS`` sets the number of kills, 3 by default.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector.cli import main
from tallyroll.storage import (
    MemmapStorage,
    S3Options,
    content_hash,
    open_storage,
    pull,
    push,
    verify,
)
from tallyroll.storage.errors import (
    CorruptStorage,
    NotAStorage,
    ObjectStoreFailed,
    PathIsTaken,
    StorageMissing,
)
from tallyroll.storage.ext.remote.address import S3Path
from tallyroll.storage.ext.remote.objects import Objects
from tallyroll.storage.ext.testing.reader_contract import collected

from object_store_kit import (
    KEY,
    SECRET,
    Fault,
    Proxy,
    StoreRequest,
    kill_after,
    process_that_calls,
)

KILLS = int(os.environ.get("TALLYROLL_KILLS", "3"))
HASTY = S3Options(patience=2.0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(collected())
        storage.pack(folder / "packed")
    return folder / "packed"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(TensorDict({"x": torch.arange(100)}, [100]))
        storage.pack(folder / "packed")
    return folder / "packed"


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"s3://datasets/{request.node.name.replace('[', '-').replace(']', '')}"


def names_at(address: str) -> set[str]:
    bucket, _, key = address.removeprefix("s3://").partition("/")
    return {*Objects(S3Path("s3:", bucket, key), S3Options()).listed()}


def test_there_and_back(proxy: Proxy, packed: Path, address: str, tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    report = push(packed, address, progress=lambda *done: shown.append(done))
    files = {str(each.relative_to(packed)) for each in packed.rglob("*") if each.is_file()}
    assert names_at(address) == files | {"tallyroll/objects.json"}
    assert (report.objects, report.sent) == (len(files), len(files))
    assert shown[-1] == (report.nbytes, report.nbytes)
    assert len(shown) == len(files)
    again = pull(address, tmp_path / "pulled")
    assert (again.rows, again.objects, again.checked_by) == (141, len(files), "checksums")
    for name in files:
        assert (tmp_path / "pulled" / name).read_bytes() == (packed / name).read_bytes()
    assert verify(tmp_path / "pulled").sound
    assert [each.name for each in tmp_path.iterdir()] == ["pulled"]


def test_the_manifest_is_written_last(proxy: Proxy, packed: Path, address: str) -> None:
    with proxy.planned(lambda asked: None) as asked:
        push(packed, address)
    put = [each.path.partition("?")[0] for each in asked if each.method == "PUT"]
    key = address.removeprefix("s3:/")
    assert put[0] == f"{key}/tallyroll/objects.json"
    assert put[-2:] == [f"{key}/zarr.json", f"{key}/tallyroll/manifest.json"]


def test_a_part_does_not_open_and_pushing_goes_on(
    proxy: Proxy, packed: Path, address: str, tmp_path: Path
) -> None:
    puts: list[StoreRequest] = []

    def fail_late(asked: StoreRequest) -> Fault | None:
        if asked.method == "PUT":
            puts.append(asked)
        return Fault(status=500) if len(puts) > 20 else None

    with (
        proxy.planned(fail_late),
        pytest.raises(ObjectStoreFailed, match=r"write s3://datasets/test_a_part"),
    ):
        push(packed, address, options=HASTY)
    with pytest.raises(NotAStorage, match="pushed in part"):
        open_storage(address)
    with pytest.raises(NotAStorage, match="pushed in part"):
        pull(address, tmp_path / "pulled")
    assert not [*tmp_path.iterdir()]
    report = push(packed, address)
    assert 0 < report.sent < report.objects
    with open_storage(address) as there, open_storage(packed) as wanted:
        assert content_hash(there) == content_hash(wanted)
    assert push(packed, address).sent == 0


def test_an_object_that_was_damaged_is_written_again(
    proxy: Proxy, packed: Path, address: str, tmp_path: Path
) -> None:
    push(packed, address)
    bucket, _, key = address.removeprefix("s3://").partition("/")
    objects = Objects(S3Path("s3:", bucket, key), S3Options())
    name = next(each for each in sorted(names_at(address)) if "/c." in each)
    content = (packed / name).read_bytes()
    objects.put(name, content[::-1], {})
    with pytest.raises(CorruptStorage, match="differs from the pushed object"):
        pull(address, tmp_path / "pulled")
    assert not [*tmp_path.iterdir()]
    assert push(packed, address).sent == 3  # including the marker that was removed before
    pull(address, tmp_path / "pulled")
    assert (tmp_path / "pulled" / name).read_bytes() == content
    objects.delete([name])
    with pytest.raises(CorruptStorage, match="is missing"):
        pull(address, tmp_path / "again")


def test_another_dataset_is_replaced_only_when_that_is_asked(
    proxy: Proxy, packed: Path, other: Path, address: str
) -> None:
    push(packed, address)
    with pytest.raises(PathIsTaken, match="different dataset"):
        push(other, address)
    with open_storage(address) as there, open_storage(packed) as wanted:
        assert content_hash(there) == content_hash(wanted)
    push(other, address, replace=True)
    with open_storage(address) as there:
        assert len(there) == 100
    files = {str(each.relative_to(other)) for each in other.rglob("*") if each.is_file()}
    assert names_at(address) == files | {"tallyroll/objects.json"}


def test_objects_of_others_stay(proxy: Proxy, packed: Path, other: Path, address: str) -> None:
    bucket, _, key = address.removeprefix("s3://").partition("/")
    objects = Objects(S3Path("s3:", bucket, key), S3Options())
    objects.put("thesis.pdf", b"of somebody", {})
    for replace in (False, True):
        with pytest.raises(PathIsTaken, match=r"thesis\.pdf"):
            push(packed, address, replace=replace)
    objects.delete(["thesis.pdf"])
    push(packed, address)
    objects.put("thesis.pdf", b"of somebody", {})
    push(other, address, replace=True)
    assert "thesis.pdf" in names_at(address)


def test_a_dataset_that_another_program_copied(
    proxy: Proxy, packed: Path, address: str, tmp_path: Path
) -> None:
    bucket, _, key = address.removeprefix("s3://").partition("/")
    objects = Objects(S3Path("s3:", bucket, key), S3Options())
    for each in packed.rglob("*"):
        if each.is_file():
            objects.put(str(each.relative_to(packed)), each.read_bytes(), {})
    assert pull(address, tmp_path / "pulled").checked_by == "chunks"
    name = next(str(each.relative_to(packed)) for each in sorted(packed.rglob("c.*")))
    content = bytearray((packed / name).read_bytes())
    content[5] ^= 1
    objects.put(name, bytes(content), {})
    with pytest.raises(CorruptStorage, match="is damaged"):
        pull(address, tmp_path / "again")
    assert [each.name for each in tmp_path.iterdir()] == ["pulled"]


@pytest.mark.parametrize("name", ["../../stolen", "/stolen", "a//b", "..", "x/../y"])
def test_names_that_lead_outside_are_refused(
    proxy: Proxy, packed: Path, address: str, tmp_path: Path, name: str
) -> None:
    address = f"s3://datasets/outside/{name.encode().hex()}"
    push(packed, address)
    bucket, _, key = address.removeprefix("s3://").partition("/")
    objects = Objects(S3Path("s3:", bucket, key), S3Options())
    listed = objects.listed()["tallyroll/objects.json"]
    said = json.loads(objects.read("tallyroll/objects.json", 0, listed.nbytes, listed))
    said["objects"][name] = [3, "0" * 64]
    objects.put("tallyroll/objects.json", json.dumps(said).encode(), {})
    with pytest.raises(CorruptStorage, match="not a list"):
        pull(address, tmp_path / "inner" / "pulled")
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_wrong_sources_and_places(proxy: Proxy, packed: Path, tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(TensorDict({"x": torch.arange(3)}, [3]))
    with pytest.raises(NotAStorage, match="Pack it first"):
        push(tmp_path / "rows", "s3://datasets/rows")
    with pytest.raises(StorageMissing):
        push(tmp_path / "nothing", "s3://datasets/rows")
    with pytest.raises(StorageMissing, match="there are no objects at s3://datasets/nowhere"):
        pull("s3://datasets/nowhere", tmp_path / "pulled")
    with pytest.raises(PathIsTaken):
        pull("s3://datasets/nowhere", tmp_path / "rows")
    for call in (
        lambda: push(packed, "datasets/rows"),
        lambda: push(packed, f"s3://{KEY}:{SECRET}@datasets/rows"),
        lambda: pull(f"s3://{KEY}:{SECRET}@datasets/rows", tmp_path / "pulled"),
    ):
        with pytest.raises(ValueError, match="address") as caught:
            call()
        assert SECRET not in str(caught.value)


def test_the_commands(
    proxy: Proxy, packed: Path, other: Path, address: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["push", str(packed), address]) == 0
    assert f"{address}: 141 rows, " in capsys.readouterr().out
    assert main(["push", str(packed), address, "--json", "--endpoint", proxy.url]) == 0
    assert json.loads(capsys.readouterr().out)["sent"] == 0
    assert main(["inspect", address]) == 0
    assert "141" in capsys.readouterr().out
    assert main(["diff", address, str(packed)]) == 0
    assert main(["push", str(other), address]) == 1
    assert "different dataset" in capsys.readouterr().err
    assert main(["pull", address, str(tmp_path / "pulled"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checked_by"] == "checksums"
    assert main(["pull", address, str(tmp_path / "pulled")]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["pull", f"s3://{KEY}:{SECRET}@datasets/x", str(tmp_path / "again")]) == 1
    said = capsys.readouterr()
    assert "credentials" in said.err
    assert SECRET not in said.err + said.out
    with pytest.raises(SystemExit, match="2"):
        main(["push", str(packed), address, "--patience", "0"])


@pytest.mark.timeout(60 + 40 * KILLS)
def test_a_killed_push_leaves_a_part_that_says_so_or_the_whole(
    proxy: Proxy, packed: Path, address: str
) -> None:
    with open_storage(packed) as storage:
        wanted = content_hash(storage)
    parts = 0
    for seed in range(KILLS):
        pick, place = random.Random(seed), f"{address}/{seed}"
        with proxy.planned(lambda asked: Fault(seconds=0.02)) as asked:
            pusher = process_that_calls(proxy.url, f"push({str(packed)!r}, {place!r})")
            kill_after(pick.randrange(1, 52), asked, pusher)
        try:
            with open_storage(place) as there:
                assert content_hash(there) == wanted, f"kill {seed}"
        except StorageMissing:
            assert not names_at(place)
        except NotAStorage as error:
            parts += "pushed in part" in str(error)
        push(packed, place)
        with open_storage(place) as there:
            assert content_hash(there) == wanted, f"kill {seed}"
    assert parts


@pytest.mark.timeout(60 + 40 * KILLS)
def test_a_killed_pull_leaves_nothing_or_the_whole(
    proxy: Proxy, packed: Path, address: str, tmp_path: Path
) -> None:
    push(packed, address)
    with open_storage(packed) as storage:
        wanted = content_hash(storage)
    place, found = tmp_path / "pulled", []
    for seed in range(KILLS):
        pick = random.Random(seed)
        with proxy.planned(lambda asked: Fault(seconds=0.02)) as asked:
            puller = process_that_calls(proxy.url, f"pull({address!r}, {str(place)!r})")
            kill_after(pick.randrange(1, 55), asked, puller)
        found.append(place.exists())
        if found[-1]:
            with open_storage(place) as pulled:
                assert content_hash(pulled) == wanted, f"kill {seed}"
            shutil.rmtree(place)
    pull(address, place)
    assert [each.name for each in tmp_path.iterdir()] == ["pulled"]
    assert False in found
