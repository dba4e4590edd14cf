"""Comparison bit for bit, and reports of differences."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.replay.comparison import (
    Comparison,
    Difference,
    differing_rows,
    largest,
)
from tallyroll.collector.ext.replay.video import write_picture


def floats(*bits: int) -> np.ndarray[Any, Any]:
    return np.array(bits, np.uint32).view(np.float32)[:, None]


NAN, OTHER_NAN, ONE, NEXT_TO_ONE, MINUS_ZERO = (
    0x7FC00000, 0x7FC00001, 0x3F800000, 0x3F800001, 0x80000000,
)  # fmt: skip


def test_bits_are_compared_and_not_numbers() -> None:
    stored = floats(NAN, NAN, 0, ONE, ONE)
    replayed = floats(NAN, OTHER_NAN, MINUS_ZERO, ONE, NEXT_TO_ONE)
    assert differing_rows(stored, replayed).tolist() == [1, 2, 4]
    assert differing_rows(stored, replayed, 1e-6).tolist() == []
    assert differing_rows(stored, replayed, 1e-9).tolist() == [4]
    assert largest(stored, replayed) == 2**-23
    assert largest(floats(NAN), floats(ONE)) == np.inf
    assert differing_rows(floats(NAN), floats(ONE), 1.0).tolist() == [0]
    assert differing_rows(np.array([[1], [2]]), np.array([[1], [3]]), 5.0).tolist() == [1]


def test_the_first_difference_of_a_trajectory_is_the_earliest() -> None:
    found = Comparison()
    ids, steps, rows, lanes = (
        np.array(each) for each in ([4, 4, 7], [0, 1, 0], [9, 11, 10], [0, 0, 1])
    )
    where = ids, steps, rows, lanes
    one, two = np.zeros((3, 2)), np.zeros((3, 2))
    two[1, 1], two[2, 0] = 0.5, -2.0
    found.column(("next", "reward"), one, two, where)
    two[0, 1] = 1.0
    found.column(("next", "observation"), one, two, where)
    assert {id: (each.step, each.column) for id, each in found.first.items()} == {
        4: (0, "next/observation"),
        7: (0, "next/reward"),
    }
    assert found.columns == {"next/reward": 2.0, "next/observation": 2.0}
    assert found.differing == {"next/reward": 2, "next/observation": 3}


def test_a_difference_says_both_values() -> None:
    values = np.array([1.0, np.nan], np.float32), np.array([1.5, np.nan], np.float32)
    found = Difference(3, 2, 40, 1, "observation", *values)
    assert str(found) == (
        "trajectory 3, step 2 (row 40), observation: stored [1.0, nan], replayed [1.5, nan]"
    )
    assert json.loads(json.dumps(found.to_dict()))["at"] == [0]
    found = Difference(3, 2, 40, 1, "x", floats(NAN)[0], floats(OTHER_NAN)[0])
    assert "(bytes 0000c07f and 0100c07f)" in str(found)
    large = np.zeros(100), np.zeros(100)
    large[1][[7, 9]] = 2.5
    assert str(Difference(0, 0, 0, 0, "x", *large)).endswith(
        "x at [7], 2 of 100 numbers differ: stored 0.0, replayed 2.5"
    )


def test_a_picture_shows_which_pixels_differ(tmp_path: Path) -> None:
    stored = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    replayed = stored.copy()
    replayed[2, 1] += 9
    replayed[4, 3, 0] += 150
    found = Difference(3, 2, 40, 1, "observation", stored, replayed)
    assert (found.pixels, found.largest) == (2, 150.0)
    assert str(found).endswith("observation: 2 of 20 pixels differ, by 150 at most")
    write_picture(found, str(tmp_path / "a.png"))
    content = (tmp_path / "a.png").read_bytes()
    assert content[12:16] == b"IHDR"
    assert np.frombuffer(content[16:24], ">u4").tolist() == [3 * 4 + 2 * 2, 5]
    start = content.index(b"IDAT") + 4
    size = int.from_bytes(content[start - 8 : start - 4])
    lines = np.frombuffer(zlib.decompress(content[start : start + size]), np.uint8)
    image = lines.reshape(5, -1)[:, 1:].reshape(5, 16, 3)
    assert (image[:, :4] == stored).all()
    assert (image[:, 6:10] == replayed).all()
    assert {*map(tuple, np.argwhere(image[:, 12:].any(axis=-1)).tolist())} == {(2, 1), (4, 3)}
    with pytest.raises(ArgumentError, match="is not an image"):
        write_picture(Difference(0, 0, 0, 0, "x", np.zeros(2), np.ones(2)), str(tmp_path / "b.png"))
    with pytest.raises(ArgumentError, match="cannot be written"):
        write_picture(found, str(tmp_path / "none/a.png"))
