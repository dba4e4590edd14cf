"""Test that packed datasets in an object store read like local ones, even if requests fail.

The store is a server in its own process. A proxy between it and the reader injects the faults.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from tallyroll.storage import (
    MemmapStorage,
    S3Options,
    content_hash,
    open_storage,
    push,
    verify,
)
from tallyroll.storage.errors import CorruptStorage, ObjectChanged, ObjectStoreFailed
from tallyroll.storage.ext.remote.address import S3Path
from tallyroll.storage.ext.testing.reader_contract import _Paths, assert_same_rows, collected
from tallyroll.storage.testing import ReaderContract

from object_store_kit import (
    BUCKET,
    KEY,
    SECRET,
    Fault,
    Proxy,
    StoreRequest,
)

ROWS, WIDTH = 6_000, 32
ADDRESS = "s3://datasets/wide/packed"
SMALL = S3Options(block_nbytes=2**14)
"""Small blocks, so that the dataset has many."""


@pytest.fixture(scope="module")
def local(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the local dataset, which is in the store, too."""
    folder = tmp_path_factory.mktemp("local")
    generator, number = torch.Generator().manual_seed(3), torch.arange(ROWS)
    done = number % 50 == 49
    rows = TensorDict(
        {
            "observation": torch.rand(ROWS, WIDTH, generator=generator),
            "action": torch.randint(0, 4, (ROWS,), generator=generator),
            ("next", "done"): done,
            ("next", "terminated"): done,
            ("collector", "traj_ids"): number // 50,
            ("collector", "step"): number % 50,
            ("collector", "lane"): torch.zeros(ROWS, dtype=torch.int32),
        },
        [ROWS],
    )
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(rows)
        storage.pack(folder / "packed", once=False)
    push(folder / "packed", ADDRESS)
    return folder / "packed"


