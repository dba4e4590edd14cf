"""Test that other libraries read pushed datasets directly, and that large objects go in parts.

``TALLYROLL_KILLS`` sets the number of kills, 3 by default.
"""

from __future__ import annotations

import os
import random
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from obstore.store import S3Store
from tensordict import TensorDict
from zarr.storage import ObjectStore

from tallyroll.storage import (
    MemmapStorage,
    S3Options,
    content_hash,
    open_storage,
    pull,
    push,
)
from tallyroll.storage.errors import NotAStorage, ObjectStoreFailed
from tallyroll.storage.ext.remote.address import S3Path
from tallyroll.storage.ext.remote.objects import Objects

from object_store_kit import (
    BUCKET,
    Fault,
    Proxy,
    StoreRequest,
    kill_after,
    process_that_calls,
)

KILLS = int(os.environ.get("TALLYROLL_KILLS", "3"))
HASTY = S3Options(patience=2.0)
PART = 2**23
"""Bytes per part of a large object."""


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a dataset whose frames are an object of three parts."""
    folder, rows = tmp_path_factory.mktemp("frames"), 640
    number = torch.arange(rows)
    draw = torch.Generator().manual_seed(1)
    content = {
        "pixels": torch.randint(0, 256, (rows, 2**15), generator=draw, dtype=torch.uint8),
        ("next", "reward"): number.double().reshape(-1, 1),
        ("next", "done"): (number % 40 == 39).reshape(-1, 1),
        ("collector", "traj_ids"): number // 40,
        ("collector", "step"): number % 40,
    }
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(TensorDict(content, [rows]))
        storage.pack(folder / "packed", codecs="none")
    return folder / "packed"


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


def key_of(address: str) -> str:
    return address.removeprefix(f"s3://{BUCKET}/")


def names_at(address: str) -> set[str]:
    return {*Objects(S3Path("s3:", BUCKET, key_of(address)), S3Options()).listed()}


def unfinished_at(proxy: Proxy, address: str) -> list[str]:
    """Return the keys below an address whose multipart uploads were started but not completed."""
    url = "http://{}:{}/{}?uploads".format(*proxy.to, BUCKET)
    said = urllib.request.urlopen(url, timeout=30).read().decode()
    return [key for key in re.findall(r"<Key>([^<]*)</Key>", said) if key_of(address) in key]


def of_a_part(asked: StoreRequest) -> int:
    """Return the number of the part that a request writes, or 0 if it writes none."""
    found = re.search(r"partNumber=(\d+)", asked.path)
    return int(found[1]) if found and asked.method == "PUT" else 0


# --- other libraries ------------------------------------------------------------------------------


def by_tensorstore(proxy: Proxy, address: str, name: str) -> np.ndarray:
    store = {
        "driver": "s3",
        "bucket": BUCKET,
        "endpoint": proxy.url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
        "path": f"{key_of(address)}/{name}/",
    }
    found = tensorstore.open({"driver": "zarr3", "kvstore": store}, read=True).result()
    return np.asarray(found.read().result())


def test_zarr_and_tensorstore_read_it_where_it_is(
    proxy: Proxy, frames: Path, address: str, tmp_path: Path
) -> None:
    push(frames, address)
    store = S3Store(BUCKET, prefix=key_of(address), client_options={"allow_http": True})
    group: Any = zarr.open_group(ObjectStore(store, read_only=True), mode="r")
    with open_storage(frames) as storage:
        rows = storage[:]
        for name in ("pixels", "next/reward", "next/done", "collector/traj_ids"):
            wanted = rows[tuple(name.split("/"))].numpy()
            for found in (group[name][:], by_tensorstore(proxy, address, name)):
                assert found.dtype == wanted.dtype, name
                assert (found == wanted).all(), name
        assert (group["pixels"][17:300:7] == rows["pixels"].numpy()[17:300:7]).all()


# --- large objects --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Fault(status=500), Fault(reset=True)])
def test_a_part_that_fails_is_sent_again(
    how: Fault, proxy: Proxy, frames: Path, address: str
) -> None:
    sent: list[int] = []

    def fail_once(asked: StoreRequest) -> Fault | None:
        sent.append(of_a_part(asked))
        return how if sent.count(2) == 1 and sent[-1] == 2 else None

    with proxy.planned(fail_once):
        push(frames, address)
    assert sent.count(2) > 1
    assert max(sent) == 3
    with open_storage(address) as there, open_storage(frames) as wanted:
        assert content_hash(there) == content_hash(wanted)


def test_nothing_of_an_object_is_seen_whose_parts_fail(
    proxy: Proxy, frames: Path, address: str
) -> None:
    with (
        proxy.planned(lambda asked: Fault(status=503) if of_a_part(asked) == 3 else None),
        pytest.raises(
            ObjectStoreFailed,
            # moto may answer 500 to another part while the upload is aborted
            match=r"pixels/c\.0\.0: the store answers with status 50[03]",
        ),
    ):
        push(frames, address, options=HASTY)
    assert "pixels/c.0.0" not in names_at(address)
    assert not unfinished_at(proxy, address)  # all attempts were aborted
    with pytest.raises(NotAStorage, match="pushed in part"):
        open_storage(address)
    assert push(frames, address).sent > 0
    assert (frames / "pixels/c.0.0").stat().st_size > 2 * PART
    with open_storage(address) as there, open_storage(frames) as wanted:
        assert content_hash(there) == content_hash(wanted)


@pytest.mark.timeout(60 + 40 * KILLS)
def test_a_push_that_is_killed_among_parts(
    proxy: Proxy, frames: Path, address: str, tmp_path: Path
) -> None:
    unfinished = 0
    for seed in range(KILLS):
        pick, place = random.Random(seed), f"{address}/{seed}"
        parts: list[int] = []

        def slowly(asked: StoreRequest, parts: list[int] = parts) -> Fault | None:
            parts.extend([number] if (number := of_a_part(asked)) else [])
            return Fault(seconds=0.3) if parts else None

        with proxy.planned(slowly):
            pusher = process_that_calls(proxy.url, f"push({str(frames)!r}, {place!r})")
            kill_after(pick.randrange(1, 4), parts, pusher)
        seen = "pixels/c.0.0" in names_at(place)
        left = unfinished_at(proxy, place)
        assert not (seen and left)  # an object is complete or absent
        unfinished += len(left)
        with pytest.raises(NotAStorage, match="pushed in part"):
            open_storage(place)
        push(frames, place)
        with open_storage(place) as there, open_storage(frames) as wanted:
            assert content_hash(there) == content_hash(wanted), f"kill {seed}"
        pull(place, tmp_path / str(seed))
    assert unfinished
