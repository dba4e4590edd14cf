"""Test that `verify` locates every kind of damage, and finds nothing in sound storages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torchrl.data import ReplayBuffer
from torchrl.envs import GymWrapper

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.storage import Finding, MemmapStorage, Report, StorageMissing, open_storage, verify
from tallyroll.storage.errors import NotAStorage
from tallyroll.storage.ext.verification import row_checks
from tallyroll.storage.ext.verification.findings import PLACES, Findings
from tallyroll.storage.ext.verification.lane_checks import CheckedRows, LaneChecks
from tallyroll.storage.ext.verification.storage_checks import CHECKS
from tallyroll.storage.ext.verification.value_checks import zero_rows
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.trajectories.episode_file import read_table, write_table
from tallyroll.storage.trajectories.episodes import table_dtype

from oracles import KINDS, Kind, OracleEnv, OracleTorchEnv, make_oracle_vec

SUFFIXES = ("", ".h5", ".zarr")
IDS, STEP, LANE = (("collector", name) for name in ("traj_ids", "step", "lane"))
LENGTHS = (5, 1, 9, 2, 30)
ROWS = 1000


def collect(env: Any, path: Path, frames: int | None = 333, **kwargs: Any) -> Path:
    """Collect a complete run."""
    kwargs = {"frames_per_batch": 50, "seed": 3, "total_frames": frames, "storage": path} | kwargs
    with SyncCollector(env, **kwargs) as collector:
        for _ in collector:
            pass
    return path


def assert_sound(path: Path) -> Report:
    """Check that there are no findings."""
    report = verify(path)
    assert report.findings == (), "\n".join(map(told, report.findings))
    assert report.sound
    return report


def told(finding: Finding) -> str:
    return "\n    ".join([str(finding), *map(str, finding.places)])


# --- sound storages -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_run_is_sound(tmp_path: Path, suffix: str, mode: AutoresetMode) -> None:
    vector = make_oracle_vec(3, LENGTHS, mode=mode, ends="mixed")
    path = collect(GymnasiumVectorEnv(vector), tmp_path / f"data{suffix}")
    report = assert_sound(path)
    assert report.rows == 333
    assert set(report.skipped) <= {
        "checksums",
        "content",
        "episodes",
        "events",
        "index",
        "overlays",
        "statistics",
    }
    assert set(report.checked) | set(report.skipped) == set(CHECKS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_observation_is_sound(tmp_path: Path, kind: Kind) -> None:
    lengths = (5, 1, 9, 2)
    vector = make_oracle_vec(2, lengths, kind=kind, ends="both")
    assert_sound(collect(GymnasiumVectorEnv(vector), tmp_path / "data", 40))


@pytest.mark.parametrize(
    "options",
    [
        {"surplus": "discard"},
        {"reset_at_each_iter": True},
        {"max_frames_per_traj": 7},
        {"init_random_frames": 60},
        {"frames_per_batch": 1, "total_frames": 20},
        {"total_episodes": 9, "total_frames": None},
    ],
)
def test_every_way_to_collect_is_sound(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_sound(collect("CartPole-v1", tmp_path / "data", num_envs=3, **options))


def test_masks_and_parts_of_lanes_are_sound(tmp_path: Path) -> None:
    vector = make_oracle_vec(3, LENGTHS, mode=AutoresetMode.NEXT_STEP)
    env = GymnasiumVectorEnv(vector, reset_slots="avoid")
    assert_sound(collect(env, tmp_path / "avoid"))
    assert_sound(collect("CartPole-v1", tmp_path / "part", num_envs=3, surplus="never_step"))
    assert_sound(collect(OracleTorchEnv(3, LENGTHS), tmp_path / "torch"))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_runs_appended_resumed_and_finalized_are_sound(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    collect("CartPole-v1", path, num_envs=3)
    collect("CartPole-v1", path, num_envs=3, frames=500, seed=None, resume=True)
    with open_storage(path, mode="append") as storage:
        collect("CartPole-v1", storage, num_envs=5, frames=77)  # type: ignore[arg-type]
    assert assert_sound(path).rows == 577
    with open_storage(path, mode="append") as storage:
        storage.finalize()
    report = assert_sound(path)
    assert "checksums" in report.checked
    with open_storage(path, mode="append") as storage:
        collect("CartPole-v1", storage, num_envs=1, frames=20)  # type: ignore[arg-type]
    assert assert_sound(path).rows == 597


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_run_that_ended_before_its_first_row_is_sound(tmp_path: Path, suffix: str) -> None:
    """The run's record is the newest one, after the rows of the previous run."""
    path = collect("CartPole-v1", tmp_path / f"data{suffix}")

    made = {"frames_per_batch": 10, "total_frames": 20}
    with (
        open_storage(path, mode="append", capacity=400) as storage,
        SyncCollector("CartPole-v1", storage=storage, **made),
    ):
        pass
    with open_storage(path) as storage:
        assert storage.record is not None
        assert json.loads(storage.record[1])["first_row_of_run"] == storage.head == 333
        assert len(storage.manifest["runs"]) == 2
    assert assert_sound(path).rows == 333


@pytest.mark.parametrize("frames", [50, 99, 100, 101, 333, 1234])
def test_rings_are_sound(tmp_path: Path, frames: int) -> None:
    path = tmp_path / "data"
    for seed in (0, 1):
        mode = "append" if seed else "create"
        with MemmapStorage(path, mode=mode, max_size=100) as storage:
            collect("CartPole-v1", storage, frames, num_envs=4, seed=seed, frames_per_batch=30)  # type: ignore[arg-type]
        assert assert_sound(path).rows == min((seed + 1) * frames, 100)


