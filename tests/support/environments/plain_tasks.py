"""Tasks in plain Python, played lane by lane: correct ones, and ones that reset themselves.

A generator draws each task, so that no two are alike. At ends, at starts and in between they show
the same things as real environments: goals at the origin, contexts of zeros, docks, clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Shown = dict[str, np.ndarray]
Task = Callable[[np.random.Generator], "Play"]


class Play:
    """One lane of a task: call `begin`, then `move` until it returns that the episode has ended."""

    limit = 30
    """Steps after which an episode is truncated."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.at, self.episode = rng, 0, -1

    def begin(self) -> None:
        """Begin an episode."""

    def move(self) -> bool:
        """Take a step. Return whether the episode terminated."""
        return False

    def show(self) -> Shown:
        """Return the current observation."""
        raise NotImplementedError

    def reset(self) -> None:
        self.at, self.episode = 0, self.episode + 1
        self.begin()

    def step(self) -> tuple[bool, bool]:
        """Take a step. Return terminated and truncated."""
        self.at += 1
        over = self.move()
        return over, not over and self.at >= self.limit


def seen(*values: float, dtype: Any = np.float32) -> Shown:
    return {"observation": np.array(values, dtype)}


class Grid(Play):
    """A player that moves on a grid until it reaches the goal, the origin."""

    size, goal, starts = 5, (0, 0), 25

    def begin(self) -> None:
        self.x, self.y = divmod(int(self.rng.integers(1, self.starts)), self.size)

    def move(self) -> bool:
        x, y = ((1, 0), (-1, 0), (0, 1), (0, -1))[int(self.rng.integers(4))]
        self.x, self.y = (min(max(a, 0), self.size - 1) for a in (self.x + x, self.y + y))
        return (self.x, self.y) == self.goal

    def show(self) -> Shown:
        return seen(self.x, self.y)


class GridFromOneStart(Grid):
    """A grid whose episodes always start in the middle."""

    def begin(self) -> None:
        self.x, self.y = 2, 2


class Home(Grid):
    """A grid whose episodes end where they started."""

    goal = (2, 2)

    def begin(self) -> None:
        self.x, self.y = self.goal


class HomeFromElsewhere(Home):
    """A grid whose first episode starts elsewhere."""

    def begin(self) -> None:
        self.x, self.y = (4, 4) if self.episode == 0 else self.goal


class HomeOrAway(Home):
    """A grid on which some episodes start elsewhere."""

    def begin(self) -> None:
        self.x, self.y = (4, 4) if self.rng.random() < 0.1 else self.goal


class Docks(Grid):
    """A grid with two to six docks. Each episode starts at one dock and ends at the next."""

    limit = 10**6

    def __init__(self, rng: np.random.Generator, docks: int | None = None) -> None:
        super().__init__(rng)
        places = [(0, 0), (4, 4), (0, 4), (4, 0), (2, 2), (2, 4)]
        self.docks = places[: docks or int(rng.integers(2, 7))]

    def begin(self) -> None:
        self.x, self.y = self.docks[self.episode % len(self.docks)]
        self.goal = self.docks[(self.episode + 1) % len(self.docks)]


class TwoDocks(Docks):
    """Two docks, with a first episode that starts elsewhere."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng, 2)

    def begin(self) -> None:
        super().begin()
        if self.episode == 0:
            self.x, self.y = 3, 1


class RandomDocks(Grid):
    """A grid whose episodes start at either of two docks, and end at a dock."""

    def begin(self) -> None:
        self.x, self.y = (0, 0) if self.rng.random() < 0.5 else (4, 4)
        self.from_here = self.x, self.y

    def move(self) -> bool:
        super().move()
        return (self.x, self.y) in ((0, 0), (4, 4))


class Bandit(Play):
    """A bandit with episodes of one step. Contexts are few or constant, and may be zeros."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self.values, self.size = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        self.kept = bool(rng.random() < 0.5)
        self.draw()

    def draw(self) -> None:
        self.context = self.rng.integers(self.values, size=self.size).astype(np.float32)

    def begin(self) -> None:
        if not self.kept:
            self.draw()

    def move(self) -> bool:
        self.draw()
        return True

    def show(self) -> Shown:
        return {"observation": self.context.copy()}


class Blind(Play):
    """A task whose observation never changes, and may be zeros."""

    def begin(self) -> None:
        self.length = int(self.rng.integers(1, 9))
        self.value = float(self.rng.integers(2))

    def move(self) -> bool:
        return self.at >= self.length

    def show(self) -> Shown:
        return seen(self.value, self.value)


class ZeroAtBothEnds(Play):
    """A task that shows zeros at the start or at the end of episodes, and noise otherwise."""

    def begin(self) -> None:
        self.length = int(self.rng.integers(3, 9))

    def move(self) -> bool:
        return self.at >= self.length

    def show(self) -> Shown:
        zero = self.at in (0, self.length)
        return seen(0, 0) if zero else seen(*self.rng.normal(size=2))


class Hands(Play):
    """A card game that starts with one of two hands. One hand looks like the final empty table."""

    def begin(self) -> None:
        self.hand, self.length = int(self.rng.integers(2)), int(self.rng.integers(3, 7))

    def move(self) -> bool:
        return self.at >= self.length

    def show(self) -> Shown:
        if self.at == 0:
            return seen(0, self.hand)
        return seen(0, 0) if self.at == self.length else seen(*self.rng.normal(size=2))


class Lap(Play):
    """A lap that returns to its start with less fuel."""

    def begin(self) -> None:
        self.tank = int(self.rng.integers(40, 60))

    def move(self) -> bool:
        self.tank -= 1
        return self.at == 8

    def show(self) -> Shown:
        return seen(self.at % 8, self.tank)


