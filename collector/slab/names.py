"""Names of columns: reserved names, collisions, and ``rename=``. Pure functions."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tallyroll.collector.errors import ArgumentError, NameRefused
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    DONE,
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    VALID,
    Key,
    can_be_stored,
    format_key,
    next_valid_keys,
    without_next,
)

Rename = Mapping[Any, str | tuple[str, ...]]
"""Maps the old names of columns to new names; a nested name is a tuple of names, or ``"a/b"``."""

_KEPT = (NEXT, COLLECTOR)
_FLAGS = (REWARD, DONE, TERMINATED, TRUNCATED)
_MASKS = {"_reset", "_step"}
"""Names that TorchRL interprets, at any level, as masks of lanes to reset or step."""


@dataclass(frozen=True)
class NamedColumn:
    """A column of an environment, with its name before ``rename`` is applied."""

    key: Key
    path: tuple[Hashable, ...]
    """The environment's name for the column; keys of a Dict space need not be strings."""
    what: str = "observation"


def spelled(key: Sequence[Any]) -> str:
    """Return a key in the form of ``rename``: ``next/observation``, or a tuple if ambiguous."""
    plain = all(isinstance(part, str) and "/" not in part for part in key)
    return repr("/".join(key)) if plain else repr(key[0] if len(key) == 1 else tuple(key))


def split(name: Any) -> tuple[Any, ...]:
    """Return ``"a/b"`` as ``("a", "b")``; return a tuple unchanged."""
    if isinstance(name, tuple):
        return name
    return tuple(name.split("/")) if isinstance(name, str) else (name,)


# --- rename ---------------------------------------------------------------------------------------


def checked_rename(rename: Any) -> dict[Any, Key]:
    """Return ``rename`` with its new names as tuples.

    Raises:
        ArgumentError: the argument is not a mapping of names to names.
    """
    if not isinstance(rename, Mapping):
        raise ArgumentError(
            f"rename: expected a mapping of old names to new ones, got {rename!r}. Write "
            f'rename={{"action": "previous_action"}}.'
        )
    checked: dict[Any, Key] = {}
    for old, new in rename.items():
        key = split(new)
        if not key or not all(isinstance(part, str) and part for part in key):
            raise ArgumentError(
                f"rename: expected a new name for {old!r}, a string or a tuple of strings that are "
                f"not empty, got {new!r}"
            )
        if any(split(other) == split(old) for other in checked):
            raise ArgumentError(f"rename: {old!r} has two new names. Give one.")
        checked[old] = key
    return checked


def spelled_rename(rename: Mapping[Any, Key]) -> list[str]:
    """Return the result of :func:`checked_rename` in the form of a command line: ``old=new``."""
    return [f"{'/'.join(map(str, split(old)))}={'/'.join(new)}" for old, new in rename.items()]


def renamed(columns: Sequence[NamedColumn], rename: Rename) -> list[Key]:
    """Return the keys of ``columns`` after all renames are applied at once.

    The name of a group includes its keys.

    An old name is looked up among observations first, and then among infos.

    Raises:
        ArgumentError: no column has an old name, or a column is renamed twice.
    """
    keys = [column.key for column in columns]
    by: dict[int, Any] = {}
    for old, new in checked_rename(rename).items():
        found = _matches(columns, old)
        if not found:
            known = sorted(spelled(column.key) for column in columns)
            raise ArgumentError(
                f"rename: expected the names of columns, got {old!r}. The columns are "
                f"{', '.join(known)}."
            )
        for index, depth in found:
            if index in by:
                raise ArgumentError(
                    f"rename: {spelled(columns[index].key)} is renamed twice, by {by[index]!r} and "
                    f"by {old!r}. Leave one of them out."
                )
            by[index] = old
            inner = len(columns[index].path) - depth
            keys[index] = (*new, *columns[index].key[len(columns[index].key) - inner :])
    return keys


def _matches(columns: Sequence[NamedColumn], old: Any) -> list[tuple[int, int]]:
    """Return the columns that ``old`` names, each with the number of path parts that it covers."""
    forms = [(old,), split(old)] if isinstance(old, str) else [split(old)]
    for what in dict.fromkeys(column.what for column in columns):
        for form in forms:
            for by_path in (True, False):
                if found := list(_named(columns, what, form, by_path)):
                    return found
    return []


