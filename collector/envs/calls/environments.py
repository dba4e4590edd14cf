"""Calls to the environments of a TorchRL environment or of a `System`."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torchrl.envs import EnvBase, ParallelEnv, SerialEnv

from tallyroll.collector.compat import call_in_worker, serial_envs
from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.envs.calls.objects import reach_objects
from tallyroll.collector.envs.setup.traits import chain, system_of
from tallyroll.collector.errors import EnvironmentRefused


def reach_env(env: EnvBase, asked: EnvCall, lanes: Sequence[int]) -> Iterable[CallOutcome]:
    """Yield the outcome of ``asked`` in each of ``lanes`` of ``env``, in order.

    Raises:
        EnvironmentRefused: the environments of the lanes cannot be called. The message says why.
    """
    base = system_of(env)
    if base is None:
        return _reach_torchrl(env, asked, lanes)
    if base.stepper.declares.arrivals:
        raise EnvironmentRefused(
            f"{asked}: {base.kind} returns lanes in any order, so some lanes are in the middle of "
            "a step. Make a vector that steps all lanes at once."
        )
    reached = base.system.reached
    if reached is None:
        raise EnvironmentRefused(
            f"{asked}: cannot reach the environments of {base.kind}: {base.system.why_not_reached}"
        )
    return reached(asked, lanes)


def _reach_torchrl(env: EnvBase, asked: EnvCall, lanes: Sequence[int]) -> Iterable[CallOutcome]:
    base, count = [*chain(env)][-1], env.batch_size.numel()
    if isinstance(base, SerialEnv) and len(inner := serial_envs(base)) == count:
        return reach_objects(inner, asked, lanes)
    if isinstance(base, ParallelEnv) and base.num_workers == count:
        if asked.way == "env_set":
            raise EnvironmentRefused(
                f"{asked}: TorchRL's ParallelEnv cannot set attributes in its processes. Call a "
                "method that sets the attribute, with env_call, or use SerialEnv in workers."
            )
        return _in_processes(base, asked, lanes)
    if count == 1:
        return reach_objects([env], asked, lanes)
    raise EnvironmentRefused(
        f"{asked}: {type(base).__name__} is one object for all its {count} lanes. Call the methods "
        "of that object directly, or make an environment for each lane (SerialEnv)."
    )


def _in_processes(env: Any, asked: EnvCall, lanes: Sequence[int]) -> Iterator[CallOutcome]:
    for lane in lanes:
        yield CallOutcome.of(
            partial(call_in_worker, env, lane, asked.name, asked.args, asked.kwargs)
        )