class Walk(Play):
    """A random walk from a random place. It stands still in some steps, or in the first steps."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self.size, self.idle = int(rng.integers(1, 6)), float(rng.choice([0, 0, 0.3, 0.6]))
        self.late = int(rng.choice([0, 0, 2, 4]))
        self.dtype = rng.choice(np.array([np.float16, np.float32, np.float64], object))

    def begin(self) -> None:
        self.place = self.rng.normal(size=self.size).astype(self.dtype)
        self.length = int(self.rng.integers(max(2, self.late), 14))

    def move(self) -> bool:
        if self.at > self.late and self.rng.random() >= self.idle:
            self.place = (self.place + self.rng.normal(size=self.size)).astype(self.dtype)
        return self.at >= self.length and self.length % 2 == 0

    @property
    def limit(self) -> int:  # type: ignore[override]
        return self.length

    def show(self) -> Shown:
        return {"observation": self.place.copy()}


class Blank(Walk):
    """A walk that shows zeros at its goal. A time limit ends some episodes, too."""

    def show(self) -> Shown:
        over = self.at >= self.length and self.length % 2 == 0
        return {"observation": self.place * np.array(0 if over else 1, self.dtype)}


class Dive(Play):
    """One-hot rows of a diver, who is invisible at the end."""

    def begin(self) -> None:
        self.column = 0

    def move(self) -> bool:
        self.column = min(6, max(0, self.column + int(self.rng.choice([-1, 1]))))
        return self.at == 7

    def show(self) -> Shown:
        water = np.zeros((7, 7), np.float32)
        if self.at < 7:
            water[self.at, self.column] = 1
        return {"observation": water}


class Countdown(Play):
    """A countdown of the remaining time, next to a constant zero."""

    limit = 12

    def begin(self) -> None:
        self.limit = int(self.rng.integers(3, 20))

    def show(self) -> Shown:
        return seen((self.limit - self.at) / 20, 0)


class Dot(Play):
    """An image of a dot, which leaves the image at the end."""

    def begin(self) -> None:
        self.x, self.y = self.rng.integers(6, size=2).tolist()

    def move(self) -> bool:
        self.x += int(self.rng.integers(-1, 3))
        self.x = max(0, self.x)
        return self.x > 5

    def show(self) -> Shown:
        picture = np.zeros((6, 6, 1), np.uint8)
        if self.x <= 5:
            picture[self.x, self.y] = 255
        return {"pixels": picture, "alive": np.array([self.x <= 5])}


class Board(Play):
    """A game with a board and a mask of legal moves. No move is left at the end."""

    def begin(self) -> None:
        self.board = np.zeros(4, np.int8)

    def move(self) -> bool:
        free = np.flatnonzero(self.board == 0)
        self.board[int(self.rng.choice(free))] = int(self.rng.choice([-1, 1]))
        return not (self.board == 0).any()

    def show(self) -> Shown:
        return {"board": self.board.copy(), "action_mask": (self.board == 0).astype(np.int8)}


HONEST: list[Any] = [
    Grid, GridFromOneStart, Home, HomeFromElsewhere, HomeOrAway, Docks, TwoDocks, RandomDocks,
    Bandit, Blind, ZeroAtBothEnds, Hands, Lap, Walk, Blank, Dive, Countdown, Dot, Board,
]  # fmt: skip


class GridOfStarts(Grid):
    """A grid whose episodes start at one of a few places."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self.starts = int(rng.integers(3, 26))


TOLD: list[Any] = [Grid, GridOfStarts, RandomDocks, Walk, Dot, Lap]
"""Tasks that start in unpredictable places, so that the check must detect a self-reset."""


def played(
    kind: Any, seed: int, lanes: int, slots: int, *, resets_itself: str = ""
) -> dict[tuple[str, ...], np.ndarray]:
    """Play a task, and return rows [lanes * slots], slot by slot.

    Args:
        kind: class of the task.
        seed: seed that draws the task.
        lanes: number of lanes.
        slots: number of slots.
        resets_itself: ``""``: never. ``"all"``, ``"terminated"`` or ``"truncated"``: at these
            ends the final observation is the next episode's first one.
    """
    columns: dict[tuple[str, ...], list[Any]] = {}
    for lane in range(lanes):
        # All lanes play one task: they draw the same parameters, and then diverge.
        play = kind(np.random.default_rng(seed))
        play.rng = np.random.default_rng([seed, lane])
        play.reset()
        number, step, here = 0, 0, play.show()
        for _ in range(slots):
            terminated, truncated = play.step()
            after = play.show()
            row: dict[tuple[str, ...], Any] = {("next", "reward"): [float(number + step)]}
            over, which = terminated or truncated, "terminated" if terminated else "truncated"
            begins: Shown = {}
            if over:
                play.reset()
                begins = play.show()
                after = begins if resets_itself in ("all", which) else after
            for name, value in here.items():
                row[name,], row["next", name] = value, after[name]
            row["next", "terminated"], row["next", "truncated"] = [terminated], [truncated]
            row["next", "done"] = [over]
            row["collector", "traj_ids"] = number * lanes + lane
            row["collector", "step"], row["collector", "lane"] = step, lane
            for key, cell in row.items():
                columns.setdefault(key, []).append(cell)
            number, step = (number + 1, 0) if over else (number, step + 1)
            here = begins if over else after
    return {key: _in_slots(np.array(value), lanes, slots) for key, value in columns.items()}


def _in_slots(column: np.ndarray, lanes: int, slots: int) -> np.ndarray:
    by_lane = column.reshape(lanes, slots, *column.shape[1:])
    return np.ascontiguousarray(by_lane.swapaxes(0, 1).reshape(column.shape))
