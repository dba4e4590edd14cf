"""Test that no row occurs twice in a union, however its members were copied from each other."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, import_dataset, open_storage, verify
from tallyroll.storage.errors import RowsDoubled
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.files import copied_runs
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to

SEEDS = int(os.environ.get("TALLYROLL_CHAINS", "2"))
ONE = ["observation"]
PARTS = {"low": "id < 3", "high": "id >= 3", "some": "id == 2 or id == 4"}


def made(path: Path, first: int, rows: int = 30) -> Path:
    """Make a storage of five-step trajectories whose observations number rows from `first`."""
    with MemmapStorage(path) as storage:
        storage.extend(trajectory_rows(first, rows, steps=5), ids="fresh")
    return path


def accepted(*paths: Path, columns: list[str] | None = None) -> bool:
    """Return whether a union of the storages opens. The order of storages must not matter."""
    found = set()
    for order in (paths, paths[::-1]):
        try:
            open_storage(list(order), columns=columns).close()
            found.add(True)
        except RowsDoubled:
            found.add(False)
    assert len(found) == 1
    return found.pop()


def packed(storage: DiskStorage, path: Path) -> None:
    storage.pack(path)


def packed_hdf5(storage: DiskStorage, path: Path) -> None:
    storage.pack(path, format="hdf5")


def by_npz(storage: DiskStorage, path: Path) -> None:
    storage.export(path.with_suffix(".npz"), "npz")
    import_dataset(path.with_suffix(".npz"), path, "npz")


def by_parquet(storage: DiskStorage, path: Path) -> None:
    storage.export(path.with_suffix(".parquet"), "parquet")
    import_dataset(path.with_suffix(".parquet"), path, "parquet")


def extended(storage: DiskStorage, path: Path) -> None:
    with MemmapStorage(path) as target:
        target.extend(storage[:], ids="fresh")


def renumbered(storage: DiskStorage, path: Path) -> None:
    made(path, 9000, 10)
    with MemmapStorage(path, mode="append") as target:
        target.extend(storage[:], ids="renumber")


def copied(**options: Any) -> Callable[[DiskStorage, Path], None]:
    return lambda storage, path: storage.copy_to(path, **options) and None


WAYS: dict[str, Callable[[DiskStorage, Path], None]] = {
    "copy": copied(),
    "sorted": copied(sort=True),
    "hdf5": copied(format="hdf5"),
    "zarr": copied(format="zarr"),
    "columns": copied(columns=ONE),
    "packed": packed,
    "packed hdf5": packed_hdf5,
    "npz": by_npz,
    "parquet": by_parquet,
    "extend": extended,
    "renumber": renumbered,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "source", 0)


@pytest.mark.parametrize("name", list(WAYS))
def test_copies_of_a_storage_and_of_its_parts(source: Path, tmp_path: Path, name: str) -> None:
    """A storage clashes with any copy of its rows. Parts without common rows do not clash."""
    way, columns = WAYS[name], ONE if name == "columns" else None
    with open_storage(source) as storage:
        way(storage, tmp_path / "whole")
        for part, condition in PARTS.items():
            way(storage.trajectories.where(condition), tmp_path / part)
    with open_storage(tmp_path / "whole") as storage:
        WAYS["columns" if columns else "copy"](storage, tmp_path / "again")
    low, high, some = (tmp_path / part for part in PARTS)
    for copy in (tmp_path / "whole", tmp_path / "again", low, high, some):
        assert not accepted(source, copy, columns=columns)
    assert not accepted(tmp_path / "again", tmp_path / "whole", columns=columns)
    if name != "renumber":  # these storages begin with the same rows
        assert accepted(low, high, columns=columns)
        other = made(tmp_path / "other", 1000)
        assert accepted(low, other, high, columns=columns)
    assert not accepted(low, some, columns=columns)
    assert not accepted(tmp_path / "whole", high, columns=columns)


def test_unions_that_were_copied(source: Path, tmp_path: Path) -> None:
    """Cover each way to copy, moved ids, and unions nested in one another."""
    other = tmp_path / "other"
    with MemmapStorage(other) as storage:
        rows = trajectory_rows(0, 30, steps=5)
        for key in ("observation", ("next", "observation")):
            rows[key] += 5000
        storage.extend(rows, ids="fresh")
    with open_storage([source, other]) as union:
        assert union.reader.ids_moved_by == (0, 6)
        for name in ("copy", "packed", "npz", "extend"):
            WAYS[name](union, tmp_path / f"both {name}")
        WAYS["copy"](union.trajectories.where("id >= 6"), tmp_path / "part")
        WAYS["packed"](union.trajectories.where("id >= 6"), tmp_path / "packed part")
    with open_storage([tmp_path / "both copy", made(tmp_path / "third", 7000)]) as union:
        WAYS["copy"](union, tmp_path / "deep")
    for name in ("both copy", "both packed", "both npz", "both extend", "deep"):
        for each in (source, other, tmp_path / "part"):
            assert not accepted(each, tmp_path / name)
    assert accepted(source, tmp_path / "part")
    assert accepted(source, tmp_path / "packed part")
    assert not accepted(other, tmp_path / "part")
    assert not accepted(other, tmp_path / "packed part")


def test_equal_trajectories_of_one_storage_are_not_the_same(tmp_path: Path) -> None:
    """A deterministic environment makes the same rows in every episode."""
    rows = trajectory_rows(0, 30, steps=5)
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        rows[key] = rows[key][:1].expand_as(rows[key]).clone()
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(rows, ids="fresh")
        for part, condition in PARTS.items():
            view = storage.trajectories.where(condition)
            view.copy_to(tmp_path / part)
            view.pack(tmp_path / f"{part} packed")
    for end in ("", " packed"):
        low, high, some = (tmp_path / f"{part}{end}" for part in PARTS)
        assert accepted(low, high)
        assert not accepted(low, some)
        assert not accepted(high, some)


def test_rows_that_were_taken_back(tmp_path: Path) -> None:
    """A copy of rows that the storage later rewound shares no rows with it."""
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(trajectory_rows(0, 20, steps=5), ids="fresh")
        storage.trajectories.where("id >= 2").copy_to(tmp_path / "before")
        storage.copy_to(tmp_path / "all before")
        rewind_to(storage.writer, 10, None)
        storage.extend(trajectory_rows(500, 10, steps=5), ids="fresh")
        storage.trajectories.where("id >= 2").copy_to(tmp_path / "after")
    assert accepted(tmp_path / "source", tmp_path / "before")
    assert accepted(tmp_path / "before", tmp_path / "after")
    assert not accepted(tmp_path / "source", tmp_path / "all before")
    assert not accepted(tmp_path / "source", tmp_path / "after")


def test_origins_that_a_manifest_leaves_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are compared if the manifest could not name all of the copies."""
    monkeypatch.setattr(copied_runs, "_MOST_COPIES", 2)
    others = [made(tmp_path / f"{number}", 1000 * number) for number in (1, 2, 3)]
    with open_storage([*others, source]) as union:
        union.copy_to(tmp_path / "all")
    with open_storage(tmp_path / "all") as storage:
        assert storage.manifest["runs"][-1] == {"first_row": 60, "copies_left_out": True}
    assert not accepted(tmp_path / "all", source)
    assert accepted(tmp_path / "all", made(tmp_path / "new", 8000))


