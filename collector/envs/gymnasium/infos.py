"""Columns for chosen ``info`` entries of a Gymnasium vector environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.compat import count_true
from tallyroll.collector.envs.gymnasium.info_entries import (
    absent_entry,
    as_array,
    complete,
    does_not_fit,
    entry_of,
    found_in,
    joined,
    lookup,
    misshapen,
    name_of,
    of_step,
    shown,
    spelled,
    unknown,
)
from tallyroll.collector.envs.gymnasium.info_merge import install, takes
from tallyroll.collector.envs.gymnasium.spaces import Leaf, drawn_from, mask_in
from tallyroll.collector.envs.probes.trial_env import throwaway
from tallyroll.collector.errors import ArgumentError, TransitionError
from tallyroll.collector.native.kernel import compiled
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.collector.slab.info import GIVEN, Info
from tallyroll.collector.slab.lossless import cast
from tallyroll.collector.slab.names import NamedColumn
from tallyroll.storage.rows.keys import Key

Array = NDArray[Any]
Mask = NDArray[np.bool_]

RESET_SLOT = -1
"""Value in :attr:`InfoColumns.steps`: the lane's next step call resets it."""


class InfoColumns:
    """Writes the declared entries of vector infos to columns; see :class:`Info`.

    If an entry has no dtype, :meth:`declare` takes it from the infos of the first reset.

    Args:
        infos: the declared entries.
        lanes: number of lanes.
        mask: an entry that is read like the others, but has no column; see `InfoMasks`.
    """

    def __init__(self, infos: Sequence[Info], lanes: int, mask: Info | None = None) -> None:
        self.shown = tuple(infos)
        """The entries that are columns."""
        self.infos = tuple(infos) if mask is None else (*infos, mask)
        self._lanes = lanes
        self.first_lane = 0
        """Number of the first lane in the run, for messages."""
        self._steps, self._uncounted = np.zeros(lanes, np.int64), 0
        """Steps of each lane at the last update, and step calls of all lanes since then."""
        self._roots = frozenset(info.key[0] for info in self.infos)
        self._may_lack_all = all(info.fill is not None for info in self.infos)
        self._lacking: Sequence[Array] | None = None
        """The rows that the last :meth:`write` filled, if its infos lacked every entry."""
        self._fills: list[bytes | None] = []
        """Fill bytes of each entry for a lane that lacks it; an empty list until computed."""
        self._is_compiled = compiled() is not None

    def __bool__(self) -> bool:
        return bool(self.infos)

    @property
    def steps(self) -> NDArray[np.int64]:
        """``[lane]``: transitions so far in the lane's trajectory, or :data:`RESET_SLOT`."""
        if self._uncounted:
            self._steps += self._uncounted
            self._uncounted = 0
        return self._steps

    @property
    def declared(self) -> bool:
        """True if the dtype of every column is known."""
        return all(info.dtype is not None for info in self.infos)

    def with_mask(self, mask: Info) -> "InfoColumns":
        """Return columns that also read ``mask``. All other entries must be declared."""
        made = InfoColumns(self.infos, self._lanes, mask)
        made.number_from(self.first_lane)
        return made

    def number_from(self, first_lane: int) -> None:
        """Number lanes in messages from ``first_lane`` on."""
        self.first_lane = first_lane

    def declare(self, info: Mapping[str, Any]) -> None:
        """Take undeclared dtypes and shapes from the infos of the first reset.

        Raises:
            ArgumentError: the infos lack an entry, or it is not a number or an array.
        """
        self.infos = tuple(
            each if each.dtype is not None else found_in(each, info, self._lanes)
            for each in self.infos
        )
        self.shown = self.infos

    @property
    def columns(self) -> list[NamedColumn]:
        """The columns.

        If an entry has a fill value, its column is followed by a flag column, which is True where
        the entry was given.
        """
        found: list[NamedColumn] = []
        for info in self.shown:
            keys = [info.key]
            if info.fill is not None:
                keys.append((*info.key[:-1], info.key[-1] + GIVEN))
            found += [NamedColumn(key, key, "info") for key in keys]
        return found

    def specs(self) -> list[Unbounded]:
        """Return one spec per column, with a leading dimension of lanes.

        The dtypes of all entries must be declared.
        """
        found: list[Unbounded] = []
        for info in self.shown:
            found.append(Unbounded(shape=(self._lanes, *info.shape), dtype=info.torch_dtype))
            if info.fill is not None:
                found.append(Unbounded(shape=(self._lanes,), dtype=torch.bool))
        return found

    def new_rows(self) -> list[Array]:
        """Return zeroed arrays ``[lane, ...]``, one per column."""
        found: list[Array] = []
        for info in self.infos:
            found.append(np.zeros((self._lanes, *info.shape), info.dtype))
            if info.fill is not None:
                found.append(np.zeros(self._lanes, np.bool_))
        return found

    def fill(self, rows: Sequence[Array]) -> None:
        """Write the fill value to the rows of entries that may be absent."""
        at = 0
        for info in self.infos:
            if info.fill is not None:
                _leave_out(rows[at], rows[at + 1], info.fill, None)
            at += 1 if info.fill is None else 2

    # --- vector infos ---------------------------------------------------------------------------

    def write(
        self, rows: Sequence[Array], info: Mapping[str, Any], lanes: Mask | None = None
    ) -> None:
        """Write the entries of ``lanes`` (None: all) from the infos of a step.

        A caller that passes the same ``rows`` again must not change them in between.

        Raises:
            TransitionError: a lane lacks an entry without ``fill``, or its value does not fit.
        """
        lacking = lanes is None and self._may_lack_all and self._roots.isdisjoint(info)
        if lacking and self._lacking is rows:
            return
        self._put(rows, partial(lookup, info), lanes, False)
        if lacking:
            self._lacking = rows

    def write_reset(
        self, rows: Sequence[Array], info: Mapping[str, Any], lanes: Mask | None = None
    ) -> None:
        """Write the entries of ``lanes`` (None: all) from the infos of their reset."""
        self._put(rows, partial(lookup, info), lanes, True)

    def write_shown(self, rows: Sequence[Array], info: Mapping[str, Any], ended: Mask) -> None:
        """Write the infos of a SAME_STEP step; in ``ended`` lanes, they are from the reset."""
        if self._may_lack_all and all(_is_final(info, each.key, ended) for each in self.infos):
            self.write(rows, {})
            return
        self.write(rows, info, ~ended)
        # In ended lanes, use the entries of the reset and none of the step before it.
        look = partial(lookup, info)
        self._put(rows, lambda path: None if of_step(info, path) else look(path), ended, True)

    def write_final(self, rows: Sequence[Array], info: Mapping[str, Any], ended: Mask) -> None:
        """Write the infos of steps that ended episodes in SAME_STEP mode, from ``final_info``."""
        final = info.get("final_info", {})
        self._put(
            rows, lambda path: lookup(info if of_step(info, path) else final, path), ended, False
        )

    def count(self, ended: Mask, cut: Mask | None = None, then: int = 0) -> None:
        """Count a step of every lane. Lanes that ``ended`` or were ``cut`` get the count ``then``.

        Most calls only increment one number.
        """
        self._uncounted += 1
        if count_true(ended):
            np.putmask(self.steps, ended, then)
        if cut is not None and count_true(cut):
            np.putmask(self.steps, cut, then)

    def _put(
        self,
        rows: Sequence[Array],
        look: Callable[[Key], "tuple[Any, Mask | None] | None"],
        lanes: Mask | None,
        reset: bool,
    ) -> None:
        at = 0
        if rows is self._lacking:
            self._lacking = None
        kernel = compiled() if self._is_compiled else None
        self._fills = self._fills or _fills_of(self.infos)
        for info, fill in zip(self.infos, self._fills, strict=True):
            row, given = rows[at], rows[at + 1] if info.fill is not None else None
            at += 1 if given is None else 2
            found = look(info.key)
            if kernel is not None and kernel.put_entry(row, given, fill, found, lanes):
                continue
            if found is None and given is not None:
                _leave_out(row, given, info.fill, lanes)
                continue
            have = self._write(info, row, found, lanes, reset)
            if have is None:  # every lane has the entry
                if given is not None:
                    given[... if lanes is None else lanes] = True
                continue
            absent = ~have if lanes is None else lanes & ~have
            if given is None:
                if absent.any():
                    raise absent_entry(info, self._where(int(np.argmax(absent)), reset))
                continue
            row[absent] = info.fill
            np.copyto(given, have, where=True if lanes is None else lanes)

    def _write(
        self,
        info: Info,
        row: Array,
        found: "tuple[Any, Mask | None] | None",
        lanes: Mask | None,
        reset: bool,
    ) -> Mask | None:
        """Write the values that are present, and return their lanes; None means all ``lanes``."""
        if found is None:
            return np.zeros(self._lanes, np.bool_)
        value, mask = found
        array = value if isinstance(value, np.ndarray) else as_array(value)
        if array is None or array.shape[:1] != (self._lanes,):
            raise TransitionError(
                f"{name_of(info)}: expected an array with an entry for each of {self._lanes} "
                f"lanes, got {shown(value)} {self._where(0, reset)}"
            )
        have = None
        if mask is not None and count_true(mask) < self._lanes:
            have = mask if lanes is None else mask & lanes
        if array.dtype.kind not in "biufc":
            whole = have if have is not None else lanes
            return self._write_each(info, row, array, whole, reset)
        chosen = have if have is not None else lanes
        if chosen is not None and not count_true(chosen):
            return have
        if array.shape != row.shape:
            lane = 0 if chosen is None else int(np.argmax(chosen))
            raise misshapen(info, array[lane], self._where(lane, reset))
        if array.dtype == row.dtype:
            if chosen is None:
                row[...] = array
            elif row.ndim == 1:
                np.putmask(row, chosen, array)
            else:
                row[chosen] = array[chosen]
            return have
        # Values of lanes without the entry need not fit.
        part = array if chosen is None else array[chosen]
        values, lost = cast(part, row.dtype)
        if lost is not None:
            first = int(np.argmax(lost.reshape(len(lost), -1).any(axis=1)))
            lane = first if chosen is None else int(np.nonzero(chosen)[0][first])
            raise does_not_fit(info, array[lane], self._where(lane, reset))
        row[... if chosen is None else chosen] = values
        return have

    def _write_each(
        self, info: Info, row: Array, array: Array, lanes: Mask | None, reset: bool
    ) -> Mask:
        """Write entries of different types lane by lane. None counts as absent."""
        have = np.zeros(self._lanes, np.bool_)
        for lane in range(self._lanes) if lanes is None else np.nonzero(lanes)[0].tolist():
            if array[lane] is not None:
                self.write_lane(info, row, array[lane], lane, reset)
                have[lane] = True
        return have

    # --- infos of one lane ------------------------------------------------------------------------

    def write_one(
        self, rows: Sequence[Array], lane: int, info: Mapping[str, Any], reset: bool
    ) -> None:
        """Write the entries of ``lane`` from the info of its own environment."""
        at = 0
        for each in self.infos:
            key, row = each.key, rows[at]
            value = info.get(key[0]) if len(key) == 1 else entry_of(info, key)
            if takes(row, value):
                row[lane] = value
            elif value is not None:
                self.write_lane(each, row, value, lane, reset)
            elif each.fill is None:
                raise absent_entry(each, self._where(lane, reset))
            else:
                row[lane] = each.fill
            if each.fill is not None:
                rows[at + 1][lane] = value is not None
            at += 1 if each.fill is None else 2

    def write_lane(self, info: Info, row: Array, value: Any, lane: int, reset: bool) -> None:
        """Write one entry of a lane.

        Raises:
            TransitionError: the value does not fit.
        """
        entry = as_array(joined(info.key, value))
        if entry is None or entry.dtype.kind not in "biufc":
            raise TransitionError(
                f"{name_of(info)}: expected a number or an array of numbers, got {shown(value)} "
                f"{self._where(lane, reset)}. Leave the key out, or encode its value in a wrapper."
            )
        if entry.shape != info.shape:
            raise misshapen(info, entry, self._where(lane, reset))
        fitting, lost = cast(entry, row.dtype)
        if lost is not None:
            raise does_not_fit(info, entry, self._where(lane, reset))
        row[lane] = fitting

    def _where(self, lane: int, reset: bool) -> str:
        step = int(self.steps[lane])
        at = f"at lane {self.first_lane + lane}, "
        if reset or step == RESET_SLOT:
            return at + "in the reset before step 0 of its trajectory"
        return at + f"step {step} of its trajectory"


