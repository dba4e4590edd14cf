"""Compare the table of episodes and its file with a plain loop over the rows."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.storage.errors import DamagedTable, NotWritable
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.trajectories.episode_file import read_table, write_table
from tallyroll.storage.trajectories.episodes import (
    END_CUT,
    END_OPEN,
    END_TERMINATED,
    END_TRUNCATED,
    EpisodeRows,
    Episodes,
    RunSeeds,
    runs_of,
    table_dtype,
    what_is_wrong,
)

from lane_model import Model, models


def rows_of(model: Model, start: int, stop: int) -> EpisodeRows:
    assert model.terminated is not None
    assert model.truncated is not None
    part = slice(start, stop)
    return EpisodeRows(
        start,
        model.ids[part],
        model.steps[part],
        model.lane[part],
        model.terminated[part],
        model.truncated[part],
        model.rewards[part],
        np.arange(len(model))[part] // 10,
        np.full(len(model), -1)[part],
    )


def counted(
    model: Model,
    sizes: Sequence[int] = (7,),
    *,
    episodes: Episodes | None = None,
    runs: Sequence[RunSeeds] = (),
    stop: int | None = None,
    start: int = 0,
) -> Episodes:
    episodes = Episodes() if episodes is None else episodes
    at, stop = max(episodes.seen, start), len(model) if stop is None else stop
    for turn in range(stop):
        if at < stop:
            size = min(sizes[turn % len(sizes)], stop - at)
            episodes.extend(rows_of(model, at, at + size), runs)
            at += size
    return episodes


def expected(model: Model, since: int = 0, runs: Sequence[RunSeeds] = ()) -> list[dict[str, Any]]:
    """Return the lines of the trajectories, counted from row `since` on, without a writer."""
    assert model.terminated is not None
    lines, seeded = [], set()
    left = [[row for row in rows if row >= since] for rows in model.trajectories().values()]
    for rows in sorted(filter(None, left)):
        id, first, last = int(model.ids[rows[0]]), rows[0], rows[-1]
        lane, seed = int(model.lane[first]), -1
        run = max((i for i, run in enumerate(runs) if run.first_row <= first), default=None)
        if run is not None and (run, lane) not in seeded and runs[run].first_row >= since:
            seeded.add((run, lane))
            if model.steps[first] == 0 and lane < len(runs[run].lane_seeds):
                seed = int(runs[run].lane_seeds[lane])
        ended = END_TERMINATED if model.terminated[last] else END_TRUNCATED
        lines.append(
            {
                "id": id,
                "lane": lane,
                "first_row": first,
                "first_step": int(model.steps[first]),
                "last_row": last,
                "length": len(rows),
                "return": float(model.rewards[rows].sum()),
                "end": ended if model.ended(last) else END_CUT,
                "version_first": first // 10,
                "version_last": last // 10,
                "reset_seed": seed,
            }
        )
    return lines


def lines_of(table: np.ndarray) -> list[dict[str, Any]]:
    names = table.dtype.names or ()
    return [dict(zip(names, line.tolist(), strict=True)) for line in table]


def test_no_later_trajectory_of_a_forgotten_lane_gets_a_seed() -> None:
    """A ring's table, when it is read again, lacks lanes whose rows are all overwritten."""
    lane = np.array([1] * 3 + [0] * 30 + [1] * 2)
    ids = np.array([1] * 3 + [0] * 30 + [3] * 2)
    steps = np.array([*range(3), *range(30), *range(2)])
    flags = np.zeros(len(ids), np.bool_)
    flags[2] = True
    model, runs = Model(ids, steps, lane, flags, ~flags & False), [RunSeeds(0, np.array([11, 22]))]
    for again in (False, True):
        episodes = Episodes(20)
        counted(model, episodes=episodes, runs=runs, stop=33)
        if again:
            lines = episodes.table(13)
            assert lines["id"].tolist() == [0]
            episodes = Episodes(20)
            episodes.resume(lines)
        counted(model, episodes=episodes, runs=runs)
        seeds = {line["id"]: line["reset_seed"] for line in lines_of(episodes.table(15))}
        assert seeds == {0: 11, 3: -1}


