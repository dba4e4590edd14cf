"""Compare rows with the values that TensorFlow Datasets read from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lerobot_kit import pictured

from tallyroll.storage.rows.dtypes import NUMPY

STEPS = 6


def rows_of_ours() -> Any:
    """Return the rows whose export TensorFlow Datasets read: four trajectories, the last cut."""
    rows = pictured(23, STEPS, pixels=(16, 12, 3), plan=(9, 11, 1), stack=(8, 9, 4))
    generator = np.random.default_rng(7)
    for dtype, each in NUMPY.items():
        bits = generator.integers(0, 256, (23, 2 * each.itemsize), np.uint8)  # any bits, even NaN
        values = torch.from_numpy(bits & 1 if each.kind == "b" else bits)
        rows[_name(dtype)] = values.view(dtype)
    return rows


def _name(dtype: torch.dtype) -> str:
    return f"of_{str(dtype).removeprefix('torch.')}"


def compare_ours(rows: Any, read: dict[str, np.ndarray]) -> None:
    """Compare the steps read, one more per episode than rows, with the rows."""
    number = np.arange(23)
    lengths = [7, 7, 7, 6]
    assert read["lengths"].tolist() == lengths
    begins = np.concatenate([[0], np.cumsum(lengths)])
    last = begins[1:] - 1
    is_row = ~np.isin(np.arange(27), last)
    ends = np.append(np.flatnonzero(number % STEPS == STEPS - 1), 22)
    seen = ("observation", "pixels", "plan", "stack")
    for key in seen:
        found = read[f"steps/observation/{key}"]
        shape = (-1, *rows[key].shape[1:])
        np.testing.assert_array_equal(found[is_row].reshape(shape), rows[key])
        np.testing.assert_array_equal(found[last].reshape(shape), rows["next", key][ends])
    np.testing.assert_array_equal(read["steps/action"][is_row], rows["action"])
    np.testing.assert_array_equal(read["steps/reward"][is_row], rows["next", "reward"][:, 0])
    np.testing.assert_array_equal(np.flatnonzero(read["steps/is_first"]), begins[:-1])
    np.testing.assert_array_equal(np.flatnonzero(read["steps/is_last"]), last)
    np.testing.assert_array_equal(np.flatnonzero(read["steps/is_terminal"]), last[:3])
    discount = 1 - rows["next", "terminated"][:, 0].numpy().astype(np.float32)
    np.testing.assert_array_equal(read["steps/discount"][is_row], discount)
    for dtype, each in NUMPY.items():
        found = read[f"steps/infos/{_name(dtype)}"]
        assert found.dtype == each
        bits = rows[_name(dtype)].view(torch.uint8).numpy()
        np.testing.assert_array_equal(found[is_row].view(np.uint8), bits)
        assert not found[last].any()
    for key in ("traj_ids", "step", "lane"):
        found = read[f"steps/infos/collector/{key}"][is_row]
        np.testing.assert_array_equal(found, rows["collector", key])
    for name in ("action", "reward", "discount"):
        assert not read[f"steps/{name}"][last].any()


def transitions_in(read: dict[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of all steps except each episode's last, and the values that follow."""
    lengths = read["lengths"]
    begins = np.cumsum(lengths) - lengths
    steps = np.concatenate([b + np.arange(n - 1) for b, n in zip(begins, lengths, strict=True)])
    return read[name][steps], read[name][steps + 1]


def compare_theirs(back: Any, read: dict[str, np.ndarray]) -> int:
    """Compare a storage with the values read. Return the number of columns."""
    keys = [key for key in back.schema.keys if key[0] not in ("next", "collector")]
    rows = back.get(slice(None))
    for key in keys:
        if key[0] == "episode_metadata":
            path = "/".join(key)
            path = path if path in read else "/".join(key[1:])
            counts = np.maximum(read["lengths"] - 1, 0)
            np.testing.assert_array_equal(rows[key], np.repeat(read[path], counts, 0))
            continue
        here, after = transitions_in(read, "/".join(("steps", *key)))
        _same(rows[key].numpy(), here, key)
        if key[0] == "observation":
            _same(rows[("next", *key)].numpy(), after, key)
    here, _ = transitions_in(read, "steps/reward")
    _same(rows["next", "reward"].numpy()[:, 0], here, ("reward",))
    here, _ = transitions_in(read, "steps/discount")
    _same(rows["next", "discount"].numpy(), here, ("discount",))
    _, last = transitions_in(read, "steps/is_last")
    _, terminal = transitions_in(read, "steps/is_terminal")
    np.testing.assert_array_equal(rows["next", "terminated"][:, 0], last & terminal)
    np.testing.assert_array_equal(rows["next", "truncated"][:, 0], last & ~terminal)
    return len(keys)


def _same(ours: np.ndarray, theirs: np.ndarray, key: tuple[str, ...]) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), key
    if "wrist_image" in key:  # JPEG: two libraries round differently
        assert np.abs(ours.astype(int) - theirs).max() <= 3
    else:
        assert ours.tobytes() == theirs.tobytes(), key