def _fills_of(infos: Sequence[Info]) -> list[bytes | None]:
    """Return the fill bytes of each entry for a lane that lacks it; None if it is required."""
    return [
        None if info.fill is None else np.full(info.shape, info.fill, info.dtype).tobytes()
        for info in infos
    ]


def _is_final(info: Mapping[str, Any], path: Key, ended: Mask) -> bool:
    """Return True if, in the info of a step, only lanes that ``ended`` have the entry."""
    if path[0] not in info:
        return True
    found = lookup(info, path) if of_step(info, path) else None
    return found is not None and found[1] is not None and not count_true(found[1] > ended)


def _leave_out(row: Array, given: Array, fill: Any, lanes: Mask | None) -> None:
    """Mark the entry as absent in the rows of ``lanes`` (None: all)."""
    if lanes is None:
        row.fill(fill)
        given.fill(False)
    else:
        row[lanes] = fill
        given[lanes] = False


def named(leaves: Sequence[Leaf], infos: InfoColumns) -> list[NamedColumn]:
    """Return the columns of observations and infos, including infos not declared yet."""
    return [*(NamedColumn(leaf.key, leaf.path) for leaf in leaves), *infos.columns]


def observations(leaves: Sequence[Leaf], infos: InfoColumns) -> dict[Key, TensorSpec]:
    """Return the specs of one lane by column. Infos are included once all are declared."""
    specs = [leaf.spec[0] for leaf in leaves]
    if infos.declared:
        specs += [spec[0] for spec in infos.specs()]
    found: dict[Key, TensorSpec] = {}
    for index, (column, spec) in enumerate(zip(named(leaves, infos), specs, strict=False)):
        # Two columns may share a name until `rename` resolves it.
        found[(*column.key, str(index)) if column.key in found else column.key] = spec
    return found


