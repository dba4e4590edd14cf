"""Compare content hashes and `diff` with plain loops, over every format and order."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.storage import (
    DiskStorage,
    H5Storage,
    MemmapStorage,
    StorageMissing,
    ZarrStorage,
    content_hash,
    diff,
    fast_paths,
    open_storage,
    verify,
)
from tallyroll.storage.errors import ColumnsMissing, Overrun
from tallyroll.storage.ext.verification import differences
from tallyroll.storage.rows.keys import CUT, STEP, TRAJ_IDS, format_key
from tallyroll.storage.trajectories import leaves
from tallyroll.storage.trajectories.content import Numbering
from tallyroll.storage.trajectories.leaves import Leaves

from collect_kit import ByObservation
from storage_damage import damage
from warm_cli import WarmServer
from worker_kit import DISABLED, factory, sync_collector, worker_collector

ROWS = 240
KINDS: dict[str, tuple[type[DiskStorage], dict[str, int]]] = {
    "rows": (MemmapStorage, {}),
    "ring": (MemmapStorage, {"max_size": ROWS}),
    "rows.h5": (H5Storage, {"capacity": ROWS}),
    "rows.zarr": (ZarrStorage, {}),
}


def collect(path: Path, workers: int = 0, batch: int = 24, name: str = "rows") -> Path:
    """Collect the same rows each time, in different ways."""
    kind, options = KINDS[name]
    run = {"frames_per_batch": batch, "total_frames": ROWS, "seed": 5}
    with kind(path / name, **options) as storage:
        run["storage"] = storage
        if workers:
            made: Any = worker_collector(DISABLED, workers, ByObservation(), lanes=12, **run)
        else:
            made = SyncCollector(factory(DISABLED, 0, 12), ByObservation(), **run)
        with made:
            for _ in made:
                pass
    return path / name


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collect(tmp_path_factory.mktemp("content"))


def plain(path: Path, relative: bool = False, leaf: int = 2**16) -> str:
    """Return the hash from a loop over rows."""
    with open_storage(path) as storage:
        columns = sorted(
            (column for column in storage.schema.columns if column.key != CUT),
            key=lambda each: format_key(each.key),
        )
        about = [[format_key(each.key), each.dtype_name, list(each.shape)] for each in columns]
        rows = storage.reader.copies(np.arange(storage.span.start, storage.span.stop))
        values = dict(zip(storage.reader.keys, rows, strict=True))
    nbytes = sum(column.row_nbytes for column in columns)
    steps_in = 2 ** max(0, int(math.log2(max(1, leaf // nbytes))))
    ids_in = min(16, steps_in)
    ids, steps = values[TRAJ_IDS].reshape(-1).tolist(), values[STEP].reshape(-1).tolist()
    order = sorted(range(len(ids)), key=lambda row: (ids[row], steps[row]))
    if relative:
        ids = [sorted(set(ids)).index(id) for id in ids]
        values[TRAJ_IDS] = np.reshape(ids, values[TRAJ_IDS].shape).astype(values[TRAJ_IDS].dtype)
    leaves = groupby(order, key=lambda row: (ids[row] // ids_in, steps[row] // steps_in))
    hashes = []
    for _, leaf in leaves:
        each = [*leaf]
        packed = b"".join(values[column.key][at].tobytes() for column in columns for at in each)
        hashes.append(hashlib.sha256(packed).digest())
    head = f"tallyroll content 1\n{json.dumps(about)}\n".encode()
    return hashlib.sha256(head + b"".join(hashes)).hexdigest()


# --- the hash -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["kept", "relative"])
def test_it_is_that_of_a_plain_loop(path: Path, ids: Any) -> None:
    assert content_hash(path, ids=ids) == plain(path, ids == "relative")


@pytest.mark.parametrize(("most", "cached"), [(1, 1), (2000, 300), (2**20, 5000)])
@pytest.mark.parametrize("off", [(), ("kernel",)])
def test_it_does_not_depend_on_how_much_is_read_at_a_time(
    path: Path, most: int, cached: int, off: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = content_hash(path)
    monkeypatch.setattr(leaves, "_MOST_NBYTES", most)
    monkeypatch.setattr(leaves, "_CACHED_NBYTES", cached)
    told: list[tuple[int, int]] = []
    with fast_paths.switched_off(*off):
        for ids in ("kept", "relative"):
            found = content_hash(path, ids=ids, progress=lambda *done: told.append(done))
            assert found == plain(path, ids == "relative")
            assert told == sorted(told)
            assert told[-1][0] == told[-1][1] > 0
            told.clear()
    assert content_hash(path) == wanted


NUMBERS = st.integers(0, 40) | st.sampled_from([2**40, 2**63 - 1, -(2**63), -3])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows_in_any_order(
    tmp_path: Path, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: any format, other leaves, reads in parts, and rows that no collector writes."""
    leaf = data.draw(st.sampled_from([1, 100, 300, 2**16]), "leaf")
    monkeypatch.setattr(leaves, "_LEAF_NBYTES", leaf)
    monkeypatch.setattr(leaves, "_MOST_NBYTES", data.draw(st.sampled_from([1, 400, 2**20])))
    monkeypatch.setattr(leaves, "_CACHED_NBYTES", data.draw(st.sampled_from([1, 150, 2**18])))
    each = st.tuples(NUMBERS, NUMBERS, st.integers(1, 5))  # a run of some steps
    runs = data.draw(st.lists(each, min_size=1, max_size=12), "runs")
    pairs = [(id, min(step, 2**63 - 9) + at) for id, step, n in runs for at in range(n)]
    ids, steps = map(list, zip(*pairs, strict=True))
    x = torch.arange(len(ids), dtype=torch.int16)[:, None].expand(-1, 3)
    given = rows(ids, steps, x)
    name = data.draw(st.sampled_from([*KINDS]), "kind")
    kind, options = KINDS[name]
    if "max_size" in options:
        options = {"max_size": data.draw(st.integers(1, 50), "ring")}
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    with kind(folder / name, **options) as storage:
        at, most = 0, options.get("max_size", 99)
        while at < len(ids):
            count = min(most, data.draw(st.integers(1, 30), "commit"))
            storage.extend(given[at : at + count], ids="fresh")
            at += count
    numberings: tuple[Numbering, ...] = "kept", "relative"
    for ids_are in numberings:
        wanted = plain(folder / name, ids_are == "relative", leaf)
        assert content_hash(folder / name, ids=ids_are) == wanted
        with fast_paths.switched_off("kernel"):
            assert content_hash(folder / name, ids=ids_are) == wanted


