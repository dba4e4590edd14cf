"""Environments of TorchRL, and the door to those of a `System`."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torchrl.envs import EnvBase, ParallelEnv, SerialEnv

from tallyroll.collector.compat import call_in_worker, serial_envs
from tallyroll.collector.envs.driven.traits import chain, system_of
from tallyroll.collector.envs.reaching.asked import Asked, Outcome
from tallyroll.collector.envs.reaching.objects import reach_objects
from tallyroll.collector.errors import EnvironmentRefused


def reach_env(env: EnvBase, asked: Asked, lanes: Sequence[int]) -> Iterable[Outcome]:
    """Return what comes of ``asked`` in each of ``lanes`` of ``env``, one after the other.

    Raises:
        EnvironmentRefused: its lanes have no objects of their own; says why.
    """
    base = system_of(env)
    if base is None:
        return _reach_torchrl(env, asked, lanes)
    if base.stepper.declares.arrivals:
        raise EnvironmentRefused(
            f"{asked}: lanes of {base.kind} come back in any order, so that some are in the middle "
            "of a step; make a vector that steps all lanes at once"
        )
    reached = base.system.reached
    if reached is None:
        raise EnvironmentRefused(
            f"{asked}: {base.kind} is not reached: {base.system.why_not_reached}"
        )
    return reached(asked, lanes)


def _reach_torchrl(env: EnvBase, asked: Asked, lanes: Sequence[int]) -> Iterable[Outcome]:
    base, count = [*chain(env)][-1], env.batch_size.numel()
    if isinstance(base, SerialEnv) and len(inner := serial_envs(base)) == count:
        return reach_objects(inner, asked, lanes)
    if isinstance(base, ParallelEnv) and base.num_workers == count:
        if asked.way == "env_set":
            raise EnvironmentRefused(
                f"{asked}: TorchRL's ParallelEnv sets no attributes in its processes; call a "
                "method of the environment that does, with env_call, or use SerialEnv in workers"
            )
        return _in_processes(base, asked, lanes)
    if count == 1:
        return reach_objects([env], asked, lanes)
    raise EnvironmentRefused(
        f"{asked}: {type(base).__name__} is one object for all its {count} lanes; use what it "
        "offers itself, or make an environment for each lane (SerialEnv)"
    )


def _in_processes(env: Any, asked: Asked, lanes: Sequence[int]) -> Iterator[Outcome]:
    for lane in lanes:
        yield Outcome.of(partial(call_in_worker, env, lane, asked.name, asked.args, asked.kwargs))
