"""Steps and resets of a collector's environments by the program, between two batches.

No method of an environment is called or replaced. Each step and each reset assigns some attributes,
such as a time limit's counter or a vector's array of ends: these are compared by identity.
"""

import dis
from collections.abc import Callable, Iterator
from functools import lru_cache
from inspect import getattr_static
from itertools import repeat
from operator import eq, is_, ne, or_
from types import FunctionType
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv
from torchrl.envs import EnvBase

from tallyroll.collector.compat import ENDED, state_reader
from tallyroll.collector.envs.setup.instances import groups_of, inner_of, lanes_of

_COUNTERS = "step", "elapsed", "time", "count", "tick"
"""Parts of the names of numbers that each step changes."""
_SURE = 1
"""The last rank of attributes that each step replaces."""
_MOST_NBYTES = 2**10
"""Size of an array that is compared by its content, for it may be written in place."""
Way = Literal["reads", "assigns", "changes", "writes"]
"""Reads, assigns or adds to an attribute, or writes to an item of anything."""
_ZERO = 0
_ZEROS = repeat(_ZERO)
_ABSENT = object()


class OutsideSteps:
    """Compares attributes that steps and resets of ``env`` assign, or arrays that they write to.

    Args:
        env: the environment that is driven, after its first reset.
        resets_first: returns True if all lanes are reset before the next step.
    """

    def __init__(self, env: EnvBase, resets_first: Callable[[], bool]) -> None:
        self.resets_first = resets_first
        sights = list(_sights_of(env))
        self._where = [where for where, _, _ in sights]
        self._owners, self._names = [each for _, each, _ in sights], [name for *_, name in sights]
        bases: list[Any] = [
            e.unwrapped if isinstance(e, gymnasium.Env) else e for e in self._owners
        ]
        self._bases = [(each, reset_names(each.__class__)) for each in bases]
        self._before: list[Any] = []
        self._arrays = list(_arrays_of(env))
        self._contents = [_content(*of) for _, *of in self._arrays]
        self._written = [False] * len(self._arrays)
        """True for arrays that the collector's own steps or resets have changed."""
        self._fresh: list[tuple[int, Any, list[int]]] = []
        """Sights of lanes that may begin an episode, and `_reset_marks` there."""
        self._readers: dict[int, tuple[np.random.Generator, Callable[[], Any]]] = {}
        self.remember()

    def _values(self) -> list[Any]:
        try:
            return list(map(getattr, self._owners, self._names))
        except AttributeError:
            return list(map(getattr, self._owners, self._names, repeat(None)))

    def remember(self) -> None:
        """Remember the environments as the collector left them."""
        self._before = before = self._values()
        if self._arrays:
            contents = [_content(*of) for _, *of in self._arrays]
            self._written = [*map(or_, self._written, map(ne, contents, self._contents))]
            self._contents = contents
        # A reset at the start of an episode leaves the counter of steps as it is.
        self._fresh = []
        if any(map(is_, before, _ZEROS)):
            zeros = (at for at, value in enumerate(before) if value is _ZERO)
            self._fresh = [(at, *self._reset_marks(at)) for at in zeros]

    def _reset_marks(self, at: int) -> tuple[Any, list[int]]:
        """Return what a reset changes at the start of an episode, too.

        A part of the state of the environment's generator, and whole numbers that resets alone
        assign, which may count episodes.
        """
        env, names = self._bases[at]
        values = [getattr(env, name, 0) for name in names]
        numbers = [value if type(value) is int else 0 for value in values]
        generator = getattr(env, "_np_random", None)
        if not isinstance(generator, np.random.Generator):
            return None, numbers
        known, read = self._readers.get(at, (None, None))
        if read is None or known is not generator:
            self._readers[at] = generator, (read := state_reader(generator))
        return (id(generator), read()), numbers

    def find(self) -> str:
        """Return the place where the program stepped or reset a lane; empty if it did nowhere."""
        now = self._values()
        if not all(map(is_, now, self._before)):
            return self._where[[*map(is_, now, self._before)].index(False)]
        if self._arrays:
            for of, content, written in zip(
                self._arrays, self._contents, self._written, strict=True
            ):
                if written and content != _content(*of[1:]):
                    return of[0]
        for at, drawn, numbers in self._fresh:
            drawn_now, numbers_now = self._reset_marks(at)
            # No generator: the exception of a signal's handler in one that is closed is lost.
            counted = any(map(eq, numbers_now, [n + 1 for n in numbers]))
            if counted or drawn_now != drawn:
                return self._where[at]
        return ""


def _layers_of(env: Any) -> list[Any]:
    """Return ``env`` and the environments that it wraps, outermost first."""
    layers = [env]
    while (inner := inner_of(layers[-1])) is not None and not any(inner is e for e in layers):
        layers.append(inner)
    return layers


