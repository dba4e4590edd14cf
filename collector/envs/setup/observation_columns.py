"""Selection of the columns that observe the environment's state, without step counts."""

from collections.abc import Iterable

from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)

from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.options import Options
from tallyroll.collector.slab.names import new_name
from tallyroll.collector.slab.slab import SlabColumns
from tallyroll.storage.rows.keys import COUNTERS, NEXT, VALID, Key, as_key, next_valid_keys

_REMEMBER = (CatFrames, InitTracker, RewardSum, StepCounter)


def observed_keys(env: EnvBase, layout: SlabColumns, options: Options) -> tuple[Key, ...]:
    """Return root keys of ``layout`` that distinguish a final observation from the next first one.

    Infos and columns that transforms add are excluded. They reflect how long an episode has
    lasted, so they differ between its end and the next start regardless of the observation. The
    result is empty if no other column exists.

    Args:
        env: the collector's environment.
        layout: the columns of the slab.
        options: the collector's options, which name the columns from Gymnasium's ``info``.
    """
    if isinstance(env, SystemEnv):
        candidates: Iterable[Key] = env.observation_keys
    else:
        candidates = map(as_key, env.observation_spec.keys(True, True))
    counted = _written_by_transforms(env) | info_columns(env, layout, options) | {VALID}
    candidates = list(candidates)
    counted |= {*next_valid_keys(candidates)}
    return tuple(
        key
        for key in candidates
        if key not in counted
        and key[-1] not in COUNTERS
        and key in layout
        and layout.get((NEXT, *key)) == layout[key]
    )


def info_columns(env: EnvBase, layout: SlabColumns, options: Options) -> set[Key]:
    """Return the columns that come from Gymnasium's ``info``."""
    base = system_of(env)
    if base is not None and base.info_keys:
        return set(base.info_keys)
    return {new_name(info.key, options.rename, layout) for info in options.info_keys}


def _written_by_transforms(env: EnvBase) -> set[Key]:
    """Return keys that a stateful transform adds. Keys that it only changes are not included."""
    found: set[Key] = set()
    while isinstance(env, TransformedEnv):
        for each in _flat(env.transform):
            if isinstance(each, TensorDictPrimer):
                found |= {as_key(key) for key in each.primers.keys(True, True)}
            elif isinstance(each, _REMEMBER):
                read = {as_key(key) for key in each.in_keys or ()}
                found |= {as_key(key) for key in each.out_keys or ()} - read
        env = env.base_env
    return found


def _flat(transform: Transform | None) -> list[Transform]:
    if isinstance(transform, Compose):
        return [inner for each in transform for inner in _flat(each)]
    return [] if transform is None else [transform]