def discovered(
    infos: Sequence[Info], create: Callable[[], VectorEnv], real: VectorEnv
) -> tuple[Info, ...]:
    """Return ``infos`` with missing dtypes taken from a throwaway environment of ``create``.

    An entry that the first reset or the first step lacks gets the fill value 0, or 1 for a mask of
    legal actions.

    Raises:
        ArgumentError: the environment cannot be made twice, or the infos of the first reset and
            the first step both lack an entry.
    """
    if all(info.dtype is not None for info in infos):
        return tuple(infos)
    names = [spelled(info) for info in infos if info.dtype is None]
    try:
        with throwaway(create, real) as env:
            if env is None:
                return tuple(infos)
            install(env, {info.key[-1] for info in infos})
            seen, first = env.reset(seed=0)
            lanes = int(env.num_envs)
            action = drawn_from(env.single_action_space, lanes)(mask_in(seen, first))
            after = env.step(action)[-1]
    except Exception as error:
        raise ArgumentError(
            f"info_keys: finding the dtypes of {', '.join(names)} needs a second environment, but "
            f"making or stepping that environment raised {type(error).__name__}: {error}. Declare "
            f'the dtypes to avoid the second environment: Info({names[0]}, dtype="float64")'
        ) from error
    found: list[Info] = []
    for info in infos:
        if info.dtype is not None:
            found.append(info)
            continue
        there = [each for each in (first, after) if lookup(each, info.key) is not None]
        if there:
            declared = found_in(info, there[0], lanes)
            always = complete(first, info.key) and complete(after, info.key)
            missing = 1 if info.key[-1] == MASK_NAME else 0  # without a mask any action is legal
            found.append(declared if always else replace(declared, fill=missing))
        else:
            raise unknown(info, {**after, **first}, "is not in the infos of a reset or a step")
    return tuple(found)
