"""Environments that are made only to be inspected, and then closed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tallyroll.collector.envs.close import close
from tallyroll.collector.policies.trial import generators_restored


@contextmanager
def throwaway(make: Callable[[], Any], real: object = None) -> Iterator[Any]:
    """Make an environment, close it at the end and restore global random generators.

    The context yields None if the factory returned ``real``, an environment in use, which must not
    be touched.
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
    """Return the index of the first factory of each kind. Equal kinds make equal environments.

    Functions from one loop, or ``functools.partial`` objects over one function, are of one kind if
    they differ in numbers only, such as seeds and lane counts.

    Args:
        factories: callables.
        kwargs: keyword arguments of each call, if any.
    """
    firsts: dict[Any, int] = {}
    for index, factory in enumerate(factories):
        called = tuple(_plain(each) for each in kwargs[index].items()) if kwargs else ()
        firsts.setdefault((*_kind(factory), called), index)
    return list(firsts.values())


def _kind(factory: Any) -> tuple[Any, ...]:
    """Return the function that a factory runs, and its arguments except numbers."""
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
    """Return a value to compare by; None for numbers and for objects that are not plain data."""
    if isinstance(value, (bool, str, bytes, type)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return tuple((str(key), _plain(each)) for key, each in value.items())
    return None
