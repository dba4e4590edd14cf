"""Save and load checkpoints: `save_checkpoint` and `load_checkpoint`.

A checkpoint restores the model, the counts and the rows together.
"""

import os
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch

from tallyroll.collector.base import Collector
from tallyroll.collector.batches.state.saved_state import MonotonicCounts
from tallyroll.collector.batches.stored.resume import newest_version
from tallyroll.collector.batches.stored.stored_run import StoredRun
from tallyroll.collector.compat import load_generators, saved_generators
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.ext.checkpoints import folder
from tallyroll.collector.ext.checkpoints.networks import unsaved_networks
from tallyroll.collector.ext.checkpoints.plain import from_plain, to_plain
from tallyroll.collector.options.checks import positive
from tallyroll.collector.policies.slot_rng import SlotRng
from tallyroll.collector.user_code import user_code
from tallyroll.storage.errors import StateMismatch
from tallyroll.storage.files.run_record import RunRecord, is_count, record_after
from tallyroll.storage.package.versions import versions
from tallyroll.storage.replay import buffers
from tallyroll.storage.replay.checkpoint import DiskStorageCheckpointer
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import require_not_rewound, require_rewindable, rewind_to
from tallyroll.storage.stores.row_sink import RowSink


@dataclass(frozen=True)
class RowsAt:
    """The rows of a storage at a checkpoint, and the record saved with them."""

    path: str
    id: str
    rows: int
    rewinds: int
    first: int
    """The oldest row in the storage. It is above 0 if a ring has overwritten rows."""
    first_row: int
    """The first row of the collector's run; -1 without a run."""
    record: tuple[int, bytes] | None

    @classmethod
    def of(cls, storage: DiskStorage, run: StoredRun | None) -> "RowsAt":
        """Describe the rows of a storage, after syncing them to disk."""
        reader, writer = storage.reader, storage.writer
        with writer.turn:
            if storage.mode != "read":
                writer.opened.settle()  # a power cut must not leave a checkpoint without its rows
            return cls(
                str(storage.path),
                reader.id or "",
                reader.head,
                reader.rewinds,
                reader.span.start,
                -1 if run is None else run.first_row,
                reader.record,
            )

    def as_state(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**vars(self), "record": None if self.record is None else list(self.record)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RowsAt":
        """Return the object that :meth:`as_state` described.

        Raises:
            StateError: ``state`` is not a result of :meth:`as_state`.
        """
        try:
            numbers = [state[name] for name in ("rows", "rewinds", "first")]
            record, first = state["record"], state["first_row"]
            sound = all(is_count(each) and each >= 0 for each in numbers) and is_count(first)
            sound &= isinstance(state["id"], str)
            if record is not None:
                at, payload = record
                sound &= is_count(at) and 0 <= at <= numbers[0] and isinstance(payload, bytes)
                record = at, payload
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise StateError(
                "the checkpoint describes its storage with values that save_checkpoint never writes"
            )
        rows, rewinds, oldest = numbers
        return cls(str(state["path"]), state["id"], rows, rewinds, oldest, first, record)

    # --- rewinding --------------------------------------------------------------------------------

    def require_same(self, storage: DiskStorage, run: StoredRun | None, *, keep: bool) -> None:
        """Raise unless ``storage`` is the storage of the checkpoint and can rewind to these rows.

        The method changes nothing.

        Args:
            storage: the storage to check.
            run: the run of the collector.
            keep: True if the later rows stay, so that no rewind is needed.

        Raises:
            StateMismatch: the storage does not fit. The message gives the reason.
            RunUnderWay: another collector writes to the storage.
            WriteError: this process may not write to the storage.
        """
        reader = storage.reader
        if not self.id:  # the storage had no rows and no files
            return
        if not reader.initialised:
            raise StateMismatch(
                f"the checkpoint belongs to {self.rows} rows of the storage that was at "
                f"{self.path}, but {storage.path} has no rows. Open the storage of the checkpoint, "
                "or save with copy_rows=True to copy the rows into the checkpoint."
            )
        if reader.id != self.id:
            raise StateMismatch(
                f"the checkpoint belongs to the storage that was at {self.path}, but "
                f"{storage.path} is another one. Open the storage of the checkpoint."
            )
        if keep:
            return
        if reader.head < self.rows:
            raise StateMismatch(
                f"the checkpoint has {self.rows} rows, but {storage.path} has {reader.head}. "
                "Restore the storage from a copy that is as new as the checkpoint."
            )
        require_not_rewound(reader, self.rows, self.rewinds, "the checkpoint")
        require_rewindable(storage.writer, self.rows, run)

    def go_back(
        self, storage: DiskStorage, run: StoredRun | None
    ) -> tuple[int, int, MonotonicCounts]:
        """Rewind the storage to the checkpoint.

        Returns:
            The number of rows that were removed, the number of earlier rows of a ring that those
            rows had overwritten, and the numbers of the run that never decrease.
        """
        if not storage.reader.initialised or not self.id:
            return 0, 0, MonotonicCounts(0)
        first_row = max(self.first_row, 0)
        since = _today(storage, first_row)
        record = self.record
        if record is not None:
            next_id = -1 if run is None else run.next_id()
            known = RunRecord.parse(storage.record)
            payload = record_after(
                record[1],
                next_id=max(next_id, -1 if known is None else known.next_id),
                incarnation=since.incarnation,
                policy_version=since.policy_version,
            )
            record = record[0], payload
        back = rewind_to(storage.writer, self.rows, record, run)
        buffers.seat_writers(storage)
        return back, min(storage.span.start, self.rows) - self.first, since


def _today(storage: DiskStorage, first_row: int) -> MonotonicCounts:
    """Return the current values of a run's numbers that never decrease."""
    known = [-1]
    for entry in storage.manifest["runs"]:
        if is_count(entry.get("incarnation")):
            known.append(entry["incarnation"])
    if (record := RunRecord.parse(storage.record)) is not None:
        known.append(record.incarnation)
    collected = storage.head and record is not None
    version = newest_version(storage.reader, first_row) if collected else -1
    return MonotonicCounts(first_row, max(known), version)


def restore_rows(storage: DiskStorage, path: Path) -> bool:
    """Copy rows into a storage that has no files yet; return True if it copied them."""
    if storage.reader.initialised or not path.exists():
        return False
    if path.is_symlink():
        raise StateError(
            f"{path}: expected the rows of the checkpoint, got a link. Copy the rows into the "
            "checkpoint."
        )
    DiskStorageCheckpointer().loads(storage, path)
    return True


_NUMBERS = {"MT19937": 624, "Philox": 4}


def states() -> dict[str, Any]:
    """Return the states of the global random generators."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "cuda": [],  # required by earlier releases
        **saved_generators(),
        "numpy": [kind, keys, place, has_gauss, gauss],
        "python": random.getstate(),
    }


def require(found: dict[str, Any]) -> None:
    """Raise an error of any type unless :func:`load` would accept ``found``."""
    torch.Generator().set_state(found["torch"])
    _, _, place, _, _ = found["numpy"]
    require_place("MT19937", place)
    np.random.RandomState(0).set_state(tuple(found["numpy"]))
    version, numbers, gauss = found["python"]
    random.Random(0).setstate((version, tuple(numbers), gauss))


def require_bits(state: Mapping[str, Any]) -> None:
    """Raise ValueError if the position of a NumPy bit generator is out of bounds."""
    if state["bit_generator"] == "MT19937":
        require_place("MT19937", state["state"]["pos"])
    elif state["bit_generator"] == "Philox":
        require_place("Philox", state["buffer_pos"])


def require_place(kind: str, place: Any) -> None:
    """Raise ValueError if ``place`` is out of bounds, because NumPy does not check it."""
    if type(place) is not int or not 0 <= place <= _NUMBERS[kind]:
        raise ValueError(
            f"{kind}: expected a position from 0 to {_NUMBERS[kind]}, got {place!r:.40}"
        )


def load(found: dict[str, Any]) -> None:
    """Restore a result of :func:`states`, except the states of devices that are absent."""
    load_generators(found)
    np.random.set_state(tuple(found["numpy"]))
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))


PathLike: TypeAlias = str | os.PathLike[str]
Rows: TypeAlias = Literal["rewind", "keep"]

_ARGUMENTS = ("path", "collector", "storage", "every", "keep_last", "copy_rows", "rows")
"""Argument names of `save_checkpoint` and `load_checkpoint`, which parts must not use."""
_UNSOUND = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Errors that any code may raise for values that are not a valid state."""


@dataclass(frozen=True)
class Loaded:
    """Report of `load_checkpoint`. Print it for a summary."""

    path: Path
    """Path of the checkpoint."""
    transitions: int
    """Number of transitions that the run has now."""
    rewound: int = 0
    """Number of rows that were committed after the checkpoint and taken back."""
    kept: int = 0
    """Number of rows that were committed after the checkpoint and kept."""
    gone: int = 0
    """Number of rows of the checkpoint that a ring has overwritten. They cannot be restored."""
    cut: int = 0
    """Number of trajectories that were open at the checkpoint.

    They end as cut, because environments are not saved.
    """
    unused: tuple[str, ...] = ()
    """Parts of the checkpoint that the caller did not request."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Parts that were saved as plain values, such as numbers, by name."""

    def __str__(self) -> str:
        said = [f"{self.transitions:,} transitions from {self.path}"]
        for count, what in (
            (self.rewound, "later rows removed"),
            (self.kept, "later rows kept"),
            (self.gone, "earlier rows overwritten since"),
            (self.cut, "open trajectories cut"),
        ):
            if count:
                said.append(f"{count:,} {what}")
        if self.unused:
            said.append(f"not loaded: {', '.join(self.unused)}")
        return "; ".join(said)


@user_code("save_checkpoint")
def save_checkpoint(
    path: PathLike | None = None,
    /,
    *,
    collector: Collector | None = None,
    storage: DiskStorage | RowSink | None = None,
    every: int | None = None,
    keep_last: int | None = 1,
    copy_rows: bool = False,
    **parts: Any,
) -> Path | None:
    """Save all state that a run needs to continue, atomically.

    Call it between two batches, or between two calls of ``collect``. The checkpoint refers to the
    rows that the storage has now, and a later `load_checkpoint` rewinds the storage to them. It
    always includes the global random generators of torch, NumPy and Python.

    Args:
        path: a folder, created if missing. Each checkpoint is a subfolder such as
            ``000007-at-120000``: its number and its transitions.
        collector: the collector. The checkpoint saves its counts, ids, seeds, policy, generators
            and the transforms of its environments. Pass the networks of a policy function as parts;
            a warning names the missing ones.
        storage: the storage, if the collector has none or there is no collector. For a
            `DeviceStorage`, this is its mirror.
        every: save only if this many transitions were collected since the newest checkpoint. None
            saves now.
        keep_last: number of checkpoints to keep, including this one. None keeps all.
        copy_rows: copy the rows too, so that the folder can move to another machine. Without a
            copy, the checkpoint only refers to the rows. Saving is then faster, but loading the
            checkpoint needs this storage.
        **parts: more state to save, by name. A part is an object with ``state_dict()`` and
            ``load_state_dict()``, a generator of torch, NumPy or Python, or a plain value: numbers,
            text, bytes, None, tensors, arrays and scalars of NumPy, and lists, tuples, sets, deques
            and dicts of these. `load_checkpoint` returns an equal value of the same type in
            ``values`` of its result. Tensors are restored on the CPU. The name of an argument of
            `save_checkpoint` or `load_checkpoint` cannot name a part.

    Returns:
        The path of the checkpoint, or None if it was not due.

    Raises:
        ArgumentError: a part cannot be saved, or arguments contradict each other. The message names
            the part and the place in it.
        StateError: a value in a state cannot be saved and restored unchanged, or another process
            saves to the folder.
        StorageError: the checkpoint cannot be written, for example because the disk is full. The
            existing checkpoints are unchanged.
    """
    place = _path_of(path, parts)
    _require_names(parts)
    if not isinstance(copy_rows, bool):
        raise _not_an_argument("copy_rows", "True or False", copy_rows)
    storage, _ = _storage_of(collector, storage)
    keep_last = None if keep_last is None else positive("keep_last", keep_last)
    if copy_rows and storage is None:
        raise ArgumentError("copy_rows=True: expected a storage to copy, got none")
    if storage is not None and not storage.reader.initialised and collector is None:
        raise ArgumentError(f"storage: {storage.path} has no rows yet, so there is nothing to save")
    transitions = _transitions(collector, storage)
    if every is not None and not _is_due(place, transitions, positive("every", every)):
        return None
    own = None if collector is None else collector.restarting
    state = {
        "collector": None if own is None else own.saved(),
        "storage": None,
        "generators": states(),
    }
    if own is not None:
        _warn_of_unsaved(own.policies, parts)
    kept = [[name, *_plain_part(name, part)] for name, part in parts.items()]
    if storage is not None and storage.reader.initialised:
        state["storage"] = RowsAt.of(storage, None if own is None else own.stored_run).as_state()
    about = {
        "transitions": transitions,
        "rows": None if storage is None else storage.head,
        "storage": None if storage is None else str(storage.path),
        "parts": sorted(parts),
        "versions": versions(),
    }
    copies = None
    if copy_rows and storage is not None:
        copies = partial(DiskStorageCheckpointer().dumps, storage)
    plain: dict[str, Any] = {name: to_plain(each, name) for name, each in state.items()}
    plain["parts"] = kept
    return folder.write(place, transitions, plain, about, copies, keep_last)


@user_code("load_checkpoint")
def load_checkpoint(
    path: PathLike | None = None,
    /,
    *,
    collector: Collector | None = None,
    storage: DiskStorage | RowSink | None = None,
    rows: Rows = "rewind",
    **parts: Any,
) -> Loaded:
    """Restore the state of a checkpoint into the given objects.

    Call it before the collector collects. Environments are not saved: each lane begins a new
    episode with a seed that was not used before, and the open episodes end as cut. Ids, seeds of
    lanes and policy versions are never reused. They continue after the largest value that was ever
    used.

    Args:
        path: a folder of checkpoints, of which the newest is loaded, or one checkpoint.
        collector: a collector made like the saved one, over the same storage.
        storage: the storage, if there is no collector. A new storage without files receives the
            rows of a checkpoint that has a copy. Then make the collector with ``resume=True``, and
            load the checkpoint into it. For a `DeviceStorage`, the rows go to its mirror, from
            which the ring is refilled.
        rows: treatment of the rows that were committed after the checkpoint. ``"rewind"`` removes
            them, so that counts, model and rows match the checkpoint. ``"keep"`` keeps them and
            their counts, and restores only the policy and the parts, for a collector made with
            ``resume=True``.
        **parts: the objects to restore, by the names with which they were saved. Other parts are
            not loaded.

    Returns:
        A report. Print it for a summary.

    Raises:
        StateError: there is no checkpoint, or the checkpoint is damaged or does not fit. Nothing
            has changed. However, if a part rejects its state, earlier parts are already loaded.
        StateMismatch: the checkpoint belongs to other rows, or the storage cannot rewind. Nothing
            has changed.
        RunUnderWay: another collector writes to the storage. Nothing has changed.
        ArgumentError: an argument is invalid, such as a value of ``rows`` that is not listed above.
    """
    place = _path_of(path, parts)
    if not isinstance(rows, str) or rows not in ("rewind", "keep"):
        raise _not_an_argument("rows", '"rewind" or "keep"', rows)
    chosen, about, plain = folder.read(place)
    state = from_plain(plain)
    try:
        saved = _parts_of(state)
        _require_sound(state, saved)
    except _UNSOUND as error:
        raise StateError(
            f"{chosen} is damaged: it has values that save_checkpoint never writes "
            f"({error!r:.200}). Load an older checkpoint."
        ) from error
    if missing := sorted(parts.keys() - saved.keys()):
        raise StateError(
            f"{chosen} has no {', '.join(missing)}. It has "
            f"{', '.join(sorted(saved)) or 'no parts'}."
        )
    storage, refill = _storage_of(collector, storage)
    at = None if state["storage"] is None else RowsAt.from_state(state["storage"])
    if storage is not None and (at is not None or storage.head):
        if at is None:
            raise StateError(
                f"{chosen} was saved without a storage, but one is given. Load it without a "
                "storage."
            )
        restored = collector is None and restore_rows(storage, chosen / folder.ROWS)
        if restored and refill is not None:
            refill()
        run = None if collector is None else collector.restarting.stored_run
        at.require_same(storage, run, keep=rows == "keep" and not restored)
    elif at is not None and collector is not None:
        raise StateError(
            f"{chosen} has {at.rows} rows of the storage at {at.path}, but the collector has no "
            "storage. Give the collector that storage."
        )
    if collector is not None:
        if state["collector"] is None:
            raise StateError(
                f"{chosen} was saved without a collector, but one is given. Leave collector out."
            )
        collector.restarting.require_fit(state["collector"], keep=rows == "keep")
    for name, part in parts.items():
        _load(name, part, saved[name])
    values = _values(saved)
    found = Loaded(
        chosen,
        int(about.get("transitions", 0)) if collector is None else collector.ledger.stored,
        unused=tuple(sorted(saved.keys() - parts.keys() - values.keys())),
        values=values,
    )
    if rows == "rewind":
        return _rewound(found, at, state, collector, storage, refill)
    if collector is not None:
        collector.restarting.keep(state["collector"])
    later = 0 if storage is None or at is None else max(0, storage.head - at.rows)
    return replace(found, kept=later)


def _rewound(
    found: Loaded,
    at: RowsAt | None,
    state: Mapping[str, Any],
    collector: Collector | None,
    storage: DiskStorage | None,
    refill: Callable[[], None] | None,
) -> Loaded:
    """Rewind rows, then counts, then the random generators.

    The generators come last, because the earlier steps draw from them.
    """
    own, since = None if collector is None else collector.restarting, None
    if storage is not None and at is not None:
        run = None if own is None else own.stored_run
        rewound, gone, since = at.go_back(storage, run)
        found = replace(found, rewound=rewound, gone=gone)
        if refill is not None:
            refill()
    if collector is not None and own is not None:
        own.go_on_from(state["collector"], since)
        cut = state["collector"]["open"]
        found = replace(found, transitions=collector.ledger.stored, cut=cut)
    load(state["generators"])
    return found


def _storage_of(
    collector: Collector | None, storage: DiskStorage | RowSink | None
) -> tuple[DiskStorage | None, Callable[[], None] | None]:
    """Return the collector's storage, or the given storage, on disk.

    For a ring with a mirror, return the mirror, and the function that refills the ring from it.
    """
    if collector is not None and not isinstance(collector, Collector):
        raise ArgumentError(
            f"collector: expected a Tallyroll collector, got {type(collector).__name__}. "
            "Pass other objects that have state_dict() by another keyword, such as "
            "optimizer=optimizer."
        )
    sink = None if collector is None else collector.restarting.storage
    own, given = _on_disk(sink), _on_disk(storage)
    if storage is not None and given is None:
        raise ArgumentError(
            f"storage: expected a storage on disk, got {type(storage).__name__}. Pass a replay "
            "buffer as a part, under a keyword of its own."
        )
    if sink is not None and own is None:
        raise ArgumentError(
            "collector: expected one that writes its rows to a storage on disk, which a checkpoint "
            f"can restore, got one with a {type(sink).__name__}. Save its state_dict() instead."
        )
    if own is not None and given not in (None, own):
        assert given is not None
        raise ArgumentError(
            f"storage: expected the storage of the collector, {own.path}, got {given.path}. "
            "Leave storage out."
        )
    refill = getattr(sink, "refill", None) or getattr(storage, "refill", None)
    return given if own is None else own, refill


def _on_disk(storage: object) -> DiskStorage | None:
    """Return a storage on disk, or the mirror of a ring, up to date; None for others."""
    if isinstance(storage, DiskStorage):
        return storage
    mirror = getattr(storage, "mirror", None)
    if not isinstance(mirror, DiskStorage):
        return None
    cast(RowSink, storage).flush()
    return mirror


def _transitions(collector: Collector | None, storage: DiskStorage | None) -> int:
    if collector is not None:
        return collector.ledger.stored
    return 0 if storage is None else storage.head


def _is_due(place: Path, transitions: int, every: int) -> bool:
    # Checkpoints with more transitions belong to rows that were taken back.
    before = [each.transitions for each in folder.entries_of(place)]
    newest = max((each for each in before if each <= transitions), default=None)
    return newest is None or transitions - newest >= every


# --- parts ----------------------------------------------------------------------------------------


def _kind_of(part: Any) -> str:
    """Return the kind of a part, which determines how its state is saved and restored."""
    for kind, of in (
        ("torch", torch.Generator),
        ("numpy", np.random.Generator),
        ("python", random.Random),
    ):
        if isinstance(part, of):
            return kind
    stateful = callable(getattr(part, "state_dict", None)) and hasattr(part, "load_state_dict")
    return "state_dict" if stateful else "value"


def _plain_part(name: str, part: Any) -> tuple[str, Any]:
    """Return the kind of a part and its state as plain values."""
    kind, state = _kind_of(part), part
    if kind == "torch":
        state = part.get_state()
    elif kind == "numpy":
        state = part.bit_generator.state
    elif kind == "python":
        state = part.getstate()
    elif kind == "state_dict":
        state = part.state_dict()
    try:
        return kind, to_plain(state, name, mapped=kind == "state_dict")
    except StateError as error:
        if kind != "value":
            raise
        raise ArgumentError(
            f"{name}: expected an object with state_dict() and load_state_dict(), a generator of "
            f"random numbers, or plain values, got {type(part).__name__} ({error})"
        ) from error


def _parts_of(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parts of a checkpoint, by name."""
    parts = state["parts"]
    if isinstance(parts, dict):  # format 1 encoded plain values twice
        return {
            name: {**each, "state": from_plain(each["state"])} if each["kind"] == "value" else each
            for name, each in parts.items()
        }
    return {name: {"kind": kind, "state": each} for name, kind, each in parts}


def _require_sound(state: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise an error of any type for a state from which no run could continue."""
    require(state["generators"])
    for name, part in parts.items():
        if not isinstance(name, str):
            raise TypeError(f"expected a str as the name of a part, got {name!r:.40}")
        if part["kind"] == "numpy":
            require_bits(part["state"])
    if (own := state["collector"]) is None:
        return
    ledger = Ledger()
    if absent := {"slots", "executed", "stored"} - own["ledger"].keys():
        raise KeyError(*absent)
    ledger.load(own["ledger"])
    ledger.check()
    for name in ("seed", "next_id", "open"):
        if type(own[name]) is not int or own[name] < 0 or (name != "seed" and own[name] >= 2**62):
            raise ValueError(f"{name}: {own[name]!r:.40}")
    for name, kinds in (("lanes", int | None), ("shard", str | None), ("policy", dict | None)):
        if not isinstance(own.get(name), kinds):
            raise TypeError(f"{name}: {own[name]!r:.40}")
    if (policy := own["policy"]) is not None:
        _require_policy(policy)
    streams = own["generators"].get("policies", [])
    if len(streams) != (len(policy["parts"]) if policy and "parts" in policy else 0):
        raise ValueError(f"expected one generator per policy, got {len(streams)} generators")
    for each in (own["generators"], *streams):
        if each["torch"] is not None or each is own["generators"]:
            torch.Generator().set_state(each["torch"])
        SlotRng().restore(each["actions"])


def _require_policy(state: Mapping[str, Any]) -> None:
    """Raise an error of any type for an invalid policy state; weights are not checked."""
    numbers, several = [state["version"]], "parts" in state
    for id, part in zip(state["ids"], state["parts"], strict=True) if several else ():
        if not isinstance(id, int | str):
            raise TypeError(f"expected a policy id that is an int or a str, got {id!r:.40}")
        if part is not None:
            _require_policy(part)
    if several:
        for name in ("versions", "openings"):
            if len(state[name]) != len(state["parts"]):
                raise ValueError(f"{name}: {state[name]!r:.40}")
            numbers += state[name]
    for number in numbers:
        if not is_count(number) or not 0 <= number < 2**62:
            raise ValueError(f"expected a count as a version or an opening, got {number!r:.40}")


def _path_of(path: PathLike | None, parts: dict[str, Any]) -> Path:
    """Return the path of the folder, which the caller may also pass as the keyword ``path``."""
    if path is not None and "path" in parts:
        raise _not_a_part("path")
    path = parts.pop("path", path)
    if not isinstance(path, str | os.PathLike):
        raise _not_an_argument("path", "the path of a folder, as the first argument", path)
    return Path(path)


def _require_names(parts: Mapping[str, Any]) -> None:
    for name in parts:
        if name in _ARGUMENTS:
            raise _not_a_part(name)


def _not_a_part(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: expected another name for the part, got that of an argument of save_checkpoint "
        f"or load_checkpoint ({', '.join(_ARGUMENTS)}). Rename the part."
    )


def _not_an_argument(name: str, wanted: str, got: object) -> ArgumentError:
    return ArgumentError(
        f"{name}: expected {wanted}, got {got!r:.80}. A part cannot have the name {name}."
    )


def _warn_of_unsaved(policies: Iterable[object], parts: Mapping[str, Any]) -> None:
    """Warn of networks that policies use, and that neither the collector nor the parts save."""
    for policy in policies:
        found: list[str] = []
        with suppress(Exception):  # the policy may be any object
            found = unsaved_networks(policy, parts)
        if found:
            warnings.warn(
                "save_checkpoint: the policy is a function, and the checkpoint does not have the "
                f"weights of its networks: {', '.join(found)}. Pass each network as a part to "
                f"save_checkpoint and load_checkpoint, such as {found[0]}={found[0]}.",
                stacklevel=4,
            )


def _load(name: str, part: Any, saved: Mapping[str, Any]) -> None:
    kind, state = saved["kind"], saved["state"]
    if kind == "value":
        raise ArgumentError(
            f"{name} was saved as a plain value. Read it from .values of the result of "
            "load_checkpoint."
        )
    wanted = _kind_of(part)
    if wanted != kind:
        raise StateError(f"{name}: expected a {kind}, as in the checkpoint, got a {wanted}")
    try:
        if kind == "torch":
            part.set_state(state)
        elif kind == "numpy":
            part.bit_generator.state = state
        elif kind == "python":
            version, numbers, gauss = state
            part.setstate((version, tuple(numbers), gauss))
        else:
            part.load_state_dict(state)
    except Exception as error:  # each kind of part raises its own errors
        raise StateError(
            f"{name}: cannot load the saved state: {error}. Rows and counts are unchanged. "
            "Construct the object with the arguments that the saved object had."
        ) from error


def _values(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each["state"] for name, each in saved.items() if each["kind"] == "value"}
