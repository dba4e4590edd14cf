"""Test ``tallyroll split``: it leaves complete parts or none, even if it is killed at any moment.

``TALLYROLL_KILLS`` sets the number of kills, 3 by default.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import PathIsTaken, StorageFull
from tallyroll.storage.ext import storage_copy
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.ext.views import split as writing
from tallyroll.storage.ext.views.split import write_parts

from killed_storages_kit import Told, forked, in_a_process, killed, wait_until

KILLS = int(os.environ.get("TALLYROLL_KILLS", "3"))
COLLECT = ["collect", "CartPole-v1", "--num-envs", "2", "--frames", "80", "--quiet"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "rows"
    with MemmapStorage(path) as storage:
        storage.extend(collected().exclude(("agents", "observation"), ("next", "agents")))
    return path


@pytest.mark.parametrize(("format", "suffix"), [("memmap", ""), ("hdf5", ".h5"), ("zarr", ".zarr")])
def test_the_parts_are_those_of_the_storage(
    source: Path, tmp_path: Path, format: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "parts"
    shares = ["--train", "0.7", "--val", "0.2", "--part", "held out=0.1"]
    command = ["split", str(source), str(place), *shares, "--seed", "5", "--format", format]
    assert main([*command, "--dry-run", "--json"]) == 0
    assert not place.exists()
    would = json.loads(capsys.readouterr().out)
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {**told, "dry_run": True} == would
    assert [*told["parts"]] == ["train", "val", "held out"]
    with open_storage(source) as storage:
        views = storage.split(seed=5, train=0.7, val=0.2, **{"held out": 0.1})
        for name, view in views.items():
            path = place / f"{name}{suffix}"
            assert told["parts"][name]["path"] == str(path)
            assert told["parts"][name]["rows"] == len(view)
            assert told["parts"][name]["trajectories"] == len(view.trajectories)
            with open_storage(path) as part:
                assert_same_rows(part.in_order(), view.in_order())
                [run] = part.runs
                assert run["copied_from"]["id"] == storage.manifest["id"]
            assert verify(path).sound
    assert [each.name for each in tmp_path.iterdir()] == ["parts"]
    assert main(command) == 1
    assert "already exists and is not replaced" in capsys.readouterr().err


def test_whole_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        with MemmapStorage(tmp_path / f"run-{number}") as storage:
            storage.extend(trajectory_rows(number * 100, 6 + number, steps=2))
    with open_storage(tmp_path / "run-*") as union:
        union.copy_to(tmp_path / "all", sort=True)
    words = ["split", str(tmp_path / "all"), str(tmp_path / "parts"), "--by", "run", "--json"]
    assert main([*words, "--train", "0.95", "--val", "0.05"]) == 1
    assert "expected runs for each part, got none for val, of 4" in capsys.readouterr().err
    assert main([*words, "--train", "0.75", "--test", "0.25", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["by"] == "run"
    found = []
    for name, count in (("train", 3), ("test", 1)):
        with open_storage(tmp_path / "parts" / name) as part:
            numbers = part.get(slice(None))["observation"].reshape(-1).long() // 100
            assert len(numbers.unique()) == count
            found += numbers.tolist()
    assert sorted(found) == [number for number in range(4) for _ in range(6 + number)]
    with open_storage(tmp_path / "all") as storage:
        parts = storage.split(seed=3, by="run", train=0.75, test=0.25)
        assert [len(parts[name]) for name in parts] == [len(found) - numbers.numel(), len(numbers)]
        with pytest.raises(ValueError, match="'trajectory' or 'run', got 'seed'"):
            storage.split(by="seed", train=1.0)  # type: ignore[arg-type]


def copied_in_pieces(place: Path) -> Path:
    for number in range(2):
        with MemmapStorage(place / f"run-{number}") as storage:
            storage.extend(trajectory_rows(number * 100, 20, steps=2))
    with MemmapStorage(place / "all") as storage:
        for number, rows in ((0, slice(10)), (1, slice(20)), (0, slice(10, 20))):
            with open_storage(place / f"run-{number}") as run:
                storage.extend(run.get(rows), ids="renumber")
    return place / "all"


def shards_of_collectors(place: Path) -> Path:
    for seed in "01":
        for shard in ("0/2", "1/2"):
            more = ["--shard", shard, "--out", str(place / f"shard-{seed}-{shard[0]}")]
            assert main([*COLLECT, "--seed", seed, *more]) == 0
    return place / "shard-*"


def sorted_shards_of_collectors(place: Path) -> Path:
    with open_storage(shards_of_collectors(place)) as union:
        union.copy_to(place / "all", sort=True)
    return place / "all"


def sorted_shards_of_workers(place: Path) -> Path:
    for seed in "01":
        out = ["--out", str(place / f"run-{seed}"), "--quiet"]
        assert main([*COLLECT, "--seed", seed, "--workers", "2", "--sharded", *out]) == 0
        assert main(["collect", "--resume", "--frames", "160", *out]) == 0
        with open_storage(place / f"run-{seed}") as run:
            run.copy_to(place / f"copy-{seed}", sort=True)
    return place / "copy-*"


@pytest.mark.parametrize(
    ("make", "entries"),
    [
        (copied_in_pieces, 3),
        (shards_of_collectors, 4),
        (sorted_shards_of_collectors, 4),
        (sorted_shards_of_workers, 8),
    ],
)
def test_all_entries_of_a_run_are_in_one_part(
    tmp_path: Path, make: Callable[[Path], Path], entries: int
) -> None:
    with open_storage(make(tmp_path)) as storage:
        assert len(storage.runs) == entries
        parts = storage.split(by="run", one=0.5, other=0.5)
        assert len(parts["one"]) == len(parts["other"]) == len(storage) / 2
        with pytest.raises(ValueError, match="got none for c, of 2 in all"):
            storage.split(by="run", a=0.4, b=0.4, c=0.2)


def test_some_trajectories_and_an_empty_part(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "parts"
    words = ["split", str(source), str(place), "--where", "length > 7 and lane == 1", "--train"]
    assert main([*words, "0.9", "--val", "0.1"]) == 1
    assert "expected trajectories for each part, got none for val" in capsys.readouterr().err
    assert not place.exists()
    assert main([*words, "1"]) == 0
    assert str(place / "train") in capsys.readouterr().out
    with open_storage(source) as storage, open_storage(place / "train") as train:
        assert {*train.trajectories} == {*storage.trajectories.where(words[4]).trajectories}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "expected a share"),
        (["--train", "0.9", "--val", "0.2"], "at most 1 together, got 1.1"),
        (["--train", "0"], "expected a share above 0"),
        (["--train", "nan"], "expected a share above 0"),
        (["--part", "0.5"], "expected NAME=SHARE"),
        (["--part", "a/b=0.5"], "expected NAME=SHARE"),
        (["--train", "0.5", "--part", "train=0.5"], "different names"),
        (["--train", "0.5", "--seed", "-1"], "expected a whole number"),
        (["--train", "0.5", "--where", "lane >"], "not a condition"),
    ],
)
def test_wrong_arguments(
    source: Path, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "parts"
    try:
        status = main(["split", str(source), str(place), *words])
    except SystemExit as done:
        status = int(done.code or 0)
    assert status == 2
    assert says in capsys.readouterr().err
    assert not place.exists()


def test_a_part_that_fails_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_storage(source) as storage:
        parts = {name: v.reader for name, v in storage.split(one=0.5, other=0.5).items()}
        made: list[Any] = []

        def second_fails(reader: Any, path: Path, **more: Any) -> Any:
            if not more.get("dry_run"):
                made.append(path)
                if len(made) == 2:
                    raise StorageFull("no space")
            return storage_copy.copy(reader, path, **more)

        with monkeypatch.context() as patch:
            patch.setattr(writing, "copy", second_fails)
            with pytest.raises(StorageFull):
                write_parts(parts, tmp_path / "parts")
        assert [*tmp_path.iterdir()] == []
        (tmp_path / "parts").write_text("mine")
        with pytest.raises(PathIsTaken):
            write_parts(parts, tmp_path / "parts")
        for wrong in ({"": parts["one"]}, {"..": parts["one"]}):
            with pytest.raises(ValueError, match="expected a name that a folder can have"):
                write_parts(wrong, tmp_path / "others")

        def all_but_full(*args: Any, **more: Any) -> Any:
            found = storage_copy.copy(*args, **more)
            return type(found)(**{**_fields(found), "free": found.nbytes + 1})

        monkeypatch.setattr(writing, "copy", all_but_full)
        with pytest.raises(StorageFull, match="for 2 parts"):
            write_parts(parts, tmp_path / "others")


def _fields(report: Any) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def split(folder: Path, told: Told) -> None:
    storage_copy._BLOCK_NBYTES = 2000

    def tell(done: int, total: int) -> None:
        told.head = done

    with open_storage(folder / "rows") as storage:
        views = storage.split(train=0.5, val=0.5)
        parts = {name: view.reader for name, view in views.items()}
        write_parts(parts, folder / "parts", progress=tell)
    told.head = -1
    while True:
        time.sleep(1)


def kill_at_random(folder: Path, kills: int) -> None:
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(trajectory_rows(0, 800, steps=7))
    with open_storage(folder / "rows") as storage:
        total = storage.nbytes
        for seed in range(kills):
            pick, told = random.Random(seed), Told()
            until = pick.choice([pick.randrange(total), total])
            told.head = 0
            child = forked(lambda t=told: split(folder, t))  # type: ignore[misc]
            wait_until(lambda t=told, u=until: t.head >= u or t.head == -1)  # type: ignore[misc]
            time.sleep(pick.uniform(0, 0.02))
            killed(child)
            if (folder / "parts").exists():
                names = sorted(each.name for each in (folder / "parts").iterdir())
                assert names == ["train", "val"], f"kill {seed}"
                union = open_storage([folder / "parts" / name for name in names])
                assert len(union) == len(storage), f"kill {seed}: half of the parts"
                union.close()
                (folder / "parts").rename(folder / f"kept {seed}")
        parts = {name: v.reader for name, v in storage.split(train=0.5, val=0.5).items()}
        write_parts(parts, folder / "parts")
    assert not [each for each in folder.iterdir() if each.name.endswith(".written-aside")]


def test_it_is_killed(tmp_path: Path) -> None:
    in_a_process(kill_at_random, tmp_path, KILLS, seconds=20 + 2 * KILLS)
