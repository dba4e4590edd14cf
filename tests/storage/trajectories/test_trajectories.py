"""Compare `storage.trajectories` and `n_step` on real storages with a plain model of each lane."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import TensorDictReplayBuffer
from torchrl.objectives.value import TD0Estimator

from tallyroll.collector import SyncCollector
from tallyroll.storage import H5Storage, MemmapStorage, Schema, ZarrStorage, n_step, open_storage
from tallyroll.storage.errors import (
    ColumnsMissing,
    CorruptStorage,
    IndexOutOfRange,
    NoSlices,
    NotInitialised,
    RowsMismatch,
    StorageClosed,
    StorageFull,
    UnknownTrajectory,
)
from tallyroll.storage.files.lock import is_held
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.trajectories import index as trajectory_index
from tallyroll.storage.trajectories import mapping
from tallyroll.storage.trajectories.episodes import END_NAMES, Episodes

from lane_model import Model, models
from storage_contract import process, receive

NAMES = np.array(END_NAMES)


def fill(
    storage: MemmapStorage,
    model: Model,
    sizes: Sequence[int] = (7,),
    *,
    stop: int | None = None,
    then: Callable[[], Any] = lambda: None,
) -> MemmapStorage:
    """Write the missing rows of `model`, in batches of these sizes in turn."""
    stop, turn = len(model) if stop is None else stop, 0
    while (head := storage.head) < stop:
        size = min(sizes[turn % len(sizes)], stop - head, storage.ring or stop)
        storage.extend(model.rows(head, head + size))
        turn += 1
        then()
    return storage


def big(rows: int = 3000, lanes: int = 8, seed: int = 0) -> Model:
    return Model.random(np.random.default_rng(seed), rows=rows, lanes=lanes)


def ends_of(model: Model, *, open_from: int | None = None) -> list[str]:
    """Return how trajectories ended, without a writer, or with a writer from a row on."""
    assert model.terminated is not None
    found, lanes_last = [], {}
    for rows in model.trajectories().values():
        lanes_last[model.lane[rows[0]]] = rows[-1]
    for rows in model.trajectories().values():
        last = rows[-1]
        if model.ended(last):
            found.append("terminated" if model.terminated[last] else "truncated")
        else:
            is_last = lanes_last[model.lane[last]] == last
            goes_on = is_last and open_from is not None and last >= open_from
            found.append("open" if goes_on else "cut")
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


@pytest.fixture
def temporary() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder) / "rows"


# --- the mapping ----------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(models(), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.booleans())
def test_it_says_what_a_plain_model_says(model: Model, sizes: list[int], look: bool) -> None:
    with TemporaryDirectory() as folder, MemmapStorage(Path(folder) / "rows") as storage:
        then = (lambda: len(storage.trajectories)) if look else (lambda: None)
        found = fill(storage, model, sizes, then=then).trajectories
        every = model.trajectories()
        assert found.ids.tolist() == list(found) == list(every)
        assert len(found) == len(every)
        assert found.lengths.tolist() == [len(rows) for rows in every.values()]
        assert found.returns.tolist() == [model.rewards[rows].sum() for rows in every.values()]
        assert found.lanes.tolist() == [model.lane[rows[0]] for rows in every.values()]
        assert found.ends.tolist() == ends_of(model, open_from=0)
        assert found.whole.tolist() == [model.steps[rows[0]] == 0 for rows in every.values()]
        for (id, rows), (wanted, numbers) in zip(found.items(), every.items(), strict=True):
            assert (id, rows.batch_size) == (wanted, (len(numbers),))
            assert (rows == storage.get(numbers)).all()
            assert found.rows_of(id).tolist() == numbers
            assert (found[id] == rows).all()
        assert [len(rows) for rows in found.values()] == found.lengths.tolist()


@settings(max_examples=15, deadline=None)
@given(
    models(),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_ring_gives_what_is_left(model: Model, sizes: list[int], ring: int, early: bool) -> None:
    first = max(0, len(model) - ring)
    left = {
        id: kept
        for id, rows in model.trajectories().items()
        if (kept := [row for row in rows if row >= first])
    }
    with (
        TemporaryDirectory() as folder,
        MemmapStorage(Path(folder) / "rows", max_size=ring) as storage,
    ):
        fill(storage, model, sizes, stop=1)
        if early:  # the mapping is updated from here on
            assert len(storage.trajectories) == 1
        found = fill(storage, model, sizes).trajectories
        assert sorted(found.ids.tolist()) == sorted(left)
        whole = {id: rows == model.trajectories()[id] for id, rows in left.items()}
        for id, is_whole, length in zip(found, found.whole, found.lengths, strict=True):
            assert found.rows_of(id).tolist() == left[id]
            assert found[id]["observation"].flatten().tolist() == left[id]
            assert is_whole == (whole[id] and model.steps[left[id][0]] == 0)
            counted = model.trajectories()[id] if early else left[id]
            assert length == len(counted)


def test_trajectories_that_are_not_there() -> None:
    with TemporaryDirectory() as folder, MemmapStorage(Path(folder) / "rows") as storage:
        fill(storage, big(50))
        with pytest.raises(UnknownTrajectory, match="has no rows of trajectory 777"):
            storage.trajectories[777]
        with pytest.raises(KeyError):
            storage.trajectories.rows_of(-1)
        assert 777 not in storage.trajectories
        assert "text" not in storage.trajectories
        assert storage.trajectories.ids[0] in storage.trajectories
        assert storage.trajectories.get(777) is None
        lengths = storage.trajectories.lengths
        said = f"{len(lengths)} trajectories of {min(lengths)} to {max(lengths)} rows (mean "
        assert repr(storage.trajectories).startswith(f"Trajectories({said}")
        assert repr(storage.trajectories).endswith(f"), {storage!r})")


def test_a_repr_counts_few_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemmapStorage(path) as storage:
        assert repr(storage.trajectories) == f"Trajectories(0 trajectories, {storage!r})"
        fill(storage, big(50))
        head = storage.head
        monkeypatch.setattr(mapping, "_MOST_COUNTED", head - 1)
        said = f"Trajectories(len() counts them in {head} rows, {storage!r})"
        assert repr(storage.trajectories) == said
        assert storage.reader.trajectory_index.counted is None
        number = len(storage.trajectories)
        assert repr(storage.trajectories).startswith(f"Trajectories({number} trajectories of ")
    with open_storage(path) as storage:  # the saved table has all rows
        trajectories = storage.trajectories
        assert repr(trajectories).startswith(f"Trajectories({number} trajectories of ")
    assert repr(trajectories) == f"Trajectories({storage!r})"


def test_a_storage_without_rows_has_none(path: Path) -> None:
    with MemmapStorage(path) as storage:
        assert len(storage.trajectories) == 0
        assert list(storage.trajectories.items()) == []
        assert 0 not in storage.trajectories
        with pytest.raises(NoSlices, match="no rows yet"):
            storage.trajectories.sample_slices(1, 1)
        storage.extend(big(10).rows(0, 0))
        assert storage.trajectories.ids.tolist() == []
        assert list(storage.trajectories) == []
    assert not (path / "episodes.npy").exists()
    with pytest.raises(StorageClosed):
        len(storage.trajectories)


def test_columns_that_are_missing_are_named(path: Path) -> None:
    rows = big(20).rows()
    rows["collector"].pop("lane")
    rows.set(("collector", "step"), rows["collector", "step"].double())
    with MemmapStorage(path) as storage:
        storage.extend(rows)
        with pytest.raises(ColumnsMissing, match="no collector/step, no collector/lane"):
            len(storage.trajectories)
        with pytest.raises(ColumnsMissing, match="collector/lane"):
            storage.trajectories.sample_slices(1, 1)
    assert not (path / "episodes.npy").exists()


def test_columns_that_may_be_missing(path: Path) -> None:
    model = big(200)
    rows = model.rows().exclude(
        ("next", "reward"), ("next", "truncated"), ("collector", "policy_version")
    )
    with MemmapStorage(path) as storage:
        storage.extend(rows)
        table = storage.trajectories.table
    assert np.isnan(table["return"]).all()
    assert (table["version_first"] == -1).all()
    assert "truncated" not in set(NAMES[table["end"]])


def test_rewards_of_16_bits_and_of_several_kinds(path: Path) -> None:
    model = big(200)
    rows = model.rows()
    several = torch.stack([rows["next", "reward"][:, 0], torch.ones(200)], 1).bfloat16()
    rows.set(("next", "reward"), several)
    with MemmapStorage(path) as storage:
        returns = fill_with(storage, rows).trajectories.returns
    wanted = [
        several[numbers].double().sum(0).tolist() for numbers in model.trajectories().values()
    ]
    assert returns.tolist() == wanted


@pytest.mark.parametrize("agents", [2, 3])
def test_flags_of_several_agents_end_a_trajectory_together(path: Path, agents: int) -> None:
    model = big(200)
    rows = model.rows()
    for name in ("done", "terminated", "truncated"):
        flags = torch.zeros(200, agents, dtype=torch.bool)
        flags[:, -1:] = rows["next", name]
        rows.set(("next", name), flags)
    with MemmapStorage(path) as storage:
        table = fill_with(storage, rows).trajectories.table
    with MemmapStorage(path.parent / "plain") as storage:
        wanted = fill_with(storage, model.rows()).trajectories.table
    assert table["end"].tolist() == wanted["end"].tolist()
    assert table["length"].tolist() == wanted["length"].tolist()


def fill_with(storage: MemmapStorage, rows: TensorDict) -> MemmapStorage:
    storage.extend(rows)
    return storage


def test_an_unclosed_storage_goes_at_once(path: Path) -> None:
    storage = MemmapStorage(path)
    assert len(fill(storage, big(20)).trajectories) > 0
    with pytest.warns(ResourceWarning, match="unclosed storage"):
        del storage


def test_a_trajectory_of_a_storage_that_nobody_else_holds(path: Path) -> None:
    with MemmapStorage(path) as storage:
        fill(storage, big(50))
    assert open_storage(path).trajectories[0]["collector", "traj_ids"].unique().tolist() == [0]


# --- the table and its file -----------------------------------------------------------------------


def test_the_table_is_written_on_close_and_read_on_opening(path: Path) -> None:
    model = big()
    with MemmapStorage(path) as storage:
        fill(storage, model)
    written = np.load(path / "episodes.npy", allow_pickle=False)
    assert NAMES[written["end"]].tolist() == ends_of(model)
    with open_storage(path) as storage:
        np.testing.assert_array_equal(storage.trajectories.table, written)


def test_it_is_not_made_anew_on_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemmapStorage(path) as storage:
        fill(storage, big())
    before = (path / "episodes.npy").stat()
    seen = 0

    def count(self: Any, rows: Any, runs: Any = ()) -> None:
        nonlocal seen
        seen += len(rows.ids)
        extend(self, rows, runs)

    extend = Episodes.extend
    monkeypatch.setattr(Episodes, "extend", count)
    with open_storage(path, mode="append") as storage:
        assert len(storage.trajectories) > 0
    assert (path / "episodes.npy").stat().st_mtime_ns == before.st_mtime_ns
    assert seen == 0
    with open_storage(path, mode="append") as storage:
        storage.extend(big(10).rows(), ids="fresh")
        assert len(storage.trajectories) > 0
    assert seen == 10


def damages() -> dict[str, Callable[[Path], object]]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[300] ^= 1
        path.write_bytes(content)

    return {
        "missing": Path.unlink,
        "flipped": flip,
        "cut short": lambda path: path.write_bytes(path.read_bytes()[:100]),
        "empty": lambda path: path.write_bytes(b""),
        "a directory": lambda path: (path.unlink(), path.mkdir()),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_table_is_made_anew_from_the_rows(path: Path, damage: str) -> None:
    with MemmapStorage(path) as storage:
        expected = fill(storage, big()).trajectories.table
    expected["end"][expected["end"] == 0] = 3
    file = path / "episodes.npy"
    damages()[damage](file)
    with open_storage(path) as storage:
        np.testing.assert_array_equal(storage.trajectories.table, expected)
    if damage != "a directory":
        with open_storage(path, mode="append"):
            pass
        np.testing.assert_array_equal(np.load(file), expected)


@pytest.mark.parametrize("rows", [2000, 3000, 3500])
def test_a_table_of_other_rows_is_made_anew(path: Path, tmp_path: Path, rows: int) -> None:
    with MemmapStorage(path) as storage:
        fill(storage, big())
    expected = np.load(path / "episodes.npy")
    with MemmapStorage(tmp_path / "other") as storage:
        fill(storage, big(rows, lanes=9, seed=5))
    shutil.copy(tmp_path / "other" / "episodes.npy", path / "episodes.npy")
    with open_storage(path) as storage:
        np.testing.assert_array_equal(storage.trajectories.table, expected)


def test_a_table_that_cannot_be_written_closes_the_storage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise StorageFull("no space")

    storage = fill(MemmapStorage(path), big())
    monkeypatch.setattr(trajectory_index, "write_table", full)
    with pytest.raises(StorageFull, match="no space"):
        storage.close()
    monkeypatch.undo()
    assert not (path / "episodes.npy").exists()
    with open_storage(path, mode="append") as storage:
        assert storage.head == 3000
    assert (path / "episodes.npy").exists()


def test_lanes_that_cannot_be_keep_nobody_from_writing(path: Path) -> None:
    rows = big(100).rows()
    with MemmapStorage(path, max_size=60) as storage:
        storage.extend(rows[:10])
        assert len(storage.trajectories) > 0
        rows["collector", "lane"][20] = -5
        storage.extend(rows[10:50], ids="fresh")
        with pytest.raises(CorruptStorage, match="row 20 has lane -5"):
            len(storage.trajectories)
        storage.extend(rows[50:100], ids="fresh")
        assert len(storage.trajectories) > 0
        storage.extend(rows[10:50], ids="fresh")
    with open_storage(path) as storage:
        assert storage.head == 140


@settings(max_examples=12, deadline=None)
@given(models(), st.integers(0, 150), st.sampled_from([0, 30, 200]), st.booleans())
def test_runs_that_are_appended(model: Model, stop: int, ring: int, look: bool) -> None:
    stop = min(stop, len(model) - 1)
    runs = [{"lane_seeds": [11, 12, 13]}, {"lane_seeds": [21, 22, 23, 24, 25, 26]}]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        with MemmapStorage(path, max_size=ring or None) as storage:
            schema = Schema.of(model.rows())
            storage.initialise(schema, runs[0])
            fill(storage, model, stop=stop)
            if look:
                len(storage.trajectories)
        with open_storage(path, mode="append") as storage:
            storage.initialise(schema, runs[1])
            fill(storage, model)
            table = storage.trajectories.table
        with open_storage(path) as storage:
            closed = storage.trajectories.table
    first = max(0, len(model) - ring) if ring else 0
    rows = {i: r for i, r in model.trajectories().items() if r[-1] >= first}
    if not ring:
        assert closed["id"].tolist() == list(rows)
        assert closed["length"].tolist() == [len(r) for r in rows.values()]
        assert NAMES[table["end"]].tolist() == ends_of(model, open_from=stop)
        assert NAMES[closed["end"]].tolist() == ends_of(model)
        assert closed["reset_seed"].tolist() == seeds_of(model, [0, stop], runs)
    else:
        assert set(closed["id"].tolist()) == set(rows)
        wanted = dict(zip(model.trajectories(), seeds_of(model, [0, stop], runs), strict=True))
        for line in closed:
            assert line["reset_seed"] in (-1, wanted[line["id"]])


def seeds_of(model: Model, starts: list[int], runs: list[dict[str, list[int]]]) -> list[int]:
    found, seen = [], set()
    for rows in model.trajectories().values():
        run = max(i for i, start in enumerate(starts) if start <= rows[0])
        lane = int(model.lane[rows[0]])
        seeds = runs[run]["lane_seeds"]
        first = (run, lane) not in seen and model.steps[rows[0]] == 0 and lane < len(seeds)
        seen.add((run, lane))
        found.append(seeds[lane] if first else -1)
    return found


@pytest.mark.parametrize("name", ["rows", "rows.h5", "rows.zarr"])
def test_every_format_has_trajectories(tmp_path: Path, name: str) -> None:
    model = big()
    storage_class = {".h5": H5Storage, ".zarr": ZarrStorage}.get(Path(name).suffix, MemmapStorage)
    with storage_class(tmp_path / name, capacity=4000) as storage:
        for start in range(0, 3000, 100):
            storage.extend(model.rows(start, start + 100))
        check_slices(storage.trajectories.sample_slices(20, 6))
        check_n_steps(n_step(storage, torch.arange(0, 3000, 7), 3, 0.9), model, 3, 0.9)
        id = int(storage.trajectories.ids[-1])
        assert storage.trajectories.rows_of(id).tolist() == model.trajectories()[id]
        storage.finalize()
    with open_storage(tmp_path / name) as storage:
        assert storage.writer.files.episodes_path.exists()
        assert storage.trajectories.ends.tolist() == ends_of(model)
        np.testing.assert_array_equal(
            np.load(storage.writer.files.episodes_path), storage.trajectories.table
        )


def test_rows_of_a_collector_are_stored(path: Path) -> None:
    lanes, complete = 64, 0
    for run in range(2):
        with (
            MemmapStorage(path, mode="append" if run else "create") as storage,
            SyncCollector(
                "CartPole-v1",
                num_envs=lanes,
                frames_per_batch=lanes,
                total_frames=2000,
                storage=storage,
                seed=run,
            ) as collector,
        ):
            assert sum(len(batch) for batch in collector) == 2000
            complete += collector.ledger.episodes_complete
            seeds = storage.manifest["runs"][-1]["lane_seeds"]
            table = storage.trajectories.table
            check_slices(storage.trajectories.sample_slices(50, 8))
        first = table[table["first_row"] >= 2000 * run][:lanes]
        assert first["lane"].tolist() == list(range(lanes))
        assert first["reset_seed"].tolist() == seeds
        assert (table["reset_seed"] == -1).sum() == len(table) - lanes * (run + 1)
        assert table["length"].sum() == table["return"].sum() == 2000 * (run + 1)
        names = NAMES[table["end"]]
        assert np.isin(names, ("terminated", "truncated")).sum() == complete
        assert (names == "open").sum() == len(names) - complete - (names == "cut").sum() <= lanes
        assert run or "cut" not in names


# --- other processes ------------------------------------------------------------------------------


def write_on(connection: Connection, path: Path, seconds: float, ring: int) -> None:
    """Write the rows of a model again and again, with increasing ids and numbers."""
    model = big(2000, lanes=16)
    names = int(model.ids.max()) + 1
    names += -names % 16
    with MemmapStorage(path, max_size=ring or None) as storage:
        until, lap = None, 0
        while until is None or time.monotonic() < until:
            rows = model.rows()
            rows["collector", "traj_ids"] += lap * names
            rows["observation"] += lap * 2000
            for start in range(0, 2000, 50):
                storage.extend(rows[start : start + 50])
                if storage.head == 2 * (ring or 2000):
                    connection.send("full")
                    assert connection.poll(30)
                    assert connection.recv() == "go on"
                    until = time.monotonic() + seconds
            lap += 1
        connection.send("done")
        connection.recv()


@pytest.mark.parametrize("ring", [0, 3000])
def test_a_reader_beside_a_writer(path: Path, ring: int) -> None:
    with process(write_on, path, 1.0, ring) as (_, connection):
        assert receive(connection) == "full"
        with open_storage(path) as storage:
            trajectories, rounds = storage.trajectories, 0
            assert "open" in set(trajectories.ends)
            connection.send("go on")
            generator = torch.Generator().manual_seed(0)
            while not connection.poll():
                slices = trajectories.sample_slices(8, 6, generator)
                check_slices(slices)
                table = trajectories.table
                assert (np.diff(table["first_row"]) > 0).all()
                for id in table["id"][:: len(table) // 3 + 1].tolist():
                    if (rows := trajectories.get(id)) is not None:
                        assert set(rows["collector", "traj_ids"].tolist()) == {id}
                        assert (rows["collector", "step"].diff() == 1).all()
                        check_slices(rows[None], marked=False)
                found = n_step(storage, torch.randint(len(storage) - 200, (64,)), 3, 0.5)
                assert (found["steps_to_next_obs"] <= 3).all()
                rounds += 1
            assert rounds > 3
        receive(connection)
        connection.send("close")


def check_slices(slices: TensorDict, *, marked: bool = True) -> None:
    """Check that each slice has consecutive steps of one trajectory, as the writer wrote them."""
    ids, steps = slices["collector", "traj_ids"], slices["collector", "step"]
    assert (ids == ids[:, :1]).all()
    assert (steps.diff(dim=1) == 1).all()
    ended = slices["next", "terminated"] | slices["next", "truncated"]
    assert not ended[:, :-1].any()
    if marked:
        assert slices["next", "done"][:, -1].all()
        assert (slices["next", "done"][:, :-1] == ended[:, :-1]).all()
        assert (slices["collector", "cut"][:, -1] == ~ended[:, -1, 0]).all()
        assert not slices["collector", "cut"][:, :-1].any()


def test_a_killed_writer_leaves_trajectories_that_are_cut(path: Path) -> None:
    with process(write_on, path, 1.0, 0) as (child, connection):
        assert receive(connection) == "full"
        with open_storage(path) as storage:
            assert "open" in set(storage.trajectories.ends)
            child.kill()
            child.join(30)
            assert "open" not in set(storage.trajectories.ends)
            assert storage.trajectories.lengths.sum() == storage.head


def test_a_reader_that_looks_for_a_writer_keeps_nobody_out(path: Path) -> None:
    with MemmapStorage(path) as storage:
        fill(storage, big(50))
        assert is_held(storage.writer.files.inside, storage.writer.files.lock_path)
    assert not is_held(Inside(path), path / "nothing")
    with open(storage.writer.files.lock_path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.003, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        timer.start()
        with open_storage(path, mode="append"):
            timer.join()
        assert not is_held(storage.writer.files.inside, storage.writer.files.lock_path)


# --- slices ---------------------------------------------------------------------------------------


def test_slices_of_many_lanes_one_row_a_batch(path: Path) -> None:
    model = Model.random(np.random.default_rng(4), rows=20_000, lanes=64, mean_length=120, skip=0.0)
    with MemmapStorage(path) as storage:
        fill(storage, model, (64,))
        every = set(model.slices(50))
        slices = storage.trajectories.sample_slices(300, 50, torch.Generator().manual_seed(1))
    assert slices.batch_size == (300, 50)
    assert {tuple(s) for s in slices["observation"][..., 0].long().tolist()} <= every
    check_slices(slices)


def test_slices_of_rows_that_do_not_say_whether_they_are_done(path: Path) -> None:
    """No slice is marked if no column tells whether trajectories continue."""
    model = big(200)
    with MemmapStorage(path) as storage:
        rows = model.rows().exclude(("next", "done"))
        rows["next", "agents", "done"] = torch.zeros(200, 3, dtype=torch.bool)
        storage.extend(rows)
        slices = storage.trajectories.sample_slices(20, 4)
    assert ("next", "done") not in slices.keys(True)
    assert not slices["next", "agents", "done"].any()
    assert ("collector", "cut") not in slices.keys(True)
    number = slices["observation"][..., 0].long()
    want = model.rows()[number]
    assert (slices["next", "terminated"] == want["next", "terminated"]).all()
    assert (slices["collector", "step"].diff(dim=1) == 1).all()


@pytest.mark.parametrize("given", ["arrays", "tensors", "nonsense"])
def test_rows_that_a_ring_overwrites_are_counted_first(path: Path, given: str) -> None:
    """New rows may be of any kind. The table covers all rows from the first one on."""
    model = big(150)
    with MemmapStorage(path, max_size=50) as storage:
        assert storage.extend(model.rows(0, 40)).stop == len(storage)
        before = storage.trajectories.table
        storage.extend(model.rows(40, 50))
        if given == "nonsense":
            for wrong in (3, {("x",): 7}, {}, [1, 2]):
                with pytest.raises(RowsMismatch):
                    storage.extend(wrong)  # type: ignore[arg-type]
        for start in range(50, 150, 25):
            rows = model.rows(start, start + 25)
            if given == "tensors":
                storage.extend(rows)
            else:
                storage.extend(
                    {
                        key if isinstance(key, tuple) else (key,): leaf.numpy()
                        for key, leaf in rows.items(True, True)
                    }
                )
        table = storage.trajectories.table
    assert set(before["first_row"]) >= set(table["first_row"][table["first_row"] < 40])
    every = model.trajectories()
    assert [line["length"] for line in table] == [len(every[line["id"]]) for line in table]


def test_slices_repeat_with_the_seed(path: Path) -> None:
    with MemmapStorage(path) as storage:
        draw = fill(storage, big()).trajectories.sample_slices
        one, again = (draw(20, 5, torch.Generator().manual_seed(7)) for _ in range(2))
        other = draw(20, 5, torch.Generator().manual_seed(8))
    assert (one == again).all()
    assert not (one == other).all()


@pytest.mark.parametrize(("count", "length"), [(0, 5), (5, 0), (2.0, 5), (5, True)])
def test_slices_that_cannot_be(path: Path, count: Any, length: Any) -> None:
    with MemmapStorage(path) as storage, pytest.raises(ValueError, match="whole number above 0"):
        fill(storage, big(50)).trajectories.sample_slices(count, length)


# --- n steps --------------------------------------------------------------------------------------


def n_steps(model: Model, row: int, n: int, gamma: float) -> tuple[int, int, float]:
    """Return the last row used, the number of rows, and the discounted sum, from a plain loop."""
    used, total = 1, float(model.rewards[row])
    while used < n and not model.ended(row) and (after := model.next_of(row)) >= 0:
        row = after
        total += gamma**used * float(model.rewards[row])
        used += 1
    return row, used, total


def check_n_steps(found: TensorDict, model: Model, n: int, gamma: float) -> None:
    rows = found["observation"][..., 0].long()
    flat = found.reshape(-1)
    assert model.terminated is not None
    for i, row in enumerate(rows.flatten().tolist()):
        last, used, total = n_steps(model, row, n, gamma)
        assert flat["next", "reward"][i].item() == pytest.approx(total, rel=1e-6)
        assert flat["next", "original_reward"][i].item() == model.rewards[row]
        assert flat["next", "observation"][i].item() == last + 0.5
        assert flat["next", "terminated"][i].item() == model.terminated[last]
        assert flat["next", "done"][i].item() == model.ended(last)
        assert flat["steps_to_next_obs"][i].tolist() == [used]
        assert flat["gamma"][i].item() == pytest.approx(gamma**used)
        assert flat["collector", "step"][i].item() == model.steps[row]


@settings(max_examples=15, deadline=None)
@given(
    models(),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from([0, 10, 60]),
)
def test_n_steps_are_those_of_a_plain_model(
    model: Model, sizes: list[int], n: int, ring: int
) -> None:
    with (
        TemporaryDirectory() as folder,
        MemmapStorage(Path(folder) / "rows", max_size=ring or None) as storage,
    ):
        fill(storage, model, sizes)
        found = n_step(storage, torch.arange(len(storage)), n, 0.9)
        assert (found["observation"] == storage.get(slice(None))["observation"]).all()
        check_n_steps(found, model, n, 0.9)


def test_three_steps_of_64_lanes_one_row_a_batch(path: Path) -> None:
    model = Model.random(np.random.default_rng(4), rows=20_000, lanes=64, skip=0.0)
    with MemmapStorage(path, max_size=5000) as storage:
        fill(storage, model, (64,))
        index = torch.randint(5000, (20, 50), generator=torch.Generator().manual_seed(0))
        found = n_step(storage, index, 3, 0.99)
    assert found.batch_size == (20, 50)
    check_n_steps(found, model, 3, 0.99)


def test_n_steps_of_a_sampled_batch(path: Path) -> None:
    model = big()
    with MemmapStorage(path) as storage:
        fill(storage, model)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=128)
        batch = buffer.sample()
        batch["_weight"] = torch.rand(128)
        found = n_step(storage, batch, 4, 0.95)
    check_n_steps(found, model, 4, 0.95)
    assert (found["index"] == batch["index"]).all()
    assert (found["_weight"] == batch["_weight"]).all()
    assert (found["observation"] == batch["observation"]).all()


def test_the_validity_of_the_next_observation_goes_with_it(path: Path) -> None:
    model = big(200)
    rows = model.rows()
    rows["collector", "next_valid"] = torch.arange(200) % 3 > 0
    with MemmapStorage(path) as storage:
        found = n_step(fill_with(storage, rows), slice(None), 3, 1.0)
    last = [n_steps(model, row, 3, 1.0)[0] for row in range(200)]
    assert found["collector", "next_valid"].tolist() == [row % 3 > 0 for row in last]


def test_torchrl_bootstraps_by_as_many_steps(path: Path) -> None:
    model, gamma = big(500), 0.9
    with MemmapStorage(path) as storage:
        found = n_step(fill(storage, model), slice(None), 3, gamma)
    value = TensorDictModule(lambda seen: seen / 100, ["observation"], ["state_value"])
    found = found.apply(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf)
    estimator = TD0Estimator(gamma=gamma, value_network=value)
    targets = estimator.value_estimate(found)
    assert model.terminated is not None
    for row, target in enumerate(targets.flatten().tolist()):
        last, used, total = n_steps(model, row, 3, gamma)
        bootstrap = 0 if model.terminated[last] else gamma**used * (last + 0.5) / 100
        assert target == pytest.approx(total + bootstrap, abs=1e-4)


def test_whole_rewards_become_floats(path: Path) -> None:
    rows = big(50).rows()
    rows["next", "reward"] = torch.ones(50, 1, dtype=torch.int64)
    with MemmapStorage(path) as storage:
        found = n_step(fill_with(storage, rows), [0], 3, 0.5)
    assert found["next", "reward"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rewards_keep_their_precision(path: Path, dtype: torch.dtype) -> None:
    """Only float64 can represent the differences between the rewards."""
    model = big(50)
    rows, rewards = model.rows(), torch.from_numpy(model.rewards + 2.0**-40).to(dtype)
    rows["next", "reward"] = rewards[:, None]
    with MemmapStorage(path) as storage:
        found = n_step(fill_with(storage, rows), slice(None), 3, 0.5)
    assert found["next", "reward"].dtype == found["next", "original_reward"].dtype == dtype
    assert found["gamma"].dtype == dtype
    total = torch.zeros(50, dtype=torch.float64)
    for row in range(50):
        at, (_, used, _) = row, n_steps(model, row, 3, 0.5)
        for step in range(used):
            total[row] += 0.5**step * rewards[at].item()
            at = model.next_of(at)
    assert (found["next", "reward"][:, 0] == total.to(dtype)).all()


@pytest.mark.parametrize(
    ("n", "gamma", "message"),
    [(0, 0.5, "n: expected"), (1.0, 0.5, "n: expected"), (1, 1.5, "gamma"), (1, -1, "g")],
)
def test_n_steps_that_cannot_be(path: Path, n: Any, gamma: float, message: str) -> None:
    with MemmapStorage(path) as storage, pytest.raises(ValueError, match=message):
        n_step(fill(storage, big(20)), [0], n, gamma)


def test_rows_that_n_steps_are_not_made_of(path: Path) -> None:
    with MemmapStorage(path) as storage:
        with pytest.raises(NotInitialised):
            n_step(storage, [0], 1, 1.0)
        fill(storage, big(20))
        with pytest.raises(IndexOutOfRange):
            n_step(storage, [20], 1, 1.0)
        with pytest.raises(ValueError, match='expected a batch with "index"'):
            n_step(storage, storage.get([1]), 1, 1.0)
        assert n_step(storage, slice(0, 0), 2, 1.0).batch_size == (0,)
        assert n_step(storage, 3, 2, 1.0).batch_size == ()
        assert n_step(storage, -1, 2, 1.0)["observation"].item() == 19
    with MemmapStorage(path.with_name("bare")) as storage:
        storage.extend(big(20).rows().exclude(("next", "reward")))
        with pytest.raises(ColumnsMissing, match="no next/reward"):
            n_step(storage, [0], 1, 1.0)
