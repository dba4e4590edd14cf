"""Environments that are made to be looked at, and closed again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tallyroll.collector.envs.close import close
from tallyroll.collector.policies.trial import generators_restored


@contextmanager
def throwaway(make: Callable[[], Any], real: object = None) -> Iterator[Any]:
    """Make an environment, and close it at the end; global random generators are restored.

    None where the factory gave what it gave before, ``real``, again: nothing may be done to it.
    """
    with generators_restored():
        env = make()
        if env is real or getattr(env, "unwrapped", env) is getattr(real, "unwrapped", real):
            yield None
            return
        try:
            yield env
        finally:
            close(env)


def distinct(factories: Sequence[Any], kwargs: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Return the first of each kind of factory: equal ones make the same environment.

    A list of functions from one loop, or of ``functools.partial`` over one function, is one kind
    where they differ in numbers only, as seeds and numbers of lanes do.

    Args:
        factories: callables.
        kwargs: what each is called with, where that is anything.
    """
    firsts: dict[Any, int] = {}
    for index, factory in enumerate(factories):
        called = tuple(_plain(each) for each in kwargs[index].items()) if kwargs else ()
        firsts.setdefault((*_kind(factory), called), index)
    return list(firsts.values())


def _kind(factory: Any) -> tuple[Any, ...]:
    """The function that a factory runs, and its arguments but for numbers."""
    bound: list[Any] = []
    for _ in range(8):  # partial, EnvCreator and cloudpickle wrappers may wrap each other
        bound += [
            *getattr(factory, "args", ()),
            *(getattr(factory, "keywords", None) or {}).items(),
        ]
        inner = (getattr(factory, name, None) for name in ("func", "create_env_fn", "fn"))
        found = next(filter(callable, inner), None)
        if found is None:
            break
        factory = found
    bound += getattr(factory, "__defaults__", None) or ()
    bound += (getattr(factory, "__kwdefaults__", None) or {}).items()
    code = getattr(factory, "__code__", factory)
    return (code if code.__hash__ is not None else id(code), *map(_plain, bound))


def _plain(value: Any) -> Any:
    """Return a value to compare by; None for numbers, and for anything but plain data."""
    if isinstance(value, (bool, str, bytes, type)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return tuple((str(key), _plain(each)) for key, each in value.items())
    return None