def test_no_trajectory_without_its_first_rows_gets_a_seed() -> None:
    ids, lane, flags = np.array([0, 1, 0, 1]), np.array([0, 1, 0, 1]), np.zeros(4, np.bool_)
    model = Model(ids, np.array([0, 3, 1, 4]), lane, flags, flags)
    table = counted(model, runs=[RunSeeds(0, np.array([11, 22]))]).table()
    assert [(line["id"], line["first_step"], line["reset_seed"]) for line in lines_of(table)] == [
        (0, 0, 11), (1, 3, -1)
    ]  # fmt: skip


sizes_of_chunks = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(models(), sizes_of_chunks)
def test_the_table_is_that_of_a_plain_model(model: Model, sizes: list[int]) -> None:
    table = counted(model, sizes).table()
    assert lines_of(table) == expected(model)
    assert what_is_wrong(table, len(model)) is None


@settings(max_examples=60, deadline=None)
@given(models(), sizes_of_chunks, st.lists(st.integers(0, 150), max_size=3), st.integers(0, 7))
def test_the_first_trajectory_of_each_lane_in_a_run_has_its_seed(
    model: Model, sizes: list[int], starts: list[int], seeds: int
) -> None:
    runs = [RunSeeds(row, 100 * row + np.arange(seeds)) for row in sorted({0, *starts})]
    assert lines_of(counted(model, sizes, runs=runs).table()) == expected(model, runs=runs)