def test_a_state_that_is_loaded_is_sound(tmp_path: Path) -> None:
    made = {"num_envs": 2, "frames_per_batch": 10, "total_frames": 100}
    with SyncCollector("CartPole-v1", seed=0, storage=tmp_path / "one", **made) as first:
        next(iter(first))
        state = first.state_dict()
    with SyncCollector("CartPole-v1", storage=tmp_path / "two", **made) as second:
        second.load_state_dict(state)
        for _ in second:
            pass
    assert assert_sound(tmp_path / "two").rows == 90
    with open_storage(tmp_path / "two") as storage:
        last = storage.manifest["runs"][-1]
    assert (last["incarnation"], last["seed"], len(last["lane_seeds"])) == (1, 0, 2)


def test_final_observations_that_are_marked_as_lost_are_sound(tmp_path: Path) -> None:
    def make() -> GymWrapper:
        env = gymnasium.wrappers.Autoreset(OracleEnv(0, LENGTHS))
        return GymWrapper(env, auto_reset=True, categorical_action_encoding=True)

    path = collect(make, tmp_path / "data", 100)
    assert_sound(path)
    with open_storage(path) as storage:
        assert not storage.column(("collector", "next_valid")).all()


def test_zero_is_an_observation_like_others_where_episodes_come_to_it(tmp_path: Path) -> None:
    """Positions on a line start and end at zero, and may stay there."""
    position = [0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2]
    assert_sound(write(tmp_path / "line", *episodes(position, [0, 0, 0, 1], [2, 1, 0])))
    assert_sound(write(tmp_path / "zero", *episodes([0, 0, 0], [0, 0])))


def test_zeros_at_ends_are_sound_where_episodes_leave_zero_midway(tmp_path: Path) -> None:
    """The last storage has two findings, in episodes that reach zero only at the end."""
    assert_sound(write(tmp_path / "one", *episodes([1, 2, 0], [0, 1, 2], [3, 0])))
    assert_sound(write(tmp_path / "same", *episodes([0, 1, 0])))
    assert_sound(write(tmp_path / "comes", *episodes([1, 0, 0], [2, 0])))
    lost = episodes([11, 12, 0], [13, 11, 12], [13, 0], [11, 12, 13, 11, 12, 13, 12])
    report = verify(write(tmp_path / "never", *lost))
    (found,) = (each for each in report.findings if each.check == "finals")
    assert found.count == 2
    assert [place.row for place in found.places] == [1, 4]


BOARD, MASK = ("player", "observation"), ("player", "action_mask")


def games(mask_dtype: Any, board: int = 1, masks: tuple[int, int] = (1, 0)) -> list[dict[Any, Any]]:
    """Return games whose mask of legal moves changes from ``masks[0]`` to ``masks[1]`` at the end.

    The players fill the board, whose last values are multiplied by ``board``.
    """
    rows = episodes([1, 2, 3], [1, 2], [1, 3, 2, 4], [1, 2, 3, 1, 2])
    for game in rows:
        steps, observation = len(game[STEP]), game.pop(("observation",))
        del game["next", "observation"]
        last = np.arange(steps) == steps - 1
        filled = observation.astype(np.int8) + 20
        game[BOARD], game[("next", *BOARD)] = filled, np.roll(filled, -1, 0)
        game[("next", *BOARD)][-1] = 25 * board
        legal = np.full((steps, 3), masks[0]).astype(mask_dtype)
        game[MASK], game[("next", *MASK)] = legal, legal.copy()
        game[("next", *MASK)][last] = masks[1]
    return rows


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int8, np.int64])
def test_masks_that_are_zero_at_ends_are_sound(tmp_path: Path, dtype: Any) -> None:
    """PettingZoo's games do this: no player has a legal move at the end."""
    assert_sound(write(tmp_path / "data", *games(dtype)))


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64])
def test_finals_that_are_lost_are_found_beside_a_mask(tmp_path: Path, dtype: Any) -> None:
    report = verify(write(tmp_path / "lost", *games(dtype, board=0)))
    found = [str(each) for each in report.findings if each.check == "finals"]
    columns = ["player/observation"] + ["player/action_mask"] * (dtype != np.bool_)
    assert [any(column in each for each in found) for column in columns] == [True] * len(columns)
    assert len(found) == len(columns)


def test_numbers_that_are_zero_at_ends_are_found_beside_others(tmp_path: Path) -> None:
    """If values are more than flags, one part may be lost alone."""
    for dtype in (np.int8, np.float32):
        report = verify(write(tmp_path / np.dtype(dtype).name, *games(dtype, masks=(2, 0))))
        (found,) = (each for each in report.findings if each.check == "finals")
        assert "player/action_mask is all zero at ends" in str(found)


@pytest.mark.parametrize(("zeros", "sound"), [(2, True), (6, False)])
def test_a_few_whole_numbers_may_all_be_zero_by_chance(
    tmp_path: Path, zeros: int, sound: bool
) -> None:
    """Two of sixteen ends may be zero, but not six of them."""
    rows = [game for _ in range(4) for game in games(np.int8, board=1, masks=(2, 2))]
    for number, game in enumerate(rows):
        game["collector", "traj_ids"][:] = number
        game[("next", *BOARD)][-1] *= number >= zeros
    report = verify(write(tmp_path / "data", *rows))
    found = [str(each) for each in report.findings]
    assert [each for each in found if "is all zero at ends" not in each] == []
    assert report.sound == sound


# --- storages without a collector -----------------------------------------------------------------


