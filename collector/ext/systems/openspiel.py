"""OpenSpiel games, both turn-based and with simultaneous moves."""

import sys
from collections.abc import Callable, Sequence
from operator import sub
from struct import Struct
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.system import AgentFlags, Declares, Mask, Step, System
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, TransitionError
from tallyroll.collector.ext.systems.kinds.side_by_side import numbers
from tallyroll.storage.rows.keys import Key


class OpenSpielSystem(System):
    """A ``pyspiel.Game``. Each lane plays separately, with its own generator for chance outcomes.

    In turn-based games, ``"current_player"`` is the player to move. The columns ``"observation"``
    and ``"information_state"``, if the game has them, and ``"action_mask"`` belong to this player.
    When the game is over, ``"current_player"`` is -4, the observation is that of the player that
    moved last, and the mask is all False. The reward is ``[player]``: the gain of each player since
    the previous move.

    Games with simultaneous moves have a group ``"players"`` instead, with all of these columns for
    each player.

    Args:
        game: the game.
        lanes: number of concurrent games.

    Raises:
        EnvironmentRefused: a seed cannot repeat the chance outcomes, or the game has no
            observations.
    """

    package, extra = "pyspiel", "openspiel"
    about = "turns, or players at once; legal moves in action_mask; a seed a lane"
    why_no_resets = "only chance determines the start of a play, and chance has a seed"

    def __init__(self, game: Any, lanes: int = 1) -> None:
        require_playable(game)
        self._game, self._players = game, game.num_players()
        seen = tensors_of(game)
        self.declares = d = declares_of(game, lanes)
        self._together = bool(d.groups)
        self._seats = self._players if self._together else 1
        """Number of observations of a lane: one per player, or only that of the player to move."""
        *tensors, legal = list(d.observation.values())[: len(seen) + 1]
        self._tensors = [np.zeros((lanes, *spec.shape), np.float32) for spec in tensors]
        self._legal = np.zeros((lanes, *legal.shape), np.bool_)
        self._turn = np.zeros(lanes, np.int64)
        self._alive = np.ones((lanes, self._players), np.bool_)
        self._arrays = [*self._tensors, self._legal, self._turn]
        self._arrays += [self._alive] * self._together
        self._writers = [
            writer(game, name, column, self._seats)
            for name, column in zip(seen, self._tensors, strict=True)
        ]
        self._size = legal.shape[-1]
        self._marks = self._legal.reshape(-1).view(np.uint8).data
        """Flags of legal moves, flat over all lanes and players."""
        self._no_move = bytes(self._size)
        self._moves: list[Sequence[int]] = [()] * (lanes * self._seats)
        """The moves that are flagged as legal, by lane and player."""
        self._reward = np.zeros((lanes, self._players))
        self._over, self._cut = np.zeros((2, lanes), np.bool_)
        self._ends, self._cuts = np.zeros((2, lanes, self._players), np.bool_)
        self._states: list[Any] = [None] * lanes
        self._rngs = [np.random.default_rng() for _ in range(lanes)]
        self._turns = [0] * lanes
        self._returns = [[0.0] * self._players for _ in range(lanes)]

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make a game as ``pyspiel.load_game`` does; ``kwargs`` are parameters of the game."""
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
        """Wrap a ``pyspiel.Game`` with one lane; return None for other objects."""
        pyspiel = sys.modules.get("pyspiel")
        return cls(made) if pyspiel is not None and isinstance(made, pyspiel.Game) else None

    def describe(self) -> dict[str, Any]:
        """Return the game with its parameters."""
        return {"id": str(self._game), "type": type(self).__name__}

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Begin new games. The seed of a lane seeds its chance outcomes."""
        seeds = seeds if self.next_seeds is None else self.next_seeds.tolist()
        for lane in numbers(lanes, len(self._states)):
            if seeds is not None:
                self._rngs[lane] = np.random.default_rng(seeds[lane])
            self._states[lane] = self._game.new_initial_state()
            self._look(lane, 0)
        return self._arrays

    def step(self, action: Sequence[Any], lanes: Mask | None = None) -> Step:
        """Apply moves in all lanes, or in the lanes of a mask."""
        rows, moves = numbers(lanes, len(self._states)), action[0].tolist()
        self._require_legal(rows, moves)
        reward, over, look = self._reward, self._over, self._look
        states, turns, returns = self._states, self._turns, self._returns
        reward.fill(0)
        over.fill(False)
        for lane in rows:
            state, turn, before = states[lane], turns[lane], returns[lane]
            if not self._together:
                state.apply_action(moves[lane])
            elif turn < 0:
                state.apply_actions(moves[lane])
            else:  # a game of simultaneous moves may also have turns of one player
                state.apply_action(moves[lane][turn])
            if look(lane, turn) == OVER:
                over[lane] = True
            if returns[lane] != before:
                reward[lane] = list(map(sub, returns[lane], before))
        if not self._together:
            gained = reward if self._players > 1 else reward[:, 0]
            return Step(self._arrays, (gained,), over, self._cut)
        self._ends[...] = over[:, None]
        agents = {GROUP: AgentFlags(self._ends, self._cuts)}
        return Step(self._arrays, (reward,), over, self._cut, agents=agents)

    def _require_legal(self, rows: Sequence[int], moves: Sequence[Any]) -> None:
        """Raise unless all moves of ``rows`` are legal."""
        size, marks, together, start = self._size, self._marks, self._together, 0
        for lane in rows:
            start = lane * self._seats * size
            for move in moves[lane] if together else (moves[lane],):
                if not (0 <= move < size and marks[start + move]):
                    raise TransitionError(
                        f"lane {self.first_lane + lane}: expected a legal move of {self._game}, "
                        f"got {moves[lane]}. Choose moves by action_mask, as the default random "
                        "policy does."
                    )
                start += size

    def _look(self, lane: int, moved: int) -> int:
        """Play chance in a lane after a move of player ``moved``, and write the observations.

        Returns:
            The player to move.
        """
        state = self._states[lane]
        turn: int = state.current_player()
        if turn == CHANCE:
            play_chance(state, self._rngs[lane])
            turn = state.current_player()
        self._turn[lane] = self._turns[lane] = turn
        self._returns[lane] = state.returns()
        who: Sequence[int] = (turn if turn >= 0 else moved,)
        if self._together:
            who = range(self._players)
            self._alive[lane] = turn != OVER
        place = lane * self._seats
        for player in who:
            for write in self._writers:
                write(place, state, player)
            moves: Sequence[int] = state.legal_actions(player) if turn != OVER else ()
            # With simultaneous moves, a player without a legal move plays the first action.
            self._mark(place, moves or ((0,) if self._together else ()))
            place += 1
        return turn

    def _mark(self, place: int, moves: Sequence[int]) -> None:
        """Mark the legal moves of a player."""
        if moves != self._moves[place]:
            marks, size = self._marks, self._size
            start = place * size
            marks[start : start + size] = self._no_move
            for move in moves:
                marks[start + move] = 1
            self._moves[place] = moves