class TestContractOfPackedRowsInAnObjectStore(ReaderContract):
    """Run the contract of readers on a dataset that was packed and pushed."""

    @pytest.fixture(scope="class")
    @classmethod
    def pushed(cls, proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> _Paths:
        folder = tmp_path_factory.mktemp("contract")
        with MemmapStorage(folder / "unordered") as storage:
            storage.extend(collected())
            storage.pack(folder / "ordered")
        with open_storage(folder / "ordered") as packed, MemmapStorage(folder / "file") as file:
            file.extend(packed.get(slice(None)))
        with open_storage(folder / "file") as file:
            file.pack(folder / "packed")
        push(folder / "packed", "s3://datasets/contract")
        return _Paths(folder / "file", S3Path("s3:", "datasets", "contract"))

    @pytest.fixture
    def paths(self, pushed: _Paths) -> _Paths:
        return pushed

    def test_verify_finds_what_is_wrong(self, tmp_path: Path) -> None:
        pass  # the tests of local packed rows cover it


def test_rows_are_those_of_this_machine_bit_for_bit(local: Path) -> None:
    generator = np.random.default_rng(5)
    with open_storage(local) as ours, open_storage(ADDRESS, s3=SMALL) as found:
        assert str(found.path) == ADDRESS
        assert len(found) == len(ours) == ROWS
        assert content_hash(found) == content_hash(ours)
        for count in (1, 7, 300):
            rows = generator.integers(0, ROWS, count)
            assert_same_rows(found.get(rows), ours.get(rows))
        assert_same_rows(found.get(slice(100, 900)), ours.get(slice(100, 900)))
        torch.manual_seed(1)
        wanted = ours.trajectories.sample_slices(16, 10)
        torch.manual_seed(1)
        assert_same_rows(found.trajectories.sample_slices(16, 10), wanted)
    assert verify(ADDRESS).sound


def test_loaders_give_the_rows_of_this_machine(local: Path) -> None:
    with open_storage(local) as ours, open_storage(ADDRESS, s3=SMALL) as found:
        batches = []
        for storage in (ours, found):
            with storage.loader(256, seed=4, workers=1, batches=4) as loader:
                batches.append([*loader])
        for one, other in zip(*batches, strict=True):
            assert_same_rows(one, other)


@pytest.mark.timeout(300)
def test_workers_of_a_data_loader_open_it_by_its_address(local: Path) -> None:
    with open_storage(ADDRESS, s3=SMALL) as found, open_storage(local) as ours:
        pickled = pickle.dumps(found)
        assert SECRET.encode() not in pickled
        assert KEY.encode() not in pickled
        data = found.dataset(["observation"])
        loader = DataLoader(
            data,
            batch_size=500,
            num_workers=2,
            multiprocessing_context="spawn",
            collate_fn=data.collate,
        )
        seen = torch.cat([batch["observation"] for batch in loader])
        wanted = ours.get(slice(None))["observation"]
        assert torch.equal(seen, wanted)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX's, if a test loaded it
def test_a_forked_child_is_refused_at_once(local: Path) -> None:
    with open_storage(ADDRESS, s3=SMALL) as found:
        found.get([0])
        reading, writing = os.pipe()
        if not (child := os.fork()):
            said = b"no error"
            try:
                found.get([ROWS // 2])
            except ObjectStoreFailed as error:
                said = str(error).encode()
            finally:
                os.write(writing, said)
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as answer:
            assert b"was forked" in answer.read()
        os.waitpid(child, 0)
        found.get([ROWS // 2])  # the parent continues


def test_rows_are_read_by_ranges(local: Path, proxy: Proxy) -> None:
    with proxy.planned(lambda asked: None) as asked, open_storage(ADDRESS, s3=SMALL) as found:
        found.get([10])["observation"]
        size = sum(each.stat().st_size for each in local.rglob("c.*"))
        assert found.reader._archive.files.nbytes < size / 4
    shards = [each for each in asked if "/c." in each.path]
    assert shards
    assert all(each.range for each in shards)


def test_blocks_are_asked_for_at_once_and_before_they_are_wanted(local: Path, proxy: Proxy) -> None:
    rows, late = np.arange(0, ROWS, 64), 0.1
    with open_storage(ADDRESS, s3=SMALL) as found:
        found.column("action")  # opened, but not read
        before = found.reader._archive.files.requests
        with proxy.planned(lambda asked: Fault(seconds=late)):
            began = time.monotonic()
            found.column("observation").take(rows)
            seconds = time.monotonic() - began
        asked = found.reader._archive.files.requests - before
    assert asked > 25
    assert seconds < asked * late / 4  # sequential requests would take longer


class TestCache:
    """Budgets count bytes, in memory and in a folder that readers share."""

    def test_memory(self, local: Path) -> None:
        options = S3Options(block_nbytes=2**14, memory_nbytes=5 * 2**14)
        with open_storage(ADDRESS, s3=options) as found, open_storage(local) as ours:
            memory = found.reader._archive.files.memory
            for start in range(0, ROWS, 997):
                rows = np.arange(start, min(start + 40, ROWS))
                assert_same_rows(found.get(rows), ours.get(rows))
                assert 0 < memory.nbytes <= options.memory_nbytes
                assert memory.nbytes == sum(map(len, memory._kept.values()))

    def test_a_folder(self, local: Path, tmp_path: Path) -> None:
        budget = 9 * 2**14 + 100
        options = S3Options(
            block_nbytes=2**14, memory_nbytes=0, disk_nbytes=budget, folder=tmp_path / "kept"
        )
        most = 0
        with open_storage(ADDRESS, s3=options) as found, open_storage(local) as ours:
            for start in range(0, ROWS, 997):
                rows = np.arange(start, min(start + 40, ROWS))
                assert_same_rows(found.get(rows), ours.get(rows))
                files = [each for each in (tmp_path / "kept").iterdir() if each.is_file()]
                most = max(most, sum(each.stat().st_size for each in files))
        assert budget / 2 < most <= budget

    def test_a_second_reader_finds_what_the_first_has_kept(
        self, local: Path, proxy: Proxy, tmp_path: Path
    ) -> None:
        options = S3Options(block_nbytes=2**14, folder=tmp_path)
        with open_storage(ADDRESS, s3=options) as first:
            wanted = first.get(slice(0, 500))
            assert first.reader._archive.files.requests > 0
        with open_storage(ADDRESS, s3=options) as second:
            assert_same_rows(second.get(slice(0, 500)), wanted)
            assert second.reader._archive.files.requests == 0

    def test_a_damaged_block_on_the_disk_is_found_and_read_again(
        self, local: Path, tmp_path: Path
    ) -> None:
        options = S3Options(block_nbytes=2**14, folder=tmp_path)
        with open_storage(ADDRESS, s3=options) as first:
            wanted = first.get(slice(0, 500))
        for each in tmp_path.glob("*.block"):
            content = bytearray(each.read_bytes())
            content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            each.write_bytes(content)
        with open_storage(ADDRESS, s3=options) as second:
            assert_same_rows(second.get(slice(0, 500)), wanted)
            assert second.reader._archive.files.requests > 0


def rows_of(asked: StoreRequest) -> bool:
    return "/c." in asked.path and asked.method == "GET"


FAULTS = {
    "late": Fault(seconds=0.2),
    "busy": Fault(status=503),
    "broken": Fault(reset=True),
    "cut short": Fault(cut=True),
}


class TestFaults:
    """A transient fault is invisible. A permanent one is an error within a stated time."""

    @pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
    def test_that_pass(self, local: Path, proxy: Proxy, fault: Fault) -> None:
        def every_third(asked: StoreRequest) -> Fault | None:
            return fault if asked.number % 3 == 1 else None

        with proxy.planned(every_third) as asked, open_storage(local) as ours:
            with open_storage(ADDRESS, s3=SMALL) as found:
                rows = np.arange(0, ROWS, 300)
                assert_same_rows(found.get(rows), ours.get(rows))
            assert sum(every_third(each) is not None for each in asked) > 5

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            (Fault(seconds=30), "did not answer in time"),
            (Fault(status=500), "status 500 .InternalError"),
            (Fault(reset=True), "the connection broke|the connection failed"),
            (Fault(cut=True), "incomplete|the store returned .* bytes|broke"),
        ],
        ids=["silent", "failing", "broken", "cut short"],
    )
    def test_that_stay(self, local: Path, proxy: Proxy, fault: Fault, words: str) -> None:
        options = S3Options(block_nbytes=2**14, timeout=1.0, patience=1.5)
        with open_storage(ADDRESS, s3=options) as found:
            with proxy.planned(lambda asked: fault if rows_of(asked) else None):
                began = time.monotonic()
                with pytest.raises(ObjectStoreFailed, match=words) as caught:
                    found.get([ROWS - 1])
                assert time.monotonic() - began < 1.0 + 1.5 + 1.5
                assert f"{ADDRESS}/" in str(caught.value)
            found.get([ROWS - 1])  # the open storage remains usable

    def test_a_server_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with pytest.raises(ObjectStoreFailed, match="refused"):
            open_storage(ADDRESS, s3=S3Options(patience=0.5, timeout=1.0))

    def test_wrong_bytes_that_stay_are_found(self, local: Path, proxy: Proxy) -> None:
        with open_storage(ADDRESS, s3=SMALL) as found, open_storage(local) as ours:
            with (
                proxy.planned(lambda asked: Fault(flip=True) if rows_of(asked) else None),
                pytest.raises(
                    CorruptStorage, match=r"incomplete or does not match its checksum|damaged"
                ),
            ):
                [found.get([row]) for row in range(0, ROWS, 64)]
            rows = range(0, ROWS, 64)
            assert_same_rows(found.get([*rows]), ours.get([*rows]))

    def test_bytes_that_are_wrong_once_are_read_again(self, local: Path, proxy: Proxy) -> None:
        wrong: set[tuple[str, str | None]] = set()

        def at_first(asked: StoreRequest) -> Fault | None:
            if not rows_of(asked) or (asked.path, asked.range) in wrong:
                return None
            wrong.add((asked.path, asked.range))
            return Fault(flip=True)

        # One chunk per block: a flipped bit of a block belongs to the chunk.
        options = S3Options(block_nbytes=2**10, memory_nbytes=0)
        with (
            proxy.planned(at_first),
            open_storage(local) as ours,
            open_storage(ADDRESS, s3=options) as found,
        ):
            assert_same_rows(found.get([4_000]), ours.get([4_000]))
        assert len(wrong) > 3

    def test_an_object_that_is_replaced_is_an_error_and_not_torn_rows(
        self, proxy: Proxy, tmp_path: Path
    ) -> None:
        address = "s3://datasets/replaced"
        for number in range(2):
            with MemmapStorage(tmp_path / f"rows{number}") as storage:
                storage.extend(TensorDict({"x": torch.full((4000, 64), number + 0.5)}, [4000]))
                storage.pack(tmp_path / f"packed{number}", codecs="none")
        push(tmp_path / "packed0", address)
        with open_storage(address, s3=SMALL) as found:
            assert found.get([0])["x"][0, 0] == 0.5
            push(tmp_path / "packed1", address, replace=True)
            with pytest.raises(ObjectChanged, match="was replaced"):
                found.get([3999])
        with open_storage(address) as found:
            assert found.get([3999])["x"][0, 0] == 1.5


def test_no_secret_is_in_what_is_written_or_said(
    local: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for status in (403, 400, 500):
        # Each answer is an error of the store.
        with proxy.planned(lambda asked, status=status: Fault(status=status)):
            try:
                open_storage(ADDRESS, s3=S3Options(patience=0.3, timeout=1.0))
            except ObjectStoreFailed as error:
                said += [*traceback.format_exception(error), repr(error.__context__)]
    for address in (f"s3://{KEY}:{SECRET}@datasets/wide", f"s3://datasets/x?sig={SECRET}"):
        with pytest.raises(ValueError, match="credentials") as caught:
            open_storage(address)
        said.append("".join(map(str, caught.value.args)))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{KEY}:{SECRET}@127.0.0.1:1")
    with pytest.raises(ValueError, match="credentials") as caught:
        open_storage(ADDRESS)
    said.append(str(caught.value))
    assert len(said) > 6
    assert not [text for text in said if SECRET in text or KEY in text]
    written = b"".join(each.read_bytes() for each in local.rglob("*") if each.is_file())
    assert SECRET.encode() not in written
    assert KEY.encode() not in written


def test_the_kit_makes_faults(proxy: Proxy) -> None:
    """Each fault reaches a plain client, which other tests rely on."""
    import http.client
    import urllib.error
    import urllib.request

    url = f"{proxy.url}/{BUCKET}"
    plain = urllib.request.urlopen(url, timeout=10).read()
    with proxy.planned(lambda asked: Fault(flip=True)):
        assert urllib.request.urlopen(url, timeout=10).read() != plain
    with proxy.planned(lambda asked: Fault(cut=True)), pytest.raises(http.client.IncompleteRead):
        urllib.request.urlopen(url, timeout=10).read()
    with (
        proxy.planned(lambda asked: Fault(reset=True)),
        pytest.raises(OSError, match=r"reset|closed"),
    ):
        urllib.request.urlopen(url, timeout=10).read()
    with (
        proxy.planned(lambda asked: Fault(status=503)),
        pytest.raises(urllib.error.HTTPError, match="503") as caught,
    ):
        urllib.request.urlopen(url, timeout=10)
    caught.value.close()