def test_wrong_steps_of_two_lanes_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are adjacent in the order of lanes, and the second seems to follow the first."""
    monkeypatch.setattr(row_checks, "_CHUNK_ROWS", 2)
    one, other = episodes([1, 2, 3], [4, 5, 6])
    other[LANE][:] = 1
    one[STEP][:], other[STEP][:] = [0, 7], [0, 2]
    rows = {key: np.stack([one[key], other[key]], 1).reshape(4, *one[key].shape[1:]) for key in one}
    assert rows_named(verify(write(tmp_path / "data", rows)), "steps") == [2, 3]


def episodes(*walks: list[int]) -> list[dict[Any, np.ndarray]]:
    """Return rows of episodes that walk along these positions. Each ends at its last one."""
    rows = []
    for number, walk in enumerate(walks):
        steps = len(walk) - 1
        place = np.array([[x, 2 * x] for x in walk], np.float32)
        end = np.arange(steps) == steps - 1
        rows.append(
            {
                ("observation",): place[:-1],
                ("next", "observation"): place[1:],
                ("next", "reward"): np.ones((steps, 1), np.float32),
                ("next", "done"): end[:, None],
                ("next", "terminated"): end[:, None],
                ("next", "truncated"): np.zeros((steps, 1), np.bool_),
                IDS: np.full(steps, number),
                STEP: np.arange(steps),
                LANE: np.zeros(steps, np.int32),
            }
        )
    return rows


def write(path: Path, *batches: dict[Any, np.ndarray]) -> Path:
    """Write a storage of these rows."""
    with MemmapStorage(path) as storage:
        for batch in batches:
            storage.extend(batch, ids="fresh")  # stored unchanged, even if they are wrong
    return path


def test_checks_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    report = assert_sound(write(tmp_path / "data", {("x",): np.arange(10.0)}))
    assert report.checked == ("files", "metadata", "runs", "nan", "zeros")
    assert report.skipped["ids"] == "there is no column collector/traj_ids, which collectors write"
    assert report.skipped["record"] == "no collector wrote a record"
    assert report.skipped["checksums"] == "the storage was not finalized"


@pytest.mark.parametrize("flags", [(), ("terminated",), ("done",), ("terminated", "truncated")])
def test_checks_that_are_made_without_all_flags(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Lanes are not followed without ``done`` or both other flags."""
    (rows,) = episodes([1, 2, 3, 4])
    for name in {"done", "terminated", "truncated"} - {*flags}:
        del rows["next", name]
    report = assert_sound(write(tmp_path / "data", rows))
    ends = "done" in flags or len(flags) == 2
    assert ("steps" in report.checked) == ends
    if not ends:
        assert report.skipped["steps"] == "there is no column next/done, which collectors write"


def test_an_id_of_another_lane_is_not_taken_for_the_largest() -> None:
    """Otherwise, `verify` would report that the record gives used ids."""
    checks, findings = LaneChecks(2), Findings()
    ids = np.array([0, 1, 2**40 + 1, 2])
    rows = CheckedRows(
        0, ids, np.zeros(4, np.int64), np.array([0, 1, 0, 0]), np.ones(4, bool), ids * 0
    )
    checks.advance(rows, findings)
    assert checks.largest == 2


def test_an_id_of_two_lanes_is_found_without_an_entry_of_its_run(
    tmp_path: Path,
) -> None:
    one, other = episodes([1, 2, 3], [1, 2])
    other[IDS][:] = 0
    other[LANE][:] = 1
    (finding,) = verify(write(tmp_path / "data", one, other)).findings
    assert told(finding) == (
        "ids: two trajectories have the same id\n    trajectory 0: begins 2 times"
    )


def test_long_runs_of_zeros_are_found_in_any_storage(tmp_path: Path) -> None:
    x = np.arange(1, 5001)
    y = np.ones((5000, 2), np.float16)
    x[700:1800], y[700:1800] = 0, 0
    x[2000:2500], y[2000:2500] = 0, 0
    for size in (5000, 300):
        rows = [{("x",): x[i : i + size], ("y",): y[i : i + size]} for i in range(0, len(x), size)]
        (finding,) = verify(write(tmp_path / str(size), *rows)).findings
        assert (finding.check, finding.count) == ("zeros", 1100)
        assert str(finding.places[0]) == "row 700: and up to row 1,799"