GROUP = "players"
OVER = -4  # pyspiel.PlayerId.TERMINAL
CHANCE = -1  # pyspiel.PlayerId.CHANCE
_COMPARED = 20
"""Number of moves over which an observer is compared with the tensors of states."""

Write: TypeAlias = Callable[[int, Any, int], None]
"""Function ``(place, state, player)`` that writes the tensor of a player to a place in a column."""


def require_playable(game: Any) -> None:
    """Raise if a seed cannot repeat the chance outcomes of ``game``, or it has no observations.

    Raises:
        EnvironmentRefused: the game is unsuitable. The message gives the reason.
    """
    kind = game.get_type()
    name, dynamics, chance = kind.short_name, type(kind).Dynamics, type(kind).ChanceMode
    if kind.dynamics not in (dynamics.SIMULTANEOUS, dynamics.SEQUENTIAL):
        raise EnvironmentRefused(
            f"{name}: expected a game in which players move, got a mean-field game"
        )
    if kind.chance_mode == chance.SAMPLED_STOCHASTIC:
        raise EnvironmentRefused(
            f"{name} draws its chance outcomes itself, so no seed can repeat a play. Use a game "
            "whose chance_mode is EXPLICIT_STOCHASTIC or DETERMINISTIC."
        )
    if not (kind.provides_observation_tensor or kind.provides_information_state_tensor):
        raise EnvironmentRefused(
            f"{name} provides neither an observation tensor nor an information state tensor"
        )


