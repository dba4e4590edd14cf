"""A throwaway environment: made by a factory once more, looked at, and closed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tallyroll.collector.policy import generators_restored

_Env = TypeVar("_Env", bound="VectorEnv | EnvBase")


@contextmanager
def throwaway(create: Callable[[], _Env], real: object = None) -> Iterator[_Env | None]:
    """What ``create`` makes, closed at the end; global random generators are as before.

    None where the factory gave what it gave before, ``real``, again: nothing may be done to it.
    """
    with generators_restored():
        env = create()
        if env is real or getattr(env, "unwrapped", env) is getattr(real, "unwrapped", real):
            yield None
            return
        try:
            yield env
        finally:
            env.close()
