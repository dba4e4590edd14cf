"""Test `verify`, `inspect` and `diff` of several storages, and faults between members."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, content_hash, diff, open_storage, verify
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.ext.testing.reader_contract import collected
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows


def made(path: Path, first: int, rows: int = 30, shard: Any = None, **changed: Any) -> Path:
    """Make a storage of five-step trajectories, optionally as a shard of a run."""
    found = trajectory_rows(first, rows, steps=5)
    for key, (row, value) in changed.items():
        found[key][row] = value
    with MemmapStorage(path) as storage:
        storage.initialise(open_schema(), {} if shard is None else {"shard": shard})
        storage.extend(found, ids="fresh")
    return path


def open_schema() -> Any:
    from tallyroll.storage import Schema

    return Schema.of(trajectory_rows(0, 1, steps=5))


def messages(paths: Any) -> list[str]:
    report = verify(paths)
    assert report.sound == (not report.findings)
    return [f"{each.check}: {each.message}" for each in report.findings]


def test_a_sound_one(tmp_path: Path) -> None:
    paths = [made(tmp_path / name, first) for name, first in (("a", 0), ("b", 100))]
    told: list[tuple[int, int]] = []
    report = verify(paths, progress=lambda *of: told.append(of))
    assert (report.sound, report.rows, report.format) == (True, 60, "tallyroll.union")
    assert "members" in report.checked
    assert {"lanes", "ids", "steps"} <= {*report.checked}
    with open_storage(paths) as union:
        assert told[-1] == (union.nbytes, union.nbytes)


def test_findings_say_of_which_storage_they_are(tmp_path: Path) -> None:
    a = made(tmp_path / "a", 0)
    b = made(tmp_path / "b", 100, observation=(3, torch.nan))
    assert all(each.endswith(f"({b})") for each in messages([a, b]))
    assert {each.partition(":")[0] for each in messages([a, b])} == {"observations", "nan"}
    assert verify([a, b], skip=["observations", "nan"]).sound


def test_rows_that_are_there_twice(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", 0), made(tmp_path / "b", 1000)
    shutil.copytree(a, tmp_path / "c")
    assert "are the same storage, or copies of the same one" in messages([a, tmp_path / "c"])[0]
    made(tmp_path / "again", 0)  # as from the same seed
    (found,) = messages([a, b, tmp_path / "again"])
    same = f"{tmp_path / 'again'} have the same rows as trajectories of {a}"
    assert found == f"members: trajectories of {same}"  # without seeds there is no explanation
    with open_storage(a) as storage:
        storage.copy_to(tmp_path / "copied")
    (found,) = messages([a, tmp_path / "copied"])
    assert f"{tmp_path / 'copied'}: expected rows that no other of these storages has" in found


def test_a_few_equal_trajectories_are_a_note(tmp_path: Path) -> None:
    rows = collected()
    first = rows[(rows["collector", "traj_ids"] == 0)]
    for name, each in (("a", rows), ("b", torch.cat([first, renumbered(first)]))):
        with MemmapStorage(tmp_path / name) as storage:
            storage.extend(each, ids="fresh")
    report = verify([tmp_path / "a", tmp_path / "b"])
    assert report.sound
    (note,) = report.notes
    assert (note.check, note.count) == ("members", 1)
    assert "trajectory 0" in str(note.places[0])


def test_runs_of_equal_seeds_are_likely_to_start_equally(tmp_path: Path) -> None:
    """The policies of both runs agree for 60 rows. Places have the numbers of each storage."""

    def policy(td: Any) -> Any:
        turn["calls"] += 1
        action = turn["later"] if turn["calls"] > 30 else 0
        return td.set("action", torch.full(td.batch_size, action))

    paths = [tmp_path / "other", tmp_path / "a", tmp_path / "b"]
    for path, seed, later in zip(paths, (9, 5, 5), (0, 0, 1), strict=True):
        turn = {"calls": 0, "later": later}
        options = {"num_envs": 2, "frames_per_batch": 60, "total_frames": 300, "seed": seed}
        with SyncCollector("CartPole-v1", policy, storage=path, **options) as collector:
            for _ in collector:
                pass
    report = verify(paths)
    assert report.sound
    (note,) = report.notes
    assert note.message == (
        f"trajectories of {paths[2]} have the same rows as trajectories of {paths[1]}; both have a "
        "run with the seed 5, so equal starts are likely"
    )
    with open_storage(paths[1]) as a, open_storage(paths[2]) as b:
        for place in note.places:
            assert place.row is not None
            assert place.trajectory is not None
            assert int(b[place.row]["collector", "traj_ids"]) == place.trajectory
            earlier = int(place.what.removeprefix("the same rows as trajectory ").split()[0])
            for key in ("observation", "action"):
                one, other = (
                    storage.get(storage.trajectories.rows_of(id), [key])[key]
                    for storage, id in ((a, earlier), (b, place.trajectory))
                )
                assert torch.equal(one, other)
        assert 0 < note.count < len(b.trajectories.table) / 2


def renumbered(rows: Any) -> Any:
    """Return the same rows with other ids and observations."""
    rows = rows.clone()
    rows["collector", "traj_ids"] += 3
    for key in ("observation", ("next", "observation")):
        rows[key] += 1
    return rows


def shard(index: int, of: int = 3, run: str = "r", asked: int = 90) -> dict[str, Any]:
    return {"index": index, "of": of, "run": run, "asked": asked}


def test_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [made(tmp_path / f"s-{i}", 100 * i, shard=shard(i)) for i in range(3)]
    assert messages(paths) == []
    with open_storage(paths) as union:
        assert isinstance(union.reader, UnionReader)
        found = union.reader.shards
        assert found is not None
        (run,) = found.runs
        assert (run.of, run.asked, run.rows, found.problems) == (3, 90, 90, [])
        union.copy_to(tmp_path / "all")
    assert main(["inspect", "--json", *map(str, paths)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["shards"]["complete"] is True
    assert [each["first_row"] for each in facts["members"]] == [0, 30, 60]

    assert messages(paths[:2]) == ["members: shards 2 of 3 are missing"]
    again = made(tmp_path / "again", 700, shard=shard(1))
    other = made(tmp_path / "other", 800, shard=shard(1, run="x"))
    plain = made(tmp_path / "plain", 900)
    assert messages([paths[0], plain, *paths[1:]]) == [f"members: {plain} is not a shard of run r"]
    assert messages([paths[0], paths[1], again, other, plain]) == [
        "members: run r: shards 2 of 3 are missing",
        f"members: run r: shard 1 of 3 occurs more than once: {paths[1]}, {again}",
        "members: run x: shards 0, 2 of 3 are missing",
        f"members: {plain} is not a shard",
    ]
    rest = [made(tmp_path / f"x-{i}", 1000 + 100 * i, shard=shard(i, run="x")) for i in (0, 2)]
    runs = [rest[0], *paths, other, rest[1]]  # each is complete, in any order
    assert messages(runs) == []
    assert main(["inspect", "--json", *map(str, runs)]) == 0
    facts = json.loads(capsys.readouterr().out)["shards"]
    assert (facts["complete"], [each["run"] for each in facts["runs"]]) == (True, ["x", "r"])
    short = made(tmp_path / "short", 600, rows=25, shard=shard(2))
    assert messages([*paths[:2], short]) == ["members: the shards have 85 rows, expected 90"]
    assert main(["inspect", str(tmp_path / "s-0"), str(again), str(plain)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "Shards of run r" in out
    assert "2 of 3, 60 rows of 90: not exactly all" in out
    assert "missing: 2" in out
    assert f"foreign: {plain}" in out


def test_shards_that_were_collected(tmp_path: Path) -> None:
    """Together, the shards equal the single run, by id and step, and their ids do not change."""
    for name, shard in (("one", None), ("s-0", "0/2"), ("s-1", "1/2")):
        options: Any = {} if shard is None else {"shard": shard}
        with SyncCollector(
            "CartPole-v1",
            num_envs=4,
            frames_per_batch=101,
            total_frames=101,
            seed=3,
            storage=tmp_path / name,
            **options,
        ) as collector:
            assert len(list(collector)) == 1
    shards = [tmp_path / "s-0", tmp_path / "s-1"]
    with open_storage(shards, ids="keep") as union:
        assert content_hash(union) == content_hash(tmp_path / "one")
        assert isinstance(union.reader, UnionReader)
        assert union.reader.shards is not None
        assert union.reader.shards.problems == []
    assert messages(shards) == []
    assert messages(shards[:1]) == ["members: shards 1 of 2 are missing"]


@pytest.mark.parametrize(
    "said",
    [None, 3, [], {"index": 0}, {**shard(0), "index": 5}, {**shard(0), "of": "3"}, shard(0, of=-1)],
)
def test_what_is_no_shard(tmp_path: Path, said: Any) -> None:
    path = made(tmp_path / "a", 0, shard={"run": "x"} if said is None else said)
    assert messages([path]) == []


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that read accept several paths or a pattern. A single path works as before."""
    a, b = made(tmp_path / "a", 0), made(tmp_path / "b", 100)
    assert main(["verify", str(a), str(b)]) == 0
    assert f"{a}, {b}: sound; 60 rows (tallyroll.union)" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "?"), "--quiet"]) == 0
    assert main(["inspect", str(tmp_path / "?")]) == 0
    assert "ids moved by" in capsys.readouterr().out
    assert main(["inspect", str(a)]) == 0
    assert "ids moved by" not in capsys.readouterr().out
    assert main(["verify", str(a), str(a)]) == 1
    assert "is given twice" in capsys.readouterr().out
    assert main(["inspect", str(a), str(a)]) == 1
    assert "is given twice" in capsys.readouterr().err
    with open_storage([a, b]) as union:
        union.copy_to(tmp_path / "all.zarr")
    assert diff([a, b], tmp_path / "all.zarr").same
    assert main(["diff", str(tmp_path / "?"), str(tmp_path / "all.zarr"), "--quiet"]) == 0