def tensors_of(game: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a player's tensors: ``"observation"``, ``"information_state"``."""
    kind, shapes = game.get_type(), {}
    if kind.provides_observation_tensor:
        shapes["observation"] = tuple(game.observation_tensor_shape())
    if kind.provides_information_state_tensor:
        shapes["information_state"] = tuple(game.information_state_tensor_shape())
    return shapes


def declares_of(game: Any, lanes: int) -> Declares:
    """Return the declaration of a system that plays ``game``.

    Players that move simultaneously form a group.
    """
    kind, players, actions = game.get_type(), game.num_players(), game.num_distinct_actions()
    together = kind.dynamics == type(kind).Dynamics.SIMULTANEOUS
    each, at = ((players,), (GROUP,)) if together else ((), ())
    observation: dict[Key, TensorSpec] = {
        (*at, name): Unbounded((*each, *shape), dtype=torch.float32)
        for name, shape in tensors_of(game).items()
    }
    observation[*at, "action_mask"] = Binary(actions, (*each, actions), dtype=torch.bool)
    observation["current_player",] = Bounded(OVER, players - 1, (), dtype=torch.int64)
    if together:
        observation[GROUP, "mask"] = Binary(players, each, dtype=torch.bool)
    return Declares(
        lanes=lanes,
        observation=observation,
        action={(*at, "action"): Categorical(actions, each, dtype=torch.int64)},
        reward={(*at, "reward"): Unbounded((players, 1) if together else (players,))},
        at_end="final",
        reset_seeds=True,
        truncation=False,
        parts=True,
        groups={GROUP: players} if together else {},
    )


def writer(game: Any, name: str, column: NDArray[np.float32], seats: int) -> Write:
    """Return a function that writes the tensor ``name`` of a player to a place in ``column``.

    Places are counted over ``[lane, seat]``. An observer of the game keeps the tensor in its own
    memory, and the function copies it from there. Copying a list of its floats takes ten times as
    long.
    """
    size, memory = column[0].nbytes // seats, column.data.cast("B")
    method = f"{name}_tensor"
    observer = observer_of(game, name)
    if observer is None:
        pack = Struct(f"{size // 4}f").pack_into

        def write(place: int, state: Any, player: int) -> None:
            pack(memory, place * size, *getattr(state, method)(player))

    else:
        places = [memory[at : at + size] for at in range(0, len(memory), size)]
        observe, seen = observer.set_from, observer.tensor.data.cast("B")

        def write(place: int, state: Any, player: int) -> None:
            observe(state, player)
            places[place][:] = seen

    return write


def observer_of(game: Any, name: str) -> Any:
    """Return OpenSpiel's observer of the tensor ``name``; None if no observer agrees with states.

    Observers of games written in Python are separate classes, and some of them include values that
    the state's tensor does not.
    """
    if hasattr(game, "make_py_observer"):
        return None
    pyspiel: Any = needs("pyspiel", "openspiel")
    recall = pyspiel.IIGObservationType(perfect_recall=True)
    kind = recall if name == "information_state" else None
    made = needs("open_spiel.python.observation", "openspiel").make_observation
    try:
        observer = made(game, kind)
        return observer if _agrees(game, f"{name}_tensor", observer) else None
    except pyspiel.SpielError:
        return None


def _agrees(game: Any, method: str, observer: Any) -> bool:
    """Return True if an observer agrees with the state's tensors over the first moves of a play."""
    if observer is None or observer.tensor is None:
        return False
    state, players = game.new_initial_state(), range(game.num_players())
    for _ in range(_COMPARED):
        if not state.is_chance_node():
            for player in players:
                observer.set_from(state, player)
                listed = np.array(getattr(state, method)(player), np.float32)
                if observer.tensor.tobytes() != listed.tobytes():
                    return False
        if state.is_terminal():
            break
        if state.is_simultaneous_node():
            state.apply_actions([[*state.legal_actions(player), 0][0] for player in players])
        else:
            state.apply_action(state.legal_actions()[-1])
    return True


def play_chance(state: Any, rng: np.random.Generator) -> None:
    """Play chance moves, one draw per node, until a player is to move or the game is over."""
    while state.is_chance_node():
        drawn = rng.random()
        for outcome, share in state.chance_outcomes():  # noqa: B007  used after the loop
            drawn -= share
            if drawn < 0:
                break
        state.apply_action(outcome)