def test_how_rows_were_committed_is_no_content(tmp_path: Path) -> None:
    given = rows([0, 0, 1], [0, 1, 0])
    for name, cut in (("one", [False] * 3), ("two", [True, False, True])):
        write(tmp_path / name, given.clone().set(CUT, torch.tensor(cut)))
    write(tmp_path / "none", given)
    hashes = {content_hash(tmp_path / name) for name in ("one", "two", "none")}
    assert len(hashes) == 1
    assert diff(tmp_path / "one", tmp_path / "two").same


@pytest.mark.parametrize("last", [10, 13, 20, 27])
def test_a_trajectory_goes_on_over_the_end_of_a_ring(tmp_path: Path, last: int) -> None:
    steps = [*range(last)]
    every = rows([4] * last, steps, torch.arange(last))
    with MemmapStorage(tmp_path / "ring", max_size=10) as storage:
        for at in range(0, last, 3):
            storage.extend(every[at : at + 3])
    write(tmp_path / "rows", every[-10:])
    assert content_hash(tmp_path / "ring") == plain(tmp_path / "rows")
    with fast_paths.switched_off("kernel"):
        assert content_hash(tmp_path / "ring") == plain(tmp_path / "rows")


def test_formats_rings_commits_and_workers_do_not_matter(path: Path, tmp_path: Path) -> None:
    wanted = content_hash(path)
    found = {}
    for name in KINDS:
        (tmp_path / name).mkdir()
        found[name] = content_hash(collect(tmp_path / name, name=name))
    for workers, batch in ((0, 60), (1, 24), (3, 12)):
        (folder := tmp_path / f"{workers} {batch}").mkdir()
        found[folder.name] = content_hash(collect(folder, workers, batch))
    with open_storage(path) as storage, MemmapStorage(tmp_path / "packed") as packed:
        for id in sorted(storage.trajectories):
            packed.extend(storage.trajectories[id])
        found["packed"] = content_hash(packed)
    assert found == dict.fromkeys(found, wanted)


def test_random_actions_too(tmp_path: Path) -> None:
    hashes = set()
    for workers in (0, 1, 3):
        run = {"frames_per_batch": 24, "total_frames": ROWS, "seed": 5}
        run["storage"] = tmp_path / str(workers)
        make: Any = (
            worker_collector(DISABLED, workers, lanes=12, **run)
            if workers
            else sync_collector(DISABLED, lanes=12, **run)
        )
        with make:
            list(make)
        hashes.add(content_hash(tmp_path / str(workers)))
    assert len(hashes) == 1