def _places_of(env: Any, first: int = 0) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each lane or vector of ``env``, and the environments there."""
    layers = _layers_of(env)
    for each in layers:
        for group in [each.envs] if isinstance(each, SyncVectorEnv) else groups_of(each):
            for item in group:
                yield from _places_of(item, first)
                first += lanes_of(item)
            yield type(each).__name__, [each]
            return
    yield f"lane {first}" if lanes_of(env) == 1 else type(layers[-1]).__name__, layers


def _sights_of(env: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield places, environments there, and names of attributes to compare by identity.

    Few of each lane, for they are compared in each call: of the innermost environment, and the one
    that shows steps most surely.
    """
    for where, layers in _places_of(env):
        found = sorted(
            (rank, depth, name)
            for depth, each in enumerate(reversed(layers))
            for rank, name in _ranked(each)
        )
        inner = min((each for each in found), key=lambda each: each[1], default=None)
        if inner is None:
            continue
        own = [each for each in found if each[1] == inner[1]]
        chosen = [*own[: 1 if own[0][0] <= _SURE else 2], found[0]]
        for _, depth, name in dict.fromkeys(chosen):
            yield where, layers[-1 - depth], name


def _ranked(env: Any) -> Iterator[tuple[int, str]]:
    """Yield the attributes of ``env`` that show steps, and how surely; 0 is the surest."""
    if type(env) is SyncVectorEnv:
        yield 0, ENDED
        return
    assigned, written = state_names(env.__class__)
    for name in assigned:
        value = getattr(env, name, _ABSENT)
        if value is _ABSENT or (name in written and _is_array(value)):
            continue
        if type(value) is bool or value is None:
            yield 3, name
        elif type(value) is int:
            yield 0 if _counts(name) else 2, name
        else:
            yield 1, name


def _counts(name: str) -> bool:
    """Return whether an attribute is named like a counter of steps."""
    return name == "t" or any(each in name.lower() for each in _COUNTERS)


def _arrays_of(env: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield places, environments there, and names of small arrays that are written in place.

    Only of places that nothing else shows.
    """
    seen = {where for where, _, _ in _sights_of(env)}
    for where, layers in _places_of(env):
        for each in layers if where not in seen else ():
            for name in state_names(each.__class__)[1]:
                value = getattr(each, name, None)
                if _is_array(value):
                    yield where, each, name


def _is_array(value: Any) -> bool:
    small = isinstance(value, np.ndarray) and value.nbytes <= _MOST_NBYTES
    return small or hasattr(value, "_version")


@lru_cache(maxsize=1024)
def state_names(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of attributes that both steps and resets of a class of environments change.

    The first are assigned by both, the second may be written in place by both.
    """
    (step, step_items), (reset, reset_items) = (_changed_by(kind, each) for each in _methods(kind))
    found = [name for name in step if name in reset], [n for n in step_items if n in reset_items]
    return tuple(found[0]), tuple(found[1])


@lru_cache(maxsize=1024)
def reset_names(kind: type) -> tuple[str, ...]:
    """Return names of attributes that resets of a class of environments alone assign."""
    (step, _), (reset, _) = (_changed_by(kind, each) for each in _methods(kind))
    return tuple(name for name in reset if name not in step)


def _methods(kind: type) -> tuple[str, str]:
    return ("_step", "_reset") if issubclass(kind, EnvBase) else ("step", "reset")


def _changed_by(kind: type, method: str) -> tuple[list[str], list[str]]:
    """Return attributes that a method assigns, itself or by other methods of its object.

    The second list has attributes that it reads in methods that write to items. Drawing of
    pictures is left out: programs do that between batches.
    """
    assigned, items, left, seen = dict[str, None](), dict[str, None](), [method], {method}
    while left:
        name = left.pop()
        for each in kind.__mro__:
            function = vars(each).get(name)
            function = getattr(function, "__wrapped__", function)
            ours = each.__module__.startswith(("torch", "tallyroll."))
            if not isinstance(function, FunctionType) or ours:
                continue
            found = list(_instructions(function))
            ways = {way: [own for each, own in found if each == way] for way in get_args(Way)}
            reads, plain = ways["reads"], ways["assigns"]
            assigned |= dict.fromkeys([*plain, *ways["changes"]])
            # An array that is only added to, and the object of `self.x[at] = ...`, stay the same.
            items |= dict.fromkeys(own for own in ways["changes"] if own not in plain)
            items |= dict.fromkeys(reads if ways["writes"] else ())
            for own in reads:
                if own in seen or "render" in own or own == "close":
                    continue
                seen.add(own)
                if isinstance(getattr_static(kind, own, None), FunctionType):
                    left.append(own)
    return list(assigned), list(items)


def _instructions(function: FunctionType) -> Iterator[tuple[Way, str]]:
    """Yield how a method uses attributes of its object, and writes to items, in its order."""
    code, before = function.__code__, ("", ())
    own = code.co_varnames[:1]
    for each in dis.get_instructions(code):
        if each.opname == "STORE_ATTR":
            yield "changes" if before[0] in ("SWAP", "ROT_TWO") else "assigns", each.argval
        elif each.opname == "STORE_SUBSCR":
            yield "writes", ""
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and before[1] == own:
            yield "reads", each.argval
        if each.opname != "CACHE":
            value = each.argval
            before = each.opname, value[-1:] if isinstance(value, tuple) else (value,)


def _content(env: Any, name: str) -> Any:
    """Return a value that differs once an array or a tensor was written in place."""
    value = getattr(env, name, None)
    return value.tobytes() if isinstance(value, np.ndarray) else getattr(value, "_version", None)
