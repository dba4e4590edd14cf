"""Versions of the packages that compute an environment, for provenance."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final

from torchrl.envs import EnvBase

from tallyroll.collector.envs.setup.instances import values_of
from tallyroll.collector.envs.setup.traits import chain
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.storage.package.versions import installed, versions

_JAX: Final = ("jax", "jaxlib")
_COMPUTES: Final[dict[str, tuple[str, ...]]] = {
    "Box2D": (),
    "ale_py": (),
    "brax": _JAX,
    "dm_control": ("mujoco",),
    "envpool": (),
    "gym3": (),
    "gymnax": _JAX,
    "isaaclab": (),
    "isaacsim": (),
    "jax": ("jaxlib",),
    "jaxlib": (),
    "jaxmarl": _JAX,
    "jumanji": _JAX,
    "mujoco": (),
    "mujoco_playground": (*_JAX, "mujoco"),
    "pettingzoo": (),
    "procgen": ("gym3",),
    "pybullet": (),
    "pyspiel": (),
    "stable_baselines3": (),
    "supersuit": ("pettingzoo",),
    "vmas": (),
}
"""Modules of packages that compute environments, with further packages that they use."""
_NAMED: Final = {
    "ale_py": ("ale-py",),
    "Box2D": ("box2d", "box2d-py"),
    "dm_control": ("dm-control",),
    "mo_gymnasium": ("mo-gymnasium",),
    "mujoco_playground": ("playground",),
    "procgen": ("procgen", "procgen-mirror"),
    "pyspiel": ("open-spiel",),
    "stable_baselines3": ("stable-baselines3",),
}
"""Package names in metadata, if they differ from the names of the modules."""
_OURS: Final = ("builtins", "__main__", "tallyroll")

VERSIONS: Final = "_versions"
"""Key of the versions in the description of an environment."""


def packages_of(env: EnvBase) -> dict[str, str]:
    """Return the versions of the packages that define or compute an environment, by name.

    Packages that `versions` already covers are excluded. Packages that only other processes have
    imported are not found. Neither are packages of a batched TorchRL environment before it starts.
    """
    own, used = set[str](), set[str]()
    if isinstance(base := [*chain(env)][-1], SystemEnv):
        used.add(base.system.package)
    for each in _parts(env):
        for kind in type(each).__mro__ if not isinstance(each, type) else each.__mro__:
            own.add(_root(kind.__module__))
            used |= _used_by(sys.modules.get(kind.__module__))
        if not isinstance(each, type):
            used |= {_root(type(value).__module__) for value in values_of(each)}
    used |= own
    modules = own | {
        name for module in used & _COMPUTES.keys() for name in (module, *_COMPUTES[module])
    }
    usual = versions()
    names = (_NAMED.get(module, (module,)) for module in sorted(modules - {*_OURS}))
    found = {each[0]: _version(each) for each in names if each[0] not in usual}
    return {name: version for name, version in found.items() if version}


def version_here(name: str) -> str:
    """Return the local version of a package in `packages_of`; empty if it is not installed."""
    return _version(next((each for each in _NAMED.values() if each[0] == name), (name,)))


def _parts(env: EnvBase) -> Iterator[Any]:
    """Yield the parts of an environment, or their classes. Of several lanes, use only the first."""
    base: Any = [*chain(env)][-1]
    yield base.system if isinstance(base, SystemEnv) else base
    if not isinstance(base, SystemEnv):  # reading a TorchRL attribute may start processes
        many = vars(base).get("_envs")
        base = many[0] if isinstance(many, list) and many else vars(base).get("_env")
    else:
        base = _of(base.system, "env")
    if base is None:
        return
    yield base
    bare = _of(base, "unwrapped") or base
    many = _of(bare, "envs")
    if isinstance(many, (list, tuple)) and many:
        yield _of(many[0], "unwrapped") or many[0]
    else:
        yield bare
        entry = _of(_of(base, "spec"), "entry_point")
        if isinstance(entry, str):  # the environments are in other processes
            module, _, name = entry.partition(":")
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type):
                yield kind


def _of(each: object, name: str) -> Any:
    try:
        return getattr(each, name, None)
    except Exception:  # noqa: BLE001  a property that raises does not matter here
        return None


def _used_by(module: ModuleType | None) -> set[str]:
    values = [] if module is None else list(vars(module).values())
    return {_root(each.__name__) for each in values if isinstance(each, ModuleType)}


def _root(module: str) -> str:
    return module.partition(".")[0]


@cache
def _version(names: tuple[str, ...]) -> str:
    return next(filter(None, map(installed, names)), "")
