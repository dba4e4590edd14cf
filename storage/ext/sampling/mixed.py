"""Batches that mix several storages or samplers at a fixed ratio, such as offline and online."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from tallyroll.storage.errors import ColumnsMissing, NoSlices, SchemaMismatch
from tallyroll.storage.ext.sampling.hindsight import HindsightSampler
from tallyroll.storage.rows.keys import Key, Keys, as_key, format_key
from tallyroll.storage.sampling.trajectory_slices import TrajectorySliceSampler
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.windows import check_positive

SOURCE: Final[Key] = ("collector", "source")
Empty: TypeAlias = Literal["error", "others"]
"""Behaviour if a part has nothing to draw."""
_Draw: TypeAlias = Callable[[int, torch.Generator | None], Any]

_MOST_DENOMINATOR: Final = 10**6


class MixedSampler:
    """Sampler of batches in which each part has a fixed share, such as half old and half new data::

        mixed = MixedSampler([(demonstrations, 1), (storage, 1)])
        batch = mixed.sample(256)  # 128 rows of each

    A batch contains the rows of one part after the other, and ``("collector", "source")`` contains
    the part number of each row, counted from 0. If a part's share of a batch is an integer, the
    part has exactly that many rows. Otherwise the share is rounded up or down at random, so that
    its mean is exact. The batch size is constant.

    Args:
        parts: pairs of a source and its share in proportion to the others: 1 and 3 mean a quarter
            and three quarters. A source is one of: a storage, whose rows are drawn uniformly with
            replacement; an object with a method ``sample(n)``, such as a `PrioritizedSampler`, a
            `HindsightSampler`, a `MixedSampler` or a TorchRL replay buffer; or a function of n,
            such as ``lambda n: storage.trajectories.sample_slices(n, 16)``. Methods and functions
            return a TensorDict whose first dimension is n. Parts may share rows, such as a storage
            and a copy of its best trajectories. Shared rows are drawn more often.
        keys: the columns to return, for parts with different columns; None: all columns, which
            must then be the same in all parts.
        fill: values for columns that some parts lack, by key, such as
            ``{"priority_weight": 1.0}``.
        empty: behaviour if a part has nothing to draw, such as a storage without rows: ``"error"``
            raises; ``"others"`` distributes its share among the other parts in proportion.
        generator: the random number generator if the caller passes none; None is torch's default.
            Functions and samplers other than `HindsightSampler` and `MixedSampler` use their own.

    Raises:
        TypeError: a part is neither a storage, a sampler nor a function.
        ValueError: a share is less than a millionth of the total, or ``empty`` is invalid.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Any, float]],
        *,
        keys: Keys | None = None,
        fill: Mapping[str | Key, Any] | None = None,
        empty: Empty = "error",
        generator: torch.Generator | None = None,
    ) -> None:
        pairs = list(parts)
        if not pairs or not all(
            isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(
                "parts: expected one or more pairs of a storage or sampler and its share, got "
                f"{parts!r}."
            )
        if empty not in get_args(Empty):
            names = ", ".join(map(repr, get_args(Empty)))
            raise ValueError(f"empty: expected one of {names}, got {empty!r}.")
        self.shares = tuple(_share(share) for _, share in pairs)
        """The share of each part; the shares add up to 1."""
        total = sum(self.shares)
        self.shares = tuple(share / total for share in self.shares)
        for (_, given), share in zip(pairs, self.shares, strict=True):
            if share < Fraction(1, _MOST_DENOMINATOR):
                raise ValueError(
                    "parts: expected each share to be at least a millionth of all shares, "
                    f"{float(total):g} in total, got {given!r}. Remove this part, or increase its "
                    "share."
                )
        self._keys = None if keys is None else _names(keys)
        self._fill = {as_key(key): value for key, value in (fill or {}).items()}
        self._empty, self._generator = empty, generator
        self._names = [_name(part) for part, _ in pairs]
        self._draws = [self._draw_of(part) for part, _ in pairs]

    def sample(self, batch_size: int, *, generator: torch.Generator | None = None) -> TensorDict:
        """Return a TensorDict of ``batch_size`` rows, or slices, one part after the other.

        Args:
            batch_size: the number of rows or slices.
            generator: the random number generator, which loader threads pass; None uses the
                generator of the sampler.

        Raises:
            NoSlices: a part has nothing to draw; with ``empty="others"``, no part has anything to
                draw.
            SchemaMismatch: the parts differ in columns, dtypes or shapes. The message names each
                difference.
            ColumnsMissing: a part lacks one of ``keys``.
        """
        check_positive("batch_size", batch_size)
        random = self._generator if generator is None else generator
        there = list(range(len(self._draws)))
        while True:
            counts, batches = self._counts(batch_size, there, random), {}
            try:
                for part, count in zip(there, counts, strict=True):
                    if count:
                        batches[part] = self._drawn(part, count, random)
            except NoSlices as error:
                there.remove(part)
                if self._empty == "error" or not there:
                    raise NoSlices(
                        f"part {part}, {self._names[part]}, has nothing to draw: {error} With "
                        'empty="others", the other parts supply these rows if they have any.'
                    ) from error
            else:
                return self._joined(batches)

    def _counts(
        self, batch_size: int, there: Sequence[int], random: torch.Generator | None = None
    ) -> list[int]:
        """Return the number of rows for each part in ``there``."""
        wanted, stops = Fraction(0), []
        total = sum(self.shares[part] for part in there)
        for part in there:
            wanted += self.shares[part] * batch_size / total
            stops.append(wanted)
        if all(stop.denominator == 1 for stop in stops):
            whole = [int(stop) for stop in stops]
        else:  # one random offset for all parts, so that their sizes add up to the batch size
            device = None if random is None else random.device
            number = torch.rand((), dtype=torch.float64, generator=random, device=device).item()
            whole = [math.floor(stop + Fraction(number)) for stop in stops]
        return [stop - start for start, stop in zip([0, *whole], whole, strict=False)]

    def _draw_of(self, part: Any) -> _Draw:
        if isinstance(part, DiskStorage):
            return _MixedRows(part)
        if isinstance(part, TrajectorySliceSampler):
            raise TypeError(
                "parts: a TrajectorySliceSampler works only in a replay buffer. Give the function "
                "lambda n: storage.trajectories.sample_slices(n, slice_len), or the buffer."
            )
        if isinstance(part, (HindsightSampler, MixedSampler)):
            return lambda count, random: part.sample(count, generator=random)
        draw = getattr(part, "sample", part)
        if not callable(draw):
            raise TypeError(
                "parts: expected storages of tallyroll.storage, objects with sample(n), or "
                f"functions of n, got {type(part).__name__}."
            )
        return lambda count, random: draw(count)

    def _drawn(self, part: int, count: int, random: torch.Generator | None) -> TensorDictBase:
        batch = self._draws[part](count, random)
        if not is_tensor_collection(batch) or batch.shape[:1] != (count,):
            got = list(batch.shape) if is_tensor_collection(batch) else type(batch).__name__
            raise ValueError(
                f"part {part}, {self._names[part]}: expected a TensorDict [{count}, ...] for "
                f"{count} rows, got {got}."
            )
        batch = batch.clone(recurse=False)  # do not modify the part's own TensorDict
        for key, value in self._fill.items():
            if batch.get(key, None) is None:
                like = torch.as_tensor(value)
                batch.set(key, like.expand(*batch.shape, *like.shape).clone())
        if self._keys is not None:
            if missing := [key for key in self._keys if batch.get(key, None) is None]:
                raise ColumnsMissing(
                    f"part {part}, {self._names[part]}, has no "
                    f"{', no '.join(map(format_key, missing))}. In keys=, name only columns that "
                    "all parts have, or give values for the missing columns in fill=."
                )
            batch = batch.select(*self._keys)
        batch.set(SOURCE, torch.full(batch.shape, part))
        return batch

    def _joined(self, batches: Mapping[int, TensorDictBase]) -> TensorDict:
        first, *others = batches.items()
        columns = _columns(first[1])
        for part, batch in others:
            if (mine := _columns(batch)) != columns:
                self._refuse(first[0], columns, part, mine)
        found: Any = torch.cat([*batches.values()]) if others else first[1]
        joined: TensorDict = found
        return joined

    def _refuse(self, first: int, columns: _Columns, part: int, mine: _Columns) -> None:
        differences = []
        for key in [*columns, *(key for key in mine if key not in columns)]:
            if columns.get(key) != mine.get(key):
                one, other = (_describe(found.get(key)) for found in (columns, mine))
                differences.append(
                    f"{format_key(key)} is {one} in part {first} and {other} in part {part}"
                )
        raise SchemaMismatch(
            f"part {first}, {self._names[first]}, and part {part}, {self._names[part]}, have "
            f"different columns: {'; '.join(differences)}. Name the shared columns in keys=, or "
            "give values for the missing columns in fill=."
        )

    def __repr__(self) -> str:
        shares = ", ".join(
            f"({name}, {share})" for name, share in zip(self._names, self.shares, strict=True)
        )
        return f"{type(self).__name__}([{shares}])"


class _MixedRows:
    """Uniform sampler of a storage's rows, with replacement."""

    def __init__(self, storage: DiskStorage) -> None:
        self._storage = storage

    def __call__(self, count: int, random: torch.Generator | None) -> TensorDict:
        storage = self._storage
        if not (rows := len(storage)):
            raise NoSlices(f"{storage.path} has no rows yet to draw from. Collect some first.")
        device = None if random is None else random.device
        index = torch.randint(rows, (count,), generator=random, device=device)
        return storage.reader.get(index.numpy(force=True))


_Columns: TypeAlias = dict[Key, tuple[torch.dtype, tuple[int, ...]]]


def _columns(batch: TensorDictBase) -> _Columns:
    """Return the dtype and shape of each column, without the first dimension."""
    return {
        as_key(key): (leaf.dtype, tuple(leaf.shape[1:]))
        for key, leaf in batch.items(include_nested=True, leaves_only=True)
    }


def _describe(column: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "missing" if column is None else f"{column[0]} {list(column[1])}"


def _share(share: Any) -> Fraction:
    number = isinstance(share, (int, float, Fraction)) and not isinstance(share, bool)
    if not number or not 0 < share < math.inf:
        raise ValueError(f"parts: expected a share above 0, got {share!r}.")
    found = Fraction(share)
    return found.limit_denominator(_MOST_DENOMINATOR) or found


def _names(keys: Keys) -> list[Key]:
    return [as_key(key) for key in ((keys,) if isinstance(keys, str) else keys)]


def _name(part: Any) -> str:
    return str(part.path) if isinstance(part, DiskStorage) else type(part).__name__
