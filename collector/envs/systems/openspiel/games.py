"""Games of OpenSpiel that can be played with seeds, their columns, and moves of chance."""

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, TensorSpec, Unbounded

from tallyroll.collector.envs.system import Declares
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.storage.rows.keys import Key

GROUP = "players"
OVER = -4  # pyspiel.PlayerId.TERMINAL
CHANCE = -1  # pyspiel.PlayerId.CHANCE


def require_playable(game: Any) -> None:
    """Raise where ``game`` cannot be repeated by a seed, or shows its players nothing.

    Raises:
        EnvironmentRefused: says why.
    """
    kind = game.get_type()
    name, dynamics, chance = kind.short_name, type(kind).Dynamics, type(kind).ChanceMode
    if kind.dynamics not in (dynamics.SIMULTANEOUS, dynamics.SEQUENTIAL):
        raise EnvironmentRefused(f"{name}: a mean-field game has no players that move")
    if kind.chance_mode == chance.SAMPLED_STOCHASTIC:
        raise EnvironmentRefused(
            f"{name} draws its chance itself, so that no seed repeats it; use a game whose "
            "chance_mode is EXPLICIT_STOCHASTIC or DETERMINISTIC"
        )
    if not (kind.provides_observation_tensor or kind.provides_information_state_tensor):
        raise EnvironmentRefused(f"{name} gives its players no tensor that they could see")


def tensors_of(game: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a player's tensors: ``"observation"``, ``"information_state"``."""
    kind, shapes = game.get_type(), {}
    if kind.provides_observation_tensor:
        shapes["observation"] = tuple(game.observation_tensor_shape())
    if kind.provides_information_state_tensor:
        shapes["information_state"] = tuple(game.information_state_tensor_shape())
    return shapes


def declares_of(game: Any, lanes: int) -> Declares:
    """Return the declaration of plays of ``game``; players that move at once are a group."""
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
        truncation=False,
        parts=True,
        groups={GROUP: players} if together else {},
    )


def writer(column: NDArray[np.float32], seats: int) -> Callable[[int, Sequence[float]], None]:
    """Return a function that writes a player's tensor to its place in ``column``.

    Places are counted over ``[lane, seat]``. The game has float32, which Python lists as floats:
    to pack them takes less than half of NumPy's time.
    """
    packing = Struct(f"{column[0].size // seats}f")
    pack, size, memory = packing.pack_into, packing.size, column.data.cast("B")

    def write(place: int, values: Sequence[float]) -> None:
        pack(memory, place * size, *values)

    return write


def play_chance(state: Any, rng: np.random.Generator) -> None:
    """Let chance move, of one number a node, until a player is to move or the game is over."""
    while state.is_chance_node():
        drawn = rng.random()
        for outcome, share in state.chance_outcomes():  # noqa: B007  the last one drawn
            drawn -= share
            if drawn < 0:
                break
        state.apply_action(outcome)
