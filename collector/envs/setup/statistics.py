"""Statistics that transforms keep of all that they saw, each in a process of its own."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrl.envs import EnvBase, Transform, VecNorm, VecNormV2

from tallyroll.collector.compat import keeps_in_shared_memory
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.options.objects import LayoutName


class StatisticsWarning(UserWarning):
    """Each worker has statistics of its own, so that rows depend on the number of workers."""


def judge_apart(names: Sequence[str], workers: int, layout: LayoutName) -> None:
    """Refuse transforms of these ``names``, which keep statistics of each worker's own lanes.

    ``layout="torchrl"`` collects as TorchRL does, which has them so: a warning.

    Raises:
        EnvironmentRefused: says what to do instead.
    """
    said = (
        f"{', '.join(names)}: expected statistics of all lanes, got those of a worker's own lanes "
        f"in each of {workers} workers, so that rows depend on how lanes are shared out; normalise "
        "in the parent (a transform of the replay buffer, or postproc), freeze() statistics that "
        "were gathered before, give VecNorm shared statistics in a memory map, or use one process"
    )
    if layout != "torchrl":
        raise EnvironmentRefused(said)
    warnings.warn(said, StatisticsWarning, stacklevel=4)


class StatisticsWatch:
    """Transforms of ``env`` that keep statistics; made before any call that may change these.

    Among TorchRL's transforms they are `VecNorm` and `VecNormV2`, unless frozen or given a
    TensorDict that processes share; the memory of its others belongs to lanes. Among others they
    are those with a buffer that a reset changes and that is not ``[*batch size, ...]``.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._shared = [id(each) for each in _normalisers(env) if keeps_in_shared_memory(each)]
        self._before = {id(each): _buffers(each) for each in _others(env)}

    def found(self) -> list[str]:
        """Names of those whose statistics no other process shares."""
        names = [
            type(each).__name__
            for each in _normalisers(self._env)
            if not each.frozen and id(each) not in self._shared
        ]
        return names + [type(each).__name__ for each in _others(self._env) if self._grew(each)]

    def _grew(self, transform: Transform) -> bool:
        lanes, before = self._env.batch_size, self._before.get(id(transform), {})
        return len(lanes) > 0 and any(
            buffer.shape[: len(lanes)] != lanes
            and (buffer.shape != before[name].shape or not torch.equal(buffer, before[name]))
            for name, buffer in _buffers(transform).items()
            if name in before
        )


def _normalisers(env: EnvBase) -> Iterator[Any]:
    return (each for each in env.modules() if isinstance(each, (VecNorm, VecNormV2)))


def _others(env: EnvBase) -> Iterator[Transform]:
    for each in env.modules():
        if isinstance(each, Transform) and not type(each).__module__.startswith("torchrl."):
            yield each


def _buffers(transform: Transform) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in transform.named_buffers(recurse=False)}


def load_frozen(env: EnvBase, state: Mapping[str, Any]) -> None:
    """Give ``state`` to the transforms of ``env``, whose normalisers stay as it says."""
    env.reset()  # buffers of some transforms (CatFrames) are made by the first
    env.load_state_dict(state)
    for each in _normalisers(env):
        each.freeze()
