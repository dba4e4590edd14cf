"""Environments that are made to be looked at, and closed again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchrl.envs import EnvBase

from tallyroll.collector.policy import generators_restored


@contextmanager
def throwaway(make: Callable[[], Any], real: object = None) -> Iterator[Any]:
    """What ``make`` makes, closed at the end; global random generators are then as before.

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
            if isinstance(env, EnvBase):
                env.close(raise_if_closed=False)
            else:
                env.close()


def distinct(factories: Sequence[Any]) -> list[int]:
    """The first of each kind of factory: those whose code is the same make the same environment.

    A list of functions from one loop, or of ``functools.partial`` over one function, is one kind.
    """
    firsts: dict[Any, int] = {}
    for index, factory in enumerate(factories):
        firsts.setdefault(_code(factory), index)
    return list(firsts.values())


def _code(factory: Any) -> Any:
    """What a factory runs, whatever it runs it on."""
    for _ in range(8):  # partial, EnvCreator and cloudpickle wrappers may lie around each other
        for name in ("func", "create_env_fn", "fn"):
            inner = getattr(factory, name, None)
            if callable(inner):
                factory = inner
                break
        else:
            break
    code = getattr(factory, "__code__", factory)
    return code if code.__hash__ is not None else id(code)