def test_rows_that_are_numbered_anew_are_relative_ones(path: Path, tmp_path: Path) -> None:
    with open_storage(path) as storage, MemmapStorage(tmp_path / "copy") as copy:
        copy.extend(storage.in_order(), ids="renumber")
        moved = copy.in_order()
        moved[TRAJ_IDS] += 100
        copies = tmp_path / "moved"
        with MemmapStorage(copies) as other:
            other.extend(moved)
    assert content_hash(path) != content_hash(copies)
    assert content_hash(path, ids="relative") == content_hash(copies, ids="relative")
    assert diff(path, copies, ids="relative").same
    assert not diff(path, copies).same


def test_it_is_kept_by_a_finalized_storage(path: Path, tmp_path: Path) -> None:
    for name in ("rows", "rows.h5", "rows.zarr"):
        copy = collect(tmp_path, name=name)
        told: list[int] = []
        with open_storage(copy, mode="append") as storage:
            total = 2 * ROWS * storage.schema.row_nbytes
            storage.finalize(told.append)
        assert sum(told) == total
        with open_storage(copy) as storage:
            assert storage.manifest["finalized"]["content"] == content_hash(path)
        assert verify(copy).sound


def test_a_storage_without_rows(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "none") as storage:
        empty = content_hash(storage)
        storage.extend(rows([0], [0]))
        assert content_hash(storage) != empty


# --- diff -----------------------------------------------------------------------------------------


def rows(ids: list[int], steps: list[int], x: Any = 0.0) -> TensorDict:
    """Return rows of one lane."""
    marks = {
        "traj_ids": torch.tensor(ids),
        "step": torch.tensor(steps),
        "lane": torch.zeros(len(ids), dtype=torch.int32),
    }
    values = torch.as_tensor(x).expand(len(ids), *torch.as_tensor(x).shape[1:])
    return TensorDict({"x": values.clone(), "collector": marks}, [len(ids)])


def write(path: Path, *given: TensorDict) -> Path:
    with MemmapStorage(path) as storage:
        for each in given:
            storage.extend(each)
    return path


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_bit_is_found_wherever_it_is(path: Path, tmp_path: Path, data: Any) -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    with open_storage(path) as storage:
        columns = [each for each in storage.schema.columns if each.key not in (CUT, TRAJ_IDS, STEP)]
        column = data.draw(st.sampled_from(columns))
        row = data.draw(st.integers(0, ROWS - 1))
        marks = storage.get(row)["collector"]
        at = (int(marks["traj_ids"]), int(marks["step"]))
    file = copy.joinpath(*column.key).with_suffix(".memmap")
    place = row * column.row_nbytes + data.draw(st.integers(0, column.row_nbytes - 1))
    byte = file.read_bytes()[place] ^ 1 << (0 if column.dtype is torch.bool else 3)
    damage(file, place, bytes([byte]))
    assert content_hash(copy) != content_hash(path)
    found = diff(path, copy)
    assert not found.same
    assert (found.equal, found.changed, found.only) == (ROWS - 1, 1, (0, 0))
    assert found.columns == {format_key(column.key): 1}
    (one,) = found.places
    assert (one.trajectory, one.step, one.column) == (*at, format_key(column.key))
    assert one.first != one.second or np.isnan(one.second).any()


def test_bits_decide_and_not_numbers(tmp_path: Path) -> None:
    values = torch.tensor([0.0, torch.nan, 1.0])
    other = torch.tensor([-0.0, torch.nan, 1.0])
    one, two = (
        write(tmp_path / name, rows([0, 0, 0], [0, 1, 2], x=each))
        for name, each in (("one", values), ("two", other))
    )
    found = diff(one, two)
    assert (found.equal, found.changed) == (2, 1)
    assert str(found.places[0]) == "trajectory 0, step 0, x: 0.0, -0.0"


def test_rows_of_one_alone(tmp_path: Path) -> None:
    """The expected values come from a model of sets."""
    one = write(tmp_path / "one", rows([0, 0, 1, 1], [0, 1, 0, 1]), rows([5], [0]))
    two = write(tmp_path / "two", rows([1, 1, 1], [0, 1, 2]), rows([5], [0]), rows([9], [3]))
    found = diff(one, two)
    assert (found.rows, found.equal, found.changed, found.only) == ((5, 5), 3, 0, (2, 2))
    assert [(p.trajectory, p.step, p.first, p.second) for p in found.places] == [
        (0, 0, True, False),
        (0, 1, True, False),
        (1, 2, False, True),
        (9, 3, False, True),
    ]
    assert "only in the first" in str(found.places[0])
    more = write(tmp_path / "more", rows([5, 6], [0, 0]))
    less = write(tmp_path / "less", rows([5], [0]))
    assert not diff(more, less).same
    assert not diff(less, more).same


pairs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=9)


