"""Detection of steps and resets that the program makes in a collector's environments.

Such calls between two batches would corrupt trajectories. The module neither calls nor replaces a
method of an environment. Each step and each reset assigns some attributes, such as a time limit's
counter or a vector's array of ends, and the module compares these by identity.
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
"""Substrings of the names of numbers that each step changes."""
_SURE = 1
"""Largest rank of attributes that each step certainly replaces."""
_MOST_NBYTES = 2**10
"""Maximum size of an array that is compared by content, because it may be written in place."""
Way = Literal["reads", "assigns", "changes", "writes"]
"""How code uses an attribute (read, assign, add to it), or a write to an item of any object."""
_ZERO = 0
_ZEROS = repeat(_ZERO)
_ABSENT = object()


class OutsideSteps:
    """Compares attributes that steps and resets of ``env`` assign, and arrays that they write to.

    Args:
        env: the collector's environment, after its first reset.
        resets_first: function that returns True if the collector resets all lanes before the next
            step.
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
        """True for arrays that steps or resets of the collector have changed."""
        self._fresh: list[tuple[int, Any, list[int]]] = []
        """Index and `_reset_marks` of each lane that may be at the start of an episode."""
        self._readers: dict[int, tuple[np.random.Generator, Callable[[], Any]]] = {}
        self.remember()

    def _values(self) -> list[Any]:
        try:
            return list(map(getattr, self._owners, self._names))
        except AttributeError:
            return list(map(getattr, self._owners, self._names, repeat(None)))

    def remember(self) -> None:
        """Remember the state in which the collector left the environments."""
        self._before = before = self._values()
        if self._arrays:
            contents = [_content(*of) for _, *of in self._arrays]
            self._written = [*map(or_, self._written, map(ne, contents, self._contents))]
            self._contents = contents
        # A reset at the start of an episode does not change the step counter.
        self._fresh = []
        if any(map(is_, before, _ZEROS)):
            zeros = (at for at, value in enumerate(before) if value is _ZERO)
            self._fresh = [(at, *self._reset_marks(at)) for at in zeros]

    def _reset_marks(self, at: int) -> tuple[Any, list[int]]:
        """Return state that a reset changes even at the start of an episode.

        This is a part of the state of the environment's generator, and integers that only resets
        assign, because they may count episodes.
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
        """Return the place of a lane that the program stepped or reset; "" if there is none."""
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
            # Not a generator expression: closing one loses an exception of a signal handler.
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
    """Yield the name of each lane or vector of ``env``, and its environments."""
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
    """Yield each attribute to compare by identity: its place, its environment and its name.

    Each check compares all of them, so there are only a few per lane: attributes of the innermost
    environment, and the attribute that shows steps most reliably.
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
    """Yield the attributes of ``env`` that show steps, with their rank. Rank 0 is most reliable."""
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
    """Return True if ``name`` looks like the name of a step counter."""
    return name == "t" or any(each in name.lower() for each in _COUNTERS)


def _arrays_of(env: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield each small array that is written in place: its place, its environment and its name.

    Only places without attributes to compare by identity are included.
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
    """Return names of attributes that both steps and resets of an environment class change.

    Both assign the names in the first tuple, and may write in place to those in the second.
    """
    (step, step_items), (reset, reset_items) = (_changed_by(kind, each) for each in _methods(kind))
    found = [name for name in step if name in reset], [n for n in step_items if n in reset_items]
    return tuple(found[0]), tuple(found[1])


@lru_cache(maxsize=1024)
def reset_names(kind: type) -> tuple[str, ...]:
    """Return names of attributes that only resets of an environment class assign."""
    (step, _), (reset, _) = (_changed_by(kind, each) for each in _methods(kind))
    return tuple(name for name in reset if name not in step)


def _methods(kind: type) -> tuple[str, str]:
    return ("_step", "_reset") if issubclass(kind, EnvBase) else ("step", "reset")


def _changed_by(kind: type, method: str) -> tuple[list[str], list[str]]:
    """Return attributes that a method assigns, directly or through other methods of its object.

    The second list contains attributes that it reads in methods that write to items. Methods that
    render are excluded, because programs call them between batches.
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
            # Augmented assignment to an array, and `self.x[at] = ...`, keep the same object.
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
    """Yield how a method uses attributes of its object and writes to items, in order."""
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
    """Return a value that changes when an array or a tensor is written in place."""
    value = getattr(env, name, None)
    return value.tobytes() if isinstance(value, np.ndarray) else getattr(value, "_version", None)