def _named(
    columns: Sequence[NamedColumn], what: str, form: tuple[Any, ...], by_path: bool
) -> Iterable[tuple[int, int]]:
    size = len(form)
    for index, column in enumerate(columns):
        name = column.path if by_path else column.key
        if column.what == what and name[:size] == form:
            # A key may have one more part in front: a Tuple space is under "observation".
            yield index, max(0, size - len(name) + len(column.path))


# --- exclude --------------------------------------------------------------------------------------


def checked_exclude(exclude: Any) -> tuple[str | tuple[str, ...], ...]:
    """Return the names of columns in ``exclude`` as a tuple, each as it was given.

    Raises:
        ArgumentError: ``exclude`` is not a sequence of names, or a name occurs twice or begins with
            ``next``.
    """
    if isinstance(exclude, str) or not isinstance(exclude, Iterable):
        raise ArgumentError(f"exclude: expected a sequence of names, got {exclude!r}")
    names, seen = tuple(exclude), set[Key]()
    for name in names:
        key = split(name)
        if not key or not all(isinstance(part, str) and part for part in key):
            raise ArgumentError(
                "exclude: expected names, each a string or a tuple of strings that are not empty, "
                f"got {name!r}"
            )
        if key[0] == NEXT:
            raise ArgumentError(
                f"exclude: expected a name without {NEXT!r}, got {name!r}. Name the root column; "
                f"the column under {NEXT!r} is excluded with it."
            )
        if key in seen:
            raise ArgumentError(f"exclude: {'/'.join(key)!r} is named twice. Name it once.")
        seen.add(key)
    return names


def excluded_columns(
    exclude: Iterable[str | tuple[str, ...]],
    columns: Iterable[Key],
    required: Mapping[Key, str],
) -> tuple[Key, ...]:
    """Return the columns that ``exclude`` names, and their counterparts under ``next``.

    The name of a group includes its columns.

    Args:
        exclude: the result of :func:`checked_exclude`.
        columns: all columns of rows.
        required: the columns that every row needs, each with a description for messages.

    Raises:
        ArgumentError: a name matches no column, or includes a required column.
    """
    keys = list(dict.fromkeys((*columns, *required)))
    found = set[Key]()
    for name in exclude:
        forms = [(name,), split(name)] if isinstance(name, str) else [name]
        named = next(filter(None, ([k for k in keys if _is_in(k, form)] for form in forms)), [])
        if not named:
            can = {*map(without_next, keys)} - {*map(without_next, required)}
            raise ArgumentError(
                f"exclude: expected the names of columns, got {name!r}. Columns that can be left "
                f"out are {', '.join(sorted(map(format_key, can))) or 'none'}."
            )
        if needed := [key for key in named if key in required]:
            raise ArgumentError(
                f"exclude: expected columns that rows can lack, got {name!r}. Every row needs "
                f"{format_key(needed[0])}, which is {required[needed[0]]}. Leave it out of exclude."
            )
        found.update(named)
    return tuple(key for key in keys if key in found)


def _is_in(key: Key, group: Key) -> bool:
    """Return True if the name ``group``, of a column or a group, includes the column ``key``."""
    return without_next(key)[: len(group)] == group


def new_name(key: Key, rename: Rename, columns: Iterable[Key]) -> Key:
    """Return the name of the info ``key`` after ``rename``."""
    for old, new in checked_rename(rename).items():
        size = len(split(old))
        if key[:size] == split(old) and key not in columns:
            return (*new, *key[size:])
    return key


# --- collisions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    key: Key
    what: str
    """The reason why the name is reserved, for messages."""
    settle: str = ""
    """The way to give the column another name, for messages; empty if that is not possible."""


