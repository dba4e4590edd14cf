"""Jobs of workers, and their serialization."""

from collections.abc import Sequence
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tallyroll.collector.envs.setup.make import require_no_env_kwargs
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options import Options
from tallyroll.collector.options.checks import at_most
from tallyroll.collector.workers.messages import Job
from tallyroll.collector.workers.share import split_evenly

_MOST_WORKERS = 2**16


def per_worker(create: Any, workers: int | None, options: Options) -> list[tuple[Any, int | None]]:
    """Return each worker's environment factory, and its number of lanes.

    The number is None for a factory if ``num_envs`` was not given.
    """
    listed = isinstance(create, (list, tuple))
    _check_factories(create if listed else [create], listed)
    if listed and workers is not None and workers != len(create):
        raise ArgumentError(
            f"num_workers: expected {len(create)}, as many as there are factories, got {workers}"
        )
    count = at_most(_MOST_WORKERS)("num_workers", len(create) if listed else workers)
    if not isinstance(create, str):
        require_no_env_kwargs(options)
    if listed and options.num_envs is not None:
        raise ArgumentError(
            "num_envs: expected one factory, got a list of factories. Leave num_envs out."
        )
    if not isinstance(create, str) and options.num_envs is None:
        return [(each, None) for each in (create if listed else [create] * count)]
    lanes = options.num_envs or count
    if lanes < count:
        raise ArgumentError(
            f"num_envs: expected at least one lane for each of {count} workers, got {lanes}; use "
            "fewer workers"
        )
    return [(create, own) for own in split_evenly(lanes, count)]


def _check_factories(factories: Sequence[Any], listed: bool) -> None:
    if not factories:
        raise ArgumentError("create_env_fn: expected at least one factory, got an empty list")
    wanted = "create_env_fn: expected a Gymnasium id, a factory or a list of factories, got "
    for each in factories:
        if isinstance(each, str) and listed:
            raise ArgumentError(f"{wanted}a list of ids; pass one id, and num_workers")
        if isinstance(each, (EnvBase, VectorEnv, gymnasium.Env)):
            raise ArgumentError(
                f"{wanted}{type(each).__name__}. An environment that was made in this process "
                "cannot be stepped in another one: pass a function that makes it."
            )
        if not callable(each) and not isinstance(each, str):
            raise ArgumentError(f"{wanted}{type(each).__name__}")


def pickled(job: Job) -> bytes:
    """Serialize a job.

    Raises:
        ArgumentError: a part cannot be pickled; the message names it.
    """
    try:
        sent: bytes = cloudpickle.dumps(job)
        return sent
    except Exception as error:
        parts = {
            "create_env_fn": job.create_env_fn,
            "env_kwargs": job.options.env_kwargs,
            "policy": job.policy,
        }
        wrong = next((name for name, part in parts.items() if not _travels(part)), "the options")
        raise ArgumentError(
            f"{wrong}: expected an object that cloudpickle can send to a worker, got "
            f"{type(error).__name__}: {error}. Make objects that cannot be pickled (files, locks, "
            "sockets, generators) inside the factory."
        ) from error


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001  this function tests exactly that
        return False
    return True