@pytest.mark.parametrize("width", [1, 2, 16, 17, 40])
def test_rows_are_zero_only_if_every_word_is(width: int) -> None:
    rows = np.zeros((width + 2, width), np.uint64)
    rows[np.arange(width), np.arange(width)] = 1
    assert zero_rows(rows).tolist() == [False] * width + [True] * 2


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (torch.float16, torch.nan), (torch.float64, torch.nan), (torch.bfloat16, torch.nan),
        (torch.complex64, torch.nan),
    ],
)  # fmt: skip
def test_nan_is_found_in_every_dtype(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    from tensordict import TensorDict

    values = torch.ones(20, 3).to(dtype)
    values[3, 0] = torch.inf
    with MemmapStorage(tmp_path / "data") as storage:
        storage.extend(TensorDict({"x": values}, [20]))
    assert_sound(tmp_path / "data")
    values[7, 1] = bad
    with MemmapStorage(tmp_path / "data", mode="append") as storage:
        storage.extend(TensorDict({"x": values}, [20]))
    (finding,) = verify(tmp_path / "data").findings
    assert told(finding) == "nan: NaN in x\n    row 27, column x"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("key", ["observation", "next/observation", "next/reward"])
def test_infinities_are_found_in_every_dtype(tmp_path: Path, dtype: torch.dtype, key: str) -> None:
    """Infinities of either sign are found, but not the largest finite numbers."""
    (episode,) = episodes([1, 2, 3, 4, 5])
    limit = torch.finfo(dtype).max
    for name, bad in (("most", limit), ("least", -limit), ("high", torch.inf), ("low", -torch.inf)):
        rows = {each: torch.from_numpy(array) for each, array in episode.items()}
        columns = [each for each in rows if rows[each].is_floating_point()]
        rows |= {each: rows[each].to(dtype) for each in columns}
        place = rows[tuple(key.split("/"))]
        place[2, 0] = bad
        if key == "observation":  # consistent with the row before
            rows["next", "observation"][1, 0] = bad
        elif key == "next/observation":
            rows["observation",][3, 0] = bad
        with MemmapStorage(tmp_path / name) as storage:
            storage.extend(TensorDict(dict(rows), [4]))
        if abs(bad) <= limit:
            assert_sound(tmp_path / name)
            continue
        found = verify(tmp_path / name).findings
        assert [each.check for each in found] == ["nan"] * (1 if key == "next/reward" else 2)
        assert any(each.places[0].row == 2 and each.places[0].column == key for each in found)
        assert all("NaN or infinity" in str(each) for each in found)


# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a finalized run in every format."""
    folder = tmp_path_factory.mktemp("sound")
    found = {}
    for suffix in SUFFIXES:
        path = folder / f"data{suffix}"
        collect("CartPole-v1", path, ROWS, num_envs=4, frames_per_batch=100)
        found[suffix] = path
    return found


@pytest.fixture(params=SUFFIXES)
def data(request: pytest.FixtureRequest, sound: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy to be damaged."""
    return copied(sound[request.param], tmp_path)


def copied(path: Path, folder: Path) -> Path:
    for each in path.parent.glob(path.name + "*"):
        if each.name == path.name or path.suffix == ".h5":
            copy = shutil.copytree if each.is_dir() else shutil.copy
            copy(each, folder / each.name)
    return folder / path.name


def damage(path: Path, key: Any, row: Any, change: Any) -> None:
    """Overwrite a value without the storage's knowledge."""
    key = (key,) if isinstance(key, str) else key
    with open_storage(path, mode="append") as storage:
        engine = storage.reader.engine
        assert engine is not None
        table = storage.writer.files.episodes_path
        before = table.read_bytes() if table.exists() else None
        column = engine.space.columns.arrays[engine.schema.keys.index(key)]
        column.flags.writeable = True
        column[row] = change(column[row]) if callable(change) else change
    if before is not None:  # the table stays as it was
        table.write_bytes(before)


def rows_named(report: Report, check: str) -> list[int | None]:
    """Return the rows at which a check found something."""
    return [place.row for f in report.findings if f.check == check for place in f.places]


def middle(path: Path) -> int:
    """Return a row in the middle of a trajectory, which the next row continues."""
    with open_storage(path) as storage:
        step, done = storage.column(STEP), storage.column(("next", "done"))[:, 0]
        ids = storage.column(IDS)
        good = (step[1:-1] > 1) & ~done[1:-1] & (ids[1:-1] == ids[2:]) & ~done[2:]
        return 1 + int(np.flatnonzero(good[400:])[0]) + 400


FLIPS: dict[str, tuple[Any, Any, str, int]] = {
    "an id of another lane": (IDS, lambda id: id + 1, "ids", 0),
    "an id from afar": (IDS, lambda id: id + 4 * 10**6 + 1, "ids", 0),
    "a negative id": (IDS, -1, "ids", 0),
    "an earlier id of this lane": (IDS, lambda id: id - 4, "ids", 0),
    "a later id of this lane": (IDS, lambda id: id + 4, "steps", 0),
    "a lane": (LANE, lambda lane: (lane + 1) % 4, "ids", 0),
    "a lane that is none": (LANE, 4, "lanes", 0),
    "a negative lane": (LANE, -(2**31), "lanes", 0),
    "a step": (STEP, lambda step: step + 1, "steps", 0),
    "a step of zero": (STEP, 0, "steps", 0),
    "a huge step": (STEP, 2**63 - 1, "steps", 0),
    "a version": (("collector", "policy_version"), 3, "versions", 1),
    "a version below all": (("collector", "policy_version"), -2, "versions", 0),
    "terminated": (("next", "terminated"), True, "ends", 0),
    "truncated": (("next", "truncated"), True, "ends", 0),
    "done": (("next", "done"), True, "ends", 0),
    "an observation": ("observation", lambda x: x * (1 + 1e-6), "observations", 0),
    "a next observation": (("next", "observation"), lambda x: -x, "observations", 1),
    "a reward of NaN": (("next", "reward"), np.nan, "nan", 0),
    "a reward of infinity": (("next", "reward"), -np.inf, "nan", 0),
    "an observation of NaN": ("observation", np.nan, "nan", 0),
    "a next observation of infinity": (("next", "observation"), np.inf, "nan", 0),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_one_value_that_changed_is_found_at_its_row(data: Path, flip: str) -> None:
    key, change, check, off = FLIPS[flip]
    row = middle(data)
    assert_sound(data)
    damage(data, key, row, change)
    report = verify(data)
    assert not report.sound
    assert row + off in rows_named(report, check), list(map(told, report.findings))
    assert report.rows == ROWS


@pytest.mark.parametrize("flag", ["terminated", "done"])
def test_an_end_that_was_taken_away_is_found(data: Path, flag: str) -> None:
    with open_storage(data) as storage:
        row = int(np.flatnonzero(storage.column(("next", "done"))[:, 0])[5])
    damage(data, ("next", flag), row, False)
    assert rows_named(verify(data), "ends") == [row]


def test_a_place_says_all_that_is_known(sound: dict[str, Path], tmp_path: Path) -> None:
    path = copied(sound[""], tmp_path)
    row = middle(path)
    with open_storage(path) as storage:
        id, lane, step = (int(storage.column(key)[row]) for key in (IDS, LANE, STEP))
    damage(path, STEP, row, 1000)
    found = {each.check: each for each in verify(path).findings}
    assert told(found["steps"]) == (
        "steps: the steps of a trajectory are not 0, 1, 2 ...\n"
        f"    row {row:,}, lane {lane}, trajectory {id}, step 1000: expected step {step}"
    )


def test_rows_of_zeros_are_found(data: Path) -> None:
    row = middle(data)
    for key in ("observation", ("next", "observation")):
        damage(data, key, slice(row, row + 20), 0)
    report = verify(data)
    (zeros,) = (each for each in report.findings if each.check == "zeros")
    assert zeros.count == 20
    assert [place.row for place in zeros.places] == list(range(row, row + PLACES))
    assert row in rows_named(report, "observations")


def test_a_final_observation_of_zeros_is_found(data: Path) -> None:
    with open_storage(data) as storage:
        ends = np.flatnonzero(storage.column(("next", "done"))[:, 0])
    damage(data, ("next", "observation"), int(ends[3]), 0)
    assert rows_named(verify(data), "finals") == [ends[3]]
    damage(data, ("next", "observation"), ends, 0)
    (finals,) = (each for each in verify(data).findings if each.check == "finals")
    assert finals.count == len(ends)


def test_rows_that_are_there_twice_are_found(data: Path) -> None:
    row = middle(data)
    with open_storage(data) as storage:
        keys = storage.schema.keys
        earlier = {key: np.array(storage.column(key)[row - 1]) for key in keys}
    for key, value in earlier.items():
        damage(data, key, row, value)
    assert row in rows_named(verify(data), "steps")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_byte_that_changed_since_the_storage_was_finalized_is_found(
    sound: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    path = copied(sound[suffix], tmp_path)
    with open_storage(path, mode="append") as storage:
        storage.finalize()
    assert "checksums" in assert_sound(path).checked
    damage(path, "action", 700, lambda action: action ^ 1)
    (finding,) = verify(path).findings
    assert told(finding) == (
        "checksums: the bytes of a block of rows do not match its checksum\n"
        "    row 512, column action: or one of the 255 rows after it"
    )
    assert verify(path, skip=("checksums",)).sound


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 7},
        {"executed": 10**6},
        {"discarded": -1},
        {"stored": 999, "executed": 999, "slots": 999},
        {"episodes_complete": 1},
    ],
)
def test_a_ledger_that_does_not_balance_is_found(
    sound: dict[str, Path], tmp_path: Path, change: dict[str, int]
) -> None:
    path = copied(sound[""], tmp_path)
    with open_storage(path, mode="append") as storage:
        assert storage.record is not None
        record = json.loads(storage.record[1])
        record["ledger"] |= change
        storage.writer.put_record(json.dumps(record).encode())
    report = verify(path)
    assert {each.check for each in report.findings} == {"record"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"{", "no commit record of a collector, although a collector wrote the last rows"),
        (b"[1]", "no commit record of a collector, although a collector wrote the last rows"),
        (
            b'{"ledger": 3}',
            "no commit record of a collector, although a collector wrote the last rows",
        ),
    ],
)
def test_a_record_that_is_none_is_found(
    sound: dict[str, Path], tmp_path: Path, record: bytes, message: str
) -> None:
    path = copied(sound[""], tmp_path)
    with open_storage(path, mode="append") as storage:
        storage.writer.put_record(record)
    (finding,) = verify(path).findings
    assert (finding.check, finding.message) == ("record", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_row_of_run": 7}, "the record belongs to another run than the last rows"),
        (
            {"first_row_of_run": "0"},
            "no commit record of a collector, although a collector wrote the last rows",
        ),
        (
            {"stored_before": 0.5},
            "no commit record of a collector, although a collector wrote the last rows",
        ),
        (
            {"ledger": {}},
            "no commit record of a collector, although a collector wrote the last rows",
        ),
    ],
)
def test_a_record_that_does_not_fit_its_run_is_found(
    sound: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = copied(sound[""], tmp_path)
    with open_storage(path, mode="append") as storage:
        assert storage.record is not None
        storage.writer.put_record(json.dumps(json.loads(storage.record[1]) | change).encode())
    report = verify(path)
    assert {each.check for each in report.findings} == {"record"}
    assert message in {each.message for each in report.findings}


def test_rows_behind_the_newest_record_are_found(sound: dict[str, Path], tmp_path: Path) -> None:
    """The rows look as if the commit's own record had been lost."""
    path = copied(sound[""], tmp_path)
    with open_storage(path, mode="append") as storage:
        more = storage.get(torch.arange(ROWS - 3, ROWS))
        more[STEP] += 3
        storage.writer.claim.take(storage)  # these rows belong to a run
        storage.extend(more, ids="fresh")
    found = {each.message: each for each in verify(path).findings}
    late = found["the newest intact record does not belong to the last commit"]
    assert str(late.places[0]) == "it was written with 1,000 rows, and 1,003 are committed"


CHECKSUMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda sums: {}, "the checksums in the manifest are damaged"),
    "text": (lambda sums: "all", "the checksums in the manifest are damaged"),
    "another algorithm": (lambda sums: sums | {"algorithm": "md5"}, "in the manifest are damaged"),
    "blocks of no rows": (lambda sums: sums | {"block_rows": 0}, "in the manifest are damaged"),
    "fewer rows": (
        lambda sums: sums | {"rows": 1},
        "expected 1 rows and a checksum for each block of",
    ),
    "more rows": (
        lambda sums: sums | {"rows": 1001},
        "expected 1001 rows and a checksum for each block of",
    ),
    "a column less": (
        lambda sums: (
            sums | {"columns": {k: v for k, v in sums["columns"].items() if k != "action"}}
        ),
        "do not match the columns of the storage: only one of the two has action",
    ),
    "a column more": (
        lambda sums: sums | {"columns": sums["columns"] | {"x": ""}},
        "do not match the columns of the storage: only one of the two has x",
    ),
    "a digit less": (
        lambda sums: sums | {"columns": {k: v[1:] for k, v in sums["columns"].items()}},
        "got 1000 rows and 31 digits of checksums. The column or the manifest is damaged",
    ),
}


