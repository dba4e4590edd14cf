"""Test that a lost ``tallyroll/zarr.json``, which describes the header, is written again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tallyroll.storage import ZarrStorage, verify


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"zarr_format": 3'])
def test_a_lost_description_of_the_header_is_written_again(
    content: bytes | None, tmp_path: Path
) -> None:
    path, meta = tmp_path / "rows", tmp_path / "rows" / "tallyroll" / "zarr.json"
    with ZarrStorage(path) as storage:
        storage.extend({("x",): np.zeros(9)})
    written = meta.read_bytes()
    meta.unlink()
    if content is not None:
        meta.write_bytes(content)
    assert not verify(path).sound
    with ZarrStorage(path, mode="append"):
        pass
    assert meta.read_bytes() == written
    assert verify(path).sound


def test_a_description_that_was_added_to_is_kept(tmp_path: Path) -> None:
    path, meta = tmp_path / "rows", tmp_path / "rows" / "tallyroll" / "zarr.json"
    with ZarrStorage(path) as storage:
        storage.extend({("x",): np.zeros(9)})
    document = json.loads(meta.read_bytes())
    document["attributes"]["mine"] = 1
    meta.write_text(json.dumps(document))
    with ZarrStorage(path, mode="append") as storage:
        storage.extend({("x",): np.ones(3)})
    assert json.loads(meta.read_bytes()) == document