@settings(max_examples=60, deadline=None)
@given(models(), sizes_of_chunks, st.integers(1, 60))
def test_a_ring_keeps_what_has_rows_left(model: Model, sizes: list[int], ring: int) -> None:
    sizes = [min(size, ring) for size in sizes]
    first = max(0, len(model) - ring)
    kept = [line for line in expected(model) if line["last_row"] >= first]
    assert lines_of(counted(model, sizes, episodes=Episodes(ring)).table(first)) == kept


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(0, 150), st.integers(0, 150))
def test_counting_begins_anew_where_rows_were_lost(model: Model, stop: int, more: int) -> None:
    runs = [RunSeeds(0, np.arange(6)), RunSeeds(len(model) // 2, np.arange(10, 16))]
    stop = min(stop, len(model))
    since = min(stop + more, len(model))
    episodes = counted(model, episodes=Episodes(200), runs=runs, stop=stop)
    counted(model, episodes=episodes, runs=runs, start=since)
    if stop == since:
        since = 0
    if since < len(model):
        assert lines_of(episodes.table()) == expected(model, since, runs)


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(0, 150), sizes_of_chunks, st.booleans())
def test_it_goes_on_behind_a_table_that_was_written(
    model: Model, stop: int, sizes: list[int], active: bool
) -> None:
    runs = [RunSeeds(0, np.arange(6)), RunSeeds(len(model) // 2, np.arange(10, 16))]
    before = counted(model, sizes, runs=runs, stop=min(stop, len(model)))
    episodes = Episodes()
    episodes.resume(before.table(active_from=0 if active else None))
    assert episodes.seen == before.seen
    assert lines_of(counted(model, sizes, episodes=episodes, runs=runs).table()) == expected(
        model, runs=runs
    )


def test_the_last_trajectory_is_open_while_a_writer_writes() -> None:
    # Lane 0 ends, and lanes 1 and 2 do not. Lane 2 stopped before the last run.
    model = Model(
        ids=np.array([0, 1, 2, 0, 1]),
        steps=np.array([0, 0, 0, 1, 1]),
        lane=np.array([0, 1, 2, 0, 1]),
        terminated=np.array([0, 0, 0, 1, 0], bool),
        truncated=np.zeros(5, bool),
    )
    episodes = counted(model)
    assert episodes.table()["end"].tolist() == [END_TERMINATED, END_CUT, END_CUT]
    assert episodes.table(active_from=0)["end"].tolist() == [END_TERMINATED, END_OPEN, END_OPEN]
    assert episodes.table(active_from=3)["end"].tolist() == [END_TERMINATED, END_OPEN, END_CUT]


def test_both_flags_say_terminated() -> None:
    both = Model(*(np.zeros(1, int) for _ in range(3)), np.ones(1, bool), np.ones(1, bool))
    assert counted(both).table()["end"].tolist() == [END_TERMINATED]


def test_several_rewards_give_several_returns() -> None:
    whose = (np.array(c) for c in ([5, 6, 5], [0, 0, 1], [0, 1, 0]))
    flags, reward = np.zeros(3, bool), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    episodes = Episodes(reward_shape=(2,))
    episodes.extend(EpisodeRows(0, *whose, flags, flags, reward, *np.zeros((2, 3), int)))
    assert episodes.table()["return"].tolist() == [[6.0, 8.0], [3.0, 4.0]]
    assert table_dtype((1,)) == table_dtype(()) == table_dtype((1, 1))


def test_lines_of_a_ring_do_not_pile_up() -> None:
    rows = 20_000
    number = np.arange(rows)
    model = Model(number, number * 0, number % 3, number >= 0, number < 0)
    episodes = counted(model, (50,), episodes=Episodes(100))
    assert len(episodes._lines) < 1000
    assert lines_of(episodes.table(rows - 100)) == expected(model)[-100:]


@pytest.mark.parametrize("seeds", [None, 5, [1.5], ["1"], [-1], [2**63], [True], {}])
def test_seeds_that_are_none_are_left_out(seeds: Any) -> None:
    (run,) = runs_of([{"first_row": 3, "lane_seeds": seeds}])
    assert (run.first_row, run.lane_seeds.tolist()) == (3, [])


# --- the file -------------------------------------------------------------------------------------


@pytest.fixture
def table() -> np.ndarray:
    return counted(Model.random(np.random.default_rng(1), rows=100, lanes=3)).table()


@pytest.fixture
def path(tmp_path: Path, table: np.ndarray) -> Path:
    write_table(Inside(tmp_path), tmp_path / "episodes.npy", table)
    return tmp_path / "episodes.npy"


def read(path: Path, head: int = 100) -> np.ndarray | None:
    return read_table(Inside(path.parent), path, table_dtype(), head)


def test_written_rows_are_read(path: Path, table: np.ndarray) -> None:
    np.testing.assert_array_equal(read(path), table)
    assert os.listdir(path.parent) == [path.name]


def test_numpy_opens_it(path: Path, table: np.ndarray) -> None:
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), table)


def test_no_file_is_no_table(tmp_path: Path) -> None:
    assert read(tmp_path / "episodes.npy") is None


def test_every_flipped_bit_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(bytes(damaged))
        with pytest.raises(DamagedTable, match="Delete the file"):
            read(path)


@pytest.mark.parametrize("size", [0, 5, 12, 200])
def test_a_file_cut_short_is_noticed(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedTable, match="checksum"):
        read(path)


def with_checksum(content: bytes) -> bytes:
    return content + b"tallyCRC" + zlib.crc32(content).to_bytes(4, "little")


def test_another_array_is_noticed(path: Path, table: np.ndarray) -> None:
    write_table(Inside(path.parent), path, table[["id", "lane"]])
    with pytest.raises(DamagedTable, match="fields"):
        read(path)
    write_table(Inside(path.parent), path, table[None])
    with pytest.raises(DamagedTable, match="shape"):
        read(path)
    path.write_bytes(with_checksum(b"text"))
    with pytest.raises(DamagedTable, match=r"not an \.npy file"):
        read(path)


def test_nothing_is_unpickled(path: Path) -> None:
    objects = np.array([{}], dtype=object)
    np.save(path, objects, allow_pickle=True)
    path.write_bytes(with_checksum(path.read_bytes()))
    with pytest.raises(DamagedTable, match="fields"):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_row": 99}, "order of first rows"),
        ({"last_row": 100}, "beyond the 100 that are stored"),
        ({"last_row": -1}, "ends before it begins"),
        ({"length": 0}, "length"),
        ({"length": 101}, "length"),
        ({"lane": -1}, "lane"),
        ({"lane": 2**30}, "lane"),
        ({"end": 4}, "an end has an unknown value"),
        ({"first_row": -1}, "before the first row"),
    ],
)
def test_lines_that_cannot_be_are_noticed(
    path: Path, table: np.ndarray, change: dict[str, int], message: str
) -> None:
    for name, value in change.items():
        table[name][0] = value
    write_table(Inside(path.parent), path, table)
    with pytest.raises(DamagedTable, match=message):
        read(path)


def test_a_table_from_the_future_is_noticed(path: Path) -> None:
    with pytest.raises(DamagedTable, match="beyond the 50"):
        read(path, 50)


def test_a_table_that_cannot_be_written_leaves_the_old_one(
    path: Path, table: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object, **descriptors: int) -> None:
        raise PermissionError(13, "Permission denied")

    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(NotWritable):
        write_table(Inside(path.parent), path, table[:1])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