@pytest.mark.parametrize("what", CHECKSUMS)
def test_checksums_that_are_none_are_found(
    sound: dict[str, Path], tmp_path: Path, what: str
) -> None:
    path = copied(sound[""], tmp_path)
    with open_storage(path, mode="append") as storage:
        storage.finalize()
    file, (change, message) = path / "manifest.json", CHECKSUMS[what]
    manifest = json.loads(file.read_bytes())
    del manifest["crc32"]
    manifest["finalized"]["checksums"] = change(manifest["finalized"]["checksums"])
    file.write_text(json.dumps(manifest))
    (finding,) = verify(path).findings
    assert finding.check == "checksums"
    assert message in finding.message


def test_a_next_id_that_was_used_is_found(sound: dict[str, Path], tmp_path: Path) -> None:
    path = copied(sound[""], tmp_path)
    with open_storage(path, mode="append") as storage:
        assert storage.record is not None
        record = json.loads(storage.record[1])
        largest = record["next_id"] - 1
        storage.writer.put_record(json.dumps(record | {"next_id": largest}).encode())
    (finding,) = verify(path).findings
    assert told(finding) == (
        "record: the next trajectory id was already used\n"
        f"    the next id is {largest}, and the largest used id is {largest}"
    )


def test_a_record_with_a_flipped_bit_is_found(sound: dict[str, Path], tmp_path: Path) -> None:
    path = copied(sound[""], tmp_path)
    with open_storage(path) as storage:
        assert storage.record is not None
        payload = storage.record[1]
    header = path / "tallyroll.header"
    content = header.read_bytes()
    assert content.count(payload) == 1
    header.write_bytes(content.replace(payload, payload.replace(b"ledger", b"Ledger")))
    assert "the newest commit record is damaged; the previous one was used" in {
        each.message for each in verify(path).findings
    }


