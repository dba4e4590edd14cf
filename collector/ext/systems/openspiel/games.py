"""Checks of OpenSpiel games, their columns, and their chance moves."""

from collections.abc import Callable
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.system import Declares
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.storage.rows.keys import Key

GROUP = "players"
OVER = -4  # pyspiel.PlayerId.TERMINAL
CHANCE = -1  # pyspiel.PlayerId.CHANCE
_COMPARED = 20
"""Number of moves over which an observer is compared with the tensors of states."""

Write: TypeAlias = Callable[[int, Any, int], None]
"""Function ``(place, state, player)`` that writes the tensor of a player to a place in a column."""


def require_playable(game: Any) -> None:
    """Raise if no seed can repeat ``game``, or if it shows its players nothing.

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
    """Play chance moves until a player is to move or the game is over, with one draw per node."""
    while state.is_chance_node():
        drawn = rng.random()
        for outcome, share in state.chance_outcomes():  # noqa: B007  used after the loop
            drawn -= share
            if drawn < 0:
                break
        state.apply_action(outcome)
