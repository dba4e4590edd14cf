"""Compare rows of OpenSpiel's games with states that are moved by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import open_spiel.python.games  # noqa: F401  it registers those in Python
import pyspiel
import pytest
import torch
from open_spiel.python import observation
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    PolicyError,
    TransitionError,
)
from tallyroll.collector.ext.systems.openspiel import OVER, OpenSpielSystem, observer_of
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import open_storage, verify

GOOFSPIEL = "goofspiel(num_cards=4)"  # simultaneous bids, and chance reveals the prize cards


class Lenient(OpenSpielSystem):
    """The contract draws moves without the mask, so illegal ones are replaced."""

    def step(self, action: Sequence[Any], lanes: Mask | None = None) -> Step:
        (moves,) = action
        legal = np.take_along_axis(self._legal, moves[..., None], -1)[..., 0]
        return super().step([np.where(legal, moves, self._legal.argmax(-1))], lanes)


class GameContract(SystemContract):
    game: ClassVar[str]
    steps = 100

    def make(self, lanes: int, seeds: Sequence[int] | None) -> OpenSpielSystem:
        return Lenient.make(self.game, lanes, seeds)


class TestKuhn(GameContract):
    game = "kuhn_poker"


class TestTicTacToe(GameContract):
    game = "tic_tac_toe"


class TestGoofspiel(GameContract):
    game = GOOFSPIEL


class TestOnePlayer(GameContract):
    game = "catch(rows=5)"


def in_order(rows: TensorDictBase, lane: int) -> TensorDictBase:
    own = rows[rows["collector", "lane"] == lane]
    return own[np.lexsort((own["collector", "step"], own["collector", "traj_ids"]))]


def play_on(state: Any, rng: np.random.Generator) -> None:
    """Apply chance moves as OpenSpiel's own examples draw them, with one number per node."""
    while state.is_chance_node():
        outcomes, shares = zip(*state.chance_outcomes(), strict=True)
        at = np.searchsorted(np.cumsum(shares), rng.random(), side="right")
        state.apply_action(outcomes[min(at, len(outcomes) - 1)])


def check_turns(rows: TensorDictBase, name: str, seeds: Sequence[int]) -> int:
    """Compare rows of a turn-based game with its own states. Return the number of ended games."""
    game, ended = pyspiel.load_game(name), 0
    for lane, seed in enumerate(seeds):
        rng, state = np.random.default_rng(seed), None
        for row in in_order(rows, lane):
            if state is None:
                state = game.new_initial_state()
                play_on(state, rng)
            player, before = state.current_player(), np.array(state.returns())
            assert row["current_player"].item() == player
            wanted = np.reshape(state.observation_tensor(player), game.observation_tensor_shape())
            assert np.array_equal(row["observation"].numpy(), np.float32(wanted))
            assert row["action_mask"].nonzero()[:, 0].tolist() == state.legal_actions()
            state.apply_action(row["action"].item())
            play_on(state, rng)
            over = state.is_terminal()
            gained = np.float32(np.array(state.returns()) - before)
            assert np.array_equal(row["next", "reward"].numpy(), gained)
            assert row["next", "terminated"].item() == over
            assert not row["next", "truncated"].item()
            sees = player if over else state.current_player()
            wanted = np.reshape(state.observation_tensor(sees), game.observation_tensor_shape())
            assert np.array_equal(row["next", "observation"].numpy(), np.float32(wanted))
            if over:
                assert row["next", "current_player"].item() == OVER
                assert not row["next", "action_mask"].any()
                ended, state = ended + 1, None
    return ended


