"""Environments that are closed, also where something that is made of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchrl.envs import EnvBase


@contextmanager
def closing_on_error(env: Any) -> Iterator[None]:
    """Return a context that closes ``env`` if an exception leaves it; None: there is nothing."""
    try:
        yield
    except BaseException:
        if hasattr(env, "close"):
            close(env)
        raise


def close(env: Any) -> None:
    """Close an environment of any kind; it may be closed already."""
    if isinstance(env, EnvBase):
        env.close(raise_if_closed=False)
    else:
        env.close()
