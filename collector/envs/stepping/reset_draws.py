"""Seeds, options and contexts of resets, drawn one reset ahead for each lane."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.numbering import reset_seeds
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.draws import Draw
from tallyroll.collector.options.resets import (
    Resets,
    Streams,
    column_draw,
    drawn_from,
    number_of,
    other_of,
)
from tallyroll.collector.slab.slab import SlabColumn
from tallyroll.storage.rows.dtypes import NUMPY, TORCH
from tallyroll.storage.rows.keys import CONTEXT, RESET_SEED, Key

_DRAWN_AHEAD = 16
"""Number of resets of a lane whose options are drawn together."""


class ResetDraws:
    """Draws of each lane, for its next reset and for its present trajectory.

    Args:
        resets: the rules by which seeds and options are drawn.
        system: the system that uses the draws. If it declares contexts, the options are contexts.

    Raises:
        ArgumentError: the names of the sampler differ from the contexts that the system declares,
            or options would have to be drawn again from seeds that are not stored.
    """

    def __init__(self, resets: Resets, system: System) -> None:
        d = system.declares
        self._resets, self._context = resets, dict(d.context)
        self._lanes = d.lanes
        dtypes, shapes = resets.columns(), dict.fromkeys(resets.columns(), ())
        if self._context:
            dtypes = {name: np.dtype(NUMPY[spec.dtype]) for name, spec in d.context.items()}
            shapes = {name: tuple(spec.shape) for name, spec in d.context.items()}
        self._dtypes = dtypes
        self._names = frozenset(resets.options_of(0))
        self._require_names(type(system).__name__)
        self._next: dict[str, NDArray[Any]] = {
            name: np.zeros((d.lanes, *shapes[name]), dtype) for name, dtype in dtypes.items()
        }
        self._now = {name: values.copy() for name, values in self._next.items()}
        self._seeds = np.zeros(d.lanes, np.int64)
        self._options: list[dict[str, Any]] = [{}] * d.lanes
        self._now_seed = np.zeros(d.lanes, np.int64)
        self._seed_ahead, self._seed_now = self._seeds.data, self._now_seed.data
        self._both = [(_items(self._now[name]), _items(each)) for name, each in self._next.items()]
        self._draws_options = resets.sampler is not None
        self._streams = Streams()
        self._plain: list[tuple[str, Draw, bool]] | None = None
        """For each option of a sampler that is a mapping: name, draw, and True if it has a column.

        None for a sampler that is a function, and for contexts."""
        if isinstance(resets.sampler, Mapping) and not self._context:
            self._plain = [
                (name, column_draw(name, draw, dtypes[name]), True)
                if name in dtypes
                else (name, draw, False)
                for name, draw in resets.sampler.items()
            ]
        self._numbers = [(name, _items(each)) for name, each in self._next.items()]
        self.told: Callable[[Sequence[int]], None] | None = None
        """Callback with the lanes whose next trajectories have begun, or None."""
        self.seed(int(np.random.SeedSequence().generate_state(1)[0]), 0, range(d.lanes))

    def report_to(self, callback: Callable[[Sequence[int]], None] | None) -> None:
        """Call ``callback``, unless it is None, with the lanes whose next trajectories begin."""
        self.told = callback

    def _require_names(self, kind: str) -> None:
        if self._context and self._names != {*self._context}:
            raise ArgumentError(
                f"reset_sampler: expected the contexts {sorted(self._context)} that {kind} "
                f"declares, got {sorted(self._names)}"
            )
        others = sorted(self._names - {*self._dtypes})
        if others and not self._resets.seeds and self._resets.options_vary:
            raise ArgumentError(
                f"reset_sampler: expected numbers, which become columns, got other values for the "
                f"options {others}. Add seeds=True, so that the seed of a reset can repeat them."
            )

    def seed(self, seed: int, incarnation: int, lanes: Sequence[int]) -> list[int]:
        """Draw the seeds and options of the next resets, after a start of ``lanes`` of the run.

        ``incarnation`` is the number of the start. Return the seeds, or an empty list if resets
        take none.
        """
        self._keys = [(seed, lane, incarnation) for lane in lanes]
        self._blocks = [0] * self._lanes
        self._words: list[list[int]] = [[]] * self._lanes
        self._drawn: list[list[dict[str, Any]]] = [[] for _ in range(self._lanes)]
        for lane in range(self._lanes):
            self._seeds[lane] = self._further(lane)
            if self._draws_options:
                self._draw(lane)
        return self._seeds.tolist() if self._resets.seeds else []

    @property
    def seeds(self) -> NDArray[np.int64] | None:
        """Seeds ``[lane]`` of the next resets, updated in place; None if resets take none."""
        return self._seeds if self._resets.seeds else None

    def give(self, system: System) -> None:
        """Give ``system`` access to the draws for its next resets."""
        by_options = self._draws_options and not self._context
        system.next_seeds = self.seeds
        system.next_options = self._options if by_options else None
        if self._context:
            system.next_context = self._next

    def begun(self, lanes: NDArray[Any]) -> None:
        """Record that trajectories of ``lanes``, a mask or numbers, began, and draw the next."""
        at = (lanes.nonzero()[0] if lanes.dtype == np.bool_ else lanes).tolist()
        seeds, words, draws = self._seed_ahead, self._words, self._draws_options
        for lane in at:  # a loop is fastest for few lanes, the most common case
            self._seed_now[lane] = seeds[lane]
            for now, ahead in self._both:
                now[lane] = ahead[lane]
            seeds[lane] = words[lane].pop() if words[lane] else self._further(lane)
            if draws:
                self._draw(lane)
        if at and self.told is not None:
            self.told(at)

    def _further(self, lane: int) -> int:
        """Draw more seeds for a lane, and return the first of them."""
        words = [*reset_seeds(*self._keys[lane], self._blocks[lane])]
        self._blocks[lane] += 1
        self._words[lane] = words[::-1]
        return self._words[lane].pop()

    def _draw(self, lane: int) -> None:
        """Draw the options that belong to a lane's next seed."""
        if self._plain is not None:
            if not (drawn_ahead := self._drawn[lane]):
                self._prefetch_draws(lane, self._plain)
            self._options[lane] = given = drawn_ahead.pop()
            for name, ahead in self._numbers:
                ahead[lane] = given[name]
            return
        given = {}
        drawn = drawn_from(self._resets, self._streams.of(self._seed_ahead[lane]))
        if drawn.keys() != self._names:
            raise ArgumentError(
                f"reset_sampler: expected the options {sorted(self._names)} in every draw, got "
                f"{sorted(map(str, drawn))}"
            )
        if self._context:
            for name, value in drawn.items():
                self._put_context(name, lane, value)
            return
        for name, value in drawn.items():
            dtype = self._dtypes.get(name)
            if dtype is None:
                given[name] = other_of(name, value)
            else:
                given[name] = self._next[name][lane] = number_of(name, value, dtype)
        self._options[lane] = given

    def _prefetch_draws(self, lane: int, plain: list[tuple[str, Draw, bool]]) -> None:
        """Draw the options of a lane's next seed, and of some seeds after it.

        The first draw loads its code and data into the processor's cache, which speeds up the
        others. Between two resets of a lane, its steps evict them.
        """
        seeds = [*self._words[lane][1 - _DRAWN_AHEAD :], self._seed_ahead[lane]]
        for seed in seeds:
            rng, given = self._streams.of(seed), {}
            for name, draw, stored in plain:
                value = draw.draw(rng)
                given[name] = value if stored else other_of(name, value)
            self._drawn[lane].append(given)

    def _put_context(self, name: str, lane: int, value: Any) -> None:
        """Store the context of a lane's next reset. A float may be rounded to the declared dtype.

        Rows contain the rounded value.

        Raises:
            ArgumentError: the value does not fit the declared shape and dtype, or is not finite.
        """
        to = self._next[name][lane, ...]
        found = np.asarray(value)
        fits = found.shape == to.shape and found.dtype.kind in "biuf"
        if fits:
            with np.errstate(over="ignore", invalid="ignore"):
                to[...] = found
            same = to == found if to.dtype.kind != "f" else np.isfinite(to)
            fits = bool(np.all(same))
        if not fits:
            raise ArgumentError(
                f"reset_sampler: expected finite {to.dtype} {list(to.shape)} for {name!r}, as the "
                f"system declares this context, got {value!r:.200}"
            )

    # --- columns ----------------------------------------------------------------------------------

    @property
    def now(self) -> Mapping[Key, NDArray[Any]]:
        """Values ``[lane, ...]`` of the present trajectories, by column."""
        of_context = {(*CONTEXT, name): values for name, values in self._now.items()}
        return ({RESET_SEED: self._now_seed} if self._resets.seeds else {}) | of_context

    @property
    def layout(self) -> dict[Key, SlabColumn]:
        """Columns for a slab."""
        return {
            key: SlabColumn(TORCH[values.dtype], values.shape[1:])
            for key, values in self.now.items()
        }


def _items(values: NDArray[Any]) -> Any:
    """Return the values of lanes in the form whose items are fastest to read and write."""
    return values.data if values.ndim == 1 and values.dtype.kind in "bif" else values