def test_one_storage_by_two_names(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    shutil.copytree(source, tmp_path / "files")
    for name in ("link", "files", "./source"):
        assert not accepted(source, tmp_path / name)


def test_commands_refuse_them(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_storage(source) as storage:
        storage.copy_to(tmp_path / "copy")
    pair = [str(source), str(tmp_path / "copy")]
    for command in (["inspect", *pair], ["copy", *pair, str(tmp_path / "new")]):
        assert main(command) != 0
        assert "rows that were copied from" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main(["verify", "--json", *pair]) != 0
    assert (
        "rows that were copied from"
        in json.loads(capsys.readouterr().out)["findings"][0]["message"]
    )
    assert not verify(pair).sound


# --- random chains --------------------------------------------------------------------------------


def rows_in(path: Path) -> list[float]:
    """Return the numbers of a storage's rows. Each source row contains its number."""
    with open_storage(path) as storage:
        return storage.get(slice(None), keys=ONE)["observation"].reshape(-1).tolist()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_chains_of_copies(seed: int, tmp_path: Path) -> None:
    """A union is accepted exactly if no row of a source is in two of its members."""
    draw = random.Random(seed)
    pool = [made(tmp_path / f"source {n}", 1000 * n, draw.choice([20, 30])) for n in range(3)]
    ways = [name for name in WAYS if name != "renumber"]
    for number in range(12):
        path = tmp_path / f"{number}"
        whole = [each for each in pool if not lacks_columns(each)]
        chosen = draw.sample(whole, draw.choice([1, 1, 2]))
        if len({*map(lacks_columns, chosen)}) > 1 or not disjoint(chosen):
            chosen = chosen[:1]
        name = draw.choice(ways)
        with open_storage(chosen if len(chosen) > 1 else chosen[0]) as storage:
            ids = storage.trajectories.table["id"].tolist()
            picked = draw.sample(ids, draw.randint(1, len(ids)))
            part = storage
            if draw.random() < 0.7:
                part = storage.trajectories.where(f"id in ({', '.join(map(str, picked))},)")
            WAYS[name](part, path)
        if draw.random() < 0.2:
            begin = draw.randrange(15)
            pieces = path.with_name(f"{number} pieces")
            with open_storage(draw.choice(whole)) as storage, MemmapStorage(pieces) as target:
                target.extend(storage[begin : begin + 7], ids="fresh")
            pool.append(pieces)
        pool.append(path)
    doubled = 0
    for _ in range(40):
        members = draw.sample(pool, draw.choice([2, 2, 3]))
        columns = ONE if any(map(lacks_columns, members)) or draw.random() < 0.2 else None
        found = accepted(*members, columns=columns)
        assert found == disjoint(members), f"{[each.name for each in members]}"
        doubled += not found
    assert 3 < doubled < 40


def lacks_columns(path: Path) -> bool:
    with open_storage(path) as storage:
        return len(storage.schema.keys) == 1


def disjoint(paths: list[Path]) -> bool:
    rows = [row for path in paths for row in {*rows_in(path)}]
    return len(rows) == len({*rows})


def test_the_oracle_numbers_rows(source: Path) -> None:
    assert rows_in(source) == torch.arange(30.0).tolist()