def write_runs(path: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change the runs of a manifest, with a valid checksum."""
    with open_storage(path, mode="append") as storage:
        storage.writer.runs.write(change(storage.manifest["runs"]))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (lambda runs: [], "the manifest names no run"),
        (lambda runs: [{**runs[0], "first_row": 5}], "run 0: its first row is 5, and the first"),
        (lambda runs: [*runs, {"first_row": 2000}], "run 1: its first row is 2000, not from 0 to"),
        (lambda runs: [{**runs[0], "lanes": 0}], "run 0: it has 0 lanes"),
        (lambda runs: [{**runs[0], "lanes": "4"}], "run 0: it has '4' lanes"),
        (
            lambda runs: [{**runs[0], "lane_seeds": [1]}],
            "run 0: its lane_seeds are not a list with one seed",
        ),
        (
            lambda runs: [{**runs[0], "first_row_of_run": 7}],
            "run 0: it continues a run from row 7 on, and begins at row 0",
        ),
    ],
)
def test_runs_that_do_not_fit_are_found(
    sound: dict[str, Path],
    tmp_path: Path,
    runs: Callable[[list[Any]], list[Any]],
    message: str,
) -> None:
    path = copied(sound[""], tmp_path)
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    del manifest["crc32"]
    file.write_text(json.dumps(manifest | {"runs": runs(manifest["runs"])}))
    found = [told(each) for each in verify(path).findings if each.check == "runs"]
    assert len(found) == 1
    assert message in found[0]


def test_another_number_of_lanes_in_the_manifest_is_found(
    sound: dict[str, Path], tmp_path: Path
) -> None:
    path = copied(sound[""], tmp_path)
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    del manifest["crc32"]
    for lanes, check in ((3, "lanes"), (7, "ids")):
        manifest["runs"][0] |= {"lanes": lanes, "lane_seeds": [0] * lanes}
        file.write_text(json.dumps(manifest))
        assert check in {each.check for each in verify(path).findings}


def test_an_id_of_an_earlier_run_is_found(tmp_path: Path) -> None:
    path = collect("CartPole-v1", tmp_path / "data", num_envs=2)
    with open_storage(path, mode="append") as storage:
        collect("CartPole-v1", storage, num_envs=2)  # type: ignore[arg-type]
    assert_sound(path)
    with open_storage(path) as storage:
        base = int(storage.column(IDS)[333])
    damage(path, IDS, slice(333, 666), lambda ids: ids - base)
    report = verify(path)
    (used,) = (each for each in report.findings if "earlier run" in each.message)
    assert used.check == "ids"
    assert used.places[0].row == 333


# --- the table of episodes ------------------------------------------------------------------------


def change_table(path: Path, change: Callable[[np.ndarray], np.ndarray | None]) -> int:
    """Change and rewrite the table. Return the first row of its tenth line."""
    with open_storage(path) as storage:
        file, head = storage.writer.files.episodes_path, storage.head
    table = read_table(Inside(file.parent), file, table_dtype(), head)
    assert table is not None
    table = table.copy()
    changed = change(table)
    write_table(Inside(file.parent), file, table if changed is None else changed)
    return int(table["first_row"][9])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lane", 3), ("length", 1), ("return", -7.0), ("end", 2), ("version_first", 5),
        ("version_last", 5), ("reset_seed", 12), ("last_row", 999),
    ],
)  # fmt: skip
def test_a_line_of_the_table_that_changed_is_found(data: Path, field: str, value: float) -> None:
    assert "episodes" in assert_sound(data).checked

    def change(table: np.ndarray) -> None:
        number = 0 if field == "reset_seed" else 9
        assert table[field][number] != value
        table[field][number] = value

    row = change_table(data, change)
    (finding,) = (f for f in verify(data).findings if f.check == "episodes")
    assert finding.message == f"the table gives another {field} than the rows"
    assert finding.places[0].row == (0 if field == "reset_seed" else row)
    assert finding.places[0].column == field
    assert finding.places[0].what.startswith(
        f"{'truncated' if field == 'end' else value} in the table"
    )


def test_lines_that_are_missing_or_too_many_are_found(
    sound: dict[str, Path], tmp_path: Path
) -> None:
    path = copied(sound[""], tmp_path)
    change_table(path, lambda table: np.delete(table, 9))
    (finding,) = verify(path).findings
    assert finding.message == "a trajectory has rows, but no line in the table"

    def add(table: np.ndarray) -> None:
        table["id"][5] = 12345

    change_table(path, add)
    assert {"a line in the table has no rows", finding.message} == {
        each.message for each in verify(path).findings
    }


def test_a_table_that_is_damaged_is_found(sound: dict[str, Path], tmp_path: Path) -> None:
    path = copied(sound[""], tmp_path)
    flip(path / "episodes.npy", 300)
    (finding,) = verify(path).findings
    assert finding.check == "episodes"
    assert "its checksum does not match" in finding.message
    (path / "episodes.npy").unlink()
    assert assert_sound(path).skipped["episodes"].startswith("there is no table yet")


def test_rows_that_changed_behind_the_table_are_found(
    sound: dict[str, Path], tmp_path: Path
) -> None:
    path = copied(sound[""], tmp_path)
    damage(path, ("next", "reward"), 500, 7.0)
    (finding,) = verify(path).findings
    assert finding.message == "the table gives another return than the rows"


def test_a_table_is_older_than_the_last_rows(tmp_path: Path) -> None:
    path = collect("CartPole-v1", tmp_path / "data", num_envs=3)
    table = (path / "episodes.npy").read_bytes()
    with open_storage(path, mode="append") as storage:
        collect("CartPole-v1", storage, 77, num_envs=5)  # type: ignore[arg-type]
    (path / "episodes.npy").write_bytes(table)
    assert "episodes" in assert_sound(path).checked


# --- metadata for other libraries -----------------------------------------------------------------

SHOWN: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "memmap, no JSON": (
        "", lambda path: truncate(path / "next" / "meta.json", 40),
        "next/meta.json cannot be read by other libraries",
    ),
    "memmap, a dtype": (
        "", lambda path: replace(path / "meta.json", b"float32", b"float64"),
        "observation/dtype is 'torch.float64', expected 'torch.float32'",
    ),
    "memmap, more rows": (
        "", lambda path: replace(path / "meta.json", b"1000", b"1001"),
        "meta.json shows 1,001 rows to other libraries, but only 1,000 are committed",
    ),
    "memmap, no rows": (
        "", lambda path: replace(path / "meta.json", b"[1000]", b"[-1]"), "it has -1 rows",
    ),
    "memmap, no shape": (
        "", lambda path: replace(path / "meta.json", b'"shape"', b'"size"'), "it has no shape",
    ),
    "memmap, no object": (
        "", lambda path: change_json(path / "meta.json", lambda meta: {**meta, "action": 3}),
        "action is not a JSON object",
    ),
    "memmap, a column gone": (
        "", lambda path: change_json(path / "meta.json", lambda meta: meta.pop("action") and meta),
        "meta.json no longer has the metadata that was written for other libraries: action is "
        "missing",
    ),
    "zarr, an array gone from the root": (
        ".zarr", lambda path: change_json(
            path / "zarr.json", lambda root: {**root, "consolidated_metadata": None}
        ), "its entry for action is missing",
    ),
    "memmap, gone": ("", lambda path: (path / "meta.json").unlink(), "No such file"),
    "zarr, no JSON": (
        ".zarr", lambda path: truncate(path / "observation" / "zarr.json", 40),
        "observation/zarr.json cannot be read by other libraries",
    ),
    "zarr, an array": (
        ".zarr", lambda path: replace(path / "action" / "zarr.json", b"int64", b"int16"),
        "action/zarr.json no longer has the metadata that was written for other libraries: "
        "data_type is 'int16'",
    ),
    "zarr, the root": (
        ".zarr", lambda path: replace(path / "zarr.json", b'"little"', b'"big"'),
        "zarr.json no longer has the metadata that was written for other libraries: "
        "consolidated_metadata/",
    ),
    "zarr, more rows": (
        ".zarr", lambda path: replace(path / "action" / "zarr.json", b"1000", b"9999"),
        "action/zarr.json shows 9,999 rows to other libraries, but only 1,000 are committed",
    ),
    "zarr, the header": (
        ".zarr", lambda path: truncate(path / "tallyroll" / "zarr.json", 9),
        "tallyroll/zarr.json cannot be read by other libraries",
    ),
    "hdf5, more rows": (
        ".h5", lambda path: change_attribute(path, "rows", 1005),
        "shows 1,005 rows to other libraries, but only 1,000 are committed",
    ),
    "hdf5, rows that are a text": (
        ".h5", lambda path: replace_attribute(path, "rows", "many"),
        "are missing: another program changed them",
    ),
    "hdf5, its capacity": (
        ".h5", lambda path: change_attribute(path, "capacity", 3), "its attribute capacity is 3",
    ),
    "hdf5, its schema": (
        ".h5", lambda path: replace(path, b'"], "dtype": "float32"', b'"], "dtype": "float64"'),
        "its attribute schema is",
    ),
}  # fmt: skip


def replace(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert old in content
    # The user block of an HDF5 file is ours.
    start = 2**20 if file.suffix == ".h5" else 0
    file.write_bytes(content[:start] + content[start:].replace(old, new))


def change_json(file: Path, change: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_bytes()))))


def change_attribute(path: Path, name: str, value: int) -> None:
    import h5py

    with h5py.File(path, "r+") as file:
        file.attrs.modify(name, np.int64(value))


def replace_attribute(path: Path, name: str, value: str) -> None:
    import h5py

    with h5py.File(path, "r+") as file:
        del file.attrs[name]
        file.attrs[name] = np.bytes_(value)


@pytest.mark.parametrize("what", SHOWN)
def test_metadata_for_other_libraries_is_checked(
    sound: dict[str, Path], tmp_path: Path, what: str
) -> None:
    suffix, change, message = SHOWN[what]
    path = copied(sound[suffix], tmp_path)
    change(path)
    found = verify(path).findings
    assert {each.check for each in found} == {"metadata"}
    assert message in found[0].message
    assert verify(path, skip=["metadata"]).sound


def test_metadata_that_others_added_stays(sound: dict[str, Path], tmp_path: Path) -> None:
    import h5py

    with h5py.File(path := copied(sound[".h5"], tmp_path), "r+") as file:
        file.attrs["note"] = "mine"
        file["next"].attrs["unit"] = "metre"
    assert_sound(path)
    path = copied(sound[".zarr"], tmp_path)
    document = json.loads((path / "action" / "zarr.json").read_bytes())
    document["attributes"]["unit"] = "metre"
    (path / "action" / "zarr.json").write_text(json.dumps(document))
    assert_sound(path)


# --- storages that cannot be opened ---------------------------------------------------------------

FILES: dict[str, Callable[[Path], None]] = {
    "a column cut short": lambda path: truncate(path / "observation.memmap", 1000),
    "a column gone": lambda path: (path / "action.memmap").unlink(),
    "a header cut short": lambda path: truncate(path / "tallyroll.header", 100),
    "a header gone": lambda path: (path / "tallyroll.header").unlink(),
    "a count in the header": lambda path: flip(path / "tallyroll.header", 128),
    "a manifest that is no JSON": lambda path: truncate(path / "manifest.json", 50),
    "a schema": lambda path: flip(path / "manifest.json", 200),
}


def truncate(file: Path, nbytes: int) -> None:
    file.write_bytes(file.read_bytes()[:nbytes])


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("what", FILES)
def test_files_that_are_damaged_are_a_finding(
    sound: dict[str, Path], tmp_path: Path, what: str
) -> None:
    path = copied(sound[""], tmp_path)
    FILES[what](path)
    report = verify(path)
    assert [each.check for each in report.findings] == ["files"]
    assert report.format is None
    assert set(report.skipped) == set(CHECKS) - {"files"}
    assert str(path) in report.findings[0].message


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_files_of_other_formats_that_are_cut_short(
    sound: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    path = copied(sound[suffix], tmp_path)
    largest = max(
        (each for each in [path, *path.rglob("*")] if each.is_file()),
        key=lambda each: each.stat().st_size,
    )
    truncate(largest, largest.stat().st_size // 2)
    assert [each.check for each in verify(path).findings] == ["files"]


def test_a_path_that_is_no_storage_raises(tmp_path: Path) -> None:
    with pytest.raises(StorageMissing):
        verify(tmp_path / "nothing")
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotAStorage):
        verify(tmp_path / "file")
    with pytest.raises(ValueError, match=r"skip: expected some of files, .*, got nam\."):
        verify(tmp_path / "nothing", skip=["nam"])


# --- in chunks, and with a concurrent writer ------------------------------------------------------


@pytest.mark.parametrize(
    ("flip", "chunk"),
    [
        *(("an id from afar", 1), ("an id from afar", 100), ("a lane", 7)),
        *(("a step", 1), ("a step", 7), ("a version", 100), ("terminated", 7)),
    ],
)
def test_chunks_do_not_matter(
    sound: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, flip: str
) -> None:
    path = copied(sound[""], tmp_path)
    row = middle(path)
    monkeypatch.setattr(row_checks, "_CHUNK_ROWS", chunk)
    assert_sound(path)
    key, change, check, off = FLIPS[flip]
    damage(path, key, row, change)
    report = verify(path)
    assert row + off in rows_named(report, check), list(map(told, report.findings))


def test_progress_tells_of_every_byte(sound: dict[str, Path], tmp_path: Path) -> None:
    path = copied(sound[""], tmp_path)
    seen: list[tuple[int, int]] = []
    verify(path, progress=lambda done, total: seen.append((done, total)))
    with open_storage(path) as storage:
        assert seen == [(storage.nbytes, storage.nbytes)]
    with open_storage(path, mode="append") as storage:
        storage.finalize()
    seen.clear()
    verify(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_a_ring_whose_writer_overtakes_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were overwritten during the read are not judged."""
    monkeypatch.setattr(row_checks, "_CHUNK_ROWS", 50)
    path = tmp_path / "data"
    with MemmapStorage(path, max_size=500) as storage:
        made = {"num_envs": 4, "frames_per_batch": 60, "total_frames": 10_000}
        with SyncCollector("CartPole-v1", seed=0, storage=storage, **made) as collector:
            batches = iter(collector)
            for _ in range(9):
                next(batches)
            report = verify(path, progress=lambda *_: next(batches))
            assert report.findings == (), list(map(told, report.findings))
            assert "another process writes" in report.skipped["zeros"]
    assert_sound(path)


def test_rows_that_come_meanwhile_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data"
    made = {"num_envs": 4, "frames_per_batch": 60, "total_frames": 10_000, "storage": path}
    with SyncCollector("CartPole-v1", seed=0, **made) as collector:
        batches = iter(collector)
        next(batches)
        report = verify(path, progress=lambda *_: next(batches))
        assert report.findings == (), list(map(told, report.findings))
        assert report.rows == 60
    assert_sound(path)


def test_a_buffer_over_the_storage_is_sound(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "data") as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        collect("CartPole-v1", None, num_envs=2, storage=None, replay_buffer=buffer)  # type: ignore[arg-type]
    assert_sound(tmp_path / "data")
