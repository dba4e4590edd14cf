"""Which games of OpenSpiel can be played with seeds, and how chance moves in them."""

from typing import Any

import numpy as np

from tallyroll.collector.errors import EnvironmentRefused

OVER = -4  # pyspiel.PlayerId.TERMINAL


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
    """What a player is shown, and its shape: ``"observation"``, ``"information_state"``."""
    kind, shapes = game.get_type(), {}
    if kind.provides_observation_tensor:
        shapes["observation"] = tuple(game.observation_tensor_shape())
    if kind.provides_information_state_tensor:
        shapes["information_state"] = tuple(game.information_state_tensor_shape())
    return shapes


def play_chance(state: Any, rng: np.random.Generator) -> None:
    """Let chance move, of one number a node, until a player is to move or the game is over."""
    while state.is_chance_node():
        drawn = rng.random()
        for outcome, share in state.chance_outcomes():  # noqa: B007  the last one drawn
            drawn -= share
            if drawn < 0:
                break
        state.apply_action(outcome)
