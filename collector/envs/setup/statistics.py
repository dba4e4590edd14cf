"""Detection of transforms that keep statistics, which each process would gather separately."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrl.envs import EnvBase, Transform, VecNorm, VecNormV2

from tallyroll.collector.compat import keeps_in_shared_memory
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.options.objects import LayoutName


class StatisticsWarning(UserWarning):
    """Each worker has separate statistics, so rows depend on the number of workers."""


def refuse_separate_statistics(names: Sequence[str], workers: int, layout: LayoutName) -> None:
    """Raise, or warn, if transforms keep statistics of each worker's own lanes.

    ``layout="torchrl"`` collects like TorchRL, which keeps such statistics, so it only warns.

    Raises:
        EnvironmentRefused: the layout is not ``"torchrl"``. The message lists alternatives.
    """
    said = (
        f"{', '.join(names)}: expected statistics of all lanes, got separate statistics in each of "
        f"{workers} workers, so rows depend on the assignment of lanes to workers. Normalise in "
        "the parent (a transform of the replay buffer, or postproc), freeze() statistics that were "
        "gathered before, give VecNorm shared statistics in a memory map, or use one process."
    )
    if layout != "torchrl":
        raise EnvironmentRefused(said)
    warnings.warn(said, StatisticsWarning, stacklevel=4)


class StatisticsWatch:
    """Finds transforms of ``env`` that keep statistics.

    Create the object before any call that may change the statistics. Among TorchRL's transforms,
    `VecNorm` and `VecNormV2` keep statistics, unless they are frozen or use a TensorDict that
    processes share. The state of TorchRL's other transforms belongs to single lanes. Any other
    transform keeps statistics if a reset changes a buffer whose shape does not begin with the batch
    size.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._shared = [id(each) for each in _normalisers(env) if keeps_in_shared_memory(each)]
        self._before = {id(each): _buffers(each) for each in _others(env)}

    def found(self) -> list[str]:
        """Return the class names of transforms whose statistics no other process shares."""
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
    """Load ``state`` into the transforms of ``env`` and freeze its normalizers."""
    env.reset()  # the first reset makes the buffers of some transforms (CatFrames)
    env.load_state_dict(state)
    for each in _normalisers(env):
        each.freeze()
