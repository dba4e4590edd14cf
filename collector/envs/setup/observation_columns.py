"""The columns that are observations of the environment's state, and not counts of steps."""

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
    """Keys at the root of ``layout`` that tell a final observation from the first one after it.

    Infos and what transforms write of their own are left out: they say how long an episode has
    lasted, and so differ between its end and the next one's start whatever was observed. Empty
    where nothing else is left.

    Args:
        env: the environment that is driven.
        layout: its columns.
        options: name the columns that come from Gymnasium's ``info``.
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
    """Return keys that a transform with a memory adds; keys that it changes stay observed."""
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
