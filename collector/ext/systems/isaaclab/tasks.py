"""Tasks of Isaac Lab by their names in Gymnasium's registry."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import gymnasium

from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra

PACKAGES = ("isaaclab_tasks", "omni.isaac.lab_tasks")


def make_task(name: str, lanes: int, given: Mapping[str, Any]) -> Any:
    """Make the environment of a task. ``given`` has the ``kwargs`` of `IsaacLabSystem.make`.

    Raises:
        MissingExtra: Isaac Lab is not installed.
        EnvironmentRefused: the Isaac Lab app was not launched.
        ArgumentError: the task is unknown, or its cfg lacks an entry.
    """
    entries = dict(given)
    mode = entries.pop("render_mode", None)
    parse = _tasks(name).parse_env_cfg
    try:
        cfg = parse(name, device=entries.pop("device", "cuda:0"), num_envs=lanes)
    except gymnasium.error.Error as error:
        raise ArgumentError(f"isaaclab:{name}: {error}") from error
    if hasattr(cfg, "compute_final_obs"):
        entries.setdefault("compute_final_obs", True)
    if unknown := [key for key in entries if not hasattr(cfg, key)]:
        raise ArgumentError(f"isaaclab:{name}: expected entries of the task's cfg, got {unknown}")
    for key, value in entries.items():
        setattr(cfg, key, value)
    return gymnasium.make(name, cfg=cfg, render_mode=mode)


def _tasks(name: str) -> Any:
    """Return the module with the tasks; importing its package registers them with Gymnasium."""
    for package in PACKAGES:
        try:
            import_module(package)
            return import_module(f"{package}.utils")
        except ModuleNotFoundError as error:
            if not f"{package}.".startswith(f"{error.name}."):
                raise EnvironmentRefused(
                    f"isaaclab:{name}: Isaac Lab cannot be imported before its app is launched "
                    f"({error}). Call isaaclab.app.AppLauncher(headless=True) first, and then make "
                    "the collector in the same script."
                ) from error
    raise MissingExtra(
        f"isaaclab:{name}: Isaac Lab is not installed. Install it from NVIDIA "
        "(https://isaac-sim.github.io/IsaacLab)."
    )
