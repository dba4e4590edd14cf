"""Closing of environments, also if an error interrupts their setup."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchrl.envs import EnvBase


@contextmanager
def closing_on_error(env: Any) -> Iterator[None]:
    """Context manager that closes ``env``, unless it is None, if its body raises."""
    try:
        yield
    except BaseException:
        if hasattr(env, "close"):
            close(env)
        raise


def close(env: Any) -> None:
    """Close an environment of any kind. It may already be closed."""
    if isinstance(env, EnvBase):
        env.close(raise_if_closed=False)
    else:
        env.close()