def require_names(
    observations: Sequence[NamedColumn],
    actions: Iterable[Key] = (("action",),),
    rewards: Iterable[Key] = (("reward",),),
    flags: Iterable[Key] = (),
    written: Iterable[Key] = (),
    given: Sequence[Key] | None = None,
) -> None:
    """Raise an error unless every column has a unique name.

    Args:
        observations: the columns, with the environment's names.
        actions: keys of actions.
        rewards: keys of rewards, without ``"next"``.
        flags: keys of done flags, without ``"next"``.
        written: keys that the policy writes in addition to the action.
        given: the keys of ``observations`` if they were renamed.

    Raises:
        NameRefused: a name is taken or empty, or TorchRL reads it as a mask; the message names it
            and a remedy.
    """
    keys = [column.key for column in observations] if given is None else list(given)
    own = (VALID, *next_valid_keys(keys))
    named = [(c, key) for c, key in zip(observations, keys, strict=True) if key not in own]
    seen = [_Entry(key, f"an {c.what} has it", _by_rename(c)) for c, key in named]
    by_policy = [_Entry(key, "the policy writes it", "the policy's out_keys") for key in written]
    for entry in (*seen, *by_policy):
        if not all(entry.key):
            raise NameRefused(
                f"{spelled(entry.key)}: expected a name that is not empty ({entry.what}). Give "
                f"another name with {entry.settle}"
            )
        if masks := sorted(_MASKS & set(entry.key)):
            raise NameRefused(
                f"{spelled(entry.key)}: expected a name other than {masks[0]!r}, because TorchRL "
                f"reads that name as a mask of lanes ({entry.what}). Give another name with "
                f"{entry.settle}"
            )
    flags = {*_FLAGS, *((NEXT, *key) for key in (*rewards, *flags))}
    _require_disjoint(
        [
            *(_Entry((name,), "tallyroll reserves it for its own columns") for name in _KEPT),
            *(_Entry(key[1:], _flag(key)) for key in _FLAGS),
            *(_Entry(key, "it is an action") for key in actions),
            *seen,
            *(entry for entry in by_policy if entry.key[0] != NEXT or len(entry.key) == 1),
        ]
    )
    after = [replace(entry, key=(NEXT, *entry.key)) for entry in seen]
    _require_disjoint([*(_Entry(key, _flag(key)) for key in sorted(flags)), *after], under=1)


def require_storable(keys: Iterable[Key]) -> None:
    """Raise an error if a storage cannot hold a column of one of these names.

    Raises:
        NameRefused: a part of a name is empty, ``.`` or ``..``, contains ``/`` or NUL, or is not
            valid Unicode.
    """
    for key in keys:
        wrong = [part for part in key if not can_be_stored(part)]
        if wrong:
            bare = without_next(key)
            raise NameRefused(
                f"{spelled(bare)}: {wrong[0][:80]!r} is empty, '.', '..', holds '/' or NUL, or is "
                "not valid Unicode, so no storage can hold it. Give the column another name: "
                f"rename={{{spelled(bare)}: {spelled(_proposal(bare))}}}, or out_keys if the "
                "policy writes it."
            )


def _flag(key: Key) -> str:
    return f"it is the name of {'the reward' if key[-1] == 'reward' else 'a flag of ends'}"


def _by_rename(column: NamedColumn) -> str:
    old = column.key if all(isinstance(part, str) for part in column.path) else column.path
    return f"rename={{{spelled(old)}: {spelled(_proposal(column.key))}}}"


def _proposal(key: Key) -> Key:
    if key == ("action",):
        return ("previous_action",)
    parts = [_cleaned(part) for part in key]
    return (f"seen_{parts[0]}", *parts[1:])


def _cleaned(part: str) -> str:
    bare = "".join("_" if char in "/\0" else char for char in part)
    bare = bare.encode(errors="replace").decode()
    return bare[:40].strip(".") or "unnamed"


def _require_disjoint(entries: Sequence[_Entry], under: int = 0) -> None:
    """Raise an error if two keys are equal, or one is a group that contains the other.

    Messages omit the first ``under`` parts of all keys.
    """
    have: dict[Key, _Entry] = {}
    for entry in entries:
        if entry.key in have:
            raise NameRefused(
                f"the name {spelled(entry.key[under:])} is taken twice: {have[entry.key].what}, "
                f"and {entry.what}; {_way_out(have[entry.key], entry)}"
            )
        have[entry.key] = entry
    for entry in entries:
        for depth in range(under + 1, len(entry.key)):
            group = have.get(entry.key[:depth])
            if group is not None:
                raise NameRefused(
                    f"{spelled(entry.key[under:])} and the name {spelled(group.key[under:])} "
                    f"collide. The second is a column: {group.what}. The first needs it as a "
                    f"group: {entry.what}. To resolve this, {_way_out(group, entry)}"
                )


def _way_out(*entries: _Entry) -> str:
    ways = dict.fromkeys(entry.settle for entry in reversed(entries) if entry.settle)
    return f"give one of them another name: {' or '.join(ways)}"
