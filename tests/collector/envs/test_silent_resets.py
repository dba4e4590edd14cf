"""Environments that reset themselves silently, through collectors and with `finals=`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.checks.final_observation_checks import FinalsWarning, FinalsWatch
from tallyroll.collector.cli import main
from tallyroll.collector.envs.probes import known_faults
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, SilentReset
from tallyroll.storage import MemmapStorage, SchemaMismatch, open_storage, verify

from collect_kit import collect
from oracles import OracleTorchEnv, make_oracle_vec
from self_reset_kit import (
    SelfResetting,
    SelfResettingTorch,
    scripted,
    serial,
    stacked,
    vector,
)
from worker_kit import in_threads, start

NEXT_VALID = ("collector", "next_valid")
SOURCES: dict[str, Callable[[], Any]] = {
    "EnvBase": SelfResettingTorch,
    "EnvBase in a TransformedEnv": lambda: TransformedEnv(SelfResettingTorch(), StepCounter(100)),
    "GymWrapper": lambda: GymWrapper(SelfResetting()),
    "stacked frames beside": stacked,
    "SerialEnv of GymWrapper": serial,
    "DISABLED vector": vector,
    "images": partial(vector, side=40),
    "standing still at first": partial(vector, length=6, still=1),
    "two lanes of eight": lambda: SelfResettingTorch(8, wrong=2),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a row a batch": {"frames_per_batch": 1, "total_frames": 300},
    "one batch": {"frames_per_batch": 840},
    "surplus discarded": {"frames_per_batch": 23, "surplus": "discard"},
    "time limit": {"max_frames_per_traj": 4},
    "info": {"info_keys": ["tick"]},
    "images stored alone": {"yield_large": False},
}
SMALL: dict[str, Any] = {"frames_per_batch": 60, "total_frames": 840, "seed": 0}
FEW: dict[str, Any] = {"frames_per_batch": 40, "total_frames": 80, "seed": 0}


@pytest.mark.parametrize("source", SOURCES)
def test_an_environment_that_resets_itself_is_refused(source: str, tmp_path: Path) -> None:
    refused(SOURCES[source](), tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", ["DISABLED vector", "images"])
def test_however_it_is_collected(source: str, way: str, tmp_path: Path) -> None:
    refused(SOURCES[source](), tmp_path, **WAYS[way])


def refused(env: Any, folder: Path, **kwargs: Any) -> None:
    """Collect, and compare the numbers in the error with the stored rows."""
    path = folder / "data"
    collector = SyncCollector(env, storage=path, **{**SMALL, **kwargs})
    batches: list[Any] = []
    with collector, pytest.raises(SilentReset, match='finals="lost"') as caught:
        batches.extend(collector)
    collector.ledger.check()
    with open_storage(path) as storage:
        rows, ends = storage.head, int(storage.column(("next", "done"))[: storage.head].sum())
    said = str(caught.value)
    assert sum(map(len, batches)) == rows == collector.ledger.stored
    assert f"with {ends} ends of episodes" in said
    if rows:
        assert f"Rows 0 to {rows - 1:,} of {path} are committed" in said
    else:
        assert f"No rows of this run are committed in {path}" in said


def loops(lane: int, episode: int, at: int) -> tuple[float, float]:
    """Return the position in a task that ends where it began, at a different place in each lane."""
    return lane, at % 5


def docks(lane: int, episode: int, at: int) -> tuple[float, float]:
    """Return the position in a task that moves between two docks, except for its first start."""
    place = (episode + (at == 5)) % 2 * 10
    return lane, 50 if episode == at == 0 else place if at in (0, 5) else 20 + at


def home(lane: int, episode: int, at: int) -> tuple[float, float]:
    """Return the position of `loops`, except for its first start."""
    return lane, 50 if episode == at == 0 else at % 5


RIGHT: dict[str, tuple[Any, int]] = {
    "a bandit of one step": (lambda lane, episode, at: (0, 0), 1),
    "a bandit of many steps": (lambda lane, episode, at: (0, 0), 6),
    "a contextual bandit": (lambda lane, episode, at: (episode + at, lane), 1),
    "a contextual bandit whose context stays": (lambda lane, episode, at: (episode, lane + 1), 6),
    "two starts, each of which is come back to": (
        lambda lane, episode, at: (at % 5, hash((lane, episode)) % 9 == 0),
        5,
    ),
    "NaN": (lambda lane, episode, at: (np.nan, np.nan), 6),
}


@pytest.mark.parametrize("task", [docks, home])
def test_episodes_that_end_where_the_next_begins_are_warned_of(task: Any, tmp_path: Path) -> None:
    """In each lane, only the first reset begins elsewhere."""
    with pytest.warns(FinalsWarning, match="Two kinds of environment look like this"):
        collect(scripted(task, 5, lanes=20), **SMALL, storage=tmp_path / "data")
    assert verify(tmp_path / "data").sound


@pytest.mark.parametrize("name", RIGHT)
def test_right_data_is_let_pass(name: str, tmp_path: Path) -> None:
    env = scripted(*RIGHT[name])
    collect(env, **SMALL, storage=tmp_path / "data", validate="off")
    assert verify(tmp_path / "data", skip=("nan",)).sound


@pytest.mark.parametrize("env", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "CartPole-v1"])
def test_gymnasiums_tasks_are_let_pass(env: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    kwargs = {"frames_per_batch": 100, "total_frames": 3000, "max_frames_per_traj": 70}
    collect(env, num_envs=6, seed=1, storage=path, **kwargs)
    assert verify(path).sound


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_mode_of_a_vector_is_let_pass(mode: AutoresetMode) -> None:
    collect(make_oracle_vec(3, [[3, 4, 5]], mode=mode), **SMALL)


def test_a_task_that_ends_where_it_began_is_warned_of_once(tmp_path: Path) -> None:
    with pytest.warns(FinalsWarning, match="Two kinds of environment look like this") as caught:
        collect(scripted(loops, 5), **SMALL, storage=tmp_path / "data")
    assert len(caught) == 1
    assert verify(tmp_path / "data").sound
    collect(scripted(loops, 5), **SMALL, finals="kept")


def test_few_ends_are_warned_of_at_the_end(tmp_path: Path) -> None:
    few = {**SMALL, "frames_per_batch": 8, "total_frames": 32}
    with pytest.warns(FinalsWarning, match="too few to be certain") as caught:
        batches, _ = collect(vector(), **few, storage=tmp_path / "data")
    assert sum(map(len, batches)) == 32
    assert f"Rows 0 to 31 of {tmp_path / 'data'}" in str(caught[0].message)
    collect(vector(rightly=True), **few)


# --- finals= ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_lost_finals_are_marked(source: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    batches, _ = collect(SOURCES[source](), **SMALL, storage=path, finals="lost", layout="rows")
    rows = torch.cat([batch.select(NEXT_VALID, ("next", "terminated")) for batch in batches])
    ended = rows["next", "terminated"].reshape(-1)
    assert torch.equal(rows[NEXT_VALID], ~ended)
    assert ended.sum() > 100
    assert verify(path, skip=("nan",)).sound


def test_kept_is_not_checked_and_verify_knows(tmp_path: Path) -> None:
    collect(vector(), **SMALL, storage=tmp_path / "data", finals="kept")
    assert verify(tmp_path / "data").sound
    with open_storage(tmp_path / "data") as storage:
        assert storage.manifest["runs"][0]["call"]["finals"] == "kept"
        for name, rows in (("copy", storage[:]), ("unknown", storage[:].clone())):
            with MemmapStorage(tmp_path / name) as other:
                other.extend(rows)
    assert verify(tmp_path / "copy").sound
    assert not verify(tmp_path / "unknown").sound


def test_another_word_is_no_argument() -> None:
    with pytest.raises(ArgumentError, match="finals"):
        SyncCollector(vector(), **SMALL, finals="gone")  # type: ignore[arg-type]


def test_a_run_with_lost_finals_goes_on_with_lost_finals(tmp_path: Path) -> None:
    path = tmp_path / "data"
    half = {**SMALL, "total_frames": 600}
    collect(vector(), **half, storage=path, finals="lost")
    with pytest.raises(SchemaMismatch, match="next_valid"):
        SyncCollector(vector(), frames_per_batch=60, total_frames=1200, storage=path, resume=True)
    more = {"frames_per_batch": 60, "total_frames": 1200}
    collect(vector(), **more, storage=path, resume=True, finals="lost")
    with open_storage(path) as storage:
        assert storage.head == 1200
    assert verify(path).sound


def test_a_resumed_run_names_the_rows_that_were_there(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with patch.object(FinalsWatch, "look"):
        collect(vector(), **{**SMALL, "total_frames": 600}, storage=path)
    with pytest.raises(SilentReset, match="Rows 0 to 599 "):
        collect(vector(), frames_per_batch=200, total_frames=1200, storage=path, resume=True)


def test_an_error_of_the_environment_is_raised_and_wrong_rows_are_not_stored(
    tmp_path: Path,
) -> None:
    env = vector()
    step, left = env.envs[0].step, [60]

    def failing(action: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("broken")
        return step(action)

    env.envs[0].step = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken") as caught:
        collect(env, **{**SMALL, "frames_per_batch": 900}, storage=tmp_path / "data")
    assert any("resets itself within step" in note for note in caught.value.__notes__)
    with open_storage(tmp_path / "data") as storage:
        assert storage.head == 0


# --- verify -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_verify_finds_it_in_rows_that_were_stored_before(source: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    with patch.object(FinalsWatch, "look"):
        collect(SOURCES[source](), **SMALL, storage=path)
    (found,) = verify(path, skip=("nan",)).findings
    assert found.check == "finals"
    assert "first ones of the next episode" in found.message
    assert found.count > 15
    with open_storage(path) as storage:
        rows = [place.row for place in found.places]
        assert storage.column(("next", "done"))[rows].all()


def test_verify_joins_a_run_that_was_resumed_often(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with patch.object(FinalsWatch, "look"):
        for part in range(1, 15):
            kwargs = {"frames_per_batch": 16, "total_frames": 16 * part}
            collect(vector(first=10 * part), **kwargs, storage=path, resume=part > 1)
    (found,) = verify(path).findings
    assert found.check == "finals"


# --- workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("wrong", [(0, 1), (1,)])
def test_through_workers(mode: Any, wrong: tuple[int, ...], tmp_path: Path) -> None:
    makes = [partial(vector, 3, rightly=worker not in wrong) for worker in (0, 1)]
    # Without an end, because one worker may finish before the other begins on a busy machine.
    kwargs = {**SMALL, "total_frames": -1, "storage": tmp_path / "data"}
    with in_threads(), start(makes, mode=mode, **kwargs) as collector:
        with pytest.raises(SilentReset, match=r"(of|by) this run"):
            for _ in collector:
                pass
        collector.ledger.check()
    with in_threads(), start(makes, mode=mode, **SMALL, finals="lost") as collector:
        for batch in collector:
            ended = batch["next", "terminated"].reshape(-1)
            assert torch.equal(batch[NEXT_VALID], ~ended)


# --- the command line -------------------------------------------------------------------------

MODULE = """
import gymnasium
from self_reset_kit import SelfResetting
gymnasium.register("SelfResetting-v0", SelfResetting)
"""


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_envs.py").write_text(MODULE)
    # Gymnasium's checker and order enforcement do not detect it.
    words = ["collect", "own_envs:SelfResetting-v0", "--frames-per-batch", "50", "--quiet"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*words, "--frames", "400", "--out", "one"]) == 1
        assert "--finals" not in capsys.readouterr().out
        assert main([*words, "--frames", "400", "--out", "two", "--finals", "lost"]) == 0
        again = ["collect", "own_envs:SelfResetting-v0", "--out", "two", "--resume", "--quiet"]
        assert main([*again, "--frames", "600"]) == 0
    with open_storage("two") as storage:
        assert storage.head == 600
        assert NEXT_VALID in storage.schema.keys
    assert main(["verify", "two", "--quiet"]) == 0


# --- known silent resets ----------------------------------------------------------------------


def stand_in(module: str, name: str) -> type:
    """Return a subclass of a class with this module and name, which wraps an inner object."""

    class Wrapped(OracleTorchEnv):
        def __init__(self, lanes: int | None = 2, **inner: Any) -> None:
            super().__init__(lanes)
            self._env = type("Inner", (), inner)()

    Wrapped.__module__, Wrapped.__qualname__, Wrapped.__name__ = module, name, name
    return type("Own", (Wrapped,), {})


Procgen = stand_in("torchrl.envs.libs.procgen", "ProcgenEnv")
Vmas = stand_in("torchrl.envs.libs.vmas", "VmasEnv")
Jumanji = stand_in("torchrl.envs.libs.jumanji", "JumanjiEnv")


def test_the_classes_are_torchrls() -> None:
    from importlib import import_module

    for module, name in known_faults.FAULTS:
        assert hasattr(import_module(module), name)


def around(env: Any) -> TransformedEnv:
    """Add a time limit that coincides with the environment's own."""
    return TransformedEnv(env, StepCounter(9), auto_unwrap=False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Procgen, 'finals="lost"'),
        (partial(Vmas, max_steps=9), "without max_steps"),
        (partial(Jumanji, time_limit=9), "time_limit=T"),
    ],
)
@pytest.mark.parametrize(
    "inside",
    [
        lambda make: make(),
        lambda make: make,
        lambda make: around(around(make())),
        lambda make: SerialEnv(2, partial(make, None)),
        lambda make: SerialEnv(2, [partial(OracleTorchEnv, None), partial(make, None)]),
        lambda make: around(SerialEnv(1, lambda: around(make(None)))),
    ],
)
def test_known_faults_are_refused(make: Any, said: str, inside: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRefused, match=said):
        SyncCollector(inside(make), **SMALL, storage=tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "make", [partial(Vmas, max_steps=9), partial(SerialEnv, 2, partial(Procgen, None))]
)
def test_known_faults_are_said_where_batches_are_torchrls_and_nothing_is_stored(
    make: Any, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"collected as TorchRL does: .*\. Pass "):
        collect(make(), **FEW, layout="torchrl")
    with pytest.raises(EnvironmentRefused, match="Pass "):
        SyncCollector(make(), **SMALL, layout="torchrl", storage=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_known_faults_are_refused_in_a_parallel_environment() -> None:
    env = ParallelEnv(2, partial(Vmas, None, max_steps=9), mp_start_method="spawn")
    with pytest.raises(EnvironmentRefused, match="max_steps=9"):
        SyncCollector(env, **SMALL)


def test_known_faults_without_effect_are_let_pass() -> None:
    collect(Procgen(), **FEW, finals="lost")
    collect(Vmas(max_steps=None), **FEW)
    collect(Jumanji(), **FEW)
    collect(Vmas(max_steps=9), **FEW, max_frames_per_traj=8)
    collect(TransformedEnv(Jumanji(time_limit=9), StepCounter(8)), **FEW)
    collect(SerialEnv(2, lambda: TransformedEnv(Vmas(None, max_steps=9), StepCounter(8))), **FEW)