@given(one=pairs, other=pairs)
def test_matches_are_those_of_a_multiset(one: Any, other: Any) -> None:
    """In a damaged storage, several rows may claim to be the same step."""

    class Rows:
        def __init__(self, found: list[tuple[int, int]]) -> None:
            found = sorted(found)
            self.rows = np.arange(len(found))
            self.ids = np.array([id for id, _ in found], np.int64)
            self.steps = np.array([step for _, step in found], np.int64)

        def at(self, places: np.ndarray) -> list[tuple[int, int]]:
            return [*zip(self.ids[places].tolist(), self.steps[places].tolist(), strict=True)]

    mine, theirs = Rows(one), Rows(other)
    both, alone = differences._matched(mine, theirs)  # type: ignore[arg-type]
    assert mine.at(both[0]) == theirs.at(both[1])
    rest = sorted(other)
    common = [rest.pop(rest.index(each)) for each in sorted(one) if each in rest]
    assert sorted(mine.at(both[0])) == common
    assert theirs.at(alone[1]) == rest
    assert sorted(mine.at(alone[0]) + common) == sorted(one)


def test_images_are_told_by_the_first_number(tmp_path: Path) -> None:
    image = torch.zeros(1, 8, 9, 3)
    changed = image.clone()
    changed[0, 4, 2, 1] = 7
    one = write(tmp_path / "one", rows([0], [0], x=image))
    two = write(tmp_path / "two", rows([0], [0], x=changed))
    assert str(diff(one, two).places[0]) == "trajectory 0, step 0, x[4, 2, 1]: 0.0, 7.0"


def test_other_columns_and_other_makers(tmp_path: Path) -> None:
    one = write(tmp_path / "one", rows([0], [0]).set("y", torch.zeros(1)))
    two = write(tmp_path / "two", rows([0], [0], x=torch.zeros(1, dtype=torch.float64)))
    found = diff(one, two)
    assert found.schema == ("x: float32 [], float64 []", "y: only in the first")
    assert not found.same
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        run = {"frames_per_batch": 4, "total_frames": 4, "seed": seed, "storage": folder}
        with SyncCollector("CartPole-v1", **run) as collector:
            list(collector)
    assert any(line.startswith("run 0, seed: 0, 1") for line in diff(*folders).provenance)


def test_rows_of_a_ring_that_go_meanwhile(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=4) as storage:
        storage.extend(rows([0, 0, 0, 0], [0, 1, 2, 3]))
        seen = Leaves(storage.reader)
        storage.extend(rows([0], [4]))
        with pytest.raises(Overrun):
            seen.hashes()


def test_rows_that_do_not_say_which_they_are(tmp_path: Path, path: Path) -> None:
    write(tmp_path / "other", TensorDict({"x": torch.zeros(3)}, [3]))
    for call in (lambda: content_hash(tmp_path / "other"), lambda: diff(path, tmp_path / "other")):
        with pytest.raises(ColumnsMissing, match="has no collector/traj_ids"):
            call()
    with open_storage(tmp_path / "other", mode="append") as storage:
        storage.finalize()
    with open_storage(tmp_path / "other") as storage:
        assert "content" not in storage.manifest["finalized"]


def test_wrong_arguments(tmp_path: Path, path: Path) -> None:
    with pytest.raises(StorageMissing):
        content_hash(tmp_path / "none")
    with pytest.raises(StorageMissing):
        diff(path, tmp_path / "none")
    wrong: Any = "other"
    with pytest.raises(ValueError, match="ids: expected 'kept' or 'relative', got 'other'"):
        content_hash(path, ids=wrong)


# --- the command line -----------------------------------------------------------------------------


def test_the_command(server: WarmServer, path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    same = server.run(tmp_path, "diff", path, copy)
    assert same.out.startswith(f"the same: {ROWS} of {ROWS} common rows are equal")
    damage(copy / "action.memmap", 0, b"\x77")
    differs = server.start(tmp_path, "diff", path, copy)
    assert differs.wait() == 1
    assert "action: 1 rows" in differs.out
    assert "trajectory" in differs.out
    as_json = server.start(tmp_path, "diff", path, copy, "--json")
    assert as_json.wait() == 1
    facts = json.loads(as_json.out)
    assert (facts["same"], facts["changed"], facts["columns"]) == (False, 1, {"action": 1})
    quiet = server.start(tmp_path, "diff", path, copy, "--quiet")
    assert (quiet.wait(), quiet.out, quiet.err) == (1, "", "")
    none = server.start(tmp_path, "diff", path, tmp_path / "none")
    assert (none.wait(), none.out) == (2, "")
    assert "does not exist" in none.err
    shown = server.run(tmp_path, "inspect", path, "--hash", "--json")
    assert json.loads(shown.out)["content"] == content_hash(path)
    with open_storage(copy, mode="append") as storage:
        storage.finalize()
    assert f"content {content_hash(copy)}" in server.run(tmp_path, "inspect", copy).out
