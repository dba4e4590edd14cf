"""Games of OpenSpiel: turn-based ones, and those in which all players move at once."""

import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.kinds.side_by_side import numbers
from tallyroll.collector.envs.system import AgentFlags, Mask, Step, System
from tallyroll.collector.envs.systems.openspiel.games import (
    GROUP,
    OVER,
    declares_of,
    play_chance,
    require_playable,
    tensors_of,
)
from tallyroll.collector.errors import ArgumentError, TransitionError


class OpenSpielSystem(System):
    """A ``pyspiel.Game``, one play of it a lane; chance is drawn from each lane's own generator.

    Turn-based: what the player to move sees is ``"observation"`` and ``"information_state"``, as
    far as the game has them, with ``"action_mask"`` and ``"current_player"`` (-4 when the game is
    over, which the player that moved last sees, with a mask that is all False). The reward is
    ``[player]``, what each has gained since the move before. A game of simultaneous moves has a
    group ``"players"`` instead, with all of that for each player.

    Args:
        game: the game.
        lanes: plays at a time.

    Raises:
        EnvironmentRefused: a game that cannot be repeated, or that shows its players nothing.
    """

    package, extra = "pyspiel", "openspiel"
    about = "turns, or players at once; legal moves in action_mask; a seed a lane"

    def __init__(self, game: Any, lanes: int = 1) -> None:
        require_playable(game)
        self._game, self._players = game, game.num_players()
        self._seen = [f"{name}_tensor" for name in tensors_of(game)]
        self.declares = d = declares_of(game, lanes)
        self._together = bool(d.groups)
        *tensors, legal = list(d.observation.values())[: len(self._seen) + 1]
        self._tensors = [np.zeros((lanes, *spec.shape), np.float32) for spec in tensors]
        self._legal = np.zeros((lanes, *legal.shape), np.bool_)
        self._turn = np.zeros(lanes, np.int64)
        self._alive = np.ones((lanes, self._players), np.bool_)
        self._states: list[Any] = [None] * lanes
        self._rngs = [np.random.default_rng() for _ in range(lanes)]
        self._returns: NDArray[np.float64] = np.zeros((lanes, self._players))

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """The game of that name, as ``pyspiel.load_game`` reads it; ``kwargs`` parametrise it."""
        pyspiel = needs("pyspiel", "openspiel")
        try:
            return cls(
                pyspiel.load_game(name, kwargs) if kwargs else pyspiel.load_game(name), lanes
            )
        except (pyspiel.SpielError, TypeError) as error:
            said = str(error).partition("\n")[0]
            raise ArgumentError(f"OpenSpiel cannot make {name!r} with {kwargs}: {said}") from error

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """A system of one lane over a ``pyspiel.Game``."""
        pyspiel = sys.modules.get("pyspiel")
        return cls(made) if pyspiel is not None and isinstance(made, pyspiel.Game) else None

    def describe(self) -> dict[str, Any]:
        """The game, with its parameters."""
        return {"id": str(self._game), "type": type(self).__name__}

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Begin new plays; a seed is that of a lane's chance."""
        rows = list(numbers(lanes, len(self._states)))
        for lane in rows:
            if seeds is not None:
                self._rngs[lane] = np.random.default_rng(seeds[lane])
            self._states[lane] = self._game.new_initial_state()
        return self._look(rows, [0] * len(self._states))

    def step(self, action: Sequence[Any], lanes: Mask | None = None) -> Step:
        """Move in all lanes, or in those of a mask."""
        rows = list(numbers(lanes, len(self._states)))
        moves, turns = action[0].tolist(), self._turn.tolist()
        legal = np.take_along_axis(self._legal, action[0][..., None], -1)
        if not legal[rows].all():
            lane = next(lane for lane in rows if not legal[lane].all())
            raise TransitionError(
                f"lane {self.first_lane + lane}: {moves[lane]} is no legal move of {self._game}; "
                "choose by action_mask, as the default random policy does"
            )
        for lane in rows:
            state, move = self._states[lane], moves[lane]
            if not self._together:
                state.apply_action(move)
            elif turns[lane] < 0:
                state.apply_actions(move)
            else:  # in a game of simultaneous moves it may be one player's turn, too
                state.apply_action(move[turns[lane]])
        before = self._returns.copy()
        seen = self._look(rows, turns)
        reward, over = self._returns - before, np.zeros(len(self._states), np.bool_)
        over[rows] = self._turn[rows] == OVER
        ends, no = np.repeat(over[:, None], self._players, 1), np.zeros_like(over)
        agents = {GROUP: AgentFlags(ends, np.zeros_like(ends))} if self._together else {}
        paid = reward if self._players > 1 or self._together else reward[:, 0]
        return Step(seen, (paid,), over, no, agents=agents)

    def _look(self, rows: list[int], moved: Sequence[int]) -> list[Any]:
        """Let chance play, and write the observations; ``moved``: the last movers, by lane."""
        tensors: list[list[Any]] = [[] for _ in self._seen]
        turns, returns, legal, size = [], [], [], self._legal.shape[-1]
        for lane in rows:
            state = self._states[lane]
            play_chance(state, self._rngs[lane])
            turn = state.current_player()
            turns.append(turn)
            returns.append(state.returns())
            who = range(self._players) if self._together else (turn if turn >= 0 else moved[lane],)
            for name, values in zip(self._seen, tensors, strict=True):
                values += map(getattr(state, name), who)
            for player in who:
                at = (lane * len(who) + player if self._together else lane) * size
                moves = state.legal_actions(player) if turn != OVER else ()
                # Among players that move at once, one without a legal move makes the first one.
                legal += [at + move for move in moves or ((0,) if self._together else ())]
        self._turn[rows], self._returns[rows], self._legal[rows] = turns, returns, False
        self._alive[rows] = self._turn[rows, None] != OVER
        self._legal.reshape(-1)[legal] = True
        for column, values in zip(self._tensors, tensors, strict=True):
            column[rows] = np.array(values, np.float32).reshape(len(rows), *column.shape[1:])
        return [*self._tensors, self._legal, self._turn, *([self._alive] * self._together)]