@pytest.mark.parametrize("name", ["tic_tac_toe", "leduc_poker"])
def test_turns_sync_resumed_and_with_workers(name: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_envs": 3, "frames_per_batch": 40}
    collect = partial(SyncCollector, f"openspiel:{name}", None, **arguments)
    with collect(total_frames=150, seed=2, storage=tmp_path / "run") as collector:
        alone = torch.cat([batch.clone() for batch in collector])
    assert alone["next", "reward"].shape == (150, 2)
    assert check_turns(alone, name, lane_seeds(2, 3, 0)) > 10
    with collect(total_frames=220, resume=True, storage=tmp_path / "run") as collector:
        assert sum(batch.numel() for batch in collector) == 70
    assert verify(tmp_path / "run").sound
    stored = open_storage(tmp_path / "run")
    assert check_turns(stored[150:].clone(), name, lane_seeds(2, 3, 1)) > 3
    if name == "tic_tac_toe":
        return
    with MultiprocessCollector(
        f"openspiel:{name}", None, num_workers=2, total_frames=150, seed=2, **arguments
    ) as collector:
        shared = torch.cat([batch.clone() for batch in collector])
    for key in alone.keys(True, True):
        assert torch.equal(alone[key], shared[key]), key


class Late(observation._Observation):
    """Observer that returns an earlier state from the third call on."""

    calls = 0

    def set_from(self, state: Any, player: int) -> None:
        self.calls += 1
        if self.calls < 3:
            super().set_from(state, player)


@pytest.mark.parametrize("how", ["observed", "listed", "late"])
def test_observers_see_what_states_list(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "late":
        monkeypatch.setattr(observation, "_Observation", Late)
    name = "python_tic_tac_toe" if how == "listed" else "tic_tac_toe"
    game = pyspiel.load_game(name)
    assert (observer_of(game, "observation") is not None) == (how == "observed")
    with SyncCollector(game, None, frames_per_batch=60, total_frames=60, seed=0) as collector:
        (rows,) = list(collector)
    assert check_turns(rows, name, lane_seeds(0, 1, 0)) >= 3


def test_moves_at_once() -> None:
    game = pyspiel.load_game(GOOFSPIEL)
    with SyncCollector(
        "openspiel:goofspiel",
        None,
        num_envs=2,
        env_kwargs={"num_cards": 4},
        frames_per_batch=60,
        total_frames=60,
        seed=4,
    ) as collector:
        (rows,) = list(collector)
    assert rows["players"].batch_size == (60, 2)
    ended = 0
    for lane, seed in enumerate(lane_seeds(4, 2, 0)):
        rng, state = np.random.default_rng(seed), None
        for row in in_order(rows, lane):
            if state is None:
                state = game.new_initial_state()
                play_on(state, rng)
            for player in range(2):
                seen = np.float32(state.observation_tensor(player))
                assert np.array_equal(row["players", "observation"][player].numpy(), seen)
                legal = row["players", "action_mask"][player].nonzero()[:, 0].tolist()
                assert legal == state.legal_actions(player)
            before = np.array(state.returns())
            state.apply_actions(row["players", "action"].tolist())
            play_on(state, rng)
            gained = np.float32(np.array(state.returns()) - before)
            assert np.array_equal(row["next", "players", "reward"][:, 0].numpy(), gained)
            over = state.is_terminal()
            assert row["next", "terminated"].item() == over
            assert row["next", "players", "done"].all().item() == over
            assert row["next", "players", "mask"].any().item() != over
            if over:
                ended, state = ended + 1, None
    assert ended >= 12


def test_a_game_that_was_loaded() -> None:
    with SyncCollector(
        pyspiel.load_game("tic_tac_toe"), None, frames_per_batch=30, total_frames=30, seed=0
    ) as collector:
        (rows,) = list(collector)
    assert check_turns(rows, "tic_tac_toe", lane_seeds(0, 1, 0)) >= 3


def test_an_illegal_move_is_refused() -> None:
    def corner(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

    with (
        SyncCollector(
            "openspiel:tic_tac_toe", corner, num_envs=2, frames_per_batch=8, total_frames=8
        ) as collector,
        pytest.raises(
            PolicyError, match=r"action is not legal at lane 0, .* allows, got 0"
        ) as found,
    ):
        list(collector)
    assert "lane 0: expected a legal move of tic_tac_toe(), got 0" in str(found.value.__cause__)


@pytest.mark.parametrize("move", [-1, 9, 2**62])
def test_a_move_that_no_game_has_is_refused(move: int) -> None:
    system = OpenSpielSystem(pyspiel.load_game("tic_tac_toe"), 2)
    before = [column.copy() for column in system.reset(None, [0, 1])]
    with pytest.raises(
        TransitionError, match=rf"lane 1: expected a legal move of .*, got {move}\."
    ):
        system.step([np.array([0, move])])
    out = system.step([np.array([0, 8])])  # the refused step moved no lane
    assert (np.asarray(out.obs[1]) != before[1]).sum() == 2


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "match"),
    [
        ("nothing", {}, ArgumentError, "OpenSpiel cannot make 'nothing' with {}: Unknown game"),
        ("tic_tac_toe", {"speed": 1}, ArgumentError, "cannot make 'tic_tac_toe' with {'speed': 1}"),
        ("negotiation", {}, EnvironmentRefused, "negotiation draws its chance outcomes itself"),
        ("cribbage", {}, EnvironmentRefused, "neither an observation tensor nor"),
        ("mfg_garnet", {}, EnvironmentRefused, "mean-field"),
        ("crossword", {}, ArgumentError, "cannot make 'crossword' with {}: Observation"),
    ],
)
def test_what_cannot_be_made(
    name: str, kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        SyncCollector(
            f"openspiel:{name}", None, frames_per_batch=4, total_frames=4, env_kwargs=kwargs
        )


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    game = pyspiel.load_game("tic_tac_toe")
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[openspiel\]"'):
        SyncCollector("openspiel:tic_tac_toe", None, frames_per_batch=4, total_frames=4)
    assert OpenSpielSystem.adopt(game) is None
